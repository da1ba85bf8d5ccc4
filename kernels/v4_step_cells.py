"""The cell of what a decode step of deepseek_v4 does between its matrix products (csrc/v4_step.cuh)."""

from __future__ import annotations

from kernels.cells import ROW_TYPES, Cell

V4_KERNELS = ("partial", "read", "write", "rotate", "route", "order", "spread", "swiglu", "sum", "softmax", "complete")


def v4_step_cell(row_type: str, streams: int, iterations: int) -> Cell:
    """Of rows of `row_type` and h streams, 2 or 4."""
    variant = f"{row_type}-h{streams}-i{iterations}"
    kernels = tuple(f"v4_{name}_{row_type}_h{streams}_i{iterations}" for name in V4_KERNELS)
    defines = {f"TAILPACK_KERNEL_{name.upper()}": kernel for name, kernel in zip(V4_KERNELS, kernels, strict=True)}
    defines |= {
        "TAILPACK_TYPE": ROW_TYPES[row_type],
        "TAILPACK_STREAMS": str(streams),
        "TAILPACK_ITERATIONS": str(iterations),
    }
    return Cell("v4_step.cu", 0, "v4", variant, kernels, tuple(defines.items()))
