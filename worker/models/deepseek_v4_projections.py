"""What an attention layer of DeepSeek-V4 computes of single rows, before and behind the attention itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker.batch import Batch
from worker.models.deepseek_v4_compressor import CompressorWeights, pending_rows
from worker.models.deepseek_v4_config import DeepseekV4Config
from worker.models.deepseek_v4_hyper import rms
from worker.models.deepseek_v4_rope import Rotation, rotate_last
from worker.models.layers import Tiles, linear


class IndexerWeights(NamedTuple):
    """wq_b [heads * dim, q_lora_rank], weights_proj [heads, hidden]."""

    wq_b: torch.Tensor
    weights_proj: torch.Tensor
    compressor: CompressorWeights


class AttentionWeights(NamedTuple):
    """Projections in the model's dtype; norms and sink float32. compressor: ratio above 0; indexer: CSA."""

    wq_a: torch.Tensor
    q_norm: torch.Tensor
    wq_b: torch.Tensor
    wkv: torch.Tensor
    kv_norm: torch.Tensor
    sink: torch.Tensor
    wo_a: torch.Tensor
    wo_b: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


class LayerRope(NamedTuple):
    """A layer's frequencies [rope_dim / 2], and their rotation of the step's positions."""

    frequencies: torch.Tensor
    step: Rotation


class Projected(NamedTuple):
    """What a layer computes for all rows of a step at once, before any attention.

    Attributes:
        q: [R, heads, dim]. raw: [R, 1, dim]. pending: [R, 2, width] float32, of layers with a compressor.
        index_q: [R, index_heads, index_dim], index_weights: [R, index_heads] float32, index_pending: [R, 2, width]
            float32, of CSA layers.
    """

    q: torch.Tensor
    raw: torch.Tensor
    pending: torch.Tensor | None = None
    index_q: torch.Tensor | None = None
    index_weights: torch.Tensor | None = None
    index_pending: torch.Tensor | None = None


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, in float32 and rounded once (Zhang & Sennrich 2019); weight is float32."""
    return (rms(x, eps) * weight).to(x.dtype)


def project(
    x: torch.Tensor, weights: AttentionWeights, config: DeepseekV4Config, batch: Batch, rope: LayerRope
) -> Projected:
    tiles, eps = batch.tiles, config.norm_eps
    q_low = normed(linear(x, weights.wq_a, None, tiles), weights.q_norm, eps)
    q = linear(q_low, weights.wq_b, None, tiles).view(-1, config.num_heads, config.head_dim)
    step = Projected(
        q=rotate_last(rms(q, eps).to(x.dtype), rope.step),
        raw=rotate_last(normed(linear(x, weights.wkv, None, tiles), weights.kv_norm, eps), rope.step).unsqueeze(1),
    )
    if weights.compressor is not None:
        step = step._replace(pending=pending_rows(x, batch.positions, weights.compressor, tiles))
    if weights.indexer is not None:
        index_q = linear(q_low, weights.indexer.wq_b, None, tiles)
        index_weights = linear(x, weights.indexer.weights_proj, None, tiles).float()
        step = step._replace(
            index_q=rotate_last(index_q.view(-1, config.index_heads, config.index_dim), rope.step),
            index_weights=index_weights * (config.index_dim * config.index_heads) ** -0.5,
            index_pending=pending_rows(x, batch.positions, weights.indexer.compressor, tiles),
        )
    return step


def project_out(out: torch.Tensor, weights: AttentionWeights, config: DeepseekV4Config, tiles: Tiles) -> torch.Tensor:
    """[R, heads, dim] -> [R, hidden]: consecutive heads are a group with a projection of its own, then all are one."""
    groups = out.reshape(len(out), config.o_groups, -1).unbind(1)
    shares = weights.wo_a.chunk(config.o_groups)
    low = [linear(group, share, None, tiles) for group, share in zip(groups, shares, strict=True)]
    return linear(torch.cat(low, dim=-1), weights.wo_b, None, tiles)
