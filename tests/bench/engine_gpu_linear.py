"""Products of few rows on a GPU: right, then their time beside cuBLAS."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from kernels.linear_cuda import FewLinear, LinearWeight, dequantized, linear_few, quantized
from kernels.sample_cuda import SampleKernel, SampleState
from kernels.step_cells import LinearTiling
from tests.bench.kernel_timing import capture

CALLS = 8  # of one graph, each with weights of its own, more than the second-level cache holds
REPEATS = 15


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


def check(shape: Shape, device: torch.device, *, fp8: bool, rows: Sequence[int] = (1, 3, 8)) -> dict[str, Any]:
    """Relative errors of rows against float64-like products in float32 of the weights as they are."""
    linear = make(shape, device, fp8=fp8)
    few = FewLinear(linear, torch.bfloat16)
    worst = 0.0
    for count in rows:
        x = torch.randn(count, shape.k, device=device).to(torch.bfloat16)
        residual = torch.randn(count, linear.width, device=device).to(torch.bfloat16) if shape.residual else None
        out = torch.full((count, linear.width), float("nan"), dtype=torch.bfloat16, device=device)
        few(x, out, residual)
        want = _exact(x, linear, residual)
        error = ((out.float() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
        worst = max(worst, error if error == error else float("inf"))
    return {"ok": worst < (1e-2 if shape.gated else 6e-3), "error": worst}


def _exact(x: torch.Tensor, linear: LinearWeight, residual: torch.Tensor | None) -> torch.Tensor:
    wide = dequantized(linear.weight, linear.scales, torch.float32).float()
    plain = LinearWeight(wide, gated=linear.gated)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        return linear_few(x.float(), plain, None if residual is None else residual.float())
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def check_codes(device: torch.device) -> dict[str, Any]:
    """Every e4m3 code, subnormal ones too, against unit vectors: must come out exactly."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    weight = codes.view(torch.float8_e4m3fn).repeat(128, 1).to(device)
    few = FewLinear(LinearWeight(weight, torch.full((1, 2), 2.0, device=device)), torch.bfloat16)
    wrong = []
    for first in range(0, 256, 8):
        x = torch.zeros(8, 256, dtype=torch.bfloat16, device=device)
        x[torch.arange(8), first + torch.arange(8)] = 1.0
        out = torch.empty(8, 128, dtype=torch.bfloat16, device=device)
        few(x, out)
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


TILINGS = (LinearTiling(6, 2), LinearTiling(8, 2), LinearTiling(3, 4))
GATED_TILINGS = (LinearTiling(4, 2), LinearTiling(3, 2), LinearTiling(1, 4))


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
            few = FewLinear(linear, torch.bfloat16, rows, tiling)
            few.load()
            calls.append(partial(few, x, out, out if shape.residual else None))
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
        stops=torch.zeros(0, dtype=torch.int32, device=device),
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
