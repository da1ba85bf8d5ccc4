// Queries and work items of the kernels in mqa.cuh: what `prepare` writes, and the queue of `attend`.
#pragma once

#include "mqa_shared.cuh"
#include "prepare.cuh"

namespace tailpack {

// DecodeArgs::queries of these kernels: [num_sequences][kv_heads][ceil(num_vectors / 64)][2] images of 64 vectors:
//   [64][512] values as a tile lies in shared memory, zeros behind the last vector
//   [64] f32  factors: what the products of a vector with a row's own values must be multiplied with
// Image 0 is for packed rows: rotated, fp16, divided by a power of two that leaves the largest in [1, 2); fp16, because with
// bf16's 8 bits of q the output was seen to err by 1e-2, against 2e-3. Image 1 is for the tail's rows: as they came.
constexpr int64_t kQueryImageBytes = mqa_shared::kTile + 4 * kMqaVectors;

__device__ __forceinline__ int query_blocks(const DecodeArgs& args) {
    return div_up(static_cast<int>(args.num_queries * args.group), kMqaVectors);
}

// Grid and threads as prepare.cuh says.
template <typename T, int VECTORS, bool SOFTCAP> __device__ __forceinline__ void prepare_mqa(const DecodeArgs& args) {
    constexpr int kOwn = kMqaWidth / 32;
    constexpr float kLog2E = 1.44269504f;
    launch_dependents();
    const PreparePlace place = prepare_place<VECTORS>(args);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (warp == VECTORS) {
        if (place.first) write_plan<PLAN_PACKED, kRowChunk>(args, place.sequence, lane);
        return;
    }
    // Weights are 2^x: x = score * log2 e. With softcap the score goes into 1 + 2^(2 log2 e score / cap) first.
    const float factor = SOFTCAP ? 2.0f * kLog2E * args.sm_scale / args.softcap : kLog2E * args.sm_scale;
    const int num_vectors = static_cast<int>(args.num_queries * args.group), blocks = query_blocks(args);
    const int64_t pair = static_cast<int64_t>(place.sequence) * args.kv_heads + place.kv_head;
    // The last CTA writes the zero rows behind the last vector, too.
    const int next = (place.chunk + 1) * VECTORS, end = next < num_vectors ? next : blocks * kMqaVectors;
    for (int vector = place.chunk * VECTORS + warp; vector < end; vector += VECTORS) {
        float x[kOwn] = {};
        if (vector < num_vectors) load_query<T, kMqaWidth>(x, query_row<T>(args, place.sequence, place.kv_head, vector), lane);
        uint8_t* const rotated = args.queries + (pair * blocks + vector / kMqaVectors) * 2 * kQueryImageBytes;
        uint8_t* const plain = rotated + kQueryImageBytes;
        const uint32_t row = static_cast<uint32_t>(vector % kMqaVectors);
        const auto place_of = [&](uint32_t j) { // of element 32 j + lane
            return j / 2 * mqa_shared::kSlab + slab_offset(row, 64 * (j % 2) + 2 * static_cast<uint32_t>(lane));
        };
#pragma unroll
        for (int j = 0; j < kOwn; j++) *reinterpret_cast<T*>(plain + place_of(static_cast<uint32_t>(j))) = T(x[j]);

        rotate_row<kMqaWidth>(x, lane);
        float largest = 0.0f;
#pragma unroll
        for (int j = 0; j < kOwn; j++) largest = fmaxf(largest, fabsf(x[j]));
#pragma unroll
        for (int distance = 16; distance >= 1; distance /= 2)
            largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
        const uint32_t exponent = min(max(__float_as_uint(largest) >> 23, 27u), 227u); // 2^-100 to 2^100, biased by 127
        const float down = __uint_as_float((254 - exponent) << 23), up = __uint_as_float(exponent << 23);
#pragma unroll
        for (int j = 0; j < kOwn; j++)
            *reinterpret_cast<__half*>(rotated + place_of(static_cast<uint32_t>(j))) = __float2half_rn(x[j] * down);
        if (lane == 0) {
            reinterpret_cast<float*>(rotated + mqa_shared::kTile)[row] = up * factor;
            reinterpret_cast<float*>(plain + mqa_shared::kTile)[row] = factor;
        }
    }
}

// ---- the queue

struct MqaWork {
    int32_t kind;     // ItemKind, or -1: no more work
    int32_t sequence, first, rows; // tokens [first, first + rows)
    int32_t slot;     // of the partial result
    int32_t kv_head, block;        // vectors [64 block, 64 block + 64)
    int32_t first_position;        // of query 0
};
static_assert(sizeof(MqaWork) == 32);

__device__ inline MqaWork packed_work(const DecodeArgs& args, const Item& item, int number) {
    const int blocks = query_blocks(args), each = static_cast<int>(args.kv_heads) * blocks, part = number % each;
    return {kPackedPages, item.sequence,  item.first * kPageTokens, item.count * kPageTokens,
            number / each, part / blocks, part % blocks, args.num_tokens[item.sequence] - static_cast<int>(args.num_queries)};
}

// Work `number`: packed items in the plan's order, then the tails' slots, each with all its heads and blocks. rows 0: a slot
// that is empty.
__device__ inline MqaWork find_work(const DecodeArgs& args, int number) {
    const int blocks = query_blocks(args), each = static_cast<int>(args.kv_heads) * blocks;
    const int index = number / each, part = number % each, num_packed = args.counters->num_packed;
    if (index < num_packed) return packed_work(args, args.items[index], number);
    MqaWork work = {};
    work.kv_head = part / blocks;
    work.block = part % blocks;
    const int chunks = ring_chunks(args), tail = index - num_packed;
    if (chunks == 0 || tail >= chunks * static_cast<int>(args.num_sequences)) {
        work.kind = -1;
        return work;
    }
    work.sequence = tail / chunks;
    const Item item = ring_item(cut_sequence<PLAN_PACKED, kRowChunk>(args, work.sequence), work.sequence, tail % chunks);
    work.kind = kRingRows;
    work.first = item.first;
    work.rows = item.count;
    work.slot = static_cast<int>(args.max_packed_items) + tail;
    work.first_position = args.num_tokens[work.sequence] - static_cast<int>(args.num_queries);
    return work;
}
// The same of a CTA's first number, by a whole warp: not waiting for prepare where the inputs say what it will write.
__device__ inline MqaWork first_work(const DecodeArgs& args, int number) {
    if (args.num_sequences <= kDirectSequences) {
        const int each = static_cast<int>(args.kv_heads) * query_blocks(args);
        const Item item = find_item<PLAN_PACKED>(args, number / each, static_cast<int>(threadIdx.x) % 32);
        if (item.count > 0) return packed_work(args, item, number);
    }
    wait_for_dependencies();
    return find_work(args, number);
}

// What read_work has waited for. Of the lanes' own: the compiler does not know that it is the same in all of them.
__device__ __forceinline__ MqaWork peek_work(uint32_t shared, uint32_t n) {
    const uint32_t from = shared + mqa_shared::kWork + n % 2 * 32;
    const uint4 a = load_shared_16(from), b = load_shared_16(from + 16);
    const auto number = [](uint32_t x) { return static_cast<int32_t>(x); };
    return {number(a.x), number(a.y), number(a.z), number(a.w), number(b.x), number(b.y), number(b.z), number(b.w)};
}
// The n-th work item of this CTA. It may be read until this warp releases it, which each warp does once.
__device__ __forceinline__ MqaWork read_work(uint32_t shared, uint32_t n) {
    mbarrier_wait(shared + mqa_shared::kWorkFull + 8 * (n % 2), n / 2 % 2);
    const MqaWork work = peek_work(shared, n);
    // Said to be the same in all lanes: the compiler serialises products in loops that may end lane by lane.
    const auto uniform = [](int32_t x) { return __shfl_sync(kAllLanes, x, 0); };
    return {uniform(work.kind), uniform(work.sequence), uniform(work.first), uniform(work.rows),
            uniform(work.slot), uniform(work.kv_head), uniform(work.block), uniform(work.first_position)};
}
__device__ __forceinline__ void release_work(uint32_t shared, uint32_t n) {
    arrive_as_warp(shared + mqa_shared::kWorkEmpty + 8 * (n % 2));
}

// By the first warp of half 0's producers.
__device__ __forceinline__ void hand_out_work(uint32_t shared, uint32_t n, const MqaWork& work) {
    const uint32_t slot = n % 2, to = shared + mqa_shared::kWork + slot * 32;
    mbarrier_wait(shared + mqa_shared::kWorkEmpty + 8 * slot, n / 2 % 2 ^ 1);
    if (threadIdx.x % 32 == 0) {
        store_shared_16(to, {static_cast<uint32_t>(work.kind), static_cast<uint32_t>(work.sequence),
                             static_cast<uint32_t>(work.first), static_cast<uint32_t>(work.rows)});
        store_shared_16(to + 16, {static_cast<uint32_t>(work.slot), static_cast<uint32_t>(work.kv_head),
                                  static_cast<uint32_t>(work.block), static_cast<uint32_t>(work.first_position)});
        mbarrier_arrive(shared + mqa_shared::kWorkFull + 8 * slot);
    }
}

// The queries of the n-th work item, by one warp, once prepare is complete.
__device__ __forceinline__ void fetch_queries(const DecodeArgs& args, uint32_t shared, uint32_t n, const MqaWork& work) {
    const int64_t pair = work.sequence * args.kv_heads + work.kv_head;
    const int64_t image = (pair * query_blocks(args) + work.block) * 2 + (work.kind == kPackedPages ? 0 : 1);
    mbarrier_wait(shared + mqa_shared::kQueriesEmpty, (n & 1) ^ 1);
    const uint32_t full = shared + mqa_shared::kQueriesFull;
    stage_begin(full, kQueryImageBytes);
    stage_copy(shared + mqa_shared::kQueries, args.queries + image * kQueryImageBytes, kQueryImageBytes, full,
               evict_last_policy());
    stage_end(full);
}

} // namespace tailpack
