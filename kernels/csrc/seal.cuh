// Seal: dense rows of a sequence, out of its tail or the step's workspace, into pages, with the pages' checksums.
//
// Each warp takes units of 32 rows, one after the other. A pass holds 32 / kLanes rows in registers; the rows
// of the next pass are copied into the warp's shared memory while it computes. The codes of a unit meet in shared memory,
// where they are put into the order of their plane and written 16 bytes a lane.
#pragma once

#include "page_codes.cuh"
#include "row_codec.cuh"

namespace tailpack {

constexpr int kMaxRowWarps = TAILPACK_ROW_WARPS; // of a CTA; a launch may have fewer

// Shared memory of one warp: rows as they come in or go out, codes, and a barrier for the rows.
template <int WIDTH, typename T> struct WarpRows {
    using L = RowLanes<WIDTH>;
    static constexpr int kRowBytes = WIDTH * static_cast<int>(sizeof(T));
    static constexpr int kPitch = kRowBytes + 16 * L::kLanes; // lanes 16 bytes apart lie in different banks
    static constexpr int kPieces = kRowBytes / 16;            // pieces of a row; copies go piece by piece, rows in a line
    static constexpr int kCopiesOfRow = kPieces > 32 ? kPieces / 32 : 1;
    static constexpr int kCopies = L::kRows * kPieces / 32;   // of each lane, for a pass
    alignas(16) uint8_t rows[L::kRows * kPitch];
    alignas(16) StagedCodes<WIDTH> staged;
    alignas(16) UnitTables units[3]; // of the unit at work, the next one and the one after it
    alignas(8) uint64_t arrived;

    // Values of the lane's chunk s of its row: 8 of 2 bytes in one register quad, or of 4 bytes in two.
    __device__ __forceinline__ uint4* chunk(int s, int lane) {
        uint8_t* row = rows + lane / L::kLanes * kPitch;
        return reinterpret_cast<uint4*>(row + (L::kLanes * s + lane % L::kLanes) * kChunk * sizeof(T));
    }
    // The row of the lane's copy i, and the byte of the row: of 32 i + lane, written so that what depends on i is known.
    static __device__ __forceinline__ int row_of_copy(int i, int lane) {
        if constexpr (kPieces > 32) return i / (kPieces / 32);
        else return i * (32 / kPieces) + lane / kPieces;
    }
    static __device__ __forceinline__ int byte_of_copy(int i, int lane) {
        if constexpr (kPieces > 32) return 16 * (i % (kPieces / 32) * 32 + lane);
        else return 16 * (lane % kPieces);
    }
    __device__ __forceinline__ uint4* piece(int i, int lane) {
        return reinterpret_cast<uint4*>(rows + row_of_copy(i, lane) * kPitch + byte_of_copy(i, lane));
    }
};

// What lane `source` has of an address.
__device__ __forceinline__ uint8_t* address_of_lane(const uint8_t* address, int source) {
    return reinterpret_cast<uint8_t*>(static_cast<uintptr_t>(
        __shfl_sync(0xffffffffu, static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(address)), source)));
}

// Rows outside the page that a warp reads or writes together, lane by lane of a row their address; nullptr: no such row.
// Mostly they lie evenly spaced, and then no lane needs to ask another for an address.
template <int WIDTH, typename T> struct RowsOutside {
    using S = WarpRows<WIDTH, T>;
    uint8_t* of_lane; // of the lane's row; if evenly spaced, of its first copy
    int32_t step;     // bytes from row to row
    bool even;

    __device__ __forceinline__ RowsOutside(uint8_t* row, int lane) : of_lane(row) {
        uint8_t* first = address_of_lane(row, 0);
        const int64_t bytes = address_of_lane(row, S::L::kLanes) - first;
        step = static_cast<int32_t>(bytes);
        even = __all_sync(0xffffffffu, row != nullptr && step == bytes &&
                                           row == first + static_cast<int64_t>(step) * (lane / S::L::kLanes)) != 0;
        if (even) of_lane = first + static_cast<int64_t>(step) * S::row_of_copy(0, lane) + S::byte_of_copy(0, lane);
    }
    // Of the lane's copy i. The same branch in all lanes.
    template <typename Copy> __device__ __forceinline__ void each(int lane, Copy copy) const {
        if (__builtin_expect(even, 1)) {
            uint8_t* at = of_lane;
            const int64_t step_of_copy = static_cast<int64_t>(step) * S::row_of_copy(S::kCopiesOfRow, 0);
#pragma unroll
            for (int i = 0; i < S::kCopies; i++) {
                copy(i, at + S::byte_of_copy(i, 0));
                if ((i + 1) % S::kCopiesOfRow == 0) at += step_of_copy;
            }
        } else {
#pragma unroll 1
            for (int i = 0; i < S::kCopies; i++) {
                uint8_t* row = address_of_lane(of_lane, S::row_of_copy(i, lane) * S::L::kLanes);
                if (row != nullptr) copy(i, row + S::byte_of_copy(i, lane));
            }
        }
    }
};

template <int WIDTH, typename T> struct SharedRows {
    RowTables tables;
    WarpRows<WIDTH, T> warps[kMaxRowWarps];
};

// A lane's part of a row as it was read: registers, not yet floats.
template <int WIDTH, typename T> struct RawRow {
    using L = RowLanes<WIDTH>;
    static constexpr int kWords = L::kValues * static_cast<int>(sizeof(T)) / 4;
    uint32_t words[kWords];

    __device__ __forceinline__ void read(WarpRows<WIDTH, T>& from, int lane) {
#pragma unroll
        for (int i = 0; i < kWords; i += 4) {
            constexpr int kQuads = kWords / L::kChunks / 4; // of a chunk
            const uint4 four = from.chunk(i / 4 / kQuads, lane)[i / 4 % kQuads];
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
    }
    // Bits of the row's largest magnitude as f32: such bits order like the magnitudes, NaN above infinity.
    __device__ __forceinline__ uint32_t largest_magnitude() const {
        uint32_t largest = 0;
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < kWords; i++) largest = max(largest, words[i] & 0x7fffffffu);
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i++) largest = max_magnitudes<T>(largest, words[i]);
            float low, high;
            halves_to_floats<T>(largest & 0x7fff7fffu, low, high);
            largest = max(__float_as_uint(low), __float_as_uint(high));
        }
#pragma unroll
        for (int distance = 1; distance < L::kLanes; distance *= 2)
            largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
        return largest;
    }
    // z[i] = scaled(value i, i)
    template <typename Scaled> __device__ __forceinline__ void to_floats(Scaled scaled, float (&z)[L::kValues]) const {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < kWords; i++) z[i] = scaled(__uint_as_float(words[i]), i);
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i++) {
                float low, high;
                halves_to_floats<T>(words[i], low, high);
                z[2 * i] = scaled(low, 2 * i);
                z[2 * i + 1] = scaled(high, 2 * i + 1);
            }
        }
    }
};

// Bits of a magnitude in [2^-32, 2^32), or of 0. A row with such a largest value has a sum of squares in [2^-64, 2^71], and what
// underflows beside it is smaller than that by more than f32's digits.
__device__ __forceinline__ bool is_ordinary(uint32_t magnitude) {
    constexpr uint32_t kFrom = (127u - 32u) << 23, kTo = (127u + 32u) << 23;
    return magnitude - kFrom < kTo - kFrom || magnitude == 0;
}

// Codes of the lane's row into `nibble_words` (all kWords of the row), its scale into `*scale`. False: the row holds NaN or
// an infinity, or its norm is above kMaxNorm; then its codes are 0 and its scale NaN. Rows are written where `writes` is set;
// every lane takes part.
template <int WIDTH, typename T>
__device__ __forceinline__ bool encode_row(const RawRow<WIDTH, T>& raw, int bits, const RowTables& tables,
                                           uint32_t* nibble_words, float* scale, bool writes, int lane) {
    using L = RowLanes<WIDTH>;
    const uint32_t largest = raw.largest_magnitude();
    int exponent = min(max(static_cast<int>(largest >> 23) - 126, -100), 124);
    // A power of two in front of a row changes no bit of what follows but near the ends of f32's range, so rows whose largest
    // value is far from them need not be scaled; with one lane a row their signs then cost nothing either, which the first
    // additions take in.
    constexpr bool kMayStay = L::kLanes == 1;
    const bool scales = !kMayStay || !__all_sync(0xffffffffu, is_ordinary(largest));
    if (!scales) exponent = 0;
    const float down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    const float up = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
    float z[L::kValues];
    if constexpr (kMayStay) {
        raw.to_floats([](float x, int) { return x; }, z);
        if (__builtin_expect(scales, 0)) {
#pragma unroll
            for (int i = 0; i < L::kValues; i++) z[i] = __fmul_rn(z[i], down);
        }
#pragma unroll
        for (int i = 0; i < L::kValues; i++) z[i] = negated_lanes<WIDTH>(i) != 0 ? -z[i] : z[i];
    } else {
        raw.to_floats(TimesDiagonal<WIDTH>(down, tables, lane), z);
    }
    const float short_norm = sqrtf(sum_of_squares<WIDTH>(z));
    const float norm = short_norm * up, share = norm / kMaxNorm;
    const bool bad = largest >= kInfinityBits || __fmul_rn(share, share) > 1.0f;
    const bool stores_codes = !bad && !(norm < kZeroNorm);

    __syncwarp();
    hadamard<WIDTH>(z, lane);
    __syncwarp(); // the compiler, too, looks nothing up before this that is needed only after it
    const TimesDiagonal<WIDTH> to_unit(1.0f / __fmul_rn(short_norm, sqrtf(static_cast<float>(WIDTH))), tables, lane);
    const Quantiser quantiser(bits, tables, lane);
    const uint32_t kept = stores_codes ? 0xffffffffu : 0u;
    uint32_t square = 0, words[4];
#pragma unroll
    for (int s = 0; s < L::kChunks; s++) {
        float y[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; j++) y[j] = to_unit(z[kChunk * s + j], kChunk * s + j);
        const uint32_t word = quantiser.codes(y);
        square += quantiser.square(word);
        words[s % 4] = word & kept;
        if constexpr (L::kLanes > 1) {
            if (writes) nibble_words[L::kLanes * s + lane % L::kLanes] = words[s % 4];
        } else if (s % 4 == 3 && writes) {
            *reinterpret_cast<uint4*>(nibble_words + s - 3) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
#pragma unroll
    for (int distance = 1; distance < L::kLanes; distance *= 2) square += __shfl_xor_sync(0xffffffffu, square, distance);
    if (writes && lane % L::kLanes == 0) {
        const float chosen = __fmul_rn(sqrtf(static_cast<float>(square)), quantiser.half_step);
        *scale = bad ? __uint_as_float(0x7fc00000u) : stores_codes ? __fmul_rn(short_norm / chosen, up) : 0.0f;
    }
    return !bad;
}

// Row `row` of the pass of this lane: its place among the 32 of the unit.
template <int WIDTH> __device__ __forceinline__ int row_of_pass(int pass, int lane) {
    return pass * RowLanes<WIDTH>::kRows + lane / RowLanes<WIDTH>::kLanes;
}

// Start the copy of a pass' rows; rows that the page does not have are read as its last one.
template <int WIDTH, typename T>
__device__ __forceinline__ void start_rows(const UnitTables& of, int pass, WarpRows<WIDTH, T>& shared, int lane) {
    using S = WarpRows<WIDTH, T>;
    const int row = min(of.unit.first_row + row_of_pass<WIDTH>(pass, lane), static_cast<int>(of.region.rows) - 1);
    const uint32_t to = shared_address(shared.rows);
    const RowsOutside<WIDTH, T> rows(row_address(of.page, of.region, of.unit.head, row), lane);
    rows.each(lane, [&](int i, const uint8_t* from) {
        lane_copy_16(to + S::row_of_copy(i, lane) * S::kPitch + S::byte_of_copy(i, lane), from);
    });
}

// Rows below `begin` stay as they are in the page. checksums [num_pages], zeroed by the caller: each page's sum is added.
// first_bad_row: lowered to entry << 32 | region << 20 | head << 8 | row of the first row, in that order, that does not pack.
template <int WIDTH, typename T>
__device__ __forceinline__ void seal_pages(const PageTables& tables, uint64_t* checksums, long long* first_bad_row,
                                           SharedRows<WIDTH, T>& shared) {
    using L = RowLanes<WIDTH>;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0); // the same in all lanes, for the compiler
    WarpRows<WIDTH, T>& own = shared.warps[warp];
    shared.tables.template fill<WIDTH>(static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
    const uint32_t arrived = shared_address(&own.arrived);
    if (lane == 0) {
        mbarrier_init(arrived, 32);
        mbarrier_init_fence();
    }
    __syncthreads();

    // A phase of `arrived`: the rows of a pass and, with a unit's first ones, the tables of the unit after it.
    const uint32_t warps = blockDim.x / 32, first = blockIdx.x * warps, step = gridDim.x * warps;
    const int64_t num_slots = tables.num_pages * tables.num_units;
    uint32_t parity = 0;
    UnitLookup lookup(tables, first + static_cast<uint32_t>(warp), step);
    lookup.start_copy(tables, own.units[0], lane);
    lane_copies_arrive(arrived);
    mbarrier_wait(arrived, parity);
    parity ^= 1;
    __syncwarp();
    if (own.units[0].in_use()) start_rows(own.units[0], 0, own, lane);
    lookup.start_copy(tables, own.units[1], lane);
    lane_copies_arrive(arrived);

    int current = 0;
    for (int64_t slot = first; slot < num_slots; slot += step) { // as often in all warps
        // The warps of a CTA work on units of their own, but begin each together: a unit is more code than the instruction
        // caches hold, so warps that are not far apart in it fetch it once for all. One more meeting inside was slower.
        __syncthreads();
        const UnitTables& of = own.units[current];
        current = current == 2 ? 0 : current + 1;
        const UnitTables& next = own.units[current];
        UnitTables& after_next = own.units[current == 2 ? 0 : current + 1];
        const bool in_use = of.in_use();
        int kept, rows;
        {
            const UnitPlace place(of.region, of.unit);
            rows = place.rows;
            kept = first_row_from(of.page.begin, of.region, place);
            if (__builtin_expect(in_use && kept > 0, 0))
                load_codes<WIDTH>(tables.arena + of.page.page * tables.page_bytes, of.region, place, own.staged, lane);
        }
#pragma unroll 1
        for (int pass = 0; pass < L::kPasses; pass++) {
            const bool last = pass + 1 == L::kPasses;
            RawRow<WIDTH, T> raw;
            if (in_use || last) {
                mbarrier_wait(arrived, parity);
                parity ^= 1;
                raw.read(own, lane);
                __syncwarp(); // all have read their rows (and have staged the codes that stay)
                if (!last) start_rows(of, pass + 1, own, lane);
                else {
                    if (next.in_use()) start_rows(next, 0, own, lane);
                    lookup.start_copy(tables, after_next, lane);
                }
                lane_copies_arrive(arrived);
            }
            if (in_use) {
                const int row = row_of_pass<WIDTH>(pass, lane), bits = static_cast<int>(of.region.bits);
                const bool writes = row >= kept && row < rows;
                const bool good = encode_row(raw, bits, shared.tables, own.staged.words[row], &own.staged.scales[row],
                                             writes, lane);
                if (writes && !good) {
                    const int64_t of_page = static_cast<int64_t>(of.unit.region) << 20 | of.unit.head << 8 | (of.unit.first_row + row);
                    atomicMin(first_bad_row, static_cast<long long>(of.entry << 32 | of_page));
                }
            }
        }
        if (!in_use) continue;
        __syncwarp();
        PageWriter writer{tables.arena + of.page.page * tables.page_bytes};
        store_codes<WIDTH>(writer, of.region, UnitPlace(of.region, of.unit), own.staged, lane);
        __syncwarp(); // the staged codes are read, and may be written again
        writer.add_to(checksums + of.entry);
    }
}

} // namespace tailpack
