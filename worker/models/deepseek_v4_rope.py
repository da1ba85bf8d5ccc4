"""DeepSeek-V4's rotary embedding: interleaved pairs, on the last dims of a row.

Angles are computed for the positions of a step, not tabled: a table for a million positions would take 256 MB a base.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from worker.models.deepseek_v4_config import DeepseekV4Config, Yarn
from worker.models.deepseek_v4_pieces import by_rows


class Rotation(NamedTuple):
    """cos and sin [R, rope_dim / 2] float32 of a step's positions."""

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def inverse(self) -> Rotation:
        return Rotation(self.cos, -self.sin)


def layer_frequencies(config: DeepseekV4Config, ratio: int) -> torch.Tensor:
    """[rope_dim / 2] float32 of a layer: of everything that it rotates, compressed rows and the output included."""
    if not ratio:
        return frequencies(config.rope_dim, config.rope_theta, None)
    return frequencies(config.rope_dim, config.compress_rope_theta, config.yarn)


def frequencies(dim: int, theta: float, yarn: Yarn | None) -> torch.Tensor:
    """theta ^ (-2i / dim) for i < dim / 2, in float32 as the model was trained with, stretched by YaRN where asked.

    YaRN (Peng et al. 2023, section 3.2) divides the frequencies of slow dims by ``factor``, keeps those of fast ones,
    and blends in between; ``beta`` are turns within the original positions at which a dim counts as fast or slow.
    """
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if yarn is None:
        return inverse

    def dim_of(turns: float) -> float:
        return dim * math.log(yarn.original_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dim - 1)
    span = high - low or 1e-3  # a step, where both fall on one dim
    slow = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return inverse / yarn.factor * slow + inverse * (1 - slow)


def rotation(inverse_frequencies: torch.Tensor, positions: torch.Tensor, *, deterministic: bool = False) -> Rotation:
    """Of positions [R], any integer dtype, below 2^24. ``deterministic``: see ``by_rows``."""
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    cos, sin = (by_rows(function, angles, deterministic=deterministic) for function in (torch.cos, torch.sin))
    return Rotation(cos, sin)


def rotate_last(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """x [R, ..., dim] -> same, new: its last rope_dim dims rotated, pairs (2i, 2i + 1), computed in float32."""
    rope_dim = 2 * by.cos.shape[-1]
    shape = (len(x), *([1] * (x.dim() - 2)), rope_dim // 2)
    cos, sin = by.cos.view(shape), by.sin.view(shape)
    wide = x[..., -rope_dim:].float()
    even, odd = wide[..., 0::2], wide[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((x[..., :-rope_dim], rotated.to(x.dtype)), dim=-1)
