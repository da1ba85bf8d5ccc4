// Codes of the TurboQuant codec and how they lie in bytes: functions of registers, no thread index anywhere.
//
// A *chunk* is 8 consecutive coordinates of a row; its codes are one integer of 8 * BITS bits, coordinate j at bit
// BITS * j. At 4 and 2 bits the chunks of a row lie one after the other. At 3 bits ten codes share a little-endian u32
// (code j at bit 3 j, the top two bits 0, the last word partial): word w starts at code 10 w.
#pragma once

#include <cuda/std/cstdint>

#include "tables.cuh"

namespace tailpack {

using cuda::std::int32_t;
using cuda::std::int64_t;
using cuda::std::uint16_t;
using cuda::std::uint32_t;
using cuda::std::uint8_t;

constexpr int kChunk = 8;

template <int WIDTH, int BITS> struct Record {
    static constexpr int kWords3 = (WIDTH + 9) / 10;                              // u32 words of a row at 3 bits
    static constexpr int kCodeBytes = BITS == 3 ? 4 * kWords3 : WIDTH * BITS / 8; // a multiple of 4 at every width
};

// Code of the rotated unit coordinate y. A tie goes to the upper cell, so a negative y keeps the smaller magnitude:
// |y| is lowered by one representable step there, which turns "b < |y|" into "b <= |y|".
template <int WIDTH, int BITS> __device__ inline uint32_t quantise(float y) {
    using G = Grid<WIDTH, BITS>;
    const uint32_t sign = y < 0.0f ? 1u : 0u;
    const float magnitude = __uint_as_float((__float_as_uint(y) & 0x7fffffffu) - sign);
    uint32_t index = 0;
#pragma unroll
    for (int i = 0; i < G::kLevels - 1; i++) index += magnitude >= G::boundary(i) ? 1u : 0u;
    return sign << (BITS - 1) | index;
}

// The table T as the eight bytes from which __byte_perm selects: entries low..low+3, 0 behind the last.
template <int WIDTH, int BITS> __device__ constexpr uint32_t levels(int low) {
    using G = Grid<WIDTH, BITS>;
    uint32_t word = 0;
    for (int i = 0; i < 4; i++)
        if (low + i < G::kLevels) word |= static_cast<uint32_t>(G::T(low + i)) << 8 * i;
    return word;
}

// Codes spread to one a nibble: code j of the chunk at bit 4 j.
template <int BITS> __device__ inline uint32_t nibbles(uint32_t chunk) {
    if constexpr (BITS == 4) return chunk;
    uint32_t spread = 0;
#pragma unroll
    for (int j = 0; j < kChunk; j++) spread |= (chunk >> BITS * j & ((1u << BITS) - 1)) << 4 * j;
    return spread;
}

// T of the chunk's eight codes, signs left out, as eight bytes in two words.
template <int WIDTH, int BITS> __device__ inline void chunk_levels(uint32_t chunk, uint32_t& first4, uint32_t& last4) {
    constexpr uint32_t kIndex = 0x11111111u * (Grid<WIDTH, BITS>::kLevels - 1);
    const uint32_t index = nibbles<BITS>(chunk) & kIndex;
    first4 = __byte_perm(levels<WIDTH, BITS>(0), levels<WIDTH, BITS>(4), index & 0xffffu);
    last4 = __byte_perm(levels<WIDTH, BITS>(0), levels<WIDTH, BITS>(4), index >> 16);
}

// Sum of (2 T - 1)^2 = 4 T^2 - 4 T + 1 over the chunk's eight codes, exact.
template <int WIDTH, int BITS> __device__ inline int32_t chunk_square(uint32_t chunk) {
    uint32_t first4, last4;
    chunk_levels<WIDTH, BITS>(chunk, first4, last4);
    const uint32_t squares = __dp4a(first4, first4, __dp4a(last4, last4, 0u));
    const uint32_t sum = __dp4a(first4, 0x01010101u, __dp4a(last4, 0x01010101u, 0u));
    return static_cast<int32_t>(4 * squares - 4 * sum + kChunk);
}

// The values that the chunk's codes decode to, in the rotated domain: +-(2 T - 1) * step / 2, rounded once.
template <int WIDTH, int BITS> __device__ inline void chunk_values(uint32_t chunk, float (&value)[kChunk]) {
    uint32_t four[2];
    chunk_levels<WIDTH, BITS>(chunk, four[0], four[1]);
    constexpr float kHalfStep = 0.5f * Grid<WIDTH, BITS>::step();
#pragma unroll
    for (int j = 0; j < kChunk; j++) {
        const int32_t level = static_cast<int32_t>(four[j / 4] >> 8 * (j % 4) & 0xffu);
        const uint32_t sign = (chunk >> (BITS * j + BITS - 1) & 1u) << 31;
        // __fmul_rn: never fused into the first addition of the transform
        value[j] = __uint_as_float(__float_as_uint(__fmul_rn(static_cast<float>(2 * level - 1), kHalfStep)) ^ sign);
    }
}

// 3 bits: the chunk in which word w begins. Its 30 bits end in the chunk after that one.
__device__ inline int word3_chunk(int w) { return 30 * w / 24; }
__device__ inline uint32_t word3(int w, uint32_t chunk, uint32_t next_chunk) {
    const int bit = 30 * w % 24;
    return (chunk >> bit | next_chunk << (24 - bit)) & 0x3fffffffu;
}

// The codes of chunk k, read from a row's code bytes (4-byte aligned).
template <int BITS> __device__ inline uint32_t read_chunk(const uint8_t* row_codes, int k) {
    if constexpr (BITS == 4) {
        return reinterpret_cast<const uint32_t*>(row_codes)[k];
    } else if constexpr (BITS == 2) {
        return reinterpret_cast<const uint16_t*>(row_codes)[k];
    } else {
        const uint32_t* words = reinterpret_cast<const uint32_t*>(row_codes);
        const int w = kChunk * k / 10, first = kChunk * k % 10; // codes first..9 of word w, the rest from word w + 1
        const uint32_t low = words[w] >> 3 * first;
        const uint32_t high = first > 2 ? words[w + 1] << 3 * (10 - first) : 0u;
        return (low | high) & 0xffffffu;
    }
}

} // namespace tailpack
