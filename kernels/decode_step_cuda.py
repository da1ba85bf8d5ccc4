"""The small kernels of a decode step on a GPU: patches of the step's state, embedding, norms, rotary embedding with
append, SwiGLU (csrc/decode_step.cuh). All launch on torch's current stream, allocate nothing, wait for nothing and may
be captured.

The rows that they give are those of worker/models/llama.py's own operators, which are their reference.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kernels import loader
from kernels.errors import ArgumentError
from kernels.linear_cuda import ROW_TYPES
from kernels.rope_append import AppendTo, RopeArgs, set_rope
from kernels.step_cells import STEP_KERNELS, step_cell

THREADS, HEADS_PER_CTA = 256, 8
_ALIGNMENT = 16
_SWIGLU_VALUES = 2 * THREADS  # of a CTA's turn

_i32, _i64, _f32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class StepArgs(ctypes.Structure):
    _fields_ = (
        ("state", _pointer),
        ("step", _pointer),
        ("ring", _pointer),
        ("tokens", _pointer),
        ("embed", _pointer),
        ("out", _pointer),
        ("row_bytes", _i64),
        ("num_states", _i64),
        ("vocabulary", _i64),
        ("slots", _i32),
        ("max_patches", _i32),
    )


class NormArgs(ctypes.Structure):
    _fields_ = (
        ("x", _pointer),
        ("delta", _pointer),
        ("weight", _pointer),
        ("out", _pointer),
        ("width", _i64),
        ("eps", _f32),
    )


class StepKernels:
    """The kernels for rows of one dtype on one GPU. Raises MachineError (loader), ArgumentError (the dtype)."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        if dtype not in ROW_TYPES:
            raise _error("no decode step in this dtype", str(dtype), ", ".join(map(str, ROW_TYPES)), "use bfloat16")
        self.dtype, self.device = dtype, device
        self._index = device.index or 0
        self._step, self._norm, self._rope = StepArgs(), NormArgs(), RopeArgs()
        cell = step_cell(ROW_TYPES[dtype])
        arguments: dict[str, ctypes.Structure] = {
            "begin": self._step,
            "embed": self._step,
            "norm": self._norm,
            "rope": self._rope,
            "swiglu": self._norm,
        }
        overlap = loader.overlaps_launches(loader.arch_of(device))
        self._launches = {
            name: loader.PreparedLaunch(
                cell, kernel, self._index, arguments[name], threads=THREADS, overlap=overlap and name != "begin"
            )
            for name, kernel in zip(STEP_KERNELS, cell.kernels, strict=True)
        }

    def begin(self, state: Tensor, step: Tensor, ring: Tensor) -> None:
        """Count the step and apply its patches.

        state: i32 [words]. step: i32 [1], the number of the newest step. ring: i32 [slots, 1 + 2 * patches], pinned.
        """
        arguments = self._step
        arguments.state, arguments.step, arguments.ring = state.data_ptr(), step.data_ptr(), ring.data_ptr()
        arguments.num_states, arguments.slots = state.numel(), ring.shape[0]
        arguments.max_patches = (ring.shape[1] - 1) // 2
        self._run("begin", 1)

    def embed(self, tokens: Tensor, weight: Tensor, out: Tensor) -> None:
        """out [B, hidden] = weight [vocabulary, hidden] of tokens i32 [B]."""
        arguments, row_bytes = self._step, weight.shape[1] * weight.element_size()
        for x in (weight, out):
            if x.dtype != self.dtype or not x.is_contiguous() or x.data_ptr() % _ALIGNMENT or row_bytes % _ALIGNMENT:
                raise _unfit(x, f"contiguous {self.dtype}, rows at multiples of {_ALIGNMENT} bytes")
        arguments.tokens, arguments.embed, arguments.out = tokens.data_ptr(), weight.data_ptr(), out.data_ptr()
        arguments.row_bytes, arguments.vocabulary = row_bytes, weight.shape[0]
        self._run("embed", len(out))

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, out: Tensor) -> None:
        """x [B, width] += delta; out = RMS norm of x, times weight [width]."""
        for each in (x, weight, out, *(() if delta is None else (delta,))):
            if (
                each.dtype != self.dtype
                or not each.is_contiguous()
                or each.shape[-1] != weight.shape[0]
                or each.shape[-1] % 2
            ):
                raise _unfit(each, f"contiguous {self.dtype} [B, {weight.shape[0]}], an even width")
        arguments = self._norm
        arguments.x, arguments.weight, arguments.out = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        arguments.delta = None if delta is None else delta.data_ptr()
        arguments.width, arguments.eps = weight.shape[0], eps
        self._run("norm", len(x))

    def swiglu(self, gate_up: Tensor, out: Tensor) -> None:
        """out [B, width] = silu(gate) * up of gate_up [B, 2 * width]."""
        width = out.shape[1]
        for each, wanted in ((gate_up, 2 * width), (out, width)):
            if each.dtype != self.dtype or not each.is_contiguous() or each.shape[1] != wanted or width % 2:
                raise _unfit(each, f"contiguous {self.dtype} [B, {wanted}], an even width")
        arguments = self._norm
        arguments.x, arguments.out, arguments.width = gate_up.data_ptr(), out.data_ptr(), width
        self._run("swiglu", -(-width // _SWIGLU_VALUES), len(out))

    def rope_append(
        self,
        qkv: Tensor,
        tables: tuple[Tensor, Tensor],
        norms: tuple[Tensor | None, Tensor | None],
        eps: float,
        to: AppendTo,
        q_heads: int,
    ) -> None:
        """Norm and rotate queries in place; norm and rotate keys, and put keys and values where they go.

        qkv: [B, (q_heads + 2 * kv_heads) * dim]. tables: cos, sin [positions, dim / 2]. norms: of queries, keys, [dim].
        """
        set_rope(self._rope, self.dtype, qkv, tables, norms, eps, to, q_heads)
        heads = q_heads + 2 * to.keys.shape[2]
        self._run("rope", -(-heads // HEADS_PER_CTA), len(qkv))

    def _run(self, name: str, x: int, y: int = 1) -> None:
        launch = self._launches[name]
        launch.set_ctas(x, y)
        launch(loader.current_stream(self._index))


def _unfit(x: Tensor, allowed: str) -> ArgumentError:
    given = f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}"
    return _error("a tensor does not fit the decode step", given, allowed, "pass it so")


def _error(reason: str, given: str, allowed: str, action: str) -> ArgumentError:
    return ArgumentError(reason, given=given, allowed=allowed, action=action)
