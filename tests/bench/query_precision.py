"""What the integer reader's number formats cost: `python -m tests.bench.query_precision` (CPU, about a minute).

Exact arithmetic emulation of csrc/packed_consumer.cuh with q and P of 16 bits (hi and lo bytes in two columns of the
tensor core, four vectors a column set) or of 8 bits (one column, eight vectors a set). Prints the relative error of the
output against float64 on the same dequantised rows, before any rounding to the model's dtype: the median and the worst
over vectors, for several spreads of the logits (standard deviation, natural units).
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from kernels import turboquant

TILE = 32  # tokens whose probabilities share an exponent
FORMATS = {"q16 P16": (32500, 65280), "q8 P16": (127, 65280), "q16 P8": (32500, 255), "q8 P8": (127, 255)}


def attend(q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor, q_max: int, p_max: int) -> Tensor:
    """q f64 [m, d], scaled to natural logits; k, v f64 [n, d] without scales [n]. Integers of q_max and p_max."""
    step = q.abs().amax(-1, keepdim=True) / q_max
    scores = ((q / step).round() @ k.T) * step * k_scale
    tiles = scores.view(len(q), -1, TILE)
    top = tiles.amax(-1, keepdim=True)
    p = (tiles - top).exp()
    largest = v_scale.view(1, -1, TILE).amax(-1, keepdim=True)
    integers = (p * v_scale.view(1, -1, TILE) * (p_max / largest)).round()
    weight = (top - scores.amax(-1).view(-1, 1, 1)).exp()
    values = (integers * (largest / p_max) * weight).reshape(len(q), -1) @ v
    return values / (p * weight).sum((1, 2)).unsqueeze(-1)


def rows_of(n: int, dim: int, bits: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Decoded rotated rows f64 [n, dim] and their scales f64 [n]."""
    rows = torch.randn(n, dim, generator=generator) * torch.exp(0.3 * torch.randn(n, 1, generator=generator))
    packed = turboquant.pack(rows, bits)
    codes = turboquant.unpack_codes(packed, dim, bits)
    return turboquant.code_values(dim, bits)[codes.long()].double(), packed.scales[:, 0].double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vectors", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(options.seed)
    print("| d | spread | " + " | ".join(FORMATS) + " |")
    print("|---|---|" + "---|" * len(FORMATS))
    for dim in (64, 128, 256):
        k, k_scale = rows_of(options.tokens, dim, 4, generator)
        v, v_scale = rows_of(options.tokens, dim, 4, generator)
        for spread in (0.5, 2, 5, 10, 20):
            q = torch.randn(options.vectors, dim, generator=generator).double()
            q *= spread / ((q @ k.T) * k_scale).std()
            exact = torch.softmax((q @ k.T) * k_scale, -1) @ (v * v_scale.unsqueeze(-1))
            cells = []
            for q_max, p_max in FORMATS.values():
                out = attend(q, k, k_scale, v, v_scale, q_max, p_max)
                error = (out - exact).norm(dim=-1) / exact.norm(dim=-1)
                cells.append(f"{error.median():.1e} / {error.max():.1e}")
            print(f"| {dim} | {spread} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
