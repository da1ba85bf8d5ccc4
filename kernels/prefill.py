"""Attention of a prompt chunk over its sequence's pages, its dense tail and the chunk itself.

Pages are unpacked, or gathered where they are dense, block by block into a workspace of bounded size and read by a
dense kernel; the blocks' results are merged by their log-sum-exp (Dao et al. 2022, "FlashAttention", section 3.1), the
newest rows and the chunk itself being the last block. On a GPU that kernel is torch's FlashAttention for rows of up to
256 without softcap: it takes windows, and query heads that share a kv head without copies. Everything else, and the
CPU, is a blocked matrix product. Blocks are cut by the sequence's own numbers, so its result does not depend on what
else is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.attention import PackedRegion
from kernels.errors import ArgumentError
from kernels.page_codec import unpack_pages
from kernels.page_layout import Region, RegionPlanes
from kernels.pages_cuda import RegionRows, page_group, restore_pages

BLOCK_PAGES = 256  # 32,768 tokens are unpacked and read together: more would cost memory, fewer launches
PAGE_TOKENS = 128
FLASH_DIM = 256  # the widest rows that torch's kernel takes
FLASH_DTYPES = (torch.bfloat16, torch.float16)
_SCORES = 1 << 24  # scores that the matrix product keeps at once: 64 MiB of f32
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class PrefillOptions:
    """sm_scale: of the scores, before softcap. window: tokens that a query sees, itself included; 0 = all. softcap: 0 =
    none. sinks: [q_heads] f32, one more logit a head in the denominator only."""

    sm_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class History(NamedTuple):
    """Packed tokens [0, base) of a sequence.

    values None: the keys are the values too. page_ids: int64 [>= base / 128] on any device, from token 0 on; entries
    of pages wholly below the window are not read. Where the pages are on a GPU they should be there, too: a copy would
    wait for it.
    """

    keys: PackedRegion
    values: PackedRegion | None
    page_ids: Tensor
    base: int


class DenseHistory(NamedTuple):
    """As `History`, of tokens in dense pages that fill them: a multiple of 128."""

    page_ids: Tensor
    base: int


class Workspace:
    """Room for one block of unpacked rows, keys and values; shared by all layers. `num_bytes` is for the ledger."""

    def __init__(self, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        """Of the widest layer: kv_heads * dim values a row."""
        self.rows = torch.empty((2, self.values(kv_heads, dim)), dtype=dtype, device=device)

    @staticmethod
    def values(kv_heads: int, dim: int) -> int:
        """Values of one side."""
        return BLOCK_PAGES * PAGE_TOKENS * kv_heads * dim

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def block(self, side: int, num_pages: int, kv_heads: int, dim: int) -> Tensor:
        """[num_pages, 128, kv_heads, dim], a view. Raises ArgumentError where a layer is wider than said."""
        size = num_pages * PAGE_TOKENS * kv_heads * dim
        if size > self.rows.shape[1]:
            raise ArgumentError(
                "the prefill workspace is too small for this layer",
                given=f"{self.rows.shape[1]} values for {num_pages} pages of {kv_heads} x {dim}",
                allowed=f"at least {size}",
                action="make it for the widest layer of the model",
            )
        return self.rows[side, :size].view(num_pages, PAGE_TOKENS, kv_heads, dim)


@torch.no_grad()
def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first_position: int,
    first_row: int,
    history: History | DenseHistory | None,
    options: PrefillOptions,
    workspace: Workspace,
    restore: Restore | None = None,
) -> Tensor:
    """Causal attention of T queries at positions first_position + i over the rows of one sequence.

    Args:
        q: [T, q_heads, dim], any strides but for the last. q_heads is a multiple of kv_heads; head h reads kv head
            h // (q_heads / kv_heads).
        k, v: [first_position + T - first_row, kv_heads, dim] of q's dtype: rows first_row.. of the sequence, the dense
            tail and behind it the chunk itself. first_row is the history's base, or above it if below the window; 0
            without history. Shared K and V: twice the same tensor.
        restore: what brings the history's pages: on a GPU the layer's `KernelRestore`, of dense ones `GatherRestore`;
            by default `CodecRestore`.

    Returns [T, q_heads, dim] of q's dtype, new. Raises ArgumentError; what restore raises.
    """
    _check(q, k, v, first_position, first_row, history, options)
    state = _Merged(q)
    window = options.window
    attend = _flash if _has_flash(q, options) else _products
    if history is not None:
        seen_from = max(0, first_position - window + 1) if window else 0
        if restore is None:
            assert isinstance(history, History)
            restore = CodecRestore(history.keys, history.values, workspace)
        for rows, first in _blocks(history, seen_from, restore):
            count = q.shape[0]
            if window:  # queries whose window begins behind the block see nothing of it
                count = min(count, first + rows[0].shape[0] - first_position + window - 1)
            state.add(attend(q[:count], *rows, first_position, first, options, is_own=False))
    state.add(attend(q, k, v, first_position, first_row, options, is_own=True))
    return state.result(options.sinks)


def _blocks(
    history: History | DenseHistory, seen_from: int, restore: Restore
) -> Iterator[tuple[tuple[Tensor, Tensor], int]]:
    """Rows [n, kv_heads, dim] of keys and values and their first token; blocks lie on multiples of BLOCK_PAGES."""
    num_pages, page = history.base // PAGE_TOKENS, seen_from // PAGE_TOKENS
    while page < num_pages:
        end = min(num_pages, (page // BLOCK_PAGES + 1) * BLOCK_PAGES)
        k, v = restore(history.page_ids[page:end])
        first = page * PAGE_TOKENS
        skip = max(0, seen_from - first)
        yield (k[skip:], v[skip:]), first + skip
        page = end


# -- pages to rows ---------------------------------------------------------------------------------------------------


class Restore(Protocol):
    """Unpacks up to BLOCK_PAGES pages int64 [n] of one layer: keys and values [n * 128, kv_heads, dim], valid until the
    next call."""

    def __call__(self, page_ids: Tensor) -> tuple[Tensor, Tensor]: ...


class CodecRestore:
    """By kernels/page_codec.py, on any device."""

    def __init__(self, keys: PackedRegion, values: PackedRegion | None, workspace: Workspace) -> None:
        self._sides, self._workspace = [keys] if values is None else [keys, values], workspace

    def __call__(self, page_ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for side, (planes, codec) in enumerate(self._sides):
            out = self._workspace.block(side, len(page_ids), planes.heads.shape[1], codec.dim)
            out.copy_(unpack_pages(page_ids.to(planes.heads.device), planes, codec, out.dtype))
            rows.append(out.flatten(0, 1))
        return rows[0], rows[-1]


class GatherRestore:
    """Of dense pages [num_pages, 128, kv_heads, dim], by index."""

    def __init__(self, keys: Tensor, values: Tensor, workspace: Workspace) -> None:
        self._sides, self._workspace = (keys, values), workspace

    def __call__(self, page_ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = []
        for side, pages in enumerate(self._sides):
            out = self._workspace.block(side, len(page_ids), *pages.shape[2:])
            torch.index_select(pages, 0, page_ids.to(pages.device), out=out)
            rows.append(out.flatten(0, 1))
        return rows[0], rows[1]


class KernelRestore:
    """By one launch of the restore kernel (kernels/pages_cuda.py); made once a layer, whose pages lie on a GPU."""

    def __init__(self, keys: PackedRegion, values: PackedRegion | None, workspace: Workspace) -> None:
        """Raises ArgumentError, LayoutError, UncompiledWidthError: a codec or width that the kernel does not take."""
        sides = [keys] if values is None else [keys, values]
        first = min((region.planes.heads for region in sides), key=Tensor.data_ptr)
        regions = []
        for side, (region, kind) in enumerate(zip(sides, ("kv",) if values is None else ("k", "v"), strict=True)):
            heads, dim = region.planes.heads.shape[1], region.codec.dim
            rows = workspace.block(side, BLOCK_PAGES, heads, dim).flatten(0, 1)
            planes = region_planes_of(region, kind, region.planes.heads.data_ptr() - first.data_ptr())
            regions.append(RegionRows(planes, dim, workspace=rows))
        ends = [at.offset + at.region.heads * at.head_bytes for at in (region.planes for region in regions)]
        arena = first.as_strided((len(first), max(ends)), (first.stride(0), 1))
        self._group = page_group(arena, regions)
        table = torch.zeros((BLOCK_PAGES, 8), dtype=torch.int64)  # pages_cuda.PageRows, field by field
        table[:, 4] = PAGE_TOKENS * torch.arange(BLOCK_PAGES)
        table[:, 6] = PAGE_TOKENS
        self._pages = table.to(first.device)

    def __call__(self, page_ids: Tensor) -> tuple[Tensor, Tensor]:
        count = len(page_ids)
        self._pages[:count, 0].copy_(page_ids)
        restore_pages(self._group, self._pages[:count])
        rows = [source.rows[: count * PAGE_TOKENS] for source in self._group.sources]
        return rows[0], rows[-1]


def region_planes_of(region: PackedRegion, kind: str, offset: int) -> RegionPlanes:
    """Where the region's planes lie in pages that begin `offset` bytes before its first head."""
    planes, codec = region
    bits = int(codec.name[2:]) if codec.rotated else 0
    shape = Region(planes.rows, planes.heads.shape[1], planes.code_bytes, planes.scale_bytes, kind, codec.dim, bits)
    return RegionPlanes(shape, offset, planes.scales_offset, planes.heads.shape[2], planes.fragments)


# -- one block -------------------------------------------------------------------------------------------------------


def _has_flash(q: Tensor, options: PrefillOptions) -> bool:
    return q.is_cuda and q.shape[2] <= FLASH_DIM and q.dtype in FLASH_DTYPES and not options.softcap


def _flash(
    q: Tensor, k: Tensor, v: Tensor, first_position: int, first_row: int, options: PrefillOptions, *, is_own: bool
) -> tuple[Tensor, Tensor]:
    """out [T, q_heads, dim] and lse f32 [T, q_heads], natural logarithm.

    Its masks count from the last row and the last query: a query sees `left` rows before the one that it is beside.
    """
    count, num_rows = q.shape[0], k.shape[0]
    left = None
    if options.window:
        left = first_row + num_rows - count - first_position + options.window - 1
        left = left if left < num_rows - 1 else None  # else it hides nothing
    return _flash_forward(q, k, v, is_own, left, options.sm_scale)


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, left: int | None, sm_scale: float
) -> tuple[Tensor, Tensor]:
    """torch's kernel for one sequence: query i of T is beside row i + N - T of N, sees `left` rows before that (None:
    all) and, unless is_causal, all behind it."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        is_causal,
        False,
        scale=sm_scale,
        window_size_left=left,
        window_size_right=0 if is_causal and left is not None else None,
    )
    return out[0], lse[0].t()


def _products(
    q: Tensor, k: Tensor, v: Tensor, first_position: int, first_row: int, options: PrefillOptions, *, is_own: bool
) -> tuple[Tensor, Tensor]:
    """As `_flash`, by matrix products over as many rows as _SCORES lets; out is f32."""
    count, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    grouped = q.view(count, kv_heads, q_heads // kv_heads, dim).permute(1, 0, 2, 3).reshape(kv_heads, -1, dim)
    positions = torch.arange(first_position, first_position + count, device=q.device).view(-1, 1, 1)
    top = torch.full((kv_heads, grouped.shape[1], 1), _LOWEST, device=q.device)
    total = torch.zeros_like(top)
    out = torch.zeros((kv_heads, grouped.shape[1], v.shape[2]), device=q.device)
    step = max(PAGE_TOKENS, _SCORES // (count * q_heads) // PAGE_TOKENS * PAGE_TOKENS)
    for begin in range(0, k.shape[0], step):
        k_block, v_block = (x[begin : begin + step].transpose(0, 1) for x in (k, v))
        s = _product(grouped, k_block.transpose(1, 2)).mul_(options.sm_scale)
        if options.softcap:
            s.div_(options.softcap).tanh_().mul_(options.softcap)
        rows = torch.arange(first_row + begin, first_row + begin + k_block.shape[1], device=q.device)
        hidden = rows > positions if is_own else torch.zeros((), dtype=torch.bool, device=q.device)
        if options.window:
            hidden = hidden | (rows <= positions - options.window)
        if hidden.dim():
            s.view(kv_heads, count, -1, k_block.shape[1]).masked_fill_(hidden, -torch.inf)
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        p = s.sub_(new_top).exp_()
        kept = top.sub_(new_top).exp_()
        top = new_top
        total.mul_(kept).add_(p.sum(-1, keepdim=True))
        out.mul_(kept).add_(_product(p.to(q.dtype), v_block))
    out.div_(total.clamp(min=1.0))
    lse = top.add_(total.log_())
    shape = (kv_heads, count, q_heads // kv_heads, -1)
    by_query = (x.view(shape).transpose(0, 1).reshape(count, q_heads, -1) for x in (out, lse))
    attended, logs = by_query
    return attended, logs.squeeze(-1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """f32 [n, i, j] of operands of the model's dtype."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a.to(torch.float32), b.to(torch.float32))


# -- the merge -------------------------------------------------------------------------------------------------------


class _Merged:
    """The blocks so far: largest log-sum-exp, sum of weights relative to it, weighted output, all f32.

    One block of all queries is kept as it is: it is the result where no other comes.
    """

    def __init__(self, q: Tensor) -> None:
        self._q = q
        self._only: tuple[Tensor, Tensor] | None = None
        self._top: Tensor | None = None

    def _begin(self) -> None:
        q = self._q
        if self._only is not None:
            out, self._top = self._only[0], self._only[1].clone()
            self._total = torch.ones(q.shape[:2], device=q.device)
            self._out = out.to(torch.float32, copy=True)
            self._only = None
        else:
            self._top = torch.full(q.shape[:2], _LOWEST, device=q.device)
            self._total = torch.zeros(q.shape[:2], device=q.device)
            self._out = torch.zeros(q.shape, device=q.device)

    def add(self, part: tuple[Tensor, Tensor]) -> None:
        """A block's result for the first queries."""
        out, lse = part
        if self._top is None and self._only is None and out.shape[0] == self._q.shape[0]:
            self._only = part
            return
        if self._top is None:
            self._begin()
        assert self._top is not None
        top, total, so_far = (x[: out.shape[0]] for x in (self._top, self._total, self._out))
        new_top = torch.maximum(top, lse)  # finite: it starts at the lowest float
        kept, weight = (top - new_top).exp_(), (lse - new_top).exp_()
        top.copy_(new_top)
        total.mul_(kept).add_(weight)
        so_far.mul_(kept.unsqueeze(-1)).addcmul_(out.to(torch.float32), weight.unsqueeze(-1))

    def result(self, sinks: Tensor | None) -> Tensor:
        if self._only is not None and sinks is None:
            return self._only[0].to(self._q.dtype)
        if self._top is None:
            self._begin()
        assert self._top is not None
        if sinks is not None:
            top = torch.maximum(self._top, sinks).clamp_(
                _LOWEST, -_LOWEST
            )  # an infinite sink takes everything: 0 / inf
            kept = (self._top - top).exp_()
            self._total.mul_(kept).add_((sinks - top).exp_())
            self._out.mul_(kept.unsqueeze(-1))
        return self._out.div_(self._total.clamp_(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)).to(self._q.dtype)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first_position: int,
    first_row: int,
    history: History | DenseHistory | None,
    options: PrefillOptions,
) -> None:
    dims = q.dim() == k.dim() == v.dim() == 3 and q.shape[2] == k.shape[2] and k.shape == v.shape
    types = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    if not (dims and types) or q.shape[1] % k.shape[1] or any(x.stride(2) != 1 for x in (q, k, v)):
        raise ArgumentError(
            "queries, keys and values do not fit each other",
            given=", ".join(f"{x.dtype} {tuple(x.shape)} on {x.device}, strides {x.stride()}" for x in (q, k, v)),
            allowed="q [T, q_heads, dim], k and v [N, kv_heads, dim] of one dtype and device, rows contiguous, "
            "q_heads a multiple of kv_heads",
            action="pass the chunk's queries and the rows of its own layer",
        )
    base = history.base if history else 0
    seen_from = max(0, first_position - options.window + 1) if options.window else 0
    joined = base <= first_row <= max(base, seen_from) and first_row <= first_position
    if q.shape[0] < 1 or first_row + k.shape[0] != first_position + q.shape[0] or not joined:
        raise ArgumentError(
            "the dense rows must go from the packed tokens' end to the last query",
            given=f"rows [{first_row}, {first_row + k.shape[0]}), {base} packed tokens, queries at [{first_position}, "
            f"{first_position + q.shape[0]})",
            allowed=f"rows [{base}, {first_position + q.shape[0]}), or fewer where the window hides them",
            action="pass the tail and the chunk, one behind the other",
        )
    if history is not None and history.base % PAGE_TOKENS:
        raise ArgumentError(
            "packed tokens fill whole pages",
            given=str(history.base),
            allowed=f"multiples of {PAGE_TOKENS}",
            action="pass the group's base",
        )
    if options.window < 0 or options.softcap < 0:
        raise ArgumentError(
            "windows and softcaps count from 0",
            given=f"window {options.window}, softcap {options.softcap}",
            allowed="0 (none) or more",
            action="pass the layer's own",
        )
