// A matrix product of 1 to 8 rows: out[m][n] = after(sum over k of before(x)[m][k] * weight[n][k]).
//
// Weights are read once, straight into registers, as A operands of m16n8k16: a lane's 16 bytes of a row are contiguous
// values of k, in whatever order the instruction sums them, as long as x comes in the same. So the 8 columns of a product
// are free, and nothing is converted: two loads, one of x and two products for 16 weight rows and 32 values of k.
//
// Grid: ceil(n / 16) CTAs, of 16 weight rows each (GATED: 16 of the gate and the same 16 of up); 8 warps share k, in
// pieces of 64 bytes a row in turn, and their sums are added in a fixed order.
//
// PDL: the first weights are asked for before the kernel waits for what x comes from (ptx.cuh, wait_for_dependencies).
//
//   NORM   x is normed first: T(w * T(x * rsqrt(mean(x^2) + eps))), statistics in f32; each CTA does it for itself, and
//          keeps the rows in shared memory: rows * (2 k + 64) bytes
//   GATED  weight holds gate [n][k] and, behind it, up [n][k]; out = T(T(silu(T(gate))) * T(up))
//   FP8    weight is e4m3 and scales f32 [weight rows / 128][k / 128] belong to blocks of 128 x 128
//   bias [weight rows] (or null) is added to the sum; then it is rounded to T; then residual [rows][n] (or null) is added.
//   residual may be out itself.
//
// prefetch (or null): prefetch_bytes of another weight that each CTA, when it has read its own, asks for its part of, to be
// in the second-level cache when its product comes: for what follows between, which leaves the memory idle. Not asked for
// where the rows' num_tokens are together more than prefetch_limit: their KV would push it out again.
//
// k: a multiple of 32, in FP8 of 128. Rows of x and weights are contiguous, at multiples of 16 bytes.
#pragma once

#include "ptx.cuh"

namespace tailpack {

constexpr int kLinearWarps = 8, kLinearThreads = 32 * kLinearWarps, kLinearRows = 16, kLinearColumns = 8;

struct LinearArgs {
    const void* x;
    const void* weight;
    const float* scales;
    const void* bias;
    const void* norm;
    const void* residual;
    void* out;
    int64_t x_stride, residual_stride, out_stride; // elements
    int32_t rows, n, k;
    float eps;
    const uint8_t* prefetch;
    const int32_t* num_tokens; // [rows]
    int64_t prefetch_bytes;
    int32_t prefetch_limit;
};

// Four e4m3 codes to two registers of bf16 halves, codes (0, 2) and (1, 3), exactly, times 2^-120: sign and the 7 bits of
// exponent and fraction move to where bf16 has them. (Subnormal codes become subnormal halves.)
__device__ __forceinline__ void e4m3_halves(uint32_t codes, uint32_t& even, uint32_t& odd) {
    odd = (codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u);
    even = ((codes << 8) & 0x80008000u) | ((codes << 4) & 0x07f007f0u);
}
constexpr uint32_t kTwoToThe60 = 0x5d805d80u; // two halves of bf16: x times this, and the sum times 2^60, undo the 2^-120
constexpr float kUnscale = 1152921504606846976.0f;

template <typename T> __device__ __forceinline__ float rounded(float x) { return static_cast<float>(static_cast<T>(x)); }

// Two normed halves of two halves of x and w.
template <typename T> __device__ __forceinline__ uint32_t normed(uint32_t x, uint32_t w, float rstd) {
    const float low = rounded<T>(half_of<T>(x, 0) * rstd) * half_of<T>(w, 0);
    const float high = rounded<T>(half_of<T>(x, 1) * rstd) * half_of<T>(w, 1);
    return pack_halves<T>(low, high);
}

// The rows of x, normed, into shared memory: [rows][k] T, rows 2 k + 64 bytes apart. All threads.
template <typename T> __device__ __forceinline__ void norm_rows(const LinearArgs& args, uint8_t* shared, float* sums) {
    const int chunks = args.k / 8, thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    for (int m = 0; m < args.rows; m++) {
        const T* x = static_cast<const T*>(args.x) + m * args.x_stride;
        float sum = 0.0f;
        for (int i = thread; i < chunks; i += kLinearThreads) {
            const uint4 v = load_l2_16(x + 8 * i);
            *reinterpret_cast<uint4*>(shared + m * (2 * args.k + 64) + 16 * i) = v;
            const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float low = half_of<T>(words[j], 0), high = half_of<T>(words[j], 1);
                sum += low * low + high * high;
            }
        }
#pragma unroll
        for (int distance = 16; distance >= 1; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (lane == 0) sums[m * kLinearWarps + warp] = sum;
    }
    __syncthreads();
    const uint8_t* weights = static_cast<const uint8_t*>(args.norm);
    for (int m = 0; m < args.rows; m++) {
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < kLinearWarps; w++) sum += sums[m * kLinearWarps + w];
        const float rstd = rsqrtf(sum / static_cast<float>(args.k) + args.eps);
        for (int i = thread; i < chunks; i += kLinearThreads) { // the same thread's own
            uint4* at = reinterpret_cast<uint4*>(shared + m * (2 * args.k + 64) + 16 * i);
            const uint4 v = *at, w = load_cached_16(weights + 16 * i);
            *at = uint4{normed<T>(v.x, w.x, rstd), normed<T>(v.y, w.y, rstd), normed<T>(v.z, w.z, rstd), normed<T>(v.w, w.w, rstd)};
        }
    }
    __syncthreads();
}

constexpr int64_t kPrefetchPiece = 16384;

// One thread of each CTA.
__device__ __forceinline__ void prefetch_part(const LinearArgs& args) {
    int64_t tokens = 0;
    for (int m = 0; m < args.rows; m++) tokens += args.num_tokens[m];
    if (tokens > args.prefetch_limit) return;
    const int64_t part = (args.prefetch_bytes / gridDim.x + 15) / 16 * 16, first = part * blockIdx.x;
    const int64_t end = min(first + part, args.prefetch_bytes);
    for (int64_t at = first; at < end; at += kPrefetchPiece)
        prefetch_l2(args.prefetch + at, static_cast<uint32_t>(min(kPrefetchPiece, end - at)));
}

template <typename T, bool FP8, bool NORM, bool GATED> __device__ __forceinline__ void linear_few(const LinearArgs& args) {
    constexpr int kTiles = GATED ? 2 : 1;
    constexpr int kDepth = TAILPACK_DEPTH;              // pieces of k under way
    constexpr int kPiece = FP8 ? 64 : 32;               // values of k: 64 bytes a row
    constexpr int kWeightBytes = FP8 ? 1 : 2, kLaneValues = 16 / kWeightBytes;
    launch_dependents();
    TAILPACK_DYNAMIC_SHARED(shared);
    __shared__ float partial[kLinearWarps][kTiles][kLinearRows * kLinearColumns];
    __shared__ float sums[kLinearColumns * kLinearWarps];

    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int first = static_cast<int>(blockIdx.x) * kLinearRows;
    const int pieces = (args.k / kPiece - warp + kLinearWarps - 1) / kLinearWarps; // of this warp
    const uint8_t* weight[kTiles][2];
    const float* scale_row[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = min(first + g + 8 * half, args.n - 1); // rows behind the last are computed and dropped
            weight[tile][half] = static_cast<const uint8_t*>(args.weight) +
                                 (static_cast<int64_t>(tile) * args.n + row) * args.k * kWeightBytes + 64 * warp + 16 * t;
        }
        scale_row[tile] = args.scales + (tile * args.n + first) / 128 * static_cast<int64_t>(args.k / 128);
    }
    uint4 held[kDepth][kTiles][2];
    auto load = [&](int i, uint4 (&to)[kTiles][2]) {
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                to[tile][half] = load_stream_16(weight[tile][half] + static_cast<int64_t>(i) * (64 * kLinearWarps));
    };
#pragma unroll
    for (int d = 0; d < kDepth; d++)
        if (d < pieces) load(d, held[d]);

    wait_for_dependencies();
    if constexpr (NORM) norm_rows<T>(args, shared, sums);
    // Column g of a product is row g of x; columns behind the last row are zeros, or whatever: they are dropped.
    const int column = min(g, args.rows - 1);
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + column * args.x_stride * 2 + (kPiece * warp + kLaneValues * t) * 2;
    const uint8_t* normed_x = shared + column * (2 * args.k + 64) + (kPiece * warp + kLaneValues * t) * 2;
    auto load_x = [&](int i, int part) {
        const int64_t at = static_cast<int64_t>(i) * (kPiece * kLinearWarps * 2) + 16 * part;
        if constexpr (NORM) return *reinterpret_cast<const uint4*>(normed_x + at);
        else return load_l2_16(x + at);
    };

    float sum[kTiles][4] = {};
    auto multiply = [&](int i, const uint4 (&w)[kTiles][2]) {
        if constexpr (FP8) {
            const int block = (i * kLinearWarps + warp) / 2; // of 128 values of k
            float scale[kTiles], own[kTiles][4] = {};
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) scale[tile] = __ldg(scale_row[tile] + block) * kUnscale;
#pragma unroll
            for (int part = 0; part < 2; part++) { // 8 of the lane's 16 values of k
                const uint4 v = load_x(i, part);
                const uint32_t b[4] = {multiply_halves<T>(permute(v.x, v.y, 0x5410), kTwoToThe60),
                                       multiply_halves<T>(permute(v.x, v.y, 0x7632), kTwoToThe60),
                                       multiply_halves<T>(permute(v.z, v.w, 0x5410), kTwoToThe60),
                                       multiply_halves<T>(permute(v.z, v.w, 0x7632), kTwoToThe60)};
#pragma unroll
                for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
                    for (int word = 0; word < 2; word++) {
                        const uint4 &low = w[tile][0], &high = w[tile][1];
                        uint32_t a0, a1, a2, a3;
                        e4m3_halves(part ? (word ? low.w : low.z) : (word ? low.y : low.x), a0, a2);
                        e4m3_halves(part ? (word ? high.w : high.z) : (word ? high.y : high.x), a1, a3);
                        mma_half<T>(own[tile], a0, a1, a2, a3, b[2 * word], b[2 * word + 1]);
                    }
            }
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
                for (int j = 0; j < 4; j++) sum[tile][j] += scale[tile] * own[tile][j];
        } else {
            const uint4 v = load_x(i, 0);
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
                const uint4 &low = w[tile][0], &high = w[tile][1];
                mma_half<T>(sum[tile], low.x, high.x, low.y, high.y, v.x, v.y);
                mma_half<T>(sum[tile], low.z, high.z, low.w, high.w, v.z, v.w);
            }
        }
    };
    for (int i = 0; i < pieces; i += kDepth) {
#pragma unroll
        for (int d = 0; d < kDepth; d++) {
            if (i + d < pieces) multiply(i + d, held[d]);
            if (i + d + kDepth < pieces) load(i + d + kDepth, held[d]);
        }
    }
    if (args.prefetch != nullptr && thread == 0) prefetch_part(args);

#pragma unroll
    for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
        for (int j = 0; j < 4; j++) partial[warp][tile][(g + 8 * (j / 2)) + kLinearRows * (2 * t + j % 2)] = sum[tile][j];
    __syncthreads();
    const int row = first + thread % kLinearRows, m = thread / kLinearRows;
    if (m >= args.rows || row >= args.n) return; // threads behind 128 have m >= 8
    float value[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
        value[tile] = 0.0f;
#pragma unroll
        for (int w = 0; w < kLinearWarps; w++) value[tile] += partial[w][tile][thread];
        if (args.bias != nullptr) value[tile] += static_cast<float>(static_cast<const T*>(args.bias)[tile * args.n + row]);
        value[tile] = rounded<T>(value[tile]);
    }
    float result = value[0];
    if constexpr (GATED) result = rounded<T>(result / (1.0f + __expf(-result))) * value[1];
    else if (args.residual != nullptr)
        result += static_cast<float>(static_cast<const T*>(args.residual)[m * args.residual_stride + row]);
    static_cast<T*>(args.out)[m * args.out_stride + row] = static_cast<T>(result);
}

} // namespace tailpack
