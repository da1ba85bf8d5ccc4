"""Products of few rows on a GPU: right, then their time beside cuBLAS."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.linear_cuda import (
    LinearChain,
    LinearWeight,
    Link,
    LinkCall,
    dequantized,
    linear_few,
    quantized,
    scale_rows,
)
from kernels.sample_cuda import SampleKernel, SampleState
from kernels.step_cells import LinearTiling
from tests.bench.kernel_timing import capture

CALLS = 8  # of one graph, each with weights of its own, more than the second-level cache holds
REPEATS = 15
EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """A product of a layer: ``gated`` after, or ``residual`` where it is added."""

    name: str
    n: int
    k: int
    gated: bool = False
    residual: bool = False


def shapes(config: Any) -> list[Shape]:
    """Of a LlamaConfig."""
    q, kv = config.q_heads * config.head_dim, config.kv_heads * config.head_dim
    return [
        Shape("qkv", q + 2 * kv, config.hidden),
        Shape("o", config.hidden, q, residual=True),
        Shape("gate_up", 2 * config.intermediate, config.hidden, gated=True),
        Shape("down", config.hidden, config.intermediate, residual=True),
        Shape("lm_head", config.vocab_size, config.hidden),
    ]


def make(shape: Shape, device: torch.device, *, fp8: bool, row_type: torch.dtype = torch.bfloat16) -> LinearWeight:
    weight = torch.empty(shape.n, shape.k, dtype=row_type, device=device).normal_(0.0, shape.k**-0.5)
    codes, scales = quantized(weight) if fp8 else (weight, None)
    return LinearWeight(codes, scales, gated=shape.gated)


def single(linear: LinearWeight, norm: torch.Tensor | None = None, tiling: LinearTiling | None = None) -> LinearChain:
    device = linear.weight.device
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    return LinearChain([Link(linear, norm, EPS)], torch.bfloat16, arrived, tiling=tiling)


def check(
    shape: Shape,
    device: torch.device,
    *,
    fp8: bool,
    rows: Sequence[int] = tuple(range(1, 9)),
    tiling: LinearTiling | None = None,
) -> dict[str, Any]:
    """Relative errors of rows against products in float32 of the weights as they are; and whether a row alone has the
    bits that it has among others."""
    linear = make(shape, device, fp8=fp8)
    norm = None if shape.residual else torch.empty(shape.k, dtype=torch.bfloat16, device=device).normal_(1.0, 0.1)
    chain = single(linear, norm, tiling)
    errors: dict[int, float] = {}
    all_x = torch.randn(max(rows), shape.k, device=device).to(torch.bfloat16)
    all_residual = torch.randn(max(rows), linear.width, device=device).to(torch.bfloat16)
    outs: dict[int, torch.Tensor] = {}
    for count in rows:
        x, residual = all_x[:count], all_residual[:count] if shape.residual else None
        out = torch.full((count, linear.width), float("nan"), dtype=torch.bfloat16, device=device)
        chain(LinkCall(x, out, residual))
        want = _exact(x, linear, residual, norm)
        error = ((out.float() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
        errors[count] = error if error == error else float("inf")
        outs[count] = out
    alike = all(torch.equal(outs[a], outs[b][:a]) for a in outs for b in outs if a < b)
    good = max(errors.values()) < (1e-2 if shape.gated else 6e-3)
    return {"ok": good and alike, "errors": errors, "rows_alone_alike": alike, "ctas": chain.ctas, "plans": chain.plans}


def check_chain(
    config: Any, device: torch.device, *, fp8: bool, turns: int = 40, tiling: LinearTiling | None = None
) -> dict[str, Any]:
    """A layer's four products in one launch, against the same four one by one: bits; again and again, for races."""
    by_name = {shape.name: shape for shape in shapes(config)}
    links = []
    for name in ("o", "gate_up", "down", "qkv"):
        shape = by_name[name]
        norm = torch.empty(shape.k, dtype=torch.bfloat16, device=device).normal_(1.0, 0.1)
        links.append(Link(make(shape, device, fp8=fp8), None if shape.residual else norm, EPS))
    chain = LinearChain(links, torch.bfloat16, torch.zeros(1, dtype=torch.int32, device=device), tiling=tiling)
    parts = [single(link.linear, link.norm, tiling) for link in links]
    wrong: dict[str, int] = {}
    for turn in range(turns):
        rows = 1 + turn % 8
        start = {
            "attended": torch.randn(rows, links[0].linear.weight.shape[1], device=device).to(torch.bfloat16),
            "x": torch.randn(rows, config.hidden, device=device).to(torch.bfloat16),
            "gated": torch.full((rows, config.intermediate), float("nan"), device=device).to(torch.bfloat16),
            "qkv": torch.full((rows, links[3].linear.width), float("nan"), device=device).to(torch.bfloat16),
        }
        found = []
        for apart in (True, False):
            held = {name: each.clone() for name, each in start.items()}
            calls = [
                LinkCall(held["attended"], held["x"], held["x"]),
                LinkCall(held["x"], held["gated"]),
                LinkCall(held["gated"], held["x"], held["x"]),
                LinkCall(held["x"], held["qkv"]),
            ]
            if apart:
                for part, call in zip(parts, calls, strict=True):
                    part(call)
            else:
                chain(*calls)
            found.append(held)
        for name in start:
            if not torch.equal(found[0][name], found[1][name]):
                wrong[f"{name} rows {rows}"] = wrong.get(f"{name} rows {rows}", 0) + 1
    return {"ok": not wrong, "wrong": wrong, "turns": turns}


def _exact(
    x: torch.Tensor, linear: LinearWeight, residual: torch.Tensor | None, norm: torch.Tensor | None
) -> torch.Tensor:
    wide = dequantized(linear.weight, linear.scales, torch.float32).float()
    plain = LinearWeight(wide, gated=linear.gated)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        more = None if residual is None else residual.float()
        return linear_few(x.float(), plain, more, None if norm is None else norm.float(), EPS)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def check_codes(device: torch.device) -> dict[str, Any]:
    """Every e4m3 code, subnormal ones too, against unit vectors: must come out exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    weight = codes.view(torch.float8_e4m3fn).repeat(128, 1).to(device)
    chain = single(LinearWeight(weight, scale_rows(torch.full((1, 2), 2.0, device=device))))
    wrong = []
    for first in range(0, 256, 8):
        x = torch.zeros(8, 256, dtype=torch.bfloat16, device=device)
        x[torch.arange(8), first + torch.arange(8)] = 1.0
        out = torch.empty(8, 128, dtype=torch.bfloat16, device=device)
        chain(LinkCall(x, out))
        bad = (out != 2 * weight[:, first : first + 8].to(torch.bfloat16).t()).any(1).nonzero().view(-1)
        wrong += [first + i for i in bad.tolist()]
    return {"ok": not wrong, "codes_wrong": wrong[:20], "num_wrong": len(wrong)}


def time_calls(calls: Sequence[Callable[[], object]]) -> dict[str, float]:
    """Microseconds a call, of graphs of several calls in a row: median and best of the graph's replays."""

    def all_calls() -> None:
        for call in calls:
            call()

    graph = capture(all_calls)
    times = []
    for turn in range(REPEATS + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 3:
            times.append(float(begin.elapsed_time(end)) * 1e3 / len(calls))
    return {"us": statistics.median(times), "best_us": min(times)}


def measure(
    shape: Shape, device: torch.device, rows: int, kind: str, tiling: LinearTiling | None = None
) -> dict[str, Any]:
    """kind: "ours", "ours fp8", "cublas" (the product alone), "scaled_mm" (FP8 blocks by torch)."""
    calls: list[Callable[[], object]] = []
    num_bytes = 0
    copies = CALLS if shape.name != "lm_head" else 2
    x = torch.randn(rows, shape.k, device=device).to(torch.bfloat16)
    for _ in range(copies):
        linear = make(shape, device, fp8=kind in ("ours fp8", "scaled_mm"))
        out = torch.empty(rows, linear.width, dtype=torch.bfloat16, device=device)
        num_bytes += linear.num_bytes
        if kind.startswith("ours"):
            chain = single(linear, tiling=tiling)
            chain.load()
            calls.append(partial(chain, LinkCall(x, out, out if shape.residual else None)))
        elif kind == "cublas":
            out = torch.empty(rows, shape.n, dtype=torch.bfloat16, device=device)
            calls.append(partial(torch.mm, x, linear.weight.t(), out=out))
        else:
            calls.append(_scaled(x, linear))
    times = time_calls(calls)
    return {
        "ok": True,
        **{name: round(value, 2) for name, value in times.items()},
        "tb_s": round(num_bytes / len(calls) / times["us"] / 1e6, 3),
        "mb": round(num_bytes / len(calls) / 1e6, 1),
    }


def _scaled(x: torch.Tensor, linear: LinearWeight) -> Callable[[], object]:
    """torch's product of FP8 blocks: 1 x 128 of x, 128 x 128 of the weight. x is quantised once, outside."""
    blocks = x.float().view(len(x), -1, 128)
    scale = blocks.abs().amax(-1).clamp(min=1e-12) / 448.0
    codes = (blocks / scale[..., None]).view(x.shape).to(torch.float8_e4m3fn)
    scale_a = scale.t().contiguous().t()  # outer-dim-major, as the kernel wants it
    assert linear.scales is not None
    weight, scale_b = linear.weight.t(), linear.scales.t()

    def call() -> object:
        return torch._scaled_mm(codes, weight, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)

    call()
    return call


def measure_draw(
    rows: int, settings: dict[str, float], device: torch.device, vocabulary: int = 128256
) -> dict[str, Any]:
    """The draw of one token a row; each turn draws from the same logits."""

    def of(value: float, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    state = SampleState(
        temperature=of(settings.get("temperature", 0.0), torch.float32),
        top_p=of(settings.get("top_p", 1.0), torch.float32),
        min_p=of(0.0, torch.float32),
        penalty=of(1.0, torch.float32),
        top_k=of(settings.get("top_k", 0)),
        seed=torch.arange(2 * rows, dtype=torch.int32, device=device).view(rows, 2),
        limit=of(1 << 30),
        tokens=of(1),
        num_tokens=of(100),
        stops=torch.full((rows, 8), -1, dtype=torch.int32, device=device),
        seen=None,
        step=torch.zeros(1, dtype=torch.int32, device=device),
        out=torch.zeros(4, rows, dtype=torch.int32, pin_memory=True),
    )
    logits = (3 * torch.randn(rows, vocabulary, device=device)).to(torch.bfloat16)
    draw = SampleKernel(torch.bfloat16, device)
    times = time_calls([partial(draw, logits, state)] * CALLS)
    drawn = state.tokens.tolist()
    right = all(0 <= token < vocabulary for token in drawn)
    if not settings.get("temperature"):
        right = drawn == logits.float().argmax(-1).tolist()
    return {"ok": right, **{name: round(value, 2) for name, value in times.items()}, "drawn": drawn[:4]}
