"""Attention of all decode rows of a step at once: one gather a layer for raw rows, one for compressed rows.

The same as ``deepseek_v4_attention`` does span by span, for devices on which many small operations cost more than rows
that are read for nothing: the B sequences are padded to the longest, and what is not theirs is hidden.
"""

from __future__ import annotations

import torch

from kernels.v4_step_cuda import V4Step
from worker.models.deepseek_v4_compressor import CompressorWeights, compressed_rows, pooled
from worker.models.deepseek_v4_config import DeepseekV4Config
from worker.models.deepseek_v4_geometry import (
    CSA_PENDING,
    CSA_ROW,
    HCA_PENDING,
    HCA_ROW,
    INDEX_KEY,
    INDEX_PENDING,
    RAW_ROW,
)
from worker.models.deepseek_v4_indexer import choose
from worker.models.deepseek_v4_projections import AttentionWeights, LayerRope, Projected
from worker.models.deepseek_v4_reads import Reads
from worker.models.deepseek_v4_step_rows import StepReads

_PRODUCTS = 1 << 25  # products of queries and index keys that are held together: 128 MiB


def attend_decode(
    step: Projected,
    layer: int,
    weights: AttentionWeights,
    config: DeepseekV4Config,
    rope: LayerRope,
    reads: Reads,
    kernels: V4Step | None = None,
) -> torch.Tensor:
    """The decode rows' attention, [B, heads, dim] float32. Their raw and pending rows are kept already; the blocks that
    they complete are kept here, and each row sees its own.
    """
    q = step.q[reads.rows]
    rows, hidden = reads.window(layer, RAW_ROW, config.window)
    if weights.compressor is not None:
        more = _compressed(step, layer, weights, config, rope, reads, kernels)
        if more is not None:
            rows, hidden = torch.cat((rows, more[0]), dim=1), torch.cat((hidden, more[1]), dim=1)
    scale = config.head_dim**-0.5
    if kernels is None:
        return _softmax_attention(q, rows, hidden, weights.sink, scale)
    shares = kernels.softmax(_product(q, rows.transpose(1, 2)), hidden, weights.sink, scale)
    return _product(shares, rows)


def _compressed(
    step: Projected,
    layer: int,
    weights: AttentionWeights,
    config: DeepseekV4Config,
    rope: LayerRope,
    reads: Reads,
    kernels: V4Step | None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The compressed rows that each of B reads, [B, N, dim], and which of them are hidden from it, [B, N]; None where
    nobody has any yet."""
    assert weights.compressor is not None
    ratio, dtype, eps = weights.compressor.ratio, step.q.dtype, config.norm_eps
    row, pending = (HCA_ROW, HCA_PENDING) if weights.indexer is None else (CSA_ROW, CSA_PENDING)
    _complete(reads, layer, row, pending, weights.compressor, rope.frequencies, dtype, eps, kernels)
    if weights.indexer is not None:
        _complete(
            reads, layer, INDEX_KEY, INDEX_PENDING, weights.indexer.compressor, rope.frequencies, dtype, eps, kernels
        )
    most = reads.most_blocks(ratio)
    if not most:
        return None
    if weights.indexer is None or most <= config.index_topk:
        return reads.blocks(layer, row, ratio)
    assert step.index_q is not None and step.index_weights is not None
    scores = _scores(step.index_q[reads.rows], step.index_weights[reads.rows], layer, ratio, reads)
    visible, topk = reads.num_blocks(ratio), config.index_topk
    chosen = choose(scores, visible, topk) if kernels is None else kernels.choose(scores, visible, topk)
    return reads.chosen(layer, row, chosen)


def _complete(
    reads: Reads,
    layer: int,
    kind: str,
    pending_kind: str,
    weights: CompressorWeights,
    inverse_frequencies: torch.Tensor,
    dtype: torch.dtype,
    eps: float,
    kernels: V4Step | None,
) -> None:
    """Keeps the rows of the blocks whose last tokens are among the decode rows."""
    if kernels is not None and isinstance(reads, StepReads):
        reads.complete(layer, kind, pending_kind, weights, inverse_frequencies, eps, kernels)
        return
    done = reads.completed(weights.ratio)
    if done is None:
        return
    ratio, dim = weights.ratio, len(weights.norm)
    pending = reads.pending(layer, pending_kind, done, ratio * (1 + weights.overlap))  # [n, tokens, 2, width]
    shares = pending[:, -ratio:, :, -dim:]
    if weights.overlap:
        before = pending[:, :ratio, :, :dim]
        if done.some_first:  # before block 0 comes nothing: values 0 of weight 0
            first = (done.blocks == 0).view(-1, 1, 1)
            values, scores = before.unbind(2)
            before = torch.stack((values.masked_fill(first, 0), scores.masked_fill(first, -torch.inf)), dim=2)
        shares = torch.cat((before, shares), dim=1)
    rows = compressed_rows(pooled(shares), done.blocks, weights, inverse_frequencies, dtype, eps)
    reads.keep_blocks(layer, kind, done, rows)


def _scores(queries: torch.Tensor, head_weights: torch.Tensor, layer: int, ratio: int, reads: Reads) -> torch.Tensor:
    """queries [B, heads, dim], head_weights [B, heads] -> [B, N] float32, of all rows of pages with whole blocks of the
    longest sequence. Behind a sequence's own rows it may be anything, NaN included.
    """
    num_queries, heads, _ = queries.shape
    scores = []
    for keys in reads.key_pages(layer, INDEX_KEY, ratio, max(1, _PRODUCTS // (num_queries * heads))):
        products = _product(queries, keys.transpose(1, 2)).relu_()
        scores.append(torch.bmm(head_weights.unsqueeze(1), products).squeeze(1))
    return torch.cat(scores, dim=1) if len(scores) > 1 else scores[0]


def _softmax_attention(
    q: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor, sink: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """q [B, heads, dim] over rows [B, N, dim], keys and values, one of each at least not hidden [B, N] -> float32."""
    scores = _product(q, rows.transpose(1, 2)).mul_(sm_scale).masked_fill_(hidden.unsqueeze(1), -torch.inf)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink.view(1, -1, 1))
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True) + (sink.view(1, -1, 1) - top).exp()
    return _product(weights, rows).div_(total)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a [B, M, K] @ b [B, K, N] -> float32, accumulated so. On a GPU, of 16-bit rows, ``a`` is rounded to their dtype
    and none is widened; elsewhere both are."""
    if b.is_cuda and b.dtype != torch.float32:
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
