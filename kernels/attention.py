"""Attention of one sequence over packed pages and over dense rows, and the merge of such parts. The CPU path.

Every part returns its output and the natural log-sum-exp of its scores; `merge` joins parts (Milakov & Gimelshein 2018;
Dao et al. 2022, "FlashAttention", section 3.1) and adds sinks. Scores:

    s = <q, k> * sm_scale;   with softcap: s = softcap * tanh(s / softcap);   masked rows: -inf

Queries are consecutive: query i stands at position first_position + i. Row i of a region of ratio r holds tokens
[i r, (i + 1) r) and stands at its last one, so a query at position p sees rows i < (p + 1) // r and, with a window of w
tokens, i >= (p - w + 1) // r.

TurboQuant rows are never un-rotated: the rotation R is orthogonal and symmetric, so <q, k> = <R q, R k>, and the output
is un-rotated once per query head. A block of pages is read once for all queries of its kv head. Blocks are cut by the
sequence's own numbers, so its result does not depend on what else is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import ArgumentError, LayoutError
from kernels.page_codec import Planes, RowCodec, check_planes, read_pages
from kernels.rotation import parts, rotate

QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_BLOCK_VALUES = 1 << 20  # f32 values of K read together: 4 MiB stay in the last cache, calls do not dominate
_SCORES = 1 << 20  # scores computed together
_LOWEST = torch.finfo(torch.float32).min


class PackedRegion(NamedTuple):
    """The packed rows of one region as attention reads them."""

    planes: Planes  # of the whole arena
    codec: RowCodec


class Part(NamedTuple):
    """Attention over some of a sequence's rows."""

    out: Tensor  # f32 [T, q_heads, dim]; 0 where no row is visible
    lse: Tensor  # f32 [T, q_heads]; -inf where no row is visible


@torch.no_grad()
def attend_packed(
    q: Tensor,
    keys: PackedRegion,
    values: PackedRegion | None,
    page_ids: Tensor,
    *,
    num_tokens: int,
    first_position: int,
    sm_scale: float,
    ratio: int = 1,
    window: int = 0,
    softcap: float = 0.0,
) -> Part:
    """Attention of T queries over the packed tokens [0, num_tokens) of one sequence.

    Args:
        q: [T, q_heads, dim] f32, f16 or bf16, any strides; q_heads is a multiple of kv_heads, head h reads kv head
            h // (q_heads / kv_heads). Positions as in the module's docstring.
        keys, values: the arena's planes and their codecs; values=None: the keys are the values too (kind "kv").
        page_ids: int64 [>= pages that num_tokens fill], the sequence's page table from token 0 on. Entries of pages
            that no query sees (wholly below the window) are not looked at, so they may be freed.
        num_tokens: packed tokens; num_tokens // ratio rows are read, the rest of the last page is not.
        ratio: tokens a row. window: tokens that a query sees, itself included; 0 = all. softcap: 0 = none.

    Raises ArgumentError, LayoutError.
    """
    values_or_keys = values or keys
    kv_heads, page_rows = _check_packed(q, keys, values_or_keys, page_ids, num_tokens, ratio)
    mask = _Mask(first_position, q.shape[0], num_tokens // ratio, ratio, window)
    state = _Softmax(_by_kv_head(_into_domain(q, keys.codec), kv_heads, sm_scale), values_or_keys.codec.width, softcap)
    block = _block_pages(keys.codec.width, kv_heads, page_rows, state.num_queries)
    first_page, end_page = mask.begin // page_rows, -(-mask.end // page_rows) if mask.begin < mask.end else 0
    _check_pages(page_ids[first_page:end_page], len(keys.planes.heads))
    for first in range(first_page // block * block, end_page, block):
        begin = max(mask.begin, first * page_rows)
        end = min(mask.end, (first + block) * page_rows)
        page = begin // page_rows  # pages of the block below it are not looked at
        pages = page_ids[page : -(-end // page_rows)]
        inside = slice(begin - page * page_rows, end - page * page_rows)
        k, k_scale = _rows_of(pages, keys, inside)
        v, v_scale = (k, k_scale) if values is None else _rows_of(pages, values, inside)
        state.add(k, v, k_scale, v_scale, mask.hidden(begin, end, q.device))
    out, lse = state.result(q.shape[0])
    return Part(_out_of_domain(out, values_or_keys.codec), lse)


@torch.no_grad()
def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    first_position: int,
    first_row: int,
    sm_scale: float,
    ratio: int = 1,
    window: int = 0,
    softcap: float = 0.0,
) -> Part:
    """Attention of T queries over N consecutive dense rows of one sequence (a tail, or a step's workspace).

    Args:
        q: as for `attend_packed`.
        k, v: [N, kv_heads, dim] of any such dtype and strides; v's dim may differ. Row i is the region's row
            first_row + i (its position, at ratio 1). A ring that wraps is two calls, or one concatenation.

    Raises ArgumentError, LayoutError.
    """
    kv_heads = _check_dense(q, k, v)
    num_queries = q.shape[0]
    mask = _Mask(first_position, num_queries, first_row + k.shape[0], ratio, window, first_row)
    begin, end = mask.begin, mask.end
    scaled = _by_kv_head(q.to(torch.float32), kv_heads, sm_scale)
    k, v = (x[max(0, begin - first_row) : max(0, end - first_row)].to(torch.float32) for x in (k, v))
    if begin < end and not softcap and k.shape[2] == v.shape[2] and q.device.type == "cpu":  # the op is a CPU's
        if mask.hidden(begin, end, q.device) is None:
            return _flash(scaled, k, v, num_queries)
        own = first_position - begin  # rows below are seen by all, the others are the queries' own
        if ratio == 1 and own >= 0 and end == first_position + num_queries and not mask.cuts(begin):
            diagonal = _flash_causal(scaled, k[own:], v[own:], num_queries)
            if own == 0:
                return diagonal
            history = _flash(scaled, k[:own], v[:own], num_queries)
            return Part(merge([history, diagonal]), torch.logaddexp(history.lse, diagonal.lse))
    state = _Softmax(scaled, v.shape[-1], softcap)
    block = _block_rows(k.shape[-1], kv_heads, state.num_queries)
    for first in range(begin, end, block):
        last = min(end, first + block)
        k_block, v_block = (x[first - begin : last - begin].transpose(0, 1) for x in (k, v))
        state.add(k_block, v_block, None, None, mask.hidden(first, last, q.device))
    return state.result(num_queries)


def _flash(q: Tensor, k: Tensor, v: Tensor, num_queries: int) -> Part:
    """All queries see all rows: q f32 [kv_heads, T * group, dim], scaled; k, v f32 [N, kv_heads, dim]."""
    k, v = (x.transpose(0, 1).unsqueeze(0) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q.unsqueeze(0), k, v, scale=1.0)
    return Part(_by_query(out[0], num_queries), _by_query(lse[0].unsqueeze(-1), num_queries).squeeze(-1))


def _flash_causal(q: Tensor, k: Tensor, v: Tensor, num_queries: int) -> Part:
    """Query i sees rows [0, i]: as `_flash`, with N = T."""
    kv_heads, _, dim = q.shape
    q = q.view(kv_heads, num_queries, -1, dim).transpose(1, 2)  # kv heads are the batch, so no head is repeated
    k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True, scale=1.0)
    return Part(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


@torch.no_grad()
def merge(attended: Sequence[Part], sinks: Tensor | None = None) -> Tensor:
    """One output f32 [T, q_heads, dim] from parts over disjoint rows.

    `sinks` [q_heads]: one more logit a head, in the denominator only; -inf is no sink, +inf takes everything (output
    0). A query that sees no row at all gets 0. Raises ArgumentError (no parts, shapes differ).
    """
    if not attended or any(p.out.shape != attended[0].out.shape or p.lse.shape != p.out.shape[:2] for p in attended):
        raise ArgumentError(
            "parts to merge must agree in shape",
            given=", ".join(f"{tuple(p.out.shape)} with lse {tuple(p.lse.shape)}" for p in attended) or "none",
            allowed="one or more of [T, q_heads, dim] with lse [T, q_heads]",
            action="pass what attend_packed and attend_dense return for the same queries",
        )
    if len(attended) == 1 and sinks is None:
        return attended[0].out
    logits = [part.lse for part in attended]
    if sinks is not None:
        if sinks.shape != attended[0].lse.shape[1:]:
            raise ArgumentError(
                "sinks are one logit a query head",
                given=str(tuple(sinks.shape)),
                allowed=str(tuple(attended[0].lse.shape[1:])),
                action="pass the layer's own sinks",
            )
        logits.append(sinks.to(torch.float32).expand_as(logits[0]))
    lse = torch.stack(logits)
    # Bounded, because inf - inf is NaN: no row and no sink leaves exp(-inf) = 0, an infinite sink 0 / inf.
    top = lse.amax(0).clamp_(_LOWEST, -_LOWEST)
    weights = (lse - top).exp_()
    weights /= weights.sum(0).clamp_(min=1.0)  # the largest logit has weight 1
    out = attended[0].out * weights[0].unsqueeze(-1)
    for part, weight in zip(attended[1:], weights[1:], strict=False):
        out.addcmul_(part.out, weight.unsqueeze(-1))
    return out


def _rows_of(pages: Tensor, region: PackedRegion, inside: slice) -> tuple[Tensor, Tensor | None]:
    values, scale = read_pages(pages, *region)
    return values[:, inside], None if scale is None else scale[:, inside]


class _Mask:
    """Which rows [first_row, num_rows) the queries see; `begin` and `end` bound what any of them sees."""

    def __init__(
        self, first_position: int, num_queries: int, num_rows: int, ratio: int, window: int, first_row: int = 0
    ) -> None:
        if first_position < 0 or first_row < 0 or ratio < 1 or window < 0:
            raise ArgumentError(
                "positions, rows and windows count from 0, ratios from 1",
                given=f"first_position {first_position}, first_row {first_row}, ratio {ratio}, window {window}",
                allowed="0 or more, ratio 1 or more",
                action="pass the span's own numbers",
            )
        self.first_position, self.num_queries, self.ratio, self.window = first_position, num_queries, ratio, window
        last = first_position + num_queries - 1
        self.begin = max(first_row, self._first_seen(first_position))
        self.end = max(self.begin, min(num_rows, (last + 1) // ratio) if num_queries else 0)

    def _first_seen(self, position: int) -> int:
        return max(0, position - self.window + 1) // self.ratio if self.window else 0

    def cuts(self, begin: int) -> bool:
        """Whether the window hides rows from `begin` on from a query."""
        return begin < self._first_seen(self.first_position + self.num_queries - 1)

    def hidden(self, begin: int, end: int, device: torch.device) -> Tensor | None:
        """Bool [T, 1, end - begin], True where a query does not see a row; None where every query sees every row."""
        last = self.first_position + self.num_queries - 1
        if end <= (self.first_position + 1) // self.ratio and not self.cuts(begin):
            return None
        rows = torch.arange(begin, end, device=device)
        positions = torch.arange(self.first_position, last + 1, device=device).view(-1, 1, 1)
        hidden = rows >= (positions + 1) // self.ratio
        if self.window:
            hidden |= rows < (positions - self.window + 1) // self.ratio
        return hidden


class _Softmax:
    """Online softmax over blocks of rows (Milakov & Gimelshein 2018): largest score, sum and output so far."""

    def __init__(self, q: Tensor, v_width: int, softcap: float) -> None:
        """q f32 [kv_heads, T * group, width], scaled."""
        if softcap < 0:
            raise ArgumentError("softcap is a bound", given=str(softcap), allowed="0 (none) or more", action="drop it")
        self.q, self.softcap, self.num_queries = q, softcap, q.shape[0] * q.shape[1]
        self.top = q.new_full((*q.shape[:2], 1), _LOWEST)  # finite, so that a masked row leaves exp(-inf) and no NaN
        self.total = q.new_zeros((*q.shape[:2], 1))
        self.out = q.new_zeros((*q.shape[:2], v_width))

    def add(self, k: Tensor, v: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, hidden: Tensor | None) -> None:
        """k, v f32 [kv_heads, n, width]; scales f32 [kv_heads, n]; hidden bool [T, 1, n]."""
        s = torch.bmm(self.q, k.transpose(1, 2))
        if k_scale is not None:
            s.mul_(k_scale.unsqueeze(1))
        if self.softcap:
            s.div_(self.softcap).tanh_().mul_(self.softcap)
        if hidden is not None:
            s.view(s.shape[0], hidden.shape[0], -1, s.shape[2]).masked_fill_(hidden, -torch.inf)
        top = torch.maximum(self.top, s.amax(-1, keepdim=True))
        p = s.sub_(top).exp_()
        kept = self.top.sub_(top).exp_()
        self.top = top
        self.total.mul_(kept).add_(p.sum(-1, keepdim=True))
        if v_scale is not None:
            p.mul_(v_scale.unsqueeze(1))
        self.out.mul_(kept).baddbmm_(p, v)

    def result(self, num_queries: int) -> Part:
        """out f32 [T, q_heads, v_width] and lse f32 [T, q_heads]."""
        out = self.out.div_(self.total.clamp(min=1.0))  # a visible row makes the sum 1 at least; none leaves 0 / 1
        lse = self.top.add_(self.total.log_())
        return Part(_by_query(out, num_queries), _by_query(lse, num_queries).squeeze(-1))


def _by_kv_head(q: Tensor, kv_heads: int, sm_scale: float) -> Tensor:
    """[T, q_heads, width] -> scaled [kv_heads, T * group, width], contiguous."""
    num_queries, q_heads, width = q.shape
    grouped = q.view(num_queries, kv_heads, q_heads // kv_heads, width).transpose(0, 1)
    return torch.mul(grouped, sm_scale).reshape(kv_heads, -1, width)


def _by_query(x: Tensor, num_queries: int) -> Tensor:
    """[kv_heads, T * group, width] -> [T, q_heads, width]."""
    kv_heads, _, width = x.shape
    return x.view(kv_heads, num_queries, -1, width).transpose(0, 1).reshape(num_queries, -1, width)


@lru_cache
def _rotation(dim: int, device: torch.device) -> Tensor:
    """D H D of rows of width dim, f32 [width, width]: one product of few rows is cheaper than many butterflies."""
    return rotate(torch.eye(sum(parts(dim)), dtype=torch.float64), parts(dim)).to(device, torch.float32)


def _into_domain(q: Tensor, codec: RowCodec) -> Tensor:
    """[T, q_heads, dim] -> f32 [T, q_heads, width] as the codec's rows are read."""
    q = q.to(torch.float32)
    if not codec.rotated:
        return q.contiguous()
    padded = torch.nn.functional.pad(q, (0, codec.width - codec.dim)) if codec.width > codec.dim else q
    return padded @ _rotation(codec.dim, q.device)


def _out_of_domain(out: Tensor, codec: RowCodec) -> Tensor:
    return (out @ _rotation(codec.dim, out.device))[..., : codec.dim] if codec.rotated else out


def _block_pages(width: int, kv_heads: int, page_rows: int, num_queries: int) -> int:
    return max(1, _block_rows(width, kv_heads, num_queries) // page_rows)


def _block_rows(width: int, kv_heads: int, num_queries: int) -> int:
    """Rows done together, a power of two; depends on shapes of the sequence alone. `num_queries` over all heads."""
    rows = min(_BLOCK_VALUES // (kv_heads * width), _SCORES // max(1, num_queries))
    return 1 << max(4, rows.bit_length() - 1)


def _check_queries(q: Tensor, kv_heads: int, dim: int) -> None:
    ok = q.dim() == 3 and q.dtype in QUERY_DTYPES and q.shape[2] == dim and kv_heads >= 1
    if not ok or q.shape[1] < 1 or q.shape[1] % kv_heads:
        raise ArgumentError(
            "queries do not fit the keys",
            given=f"{q.dtype} {tuple(q.shape)}, {kv_heads} kv heads of width {dim}",
            allowed=f"float32, float16 or bfloat16 [T, multiple of {kv_heads}, {dim}]",
            action="pass [T, q_heads, dim] of the layer that wrote the keys",
        )


def _check_packed(
    q: Tensor, keys: PackedRegion, values: PackedRegion, page_ids: Tensor, num_tokens: int, ratio: int
) -> tuple[int, int]:
    """Number of kv heads and rows a page."""
    check_planes(*keys)
    check_planes(*values)
    pages, kv_heads, page_rows = *keys.planes.heads.shape[:2], keys.planes.rows
    if (*values.planes.heads.shape[:2], values.planes.rows) != (pages, kv_heads, page_rows):
        raise LayoutError(
            "keys and values lie in pages of different shapes",
            given=f"values: {tuple(values.planes.heads.shape[:2])}, {values.planes.rows} rows",
            allowed=f"{pages} pages, {kv_heads} heads, {page_rows} rows",
            action="take both regions from one layer",
        )
    _check_queries(q, kv_heads, keys.codec.dim)
    if ratio < 1 or num_tokens < 0:
        raise ArgumentError(
            "tokens count from 0, ratios from 1",
            given=f"num_tokens {num_tokens}, ratio {ratio}",
            allowed="num_tokens 0 or more, ratio 1 or more",
            action="pass the group's base and the region's ratio",
        )
    num_pages = -(-(num_tokens // ratio) // page_rows)
    if page_ids.dtype != torch.int64 or page_ids.dim() != 1 or len(page_ids) < num_pages:
        raise ArgumentError(
            "the page table does not cover the packed tokens",
            given=f"{page_ids.dtype} {tuple(page_ids.shape)} for {num_tokens} tokens of ratio {ratio}",
            allowed=f"int64 [{num_pages} or more]",
            action="pass the sequence's whole page table, from token 0 on",
        )
    return kv_heads, page_rows


def _check_pages(pages: Tensor, num_pages: int) -> None:
    """Pages that queries see must exist: index_select's own message would not say what is wrong."""
    if len(pages) and not 0 <= int(pages.min()) <= int(pages.max()) < num_pages:
        raise ArgumentError(
            "a page that queries see is not in the arena",
            given=f"pages {int(pages.min())} to {int(pages.max())}",
            allowed=f"0 to {num_pages - 1}",
            action="a freed page lies inside the window: compare the group's window with the one it was freed by",
        )


def _check_dense(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Number of kv heads."""
    ok = all(x.dim() == 3 and x.dtype in QUERY_DTYPES for x in (k, v)) and k.shape[:2] == v.shape[:2]
    if not ok:
        raise ArgumentError(
            "keys and values must be rows of the same heads",
            given=f"k {k.dtype} {tuple(k.shape)}, v {v.dtype} {tuple(v.shape)}",
            allowed="float32, float16 or bfloat16 [N, kv_heads, dim], N and kv_heads equal",
            action="pass the rows of one region pair",
        )
    _check_queries(q, k.shape[1], k.shape[2])
    return int(k.shape[1])
