"""Hyper-connections: a layer reads one vector out of several residual streams and writes back into all of them.

The streams are mixed by a matrix whose rows and columns nearly sum to one (Sinkhorn & Knopp 1967), so that no stream
grows with depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.hyper_cuda import mix
from worker.models.deepseek_v4_config import DeepseekV4Config
from worker.models.layers import Tiles, linear


class HyperWeights(NamedTuple):
    """Float32. Of a sublayer: fn [(2 + h) h, h d], base [(2 + h) h], scale [3]; of the head: [h, h d], [h], [1]."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


class Mixing(NamedTuple):
    """How one sublayer reads and writes the h streams. All float32.

    Attributes:
        read: [R, h], weights of the streams in the sublayer's input.
        write: [R, h], weights of its output in each stream.
        carry: [R, h, h], weight of stream j (axis 1) in the new stream k (axis 2); columns sum to one.
    """

    read: torch.Tensor
    write: torch.Tensor
    carry: torch.Tensor


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis, without a weight, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def mixing(streams: torch.Tensor, weights: HyperWeights, config: DeepseekV4Config, tiles: Tiles) -> Mixing:
    """streams [R, h, d] -> how the sublayer with these weights reads and writes them. On a GPU by a kernel: balancing
    a matrix of 4 x 4 takes 120 operations of PyTorch."""
    h, eps = config.hc_mult, config.hc_eps
    values = linear(rms(streams.flatten(1), config.norm_eps), weights.fn, None, tiles)
    if values.is_cuda:
        return Mixing(*mix(values, weights.base, weights.scale, iterations=config.sinkhorn_iterations, eps=eps))
    read, write, carry = (
        values[:, at] * scale + weights.base[at]
        for at, scale in zip((slice(h), slice(h, 2 * h), slice(2 * h, None)), weights.scale, strict=True)
    )
    return Mixing(
        read=torch.sigmoid(read) + eps,
        write=2 * torch.sigmoid(write),
        carry=_balanced(carry.view(-1, h, h), iterations=config.sinkhorn_iterations, eps=eps),
    )


def _balanced(logits: torch.Tensor, *, iterations: int, eps: float) -> torch.Tensor:
    """[R, h, h] -> rows and columns that sum to about one, columns last."""
    matrix = logits.softmax(-1).add_(eps)
    matrix.div_(matrix.sum(-2, keepdim=True).add_(eps))
    for _ in range(iterations - 1):
        matrix.div_(matrix.sum(-1, keepdim=True).add_(eps))
        matrix.div_(matrix.sum(-2, keepdim=True).add_(eps))
    return matrix


def read_streams(streams: torch.Tensor, read: torch.Tensor) -> torch.Tensor:
    """sum_j read[j] streams[j]: [R, h, d] and [R, h] -> [R, d] in the streams' dtype."""
    return (read.unsqueeze(-1) * streams.float()).sum(1).to(streams.dtype)


def write_streams(streams: torch.Tensor, y: torch.Tensor, by: Mixing) -> torch.Tensor:
    """write[k] y + sum_j carry[j, k] streams[j]: [R, h, d] and [R, d] -> [R, h, d] in the streams' dtype."""
    # Elementwise, not a product of h x h matrices: a row's bits must not depend on the rows beside it.
    carried = (by.carry.unsqueeze(-1) * streams.float().unsqueeze(2)).sum(1)
    return (by.write.unsqueeze(-1) * y.float().unsqueeze(1) + carried).to(streams.dtype)


def head_streams(streams: torch.Tensor, weights: HyperWeights, config: DeepseekV4Config, tiles: Tiles) -> torch.Tensor:
    """[R, h, d] behind the last layer -> [R, d], what the final norm reads."""
    values = linear(rms(streams.flatten(1), config.norm_eps), weights.fn, None, tiles)
    return read_streams(streams, torch.sigmoid(values * weights.scale + weights.base) + config.hc_eps)
