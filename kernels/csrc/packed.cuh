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
// Launch: kThreads threads, kSharedBytes of dynamic shared memory, kCtas CTAs an SM (all numbers: kernels/decode_tiling.py);
// programmatically dependent on prepare, or plainly. Page planes, strides and scale offsets: multiples of 16 bytes; for
// D <= 128 the scales of a head lie right behind its codes.
//
// A result depends on nothing but the item: warps are told apart by the stages of the item that they had, not by their
// place in the CTA, whose groups begin where the last item ended.
#pragma once

#include "packed_consumer.cuh"
#include "packed_epilogue.cuh"
#include "packed_producer.cuh"

namespace tailpack {

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
    if (cta.warp < Tiling::kConsumers) {
        const uint32_t out_parity = attend_tails<Tiling, T, SOFTCAP>(cta);
        Consumer<Tiling, T, SOFTCAP>(cta, out_parity).run();
    } else if (cta.warp == Tiling::kConsumers) {
        Producer<Tiling>{cta}.run();
    } else {
        Epilogue<Tiling>{cta}.run();
    }
}

} // namespace tailpack
