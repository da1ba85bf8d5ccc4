// The producers of mqa.cuh: rows of packed pages, or of a tail, to tiles of 16-bit values in shared memory.
#pragma once

#include "codec.cuh"
#include "mqa_work.cuh"

namespace tailpack {

// ---- decoding

// Bytes of the fp16 2 T - 1 for entries first..first + 3 of the table: the low ones (HIGH 0) or the high ones (HIGH 1).
// 2 T - 1 has at most 8 bits, so it is exact.
template <int WIDTH, int HIGH> __device__ constexpr uint32_t magnitude_bytes(int first) {
    uint32_t word = 0;
    for (int i = 0; i < 4; i++) {
        const uint32_t value = 2 * static_cast<uint32_t>(Grid<WIDTH, 4>::T(first + i)) - 1;
        uint32_t exponent = 7;
        while (value >> exponent == 0) exponent--;
        const uint32_t half = (15 + exponent) << 10 | (value << (10 - exponent) & 0x3ff);
        word |= (half >> 8 * HIGH & 0xff) << 8 * i;
    }
    return word;
}

// Eight 4-bit codes, code j at bit 4 j, to eight fp16 +-(2 T - 1), value j in half j. The row's own value is this * step / 2
// * scale.
template <int WIDTH> __device__ __forceinline__ uint4 decode_codes(uint32_t codes) {
    constexpr uint32_t kLow0 = magnitude_bytes<WIDTH, 0>(0), kLow4 = magnitude_bytes<WIDTH, 0>(4);
    constexpr uint32_t kHigh0 = magnitude_bytes<WIDTH, 1>(0), kHigh4 = magnitude_bytes<WIDTH, 1>(4);
    const uint32_t index = codes & 0x77777777u, last = index >> 16;
    const uint32_t even = codes << 4; // the signs of codes 2 i at bit 7 of byte i, as those of 2 i + 1 are in `codes`
    const uint32_t low0 = permute(kLow0, kLow4, index), low4 = permute(kLow0, kLow4, last);
    const uint32_t high0 = permute(kHigh0, kHigh4, index) | (permute(even, codes, 0x5140) & 0x80808080u);
    const uint32_t high4 = permute(kHigh0, kHigh4, last) | (permute(even, codes, 0x7362) & 0x80808080u);
    return {permute(low0, high0, 0x5140), permute(low0, high0, 0x7362), permute(low4, high4, 0x5140),
            permute(low4, high4, 0x7362)};
}

// ---- the producer

__device__ __forceinline__ void publish_half(uint32_t shared, int tile, int half) {
    fence_async_proxy();
    arrive_as_warp(full_barrier(shared, tile, half));
}

// Where the rows of a tile are *even*, their scales are multiplied into the values (rounding them to fp16's 11 bits), less a
// power of two that the tile's rows have in common: weights are then found without looking at a row. That is so where the
// largest scale is at most 2^kEven times the smallest, so that no row's values leave fp16's range, and neither is far from 1.
// Else each row keeps its scale, and the values that lie in the tile are +-(2 T - 1).
constexpr uint32_t kEven = 8;
constexpr uint32_t kEvenFrom = 127 - 60, kEvenTo = 127 + 20; // exponents of the largest scale, biased

// The scales of a tile's 64 rows, of rows `lane` and `lane` + 32 in each warp, with the grid's half step.
struct TileScales {
    float low, high;
    __device__ __forceinline__ void load(const float* scales) {
        const uint32_t lane = threadIdx.x % 32;
        low = scales[lane], high = scales[lane + 32];
    }
};
struct RowFactors {
    __half2 row[2]; // of the thread's rows, r and r + 8
    bool even;
    uint32_t exponent; // of what the rows have in common, biased

    __device__ __forceinline__ RowFactors(const TileScales& scales, float half_step) {
        const uint32_t warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
        const float low = scales.low * half_step, high = scales.high * half_step;
        const uint32_t a = __float_as_uint(low), b = __float_as_uint(high);
        const uint32_t most = __reduce_max_sync(kAllLanes, max(a, b)) >> 23;
        const uint32_t least = __reduce_min_sync(kAllLanes, min(a - 1, b - 1)) + 1 >> 23; // zero rows do not count
        exponent = most == 0 ? 127 : most;
        even = most == 0 || (most - least <= kEven && most >= kEvenFrom && most <= kEvenTo);
        const float down = __uint_as_float((254 - min(exponent, 253u)) << 23);
        const float own = (warp < 2 ? low : high) * down;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float factor = __shfl_sync(kAllLanes, own, 16 * (warp % 2) + lane % 8 + 8 * i);
            row[i] = __float2half2_rn(even ? factor : 1.0f);
        }
    }
};
__device__ __forceinline__ uint4 times_factor(uint4 x, __half2 factor) {
    const auto times = [&](uint32_t& pair) {
        const __half2 value = __hmul2(*reinterpret_cast<const __half2*>(&pair), factor);
        pair = *reinterpret_cast<const uint32_t*>(&value);
    };
    times(x.x), times(x.y), times(x.z), times(x.w);
    return x;
}
__device__ __forceinline__ void store_exponent(uint32_t shared, int tile, float exponent) {
    store_shared_4(shared + mqa_shared::kExponents + 4 * static_cast<uint32_t>(tile), __float_as_uint(exponent));
}

// What a row of a tile that is not even must be multiplied with. Of a zero row, and of norms below 1e-10, which are stored as
// zero rows, the logarithm is only a bound.
__device__ __forceinline__ void store_scale(uint32_t shared, int tile, uint32_t row, float scale) {
    const uint32_t to = shared + mqa_shared::kScales + static_cast<uint32_t>(tile) * 8 * kTileRows;
    store_shared_4(to + 8 * row, __float_as_uint(scale));
    store_shared_4(to + 8 * row + 4, __float_as_uint(log2_fast(fmaxf(scale, 0x1p-60f))));
}

// A thread's part of half a tile: 16 bytes (32 codes) of rows 16 warp + lane % 8 and + 8, at bytes 16 (lane / 8) and + 64
// of the half's 128. Eight lanes then store to the same chunk of eight rows, which the swizzle spreads over all banks.
__device__ __forceinline__ void load_codes(uint4 (&codes)[4], const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < 4; i++) codes[i] = load_stream_16(from + i / 2 * 8 * (kMqaWidth / 2) + i % 2 * 64);
}
// Two decoded values stand in registers of their own before the first is stored. A store reads its registers late: with all
// values in the same four, each is decoded only when the one before has left. (The barrier is what keeps the assembler from
// it; with the first codes it would cost registers that are not there.)
// chunk: where the thread's first four chunks lie in the half of tile 0.
__device__ __forceinline__ void store_decoded(const uint4 (&codes)[4], const uint32_t (&chunk)[4], int tile,
                                              const RowFactors& factors) {
    const auto decode = [&](uint32_t word, int i) {
        return times_factor(decode_codes<kMqaWidth>(word), factors.row[i / 2]);
    };
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t to = static_cast<uint32_t>(tile) * mqa_shared::kTile + i / 2 * 8 * 128 + i % 2 * 2 * mqa_shared::kSlab;
        uint4 a = decode(codes[i].x, i), b = decode(codes[i].y, i);
        if (i > 0) __syncwarp();
        store_shared_16(chunk[0] + to, a);
        store_shared_16(chunk[1] + to, b);
        a = decode(codes[i].z, i), b = decode(codes[i].w, i);
        __syncwarp();
        store_shared_16(chunk[2] + to, a);
        store_shared_16(chunk[3] + to, b);
    }
}

// Rows of pages, this warpgroup's half of them. Codes are loaded a tile ahead of the decoding, behind publish_half: its
// fence would wait for them. A lane keeps the id of one page, so that no other load's latency is in the loop. `near_end` is
// called once, a page before the last.
template <typename NearEnd>
__device__ __forceinline__ void produce_packed(const DecodeArgs& args, const MqaWork& work, uint32_t shared, int half,
                                               uint32_t& round, MqaTimes& times, NearEnd near_end) {
    static_assert(kLongPages <= 32);
    constexpr int kRowBytes = kMqaWidth / 2, kTileBytes = kTileRows * kRowBytes;
    constexpr float kHalfStep = 0.5f * Grid<kMqaWidth, 4>::step();
    const uint32_t thread = threadIdx.x % 128, row = 16 * (thread / 32) + thread % 8, column = thread % 32 / 8;
    const int last = work.rows / kPageTokens - 1;
    const int32_t* const table = args.page_table + work.sequence * args.table_stride + work.first / kPageTokens;
    int id = table[min(static_cast<int>(thread % 32), last)]; // of the page so many pages ahead
    const uint32_t first_code = row * kRowBytes + static_cast<uint32_t>(half) * (kRowBytes / 2) + 16 * column;
    const uint8_t* const pool = args.k_pages + work.kv_head * args.k_head_stride + first_code;
    // Behind the last page one is loaded once more, for nothing.
    const auto page_at = [&](int i) { return pool + __shfl_sync(kAllLanes, id, i) * args.page_stride; };
    uint32_t chunk[4];
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        chunk[i] = half_address(shared, 0, half) + column / 2 * mqa_shared::kSlab + slab_offset(row, column % 2 * 64 + 16 * i);
    const uint32_t scale_offset = static_cast<uint32_t>(args.k_scales_offset) - first_code;
    const auto scales_of = [&](const uint8_t* page, int tile) {
        return reinterpret_cast<const float*>(page + scale_offset) + tile * kTileRows;
    };
    // A page's codes into L2, two pages before they are loaded: that latency is short.
    const auto prefetch = [&](const uint8_t* at) {
#pragma unroll
        for (int i = 0; i < 4; i++) prefetch_l2(at + i % 2 * 8 * kRowBytes + i / 2 * kTileBytes);
    };

    const uint8_t* page = page_at(0);
    uint4 codes[4]; // of the tile that comes
    load_codes(codes, page);
    TileScales scales;
    scales.load(scales_of(page, 0));
    prefetch(page_at(1));
#pragma unroll 1
    for (int left = last; left >= 0; left--, round++) {
        if (left == min(last, 1)) near_end();
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            times.time<kMqaTileWait>([&] { mbarrier_wait(empty_barrier(shared, tile, half), (round & 1) ^ 1); });
            const RowFactors factors(scales, kHalfStep);
            store_decoded(codes, chunk, tile, factors);
            if (half == 0) {
                if (thread == 0)
                    store_exponent(shared, tile, factors.even ? static_cast<float>(static_cast<int>(factors.exponent) - 127) : __uint_as_float(0x7fc00000u));
                if (!factors.even && thread < 32) {
                    store_scale(shared, tile, thread, scales.low * kHalfStep);
                    store_scale(shared, tile, thread + 32, scales.high * kHalfStep);
                }
            }
            publish_half(shared, tile, half);
            if (tile == 0) {
                prefetch(page_at(2));
            } else {
                page = page_at(1);
                id = __shfl_sync(kAllLanes, id, (thread + 1) % 32);
            }
            load_codes(codes, page + (1 - tile) * kTileBytes);
            scales.load(scales_of(page, 1 - tile));
        }
    }
}

// Rows of the tail ring; those behind the last are zeros. A warp copies 16 rows, lane l chunk l of a half's 512 bytes.
__device__ __forceinline__ void produce_rows(const DecodeArgs& args, const MqaWork& work, uint32_t shared, int half,
                                             uint32_t& round) {
    const uint32_t thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
    const uint8_t* const slot = args.k_tail + args.tail_slots[work.sequence] * args.k_tail_slot_stride +
                                work.kv_head * args.tail_head_stride + half * 512 + 16 * lane;
    const uint32_t column = lane / 8 * mqa_shared::kSlab, byte = lane % 8 * 16;
    const int ring = static_cast<int>(args.ring_rows), ring_first = work.first % ring;
#pragma unroll 1
    for (int first = 0; first < work.rows; first += kPairRows, round++)
#pragma unroll 1
        for (int tile = 0; tile < 2; tile++) {
            mbarrier_wait(empty_barrier(shared, tile, half), (round & 1) ^ 1);
            const uint32_t to = half_address(shared, tile, half) + column;
#pragma unroll 1
            for (uint32_t row = 16 * warp; row < 16 * warp + 16; row += 4) {
                uint4 x[4];
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) {
                    const int offset = first + tile * kTileRows + static_cast<int>(row + i), ring_row = ring_first + offset;
                    x[i] = {0, 0, 0, 0};
                    if (offset < work.rows)
                        x[i] = load_stream_16(slot + (ring_row < ring ? ring_row : ring_row - ring) * args.tail_row_stride);
                }
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) store_shared_16(to + slab_offset(row + i, byte), x[i]);
            }
            if (half == 0 && thread == 0) store_exponent(shared, tile, 0.0f);
            publish_half(shared, tile, half);
        }
}

// One of two warpgroups, for half `half` of each tile.
__device__ __forceinline__ void produce(const DecodeArgs& args, uint32_t shared, int half) {
    const bool finds_work = half == 0 && threadIdx.x % 128 < 32;
    const int ctas = static_cast<int>(gridDim.x);
    const auto take_number = [&] {
        int taken = 0;
        if (threadIdx.x % 32 == 0) taken = ctas + atomicAdd(&args.counters->next_packed, 1);
        return taken;
    };
    // Late, so that no CTA holds work back from an idle one. Rows do not depend on what prepare writes, so that the first
    // ones are decoded before it is waited for.
    int number = 0;
    const auto take = [&] {
        if (!finds_work) return;
        wait_for_dependencies();
        number = take_number();
    };
    uint32_t round = 0;
    MqaTimes times;
    for (uint32_t n = 0;; n++) {
        if (finds_work) {
            MqaWork work = n == 0 ? first_work(args, static_cast<int>(blockIdx.x))
                                  : find_work(args, __shfl_sync(kAllLanes, number, 0));
            while (work.kind >= 0 && work.rows == 0) work = find_work(args, __shfl_sync(kAllLanes, take_number(), 0));
            hand_out_work(shared, n, work);
        }
        const MqaWork work = read_work(shared, n);
        release_work(shared, n);
        if (work.kind < 0) break;
        if (finds_work && n > 0) fetch_queries(args, shared, n, work);
        if (work.kind == kPackedPages) {
            produce_packed(args, work, shared, half, round, times, take);
        } else {
            take();
            produce_rows(args, work, shared, half, round);
        }
    }
    if constexpr (TAILPACK_PROFILE)
        if (half == 0) write_profile<kMqaTileWait>(args, times.ns[kMqaTileWait]);
}

} // namespace tailpack
