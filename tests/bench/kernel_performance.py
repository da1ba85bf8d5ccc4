"""A case's time, its floor and its rival, after its results have been found right."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.loader import arch_of
from tests.bench.kernel_cases import Case, Timed
from tests.bench.kernel_checks import checked
from tests.bench.kernel_engines import Gpu
from tests.bench.kernel_inputs import Inputs, make
from tests.bench.kernel_timing import Ceilings, Timer, Times, ceilings, host_us, latency_us, rivals


@dataclass(frozen=True)
class Machine:
    device: torch.device
    timer: Timer
    ceilings: Ceilings

    @classmethod
    def measure(cls, device: torch.device) -> Machine:
        timer = Timer(device)
        return cls(device, timer, ceilings(timer, device))

    @property
    def text(self) -> str:
        c = self.ceilings
        rates = f"reads {c.read / 1e12:.2f} TB/s, copies {c.copy / 1e12:.2f} TB/s"
        return f"{rates}, bf16 products {c.flops / 1e12:.0f} TFLOP/s"

    def floor(self, num_bytes: float, flops: float) -> tuple[float, str]:
        """Milliseconds, and what binds."""
        by_bytes, by_flops = num_bytes / self.ceilings.read * 1e3, flops / self.ceilings.flops * 1e3
        if by_bytes >= by_flops:
            return by_bytes, f"bytes: {num_bytes / 1e6:.1f} MB read at {self.ceilings.read / 1e12:.2f} TB/s"
        return by_flops, f"flops: {flops / 1e9:.1f} GFLOP at {self.ceilings.flops / 1e12:.0f} TFLOP/s"


def measure_decode(timed: Timed, machine: Machine) -> dict[str, Any]:
    """Right on some sequences first; then times, a record among the facts."""
    case = timed.case
    inputs = make(case, machine.device)
    engine = Gpu(inputs)
    count = len(inputs.q)
    facts = checked(inputs, engine, sorted({0, count // 2, count - 1})[: timed.checked])
    if not facts["ok"]:
        return facts
    call = lambda: engine(inputs.q, inputs.batch, inputs.out, inputs.lse)
    times = machine.timer.time(call, cold=True)
    rival = _rival(inputs, machine)
    floor, floor_by = machine.floor(inputs.bytes_read, _flops(case) if case.shared else 0.0)
    return facts | _timed_facts(case, times, floor, floor_by, rival, facts["error"], timed)


def _timed_facts(
    case: Case,
    times: Times,
    floor: float,
    floor_by: str,
    rival: tuple[str, float] | str,
    error: float,
    timed: Timed,
) -> dict[str, Any]:
    named = isinstance(rival, tuple)
    record: dict[str, Any] = {
        "case": case.name,
        "value": round(times.median, 5),
        "unit": "ms",
        "spread": [round(min(times.values), 5), round(max(times.values), 5)],
        "repeats": len(times.values),
        "steady": None if times.steady is None else round(times.steady, 5),
        "floor": round(floor, 5),
        "floor_by": floor_by,
        "rival": rival[0] if named else None,
        "rival_value": round(float(rival[1]), 5) if named else None,
        **({} if named else {"rival_why": rival}),
        "error": error,
        "shape": _shape_text(case),
        "arch": arch_of(torch.device("cuda")),
        "width": case.dim,
        "mode": case.mode,
    }
    facts: dict[str, Any] = {"ms": times.median, "steady": times.steady, "of_floor": floor / times.median}
    if named:
        facts |= {"rival": float(rival[1]), "faster": float(rival[1]) / times.median}
    if timed.required_ms is not None:
        record |= {"required": timed.required_ms, "goal": timed.goal_ms}
        facts["required"] = f"{timed.required_ms} ({'met' if times.median <= timed.required_ms else 'MISSED'})"
    return facts | {"record": record}


def _shape_text(case: Case) -> str:
    lengths = sorted(set(case.lengths))
    heads = f"{case.kv_heads}/{case.kv_heads * case.group} heads"
    return (
        f"B={len(case.lengths)}, {'/'.join(map(str, lengths))} tokens, {heads}, d={case.dim}, "
        f"{case.mode}{' shared K=V' if case.shared else ''}, T={case.queries}, "
        f"{'no tail' if case.kept is None else f'tails of {case.kept} tokens or more'}"
    )


def _flops(case: Case) -> float:
    """Of both products."""
    return 4.0 * sum(case.lengths) * case.queries * case.kv_heads * case.group * case.dim


def _rival(inputs: Inputs, machine: Machine) -> tuple[str, float] | str:
    """The fastest of torch's kernels over bf16 rows of the same shape, cold; or why there is none."""
    case = inputs.case
    if len(set(case.lengths)) != 1 or case.softcap or case.sinks or case.window:
        return "torch's fused kernels take no softcap, sinks, or windows in decode"
    if case.queries > 1:
        return "torch's fused kernels take no causal mask over the last of many keys"
    length, batch = case.lengths[0], len(case.lengths)
    shape = (batch, case.kv_heads, length, case.dim)
    k = torch.randn(shape, dtype=torch.bfloat16, device=machine.device)
    v = k if case.shared else torch.randn(shape, dtype=torch.bfloat16, device=machine.device)
    q = inputs.q.transpose(1, 2).to(torch.bfloat16)
    best = best_rival(q, k, v, inputs.options.sm_scale, machine)
    return best or "no kernel of torch takes this shape"


def best_rival(
    q: Tensor, k: Tensor, v: Tensor, scale: float, machine: Machine, *, is_causal: bool = False
) -> tuple[str, float] | None:
    times = {
        name: machine.timer.time(call, cold=True, repeats=15).median
        for name, call in rivals(q, k, v, scale, is_causal=is_causal).items()
    }
    return min(times.items(), key=lambda item: item[1]) if times else None


def measure_fixed(timed: Timed, machine: Machine) -> dict[str, Any]:
    """What a call costs however little it reads: microseconds from a plain call to its result, on the host's clock."""
    case = timed.case
    inputs = make(case, machine.device)
    engine = Gpu(inputs)
    facts = checked(inputs, engine, [0])
    if not facts["ok"]:
        return facts
    call = lambda: engine(inputs.q, inputs.batch, inputs.out, inputs.lse)
    mine = latency_us(call)
    k, v = (
        torch.randn((1, case.kv_heads, case.lengths[0], case.dim), dtype=torch.bfloat16, device=machine.device)
        for _ in "kv"
    )
    q = inputs.q.transpose(1, 2)
    usable = rivals(q, k, v, inputs.options.sm_scale)
    others = {name: statistics.median(latency_us(rival)) for name, rival in usable.items()}
    graphs = {name: machine.timer.time(rival, cold=False).median * 1e3 for name, rival in usable.items()}
    own_graph = machine.timer.time(call, cold=False).median * 1e3
    value = statistics.median(mine)
    rival, rival_value = min(others.items(), key=lambda item: item[1])
    record = {
        "case": case.name,
        "value": round(value, 2),
        "unit": "us from call to result, host clock",
        "spread": [round(min(mine), 2), round(max(mine), 2)],
        "repeats": len(mine),
        "floor": None,
        "floor_by": "launches",
        "rival": rival,
        "rival_value": round(rival_value, 2),
        "graph_us": round(own_graph, 2),
        "rival_graph_us": round(min(graphs.values()), 2),
        "host_us": round(host_us(call), 2),
        "error": facts["error"],
        "shape": _shape_text(case),
    }
    cudnn = others.get("cuDNN SDPA", rival_value)
    shown = {"us": value, "graph_us": own_graph, "host_us": record["host_us"], "rivals_us": _rounded(others)}
    met = "met" if value <= 1.5 * cudnn else "MISSED"
    return facts | shown | {"rival_graphs_us": _rounded(graphs), "required": f"1.5 x cuDNN ({met})", "record": record}


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in values.items()}
