// y = x W^T of a few rows x: decode steps of small batches, where the time is that of reading the weights once. A cell is
// a dtype, a kind of weights, and what is done after; csrc/linear_few.cuh says how.
#include "linear_few.cuh"

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(kLinearThreads, TAILPACK_CTAS) TAILPACK_KERNEL_LINEAR(const __grid_constant__ LinearArgs args) {
    linear_few<TAILPACK_TYPE, TAILPACK_FP8, TAILPACK_GATED, TAILPACK_DEPTH>(args);
}
