// One cell: decode attention over pages that are read as rows (dense, fp8, TurboQuant rows shared by keys and values) and
// over tails, for any number of vectors a kv head. kernels/cells.py gives the defines and the names.
//   TAILPACK_SOURCE dense | fp8 | tq2 | tq3 | tq4, TAILPACK_WIDTH, TAILPACK_TYPE, TAILPACK_VECTORS (4 | 8 at a time),
//   TAILPACK_SOFTCAP, TAILPACK_PROFILE.
#include "attend_rows.cuh"
#include "merge.cuh"
#include "prepare.cuh"

#define TAILPACK_JOIN2(a, b) a##b
#define TAILPACK_JOIN(a, b) TAILPACK_JOIN2(a, b)

namespace tailpack {

using Pages_dense = PageRows<DenseFormat<TAILPACK_WIDTH, TAILPACK_TYPE>, false>;
using Pages_fp8 = PageRows<Fp8Format<TAILPACK_WIDTH>, false>;
using Pages_tq2 = PageRows<TurboQuantFormat<TAILPACK_WIDTH, 2>, true>;
using Pages_tq3 = PageRows<TurboQuantFormat<TAILPACK_WIDTH, 3>, true>;
using Pages_tq4 = PageRows<TurboQuantFormat<TAILPACK_WIDTH, 4>, true>;
using Pages = TAILPACK_JOIN(Pages_, TAILPACK_SOURCE);

} // namespace tailpack

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(32 * (TAILPACK_VECTORS + 1))
TAILPACK_KERNEL_PREPARE(const __grid_constant__ DecodeArgs args) {
    prepare_rows<TAILPACK_WIDTH, TAILPACK_TYPE, TAILPACK_VECTORS, Pages::Format::kRotated, kPageChunk>(args);
}

extern "C" __global__ void __launch_bounds__(32 * kRowWarps, kRowCtasPerSm)
TAILPACK_KERNEL_ATTEND(const __grid_constant__ DecodeArgs args) {
    attend_rows<TAILPACK_WIDTH, TAILPACK_TYPE, Pages, TAILPACK_VECTORS, TAILPACK_SOFTCAP, TAILPACK_PROFILE>(args);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads) TAILPACK_KERNEL_MERGE(const __grid_constant__ DecodeArgs args) {
    merge_partials<TAILPACK_WIDTH, TAILPACK_TYPE, PLAN_ROWS, Pages::Format::kRotated, kPageChunk>(args);
}
