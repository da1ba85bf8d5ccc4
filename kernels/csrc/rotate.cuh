// The rotation D H D of one row held by one warp: element 32 j + lane is x[j] of that lane (kernels/rotation.py).
#pragma once

#include "decode_args.cuh"
#include "tables.cuh"

namespace tailpack {

// x[j] with its sign flipped where the diagonal D is negative at element 32 j + lane.
template <int D> __device__ __forceinline__ float diagonal(float x, int j, int lane) {
    return __uint_as_float(__float_as_uint(x) ^ (Signs<D>::word(j) >> lane & 1u) << 31);
}

template <int D> __device__ __forceinline__ void rotate_row(float (&x)[D / 32], int lane) {
    constexpr int kOwn = D / 32;
#pragma unroll
    for (int j = 0; j < kOwn; j++) {
        x[j] = diagonal<D>(x[j], j, lane);
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const float other = __shfl_xor_sync(0xffffffffu, x[j], distance);
            x[j] = (lane & distance ? -x[j] : x[j]) + other; // the upper lane takes lower - upper
        }
    }
#pragma unroll
    for (int distance = 1; distance < kOwn; distance *= 2)
#pragma unroll
        for (int j = 0; j < kOwn; j++)
            if (!(j & distance)) {
                const float a = x[j], b = x[j + distance];
                x[j] = a + b;
                x[j + distance] = a - b;
            }
    const float norm = D == 64 ? 0.125f : D == 128 ? 0.08838834764831845f : D == 256 ? 0.0625f : 0.04419417382415922f;
#pragma unroll
    for (int j = 0; j < kOwn; j++) x[j] = diagonal<D>(x[j] * norm, j, lane);
}

} // namespace tailpack
