// The epilogue warp of the packed attend kernel.
#pragma once

#include "packed_cta.cuh"

namespace tailpack {

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

} // namespace tailpack
