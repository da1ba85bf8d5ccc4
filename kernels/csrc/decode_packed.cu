// One cell: the three launches of decode attention over packed pages for one width, preset, dtype and number of vectors.
// kernels/cells.py gives the defines and the kernels' names, kernels/decode_tiling.py the tiling.
#include "merge.cuh"
#include "packed.cuh"

using namespace tailpack;

// SMs with 228 KiB of shared memory, and all others.
#if !defined(TAILPACK_SMALL) && (!defined(__CUDA_ARCH__) || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200))
#define TAILPACK_TILING TAILPACK_LARGE_TILING
#else
#define TAILPACK_TILING TAILPACK_SMALL_TILING
#endif
using Tiling = PackedTiling<TAILPACK_WIDTH, TAILPACK_KEY_BITS, TAILPACK_VALUE_BITS, TAILPACK_VECTORS, TAILPACK_TILING>;

extern "C" __global__ void __launch_bounds__(32 * (TAILPACK_VECTORS + 1))
TAILPACK_KERNEL_PREPARE(const __grid_constant__ DecodeArgs args) {
    prepare_packed<TAILPACK_WIDTH, TAILPACK_TYPE, TAILPACK_VECTORS, TAILPACK_KEY_BITS, TAILPACK_SOFTCAP>(args);
}

extern "C" __global__ void __launch_bounds__(Tiling::kThreads, Tiling::kCtas)
TAILPACK_KERNEL_ATTEND(const __grid_constant__ DecodeArgs args) {
    TAILPACK_DYNAMIC_SHARED(shared);
    attend_packed<Tiling, TAILPACK_TYPE, TAILPACK_SOFTCAP>(args, shared);
}

extern "C" __global__ void __launch_bounds__(kMergeThreads) TAILPACK_KERNEL_MERGE(const __grid_constant__ DecodeArgs args) {
    merge_partials<TAILPACK_WIDTH, TAILPACK_TYPE, PLAN_PACKED, false>(args);
}
