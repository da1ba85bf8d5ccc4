"""Reads and writes the planes of a packed page (where they lie: `kernels.page_layout`).

What a layout version fixes is also the order *inside* a codes plane; a new order (one that follows MMA fragments, say)
is a new entry of ORDERS, and files and transfers name the version they were written with. Version 1 keeps canonical
records: row after row, codes as in `bitpack`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import LayoutError
from kernels.page_layout import (
    LAYOUT_VERSION,
    PLANE_ALIGNMENT,
    PageLayout,
    Region,
    RegionPlanes,
    check_version,
    page_layout,
)

__all__ = [
    "LAYOUT_VERSION",
    "ORDERS",
    "PLANE_ALIGNMENT",
    "Order",
    "PageLayout",
    "Region",
    "RegionPlanes",
    "page_layout",
    "read_region",
    "region_planes",
    "write_region",
]


class Order(NamedTuple):
    """How a version arranges the codes of its planes; pure, inverse to each other, u8 [heads, rows, code_bytes]."""

    from_canonical: Callable[[Tensor, Region], Tensor]
    to_canonical: Callable[[Tensor, Region], Tensor]


def _as_is(codes: Tensor, region: Region) -> Tensor:
    return codes


ORDERS: dict[int, Order] = {1: Order(_as_is, _as_is)}


def _order(version: int) -> Order:
    check_version(version)
    return ORDERS[version]


def region_planes(layout: PageLayout, page: Tensor, region: int) -> tuple[Tensor, Tensor]:
    """Views into `page` u8 [page_bytes]: codes [heads, rows, code_bytes], scales [heads, rows, scale_bytes].

    The codes are in the version's order. The views live as long as the page does. Raises LayoutError where the page has
    another size, dtype or stride.
    """
    if page.dtype != torch.uint8 or page.shape != (layout.page_bytes,) or not page.is_contiguous():
        raise LayoutError(
            "this is not a page of that layout",
            given=f"{page.dtype} {tuple(page.shape)}, strides {page.stride()}",
            allowed=f"contiguous uint8 [{layout.page_bytes}]",
            action="compare the geometry digests of both ends",
        )
    (rows, heads, code_bytes, scale_bytes), offset, scales_offset, head_bytes = layout.regions[region]
    span = page[offset : offset + heads * head_bytes].view(heads, head_bytes)
    codes = span[:, : rows * code_bytes].view(heads, rows, code_bytes)
    return codes, span[:, scales_offset : scales_offset + rows * scale_bytes].view(heads, rows, scale_bytes)


def write_region(layout: PageLayout, page: Tensor, region: int, records: Tensor) -> None:
    """Write canonical `records` u8 [heads, rows, code_bytes + scale_bytes] into `page` u8 [page_bytes], in place.

    Padding is zeroed, so a page's bytes are a pure function of its records. Raises LayoutError.
    """
    codes, scales = region_planes(layout, page, region)
    want = (*codes.shape[:2], codes.shape[2] + scales.shape[2])
    if records.dtype != torch.uint8 or records.shape != want:
        raise LayoutError(
            "records do not fit the region",
            given=f"{records.dtype} {tuple(records.shape)}",
            allowed=f"uint8 {want}",
            action="pass [heads, rows, record bytes]",
        )
    planes = layout.regions[region]
    page[planes.offset : planes.offset + planes.region.heads * planes.head_bytes] = 0
    codes.copy_(_order(layout.version).from_canonical(records[..., : codes.shape[2]], planes.region))
    scales.copy_(records[..., codes.shape[2] :])


def read_region(layout: PageLayout, page: Tensor, region: int) -> Tensor:
    """Canonical records u8 [heads, rows, code_bytes + scale_bytes] of a region; a new tensor. Raises LayoutError."""
    codes, scales = region_planes(layout, page, region)
    return torch.cat([_order(layout.version).to_canonical(codes, layout.regions[region].region), scales], dim=-1)
