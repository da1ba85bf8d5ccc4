// Which rows go into pages or come out of them, where they lie, and the checksum of a page.
//
// A call works on a table of pages, a table of the regions of a layer group, and the units of a page: a unit is up to 32
// rows of one head of one region. All tables are device memory, all strides bytes, all offsets multiples of 16.
// Mirrored in kernels/pages_cuda.py.
#pragma once

#include "ptx.cuh"

namespace tailpack {

constexpr int kGroupRows = 32; // rows of a unit, and of a group of layout version 2

// Tokens [first_token, first_token + 128) of a sequence, and where their rows lie outside the page: those of the page's
// first `ring_tokens` tokens in the sequence's tail, those of the others in the workspace.
struct PageRows {
    int64_t page; // -1: an entry to be skipped
    int64_t first_token;
    int64_t tail_slot;
    int64_t ring_tokens;
    int64_t workspace_token; // of the first token that is not in the tail; its row is the token's over the ratio
    int64_t begin, end;    // the call is about tokens [begin, end) of the page's 128
    int64_t unused;
};

enum class Order : int64_t { kRows = 0, kKeys = 1, kValues = 2 }; // of codes in a head's plane (kernels/fragments.py)

// One region of the group: its tail rings, its workspace, and its planes in a page. A row covers `ratio` tokens.
struct PageRegion {
    uint8_t* tail; // row i of slot s is at ring row i % ring_rows
    int64_t tail_slot_stride, tail_row_stride, tail_head_stride, ring_rows;
    uint8_t* workspace;
    int64_t workspace_row_stride, workspace_head_stride;
    int64_t offset, head_bytes, scales_offset; // head h: page + offset + h * head_bytes; its scales at + scales_offset
    int64_t rows, ratio;                       // rows of a page
    Order order;
    int64_t bits; // of a TurboQuant code; 0: fp8
    int64_t dim;
};

struct PageUnit {
    int32_t region, head, first_row, unused;
};

struct PageTables {
    const PageRows* pages;
    const PageRegion* regions;
    const PageUnit* units; // of a page
    int64_t num_pages, num_units;
    uint8_t* arena;
    int64_t page_bytes;
};

// Goes through the units of all entries of a call in steps of `step`, without a division a step. Entries that are to be
// skipped are met too.
struct UnitCursor {
    int64_t entry; // index in PageTables::pages
    int32_t at;    // index in PageTables::units
    int32_t step_units;
    int64_t step_entries;

    __device__ __forceinline__ UnitCursor(const PageTables& tables, uint32_t first, uint32_t step) {
        const uint32_t units = static_cast<uint32_t>(tables.num_units);
        entry = first / units;
        at = static_cast<int32_t>(first % units);
        step_entries = step / units;
        step_units = static_cast<int32_t>(step % units);
    }
    __device__ __forceinline__ bool done(const PageTables& tables) const { return entry >= tables.num_pages; }
    __device__ __forceinline__ bool in_use(const PageTables& tables) const { return tables.pages[entry].page >= 0; }
    __device__ __forceinline__ void advance(const PageTables& tables) {
        entry += step_entries;
        at += step_units;
        if (at >= tables.num_units) {
            at -= static_cast<int32_t>(tables.num_units);
            entry++;
        }
    }
    __device__ __forceinline__ PageUnit unit(const PageTables& tables) const {
        const int4 raw = __ldg(reinterpret_cast<const int4*>(tables.units) + at);
        return {raw.x, raw.y, raw.z, raw.w};
    }
};

// What the tables say of one unit, in the shared memory of the warp that has it.
struct alignas(16) UnitTables {
    PageRegion region;
    PageRows page;
    PageUnit unit;
    int64_t entry; // -1: there is no such unit, and the rest is that of some other

    __device__ __forceinline__ bool in_use() const { return entry >= 0 && page.page >= 0; }
};

// Copies the tables' entries of a warp's units into shared memory, each well before they are needed: one look-up of the
// tables waits for another, and a unit is too short to hide that.
struct UnitLookup {
    UnitCursor cursor;
    int32_t region; // of the unit that is copied next

    __device__ __forceinline__ UnitLookup(const PageTables& tables, uint32_t first, uint32_t step)
        : cursor(tables, first, step), region(cursor.unit(tables).region) {}

    // Start the copy of the next unit's; it is complete when the lanes' copies are, but `entry` after a barrier of the warp.
    __device__ __forceinline__ void start_copy(const PageTables& tables, UnitTables& to, int lane) {
        constexpr int kRegion = sizeof(PageRegion) / 16, kPage = sizeof(PageRows) / 16;
        const int64_t entry = min(cursor.entry, tables.num_pages - 1);
        if (lane <= kRegion + kPage) {
            const uint4* from = reinterpret_cast<const uint4*>(tables.units) + cursor.at;
            if (lane < kRegion) from = reinterpret_cast<const uint4*>(tables.regions + region) + lane;
            else if (lane < kRegion + kPage) from = reinterpret_cast<const uint4*>(tables.pages + entry) + (lane - kRegion);
            lane_copy_16(shared_address(&to) + 16 * lane, from);
        }
        if (lane == 0) to.entry = cursor.done(tables) ? -1 : entry;
        cursor.advance(tables);
        region = cursor.unit(tables).region;
    }
};

// Where row `row` of a page lies outside it.
__device__ __forceinline__ uint8_t* row_address(const PageRows& page, const PageRegion& region, int head, int row) {
    uint32_t ring_rows_of_page = static_cast<uint32_t>(page.ring_tokens);
    uint32_t first_ring_row = static_cast<uint32_t>(page.first_token);
    uint32_t first_workspace_row = static_cast<uint32_t>(page.workspace_token);
    if (region.ratio != 1) {
        const uint32_t ratio = static_cast<uint32_t>(region.ratio);
        ring_rows_of_page /= ratio;
        first_ring_row /= ratio;
        first_workspace_row /= ratio;
    }
    if (row < static_cast<int>(ring_rows_of_page)) {
        const uint32_t ring_row = (first_ring_row + static_cast<uint32_t>(row)) % static_cast<uint32_t>(region.ring_rows);
        return region.tail + page.tail_slot * region.tail_slot_stride + ring_row * region.tail_row_stride +
               head * region.tail_head_stride;
    }
    const int64_t workspace_row = first_workspace_row + static_cast<uint32_t>(row) - ring_rows_of_page;
    return region.workspace + workspace_row * region.workspace_row_stride +
           head * region.workspace_head_stride;
}

// ---- checksum: kernels/page_checksum.py says what it is

constexpr uint32_t kKeyStep = 0x9E3779B9u, kKeyStart = 0x7F4A7C15u;

// The share of words word, word + 1 of a page.
__device__ __forceinline__ uint64_t checksum_of(uint32_t low, uint32_t high, uint32_t word) {
    const uint32_t key = word * kKeyStep + kKeyStart;
    return static_cast<uint64_t>(low + key) * (high + (key + kKeyStep));
}
__device__ __forceinline__ uint64_t checksum_of(const uint4& words, uint32_t word) {
    return checksum_of(words.x, words.y, word) + checksum_of(words.z, words.w, word + 2);
}

// What one warp writes into one page, and the share of the page's checksum that it is. Offsets: bytes in the page.
struct PageWriter {
    uint8_t* page;
    uint64_t share = 0;

    __device__ __forceinline__ void store(int64_t offset, const uint4& words) {
        *reinterpret_cast<uint4*>(page + offset) = words;
        share += checksum_of(words, static_cast<uint32_t>(offset >> 2));
    }
    __device__ __forceinline__ void store(int64_t offset, const uint2& words) {
        *reinterpret_cast<uint2*>(page + offset) = words;
        share += checksum_of(words.x, words.y, static_cast<uint32_t>(offset >> 2));
    }
    // All lanes of the warp: add their shares to the page's sum.
    __device__ __forceinline__ void add_to(uint64_t* checksum) {
#pragma unroll
        for (int distance = 16; distance >= 1; distance /= 2)
            share += static_cast<uint64_t>(
                __shfl_xor_sync(0xffffffffu, static_cast<unsigned long long>(share), distance));
        if (threadIdx.x % 32 == 0)
            atomicAdd(reinterpret_cast<unsigned long long*>(checksum), static_cast<unsigned long long>(share));
    }
};

} // namespace tailpack
