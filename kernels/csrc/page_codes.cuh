// Codes and scales of up to 32 rows, between a page and shared memory, in either order of a page's planes.
//
// In shared memory a row is its *nibble words*: word k holds the codes of dims 8 k .. 8 k + 7, code j at bits 4 j. Rows lie
// kPitch words apart, which lets a warp read and write them without bank conflicts in every pattern below.
#pragma once

#include "codec.cuh"
#include "page_rows.cuh"

namespace tailpack {

template <int WIDTH> struct StagedCodes {
    static constexpr int kWords = WIDTH / kChunk;
    static constexpr int kPitch = kWords + 4;
    alignas(16) uint32_t words[kGroupRows][kPitch];
    float scales[kGroupRows];
};

// Where a unit lies in its page, in bytes.
struct UnitPlace {
    int64_t head; // start of the head's planes
    int64_t scales_offset, head_bytes;
    int first_row, rows, rows_of_page, bits;

    __device__ __forceinline__ UnitPlace(const PageRegion& region, const PageUnit& unit)
        : head(region.offset + unit.head * region.head_bytes), scales_offset(region.scales_offset),
          head_bytes(region.head_bytes), first_row(unit.first_row), rows_of_page(static_cast<int>(region.rows)),
          bits(static_cast<int>(region.bits)) {
        rows = min(rows_of_page - first_row, kGroupRows);
    }
    __device__ __forceinline__ bool last() const { return first_row + rows == rows_of_page; }
};

// The first of the unit's rows that lies at or behind token `begin` of the page, or place.rows.
__device__ __forceinline__ int first_row_from(int64_t begin, const PageRegion& region, const UnitPlace& place) {
    int row = static_cast<int>(begin);
    if (region.ratio != 1) row /= static_cast<int>(region.ratio);
    return min(max(row - place.first_row, 0), place.rows);
}

// ---- layout version 2: kernels/fragments.py says which code lies where
//
// Lane 4 g + t owns kWords nibble words. They are gathered from the staged rows, or scattered to them, kBlock at a time.

template <int WIDTH> struct FragmentBlock {
    static constexpr int kWords = WIDTH / kChunk < 16 ? WIDTH / kChunk : 16;
    static constexpr int kBlocks = WIDTH / kChunk / kWords;
    static constexpr uint32_t kLow = 0x0f0f0f0fu, kHigh = 0xf0f0f0f0u;
    uint32_t n[kWords];

    // keys: words 2 i, 2 i + 1 are those of rows 16 m + g and + 8, nibble word 4 s + t of each, i = m (WIDTH / 32) + s
    __device__ __forceinline__ void gather_keys(const StagedCodes<WIDTH>& staged, int block, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int k = 0; k < kWords; k += 2) {
            const int i = (block * kWords + k) / 2, m = i / (WIDTH / 32), s = i % (WIDTH / 32);
            const uint32_t a = staged.words[16 * m + g][4 * s + t], b = staged.words[16 * m + g + 8][4 * s + t];
            n[k] = permute(a, b, 0x5410);
            n[k + 1] = permute(a, b, 0x7632);
        }
    }
    __device__ __forceinline__ void scatter_keys(StagedCodes<WIDTH>& staged, int block, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int k = 0; k < kWords; k += 2) {
            const int i = (block * kWords + k) / 2, m = i / (WIDTH / 32), s = i % (WIDTH / 32);
            staged.words[16 * m + g][4 * s + t] = permute(n[k], n[k + 1], 0x5410);
            staged.words[16 * m + g + 8][4 * s + t] = permute(n[k], n[k + 1], 0x7632);
        }
    }

    // values: words 4 c + 2 e + khalf, of dims 32 c + 4 g .. + 3 (half a staged word) of four rows: a 4x4 transpose of nibbles
    __device__ __forceinline__ void gather_values(const StagedCodes<WIDTH>& staged, int block, int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int k = 0; k < kWords; k += 4)
#pragma unroll
            for (int khalf = 0; khalf < 2; khalf++) {
                const int at = 2 * (block * kWords + k) + g, row = 16 * khalf + 2 * t;
                // rows in the order of j: row, row + 8, row + 1, row + 9
                const uint32_t even = permute(half_word(staged, row, at), half_word(staged, row + 1, at), 0x5140);
                const uint32_t odd = permute(half_word(staged, row + 8, at), half_word(staged, row + 9, at), 0x5140);
                const uint32_t low = (even & kLow) | (odd << 4 & kHigh), high = (even >> 4 & kLow) | (odd & kHigh);
                n[k + khalf] = permute(low, high, 0x5410);
                n[k + 2 + khalf] = permute(low, high, 0x7632);
            }
    }
    __device__ __forceinline__ void scatter_values(StagedCodes<WIDTH>& staged, int block, int lane) const {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int k = 0; k < kWords; k += 4)
#pragma unroll
            for (int khalf = 0; khalf < 2; khalf++) {
                const int at = 2 * (block * kWords + k) + g, row = 16 * khalf + 2 * t;
                const uint32_t low = permute(n[k + khalf], n[k + 2 + khalf], 0x5410);
                const uint32_t high = permute(n[k + khalf], n[k + 2 + khalf], 0x7632);
                const uint32_t even = (low & kLow) | (high << 4 & kHigh), odd = (low >> 4 & kLow) | (high & kHigh);
                half_word(staged, row, at) = static_cast<uint16_t>(permute(even, 0, 0x4420));
                half_word(staged, row + 1, at) = static_cast<uint16_t>(permute(even, 0, 0x4431));
                half_word(staged, row + 8, at) = static_cast<uint16_t>(permute(odd, 0, 0x4420));
                half_word(staged, row + 9, at) = static_cast<uint16_t>(permute(odd, 0, 0x4431));
            }
    }

    // The block's words as they are stored, at `group` in the page: 16 bytes a lane at a time.
    __device__ __forceinline__ void store(PageWriter& writer, int64_t group, int bits, int block, int lane) const {
        constexpr uint32_t kTwo = 0x33333333u, kOne = 0x11111111u;
        if (bits == 4) {
#pragma unroll
            for (int k = 0; k < kWords; k += 4)
                writer.store(group + 128 * (block * kWords + k) + 16 * lane, make_uint4(n[k], n[k + 1], n[k + 2], n[k + 3]));
            return;
        }
#pragma unroll
        for (int k = 0; k < kWords; k += 8) {
            uint32_t w[4];
#pragma unroll
            for (int i = 0; i < 4; i++) w[i] = (n[k + 2 * i] & kTwo) | (n[k + 2 * i + 1] & kTwo) << 2;
            writer.store(group + 64 * (block * kWords + k) + 16 * lane, make_uint4(w[0], w[1], w[2], w[3]));
        }
        if (bits == 3) {
            uint32_t top[kWords / 4];
#pragma unroll
            for (int u = 0; u < kWords / 4; u++) {
                top[u] = 0;
#pragma unroll
                for (int i = 0; i < 4; i++) top[u] |= (n[4 * u + i] >> 2 & kOne) << i;
            }
            const int64_t at = group + 8 * WIDTH + 32 * block * kWords;
            if constexpr (kWords == 16) writer.store(at + 16 * lane, make_uint4(top[0], top[1], top[2], top[3]));
            else writer.store(at + 8 * lane, make_uint2(top[0], top[1]));
        }
    }
    __device__ __forceinline__ void load(const uint8_t* group, int bits, int block, int lane) {
        constexpr uint32_t kTwo = 0x33333333u, kOne = 0x11111111u;
        if (bits == 4) {
#pragma unroll
            for (int k = 0; k < kWords; k += 4) {
                const uint4 w = *reinterpret_cast<const uint4*>(group + 128 * (block * kWords + k) + 16 * lane);
                n[k] = w.x, n[k + 1] = w.y, n[k + 2] = w.z, n[k + 3] = w.w;
            }
            return;
        }
#pragma unroll
        for (int k = 0; k < kWords; k += 8) {
            const uint4 four = *reinterpret_cast<const uint4*>(group + 64 * (block * kWords + k) + 16 * lane);
            const uint32_t w[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int i = 0; i < 4; i++) n[k + 2 * i] = w[i] & kTwo, n[k + 2 * i + 1] = w[i] >> 2 & kTwo;
        }
        if (bits == 3) {
            const uint8_t* at = group + 8 * WIDTH + 32 * block * kWords;
            uint32_t top[kWords / 4];
            if constexpr (kWords == 16) {
                const uint4 w = *reinterpret_cast<const uint4*>(at + 16 * lane);
                top[0] = w.x, top[1] = w.y, top[2] = w.z, top[3] = w.w;
            } else {
                const uint2 w = *reinterpret_cast<const uint2*>(at + 8 * lane);
                top[0] = w.x, top[1] = w.y;
            }
#pragma unroll
            for (int i = 0; i < kWords; i++) n[i] |= (top[i / 4] >> i % 4 & kOne) << 2;
        }
    }

  private:
    static __device__ __forceinline__ const uint16_t& half_word(const StagedCodes<WIDTH>& staged, int row, int at) {
        return reinterpret_cast<const uint16_t*>(staged.words[row])[at];
    }
    static __device__ __forceinline__ uint16_t& half_word(StagedCodes<WIDTH>& staged, int row, int at) {
        return reinterpret_cast<uint16_t*>(staged.words[row])[at];
    }
};

template <int WIDTH>
__device__ __forceinline__ void store_fragments(PageWriter& writer, const UnitPlace& place, Order order,
                                                const StagedCodes<WIDTH>& staged, int lane) {
    const int64_t group = place.head + static_cast<int64_t>(place.first_row) * WIDTH * place.bits / 8;
#pragma unroll
    for (int block = 0; block < FragmentBlock<WIDTH>::kBlocks; block++) {
        FragmentBlock<WIDTH> words;
        if (order == Order::kKeys) words.gather_keys(staged, block, lane);
        else words.gather_values(staged, block, lane);
        words.store(writer, group, place.bits, block, lane);
    }
    if (lane < 8) // index 4 g + k is row g + 8 k
        writer.store(place.head + place.scales_offset + 4 * place.first_row + 16 * lane,
                     make_uint4(__float_as_uint(staged.scales[lane]), __float_as_uint(staged.scales[lane + 8]),
                                __float_as_uint(staged.scales[lane + 16]), __float_as_uint(staged.scales[lane + 24])));
}

template <int WIDTH>
__device__ __forceinline__ void load_fragments(const uint8_t* page, const UnitPlace& place, Order order,
                                               StagedCodes<WIDTH>& staged, int lane) {
    const uint8_t* group = page + place.head + static_cast<int64_t>(place.first_row) * WIDTH * place.bits / 8;
#pragma unroll
    for (int block = 0; block < FragmentBlock<WIDTH>::kBlocks; block++) {
        FragmentBlock<WIDTH> words;
        words.load(group, place.bits, block, lane);
        if (order == Order::kKeys) words.scatter_keys(staged, block, lane);
        else words.scatter_values(staged, block, lane);
    }
    staged.scales[lane / 4 + 8 * (lane % 4)] =
        reinterpret_cast<const float*>(page + place.head + place.scales_offset)[place.first_row + lane];
}

// ---- layout version 1, and regions that keep it: row after row, codes as in codec.cuh, padding zero

// Codes of a nibble word side by side: code j at bit BITS * j.
__device__ __forceinline__ uint32_t squeeze2(uint32_t n) {
    n = (n | n >> 2) & 0x0f0f0f0fu;
    n = (n | n >> 4) & 0x00ff00ffu;
    return (n | n >> 8) & 0xffffu;
}
__device__ __forceinline__ uint32_t spread2(uint32_t codes) { // of the low 16 bits
    uint32_t n = (codes & 0xffu) | (codes << 8 & 0xff0000u);
    n = (n | n << 4) & 0x0f0f0f0fu;
    return (n | n << 2) & 0x33333333u;
}
__device__ __forceinline__ uint32_t squeeze3(uint32_t n) {
    n = (n & 0x07070707u) | (n & 0x70707070u) >> 1;
    n = (n & 0x003f003fu) | (n & 0x3f003f00u) >> 2;
    return (n & 0xfffu) | n >> 16 << 12;
}

template <int WIDTH, int BITS> constexpr int kRowWords = BITS == 3 ? (WIDTH + 9) / 10 : WIDTH * BITS / 32;

// Words word..word + 3 of the unit's rows, side by side; rows that the page does not have are zeros.
template <int WIDTH, int BITS>
__device__ __forceinline__ uint4 row_words(const StagedCodes<WIDTH>& staged, int word, int rows) {
    constexpr int kWords = kRowWords<WIDTH, BITS>;
    if constexpr (BITS == 3) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = (word + i) / kWords, of_row = (word + i) % kWords, k = word3_chunk(of_row);
            const uint32_t* codes = staged.words[min(row, kGroupRows - 1)];
            const uint32_t next = k + 1 < WIDTH / kChunk ? squeeze3(codes[k + 1]) : 0u;
            w[i] = row < rows ? word3(of_row, squeeze3(codes[k]), next) : 0u;
        }
        return make_uint4(w[0], w[1], w[2], w[3]);
    } else { // four words are of one row
        const int row = word / kWords;
        if (row >= rows) return make_uint4(0, 0, 0, 0);
        const uint4* codes = reinterpret_cast<const uint4*>(staged.words[row] + word % kWords * (BITS == 4 ? 1 : 2));
        if constexpr (BITS == 4) return codes[0];
        const uint4 a = codes[0], b = codes[1];
        return make_uint4(squeeze2(a.x) | squeeze2(a.y) << 16, squeeze2(a.z) | squeeze2(a.w) << 16,
                          squeeze2(b.x) | squeeze2(b.y) << 16, squeeze2(b.z) | squeeze2(b.w) << 16);
    }
}

template <int WIDTH, int BITS>
__device__ __forceinline__ void store_rows(PageWriter& writer, const UnitPlace& place, const StagedCodes<WIDTH>& staged,
                                           int lane) {
    constexpr int kWords = kRowWords<WIDTH, BITS>;
    // The last unit of a head also writes the padding behind both planes.
    const int first_word = place.first_row * kWords;
    const int end = place.last() ? static_cast<int>(place.scales_offset / 4) - first_word : place.rows * kWords;
#pragma unroll 1
    for (int at = 4 * lane; at < end; at += 128)
        writer.store(place.head + 4 * (static_cast<int64_t>(first_word) + at), row_words<WIDTH, BITS>(staged, at, place.rows));
    const int64_t scales = place.head + place.scales_offset + 4 * place.first_row;
    const int scales_end = place.last() ? static_cast<int>(place.head + place.head_bytes - scales) / 4 : place.rows;
#pragma unroll 1
    for (int at = 4 * lane; at < scales_end; at += 128) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; i++) w[i] = at + i < place.rows ? __float_as_uint(staged.scales[at + i]) : 0u;
        writer.store(scales + 4 * at, make_uint4(w[0], w[1], w[2], w[3]));
    }
}

template <int WIDTH, int BITS>
__device__ __forceinline__ void load_rows(const uint8_t* page, const UnitPlace& place, StagedCodes<WIDTH>& staged, int lane) {
    constexpr int kWords = kRowWords<WIDTH, BITS>;
    const uint8_t* codes = page + place.head + static_cast<int64_t>(place.first_row) * (4 * kWords);
    if constexpr (BITS == 3) {
        constexpr int kChunks = WIDTH / kChunk;
#pragma unroll 1
        for (int i = lane; i < place.rows * kChunks; i += 32) {
            const int row = i / kChunks, k = i % kChunks;
            staged.words[row][k] = nibbles<3>(read_chunk<3>(codes + row * (4 * kWords), k));
        }
    } else {
        constexpr int kFours = 4; // of a lane, on their way together
#pragma unroll 1
        for (int first = 4 * lane; first < place.rows * kWords; first += 128 * kFours) {
            uint4 four[kFours];
#pragma unroll
            for (int i = 0; i < kFours; i++)
                if (first + 128 * i < place.rows * kWords)
                    four[i] = *reinterpret_cast<const uint4*>(codes + 4 * (first + 128 * i));
#pragma unroll
            for (int i = 0; i < kFours; i++) {
                const int word = first + 128 * i;
                uint4* to = reinterpret_cast<uint4*>(staged.words[word / kWords] + word % kWords * (BITS == 4 ? 1 : 2));
                if (word >= place.rows * kWords) break;
                if constexpr (BITS == 4) {
                    *to = four[i];
                } else {
                    const uint32_t w[4] = {four[i].x, four[i].y, four[i].z, four[i].w};
#pragma unroll
                    for (int j = 0; j < 2; j++)
                        to[j] = make_uint4(spread2(w[2 * j]), spread2(w[2 * j] >> 16), spread2(w[2 * j + 1]),
                                           spread2(w[2 * j + 1] >> 16));
                }
            }
        }
    }
    if (lane < place.rows)
        staged.scales[lane] =
            reinterpret_cast<const float*>(page + place.head + place.scales_offset)[place.first_row + lane];
}

// ---- either

template <int WIDTH>
__device__ __forceinline__ void store_codes(PageWriter& writer, const PageRegion& region, const UnitPlace& place,
                                            const StagedCodes<WIDTH>& staged, int lane) {
    if (region.order == Order::kRows) {
        if (place.bits == 4) store_rows<WIDTH, 4>(writer, place, staged, lane);
        else if (place.bits == 3) store_rows<WIDTH, 3>(writer, place, staged, lane);
        else store_rows<WIDTH, 2>(writer, place, staged, lane);
    } else store_fragments<WIDTH>(writer, place, region.order, staged, lane);
}
template <int WIDTH>
__device__ __forceinline__ void load_codes(const uint8_t* page, const PageRegion& region, const UnitPlace& place,
                                           StagedCodes<WIDTH>& staged, int lane) {
    if (region.order == Order::kRows) {
        if (place.bits == 4) load_rows<WIDTH, 4>(page, place, staged, lane);
        else if (place.bits == 3) load_rows<WIDTH, 3>(page, place, staged, lane);
        else load_rows<WIDTH, 2>(page, place, staged, lane);
    } else load_fragments<WIDTH>(page, place, region.order, staged, lane);
}

} // namespace tailpack
