"""Where rotary embedding and append of a decode step read and write: what the kernels are given, checked. Pure ctypes.

Two kernels do it: one of its own (csrc/decode_step.cuh) and the product that makes queries, keys and values
(csrc/linear_few.cuh).
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import ArgumentError

MAX_DIM = 512

_i32, _i64, _f32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class RopeArgs(ctypes.Structure):
    _fields_ = (
        ("qkv", _pointer),
        ("cos", _pointer),
        ("sin", _pointer),
        ("q_norm", _pointer),
        ("k_norm", _pointer),
        ("num_tokens", _pointer),
        ("places", _pointer),
        ("k_to", _pointer),
        ("v_to", _pointer),
        ("row_stride", _i64),
        ("k_place_stride", _i64),
        ("v_place_stride", _i64),
        ("to_row_stride", _i64),
        ("to_head_stride", _i64),
        ("table_stride", _i32),
        ("table_width", _i32),
        ("ring_rows", _i32),
        ("num_places", _i32),
        ("q_heads", _i32),
        ("kv_heads", _i32),
        ("dim", _i32),
        ("positions", _i32),
        ("eps", _f32),
    )


class AppendTo(NamedTuple):
    """Where one layer's new keys and values go.

    keys, values: [places, rows, kv_heads, dim]: tail rings (a place is a slot) or dense pages (a page).
    places: i32, tail slots [B], or page tables [B, width] with rows any stride apart.
    num_tokens: i32 [B], the newest token included; 0: padding, which goes nowhere, as does what has a negative place or
        lies behind the table.
    """

    keys: Tensor
    values: Tensor
    places: Tensor
    num_tokens: Tensor


def set_rope(
    arguments: RopeArgs,
    dtype: torch.dtype,
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    norms: tuple[Tensor | None, Tensor | None],
    eps: float,
    to: AppendTo,
    q_heads: int,
) -> None:
    """Check a call of `rope_append` and point the arguments at it. Raises ArgumentError."""
    keys, values, places, num_tokens = to
    _, num_rows, kv_heads, dim = keys.shape
    rows = len(qkv)
    if qkv.dtype != dtype or qkv.shape[1] != (q_heads + 2 * kv_heads) * dim or qkv.stride(1) != 1:
        raise _unfit(qkv, f"{dtype} [B, {(q_heads + 2 * kv_heads) * dim}], rows contiguous")
    if dim > MAX_DIM or dim % 2:
        raise _error("no rotary embedding of this width", str(dim), f"even, up to {MAX_DIM}", "use torch")
    for x in (keys, values):
        if (
            x.dtype != dtype
            or x.shape[1:] != keys.shape[1:]
            or x.stride(3) != 1
            or x.stride()[1:3] != keys.stride()[1:3]
        ):
            raise _unfit(x, f"{dtype} [places, {num_rows}, {kv_heads}, {dim}], strides alike but for the places")
    for each in (*tables, *norms):
        if each is not None and (
            each.dtype != dtype or not each.is_contiguous() or each.shape[-1] not in (dim, dim // 2)
        ):
            raise _unfit(each, f"contiguous {dtype} [.., {dim // 2}] of tables, [{dim}] of norms")
    for x in (places, num_tokens):
        if x.dtype != torch.int32 or x.shape[0] != rows or (x.shape[-1] > 1 and x.stride(-1) != 1):
            raise _unfit(x, f"int32 [{rows}], or a table [{rows}, pages]")
    size = keys.element_size()
    arguments.qkv, arguments.row_stride = qkv.data_ptr(), qkv.stride(0)
    arguments.cos, arguments.sin = (table.data_ptr() for table in tables)
    arguments.positions = tables[0].numel() // (dim // 2)
    arguments.q_norm, arguments.k_norm = (None if norm is None else norm.data_ptr() for norm in norms)
    arguments.num_tokens, arguments.places = num_tokens.data_ptr(), places.data_ptr()
    arguments.k_to, arguments.v_to = keys.data_ptr(), values.data_ptr()
    arguments.k_place_stride, arguments.v_place_stride = size * keys.stride(0), size * values.stride(0)
    arguments.to_row_stride, arguments.to_head_stride = size * keys.stride(1), size * keys.stride(2)
    paged = places.dim() == 2
    arguments.table_stride, arguments.table_width = (places.stride(0), places.shape[1]) if paged else (0, 0)
    arguments.ring_rows = 0 if paged else num_rows
    arguments.num_places = min(len(keys), len(values))
    arguments.q_heads, arguments.kv_heads, arguments.dim, arguments.eps = q_heads, kv_heads, dim, eps


def _unfit(x: Tensor, allowed: str) -> ArgumentError:
    given = f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}"
    return _error("a tensor does not fit the decode step", given, allowed, "pass it so")


def _error(reason: str, given: str, allowed: str, action: str) -> ArgumentError:
    return ArgumentError(reason, given=given, allowed=allowed, action=action)
