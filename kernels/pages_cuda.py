"""Dense rows into packed pages and back, on a GPU: all regions of a layer group in one launch.

What is packed where is a table of pages and a table of the group's regions, both in device memory, so a launch may be
captured in a CUDA graph and replayed with other contents. Nothing here allocates on the device or waits for it once the
tables are made. Codes, scales and rows equal those of kernels/turboquant.py and kernels/fp8.py bit for bit; where they
lie says kernels/page_layout.py, and the checksums are those of kernels/page_checksum.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cells import ROW_TYPES, Cell
from kernels.errors import ArgumentError, LayoutError, RowError
from kernels.loader import launch
from kernels.page_cells import GROUP_ROWS, fp8_cell, page_grid, seal_cell
from kernels.page_layout import RegionPlanes
from kernels.record_sizes import SCALE_BYTES, code_bytes
from kernels.widths import require_compiled

PAGE_TOKENS = 128
NO_BAD_ROW = 2**63 - 1  # value of a first_bad_row flag while no bad row was met
_ALIGNMENT = 16  # bytes: rows move 16 at a time
_ROW_TYPES = dict(zip((torch.bfloat16, torch.float16, torch.float32), ROW_TYPES, strict=True))
_ORDERS = {"": 0, "k": 1, "v": 2}  # Order in csrc/page_rows.cuh
_MAX_REGIONS = _MAX_HEADS = 1 << 12  # what the flag of a bad row can name
_PAGE_FIELDS, _REGION_FIELDS = 8, 16


class PageRows(NamedTuple):
    """One page of a call, tokens [first_token, first_token + 128) of a sequence, and where their rows lie outside it.

    The rows of the page's first `ring_tokens` tokens lie in tail slot `tail_slot`, the others in the workspace, which
    has the row of its token t at t // ratio, from token `workspace_token` on. The call is about tokens [begin, end) of
    the page's 128. All of these are multiples of every region's ratio.
    """

    page: int  # -1: an entry to be skipped
    first_token: int = 0
    tail_slot: int = 0
    ring_tokens: int = 0
    workspace_token: int = 0
    begin: int = 0
    end: int = PAGE_TOKENS


class BadRow(NamedTuple):
    """A row that does not pack. entry: index in the table of pages; row: in the page."""

    entry: int
    region: int
    head: int
    row: int


@dataclass(frozen=True)
class RegionRows:
    """One region of a layer group: its planes in a page, and the dense rows outside.

    tail: [slots, ring rows, heads, dim], row i of a slot in ring row i % ring rows, or None.
    workspace: [rows, heads, dim], or None. Any strides of 16-byte multiples, the last one 1.
    """

    planes: RegionPlanes
    dim: int
    ratio: int = 1  # tokens a row
    tail: Tensor | None = None
    workspace: Tensor | None = None

    @property
    def rows(self) -> Tensor:
        """The tail or the workspace, whichever there is. Raises ArgumentError."""
        rows = self.tail if self.tail is not None else self.workspace
        if rows is None:
            raise ArgumentError(
                "a region has no dense rows", given="neither", allowed="a tail, a workspace or both", action="pass one"
            )
        return rows


@dataclass(frozen=True)
class PageGroup:
    """A layer group's arena and regions as the kernels take them; made by `page_group`, kept while the arena lives.

    arena: u8 [pages, page_bytes]. regions: i64 [regions, 16] and units: i32 [units, 4], on the arena's device. Where a
    workspace moves, copy a new `region_table` into `regions`.
    """

    arena: Tensor
    regions: Tensor
    units: Tensor
    cell: Cell
    sources: tuple[RegionRows, ...]


def page_group(arena: Tensor, regions: Sequence[RegionRows]) -> PageGroup:
    """Tables of a layer group. All its regions have one dim, one dtype of dense rows, and TurboQuant or fp8 codes.

    Raises ArgumentError, LayoutError, UncompiledWidthError.
    """
    if not 1 <= len(regions) <= _MAX_REGIONS:
        raise ArgumentError(
            "a group has regions", given=str(len(regions)), allowed=f"1 to {_MAX_REGIONS}", action="pass its regions"
        )
    if arena.dtype != torch.uint8 or arena.dim() != 2 or (arena.shape[1] > 1 and arena.stride(1) != 1):
        raise LayoutError(
            "this is not an arena of pages",
            given=f"{arena.dtype} {tuple(arena.shape)}, strides {arena.stride()}",
            allowed="uint8 [pages, page_bytes], contiguous pages",
            action="map the arena as bytes",
        )
    _check_alignment("arena", arena, arena.stride()[:1])
    first = regions[0]
    for region in regions:
        _check_region(arena, first, region)
    row_type = _ROW_TYPES[first.rows.dtype]
    if first.planes.region.bits:
        require_compiled(first.dim, "row")
        cell = seal_cell(first.dim, row_type)
    else:
        cell = fp8_cell(row_type)
    units = [
        (i, head, row, 0)
        for i, region in enumerate(regions)
        for row in range(0, region.planes.region.rows, GROUP_ROWS)
        for head in range(region.planes.region.heads)  # innermost: neighbours read what lies side by side
    ]
    table = torch.tensor(units, dtype=torch.int32, device=arena.device)
    return PageGroup(arena, region_table(regions).to(arena.device), table, cell, tuple(regions))


def region_table(regions: Sequence[RegionRows]) -> Tensor:
    """i64 [regions, 16] on the CPU: PageRegion of csrc/page_rows.cuh, field by field."""
    return torch.tensor([_region_fields(region) for region in regions], dtype=torch.int64)


def page_table(group: PageGroup, pages: Sequence[PageRows], *, seal: bool = False) -> Tensor:
    """i64 [pages, 8] on the CPU, checked against the group; the caller copies it to the device.

    seal: it is for `seal_pages`, which packs whole pages. Raises ArgumentError naming the page that does not fit.
    """
    for page in pages:
        if page.page >= 0:
            _check_page(group, page, seal)
    return torch.tensor([(*page, 0) for page in pages], dtype=torch.int64).view(-1, _PAGE_FIELDS)


def seal_pages(group: PageGroup, pages: Tensor, checksums: Tensor, first_bad_row: Tensor) -> None:
    """Pack the rows of tokens [begin, 128) of `pages` i64 [n, 8] (a `page_table`) into their pages, all regions.

    Rows below `begin` stay as they are in the page: a page that a cut divided is copied whole and then completed. Every
    other byte of a page is written, padding as zeros.
    checksums: i64 [n], zero before the call; afterwards the pages' checksums (mod 2^64).
    first_bad_row: i64 [1], lowered to the first row that is not finite or longer than 1e37 (`bad_row` reads it); such a
    row stores codes 0 and scale NaN.
    Raises ArgumentError before anything runs; MachineError (loader).
    """
    n = _check_table(group, "pages", pages, (_PAGE_FIELDS,))
    if _check_table(group, "checksums", checksums, ()) != n:
        raise ArgumentError(
            "a checksum is kept for each page", given=f"{len(checksums)}", allowed=f"{n}", action="pass one a page"
        )
    _check_table(group, "first_bad_row", first_bad_row, ())
    _launch(group, 0, pages, (checksums, first_bad_row))


def restore_pages(group: PageGroup, pages: Tensor) -> None:
    """Unpack the rows of tokens [begin, end) of `pages` i64 [n, 8] (a `page_table`) to where it says, all regions.

    Raises ArgumentError before anything runs; MachineError (loader).
    """
    _check_table(group, "pages", pages, (_PAGE_FIELDS,))
    _launch(group, 1, pages, ())


def bad_row(flag: int) -> BadRow | None:
    """The row that a first_bad_row flag names."""
    if flag == NO_BAD_ROW:
        return None
    return BadRow(flag >> 32, flag >> 20 & _MAX_REGIONS - 1, flag >> 8 & _MAX_HEADS - 1, flag & 0xFF)


def raise_bad_row(flag: int, pages: Sequence[PageRows]) -> None:
    """Raise RowError if the flag names a row of `pages`; their contents are then not to be used."""
    bad = bad_row(flag)
    if bad is not None:
        raise RowError(
            "a row that is not finite, or whose norm is above 1e37, cannot be packed",
            given=f"row {bad.row} of page {pages[bad.entry].page}, region {bad.region}, head {bad.head}",
            allowed="finite rows",
            action="find what produced it; the pages are not to be used",
        )


def _region_fields(region: RegionRows) -> tuple[int, ...]:
    tail, workspace, planes = region.tail, region.workspace, region.planes
    fields = (
        *((tail.data_ptr(), *_byte_strides(tail)[:3], tail.shape[1]) if tail is not None else (0, 0, 0, 0, 1)),
        *((workspace.data_ptr(), *_byte_strides(workspace)[:2]) if workspace is not None else (0, 0, 0)),
        *(planes.offset, planes.head_bytes, planes.scales_offset),
        *(planes.region.rows, region.ratio),
        _ORDERS[planes.fragments.kind if planes.fragments else ""],
        *(planes.region.bits, region.dim),
    )
    assert len(fields) == _REGION_FIELDS
    return fields


def _byte_strides(rows: Tensor) -> tuple[int, ...]:
    return tuple(stride * rows.element_size() for stride in rows.stride())


def _check_region(arena: Tensor, first: RegionRows, region: RegionRows) -> None:
    planes, rows = region.planes, region.rows
    shape = planes.region
    alike = (region.dim, rows.dtype, bool(shape.bits)) == (first.dim, first.rows.dtype, bool(first.planes.region.bits))
    if not alike or rows.dtype not in _ROW_TYPES:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in _ROW_TYPES)
        raise ArgumentError(
            "the regions of a group differ, or hold another dtype",
            given=f"dim {region.dim}, {rows.dtype}, {shape.bits} bits",
            allowed=f"dim {first.dim}, {first.rows.dtype}, which is {names}, and bits for all or for none",
            action="make a group of each kind",
        )
    sizes = (code_bytes(region.dim, shape.bits) if shape.bits else region.dim, SCALE_BYTES)
    fits = (
        planes.offset + shape.heads * planes.head_bytes <= arena.shape[1] and region.ratio * shape.rows == PAGE_TOKENS
    )
    if (shape.code_bytes, shape.scale_bytes) != sizes or not fits or shape.heads > _MAX_HEADS or region.dim % 8:
        raise LayoutError(
            "a region's planes do not hold its rows",
            given=f"dim {region.dim}, ratio {region.ratio}, {planes}, pages of {arena.shape[1]} bytes",
            allowed=f"{sizes[0]} + {sizes[1]} bytes a row, 128 tokens a page, up to {_MAX_HEADS} heads",
            action="compare the geometry digests of both ends",
        )
    for name, source, dims in (("tail", region.tail, 4), ("workspace", region.workspace, 3)):
        if source is None:
            continue
        if source.dim() != dims or source.shape[-2:] != (shape.heads, region.dim) or source.dtype != rows.dtype:
            raise ArgumentError(
                f"the {name} does not fit the region",
                given=f"{source.dtype} {tuple(source.shape)}",
                allowed=f"{rows.dtype} [{'slots, ' * (dims == 4)}rows, {shape.heads}, {region.dim}]",
                action="take the region's own",
            )
        if source.device != arena.device or source.stride(-1) != 1:
            raise ArgumentError(
                f"the {name} must lie on the arena's device, each row in one piece",
                given=f"{source.device}, strides {source.stride()}",
                allowed=f"{arena.device}, last stride 1",
                action="pass it so",
            )
        _check_alignment(name, source, _byte_strides(source)[:-1])
    if region.tail is not None and region.tail.shape[1] < shape.rows:
        raise ArgumentError(
            "a tail ring is shorter than a page",
            given=f"{region.tail.shape[1]} rows",
            allowed=f"{shape.rows} or more",
            action="take the region's own",
        )


def _check_alignment(name: str, rows: Tensor, byte_strides: Sequence[int]) -> None:
    if rows.data_ptr() % _ALIGNMENT or any(stride % _ALIGNMENT for stride in byte_strides):
        raise ArgumentError(
            f"the {name} must lie at multiples of {_ALIGNMENT} bytes",
            given=f"address {rows.data_ptr():#x}, byte strides {tuple(byte_strides)}",
            allowed=f"multiples of {_ALIGNMENT}",
            action="pass a contiguous copy",
        )


def _check_page(group: PageGroup, page: PageRows, seal: bool) -> None:
    problems = []
    if seal and page.end != PAGE_TOKENS:
        problems.append(f"end {PAGE_TOKENS}, for pages are sealed whole")
    if page.page >= len(group.arena):
        problems.append(f"page below {len(group.arena)}")
    if not 0 <= page.begin <= page.end <= PAGE_TOKENS or not 0 <= page.ring_tokens <= PAGE_TOKENS:
        problems.append("0 <= begin <= end <= 128, 0 <= ring_tokens <= 128")
    if page.first_token < 0 or page.first_token % PAGE_TOKENS:
        problems.append("first_token a multiple of 128")
    for region in group.sources:
        cuts = (page.begin, page.end, page.ring_tokens, page.workspace_token)
        if any(cut % region.ratio for cut in cuts):
            problems.append(f"multiples of {region.ratio}")
        if page.ring_tokens and not (region.tail is not None and 0 <= page.tail_slot < len(region.tail)):
            problems.append("a tail slot of every region")
        tokens = max(0, page.end - page.ring_tokens)
        held = 0 if region.workspace is None else len(region.workspace) * region.ratio
        if tokens and not 0 <= page.workspace_token <= held - tokens:
            problems.append(f"{tokens} tokens in the workspace of every region (one holds {held})")
    if problems:
        raise ArgumentError(
            "a page's rows are not where it says",
            given=str(page),
            allowed="; ".join(dict.fromkeys(problems)),
            action="correct the entry",
        )


def _check_table(group: PageGroup, name: str, table: Tensor, inner: tuple[int, ...]) -> int:
    """Length of an i64 table [n, *inner]. Raises ArgumentError."""
    want = (torch.int64, group.arena.device, inner)
    if (table.dtype, table.device, tuple(table.shape[1:])) != want or table.dim() == 0 or not table.is_contiguous():
        raise ArgumentError(
            f"{name} does not fit",
            given=f"{table.dtype} {tuple(table.shape)} on {table.device}, strides {table.stride()}",
            allowed=f"contiguous int64 [n{''.join(f', {size}' for size in inner)}] on {group.arena.device}",
            action="copy it to the arena's device",
        )
    return len(table)


def _launch(group: PageGroup, kernel: int, pages: Tensor, results: tuple[Tensor, ...]) -> None:
    device = group.arena.device
    if device.type != "cuda":
        raise ArgumentError(
            "the kernels run on a GPU", given=str(device), allowed="cuda", action="use kernels.page_codec on a CPU"
        )
    if len(pages) == 0:
        return
    sm = torch.cuda.get_device_properties(device)
    num_units = len(pages) * len(group.units)
    grid = page_grid(group.cell, num_units, sm.multi_processor_count, sm.shared_memory_per_multiprocessor)
    tables = (pages, group.regions, group.units, len(pages), len(group.units), group.arena, group.arena.stride(0))
    launch(
        group.cell,
        group.cell.kernels[kernel],
        device,
        ctas=grid.ctas,
        threads=32 * grid.warps,
        arguments=(*tables, *results),
        shared_bytes=grid.shared_bytes,
    )
