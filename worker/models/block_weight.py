"""Weights in FP8 blocks of 128 x 128, and nothing else of them (DeepSeek-V3 report, section 3.3).

Decode steps of few rows read the codes (kernels/linear_cuda.py). Every other product makes the weight anew, in the
dtype of its rows, from memory to memory: several times the bytes of the codes alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.linear_cuda import BLOCK, quantized
from protos.errors import ModelError


@dataclass(frozen=True)
class BlockWeight:
    """codes: e4m3 [N, K]; scales: f32 [ceil(N / 128), K / 128]; dtype: of the weight that they stand for."""

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @staticmethod
    def of(weight: torch.Tensor, name: str) -> BlockWeight:
        """weight: [N, K], K a multiple of 128; else ModelError."""
        if weight.shape[1] % BLOCK:
            raise ModelError(
                f"{name} does not go into blocks of FP8",
                reason="NO_BLOCKS",
                given=f"rows of {weight.shape[1]}",
                allowed=f"rows of a multiple of {BLOCK}",
            )
        codes, scales = quantized(weight)
        return BlockWeight(codes, scales, weight.dtype)

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()

    def dense(self) -> torch.Tensor:
        """The weight, [N, K], made anew: each value rounded once."""
        n, k = self.codes.shape
        whole = n // BLOCK * BLOCK
        out = torch.empty((n, k), dtype=self.dtype, device=self.codes.device)
        for first, end, rows in (
            (0, whole, BLOCK),
            (whole, n, n - whole),
        ):  # the last block of rows may be a part of one
            if first == end:
                continue
            blocks = (-1, rows, k // BLOCK, BLOCK)
            scales = self.scales[first // BLOCK : -(-end // BLOCK), None, :, None]
            wide = self.codes[first:end].to(self.dtype).view(blocks)  # exact
            torch.mul(wide, scales, out=out[first:end].view(blocks))
        return out


Weight = torch.Tensor | BlockWeight


def dense(weight: Weight) -> torch.Tensor:
    return weight.dense() if isinstance(weight, BlockWeight) else weight
