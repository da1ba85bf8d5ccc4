// What every kernel of one `decode` call is given: one struct by value, field by field as in kernels/decode_args.py.
//
// A call attends B sequences of T query tokens each (T = 1 but in speculation), query t of sequence b at position
// num_tokens[b] - T + t. A kv head is read by `group` query heads; its *vectors* are v = t * group + j, j < group,
// query head h * group + j. num_tokens[b] = 0: the sequence is padding, its output is zeros and its lse -inf.
//
// Rows of a sequence: tokens [0, base) in pages, tokens [base, num_tokens) in its tail ring (token i in ring row
// i % ring_rows). Dense and fp8 pages without a tail: base = num_tokens, the last page partly filled.
//
// The call is three launches: prepare, attend, merge. `prepare` reads the lengths on the device and writes the plan; so
// the same launches, captured in a CUDA graph, serve any lengths.
//
// An *item* is one split of one sequence. Splits are cut by the sequence's own numbers, so a sequence's result does not
// depend on its batch mates. Packed items are written first, row items (chunks of tails or pages read as rows) behind
// them. For each item and kv head the attend kernel leaves a partial result for all vectors:
//   partial_out f32 [item][kv_head][num_vectors][D]: sum of p * v, where p = 2^(x - m), x the score times log2 e
//   partial_ml  f32 [item][kv_head][num_vectors][2]: m, l = sum of p.  Nothing visible: m = -inf, l = 0, out 0.
// out of TurboQuant pages lies in the rotated domain, that of other rows in the model's own.
#pragma once

#include "ptx.cuh"

namespace tailpack {

constexpr int kPageTokens = 128;
constexpr int kRowChunk = 256; // tokens of a row item

struct Item {
    int32_t sequence;
    int32_t first;  // packed items: page index; row items: token position
    int32_t count;  // packed items: pages; row items: tokens
    int32_t kind;   // 0 packed pages, 1 rows in pages, 2 rows in the tail ring
};

// What merge needs of one sequence: its items are packed [packed_big, + num_big), [packed_small, + num_small), and row
// items [rows, + num_rows), counted from max_packed_items on, of which the first num_page_rows lie in pages.
struct Plan {
    int32_t packed_big, num_big, packed_small, num_small, rows, num_rows, num_page_rows, pad;
};

// Counters at the head of the workspace.
struct Counters {
    int32_t next_packed; // taken by the attend kernel's queue, zeroed by prepare
    int32_t num_packed;  // items
    int32_t num_rows;    // items
    int32_t pad[29];
};

struct DecodeArgs {
    // queries, outputs: [B, T, q_heads, D] of the model's dtype; strides in elements, last one 1
    const void* q;
    int64_t q_batch_stride, q_token_stride, q_head_stride;
    void* out;
    int64_t out_batch_stride, out_token_stride, out_head_stride;
    float* lse;         // [B, T, q_heads] contiguous, natural logarithm, sinks not counted; may be null
    const float* sinks; // [q_heads]; may be null

    // pages: byte strides. Packed: head h of page p at pages + p * page_stride + h * head_stride, codes first, scales at
    // + scales_offset. Dense: row r of head h at pages + p * page_stride + r * row_stride + h * head_stride.
    const uint8_t* k_pages;
    const uint8_t* v_pages;
    int64_t page_stride;
    int64_t k_head_stride, v_head_stride;
    int64_t k_row_stride, v_row_stride;
    int64_t k_scales_offset, v_scales_offset;
    const int32_t* page_table; // [B, table_stride]; entries wholly below the window are not read
    int64_t table_stride;
    const int32_t* bases;      // [B]
    const int32_t* num_tokens; // [B]

    // tails: [slots, ring_rows, kv_heads, D] of the model's dtype; byte strides; null where there is none
    const uint8_t* k_tail;
    const uint8_t* v_tail;
    int64_t k_tail_slot_stride, v_tail_slot_stride, tail_row_stride, tail_head_stride;
    const int32_t* tail_slots; // [B]
    int64_t ring_rows;

    // workspace, all 128-byte aligned
    Counters* counters;
    Plan* plans;        // [B]
    Item* items;        // packed ones, then row ones from items + max_packed_items on
    uint8_t* queries;   // what prepare makes of q, see prepare.cuh
    float* partial_out; // [max_packed_items + max_row_items][kv_heads][num_vectors][D]
    float* partial_ml;  // the same but [2]
    uint64_t* profile;  // phase-timing variant: [CTAs][kProfileSlots] ns; else null
    int64_t max_packed_items, max_row_items;

    int64_t num_sequences, num_queries, kv_heads, group;
    int64_t window;     // tokens that a query sees, itself included; 0: all
    float sm_scale;     // of the scores, before softcap
    float softcap;      // variant SOFTCAP only
    uint32_t minus_one; // 0xffffffff, unknown to the compiler (see multiply_add)
    uint32_t pad;
};

} // namespace tailpack
