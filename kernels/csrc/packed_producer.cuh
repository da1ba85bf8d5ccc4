// The producer warp of the packed attend kernel: the queue of work, the ring of stages, the slots of queries.
#pragma once

#include "packed_cta.cuh"

namespace tailpack {

template <typename Tiling> struct Producer {
    const PackedCta<Tiling>& cta;
    int stage = 0;
    uint32_t stage_parity = 1; // of a barrier's phase that is over: at first all stages are empty
    int slot = 0;
    uint32_t slot_parity = 1;
    int total = 0; // pieces of work; known once prepare is complete

    __device__ __forceinline__ Item listed(int work, int per_item) const {
        Item item = {};
        if (work < total) item = cta.args.items[work / per_item];
        return item;
    }
    __device__ __forceinline__ int page_id(const Item& item) const { // of the lane's page
        const int32_t* table = cta.args.page_table + item.sequence * cta.args.table_stride + item.first;
        return cta.lane < item.count ? __ldg(table + cta.lane) : 0;
    }

    __device__ __forceinline__ int length(const Item& item) const { return __ldg(cta.args.num_tokens + item.sequence); }

    __device__ __forceinline__ void wait_for_plan(int per_item) {
        wait_for_dependencies();
        total = __ldcg(&cta.args.counters->num_packed) * per_item;
    }

    // Queries and header of a piece of work, or the end of work, into the next slot.
    __device__ __forceinline__ void publish(int work, int per_item, const Item& item, int num_tokens, uint64_t keep) {
        const DecodeArgs& args = cta.args;
        const uint32_t full = cta.base + Tiling::kSlotFull + 8 * slot;
        mbarrier_wait(cta.base + Tiling::kSlotEmpty + 8 * slot, slot_parity);
        const uint32_t bytes = item.count > 0 ? Tiling::Block::kBytes : 0;
        const int passes = cta.passes(), heads = per_item / passes, pass = work % passes, head = work / passes % heads;
        if (cta.lane == 0) {
            Header header = {};
            if (item.count > 0) {
                const int queries = static_cast<int>(args.num_queries);
                const int window = static_cast<int>(args.window), first_token = item.first * kPageTokens;
                const int seen_by_last = window > 0 ? max(0, num_tokens - window) : 0; // and by all before it
                const int unseen_by_first = num_tokens - queries + 1;
                constexpr int kTokens = Tiling::kStageTokens;
                header.item = work / per_item;
                header.kv_head = head;
                header.first_vector = pass * Tiling::kVectors;
                header.num_stages = item.count * Tiling::kParts;
                header.first_token = first_token;
                header.num_tokens = num_tokens;
                header.plain_from = div_up(max(0, seen_by_last - first_token), kTokens);
                header.plain_end = max(0, unseen_by_first - first_token) / kTokens;
            }
            *const_cast<Header*>(cta.header(slot)) = header;
        }
        stage_begin(full, bytes);
        if (bytes > 0) {
            const int64_t block = (static_cast<int64_t>(item.sequence) * heads + head) * passes + pass;
            stage_copy(cta.base + Tiling::kSlots + slot * Tiling::kSlotBytes, args.queries + block * Tiling::Block::kBytes,
                       bytes, full, keep);
        }
        stage_end(full);
        if (cta.lane == 0) mbarrier_arrive(full); // for the header
        slot ^= 1;
        slot_parity ^= slot == 0;
    }

    __device__ __forceinline__ void copy_stage(int64_t page, int part, int head, uint64_t stream) {
        const DecodeArgs& args = cta.args;
        const uint32_t full = cta.base + Tiling::kStageFull + 8 * stage, to = cta.base + stage * Tiling::kStageBytes;
        const uint8_t* keys = args.k_pages + page * args.page_stride + head * args.k_head_stride;
        const uint8_t* values = args.v_pages + page * args.page_stride + head * args.v_head_stride;
        mbarrier_wait(cta.base + Tiling::kStageEmpty + 8 * stage, stage_parity);
        stage_begin(full, Tiling::kStageBytes);
        if constexpr (Tiling::kParts == 1) { // scales lie right behind the codes
            stage_copy(to, keys, Tiling::kKeyCodes + Tiling::kScaleBytes, full, stream);
            stage_copy(to + Tiling::kValues, values, Tiling::kValueCodes + Tiling::kScaleBytes, full, stream);
        } else {
            stage_copy(to, keys + part * Tiling::kKeyCodes, Tiling::kKeyCodes, full, stream);
            stage_copy(to + Tiling::kKeyScales, keys + args.k_scales_offset + part * Tiling::kScaleBytes,
                       Tiling::kScaleBytes, full, stream);
            stage_copy(to + Tiling::kValues, values + part * Tiling::kValueCodes, Tiling::kValueCodes, full, stream);
            stage_copy(to + Tiling::kValueScales, values + args.v_scales_offset + part * Tiling::kScaleBytes,
                       Tiling::kScaleBytes, full, stream);
        }
        stage_end(full);
        if (++stage == Tiling::kStages) stage = 0, stage_parity ^= 1;
    }

    __device__ __forceinline__ void run() {
        const DecodeArgs& args = cta.args;
        const uint64_t stream = evict_first_policy(), keep = evict_last_policy();
        const int passes = cta.passes(), heads = static_cast<int>(args.kv_heads), per_item = heads * passes;
        int work = static_cast<int>(blockIdx.x), num_items = 0;
        bool prepared = args.num_sequences > kDirectSequences;
        Item item;
        if (prepared) {
            wait_for_plan(per_item);
            item = listed(work, per_item);
        } else {
            item = find_item<PLAN_PACKED>(args, work / per_item, cta.lane);
        }
        int pages = page_id(item), num_tokens = length(item);
        if (prepared) publish(work, per_item, item, num_tokens, keep);

        while (item.count > 0) {
            const int num_stages = item.count * Tiling::kParts, head = work / passes % heads;
            int ticket = 0, next_work = 0, next_pages = 0;
            Item next = {};
            int step = 0; // of finding the next piece of work
            for (int i = 0; i < num_stages || step < 4; i++) {
                if (i < num_stages) {
                    const int64_t page = __shfl_sync(kAllLanes, pages, i / Tiling::kParts);
                    copy_stage(page, i % Tiling::kParts, head, stream);
                }
                if (!prepared) {
                    // The ring is full, or holds the item: nothing more can be done without the queries.
                    if (i + 1 < min(Tiling::kStages, num_stages)) continue;
                    wait_for_plan(per_item);
                    if constexpr (TAILPACK_PROFILE) cta.template mark<kProfileDependencies>(global_nanoseconds());
                    publish(work, per_item, item, num_tokens, keep);
                    prepared = true;
                }
                if (step == 0 && i + kTakeAhead >= num_stages) {
                    if (cta.lane == 0) ticket = atomicAdd(&args.counters->next_packed, 1);
                    step = 1;
                } else if (step == 1 && i + kReadAhead >= num_stages) {
                    next_work = static_cast<int>(gridDim.x) + __shfl_sync(kAllLanes, ticket, 0);
                    next = listed(next_work, per_item);
                    step = 2;
                } else if (step == 2 && i + kPagesAhead >= num_stages) {
                    next_pages = page_id(next), num_tokens = length(next);
                    step = 3;
                } else if (step == 3 && i + 1 >= num_stages) { // not before: it waits for the consumers to be past
                    publish(next_work, per_item, next, num_tokens, keep);  // the piece of work before this one
                    step = 4;
                }
            }
            work = next_work, item = next, pages = next_pages;
            num_items++;
        }
        if (!prepared) { // no work at all: still, no CTA ends before prepare does, for merge waits for this launch alone
            wait_for_plan(per_item);
            publish(0, per_item, item, 0, keep);
        }
        if constexpr (TAILPACK_PROFILE) {
            cta.template mark<kProfileProducer>(global_nanoseconds());
            cta.template mark<kProfileItems>(static_cast<uint64_t>(num_items));
        }
    }
};

} // namespace tailpack
