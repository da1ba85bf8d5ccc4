"""Decode in steady state: many captured steps over full KV, tokens read a step late, pages sealed when they are due."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.pages_cuda import PageRows
from protos.page_hash import PAGE_TOKENS
from tests.bench.engine_gpu_model import Cache, in_blocks
from worker.bench_profile import profiled
from worker.decode_graphs import DecodeGraphs
from worker.decode_state import RowStart
from worker.gpu_pages import GpuPages, Sealing
from worker.models.gpu_attention import GpuAttention
from worker.models.llama import Llama
from worker.sequence import Sampling

WARM_UP, PROFILED, REPLAYS = 24, 4, 24


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    num_tokens: int  # of each at the start
    mode: str = "dense"
    fp8: bool = False  # weights
    steps: int = 256
    few_rows: int = 8


@dataclass
class Seals:
    """Packs what is due behind the step that was launched last, on its stream; waits in ``finish`` only."""

    cache: Cache
    pages: GpuPages
    graphs: DecodeGraphs
    bases: list[dict[str, int]]
    num_sealed: int = 0
    late: list[Sealing] = field(default_factory=list)

    def after(self, num_tokens: int) -> None:
        """All rows have computed so many tokens."""
        wanted = self.cache.bases(num_tokens)
        for name, base in wanted.items():
            if self.cache.geometry.group(name).mode == "dense":
                continue
            due = [row for row, bases in enumerate(self.bases) if bases[name] < base]
            if not due:
                continue
            entries = []
            for row in due:
                first = self.bases[row][name]
                page = self.cache.tables[name][row][first // PAGE_TOKENS]
                entries.append(PageRows(page, first, self.cache.slots(row)[name], PAGE_TOKENS))
                self.bases[row][name] = first + PAGE_TOKENS
                self.graphs.set_pages(row, name, first // PAGE_TOKENS, [page])
                self.graphs.set_base(row, name, first + PAGE_TOKENS)
            self.late.append(self.pages.start_seal(name, entries))
            self.num_sealed += len(entries)

    def finish(self) -> None:
        """Raises RowError: a row that was packed was not finite."""
        for sealing in self.late:
            sealing.checksums()


def measure(network: Llama, case: Case, read_bytes_s: float, device: torch.device) -> dict[str, Any]:
    """Facts of one case. read_bytes_s: what a kernel that only reads did in this run."""
    if case.fp8:
        network = in_blocks(network)
    max_tokens = case.num_tokens + WARM_UP + case.steps + PROFILED + REPLAYS + 16
    on_gpu = device.type == "cuda"
    began = time.perf_counter()
    cache = Cache.make(network.config, case.mode, case.rows, max_tokens, device)
    cache.fill()
    attention = GpuAttention(
        cache.kv, q_heads=network.config.q_heads, max_sequences=case.rows, max_sequence_tokens=max_tokens
    )
    pages = GpuPages(cache.kv)
    attention.load()
    pages.load()
    graphs = DecodeGraphs(
        network,
        cache.kv,
        attention,
        max_sequences=case.rows,
        max_sequence_tokens=max_tokens,
        buckets=(),
        few_rows=case.few_rows,
    )
    capture_s = graphs.capture()
    bases = cache.bases(case.num_tokens)
    for row in range(case.rows):
        start = RowStart(
            token=1 + 7 * row,
            num_tokens=case.num_tokens,
            limit=max_tokens,
            sampling=Sampling(),
            pages=cache.pages(row, case.num_tokens),
            bases=bases,
            tail_slots=cache.slots(row),
        )
        graphs.enter(row, start)
    seals = Seals(cache, pages, graphs, [dict(bases) for _ in range(case.rows)])
    ready_s = time.perf_counter() - began
    length = case.num_tokens
    with torch.inference_mode():
        length, _, _ = _steps(graphs, seals, case.rows, length, WARM_UP)
        before = _allocations(device)
        start_tokens = length
        length, wall_s, said = _steps(graphs, seals, case.rows, length, case.steps)
        after = _allocations(device)
        profile = _profiled(graphs, seals, case.rows, length, device) if on_gpu else {}
        length += PROFILED
        gap = _gaps(graphs, case.rows) if on_gpu else {}
    seals.finish()
    fine = all(token >= 0 for tokens in said for token in tokens)
    step_s = wall_s / case.steps
    weights = _weight_bytes(network)
    kv = cache.kv_bytes((start_tokens + length) // 2)
    floor_s = (weights + kv) / read_bytes_s
    idle = 1 - gap["replay_ms"] / 1e3 / step_s if gap else None
    return {
        "ok": fine and len(said) == case.steps,
        "tokens_per_s": round(case.rows / step_s, 2),
        "step_ms": round(step_s * 1e3, 4),
        "floor_ms": round(floor_s * 1e3, 4),
        "of_floor": round(floor_s / step_s, 4),
        "weights_gb": round(weights / 1e9, 3),
        "kv_gb": round(kv / 1e9, 3),
        "kv_bytes_held": sum(cache.kv.page_bytes(g.name).numel() for g in cache.geometry.groups),
        "idle_between_steps": None if idle is None else round(idle, 4),
        **gap,
        "allocations_a_step": None if before is None or after is None else (after[0] - before[0]) / case.steps,
        "bytes_grown": None if before is None or after is None else after[1] - before[1],
        "pages_sealed": seals.num_sealed,
        "capture_s": round(capture_s, 2),
        "ready_s": round(ready_s, 2),
        "memory": vars(graphs.memory),
        **profile,
        "distinct_tokens": len({token for tokens in said for token in tokens}),
    }


def _steps(
    graphs: DecodeGraphs, seals: Seals, rows: int, length: int, count: int
) -> tuple[int, float, list[list[int]]]:
    """(tokens of each row afterwards, seconds, what the steps drew). The last step's tokens are read, too."""
    said: list[list[int]] = []
    began = time.perf_counter()
    step = 0
    for turn in range(count):
        step = graphs.launch(rows)
        seals.after(length)  # the step computed the token that made it `length`
        length += 1
        if turn:
            said.append(graphs.tokens(step - 1))
    said.append(graphs.tokens(step))
    return length, time.perf_counter() - began, said


def _gaps(graphs: DecodeGraphs, rows: int) -> dict[str, float]:
    """Milliseconds of a step that is one of many launched without looking: what the GPU needs."""
    replay = graphs._replays[graphs.bucket_of(rows), graphs.layers.reaches[-1]]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    graphs.state.patches[:, 0] = 0  # every turn finds none
    replay()
    begin.record()
    for _ in range(REPLAYS - 4):
        replay()
    end.record()
    end.synchronize()
    return {"replay_ms": round(float(begin.elapsed_time(end)) / (REPLAYS - 4), 4)}


def _allocations(device: torch.device) -> tuple[int, int] | None:
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return int(stats.get("allocation.all.allocated", 0)), int(torch.cuda.memory_reserved(device))


def _weight_bytes(network: Llama) -> int:
    """Read by a step: every matrix once, the embedding's rows not counted."""
    return network.weight_bytes - 2 * network.embed.numel()


def _profiled(graphs: DecodeGraphs, seals: Seals, rows: int, length: int, device: torch.device) -> dict[str, Any]:
    """Host calls a step, kernels of a step by name, and the share of the time in which one runs."""
    try:
        seen = profiled(lambda: _steps(graphs, seals, rows, length, PROFILED), PROFILED, device)
    except Exception as error:  # noqa: BLE001 - the times stand without it
        return {"failed": f"{type(error).__name__}: {error}"[:400]}
    return {
        "launch_calls_a_step": seen.launches,
        "blocking_waits_a_step": seen.waits,
        "event_waits_a_step": seen.event_waits,
        "driver_allocations_a_step": seen.allocations,
        "kernels_a_step": round(seen.kernels, 1),
        "busy_share": round(seen.busy_share, 4),
        "profile": {"host_calls_a_step": seen.calls, "us_a_step": seen.us_by_kernel},
    }
