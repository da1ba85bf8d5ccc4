// How the sequences of a call are cut into items. Read decode_args.cuh first.
//
// Cuts are made of the sequence's own numbers (base, num_tokens, T, window), so that its result does not depend on its
// batch mates. With `seen` the first token that the first query sees:
//   packed pages  [seen / 128, base / 128): the last ones, a sixteenth but at least 16, are cut into splits of up to 4
//                 pages, from their start; the pages before them into splits of up to kLongPages. All long splits come
//                 first in the item list, all short ones last, so that the queue ends with small pieces of work.
//   page rows     tokens [seen, base), from a page boundary on: the pages that would be cut short above in chunks of
//                 kShortChunk tokens, those before them in chunks of PAGE_CHUNK (dense, fp8, shared rows)
//   ring rows     tokens [max(seen, base), num_tokens) in chunks of kRowChunk, rows of the tail ring
// A cell is of one of two kinds:
//   PLAN_PACKED   packed items are listed; the tail's items are not: chunk c of sequence b has slot
//                 max_packed_items + b * ring_chunks(args) + c, and it may be empty (Plan::num_rows counts those that are not).
//   PLAN_ROWS     no packed items; row items, those of pages and then those of the ring, sequence after sequence, are
//                 listed from items + max_packed_items on. Counters::num_rows counts them.
//
// Every function here is for one whole warp, and reads nothing but the call's inputs: the attend kernel and merge may
// call them before wait_for_dependencies. prepare writes what they say, once a call, for batches where each CTA working
// it out again would cost more than reading it (kDirectSequences).
#pragma once

#include "decode_args.cuh"

namespace tailpack {

// Pages of a long split: kernels/decode_tiling.py, for cells that cut pages.
#if !defined(TAILPACK_LONG_PAGES)
#define TAILPACK_LONG_PAGES 16
#endif
constexpr int kLongPages = TAILPACK_LONG_PAGES;
constexpr int kShortPages = 4;         // pages of a short split
constexpr int kShortRegion = 16;       // pages at a sequence's end that are cut short, at least
constexpr int kShortShare = 16;        // and at least this part of those it has
constexpr int kShortChunk = 128;       // tokens of a short chunk of page rows
constexpr int kDirectSequences = 128;  // batches up to it are planned where the plan is needed
constexpr unsigned kAllLanes = 0xffffffffu;

enum ItemKind : int32_t { kPackedPages = 0, kPageRows = 1, kRingRows = 2 };
enum PlanKind : int32_t { PLAN_PACKED = 0, PLAN_ROWS = 1 };

__host__ __device__ constexpr int div_up(int a, int b) { return (a + b - 1) / b; }

// What one sequence is cut into. A padding sequence (num_tokens 0) has nothing of anything.
struct Cut {
    int32_t first_page, short_page, end_page; // long splits [first_page, short_page), short ones [short_page, end_page)
    int32_t num_long, num_short;
    // Tokens read as rows of pages: long chunks of [page_begin, page_short), short ones of [page_short, page_end).
    int32_t page_begin, page_short, page_end, num_long_rows, num_page_rows;
    int32_t ring_begin, ring_end, num_ring_rows; // tokens [begin, end) in the ring, and their chunks
};

__device__ __forceinline__ int first_seen(const DecodeArgs& args, int num_tokens) {
    const int first = num_tokens - static_cast<int>(args.num_queries) - static_cast<int>(args.window) + 1;
    return args.window > 0 && first > 0 ? first : 0;
}

// Of so many pages of a sequence, those at its end that are cut short.
__device__ __forceinline__ int short_pages(int pages) { return min(pages, max(kShortRegion, pages / kShortShare)); }

template <PlanKind KIND, int PAGE_CHUNK> __device__ __forceinline__ Cut cut_sequence(const DecodeArgs& args, int b) {
    const int num_tokens = args.num_tokens[b];
    const int base = min(args.bases[b], num_tokens); // of a padding sequence it may be anything
    const int seen = min(first_seen(args, num_tokens), num_tokens);
    Cut cut = {};
    if constexpr (KIND == PLAN_PACKED) {
        cut.end_page = base / kPageTokens;
        cut.first_page = min(seen / kPageTokens, cut.end_page);
        cut.short_page = cut.end_page - short_pages(cut.end_page - cut.first_page);
        cut.num_long = div_up(cut.short_page - cut.first_page, kLongPages);
        cut.num_short = div_up(cut.end_page - cut.short_page, kShortPages);
    } else {
        cut.page_end = base;
        cut.page_begin = min(seen / kPageTokens * kPageTokens, base);
        const int pages = div_up(cut.page_end - cut.page_begin, kPageTokens);
        cut.page_short = min(cut.page_begin + (pages - short_pages(pages)) * kPageTokens, cut.page_end);
        cut.num_long_rows = div_up(cut.page_short - cut.page_begin, PAGE_CHUNK);
        cut.num_page_rows = cut.num_long_rows + div_up(cut.page_end - cut.page_short, kShortChunk);
    }
    cut.ring_begin = max(seen, base);
    cut.ring_end = num_tokens;
    cut.num_ring_rows = div_up(cut.ring_end - cut.ring_begin, kRowChunk);
    return cut;
}

// Split i of a sequence; long ones and short ones are counted apart.
__device__ __forceinline__ Item long_item(const Cut& cut, int b, int i) {
    const int first = cut.first_page + i * kLongPages;
    return {b, first, min(kLongPages, cut.short_page - first), kPackedPages};
}
__device__ __forceinline__ Item short_item(const Cut& cut, int b, int i) {
    const int first = cut.short_page + i * kShortPages;
    return {b, first, min(kShortPages, cut.end_page - first), kPackedPages};
}
// Chunk i of the ring's rows, an empty item behind the last.
__device__ __forceinline__ Item ring_item(const Cut& cut, int b, int i) {
    const int first = cut.ring_begin + i * kRowChunk;
    return {b, first, max(0, min(kRowChunk, cut.ring_end - first)), kRingRows};
}
template <int PAGE_CHUNK> __device__ __forceinline__ Item row_item(const Cut& cut, int b, int i) {
    if (i >= cut.num_page_rows) return ring_item(cut, b, i - cut.num_page_rows);
    if (i < cut.num_long_rows) {
        const int first = cut.page_begin + i * PAGE_CHUNK;
        return {b, first, min(PAGE_CHUNK, cut.page_short - first), kPageRows};
    }
    const int first = cut.page_short + (i - cut.num_long_rows) * kShortChunk;
    return {b, first, min(kShortChunk, cut.page_end - first), kPageRows};
}

// Ring chunks that a sequence can have at most: the stride of the tail's item slots in PLAN_PACKED cells.
__device__ __forceinline__ int ring_chunks(const DecodeArgs& args) {
    return args.k_tail == nullptr ? 0 : div_up(static_cast<int>(args.ring_rows), kRowChunk);
}

// Sums of item counts over the sequences before b and over all.
struct BatchSums {
    int32_t long_before, short_before, rows_before, num_long, num_short, num_rows;
};

template <PlanKind KIND, int PAGE_CHUNK>
__device__ inline BatchSums sum_batch(const DecodeArgs& args, int b, int lane) {
    BatchSums sums = {};
    for (int s = lane; s < args.num_sequences; s += 32) {
        const Cut cut = cut_sequence<KIND, PAGE_CHUNK>(args, s);
        const int rows = cut.num_page_rows + cut.num_ring_rows;
        sums.num_long += cut.num_long;
        sums.num_short += cut.num_short;
        sums.num_rows += rows;
        if (s < b) {
            sums.long_before += cut.num_long;
            sums.short_before += cut.num_short;
            sums.rows_before += rows;
        }
    }
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) {
        sums.num_long += __shfl_xor_sync(kAllLanes, sums.num_long, distance);
        sums.num_short += __shfl_xor_sync(kAllLanes, sums.num_short, distance);
        sums.num_rows += __shfl_xor_sync(kAllLanes, sums.num_rows, distance);
        sums.long_before += __shfl_xor_sync(kAllLanes, sums.long_before, distance);
        sums.short_before += __shfl_xor_sync(kAllLanes, sums.short_before, distance);
        sums.rows_before += __shfl_xor_sync(kAllLanes, sums.rows_before, distance);
    }
    return sums;
}

template <PlanKind KIND>
__device__ __forceinline__ Plan make_plan(const DecodeArgs& args, int b, const Cut& cut, const BatchSums& sums) {
    const int rows = KIND == PLAN_PACKED ? b * ring_chunks(args) : sums.rows_before;
    return {sums.long_before, cut.num_long, sums.num_long + sums.short_before, cut.num_short,
            rows,             cut.num_page_rows + cut.num_ring_rows, cut.num_page_rows, 0};
}

// The plan of sequence b, worked out from the inputs.
template <PlanKind KIND, int PAGE_CHUNK> __device__ inline Plan plan_sequence(const DecodeArgs& args, int b, int lane) {
    const BatchSums sums = sum_batch<KIND, PAGE_CHUNK>(args, b, lane);
    return make_plan<KIND>(args, b, cut_sequence<KIND, PAGE_CHUNK>(args, b), sums);
}

// Writes the plan and the items of sequence b, and with sequence 0 the counters. One warp, once a sequence.
template <PlanKind KIND, int PAGE_CHUNK> __device__ inline void write_plan(const DecodeArgs& args, int b, int lane) {
    const BatchSums sums = sum_batch<KIND, PAGE_CHUNK>(args, b, lane);
    const Cut cut = cut_sequence<KIND, PAGE_CHUNK>(args, b);
    const Plan plan = make_plan<KIND>(args, b, cut, sums);
    const int num_packed = sums.num_long + sums.num_short;
    // The host sizes the lists for the longest sequences that its page table can hold; beyond it is memory of others.
    if (num_packed > args.max_packed_items || plan.rows + plan.num_rows > args.max_row_items) trap();
    for (int i = lane; i < plan.num_big; i += 32) args.items[plan.packed_big + i] = long_item(cut, b, i);
    for (int i = lane; i < plan.num_small; i += 32) args.items[plan.packed_small + i] = short_item(cut, b, i);
    if constexpr (KIND == PLAN_ROWS)
        for (int i = lane; i < plan.num_rows; i += 32)
            args.items[args.max_packed_items + plan.rows + i] = row_item<PAGE_CHUNK>(cut, b, i);
    if (lane == 0) {
        args.plans[b] = plan;
        if (b == 0) {
            args.counters->next_packed = 0;
            args.counters->num_packed = num_packed;
            args.counters->num_rows = sums.num_rows;
        }
    }
}

// Item `index` of the list that prepare writes, worked out from the inputs; count 0 behind the last. Sequences are looked
// at 32 at a time, so it is for batches up to kDirectSequences.
template <PlanKind KIND, int PAGE_CHUNK = kRowChunk>
__device__ inline Item find_item(const DecodeArgs& args, int index, int lane) {
    const int batch = static_cast<int>(args.num_sequences);
    for (int pass = 0; pass < (KIND == PLAN_PACKED ? 2 : 1); pass++) // long splits, then short ones
        for (int first = 0; first < batch; first += 32) {
            Cut cut = {};
            if (first + lane < batch) cut = cut_sequence<KIND, PAGE_CHUNK>(args, first + lane);
            int count = cut.num_page_rows + cut.num_ring_rows;
            if constexpr (KIND == PLAN_PACKED) count = pass == 0 ? cut.num_long : cut.num_short;
            int end = count; // of this lane's items, once those of the lanes before it are added
#pragma unroll
            for (int distance = 1; distance < 32; distance *= 2) {
                const int before = __shfl_up_sync(kAllLanes, end, distance);
                if (lane >= distance) end += before;
            }
            const unsigned found = __ballot_sync(kAllLanes, index < end && index >= end - count);
            if (found != 0) {
                const int owner = __ffs(static_cast<int>(found)) - 1, i = index - (end - count);
                Item item;
                if constexpr (KIND == PLAN_PACKED)
                    item = pass == 0 ? long_item(cut, first + lane, i) : short_item(cut, first + lane, i);
                else
                    item = row_item<PAGE_CHUNK>(cut, first + lane, i);
                const int kind = KIND == PLAN_PACKED ? kPackedPages : __shfl_sync(kAllLanes, item.kind, owner);
                return {__shfl_sync(kAllLanes, item.sequence, owner), __shfl_sync(kAllLanes, item.first, owner),
                        __shfl_sync(kAllLanes, item.count, owner), kind};
            }
            index -= __shfl_sync(kAllLanes, end, 31);
        }
    return {};
}

} // namespace tailpack
