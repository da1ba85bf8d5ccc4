// One cell: the three launches of decode attention over rows that K and V share, for many query heads on one kv head, by
// Hopper's warpgroup tensor cores (mqa.cuh). kernels/cells.py gives the defines and the kernels' names.
#include "merge.cuh"
#include "mqa.cuh"

using namespace tailpack;
static_assert(TAILPACK_WIDTH == kMqaWidth);

extern "C" __global__ void __launch_bounds__(32 * (TAILPACK_VECTORS + 1))
TAILPACK_KERNEL_PREPARE(const __grid_constant__ DecodeArgs args) {
    prepare_mqa<TAILPACK_TYPE, TAILPACK_VECTORS, TAILPACK_SOFTCAP>(args);
}

extern "C" __global__ void __launch_bounds__(kMqaThreads, 1) TAILPACK_KERNEL_ATTEND(const __grid_constant__ DecodeArgs args) {
    TAILPACK_DYNAMIC_SHARED(shared);
    attend_mqa<TAILPACK_TYPE, TAILPACK_SOFTCAP>(args, shared);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads) TAILPACK_KERNEL_MERGE(const __grid_constant__ DecodeArgs args) {
    merge_partials<TAILPACK_WIDTH, TAILPACK_TYPE, PLAN_PACKED, false>(args);
}
