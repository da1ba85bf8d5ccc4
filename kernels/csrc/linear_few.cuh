// A matrix product of 1 to 8 rows: out[m][n] = after(sum over k of x[m][k] * weight[n][k]).
//
// Weights are read once, straight into registers, as A operands of m16n8k16: a lane's 16 bytes of a row are contiguous
// values of k, in whatever order the instruction sums them, as long as x comes in the same. So the 8 columns of a product
// are free, and nothing is converted: two loads, one of x and two products for 16 weight rows and 32 values of k.
//
// Grid: any number of CTAs, which take tiles of 16 weight rows (GATED: 16 of the gate and the same 16 of up) in turn; 8
// warps share k, in pieces of 64 bytes a row in turn, and their sums are added in a fixed order. Loads run DEPTH pieces
// ahead, across the end of a tile. Few enough CTAs leave room on each SM for those of the next kernel.
//
// PDL: the first weights are asked for before the kernel waits for what x comes from (ptx.cuh, wait_for_dependencies).
//
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
    const void* residual;
    void* out;
    int64_t x_stride, residual_stride, out_stride; // elements
    const uint8_t* prefetch;
    const int32_t* num_tokens; // [rows]
    int64_t prefetch_bytes;
    int32_t prefetch_limit, rows, n, k;
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

// x of one piece, as a lane holds it.
template <bool FP8> struct LinearX {
    uint4 part[FP8 ? 2 : 1];
};

// own += w x, of one piece; w as it lies in memory, [row g, row g + 8].
template <typename T, bool FP8>
__device__ __forceinline__ void multiply_piece(float (&own)[4], const uint4 (&w)[2], const LinearX<FP8>& x) {
    if constexpr (FP8) {
#pragma unroll
        for (int part = 0; part < 2; part++) { // 8 of the lane's 16 values of k
            const uint4& v = x.part[part];
            uint32_t a0, a1, a2, a3;
            e4m3_halves(part ? w[0].z : w[0].x, a0, a2);
            e4m3_halves(part ? w[1].z : w[1].x, a1, a3);
            mma_half<T>(own, a0, a1, a2, a3, v.x, v.y);
            e4m3_halves(part ? w[0].w : w[0].y, a0, a2);
            e4m3_halves(part ? w[1].w : w[1].y, a1, a3);
            mma_half<T>(own, a0, a1, a2, a3, v.z, v.w);
        }
    } else {
        const uint4& v = x.part[0];
        mma_half<T>(own, w[0].x, w[1].x, w[0].y, w[1].y, v.x, v.y);
        mma_half<T>(own, w[0].z, w[1].z, w[0].w, w[1].w, v.z, v.w);
    }
}

template <typename T, bool FP8, bool GATED, int DEPTH> __device__ __forceinline__ void linear_few(const LinearArgs& args) {
    constexpr int kTiles = GATED ? 2 : 1;
    constexpr int kPiece = FP8 ? 64 : 32; // values of k: 64 bytes a row
    constexpr int kWeightBytes = FP8 ? 1 : 2, kLaneValues = 16 / kWeightBytes;
    launch_dependents();
    __shared__ float partial[2][kLinearWarps][kTiles][kLinearRows * kLinearColumns];

    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int tiles = (args.n + kLinearRows - 1) / kLinearRows, step = static_cast<int>(gridDim.x);
    const int all = args.k / kPiece, pieces = (all - warp + kLinearWarps - 1) / kLinearWarps; // of this warp
    // Each warp goes through so many places a tile, of which the last ones may be empty.
    const int places = ((all + kLinearWarps - 1) / kLinearWarps + DEPTH - 1) / DEPTH * DEPTH;

    int next_tile = static_cast<int>(blockIdx.x), next_place = 0; // of the piece that is loaded next
    const uint8_t* from[kTiles][2];
    auto seek = [&] {
#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                // Rows behind the last are computed and dropped.
                const int64_t row = min(next_tile * kLinearRows + g + 8 * half, args.n - 1) + static_cast<int64_t>(tile) * args.n;
                from[tile][half] = static_cast<const uint8_t*>(args.weight) + row * args.k * kWeightBytes + 64 * warp + 16 * t;
            }
    };
    auto load = [&](uint4 (&to)[kTiles][2]) {
        if (next_tile >= tiles) return;
        if (next_place < pieces)
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    to[tile][half] = load_stream_16(from[tile][half]);
                    from[tile][half] += 64 * kLinearWarps;
                }
        if (++next_place == places) {
            next_place = 0;
            next_tile += step;
            if (next_tile < tiles) seek();
        }
    };
    uint4 held[DEPTH][kTiles][2];
    if (next_tile < tiles) seek();
#pragma unroll
    for (int d = 0; d < DEPTH; d++) load(held[d]);

    wait_for_dependencies();
    // Column g of a product is row g of x; columns behind the last row are zeros, or whatever: they are dropped.
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + min(g, args.rows - 1) * args.x_stride * 2 +
                       (kPiece * warp + kLaneValues * t) * 2;
    auto load_x = [&](int piece) {
        LinearX<FP8> v;
        const uint8_t* at = x + static_cast<int64_t>(piece < pieces ? piece : 0) * (kPiece * kLinearWarps * 2);
        if constexpr (FP8) {
#pragma unroll
            for (int part = 0; part < 2; part++) v.part[part] = load_l2_16(at + 16 * part);
        } else {
            v.part[0] = load_l2_16(at);
        }
        return v;
    };
    auto as_operand = [&](LinearX<FP8> v) { // x in the order in which codes come out of a word, times 2^60
        if constexpr (FP8) {
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const uint4 p = v.part[part];
                v.part[part] = uint4{multiply_halves<T>(permute(p.x, p.y, 0x5410), kTwoToThe60),
                                     multiply_halves<T>(permute(p.x, p.y, 0x7632), kTwoToThe60),
                                     multiply_halves<T>(permute(p.z, p.w, 0x5410), kTwoToThe60),
                                     multiply_halves<T>(permute(p.z, p.w, 0x7632), kTwoToThe60)};
            }
        }
        return v;
    };
    LinearX<FP8> ahead = pieces > 0 ? load_x(0) : LinearX<FP8>{};

    int buffer = 0;
    for (int tile0 = static_cast<int>(blockIdx.x); tile0 < tiles; tile0 += step) {
        const int first = tile0 * kLinearRows;
        float sum[kTiles][4] = {};
        for (int place = 0; place < places; place += DEPTH) {
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const int i = place + d;
                if (i < pieces) {
                    const LinearX<FP8> v = as_operand(ahead);
                    ahead = load_x(i + 1);
                    if constexpr (FP8) {
                        const int block = (i * kLinearWarps + warp) / 2; // of 128 values of k
#pragma unroll
                        for (int tile = 0; tile < kTiles; tile++) {
                            float own[4] = {};
                            const float scale = __ldg(args.scales + (tile * args.n + first) / 128 * static_cast<int64_t>(args.k / 128) + block);
                            multiply_piece<T, FP8>(own, held[d][tile], v);
#pragma unroll
                            for (int j = 0; j < 4; j++) sum[tile][j] += scale * kUnscale * own[j];
                        }
                    } else {
#pragma unroll
                        for (int tile = 0; tile < kTiles; tile++) multiply_piece<T, FP8>(sum[tile], held[d][tile], v);
                    }
                }
                load(held[d]);
            }
        }
        if (args.prefetch != nullptr && thread == 0 && tile0 + step >= tiles) prefetch_part(args);

#pragma unroll
        for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                partial[buffer][warp][tile][(g + 8 * (j / 2)) + kLinearRows * (2 * t + j % 2)] = sum[tile][j];
        __syncthreads(); // and whoever writes into this buffer again has passed the next one of these
        const int row = first + thread % kLinearRows, m = thread / kLinearRows; // threads behind 128 have m >= 8
        if (m < args.rows && row < args.n) {
            float value[kTiles];
#pragma unroll
            for (int tile = 0; tile < kTiles; tile++) {
                value[tile] = 0.0f;
#pragma unroll
                for (int w = 0; w < kLinearWarps; w++) value[tile] += partial[buffer][w][tile][thread];
                if (args.bias != nullptr) value[tile] += static_cast<float>(static_cast<const T*>(args.bias)[tile * args.n + row]);
                value[tile] = rounded<T>(value[tile]);
            }
            float result = value[0];
            if constexpr (GATED) result = rounded<T>(result / (1.0f + __expf(-result))) * value[1];
            else if (args.residual != nullptr)
                result += static_cast<float>(static_cast<const T*>(args.residual)[m * args.residual_stride + row]);
            static_cast<T*>(args.out)[m * args.out_stride + row] = static_cast<T>(result);
        }
        buffer ^= 1;
    }
}

} // namespace tailpack
