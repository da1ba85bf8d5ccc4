"""What can be compiled: the archs, and the cells.

A *cell* is one source compiled with one set of defines: one width, preset and variant. It becomes one cubin an arch.
kernels/declared.py lists those that are built ahead of time; others compile on demand, on the device that asks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kernels.decode_tiling import MQA_LONG_PAGES, tiling_defines
from kernels.widths import PRESETS

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
MODEL_TYPES = ("bf16", "f16")  # what attention takes and gives
PHASES = ("prepare", "attend", "merge")  # the launches of one decode call, in order


@dataclass(frozen=True)
class Cell:
    """One compilation unit.

    source: file in kernels/csrc. preset: "b4" for the codec's kernels (bits a code); for attention what the pages hold,
    "tq4" and the like, "fp8" or "dense". variant: what else is fixed at compile time, such as the row dtype.
    kernels: the names an archive must show. arches: the only ones that it is for; () all.
    tensor_kernels: those whose machine code must hold tensor-core instructions and loads of 16 bytes or more.
    """

    source: str
    width: int
    preset: str
    variant: str
    kernels: tuple[str, ...]
    defines: tuple[tuple[str, str], ...]
    arches: tuple[str, ...] = ()
    tensor_kernels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.source.removesuffix('.cu')}-w{self.width}-{self.preset}-{self.variant}"


def pairs_of(cells: Iterable[Cell], arches: Iterable[str]) -> list[tuple[Cell, str]]:
    """Each cell with each of `arches` that it is built for, once, arch by arch."""
    distinct = tuple(dict.fromkeys(cells))
    return [
        (cell, arch) for arch in dict.fromkeys(arches) for cell in distinct if not cell.arches or arch in cell.arches
    ]


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


@dataclass(frozen=True)
class AttentionVariant:
    """What else is fixed when a decode cell is compiled.

    row_type: of queries, tails and outputs. vectors: query vectors of a kv head that one pass over the rows serves.
    softcap: whether scores are capped; the other machine code knows nothing of it. profile: whether phases are timed.
    """

    row_type: str = "bf16"
    vectors: int = 4
    softcap: bool = False
    profile: bool = False

    @property
    def name(self) -> str:
        flags = [name for name in ("softcap", "profile") if getattr(self, name)]
        return "-".join([self.row_type, f"c{self.vectors}", *flags])


def packed_cell(width: int, preset: str, variant: AttentionVariant) -> Cell:
    """Decode attention over packed keys and values of their own (page layout 2), by integer tensor cores."""
    bits = PRESETS[preset]
    own = {"TAILPACK_KEY_BITS": str(bits.key_bits), "TAILPACK_VALUE_BITS": str(bits.value_bits)}
    own |= tiling_defines(width, bits.key_bits, bits.value_bits, variant.vectors)
    return _decode_cell("decode_packed.cu", width, preset, variant, own)


def rows_cell(width: int, source: str, variant: AttentionVariant) -> Cell:
    """Decode attention over rows as they lie in pages: "dense", "fp8", or "tq2", "tq3", "tq4" (shared by K and V)."""
    return _decode_cell("decode_rows.cu", width, source, variant, {"TAILPACK_SOURCE": source})


def mqa_cell(width: int, source: str, variant: AttentionVariant) -> Cell:
    """Decode attention of many query heads over rows shared by K and V, by Hopper's warpgroup instructions."""
    own = {"TAILPACK_SOURCE": source, "TAILPACK_LONG_PAGES": str(MQA_LONG_PAGES)}
    return _decode_cell("decode_mqa.cu", width, source, variant, own, ("sm_90a",))


def _decode_cell(
    source: str,
    width: int,
    preset: str,
    variant: AttentionVariant,
    own: dict[str, str],
    arches: tuple[str, ...] = (),
) -> Cell:
    stem = source.removesuffix(".cu").removeprefix("decode_")
    suffix = f"{stem}_w{width}_{preset}_{variant.name.replace('-', '_')}"
    kernels = tuple(f"{phase}_{suffix}" for phase in PHASES)
    defines = {f"TAILPACK_KERNEL_{phase.upper()}": name for phase, name in zip(PHASES, kernels, strict=True)}
    defines |= {"TAILPACK_WIDTH": str(width), **own, "TAILPACK_TYPE": ROW_TYPES[variant.row_type]}
    defines |= {"TAILPACK_VECTORS": str(variant.vectors), "TAILPACK_SOFTCAP": str(int(variant.softcap))}
    defines["TAILPACK_PROFILE"] = str(int(variant.profile))
    return Cell(source, width, preset, variant.name, kernels, tuple(defines.items()), arches, kernels[1:2])
