"""DeepSeek-V4's captured decode steps: their tokens beside the eager step's, then their time, layer by layer.

A step is DecodeGraphs' own, as the engine launches it. Of a layer, a graph of its own over the same state is replayed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kvstore.geometry import Region
from tests.bench.kernel_timing import capture
from worker.decode_graphs import DecodeGraphs
from worker.decode_state import RowStart
from worker.kv_view import KvView, Places, Workspace
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_geometry import COMPRESSED, RAW
from worker.models.deepseek_v4_kv_rows import KvRows
from worker.models.deepseek_v4_step_rows import StepReads
from worker.sequence import Sampling
from worker.v4_decode_layers import V4DecodeLayers

COMPARED, REPLAYS, LOOPED = 12, 24, 24  # steps; rings keep 16 tokens more than a step reads
AHEAD = COMPARED + REPLAYS + LOOPED + 16  # tokens behind a case's own
MEDIAN_MOST, NORM_MOST = 0.01, 0.05  # of differences by norm, in bf16 through all layers: of logits, and of kept rows


@dataclass
class Steps:
    """Captured steps of sequences of ``lengths`` tokens each, the newest to be computed, in pages of a cache."""

    network: DeepseekV4
    kv: KvView
    pages: list[list[int]]
    lengths: list[int]
    tokens: list[int]
    max_tokens: int
    capture_s: float = 0.0  # seconds

    @cached_property
    def graphs(self) -> DecodeGraphs:
        count = len(self.lengths)
        return DecodeGraphs(
            self.network, self.kv, None, max_sequences=count, max_sequence_tokens=self.max_tokens, buckets=()
        )

    def capture(self) -> None:
        self.capture_s = self.graphs.capture()

    def enter(self) -> None:
        for row, (length, token) in enumerate(zip(self.lengths, self.tokens, strict=True)):
            start = RowStart(
                token=token,
                num_tokens=length,
                limit=self.max_tokens,
                sampling=Sampling(),
                pages={COMPRESSED: self.pages[row]},
                bases={},
                tail_slots={group.name: row for group in self.kv.geometry.groups},
            )
            self.graphs.enter(row, start)

    def run(self, count: int) -> list[list[int]]:
        """What each step drew, of all rows; read a step late."""
        graphs, said = self.graphs, []
        for turn in range(count):
            step = graphs.launch(len(self.lengths))
            if turn:
                said.append(graphs.tokens(step - 1))
        return [*said, graphs.tokens(step)]

    @property
    def layers(self) -> V4DecodeLayers:
        layers = self.graphs.layers
        assert isinstance(layers, V4DecodeLayers)
        return layers

    def reach(self) -> int:
        return next(reach for reach in self.layers.reaches if reach >= max(self.lengths) + AHEAD)

    def ends(self) -> None:
        """What a step does beside its layers."""
        count, state, network = len(self.lengths), self.graphs.state, self.network
        self.layers.kernels.begin(state.words, state.step, state.patches)
        reads = StepReads(self.kv, state, count, self.reach())
        batch = self.layers.batch(count, reads.positions)
        network.ropes(batch)
        self.layers.draw(network.stem(batch).contiguous(), batch)

    def layer(self, layer: int) -> Callable[[], object]:
        """One layer of a step, over the state as it is."""
        count, state = len(self.lengths), self.graphs.state
        reads = StepReads(self.kv, state, count, self.reach())
        batch = self.layers.batch(count, reads.positions)
        ropes, streams = self.network.ropes(batch), self.network.stem(batch).contiguous()
        # What is made once a step and kept in ``reads`` shall not be counted a layer.
        self.network.layer(layer, streams, batch, ropes, reads)
        return lambda: self.network.layer(layer, streams, batch, ropes, reads)


def compare(steps: Steps, eager: Callable[[list[int], list[int], list[int]], torch.Tensor]) -> dict[str, Any]:
    """Greedy tokens, logits and rows of COMPARED steps, eager first: then the same once more, captured.

    In bf16 an expert at the boundary of the choice may be another one after any other order of sums, and what follows
    is another's. So the errors of rows stand beside those of the eager step itself, of rows alone against in company.

    Args:
        eager: logits [rows, vocabulary] float32 of a step of these tokens, the newest of so many, of these rows.
    """
    rows = list(range(len(steps.lengths)))
    tokens, want, margins = list(steps.tokens), [], []
    alone = [eager([tokens[row]], [steps.lengths[row]], [row]) for row in rows[:8]]
    first: torch.Tensor | None = None
    for turn in range(COMPARED):
        logits = eager(tokens, [length + turn for length in steps.lengths], rows)
        first = logits.clone() if first is None else first
        best = logits.topk(2).values
        margins.append((best[:, 0] - best[:, 1]).tolist())
        # Of equal ones the first, as the kernel draws.
        tokens = [int((row == row.max()).nonzero()[0]) for row in logits]
        want.append(tokens)
    kept = {key: view.float().clone() for key, view in written(steps)}
    steps.capture()
    steps.enter()
    got = steps.run(1)
    assert first is not None
    count = len(rows)
    logit_errors = _errors(steps.layers.logits[:count], first)
    got += steps.run(COMPARED - 1)
    parted = [
        {"step": turn, "row": row, "margin": round(margins[turn][row], 5)}
        for row in rows
        for turn in _first_apart([step[row] for step in want], [step[row] for step in got])
    ]
    alike = sorted({*rows} - {int(each["row"]) for each in parted})
    keep = torch.tensor(alike, dtype=torch.int64, device=steps.network.device)
    errors: dict[str, float] = {}
    for (layer, kind), view in written(steps):
        if alike:
            each = _errors(view.float()[keep].flatten(1), kept[layer, kind][keep].flatten(1))
            errors[kind] = max(errors.get(kind, 0.0), round(statistics.median(each), 6))
    alone_errors = _errors(torch.cat(alone), first[: len(alone)])
    limit = max(MEDIAN_MOST, 2 * statistics.median(alone_errors))
    return {
        "passed": statistics.median(logit_errors) <= limit and all(each <= NORM_MOST for each in errors.values()),
        "rows": count,
        "steps": COMPARED,
        "tokens_parted": parted[:6],
        "num_parted": len(parted),
        "first_logits_error": _told(logit_errors),
        "eager_alone_error": _told(alone_errors),
        "kv_error": errors,
        "capture_s": round(steps.capture_s, 2),
    }


def _told(errors: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(errors), 6), "most": round(max(errors), 6)}


def _first_apart(want: Sequence[int], got: Sequence[int]) -> list[int]:
    return [turn for turn, pair in enumerate(zip(want, got, strict=True)) if pair[0] != pair[1]][:1]


def _errors(got: torch.Tensor, want: torch.Tensor) -> list[float]:
    """By norm, of each row."""
    errors: list[float] = ((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-9)).tolist()
    return errors


def written(steps: Steps) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
    """What COMPARED steps have written, by layer and kind: [B, N, ...]."""
    device = steps.network.device
    ends = torch.tensor(steps.lengths, device=device) - 1 + COMPARED  # tokens computed
    slots = torch.arange(len(ends), device=device)
    width = max(len(pages) for pages in steps.pages)
    table = torch.tensor([pages + [0] * (width - len(pages)) for pages in steps.pages], device=device)
    for (layer, kind), view in steps.kv.regions.items():
        region: Region = view.region
        count = COMPARED // region.ratio + 1
        back = torch.arange(1, count + 1 if region.ratio > 1 else COMPARED + 1, device=device)
        numbers = ((ends // region.ratio).unsqueeze(1) - back).clamp(min=0)
        paged = view.tail is None
        where = Places(table, None if paged else slots)
        if view.group.name == RAW and paged:
            raise NotImplementedError("raw rows in dense pages")
        yield (layer, kind), steps.kv.gather(view, where, numbers)


def times(steps: Steps, kinds: dict[str, int]) -> dict[str, Any]:
    """Milliseconds: of steps one behind the other on the GPU, as the host sees them, and of one layer of each kind.

    Args:
        kinds: a layer of each.
    """
    on_gpu = steps.network.device.type == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else 0
    steps.capture()
    graphs = steps.graphs
    used = free - torch.cuda.mem_get_info()[0] if on_gpu else 0
    count = len(steps.lengths)
    steps.enter()
    steps.run(4)
    began = time.perf_counter()
    said = steps.run(LOOPED)
    loop_ms = (time.perf_counter() - began) * 1e3 / LOOPED
    found: dict[str, Any] = {
        "loop_ms": round(loop_ms, 4),
        "fine": all(token >= 0 for tokens in said for token in tokens),
        "capture_s": round(steps.capture_s, 2),
        "graphs": len(graphs.buckets) * len(steps.layers.reaches),
        "memory": vars(graphs.memory),
        "device_bytes_taken": used,
        "reach": steps.reach(),
    }
    with counted(found):
        steps.layers.run(count, steps.reach())
    if not on_gpu:
        return found
    replay = graphs._replays[count, steps.reach()]
    graphs.state.patches[:, 0] = 0  # every turn finds none
    found["step_ms"] = _row(replay)
    found["ends_ms"] = _row(capture(steps.ends).replay)
    found["layer_ms"] = {kind: _row(capture(steps.layer(layer)).replay) for kind, layer in kinds.items()}
    return found


def _row(replay: Callable[[], object]) -> float:
    """Milliseconds of one in a row of many."""
    values = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        replay()
        begin.record()
        for _ in range(REPLAYS // 3):
            replay()
        end.record()
        end.synchronize()
        values.append(float(begin.elapsed_time(end)) / (REPLAYS // 3))
    return round(statistics.median(values), 4)


@contextmanager
def counted(found: dict[str, Any]) -> Iterator[None]:
    """Experts that each layer of an uncaptured step chooses."""
    from tests.bench.bench_deepseek_v4 import counted_experts

    experts: list[int] = []
    with counted_experts(experts):
        yield
    found["experts"] = experts


def profile(steps: Steps, layer: int, rows_shown: int) -> list[str]:
    """The kernels of a layer's graph that take longest: "microseconds x calls name"."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    graph = capture(steps.layer(layer))
    graph.replay()
    torch.cuda.synchronize()
    with profiled(activities=[ProfilerActivity.CUDA]) as seen:
        graph.replay()
        torch.cuda.synchronize()
    kernels = sorted(seen.key_averages(), key=lambda each: -each.self_device_time_total)
    total, calls = (sum(getattr(each, name) for each in kernels) for name in ("self_device_time_total", "count"))
    return [f"{total:.0f} us in {calls} kernels"] + [
        f"{each.self_device_time_total:.0f} us x {each.count} {_short(each.key)}" for each in kernels[:rows_shown]
    ]


def _short(name: str) -> str:
    for part in ("void at::native::", "at::native::", "(anonymous namespace)::"):
        name = name.replace(part, "")
    return name[:110]


def probe(steps: Steps) -> list[str]:
    """After a step could not be captured: which of its layers can, and how the others refuse."""
    found = []
    for layer in range(steps.network.config.num_layers):
        try:
            capture(steps.layer(layer))
            found.append(f"layer {layer}: captured")
        except Exception as error:  # noqa: BLE001 -- told
            found.append(f"layer {layer}: {type(error).__name__}: {error}"[:600])
    return found


def eager_logits(network: DeepseekV4, kv: KvView, batch: Any) -> torch.Tensor:
    """A step as ``ModelRunner`` makes it."""
    rows = KvRows(kv, Workspace(batch), batch)
    return network.logits(network.streams(batch, rows), batch)


def expert_times(network: DeepseekV4, rows: int) -> tuple[dict[str, float], float]:
    """Milliseconds of the routed experts' products of the last layer, ours and PyTorch's; MB of their weights."""
    config, weights, kernels = network.config, network.layers[-1].ffn, network.kernels
    assert kernels is not None
    generator = torch.Generator(network.device).manual_seed(rows)
    x = torch.randn(rows, config.hidden_size, generator=generator, device=network.device).to(network.embed)
    logits = torch.randn(rows, config.num_experts, generator=generator, device=network.device)
    bias, tokens = torch.zeros_like(logits[0]), torch.zeros_like(logits[:, 0]).long()
    by = kernels.route(logits, bias, None, tokens, num_chosen=config.experts_per_token, scale=1.0)
    spread, shares = kernels.spread(x, by)

    def ours() -> torch.Tensor:
        gated = kernels.experts_up(spread, shares, weights.up, by, config.swiglu_limit)
        return kernels.experts_down(gated, weights.down, by)

    def grouped() -> torch.Tensor:
        gate_up = torch.nn.functional.grouped_mm(spread, weights.up.transpose(1, 2), offs=by.ends)
        gated = kernels.swiglu(gate_up, shares, config.swiglu_limit)
        return torch.nn.functional.grouped_mm(gated, weights.down.transpose(1, 2), offs=by.ends)

    num_bytes = int((by.experts.flatten().bincount() > 0).sum()) * (weights.up[0].numel() + weights.down[0].numel()) * 2
    return {"ours": _row(capture(ours).replay), "grouped_mm": _row(capture(grouped).replay)}, num_bytes / 1e6
