"""Where packed rows lie in a page: planes of codes and scales, with a version.

A page is one contiguous blob: region after region, head after head, all codes of the page's rows and then all their
scales, every plane on a 128-byte boundary:

    region 0: [head 0: codes | pad | scales | pad][head 1: ...] region 1: ...      pad up to a multiple of 128, zero

`page_layout` is a pure function of the regions and the version. What a version fixes is also the order *inside* a codes
plane; a new order (one that follows MMA fragments, say) is a new entry of ORDERS, and files and transfers name the
version they were written with. Version 1 keeps canonical records: row after row, codes as in `bitpack`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import LayoutError

PLANE_ALIGNMENT = 128
LAYOUT_VERSION = 1  # what new pages are written with


class Region(NamedTuple):
    """One kind of row in one layer, as a page holds it. The codec decides the two sizes; a dense row has no scales."""

    rows: int  # rows a page holds: 128 over the region's ratio
    heads: int
    code_bytes: int  # a row
    scale_bytes: int  # a row


class RegionPlanes(NamedTuple):
    """Bytes [offset, offset + heads * head_bytes) of a page; head h starts at offset + h * head_bytes, codes first."""

    region: Region
    offset: int
    scales_offset: int  # from a head's start to its scales
    head_bytes: int


class PageLayout(NamedTuple):
    """All offsets and sizes are multiples of 128."""

    version: int
    regions: tuple[RegionPlanes, ...]
    page_bytes: int


class Order(NamedTuple):
    """How a version arranges the codes of its planes; pure, inverse to each other, u8 [heads, rows, code_bytes]."""

    from_canonical: Callable[[Tensor, Region], Tensor]
    to_canonical: Callable[[Tensor, Region], Tensor]


def _as_is(codes: Tensor, region: Region) -> Tensor:
    return codes


ORDERS: dict[int, Order] = {1: Order(_as_is, _as_is)}


def _aligned(size: int) -> int:
    return -(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


def _order(version: int) -> Order:
    if version not in ORDERS:
        raise LayoutError(
            "unknown page layout version",
            given=str(version),
            allowed=", ".join(map(str, ORDERS)),
            action="read the page with the release that wrote it, or seal it again",
        )
    return ORDERS[version]


def page_layout(regions: Sequence[Region], version: int = LAYOUT_VERSION) -> PageLayout:
    """Planes of a page that holds `regions`. Raises LayoutError (version unknown, a region with a size below 1)."""
    _order(version)
    planes: list[RegionPlanes] = []
    offset = 0
    for region in regions:
        if min(region.rows, region.heads, region.code_bytes) < 1 or region.scale_bytes < 0:
            raise LayoutError(
                "a region needs rows, heads and bytes",
                given=str(region),
                allowed="rows, heads and code_bytes of 1 or more, scale_bytes of 0 or more",
                action="correct the geometry",
            )
        scales_offset = _aligned(region.rows * region.code_bytes)
        head_bytes = scales_offset + _aligned(region.rows * region.scale_bytes)
        planes.append(RegionPlanes(region, offset, scales_offset, head_bytes))
        offset += region.heads * head_bytes
    return PageLayout(version, tuple(planes), offset)


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
