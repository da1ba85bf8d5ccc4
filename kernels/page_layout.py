"""Where packed rows lie in a page, as numbers: planes of codes and scales, with a version. No torch.

A page is one contiguous blob: region after region, head after head, all codes of the page's rows and then all their
scales, every plane on a 128-byte boundary:

    region 0: [head 0: codes | pad | scales | pad][head 1: ...] region 1: ...      pad up to a multiple of 128, zero

Version 1 ("rows") keeps canonical records: row after row, codes as in `bitpack`. Version 2 ("fragments") is for pages
that GPU kernels read: TurboQuant keys and values of FRAGMENT_WIDTHS, in whole groups of 32 rows, lie in the order of
`fragments`, where a row takes width * bits / 8 bytes (48 of 128 3-bit codes, not 52). Every other region is as in 1.

`page_layout` is a pure function of the regions and the version. `kernels.layout` reads and writes such pages.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kernels.errors import LayoutError
from kernels.record_sizes import SCALE_BYTES, code_bytes

PLANE_ALIGNMENT = 128
ROWS, FRAGMENTS = 1, 2
VERSIONS = (ROWS, FRAGMENTS)  # what can be written and read
FRAGMENT_WIDTHS = (64, 128, 256, 512)  # part of the version: a new width needs a new one
GROUP_ROWS = 32


class Region(NamedTuple):
    """One kind of row in one layer, as records. The codec decides the two sizes; a dense row has no scales."""

    rows: int  # rows a page holds: 128 over the region's ratio
    heads: int
    code_bytes: int  # a row, canonical
    scale_bytes: int  # a row
    kind: str = ""  # "k" and "v" have orders of their own in version 2
    dim: int = 0
    bits: int = 0  # of a TurboQuant code; 0: another codec


class Fragments(NamedTuple):
    """Rows in groups of 32, in the order of `fragments`."""

    kind: str  # "k", "v"
    dim: int
    bits: int

    @property
    def row_bytes(self) -> int:
        """A row's share of its group's codes."""
        return self.dim * self.bits // 8

    @property
    def group_bytes(self) -> int:
        """Codes of a group."""
        return GROUP_ROWS * self.row_bytes


class RegionPlanes(NamedTuple):
    """Bytes [offset, offset + heads * head_bytes) of a page; head h starts at offset + h * head_bytes, codes first."""

    region: Region
    offset: int
    scales_offset: int  # from a head's start to its scales
    head_bytes: int
    fragments: Fragments | None = None  # None: row after row

    @property
    def row_bytes(self) -> int:
        """A row's share of the codes of a head."""
        return self.fragments.row_bytes if self.fragments else self.region.code_bytes


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


def region_fragments(region: Region, version: int) -> Fragments | None:
    """The order that `version` gives a region; None: row after row. Raises LayoutError (version)."""
    check_version(version)
    if version == ROWS or region.kind not in ("k", "v") or not region.bits or region.dim not in FRAGMENT_WIDTHS:
        return None
    return None if region.rows % GROUP_ROWS else Fragments(region.kind, region.dim, region.bits)


def page_layout(regions: Iterable[Region], version: int = ROWS) -> PageLayout:
    """Planes of a page that holds `regions`.

    Raises LayoutError: version unknown, a region with a size below 1, or one whose sizes are not those of its codes.
    """
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
        fragments = region_fragments(region, version)
        record = (region.code_bytes, region.scale_bytes)
        if fragments and record != (code_bytes(region.dim, region.bits), SCALE_BYTES):
            raise LayoutError(
                "a region has other bytes a row than its codes take",
                given=str(region),
                allowed=f"{code_bytes(region.dim, region.bits)} + {SCALE_BYTES} bytes",
                action="correct the geometry",
            )
        row_bytes = fragments.row_bytes if fragments else region.code_bytes
        scales_offset = aligned(region.rows * row_bytes)
        head_bytes = scales_offset + aligned(region.rows * region.scale_bytes)
        planes.append(RegionPlanes(region, offset, scales_offset, head_bytes, fragments))
        offset += region.heads * head_bytes
    return PageLayout(version, tuple(planes), offset)
