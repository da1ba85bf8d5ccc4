"""DeepSeek-V4's attention: one row a token that is key and value of every head, a window of raw rows, compressed rows
behind it, one softmax over both and a sink.

A query at position t reads the raw rows of tokens (t - window, t] and compressed rows c < (t + 1) // ratio: all of them
in HCA layers, the indexer's choice in CSA layers. A token may be read twice, raw and compressed; the model means it so.
Rows are stored rotated, so the output is rotated back.

Prompt chunks go span by span; decode rows too, but where ``Rows.decode`` has them all at once.
"""

from __future__ import annotations

import torch

from kernels.attention import Part, attend_dense, merge
from kernels.v4_step_cuda import V4Step
from worker.batch import Batch
from worker.models.deepseek_v4_compressor import complete
from worker.models.deepseek_v4_config import DeepseekV4Config
from worker.models.deepseek_v4_decode import attend_decode
from worker.models.deepseek_v4_geometry import (
    CSA_PENDING,
    CSA_ROW,
    HCA_PENDING,
    HCA_ROW,
    INDEX_KEY,
    INDEX_PENDING,
    RAW_ROW,
)
from worker.models.deepseek_v4_indexer import choose, index_scores
from worker.models.deepseek_v4_projections import AttentionWeights, LayerRope, Projected, project, project_out
from worker.models.deepseek_v4_rope import rotate_last
from worker.models.deepseek_v4_rows import LayerSpan, Rows
from worker.models.deepseek_v4_step_rows import StepReads

_GATHERED = 1 << 22  # values of chosen rows gathered together: 16 MiB
_SCORED = 1 << 22  # scores of queries for all rows that are ranked together: 16 MiB


def attention(
    x: torch.Tensor,
    layer: int,
    weights: AttentionWeights,
    config: DeepseekV4Config,
    batch: Batch,
    rope: LayerRope,
    rows: Rows | StepReads,
    kernels: V4Step | None = None,
) -> torch.Tensor:
    """x [R, hidden], normed -> [R, hidden]; the step's rows of this layer are kept in ``rows``."""
    step = project(x, weights, config, batch, rope, kernels)
    rows.keep(layer, RAW_ROW, step.raw)
    if step.pending is not None:
        rows.keep(layer, HCA_PENDING if step.index_pending is None else CSA_PENDING, step.pending)
    if step.index_pending is not None:
        rows.keep(layer, INDEX_PENDING, step.index_pending)
    if isinstance(rows, StepReads):
        out = attend_decode(step, layer, weights, config, rope, rows, kernels)
    else:
        out = _attend_spans(step, layer, weights, config, batch, rope, rows, kernels)
    if kernels is None:
        out = rotate_last(out, rope.step.inverse).to(x.dtype)
    else:
        out = kernels.rotate(out, *rope.step, inverse=True)
    return project_out(out, weights, config, batch.tiles, together=kernels is not None)


def _attend_spans(
    step: Projected,
    layer: int,
    weights: AttentionWeights,
    config: DeepseekV4Config,
    batch: Batch,
    rope: LayerRope,
    rows: Rows,
    kernels: V4Step | None,
) -> torch.Tensor:
    """[R, heads, dim] float32; 0 in padding rows."""
    out = step.q.new_zeros(step.q.shape, dtype=torch.float32)
    decode = rows.decode()
    if decode is not None:
        out[decode.rows] = attend_decode(step, layer, weights, config, rope, decode, kernels)
    for number, span in enumerate(batch.spans):
        if decode is not None and span.num_rows == 1:
            continue
        at = LayerSpan(rows, number, span, layer)
        parts = [_attend_window(step, at, config)]
        if weights.compressor is not None and at.end >= weights.compressor.ratio:
            parts.append(_attend_compressed(step, at, weights, config, rope))
        at.own(out)[:] = merge(parts, weights.sink)
    return out


def _attend_window(step: Projected, at: LayerSpan, config: DeepseekV4Config) -> Part:
    first = max(0, at.start - config.window + 1)
    raw = torch.cat((at.held(RAW_ROW, first, at.start), at.own(step.raw)))
    return attend_dense(
        at.own(step.q),
        raw,
        raw,
        first_position=at.start,
        first_row=first,
        sm_scale=config.head_dim**-0.5,
        window=config.window,
    )


def _attend_compressed(
    step: Projected, at: LayerSpan, weights: AttentionWeights, config: DeepseekV4Config, rope: LayerRope
) -> Part:
    """Completes the span's blocks, each of which its own last token sees already, and attends to compressed rows."""
    assert weights.compressor is not None and step.pending is not None
    ratio, scale, eps = weights.compressor.ratio, config.head_dim**-0.5, config.norm_eps
    q, frequencies = at.own(step.q), rope.frequencies
    row, pending = (HCA_ROW, HCA_PENDING) if weights.indexer is None else (CSA_ROW, CSA_PENDING)
    new = complete(at.own(step.pending), pending, row, at, weights.compressor, frequencies, q.dtype, eps)
    if weights.indexer is not None:
        assert step.index_pending is not None and step.index_q is not None and step.index_weights is not None
        own, compressor = at.own(step.index_pending), weights.indexer.compressor
        keys = complete(own, INDEX_PENDING, INDEX_KEY, at, compressor, frequencies, q.dtype, eps)
        if at.end // ratio > config.index_topk:
            keys = torch.cat((at.held(INDEX_KEY, 0, at.start // ratio), keys)).squeeze(1)
            num_visible = torch.arange(at.start + 1, at.end + 1, device=q.device) // ratio
            chosen = _choose_rows(
                at.own(step.index_q), at.own(step.index_weights), keys, num_visible, config.index_topk
            )
            return _attend_chosen(q, row, at, chosen, scale)
    held = torch.cat((at.held(row, 0, at.start // ratio), new))
    return attend_dense(q, held, held, first_position=at.start, first_row=0, sm_scale=scale, ratio=ratio)


def _choose_rows(
    queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor, num_visible: torch.Tensor, topk: int
) -> torch.Tensor:
    """The indexer's choice for T queries, [T, topk] int64, some queries at once: a chunk's scores for all rows of a
    long text take more memory than all else that it computes."""
    step = max(1, _SCORED // len(keys))
    chosen = []
    for first in range(0, len(queries), step):
        some = slice(first, first + step)
        scores = index_scores(queries[some], head_weights[some], keys)
        chosen.append(choose(scores, num_visible[some], topk))
    return torch.cat(chosen)


def _attend_chosen(q: torch.Tensor, kind: str, at: LayerSpan, chosen: torch.Tensor, sm_scale: float) -> Part:
    """Each query [T, heads, dim] over its own rows, [T, K] int64 numbers of the kind; -1: none. Only those are read."""
    out = q.new_empty(q.shape, dtype=torch.float32)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    step = max(1, _GATHERED // (chosen.shape[1] * q.shape[-1]))
    for first in range(0, len(q), step):
        some = slice(first, min(len(q), first + step))
        numbers = chosen[some].clamp(min=0)
        gathered = at.chosen(kind, numbers.flatten()).view(*numbers.shape, -1).float()  # [t, K, dim]
        scores = torch.bmm(q[some].float() * sm_scale, gathered.transpose(1, 2))
        scores.masked_fill_((chosen[some] < 0).unsqueeze(1), -torch.inf)
        lse[some] = scores.logsumexp(-1)
        finite = lse[some].clamp(min=torch.finfo(torch.float32).min)  # a query that sees no row gets 0, not NaN
        out[some] = torch.bmm((scores - finite.unsqueeze(-1)).exp_(), gathered)
    return Part(out, lse)
