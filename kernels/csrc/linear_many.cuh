// A matrix product of up to 64 rows: out[m][n] = sum over k of x[m][k] * weight[n][k].
//
// As in linear_few.cuh, weights go straight from memory into registers, as A operands of m16n8k16, and each is read once.
// The rows of x, which every CTA needs, pass through shared memory in pieces of 64 values of k, a ring of stages; they are
// the B operands, so more rows of x are more products a weight, and no more loads of weights.
//
// Grid: x = ceil(n / 128) CTAs of 8 warps with 16 weight rows each, y = splits of k. With one split out is T [rows][n];
// with more it is f32 [splits][rows][n], part_stride apart, to be summed by what comes next, in order of the splits. bias
// [n] (or null) is in the first split's sum.
//
// k: a multiple of 64. Rows of x and weights contiguous, at multiples of 16 bytes.
#pragma once

#include "ptx.cuh"

namespace tailpack {

constexpr int kManyWarps = 8, kManyThreads = 32 * kManyWarps, kManyRows = 16 * kManyWarps, kManyPiece = 64, kManyStages = 4;

struct ManyArgs {
    const void *x, *weight, *bias;
    void* out;
    int64_t x_stride, out_stride, part_stride; // elements
    int32_t rows, n, k, splits;
};

// Dynamic shared memory: kManyStages * TILES * 8 rows of 128 bytes. Chunk c (16 bytes) of row r lies at chunk c ^ 4 of the
// odd rows: eight lanes that load together touch all banks.
template <typename T, int TILES, int DEPTH> __device__ __forceinline__ void linear_many(const ManyArgs& args) {
    constexpr int kStageBytes = TILES * 8 * 128, kChunks = TILES * 64;
    launch_dependents();
    TAILPACK_DYNAMIC_SHARED(shared);
    __shared__ uint64_t full[kManyStages];
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int row0 = static_cast<int>(blockIdx.x) * kManyRows + 16 * warp, split = static_cast<int>(blockIdx.y);
    const int all = args.k / kManyPiece;
    const int begin = all * split / args.splits, pieces = all * (split + 1) / args.splits - begin;

    const uint8_t* weight[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t row = min(row0 + g + 8 * half, args.n - 1); // rows behind the last are computed and dropped
        weight[half] = static_cast<const uint8_t*>(args.weight) + (row * args.k + begin * kManyPiece) * 2 + 16 * t;
    }
    uint4 held[DEPTH][2][2]; // [half of the piece][row g, g + 8]
    auto load = [&](int i, uint4 (&to)[2][2]) {
#pragma unroll
        for (int j = 0; j < 2; j++)
#pragma unroll
            for (int half = 0; half < 2; half++) to[j][half] = load_stream_16(weight[half] + static_cast<int64_t>(i) * 128 + 64 * j);
    };
#pragma unroll
    for (int d = 0; d < DEPTH; d++)
        if (d < pieces) load(d, held[d]);

    if (thread == 0) {
        for (int s = 0; s < kManyStages; s++) mbarrier_init(shared_address(&full[s]), kManyThreads);
        mbarrier_init_fence();
    }
    __syncthreads();
    wait_for_dependencies();
    auto copy = [&](int i) {
        const uint32_t to = shared_address(shared) + static_cast<uint32_t>(i % kManyStages * kStageBytes);
        const T* from = static_cast<const T*>(args.x) + (begin + i) * kManyPiece;
        for (int id = thread; id < kChunks; id += kManyThreads) {
            const int row = id / 8, chunk = id % 8;
            lane_copy_16(to + static_cast<uint32_t>(row * 128 + (chunk ^ 4 * (row & 1)) * 16),
                         from + min(row, args.rows - 1) * args.x_stride + 8 * chunk);
        }
        lane_copies_arrive(shared_address(&full[i % kManyStages]));
    };
    for (int i = 0; i < kManyStages - 1 && i < pieces; i++) copy(i);

    float sum[TILES][4] = {};
    auto multiply = [&](int i, const uint4 (&w)[2][2]) {
        const uint32_t stage = shared_address(shared) + static_cast<uint32_t>(i % kManyStages * kStageBytes + g * 128);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const uint4 &low = w[j][0], &high = w[j][1];
            const uint32_t chunk = static_cast<uint32_t>((4 * j + t) ^ (4 * (g & 1)));
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) {
                const uint4 v = load_shared_16(stage + static_cast<uint32_t>(tile * 1024) + 16 * chunk);
                mma_half<T>(sum[tile], low.x, high.x, low.y, high.y, v.x, v.y);
                mma_half<T>(sum[tile], low.z, high.z, low.w, high.w, v.z, v.w);
            }
        }
    };
    for (int i = 0; i < pieces; i += DEPTH) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const int at = i + d;
            if (at < pieces) { // the same for all threads
                mbarrier_wait(shared_address(&full[at % kManyStages]), static_cast<uint32_t>(at / kManyStages % 2));
                __syncthreads(); // nobody reads the stage of the piece before any more
                if (at + kManyStages - 1 < pieces) copy(at + kManyStages - 1);
                multiply(at, held[d]);
                if (at + DEPTH < pieces) load(at + DEPTH, held[d]);
            }
        }
    }

#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int n = row0 + g + 8 * half;
        if (n >= args.n) continue;
        const float bias = args.bias != nullptr && split == 0 ? static_cast<float>(static_cast<const T*>(args.bias)[n]) : 0.0f;
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const int m = 8 * tile + 2 * t + j;
                if (m >= args.rows) continue;
                const float value = sum[tile][2 * half + j] + bias;
                if (args.splits > 1) static_cast<float*>(args.out)[split * args.part_stride + m * args.out_stride + n] = value;
                else static_cast<T*>(args.out)[m * args.out_stride + n] = static_cast<T>(value);
            }
    }
}

} // namespace tailpack
