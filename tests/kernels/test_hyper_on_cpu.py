"""The kernel of hyper-connections (csrc/hyper.cu), run on a CPU thread by thread, beside PyTorch; and its checks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.errors import ArgumentError
from kernels.hyper_cells import hyper_cell
from kernels.hyper_cuda import mix, mix_launch
from tests.kernels.emulator import Emulator, needs_compiler
from worker.models.deepseek_v4_hyper import HyperWeights, mixing


def weights(streams: int, hidden: int, seed: int) -> HyperWeights:
    generator = torch.Generator().manual_seed(seed)
    width = (2 + streams) * streams
    shapes = ((width, streams * hidden), (width,), (3,))
    fn, base, scale = (torch.randn(shape, generator=generator) for shape in shapes)
    return HyperWeights(fn * (streams * hidden) ** -0.5, base, scale)


@needs_compiler
@pytest.mark.parametrize(
    ("streams", "iterations", "eps", "rows"), [(4, 20, 1e-6, 1), (4, 20, 1e-6, 130), (4, 1, 1e-6, 64), (2, 3, 1e-2, 65)]
)
def test_a_row_is_mixed_as_by_pytorch(streams: int, iterations: int, eps: float, rows: int) -> None:
    hidden, by = 16, weights(streams, 16, seed=rows)
    config: Any = SimpleNamespace(hc_mult=streams, hc_eps=eps, norm_eps=1e-6, sinkhorn_iterations=iterations)
    x = 3 * torch.randn(rows, streams, hidden, generator=torch.Generator().manual_seed(7))
    want = mixing(x, by, config, ((0, rows),))
    flat = x.flatten(1)
    values = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6) @ by.fn.t()
    cell, ctas, mixed = mix_launch(values, by.base, by.scale, iterations=iterations, eps=eps)
    library = Emulator.of(cell)
    library.call("hyper", ctas, values, by.base, by.scale, *mixed, rows)
    for name, got, expected in zip(mixed._fields, mixed, want, strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < 2e-6, name


def test_what_does_not_fit_is_refused() -> None:
    values, base, scale = torch.zeros(5, 24), torch.zeros(24), torch.zeros(3)
    with pytest.raises(ArgumentError, match="GPU"):
        mix(values, base, scale, iterations=20, eps=1e-6)
    for wrong in ((values[:, :23], base, scale), (values, base[:23], scale), (values, base, scale[:2])):
        with pytest.raises(ArgumentError, match="do not fit"):
            mix_launch(*wrong, iterations=20, eps=1e-6)
    with pytest.raises(ArgumentError, match="do not fit"):
        mix_launch(values.half(), base, scale, iterations=20, eps=1e-6)
    with pytest.raises(ArgumentError, match="streams"):
        hyper_cell(9, 20, 1e-6)
