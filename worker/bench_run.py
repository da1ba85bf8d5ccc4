"""Engines measured side by side in one process: windows of decode steps by turns, then one under torch's profiler."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvstore.geometry import CacheGeometry
from protos.page_hash import PAGE_TOKENS
from worker import owners
from worker.bench_engine import BenchEngine
from worker.bench_profile import Profile, profiled
from worker.config import WorkerConfig
from worker.families import architecture
from worker.ledger import Ledger, Reading
from worker.random_weights import random_model
from worker.weights import Model, dtype_name, load_model

PROFILED_STEPS = 8
LEAST_TOKENS = 256
"""Of a window: what is shorter is a try."""
SLACK_TOKENS = 16

Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """What runs: ``rows`` sequences, all of them in every step, each with a prompt of ``prompt`` random tokens that are
    computed by ``chunk`` a step.

    A window is ``tokens`` tokens of each; ``repeats`` of them, behind ``warm_up`` tokens. Sequences live through all,
    so later windows are of longer sequences, for every engine alike.
    """

    rows: int = 1
    prompt: int = 128
    tokens: int = LEAST_TOKENS
    chunk: int = 512
    warm_up: int = 32
    repeats: int = 3
    seed: int = 0

    @property
    def num_tokens(self) -> int:
        """Of a sequence at the end, at most: those whose prompts come first decode while the others' are computed."""
        filling = -(-self.rows * self.prompt // self.chunk) + self.rows
        measured = self.warm_up + self.repeats * self.tokens + PROFILED_STEPS
        return self.prompt + filling + measured + SLACK_TOKENS

    @property
    def mean_tokens(self) -> int:
        """Of a sequence, over all windows."""
        return self.prompt + self.warm_up + self.repeats * self.tokens // 2


@dataclass(frozen=True)
class Window:
    """Of all engines' steps from one token of each sequence to another. Milliseconds are of a step."""

    tokens_per_s: float
    step_ms: float
    phase_ms: Mapping[str, float]
    append_ms: float
    seal_ms: float
    allocations: float | None  # by torch's allocator, a step; None on a CPU


@dataclass
class Side:
    """One configuration. ``held``: bytes of its KV memory by arena; ``in_use``: of pages and tails that sequences hold,
    at the start and at the end.
    """

    name: str
    config: WorkerConfig
    model: Model
    bench: BenchEngine
    windows: list[Window] = field(default_factory=list)
    profile: Profile | None = None
    held: dict[str, int] = field(default_factory=dict)
    in_use: list[int] = field(default_factory=list)
    pages_packed: int = 0

    @property
    def tokens_per_s(self) -> float:
        return statistics.median(window.tokens_per_s for window in self.windows)

    @property
    def step_ms(self) -> float:
        return statistics.median(window.step_ms for window in self.windows)


@dataclass(frozen=True)
class Measured:
    """``before``, ``after``: the process's memory when all engines were ready, and at the end."""

    load: Load
    sides: tuple[Side, ...]
    read_bytes_s: float
    before: Reading
    after: Reading


@dataclass(frozen=True)
class Source:
    """Where the model comes from: config.json, and the folder with its weights; None: they are random."""

    raw: Mapping[str, Any]
    folder: Path | None

    def load(self, config: WorkerConfig) -> Model:
        """Raises what ``load_model`` and ``random_model`` raise."""
        if self.folder is None:
            return random_model(config, self.raw)
        return load_model(replace(config, model=self.folder))

    def in_mode_of(self, config: WorkerConfig, model: Model) -> Model:
        """The same network over KV memory as ``config`` has it."""
        dtype = dtype_name(config.dtype, self.raw)
        geometry = architecture(self.raw).geometry(config, dtype, config.max_sequence_tokens)
        return replace(model, geometry=geometry)


def run(configs: Mapping[str, WorkerConfig], source: Source, load: Load, say: Say) -> Measured:
    """Raises what loading a model, making an engine and its steps raise.

    Args:
        configs: by name; what the load decides is the load's. Engines with the same weights share one model.
    """
    configs = {
        name: replace(config, max_running=load.rows, max_sequence_tokens=load.num_tokens, prefill_chunk=load.chunk)
        for name, config in configs.items()
    }
    first = next(iter(configs.values()))
    ledger = owners.begin(first)
    with ExitStack() as stack:
        models = _models(configs, source, ledger)
        device = next(iter(models.values())).network.device
        read_bytes_s = read_rate(device)
        sides = []
        for name, config in configs.items():
            say(f"{name}: starting")
            bench = stack.enter_context(BenchEngine(config, models[name], load.num_tokens))
            sides.append(Side(name, config, models[name], bench))
            owners.made(ledger, config, bench.engine, _arenas(bench))
        for side in sides:
            _fill(side, load, say)
        owners.ready(ledger)
        before = ledger.read()
        for number in range(load.repeats):
            for side in sides if number % 2 == 0 else sides[::-1]:
                side.windows.append(_window(side, load))
                say(
                    f"{side.name}: window {number + 1} of {load.repeats}, {side.windows[-1].tokens_per_s:,.1f} tokens/s"
                )
        after = ledger.read()  # before the profiler, which keeps what it saw
        for side in sides:
            side.in_use.append(in_use(side.bench))
            side.pages_packed = side.bench.load().pages_packed
            side.profile = _profile(side, load)
            side.bench.end()
    return Measured(load, tuple(sides), read_bytes_s, before, after)


def _models(configs: Mapping[str, WorkerConfig], source: Source, ledger: Ledger) -> dict[str, Model]:
    found: dict[str, Model] = {}
    loaded: dict[tuple[str, str], Model] = {}
    for name, config in configs.items():
        key = (config.dtype, config.weights)
        if key not in loaded:
            loaded[key] = source.load(config)
            owners.loaded(ledger, config, loaded[key])
        found[name] = source.in_mode_of(config, loaded[key])
    return found


def _arenas(bench: BenchEngine) -> list[Any]:
    return [*bench.attachment.arenas.values(), *bench.attachment.tails.values()]


def _fill(side: Side, load: Load, say: Say) -> None:
    """Prompts computed, and the warm-up's tokens drawn."""
    bench, rng = side.bench, random.Random(load.seed)
    vocabulary = side.model.info.vocab_size
    for number in range(load.rows):
        prompt = [rng.randrange(vocabulary) for _ in range(load.prompt)]
        bench.submit(f"r{number}", prompt, load.num_tokens - load.prompt)
    began = time.perf_counter()
    while (state := bench.load()).queued_tokens or state.num_waiting or not state.num_steps:
        bench.step()
    bench.synchronize()
    took = time.perf_counter() - began
    say(f"{side.name}: {load.rows * load.prompt:,} prompt tokens in {took:.1f} s")
    bench.run_until(bench.num_emitted + load.rows * load.warm_up)
    side.held = {f"{arena.group} {kind}": arena.num_pages * arena.page_bytes for kind, arena in _by_kind(bench)}
    side.in_use.append(in_use(bench))


def _by_kind(bench: BenchEngine) -> list[tuple[str, Any]]:
    attachment = bench.attachment
    return [("pages", each) for each in attachment.arenas.values()] + [
        ("tails", each) for each in attachment.tails.values()
    ]


def _window(side: Side, load: Load) -> Window:
    bench, device = side.bench, side.bench.device
    bench.synchronize()
    before, phases = bench.load(), dict(bench.phases.ns)
    allocations, emitted, began = _allocations(device), bench.num_emitted, time.perf_counter()
    bench.run_until(emitted + load.rows * load.tokens)
    bench.synchronize()
    took = time.perf_counter() - began
    after, made = bench.load(), _allocations(device)
    steps = max(1, after.num_steps - before.num_steps)
    return Window(
        tokens_per_s=(bench.num_emitted - emitted) / took,
        step_ms=took / steps * 1e3,
        phase_ms={name: (ns - phases.get(name, 0)) / steps / 1e6 for name, ns in bench.phases.ns.items()},
        append_ms=(after.append_ns - before.append_ns) / steps / 1e6,
        seal_ms=(after.seal_ns - before.seal_ns) / steps / 1e6,
        allocations=None if made is None or allocations is None else (made - allocations) / steps,
    )


def _profile(side: Side, load: Load) -> Profile:
    bench = side.bench
    steps = bench.load().num_steps
    found = profiled(
        lambda: bench.run_until(bench.num_emitted + load.rows * PROFILED_STEPS), PROFILED_STEPS, bench.device
    )
    assert bench.load().num_steps > steps
    return found


def in_use(bench: BenchEngine) -> int:
    """Bytes of pages that sequences hold, and of their tails."""
    table, geometry = bench.attachment.device.table, bench.model.geometry
    pages = sum(
        (table.groups[group.name].num_open + table.groups[group.name].num_sealed) * group.page_bytes
        for group in geometry.groups
        if group.has_pages
    )
    return int(pages + bench.load().num_running * geometry.tail_bytes)


def read_rate(device: torch.device) -> float:
    """Bytes a second of a sum over memory that no cache holds, the best of five."""
    size = (1 << 30) if device.type == "cuda" else (128 << 20)
    data = torch.ones(size // 4, device=device)

    def once() -> float:
        _wait(device)
        began = time.perf_counter()
        data.sum()
        _wait(device)
        return time.perf_counter() - began

    return size / min(once() for _ in range(5))


def floor_tokens_per_s(side: Side, load: Load, read_bytes_s: float) -> float:
    """What reading every weight and all KV once a step lets through at ``read_bytes_s``; the embedding's rows, and what
    a step writes, are not counted.
    """
    network: Any = side.model.network
    embedding = 0 if network.lm_head is network.embed else network.embed.nbytes
    weights = sum(use.num_bytes for use in side.model.uses) - embedding
    kv = load.rows * kv_bytes(side.model.geometry, load.mean_tokens)
    return load.rows * read_bytes_s / (weights + kv)


def kv_bytes(geometry: CacheGeometry, num_tokens: int) -> int:
    """Of one sequence, about what a decode step reads: pages behind its tail's reach, and the tail as computed."""
    total = 0
    for group in geometry.groups:
        seen = min(num_tokens, group.window) if group.window else num_tokens
        dense = sum(region.heads * region.dim * _item(region.dtype) // region.ratio for region in group.regions)
        in_tail = min(seen, group.effective_window + PAGE_TOKENS // 2) if group.has_tail else 0
        total += in_tail * dense + (seen - in_tail) * group.page_bytes // PAGE_TOKENS
    return total


def _item(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _allocations(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratios(first: Side, second: Side) -> Sequence[float]:
    """Of the second's tokens/s to the first's, window by window."""
    pairs = zip(first.windows, second.windows, strict=True)
    return [b.tokens_per_s / a.tokens_per_s for a, b in pairs]
