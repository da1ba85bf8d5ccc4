"""The declared table: what is built ahead, and that nothing in it can be mistaken for something else."""

from __future__ import annotations

import re

from kernels import turboquant
from kernels.cells import ARCHES, MAX_NORM, ROW_TYPES, ZERO_NORM, codec_cell
from kernels.declared import DECLARED
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS, PRESETS


def test_every_compiled_width_and_every_presets_bits_are_declared() -> None:
    declared = {(cell.width, cell.preset) for cell in DECLARED if cell.source == "turboquant.cu"}
    wanted = {bits for preset in PRESETS.values() for bits in (preset.key_bits, preset.value_bits)}
    assert wanted <= set(PACKED_BITS)
    assert declared >= {(width, f"b{bits}") for width in COMPILED_WIDTHS for bits in wanted}


def test_cells_and_kernels_have_names_of_their_own() -> None:
    cells = [codec_cell(width, bits, row) for width in COMPILED_WIDTHS for bits in PACKED_BITS for row in ROW_TYPES]
    assert len({cell.name for cell in cells}) == len(cells)
    kernels = [kernel for cell in cells for kernel in cell.kernels]
    assert len(set(kernels)) == len(kernels) == 2 * len(cells)
    assert len(set(DECLARED)) == len(DECLARED)


def test_arches_are_the_promised_ones_in_a_form_the_loader_reads() -> None:
    assert set(ARCHES) >= {"sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"}
    assert all(re.fullmatch(r"sm_\d{2,3}a?", arch) for arch in ARCHES)


def test_kernels_are_compiled_with_the_references_limits() -> None:
    assert (ZERO_NORM, MAX_NORM) == (turboquant.ZERO_NORM, turboquant.MAX_NORM)
