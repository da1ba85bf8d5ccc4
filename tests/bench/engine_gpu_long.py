"""Very many decode steps of a worker's engine with sequences coming and going: whether it slows down or grows."""

from __future__ import annotations

import gc
import itertools
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from protos.errors import InternalError
from worker import owners
from worker.bench_engine import BenchEngine
from worker.config import WorkerConfig
from worker.memory_meter import HOST
from worker.random_weights import random_model
from worker.sequence import Sampling

CYCLE = 48  # sequences, after which lengths come again: so that all quarters have the same to do
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1)


@dataclass(frozen=True)
class Run:
    """``num_running`` sequences at any time; ``longest``: of one, prompt and output together. What is not done after
    ``seconds`` is told as it stands, and not ok.
    """

    steps: int = 20_000
    warm_up: int = 800
    num_running: int = 16
    longest: int = 1024
    mode: str = "turboquant"
    seconds: float = 75.0
    looks: int = 20
    say_every_s: float = 8.0


@dataclass(frozen=True)
class Coming:
    """abort_at: tokens after which its caller goes; 0: never."""

    prompt: int
    output: int
    sampled: bool
    abort_at: int


def comings(longest: int) -> Iterator[Coming]:
    """Lengths mixed, half of them sampled, one in six aborted."""
    rng = random.Random(5)
    cycle = []
    for number in range(CYCLE):
        prompt = rng.choice((3, 9, 17, 30, 44, 64))  # short: steps are what is asked for, and decode grows over pages
        output = rng.randrange(60, min(700, longest - prompt))
        cycle.append(Coming(prompt, output, number % 2 == 1, output // 2 if number % 6 == 4 else 0))
    return itertools.cycle(cycle)


class Crowd:
    """Keeps the engine's places full."""

    def __init__(self, bench: BenchEngine, run: Run) -> None:
        self._bench, self._run = bench, run
        self._comings = comings(run.longest)
        self._rng = random.Random(7)
        self._to_abort: dict[str, tuple[Coming, int]] = {}
        self.num_submitted = self.num_aborted = 0
        self._said, self._prefill_s, self._began = time.monotonic(), 0.0, (0, 0)

    def step(self) -> None:
        bench = self._bench
        while self.num_submitted - bench.num_ended < self._run.num_running:
            coming = next(self._comings)
            name = f"r{self.num_submitted}"
            prompt = [self._rng.randrange(bench.model.info.vocab_size) for _ in range(coming.prompt)]
            sampling = replace(SAMPLED, seed=self.num_submitted) if coming.sampled else Sampling()
            bench.submit(name, prompt, coming.output, sampling)
            if coming.abort_at:
                self._to_abort[name] = (coming, bench.load().num_steps)
            self.num_submitted += 1
        prefill, began = bench.load().queued_tokens > 0, time.monotonic()
        bench.step()
        self._prefill_s += (time.monotonic() - began) * prefill
        if began - self._said > self._run.say_every_s:
            self._say(began)
        now = bench.load().num_steps
        for name, (coming, began) in list(self._to_abort.items()):
            if now - began > coming.abort_at:
                self.num_aborted += bench.engine.abort(name)
                del self._to_abort[name]

    def _say(self, now: float) -> None:
        bench, took = self._bench, now - self._said
        load = bench.load()
        steps, tokens = self._began
        told = {
            "progress": "long",
            "steps": load.num_steps,
            "steps_per_s": round((load.num_steps - steps) / took, 1),
            "tokens_per_s": round((bench.num_emitted - tokens) / took, 1),
            "running": load.num_running,
            "waiting": load.num_waiting,
            "submitted": self.num_submitted,
            "share_of_steps_with_prompts": round(self._prefill_s / took, 3),
            "phases_ms_a_step": {
                name: round(ns / 1e6 / max(1, bench.phases.num_steps), 3) for name, ns in bench.phases.ns.items()
            },
        }
        print(json.dumps(told), flush=True)
        self._said, self._prefill_s, self._began = now, 0.0, (load.num_steps, bench.num_emitted)


def measure(raw: dict[str, Any], device: torch.device, run: Run) -> dict[str, Any]:
    on_gpu = device.type == "cuda"
    config = WorkerConfig.from_dict(
        {
            "model": Path("none"),
            "name": "long",
            "kv_socket": Path("none"),
            "worker_id": "bench",
            "device": "cuda:0" if on_gpu else "cpu:0",
            "dtype": "bfloat16" if on_gpu else "float32",
            "kv_mode": run.mode,
            "max_running": run.num_running,
            "max_sequence_tokens": run.longest,
            "prefill_chunk": 512,
            "step_time_budget_ms": 0,
            "decode_graphs": on_gpu,
            "threads": 1 if not on_gpu else 0,
        }
    )
    ledger = owners.begin(config)
    model = random_model(config, raw)
    owners.loaded(ledger, config, model)
    deadline = time.monotonic() + run.seconds
    with BenchEngine(config, model, run.longest) as bench:
        arenas = [*bench.attachment.arenas.values(), *bench.attachment.tails.values()]
        owners.made(ledger, config, bench.engine, arenas)
        crowd = Crowd(bench, run)
        while bench.load().num_steps < run.warm_up and time.monotonic() < deadline:
            crowd.step()
        bench.synchronize()
        owners.ready(ledger)
        first, started = bench.load().num_steps, time.perf_counter()
        looks = [_look(bench, device, started)]
        for number in range(1, run.looks + 1):
            until = first + run.steps * number // run.looks
            while bench.load().num_steps < until and time.monotonic() < deadline:
                crowd.step()
            bench.synchronize()
            looks.append(_look(bench, device, started))
        rates = [
            (b["tokens"] - a["tokens"]) / max(1e-9, b["s"] - a["s"])
            for a, b in itertools.pairwise(looks[:: run.looks // 4])
        ]
        grown = {name: looks[-1][name] - looks[0][name] for name in looks[0] if name.endswith("bytes")}
        done = bench.load().num_steps - first
        checked = bench.attachment.verify() + _moved(bench)
        load, reading = bench.load(), ledger.read()
        facts = {
            "ok": done >= run.steps and not checked and not any(v for m, v in reading.grown.items() if m != HOST),
            "steps": done,
            "last_over_second_quarter": round(rates[3] / rates[1], 4) if len(rates) == 4 else None,
            "tokens_per_s_by_quarter": [round(rate, 1) for rate in rates],
            "step_ms": round((looks[-1]["s"] - looks[0]["s"]) / max(1, done) * 1e3, 3),
            "grown": grown,
            "grown_since_quarter": {
                name: looks[-1][name] - looks[run.looks // 4][name] for name in looks[0] if name.endswith("bytes")
            },
            "allocations_a_step": None
            if not on_gpu
            else round((looks[-1]["allocations"] - looks[0]["allocations"]) / max(1, done), 3),
            "unknown_grown": reading.grown,
            "memory": {f"{each.memory} {each.owner}": each.num_bytes for each in reading.owned},
            "sequences": crowd.num_submitted,
            "aborted": crowd.num_aborted,
            "pages_packed": load.pages_packed,
            "problems": checked[:3],
            "looks": looks,
        }
        bench.end()
    return facts


def _moved(bench: BenchEngine) -> list[str]:
    """What captured steps have baked in and is not where it was."""
    decode: Any = vars(bench.engine._runner)["_decode"]
    if decode is None:
        return []
    baked = decode._graphs.baked
    try:
        baked.check()
    except InternalError as moved:
        return [str(moved)]
    return [] if len(baked.tensors) > 10 else ["nothing is guarded"]


def _look(bench: BenchEngine, device: torch.device, started: float) -> dict[str, Any]:
    gc.collect()
    facts: dict[str, Any] = {
        "s": round(time.perf_counter() - started, 3),
        "steps": bench.load().num_steps,
        "tokens": bench.num_emitted,
        "rss_bytes": psutil.Process().memory_info().rss,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        facts |= {
            "device_bytes": total - free,
            "torch_reserved_bytes": torch.cuda.memory_reserved(device),
            "torch_allocated_bytes": torch.cuda.memory_allocated(device),
            "allocations": torch.cuda.memory_stats(device).get("allocation.all.allocated", 0),
        }
    return facts
