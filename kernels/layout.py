"""Reads and writes the planes of a packed page (where they lie and in which order: `kernels.page_layout`).

What is read and written are canonical records: a row's codes as in `bitpack`, then its scales. Files and transfers name
the version that their pages were written with.
"""

import torch
from torch import Tensor

from kernels import fragments
from kernels.errors import LayoutError
from kernels.page_layout import GROUP_ROWS, PageLayout, Region, RegionPlanes, check_version, page_layout

__all__ = ["PageLayout", "Region", "RegionPlanes", "page_layout", "read_region", "region_planes", "write_region"]


def region_planes(layout: PageLayout, page: Tensor, region: int) -> tuple[Tensor, Tensor]:
    """Views into `page` u8 [page_bytes] of codes and scales: u8 [heads, rows, bytes a row], or [heads, groups, bytes].

    Groups of 32 rows, where the version keeps the region in the order of `fragments`. The views live as long as the
    page does. Raises LayoutError where the page has another size, dtype or stride, or the layout an unknown version.
    """
    check_version(layout.version)
    if page.dtype != torch.uint8 or page.shape != (layout.page_bytes,) or not page.is_contiguous():
        raise LayoutError(
            "this is not a page of that layout",
            given=f"{page.dtype} {tuple(page.shape)}, strides {page.stride()}",
            allowed=f"contiguous uint8 [{layout.page_bytes}]",
            action="compare the geometry digests of both ends",
        )
    at = layout.regions[region]
    rows, heads, _, scale_bytes, *_ = at.region
    span = page[at.offset : at.offset + heads * at.head_bytes].view(heads, at.head_bytes)
    codes = span[:, : rows * at.row_bytes]
    scales = span[:, at.scales_offset : at.scales_offset + rows * scale_bytes]
    units = rows // GROUP_ROWS if at.fragments else rows
    return (
        codes.view(heads, units, rows * at.row_bytes // units),
        scales.view(heads, units, rows * scale_bytes // units),
    )


def write_region(layout: PageLayout, page: Tensor, region: int, records: Tensor) -> None:
    """Write canonical `records` u8 [heads, rows, code_bytes + scale_bytes] into `page` u8 [page_bytes], in place.

    Padding is zeroed, so a page's bytes are a pure function of its records. Raises LayoutError.
    """
    codes, scales = region_planes(layout, page, region)
    at = layout.regions[region]
    rows, heads, code_bytes, scale_bytes, *_ = at.region
    want = (heads, rows, code_bytes + scale_bytes)
    if records.dtype != torch.uint8 or records.shape != want:
        raise LayoutError(
            "records do not fit the region",
            given=f"{records.dtype} {tuple(records.shape)}",
            allowed=f"uint8 {want}",
            action="pass [heads, rows, record bytes]",
        )
    page[at.offset : at.offset + heads * at.head_bytes] = 0
    own_codes, own_scales = records[..., :code_bytes], records[..., code_bytes:]
    if at.fragments:
        own_codes = fragments.codes_to_groups(own_codes, at.fragments)
        own_scales = fragments.scales_to_groups(own_scales)
    codes.copy_(own_codes)
    scales.copy_(own_scales)


def read_region(layout: PageLayout, page: Tensor, region: int) -> Tensor:
    """Canonical records u8 [heads, rows, code_bytes + scale_bytes] of a region; a new tensor. Raises LayoutError."""
    codes, scales = region_planes(layout, page, region)
    order = layout.regions[region].fragments
    if order:
        codes, scales = fragments.codes_from_groups(codes, order), fragments.scales_from_groups(scales)
    return torch.cat([codes, scales], dim=-1)
