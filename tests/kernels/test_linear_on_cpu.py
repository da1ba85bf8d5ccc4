"""Chains of products of few rows (csrc/linear_few.cuh), run on a CPU lane by lane, and the checks of their wrapper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from kernels.errors import ArgumentError
from kernels.linear_cuda import (
    LinearChain,
    LinearWeight,
    Link,
    LinkCall,
    Rotary,
    dequantized,
    linear_few,
    quantized,
    scale_rows,
    shared_plan,
)
from kernels.rope_append import AppendTo, RopeArgs, set_rope
from kernels.step_cells import LinearTiling, linear_tiling, step_cell
from tests.kernels.emulator import Emulator, EmulatorError, needs_compiler

BF16 = torch.bfloat16
EPS = 1e-5


def chain_of(*links: Link, arch: str = "sm_90a", tiling: LinearTiling | None = None, max_rows: int = 8) -> LinearChain:
    arrived = torch.zeros(1, dtype=torch.int32)
    return LinearChain(links, BF16, arrived, max_rows, arch=arch, tiling=tiling)


def launch(chain: LinearChain, calls: Sequence[LinkCall], ctas: int, seed: int) -> None:
    chain.set_call(*calls)
    shared = chain.plans[len(calls[0].x)].total
    Emulator.of(chain.cell).call("linear", ctas, shared, chain.arguments, seed=seed)
    assert int(chain._arrived) % 1024 == 0


def run(chain: LinearChain, x: torch.Tensor, residual: torch.Tensor | None, seed: int, ctas: int = 1) -> torch.Tensor:
    """Of a chain of one product."""
    out = torch.full((len(x), chain.links[0].linear.width), float("nan"), dtype=x.dtype)
    launch(chain, [LinkCall(x, out, residual)], ctas, seed)
    return out


def exact(x: torch.Tensor, link: Link, residual: torch.Tensor | None) -> torch.Tensor:
    """In float64, of weights as they are."""

    def wide(each: torch.Tensor | None) -> torch.Tensor | None:
        return None if each is None else each.double()

    linear = link.linear
    weight = dequantized(linear.weight, linear.scales, torch.float32).double()
    plain = replace(linear, weight=weight, scales=None, bias=wide(linear.bias))
    return linear_few(x.double(), plain, wide(residual), wide(link.norm), link.eps)


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max())


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("kind", ["plain", "gated"])
def test_products_are_the_references(kind: str, fp8: bool, rows: int) -> None:
    torch.manual_seed(rows)
    n, k = (256, 1664) if fp8 else (84 if kind != "gated" else 92, 1184)  # more than one stage, the last in part
    weight = torch.randn(n, k).to(BF16)
    codes, scales = quantized(weight) if fp8 else (weight, None)
    linear = LinearWeight(codes, scales, bias=torch.randn(n).to(BF16), gated=kind == "gated")
    link = Link(linear, norm=(1 + 0.1 * torch.randn(k)).to(BF16) if rows != 3 else None, eps=EPS)
    chain = chain_of(link)
    x = torch.randn(rows, 2 * k).to(BF16)[:, k:]
    residual = torch.randn(rows, n).to(BF16) if kind == "plain" else None
    got = run(chain, x, residual, seed=rows)
    for ctas in (3, 50):  # some have no tile
        assert torch.equal(run(chain, x, residual, seed=rows, ctas=ctas), got)
    want = exact(x, link, residual)
    # Gate, silu, up and their product are rounded each; so are a norm's two factors.
    assert worst(got, want) < (1e-2 if linear.gated else 6e-3)
    assert (got - linear_few(x, linear, residual, link.norm, EPS)).abs().max() <= 2**-5 * want.abs().max()


@needs_compiler
@pytest.mark.parametrize("fp8", [False, True])
def test_rows_do_not_know_of_each_other(fp8: bool) -> None:
    torch.manual_seed(1)
    weight = torch.randn(128, 1152).to(BF16)
    chain = chain_of(
        Link(LinearWeight(*(quantized(weight) if fp8 else (weight, None))), torch.ones(1152).to(BF16), EPS)
    )
    x = torch.randn(8, 1152).to(BF16)
    alone = torch.cat([run(chain, row.unsqueeze(0), None, seed=0) for row in x])
    assert torch.equal(run(chain, x, None, seed=3), alone)
    assert torch.equal(run(chain, x.flip(0), None, seed=3).flip(0), alone)


def layer(rows: int, hidden: int, inner: int, fp8: bool) -> tuple[list[Link], list[LinkCall], dict[str, torch.Tensor]]:
    """What follows attention, and the next layer's first product: as decode steps chain them."""

    def weight(n: int, k: int, **options: object) -> LinearWeight:
        values = (torch.randn(n, k) * k**-0.5).to(BF16)
        return LinearWeight(*(quantized(values) if fp8 else (values, None)), **options)  # type: ignore[arg-type]

    norms = [(1 + 0.1 * torch.randn(hidden)).to(BF16) for _ in range(2)]
    links = [
        Link(weight(hidden, hidden)),
        Link(weight(2 * inner, hidden, gated=True), norms[0], EPS),
        Link(weight(hidden, inner)),
        Link(weight(384, hidden), norms[1], EPS),
    ]
    nan = float("nan")
    held = {
        "attended": torch.randn(rows, hidden).to(BF16),
        "x": torch.randn(rows, hidden).to(BF16),
        "gated": torch.full((rows, inner), nan).to(BF16),
        "qkv": torch.full((rows, 384), nan).to(BF16),
    }
    calls = [
        LinkCall(held["attended"], held["x"], held["x"]),
        LinkCall(held["x"], held["gated"]),
        LinkCall(held["gated"], held["x"], held["x"]),
        LinkCall(held["x"], held["qkv"]),
    ]
    return links, calls, held


@needs_compiler
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("rows", "seeds"), [(1, (0, 1, 2, 3)), (4, (4, 5))])
def test_a_chain_is_its_products_one_by_one(fp8: bool, rows: int, seeds: Sequence[int]) -> None:
    """Three CTAs that run at once, as many as the emulator lets; the second launch goes on with the counter."""
    torch.manual_seed(rows)
    links, calls, held = layer(rows, 256, 384, fp8)
    start = {name: each.clone() for name, each in held.items()}
    x = start["x"].clone()
    for link, call in zip(links, calls, strict=True):
        single = chain_of(link)
        launch(single, [call], 3, seed=0)
    want = {name: each.clone() for name, each in held.items()}
    assert all(each.isfinite().all() for each in want.values()) and not torch.equal(want["x"], x)
    chain = chain_of(*links)
    for seed in seeds:
        for name, each in held.items():
            each.copy_(start[name])
        launch(chain, calls, 3, seed)
        for name, each in held.items():
            assert torch.equal(each, want[name]), f"{name}, seed {seed}"


@needs_compiler
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("paged", [False, True])
def test_heads_are_rotated_and_appended_as_by_a_kernel_of_its_own(paged: bool, fp8: bool) -> None:
    torch.manual_seed(8)
    rows, q_heads, kv_heads, dim, k = 3, 4, 2, 64, 256
    n = (q_heads + 2 * kv_heads) * dim
    weight = torch.randn(n, k).to(BF16)
    codes, scales = quantized(weight) if fp8 else (weight, None)
    linear = LinearWeight(codes, scales, bias=torch.randn(n).to(BF16))
    x, tables = (
        torch.randn(rows, k).to(BF16),
        (torch.randn(300, dim // 2).to(BF16), torch.randn(300, dim // 2).to(BF16)),
    )
    num_tokens = torch.tensor([7, 0, 271], dtype=torch.int32)  # the middle one is padding
    places = torch.tensor([[4, 1, 2], [0, 3, 3], [3, -1, 0]] if paged else [2, 0, 1], dtype=torch.int32)
    found = []
    for rotary in (False, True):
        memory = torch.zeros(2, 5, 128 if paged else 160, kv_heads, dim, dtype=BF16)
        to = AppendTo(memory[0], memory[1], places, num_tokens)
        out = torch.zeros(rows, n, dtype=BF16)
        chain = chain_of(Link(linear, rotary=rotary))
        launch(chain, [LinkCall(x, out, rotary=Rotary(tables, to, q_heads) if rotary else None)], 3, seed=2)
        if not rotary:
            arguments = RopeArgs()
            set_rope(arguments, BF16, out, tables, (None, None), 0.0, to, q_heads)
            Emulator.of(step_cell("bf16")).call("rope", 1, rows, arguments)
        found.append((out[:, : q_heads * dim], memory))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    assert found[0][1].ne(0).any(-1).sum() == 2 * 2 * kv_heads  # of two rows


@needs_compiler
@pytest.mark.parametrize("fp8", [False, True])
def test_long_rows_are_read_from_memory(fp8: bool) -> None:
    """On an SM with 99 KiB, 8 rows of 3,072 values are too many; results are those of rows in shared memory."""
    torch.manual_seed(5)
    k, n = 3072, 128
    weight = torch.randn(n, k).to(BF16)
    link = Link(LinearWeight(*(quantized(weight) if fp8 else (weight, None))))
    large, small = chain_of(link), chain_of(link, arch="sm_89")
    assert small.plans[8].x_bytes < 8 * 2 * k < large.plans[8].x_bytes
    x = torch.randn(8, k).to(BF16)
    assert torch.equal(run(small, x, None, seed=7), run(large, x, None, seed=7))


@needs_compiler
@pytest.mark.parametrize(
    "tiling",
    [
        LinearTiling(8, 1, 1024, bulk=False, in_flight=2),
        LinearTiling(4, 2, 512, in_flight=1, max_stages=2),
        LinearTiling(8, 4, 512, in_flight=3, lanes=32),
    ],
    ids=["copies of older archs", "another cut", "few under way, each lane arrives"],
)
def test_ways_to_cut_give_the_same(tiling: LinearTiling) -> None:
    torch.manual_seed(6)
    links, calls, held = layer(2, 256, 128, fp8=False)
    start = {name: each.clone() for name, each in held.items()}
    launch(chain_of(*links), calls, 3, seed=1)
    want = {name: each.clone() for name, each in held.items()}
    chain = chain_of(*links, tiling=tiling)
    for seed in (0, 2, 3):
        for name, each in held.items():
            each.copy_(start[name])
        launch(chain, calls, 3, seed)
        for name, each in held.items():
            assert (each.float() - want[name].float()).norm() < 1e-2 * want[name].float().norm()


@needs_compiler
def test_every_code_is_read_exactly() -> None:
    """A row of weights that holds each e4m3 code, subnormal ones too, against unit vectors."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # NaN
    weight = codes.view(torch.float8_e4m3fn).repeat(128, 1)
    chain = chain_of(Link(LinearWeight(weight, scale_rows(torch.full((1, 2), 2.0)))))
    for first in range(0, 256, 8):
        x = torch.zeros(8, 256, dtype=BF16)
        x[torch.arange(8), first + torch.arange(8)] = 1.0
        got = run(chain, x, None, seed=0)
        assert torch.equal(got, 2 * weight[:, first : first + 8].to(BF16).t())


@needs_compiler
def test_a_grid_that_does_not_run_at_once_ends() -> None:
    """More CTAs than run at once wait for ever; the emulator says so, a GPU traps."""
    links, calls, _ = layer(1, 256, 128, fp8=False)
    with pytest.raises(EmulatorError, match="deadlock"):
        launch(chain_of(*links), calls, 4, seed=0)


def test_shared_memory_is_shared_out() -> None:
    plan = shared_plan(1, [(4096, True), (14336, False)], "sm_90a", linear_tiling(fp8=False))
    assert plan.x_bytes == 2 * 14336 + 64 and plan.stages == 11 and plan.total <= 227 * 1024
    plan = shared_plan(8, [(4096, True), (14336, False)], "sm_90a", linear_tiling(fp8=False))
    assert plan.x_bytes == 8 * (2 * 4096 + 64) and plan.stages == 9
    with pytest.raises(ArgumentError, match="do not fit into shared memory"):
        shared_plan(8, [(4096, True)], "sm_89", linear_tiling(fp8=False))


@pytest.mark.parametrize(
    "linear",
    [
        LinearWeight(torch.zeros(8, 40, dtype=BF16)),
        LinearWeight(torch.zeros(8, 64)),
        LinearWeight(torch.zeros(64, 8, dtype=BF16).t()),
        LinearWeight(torch.zeros(128, 128, dtype=torch.float8_e4m3fn), torch.ones(1, 2)),
        LinearWeight(torch.zeros(8, 64, dtype=BF16), bias=torch.zeros(8)),
    ],
)
def test_weights_that_do_not_fit_are_refused(linear: LinearWeight) -> None:
    with pytest.raises(ArgumentError, match="does not fit"):
        chain_of(Link(linear))


def test_chains_that_do_not_fit_are_refused() -> None:
    plain, gated = LinearWeight(torch.zeros(32, 64, dtype=BF16)), LinearWeight(torch.zeros(32, 64).to(BF16), gated=True)
    fp8 = LinearWeight(torch.zeros(128, 128, dtype=torch.float8_e4m3fn), torch.ones(1, 1))
    for links in ([], [Link(plain)] * 5, [Link(plain), Link(fp8)]):
        with pytest.raises(ArgumentError, match="make no chain"):
            chain_of(*links)
    with pytest.raises(ArgumentError, match="norm does not fit"):
        chain_of(Link(plain, torch.ones(64)))
    chain = chain_of(Link(plain))
    x, out = torch.zeros(9, 64, dtype=BF16), torch.zeros(9, 32, dtype=BF16)
    for bad in ((x, out), (x[:2, :32], out[:2]), (x[:2], out[:3]), (x[:2].float(), out[:2])):
        with pytest.raises(ArgumentError, match="does not fit the product"):
            chain.set_call(LinkCall(*bad))
    with pytest.raises(ArgumentError, match="adds a residual"):
        chain_of(Link(gated)).set_call(LinkCall(x[:1], out[:1, :16], out[:1, :16]))
