"""DeepSeek-V4's quantised weights in float32: FP8 with a scale a block, FP4 with a scale for 32 values of a row.

Scales are powers of two (e8m0, a byte: the exponent plus 127) or float32. e8m0 is read as bytes, never as numbers of an
integer type: cast to one, every scale below 1 becomes 0.
"""

from __future__ import annotations

import torch

from protos.errors import ModelError
from worker.models.deepseek_v4_config import FP4_BLOCK

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of FP4's low three bits (OCP Microscaling Formats 1.0, section 5.3.3); bit 3 is the sign."""


def dequantized(weights: dict[str, torch.Tensor], name: str, block: tuple[int, int]) -> torch.Tensor:
    """Weight ``name`` ("....weight") by its sibling "....scale", float32, new.

    Args:
        block: rows and columns of an FP8 weight that share a scale.

    Raises:
        ModelError: BAD_TENSOR, the two do not fit together.
    """
    weight, scale = weights[name], weights[name.removesuffix("weight") + "scale"]
    if weight.dtype == torch.float8_e4m3fn:
        return dequantized_fp8(weight, scale, block)
    if weight.element_size() == 1:
        return dequantized_fp4(weight, scale)
    raise ModelError(
        f"tensor {name} has a scale but no quantised dtype",
        reason="BAD_TENSOR",
        given=weight.dtype,
        allowed="float8_e4m3fn, or packed FP4 in bytes",
    )


def dequantized_fp8(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """weight [O, I] float8_e4m3fn, scale [ceil(O / rows), ceil(I / columns)] -> [O, I] float32."""
    rows, columns = block
    _demand_shape(scale, (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)))
    wide = _scales(scale).repeat_interleave(rows, 0)[: len(weight)]
    return weight.float() * wide.repeat_interleave(columns, 1)[:, : weight.shape[1]]


def dequantized_fp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """packed [O, I / 2] bytes, the even column in the low half, scale [O, I / 32] -> [O, I] float32."""
    codes = packed.view(torch.uint8)
    _demand_shape(scale, (len(codes), codes.shape[1] * 2 // FP4_BLOCK))
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=packed.device)
    values = table[torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1).int()]
    return values * _scales(scale).repeat_interleave(FP4_BLOCK, 1)


def _scales(scale: torch.Tensor) -> torch.Tensor:
    """float32 of scales as stored; a byte of any name is e8m0."""
    if scale.element_size() == 1:
        return scale.view(torch.float8_e8m0fnu).float()
    return scale.float()


def _demand_shape(scale: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(scale.shape) != shape:
        raise ModelError(
            "a weight's scales do not fit it", reason="BAD_TENSOR", given=tuple(scale.shape), allowed=shape
        )
