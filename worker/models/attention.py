"""Attention of a step's spans over their own sequences, one span at a time.

Dense groups without a window read their pages in place (the flash path). Everything else reads the rows that stay
dense through ``KvView.span``, packed pages through ``kernels.attention``, and merges the two: one code for every mode,
so what a mode changes is where rows lie, never how they are read.

Partial results are merged by their log-sum-exp (Milakov & Gimelshein 2018; Dao et al. 2022, "FlashAttention", section
3.1): with o_i, l_i of block i, out = sum_i softmax(l)_i * o_i.
"""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.attention import Part, attend_dense, attend_packed, merge
from worker.batch import Batch, Place, Span
from worker.kv_view import KvView, RegionView


class Attend(Protocol):
    """``attend`` below, or ``worker.models.gpu_attention.GpuAttention``."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_view: RegionView,
        v_view: RegionView,
        kv: KvView,
        batch: Batch,
    ) -> torch.Tensor: ...


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, T, dim] queries over [B, H, N, dim] keys, any strides -> output and log-sum-exp [B, H, T] float32."""
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=is_causal
    )
    return out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_view: RegionView, v_view: RegionView, kv: KvView, batch: Batch
) -> torch.Tensor:
    """Causal attention of every span's rows over their own sequence, scores scaled by dim ** -0.5.

    Args:
        q: [R, q_heads, dim], rotated. q_heads is a multiple of kv_heads; head h reads kv head h // (q_heads/kv_heads).
        k, v: [R, kv_heads, dim] of this step's rows, rotated; appended already (``KvView.append``).
        k_view, v_view: the layer's regions, of one group.
        batch: its spans cover the real rows; padding rows get zeros.

    Returns:
        [R, q_heads, dim], new.
    """
    num_rows, q_heads, dim = q.shape
    group, kv_heads = k_view.group, k.shape[1]
    out = q.new_zeros(q.shape) if batch.padded else q.new_empty(q.shape)
    grouped = (num_rows, kv_heads, q_heads // kv_heads, dim)
    q_grouped, out_grouped = q.view(grouped), out.view(grouped)
    k_pages, v_pages = k_view.pages, v_view.pages
    for span, place in zip(batch.spans, batch.groups[group.name].places, strict=True):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        if k_pages is None or v_pages is None or group.window:
            out[rows] = _attend_rows(q[rows], k[rows], v[rows], k_view, v_view, kv, span, place)
        elif span.num_rows == 1:
            out_grouped[span.first_row] = _decode(q_grouped[span.first_row], k_pages, v_pages, place)
        else:
            out_grouped[rows] = _prefill(q_grouped[rows], k[rows], v[rows], k_pages, v_pages, span.start, place)
    return out


def _attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_view: RegionView,
    v_view: RegionView,
    kv: KvView,
    span: Span,
    place: Place,
) -> torch.Tensor:
    """q [T, q_heads, dim] over packed tokens [seen, base) and dense rows [base, start + T) -> [T, q_heads, dim] f32."""
    window, sm_scale = k_view.group.window, q.shape[-1] ** -0.5
    seen = max(0, span.start - window + 1) if window else 0
    parts: list[Part] = []
    if k_view.packed is not None and v_view.packed is not None and place.base > seen:
        parts.append(
            attend_packed(
                q,
                k_view.packed,
                v_view.packed,
                place.page_ids,
                num_tokens=place.base,
                first_position=span.start,
                sm_scale=sm_scale,
                window=window,
            )
        )
        kv.counters.rows_dequantised["attention"] += 2 * (place.base - seen)
        seen = place.base
    k_rows, v_rows = (dense_rows(kv, view, place, seen, own, span) for view, own in ((k_view, k), (v_view, v)))
    parts.append(
        attend_dense(q, k_rows, v_rows, first_position=span.start, first_row=seen, sm_scale=sm_scale, window=window)
    )
    return merge(parts)


def dense_rows(kv: KvView, view: RegionView, place: Place, first: int, own: torch.Tensor, span: Span) -> torch.Tensor:
    """[start + T - first, kv_heads, dim]: rows [first, start) as they are kept, then the span's ``own`` [T, ...]."""
    if first == span.start:
        return own
    return torch.cat((kv.span(view, place, first, span.start - first, "attention"), own))


def _decode(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, place: Place) -> torch.Tensor:
    """One row: q [kv_heads, group, dim] -> same shape. Full pages are one batched call, the last page another."""
    last, num_rows = place.last_page, place.last_rows
    out, lse = _flash(
        q.unsqueeze(0),
        k_pages[last : last + 1, :num_rows].transpose(1, 2),
        v_pages[last : last + 1, :num_rows].transpose(1, 2),
    )
    assert place.full_pages is not None
    num_full = len(place.full_pages)
    if num_full == 0:
        return out[0]
    full_out, full_lse = _flash(
        q.expand(num_full, *q.shape),
        _pages(k_pages, place.full_pages).transpose(1, 2),
        _pages(v_pages, place.full_pages).transpose(1, 2),
    )
    return _merge(torch.cat((full_out, out)), torch.cat((full_lse, lse)))


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    start: int,
    place: Place,
) -> torch.Tensor:
    """Several rows: q [T, kv_heads, group, dim] -> same shape; their own KV from the workspace, earlier from pages."""
    group = q.shape[2]
    q = q.permute(1, 2, 0, 3)  # [kv_heads, group, T, dim]: kv heads are the batch, so no head is repeated
    out, lse = _flash(q, _per_group(k, group), _per_group(v, group), is_causal=True)
    if start:
        k_before, v_before = (_rows_before(pages, start, place) for pages in (k_pages, v_pages))
        before, before_lse = _flash(q, _per_group(k_before, group), _per_group(v_before, group))
        out = _merge(torch.stack((before, out)), torch.stack((before_lse, lse)))
    return out.permute(2, 0, 1, 3)


def _merge(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """[N, a, b, c, ...dim] partial outputs and their [N, a, b, c] log-sum-exps -> one output without the first axis."""
    return (outs * lses.softmax(0).unsqueeze(-1)).sum(0).to(outs.dtype)


def _per_group(rows: torch.Tensor, group: int) -> torch.Tensor:
    """[T, kv_heads, dim] -> [kv_heads, group, T, dim], a view."""
    return rows.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)


def _pages(plane: torch.Tensor, page_ids: torch.Tensor) -> torch.Tensor:
    """[P, 128, kv_heads, dim]: a view where the ids are evenly spaced and rising (a run is), else a copy."""
    ids = page_ids.tolist()
    step = ids[1] - ids[0] if len(ids) > 1 else 1
    if step > 0 and ids == list(range(ids[0], ids[0] + step * len(ids), step)):
        return plane[ids[0] : ids[-1] + 1 : step]
    return plane.index_select(0, page_ids)


def _rows_before(plane: torch.Tensor, start: int, place: Place) -> torch.Tensor:
    """[start, kv_heads, dim]: the rows below the span, copied out of its pages."""
    assert place.full_pages is not None
    rows = plane.new_empty((start, *plane.shape[2:]))
    num_whole = len(place.full_pages) * plane.shape[1]
    if num_whole:
        rows[:num_whole].view(-1, *plane.shape[1:]).copy_(_pages(plane, place.full_pages))
    rows[num_whole:] = plane[place.last_page, : place.last_rows]
    return rows
