"""DeepSeek-V4's compressors: blocks of ``ratio`` tokens become one row by a softmax over tokens, channel by channel.

A token's share waits as a *pending row* [2, width] float32: its values and its scores, the place in the block counted
in. Block b of ratio m pools tokens [m b, m (b + 1)). With overlap (CSA) a pending row is two shares wide: the first
half goes to the next block, the second to the token's own, and so block b also pools the first halves of block b - 1.
Blocks are counted from position 0, whatever is cached and however a prompt is cut.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from worker.models.deepseek_v4_hyper import rms
from worker.models.deepseek_v4_rope import rotate_last, rotation
from worker.models.deepseek_v4_rows import LayerSpan
from worker.models.layers import Tiles, linear


class CompressorWeights(NamedTuple):
    """Float32: wkv, wgate [width, hidden], ape [ratio, width], norm [dim]; width is dim, or 2 dim with overlap."""

    wkv: torch.Tensor
    wgate: torch.Tensor
    ape: torch.Tensor
    norm: torch.Tensor

    @property
    def ratio(self) -> int:
        return len(self.ape)

    @property
    def overlap(self) -> bool:
        return len(self.wkv) == 2 * len(self.norm)


def pending_rows(x: torch.Tensor, positions: torch.Tensor, weights: CompressorWeights, tiles: Tiles) -> torch.Tensor:
    """x [R, hidden], the attention's own input, at positions [R] -> [R, 2, width] float32."""
    wide = x.float()
    values, scores = (linear(wide, weight, None, tiles) for weight in (weights.wkv, weights.wgate))
    return torch.stack((values, scores + weights.ape[positions % weights.ratio]), dim=1)


def first_needed(num_tokens: int, weights: CompressorWeights) -> int:
    """First token whose pending row the next block of a sequence of ``num_tokens`` reads."""
    return max(0, num_tokens // weights.ratio - weights.overlap) * weights.ratio


def pool(pending: torch.Tensor, first_token: int, blocks: range, weights: CompressorWeights) -> torch.Tensor:
    """The pooled values of blocks [len(blocks), dim] float32.

    Args:
        pending: [N, 2, width] of tokens [first_token, first_token + N), which hold all that the blocks pool;
            first_token is a multiple of the ratio.
    """
    ratio, dim = weights.ratio, len(weights.norm)
    by_block = pending[: len(pending) // ratio * ratio].view(-1, ratio, *pending.shape[1:])  # by block held
    first = blocks.start - first_token // ratio
    assert blocks.start == 0 or first >= weights.overlap, "the block before is not held"
    own = by_block[first : first + len(blocks), ..., -dim:]
    if weights.overlap:
        before = by_block[max(0, first - 1) : first + len(blocks) - 1, ..., :dim]
        if blocks.start == 0:  # nothing comes before: values 0 of weight 0
            nothing = before.new_zeros((1, *own.shape[1:]))
            nothing[:, :, 1] = -torch.inf
            before = torch.cat((nothing, before))
        own = torch.cat((before, own), dim=1)
    return pooled(own)


def pooled(shares: torch.Tensor) -> torch.Tensor:
    """[blocks, tokens, 2, dim] float32, values and scores, -> [blocks, dim]."""
    values, scores = shares.unbind(2)
    return (scores.softmax(1) * values).sum(1)


def compressed_rows(
    values: torch.Tensor,
    blocks: torch.Tensor,
    weights: CompressorWeights,
    inverse_frequencies: torch.Tensor,
    dtype: torch.dtype,
    eps: float,
) -> torch.Tensor:
    """Pooled values [B, dim] of blocks [B] -> rows [B, 1, dim] as attention reads them: normed, rotated to their
    block's first token.
    """
    normed = (rms(values.to(dtype), eps) * weights.norm).to(dtype)
    return rotate_last(normed, rotation(inverse_frequencies, blocks * weights.ratio)).unsqueeze(1)


def complete(
    own: torch.Tensor,
    pending_kind: str,
    kind: str,
    at: LayerSpan,
    weights: CompressorWeights,
    inverse_frequencies: torch.Tensor,
    dtype: torch.dtype,
    eps: float,
) -> torch.Tensor:
    """The rows of the blocks that the span completes, [at.end // ratio - at.start // ratio, 1, dim]; they are kept.

    Args:
        own: [T, 2, width] the span's pending rows.
    """
    blocks = range(at.start // weights.ratio, at.end // weights.ratio)
    if not blocks:
        return own.new_empty((0, 1, len(weights.norm)), dtype=dtype)
    first = first_needed(at.start, weights)
    pending = torch.cat((at.held(pending_kind, first, at.start), own))
    values = pool(pending, first, blocks, weights)
    numbers = torch.arange(blocks.start, blocks.stop, device=own.device)
    rows = compressed_rows(values, numbers, weights, inverse_frequencies, dtype, eps)
    at.keep_blocks(kind, blocks.start, rows)
    return rows
