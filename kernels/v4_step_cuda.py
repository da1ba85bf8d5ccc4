"""What a decode step of deepseek_v4 does between its matrix products, on a GPU, one launch each (csrc/v4_step.cuh);
and its experts' products of a few rows each (csrc/experts_few.cuh).

The references, and the paths of a CPU, of float32 and of deterministic mode, are the functions of the same names in
worker/models/deepseek_v4_*.py. Everything launches on torch's current stream, waits for nothing and may be captured; a
row's bits do not depend on the other rows.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import loader
from kernels.errors import ArgumentError
from kernels.linear_cuda import ROW_TYPES
from kernels.v4_step_cells import EXPERT_KERNELS, V4_KERNELS, experts_cell, v4_step_cell

THREADS, ROW_VALUES = 256, 2048  # of a CTA
_SLICE, _SLICE_ROWS, _WARPS = 256, 8, 8
_PAIRS_PER_ITEM, _MAX_SHARED = 16, 112 << 10  # of experts: pairs of outputs, and bytes of shared memory, of a CTA
_MAX_DIM, _MAX_POOLED, _MAX_EXPERTS, _MAX_CHOSEN = 2048, 512, 512, 32

Launch = Callable[[str, int, tuple[Tensor | int, ...], int], None]
"""Kernel by its name in V4_KERNELS or EXPERT_KERNELS, CTAs, arguments, bytes of dynamic shared memory."""


class Read(NamedTuple):
    """x [R, hidden], normed; write [R, h] and carry [R, h, h] float32, as ``deepseek_v4_hyper.Mixing`` has them."""

    x: Tensor
    write: Tensor
    carry: Tensor


class Routed(NamedTuple):
    """experts int32, shares float32, [R, K]; place [R K] int32: where entries go in the order of experts; ends [E]
    int32, behind each expert's last."""

    experts: Tensor
    shares: Tensor
    place: Tensor
    ends: Tensor


class V4Step:
    """The kernels for rows of one dtype (bf16 or f16), h streams and so many iterations of balancing.

    Args:
        launch: by default on the arguments' device.
    """

    def __init__(self, dtype: torch.dtype, streams: int, iterations: int, launch: Launch | None = None) -> None:
        if dtype not in ROW_TYPES or streams not in (2, 4):
            raise ArgumentError(
                "no kernels of such a decode step",
                given=f"{dtype}, {streams} streams",
                allowed=f"{', '.join(map(str, ROW_TYPES))}; 2 or 4 streams",
                action="use PyTorch",
            )
        self.dtype, self.streams = dtype, streams
        self.cell = v4_step_cell(ROW_TYPES[dtype], streams, iterations)
        self.experts = experts_cell(ROW_TYPES[dtype])
        self._kernels = {name: (self.cell, each) for name, each in zip(V4_KERNELS, self.cell.kernels, strict=True)}
        own = zip(EXPERT_KERNELS, self.experts.kernels, strict=True)
        self._kernels |= {name: (self.experts, each) for name, each in own}
        self._launch = launch or self._on_device

    def _on_device(self, name: str, ctas: int, arguments: tuple[Tensor | int, ...], shared_bytes: int) -> None:
        device = next(each for each in arguments if isinstance(each, Tensor)).device
        cell, kernel = self._kernels[name]
        loader.launch(cell, kernel, device, ctas=ctas, threads=THREADS, arguments=arguments, shared_bytes=shared_bytes)

    def _run(self, name: str, ctas: int, arguments: tuple[Tensor | int, ...], shared_bytes: int = 0) -> None:
        self._launch(name, ctas, arguments, shared_bytes)

    def hyper_read(
        self,
        streams: Tensor,
        fn: Tensor,
        base: Tensor,
        scale: Tensor,
        norm: Tensor,
        *,
        norm_eps: float,
        eps: float,
    ) -> Read:
        """streams [R, h, hidden], fn [(2 + h) h, h hidden], base [(2 + h) h], scale [3], norm [hidden]."""
        rows, h, hidden = streams.shape
        outputs = len(base)
        self._demand(streams, self.dtype, (rows, self.streams, hidden))
        self._demand(fn, torch.float32, (self.streams * (2 + self.streams), h * hidden))
        self._demand(norm, torch.float32, (hidden,))
        slices = h * hidden // _SLICE
        if h * hidden % _SLICE:
            raise self._unfit(streams, f"h hidden a multiple of {_SLICE}")
        partial = fn.new_empty(slices, rows, outputs + 1)
        groups = -(-rows // _SLICE_ROWS)
        self._run("partial", slices * groups, (streams, fn, partial, rows, h * hidden, outputs))
        found = Read(streams.new_empty(rows, hidden), fn.new_empty(rows, h), fn.new_empty(rows, h, h))
        numbers = (rows, hidden, _bits(norm_eps), _bits(eps))
        self._run("read", rows, (partial, base, scale, streams, norm, *found, *numbers))
        return found

    def hyper_write(self, streams: Tensor, y: Tensor, write: Tensor, carry: Tensor) -> Tensor:
        """streams [R, h, hidden], y [R, hidden] -> [R, h, hidden], new."""
        rows, _, hidden = streams.shape
        self._demand(streams, self.dtype, (rows, self.streams, hidden))
        self._demand(y, self.dtype, (rows, hidden))
        out = torch.empty_like(streams)
        self._run("write", rows * -(-hidden // ROW_VALUES), (streams, y, write, carry, out, hidden))
        return out

    def rotate(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        normed: bool = False,
        weight: Tensor | None = None,
        inverse: bool = False,
        eps: float = 0.0,
    ) -> Tensor:
        """x [R, heads, dim] in the dtype or float32, cos and sin [R, rope / 2] (rope 0: none) -> the dtype, new."""
        rows, heads, dim = x.shape
        wide = x.dtype == torch.float32
        self._demand(x, torch.float32 if wide else self.dtype, (rows, heads, dim))
        rope = 2 * cos.shape[-1]
        if dim % 64 or dim > _MAX_DIM or rope > dim:
            raise self._unfit(x, f"dims of up to {_MAX_DIM}, multiples of 64")
        if weight is not None:
            self._demand(weight, torch.float32, (dim,))
        for angles in (cos, sin):
            self._demand(angles, torch.float32, (rows, rope // 2))
        out = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        flags = (int(normed), int(inverse), _bits(eps))
        pointers = (x, int(wide), 0 if weight is None else weight, cos, sin, out)
        self._run("rotate", -(-rows * heads // _WARPS), (*pointers, rows, heads, dim, rope, *flags))
        return out

    def route(
        self,
        logits: Tensor,
        bias: Tensor | None,
        table: Tensor | None,
        tokens: Tensor,
        *,
        num_chosen: int,
        scale: float,
    ) -> Routed:
        """logits [R, E] float32; bias [E] float32, or table [vocabulary, K] and tokens [R] int64."""
        rows, experts = logits.shape
        self._demand(logits, torch.float32, (rows, experts), aligned=False)
        if experts > _MAX_EXPERTS or num_chosen > min(_MAX_CHOSEN, experts):
            raise self._unfit(logits, f"up to {_MAX_EXPERTS} experts, {_MAX_CHOSEN} of which are chosen")
        if table is not None:
            self._demand(table, torch.int64, (len(table), num_chosen))
            self._demand(tokens, torch.int64, (rows,), aligned=False)
        else:
            assert bias is not None
            self._demand(bias, torch.float32, (experts,))
        chosen = torch.empty(rows, num_chosen, dtype=torch.int32, device=logits.device)
        entries = rows * num_chosen
        found = Routed(
            chosen,
            torch.empty(chosen.shape, dtype=torch.float32, device=logits.device),
            chosen.new_empty(entries),
            chosen.new_empty(experts),
        )
        by = (0 if bias is None else bias, 0 if table is None else table, tokens)
        self._run(
            "route",
            -(-rows // _WARPS),
            (logits, *by, chosen, found.shares, rows, experts, num_chosen, _bits(scale)),
        )
        ctas = -(-entries // THREADS) + -(-experts // THREADS)
        self._run("order", ctas, (chosen, found.place, found.ends, entries, experts))
        return found

    def spread(self, x: Tensor, routed: Routed) -> tuple[Tensor, Tensor]:
        """x [R, width] -> each row K times in the order of experts, [R K, width], and the shares of these rows."""
        rows, width = x.shape
        self._demand(x, self.dtype, (rows, width))
        entries = len(routed.place)
        sorted_, shares = x.new_empty(entries, width), routed.shares.new_empty(entries)
        arguments = (x, routed.place, routed.shares, sorted_, shares, entries // rows, width)
        self._run("spread", entries, arguments)
        return sorted_, shares

    def swiglu(self, gate_up: Tensor, shares: Tensor | None, limit: float) -> Tensor:
        """silu(min(gate, limit)) clamp(up, -limit, limit) share of gate_up [N, 2 width] -> [N, width]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        self._demand(gate_up, self.dtype, (rows, 2 * width))
        out = gate_up.new_empty(rows, width)
        by = 0 if shares is None else shares
        self._run("swiglu", rows * -(-width // ROW_VALUES), (gate_up, by, out, width, _bits(limit)))
        return out

    def experts_up(self, sorted_: Tensor, shares: Tensor, up: Tensor, routed: Routed, limit: float) -> Tensor:
        """``spread``'s rows [N, hidden] through up [E, 2 width, hidden], gates first -> as ``swiglu``, [N, width].

        For few rows an expert: each eight of them read the expert's weights again.
        """
        entries, hidden = sorted_.shape
        experts, outputs, _ = up.shape
        self._demand_experts(up, (experts, outputs, hidden))
        self._demand(sorted_, self.dtype, (entries, hidden))
        out = sorted_.new_empty(entries, outputs // 2)
        arguments = (sorted_, up, routed.ends, shares, out, hidden, outputs, experts, _bits(limit))
        self._run("gated", _expert_ctas(up, entries), arguments, 16 * hidden)
        return out

    def experts_down(self, gated: Tensor, down: Tensor, routed: Routed) -> Tensor:
        """gated [N, width], in the order of experts, through down [E, hidden, width] -> [N, hidden]."""
        entries, width = gated.shape
        experts, outputs, _ = down.shape
        self._demand_experts(down, (experts, outputs, width))
        self._demand(gated, self.dtype, (entries, width))
        out = gated.new_empty(entries, outputs)
        arguments = (gated, down, routed.ends, out, width, outputs, experts)
        self._run("plain", _expert_ctas(down, entries), arguments, 16 * width)
        return out

    def _demand_experts(self, weights: Tensor, shape: tuple[int, int, int]) -> None:
        self._demand(weights, self.dtype, shape)
        experts, outputs, width = shape
        if experts > _MAX_EXPERTS or width % 256 or outputs % (2 * _PAIRS_PER_ITEM) or 16 * width > _MAX_SHARED:
            most = _MAX_SHARED // 16
            allowed = f"up to {_MAX_EXPERTS} experts, outputs by {2 * _PAIRS_PER_ITEM}, width by 256, up to {most}"
            raise self._unfit(weights, allowed)

    def gather_sum(self, shared: Tensor, sorted_: Tensor, routed: Routed) -> Tensor:
        """shared [R, width] plus the sum of each row's K results among sorted_ [R K, width] -> [R, width]."""
        rows, width = shared.shape
        self._demand(shared, self.dtype, (rows, width))
        self._demand(sorted_, self.dtype, (len(routed.place), width))
        out = torch.empty_like(shared)
        arguments = (shared, sorted_, routed.place, out, len(routed.place) // rows, width)
        self._run("sum", rows * -(-width // ROW_VALUES), arguments)
        return out

    def softmax(self, scores: Tensor, hidden: Tensor, sinks: Tensor, scale: float) -> Tensor:
        """scores [B, heads, N] float32, hidden [B, N] bool, sinks [heads] -> weights [B, heads, N] in the dtype."""
        batch, heads, n = scores.shape
        self._demand(scores, torch.float32, (batch, heads, n), aligned=False)
        self._demand(hidden, torch.bool, (batch, n), aligned=False)
        self._demand(sinks, torch.float32, (heads,))
        out = torch.empty(scores.shape, dtype=self.dtype, device=scores.device)
        self._run("softmax", batch * heads, (scores, hidden, sinks, out, heads, n, _bits(scale)))
        return out

    def choose(self, scores: Tensor, num_visible: Tensor, topk: int) -> Tensor:
        """scores [B, N] float32, num_visible [B] int64 -> as ``deepseek_v4_indexer.choose``, [B, topk] int64; but that
        NaN is the worst score.
        """
        batch, n = scores.shape
        self._demand(scores, torch.float32, (batch, n), aligned=False)
        self._demand(num_visible, torch.int64, (batch,), aligned=False)
        out = num_visible.new_empty(batch, topk)
        self._run("choose", batch, (scores, num_visible, out, n, topk))
        return out

    def complete(
        self,
        pending: Tensor,
        slots: Tensor,
        num_tokens: Tensor,
        pages: Tensor,
        table: Tensor,
        norm: Tensor,
        frequencies: Tensor,
        *,
        ratio: int,
        eps: float,
    ) -> None:
        """Keeps the compressed rows of the blocks that end with the newest tokens of B sequences.

        pending: [slots, ring rows, 2, width] float32, rings; width is dim, or 2 dim where blocks overlap. slots,
        num_tokens [B], table [B, P]: int64; 0 tokens: padding. pages: [pages, rows, dim]; a row of ``ratio`` tokens
        each, those of a sequence in the order of its table. norm [dim], frequencies [rope / 2]: float32.
        """
        (batch, table_width), (_, ring, _, width) = table.shape, pending.shape
        _, rows_per_page, dim = pages.shape
        inner = (2 * width, width, 1)
        fits = pending.dtype == torch.float32 and pending.stride()[1:] == inner and width in (dim, 2 * dim)
        if not fits or ring < ratio * width // dim:
            raise self._unfit(pending, f"float32 [slots, {ratio * width // dim} or more, 2, {dim} or {2 * dim}]")
        if pages.dtype != self.dtype or pages.stride()[1:] != (dim, 1) or dim % 2 or dim > _MAX_POOLED:
            raise self._unfit(pages, f"{self.dtype} [pages, rows, dim of up to {_MAX_POOLED}]")
        self._demand(table, torch.int64, (batch, table_width), aligned=False)
        for each in (slots, num_tokens):
            self._demand(each, torch.int64, (batch,), aligned=False)
        self._demand(norm, torch.float32, (dim,))
        rings = (pending, pending.stride(0), ring, width, slots, num_tokens, table, table_width)
        to = (pages, pages.stride(0), rows_per_page, dim, 2 * len(frequencies), ratio, _bits(eps))
        self._run("complete", batch, (*rings, norm, frequencies, *to))

    def _demand(self, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], *, aligned: bool = True) -> None:
        rough = aligned and (x.data_ptr() % 16 or (dtype == self.dtype and x.shape[-1] % 8))
        if x.dtype != dtype or tuple(x.shape) != shape or not x.is_contiguous() or rough:
            raise self._unfit(x, f"contiguous {dtype} {shape}, at a multiple of 16 bytes")

    def _unfit(self, x: Tensor, allowed: str) -> ArgumentError:
        given = f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}"
        return ArgumentError(
            "a tensor does not fit the decode step", given=given, allowed=allowed, action="use PyTorch"
        )


def takes_experts(up: Tensor, down: Tensor) -> bool:
    """Whether ``experts_up`` and ``experts_down`` take such weights."""
    widths = (up.shape[2], down.shape[2])
    fits = all(width % 256 == 0 and 16 * width <= _MAX_SHARED for width in widths)
    return (
        fits and up.shape[0] <= _MAX_EXPERTS and not any(each.shape[1] % (2 * _PAIRS_PER_ITEM) for each in (up, down))
    )


def _expert_ctas(weights: Tensor, entries: int) -> int:
    """Two a multiprocessor, or one an item of work where there are fewer."""
    experts, outputs, _ = weights.shape
    most = 2 * torch.cuda.get_device_properties(weights.device).multi_processor_count if weights.is_cuda else 3
    return min(most, min(experts, entries) * outputs // (2 * _PAIRS_PER_ITEM))


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack("<f", value), "little", signed=True)
