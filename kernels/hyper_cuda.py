"""How hyper-connections read, write and carry their residual streams, on a GPU: one launch (csrc/hyper.cu).

The reference, and the path of a CPU, is worker/models/deepseek_v4_hyper.py, of which this differs by single roundings.
A row's bits do not depend on the other rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.cells import Cell
from kernels.errors import ArgumentError
from kernels.hyper_cells import hyper_cell
from kernels.loader import launch

THREADS = 64


class Mixed(NamedTuple):
    """f32: read, write [R, h], carry [R, h, h]."""

    read: Tensor
    write: Tensor
    carry: Tensor


def mix(values: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float) -> Mixed:
    """values f32 [R, (2 + h) h], base f32 [(2 + h) h], scale f32 [3] -> how a sublayer meets the streams, new tensors.

    Raises, before anything runs: ArgumentError; MachineError (loader).
    """
    if not values.is_cuda:
        raise ArgumentError(
            "values must lie on a GPU", given=str(values.device), allowed="cuda", action="use PyTorch on a CPU"
        )
    cell, ctas, mixed = mix_launch(values, base, scale, iterations=iterations, eps=eps)
    if ctas:
        arguments = (values, base, scale, *mixed, len(values))
        launch(cell, cell.kernels[0], values.device, ctas=ctas, threads=THREADS, arguments=arguments)
    return mixed


def mix_launch(values: Tensor, base: Tensor, scale: Tensor, *, iterations: int, eps: float) -> tuple[Cell, int, Mixed]:
    """The cell, CTAs, and where the results go. Raises ArgumentError."""
    width = len(base)
    streams = int((1 + width) ** 0.5 - 1 + 0.5)  # (2 + h) h = (h + 1)^2 - 1
    wanted = {"values": (values, (len(values), width)), "base": (base, (width,)), "scale": (scale, (3,))}
    for name, (tensor, shape) in wanted.items():
        fits = tensor.dtype == torch.float32 and tuple(tensor.shape) == shape and tensor.is_contiguous()
        if not fits or tensor.device != values.device or streams * (2 + streams) != width:
            raise ArgumentError(
                f"{name} of hyper-connections do not fit",
                given=f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}",
                allowed=f"contiguous float32 {shape} on {values.device}, of widths (2 + h) h",
                action="pass the product of the flattened streams and the sublayer's own base and scale",
            )
    cell = hyper_cell(streams, iterations, eps)
    rows = len(values)
    mixed = Mixed(
        values.new_empty((rows, streams)), values.new_empty((rows, streams)), values.new_empty((rows, streams, streams))
    )
    return cell, -(-rows // THREADS), mixed
