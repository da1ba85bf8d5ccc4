"""The next token of every row on a GPU (csrc/sample.cuh): greedy, or temperature, top-k, top-p, min-p and repetition
penalty, drawn by (seed, position). One launch; it also makes of a step's state the next one's, so that nothing need
come back to the host between two steps. The reference is worker/sampler.py, which computes in 64 bits where this does
in 32: greedy tokens without a penalty are the same, others as likely.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import loader
from kernels.errors import ArgumentError
from kernels.linear_cuda import ROW_TYPES
from kernels.step_cells import sample_cell

THREADS = 1024
LOGIT_TYPES = {**ROW_TYPES, torch.float32: "f32"}
NO_TOKEN, NOT_FINITE = -1, -2  # in place of a token

_i32, _i64, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p


class SampleArgs(ctypes.Structure):
    """As csrc/sample.cuh has it."""

    _fields_ = (
        ("logits", _pointer),
        ("temperature", _pointer),
        ("top_p", _pointer),
        ("min_p", _pointer),
        ("penalty", _pointer),
        ("top_k", _pointer),
        ("seed", _pointer),
        ("limit", _pointer),
        ("stops", _pointer),
        ("seen", _pointer),
        ("tokens", _pointer),
        ("num_tokens", _pointer),
        ("step", _pointer),
        ("out", _pointer),
        ("logits_stride", _i64),
        ("seen_words", _i64),
        ("vocabulary", _i32),
        ("num_stops", _i32),
        ("slots", _i32),
        ("out_stride", _i32),
    )


class SampleState(NamedTuple):
    """Of B rows, on the logits' device, all contiguous. temperature 0: greedy. Off: top_k 0, top_p 1, min_p 0,
    penalty 1.

    temperature, top_p, min_p, penalty: f32 [B]. top_k, limit: i32 [B]. seed: i32 [B, 2], the low word first.
    tokens, num_tokens: i32 [B], of the step at hand, then of the next; 0 tokens: padding, and rows that have ended, by
        one of their stops i32 [B, n] (-1: none), or with as many tokens as limit says.
    seen: i32 [B, ceil(vocabulary / 32)], a bit a token; None: no row has a penalty.
    step: i32 [1]. out: i32 [slots, >= B] in pinned memory (or the device's): slot step % slots gets the tokens.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    top_k: Tensor
    seed: Tensor
    limit: Tensor
    tokens: Tensor
    num_tokens: Tensor
    stops: Tensor
    seen: Tensor | None
    step: Tensor
    out: Tensor


class SampleKernel:
    """The kernel for logits of one dtype on one GPU. Raises MachineError (loader)."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._index = device.index or 0
        self._arguments = SampleArgs()
        cell = sample_cell(LOGIT_TYPES[dtype])
        overlap = loader.overlaps_launches(loader.arch_of(device))
        self._launch = loader.PreparedLaunch(
            cell, cell.kernels[0], self._index, self._arguments, threads=THREADS, overlap=overlap
        )

    def __call__(self, logits: Tensor, state: SampleState) -> None:
        """logits: [B, vocabulary], rows contiguous. Raises ArgumentError."""
        set_sample(self._arguments, logits, state)
        self._launch.set_ctas(len(logits))
        self._launch(loader.current_stream(self._index))


def set_sample(arguments: SampleArgs, logits: Tensor, state: SampleState) -> None:
    """Check a call and point the arguments at it. Raises ArgumentError."""
    rows, vocabulary = logits.shape
    kinds = dict.fromkeys(("temperature", "top_p", "min_p", "penalty"), torch.float32)
    kinds |= dict.fromkeys(("top_k", "limit", "tokens", "num_tokens", "seed", "step", "stops", "out"), torch.int32)
    for name, dtype in kinds.items():
        x: Tensor = getattr(state, name)
        wanted = {"seed": (rows, 2), "step": (1,), "stops": (rows, x.shape[-1]), "out": x.shape}.get(name, (rows,))
        if x.dtype != dtype or x.shape != wanted or not x.is_contiguous():
            raise _unfit(name, x, f"contiguous {dtype} {tuple(wanted)}")
        setattr(arguments, name, x.data_ptr())
    if logits.dtype not in LOGIT_TYPES or logits.stride(1) != 1 or state.out.dim() != 2 or state.out.shape[1] < rows:
        raise _unfit("logits or out", logits, f"bf16, f16 or f32 [B, vocabulary]; out [slots, {rows} or more]")
    words = -(-vocabulary // 32)
    if state.seen is not None and (state.seen.dtype != torch.int32 or state.seen.shape != (rows, words)):
        raise _unfit("seen", state.seen, f"int32 [{rows}, {words}]")
    arguments.seen = None if state.seen is None else state.seen.data_ptr()
    arguments.seen_words = words
    arguments.logits, arguments.logits_stride, arguments.vocabulary = logits.data_ptr(), logits.stride(0), vocabulary
    arguments.num_stops, (arguments.slots, arguments.out_stride) = state.stops.shape[1], state.out.shape


def _unfit(name: str, x: Tensor, allowed: str) -> ArgumentError:
    return ArgumentError(
        f"{name} does not fit the draw",
        given=f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}",
        allowed=allowed,
        action="pass it so",
    )
