// Decode attention of many query heads over one kv head whose rows are keys and values at once, on Hopper's warpgroup
// tensor cores (wgmma.cuh). Width 512, rows packed at 4 bits in canonical order (page layout 1), tails dense.
//
// With 64 query vectors a row of 260 bytes takes 131,072 operations, so the tensor cores are the limit. A work item is
// one item of the plan, for one kv head and one block of up to 64 vectors. A CTA of four warpgroups takes work off a
// queue; a *tile* is 64 rows, and a page is a pair of them:
//
//   producers    decode rows to fp16, each times its scale but for a power of two that the tile's rows have in common (or,
//                where their scales differ much, 2 T - 1 exactly, a row's scale being left to the weights), into two
//                tiles of 64 rows x 512 in shared memory, each in two halves of 256 dims, one of each warpgroup, that are
//                handed over apart. Rows of a tail are copied as they are, and multiplied in their own type.
//   consumers    side s (0, 1) computes the scores of tile s, 64 vectors x 64 rows over all 512 dims, and their weights,
//                p = 2^(x - reference) times what was left out; both sides add the weighted rows of both tiles, side s to
//                dims [256 s, 256 s + 256) of the output, which stays in their registers (64 x 256 f32).
//
// So scores are computed once, and each side hands its weights to the other through shared memory. Both add tiles in
// their order.
//
// Weights are fp16. So a vector's reference is the largest exponent of a *weight*, log2 of p times the scale, in the
// first tile that it sees; what is lost below fp16's range is small against the largest summand of the output, whatever
// the rows' norms. The reference is raised, and what was summed is scaled down, only when a later tile exceeds it by
// `headroom`, which is rare.
//
// Barriers (mbarriers; "round" counts pairs of tiles, over all work of the CTA):
//   full[tile][half]    producers of that half: decoded, and with half 0 the tile's scales. Both sides wait for it.
//   empty[tile][half]   side `half`: added. The tile's scores are done by then, for its weights were there.
//   weights[side]       side: its weights and references are written. The other side waits for it.
//   queries_full        the bulk copy of the block's queries;   queries_empty: both sides have an item's last scores
//   sums                side 1: its sums of p, at an item's end. Side 0 waits for it.
//   work_full, work_empty[slot]   the next work item, found by the first warp of half 0's producers
// Every lane of a warp arrives behind its own accesses; what the tensor cores read has ended by wgmma_wait. Weights and
// references need no "empty": side 0's are read before side 1 frees (0, 1), and side 1's before side 0 frees (1, 0), without
// which the next tile does not come.
#pragma once

#include "mqa_producer.cuh"

namespace tailpack {

// Of 65,536; a launch gives each of the 512 threads 128.
constexpr int kConsumerRegisters = 192, kProducerRegisters = 64;
static_assert(256 * (kConsumerRegisters + kProducerRegisters) == 65536);

constexpr float kLog2E = 1.44269504f;

// Rows [begin, end) of an item that a query sees.
struct Visible {
    int begin, end;
};
__device__ __forceinline__ Visible visible_rows(const DecodeArgs& args, const MqaWork& work, int query) {
    const int position = work.first_position + query - work.first, window = static_cast<int>(args.window);
    return {window > 0 ? max(0, position + 1 - window) : 0, min(work.rows, position + 1)};
}
// What all queries of the call see.
__device__ __forceinline__ Visible visible_to_all(const DecodeArgs& args, const MqaWork& work) {
    return {visible_rows(args, work, static_cast<int>(args.num_queries) - 1).begin, visible_rows(args, work, 0).end};
}
// The first of a thread's two vectors in its block; the second is 8 behind.
__device__ __forceinline__ uint32_t own_row() { return 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4; }
// Vectors behind the last are computed, too, and not stored.
__device__ __forceinline__ int vector_of(const MqaWork& work, int v) {
    return kMqaVectors * work.block + static_cast<int>(own_row()) + 8 * v;
}

__device__ __forceinline__ float hidden_score() { return __uint_as_float(0xff800000u); } // -inf

// Of a thread's two vectors; `sum` of p over this thread's rows of this side's tiles.
struct Softmax {
    float factor[2], reference[2], sum[2];
};

// How far the exponent of a weight may exceed the reference: 2^headroom must be far from the type's largest number.
template <typename T> __device__ constexpr float headroom() { return 32.0f; }
template <> __device__ constexpr float headroom<__half>() { return 10.0f; }

// From the old references to these: what sums have to be multiplied with.
__device__ __forceinline__ void move_references(Softmax& state, const float (&reference)[2], float (&correction)[2]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        correction[i] = reference[i] == state.reference[i] ? 1.0f : exp2_fast(state.reference[i] - reference[i]);
        state.reference[i] = reference[i];
        state.sum[i] *= correction[i];
    }
}
// Of 64 vectors, a thread's part of 256 dims, 128 by 128: an instruction may name no more registers than a launch gives.
using Output = float[2][64];
__device__ __forceinline__ void hold(Output& out) {
    hold(out[0]);
    hold(out[1]);
}
__device__ __forceinline__ void correct(Output& out, const float (&correction)[2]) {
    hold(out);
    if (__any_sync(kAllLanes, correction[0] != 1.0f || correction[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < 128; i++) out[i / 64][i % 64] *= correction[i / 2 % 2];
    }
}

// Of a thread's two vectors, the rows of a tile that they see: those of register 4 i + 2 v + j with begin <= 8 i + j < end.
struct VisibleRows {
    int begin[2], end[2];
    bool masked; // false: all of them

    __device__ __forceinline__ VisibleRows(const DecodeArgs& args, uint32_t shared, uint32_t n, int offset) {
        const MqaWork work = peek_work(shared, n); // again: registers are scarce
        const Visible to_all = visible_to_all(args, work);
        masked = __any_sync(kAllLanes, offset < to_all.begin || offset + kTileRows > to_all.end);
        begin[0] = begin[1] = end[0] = end[1] = 0;
        if (!masked) return;
        const int last = static_cast<int>(args.num_queries * args.group) - 1, t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const Visible visible = visible_rows(args, work, min(vector_of(work, v), last) / static_cast<int>(args.group));
            begin[v] = visible.begin - offset - 2 * t;
            end[v] = visible.end - offset - 2 * t;
        }
    }
    __device__ __forceinline__ bool hides(int v, int row) const { return row < begin[v] || row >= end[v]; }
};
// The new references of a thread's two vectors, for the largest exponents of their weights in this tile.
template <typename Half>
__device__ __forceinline__ void raise_references(Softmax& state, float (&top)[2], float (&correction)[2], float (&subtract)[2]) {
    float reference[2];
#pragma unroll
    for (int v = 0; v < 2; v++) {
        top[v] = fmaxf(top[v], __shfl_xor_sync(kAllLanes, top[v], 1));
        top[v] = fmaxf(top[v], __shfl_xor_sync(kAllLanes, top[v], 2));
        reference[v] = top[v] > state.reference[v] + headroom<Half>() ? top[v] : state.reference[v];
        // Nothing seen yet: all scores are -inf, and any finite number makes zeros of them.
        subtract[v] = reference[v] == hidden_score() ? 0.0f : reference[v];
    }
    move_references(state, reference, correction);
}

// The same as `weigh`, for a tile whose rows have one exponent instead of scales.
template <typename Half, bool SOFTCAP>
__device__ __forceinline__ void weigh_even(const DecodeArgs& args, uint32_t shared, uint32_t n, float (&scores)[32],
                                           float exponent, int offset, Softmax& state, float (&correction)[2],
                                           uint32_t (&weights)[16]) {
    const float up = __uint_as_float(static_cast<uint32_t>(static_cast<int>(exponent) + 127) << 23);
    const float down = __uint_as_float(static_cast<uint32_t>(127 - static_cast<int>(exponent)) << 23);
    const float own[2] = {state.factor[0] * up, state.factor[1] * up};
    const float factor[2] = {SOFTCAP ? 1.0f : own[0], SOFTCAP ? 1.0f : own[1]};
    // x = factor * score, or with softcap cap log2 e tanh(s / cap), tanh y = 1 - 2 / (1 + 2^(2 log2 e y)).
    if constexpr (SOFTCAP) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            scores[i] = args.softcap * kLog2E * (1.0f - divide_fast(2.0f, 1.0f + exp2_fast(scores[i] * own[i / 2 % 2])));
    }
    const VisibleRows visible(args, shared, n, offset);
    if (visible.masked) {
#pragma unroll
        for (int i = 0; i < 32; i++)
            if (visible.hides(i / 2 % 2, 8 * (i / 4) + i % 2)) scores[i] = hidden_score();
    }
    float top[2] = {hidden_score(), hidden_score()};
#pragma unroll
    for (int i = 0; i < 32; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], scores[i]);
    float subtract[2];
#pragma unroll
    for (int v = 0; v < 2; v++) top[v] = fmaf(top[v], factor[v], exponent);
    raise_references<Half>(state, top, correction, subtract);
    float sum[2] = {0.0f, 0.0f}; // of weights: p times 2^exponent
#pragma unroll
    for (int v = 0; v < 2; v++) subtract[v] = exponent - subtract[v];
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const float p0 = exp2_fast(fmaf(scores[4 * i + 2 * v], factor[v], subtract[v]));
            const float p1 = exp2_fast(fmaf(scores[4 * i + 2 * v + 1], factor[v], subtract[v]));
            sum[v] += p0 + p1;
            weights[2 * i + v] = pack_halves<Half>(p0, p1);
        }
#pragma unroll
    for (int v = 0; v < 2; v++) state.sum[v] = fmaf(sum[v], down, state.sum[v]);
}

// The tile's products to weights, two 16-bit values a register: weights[2 i + v] for vector v of the thread, rows
// 8 i + 2 t, + 1. offset: of the tile in the item. Returns in `correction` what older sums must be multiplied with.
template <int SIDE, typename Half, bool SOFTCAP>
__device__ __forceinline__ void weigh(const DecodeArgs& args, uint32_t shared, uint32_t n, float (&scores)[32],
                                      uint32_t scales, int offset, Softmax& state,
                                      float (&correction)[2], uint32_t (&weights)[16]) {
    const int t = static_cast<int>(threadIdx.x) % 4;
    const float exponent = __uint_as_float(__shfl_sync(kAllLanes, load_shared_4(shared + mqa_shared::kExponents + 4 * SIDE), 0));
    if (__builtin_expect(exponent == exponent, 1)) {
        weigh_even<Half, SOFTCAP>(args, shared, n, scores, exponent, offset, state, correction, weights);
        return;
    }
    const auto load_scales = [&](int i) { // of rows 8 i + 2 t, + 1: scale, log2; scale, log2
        return load_shared_f4(scales + 16 * static_cast<uint32_t>(4 * i + t));
    };
    const float factor[2] = {SOFTCAP ? 1.0f : state.factor[0], SOFTCAP ? 1.0f : state.factor[1]};
    const VisibleRows visible(args, shared, n, offset);
    float top[2] = {hidden_score(), hidden_score()};
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i % 4 == 0) __syncwarp(); // or the assembler loads all scales at once, and spills
        const float4 scale = load_scales(i);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float& score = scores[4 * i + j];
            const int v = j / 2, row = 8 * i + j % 2;
            score *= j % 2 == 0 ? scale.x : scale.z;
            if constexpr (SOFTCAP)
                score = args.softcap * kLog2E * (1.0f - divide_fast(2.0f, 1.0f + exp2_fast(score * state.factor[v])));
            if (visible.masked && visible.hides(v, row)) score = hidden_score();
            top[v] = fmaxf(top[v], fmaf(score, factor[v], j % 2 == 0 ? scale.y : scale.w));
        }
    }
    float subtract[2];
    raise_references<Half>(state, top, correction, subtract);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i % 4 == 0) __syncwarp(); // or the assembler loads all scales at once, and spills
        const float4 scale = load_scales(i);
#pragma unroll
        for (int v = 0; v < 2; v++) {
            const float p0 = exp2_fast(fmaf(scores[4 * i + 2 * v], factor[v], -subtract[v]));
            const float p1 = exp2_fast(fmaf(scores[4 * i + 2 * v + 1], factor[v], -subtract[v]));
            state.sum[v] += p0 + p1;
            weights[2 * i + v] = pack_halves<Half>(p0 * scale.x, p1 * scale.z);
        }
    }
}

// This side's weights and references for the other.
template <int SIDE>
__device__ __forceinline__ void publish_weights(uint32_t shared, const uint32_t (&weights)[16], const Softmax& state) {
    const uint32_t warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = 16 * warp + g;
    const uint32_t slab = shared + mqa_shared::kWeights + SIDE * mqa_shared::kSlab;
#pragma unroll
    for (uint32_t i = 0; i < 16; i++) store_shared_4(slab + slab_offset(row + 8 * (i % 2), 16 * (i / 2) + 4 * t), weights[i]);
    if (t == 0) {
        const uint32_t to = shared + mqa_shared::kReferences + SIDE * 4 * kMqaVectors + 4 * row;
        store_shared_4(to, __float_as_uint(state.reference[0]));
        store_shared_4(to + 32, __float_as_uint(state.reference[1]));
    }
    fence_async_proxy();
    arrive_as_warp(shared + mqa_shared::kWeightsFull + 8 * SIDE);
}
// Wait for the other side's weights, and take over its references.
template <int SIDE>
__device__ __forceinline__ void take_references(uint32_t shared, uint32_t round, Softmax& state, float (&correction)[2],
                                                MqaTimes& times) {
    const uint32_t row = 16 * (threadIdx.x / 32 % 4) + threadIdx.x % 32 / 4;
    times.time<kMqaWeightWait>([&] { mbarrier_wait(shared + mqa_shared::kWeightsFull + 8 * SIDE, round & 1); });
    const uint32_t from = shared + mqa_shared::kReferences + SIDE * 4 * kMqaVectors + 4 * row;
    const float reference[2] = {__uint_as_float(load_shared_4(from)), __uint_as_float(load_shared_4(from + 32))};
    move_references(state, reference, correction);
}

// scores = queries * tile^T, left under way as one group.
template <typename Half>
__device__ __forceinline__ void start_scores(float (&scores)[32], uint32_t shared, int tile, uint32_t round, MqaTimes& times) {
    const uint64_t queries = operand_along_rows(shared + mqa_shared::kQueries);
    const uint64_t rows = operand_along_rows(half_address(shared, tile, 0));
    times.time<kMqaRowWait>([&] { mbarrier_wait(full_barrier(shared, tile, 0), round & 1); });
    hold(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kMqaWidth / 16; step++) {
        if (step == kMqaWidth / 32) {
            times.time<kMqaRowWait>([&] { mbarrier_wait(full_barrier(shared, tile, 1), round & 1); });
            wgmma_fence();
        }
        const uint64_t at = static_cast<uint64_t>(step / 4) * (mqa_shared::kSlab / 16) + static_cast<uint64_t>(step % 4) * 2;
        Wgmma<Half>::scores(scores, queries + at, rows + at, step > 0);
    }
    wgmma_commit();
}
constexpr uint64_t kOutputPart = 2 * mqa_shared::kSlab / 16; // from the operand of 128 dims to that of the next 128
// out += weights * half a tile, left under way as one group: this side's weights from its registers, the other's from
// shared memory.
template <int SIDE, typename Half>
__device__ __forceinline__ void start_own(Output& out, const uint32_t (&weights)[16], uint32_t shared) {
    const uint64_t rows = operand_across_rows(half_address(shared, SIDE, SIDE), mqa_shared::kSlab);
    hold(out);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2 * kTileRows / 16; i++) {
        const int step = i / 2, part = i % 2;
        Wgmma<Half>::output(out[part], weights[4 * step], weights[4 * step + 1], weights[4 * step + 2], weights[4 * step + 3],
                            rows + static_cast<uint64_t>(step * 128) + static_cast<uint64_t>(part) * kOutputPart);
    }
    wgmma_commit();
}
template <int SIDE, typename Half>
__device__ __forceinline__ void start_other(Output& out, uint32_t shared, uint32_t round) {
    constexpr int kOther = 1 - SIDE;
    const uint64_t weights = operand_along_rows(shared + mqa_shared::kWeights + kOther * mqa_shared::kSlab);
    const uint64_t rows = operand_across_rows(half_address(shared, kOther, SIDE), mqa_shared::kSlab);
    mbarrier_wait(full_barrier(shared, kOther, SIDE), round & 1); // true for long; it makes the rows visible here, too
    hold(out);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 2 * kTileRows / 16; i++) {
        const int step = i / 2, part = i % 2;
        Wgmma<Half>::output(out[part], weights + static_cast<uint64_t>(step) * 2,
                            rows + static_cast<uint64_t>(step * 128) + static_cast<uint64_t>(part) * kOutputPart);
    }
    wgmma_commit();
}

template <int SIDE>
__device__ __forceinline__ void store_partial(const DecodeArgs& args, uint32_t shared, uint32_t n, const Output& out,
                                              Softmax& state) {
    const MqaWork work = read_work(shared, n);
    release_work(shared, n);
    const int num_vectors = static_cast<int>(args.num_queries * args.group), t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int v = 0; v < 2; v++) {
        state.sum[v] += __shfl_xor_sync(kAllLanes, state.sum[v], 1);
        state.sum[v] += __shfl_xor_sync(kAllLanes, state.sum[v], 2);
    }
    const uint32_t sums = shared + mqa_shared::kSums + 4 * own_row();
    if (SIDE == 1) {
        if (t == 0) {
            store_shared_4(sums, __float_as_uint(state.sum[0]));
            store_shared_4(sums + 32, __float_as_uint(state.sum[1]));
        }
        arrive_as_warp(shared + mqa_shared::kSumsFull);
    } else {
        mbarrier_wait(shared + mqa_shared::kSumsFull, n & 1);
    }
#pragma unroll
    for (int v = 0; v < 2; v++) {
        const int vector = vector_of(work, v);
        if (vector >= num_vectors) continue;
        const int64_t index = (work.slot * args.kv_heads + work.kv_head) * num_vectors + vector;
        float2* to = reinterpret_cast<float2*>(args.partial_out + index * kMqaWidth + 256 * SIDE) + t;
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const float* const from = &out[i / 16][i % 16 * 4 + 2 * v];
            to[4 * i] = make_float2(from[0], from[1]);
        }
        if (SIDE == 0 && t == 0) {
            const float sum = state.sum[v] + __uint_as_float(load_shared_4(sums + 32 * v));
            reinterpret_cast<float2*>(args.partial_ml)[index] = make_float2(state.reference[v], sum);
        }
    }
}

// A variant for finding errors (TAILPACK_MQA_DUMP): CTA 0 leaves what it had in its first round at args.profile.
//   [0] tile 0 of fp16   [65,536] the queries' image   [131,328] scales and log2 of tile 0   [131,840] scores f32 [64][64]
//   of tile 0, products only   [148,224] weights of side 0, a slab of fp16   [156,416] references of side 0, f32   [156,672]
//   exponent of tile 0
#if defined(TAILPACK_MQA_DUMP)
__device__ __forceinline__ void dump_bytes(const DecodeArgs& args, uint32_t to, uint32_t from, uint32_t bytes) {
    for (uint32_t at = 4 * (threadIdx.x % 128); at < bytes; at += 512)
        *reinterpret_cast<uint32_t*>(reinterpret_cast<uint8_t*>(args.profile) + to + at) = load_shared_4(from + at);
}
__device__ inline void dump_scores(const DecodeArgs& args, uint32_t shared, const float (&scores)[32]) {
    dump_bytes(args, 0, shared + mqa_shared::kTiles, mqa_shared::kTile);
    dump_bytes(args, 65536, shared + mqa_shared::kQueries, kQueryImageBytes);
    dump_bytes(args, 131328, shared + mqa_shared::kScales, 8 * kTileRows);
    dump_bytes(args, 156672, shared + mqa_shared::kExponents, 4);
    float* to = reinterpret_cast<float*>(reinterpret_cast<uint8_t*>(args.profile) + 131840) + 64 * own_row() + 2 * (threadIdx.x % 4);
#pragma unroll
    for (int i = 0; i < 32; i++) to[i / 2 % 2 * 8 * 64 + i / 4 * 8 + i % 2] = scores[i];
}
__device__ inline void dump_weights(const DecodeArgs& args, uint32_t shared) {
    mbarrier_wait(shared + mqa_shared::kWeightsFull, 0); // of all four warps
    dump_bytes(args, 148224, shared + mqa_shared::kWeights, mqa_shared::kSlab);
    dump_bytes(args, 156416, shared + mqa_shared::kReferences, 4 * kMqaVectors);
}
#endif

// Which round and which work item a consumer is at, in one register.
struct Clock {
    uint32_t bits;
    __device__ __forceinline__ uint32_t round() const { return bits & 1; } // its parity is enough
    __device__ __forceinline__ uint32_t work() const { return bits >> 1; }
    __device__ __forceinline__ void end_round() { bits ^= 1; }
    __device__ __forceinline__ void end_work() { bits += 2; }
};

template <int SIDE, typename Half, bool SOFTCAP>
__device__ __forceinline__ void consume_work(const DecodeArgs& args, uint32_t shared, Clock& clock, MqaTimes& times) {
    const int num_rows = read_work(shared, clock.work()).rows;
    const uint32_t scales = shared + mqa_shared::kScales + SIDE * 8 * kTileRows;
    Output out;
    float scores[32];
#pragma unroll
    for (int i = 0; i < 128; i++) out[i / 64][i % 64] = 0.0f;
    float correction[2];
    uint32_t weights[16];
    mbarrier_wait(shared + mqa_shared::kQueriesFull, clock.work() & 1);
    const uint32_t factors = shared + mqa_shared::kFactors + 4 * own_row();
    Softmax state = {{__uint_as_float(load_shared_4(factors)), __uint_as_float(load_shared_4(factors + 32))},
                     {hidden_score(), hidden_score()},
                     {0.0f, 0.0f}};
    for (int first = 0; first < num_rows; first += kPairRows, clock.end_round()) {
        const bool last = first + kPairRows >= num_rows;
        if constexpr (SIDE == 0) {
            start_scores<Half>(scores, shared, SIDE, clock.round(), times);
            times.time<kMqaScoreWait>([] { wgmma_wait<0>(); });
            hold(scores);
            if (last) arrive_as_warp(shared + mqa_shared::kQueriesEmpty);
#if defined(TAILPACK_MQA_DUMP)
            const bool dumps = blockIdx.x == 0 && clock.work() == 0 && first == 0;
            if (dumps) dump_scores(args, shared, scores);
#endif
            weigh<SIDE, Half, SOFTCAP>(args, shared, clock.work(), scores, scales, first, state, correction, weights);
            publish_weights<SIDE>(shared, weights, state);
#if defined(TAILPACK_MQA_DUMP)
            if (dumps) dump_weights(args, shared);
#endif
            correct(out, correction);
            start_own<SIDE, Half>(out, weights, shared);
            times.time<kMqaOutWait>([] { wgmma_wait<0>(); });
            arrive_as_warp(empty_barrier(shared, 0, 0));
            take_references<1>(shared, clock.round(), state, correction, times);
            correct(out, correction);
            start_other<SIDE, Half>(out, shared, clock.round());
            times.time<kMqaOutWait>([] { wgmma_wait<0>(); });
            arrive_as_warp(empty_barrier(shared, 1, 0));
        } else {
            start_scores<Half>(scores, shared, SIDE, clock.round(), times);
            take_references<0>(shared, clock.round(), state, correction, times);
            // Before `out` is touched: the compiler serialises all products otherwise.
            times.time<kMqaScoreWait>([] { wgmma_wait<0>(); });
            hold(scores);
            if (last) arrive_as_warp(shared + mqa_shared::kQueriesEmpty);
            correct(out, correction);
            start_other<SIDE, Half>(out, shared, clock.round());
            __syncwarp(); // or the compiler issues the products in between what follows
            hold(scores);
            weigh<SIDE, Half, SOFTCAP>(args, shared, clock.work(), scores, scales, first + kTileRows, state, correction, weights);
            publish_weights<SIDE>(shared, weights, state);
            times.time<kMqaOutWait>([] { wgmma_wait<0>(); });
            arrive_as_warp(empty_barrier(shared, 0, 1));
            correct(out, correction);
            start_own<SIDE, Half>(out, weights, shared);
            times.time<kMqaOutWait>([] { wgmma_wait<0>(); });
            arrive_as_warp(empty_barrier(shared, 1, 1));
        }
    }
    hold(out);
    store_partial<SIDE>(args, shared, clock.work(), out, state);
}

template <typename T> constexpr bool kIsHalf = false;
template <> constexpr bool kIsHalf<__half> = true;

template <int SIDE, typename T, bool SOFTCAP> __device__ __forceinline__ void consume(const DecodeArgs& args, uint32_t shared) {
    MqaTimes times;
    Clock clock = {};
    if (SIDE == 0 && threadIdx.x < 32) { // the first item's, which the producers do not wait for
        wait_for_dependencies();
        const MqaWork work = read_work(shared, 0);
        if (work.kind >= 0) fetch_queries(args, shared, 0, work);
    }
    for (;; clock.end_work()) {
        const int kind = read_work(shared, clock.work()).kind;
        if (kind < 0) break;
        if (kIsHalf<T> || kind == kPackedPages) consume_work<SIDE, __half, SOFTCAP>(args, shared, clock, times);
        else consume_work<SIDE, T, SOFTCAP>(args, shared, clock, times);
    }
    if constexpr (TAILPACK_PROFILE && SIDE == 0) {
        write_profile<kMqaRowWait>(args, times.ns[kMqaRowWait]);
        write_profile<kMqaScoreWait>(args, times.ns[kMqaScoreWait]);
        write_profile<kMqaWeightWait>(args, times.ns[kMqaWeightWait]);
        write_profile<kMqaOutWait>(args, times.ns[kMqaOutWait]);
        write_profile<kMqaEnd>(args, global_nanoseconds());
        write_profile<kMqaItems>(args, clock.work());
    }
}

// Of kMqaThreads threads and kMqaSharedBytes, one CTA a multiprocessor; any number of CTAs. May be launched programmatically
// dependent on prepare.
template <typename T, bool SOFTCAP> __device__ __forceinline__ void attend_mqa(const DecodeArgs& args, const uint8_t* memory) {
    const uint32_t shared = (shared_address(memory) + 1023) / 1024 * 1024;
    launch_dependents();
    if constexpr (TAILPACK_PROFILE)
        if (threadIdx.x == 0) write_profile<kMqaStart>(args, global_nanoseconds());
    if (threadIdx.x == 0) {
        using namespace mqa_shared;
        for (uint32_t i = 0; i < 4; i++) {
            mbarrier_init(shared + kFull + 8 * i, 4 * kWarpArrivals); // one half's producers
            mbarrier_init(shared + kEmpty + 8 * i, 4 * kWarpArrivals); // one side's warps
        }
        for (uint32_t i = 0; i < 2; i++) {
            mbarrier_init(shared + kWeightsFull + 8 * i, 4 * kWarpArrivals);
            mbarrier_init(shared + kWorkFull + 8 * i, 1);
            mbarrier_init(shared + kWorkEmpty + 8 * i, kMqaThreads / 32 * kWarpArrivals);
        }
        mbarrier_init(shared + kQueriesFull, kStageArrivals);
        mbarrier_init(shared + kQueriesEmpty, 8 * kWarpArrivals);
        mbarrier_init(shared + kSumsFull, 4 * kWarpArrivals);
        mbarrier_init_fence();
    }
    __syncthreads();
    const int warpgroup = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (warpgroup >= 2) {
        give_registers<kProducerRegisters>();
        produce(args, shared, warpgroup - 2);
    } else if (warpgroup == 0) {
        take_registers<kConsumerRegisters>();
        consume<0, T, SOFTCAP>(args, shared);
    } else {
        take_registers<kConsumerRegisters>();
        consume<1, T, SOFTCAP>(args, shared);
    }
}

} // namespace tailpack
