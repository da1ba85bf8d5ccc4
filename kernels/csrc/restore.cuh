// Restore: rows of pages back to dense rows, into a tail or a workspace.
#pragma once

#include "seal.cuh"

namespace tailpack {

template <typename T> constexpr bool kSaturates = false; // a row may come back longer than the dtype holds
template <> constexpr bool kSaturates<__half> = true;

// The lane's row, decoded from nibble words of codes of sign_bit + 1 bits, into its chunks of `own`. Every lane takes part.
template <int WIDTH, typename T>
__device__ __forceinline__ void decode_row(const uint32_t* nibble_words, float scale, float value_of_lane, int sign_bit,
                                           const RowTables& tables, WarpRows<WIDTH, T>& own, int lane) {
    using L = RowLanes<WIDTH>;
    constexpr float kMaxHalf = 65504.0f;
    float x[L::kValues];
#pragma unroll
    for (int s = 0; s < L::kChunks; s++) {
        const int chunk = L::kLanes * s + lane % L::kLanes;
        uint32_t word = nibble_words[chunk];
        if constexpr (L::kLanes > 1) word ^= tables.signs[chunk] << sign_bit;
#pragma unroll
        for (int j = 0; j < kChunk; j++) { // the table repeats after 16 lanes, so the next code's low bit does no harm
            const float v = __shfl_sync(0xffffffffu, value_of_lane, static_cast<int>(word >> 4 * j));
            x[kChunk * s + j] = L::kLanes == 1 && negated_lanes<WIDTH>(kChunk * s + j) != 0 ? -v : v;
        }
    }
    hadamard<WIDTH>(x, lane);
    const TimesDiagonal<WIDTH> unrotated(1.0f / sqrtf(static_cast<float>(WIDTH)), tables, lane);
    const uint32_t kept = scale == 0.0f ? 0u : 0xffffffffu; // a zero row comes back as +0, never -0
#pragma unroll
    for (int s = 0; s < L::kChunks; s++) {
        float v[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; j++) {
            const int i = kChunk * s + j;
            v[j] = __fmul_rn(unrotated(x[i], i), scale);
            if constexpr (kSaturates<T>) v[j] = fminf(fmaxf(v[j], -kMaxHalf), kMaxHalf);
        }
        uint4* out = own.chunk(s, lane);
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int half = 0; half < 2; half++)
                out[half] = make_uint4(__float_as_uint(v[4 * half]) & kept, __float_as_uint(v[4 * half + 1]) & kept,
                                       __float_as_uint(v[4 * half + 2]) & kept, __float_as_uint(v[4 * half + 3]) & kept);
        } else {
            out[0] = make_uint4(pack_halves<T>(v[0], v[1]) & kept, pack_halves<T>(v[2], v[3]) & kept,
                                pack_halves<T>(v[4], v[5]) & kept, pack_halves<T>(v[6], v[7]) & kept);
        }
    }
}

// Rows of tokens [begin, end) of the pages are written where row_address says; the pages are left alone.
template <int WIDTH, typename T>
__device__ __forceinline__ void restore_pages(const PageTables& tables, SharedRows<WIDTH, T>& shared) {
    using L = RowLanes<WIDTH>;
    using S = WarpRows<WIDTH, T>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0); // the same in all lanes, for the compiler
    S& own = shared.warps[warp];
    shared.tables.template fill<WIDTH>(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
    __syncthreads();

    const uint32_t warps = blockDim.x / 32;
    UnitCursor cursor(tables, blockIdx.x * warps + static_cast<uint32_t>(warp), gridDim.x * warps);
    for (; !cursor.done(tables); cursor.advance(tables)) {
        if (!cursor.in_use(tables)) continue;
        const PageUnit unit = cursor.unit(tables);
        const PageRegion& region = tables.regions[unit.region];
        const PageRows& page = tables.pages[cursor.entry];
        const UnitPlace place(region, unit);
        const int begin = first_row_from(page.begin, region, place), end = first_row_from(page.end, region, place);
        if (begin >= end) continue;
        load_codes<WIDTH>(tables.arena + page.page * tables.page_bytes, region, place, own.staged, lane);
        __syncwarp();
        const float value_of_lane = shared.tables.value[place.bits - 2][lane];
#pragma unroll 1
        for (int pass = 0; pass < L::kPasses; pass++) {
            const int row = row_of_pass<WIDTH>(pass, lane);
            decode_row<WIDTH, T>(own.staged.words[row], own.staged.scales[row], value_of_lane, place.bits - 1, shared.tables,
                                 own, lane);
            __syncwarp();
            uint8_t* to = nullptr;
            if (row >= begin && row < end) to = row_address(page, region, unit.head, place.first_row + row);
            RowsOutside<WIDTH, T>(to, lane).each(lane, [&](int i, uint8_t* at) { store_global_16(at, *own.piece(i, lane)); });
            __syncwarp(); // the rows and the staged codes are read, and may be written again
        }
    }
}

} // namespace tailpack
