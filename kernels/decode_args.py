"""What the decode kernels are given, field by field as csrc/decode_args.cuh has it (which says what each one means).

tests/kernels/test_decode_args.py compiles the header and compares every offset, size and constant with these.
"""

from __future__ import annotations

import ctypes

PAGE_TOKENS = 128  # kPageTokens
ROW_CHUNK = 256  # kRowChunk: tokens of a row item

_i32, _i64, _f32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class Item(ctypes.Structure):
    _fields_ = (("sequence", _i32), ("first", _i32), ("count", _i32), ("kind", _i32))


class Plan(ctypes.Structure):
    _fields_ = (
        ("packed_big", _i32),
        ("num_big", _i32),
        ("packed_small", _i32),
        ("num_small", _i32),
        ("rows", _i32),
        ("num_rows", _i32),
        ("num_page_rows", _i32),
        ("pad", _i32),
    )


class Counters(ctypes.Structure):
    _fields_ = (("next_packed", _i32), ("num_packed", _i32), ("num_rows", _i32), ("pad", _i32 * 29))


class DecodeArgs(ctypes.Structure):
    _fields_ = (
        ("q", _pointer),
        ("q_batch_stride", _i64),
        ("q_token_stride", _i64),
        ("q_head_stride", _i64),
        ("out", _pointer),
        ("out_batch_stride", _i64),
        ("out_token_stride", _i64),
        ("out_head_stride", _i64),
        ("lse", _pointer),
        ("sinks", _pointer),
        ("k_pages", _pointer),
        ("v_pages", _pointer),
        ("page_stride", _i64),
        ("k_head_stride", _i64),
        ("v_head_stride", _i64),
        ("k_row_stride", _i64),
        ("v_row_stride", _i64),
        ("k_scales_offset", _i64),
        ("v_scales_offset", _i64),
        ("page_table", _pointer),
        ("table_stride", _i64),
        ("bases", _pointer),
        ("num_tokens", _pointer),
        ("k_tail", _pointer),
        ("v_tail", _pointer),
        ("k_tail_slot_stride", _i64),
        ("v_tail_slot_stride", _i64),
        ("tail_row_stride", _i64),
        ("tail_head_stride", _i64),
        ("tail_slots", _pointer),
        ("ring_rows", _i64),
        ("counters", _pointer),
        ("plans", _pointer),
        ("items", _pointer),
        ("queries", _pointer),
        ("partial_out", _pointer),
        ("partial_ml", _pointer),
        ("profile", _pointer),
        ("max_packed_items", _i64),
        ("max_row_items", _i64),
        ("num_sequences", _i64),
        ("num_queries", _i64),
        ("kv_heads", _i64),
        ("group", _i64),
        ("window", _i64),
        ("sm_scale", _f32),
        ("softcap", _f32),
        ("minus_one", ctypes.c_uint32),
        ("pad", ctypes.c_uint32),
    )
