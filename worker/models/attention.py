"""Attention over dense pages, one span at a time, without copying KV on the decode path.

Partial results of key blocks are merged by their log-sum-exp (Milakov & Gimelshein 2018; Dao et al. 2022,
"FlashAttention", section 3.1): with o_i, l_i of block i, out = sum_i softmax(l)_i * o_i.
"""

from __future__ import annotations

import torch

from worker.batch import Batch, Span


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, H, T, dim] queries over [B, H, N, dim] keys, any strides -> output and log-sum-exp [B, H, T] float32."""
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, is_causal=is_causal
    )
    return out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """Causal attention of every span's rows over their own sequence.

    Args:
        q: [R, q_heads, dim], rotated. q_heads is a multiple of kv_heads; head h reads kv head h // (q_heads/kv_heads).
        k, v: [R, kv_heads, dim] of this step's rows, rotated.
        k_pages, v_pages: [num_pages, 128, kv_heads, dim]; this step's rows are already written.
        batch: its spans cover the real rows; padding rows get zeros.

    Returns:
        [R, q_heads, dim], new.
    """
    num_rows, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    out = q.new_zeros(q.shape) if batch.write_rows is not None else q.new_empty(q.shape)
    grouped = (num_rows, kv_heads, q_heads // kv_heads, dim)
    q_grouped, out_grouped = q.view(grouped), out.view(grouped)
    for span in batch.spans:
        rows = slice(span.first_row, span.first_row + span.num_rows)
        if span.num_rows == 1:
            out_grouped[span.first_row] = _decode(q_grouped[span.first_row], k_pages, v_pages, span)
        else:
            out_grouped[rows] = _prefill(q_grouped[rows], k[rows], v[rows], k_pages, v_pages, span)
    return out


def _decode(q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, span: Span) -> torch.Tensor:
    """One row: q [kv_heads, group, dim] -> same shape. Full pages are one batched call, the last page another."""
    last, num_rows = span.last_page, span.last_rows
    out, lse = _flash(
        q.unsqueeze(0),
        k_pages[last : last + 1, :num_rows].transpose(1, 2),
        v_pages[last : last + 1, :num_rows].transpose(1, 2),
    )
    num_full = len(span.full_pages)
    if num_full == 0:
        return out[0]
    full_out, full_lse = _flash(
        q.expand(num_full, *q.shape),
        _pages(k_pages, span.full_pages).transpose(1, 2),
        _pages(v_pages, span.full_pages).transpose(1, 2),
    )
    return _merge(torch.cat((full_out, out)), torch.cat((full_lse, lse)))


def _prefill(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, span: Span
) -> torch.Tensor:
    """Several rows: q [T, kv_heads, group, dim] -> same shape; their own KV from the workspace, earlier from pages."""
    group = q.shape[2]
    q = q.permute(1, 2, 0, 3)  # [kv_heads, group, T, dim]: kv heads are the batch, so no head is repeated
    out, lse = _flash(q, _per_group(k, group), _per_group(v, group), is_causal=True)
    if span.start:
        k_before, v_before = (_rows_before(pages, span) for pages in (k_pages, v_pages))
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


def _rows_before(plane: torch.Tensor, span: Span) -> torch.Tensor:
    """[start, kv_heads, dim]: the rows below the span, copied out of its pages."""
    rows = plane.new_empty((span.start, *plane.shape[2:]))
    num_whole = len(span.full_pages) * plane.shape[1]
    if num_whole:
        rows[:num_whole].view(-1, *plane.shape[1:]).copy_(_pages(plane, span.full_pages))
    rows[num_whole:] = plane[span.last_page, : span.last_rows]
    return rows
