// Chains of y = x W^T of a few rows x: decode steps of small batches, where the time is that of reading the weights once.
// A cell is a dtype and a kind of weights; csrc/linear_few.cuh says how.
//   TAILPACK_TYPE, TAILPACK_FP8, TAILPACK_WARPS, TAILPACK_PRODUCERS, TAILPACK_ROW_BYTES and TAILPACK_LANES: kernels/step_cells.py.
#include "linear_few.cuh"

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(32 * (TAILPACK_WARPS + TAILPACK_PRODUCERS + 1), 1)
    TAILPACK_KERNEL_LINEAR(const __grid_constant__ LinearArgs args) {
    TAILPACK_DYNAMIC_SHARED(shared);
    linear_few<TAILPACK_TYPE, TAILPACK_FP8, TAILPACK_WARPS, TAILPACK_PRODUCERS, TAILPACK_ROW_BYTES, TAILPACK_LANES>(args, shared);
}
