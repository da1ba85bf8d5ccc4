"""What an attention layer of DeepSeek-V4 computes of single rows, before and behind the attention itself."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.v4_step_cuda import V4Step
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
    x: torch.Tensor,
    weights: AttentionWeights,
    config: DeepseekV4Config,
    batch: Batch,
    rope: LayerRope,
    kernels: V4Step | None = None,
) -> Projected:
    """``kernels``: take them for norms and rotations."""
    tiles, eps, (cos, sin) = batch.tiles, config.norm_eps, rope.step
    q_low, raw = (linear(x, weight, None, tiles) for weight in (weights.wq_a, weights.wkv))
    if kernels is None:
        q_low = normed(q_low, weights.q_norm, eps)
        q = linear(q_low, weights.wq_b, None, tiles).view(-1, config.num_heads, config.head_dim)
        q = rotate_last(rms(q, eps).to(x.dtype), rope.step)
        raw = rotate_last(normed(raw, weights.kv_norm, eps), rope.step).unsqueeze(1)
    else:
        none = cos[:, :0]
        q_low = kernels.rotate(q_low.unsqueeze(1), none, none, normed=True, weight=weights.q_norm, eps=eps).squeeze(1)
        q = linear(q_low, weights.wq_b, None, tiles).view(-1, config.num_heads, config.head_dim)
        q = kernels.rotate(q, cos, sin, normed=True, eps=eps)
        raw = kernels.rotate(raw.unsqueeze(1), cos, sin, normed=True, weight=weights.kv_norm, eps=eps)
    step = Projected(q=q, raw=raw)
    if weights.compressor is not None:
        step = step._replace(pending=pending_rows(x, batch.positions, weights.compressor, tiles))
    if weights.indexer is not None:
        index_q = linear(q_low, weights.indexer.wq_b, None, tiles).view(-1, config.index_heads, config.index_dim)
        index_weights = linear(x, weights.indexer.weights_proj, None, tiles).float()
        step = step._replace(
            index_q=rotate_last(index_q, rope.step) if kernels is None else kernels.rotate(index_q, cos, sin),
            index_weights=index_weights * (config.index_dim * config.index_heads) ** -0.5,
            index_pending=pending_rows(x, batch.positions, weights.indexer.compressor, tiles),
        )
    return step


def project_out(
    out: torch.Tensor, weights: AttentionWeights, config: DeepseekV4Config, tiles: Tiles, *, together: bool = False
) -> torch.Tensor:
    """[R, heads, dim] -> [R, hidden]: consecutive heads are a group with a projection of its own, then all are one.

    ``together``: the groups' products in one call, whose shape no tile bounds.
    """
    groups = out.reshape(len(out), config.o_groups, -1)
    if together:
        shares = weights.wo_a.view(config.o_groups, -1, groups.shape[-1])
        low = torch.bmm(groups.transpose(0, 1), shares.transpose(1, 2)).transpose(0, 1).flatten(1)
    else:
        pairs = zip(groups.unbind(1), weights.wo_a.chunk(config.o_groups), strict=True)
        low = torch.cat([linear(group, share, None, tiles) for group, share in pairs], dim=-1)
    return linear(low, weights.wo_b, None, tiles)
