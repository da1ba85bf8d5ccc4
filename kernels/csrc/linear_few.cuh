// A chain of matrix products of 1 to 8 rows, in one launch. Each: out[m][n] = after(sum over k of before(x)[m][k] *
// weight[n][k]); the x of a later one is made of what earlier ones wrote. The time is that of reading the weights once.
//
//   before     RMS norm of x where there are weights for it: T(norm * T(x * rsqrt(mean(x^2) + eps)))
//   after      bias [weight rows] is added (or null), the sum rounded to T; then a kind, or residual [rows][n] is added (or null)
//   GATED      weight holds gate [n][k] and, behind it, up [n][k]; out = T(T(silu(T(gate))) * T(up))
//   ROTARY     rows are heads: queries, keys, values. Queries and keys are rotated, queries go to out, keys and values
//              where the newest token's go (RopeArgs; no norms, dim a multiple of 16). No residual.
//   FP8        weights are e4m3 and scales f32 [weight rows / 128][k / 128] belong to blocks of 128 x 128; their rows are
//              scale_stride apart, a multiple of 4, and may be read to the end of four
//   residual may be out itself.
//
// A CTA takes tiles of 16 weight rows in turn: two halves of 8, which lie side by side but for gate and the same rows of up,
// and the two halves of a head that are rotated together. PRODUCERS warps stream them into a
// ring of stages, ROW_BYTES of each of the 16 rows, and run ahead over tiles and over products: weights depend on
// nothing, so they do not even wait for what the launch depends on. WARPS consumer warps share a stage's values of k. Weights
// are A operands of m16n8k16, as they lie in memory: a lane's 16 bytes of a row are contiguous values of k, in whatever
// order the instruction sums them, as long as x comes in the same; the 8 columns are the rows of x, and the result of
// one does not depend on the others. An epilogue warp adds up what the consumers have, in a fixed order, and writes it; between
// two products it waits until the epilogue warps of all CTAs have written. That wait needs all CTAs of the grid to run at
// once: never launch more than fit on the device, nor two chains on two streams.
//
// Rows of x are copied to shared memory; those too long for that are read from memory, and then there is no norm.
// k: a multiple of 32, in FP8 of 128. Rows of x and weights are contiguous, at multiples of 16 bytes.
#pragma once

#include "decode_step.cuh"

namespace tailpack {

constexpr int kLinearRows = 16, kLinearColumns = 8, kLinearProducts = 4;
constexpr int kLinearPad = 64; // bytes between rows in shared memory: what 8 lanes read lies in all banks
constexpr int kLinearSums = kLinearRows * kLinearColumns;
constexpr uint32_t kLinearGeneration = 1024; // what the counter of arrived CTAs grows by between two products

enum LinearKind : int32_t { LINEAR_PLAIN = 0, LINEAR_GATED = 1, LINEAR_ROTARY = 2 };

struct LinearProduct {
    const void* x;
    const void* weight;
    const float* scales;
    const void* bias;
    const void* residual;
    const void* norm;
    void* out;
    int64_t x_stride, residual_stride, out_stride, scale_stride; // elements
    int32_t n, k, kind;
    float eps;
};

struct LinearArgs {
    LinearProduct products[kLinearProducts];
    RopeArgs rope; // of the one that is ROTARY
    uint32_t* arrived; // a multiple of kLinearGeneration before and after a launch
    int32_t num_products, rows;
    int32_t stages, x_bytes; // of shared memory: linear_shared_bytes
    int32_t in_flight;       // stages under way at most, 1 to `stages`
};

// Four e4m3 codes to two registers of bf16 halves, codes (0, 2) and (1, 3), exactly, times 2^-120: sign and the 7 bits of
// exponent and fraction move to where bf16 has them. (Subnormal codes become subnormal halves.)
__device__ __forceinline__ void e4m3_halves(uint32_t codes, uint32_t& even, uint32_t& odd) {
    odd = (codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u);
    even = ((codes << 8) & 0x80008000u) | ((codes << 4) & 0x07f007f0u);
}
constexpr uint32_t kTwoToThe60 = 0x5d805d80u; // two halves of bf16: x times this, and the sum times 2^60, undo the 2^-120
constexpr float kUnscale = 1152921504606846976.0f;

// Until every CTA of the grid has come here, and what each wrote is seen. One thread of each CTA.
__device__ __forceinline__ void meet_grid(uint32_t* arrived) {
    const uint32_t share = blockIdx.x == 0 ? kLinearGeneration - (gridDim.x - 1) : 1u;
    const uint32_t target = (add_release(arrived, share) | (kLinearGeneration - 1)) + 1;
    for (uint32_t polls = 0; static_cast<int32_t>(load_acquire(arrived) - target) < 0; polls++) {
        if (polls == 1u << 26) trap(); // seconds: not all CTAs run
        pause_poll();
    }
}

template <typename T, bool FP8, int WARPS, int PRODUCERS, int ROW_BYTES, int LANES> struct LinearCta {
    static constexpr int kConsumers = 32 * WARPS;
    static constexpr int kPitch = ROW_BYTES + kLinearPad, kStageBytes = kLinearRows * kPitch;
    static constexpr int kWeightBytes = FP8 ? 1 : 2;
    static constexpr int kPieces = ROW_BYTES / 64, kOwn = kPieces / WARPS; // of 64 bytes a row, of a stage and of a warp
    static constexpr int kPieceBytes = FP8 ? 128 : 64;                     // of x
    static constexpr int kParts = FP8 ? 2 : 1;                             // of a lane's x: 16 bytes each
    static constexpr int kXBatch = 8, kNormAhead = 2;                      // loads of 16 bytes a thread under way
    static_assert(ROW_BYTES / 128 * 4 <= kLinearPad); // scales of a stage's row
    static_assert(kPieces % WARPS == 0 && ROW_BYTES % 128 == 0 && kLinearRows % PRODUCERS == 0);

    const LinearArgs& args;
    uint8_t* shared;
    uint32_t base;
    int warp, lane;

    __device__ __forceinline__ LinearCta(const LinearArgs& args, uint8_t* shared)
        : args(args), shared(shared), base(shared_address(shared)), warp(static_cast<int>(threadIdx.x) / 32),
          lane(static_cast<int>(threadIdx.x) % 32) {}

    // ---- shared memory: stages, x, sums of consumers [2][WARPS][kLinearSums], of norms [8][WARPS], barriers

    __device__ __forceinline__ int x_at() const { return args.stages * kStageBytes; }
    __device__ __forceinline__ int sums_at() const { return x_at() + args.x_bytes; }
    __device__ __forceinline__ int norms_at() const { return sums_at() + 2 * WARPS * kLinearSums * 4; }
    __device__ __forceinline__ int barriers_at() const { return norms_at() + kLinearColumns * WARPS * 4; }
    __device__ __forceinline__ uint32_t barrier(int i) const { return base + barriers_at() + 8 * i; }
    __device__ __forceinline__ uint32_t sums_full(int i) const { return barrier(i); }
    __device__ __forceinline__ uint32_t sums_empty(int i) const { return barrier(2 + i); }
    __device__ __forceinline__ uint32_t x_ready(int product) const { return barrier(4 + product); }
    __device__ __forceinline__ uint32_t meeting() const { return barrier(4 + kLinearProducts); }
    __device__ __forceinline__ uint32_t stage_full(int i) const { return barrier(5 + kLinearProducts + 2 * i); }
    __device__ __forceinline__ uint32_t stage_empty(int i) const { return barrier(6 + kLinearProducts + 2 * i); }
    __device__ __forceinline__ float* sums(int buffer) const {
        return reinterpret_cast<float*>(shared + sums_at()) + buffer * WARPS * kLinearSums;
    }

    __device__ __forceinline__ void init() {
        if (threadIdx.x == 0) {
            for (int i = 0; i < 2; i++) mbarrier_init(sums_full(i), WARPS * LANES), mbarrier_init(sums_empty(i), LANES);
            for (int i = 0; i < kLinearProducts; i++) mbarrier_init(x_ready(i), 1);
            mbarrier_init(meeting(), WARPS * LANES);
            for (int i = 0; i < args.stages; i++)
                mbarrier_init(stage_full(i), PRODUCERS * kStageArrivals), mbarrier_init(stage_empty(i), WARPS * LANES);
            mbarrier_init_fence();
        }
        __syncthreads();
    }

    // By a warp, for what its lanes read and wrote so far. By each lane for itself where compute-sanitizer is to see it.
    __device__ __forceinline__ void arrive(uint32_t barrier) const {
        if constexpr (LANES == 32) {
            mbarrier_arrive(barrier);
        } else {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(barrier);
        }
    }

    // ---- what the warps agree on

    struct Ring {
        int stage = 0;
        uint32_t parity = 0;
        __device__ __forceinline__ void next(int stages) {
            if (++stage == stages) stage = 0, parity ^= 1;
        }
    };
    static __device__ __forceinline__ int tile_width(const LinearProduct& product) {
        return product.kind == LINEAR_GATED ? 8 : kLinearRows;
    }
    // The weight row that half 0 or 1 of a tile begins with, and the end of those that it may have.
    __device__ __forceinline__ int half_row(const LinearProduct& product, int tile, int half) const {
        if (product.kind == LINEAR_GATED) return 8 * tile + half * product.n;
        if (product.kind == LINEAR_PLAIN) return 16 * tile + 8 * half;
        const int dim = args.rope.dim, tiles = dim / 16;
        return tile / tiles * dim + tile % tiles * 8 + half * (dim / 2);
    }
    static __device__ __forceinline__ int half_end(const LinearProduct& product, int half) {
        return product.kind == LINEAR_GATED && half ? 2 * product.n : product.n;
    }
    static __device__ __forceinline__ int num_tiles(const LinearProduct& product) {
        const int width = tile_width(product);
        return (product.n + width - 1) / width;
    }
    static __device__ __forceinline__ int num_chunks(const LinearProduct& product) {
        return (product.k * kWeightBytes + ROW_BYTES - 1) / ROW_BYTES;
    }
    static __device__ __forceinline__ int chunk_bytes(const LinearProduct& product, int chunk) {
        return min(ROW_BYTES, product.k * kWeightBytes - chunk * ROW_BYTES);
    }
    static __device__ __forceinline__ int x_pitch(const LinearProduct& product) { return product.k * 2 + kLinearPad; }

    // ---- the producer warps: each has some rows of every stage, for starting a copy takes its time

    // No more than args.in_flight stages are under way: what lies between two products, or before the launch, reads memory
    // behind them.
    __device__ __forceinline__ void produce(int producer) const {
        constexpr int kRows = kLinearRows / PRODUCERS, kTogether = kRows < 8 ? kRows : 8; // of a half
        const uint64_t stream = evict_first_policy();
        Ring ring, behind;
        int started = 0;
        for (int p = 0; p < args.num_products; p++) {
            const LinearProduct& product = args.products[p];
            const int tiles = num_tiles(product), chunks = num_chunks(product);
            const int64_t row_bytes = static_cast<int64_t>(product.k) * kWeightBytes;
            for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
                for (int chunk = 0; chunk < chunks; chunk++) {
                    const uint32_t bytes = static_cast<uint32_t>(chunk_bytes(product, chunk)), full = stage_full(ring.stage);
                    if (started++ >= args.in_flight) {
                        mbarrier_wait(stage_full(behind.stage), behind.parity);
                        behind.next(args.stages);
                    }
                    mbarrier_wait(stage_empty(ring.stage), ring.parity ^ 1);
                    // The scales of a half lie behind its first row.
                    const uint32_t scale_bytes = FP8 ? (bytes / 128 + 3) / 4 * 16 : 0;
                    const int halves = PRODUCERS == 1 ? 2 : kRows * producer % 8 == 0 ? 1 : 0;
                    stage_begin(full, kRows * bytes + halves * scale_bytes);
#pragma unroll
                    for (int first = 0; first < kRows; first += kTogether) {
                        const int r = kRows * producer + first; // of the tile
                        const int end = half_end(product, r / 8);
                        int row = half_row(product, tile, r / 8) + r % 8;
                        uint32_t to = base + ring.stage * kStageBytes + r * kPitch;
                        if constexpr (FP8)
                            if (r % 8 == 0)
                                stage_copy(to + ROW_BYTES, product.scales + row / 128 * product.scale_stride + chunk * (ROW_BYTES / 128),
                                           scale_bytes, full, stream);
                        // Rows behind the last are that one again: computed and dropped.
                        const uint8_t* from = static_cast<const uint8_t*>(product.weight) + min(row, end - 1) * row_bytes + chunk * ROW_BYTES;
#pragma unroll
                        for (int each = 0; each < kTogether; each++, row++, to += kPitch) {
                            stage_copy(to, from, bytes, full, stream);
                            if (row < end - 1) from += row_bytes;
                        }
                    }
                    stage_end(full);
                    ring.next(args.stages);
                }
            }
        }
    }

    // ---- the consumer warps

    // x of one piece, as a lane holds it.
    struct Operand {
        uint4 part[kParts];
    };
    // x in the order in which codes come out of a word, times 2^60.
    static __device__ __forceinline__ uint4 as_operand(const uint4& v) {
        if constexpr (FP8)
            return uint4{multiply_halves<T>(permute(v.x, v.y, 0x5410), kTwoToThe60),
                         multiply_halves<T>(permute(v.x, v.y, 0x7632), kTwoToThe60),
                         multiply_halves<T>(permute(v.z, v.w, 0x5410), kTwoToThe60),
                         multiply_halves<T>(permute(v.z, v.w, 0x7632), kTwoToThe60)};
        return v;
    }
    static __device__ __forceinline__ float sum_of_squares(const uint4& v) {
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float low = half_of<T>(words[j], 0), high = half_of<T>(words[j], 1);
            sum += low * low + high * high;
        }
        return sum;
    }
    static __device__ __forceinline__ uint4 normed(const uint4& v, const uint4& weight, float rstd) {
        const uint32_t from[4] = {v.x, v.y, v.z, v.w}, by[4] = {weight.x, weight.y, weight.z, weight.w};
        uint32_t to[4];
#pragma unroll
        for (int j = 0; j < 4; j++)
            to[j] = pack_halves<T>(as_rounded<T>(half_of<T>(from[j], 0) * rstd) * half_of<T>(by[j], 0),
                                   as_rounded<T>(half_of<T>(from[j], 1) * rstd) * half_of<T>(by[j], 1));
        return uint4{to[0], to[1], to[2], to[3]};
    }
    __device__ __forceinline__ void meet_consumers(uint32_t& parity) const {
        arrive(meeting());
        mbarrier_wait(meeting(), parity);
        parity ^= 1;
    }

    // Rows of x to shared memory, as operands; first normed where that is asked for. `ahead`: this thread's first pieces of
    // the norm's weights.
    __device__ __forceinline__ void bring_x(const LinearProduct& product, const uint4 (&ahead)[kNormAhead], uint32_t& parity) const {
        const int thread = static_cast<int>(threadIdx.x), bytes = product.k * 2, pitch = x_pitch(product);
        float* norms = reinterpret_cast<float*>(shared + norms_at());
        const bool norm = product.norm != nullptr;
        for (int m = 0; m < args.rows; m++) {
            const uint8_t* from = static_cast<const uint8_t*>(product.x) + m * product.x_stride * 2;
            uint8_t* to = shared + x_at() + m * pitch;
            float sum = 0.0f;
            for (int first = 16 * thread; first < bytes; first += 16 * kConsumers * kXBatch) {
                uint4 v[kXBatch];
#pragma unroll
                for (int j = 0; j < kXBatch; j++) {
                    const int at = first + 16 * kConsumers * j;
                    if (at < bytes) v[j] = load_l2_16(from + at);
                }
#pragma unroll
                for (int j = 0; j < kXBatch; j++) {
                    const int at = first + 16 * kConsumers * j;
                    if (at >= bytes) continue;
                    if (norm) sum += sum_of_squares(v[j]);
                    *reinterpret_cast<uint4*>(to + at) = norm ? v[j] : as_operand(v[j]);
                }
            }
            if (!norm) continue;
#pragma unroll
            for (int distance = 16; distance >= 1; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            if (lane == 0) norms[m * WARPS + warp] = sum;
        }
        meet_consumers(parity);
        if (!norm) return;
        for (int m = 0; m < args.rows; m++) {
            uint8_t* row = shared + x_at() + m * pitch;
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < WARPS; w++) sum += norms[m * WARPS + w];
            const float rstd = rsqrtf(sum / static_cast<float>(product.k) + product.eps);
#pragma unroll
            for (int j = 0; j < kNormAhead; j++) { // the same thread's own
                const int at = 16 * (thread + kConsumers * j);
                if (at >= bytes) continue;
                uint4* x = reinterpret_cast<uint4*>(row + at);
                *x = as_operand(normed(*x, ahead[j], rstd));
            }
            for (int at = 16 * (thread + kConsumers * kNormAhead); at < bytes; at += 16 * kConsumers) {
                uint4* x = reinterpret_cast<uint4*>(row + at);
                *x = as_operand(normed(*x, load_cached_16(static_cast<const uint8_t*>(product.norm) + at), rstd));
            }
        }
        meet_consumers(parity);
    }

    // sum += w x, of one piece; w as it lies in memory, [row g, row g + 8].
    static __device__ __forceinline__ void multiply_piece(float (&sum)[4], const uint4 (&w)[2], const Operand& x) {
        if constexpr (FP8) {
#pragma unroll
            for (int part = 0; part < 2; part++) { // 8 of the lane's 16 values of k
                const uint4& v = x.part[part];
                uint32_t a0, a1, a2, a3;
                e4m3_halves(part ? w[0].z : w[0].x, a0, a2);
                e4m3_halves(part ? w[1].z : w[1].x, a1, a3);
                mma_half<T>(sum, a0, a1, a2, a3, v.x, v.y);
                e4m3_halves(part ? w[0].w : w[0].y, a0, a2);
                e4m3_halves(part ? w[1].w : w[1].y, a1, a3);
                mma_half<T>(sum, a0, a1, a2, a3, v.z, v.w);
            }
        } else {
            const uint4& v = x.part[0];
            mma_half<T>(sum, w[0].x, w[1].x, w[0].y, w[1].y, v.x, v.y);
            mma_half<T>(sum, w[0].z, w[1].z, w[0].w, w[1].w, v.z, v.w);
        }
    }

    // DIRECT: x is read from memory, a stage ahead.
    template <bool DIRECT>
    __device__ __forceinline__ void load_direct(const LinearProduct& product, int chunk, Operand (&to)[kOwn]) const {
        if constexpr (DIRECT) {
            const int m = min(lane / 4, args.rows - 1), pieces = chunk_bytes(product, chunk) / 64;
            const uint8_t* x = static_cast<const uint8_t*>(product.x) + m * product.x_stride * 2 + lane % 4 * (16 * kParts);
#pragma unroll
            for (int j = 0; j < kOwn; j++) {
                const int i = warp + WARPS * j;
                if (i >= pieces) continue;
#pragma unroll
                for (int part = 0; part < kParts; part++)
                    to[j].part[part] = load_l2_16(x + (chunk * kPieces + i) * kPieceBytes + 16 * part);
            }
        }
    }

    template <bool DIRECT> __device__ __forceinline__ void multiply(const LinearProduct& product, Ring& ring, Ring& buffer) const {
        const int g = lane / 4, t = lane % 4, tiles = num_tiles(product), chunks = num_chunks(product);
        // Column g of a product is row g of x; columns behind the last row are that one again: they are dropped.
        const uint32_t x_row = base + x_at() + min(g, args.rows - 1) * x_pitch(product) + 16 * kParts * t;
        const uint32_t own = base + g * kPitch + 64 * warp + 16 * t;
        Operand next_x[kOwn] = {};
        load_direct<DIRECT>(product, 0, next_x);
        for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
            float sum[4] = {};
            for (int chunk = 0; chunk < chunks; chunk++) {
                const int pieces = chunk_bytes(product, chunk) / 64;
                Operand x[kOwn];
                if constexpr (DIRECT) {
#pragma unroll
                    for (int j = 0; j < kOwn; j++) x[j] = next_x[j];
                    load_direct<DIRECT>(product, chunk + 1 < chunks ? chunk + 1 : 0, next_x);
                }
                mbarrier_wait(stage_full(ring.stage), ring.parity);
                const uint32_t stage = own + ring.stage * kStageBytes;
#pragma unroll
                for (int j = 0; j < kOwn; j++) {
                    const int i = warp + WARPS * j;
                    if (i >= pieces) continue;
                    const uint4 w[2] = {load_shared_16(stage + 64 * WARPS * j), load_shared_16(stage + 64 * WARPS * j + 8 * kPitch)};
#pragma unroll
                    for (int part = 0; part < kParts; part++) {
                        if constexpr (DIRECT) x[j].part[part] = as_operand(x[j].part[part]);
                        else x[j].part[part] = load_shared_16(x_row + (chunk * kPieces + i) * kPieceBytes + 16 * part);
                    }
                    if constexpr (FP8) {
                        const uint8_t* behind = shared + ring.stage * kStageBytes + ROW_BYTES + i / 2 * 4;
                        float piece[4] = {};
                        multiply_piece(piece, w, x[j]);
#pragma unroll
                        for (int half = 0; half < 2; half++) { // rows g and g + 8
                            const float scale = *reinterpret_cast<const float*>(behind + half * 8 * kPitch) * kUnscale;
                            sum[2 * half] += scale * piece[2 * half], sum[2 * half + 1] += scale * piece[2 * half + 1];
                        }
                    } else {
                        multiply_piece(sum, w, x[j]);
                    }
                }
                arrive(stage_empty(ring.stage));
                ring.next(args.stages);
            }
            float* to = sums(buffer.stage) + warp * kLinearSums;
            mbarrier_wait(sums_empty(buffer.stage), buffer.parity ^ 1);
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (2 * t + c % 2 < args.rows) to[g + 8 * (c / 2) + kLinearRows * (2 * t + c % 2)] = sum[c];
            arrive(sums_full(buffer.stage));
            buffer.next(2);
        }
    }

    __device__ __forceinline__ void consume() const {
        Ring ring, buffer;
        uint32_t parity = 0;
        for (int p = 0; p < args.num_products; p++) {
            const LinearProduct& product = args.products[p];
            const bool direct = args.rows * x_pitch(product) > args.x_bytes;
            uint4 norm[kNormAhead] = {};
            if (product.norm != nullptr)
#pragma unroll
                for (int j = 0; j < kNormAhead; j++) {
                    const int at = 16 * (static_cast<int>(threadIdx.x) + kConsumers * j);
                    if (at < product.k * 2) norm[j] = load_cached_16(static_cast<const uint8_t*>(product.norm) + at);
                }
            if (p == 0) wait_for_dependencies();
            else mbarrier_wait(x_ready(p), 0);
            if (static_cast<int>(blockIdx.x) >= num_tiles(product)) continue;
            if (!direct) bring_x(product, norm, parity);
            if (direct) multiply<true>(product, ring, buffer);
            else multiply<false>(product, ring, buffer);
        }
    }

    // ---- the epilogue warp

    __device__ __forceinline__ void finish() const {
        constexpr int kValues = kLinearSums / 32;
        Ring buffer;
        wait_for_dependencies();
        for (int p = 0; p < args.num_products; p++) {
            const LinearProduct& product = args.products[p];
            const int tiles = num_tiles(product), width = tile_width(product), values = args.rows * width;
            const bool gated = product.kind == LINEAR_GATED;
            const T *bias = static_cast<const T*>(product.bias), *residual = static_cast<const T*>(product.residual);
            for (int tile = static_cast<int>(blockIdx.x); tile < tiles; tile += static_cast<int>(gridDim.x)) {
                if (product.kind == LINEAR_ROTARY) {
                    rotate_tile(product, tile, buffer);
                    continue;
                }
                float more[kValues] = {}, offset[kValues][2] = {}; // residual and bias, under way while others compute
                const int first = tile * width;
#pragma unroll
                for (int j = 0; j < kValues; j++) {
                    const int i = lane + 32 * j, m = i / width, row = first + i % width;
                    if (i >= values || row >= product.n) continue;
                    if (residual != nullptr) more[j] = load_l2_half(residual + m * product.residual_stride + row);
                    if (bias != nullptr) {
                        offset[j][0] = static_cast<float>(bias[row]);
                        if (gated) offset[j][1] = static_cast<float>(bias[product.n + row]);
                    }
                }
                mbarrier_wait(sums_full(buffer.stage), buffer.parity);
                const float* from = sums(buffer.stage);
#pragma unroll
                for (int j = 0; j < kValues; j++) {
                    const int i = lane + 32 * j, m = i / width, row = first + i % width;
                    if (i >= values || row >= product.n) continue;
                    const int at = kLinearRows * m + i % width;
                    float value = 0.0f, up = 0.0f;
#pragma unroll
                    for (int w = 0; w < WARPS; w++) value += from[w * kLinearSums + at];
                    value = as_rounded<T>(value + offset[j][0]);
                    if (gated) {
#pragma unroll
                        for (int w = 0; w < WARPS; w++) up += from[w * kLinearSums + at + 8];
                        value = as_rounded<T>(value / (1.0f + __expf(-value))) * as_rounded<T>(up + offset[j][1]);
                    } else {
                        value += more[j];
                    }
                    static_cast<T*>(product.out)[m * product.out_stride + row] = static_cast<T>(value);
                }
                arrive(sums_empty(buffer.stage));
                buffer.next(2);
            }
            __syncwarp();
            if (p + 1 < args.num_products && lane == 0) {
                meet_grid(args.arrived);
                mbarrier_arrive(x_ready(p + 1));
            }
            __syncwarp();
        }
    }
    // A tile of a ROTARY product: 8 dims of a head and those they are rotated with.
    __device__ __forceinline__ void rotate_tile(const LinearProduct& product, int tile, Ring& buffer) const {
        constexpr int kPairs = kLinearColumns * 8 / 32;
        const RopeArgs& rope = args.rope;
        const int half = rope.dim / 2, tiles = rope.dim / 16, head = tile / tiles, first = tile % tiles * 8;
        const bool is_query = head < rope.q_heads, is_value = head >= rope.q_heads + rope.kv_heads;
        const T* bias = static_cast<const T*>(product.bias);
        T* to[kPairs] = {};
        float c[kPairs] = {}, s[kPairs] = {}, offset[kPairs][2] = {};
#pragma unroll
        for (int j = 0; j < kPairs; j++) { // while others compute
            const int i = lane + 32 * j, m = i / 8, dim = first + i % 8;
            if (m >= args.rows) continue;
            const int position = rope.num_tokens[m] - 1;
            if (position >= rope.positions) trap();
            if (!is_value) {
                const int64_t at = static_cast<int64_t>(max(position, 0)) * half + dim;
                c[j] = static_cast<float>(static_cast<const T*>(rope.cos)[at]), s[j] = static_cast<float>(static_cast<const T*>(rope.sin)[at]);
            }
            if (bias != nullptr)
#pragma unroll
                for (int h = 0; h < 2; h++) offset[j][h] = static_cast<float>(bias[head * rope.dim + dim + h * half]);
            to[j] = is_query ? static_cast<T*>(product.out) + m * product.out_stride + head * rope.dim
                             : append_target<T>(rope, m, (head - rope.q_heads) % rope.kv_heads, is_value, position);
        }
        mbarrier_wait(sums_full(buffer.stage), buffer.parity);
        const float* from = sums(buffer.stage);
#pragma unroll
        for (int j = 0; j < kPairs; j++) {
            const int i = lane + 32 * j, m = i / 8, dim = first + i % 8;
            if (m >= args.rows || to[j] == nullptr) continue;
            float value[2] = {};
#pragma unroll
            for (int h = 0; h < 2; h++) {
#pragma unroll
                for (int w = 0; w < WARPS; w++) value[h] += from[w * kLinearSums + kLinearRows * m + i % 8 + 8 * h];
                value[h] = as_rounded<T>(value[h] + offset[j][h]);
            }
            float low = value[0], high = value[1];
            if (!is_value) {
                low = as_rounded<T>(value[0] * c[j]) - as_rounded<T>(value[1] * s[j]);
                high = as_rounded<T>(value[1] * c[j]) + as_rounded<T>(value[0] * s[j]);
            }
            to[j][dim] = static_cast<T>(low);
            to[j][dim + half] = static_cast<T>(high);
        }
        arrive(sums_empty(buffer.stage));
        buffer.next(2);
    }
    static __device__ __forceinline__ float load_l2_half(const T* p) {
        const unsigned short bits = __ldcg(reinterpret_cast<const unsigned short*>(p));
        return half_of<T>(bits, 0);
    }
};

// Threads: 32 * (WARPS + PRODUCERS + 1). Grid: any number of CTAs that run at once, below kLinearGeneration.
template <typename T, bool FP8, int WARPS, int PRODUCERS, int ROW_BYTES, int LANES>
__device__ __forceinline__ void linear_few(const LinearArgs& args, uint8_t* shared) {
    launch_dependents();
    LinearCta<T, FP8, WARPS, PRODUCERS, ROW_BYTES, LANES> cta(args, shared);
    cta.init();
    if (cta.warp < WARPS) cta.consume();
    else if (cta.warp < WARPS + PRODUCERS) cta.produce(cta.warp - WARPS);
    else cta.finish();
}

} // namespace tailpack
