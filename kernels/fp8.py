"""Rows as e4m3: the plain per-row form, and DeepSeek-V4's 590-byte raw row.

Plain: scale = amax / 448 in f32, codes = e4m3(x / scale), nearest even; d + 4 bytes a row. A row whose amax is below
1e-10 stores scale 0 and comes back as exact zeros.

V4 (width 512): 448 e4m3 codes | 64 bf16 | 7 bf16 amax. The row is rounded to bf16 first, so the amax of each block of
64 is exact in bf16, and the scale follows from it: 2^ceil(log2(max(amax, 1e-4) / 448)). The last 64 (RoPE) coordinates
are kept as bf16.

Public engines keep such rows in 584 bytes (FlashMLA's layout of V4 rows, also vLLM's and SGLang's). Ours differs so:

              here                                        there
    a row     448 codes | 64 bf16 | 7 bf16 amax: 590 B    448 codes | 64 bf16 | 7 exponents + 127, 1 pad: 584 B
    a page    128 rows: 576 B each, then 14 B each        P rows (64, 256): 576 B each, then 8 B each
    its size  75,520 B, planes on 128-byte boundaries     a multiple of 576 B (37,440 for 64 rows, which take 37,376)

Codes and RoPE coordinates are the same bytes, and both scales are the power of two that the model was trained with, so
both decode to the same values. The 6 bytes more keep each block's amax, of which the exponent is only the upper end:
that row can be checked, or scaled otherwise, without the row it was made from.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import ArgumentError, LayoutError, WidthError
from kernels.turboquant import ROW_DTYPES, ZERO_NORM, check_finite, check_row_type

E4M3_MAX = 448.0
V4_WIDTH = 512
V4_CODES = 448
V4_BLOCK = 64
V4_RECORD_BYTES = V4_CODES + 2 * (V4_WIDTH - V4_CODES) + 2 * (V4_CODES // V4_BLOCK)  # 590


class Fp8Rows(NamedTuple):
    """Plain per-row e4m3 with any leading dims."""

    codes: Tensor  # u8 [..., d], e4m3 bit patterns
    scales: Tensor  # f32 [..., 1]


def _to_e4m3(x: Tensor) -> Tensor:
    # Far above 448 the cast gives NaN, but x / scale passes 448 by its own rounding at most, which rounds back to it.
    return x.to(torch.float8_e4m3fn).view(torch.uint8)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in ROW_DTYPES:
        raise ArgumentError(
            "rows unpack to a model's dtype", given=str(dtype), allowed="float32, float16, bfloat16", action="pick one"
        )


@torch.no_grad()
def pack(rows: Tensor) -> Fp8Rows:
    """Pack `rows` f32, f16 or bf16 [..., d], any strides. Raises ArgumentError (dtype), NonFiniteRowError."""
    check_row_type(rows)
    check_finite(rows)
    x = rows.to(torch.float32)
    amax = x.abs().amax(-1, keepdim=True)
    zero = amax < ZERO_NORM
    # A tensor, because torch multiplies by the reciprocal of a number on a GPU, which is not the quotient's rounding.
    scale = torch.where(zero, 0.0, amax / amax.new_tensor(E4M3_MAX))
    codes = _to_e4m3(torch.where(zero, 0.0, x / scale)).contiguous()
    return Fp8Rows(codes, scale)


@torch.no_grad()
def unpack(packed: Fp8Rows, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows [..., d] of `dtype`. Raises ArgumentError (dtype), LayoutError (not what `pack` makes)."""
    _check_dtype(dtype)
    codes, scales = packed
    if codes.dtype != torch.uint8 or scales.dtype != torch.float32 or scales.shape != (*codes.shape[:-1], 1):
        raise LayoutError(
            "these are not fp8 rows",
            given=f"codes {codes.dtype} {tuple(codes.shape)}, scales {scales.dtype} {tuple(scales.shape)}",
            allowed="codes uint8 [..., d], scales float32 [..., 1]",
            action="pass what pack returned",
        )
    x = codes.view(torch.float8_e4m3fn).to(torch.float32) * scales
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)


def v4_scale(amax: Tensor) -> Tensor:
    """2^ceil(log2(max(amax, 1e-4) / 448)) as f32 of the same shape, without a rounded logarithm; amax bf16 or f32.

    With max(amax, 1e-4) = m 2^k, m in [1/2, 1), and 448 = 7/8 2^9, the exponent is k - 9 while m <= 7/8, else k - 8.
    """
    bits = amax.to(torch.float32).clamp(min=1e-4).view(torch.int32)
    exponent = (bits >> 23) - 126 - 9 + ((bits & 0x7FFFFF) > 0x600000)
    return (exponent + 127 << 23).view(torch.float32)


@torch.no_grad()
def pack_v4(rows: Tensor) -> Tensor:
    """V4 raw rows f32, f16 or bf16 [..., 512] to records u8 [..., 590].

    Raises ArgumentError (dtype), WidthError (not 512), NonFiniteRowError (also for an f32 value that bf16 cannot hold).
    """
    check_row_type(rows)
    if rows.shape[-1] != V4_WIDTH:
        raise WidthError(
            "V4 raw rows have one width", given=str(rows.shape[-1]), allowed=str(V4_WIDTH), action="use plain fp8"
        )
    rows = rows.to(torch.bfloat16)
    check_finite(rows)
    blocks = rows[..., :V4_CODES].reshape(*rows.shape[:-1], -1, V4_BLOCK)
    amax = blocks.abs().amax(-1)
    codes = _to_e4m3(blocks.to(torch.float32) / v4_scale(amax)[..., None]).flatten(-2)
    tail = rows[..., V4_CODES:].clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.cat([codes, tail, amax.contiguous().view(torch.uint8)], dim=-1)


@torch.no_grad()
def unpack_v4(records: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Records u8 [..., 590] to rows [..., 512] of `dtype`. Raises ArgumentError (dtype), LayoutError (record size)."""
    _check_dtype(dtype)
    if records.dtype != torch.uint8 or records.shape[-1] != V4_RECORD_BYTES:
        raise LayoutError(
            "these are not V4 fp8 records",
            given=f"{records.dtype} {tuple(records.shape)}",
            allowed=f"uint8 [..., {V4_RECORD_BYTES}]",
            action="pass what pack_v4 returned",
        )
    plain = records[..., V4_CODES:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
    tail, amax = plain[..., : V4_WIDTH - V4_CODES], plain[..., V4_WIDTH - V4_CODES :]
    codes = records[..., :V4_CODES].clone(memory_format=torch.contiguous_format).view(torch.float8_e4m3fn)
    values = codes.to(torch.float32).view(*amax.shape, V4_BLOCK) * v4_scale(amax)[..., None]
    x = torch.cat([values.flatten(-2), tail.to(torch.float32)], dim=-1)
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype)
