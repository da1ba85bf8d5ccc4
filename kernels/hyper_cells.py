"""The cells that mix hyper-connections' streams (csrc/hyper.cu)."""

from __future__ import annotations

from kernels.cells import Cell
from kernels.errors import ArgumentError

MAX_STREAMS = 8  # a row's matrix lies in one thread's registers


def hyper_cell(streams: int, iterations: int, eps: float) -> Cell:
    """Of h streams. Raises ArgumentError."""
    if not 1 <= streams <= MAX_STREAMS or iterations < 1 or not eps > 0:
        raise ArgumentError(
            "no kernel mixes so many streams",
            given=f"{streams} streams, {iterations} iterations, eps {eps}",
            allowed=f"1 to {MAX_STREAMS} streams, iterations of 1 or more, eps above 0",
            action="use the model's own configuration",
        )
    kernel = f"hyper_h{streams}_i{iterations}"
    defines = {
        "TAILPACK_KERNEL_HYPER": kernel,
        "TAILPACK_STREAMS": str(streams),
        "TAILPACK_ITERATIONS": str(iterations),
        "TAILPACK_EPS": f"{eps!r}f",
    }
    return Cell("hyper.cu", 0, f"h{streams}", f"i{iterations}-eps{eps!r}", (kernel,), tuple(defines.items()))
