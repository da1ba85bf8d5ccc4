"""Pages and tails as the decode kernels read them: from views to pointers and strides, checked once a layer.

Pages of one region are either a `PackedRegion` (fp8; TurboQuant, in page layout 2 where keys and values are apart, in
layout 1 where they are shared), or, in mode dense, a tensor [pages, 128, kv_heads, dim] of the model's dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attention import PackedRegion
from kernels.decode_args import PAGE_TOKENS, DecodeArgs
from kernels.errors import ArgumentError, LayoutError
from kernels.page_codec import check_planes

ALIGNMENT = 16  # bytes: rows, codes and scales move 16 at a time
ROW_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

Pages = PackedRegion | Tensor


class Tail(NamedTuple):
    """Dense rows of the newest tokens, a ring a slot; token i lies in ring row i % ring_rows.

    keys, values: [slots, ring_rows, kv_heads, dim] of the model's dtype, last dim contiguous; of the same strides but
    for the slots. Where K and V are shared, twice the same tensor.
    """

    keys: Tensor
    values: Tensor


class RegionFacts(NamedTuple):
    """One region's pages: what the kernels are given."""

    codec: str
    dim: int
    kv_heads: int
    device: torch.device
    pointer: int
    page_stride: int  # bytes, as all below
    head_stride: int
    row_stride: int  # 0 where rows have no stride of their own (page layout 2)
    scales_offset: int


def region_facts(pages: Pages, kind: str) -> RegionFacts:
    """`kind`: "k" or "v" of a pair, "kv" of shared rows. Raises LayoutError."""
    facts = _packed_facts(pages, kind) if isinstance(pages, PackedRegion) else _dense_facts(pages)
    steps = (facts.pointer, facts.page_stride, facts.head_stride, facts.scales_offset)
    row_alignment = 4 if facts.codec.startswith("tq") else ALIGNMENT  # codes in row order are read by words
    if any(step % ALIGNMENT for step in steps) or facts.row_stride % row_alignment:
        raise LayoutError(
            "pages must keep heads, rows and planes at multiples of 16 bytes",
            given=f"address {facts.pointer:#x}; strides of pages {facts.page_stride}, heads {facts.head_stride}, "
            f"rows {facts.row_stride}; scales at {facts.scales_offset}",
            allowed=f"multiples of {ALIGNMENT}",
            action="use the arena's own views, or another mode for widths of odd sizes",
        )
    return facts


def _strides(x: Tensor) -> list[int]:
    """In bytes; 0 for a dim of one element, whose stride says nothing."""
    size = x.element_size()
    return [size * step if count > 1 else 0 for count, step in zip(x.shape, x.stride(), strict=True)]


def _packed_facts(region: PackedRegion, kind: str) -> RegionFacts:
    planes, codec = region
    check_planes(planes, codec)
    heads = planes.heads
    if planes.rows != PAGE_TOKENS or heads.stride(2) != 1:
        raise LayoutError(
            "decode reads pages of one row a token",
            given=f"{planes.rows} rows a page, strides {heads.stride()}",
            allowed=f"{PAGE_TOKENS} rows of contiguous planes",
            action="use kernels.attention for regions with a ratio",
        )
    order = planes.fragments
    in_groups = codec.name.startswith("tq") and kind != "kv"
    if (order is not None) != in_groups or (order is not None and order.kind != kind):
        raise LayoutError(
            f"this reader of kind {kind!r} takes pages in another order",
            given=str(order or "rows, page layout 1"),
            allowed=f"fragments of kind {kind!r}, page layout 2" if in_groups else "rows",
            action="make the geometry with layout version 2 for groups whose memory is on a GPU",
        )
    if order is not None and planes.scales_offset != PAGE_TOKENS * order.row_bytes:
        raise LayoutError(
            "the scales of a head must lie right behind its codes, with which they are copied",
            given=f"scales at {planes.scales_offset}",
            allowed=f"{PAGE_TOKENS * order.row_bytes}",
            action="take the planes that page_layout gives",
        )
    page_stride, head_stride, _ = _strides(heads)
    return RegionFacts(
        codec.name,
        codec.dim,
        heads.shape[1],
        heads.device,
        heads.data_ptr(),
        page_stride,
        head_stride,
        0 if order else planes.code_bytes,
        planes.scales_offset,
    )


def _dense_facts(pages: Tensor) -> RegionFacts:
    if pages.dim() != 4 or pages.shape[1] != PAGE_TOKENS or pages.dtype not in ROW_TYPES or pages.stride(3) != 1:
        raise LayoutError(
            "these are no dense pages",
            given=f"{pages.dtype} {tuple(pages.shape)}, strides {pages.stride()}",
            allowed=f"bfloat16 or float16 [pages, {PAGE_TOKENS}, kv_heads, dim], rows contiguous",
            action="pass the region's view of the arena",
        )
    page, row, head, _ = _strides(pages)
    return RegionFacts("dense", pages.shape[3], pages.shape[2], pages.device, pages.data_ptr(), page, head, row, 0)


def set_pages(arguments: DecodeArgs, keys: RegionFacts, values: RegionFacts) -> None:
    """Raises LayoutError where keys and values do not lie in pages alike."""
    pairs = [(getattr(keys, name), getattr(values, name)) for name in ("dim", "kv_heads", "device", "page_stride")]
    if any(a != b for a, b in pairs):
        raise LayoutError(
            "keys and values lie in pages of different shapes",
            given=f"dim, kv heads, device and page stride of keys and values: {pairs}",
            allowed="the same for both",
            action="take both regions from one layer of one arena",
        )
    arguments.k_pages, arguments.v_pages = keys.pointer, values.pointer
    arguments.page_stride = keys.page_stride
    arguments.k_head_stride, arguments.v_head_stride = keys.head_stride, values.head_stride
    arguments.k_row_stride, arguments.v_row_stride = keys.row_stride, values.row_stride
    arguments.k_scales_offset, arguments.v_scales_offset = keys.scales_offset, values.scales_offset


def set_tail(arguments: DecodeArgs, tail: Tail, keys: RegionFacts, dtype: torch.dtype) -> None:
    """Raises ArgumentError where the tail is not one of these pages' layer."""
    k, v = tail
    want = (dtype, keys.device, keys.kv_heads, keys.dim)
    fits = all(x.dim() == 4 and (x.dtype, x.device, x.shape[2], x.shape[3]) == want for x in tail)
    k_steps, v_steps = _strides(k), _strides(v)
    if not fits or k.shape != v.shape or k_steps[1:] != v_steps[1:] or k.stride(3) != 1 or k.shape[1] < 1:
        raise ArgumentError(
            "the tails do not fit the pages",
            given=", ".join(f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}, on {x.device}" for x in tail),
            allowed=f"{dtype} [slots, ring rows, {keys.kv_heads}, {keys.dim}] twice, on {keys.device}, of the same "
            "strides, rows contiguous",
            action="pass the layer's two tail views",
        )
    if any(step % ALIGNMENT for step in (k.data_ptr(), v.data_ptr(), *k_steps[:3], *v_steps[:3])):
        raise ArgumentError(
            "tails must keep slots, rows and heads at multiples of 16 bytes",
            given=f"addresses {k.data_ptr():#x}, {v.data_ptr():#x}; strides {k.stride()}, {v.stride()} elements",
            allowed=f"multiples of {ALIGNMENT} bytes",
            action="use the arena's own views",
        )
    arguments.k_tail, arguments.v_tail = k.data_ptr(), v.data_ptr()
    arguments.k_tail_slot_stride, arguments.v_tail_slot_stride = k_steps[0], v_steps[0]
    arguments.tail_row_stride, arguments.tail_head_stride = k_steps[1:3]
    arguments.ring_rows = k.shape[1]
