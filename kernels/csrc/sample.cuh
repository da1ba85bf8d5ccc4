// Draws one token a row of logits, as worker/sampler.py does, and advances the row. One CTA a row.
//
// Filters in the order of the sampler: repetition penalty, temperature, top-k, top-p, min-p; equals are taken in order of
// ids. The kept tokens are a prefix of all tokens in the order (largest logit, smallest id): it ends at a logit, which
// is found by its bits, eight at a time, from counts (top-k) or from masses (top-p), and among its equals at an id. Masses
// are fixed point, e^((logit - largest) / temperature) * 2^40, so sums do not depend on the order of their terms.
// The draw is the inverse CDF in order of ids by a number of 53 bits that (seed, position) alone decide (blake2b).
#pragma once

#include "ptx.cuh"

namespace tailpack {

constexpr int kSampleThreads = 1024, kSampleWarps = kSampleThreads / 32;

// All arrays [rows]. temperature 0: greedy. top_k 0, top_p 1, min_p 0, penalty 1: off. seed: two words, the low one first.
// seen: [rows][seen_words], a bit a token of the prompt and the output so far; read and kept only where penalty is not 1.
// tokens, num_tokens: of the step at hand; afterwards of the next: the token drawn, one more token; 0 tokens where the
// row ends, by one of its stops (-1: none) or since num_tokens has reached limit. out: ring [slots][out_stride] in pinned host memory,
// row number % slots: the token; -1 for rows without tokens, -2 where the logits are not finite (the row ends).
struct SampleArgs {
    const void* logits; // [rows][logits_stride], vocabulary of each count
    const float *temperature, *top_p, *min_p, *penalty;
    const int32_t* top_k;
    const uint32_t* seed;
    const int32_t* limit;
    const int32_t* stops; // [rows][num_stops]
    uint32_t* seen;
    int32_t *tokens, *num_tokens;
    const int32_t* step;
    int32_t* out;
    int64_t logits_stride, seen_words;
    int32_t vocabulary, num_stops, slots, out_stride;
};

// Of (seed, position), the personalisation "tailpack-draw-v1", 8 bytes: RFC 7693.
__device__ __forceinline__ uint64_t rotate_right(uint64_t x, int by) { return x >> by | x << (64 - by); }
__device__ __forceinline__ uint64_t draw_bits(uint64_t seed, uint64_t position) {
    const uint64_t iv[8] = {0x6a09e667f3bcc908ull, 0xbb67ae8584caa73bull, 0x3c6ef372fe94f82bull, 0xa54ff53a5f1d36f1ull,
                            0x510e527fade682d1ull, 0x9b05688c2b3e6c1full, 0x1f83d9abfb41bd6bull, 0x5be0cd19137e2179ull};
    const uint64_t order[10] = {0xfedcba9876543210ull, 0x357b20c16df984aeull, 0x491763eadf250c8bull, 0x8f04a562ebcd1397ull,
                                0xd386cb1efa427509ull, 0x91ef57d438b0a6c2ull, 0xb8293670a4def15cull, 0xa2684f05931ce7bdull,
                                0x5a417d2c803b9ef6ull, 0x0dc3e9bf5167482aull}; // nibble i: which word comes i-th
    const uint64_t h0 = iv[0] ^ 0x01010008ull;
    uint64_t v[16], m[16] = {seed, position};
    for (int i = 0; i < 8; i++) v[i] = v[i + 8] = iv[i];
    v[0] = h0;
    v[6] ^= 0x6b6361706c696174ull; // "tailpack"
    v[7] ^= 0x31762d776172642dull; // "-draw-v1"
    v[12] ^= 16; // bytes so far
    v[14] = ~v[14]; // the last block
    for (int round = 0; round < 12; round++) {
        const uint64_t words = order[round % 10];
        for (int i = 0; i < 8; i++) {
            const int turn = i / 4, at = i % 4;
            const int a = at, b = 4 + (at + turn) % 4, c = 8 + (at + 2 * turn) % 4, d = 12 + (at + 3 * turn) % 4;
            v[a] += v[b] + m[words >> 8 * i & 15];
            v[d] = rotate_right(v[d] ^ v[a], 32);
            v[c] += v[d];
            v[b] = rotate_right(v[b] ^ v[c], 24);
            v[a] += v[b] + m[words >> (8 * i + 4) & 15];
            v[d] = rotate_right(v[d] ^ v[a], 16);
            v[c] += v[d];
            v[b] = rotate_right(v[b] ^ v[c], 63);
        }
    }
    return h0 ^ v[0] ^ v[8];
}

// Larger floats have larger keys.
__device__ __forceinline__ uint32_t order_key(float x) {
    const uint32_t bits = __float_as_uint(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_order_key(uint32_t key) { return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key); }

struct SampleShared {
    unsigned long long words[kSampleWarps];
    unsigned long long bins[256];
    unsigned long long chosen[2];
};

// The sum, or the largest, of a word a thread, in all threads.
template <bool LARGEST>
__device__ __forceinline__ unsigned long long of_all(unsigned long long x, SampleShared& shared) {
#pragma unroll
    for (int distance = 16; distance >= 1; distance /= 2) {
        const unsigned long long other = __shfl_xor_sync(0xffffffffu, x, distance);
        x = LARGEST ? (other > x ? other : x) : x + other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared.words[threadIdx.x / 32] = x;
    __syncthreads();
    x = shared.words[0];
    for (int w = 1; w < kSampleWarps; w++) x = LARGEST ? (shared.words[w] > x ? shared.words[w] : x) : x + shared.words[w];
    return x;
}
// The sum over all threads before this one.
__device__ __forceinline__ unsigned long long before_this(unsigned long long x, SampleShared& shared) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    unsigned long long sum = x;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const unsigned long long other = __shfl_up_sync(0xffffffffu, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == 31) shared.words[warp] = sum;
    __syncthreads();
    unsigned long long earlier = sum - x;
    for (int w = 0; w < warp; w++) earlier += shared.words[w];
    return earlier;
}

template <typename T> struct SampleRow {
    const SampleArgs& args;
    SampleShared& shared;
    const T* logits;
    const uint32_t* seen; // null: no penalty
    float penalty, inverse_temperature, largest;

    __device__ __forceinline__ float logit(int i) const { return penalized(i, static_cast<float>(logits[i])); }
    __device__ __forceinline__ float penalized(int i, float x) const {
        if (seen == nullptr || (seen[i / 32] >> i % 32 & 1u) == 0) return x;
        return x > 0.0f ? x / penalty : x * penalty;
    }
    __device__ __forceinline__ unsigned long long mass(float x) const {
        return static_cast<unsigned long long>(expf((x - largest) * inverse_temperature) * 1099511627776.0f);
    }
    // Where the shortest prefix of tokens, largest first, ends that sums up to `wanted` (1 or more, at most what there is)
    // of tokens with keys from `least` on: its last key; left: how much of the sum its equals must bring.
    template <bool MASSES>
    __device__ __forceinline__ uint32_t last_key(unsigned long long wanted, uint32_t least, unsigned long long& left) const {
        uint32_t prefix = 0;
        for (int shift = 24; shift >= 0; shift -= 8) {
            __syncthreads();
            for (int i = static_cast<int>(threadIdx.x); i < 256; i += kSampleThreads) shared.bins[i] = 0;
            __syncthreads();
            for (int i = static_cast<int>(threadIdx.x); i < args.vocabulary; i += kSampleThreads) {
                const float x = logit(i);
                const uint32_t key = order_key(x);
                if (key < least || (shift < 24 && (key ^ prefix) >> (shift + 8) != 0)) continue;
                atomicAdd(&shared.bins[key >> shift & 255u], MASSES ? mass(x) : 1ull);
            }
            __syncthreads();
            if (threadIdx.x == 0) {
                unsigned long long sum = 0;
                int bin = 255;
                while (bin > 0 && sum + shared.bins[bin] < wanted) sum += shared.bins[bin--];
                shared.chosen[0] = static_cast<unsigned long long>(bin);
                shared.chosen[1] = wanted - sum;
            }
            __syncthreads();
            prefix |= static_cast<uint32_t>(shared.chosen[0]) << shift;
            wanted = shared.chosen[1];
        }
        left = wanted;
        return prefix;
    }
    // The mass of token i where it is kept, else 0. at: how many tokens before it have the key `least`; counted on.
    __device__ __forceinline__ unsigned long long kept_mass(int i, uint32_t least, unsigned long long equals,
                                                            unsigned long long least_mass, unsigned long long& at) const {
        const float x = logit(i);
        const uint32_t key = order_key(x);
        if (key < least) return 0;
        if (key == least && equals != ~0ull && at++ >= equals) return 0;
        const unsigned long long own = mass(x);
        return own >= least_mass ? own : 0;
    }
    // Among the tokens whose key is `key`, in order of ids: how many this thread's range [begin, end) comes after.
    __device__ __forceinline__ unsigned long long equals_before(uint32_t key, int begin, int end, unsigned long long& own) const {
        own = 0;
        for (int i = begin; i < end; i++) own += order_key(logit(i)) == key;
        return before_this(own, shared);
    }
};

template <typename T> __device__ __forceinline__ int draw_row(const SampleRow<T>& row, int r, int position) {
    const SampleArgs& args = row.args;
    SampleShared& shared = row.shared;
    const int thread = static_cast<int>(threadIdx.x), vocabulary = args.vocabulary;
    uint32_t least = 0;                 // keys from here on are kept,
    unsigned long long equals = ~0ull;  // and so many of those that are equal to it
    const int top_k = args.top_k[r];
    if (top_k > 0 && top_k < vocabulary) least = row.template last_key<false>(top_k, 0, equals);
    const float top_p = args.top_p[r];
    if (top_p < 1.0f) {
        unsigned long long sum = 0;
        for (int i = thread; i < vocabulary; i += kSampleThreads) {
            const float x = row.logit(i);
            if (order_key(x) > least || equals == ~0ull) sum += row.mass(x);
        }
        sum = of_all<false>(sum, shared);
        const unsigned long long one = row.mass(from_order_key(least));
        if (equals != ~0ull) sum += equals * one;
        const unsigned long long wanted = static_cast<unsigned long long>(ceil(static_cast<double>(top_p) * static_cast<double>(sum)));
        unsigned long long left;
        const uint32_t last = row.template last_key<true>(wanted > 0 ? (wanted < sum ? wanted : sum) : 1, least, left);
        const unsigned long long each = row.mass(from_order_key(last));
        const unsigned long long needed = each > 0 ? (left + each - 1) / each : 1;
        equals = last > least ? needed : (needed < equals ? needed : equals);
        least = last;
    }
    const float min_p = args.min_p[r];
    const unsigned long long least_mass = static_cast<unsigned long long>(ceil(static_cast<double>(min_p) * 1099511627776.0));
    const int each = (vocabulary + kSampleThreads - 1) / kSampleThreads, begin = min(thread * each, vocabulary), end = min(begin + each, vocabulary);
    unsigned long long own_equals, rank = 0;
    if (equals != ~0ull) rank = row.equals_before(least, begin, end, own_equals);
    unsigned long long own = 0, at = rank;
    int last = -1;
    for (int i = begin; i < end; i++) {
        const unsigned long long mass = row.kept_mass(i, least, equals, least_mass, at);
        own += mass;
        if (mass > 0) last = i;
    }
    const unsigned long long earlier = before_this(own, shared), total = of_all<false>(own, shared);
    last = static_cast<int>(of_all<true>(static_cast<unsigned long long>(last + 1), shared)) - 1;
    if (thread == 0) {
        const uint64_t seed = args.seed[2 * r] | static_cast<uint64_t>(args.seed[2 * r + 1]) << 32;
        const double uniform = static_cast<double>(draw_bits(seed, static_cast<uint64_t>(position)) >> 11) * 0x1p-53;
        shared.chosen[0] = static_cast<unsigned long long>(uniform * static_cast<double>(total));
        shared.chosen[1] = static_cast<unsigned long long>(last);
    }
    __syncthreads();
    const unsigned long long target = shared.chosen[0];
    if (earlier <= target && target < earlier + own) { // one thread's range; the first token whose sum is beyond it
        unsigned long long sum = earlier;
        at = rank;
        for (int i = begin; i < end && sum <= target; i++) {
            sum += row.kept_mass(i, least, equals, least_mass, at);
            if (sum > target) shared.chosen[1] = static_cast<unsigned long long>(i);
        }
    }
    __syncthreads();
    return static_cast<int>(shared.chosen[1]);
}

template <typename T> __device__ __forceinline__ void sample_row(const SampleArgs& args) {
    launch_dependents();
    wait_for_dependencies();
    __shared__ SampleShared shared;
    const int r = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), num_tokens = args.num_tokens[r];
    int32_t* out = args.out + static_cast<int64_t>(*args.step % args.slots) * args.out_stride + r;
    if (num_tokens <= 0) {
        if (thread == 0) *out = -1;
        return;
    }
    const float penalty = args.penalty[r], temperature = args.temperature[r];
    uint32_t* seen = args.seen == nullptr || penalty == 1.0f ? nullptr : args.seen + r * args.seen_words;
    const T* logits = static_cast<const T*>(args.logits) + r * args.logits_stride;
    SampleRow<T> row{args, shared, logits, seen, penalty, 0.0f, 0.0f};
    bool finite = true;
    float most = -__int_as_float(0x7f800000);
    uint32_t at = 0; // of a thread's equals the first
    auto see = [&](int i, float x) {
        finite &= x < __int_as_float(0x7f800000); // neither NaN nor +inf
        if (x > most) most = x, at = static_cast<uint32_t>(i);
    };
    const bool wide = sizeof(T) == 2 && reinterpret_cast<uintptr_t>(logits) % 16 == 0;
    const int in_eights = wide ? args.vocabulary / 8 : 0;
    if constexpr (sizeof(T) == 2) {
#pragma unroll 4
        for (int i = thread; i < in_eights; i += kSampleThreads) {
            const uint4 eight = load_l2_16(logits + 8 * i);
            const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
            for (int j = 0; j < 8; j++) see(8 * i + j, row.penalized(8 * i + j, half_of<T>(words[j / 2], j % 2)));
        }
    }
    for (int i = 8 * in_eights + thread; i < args.vocabulary; i += kSampleThreads) see(i, row.logit(i));
    // + 0: zeros of both signs are equals
    unsigned long long best = static_cast<unsigned long long>(order_key(most + 0.0f)) << 32 | (0xffffffffu - at);
    best = of_all<true>(finite ? best : ~0ull, shared);
    row.largest = from_order_key(static_cast<uint32_t>(best >> 32));
    const bool broken = best == ~0ull || !(row.largest > -__int_as_float(0x7f800000));
    int token = broken ? -2 : static_cast<int>(0xffffffffu - static_cast<uint32_t>(best));
    if (!broken && temperature > 0.0f) {
        row.inverse_temperature = 1.0f / temperature;
        token = draw_row(row, r, num_tokens);
    }
    if (thread != 0) return;
    bool ends = broken || num_tokens >= args.limit[r];
    for (int i = 0; i < args.num_stops; i++) ends |= token == args.stops[r * args.num_stops + i];
    if (!broken) {
        if (seen != nullptr) seen[token / 32] |= 1u << token % 32;
        args.tokens[r] = token;
    }
    args.num_tokens[r] = ends ? 0 : num_tokens + 1;
    *out = token;
}

} // namespace tailpack
