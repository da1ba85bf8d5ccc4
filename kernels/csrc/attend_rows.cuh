// The attend kernel of cells that read rows: decode_rows.cu.
//
// A CTA takes *units* off a queue: one item, one kv head, COLUMNS of its vectors. Its warps share the item's tiles, each
// leaves a result of its own in shared memory, and the CTA adds them up and writes the partial result. Units of one item
// are neighbours, so that heads whose rows lie side by side in a page, and vectors that read the same rows, meet in L2.
//
// Launch: 32 * kRowWarps threads, row_shared_bytes(D, COLUMNS) of dynamic shared memory, kRowCtasPerSm CTAs an SM where
// they fit (no more than there are units; any number is right).
#pragma once

#include "plan.cuh"
#include "rows.cuh"

namespace tailpack {

constexpr int kRowWarps = 4;
constexpr int kRowTiles = 2;     // of a warp's round
constexpr int kRowCtasPerSm = 4; // 512 threads of 128 registers
constexpr int kPageChunk = 512;  // tokens of an item of page rows: partial results are then a 60th of what is read at d = 128

__host__ __device__ constexpr int row_out_stride(int width) { return width + 1; } // see attend_rows_warp
__host__ __device__ constexpr int row_shared_bytes(int width, int columns) {
    return 4 * kRowWarps * columns * (row_out_stride(width) + 2) + 16;
}

// args.profile of the phase-timing variant, a CTA's row of u64: nanoseconds of the global timer, sums of them, a count.
enum RowProfileSlot {
    kRowStart,
    kRowDependencies, // prepare is complete, or need not be waited for
    kRowFirst,        // the first unit is attended
    kRowAttend,       // sum over units: until all warps have attended
    kRowCombine,      // sum over units: adding up and writing
    kRowEnd,
    kRowUnits, // units done
    kRowProfileSlots = 8
};

template <int D, typename T, typename Pages, int COLUMNS, bool SOFTCAP, bool PROFILE>
__device__ __forceinline__ void attend_rows(const DecodeArgs& args) {
    constexpr int kStride = row_out_stride(D), kThreads = 32 * kRowWarps;
    using Tail = RingRows<DenseFormat<D, T>>;
    TAILPACK_DYNAMIC_SHARED(shared);
    float* outs = reinterpret_cast<float*>(shared);              // [warp][column][kStride]
    float* mls = outs + kRowWarps * COLUMNS * kStride;           // [warp][column][2]
    int* next = reinterpret_cast<int*>(mls + kRowWarps * COLUMNS * 2);
    const int warp = threadIdx.x / 32;
    const int heads = static_cast<int>(args.kv_heads);
    const int num_vectors = static_cast<int>(args.num_queries * args.group);
    const int chunks = div_up(num_vectors, COLUMNS);

    uint64_t profile[kRowProfileSlots] = {}, last = 0; // of thread 0
    const auto passed = [&]() -> uint64_t {
        const uint64_t before = last;
        return (last = global_nanoseconds()) - before;
    };
    if constexpr (PROFILE) passed(), profile[kRowStart] = last;
    launch_dependents();
    // A call with a unit for each CTA at most is planned here, while prepare still runs, if all that it makes is the plan.
    const int lane = static_cast<int>(threadIdx.x) % 32;
    bool direct = !Pages::Format::kRotated && args.num_sequences <= kDirectSequences;
    int num_units = 0;
    if (direct) {
        num_units = sum_batch<PLAN_ROWS, kPageChunk>(args, 0, lane).num_rows * heads * chunks;
        direct = num_units <= static_cast<int>(gridDim.x);
    }
    if (!direct) {
        wait_for_dependencies();
        num_units = args.counters->num_rows * heads * chunks;
    }
    if constexpr (PROFILE) passed(), profile[kRowDependencies] = last;
    for (int unit = static_cast<int>(blockIdx.x); unit < num_units;) {
        if (threadIdx.x == 0) // known when the unit is done; prepare has zeroed it
            *next = direct ? num_units : static_cast<int>(gridDim.x) + atomicAdd(&args.counters->next_packed, 1);
        const int first_vector = unit % chunks * COLUMNS, kv_head = unit / chunks % heads, number = unit / (chunks * heads);
        const int64_t index = args.max_packed_items + number;
        const Item item = direct ? find_item<PLAN_ROWS, kPageChunk>(args, number, lane) : args.items[index];
        float *out = outs + warp * COLUMNS * kStride, *ml = mls + warp * COLUMNS * 2;
        if (item.kind == kRingRows) {
            const Tail rows(args, item, kv_head);
            attend_rows_warp<D, T, Tail, COLUMNS, SOFTCAP, kRowTiles>(args, rows, item, kv_head, first_vector, warp, kRowWarps,
                                                                      out, kStride, ml);
        } else {
            const Pages rows(args, item, kv_head);
            attend_rows_warp<D, T, Pages, COLUMNS, SOFTCAP, kRowTiles>(args, rows, item, kv_head, first_vector, warp,
                                                                       kRowWarps, out, kStride, ml);
        }
        __syncthreads();
        unit = *next;
        if constexpr (PROFILE) {
            profile[kRowAttend] += passed();
            if (profile[kRowUnits]++ == 0) profile[kRowFirst] = last;
        }

        const int64_t first_row = (index * heads + kv_head) * num_vectors + first_vector;
        const int columns = min(COLUMNS, num_vectors - first_vector);
        for (int i = static_cast<int>(threadIdx.x); i < columns * D; i += kThreads) {
            const int c = i / D, dim = i % D;
            float m = minus_infinity();
#pragma unroll
            for (int w = 0; w < kRowWarps; w++) m = fmaxf(m, mls[(w * COLUMNS + c) * 2]);
            const float top = m == minus_infinity() ? 0.0f : m;
            float l = 0.0f, sum = 0.0f;
#pragma unroll
            for (int w = 0; w < kRowWarps; w++) {
                const float share = exp2_fast(mls[(w * COLUMNS + c) * 2] - top);
                l = fmaf(mls[(w * COLUMNS + c) * 2 + 1], share, l);
                sum = fmaf(outs[(w * COLUMNS + c) * kStride + dim], share, sum);
            }
            args.partial_out[first_row * D + i] = sum;
            if (dim == 0) {
                args.partial_ml[(first_row + c) * 2] = m;
                args.partial_ml[(first_row + c) * 2 + 1] = l;
            }
        }
        __syncthreads(); // the next unit writes what this one reads
        if constexpr (PROFILE) profile[kRowCombine] += passed();
    }
    if (direct) wait_for_dependencies(); // merge, which waits for this kernel, then runs behind prepare too
    if constexpr (PROFILE)
        if (threadIdx.x == 0) {
            profile[kRowEnd] = last;
            for (int i = 0; i < kRowProfileSlots; i++)
                args.profile[static_cast<int64_t>(blockIdx.x) * kRowProfileSlots + i] = profile[i];
        }
}

} // namespace tailpack
