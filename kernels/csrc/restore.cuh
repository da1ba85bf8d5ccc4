// Restore: rows of pages back to dense rows, into a tail or a workspace.
#pragma once

#include "seal.cuh"

namespace tailpack {

template <typename T> constexpr bool kSaturates = false; // a row may come back longer than the dtype holds
template <> constexpr bool kSaturates<__half> = true;

// The lane's row, decoded from nibble words, into its chunks of `own`. Every lane takes part.
template <int WIDTH, typename T>
__device__ __forceinline__ void decode_row(const uint32_t* nibble_words, float scale, float value_of_lane,
                                           const Diagonal<WIDTH>& diagonal, WarpRows<WIDTH, T>& own, int lane) {
    using L = RowLanes<WIDTH>;
    constexpr float kMaxHalf = 65504.0f;
    const float inverse_root = 1.0f / sqrtf(static_cast<float>(WIDTH));
    float x[L::kValues];
#pragma unroll
    for (int s = 0; s < L::kChunks; s++) {
        const uint32_t word = nibble_words[L::kLanes * s + lane % L::kLanes];
#pragma unroll
        for (int j = 0; j < kChunk; j++) // the table repeats after 16 lanes, so the next code's low bit does no harm
            x[kChunk * s + j] = diagonal.flip(
                __shfl_sync(0xffffffffu, value_of_lane, static_cast<int>(word >> 4 * j)), kChunk * s + j);
    }
    hadamard<WIDTH>(x, lane);
    const uint32_t kept = scale == 0.0f ? 0u : 0xffffffffu; // a zero row comes back as +0, never -0
#pragma unroll
    for (int s = 0; s < L::kChunks; s++) {
        float v[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; j++) {
            const int i = kChunk * s + j;
            v[j] = __fmul_rn(__fmul_rn(diagonal.flip(x[i], i), inverse_root), scale);
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
            const Diagonal<WIDTH> diagonal(shared.tables, lane);
            decode_row<WIDTH, T>(own.staged.words[row], own.staged.scales[row], value_of_lane, diagonal, own, lane);
            __syncwarp();
            const uint8_t* of_lane = nullptr;
            if (row >= begin && row < end) of_lane = row_address(page, region, unit.head, place.first_row + row);
#pragma unroll
            for (int i = 0; i < S::kCopies; i++) {
                uint8_t* to = address_of_lane(of_lane, S::row_of_copy(i, lane) * L::kLanes);
                if (to != nullptr) store_global_16(to + S::byte_of_copy(i, lane), *own.piece(i, lane));
            }
            __syncwarp(); // the rows and the staged codes are read, and may be written again
        }
    }
}

} // namespace tailpack
