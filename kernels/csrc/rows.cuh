// Attention of one warp over rows that are read as 16-bit floats: dense tails and pages, fp8 pages, and TurboQuant pages
// in canonical row order. Registers only, but for the result.
//
// A *tile* is 16 rows. Rows are the A operand of m16n8k16 (tokens on M), up to 8 query vectors its 8 columns. Lane
// (g, t), g = lane / 4, t = lane % 4, loads kLaneDims consecutive dims of rows g and g + 8 of a tile: of every 8 dims,
// four words of two, words 0 and 1 are the k-slices of one mma, words 2 and 3 those of another. The order of dims
// within a product is free as long as q's fragment has the same one, so q is loaded in the same way. V^T is the A operand
// of the second product by the same loads through transpose_8x8.
//
// A *round* is TILES tiles of the warp: scores of all of them, one softmax step, then the output, dims step by step, so
// that no width needs more than a step's accumulators. Loads run kPairsAhead pairs ahead of their use.
//
// A *format* says what a row's bytes mean, a *source* where the rows of an item lie:
//   DenseFormat<D, T>, Fp8Format<D>, TurboQuantFormat<D, BITS>;  RingRows<Format> (tails), PageRows<Format, CACHED>.
#pragma once

#include "codec.cuh"
#include "decode_args.cuh"

namespace tailpack {

constexpr int kTileRows = 16;
constexpr float kLog2e = 1.44269504f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

template <typename A, typename B> struct IsSame {
    static constexpr bool kValue = false;
};
template <typename A> struct IsSame<A, A> {
    static constexpr bool kValue = true;
};

// Factor on p before it is rounded to a half, taken out of the result again: keeps f16's 11 bits down to p = 2^-29.
template <typename Compute> struct ProbabilityBias {
    static constexpr float kUp = 1.0f, kDown = 1.0f;
};
template <> struct ProbabilityBias<__half> {
    static constexpr float kUp = 32768.0f, kDown = 1.0f / 32768.0f;
};

// ---- formats
//
// Compute: dtype of the products. Raw: what one load of a lane brings, kLaneDims dims of one row.
// decode: the i-th eight dims of a Raw as four words of two halves; `chunk` is their place in the row, in eights.
// Word j holds dims pair_dim(j, 0) (low half) and pair_dim(j, 1); arrange() puts q's natural words into that order.
// kScaled: the row has an f32 scale still to be multiplied by unit(). kRotated: q is the one that prepare rotated.
// kRowBytes: bytes from row to row in a page; 0: as the arguments say. kPairsAhead: pairs of loads under way, a lane.

template <int D, typename T> struct DenseFormat {
    using Compute = T;
    using Raw = uint4;
    static constexpr int kLaneDims = 8, kRowBytes = 0, kPairsAhead = 4;
    static constexpr bool kScaled = false, kRotated = false;
    static __device__ constexpr float unit() { return 1.0f; }
    template <bool CACHED> static __device__ __forceinline__ Raw load(const uint8_t* row, int step, int t) {
        const uint8_t* p = row + (4 * step + t) * 16;
        return CACHED ? load_cached_16(p) : load_stream_16(p);
    }
    static __device__ __forceinline__ void decode(const Raw& raw, int, int, uint32_t (&w)[4]) {
        w[0] = raw.x, w[1] = raw.y, w[2] = raw.z, w[3] = raw.w;
    }
    static __device__ constexpr int pair_dim(int j, int half) { return 2 * j + half; }
    static __device__ __forceinline__ void arrange(uint32_t (&)[4]) {}
};

// e4m3 codes [rows][D] and f32 scales. A byte's exponent and mantissa, moved to where bf16 has them, are its value times
// 2^-120, subnormals included; so one product makes it exact. Bytes 0, 2 and 1, 3 of a word are two shifts away.
template <int D> struct Fp8Format {
    using Compute = __nv_bfloat16;
    using Raw = uint4;
    static constexpr int kLaneDims = 16, kRowBytes = D, kPairsAhead = 4;
    static constexpr bool kScaled = true, kRotated = false;
    static __device__ constexpr float unit() { return 1.0f; }
    template <bool CACHED> static __device__ __forceinline__ Raw load(const uint8_t* row, int step, int t) {
        const uint8_t* p = row + (4 * step + t) * 16;
        return CACHED ? load_cached_16(p) : load_stream_16(p);
    }
    static __device__ __forceinline__ void decode(const Raw& raw, int i, int, uint32_t (&w)[4]) {
        constexpr uint32_t kSigns = 0x80008000u, kValues = 0x07f007f0u, k2To120 = 0x7b807b80u;
        const uint32_t four[2] = {i ? raw.z : raw.x, i ? raw.w : raw.y};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t x = four[half];
            w[2 * half] = multiply_halves<__nv_bfloat16>((x << 8 & kSigns) | (x << 4 & kValues), k2To120);
            w[2 * half + 1] = multiply_halves<__nv_bfloat16>((x & kSigns) | (x >> 4 & kValues), k2To120);
        }
    }
    static __device__ constexpr int pair_dim(int j, int half) { return 4 * (j / 2) + 2 * half + j % 2; }
    static __device__ __forceinline__ void arrange(uint32_t (&w)[4]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t a = w[2 * half], b = w[2 * half + 1];
            w[2 * half] = permute(a, b, 0x5410);
            w[2 * half + 1] = permute(a, b, 0x7632);
        }
    }
};

// Codes in canonical row order. A code's value is +-(2 T - 1) half steps, exact in bf16; its two bytes come from two
// byte tables.
template <int D, int BITS> struct TurboQuantFormat {
    using Compute = __nv_bfloat16;
    static constexpr int kLaneDims = BITS == 3 ? 8 : 16; // 3 bits: eight codes lie in two words
    static constexpr int kLoadBytes = BITS == 3 ? 8 : kLaneDims * BITS / 8;
    struct Raw {
        uint32_t word[kLoadBytes / 4];
    };
    static constexpr int kRowBytes = Record<D, BITS>::kCodeBytes, kPairsAhead = 2;
    static constexpr bool kScaled = true, kRotated = true;
    static __device__ constexpr float unit() { return 0.5f * Grid<D, BITS>::step(); }

    template <bool CACHED> static __device__ __forceinline__ Raw load(const uint8_t* row, int step, int t) {
        Raw raw;
        if constexpr (BITS == 3) {
            const int w = kChunk * (4 * step + t) / 10, next = w + 1 < Record<D, 3>::kWords3 ? w + 1 : w;
            raw.word[0] = load_cached_4(row + 4 * w);
            raw.word[1] = load_cached_4(row + 4 * next);
        } else {
            const uint8_t* p = row + (4 * step + t) * kLoadBytes;
            if constexpr (kLoadBytes == 8) {
                const uint2 x = load_cached_8(p);
                raw.word[0] = x.x, raw.word[1] = x.y;
            } else {
                raw.word[0] = load_cached_4(p);
            }
        }
        return raw;
    }
    static __device__ __forceinline__ void decode(const Raw& raw, int i, int chunk, uint32_t (&w)[4]) {
        uint32_t codes;
        if constexpr (BITS == 4) codes = raw.word[i];
        if constexpr (BITS == 2) codes = nibbles<2>(raw.word[i / 2] >> 16 * (i % 2));
        if constexpr (BITS == 3) {
            const int first = kChunk * chunk % 10; // codes first..9 of word 0, the rest from word 1
            const uint32_t high = first > 2 ? raw.word[1] << 3 * (10 - first) : 0u;
            codes = nibbles<3>(raw.word[0] >> 3 * first | high);
        }
        constexpr uint32_t kIndex = 0x11111111u * (Grid<D, BITS>::kLevels - 1);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const uint32_t four = codes >> 16 * half;
            const uint32_t low = permute(table(0, 0), table(0, 4), four & kIndex & 0xffffu);
            uint32_t high = permute(table(8, 0), table(8, 4), four & kIndex & 0xffffu);
            // Bit 3 of a selector's nibble copies the sign of the byte all over it: 0xff for negative codes, else 0x80.
            const uint32_t sign_up = BITS == 4 ? four : four << (4 - BITS) & 0x8888u;
            high |= permute(0x80808080u, 0x80808080u, sign_up) << 1 & 0x80808080u;
            w[2 * half] = permute(low, high, 0x5140);
            w[2 * half + 1] = permute(low, high, 0x7362);
        }
    }
    static __device__ constexpr int pair_dim(int j, int half) { return 2 * j + half; }
    static __device__ __forceinline__ void arrange(uint32_t (&)[4]) {}

  private:
    // Byte `shift` / 8 of the bf16 patterns of 2 T - 1 for magnitudes first..first+3, 0 behind the last.
    static __device__ constexpr uint32_t table(int shift, int first) {
        uint32_t word = 0;
        for (int k = 0; k < 4; k++) {
            if (first + k >= Grid<D, BITS>::kLevels) continue;
            const int n = 2 * Grid<D, BITS>::T(first + k) - 1;
            int exponent = 0;
            while (n >> (exponent + 1)) exponent++;
            const uint32_t pattern = static_cast<uint32_t>((127 + exponent) << 7 | (n << (7 - exponent) & 0x7f));
            word |= (pattern >> shift & 0xffu) << 8 * k;
        }
        return word;
    }
};

// ---- sources: rows 0..item.count-1 of an item, of one kv head
//
// A row is named by its tile's first row, a multiple of 16, and its line in the tile.

// The tail ring (item kind 2): token p lies in ring row p % ring_rows.
template <typename FormatOf> struct RingRows {
    using Format = FormatOf;
    static constexpr bool kCached = false;
    const DecodeArgs& args;
    int32_t slot, kv_head, first;

    __device__ __forceinline__ RingRows(const DecodeArgs& args, const Item& item, int kv_head)
        : args(args), slot(args.tail_slots[item.sequence]), kv_head(kv_head),
          first(item.first % static_cast<int32_t>(args.ring_rows)) {}
    __device__ __forceinline__ int64_t offset(int row) const { // an item is never longer than the ring
        const int32_t at = first + row, ring_rows = static_cast<int32_t>(args.ring_rows);
        return (at < ring_rows ? at : at - ring_rows) * args.tail_row_stride + kv_head * args.tail_head_stride;
    }
    __device__ __forceinline__ const uint8_t* key(int tile_row, int line) const {
        return args.k_tail + slot * args.k_tail_slot_stride + offset(tile_row + line);
    }
    __device__ __forceinline__ const uint8_t* value(int tile_row, int line) const {
        return args.v_tail + slot * args.v_tail_slot_stride + offset(tile_row + line);
    }
    __device__ __forceinline__ float key_scale(int, int) const { return 1.0f; }
    __device__ __forceinline__ float value_scale(int, int) const { return 1.0f; }
};

// Rows in pages through the page table (item kind 1, cut at pages: a tile lies in one). CACHED: keys and values are the
// same rows, so the first read leaves them in L1 for the second.
template <typename FormatOf, bool CACHED> struct PageRows {
    using Format = FormatOf;
    static constexpr bool kCached = CACHED;
    const DecodeArgs& args;
    int32_t sequence, kv_head, first;

    __device__ __forceinline__ PageRows(const DecodeArgs& args, const Item& item, int kv_head)
        : args(args), sequence(item.sequence), kv_head(kv_head), first(item.first) {}
    __device__ __forceinline__ int in_page(int tile_row) const { return (first + tile_row) % kPageTokens; }
    __device__ __forceinline__ int64_t page(int tile_row) const { // its offset in the arena
        return args.page_table[sequence * args.table_stride + (first + tile_row) / kPageTokens] * args.page_stride;
    }
    __device__ __forceinline__ const uint8_t* key(int tile_row, int line) const {
        const int64_t row_bytes = Format::kRowBytes ? Format::kRowBytes : args.k_row_stride;
        return args.k_pages + kv_head * args.k_head_stride + page(tile_row) + (in_page(tile_row) + line) * row_bytes;
    }
    __device__ __forceinline__ const uint8_t* value(int tile_row, int line) const {
        const int64_t row_bytes = Format::kRowBytes ? Format::kRowBytes : args.v_row_stride;
        return args.v_pages + kv_head * args.v_head_stride + page(tile_row) + (in_page(tile_row) + line) * row_bytes;
    }
    __device__ __forceinline__ float key_scale(int tile_row, int line) const {
        const uint8_t* scales = args.k_pages + kv_head * args.k_head_stride + page(tile_row) + args.k_scales_offset;
        return __ldg(reinterpret_cast<const float*>(scales) + in_page(tile_row) + line);
    }
    __device__ __forceinline__ float value_scale(int tile_row, int line) const {
        const uint8_t* scales = args.v_pages + kv_head * args.v_head_stride + page(tile_row) + args.v_scales_offset;
        return __ldg(reinterpret_cast<const float*>(scales) + in_page(tile_row) + line);
    }
};

// ---- queries

// The dims of q that lane (g, t) multiplies with a step of rows: kLaneDims of vector first_vector + g, as B fragments.
// Where q is not in the dtype of the products, a second fragment holds what the first one's rounding left of it.
template <int D, typename T, typename Format> struct QueryRow {
    using Compute = typename Format::Compute;
    static constexpr bool kSplit = Format::kRotated || !IsSame<T, Compute>::kValue;
    static constexpr int kTerms = kSplit ? 2 : 1;
    using Words = uint32_t[kTerms][4];
    const uint8_t* row; // a vector behind the last reads the last one's

    __device__ __forceinline__ QueryRow(const DecodeArgs& args, const Item& item, int kv_head, int first_vector) {
        const int num_vectors = static_cast<int>(args.num_queries * args.group), group = static_cast<int>(args.group);
        const int vector = min(first_vector + static_cast<int>(threadIdx.x % 32 / 4), num_vectors - 1);
        if constexpr (Format::kRotated) { // f32, from prepare
            row = args.queries + ((item.sequence * args.kv_heads + kv_head) * num_vectors + vector) * (4 * D);
        } else {
            const int query = vector / group, head = kv_head * group + vector % group;
            row = static_cast<const uint8_t*>(args.q) + sizeof(T) * (item.sequence * args.q_batch_stride +
                                                                     query * args.q_token_stride + head * args.q_head_stride);
        }
    }
    __device__ __forceinline__ void load(int step, int i, Words& w) const {
        const int chunk = (4 * step + static_cast<int>(threadIdx.x % 4)) * (Format::kLaneDims / 8) + i;
        if constexpr (Format::kRotated) {
            const uint4 x = load_cached_16(row + 32 * chunk), y = load_cached_16(row + 32 * chunk + 16);
            split(w, 0, __uint_as_float(x.x), __uint_as_float(x.y)), split(w, 1, __uint_as_float(x.z), __uint_as_float(x.w));
            split(w, 2, __uint_as_float(y.x), __uint_as_float(y.y)), split(w, 3, __uint_as_float(y.z), __uint_as_float(y.w));
        } else {
            const uint4 x = load_cached_16(row + 16 * chunk);
            w[0][0] = x.x, w[0][1] = x.y, w[0][2] = x.z, w[0][3] = x.w;
            if constexpr (kSplit)
#pragma unroll
                for (int j = 0; j < 4; j++) split(w, j, half_of<T>(w[0][j], 0), half_of<T>(w[0][j], 1));
        }
#pragma unroll
        for (int term = 0; term < kTerms; term++) Format::arrange(w[term]);
    }

  private:
    static __device__ __forceinline__ void split(Words& w, int j, float a, float b) {
        w[0][j] = pack_halves<Compute>(a, b);
        w[kTerms - 1][j] = pack_halves<Compute>(a - half_of<Compute>(w[0][j], 0), b - half_of<Compute>(w[0][j], 1));
    }
};

// Where the two vectors in this lane's columns stand, as rows of an item: row r is seen if it is not behind them and less
// than a window before them.
struct Positions {
    static constexpr int kFar = 1 << 30; // no window, and before any row
    int32_t own[2];

    __device__ __forceinline__ Positions(const DecodeArgs& args, const Item& item, int first_vector) {
        const int num_vectors = static_cast<int>(args.num_queries * args.group), group = static_cast<int>(args.group);
        const int first_query = args.num_tokens[item.sequence] - static_cast<int>(args.num_queries) - item.first;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int vector = first_vector + 2 * static_cast<int>(threadIdx.x % 4) + i;
            own[i] = vector < num_vectors ? first_query + vector / group : -kFar;
        }
    }
    __device__ __forceinline__ bool see(int i, int row, int window) const {
        return (row <= own[i]) & (row > own[i] - window);
    }
};

// ---- the warp

// Pairs of rows (g, g + 8) of TILES tiles, loaded step by step: a step is what one load of each of the four lanes of a
// row brings. A group of steps is in registers, each pair of loads renewed for the next group as soon as it is used.
template <int D, typename Source, int TILES> struct RowStream {
    using Format = typename Source::Format;
    static constexpr int kStepDims = 4 * Format::kLaneDims, kSteps = D / kStepDims;
    static constexpr int kWanted = Format::kPairsAhead < TILES ? 1 : Format::kPairsAhead / TILES;
    static constexpr int kGroup = kSteps < kWanted ? kSteps : kWanted; // both powers of two
    const uint8_t* row[TILES][2];
    typename Format::Raw raw[kGroup][TILES][2];

    __device__ __forceinline__ void load(int group, int s, int tile) {
#pragma unroll
        for (int h = 0; h < 2; h++)
            raw[s][tile][h] = Format::template load<Source::kCached>(row[tile][h], group + s, threadIdx.x % 4);
    }
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int s = 0; s < kGroup; s++)
#pragma unroll
            for (int tile = 0; tile < TILES; tile++) load(0, s, tile);
    }
    // The i-th eight dims of a lane, rows g and g + 8.
    __device__ __forceinline__ void decode(int group, int s, int tile, int i, uint32_t (&a)[4], uint32_t (&b)[4]) const {
        const int chunk = (4 * (group + s) + static_cast<int>(threadIdx.x % 4)) * (Format::kLaneDims / 8) + i;
        Format::decode(raw[s][tile][0], i, chunk, a);
        Format::decode(raw[s][tile][1], i, chunk, b);
    }
    __device__ __forceinline__ void next(int group, int s, int tile) {
        if (group + kGroup < kSteps) load(group + kGroup, s, tile);
    }
};

// Attends the vectors first_vector .. + COLUMNS - 1 (COLUMNS 4 or 8) of `kv_head` over tiles warp, warp + num_warps, ..
// of `item`; `first` and `count` in tokens. All 32 lanes call it.
//   out[c * out_stride + dim], f32, dims in natural order, and ml[2 c], ml[2 c + 1]: sum of p v, m and l of column c as
//   in decode_args.cuh; a column of no vector, or one that sees nothing, gets 0, -inf and 0. Both lie in shared memory
//   of the warp's own (each lane writes, and adds to, its own elements); a stride of 1 mod 16 has no bank conflicts.
// q: rows at multiples of 16 bytes. TILES: tiles of a round. ONE_ROUND: the caller knows that the item has no more than
// TILES * num_warps of them; then nothing is carried from round to round.
template <int D, typename T, typename Source, int COLUMNS, bool SOFTCAP, int TILES, bool ONE_ROUND = false>
__device__ __forceinline__ void attend_rows_warp(const DecodeArgs& args, const Source& source, const Item& item, int kv_head,
                                                 int first_vector, int warp, int num_warps, float* out, int out_stride,
                                                 float* ml) {
    using Format = typename Source::Format;
    using Compute = typename Format::Compute;
    using Stream = RowStream<D, Source, TILES>;
    using Query = QueryRow<D, T, Format>;
    constexpr int kEights = Format::kLaneDims / 8;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const Query query(args, item, kv_head, first_vector);
    const Positions positions(args, item, first_vector);
    const int window = args.window > 0 && args.window < Positions::kFar ? static_cast<int>(args.window) : Positions::kFar;
    const float to_log2 = args.sm_scale * (SOFTCAP ? 1.0f : kLog2e) * Format::unit();
    float m[2] = {minus_infinity(), minus_infinity()}, l[2] = {0.0f, 0.0f}; // of columns 2 t and 2 t + 1; l of own rows

    const int num_tiles = (item.count + kTileRows - 1) / kTileRows;
    for (int first_tile = warp; first_tile < num_tiles; first_tile = ONE_ROUND ? num_tiles : first_tile + TILES * num_warps) {
        // Behind the item's end its last tile and last row are read again, which exist, and masked. Codes are finite
        // whatever they are, so of a page's codes any may be read; but no scale, and no row of floats.
        const auto tile_row = [&](int tile) { return kTileRows * min(first_tile + tile * num_warps, num_tiles - 1); };
        const auto line = [&](int tile, int h) { return min(g + 8 * h, item.count - 1 - tile_row(tile)); };
        const auto code_line = [&](int tile, int h) { return Format::kScaled ? g + 8 * h : line(tile, h); };
        Stream keys, values;
        float k_scale[TILES][2], v_scale[TILES][2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                keys.row[tile][h] = source.key(tile_row(tile), code_line(tile, h));
                if constexpr (Format::kScaled) k_scale[tile][h] = source.key_scale(tile_row(tile), line(tile, h));
            }

        float x[TILES][4] = {};
        keys.begin();
#pragma unroll 1
        for (int group = 0; group < Stream::kSteps; group += Stream::kGroup)
#pragma unroll
            for (int s = 0; s < Stream::kGroup; s++) {
#pragma unroll
                for (int i = 0; i < kEights; i++) {
                    typename Query::Words q;
                    query.load(group + s, i, q);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        uint32_t a[4], b[4]; // rows g, g + 8
                        keys.decode(group, s, tile, i, a, b);
#pragma unroll
                        for (int term = 0; term < Query::kTerms; term++) {
                            mma_half<Compute>(x[tile], a[0], b[0], a[1], b[1], q[term][0], q[term][1]);
                            mma_half<Compute>(x[tile], a[2], b[2], a[3], b[3], q[term][2], q[term][3]);
                        }
                        if (i == kEights - 1) keys.next(group, s, tile);
                    }
                }
            }

#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                values.row[tile][h] = source.value(tile_row(tile), code_line(tile, h));
                if constexpr (Format::kScaled) v_scale[tile][h] = source.value_scale(tile_row(tile), line(tile, h));
            }
        values.begin(); // under way during the softmax

        float top[2] = {m[0], m[1]};
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4; i++) { // row g + 8 (i / 2), column 2 t + i % 2
                const int row = kTileRows * (first_tile + tile * num_warps) + g + 8 * (i / 2);
                float s = x[tile][i] * (Format::kScaled ? k_scale[tile][i / 2] * to_log2 : to_log2);
                if constexpr (SOFTCAP) {
                    // tanh(y) = 1 - 2 / (1 + e^2y): its absolute error, which is what a logit keeps, is 1e-7
                    const float e = exp2_fast(s * (2.0f * kLog2e / args.softcap));
                    s = args.softcap * kLog2e * (1.0f - divide_fast(2.0f, 1.0f + e));
                }
                x[tile][i] = (row < item.count) & positions.see(i % 2, row, window) ? s : minus_infinity();
                top[i % 2] = fmaxf(top[i % 2], x[tile][i]);
            }
        float kept[2]; // what the output so far is worth against the new maximum
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int step = 4; step < 32; step *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], step));
            kept[i] = m[i] == top[i] ? 1.0f : exp2_fast(m[i] - top[i]); // also where both are -inf
            m[i] = top[i];
            l[i] *= kept[i];
            if (top[i] == minus_infinity()) top[i] = 0.0f; // p = 2^(-inf - 0) = 0, not 2^(-inf + inf)
        }
        uint32_t p[TILES][2]; // B fragments: column g, rows 2 t, 2 t + 1 and those + 8
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float p0 = exp2_fast(x[tile][2 * h] - top[0]), p1 = exp2_fast(x[tile][2 * h + 1] - top[1]);
                l[0] += p0, l[1] += p1;
                constexpr float kUp = ProbabilityBias<Compute>::kUp;
                const float factor = Format::kScaled ? v_scale[tile][h] * Format::unit() : kUp;
                p[tile][h] = transpose_8x8(Format::kScaled || kUp != 1.0f ? pack_halves<Compute>(p0 * factor, p1 * factor)
                                                                          : pack_halves<Compute>(p0, p1));
            }

        const bool more = !ONE_ROUND && first_tile != warp; // out holds the rounds before
#pragma unroll 1
        for (int group = 0; group < Stream::kSteps; group += Stream::kGroup)
#pragma unroll
            for (int s = 0; s < Stream::kGroup; s++)
#pragma unroll
                for (int i = 0; i < kEights; i++) {
                    float o[2][4] = {}; // o[j]: dims of words 2 j and 2 j + 1, columns 2 t, 2 t + 1
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        uint32_t a[4], b[4];
                        values.decode(group, s, tile, i, a, b);
#pragma unroll
                        for (int j = 0; j < 2; j++)
                            mma_half<Compute>(o[j], transpose_8x8(a[2 * j]), transpose_8x8(a[2 * j + 1]),
                                              transpose_8x8(b[2 * j]), transpose_8x8(b[2 * j + 1]), p[tile][0], p[tile][1]);
                        if (i == kEights - 1) values.next(group, s, tile);
                    }
                    if (2 * t < COLUMNS) {
                        // A column of a transposed word, here g, is the dim of lane t = g / 2, half g % 2.
                        const int dim = (group + s) * Stream::kStepDims + g / 2 * Format::kLaneDims + 8 * i;
#pragma unroll
                        for (int j = 0; j < 4; j++) {
                            float* to = out + 2 * t * out_stride + dim + Format::pair_dim(j, g % 2);
#pragma unroll
                            for (int c = 0; c < 2; c++) {
                                const float sum = o[j / 2][2 * (j % 2) + c] * ProbabilityBias<Compute>::kDown;
                                to[c * out_stride] = more ? fmaf(to[c * out_stride], kept[c], sum) : sum;
                            }
                        }
                    }
                }
    }

#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) l[i] += __shfl_xor_sync(0xffffffffu, l[i], step);
    if (g == 0 && 2 * t < COLUMNS)
#pragma unroll
        for (int i = 0; i < 2; i++) ml[2 * (2 * t + i)] = m[i], ml[2 * (2 * t + i) + 1] = l[i];
    if (warp >= num_tiles)
        for (int i = lane; i < COLUMNS * D; i += 32) out[i / D * out_stride + i % D] = 0.0f;
}

} // namespace tailpack
