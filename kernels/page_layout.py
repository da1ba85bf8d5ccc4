"""Where packed rows lie in a page, as numbers: planes of codes and scales, with a version. No torch.

A page is one contiguous blob: region after region, head after head, all codes of the page's rows and then all their
scales, every plane on a 128-byte boundary:

    region 0: [head 0: codes | pad | scales | pad][head 1: ...] region 1: ...      pad up to a multiple of 128, zero

`page_layout` is a pure function of the regions and the version. `kernels.layout` reads and writes such pages.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kernels.errors import LayoutError

PLANE_ALIGNMENT = 128
LAYOUT_VERSION = 1  # what new pages are written with
VERSIONS = (1,)  # what can be read


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


def aligned(size: int) -> int:
    """`size` rounded up to a plane boundary."""
    return -(-size // PLANE_ALIGNMENT) * PLANE_ALIGNMENT


def check_version(version: int) -> None:
    """Raises LayoutError for a version that this release cannot read."""
    if version not in VERSIONS:
        raise LayoutError(
            "unknown page layout version",
            given=str(version),
            allowed=", ".join(map(str, VERSIONS)),
            action="read the page with the release that wrote it, or seal it again",
        )


def page_layout(regions: Sequence[Region], version: int = LAYOUT_VERSION) -> PageLayout:
    """Planes of a page that holds `regions`. Raises LayoutError (version unknown, a region with a size below 1)."""
    check_version(version)
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
        scales_offset = aligned(region.rows * region.code_bytes)
        head_bytes = scales_offset + aligned(region.rows * region.scale_bytes)
        planes.append(RegionPlanes(region, offset, scales_offset, head_bytes))
        offset += region.heads * head_bytes
    return PageLayout(version, tuple(planes), offset)
