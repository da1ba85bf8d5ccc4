"""The worker's engine on a GPU: right first, then its steady state. Llama-3-8B's geometry, random weights, no store.

    python3 -m tests.e2e.gpu_engine_check --records FILE --commit SHA --seconds 200
    python3 -m tests.e2e.gpu_engine_check --only same,cost,idle,prefill --modes dense,tq4

same: in deterministic mode a sequence's greedy tokens are the same alone, in a batch of 8, after preemption, after a
fork, and computed again from tokens emitted elsewhere; alone and in the batch also its log-probabilities, bit for bit.
fused: prompts by the steps' own kernels against PyTorch's operators.
cost: a step of deterministic mode against one of the default. idle: the engine's step against bare replays of the same
graph, what of it the host works and waits. prefill: 16 sequences that decode while a prompt of 100,000 tokens is
computed: gaps between their tokens undisturbed and disturbed, the prompt's time to first token, alone too, and its MFU.

Every case is one JSON line on standard output and in $OUT/gpu_engine_check.jsonl; no fault of one hides another. Exit
status: 0 all passed, 1 a case failed, 2 this machine cannot.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvstore.local import LocalAttachment
from protos import types_pb2
from tests.bench.engine_gpu_model import LLAMA_3_8B, SMALL
from worker.config import WorkerConfig
from worker.device_memory import DeviceMemory
from worker.due import worst_pages
from worker.engine import Engine
from worker.families import architecture
from worker.gpu import memory_of, store_name
from worker.random_weights import random_model
from worker.sequence import Output, Request, Sampling, StepResult, StopConditions
from worker.sequence import Sequence as Running
from worker.weights import Model

PEAK_FLOPS = 989e12  # bf16, dense, of an H200
MODES: Mapping[str, dict[str, Any]] = {"dense": {}, "tq4": {"kv_mode": "turboquant"}, "fp8": {"kv_mode": "fp8"}}


@dataclass(frozen=True)
class Sizes:
    raw: dict[str, Any]
    lengths: tuple[int, ...] = (1, 77, 128, 300, 511, 640, 1000, 1500)
    output: int = 96
    cost_steps: int = 96
    idle: tuple[tuple[int, int, str], ...] = ((64, 512, "dense"), (64, 512, "tq4"), (1, 128, "dense"))
    idle_steps: int = 200
    decoding: int = 16
    decoding_tokens: int = 4096
    long_prompt: int = 100_000
    calm_steps: int = 160
    patience_s: float = 30.0


GPU = Sizes(LLAMA_3_8B)
TINY = SMALL | {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 64, "vocab_size": 512}
CPU = Sizes(TINY, (1, 30, 70, 130, 260), 8, 4, ((1, 20, "dense"), (3, 20, "tq4")), 4, 2, 20, 900, 4)


class Driven:
    """An engine that is stepped by hand. A context manager."""

    def __init__(self, model: Model, config: WorkerConfig, num_tokens: int, sequences: int | None = None) -> None:
        geometry = architecture(RAW[0]).geometry(config, "bfloat16" if config.on_gpu else "float32", num_tokens)
        info = types_pb2.ModelInfo()
        info.CopyFrom(model.info)
        info.max_sequence_tokens = num_tokens
        self.model = replace(model, geometry=geometry, info=info)
        name = store_name(config.device) if config.on_gpu else config.device
        worst = max(worst_pages(geometry, group, num_tokens) for group in geometry.groups)
        self.attachment = LocalAttachment(
            geometry,
            num_pages=max(2, (sequences or config.max_running) * worst),
            max_sequences=config.num_slots,
            max_sequence_tokens=num_tokens,
            checkpoint_slots=config.num_checkpoints if geometry.tail_bytes else 0,
            device=name,
            device_memory=DeviceMemory(memory_of(name)) if config.on_gpu else None,
        )
        self.config = config
        self.outputs: dict[str, list[Output]] = {}
        self.times: dict[str, list[float]] = {}  # of each output with tokens
        began = time.perf_counter()
        self.engine = Engine(config, self.model, self.attachment, self._take)
        self.start_s = time.perf_counter() - began

    def __enter__(self) -> Driven:
        return self

    def __exit__(self, *error: object) -> None:
        del self.engine
        gc.collect()
        self.attachment.close()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _take(self, result: StepResult) -> None:
        now = time.perf_counter()
        for output in result.outputs:
            if output.error is not None:
                raise output.error
            self.outputs.setdefault(output.request_id, []).append(output)
            if output.token_ids:
                self.times.setdefault(output.request_id, []).append(now)

    def submit(self, name: str, prompt: Sequence[int], most: int, emitted: Sequence[int] = (), **sampling: Any) -> None:
        stop = StopConditions(most, ignore_eos=True)
        never = types_pb2.PREFIX_REUSE_NONE
        self.engine.submit(Request(name, "", tuple(prompt), Sampling(**sampling), stop, tuple(emitted), reuse=never))

    def step(self, count: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(count):
                self.engine.step()

    def run(self) -> None:
        while (load := self.engine.load()).num_running or load.num_waiting:
            self.step()

    def until(self, name: str, tokens: int) -> None:
        while len(self.tokens(name)) < tokens:
            self.step()

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs.get(name, ()) for token in output.token_ids]

    def logprobs(self, name: str) -> list[float]:
        return [each.chosen.logprob for output in self.outputs.get(name, ()) for each in output.logprobs]

    def running(self, name: str) -> Running:
        return next(s for s in self.engine._running if s.request.request_id == name)

    @contextlib.contextmanager
    def between_steps(self) -> Iterator[None]:
        with torch.inference_mode():
            self.engine._land_early()
            yield


RAW: list[dict[str, Any]] = []


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(RAW[0]["vocab_size"]) for _ in range(length)]


def config_of(device: str, **settings: Any) -> WorkerConfig:
    graphs = {"decode_graphs": True} if device != "cpu:0" else {}
    dtype = "bfloat16" if device != "cpu:0" else "float32"
    more = {
        "max_running": 8,
        "prefill_chunk": 4096,
        "device": device,
        "dtype": dtype,
        "threads": 1,
        **graphs,
        **settings,
    }
    return WorkerConfig(model=Path("random"), name="random", kv_socket=Path("none"), worker_id="check", **more)


# --- the same tokens ---


def same(model: Model, device: str, mode: str, sizes: Sizes) -> dict[str, Any]:
    config = config_of(device, deterministic=True, **MODES[mode])
    prompts = [prompt(i, length) for i, length in enumerate(sizes.lengths)]
    names = [f"r{i}" for i in range(len(prompts))]
    most, cut = sizes.output, sizes.output // 2
    num_tokens = max(sizes.lengths) + most + 8
    facts: dict[str, Any] = {"ok": True, "prompts": list(sizes.lengths), "tokens": most}

    def differs(what: str, got: Sequence[Any], want: Sequence[Any], name: str) -> None:
        if list(got) != list(want):
            at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
            facts["ok"] = False
            facts.setdefault("differences", []).append(
                f"{what} {name}: from {at} on, {list(got[at : at + 3])} for {list(want[at : at + 3])}, "
                f"{len(got)} of {len(want)}"
            )

    with Driven(model, config, num_tokens) as driven:
        began = time.perf_counter()
        driven.engine.warm_up()
        facts["proved_s"], facts["start_s"] = round(time.perf_counter() - began, 2), round(driven.start_s, 2)
        for name, each in zip(names, prompts, strict=True):
            driven.submit(f"alone {name}", each, most, logprobs=0)
            driven.run()
        want = {name: driven.tokens(f"alone {name}") for name in names}
        facts["distinct_tokens"] = len({token for tokens in want.values() for token in tokens})
        for name, each in zip(names, prompts, strict=True):
            driven.submit(f"batch {name}", each, most)
        driven.run()
        for name, each in reversed(list(zip(names, prompts, strict=True))):
            driven.submit(f"told {name}", each, most, logprobs=0)
            driven.step(3)
        driven.run()
        for name in names:
            differs("batch", driven.tokens(f"batch {name}"), want[name], name)
            differs("another batch", driven.tokens(f"told {name}"), want[name], name)
            differs("log-probabilities", driven.logprobs(f"told {name}"), driven.logprobs(f"alone {name}"), name)
        for name, each in zip(names[-3:], prompts[-3:], strict=True):
            driven.submit(f"dropped {name}", each, most)
        for name in (names[-1], names[-2]):
            driven.until(f"dropped {name}", cut)
            with driven.between_steps():
                driven.engine._drop(driven.running(f"dropped {name}"))
        driven.run()
        facts["dropped"] = driven.engine.load().sequences_recomputed
        for name in names[-3:]:
            differs("preempted", driven.tokens(f"dropped {name}"), want[name], name)
        for name, each in zip(names[:3] + names[-2:], prompts[:3] + prompts[-2:], strict=True):
            driven.submit(f"parent {name}", each, most)
        forked = {}
        for name in (names[1], names[-1]):  # the one with the longer prompt comes later
            driven.until(f"parent {name}", cut)
            parent = driven.running(f"parent {name}")
            with torch.inference_mode():
                assert driven.engine.fork(parent, f"fork {name}") is not None
            forked[name] = parent.num_emitted
        driven.run()
        for name, at in forked.items():
            differs("parent", driven.tokens(f"parent {name}"), want[name], name)
            differs("fork", driven.tokens(f"fork {name}"), want[name][at:], name)
        for name, each in zip(names, prompts, strict=True):
            driven.submit(f"again {name}", each, most, want[name][:cut])
        driven.run()
        for name in names:
            differs("computed again", driven.tokens(f"again {name}"), want[name][cut:], name)
        facts["pages_packed"] = driven.engine.load().pages_packed
    return facts


def fused(model: Model, device: str, mode: str, sizes: Sizes) -> dict[str, Any]:
    """Prompts by the steps' kernels and by PyTorch's operators: log-probabilities of first tokens, and times."""
    config = config_of(device, **MODES[mode])
    facts: dict[str, Any] = {"ok": True}
    with Driven(model, config, max(sizes.lengths) + 8) as driven:
        runner = driven.engine._runner
        told = {}
        for name, forward in (("fused", runner._fused), ("plain", None), ("fused again", runner._fused)):
            runner._fused = forward
            at = time.perf_counter()
            for i, length in enumerate(sizes.lengths):
                driven.submit(f"{name} {i}", prompt(i, length), 2, logprobs=3)
            driven.run()
            facts[f"{name}_s"] = round(time.perf_counter() - at, 3)
            told[name] = [driven.logprobs(f"{name} {i}") for i in range(len(sizes.lengths))]
            facts[f"{name}_tokens"] = [driven.tokens(f"{name} {i}") for i in range(len(sizes.lengths))]
        pairs = zip(told["fused"], told["plain"], strict=True)
        facts["largest_difference"] = max(abs(a[0] - b[0]) for a, b in pairs)
        same_first = [a[0] == b[0] for a, b in zip(facts["fused_tokens"], facts["plain_tokens"], strict=True)]
        facts["same_first_tokens"] = sum(same_first)
        facts["ok"] = facts["largest_difference"] < 0.1 and 2 * sum(same_first) > len(same_first)
    return facts


# --- times ---


def step_ms(driven: Driven, rows: int, length: int, steps: int) -> tuple[float, list[float]]:
    """(median, all) of a steady engine's steps."""
    for i in range(rows):
        driven.submit(f"t{i}", prompt(i, length), steps + 64)
    while min(len(driven.tokens(f"t{i}")) for i in range(rows)) < 16:
        driven.step()
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        driven.step()
        took.append((time.perf_counter() - began) * 1e3)
    return statistics.median(took), took


def finish(driven: Driven, rows: int) -> None:
    for i in range(rows):
        driven.engine.abort(f"t{i}")
    driven.run()


def cost(model: Model, device: str, mode: str, sizes: Sizes) -> dict[str, Any]:
    facts: dict[str, Any] = {"ok": True}
    for name, deterministic in (("default", False), ("deterministic", True)):
        config = config_of(device, deterministic=deterministic, **MODES[mode])
        with Driven(model, config, 512 + sizes.cost_steps) as driven:
            for rows in (1, 8):
                ms, took = step_ms(driven, rows, 128, sizes.cost_steps)
                facts[f"{name}_b{rows}_ms"] = round(ms, 4)
                facts[f"{name}_b{rows}_spread"] = [round(min(took), 4), round(max(took), 4)]
                finish(driven, rows)
                driven.outputs.clear()
    for rows in (1, 8):
        facts[f"b{rows}_costs"] = round(facts[f"deterministic_b{rows}_ms"] / facts[f"default_b{rows}_ms"], 4)
    return facts


def idle(model: Model, device: str, rows: int, length: int, mode: str, sizes: Sizes) -> dict[str, Any]:
    config = config_of(device, max_running=rows, **MODES[mode])
    most = 3 * sizes.idle_steps + 200  # none ends before all have been measured
    with Driven(model, config, length + most + 8) as driven:
        driven.engine.warm_up()
        decode = driven.engine._runner._decode
        graphs = decode.graphs if decode is not None else None
        waited = [0.0]
        if graphs is not None:
            tokens = graphs.tokens

            def timed(number: int) -> list[int]:
                began = time.perf_counter()
                try:
                    return tokens(number)
                finally:
                    waited[0] += time.perf_counter() - began

            graphs.tokens = timed  # type: ignore[method-assign, assignment]
        for i in range(rows):
            driven.submit(f"t{i}", prompt(i, length), most)
        filling = fill(driven, rows)
        before = allocations(device)
        steps = driven.engine.load().num_steps
        entered = decode.num_entered if decode is not None else 0
        waited[0] = 0.0
        took: list[float] = []
        began = time.perf_counter()
        for _ in range(sizes.idle_steps):
            at = time.perf_counter()
            driven.step()
            took.append((time.perf_counter() - at) * 1e3)
        wall_ms = (time.perf_counter() - began) * 1e3 / sizes.idle_steps
        wait_ms = waited[0] * 1e3 / sizes.idle_steps
        after = allocations(device)
        facts: dict[str, Any] = {
            "ok": driven.engine.load().num_steps - steps == sizes.idle_steps,
            "tokens_per_s": round(rows / wall_ms * 1e3, 1),
            "step_ms": round(wall_ms, 4),
            "step_ms_p50_p99_max": [round(each, 3) for each in percentiles(took)],
            "host_works_ms": round(wall_ms - wait_ms, 4),
            "allocations_a_step": (after - before) / sizes.idle_steps,
            "pages_packed": driven.engine.load().pages_packed,
            "filling": filling,
        }
        if decode is not None:
            facts["rows_entered"] = decode.num_entered - entered
            replay_ms = bare_replays(decode.graphs, rows)
            facts |= {"replay_ms": round(replay_ms, 4), "idle": round(1 - replay_ms / wall_ms, 4)}
            facts["ok"] = facts["ok"] and facts["rows_entered"] == 0
        return facts


def fill(driven: Driven, rows: int) -> list[str]:
    """Steps until all decode; of the first and the last: prompt tokens, decode rows, milliseconds."""
    said: list[str] = []
    while min(len(driven.tokens(f"t{i}")) for i in range(rows)) < 16:
        before = {s.request.request_id: s.num_computed for s in driven.engine._running}
        began = time.perf_counter()
        driven.step()
        took = (time.perf_counter() - began) * 1e3
        after = {s.request.request_id: s.num_computed for s in driven.engine._running}
        counts = [count - before.get(name, 0) for name, count in after.items()]
        if prompts := [count for count in counts if count > 1]:
            decode_ms = driven.engine._pace.decode_s * 1e3
            said.append(
                f"{sum(prompts)} of {len(prompts)} + {len(counts) - len(prompts)}: {took:.1f} ({decode_ms:.1f})"
            )
    return [f"{len(said)} steps", *said[:12], "...", *said[-4:]]


def one_chunk(driven: Driven) -> dict[str, Any]:
    """What a step with a chunk spends its time on: kernels and host calls, by torch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        driven.step()
        wall_ms = (time.perf_counter() - began) * 1e3
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    kernels = [e for e in averages if "CUDA" in str(e.device_type)]
    host = [e for e in averages if "CUDA" not in str(e.device_type)]
    return {
        "wall_ms": round(wall_ms, 2),
        "kernels": {
            e.key[:70]: [e.count, round(e.self_device_time_total / 1e3, 3)]
            for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:16]
        },
        "host": {
            e.key[:50]: [e.count, round(e.self_cpu_time_total / 1e3, 3)]
            for e in sorted(host, key=lambda e: -e.self_cpu_time_total)[:18]
        },
        "kernel_ms": round(sum(e.self_device_time_total for e in kernels) / 1e3, 2),
        "num_kernels": sum(e.count for e in kernels),
    }


def bare_replays(graphs: Any, rows: int, count: int = 20) -> float:
    """Milliseconds of a step, launched without looking. Nothing is right behind it."""
    replay = next(each for kind, each in graphs._replays.items() if kind[0] == graphs.bucket_of(rows))
    torch.cuda.synchronize()
    with torch.inference_mode():
        graphs.state.patches[:, 0] = 0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    replay()
    begin.record()
    for _ in range(count):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def prefill(model: Model, device: str, mode: str, sizes: Sizes) -> dict[str, Any]:
    raw, count, length = RAW[0], sizes.decoding, sizes.long_prompt
    config = config_of(device, max_running=count + 1, prefill_chunk=8192, **MODES[mode])
    num_tokens = length + 64
    share = -(-(count * (sizes.decoding_tokens + 8192) + 2 * num_tokens) // num_tokens)
    facts: dict[str, Any] = {"ok": True, "decoding": count, "of_tokens": sizes.decoding_tokens, "prompt": length}
    with Driven(model, config, num_tokens, share) as driven:
        driven.engine.warm_up()
        alone_s = 0.0
        if mode == "dense":
            driven.submit("alone", prompt(99, length), 1)
            alone_s = timed_run(driven, "alone")
            facts["alone_ttft_s"] = round(alone_s, 3)
        for i in range(count):
            driven.submit(f"t{i}", prompt(i, sizes.decoding_tokens), 7000)
        facts["filling"] = fill(driven, count)
        driven.times.clear()
        driven.step(sizes.calm_steps)
        calm = gaps(driven, count)
        driven.times.clear()
        driven.step()
        began = time.perf_counter()
        driven.submit("long", prompt(98, length), 1)
        sizes_of_chunks: list[int] = []
        spent: list[float] = []
        before = 0
        while not driven.tokens("long"):
            at = time.perf_counter()
            driven.step()
            spent.append((time.perf_counter() - at) * 1e3)
            here = next((s.num_computed for s in driven.engine._running if s.request.request_id == "long"), before)
            sizes_of_chunks.append(here - before)
            before = here
            if time.perf_counter() - began > sizes.patience_s:
                facts["ok"], facts["gave_up_at"] = False, here
                break
        ttft_s = time.perf_counter() - began
        busy = gaps(driven, count)
        quarters = [sum(sizes_of_chunks[: i * len(sizes_of_chunks) // 8]) for i in range(1, 9)]
        facts |= {
            "calm_itl_ms_p50_p99_max": [round(each, 3) for each in percentiles(calm)],
            "busy_itl_ms_p50_p99_max": [round(each, 3) for each in percentiles(busy)],
            "p99_ratio": round(percentiles(busy)[1] / percentiles(calm)[1], 3),
            "first_steps_ms": [round(each, 1) for each in spent[:12]],
            "ttft_s": round(ttft_s, 3),
            "steps": len(spent),
            "tokens_by_eighth": quarters,
            "chunk_ms_by_eighth": [round(spent[i * len(spent) // 8], 1) for i in range(8)],
            "layer_us_a_token": round(driven.engine._pace.layer_token_s * 1e6, 3),
            "chunks_landed": sum(count > 0 for count in sizes_of_chunks),
            "slow_steps": [
                [at, round(ms, 1), sizes_of_chunks[at]]
                for at, ms in enumerate(spent)
                if ms > 2.4 * percentiles(calm)[1]
            ][:24],
            "decode_s": driven.engine._pace.decode_s,
        }
        if torch.cuda.is_available():  # behind what is measured: the profiler's first step takes seconds
            driven.submit("profiled", prompt(97, length), 1)
            driven.step(40)
            facts["chunk_beside_decoding"] = one_chunk(driven)
    c = architecture(raw).shapes  # type: ignore[attr-defined]
    per_layer = c.hidden * (c.q_heads + 2 * c.kv_heads) * c.head_dim + c.q_heads * c.head_dim * c.hidden
    parameters = c.num_layers * (per_layer + 3 * c.hidden * c.intermediate)
    flops = 2 * parameters * length + 2 * c.num_layers * c.q_heads * c.head_dim * length**2
    facts["mfu"] = round(flops / ttft_s / PEAK_FLOPS, 4)
    if alone_s:
        facts["alone_mfu"] = round(flops / alone_s / PEAK_FLOPS, 4)
    facts["met"] = facts["ok"] and facts["p99_ratio"] < 3
    return facts


def timed_run(driven: Driven, name: str) -> float:
    began = time.perf_counter()
    driven.until(name, 1)
    return time.perf_counter() - began


def gaps(driven: Driven, count: int) -> list[float]:
    """Milliseconds between outputs, of all sequences."""
    all_of_them = []
    for i in range(count):
        times = driven.times.get(f"t{i}", [])
        all_of_them += [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
    return all_of_them


def percentiles(values: Sequence[float]) -> list[float]:
    ordered = sorted(values) or [0.0]
    return [ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], ordered[-1]]


def allocations(device: str) -> int:
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if device != "cpu:0" else 0


# --- what is run ---


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="same,fused,idle,prefill,cost", help="parts, in this order; commas between")
    parser.add_argument("--modes", default="dense,tq4", help="of same, prefill; the first of cost")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, to try the script")
    parser.add_argument("--seconds", type=float, default=200.0, help="no case begins after so long")
    parser.add_argument("--records", type=Path, help="file for records of what was timed")
    parser.add_argument("--commit", default="unknown", help="what the records say was run")
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        print("cannot run: torch sees no CUDA device", file=sys.stderr)
        return 2
    sizes, device = (GPU, "cuda:0") if on_gpu else (CPU, "cpu:0")
    RAW[:] = [sizes.raw]
    began, modes = time.monotonic(), options.modes.split(",")
    out = Path(os.environ["OUT"]) / "gpu_engine_check.jsonl" if "OUT" in os.environ else None
    lines: list[dict[str, Any]] = []

    def case(part: str, name: str, call: Callable[[], dict[str, Any]]) -> None:
        at = time.monotonic()
        if at - began > options.seconds:
            facts: dict[str, Any] = {"ok": False, "skipped": "out of time"}
        else:
            try:
                facts = call()
            except Exception as error:  # noqa: BLE001 - the others shall run
                facts = {"ok": False, "crashed": repr(error)[:1500], "trace": traceback.format_exc()[-3500:]}
        line = {"part": part, "case": name, "seconds": round(time.monotonic() - at, 2), **facts}
        lines.append(line)
        print(json.dumps(line, default=str), flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line, default=str) + "\n")
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()

    made: list[Model] = []

    def make() -> dict[str, Any]:
        made.append(random_model(config_of(device, max_sequence_tokens=sizes.long_prompt + 64), sizes.raw))
        return {"ok": True, "parameters": made[0].info.num_parameters}

    case("model", "random", make)
    if not made:
        return 1
    (model,) = made
    for part in options.only.split(","):
        if part == "same":
            for mode in modes:
                case(part, mode, partial(same, model, device, mode, sizes))
        elif part == "fused":
            for mode in modes:
                case(part, mode, partial(fused, model, device, mode, sizes))
        elif part == "cost":
            case(part, modes[0], partial(cost, model, device, modes[0], sizes))
        elif part == "idle":
            for rows, length, mode in sizes.idle:
                case(part, f"b{rows}-{length}-{mode}", partial(idle, model, device, rows, length, mode, sizes))
        elif part == "prefill":
            for mode in modes:
                case(part, mode, partial(prefill, model, device, mode, sizes))
        else:
            raise SystemExit(f"no such part: {part}")
    if options.records:
        records = list(_records(lines, options.commit, on_gpu))
        options.records.write_text("".join(json.dumps(record) + "\n" for record in records))
    failed = [f"{line['part']} {line['case']}" for line in lines if not line["ok"]]
    print(f"{len(lines) - len(failed)} passed, {len(failed)} failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _records(lines: Sequence[dict[str, Any]], commit: str, on_gpu: bool) -> Iterator[dict[str, Any]]:
    units = {"idle": ("step_ms", "ms a step"), "prefill": ("p99_ratio", "times"), "cost": ("b8_costs", "times")}
    common = {
        "bench": "gpu_engine_check",
        "kind": "measured",
        "machine": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit,
        "command": "python3 -m tests.e2e.gpu_engine_check " + " ".join(sys.argv[1:]),
        "rival": None,
        "rival_why": "an engine against itself",
    }
    for line in lines:
        if "skipped" in line or "crashed" in line or line["part"] == "model":
            continue
        key, unit = units.get(line["part"], ("ok", "all the same"))
        floor = {"floor": line["replay_ms"], "floor_by": "bare replays of the graph"} if "replay_ms" in line else {}
        facts = {name: value for name, value in line.items() if name not in ("part", "case", "ok")}
        yield {
            **common,
            "case": f"{line['part']}-{line['case']}",
            "value": line.get(key),
            "unit": unit,
            **floor,
            **facts,
        }


if __name__ == "__main__":
    sys.exit(main())
