"""A step's new rows of keys and values into tail rings or dense pages, on a GPU: one launch for one layer or for all.

Where each row goes is read on the device, so a launch may be captured in a CUDA graph and replayed with other places.
Nothing here allocates or waits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import ArgumentError, LayoutError
from kernels.loader import launch
from kernels.page_cells import APPEND_CELL

ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)
_ALIGNMENT = 16  # bytes: rows move 16 at a time
THREADS = 128  # of a CTA
_MAX_CTAS = 2**31 - 1


class AppendSide(NamedTuple):
    """Keys, or values.

    rows: [N, kv_heads, dim] of one layer, or [layers, N, kv_heads, dim]: the new rows.
    to: [places, rows, kv_heads, dim] or [layers, places, rows, kv_heads, dim]: tail rings (a place is a slot), or the
        region's view of an arena of dense pages (a place is a page).
    One dtype (bf16, f16 or f32), any strides of 16-byte multiples, the last one 1.
    """

    rows: Tensor
    to: Tensor


def append(keys: AppendSide, values: AppendSide | None, places: Tensor, rows: Tensor) -> None:
    """Copy entry n of the new rows, in every layer, to row rows[n] of place places[n].

    values: None where keys are the values too. places, rows: i32 or i64 [N], both alike, contiguous, on the device.
    places[n] = -1 (or any negative number) skips entry n. No two entries may go to one row: which of them is kept is
    not defined. A place or row that does not exist ends the kernel with an error, as any access out of bounds does; the
    device's context is then lost.

    Raises, before anything runs: ArgumentError, LayoutError; MachineError (loader).
    """
    device = keys.rows.device
    if device.type != "cuda":
        raise ArgumentError(
            "rows must lie on a GPU", given=str(device), allowed="cuda", action="use plain indexing on a CPU"
        )
    ctas, arguments = append_launch(keys, values, places, rows)
    if ctas > 0:
        launch(APPEND_CELL, APPEND_CELL.kernels[0], device, ctas=ctas, threads=THREADS, arguments=arguments)


def append_launch(
    keys: AppendSide, values: AppendSide | None, places: Tensor, rows: Tensor
) -> tuple[int, tuple[Tensor | int, ...]]:
    """CTAs and arguments of the kernel in csrc/append.cu for such a call. Raises ArgumentError, LayoutError."""
    device = keys.rows.device
    shape = _check_side("keys", keys, device)
    if values is not None:
        other = _check_side("values", values, device)
        if other != shape:
            raise ArgumentError(
                "keys and values differ",
                given=f"keys {shape}, values {other}",
                allowed="the same layers, entries, places, rows, kv heads, dim and dtype",
                action="pass one step's rows of the same layers",
            )
    layers, entries, num_places, num_rows, heads, dim, dtype = shape
    _check_indices(places, rows, entries, device)
    sides = 1 if values is None else 2
    ctas = layers * sides * entries
    if ctas > _MAX_CTAS:
        raise ArgumentError(
            "too many rows for one launch",
            given=f"{layers} layers, {entries} entries",
            allowed=f"{_MAX_CTAS} rows",
            action="append layer by layer",
        )
    arguments: list[Tensor | int] = []
    for new, _ in (keys, values or keys):
        arguments += [new, *_row_strides(new)]
    for _, to in (keys, values or keys):
        arguments += [to, *_place_strides(to)]
    arguments += [places, rows, places.element_size(), sides, entries, num_places, num_rows]
    arguments += [heads, dim * dtype.itemsize // _ALIGNMENT]
    return ctas, tuple(arguments)


def _row_strides(rows: Tensor) -> list[int]:
    """Bytes from layer to layer, entry to entry, head to head."""
    strides = [rows.element_size() * step for step in rows.stride()[:-1]]
    return strides if rows.dim() == 4 else [0, *strides]


def _place_strides(to: Tensor) -> list[int]:
    """Bytes from layer to layer, place to place, row to row, head to head."""
    strides = [to.element_size() * step for step in to.stride()[:-1]]
    return strides if to.dim() == 5 else [0, *strides]


def _check_side(name: str, side: AppendSide, device: torch.device) -> tuple[int, int, int, int, int, int, torch.dtype]:
    """Layers, entries, places, rows, kv heads, dim and dtype. Raises ArgumentError, LayoutError."""
    rows, to = side
    fits = rows.dim() in (3, 4) and to.dim() == rows.dim() + 1
    if not fits or rows.shape[-2:] != to.shape[-2:] or (rows.dim() == 4 and rows.shape[0] != to.shape[0]):
        raise ArgumentError(
            f"the new {name} do not fit where they go",
            given=f"rows {tuple(rows.shape)} into {tuple(to.shape)}",
            allowed="[N, kv_heads, dim] into [places, rows, kv_heads, dim], or both with the layers in front",
            action="pass the step's rows and the view of the memory that this layer, or these layers, keep them in",
        )
    if rows.dtype not in ROW_DTYPES or to.dtype != rows.dtype:  # never convert in silence
        raise ArgumentError(
            f"{name} must be stored in their own dtype",
            given=f"{rows.dtype} into {to.dtype}",
            allowed=f"one of {', '.join(str(dtype).removeprefix('torch.') for dtype in ROW_DTYPES)} on both sides",
            action="convert the rows first",
        )
    if not rows.device == to.device == device:
        raise ArgumentError(
            f"{name} must lie on one device",
            given=f"rows on {rows.device}, memory on {to.device}",
            allowed=f"{device} for everything",
            action="move the rows to the memory's device",
        )
    for what, tensor in (("rows", rows), ("memory", to)):
        size = tensor.element_size()
        steps = [size * step for step, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
        if any(step % _ALIGNMENT for step in (tensor.data_ptr(), size * tensor.shape[-1], *steps)) or (
            tensor.shape[-1] > 1 and tensor.stride(-1) != 1
        ):
            raise LayoutError(
                f"the {what} of {name} must hold each row in one piece, at multiples of {_ALIGNMENT} bytes",
                given=f"address {tensor.data_ptr():#x}, {tensor.dtype} {tuple(tensor.shape)}, "
                f"strides {tensor.stride()}",
                allowed=f"last stride 1; address, rows and other strides multiples of {_ALIGNMENT} bytes",
                action="pass contiguous rows, or the arena's own views",
            )
    layers = rows.shape[0] if rows.dim() == 4 else 1
    return (layers, rows.shape[-3], *to.shape[-4:-2], *to.shape[-2:], rows.dtype)


def _check_indices(places: Tensor, rows: Tensor, entries: int, device: torch.device) -> None:
    fits = all(
        x.dtype in INDEX_DTYPES and x.shape == (entries,) and x.device == device and (entries < 2 or x.stride(0) == 1)
        for x in (places, rows)
    )
    if not fits or places.dtype != rows.dtype:
        raise ArgumentError(
            "places and rows name where each entry goes",
            given=", ".join(f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}, on {x.device}" for x in (places, rows)),
            allowed=f"two contiguous tensors [{entries}] of int32, or of int64, on {device}",
            action="pass one index an entry, of the same dtype for both",
        )
