"""The products of few rows (csrc/linear_few.cuh), run on a CPU lane by lane, and the checks of their wrapper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels.cells import Cell
from kernels.errors import ArgumentError
from kernels.linear_cuda import FewLinear, LinearWeight, dequantized, linear_few, quantized
from tests.kernels.emulator import Emulator, needs_compiler

BUILT: dict[Cell, Emulator] = {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    BUILT.clear()
    return tmp_path_factory.mktemp("linear")


def library(cell: Cell, folder: Path) -> Emulator:
    if cell not in BUILT:
        BUILT[cell] = Emulator.build("linear_few.cpp", folder, [f"-D{name}={value}" for name, value in cell.defines])
    return BUILT[cell]


def run(
    few: FewLinear, folder: Path, x: torch.Tensor, residual: torch.Tensor | None, seed: int, ctas: int = 0
) -> torch.Tensor:
    out = torch.full((len(x), few.linear.width), float("nan"), dtype=x.dtype)
    few.set_call(x, out, residual)
    library(few.cell, folder).call("linear", ctas or few.ctas, few.arguments, seed=seed)
    return out


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_products_are_the_references(folder: Path, kind: str, fp8: bool, rows: int) -> None:
    torch.manual_seed(rows)
    n, k = (256, 384) if fp8 else (88 if kind != "gated" else 96, 352)
    dtype = torch.bfloat16
    weight = torch.randn(n, k).to(dtype)
    codes, scales = quantized(weight) if fp8 else (weight, None)
    linear = LinearWeight(
        codes,
        scales,
        bias=torch.randn(n).to(dtype),
        gated=kind == "gated",
    )
    few = FewLinear(linear, dtype)
    x = torch.randn(rows, 2 * k).to(dtype)[:, k:]
    residual = torch.randn(rows, n).to(dtype) if kind == "plain" else None
    got = run(few, folder, x, residual, seed=rows)
    for ctas in (1, 3, 50):  # several tiles each, some none
        assert torch.equal(run(few, folder, x, residual, seed=rows, ctas=ctas), got)
    exact = linear_few(x.double(), _as_doubles(linear), None if residual is None else residual.double())
    error = (got.double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < (1e-2 if linear.gated else 6e-3), error  # gate, silu, up and their product are rounded each
    assert (got - linear_few(x, linear, residual)).abs().max() <= 2**-5 * exact.abs().max()


def _as_doubles(linear: LinearWeight) -> LinearWeight:
    def wide(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.double()

    weight = dequantized(linear.weight, linear.scales, torch.float32).double()
    return replace(linear, weight=weight, scales=None, bias=wide(linear.bias))


@needs_compiler
def test_every_code_is_read_exactly(folder: Path) -> None:
    """A row of weights that holds each e4m3 code, subnormal ones too, against unit vectors."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    weight = codes.view(torch.float8_e4m3fn).repeat(128, 1)
    few = FewLinear(LinearWeight(weight, torch.full((1, 2), 2.0)), torch.bfloat16)
    for first in range(0, 256, 8):
        x = torch.zeros(8, 256, dtype=torch.bfloat16)
        x[torch.arange(8), first + torch.arange(8)] = 1.0
        got = run(few, folder, x, None, seed=0)
        assert torch.equal(got, 2 * weight[:, first : first + 8].to(torch.bfloat16).t())


@needs_compiler
@pytest.mark.parametrize("limit", [6, 7])
def test_another_weight_is_asked_for(folder: Path, limit: int) -> None:
    """It changes nothing; what it touches lies inside that weight, else the emulator ends."""
    few = FewLinear(LinearWeight(torch.randn(40, 64).to(torch.bfloat16)), torch.bfloat16)
    x = torch.randn(2, 64).to(torch.bfloat16)
    want = run(few, folder, x, None, seed=0)
    few.prefetch(torch.zeros(100_008, dtype=torch.bfloat16), torch.tensor([3, 4], dtype=torch.int32), limit)
    assert torch.equal(run(few, folder, x, None, seed=0), want)
    with pytest.raises(ArgumentError, match="multiples of 16"):
        few.prefetch(torch.zeros(9, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32), 1)


@needs_compiler
def test_a_row_may_be_added_to_itself(folder: Path) -> None:
    linear = LinearWeight(torch.randn(32, 64).to(torch.bfloat16))
    x, y = torch.randn(2, 64).to(torch.bfloat16), torch.randn(2, 32).to(torch.bfloat16)
    want = linear_few(x, linear, y)
    few = FewLinear(linear, torch.bfloat16)
    few.set_call(x, y, y)
    library(few.cell, folder).call("linear", 2, few.arguments)
    assert (y.float() - want.float()).abs().max() <= 0.13


@pytest.mark.parametrize(
    "linear",
    [
        LinearWeight(torch.zeros(8, 40, dtype=torch.bfloat16)),
        LinearWeight(torch.zeros(8, 64)),
        LinearWeight(torch.zeros(64, 8, dtype=torch.bfloat16).t()),
        LinearWeight(torch.zeros(128, 128, dtype=torch.float8_e4m3fn), torch.ones(1, 2)),
        LinearWeight(torch.zeros(8, 64, dtype=torch.bfloat16), bias=torch.zeros(8)),
    ],
)
def test_weights_that_do_not_fit_are_refused(linear: LinearWeight) -> None:
    with pytest.raises(ArgumentError, match="does not fit"):
        FewLinear(linear, torch.bfloat16)


def test_calls_that_do_not_fit_are_refused() -> None:
    few = FewLinear(LinearWeight(torch.zeros(32, 64, dtype=torch.bfloat16)), torch.bfloat16)
    x, out = torch.zeros(9, 64, dtype=torch.bfloat16), torch.zeros(9, 32, dtype=torch.bfloat16)
    for bad in ((x, out), (x[:2, :32], out[:2]), (x[:2], out[:3]), (x[:2].float(), out[:2])):
        with pytest.raises(ArgumentError, match="does not fit the product"):
            few.set_call(*bad, None)
