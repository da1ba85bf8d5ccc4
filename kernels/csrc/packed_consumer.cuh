// The consumer warps of the packed attend kernel: scores, softmax and output of their rows.
#pragma once

#include "packed_cta.cuh"
#include "rows.cuh"

namespace tailpack {

template <int D, typename T> struct TailFormat : DenseFormat<D, T> {
    static constexpr int kPairsAhead = 2; // registers are few here, and other warps' loads many
};

// Attends this CTA's tails; returns the parity of the phase of kOutEmpty that comes next.
template <typename Tiling, typename T, bool SOFTCAP>
__device__ __forceinline__ uint32_t attend_tails(const PackedCta<Tiling>& cta) {
    constexpr int D = Tiling::kWidth, kItemTiles = kRowChunk / kTileRows;
    constexpr int kShare = div_up(kItemTiles, Tiling::kConsumers), kTiles = kShare < 4 ? kShare : 4;
    constexpr bool kOneRound = kTiles * Tiling::kConsumers >= kItemTiles;
    using Tail = RingRows<TailFormat<D, T>>;
    uint32_t out_parity = 1;
    for_each_tail(cta, [&](const Item& item, int, int kv_head, int first_vector) {
        mbarrier_wait(cta.base + Tiling::kOutEmpty, out_parity);
        out_parity ^= 1;
        attend_rows_warp<D, T, Tail, Tiling::kVectors, SOFTCAP, kTiles, kOneRound>(
            cta.args, Tail(cta.args, item, kv_head), item, kv_head, first_vector, cta.warp, Tiling::kConsumers,
            cta.out(cta.warp, 0), Tiling::kOutStride, cta.ml(cta.warp, 0));
        mbarrier_arrive(cta.base + Tiling::kOutFull);
    });
    if constexpr (TAILPACK_PROFILE)
        if (cta.warp == 0) cta.template mark<kProfileTail>(global_nanoseconds());
    return out_parity;
}

template <typename Tiling, typename T, bool SOFTCAP> struct Consumer {
    static constexpr int D = Tiling::kWidth, kGroups = Tiling::kGroups, kWarps = Tiling::kWarps;
    static constexpr int kSets = Tiling::kSets, kSteps = D / 16, kRowGroups = Tiling::kWarpGroups;
    using Keys = typename Tiling::Keys;
    using Values = typename Tiling::Values;
    static constexpr float kLowest = -1e38f; // stands for -inf where a difference of two could be NaN
    static constexpr float kRescale = 60.0f; // m moves when a tile's top is 2^60 above it

    const PackedCta<Tiling>& cta;
    const int g, t, group, warp_in_group;
    const Opaque opaque;

    int stage; // of the ring, the group's next
    uint32_t stage_parity = 0;
    uint32_t out_parity;

    float out[kSets][kSteps][2]; // dims 32 (k / 2) + 4 g + 2 (k % 2) + 0, 1 of vector t
    float m[kSets], l[kSets], halves[kSets];
    uint32_t q[kSets][Tiling::kQueryInRegisters ? kSteps : 1];
    float q_scale[kSets], q_half[kSets];

    __device__ __forceinline__ Consumer(const PackedCta<Tiling>& cta_, uint32_t out_parity_)
        : cta(cta_), g(cta_.lane / 4), t(cta_.lane % 4), group(cta_.warp / kWarps), warp_in_group(cta_.warp % kWarps),
          opaque(Opaque::make<D>(cta_.args.minus_one)), stage(cta_.warp / kWarps), out_parity(out_parity_) {}

    __device__ __forceinline__ void arrive_all(uint32_t barrier, bool all_lanes) const {
        if (all_lanes) {
            mbarrier_arrive(barrier);
        } else {
            __syncwarp();
            if (cta.lane == 0) mbarrier_arrive(barrier);
        }
    }

    // B operand of steps `first`, first + 1 of a row's dims.
    __device__ __forceinline__ void load_query(uint32_t (&b)[4], int set, int first, uint32_t slot) const {
        const uint4 w = load_shared_16(slot + set * Tiling::Block::kSetBytes + first / 2 * 512 + 16 * cta.lane);
        b[0] = w.x, b[1] = w.y, b[2] = w.z, b[3] = w.w;
    }
    // Words of step `first` + i, i < 2.
    __device__ __forceinline__ void query_steps(uint32_t (&b)[2][kSets][2], int first, uint32_t slot) const {
#pragma unroll
        for (int set = 0; set < kSets; set++) {
            uint32_t four[4];
            if constexpr (Tiling::kQueryInRegisters) {
#pragma unroll
                for (int i = 0; i < 4; i++) four[i] = q[set][2 * first + i];
            } else {
                load_query(four, set, first, slot);
            }
            b[0][set][0] = four[0], b[0][set][1] = four[1], b[1][set][0] = four[2], b[1][set][1] = four[3];
        }
    }

    // Integer scores of 32 rows: c[half of 16 rows][set][4].
    __device__ __forceinline__ void score(int32_t (&c)[2][kSets][4], uint32_t codes, uint32_t slot) const {
        const uint32_t lane_codes = codes + 16 * cta.lane;
        constexpr int kRowSteps = D / 32; // steps of 16 rows
        if constexpr (kRowSteps == 2) {   // one quad is both halves
            uint32_t b[2][kSets][2], n[8];
            query_steps(b, 0, slot);
            Keys::load(n, lane_codes, 0);
#pragma unroll
            for (int i = 0; i < 4; i++)
                Keys::template multiply<false, kSets>(c[i / 2], n[2 * i], n[2 * i + 1], b[i % 2], opaque);
        } else {
#pragma unroll
            for (int first = 0; first < kRowSteps; first += 4) {
                uint32_t b[2][2][kSets][2];
                query_steps(b[0], first, slot);
                query_steps(b[1], first + 2, slot);
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

    // -inf for the rows of a group of 32 that its vector does not see. Rows g + 8 i are x[i]; row 0 is token `row` of the
    // piece of work.
    __device__ __forceinline__ void mask(float (&x)[kSets][4], int row, uint32_t slot) const {
        const DecodeArgs& args = cta.args;
        const int num_queries = static_cast<int>(args.num_queries), in_group = static_cast<int>(args.group);
        const int first_vector = static_cast<int>(load_shared_16(slot + Tiling::kHeader).z);
        const uint2 tokens = load_shared_8(slot + Tiling::kHeader + 16); // first_token, num_tokens
        const int token = static_cast<int>(tokens.x) + row + g, first_position = static_cast<int>(tokens.y) - num_queries;
#pragma unroll
        for (int set = 0; set < kSets; set++) {
            const int position = first_position + min((first_vector + 4 * set + t) / in_group, num_queries - 1);
            const int first = args.window > 0 ? position - static_cast<int>(args.window) + 1 : 0;
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (token + 8 * i < first || token + 8 * i > position) x[set][i] = minus_infinity();
        }
    }

    __device__ __forceinline__ void attend_stage(int index, uint32_t slot) {
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
            score(c, at + rows * Keys::kGroupBytes, slot);
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
        const uint2 plain = load_shared_8(slot + Tiling::kHeader + 24); // plain_from, plain_end
        if (index < static_cast<int>(plain.x) || index >= static_cast<int>(plain.y)) {
#pragma unroll
            for (int r = 0; r < kRowGroups; r++)
                mask(x[r], index * Tiling::kStageTokens + (warp_in_group * kRowGroups + r) * 32, slot);
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
        int index = group; // of the group's next stage in the piece of work
        bool first = true;
        for (uint32_t turn = 0;; turn++) {
            const uint32_t slot = cta.base + Tiling::kSlots + turn % 2 * Tiling::kSlotBytes;
            mbarrier_wait(cta.base + Tiling::kSlotFull + turn % 2 * 8, turn / 2 % 2);
            const int num_stages = static_cast<int>(load_shared_16(slot + Tiling::kHeader).w);
            if (num_stages == 0) break;
            const float* scales = reinterpret_cast<const float*>(cta.shared + (slot - cta.base) + Tiling::Block::kScales);
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
                        load_query(four, set, step, slot);
#pragma unroll
                        for (int i = 0; i < 4; i++) q[set][2 * step + i] = four[i];
                    }
            }
            const int place = index * kWarps + warp_in_group;
            for (; index < num_stages; index += kGroups) {
                attend_stage(index, slot);
                if constexpr (TAILPACK_PROFILE) {
                    if (first && cta.warp == 0) cta.template mark<kProfileFirstPage>(global_nanoseconds());
                    first = false;
                }
            }
            index -= num_stages;
            arrive_all(cta.base + Tiling::kSlotEmpty + turn % 2 * 8, kAllLanesRelease);
            leave(place);
        }
        if constexpr (TAILPACK_PROFILE)
            if (cta.warp == 0) cta.template mark<kProfileConsumer>(global_nanoseconds());
    }
};

} // namespace tailpack
