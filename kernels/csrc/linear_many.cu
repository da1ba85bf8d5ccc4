// y = x W^T of 9 to 64 rows x, where the time is still that of reading the weights once: csrc/linear_many.cuh.
//   TAILPACK_TYPE, TAILPACK_TILES (of 8 rows of x: 2, 4, 8), TAILPACK_DEPTH, TAILPACK_CTAS.
#include "linear_many.cuh"

using namespace tailpack;

extern "C" __global__ void __launch_bounds__(kManyThreads, TAILPACK_CTAS) TAILPACK_KERNEL_LINEAR(const __grid_constant__ ManyArgs args) {
    linear_many<TAILPACK_TYPE, TAILPACK_TILES, TAILPACK_DEPTH>(args);
}
