"""What is compiled: the archs, and the table of cells that are built ahead of time.

A *cell* is one source compiled with one set of defines: one width, preset and variant. It becomes one cubin an arch.
Cells outside DECLARED compile on demand, on the device that asks, and are logged (kernels/loader.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.widths import COMPILED_WIDTHS, PACKED_BITS

# Adding an arch is adding a line. A suffix "a" means that the cubin runs on exactly this arch.
ARCHES: tuple[str, ...] = (
    "sm_80",  # A100
    "sm_89",  # L4, L40S
    "sm_90a",  # H100, H200
    "sm_100a",  # B200
    "sm_103a",  # B300
    "sm_120a",  # RTX PRO 6000 Blackwell
)

# Limits of the codec (kernels/turboquant.py); tests/kernels/test_cells.py compares them.
ZERO_NORM = 1e-10
MAX_NORM = 1e37

ROW_TYPES: dict[str, str] = {"bf16": "__nv_bfloat16", "f16": "__half", "f32": "float"}


@dataclass(frozen=True)
class Cell:
    """One compilation unit.

    source: file in kernels/csrc. preset: "b4" for the codec's kernels (bits a code), "tq4" and the like for attention.
    variant: what else is fixed at compile time, such as the row dtype. kernels: the names an archive must show.
    """

    source: str
    width: int
    preset: str
    variant: str
    kernels: tuple[str, ...]
    defines: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return f"{self.source.removesuffix('.cu')}-w{self.width}-{self.preset}-{self.variant}"


def codec_cell(width: int, bits: int, row_type: str) -> Cell:
    """Pack and unpack of rows of `row_type` ("bf16", "f16", "f32"). Kernel names say which cell they come from."""
    pack, unpack = (f"{verb}_w{width}_b{bits}_{row_type}" for verb in ("pack", "unpack"))
    defines = {
        "TAILPACK_PACK": pack,
        "TAILPACK_UNPACK": unpack,
        "TAILPACK_ROW": ROW_TYPES[row_type],
        "TAILPACK_WIDTH": str(width),
        "TAILPACK_BITS_PER_CODE": str(bits),
        "TAILPACK_ZERO_NORM": repr(ZERO_NORM),
        "TAILPACK_MAX_NORM": repr(MAX_NORM),
    }
    return Cell("turboquant.cu", width, f"b{bits}", row_type, (pack, unpack), tuple(defines.items()))


# Models run in bf16; rows of f16 and f32 are rare enough to compile on demand.
DECLARED: tuple[Cell, ...] = tuple(codec_cell(width, bits, "bf16") for width in COMPILED_WIDTHS for bits in PACKED_BITS)
