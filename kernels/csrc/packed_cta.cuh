// What the warps of the packed attend kernel share (packed.cuh): the tiling, shared memory, and which tails are theirs.
#pragma once

#include "operands.cuh"
#include "plan.cuh"
#include "prepare.cuh"

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
// same order for whoever asks. Each lane looks at one chunk: few have any, and none should wait for the others' lengths.
template <typename Tiling, typename Attend>
__device__ __forceinline__ void for_each_tail(const PackedCta<Tiling>& cta, Attend attend) {
    const DecodeArgs& args = cta.args;
    const int passes = cta.passes(), heads = static_cast<int>(args.kv_heads), chunks = ring_chunks(args);
    const int total = static_cast<int>(args.num_sequences) * chunks * heads * passes;
    const int stride = static_cast<int>(gridDim.x);
    for (int first = static_cast<int>(blockIdx.x); first < total; first += 32 * stride) {
        const int own = first + cta.lane * stride, own_place = own / passes / heads;
        Item item = {};
        if (own < total)
            item = ring_item(cut_sequence<PLAN_PACKED, kRowChunk>(args, own_place / chunks), own_place / chunks, own_place % chunks);
        for (unsigned left = __ballot_sync(kAllLanes, item.count > 0); left != 0; left &= left - 1) {
            const int owner = __ffs(static_cast<int>(left)) - 1, index = first + owner * stride, place = index / passes / heads;
            const Item next = {place / chunks, __shfl_sync(kAllLanes, item.first, owner),
                               __shfl_sync(kAllLanes, item.count, owner), kRingRows};
            attend(next, static_cast<int>(args.max_packed_items) + place, index / passes % heads, index % passes * Tiling::kVectors);
        }
    }
}

} // namespace tailpack
