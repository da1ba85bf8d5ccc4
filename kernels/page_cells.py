"""The cells that seal and restore pages, one a width and row dtype, for 2, 3 and 4 bits alike, and one for fp8; and the
one that appends rows."""

from __future__ import annotations

from kernels.cells import MAX_NORM, ROW_TYPES, ZERO_NORM, Cell
from kernels.widths import COMPILED_WIDTHS

WARPS = 4  # of a CTA: kRowWarpsOfCta in csrc/seal.cuh
GROUP_ROWS = 32  # rows of a unit: kGroupRows in csrc/page_rows.cuh
_LANE_VALUES = 128  # of a row in one lane's registers
_ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_CTAS_PER_SM = {64: 4, 128: 3, 256: 2, 512: 2}  # as many as registers allow with next to no spilling on any arch


def seal_cell(width: int, row_type: str) -> Cell:
    """Seal and restore of TurboQuant rows of `row_type` ("bf16", "f16", "f32") of a compiled width."""
    seal, restore = (f"{verb}_w{width}_{row_type}" for verb in ("seal", "restore"))
    defines = {
        "TAILPACK_KERNEL_SEAL": seal,
        "TAILPACK_KERNEL_RESTORE": restore,
        "TAILPACK_TYPE": ROW_TYPES[row_type],
        "TAILPACK_WIDTH": str(width),
        "TAILPACK_CTAS_PER_SM": str(_CTAS_PER_SM[width]),
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


def ctas_per_sm(cell: Cell) -> int:
    """CTAs that one SM holds at a time, if its shared memory allows."""
    return _CTAS_PER_SM.get(cell.width, 8)


def shared_bytes(cell: Cell) -> int:
    """Dynamic shared memory of a CTA: sizeof(SharedRows) in csrc/seal.cuh. None for fp8."""
    if cell.source != "seal.cu":
        return 0
    lanes = max(1, cell.width // _LANE_VALUES)
    rows = GROUP_ROWS // lanes * (cell.width * _ELEMENT_BYTES[cell.variant] + 16 * lanes)
    staged = GROUP_ROWS * (4 * (cell.width // 8 + 4) + 4)
    tables = 2 * 3 * 32 * 4 + 16 * 4
    return tables + WARPS * (rows + staged + 16)


# Appending copies bytes, whatever the rows are.
APPEND_CELL = Cell("append.cu", 0, "rows", "bytes", ("append_rows",), (("TAILPACK_KERNEL_APPEND", "append_rows"),))

# Models run in bf16; rows of f16 and f32 are rare enough to compile on demand.
DECLARED_PAGE_CELLS: tuple[Cell, ...] = (
    *(seal_cell(width, "bf16") for width in COMPILED_WIDTHS),
    fp8_cell("bf16"),
    APPEND_CELL,
)
