// Pack and unpack of TurboQuant rows. Every f32 operation and its order are those of kernels/turboquant.py, so codes,
// scales and unpacked rows equal the reference bit for bit; products that meet an addition are __fmul_rn for that reason.
//
// A row of WIDTH values is held by LANES lanes of one warp, 8 consecutive values (one chunk) in registers at a time:
//   chunk k = v * LANES + lane, v < VECS.   WIDTH 64: 8 lanes, 4 rows a warp; 128: 16, 2; 256: 32, 1; 512: 32, 1, VECS 2.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "codec.cuh"

namespace tailpack {

constexpr unsigned kFullWarp = 0xffffffffu;
constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr float kZeroNorm = TAILPACK_ZERO_NORM; // below it a row stores scale 0 and decodes to exact zeros
constexpr float kMaxNorm = TAILPACK_MAX_NORM;   // above it a row is refused
constexpr float kMaxHalf = 65504.0f;

template <int WIDTH> struct Lanes {
    static constexpr int kLanes = WIDTH / kChunk < 32 ? WIDTH / kChunk : 32;
    static constexpr int kVecs = WIDTH / kChunk / kLanes;
    static constexpr int kRowsPerWarp = 32 / kLanes;
    static constexpr int kLaneSteps = kLanes == 8 ? 3 : kLanes == 16 ? 4 : 5; // log2
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline void from_float(float x, float& out) { out = x; }
__device__ inline void from_float(float x, __nv_bfloat16& out) { out = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half& out) { out = __float2half_rn(fminf(fmaxf(x, -kMaxHalf), kMaxHalf)); }

// 8 values of a row, moved 16 bytes at a time; a row begins at a multiple of 16 bytes (the caller has checked it).
template <typename T> struct alignas(16) Chunk {
    T value[kChunk];
};

// The diagonal D: bit i of the result is 1 where value i of chunk k is negated.
template <int WIDTH> __device__ inline uint32_t chunk_signs(int k) {
    uint32_t word = Signs<WIDTH>::word(0);
#pragma unroll
    for (int w = 1; w < WIDTH / 32; w++) word = k / 4 == w ? Signs<WIDTH>::word(w) : word;
    return word >> kChunk * (k % 4) & 0xffu;
}

__device__ inline float flip(float x, uint32_t signs, int i) {
    return __uint_as_float(__float_as_uint(x) ^ (signs >> i & 1u) << 31);
}

// In place: x <- H x, H the Sylvester Hadamard matrix of +-1 (not divided by sqrt(WIDTH)): butterflies with distance 1, 2,
// 4 in registers, then over the lanes, then over v.
template <int WIDTH> __device__ inline void hadamard(float (&x)[Lanes<WIDTH>::kVecs][kChunk], int lane) {
    using L = Lanes<WIDTH>;
#pragma unroll
    for (int v = 0; v < L::kVecs; v++) {
#pragma unroll
        for (int distance = 1; distance < kChunk; distance *= 2)
#pragma unroll
            for (int i = 0; i < kChunk; i++)
                if (!(i & distance)) {
                    const float a = x[v][i], b = x[v][i + distance];
                    x[v][i] = a + b;
                    x[v][i + distance] = a - b;
                }
#pragma unroll
        for (int step = 0; step < L::kLaneSteps; step++) {
            const float mine = lane >> step & 1 ? -1.0f : 1.0f; // the upper lane takes lower - upper
#pragma unroll
            for (int i = 0; i < kChunk; i++)
                x[v][i] = fmaf(mine, x[v][i], __shfl_xor_sync(kFullWarp, x[v][i], 1 << step, L::kLanes));
        }
    }
    if constexpr (L::kVecs == 2)
#pragma unroll
        for (int i = 0; i < kChunk; i++) {
            const float a = x[0][i], b = x[1][i];
            x[0][i] = a + b;
            x[1][i] = a - b;
        }
}

// Sum of z^2 over the row, the same in every lane, in the reference's order: halves of the row added onto each other.
// The first three steps over the lanes each keep half of a lane's values, so that few shuffles do the work of many.
template <int WIDTH> __device__ inline float sum_of_squares(const float (&z)[Lanes<WIDTH>::kVecs][kChunk], int lane) {
    using L = Lanes<WIDTH>;
    float s[kChunk];
#pragma unroll
    for (int i = 0; i < kChunk; i++) {
        s[i] = __fmul_rn(z[0][i], z[0][i]);
        if constexpr (L::kVecs == 2) s[i] += __fmul_rn(z[1][i], z[1][i]);
    }
    int distance = L::kLanes / 2;
#pragma unroll
    for (int keep = kChunk / 2; keep >= 1; keep /= 2, distance /= 2) {
        const bool upper = lane & distance; // the upper lane keeps the upper half of the values
#pragma unroll
        for (int i = 0; i < keep; i++) {
            const float give = upper ? s[i] : s[i + keep];
            const float take = upper ? s[i + keep] : s[i];
            s[i] = take + __shfl_xor_sync(kFullWarp, give, distance, L::kLanes);
        }
    }
    float sum = s[0];
#pragma unroll
    for (; distance >= 1; distance /= 2) sum += __shfl_xor_sync(kFullWarp, sum, distance, L::kLanes);
#pragma unroll
    for (int step = 1; step <= 3; step++) sum += __shfl_xor_sync(kFullWarp, sum, L::kLanes >> step, L::kLanes);
    return sum;
}

// Store a row's chunks. All lanes of the warp call it (at 3 bits it shuffles); only rows with `exists` are written.
template <int WIDTH, int BITS>
__device__ inline void store_codes(const uint32_t (&chunk)[Lanes<WIDTH>::kVecs], int lane, uint8_t* row_codes, bool exists) {
    using L = Lanes<WIDTH>;
    if constexpr (BITS == 3) {
        constexpr int kWords = Record<WIDTH, 3>::kWords3;
#pragma unroll
        for (int first = 0; first < kWords; first += L::kLanes) {
            const int w = first + lane, k = word3_chunk(w);
            uint32_t low = 0, high = 0; // a chunk behind the row's end is 0
#pragma unroll
            for (int v = 0; v < L::kVecs; v++) {
                const uint32_t a = __shfl_sync(kFullWarp, chunk[v], k % L::kLanes, L::kLanes);
                const uint32_t b = __shfl_sync(kFullWarp, chunk[v], (k + 1) % L::kLanes, L::kLanes);
                low = k / L::kLanes == v ? a : low;
                high = (k + 1) / L::kLanes == v ? b : high;
            }
            if (exists && w < kWords) reinterpret_cast<uint32_t*>(row_codes)[w] = word3(w, low, high);
        }
    } else if (exists) {
#pragma unroll
        for (int v = 0; v < L::kVecs; v++) {
            const int k = v * L::kLanes + lane;
            if constexpr (BITS == 4) reinterpret_cast<uint32_t*>(row_codes)[k] = chunk[v];
            if constexpr (BITS == 2) reinterpret_cast<uint16_t*>(row_codes)[k] = static_cast<uint16_t>(chunk[v]);
        }
    }
}

// rows   [num_rows, WIDTH] of T, row_stride values apart
// codes  [num_rows, kCodeBytes], codes_stride bytes apart; every byte is written
// scales [num_rows] f32, scales_stride values apart
// A row with NaN, an infinity or a norm above kMaxNorm stores codes 0 and scale NaN, and lowers *first_bad_row to its index.
template <typename T, int WIDTH, int BITS>
__device__ inline void pack_rows(const T* __restrict__ rows, int64_t row_stride, uint8_t* __restrict__ codes,
                                 int64_t codes_stride, float* __restrict__ scales, int64_t scales_stride,
                                 long long* __restrict__ first_bad_row, int64_t num_rows) {
    using L = Lanes<WIDTH>;
    const int lane = threadIdx.x % L::kLanes;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const float sqrt_width = sqrtf(static_cast<float>(WIDTH));
    constexpr float kHalfStep = 0.5f * Grid<WIDTH, BITS>::step();
    uint32_t signs[L::kVecs];
#pragma unroll
    for (int v = 0; v < L::kVecs; v++) signs[v] = chunk_signs<WIDTH>(v * L::kLanes + lane);

    // Whole warps stay in the loop to the end: every lane takes part in every shuffle.
    for (int64_t first = warp * L::kRowsPerWarp; first < num_rows; first += warps * L::kRowsPerWarp) {
        const int64_t row = first + threadIdx.x % 32 / L::kLanes;
        const bool exists = row < num_rows;
        float z[L::kVecs][kChunk];
        uint32_t amax = 0; // as bits: for values >= 0 the order of floats is the order of their bits, NaN above infinity
#pragma unroll
        for (int v = 0; v < L::kVecs; v++) {
            Chunk<T> in = {};
            if (exists) in = *reinterpret_cast<const Chunk<T>*>(rows + row * row_stride + (v * L::kLanes + lane) * kChunk);
#pragma unroll
            for (int i = 0; i < kChunk; i++) {
                z[v][i] = to_float(in.value[i]);
                amax = max(amax, __float_as_uint(z[v][i]) & 0x7fffffffu);
            }
        }
#pragma unroll
        for (int step = 0; step < L::kLaneSteps; step++)
            amax = max(amax, __shfl_xor_sync(kFullWarp, amax, 1 << step, L::kLanes));

        const int exponent = min(max(static_cast<int>(amax >> 23) - 126, -100), 124);
        const float down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
        const float up = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
#pragma unroll
        for (int v = 0; v < L::kVecs; v++)
#pragma unroll
            for (int i = 0; i < kChunk; i++) z[v][i] = __fmul_rn(z[v][i], down);
        const float short_norm = sqrtf(sum_of_squares<WIDTH>(z, lane));
        const float norm = short_norm * up;
        const float share = norm / kMaxNorm;
        const bool bad = amax >= kInfinityBits || __fmul_rn(share, share) > 1.0f;
        const bool stores_codes = !bad && !(norm < kZeroNorm);

#pragma unroll
        for (int v = 0; v < L::kVecs; v++)
#pragma unroll
            for (int i = 0; i < kChunk; i++) z[v][i] = flip(z[v][i], signs[v], i);
        hadamard<WIDTH>(z, lane);
        const float factor = 1.0f / __fmul_rn(short_norm, sqrt_width);
        uint32_t chunk[L::kVecs];
        int32_t square = 0;
#pragma unroll
        for (int v = 0; v < L::kVecs; v++) {
            chunk[v] = 0;
#pragma unroll
            for (int i = 0; i < kChunk; i++)
                chunk[v] |= quantise<WIDTH, BITS>(flip(z[v][i] * factor, signs[v], i)) << BITS * i;
            square += chunk_square<WIDTH, BITS>(chunk[v]);
            if (!stores_codes) chunk[v] = 0;
        }
#pragma unroll
        for (int step = 0; step < L::kLaneSteps; step++) square += __shfl_xor_sync(kFullWarp, square, 1 << step, L::kLanes);

        store_codes<WIDTH, BITS>(chunk, lane, codes + row * codes_stride, exists);
        if (exists && lane == 0) {
            const float chosen = __fmul_rn(sqrtf(static_cast<float>(square)), kHalfStep);
            float scale = stores_codes ? __fmul_rn(short_norm / chosen, up) : 0.0f;
            if (bad) {
                scale = __uint_as_float(0x7fc00000u); // NaN: a consumer that ignores the flag cannot take it for a row
                atomicMin(first_bad_row, static_cast<long long>(row));
            }
            scales[row * scales_stride] = scale;
        }
    }
}

// codes, scales as above -> rows [num_rows, WIDTH] of T, row_stride values apart. f16 rows saturate at 65504.
template <typename T, int WIDTH, int BITS>
__device__ inline void unpack_rows(const uint8_t* __restrict__ codes, int64_t codes_stride,
                                   const float* __restrict__ scales, int64_t scales_stride, T* __restrict__ rows,
                                   int64_t row_stride, int64_t num_rows) {
    using L = Lanes<WIDTH>;
    const int lane = threadIdx.x % L::kLanes;
    const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / 32);
    const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
    const float inv_sqrt_width = 1.0f / sqrtf(static_cast<float>(WIDTH));
    uint32_t signs[L::kVecs];
#pragma unroll
    for (int v = 0; v < L::kVecs; v++) signs[v] = chunk_signs<WIDTH>(v * L::kLanes + lane);

    for (int64_t first = warp * L::kRowsPerWarp; first < num_rows; first += warps * L::kRowsPerWarp) {
        const int64_t row = first + threadIdx.x % 32 / L::kLanes;
        const bool exists = row < num_rows;
        const float scale = exists ? scales[row * scales_stride] : 0.0f;
        float x[L::kVecs][kChunk];
#pragma unroll
        for (int v = 0; v < L::kVecs; v++) {
            const uint32_t chunk = exists ? read_chunk<BITS>(codes + row * codes_stride, v * L::kLanes + lane) : 0u;
            chunk_values<WIDTH, BITS>(chunk, x[v]);
#pragma unroll
            for (int i = 0; i < kChunk; i++) x[v][i] = flip(x[v][i], signs[v], i);
        }
        hadamard<WIDTH>(x, lane);
#pragma unroll
        for (int v = 0; v < L::kVecs; v++) {
            Chunk<T> out;
#pragma unroll
            for (int i = 0; i < kChunk; i++) {
                const float value = __fmul_rn(__fmul_rn(x[v][i], inv_sqrt_width), scale);
                from_float(scale == 0.0f ? 0.0f : flip(value, signs[v], i), out.value[i]); // +0, never -0
            }
            if (exists) *reinterpret_cast<Chunk<T>*>(rows + row * row_stride + (v * L::kLanes + lane) * kChunk) = out;
        }
    }
}

} // namespace tailpack
