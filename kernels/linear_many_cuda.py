"""Matrix products of up to 64 rows on a GPU, at the speed of reading the weights (csrc/linear_many.cuh).

A product with few weight rows is cut along K, so that all SMs take part; then its result is partial sums, which the
next kernel of the step adds up. A `ManyLinear` allocates nothing and may be captured.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import loader
from kernels.errors import ArgumentError
from kernels.linear_cuda import ROW_TYPES
from kernels.step_cells import MANY_STAGES, MANY_TILES, LinearTiling, many_cell

MAX_ROWS = 8 * MANY_TILES[-1]
THREADS, ROWS_PER_CTA, PIECE = 256, 128, 64
MAX_SPLITS = 8
_CTAS_PER_SM = 2
_LEAST_PIECES = 4  # of a split
_ALIGNMENT = 16


class ManyArgs(ctypes.Structure):
    """As csrc/linear_many.cuh has it."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("part_stride", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("splits", ctypes.c_int32),
    )


def splits_of(n: int, k: int, sms: int) -> int:
    """Cuts along K of a weight [n, k], a power of two: as many as fill the SMs."""
    splits = 1
    while (
        2 * splits <= MAX_SPLITS
        and -(-n // ROWS_PER_CTA) * 2 * splits <= _CTAS_PER_SM * sms
        and k // PIECE // (2 * splits) >= _LEAST_PIECES
    ):
        splits *= 2
    return splits


class ManyLinear:
    """One weight's product. Raises ArgumentError (shapes, dtypes, alignment), MachineError (loader).

    Attributes: splits: where it is 1 the result is rows [B, N] of x's dtype, else f32 [splits, B, N] to be summed.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        splits: int,
        tiling: LinearTiling | None = None,
    ) -> None:
        """weight: [N, K] bf16 or f16, K a multiple of 64. bias: [N] or None. tiling: another than the kernel's own."""
        n, k = weight.shape
        fits = weight.dtype in ROW_TYPES and weight.is_contiguous() and k % PIECE == 0
        fits = fits and (bias is None or (bias.dtype == weight.dtype and bias.shape == (n,) and bias.is_contiguous()))
        if not fits or weight.data_ptr() % _ALIGNMENT or not 1 <= splits <= k // PIECE:
            raise _error(
                "this weight does not fit the kernel",
                f"{weight.dtype} {tuple(weight.shape)}, {splits} splits",
                f"contiguous bf16 or f16 [N, K], K a multiple of {PIECE}, up to K / {PIECE} splits; bias [N] alike",
            )
        self.weight, self.splits, self.dtype, self.device = weight, splits, weight.dtype, weight.device
        self._bias, self._tiling = bias, tiling
        self.arguments = ManyArgs(n=n, k=k, splits=splits, weight=weight.data_ptr())
        if bias is not None:
            self.arguments.bias = bias.data_ptr()
        self.grid = (-(-n // ROWS_PER_CTA), splits)
        self._launches: dict[int, loader.PreparedLaunch] = {}

    @staticmethod
    def tiles_of(rows: int) -> int:
        """Of eight rows of x, in the cell that serves so many."""
        return next(tiles for tiles in MANY_TILES if rows <= 8 * tiles)

    def load(self, rows: int) -> None:
        """Load the kernel for so many rows; not allowed inside a capture."""
        self._launch(self.tiles_of(rows))

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        """x: [B, K]; out: [B, N], or f32 [splits, B, N]; rows contiguous. Returns `out`. Raises ArgumentError."""
        self.set_call(x, out)
        self._launch(self.tiles_of(len(x)))(loader.current_stream(self.device.index or 0))
        return out

    def set_call(self, x: Tensor, out: Tensor) -> None:
        """Check a call's tensors and point the arguments at them. Raises ArgumentError."""
        arguments, rows = self.arguments, len(x)
        shape: tuple[int, ...] = (rows, arguments.n)
        dtype = self.dtype
        if self.splits > 1:
            shape, dtype = (self.splits, *shape), torch.float32
        step = x.stride(0) * x.element_size()
        fits = x.dtype == self.dtype and x.shape == (rows, arguments.k) and x.stride(1) == 1 and step % _ALIGNMENT == 0
        fits = fits and out.dtype == dtype and out.shape == shape and out.stride(-1) == 1
        if (
            not fits
            or x.data_ptr() % _ALIGNMENT
            or not 1 <= rows <= MAX_ROWS
            or not x.device == out.device == self.device
        ):
            raise _error(
                "x or out does not fit the product",
                f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}; {out.dtype} {tuple(out.shape)}",
                f"{self.dtype} [1 to {MAX_ROWS}, {arguments.k}] and {dtype} {shape} on {self.device}, rows contiguous",
            )
        arguments.x, arguments.out, arguments.rows = x.data_ptr(), out.data_ptr(), rows
        arguments.x_stride, arguments.out_stride = x.stride(0), out.stride(-2)
        arguments.part_stride = out.stride(0) if self.splits > 1 else 0

    def _launch(self, tiles: int) -> loader.PreparedLaunch:
        if tiles not in self._launches:
            cell = many_cell(ROW_TYPES[self.dtype], tiles, self._tiling)
            self._launches[tiles] = loader.PreparedLaunch(
                cell,
                cell.kernels[0],
                self.device.index or 0,
                self.arguments,
                threads=THREADS,
                shared_bytes=shared_bytes(tiles),
                overlap=loader.overlaps_launches(loader.arch_of(self.device)),
            )
            self._launches[tiles].set_ctas(*self.grid)
        return self._launches[tiles]


def shared_bytes(tiles: int) -> int:
    """Dynamic shared memory of a CTA: the stages of x."""
    return MANY_STAGES * tiles * 8 * 128


def _error(reason: str, given: str, allowed: str) -> ArgumentError:
    return ArgumentError(reason, given=given, allowed=allowed, action="use torch's own products for it")
