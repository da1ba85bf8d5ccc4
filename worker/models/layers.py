"""Row-wise building blocks that the model families share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, overload

import torch
import torch.nn.functional as F

from protos.errors import ModelError
from worker.models.block_weight import Weight, dense

Tiles = tuple[tuple[int, int], ...]

ONE_THREAD_ELEMENTS = 32767
"""ATen leaves an elementwise operation to one thread below its grain (at::internal::GRAIN_SIZE, 32768 elements)."""


class Weights(Protocol):
    """A model's tensors by name, each taken out once; a dict is one."""

    @overload
    def pop(self, name: str, /) -> torch.Tensor: ...

    @overload
    def pop(self, name: str, default: None, /) -> torch.Tensor | None: ...


def linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, tiles: Tiles) -> torch.Tensor:
    """x [R, in] @ weight [out, in]^T + bias [out] -> [R, out], one product per tile of rows."""
    weight = dense(weight)
    if len(tiles) == 1:
        return F.linear(x, weight, bias)
    return torch.cat([F.linear(x[first:end], weight, bias) for first, end in tiles])


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
    """silu(gate) * up of [R, I] each -> [R, I], new (Shazeer 2020, "GLU Variants Improve Transformer").

    ``deterministic``: in pieces of whole rows, small enough for one thread. ATen cuts larger tensors between threads at
    any element, and computes what a thread's share leaves over of a vector register by another exp.
    """
    if not deterministic:
        return F.silu(gate) * up
    out = gate.new_empty(gate.shape)
    step = max(1, ONE_THREAD_ELEMENTS // gate.shape[-1])
    for a in range(0, len(gate), step):
        torch.mul(F.silu(gate[a : a + step]), up[a : a + step], out=out[a : a + step])
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, statistics in float32 (Zhang & Sennrich 2019)."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [R, heads, dim] by cos, sin [R, 1, dim/2]; pairs are (i, i + dim/2), as in HF weights."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rope_tables(config: Mapping[str, Any], dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each [num_positions, dim/2] float32, of position * inverse frequency.

    Understands both spellings of Hugging Face configs: ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``.

    Raises:
        ModelError: a scaling that is not built (ROPE_NOT_BUILT).
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "llama3") or partial != 1.0:
        raise ModelError(
            "this rotary embedding is not built",
            reason="ROPE_NOT_BUILT",
            given=f"rope_type {kind!r}, partial_rotary_factor {partial}",
            allowed="rope_type default or llama3 over the whole head",
        )
    inverse = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind == "llama3":
        inverse = _llama3_scaling(inverse, rope)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse)
    return angles.cos(), angles.sin()


def _llama3_scaling(inverse: torch.Tensor, rope: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1's stretch: long wavelengths divided by ``factor``, short ones kept, between them a linear blend."""
    try:
        factor, low, high, original = (
            float(rope[key])
            for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError("rope_type llama3 lacks a parameter", given=dict(rope), allowed=str(error)) from None
    wavelength = 2 * math.pi / inverse
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return inverse / factor * (1 - blend) + inverse * blend
