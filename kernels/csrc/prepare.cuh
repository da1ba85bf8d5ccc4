// The first launch of a call: writes the plan (plan.cuh) and makes of the queries what the attend kernel wants to read.
//
// Both kernels: one CTA for each (sequence, kv head, VECTORS of its vectors), in this order with the vectors last, grid
//   prepare_ctas = num_sequences * kv_heads * ceil(num_vectors / VECTORS), of 32 * (VECTORS + 1) threads: one warp a
// vector, and one that writes the plan if the CTA is its sequence's first. Launched plainly, behind what wrote the inputs;
// attend may be launched programmatically dependent on it.
//
//   prepare_packed<..>   DecodeArgs::queries = QueryBlock [num_sequences][kv_heads][ceil(num_vectors / VECTORS)]
//   prepare_rows<..>     if ROTATED, DecodeArgs::queries = f32 [num_sequences][kv_heads][num_vectors][D], rotated, unscaled.
#pragma once

#include "plan.cuh"
#include "rotate.cuh"

namespace tailpack {

// Queries of one pass as int8 mma operands. A vector q of D floats, rotated, is n * scale with n in [-32500, 32500], and
// n = 256 hi + lo in two bytes; column 2 i of a column set is the hi of its vector i, column 2 i + 1 the lo.
//   fragments  u32 [set][step / 2][lane][2 * (step % 2) + khalf], D / 32 steps: what lane (g, t) has as B operand word
//              khalf of that step: dims 32 step + 8 t + 4 khalf + 0..3 of column g, the order of page layout 2's keys
//   scales     f32 [VECTORS]: what the integer score times the row's scale must be multiplied with
//   halves     f32 [VECTORS]: sum of n / 2, what the integer score lacks (see decode_codes)
// Vectors behind the last are zeros.
template <int D, int VECTORS> struct QueryBlock {
    static constexpr int kSets = VECTORS / 4;
    static constexpr int kSetBytes = D * 8;
    static constexpr int kScales = kSets * kSetBytes;
    static constexpr int kHalves = kScales + 4 * VECTORS;
    static constexpr int kBytes = kHalves + 4 * VECTORS;
};

template <typename T> __device__ __forceinline__ const T* query_row(const DecodeArgs& args, int b, int kv_head, int vector) {
    const int64_t group = args.group, token = vector / group, head = kv_head * group + vector % group;
    return static_cast<const T*>(args.q) + b * args.q_batch_stride + token * args.q_token_stride +
           head * args.q_head_stride;
}

template <typename T, int D> __device__ __forceinline__ void load_query(float (&x)[D / 32], const T* row, int lane) {
#pragma unroll
    for (int j = 0; j < D / 32; j++) x[j] = static_cast<float>(row[32 * j + lane]);
}

// This CTA's place.
struct PreparePlace {
    int sequence, kv_head, chunk;
    bool first; // of its sequence
};
template <int VECTORS> __device__ __forceinline__ PreparePlace prepare_place(const DecodeArgs& args) {
    const int chunks = div_up(static_cast<int>(args.num_queries * args.group), VECTORS);
    const int heads = static_cast<int>(args.kv_heads);
    const int index = static_cast<int>(blockIdx.x), chunk = index % chunks, pair = index / chunks;
    return {pair / heads, pair % heads, chunk, index % (chunks * heads) == 0};
}

template <int D, typename T, int VECTORS, int KEY_BITS, bool SOFTCAP>
__device__ __forceinline__ void prepare_packed(const DecodeArgs& args) {
    using Block = QueryBlock<D, VECTORS>;
    constexpr int kOwn = D / 32;
    launch_dependents();
    const PreparePlace place = prepare_place<VECTORS>(args);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (warp == VECTORS) {
        if (place.first) write_plan<PLAN_PACKED, kRowChunk>(args, place.sequence, lane);
        return;
    }
    const int num_vectors = static_cast<int>(args.num_queries * args.group), vector = place.chunk * VECTORS + warp;
    uint8_t* block = args.queries + static_cast<int64_t>(blockIdx.x) * Block::kBytes;

    float x[kOwn] = {};
    if (vector < num_vectors) load_query<T, D>(x, query_row<T>(args, place.sequence, place.kv_head, vector), lane);
    rotate_row<D>(x, lane);
    float largest = 0.0f;
    bool finite = true;
#pragma unroll
    for (int j = 0; j < kOwn; j++) {
        finite &= fabsf(x[j]) < __int_as_float(0x7f800000);
        largest = fmaxf(largest, fabsf(x[j]));
    }
    finite = __all_sync(kAllLanes, finite); // integers have no NaN, so the scale says it
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2)
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    const float step = fmaxf(largest, 1e-30f) * (1.0f / 32500.0f), inverse = 32500.0f / fmaxf(largest, 1e-30f);

    int32_t sum = 0;
    const int column = 2 * (warp % 4), t = lane / 8, khalf = lane / 4 % 2;
    uint32_t* fragments = reinterpret_cast<uint32_t*>(block + warp / 4 * Block::kSetBytes);
#pragma unroll
    for (int j = 0; j < kOwn; j++) { // dims 32 j + lane: step j
        const int32_t n = finite ? static_cast<int32_t>(rintf(x[j] * inverse)) : 0;
        const int32_t hi = (n + 128) >> 8, lo = n - 256 * hi;
        sum += n;
        // Four lanes' bytes make a word: exchanged twice, it is whole in all four.
        uint32_t words[2] = {static_cast<uint32_t>(hi & 0xff) << 8 * (lane % 4), static_cast<uint32_t>(lo & 0xff) << 8 * (lane % 4)};
#pragma unroll
        for (int part = 0; part < 2; part++) {
            words[part] |= __shfl_xor_sync(kAllLanes, words[part], 1);
            words[part] |= __shfl_xor_sync(kAllLanes, words[part], 2);
        }
        if (lane % 4 < 2) {
            const int fragment_lane = 4 * (column + lane % 4) + t;
            fragments[(j / 2 * 32 + fragment_lane) * 4 + 2 * (j % 2) + khalf] = lane % 4 == 0 ? words[0] : words[1];
        }
    }
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
    if (lane == 0) {
        constexpr float kLog2 = 1.44269504f; // log2 e
        // The exponent is 2^x: x = score * log2 e. With softcap the score goes into 1 + 2^(2 log2 e score / cap) first.
        const float factor = SOFTCAP ? 2.0f * kLog2 * args.sm_scale / args.softcap : kLog2 * args.sm_scale;
        const bool exists = vector < num_vectors;
        const float scale = finite ? step * Grid<D, KEY_BITS>::step() * factor : __int_as_float(0x7fc00000);
        reinterpret_cast<float*>(block + Block::kScales)[warp] = exists ? scale : 0.0f;
        reinterpret_cast<float*>(block + Block::kHalves)[warp] = 0.5f * static_cast<float>(sum);
    }
}

// For kernels that read rows. PAGE_CHUNK: tokens of a chunk of page rows.
template <int D, typename T, int VECTORS, bool ROTATED, int PAGE_CHUNK = kRowChunk>
__device__ __forceinline__ void prepare_rows(const DecodeArgs& args) {
    launch_dependents();
    const PreparePlace place = prepare_place<VECTORS>(args);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (warp == VECTORS) {
        if (place.first) write_plan<PLAN_ROWS, PAGE_CHUNK>(args, place.sequence, lane);
        return;
    }
    const int num_vectors = static_cast<int>(args.num_queries * args.group), vector = place.chunk * VECTORS + warp;
    if (!ROTATED || vector >= num_vectors) return;
    float x[D / 32];
    load_query<T, D>(x, query_row<T>(args, place.sequence, place.kv_head, vector), lane);
    rotate_row<D>(x, lane);
    const int64_t pair = static_cast<int64_t>(place.sequence) * args.kv_heads + place.kv_head;
    float* out = reinterpret_cast<float*>(args.queries) + (pair * num_vectors + vector) * D;
#pragma unroll
    for (int j = 0; j < D / 32; j++) out[32 * j + lane] = x[j];
}

} // namespace tailpack
