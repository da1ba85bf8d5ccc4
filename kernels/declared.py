"""The cells that are built ahead of time, about fifty an arch: what the served model families need.

Cells outside DECLARED compile on demand, on the device that asks, and are logged (kernels/loader.py).
"""

from __future__ import annotations

from kernels.cells import AttentionVariant, Cell, codec_cell, mqa_cell, packed_cell, rows_cell
from kernels.hyper_cells import hyper_cell
from kernels.page_cells import DECLARED_PAGE_CELLS
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS, PRESETS


def _declared_attention() -> tuple[Cell, ...]:
    """What the served model families need; vectors by their GQA ratios, softcap where a family has it."""
    few, many = AttentionVariant(vectors=4), AttentionVariant(vectors=8)
    few_capped, many_capped = AttentionVariant(vectors=4, softcap=True), AttentionVariant(vectors=8, softcap=True)
    cells = [packed_cell(width, preset, v) for width in (64, 128) for preset in PRESETS for v in (few, many)]
    cells += [packed_cell(256, preset, v) for preset in PRESETS for v in (few, few_capped)]  # gemma: ratios 1 to 4
    for source in ("dense", "fp8"):
        cells += [rows_cell(width, source, many) for width in COMPILED_WIDTHS]
        cells.append(rows_cell(256, source, many_capped))
    cells += [rows_cell(512, "tq4", many), mqa_cell(512, "tq4", many)]  # deepseek_v4's raw rows
    return tuple(cells)


# Models run in bf16; rows of f16 and f32 are rare enough to compile on demand.
DECLARED: tuple[Cell, ...] = (
    *(codec_cell(width, bits, "bf16") for width in COMPILED_WIDTHS for bits in PACKED_BITS),
    *DECLARED_PAGE_CELLS,
    *_declared_attention(),
    hyper_cell(4, 20, 1e-6),  # deepseek_v4
)
