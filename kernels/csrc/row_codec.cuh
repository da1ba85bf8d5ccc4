// TurboQuant on rows held in registers: rotation, norms, quantising and decoding, for whole rows a lane at a time.
//
// A row of WIDTH values is held by kLanes lanes side by side (one lane up to width 128), in *chunks* of 8 values: lane q of
// the row has chunks kLanes * s + q. So the first three and the last butterflies of the transform need no other lane, and
// with one lane a row no lane needs another at all.
// Every f32 operation and its order are those of kernels/turboquant.py, so codes, scales and rows equal it bit for bit.
#pragma once

#include "codec.cuh"
#include "ptx.cuh"

namespace tailpack {

constexpr uint32_t kInfinityBits = 0x7f800000u;
constexpr float kZeroNorm = TAILPACK_ZERO_NORM; // below it a row stores scale 0 and decodes to exact zeros
constexpr float kMaxNorm = TAILPACK_MAX_NORM;   // above it a row is refused

template <int WIDTH> struct RowLanes {
    static constexpr int kLanes = TAILPACK_ROW_LANES;
    static_assert(WIDTH / kLanes >= 32 && WIDTH / kLanes <= 128, "codes are written in fours, and registers are few");
    static constexpr int kValues = WIDTH / kLanes; // of a row in one lane
    static constexpr int kChunks = kValues / kChunk;
    static constexpr int kRows = 32 / kLanes;   // rows that a warp holds
    static constexpr int kPasses = kLanes;      // until it has held 32
    static constexpr int kWords = WIDTH / kChunk; // nibble words of a row
};

// ---- transform and norm

template <int FIRST, int LAST, int N> __device__ __forceinline__ void butterflies(float (&x)[N]) {
#pragma unroll
    for (int distance = FIRST; distance < LAST; distance *= 2)
#pragma unroll
        for (int i = 0; i < N; i++)
            if (!(i & distance)) {
                const float a = x[i], b = x[i + distance];
                x[i] = a + b;
                x[i + distance] = a - b;
            }
}

// In place: x <- H x, H the Sylvester Hadamard matrix of +-1, butterflies by ascending distance.
template <int WIDTH> __device__ __forceinline__ void hadamard(float (&x)[RowLanes<WIDTH>::kValues], int lane) {
    using L = RowLanes<WIDTH>;
    butterflies<1, kChunk>(x);
#pragma unroll
    for (int distance = 1; distance < L::kLanes; distance *= 2) {
        const float mine = lane & distance ? -1.0f : 1.0f; // the upper lane takes lower - upper
#pragma unroll
        for (int i = 0; i < L::kValues; i++)
            x[i] = fmaf(mine, x[i], __shfl_xor_sync(0xffffffffu, x[i], distance));
    }
    butterflies<kChunk, L::kValues>(x);
}

// Sum of z_i^2 over i, i + STEP, i + 2 STEP and so on, in the reference's order: halves added onto each other. Depth
// first, so that few sums are alive at a time.
template <int STEP, int N> __device__ __forceinline__ float squares_from(const float (&z)[N], int i) {
    if constexpr (STEP == N) return __fmul_rn(z[i], z[i]); // never fused into the addition
    else return squares_from<2 * STEP>(z, i) + squares_from<2 * STEP>(z, i + STEP);
}

template <int WIDTH> __device__ __forceinline__ float sum_of_squares(const float (&z)[RowLanes<WIDTH>::kValues]) {
    using L = RowLanes<WIDTH>;
    if constexpr (L::kLanes == 1) {
        return squares_from<1>(z, 0);
    } else {
        float sums[kChunk];
#pragma unroll
        for (int j = 0; j < kChunk; j++) sums[j] = squares_from<kChunk>(z, j);
#pragma unroll
        for (int distance = L::kLanes / 2; distance >= 1; distance /= 2)
#pragma unroll
            for (int j = 0; j < kChunk; j++) sums[j] += __shfl_xor_sync(0xffffffffu, sums[j], distance);
#pragma unroll
        for (int keep = kChunk / 2; keep >= 1; keep /= 2)
#pragma unroll
            for (int j = 0; j < keep; j++) sums[j] += sums[j + keep];
        return sums[0];
    }
}

// ---- the grid of one number of bits, chosen at run time: the same instructions serve all of them
//
// The cells of the line are numbered 0..2^bits - 1 from the left. Boundary m - (kLevels - 1), m in [0, 2 kLevels - 2], lies
// between cells m and m + 1. A coordinate's *candidate* m is that of the uniform grid of the slope below; the stretched
// boundaries are close enough to uniform that the coordinate is in cell m or m + 1 (checked below for every grid), and one
// comparison with boundary m, looked up in another lane, decides. It is the difference's sign: y - b is never rounded to
// zero, and is +0 where y is on the boundary or, with the middle one kept as -0, y is a zero of either sign. So ties go to
// the upper cell on both sides.

template <int WIDTH, int BITS> struct Candidates {
    using G = Grid<WIDTH, BITS>;
    static constexpr int kLevels = G::kLevels;
    // uniform cells a unit: any value for which candidates_fit
    static constexpr float kSlope = (BITS == 4 ? 0.885f : 0.95f) / G::boundary(0);

    // minus the boundary between cells m and m + 1; +0 for the middle one
    static __device__ __forceinline__ float negated_boundary(int m) {
        float b = 0.0f;
#pragma unroll
        for (int i = 1; i < kLevels; i++) {
            b = m == kLevels - 1 + i ? -G::boundary(i - 1) : b;
            b = m == kLevels - 1 - i ? G::boundary(i - 1) : b;
        }
        return b;
    }
    // what a code decodes to in the rotated domain; 0 for what is no code
    static __device__ __forceinline__ float value(int code) {
        float v = 0.0f;
#pragma unroll
        for (int i = 0; i < kLevels; i++) {
            const float magnitude = static_cast<float>(2 * G::T(i) - 1) * (0.5f * G::step()); // rounded once, as there
            v = code == i ? magnitude : code == i + kLevels ? -magnitude : v;
        }
        return v;
    }
    // 2 T - 1 of magnitudes low..low + 3, a byte each
    static __device__ constexpr uint32_t odd(int low) {
        uint32_t word = 0;
        for (int i = 0; i < 4; i++)
            if (low + i < kLevels) word |= static_cast<uint32_t>(2 * G::T(low + i) - 1) << 8 * i;
        return word;
    }
};

template <int WIDTH, int BITS> __device__ constexpr bool candidates_fit() {
    using C = Candidates<WIDTH, BITS>;
    for (int i = 1; i < C::kLevels; i++) {
        const float at = C::kSlope * Grid<WIDTH, BITS>::boundary(i - 1);
        if (at < i - 0.48f || (i < C::kLevels - 1 && at > i + 0.48f)) return false;
    }
    return true;
}

struct alignas(16) GridConstants {
    float slope;     // uniform cells, of 2 kLevels - 2, a unit
    float last;      // 2 kLevels - 2
    float half_step; // step / 2
    int sign_bit;    // bits - 1
    uint32_t odd_low, odd_high;

    template <int WIDTH, int BITS> static __device__ __forceinline__ GridConstants of() {
        using C = Candidates<WIDTH, BITS>;
        static_assert(candidates_fit<WIDTH, BITS>(), "a coordinate may be in neither of its two candidate cells");
        constexpr float kLast = 2 * C::kLevels - 2;
        return {C::kSlope / kLast, kLast, 0.5f * Grid<WIDTH, BITS>::step(), BITS - 1, C::odd(0), C::odd(4)};
    }
};

// What lanes look up; in shared memory. Of the three grids in the order 2, 3, 4 bits.
struct RowTables {
    float negated_boundary[3][32]; // by candidate
    float value[3][32];            // by the five low bits of any number whose four low ones are the code
    GridConstants grids[3];
    alignas(16) uint32_t negations[4][8]; // the sign bit of [q][p] is bit q of 2 p
    uint32_t signs[64];            // of the diagonal: bit 4 j of word k is 1 where dim 8 k + j is negated

    template <int WIDTH> __device__ __forceinline__ void fill(int thread, int num_threads) {
        for (int i = thread; i < 32; i += num_threads) {
            negated_boundary[0][i] = Candidates<WIDTH, 2>::negated_boundary(i);
            negated_boundary[1][i] = Candidates<WIDTH, 3>::negated_boundary(i);
            negated_boundary[2][i] = Candidates<WIDTH, 4>::negated_boundary(i);
            value[0][i] = Candidates<WIDTH, 2>::value(i % 16);
            value[1][i] = Candidates<WIDTH, 3>::value(i % 16);
            value[2][i] = Candidates<WIDTH, 4>::value(i % 16);
        }
        for (int i = thread; i < 32; i += num_threads)
            negations[i / 8][i % 8] = static_cast<uint32_t>(2 * (i % 8)) << (31 - i / 8) & 0x80000000u;
        if (thread == 0) {
            grids[0] = GridConstants::of<WIDTH, 2>();
            grids[1] = GridConstants::of<WIDTH, 3>();
            grids[2] = GridConstants::of<WIDTH, 4>();
        }
#pragma unroll 1
        for (int i = thread; i < WIDTH / kChunk; i += num_threads) {
            uint32_t of_four = 0, word = 0;
#pragma unroll
            for (int k = 0; k < WIDTH / 32; k++) // the index by which signs are looked up has to be a constant
                of_four = i / 4 == k ? Signs<WIDTH>::word(k) : of_four;
#pragma unroll
            for (int j = 0; j < kChunk; j++) word |= (of_four >> (kChunk * (i % 4) + j) & 1u) << 4 * j;
            signs[i] = word;
        }
    }
};

// ---- the diagonal D

// Bit q: value i of lane q of a row is negated. Known to the compiler, as i is.
template <int WIDTH> __device__ constexpr uint32_t negated_lanes(int i) {
    constexpr int kLanes = RowLanes<WIDTH>::kLanes;
    uint32_t lanes = 0;
    for (int q = 0; q < kLanes; q++) {
        const int dim = kChunk * (kLanes * (i / kChunk) + q) + i % kChunk;
        lanes |= (Signs<WIDTH>::word(dim / 32) >> dim % 32 & 1u) << q;
    }
    return lanes;
}

// A factor times the diagonal. Up to four lanes have so few ways of sharing signs out that a register holds the factor for
// each of them, and the signs cost nothing.
template <int WIDTH> struct TimesDiagonal {
    using L = RowLanes<WIDTH>;
    static constexpr bool kByPattern = L::kLanes <= 4;
    static constexpr int kFactors = kByPattern ? 1 << (L::kLanes - 1) : 1;
    float factors[kFactors];                    // p: negated in the lanes that are the set bits of 2 p
    uint32_t signs[kByPattern ? 1 : L::kChunks]; // RowTables::signs of the lane's chunks

    __device__ __forceinline__ TimesDiagonal(float factor, const RowTables& tables, int lane) {
        const int q = lane % L::kLanes;
        factors[0] = factor;
#pragma unroll
        for (int p = 1; p < kFactors; p++) factors[p] = __uint_as_float(__float_as_uint(factor) ^ tables.negations[q][p]);
        if constexpr (!kByPattern) {
#pragma unroll
            for (int s = 0; s < L::kChunks; s++) signs[s] = tables.signs[L::kLanes * s + q];
        }
    }
    // Value i of the lane times its factor, rounded once.
    __device__ __forceinline__ float operator()(float x, int i) const {
        if constexpr (kByPattern) {
            const uint32_t lanes = negated_lanes<WIDTH>(i);
            const bool first = (lanes & 1u) != 0;
            return __fmul_rn(first ? -x : x, factors[(first ? ~lanes : lanes) >> 1 & (kFactors - 1)]);
        } else {
            const uint32_t negated = signs[i / kChunk] << (31 - 4 * (i % kChunk)) & 0x80000000u;
            return __fmul_rn(x, __uint_as_float(__float_as_uint(factors[0]) ^ negated));
        }
    }
};

struct Quantiser : GridConstants {
    float negated_boundary; // of this lane

    // Read where it is used: its registers are wanted elsewhere.
    __device__ __forceinline__ Quantiser(int bits, const RowTables& tables, int lane)
        : GridConstants(tables.grids[bits - 2]), negated_boundary(tables.negated_boundary[bits - 2][lane]) {}

    // The nibble word of 8 rotated unit coordinates: code j at bits 4 j.
    __device__ __forceinline__ uint32_t codes(const float (&y)[kChunk]) const {
        constexpr float kMagic = 8388608.0f; // 2^23: adding it rounds to whole numbers, which are then the low bits
        constexpr uint32_t kOnes = 0x11111111u, kMagicBits = 0x4b000000u;
        uint32_t candidates = 0, below = 0;
#pragma unroll
        for (int j = kChunk - 1; j >= 0; j--) {
            const float m = fmaf(fma_saturated(y[j], slope, 0.5f), last, kMagic);
            const float over = y[j] + __shfl_sync(0xffffffffu, negated_boundary, __float_as_int(m));
            candidates += __float_as_uint(m) << 4 * j;
            below = __funnelshift_l(__float_as_uint(over), below, 4); // its sign to the top of a nibble
        }
        // the parts of kMagic that were added up, which shifts by 4 j, j = 0..7, leave of a word
        constexpr uint32_t kAdded = kMagicBits + (kMagicBits << 4);
        const uint32_t cells = candidates - (kAdded - kOnes) - (below >> 3 & kOnes);
        const uint32_t signs = kOnes << sign_bit, negative = ~cells & signs;
        return cells ^ signs ^ (negative - (negative >> sign_bit)); // a negative cell c has magnitude kLevels - 1 - c
    }

    // Sum of (2 T - 1)^2 over a nibble word of codes, exact.
    __device__ __forceinline__ uint32_t square(uint32_t codes) const {
        const uint32_t index = codes & ((0x11111111u << sign_bit) - 0x11111111u);
        const uint32_t first4 = permute(odd_low, odd_high, index);
        const uint32_t last4 = permute(odd_low, odd_high, index >> 16);
        return __dp4a(first4, first4, __dp4a(last4, last4, 0u));
    }
};

} // namespace tailpack
