"""The cells of a decode step apart from attention: products of few rows, the small kernels between them, sampling.

None of them is declared yet: they compile on demand, some seconds each, until a recorded run says what they are worth.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.cells import ROW_TYPES, Cell

STEP_KERNELS = ("begin", "embed", "norm", "rope", "swiglu")


class LinearTiling(NamedTuple):
    """warps: that share a stage's values of k. producers: warps that start copies. row_bytes: of a stage, of each of
    its 16 weight rows. bulk: by bulk copies, where the arch has them. in_flight: stages under way at most.
    max_stages: of the ring; fewer where shared memory ends before. lanes: of a warp that arrive at a barrier, 1 or 32.
    compute-sanitizer orders only what a lane does before its own arrival; with one, the others' stands behind a
    __syncwarp."""

    warps: int = 8
    producers: int = 4
    row_bytes: int = 1024
    bulk: bool = True
    in_flight: int = 16
    max_stages: int = 32
    lanes: int = 1

    @property
    def threads(self) -> int:
        """Of a CTA: consumers, producers and an epilogue warp."""
        return 32 * (self.warps + self.producers + 1)


def linear_tiling(*, fp8: bool) -> LinearTiling:
    """What an H200 was fastest with. Few stages under way: what lies between two products reads memory behind them."""
    return LinearTiling(8, 2, 2048, in_flight=2) if fp8 else LinearTiling(8, 4, 1024, in_flight=3)


def linear_shared_bytes(stages: int, x_bytes: int, tiling: LinearTiling) -> int:
    """Dynamic shared memory of a CTA of csrc/linear_few.cuh: the ring, x, sums of warps, of norms, barriers."""
    sums = 2 * tiling.warps * 16 * 8 * 4 + 8 * tiling.warps * 4
    return stages * 16 * (tiling.row_bytes + 64) + x_bytes + sums + 8 * (5 + 4 + 2 * stages)


def linear_cell(row_type: str, *, fp8: bool, tiling: LinearTiling | None = None) -> Cell:
    """x W^T of up to eight rows (csrc/linear_few.cuh). fp8: weights are e4m3 with a scale a block of 128 x 128."""
    own_tiling = linear_tiling(fp8=fp8)
    tiling = tiling or own_tiling
    cut = f"w{tiling.warps}p{tiling.producers}b{tiling.row_bytes}{'' if tiling.bulk else 'l'}"
    own = [cut] if tiling[:4] != own_tiling[:4] else []
    own += [f"a{tiling.lanes}"] if tiling.lanes != own_tiling.lanes else []
    variant = "-".join([row_type, *(["fp8"] if fp8 else []), *own])
    kernel = f"linear_{variant.replace('-', '_')}"
    defines = {
        "TAILPACK_KERNEL_LINEAR": kernel,
        "TAILPACK_TYPE": ROW_TYPES[row_type],
        "TAILPACK_FP8": str(int(fp8)),
        "TAILPACK_WARPS": str(tiling.warps),
        "TAILPACK_PRODUCERS": str(tiling.producers),
        "TAILPACK_ROW_BYTES": str(tiling.row_bytes),
        "TAILPACK_LANES": str(tiling.lanes),
        **({} if tiling.bulk else {"TAILPACK_NO_BULK_COPY": "1"}),
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
