// The producer of mqa.cuh: rows of packed pages, or of a tail, to tiles of 16-bit values in shared memory.
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

// What row `thread` of a tile must be multiplied with, by two warps. Of a zero row, and of norms below 1e-10, which are
// stored as zero rows, the logarithm is only a bound.
__device__ __forceinline__ void store_scale(uint32_t shared, int tile, float scale) {
    const uint32_t thread = threadIdx.x % 128, to = shared + mqa_shared::kScales + static_cast<uint32_t>(tile) * 8 * kTileRows;
    if (thread >= kTileRows) return;
    store_shared_4(to + 8 * thread, __float_as_uint(scale));
    store_shared_4(to + 8 * thread + 4, __float_as_uint(log2_fast(fmaxf(scale, 0x1p-60f))));
}

// A thread's part of half a tile: 16 bytes (32 codes) of rows 16 warp + lane % 8 and + 8, at bytes 16 (lane / 8) and + 64
// of the half's 128. Eight lanes then store to the same chunk of eight rows, which the swizzle spreads over all banks.
__device__ __forceinline__ void load_codes(uint4 (&codes)[4], const uint8_t* from) {
#pragma unroll
    for (int i = 0; i < 4; i++) codes[i] = load_stream_16(from + i / 2 * 8 * (kMqaWidth / 2) + i % 2 * 64);
}
__device__ __forceinline__ void store_decoded(const uint4 (&codes)[4], uint32_t half, const uint32_t (&chunk)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t to = half + i / 2 * 8 * 128 + i % 2 * 2 * mqa_shared::kSlab;
        store_shared_16(to + chunk[0], decode_codes<kMqaWidth>(codes[i].x));
        store_shared_16(to + chunk[1], decode_codes<kMqaWidth>(codes[i].y));
        store_shared_16(to + chunk[2], decode_codes<kMqaWidth>(codes[i].z));
        store_shared_16(to + chunk[3], decode_codes<kMqaWidth>(codes[i].w));
    }
}

// A page's bytes into L2. They are loaded about two pages later, and that latency the producer can hide.
__device__ __forceinline__ void prefetch_page(const DecodeArgs& args, const uint8_t* page) {
    if (threadIdx.x % 128 != 0) return;
    prefetch_l2(page, kPageTokens * kMqaWidth / 2);
    prefetch_l2(page + args.k_scales_offset, kPageTokens * 4);
}

// Codes are loaded a tile ahead of the decoding. Behind publish_half: its fence would wait for them.
__device__ __forceinline__ void produce_packed(const DecodeArgs& args, const MqaWork& work, uint32_t shared, uint32_t& round,
                                               MqaTimes& times) {
    constexpr int kRowBytes = kMqaWidth / 2;
    constexpr float kHalfStep = 0.5f * Grid<kMqaWidth, 4>::step();
    const uint32_t thread = threadIdx.x % 128, row = 16 * (thread / 32) + thread % 8, column = thread % 32 / 8;
    const int last = work.rows / kPageTokens - 1;
    const int32_t* const table = args.page_table + work.sequence * args.table_stride + work.first / kPageTokens;
    const uint8_t* const pool = args.k_pages + work.kv_head * args.k_head_stride;
    const auto id_at = [&](int i) { return table[min(i, last)]; };
    const auto page_of = [&](int id) { return pool + id * args.page_stride; };
    const uint32_t first_code = row * kRowBytes + 16 * column;
    uint32_t chunk[4]; // where the thread's first four chunks lie in a half
#pragma unroll
    for (uint32_t i = 0; i < 4; i++) chunk[i] = column / 2 * mqa_shared::kSlab + slab_offset(row, column % 2 * 64 + 16 * i);
    const auto load_scale = [&](const uint8_t* page, int tile) { // row `thread` of a tile, by two warps
        const float* scales = reinterpret_cast<const float*>(page + args.k_scales_offset);
        return thread < kTileRows ? scales[tile * kTileRows + static_cast<int>(thread)] : 0.0f;
    };

    const uint8_t* page = page_of(id_at(0));
    int next = id_at(1), after = id_at(2);
    prefetch_page(args, page_of(next));
    uint4 codes[2][4]; // of the tile that comes
    load_codes(codes[0], page + first_code);
    load_codes(codes[1], page + first_code + kRowBytes / 2);
    float scale = load_scale(page, 0);
#pragma unroll 1
    for (int i = 0; i <= last; i++, round++) {
        prefetch_page(args, page_of(after));
        const int later = id_at(i + 3);
#pragma unroll
        for (int tile = 0; tile < 2; tile++) {
            // Behind the last tile the last page is loaded once more, for nothing.
            const uint8_t* const source = tile == 0 ? page + kTileRows * kRowBytes : page_of(next);
#pragma unroll
            for (int half = 0; half < 2; half++) {
                times.time<kMqaTileWait>([&] { mbarrier_wait(empty_barrier(shared, tile, half), (round & 1) ^ 1); });
                store_decoded(codes[half], half_address(shared, tile, half), chunk);
                if (half == 0) store_scale(shared, tile, scale * kHalfStep);
                publish_half(shared, tile, half);
                load_codes(codes[half], source + first_code + half * (kRowBytes / 2));
                if (half == 0) scale = tile == 0 ? load_scale(page, 1) : load_scale(page_of(next), 0);
            }
        }
        page = page_of(next);
        next = after;
        after = later;
    }
}

// Rows of the tail ring; those behind the last are zeros. A warp copies 16 rows, lane l chunk l of a half's 512 bytes.
__device__ __forceinline__ void produce_rows(const DecodeArgs& args, const MqaWork& work, uint32_t shared, uint32_t& round) {
    const uint32_t thread = threadIdx.x % 128, warp = thread / 32, lane = threadIdx.x % 32;
    const uint8_t* const slot = args.k_tail + args.tail_slots[work.sequence] * args.k_tail_slot_stride +
                                work.kv_head * args.tail_head_stride + 16 * lane;
    const uint32_t column = lane / 8 * mqa_shared::kSlab, byte = lane % 8 * 16;
    const int ring = static_cast<int>(args.ring_rows), ring_first = work.first % ring;
#pragma unroll 1
    for (int first = 0; first < work.rows; first += kPairRows, round++)
#pragma unroll 1
        for (int part = 0; part < 4; part++) {
            const int tile = part / 2, half = part % 2;
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
                        x[i] = load_stream_16(slot + (ring_row < ring ? ring_row : ring_row - ring) * args.tail_row_stride + half * 512);
                }
#pragma unroll
                for (uint32_t i = 0; i < 4; i++) store_shared_16(to + slab_offset(row + i, byte), x[i]);
            }
            if (half == 0) store_scale(shared, tile, 1.0f);
            publish_half(shared, tile, half);
        }
}

__device__ __forceinline__ void produce(const DecodeArgs& args, uint32_t shared) {
    const bool finds_work = threadIdx.x % 128 < 32;
    const int ctas = static_cast<int>(gridDim.x);
    int number = static_cast<int>(blockIdx.x);
    uint32_t round = 0;
    MqaTimes times;
    for (uint32_t n = 0;; n++) {
        int next = 0;
        if (finds_work) {
            const auto take_number = [&] { // early: the answer is long on its way
                int taken = 0;
                if (threadIdx.x % 32 == 0) taken = ctas + atomicAdd(&args.counters->next_packed, 1);
                return taken;
            };
            MqaWork work = find_work(args, number);
            while (work.kind >= 0 && work.rows == 0) work = find_work(args, __shfl_sync(kAllLanes, take_number(), 0));
            hand_out_work(shared, n, work);
            if (work.kind >= 0) next = take_number();
        }
        const MqaWork work = read_work(shared, n);
        release_work(shared, n);
        if (work.kind < 0) break;
        if (finds_work) {
            const int64_t pair = work.sequence * args.kv_heads + work.kv_head;
            const int64_t image = (pair * query_blocks(args) + work.block) * 2 + (work.kind == kPackedPages ? 0 : 1);
            mbarrier_wait(shared + mqa_shared::kQueriesEmpty, (n & 1) ^ 1);
            const uint32_t full = shared + mqa_shared::kQueriesFull;
            stage_begin(full, kQueryImageBytes);
            stage_copy(shared + mqa_shared::kQueries, args.queries + image * kQueryImageBytes, kQueryImageBytes, full,
                       evict_last_policy());
            stage_end(full);
        }
        if (work.kind == kPackedPages) produce_packed(args, work, shared, round, times);
        else produce_rows(args, work, shared, round);
        if (finds_work) number = __shfl_sync(kAllLanes, next, 0);
    }
    if constexpr (TAILPACK_PROFILE) write_profile<kMqaTileWait>(args, times.ns[kMqaTileWait]);
}

} // namespace tailpack
