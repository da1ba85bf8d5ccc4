"""The cells of what a decode step of deepseek_v4 does between its matrix products (csrc/v4_step.cuh), and of
its experts' products, a few rows each (csrc/experts_few.cuh).
"""

from __future__ import annotations

from kernels.cells import ROW_TYPES, Cell

V4_KERNELS = (
    "partial",
    "read",
    "write",
    "rotate",
    "route",
    "order",
    "spread",
    "swiglu",
    "sum",
    "softmax",
    "complete",
    "choose",
)


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


EXPERT_KERNELS = ("gated", "plain")


def experts_cell(row_type: str) -> Cell:
    """Of rows and weights of `row_type`."""
    kernels = tuple(f"experts_{name}_{row_type}" for name in EXPERT_KERNELS)
    defines = {f"TAILPACK_KERNEL_{name.upper()}": kernel for name, kernel in zip(EXPERT_KERNELS, kernels, strict=True)}
    defines["TAILPACK_TYPE"] = ROW_TYPES[row_type]
    return Cell("experts_few.cu", 0, "few", row_type, kernels, tuple(defines.items()))
