// Attention over packed pages of layout version 2 by integer tensor cores, with the dense tail as one more split.
//
// A CTA is GROUPS groups of WARPS consumer warps, a producer warp and an epilogue warp; CTAs stay until the queue is
// empty. A piece of *work* is (packed item, kv head, pass over VECTORS of its vectors); first ones by blockIdx, later ones
// from Counters::next_packed. A *stage* is kStageTokens tokens of one page and head, keys and values:
//   producer    copies stages into a ring, every group taking each GROUPS-th; puts the queries of each piece of work and a
//               header into one of two slots, ahead of need
//   consumers   a warp has kStageTokens / WARPS tokens of its group's stages and keeps m, l and out in registers; at the
//               end of a piece of work it leaves them in shared memory and goes on
//   epilogue    merges what the warps left and writes the partial result
// First of all, while the producer fills the ring and prepare still runs, the consumers attend the tails that fall to this
// CTA (rows.cuh); their partial results take the same way out.
//
// Numbers. q is 16-bit integers in two bytes, hi and lo in adjacent columns (prepare.cuh): lane (g, t) gets both for
// vector t and row g. P of 32 tokens is block floating point: 2^(x - top) * v_scale * 65280 / largest v_scale, 16 bits in
// two unsigned bytes, again in adjacent columns; so sums over 32 tokens are exact, and out grows in f32. m moves only when
// a tile's top exceeds it by 2^60.
//
// A result depends on nothing but the item: warps are told apart by the stages of the item that they had, not by their
// place in the CTA, whose groups begin where the last item ended.
#pragma once

#include "operands.cuh"
#include "plan.cuh"
#include "prepare.cuh"
#include "rows.cuh"

namespace tailpack {

// All lanes of a consumer warp release a stage, so that each lane's reads are ordered before the copy that overwrites
// them also in the eyes of compute-sanitizer; else one lane does for all, after __syncwarp.
constexpr bool kAllLanesRelease = true;
// Stages before the end of an item at which the producer takes the next from the queue, reads it, and reads its page ids.
// Late, so that no CTA holds work back from an idle one; early enough that the ring does not run dry over three latencies.
constexpr int kTakeAhead = 6, kReadAhead = 4, kPagesAhead = 2;

// args.profile of the phase-timing variant, a CTA's row: nanoseconds of the global timer, and a count.
enum ProfileSlot {
    kProfileStart,
    kProfileDependencies, // producer: prepare is complete
    kProfileFirstPage,    // first consumer warp
    kProfileTail,         // first consumer warp: tails done
    kProfileProducer,     // ends of the roles
    kProfileConsumer,
    kProfileEpilogue,
    kProfileItems, // pieces of work done
    kProfileSlots
};

// The last five are from kernels/decode_tiling.py.
template <int D, int KEY_BITS, int VALUE_BITS, int VECTORS, int GROUPS, int WARPS, int STAGES, int CTAS, int SHARED_BYTES>
struct PackedTiling {
    static_assert(STAGES % GROUPS == 0, "a slot of the ring belongs to one group: parities of two would alias");
    using Keys = Operands<D, KEY_BITS>;
    using Values = Operands<D, VALUE_BITS>;
    using Block = QueryBlock<D, VECTORS>;
    static constexpr int kWidth = D, kGroups = GROUPS, kWarps = WARPS, kStages = STAGES, kCtas = CTAS;
    static constexpr int kVectors = VECTORS, kSets = VECTORS / 4;
    static constexpr int kConsumers = GROUPS * WARPS;
    static constexpr int kThreads = 32 * (kConsumers + 2);
    static constexpr int kStageTokens = D <= 128 ? kPageTokens : kPageTokens * 128 / D;
    static constexpr int kParts = kPageTokens / kStageTokens; // stages of a page
    static constexpr int kWarpGroups = kStageTokens / WARPS / 32; // groups of 32 rows that are a warp's
    static_assert(kWarpGroups * 32 * WARPS == kStageTokens);
    // q's fragments stay in registers where there is room.
    static constexpr bool kQueryInRegisters = D * kSets <= 128;

    // a stage
    static constexpr int kKeyCodes = kStageTokens * D * KEY_BITS / 8, kValueCodes = kStageTokens * D * VALUE_BITS / 8;
    static constexpr int kScaleBytes = kStageTokens * 4;
    static constexpr int kKeyScales = kKeyCodes, kValues = kKeyScales + kScaleBytes, kValueScales = kValues + kValueCodes;
    static constexpr int kStageBytes = kValueScales + kScaleBytes;
    // a query slot: QueryBlock, header
    static constexpr int kHeader = Block::kBytes, kSlotBytes = kHeader + 32;
    // what consumers leave: f32 out [warp][vector][kOutStride], ml [warp][vector][2]
    static constexpr int kOutStride = D + 8; // 8 mod 32: the 16-byte writes of 8 lanes meet every bank once
    // shared memory
    static constexpr int kSlots = STAGES * kStageBytes, kOut = kSlots + 2 * kSlotBytes;
    static constexpr int kMl = kOut + kConsumers * VECTORS * kOutStride * 4;
    static constexpr int kBarriers = kMl + kConsumers * VECTORS * 8;
    static constexpr int kStageFull = kBarriers, kStageEmpty = kStageFull + 8 * STAGES;
    static constexpr int kSlotFull = kStageEmpty + 8 * STAGES, kSlotEmpty = kSlotFull + 16;
    static constexpr int kOutFull = kSlotEmpty + 16, kOutEmpty = kOutFull + 8;
    static constexpr int kSharedBytes = kOutEmpty + 8;
    static_assert(kSharedBytes == SHARED_BYTES, "kernels/decode_tiling.py counts shared memory otherwise");
};

// A piece of work as it is put into a query slot.
struct alignas(16) Header {
    int32_t item;       // index of its partial result
    int32_t kv_head;
    int32_t first_vector;
    int32_t num_stages; // 0: no more work
    int32_t first_token;
    int32_t num_tokens; // of the sequence
    int32_t plain_from; // stages [plain_from, plain_end) are seen by every query, whole
    int32_t plain_end;
};

template <typename Tiling> struct PackedCta {
    const DecodeArgs& args;
    uint8_t* const shared;
    const uint32_t base; // address of `shared`
    const int warp, lane;

    __device__ __forceinline__ const Header* header(int slot) const {
        return reinterpret_cast<const Header*>(shared + Tiling::kSlots + slot * Tiling::kSlotBytes + Tiling::kHeader);
    }
    __device__ __forceinline__ float* out(int warp_, int vector) const {
        return reinterpret_cast<float*>(shared + Tiling::kOut) +
               (warp_ * Tiling::kVectors + vector) * Tiling::kOutStride;
    }
    __device__ __forceinline__ float* ml(int warp_, int vector) const {
        return reinterpret_cast<float*>(shared + Tiling::kMl) + (warp_ * Tiling::kVectors + vector) * 2;
    }
    __device__ __forceinline__ int passes() const {
        return div_up(static_cast<int>(args.num_queries * args.group), Tiling::kVectors);
    }
    template <int SLOT> __device__ __forceinline__ void mark(uint64_t value) const {
        if (lane == 0) args.profile[static_cast<int64_t>(blockIdx.x) * kProfileSlots + SLOT] = value;
    }
};

// Calls attend(item, its slot, kv_head, first_vector) for each tail chunk that falls to this CTA and is not empty, in the
// same order for whoever asks.
template <typename Tiling, typename Attend>
__device__ __forceinline__ void for_each_tail(const PackedCta<Tiling>& cta, Attend attend) {
    const DecodeArgs& args = cta.args;
    const int passes = cta.passes(), heads = static_cast<int>(args.kv_heads), chunks = ring_chunks(args);
    const int total = static_cast<int>(args.num_sequences) * chunks * heads * passes;
    for (int index = static_cast<int>(blockIdx.x); index < total; index += static_cast<int>(gridDim.x)) {
        const int pass = index % passes, head = index / passes % heads, place = index / passes / heads;
        const int b = place / chunks, chunk = place % chunks;
        const Item item = ring_item(cut_sequence<PLAN_PACKED, kRowChunk>(args, b), b, chunk);
        if (item.count > 0) attend(item, static_cast<int>(args.max_packed_items) + place, head, pass * Tiling::kVectors);
    }
}

// ---- producer

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

    __device__ __forceinline__ void wait_for_plan(int per_item) {
        wait_for_dependencies();
        total = __ldcg(&cta.args.counters->num_packed) * per_item;
    }

    // Queries and header of a piece of work, or the end of work, into the next slot.
    __device__ __forceinline__ void publish(int work, int per_item, const Item& item, uint64_t keep) {
        const DecodeArgs& args = cta.args;
        const uint32_t full = cta.base + Tiling::kSlotFull + 8 * slot;
        mbarrier_wait(cta.base + Tiling::kSlotEmpty + 8 * slot, slot_parity);
        const uint32_t bytes = item.count > 0 ? Tiling::Block::kBytes : 0;
        const int passes = cta.passes(), heads = per_item / passes, pass = work % passes, head = work / passes % heads;
        if (cta.lane == 0) {
            Header header = {};
            if (item.count > 0) {
                const int num_tokens = args.num_tokens[item.sequence], queries = static_cast<int>(args.num_queries);
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
            item = find_packed_item(args, work / per_item, cta.lane);
        }
        int pages = page_id(item);
        if (prepared) publish(work, per_item, item, keep);

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
                    publish(work, per_item, item, keep);
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
                    next_pages = page_id(next);
                    step = 3;
                } else if (step == 3 && i + 1 >= num_stages) { // not before: it waits for the consumers to be past
                    publish(next_work, per_item, next, keep);  // the piece of work before this one
                    step = 4;
                }
            }
            work = next_work, item = next, pages = next_pages;
            num_items++;
        }
        if (!prepared) { // no work at all: still, no CTA ends before prepare does, for merge waits for this launch alone
            wait_for_plan(per_item);
            publish(0, per_item, item, keep);
        }
        if constexpr (TAILPACK_PROFILE) {
            cta.template mark<kProfileProducer>(global_nanoseconds());
            cta.template mark<kProfileItems>(static_cast<uint64_t>(num_items));
        }
    }
};

// ---- consumers

template <typename Tiling, typename T, bool SOFTCAP> struct Consumer {
    static constexpr int D = Tiling::kWidth, kGroups = Tiling::kGroups, kWarps = Tiling::kWarps;
    static constexpr int kSets = Tiling::kSets, kSteps = D / 16, kRowGroups = Tiling::kWarpGroups;
    using Keys = typename Tiling::Keys;
    using Values = typename Tiling::Values;
    static constexpr float kLowest = -1e38f; // stands for -inf where a difference of two could be NaN
    static constexpr float kRescale = 60.0f; // m moves when a tile's top is 2^60 above it

    const PackedCta<Tiling>& cta;
    const int g, t, group, warp_in_group;
    const uint32_t queries; // address of the lane's words in slot 0
    const Opaque opaque;

    int stage; // of the ring, the group's next
    uint32_t stage_parity = 0;
    uint32_t slot_parity = 0, out_parity = 1;
    int slot = 0;

    float out[kSets][kSteps][2]; // dims 32 (k / 2) + 4 g + 2 (k % 2) + 0, 1 of vector t
    float m[kSets], l[kSets], halves[kSets];
    uint32_t q[kSets][Tiling::kQueryInRegisters ? kSteps : 1];
    float q_scale[kSets], q_half[kSets];

    __device__ __forceinline__ explicit Consumer(const PackedCta<Tiling>& cta_)
        : cta(cta_), g(cta_.lane / 4), t(cta_.lane % 4), group(cta_.warp / kWarps), warp_in_group(cta_.warp % kWarps),
          queries(cta_.base + Tiling::kSlots + 16 * cta_.lane),
          opaque(Opaque::make<D>(cta_.args.minus_one)), stage(cta_.warp / kWarps) {}

    __device__ __forceinline__ void arrive_all(uint32_t barrier, bool all_lanes) const {
        if (all_lanes) {
            mbarrier_arrive(barrier);
        } else {
            __syncwarp();
            if (cta.lane == 0) mbarrier_arrive(barrier);
        }
    }

    // B operand of steps `first`, first + 1 of a row's dims.
    __device__ __forceinline__ void load_query(uint32_t (&b)[4], int set, int first, uint32_t slot_queries) const {
        const uint4 w = load_shared_16(slot_queries + set * Tiling::Block::kSetBytes + first / 2 * 512);
        b[0] = w.x, b[1] = w.y, b[2] = w.z, b[3] = w.w;
    }
    // Words of step `first` + i, i < 2.
    __device__ __forceinline__ void query_steps(uint32_t (&b)[2][kSets][2], int first, uint32_t slot_queries) const {
#pragma unroll
        for (int set = 0; set < kSets; set++) {
            uint32_t four[4];
            if constexpr (Tiling::kQueryInRegisters) {
#pragma unroll
                for (int i = 0; i < 4; i++) four[i] = q[set][2 * first + i];
            } else {
                load_query(four, set, first, slot_queries);
            }
            b[0][set][0] = four[0], b[0][set][1] = four[1], b[1][set][0] = four[2], b[1][set][1] = four[3];
        }
    }

    // Integer scores of 32 rows: c[half of 16 rows][set][4].
    __device__ __forceinline__ void score(int32_t (&c)[2][kSets][4], uint32_t codes, uint32_t slot_queries) const {
        const uint32_t lane_codes = codes + 16 * cta.lane;
        constexpr int kRowSteps = D / 32; // steps of 16 rows
        if constexpr (kRowSteps == 2) {   // one quad is both halves
            uint32_t b[2][kSets][2], n[8];
            query_steps(b, 0, slot_queries);
            Keys::load(n, lane_codes, 0);
#pragma unroll
            for (int i = 0; i < 4; i++)
                Keys::template multiply<false, kSets>(c[i / 2], n[2 * i], n[2 * i + 1], b[i % 2], opaque);
        } else {
#pragma unroll
            for (int first = 0; first < kRowSteps; first += 4) {
                uint32_t b[2][2][kSets][2];
                query_steps(b[0], first, slot_queries);
                query_steps(b[1], first + 2, slot_queries);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t n[8];
                    Keys::load(n, lane_codes, (half * kRowSteps + first) / 4);
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        Keys::template multiply<false, kSets>(c[half], n[2 * i], n[2 * i + 1], b[i / 2][i % 2], opaque);
                }
            }
        }
    }

    static __device__ __forceinline__ float joined(int32_t hi, int32_t lo) { return static_cast<float>(hi * 256 + lo); }

    // -inf for the rows of a group of 32 that its vector does not see. Rows g + 8 i are x[i]; `token` is row 0's.
    __device__ __forceinline__ void mask(float (&x)[kSets][4], int token, const Header& header) const {
        const DecodeArgs& args = cta.args;
        const int queries_ = static_cast<int>(args.num_queries), group_ = static_cast<int>(args.group);
#pragma unroll
        for (int set = 0; set < kSets; set++) {
            const int vector = header.first_vector + 4 * set + t;
            const int position = header.num_tokens - queries_ + min(vector / group_, queries_ - 1);
            const int first = args.window > 0 ? position - static_cast<int>(args.window) + 1 : 0;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int row = token + g + 8 * i;
                if (row < first || row > position) x[set][i] = minus_infinity();
            }
        }
    }

    __device__ __forceinline__ void attend_stage(int index, uint32_t slot_queries) {
        const uint32_t full = cta.base + Tiling::kStageFull + 8 * stage, empty = cta.base + Tiling::kStageEmpty + 8 * stage;
        const uint32_t at = cta.base + stage * Tiling::kStageBytes;
        mbarrier_wait(full, stage_parity);

        float x[kRowGroups][kSets][4];
        float4 v_scale[kRowGroups];
#pragma unroll
        for (int r = 0; r < kRowGroups; r++) {
            const int rows = warp_in_group * kRowGroups + r; // group of 32 rows in the stage
            const float4 k_scale = load_shared_f4(at + Tiling::kKeyScales + rows * 128 + g * 16);
            v_scale[r] = load_shared_f4(at + Tiling::kValueScales + rows * 128 + g * 16);
            int32_t c[2][kSets][4] = {};
            score(c, at + rows * Keys::kGroupBytes, slot_queries);
            const float k[4] = {k_scale.x, k_scale.y, k_scale.z, k_scale.w};
#pragma unroll
            for (int set = 0; set < kSets; set++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float sum = joined(c[i / 2][set][2 * (i % 2)], c[i / 2][set][2 * (i % 2) + 1]) + q_half[set];
                    x[r][set][i] = sum * (k[i] * q_scale[set]);
                    if constexpr (SOFTCAP) { // cap tanh(s / cap) = cap (1 - 2 / (1 + e^(2 s / cap))), times log2 e
                        const float cap = cta.args.softcap * kLog2e;
                        x[r][set][i] = cap - divide_fast(2.0f * cap, 1.0f + exp2_fast(x[r][set][i]));
                    }
                }
        }
        const Header* header = cta.header(slot);
        const bool masked = index < header->plain_from || index >= header->plain_end;
        if (masked) {
#pragma unroll
            for (int r = 0; r < kRowGroups; r++)
                mask(x[r], header->first_token + index * Tiling::kStageTokens + (warp_in_group * kRowGroups + r) * 32, *header);
        }

        // Block floating point of P: by the largest score a vector, and the largest scale of V.
        float top[kSets], largest = 0.0f;
#pragma unroll
        for (int set = 0; set < kSets; set++) top[set] = kLowest;
#pragma unroll
        for (int r = 0; r < kRowGroups; r++) {
#pragma unroll
            for (int set = 0; set < kSets; set++)
                top[set] = fmaxf(top[set], fmaxf(fmaxf(x[r][set][0], x[r][set][1]), fmaxf(x[r][set][2], x[r][set][3])));
            largest = fmaxf(largest, fmaxf(fmaxf(v_scale[r].x, v_scale[r].y), fmaxf(v_scale[r].z, v_scale[r].w)));
        }
        bool rises = false;
#pragma unroll
        for (int set = 0; set < kSets; set++) {
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2)
                top[set] = fmaxf(top[set], __shfl_xor_sync(kAllLanes, top[set], distance));
            rises |= top[set] > m[set] + kRescale;
        }
        largest = fmaxf(__uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(largest))), 1e-30f);
        if (__any_sync(kAllLanes, rises)) {
#pragma unroll
            for (int set = 0; set < kSets; set++) {
                const float risen = fmaxf(m[set], top[set]), kept = exp2_fast(m[set] - risen);
                m[set] = risen;
                l[set] *= kept;
                halves[set] *= kept;
#pragma unroll
                for (int k = 0; k < kSteps; k++) out[set][k][0] *= kept, out[set][k][1] *= kept;
            }
        }

        const float to_integer = divide_fast(65280.0f, largest);
        constexpr float kMagic = 8388608.0f; // 2^23: its last bits are ones
        float unit[kSets]; // what an integer of this tile is worth in out
        uint32_t p[kRowGroups][kSets][2];
#pragma unroll
        for (int set = 0; set < kSets; set++) {
            const float worth = exp2_fast(top[set] - m[set]);
            unit[set] = worth * (largest * (1.0f / 65280.0f));
            float sum = 0.0f, integers = 0.0f;
#pragma unroll
            for (int r = 0; r < kRowGroups; r++) {
                const float v[4] = {v_scale[r].x, v_scale[r].y, v_scale[r].z, v_scale[r].w};
                float e[4], n[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    e[i] = exp2_fast(x[r][set][i] - top[set]);
                    n[i] = fmaf(e[i], v[i] * to_integer, kMagic);
                }
                sum += (e[0] + e[1]) + (e[2] + e[3]);
                integers += ((n[0] - kMagic) + (n[1] - kMagic)) + ((n[2] - kMagic) + (n[3] - kMagic));
#pragma unroll
                for (int khalf = 0; khalf < 2; khalf++) // hi of rows g, g + 8, then lo of the same: columns 2 t, 2 t + 1
                    p[r][set][khalf] = transpose_8x8(
                        permute(__float_as_uint(n[2 * khalf]), __float_as_uint(n[2 * khalf + 1]), 0x4051));
            }
            l[set] = fmaf(sum, worth, l[set]);
            halves[set] = fmaf(integers, unit[set], halves[set]);
        }

#pragma unroll
        for (int quad = 0; quad < Values::kQuads; quad++) {
            int32_t c[4][kSets][4] = {};
#pragma unroll
            for (int r = 0; r < kRowGroups; r++) {
                uint32_t n[8];
                const uint32_t codes = at + Tiling::kValues + (warp_in_group * kRowGroups + r) * Values::kGroupBytes;
                Values::load(n, codes + 16 * cta.lane, quad);
#pragma unroll
                for (int i = 0; i < 4; i++)
                    Values::template multiply<true, kSets>(c[i], n[2 * i], n[2 * i + 1], p[r], opaque);
            }
            if (quad == Values::kQuads - 1) arrive_all(empty, kAllLanesRelease);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int set = 0; set < kSets; set++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        float& sum = out[set][4 * quad + i][half];
                        sum = fmaf(joined(c[i][set][2 * half], c[i][set][2 * half + 1]), unit[set], sum);
                    }
        }
        stage += kGroups;
        if (stage >= Tiling::kStages) stage -= Tiling::kStages, stage_parity ^= 1;
    }

    // Into shared memory, as logical warp `place` of the piece of work.
    __device__ __forceinline__ void leave(int place) {
        mbarrier_wait(cta.base + Tiling::kOutEmpty, out_parity);
        out_parity ^= 1;
#pragma unroll
        for (int set = 0; set < kSets; set++) {
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                l[set] += __shfl_xor_sync(kAllLanes, l[set], distance);
                halves[set] += __shfl_xor_sync(kAllLanes, halves[set], distance);
            }
            const float half = 0.5f * halves[set];
            constexpr float kStep = Grid<D, Values::kBits>::step();
            float* to = cta.out(place, 4 * set + t) + 4 * g;
#pragma unroll
            for (int c = 0; c < D / 32; c++) {
                const float(&even)[2] = out[set][2 * c], (&odd)[2] = out[set][2 * c + 1];
                *reinterpret_cast<float4*>(to + 32 * c) = make_float4((even[0] + half) * kStep, (even[1] + half) * kStep,
                                                                      (odd[0] + half) * kStep, (odd[1] + half) * kStep);
            }
            if (g == 0)
                *reinterpret_cast<float2*>(cta.ml(place, 4 * set + t)) =
                    make_float2(l[set] > 0.0f ? m[set] : minus_infinity(), l[set]);
        }
        arrive_all(cta.base + Tiling::kOutFull, true);
    }

    __device__ __forceinline__ void run() {
        using Tail = RingRows<DenseFormat<D, T>>;
        constexpr int kTiles = kRowChunk / kTileRows / Tiling::kConsumers;
        for_each_tail(cta, [&](const Item& item, int, int kv_head, int first_vector) {
            mbarrier_wait(cta.base + Tiling::kOutEmpty, out_parity);
            out_parity ^= 1;
            attend_rows_warp<D, T, Tail, Tiling::kVectors, SOFTCAP, kTiles>(
                cta.args, Tail(cta.args, item, kv_head), item, kv_head, first_vector, cta.warp, Tiling::kConsumers,
                cta.out(cta.warp, 0), Tiling::kOutStride, cta.ml(cta.warp, 0));
            arrive_all(cta.base + Tiling::kOutFull, true);
        });
        if constexpr (TAILPACK_PROFILE)
            if (cta.warp == 0) cta.template mark<kProfileTail>(global_nanoseconds());

        int index = group; // of the group's next stage in the piece of work
        bool first = true;
        for (;;) {
            mbarrier_wait(cta.base + Tiling::kSlotFull + 8 * slot, slot_parity);
            const int num_stages = cta.header(slot)->num_stages;
            if (num_stages == 0) break;
            const uint32_t slot_queries = queries + slot * Tiling::kSlotBytes;
            const float* scales = reinterpret_cast<const float*>(cta.shared + Tiling::kSlots + slot * Tiling::kSlotBytes +
                                                                 Tiling::Block::kScales);
#pragma unroll
            for (int set = 0; set < kSets; set++) {
                q_scale[set] = scales[4 * set + t];
                q_half[set] = scales[4 * kSets + 4 * set + t];
                m[set] = minus_infinity(), l[set] = 0.0f, halves[set] = 0.0f;
#pragma unroll
                for (int k = 0; k < kSteps; k++) out[set][k][0] = 0.0f, out[set][k][1] = 0.0f;
                if constexpr (Tiling::kQueryInRegisters)
#pragma unroll
                    for (int step = 0; step < D / 32; step += 2) {
                        uint32_t four[4];
                        load_query(four, set, step, slot_queries);
#pragma unroll
                        for (int i = 0; i < 4; i++) q[set][2 * step + i] = four[i];
                    }
            }
            const int place = index * kWarps + warp_in_group;
            for (; index < num_stages; index += kGroups) {
                attend_stage(index, slot_queries);
                if constexpr (TAILPACK_PROFILE) {
                    if (first && cta.warp == 0) cta.template mark<kProfileFirstPage>(global_nanoseconds());
                    first = false;
                }
            }
            index -= num_stages;
            arrive_all(cta.base + Tiling::kSlotEmpty + 8 * slot, kAllLanesRelease);
            slot ^= 1;
            slot_parity ^= slot == 0;
            leave(place);
        }
        if constexpr (TAILPACK_PROFILE)
            if (cta.warp == 0) cta.template mark<kProfileConsumer>(global_nanoseconds());
    }
};

// ---- epilogue

template <typename Tiling> struct Epilogue {
    static constexpr int D = Tiling::kWidth, kOwn = D / 32;
    const PackedCta<Tiling>& cta;
    uint32_t out_parity = 0;

    // Merges what the consumer warps leave next and writes it as the partial result of (item, kv_head, first_vector..).
    __device__ __forceinline__ void merge(int item, int kv_head, int first_vector) {
        const DecodeArgs& args = cta.args;
        const int num_vectors = static_cast<int>(args.num_queries * args.group), count = min(Tiling::kVectors, num_vectors - first_vector);
        const int64_t place = (static_cast<int64_t>(item) * args.kv_heads + kv_head) * num_vectors + first_vector;
        mbarrier_wait(cta.base + Tiling::kOutFull, out_parity);
        out_parity ^= 1;
#pragma unroll 1
        for (int vector = 0; vector < count; vector++) {
            float weight[Tiling::kConsumers], top = -1e38f, l = 0.0f;
            float2 ml[Tiling::kConsumers];
#pragma unroll
            for (int w = 0; w < Tiling::kConsumers; w++) {
                ml[w] = *reinterpret_cast<const float2*>(cta.ml(w, vector));
                top = fmaxf(top, ml[w].x);
            }
#pragma unroll
            for (int w = 0; w < Tiling::kConsumers; w++) {
                weight[w] = exp2_fast(ml[w].x - top);
                l = fmaf(weight[w], ml[w].y, l);
            }
            float* to = args.partial_out + (place + vector) * D;
            constexpr int kWide = kOwn < 4 ? kOwn : 4; // floats of one access
#pragma unroll
            for (int c = 0; c < D; c += 32 * kWide) {
                const int dim = c + kWide * cta.lane;
                float sum[kWide] = {};
#pragma unroll
                for (int w = 0; w < Tiling::kConsumers; w++) {
                    const float* from = cta.out(w, vector) + dim;
                    float value[kWide];
                    if constexpr (kWide == 4) {
                        const float4 four = *reinterpret_cast<const float4*>(from);
                        value[0] = four.x, value[1] = four.y, value[2] = four.z, value[3] = four.w;
                    } else {
                        const float2 two = *reinterpret_cast<const float2*>(from);
                        value[0] = two.x, value[1] = two.y;
                    }
#pragma unroll
                    for (int i = 0; i < kWide; i++) sum[i] = fmaf(weight[w], value[i], sum[i]);
                }
                if constexpr (kWide == 4) __stcg(reinterpret_cast<float4*>(to + dim), make_float4(sum[0], sum[1], sum[2], sum[3]));
                else __stcg(reinterpret_cast<float2*>(to + dim), make_float2(sum[0], sum[1]));
            }
            if (cta.lane == 0)
                __stcg(reinterpret_cast<float2*>(args.partial_ml + (place + vector) * 2),
                       make_float2(l > 0.0f ? top : minus_infinity(), l));
        }
        mbarrier_arrive(cta.base + Tiling::kOutEmpty);
    }

    __device__ __forceinline__ void run() {
        for_each_tail(cta, [&](const Item&, int item, int kv_head, int first_vector) { merge(item, kv_head, first_vector); });
        uint32_t slot_parity = 0;
        for (int slot = 0;; slot ^= 1, slot_parity ^= slot == 0) {
            mbarrier_wait(cta.base + Tiling::kSlotFull + 8 * slot, slot_parity);
            const Header header = *cta.header(slot);
            if (header.num_stages == 0) break;
            mbarrier_arrive(cta.base + Tiling::kSlotEmpty + 8 * slot);
            merge(header.item, header.kv_head, header.first_vector);
        }
        if constexpr (TAILPACK_PROFILE) cta.template mark<kProfileEpilogue>(global_nanoseconds());
    }
};

// The attend kernel's body: kThreads threads, kSharedBytes of dynamic shared memory.
template <typename Tiling, typename T, bool SOFTCAP>
__device__ __forceinline__ void attend_packed(const DecodeArgs& args, uint8_t* shared) {
    const PackedCta<Tiling> cta = {args, shared, shared_address(shared), static_cast<int>(threadIdx.x / 32),
                                   static_cast<int>(threadIdx.x % 32)};
    if constexpr (TAILPACK_PROFILE)
        if (threadIdx.x == 0) cta.template mark<kProfileStart>(global_nanoseconds());
    if (threadIdx.x == 0) {
        constexpr uint32_t kReleases = kAllLanesRelease ? 32 : 1;
        for (int i = 0; i < Tiling::kStages; i++) {
            mbarrier_init(cta.base + Tiling::kStageFull + 8 * i, kStageArrivals);
            mbarrier_init(cta.base + Tiling::kStageEmpty + 8 * i, Tiling::kWarps * kReleases);
        }
        for (int i = 0; i < 2; i++) {
            mbarrier_init(cta.base + Tiling::kSlotFull + 8 * i, kStageArrivals + 1);
            mbarrier_init(cta.base + Tiling::kSlotEmpty + 8 * i, Tiling::kConsumers * kReleases + 32);
        }
        mbarrier_init(cta.base + Tiling::kOutFull, Tiling::kConsumers * 32);
        mbarrier_init(cta.base + Tiling::kOutEmpty, 32);
        mbarrier_init_fence();
    }
    __syncthreads();
    launch_dependents();
    if (cta.warp < Tiling::kConsumers) Consumer<Tiling, T, SOFTCAP>(cta).run();
    else if (cta.warp == Tiling::kConsumers) Producer<Tiling>{cta}.run();
    else Epilogue<Tiling>{cta}.run();
}

} // namespace tailpack
