"""The cells of a decode step apart from attention: products of few rows, the small kernels between them, sampling.

None of them is declared yet: they compile on demand, some seconds each, until a recorded run says what they are worth.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.cells import ROW_TYPES, Cell

STEP_KERNELS = ("begin", "embed", "norm", "rope", "swiglu")


class LinearTiling(NamedTuple):
    """depth: pieces of 64 bytes of each weight row under way a lane. ctas: that an SM has room for, which bounds
    registers; one less are launched, so that the next kernel's find room beside them."""

    depth: int
    ctas: int


def linear_tiling(*, gated: bool) -> LinearTiling:
    """Eight loads of 16 bytes under way a lane, in so few registers that three CTAs share an SM."""
    return LinearTiling(2 if gated else 4, 3)


def linear_cell(row_type: str, *, fp8: bool, gated: bool, tiling: LinearTiling | None = None) -> Cell:
    """x W^T of up to eight rows (csrc/linear_few.cuh). fp8: weights are e4m3 with a scale a block of 128 x 128."""
    flags = [name for name, on in (("fp8", fp8), ("gated", gated)) if on]
    depth, ctas = tiling or linear_tiling(gated=gated)
    variant = "-".join([row_type, *flags, *([f"d{depth}c{ctas}"] if tiling else [])])
    kernel = f"linear_{variant.replace('-', '_')}"
    defines = {
        "TAILPACK_KERNEL_LINEAR": kernel,
        "TAILPACK_TYPE": ROW_TYPES[row_type],
        "TAILPACK_FP8": str(int(fp8)),
        "TAILPACK_GATED": str(int(gated)),
        "TAILPACK_DEPTH": str(depth),
        "TAILPACK_CTAS": str(ctas),
    }
    return Cell("linear_few.cu", 0, "few", variant, (kernel,), tuple(defines.items()), tensor_kernels=(kernel,))


def step_cell(row_type: str) -> Cell:
    """Embedding, norms, rotary embedding with append, SwiGLU of rows of `row_type` (csrc/decode_step.cuh)."""
    kernels = tuple(f"{name}_{row_type}" for name in STEP_KERNELS)
    defines = {f"TAILPACK_KERNEL_{name.upper()}": k for name, k in zip(STEP_KERNELS, kernels, strict=True)}
    defines["TAILPACK_TYPE"] = ROW_TYPES[row_type]
    return Cell("decode_step.cu", 0, "step", row_type, kernels, tuple(defines.items()))


def sample_cell(row_type: str) -> Cell:
    """The next token of rows of logits of `row_type` (csrc/sample.cuh)."""
    kernel = f"sample_{row_type}"
    defines = {"TAILPACK_KERNEL_SAMPLE": kernel, "TAILPACK_TYPE": ROW_TYPES[row_type]}
    return Cell("sample.cu", 0, "sample", row_type, (kernel,), tuple(defines.items()))
