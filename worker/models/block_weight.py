"""Weights in FP8 blocks of 128 x 128, and nothing else of them (DeepSeek-V3 report, section 3.3).

Decode steps of few rows read the codes (kernels/linear_cuda.py). Every other product makes the weight anew, in the
dtype of its rows, from memory to memory: several times the bytes of the codes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.linear_cuda import BLOCK, quantized
from protos.errors import ModelError

DEQUANTIZE = "hold it in bfloat16: --weights bf16"


@dataclass(frozen=True)
class BlockWeight:
    """codes: e4m3 [N, K]; padded_scales: f32 [ceil(N / 128), K / 128 and up to three more], contiguous, as kernels read
    them from wherever they lie; dtype: of the weight that they stand for, each value code * scale.
    """

    codes: torch.Tensor
    padded_scales: torch.Tensor
    dtype: torch.dtype

    @staticmethod
    def of(weight: torch.Tensor, name: str) -> BlockWeight:
        """weight: [N, K], K a multiple of 128; else ModelError (NO_BLOCKS). On torch's device "meta" too."""
        _demand_whole(weight.shape[1], name)
        if weight.is_meta:
            codes = weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn)
            scales = weight.new_empty((-(-len(weight) // BLOCK), weight.shape[1] // BLOCK), dtype=torch.float32)
        else:
            codes, scales = quantized(weight)
        return BlockWeight(codes, _padded(scales), weight.dtype)

    @staticmethod
    def joined(
        codes: Sequence[torch.Tensor], scales: Sequence[torch.Tensor], dtype: torch.dtype, name: str
    ) -> BlockWeight:
        """Weights in blocks, one below the other: codes e4m3 [N, K] and scales f32 [ceil(N / 128), K / 128] of each.

        Raises ModelError: NO_BLOCKS, K is no multiple of 128, or a block would be of two of them.
        """
        _demand_whole(codes[0].shape[1], name)
        if uneven := [len(part) for part in codes[:-1] if len(part) % BLOCK]:
            raise ModelError(
                f"{name} cannot be held in its blocks of FP8 as one: some would be of two weights",
                reason="NO_BLOCKS",
                given=f"{uneven[0]} rows",
                allowed=f"a multiple of {BLOCK}",
                hint=DEQUANTIZE,
            )
        return BlockWeight(torch.cat(list(codes)), _padded(torch.cat(list(scales))), dtype)

    @property
    def scales(self) -> torch.Tensor:
        """f32 [ceil(N / 128), K / 128], its rows a multiple of 16 bytes apart."""
        return self.padded_scales[:, : self.codes.shape[1] // BLOCK]

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


def _padded(scales: torch.Tensor) -> torch.Tensor:
    rows, columns = scales.shape
    out = scales.new_zeros(rows, -(-columns // 4) * 4)
    if not scales.is_meta:
        out[:, :columns] = scales
    return out


def _demand_whole(columns: int, name: str) -> None:
    if columns % BLOCK:
        raise ModelError(
            f"{name} does not go into blocks of FP8",
            reason="NO_BLOCKS",
            given=f"rows of {columns}",
            allowed=f"rows of a multiple of {BLOCK}",
            hint=DEQUANTIZE,
        )


Weight = torch.Tensor | BlockWeight


def dense(weight: Weight) -> torch.Tensor:
    return weight.dense() if isinstance(weight, BlockWeight) else weight
