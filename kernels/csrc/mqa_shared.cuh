// Shared memory and barriers of the kernels in mqa.cuh, which says what they are for.
#pragma once

#include "decode_args.cuh"
#include "wgmma.cuh"

namespace tailpack {

constexpr int kMqaWidth = 512;
constexpr int kMqaVectors = 64; // of a work item
constexpr int kTileRows = 64;
constexpr int kPairRows = 2 * kTileRows; // a page
constexpr int kMqaThreads = 4 * 128;
static_assert(kPairRows == kPageTokens);

// Shared memory, in bytes from a multiple of 1,024 on.
namespace mqa_shared {
constexpr uint32_t kSlab = 64 * 128; // 64 rows of 64 halves
constexpr uint32_t kHalf = 4 * kSlab;
constexpr uint32_t kTile = 2 * kHalf;
constexpr uint32_t kTiles = 0;                                  // [2]
constexpr uint32_t kWeights = kTiles + 2 * kTile;               // [side] slab: vectors x rows of a tile
constexpr uint32_t kQueries = kWeights + 2 * kSlab;             // as a tile, and then
constexpr uint32_t kFactors = kQueries + kTile;                 // [vector] f32
constexpr uint32_t kScales = kFactors + 4 * kMqaVectors;        // [tile][row] f32 of the row's values, and its log2; of some tiles
constexpr uint32_t kReferences = kScales + 2 * 8 * kTileRows;   // [side][vector] f32
constexpr uint32_t kSums = kReferences + 2 * 4 * kMqaVectors;   // [vector] f32, of side 1
constexpr uint32_t kWork = kSums + 4 * kMqaVectors;             // [2] MqaWork
constexpr uint32_t kBarriers = kWork + 2 * 32;
constexpr uint32_t kFull = kBarriers, kEmpty = kFull + 32, kWeightsFull = kEmpty + 32, kQueriesFull = kWeightsFull + 16,
                   kQueriesEmpty = kQueriesFull + 8, kSumsFull = kQueriesEmpty + 8, kWorkFull = kSumsFull + 8,
                   kWorkEmpty = kWorkFull + 16;
constexpr uint32_t kExponents = kWorkEmpty + 16; // [tile] f32: rows are those there times 2^this; NaN: times kScales
constexpr uint32_t kEnd = kExponents + 8;
} // namespace mqa_shared
constexpr uint32_t kMqaSharedBytes = mqa_shared::kEnd + 1024; // to reach a multiple of 1,024

__device__ __forceinline__ uint32_t half_address(uint32_t shared, int tile, int half) {
    return shared + mqa_shared::kTiles + static_cast<uint32_t>(tile) * mqa_shared::kTile +
           static_cast<uint32_t>(half) * mqa_shared::kHalf;
}
__device__ __forceinline__ uint32_t full_barrier(uint32_t shared, int tile, int half) {
    return shared + mqa_shared::kFull + static_cast<uint32_t>(16 * tile + 8 * half);
}
__device__ __forceinline__ uint32_t empty_barrier(uint32_t shared, int tile, int half) {
    return shared + mqa_shared::kEmpty + static_cast<uint32_t>(16 * tile + 8 * half);
}

// By a warp, each lane for itself: so a lane's own accesses come before its arrival also in the eyes of compute-sanitizer.
constexpr uint32_t kWarpArrivals = 32;
__device__ __forceinline__ void arrive_as_warp(uint32_t barrier) { mbarrier_arrive(barrier); }

// ---- the phase-timing variant: a row of args.profile for each CTA (kernels/phase_profile.py)

enum MqaProfileSlot {
    kMqaStart,      // mark
    kMqaTileWait,   // the first producing thread, sum of nanoseconds: no tile is free
    kMqaRowWait,    // side 0's first thread: rows are not decoded yet
    kMqaScoreWait,  //   scores are under way
    kMqaWeightWait, //   side 1's weights are not there yet
    kMqaOutWait,    //   weighted rows are under way
    kMqaEnd,        // mark, of side 0
    kMqaItems,      // work items
    kMqaProfileSlots
};
struct MqaTimes {
    uint32_t ns[kMqaProfileSlots] = {};
    template <int SLOT, typename Wait> __device__ __forceinline__ void time(Wait wait) {
        if constexpr (TAILPACK_PROFILE) {
            const uint64_t begin = global_nanoseconds();
            wait();
            ns[SLOT] += static_cast<uint32_t>(global_nanoseconds() - begin);
        } else {
            wait();
        }
    }
};
template <int SLOT> __device__ __forceinline__ void write_profile(const DecodeArgs& args, uint64_t value) {
    if (threadIdx.x % 128 == 0) args.profile[static_cast<int64_t>(blockIdx.x) * kMqaProfileSlots + SLOT] = value;
}

} // namespace tailpack
