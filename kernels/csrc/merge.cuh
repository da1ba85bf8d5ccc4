// The last launch of a call: from the partial results of a query head's items to its output and log-sum-exp.
//
//   out = sum over items of 2^(m_i - m) out_i / (sum of 2^(m_i - m) l_i + 2^(sink log2 e - m)),  m the largest of all m_i
//   lse = ln 2 * (m + log2 of the sum of 2^(m_i - m) l_i): sinks not counted
// Results in the rotated domain, those of packed pages (PLAN_PACKED), or of page rows if ROTATED (PLAN_ROWS), are added up
// first and rotated back once. Nothing visible: out 0, lse -inf. A sink of +inf takes everything: out 0. NaN stays NaN.
//
// Grid: num_sequences * num_queries * q_heads CTAs of kMergeThreads threads. A warp takes every kMergeWarps-th item, always
// the same ones, so that the order of additions is the sequence's own.
#pragma once

#include "plan.cuh"
#include "rotate.cuh"

namespace tailpack {

constexpr int kMergeWarps = 4, kMergeThreads = 32 * kMergeWarps; // 64 registers: 1,024 heads at once on 132 SMs

template <int D> struct MergeShared {
    float out[2][kMergeWarps][D]; // rotated, plain
    float ml[kMergeWarps][2];
};

template <typename T> __device__ __forceinline__ T rounded(float x) { return T(x); }
template <> __device__ __forceinline__ __half rounded<__half>(float x) { // a mean of rows near 65504 may come out longer
    return __float2half_rn(x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x); // NaN stays
}

template <int D, typename T, PlanKind KIND, bool ROTATED, int PAGE_CHUNK = kRowChunk>
__device__ __forceinline__ void merge_partials(const DecodeArgs& args) {
    constexpr int kOwn = D / 32, kWide = kOwn < 4 ? kOwn : 4; // a lane's floats; those of one access, at kWide * lane
    constexpr int kMergeAhead = kOwn <= 4 ? 6 : kOwn == 8 ? 3 : 2; // items whose loads are under way together
    constexpr float kLog2 = 1.44269504f, kLn2 = 0.693147181f, kLowest = -1e38f;
    __shared__ MergeShared<D> shared;
    launch_dependents();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t num_vectors = args.num_queries * args.group;
    const int64_t vector = blockIdx.x % num_vectors, kv_head = blockIdx.x / num_vectors % args.kv_heads;
    const int b = static_cast<int>(blockIdx.x / num_vectors / args.kv_heads);
    const int64_t query = vector / args.group, head = kv_head * args.group + vector % args.group;
    const float sink = args.sinks == nullptr ? -__int_as_float(0x7f800000) : args.sinks[head] * kLog2;

    Plan plan;
    if (args.num_sequences <= kDirectSequences) { // while the launch before still runs
        plan = plan_sequence<KIND, PAGE_CHUNK>(args, b, lane);
        wait_for_dependencies();
    } else {
        wait_for_dependencies();
        plan = args.plans[b];
    }
    // Items in order: long splits, short ones, page rows, ring rows. Those before `num_rotated` lie in the rotated domain.
    const int num_packed = plan.num_big + plan.num_small, total = num_packed + plan.num_rows;
    const int num_rotated = ROTATED ? num_packed + plan.num_page_rows : num_packed;

    float sum[2][kOwn] = {}, m = kLowest, l = 0.0f;
    for (int first = warp; first < total; first += kMergeAhead * kMergeWarps) {
        float2 ml[kMergeAhead];
        float value[kMergeAhead][kOwn];
#pragma unroll
        for (int i = 0; i < kMergeAhead; i++) {
            const int index = first + i * kMergeWarps;
            const bool exists = index < total;
            int64_t slot = args.max_packed_items + plan.rows + index - num_packed;
            if (index < num_packed) slot = index < plan.num_big ? plan.packed_big + index : plan.packed_small + index - plan.num_big;
            const int64_t place = (slot * args.kv_heads + kv_head) * num_vectors + vector;
            ml[i] = exists ? load_l2_f2(args.partial_ml + 2 * place) : make_float2(kLowest, 0.0f);
#pragma unroll
            for (int c = 0; c < kOwn; c += kWide) {
                const float* from = args.partial_out + place * D + 32 * c + kWide * lane;
                float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
                if (exists) {
                    if constexpr (kWide == 4) {
                        four = load_l2_f4(from);
                    } else {
                        const float2 two = load_l2_f2(from);
                        four.x = two.x, four.y = two.y;
                    }
                }
                value[i][c] = four.x, value[i][c + 1] = four.y;
                if constexpr (kWide == 4) value[i][c + 2] = four.z, value[i][c + 3] = four.w;
            }
        }
        float top = m;
#pragma unroll
        for (int i = 0; i < kMergeAhead; i++) top = fmaxf(top, ml[i].x);
        const float kept = exp2_fast(m - top);
        m = top, l *= kept;
#pragma unroll
        for (int j = 0; j < kOwn; j++) sum[0][j] *= kept, sum[1][j] *= kept;
#pragma unroll
        for (int i = 0; i < kMergeAhead; i++) {
            const float weight = exp2_fast(ml[i].x - top);
            const bool rotated = first + i * kMergeWarps < num_rotated; // the same for the whole warp
            l = fmaf(weight, ml[i].y, l);
#pragma unroll
            for (int j = 0; j < kOwn; j++) {
                sum[0][j] = fmaf(rotated ? weight : 0.0f, value[i][j], sum[0][j]);
                sum[1][j] = fmaf(rotated ? 0.0f : weight, value[i][j], sum[1][j]);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < kOwn; j++) {
        const int dim = 32 * (j / kWide * kWide) + kWide * lane + j % kWide;
        shared.out[0][warp][dim] = sum[0][j];
        shared.out[1][warp][dim] = sum[1][j];
    }
    if (lane == 0) shared.ml[warp][0] = m, shared.ml[warp][1] = l;
    __syncthreads();
    if (warp != 0) return;

    m = kLowest, l = 0.0f;
#pragma unroll
    for (int w = 0; w < kMergeWarps; w++) m = fmaxf(m, shared.ml[w][0]);
    float weight[kMergeWarps];
#pragma unroll
    for (int w = 0; w < kMergeWarps; w++) {
        weight[w] = exp2_fast(shared.ml[w][0] - m);
        l = fmaf(weight[w], shared.ml[w][1], l);
    }
    float out[kOwn], plain[kOwn]; // dims 32 j + lane, as rotate_row wants them
#pragma unroll
    for (int j = 0; j < kOwn; j++) {
        out[j] = plain[j] = 0.0f;
#pragma unroll
        for (int w = 0; w < kMergeWarps; w++) {
            out[j] = fmaf(weight[w], shared.out[0][w][32 * j + lane], out[j]);
            plain[j] = fmaf(weight[w], shared.out[1][w][32 * j + lane], plain[j]);
        }
    }
    if (num_rotated > 0) rotate_row<D>(out, lane);

    // With the sink's weight in the denominator; both weights are at most 1, and finite for sinks of either infinity.
    const float top = fminf(fmaxf(m, sink), -kLowest);
    const float ours = exp2_fast(m - top), others = exp2_fast(fmaxf(sink, kLowest) - top), all = fmaf(l, ours, others);
    const bool nothing = l == 0.0f; // not so if it is NaN
    const float factor = nothing ? 0.0f : ours / all; // 0 / inf beside an infinite sink
    T* to = static_cast<T*>(args.out) + b * args.out_batch_stride + query * args.out_token_stride + head * args.out_head_stride;
#pragma unroll
    for (int j = 0; j < kOwn; j++) to[32 * j + lane] = rounded<T>(nothing ? 0.0f : (out[j] + plain[j]) * factor);
    if (lane == 0 && args.lse != nullptr)
        args.lse[(b * args.num_queries + query) * args.kv_heads * args.group + head] =
            nothing ? -__int_as_float(0x7f800000) : (m + log2_fast(l)) * kLn2;
}

} // namespace tailpack
