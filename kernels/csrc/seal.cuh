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
    __device__ __forceinline__ void scale_to_floats(float factor, float (&z)[L::kValues]) const {
        if constexpr (sizeof(T) == 4) {
#pragma unroll
            for (int i = 0; i < kWords; i++) z[i] = __fmul_rn(__uint_as_float(words[i]), factor);
        } else {
#pragma unroll
            for (int i = 0; i < kWords; i++) {
                float low, high;
                halves_to_floats<T>(words[i], low, high);
                z[2 * i] = __fmul_rn(low, factor);
                z[2 * i + 1] = __fmul_rn(high, factor);
            }
        }
    }
};

// Codes of the lane's row into `nibble_words` (all kWords of the row), its scale into `*scale`. False: the row holds NaN or
// an infinity, or its norm is above kMaxNorm; then its codes are 0 and its scale NaN. Rows are written where `writes` is set;
// every lane takes part.
template <int WIDTH, typename T>
__device__ __forceinline__ bool encode_row(const RawRow<WIDTH, T>& raw, const Quantiser& quantiser,
                                           const Diagonal<WIDTH>& diagonal, uint32_t* nibble_words, float* scale, bool writes,
                                           int lane) {
    using L = RowLanes<WIDTH>;
    const uint32_t largest = raw.largest_magnitude();
    const int exponent = min(max(static_cast<int>(largest >> 23) - 126, -100), 124);
    const float down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    const float up = __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
    float z[L::kValues];
    raw.scale_to_floats(down, z);
    const float short_norm = sqrtf(sum_of_squares<WIDTH>(z));
    const float norm = short_norm * up, share = norm / kMaxNorm;
    const bool bad = largest >= kInfinityBits || __fmul_rn(share, share) > 1.0f;
    const bool stores_codes = !bad && !(norm < kZeroNorm);

#pragma unroll
    for (int i = 0; i < L::kValues; i++) z[i] = diagonal.flip(z[i], i);
    hadamard<WIDTH>(z, lane);
    const float factor = 1.0f / __fmul_rn(short_norm, sqrtf(static_cast<float>(WIDTH)));
    const uint32_t kept = stores_codes ? 0xffffffffu : 0u;
    uint32_t square = 0, words[4];
#pragma unroll
    for (int s = 0; s < L::kChunks; s++) {
        float y[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; j++) y[j] = diagonal.flip(__fmul_rn(z[kChunk * s + j], factor), kChunk * s + j);
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
    const uint8_t* of_lane = row_address(of.page, of.region, of.unit.head, row);
#pragma unroll
    for (int i = 0; i < S::kCopies; i++) {
        const uint8_t* from = address_of_lane(of_lane, S::row_of_copy(i, lane) * S::L::kLanes);
        const uint32_t at = S::row_of_copy(i, lane) * S::kPitch + S::byte_of_copy(i, lane);
        lane_copy_16(to + at, from + S::byte_of_copy(i, lane));
    }
}

// Rows below `begin` stay as they are in the page. checksums [num_pages], zeroed by the caller: each page's sum is added.
// first_bad_row: lowered to entry << 32 | region << 20 | head << 8 | row of the first row, in that order, that does not pack.
//
// The warps of a CTA work on units of their own, but begin each of them together: a unit is more code than the instruction
// caches hold, so warps that are not far apart in it fetch it once for all.
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
        __syncthreads();
        const UnitTables& of = own.units[current];
        current = current == 2 ? 0 : current + 1;
        const UnitTables& next = own.units[current];
        UnitTables& after_next = own.units[current == 2 ? 0 : current + 1];
        const bool in_use = of.in_use();
        const UnitPlace place(of.region, of.unit);
        const int kept = first_row_from(of.page.begin, of.region, place);
        PageWriter writer{tables.arena + of.page.page * tables.page_bytes};
        if (in_use && kept > 0) load_codes<WIDTH>(writer.page, of.region, place, own.staged, lane);
        const Quantiser quantiser = Quantiser::of<WIDTH>(place.bits, shared.tables, lane);
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
                const int row = row_of_pass<WIDTH>(pass, lane);
                const bool writes = row >= kept && row < place.rows;
                const Diagonal<WIDTH> diagonal(shared.tables, lane);
                const bool good = encode_row(raw, quantiser, diagonal, own.staged.words[row], &own.staged.scales[row], writes, lane);
                if (writes && !good)
                    atomicMin(first_bad_row, static_cast<long long>(of.entry << 32 | static_cast<int64_t>(of.unit.region) << 20 |
                                                                    of.unit.head << 8 | (place.first_row + row)));
            }
        }
        if (!in_use) continue;
        __syncwarp();
        store_codes<WIDTH>(writer, of.region, place, own.staged, lane);
        __syncwarp(); // the staged codes are read, and may be written again
        writer.add_to(checksums + of.entry);
    }
}

} // namespace tailpack
