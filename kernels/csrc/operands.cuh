// Codes of page layout version 2 (kernels/fragments.py) as int8 A operands of m16n8k32.
//
// A group of 32 rows is D / 16 *steps* of the tensor core for keys (16 rows, 32 dims) as for values (16 dims, 32 rows). A
// lane's share of a step is two nibble words, khalf 0 and 1; the low four nibbles of a word are row (or dim) g of the
// step, the high four row g + 8.
//
// A code stands for +-(T - 1/2) half-integer levels. What is multiplied is that less 1/2, an integer:
//   4 bits: two selections from byte tables, added by the tensor core. A selector's bit 3, here the code's sign, selects
//     the sign of the byte instead of the byte. So the table T by the word gives T, or 0 for a negative code; and the
//     table -T, reversed, by the inverted word gives -T, or -1 for a positive code.
//   3 and 2 bits: one selection from {T - 1 | -T}, a code being a nibble of less than 8.
// The missing 1/2 of each product is put back as half the sum of the B operand's column, once.
#pragma once

#include "codec.cuh"
#include "ptx.cuh"

namespace tailpack {

// Words that the compiler must not know, so that they stay in registers: it would turn ~w into logic, and load the
// table's half anew before each use.
struct Opaque {
    uint32_t minus_one, negative_table;
    template <int D> static __device__ __forceinline__ Opaque make(uint32_t minus_one);
};

template <int D, int BITS> struct Operands {
    static constexpr int kBits = BITS, kSteps = D / 16;
    static constexpr int kGroupBytes = 4 * D * BITS;
    static constexpr int kQuads = kSteps / 4;

    // The nibble words of steps 4 quad .. 4 quad + 3: words 2 i and 2 i + 1 are step i's. `lane_group`: address of the
    // group plus 16 * lane.
    static __device__ __forceinline__ void load(uint32_t (&n)[8], uint32_t lane_group, int quad) {
        if constexpr (BITS == 4) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint4 w = load_shared_16(lane_group + (2 * quad + i) * 512);
                n[4 * i] = w.x, n[4 * i + 1] = w.y, n[4 * i + 2] = w.z, n[4 * i + 3] = w.w;
            }
        } else {
            const uint4 w = load_shared_16(lane_group + quad * 512);
            const uint32_t two[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int i = 0; i < 4; i++) n[2 * i] = two[i] & 0x33333333u, n[2 * i + 1] = two[i] >> 2 & 0x33333333u;
            if constexpr (BITS == 3) {
                // Two words of top bits: 8 bytes a lane where there are no more, else half of a lane's 16.
                const int lane = static_cast<int>(threadIdx.x % 32);
                const uint32_t top = D == 64 ? lane_group - 8 * lane : lane_group + quad / 2 * 512 + quad % 2 * 8;
                const uint2 b = load_shared_8(top + 8 * D);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    const uint32_t four = i < 4 ? b.x : b.y;
                    n[i] |= (i % 4 < 2 ? four << (2 - i % 4) : four >> (i % 4 - 2)) & 0x44444444u;
                }
            }
        }
    }

    // c[set] += codes * b[set] for one step. VALUES: b is unsigned, the probabilities.
    template <bool VALUES, int SETS>
    static __device__ __forceinline__ void multiply(int32_t (&c)[SETS][4], uint32_t w0, uint32_t w1,
                                                    const uint32_t (&b)[SETS][2], const Opaque& opaque) {
        const uint32_t h0 = w0 >> 16, h1 = w1 >> 16; // a selector's high half is ignored
        if constexpr (BITS == 4) {
            constexpr uint32_t kT0 = table(0), kT1 = table(4), kN1 = table(12);
            const uint32_t kN0 = opaque.negative_table, minus_one = opaque.minus_one;
            multiply_step<VALUES, SETS>(c, permute(kT0, kT1, w0), permute(kT0, kT1, h0), permute(kT0, kT1, w1),
                                        permute(kT0, kT1, h1), b);
            // ~w, on the multiplier's pipe: the permutes keep the logic one busy
            multiply_step<VALUES, SETS>(c, permute(kN0, kN1, multiply_add(w0, minus_one, minus_one)),
                                        permute(kN0, kN1, multiply_add(h0, minus_one, minus_one)),
                                        permute(kN0, kN1, multiply_add(w1, minus_one, minus_one)),
                                        permute(kN0, kN1, multiply_add(h1, minus_one, minus_one)), b);
        } else {
            constexpr uint32_t kT0 = table(0), kT1 = table(4);
            multiply_step<VALUES, SETS>(c, permute(kT0, kT1, w0), permute(kT0, kT1, h0), permute(kT0, kT1, w1),
                                        permute(kT0, kT1, h1), b);
        }
    }

    // Entries first..first+3. 4 bits: 0..7 T, 8..15 -T reversed. Else one entry a code: T - 1, and then -T.
    static __device__ constexpr uint32_t table(int first) {
        constexpr int kLevels = Grid<D, BITS>::kLevels;
        uint32_t word = 0;
        for (int i = 0; i < 4; i++) {
            const int k = first + i;
            int entry = 0;
            if (BITS == 4) entry = k < kLevels ? Grid<D, BITS>::T(k) : -Grid<D, BITS>::T(2 * kLevels - 1 - k);
            else if (k < 2 * kLevels) entry = k < kLevels ? Grid<D, BITS>::T(k) - 1 : -Grid<D, BITS>::T(k - kLevels);
            word |= static_cast<uint32_t>(entry & 0xff) << 8 * i;
        }
        return word;
    }

  private:
    template <bool VALUES, int SETS>
    static __device__ __forceinline__ void multiply_step(int32_t (&c)[SETS][4], uint32_t a0, uint32_t a1, uint32_t a2,
                                                         uint32_t a3, const uint32_t (&b)[SETS][2]) {
#pragma unroll
        for (int set = 0; set < SETS; set++) {
            if constexpr (VALUES) mma_s8_u8(c[set], a0, a1, a2, a3, b[set][0], b[set][1]);
            else mma_s8_s8(c[set], a0, a1, a2, a3, b[set][0], b[set][1]);
        }
    }
};

template <int D> __device__ __forceinline__ Opaque Opaque::make(uint32_t minus_one) {
    return {minus_one, minus_one & Operands<D, 4>::table(8)};
}

} // namespace tailpack
