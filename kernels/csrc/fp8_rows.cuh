// Seal and restore of rows as e4m3 codes with one f32 scale: kernels/fp8.py, bit for bit, on every arch alike.
//
// A warp takes a unit of 32 rows, 4 at a time, 8 lanes a row. A lane has chunks of 8 values 64 values apart; it reads them
// twice, the second time out of L1.
#pragma once

#include "page_rows.cuh"

namespace tailpack {

constexpr float kZeroNorm = TAILPACK_ZERO_NORM; // a row whose largest magnitude is below it comes back as zeros
constexpr int kFp8Chunk = 8, kFp8Lanes = 8, kFp8Rows = 32 / kFp8Lanes;
constexpr float kLargestE4m3 = 448.0f;

// e4m3 of x, |x| < 464, nearest even.
__device__ __forceinline__ uint32_t to_e4m3(float x) {
    const uint32_t sign = __float_as_uint(x) >> 24 & 0x80u, magnitude = __float_as_uint(x) & 0x7fffffffu;
    constexpr uint32_t kSmallestNormal = 121u << 23; // 2^-6; below it codes are multiples of 2^-9
    if (magnitude < kSmallestNormal)
        return sign | static_cast<uint32_t>(__float2int_rn(__uint_as_float(magnitude) * 512.0f));
    const uint32_t rounded = magnitude + 0x7ffffu + (magnitude >> 20 & 1u); // 3 of 23 bits are kept
    return sign | ((rounded >> 20) - (120u << 3));
}
__device__ __forceinline__ float from_e4m3(uint32_t code) {
    if ((code & 0x7fu) == 0x7fu) return __uint_as_float(0x7fc00000u);
    // as an f32 whose exponent is 120 too low, which also makes subnormals right
    return __uint_as_float((code & 0x80u) << 24 | (code & 0x7fu) << 20) * 1.329227995784916e36f;
}

template <typename T> __device__ constexpr float largest_finite() { return 3.40282347e38f; }
template <> __device__ constexpr float largest_finite<__half>() { return 65504.0f; }
template <> __device__ constexpr float largest_finite<__nv_bfloat16>() { return 3.38953139e38f; }

// 8 values of a row at a multiple of 16 bytes.
template <typename T> __device__ __forceinline__ void read_chunk8(const uint8_t* row, int chunk, float (&x)[kFp8Chunk]) {
    const uint4* at = reinterpret_cast<const uint4*>(row + chunk * kFp8Chunk * sizeof(T));
    if constexpr (sizeof(T) == 4) {
        const uint4 a = at[0], b = at[1];
        const uint32_t words[kFp8Chunk] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
        for (int i = 0; i < kFp8Chunk; i++) x[i] = __uint_as_float(words[i]);
    } else {
        const uint4 a = at[0];
        halves_to_floats<T>(a.x, x[0], x[1]);
        halves_to_floats<T>(a.y, x[2], x[3]);
        halves_to_floats<T>(a.z, x[4], x[5]);
        halves_to_floats<T>(a.w, x[6], x[7]);
    }
}
template <typename T> __device__ __forceinline__ void write_chunk8(uint8_t* row, int chunk, const float (&x)[kFp8Chunk]) {
    uint4* at = reinterpret_cast<uint4*>(row + chunk * kFp8Chunk * sizeof(T));
    if constexpr (sizeof(T) == 4) {
        at[0] = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
        at[1] = make_uint4(__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7]));
    } else {
        at[0] = make_uint4(pack_halves<T>(x[0], x[1]), pack_halves<T>(x[2], x[3]), pack_halves<T>(x[4], x[5]),
                           pack_halves<T>(x[6], x[7]));
    }
}

// A unit and where it lies in the page, in bytes.
struct Fp8Place {
    PageUnit unit;
    int64_t codes, scales, codes_end, scales_end; // the ends are those of the planes with their padding
    int rows, dim;
    bool last;

    __device__ __forceinline__ Fp8Place(const PageRegion& region, const PageUnit& unit_of_page) : unit(unit_of_page) {
        const int64_t head = region.offset + unit.head * region.head_bytes;
        dim = static_cast<int>(region.dim);
        rows = min(static_cast<int>(region.rows) - unit.first_row, kGroupRows);
        last = unit.first_row + rows == region.rows;
        codes = head + static_cast<int64_t>(unit.first_row) * dim;
        codes_end = head + region.scales_offset;
        scales = head + region.scales_offset + 4 * unit.first_row;
        scales_end = head + region.head_bytes;
    }
};

// Of the lane's row: codes into the page. Returns its scale, NaN where it is not finite.
template <typename T>
__device__ __forceinline__ float seal_fp8_row(PageWriter& writer, int64_t codes, const uint8_t* row, int dim, int lane_of_row) {
    uint32_t largest = 0; // bits of magnitudes order like the magnitudes, NaN above infinity
    for (int chunk = lane_of_row; chunk < dim / kFp8Chunk; chunk += kFp8Lanes) {
        float x[kFp8Chunk];
        read_chunk8<T>(row, chunk, x);
#pragma unroll
        for (int i = 0; i < kFp8Chunk; i++) largest = max(largest, __float_as_uint(x[i]) & 0x7fffffffu);
    }
#pragma unroll
    for (int distance = 1; distance < kFp8Lanes; distance *= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    const bool bad = largest >= 0x7f800000u;
    const float amax = __uint_as_float(largest);
    const bool zero = bad || amax < kZeroNorm;
    const float scale = zero ? 0.0f : amax / kLargestE4m3;
    if (codes >= 0)
        for (int chunk = lane_of_row; chunk < dim / kFp8Chunk; chunk += kFp8Lanes) {
            float x[kFp8Chunk];
            read_chunk8<T>(row, chunk, x);
            uint32_t words[2] = {0, 0};
#pragma unroll
            for (int i = 0; i < kFp8Chunk; i++)
                words[i / 4] |= to_e4m3(zero ? 0.0f : x[i] / scale) << 8 * (i % 4);
            writer.store(codes + kFp8Chunk * chunk, make_uint2(words[0], words[1]));
        }
    return bad ? __uint_as_float(0x7fc00000u) : scale;
}

// As seal_pages (seal.cuh).
template <typename T>
__device__ __forceinline__ void seal_fp8_pages(const PageTables& tables, uint64_t* checksums, long long* first_bad_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    const uint32_t warps = blockDim.x / 32;
    const int lane_of_row = lane % kFp8Lanes, group = lane / kFp8Lanes;
    UnitCursor cursor(tables, blockIdx.x * warps + static_cast<uint32_t>(warp), gridDim.x * warps);
    for (; !cursor.done(tables); cursor.advance(tables)) {
        if (!cursor.in_use(tables)) continue;
        const PageRegion& region = tables.regions[cursor.unit(tables).region];
        const PageRows& page = tables.pages[cursor.entry];
        const Fp8Place place(region, cursor.unit(tables));
        const int kept = static_cast<int>(page.begin / region.ratio) - place.unit.first_row;
        PageWriter writer{tables.arena + page.page * tables.page_bytes};
        float scale = 0.0f; // in the end that of row `lane` of the unit
        for (int first = 0; first < kGroupRows; first += kFp8Rows) {
            const int row = first + group;
            const bool seals = row >= kept && row < place.rows;
            const int64_t codes = place.codes + static_cast<int64_t>(row) * place.dim;
            const int source_row = place.unit.first_row + min(max(row, kept), place.rows - 1);
            const uint8_t* source = row_address(page, region, place.unit.head, source_row);
            const float of_row = seal_fp8_row<T>(writer, seals ? codes : -1, source, place.dim, lane_of_row);
            if (seals && of_row != of_row && lane_of_row == 0)
                atomicMin(first_bad_row, static_cast<long long>(cursor.entry << 32 |
                                                                static_cast<int64_t>(place.unit.region) << 20 |
                                                                place.unit.head << 8 | (place.unit.first_row + row)));
            if (row < kept && row < place.rows) // stays as it is, and counts
                for (int chunk = lane_of_row; chunk < place.dim / kFp8Chunk; chunk += kFp8Lanes)
                    writer.store(codes + kFp8Chunk * chunk,
                                 *reinterpret_cast<const uint2*>(writer.page + codes + kFp8Chunk * chunk));
            const float other = __shfl_sync(0xffffffffu, of_row, lane % kFp8Rows * kFp8Lanes);
            if (lane / kFp8Rows == first / kFp8Rows) scale = other;
        }
        if (lane < kept && lane < place.rows) scale = reinterpret_cast<const float*>(writer.page + place.scales)[lane];
        if (lane >= place.rows) scale = 0.0f;
        __syncwarp(); // the scales that stay are read
        const float low = __shfl_sync(0xffffffffu, scale, 2 * lane % 32), high = __shfl_sync(0xffffffffu, scale, (2 * lane + 1) % 32);
        const int scale_words = place.last ? static_cast<int>(place.scales_end - place.scales) / 4 : place.rows;
        if (2 * lane < min(scale_words, kGroupRows))
            writer.store(place.scales + 8 * lane, make_uint2(__float_as_uint(low), __float_as_uint(high)));
        if (place.last)
            for (int64_t at = place.codes + static_cast<int64_t>(place.rows) * place.dim + 8 * lane; at < place.codes_end; at += 256)
                writer.store(at, make_uint2(0, 0));
        writer.add_to(checksums + cursor.entry);
    }
}

// As restore_pages (restore.cuh).
template <typename T> __device__ __forceinline__ void restore_fp8_pages(const PageTables& tables) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 32, 0);
    const uint32_t warps = blockDim.x / 32;
    constexpr float kMax = largest_finite<T>();
    UnitCursor cursor(tables, blockIdx.x * warps + static_cast<uint32_t>(warp), gridDim.x * warps);
    for (; !cursor.done(tables); cursor.advance(tables)) {
        if (!cursor.in_use(tables)) continue;
        const PageRegion& region = tables.regions[cursor.unit(tables).region];
        const PageRows& page = tables.pages[cursor.entry];
        const Fp8Place place(region, cursor.unit(tables));
        const uint8_t* from = tables.arena + page.page * tables.page_bytes;
        const int begin = max(static_cast<int>(page.begin / region.ratio) - place.unit.first_row, 0);
        const int end = min(static_cast<int>(page.end / region.ratio) - place.unit.first_row, place.rows);
        for (int row = begin + lane / kFp8Lanes; row < end; row += kFp8Rows) {
            const float scale = reinterpret_cast<const float*>(from + place.scales)[row];
            const uint8_t* codes = from + place.codes + static_cast<int64_t>(row) * place.dim;
            uint8_t* to = row_address(page, region, place.unit.head, place.unit.first_row + row);
            for (int chunk = lane % kFp8Lanes; chunk < place.dim / kFp8Chunk; chunk += kFp8Lanes) {
                const uint2 words = *reinterpret_cast<const uint2*>(codes + kFp8Chunk * chunk);
                float x[kFp8Chunk];
#pragma unroll
                for (int i = 0; i < kFp8Chunk; i++) {
                    const float v = from_e4m3((i < 4 ? words.x : words.y) >> 8 * (i % 4) & 0xffu) * scale;
                    x[i] = v > kMax ? kMax : v < -kMax ? -kMax : v; // NaN stays
                }
                write_chunk8<T>(to, chunk, x);
            }
        }
    }
}

} // namespace tailpack
