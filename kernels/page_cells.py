"""The cells that seal and restore pages, one a width and row dtype, for 2, 3 and 4 bits alike, and one for fp8; and the
one that appends rows."""

from __future__ import annotations

from typing import NamedTuple

from kernels.cells import MAX_NORM, ROW_TYPES, ZERO_NORM, Cell
from kernels.widths import COMPILED_WIDTHS

GROUP_ROWS = 32  # rows of a unit: kGroupRows in csrc/page_rows.cuh
_FP8_WARPS, _FP8_CTAS_PER_SM = 4, 8
_ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_STATIC_SHARED_BYTES = 1024  # of each CTA, the machine's own


class RowTiling(NamedTuple):
    """How rows of a width are spread: over how many lanes each, and over how many warps an SM's registers."""

    lanes: int
    warps: int


_TILINGS = {64: RowTiling(1, 16), 128: RowTiling(1, 12), 256: RowTiling(4, 16), 512: RowTiling(8, 16)}
_MAX_CTA_WARPS = (
    16  # warps of one CTA fetch their instructions together (csrc/seal.cuh), so CTAs are as large as they can be
)


class PageGrid(NamedTuple):
    """CTAs of a launch, warps and dynamic shared memory of each."""

    ctas: int
    warps: int
    shared_bytes: int


def seal_cell(width: int, row_type: str) -> Cell:
    """Seal and restore of TurboQuant rows of `row_type` ("bf16", "f16", "f32") of a compiled width."""
    tiling = _TILINGS[width]
    seal, restore = (f"{verb}_w{width}_{row_type}" for verb in ("seal", "restore"))
    defines = {
        "TAILPACK_KERNEL_SEAL": seal,
        "TAILPACK_KERNEL_RESTORE": restore,
        "TAILPACK_TYPE": ROW_TYPES[row_type],
        "TAILPACK_WIDTH": str(width),
        "TAILPACK_ROW_LANES": str(tiling.lanes),
        "TAILPACK_ROW_WARPS": str(tiling.warps),
        "TAILPACK_ZERO_NORM": repr(ZERO_NORM),
        "TAILPACK_MAX_NORM": repr(MAX_NORM),
    }
    return Cell("seal.cu", width, "tq", row_type, (seal, restore), tuple(defines.items()))


def fp8_cell(row_type: str) -> Cell:
    """Seal and restore of fp8 rows of any width that is a multiple of 8."""
    seal, restore = (f"{verb}_fp8_{row_type}" for verb in ("seal", "restore"))
    defines = {
        "TAILPACK_KERNEL_SEAL": seal,
        "TAILPACK_KERNEL_RESTORE": restore,
        "TAILPACK_TYPE": ROW_TYPES[row_type],
        "TAILPACK_ZERO_NORM": repr(ZERO_NORM),
    }
    return Cell("seal_fp8.cu", 0, "fp8", row_type, (seal, restore), tuple(defines.items()))


def page_grid(cell: Cell, num_units: int, sms: int, sm_shared_bytes: int) -> PageGrid:
    """The grid that keeps most warps at work, each on units of its own, on SMs of that much shared memory.

    A CTA may have all of an SM's but 1 KB. Few units are spread over all SMs.
    """
    if cell.source != "seal.cu":
        return PageGrid(min(-(-num_units // _FP8_WARPS), sms * _FP8_CTAS_PER_SM), _FP8_WARPS, 0)
    of_sm = _TILINGS[cell.width].warps

    def ctas_per_sm(warps: int) -> int:
        return min(of_sm // warps, sm_shared_bytes // (shared_bytes(cell, warps) + _STATIC_SHARED_BYTES))

    # the first of several that are as good, which has the largest CTAs
    warps = max(range(min(of_sm, _MAX_CTA_WARPS), 0, -1), key=lambda warps: warps * ctas_per_sm(warps))
    most_ctas = sms * ctas_per_sm(warps)
    warps = min(warps, -(-num_units // most_ctas))
    return PageGrid(min(-(-num_units // warps), most_ctas), warps, shared_bytes(cell, warps))


def shared_bytes(cell: Cell, warps: int) -> int:
    """Dynamic shared memory of a CTA of that many warps: SharedRows in csrc/seal.cuh up to its last warp."""
    lanes = _TILINGS[cell.width].lanes
    rows = GROUP_ROWS // lanes * (cell.width * _ELEMENT_BYTES[cell.variant] + 16 * lanes)
    staged = GROUP_ROWS * (4 * (cell.width // 8 + 4) + 4)
    units = 3 * (16 * 8 + 8 * 8 + 4 * 4 + 16)
    tables = 2 * 3 * 32 * 4 + 3 * 32 + 4 * 32 + 64 * 4
    return tables + warps * (rows + staged + units + 16)


# Appending copies bytes, whatever the rows are.
APPEND_CELL = Cell("append.cu", 0, "rows", "bytes", ("append_rows",), (("TAILPACK_KERNEL_APPEND", "append_rows"),))

# Models run in bf16; rows of f16 and f32 are rare enough to compile on demand.
DECLARED_PAGE_CELLS: tuple[Cell, ...] = (
    *(seal_cell(width, "bf16") for width in COMPILED_WIDTHS),
    fp8_cell("bf16"),
    APPEND_CELL,
)
