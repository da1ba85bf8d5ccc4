"""Chains of products of few rows on a GPU: right first, then decode steps of Llama-3-8B's geometry, random weights.

    python3 -m tests.bench.bench_few_rows --records FILE --commit SHA
    python3 -m tests.bench.bench_few_rows --only check                     parts: tilings, check, steps, lanes, small
    compute-sanitizer --tool racecheck python3 -m tests.bench.bench_few_rows --only small

check: every shape, 1 to 8 rows, bf16 and FP8, against float32 products; a row's bits beside other rows; chains against
their products one by one, many times. tilings: a captured step of one row for each way to cut the kernel: the whole
step, its chains alone, and what lies between them alone; what is checked and timed behind it is cut in the fastest way.
steps: cases of few rows, by own products and by cuBLAS. lanes: the step of one row where one lane of a warp arrives at
a barrier for all, and where each does. small: chains of a small model so cut, which compute-sanitizer can follow.

Every case is one JSON line; exit status: 0 all passed, 1 a case failed, 2 this machine cannot.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import loader
from kernels.cubins import build, default_folder
from kernels.decode_cells import DecodeShape, decode_cell
from kernels.linear_cuda import LinearChain
from kernels.step_cells import LinearTiling, linear_cell, linear_tiling, sample_cell, step_cell
from tests.bench import bench_engine_gpu, engine_gpu_linear, engine_gpu_steady
from tests.bench.bench_engine_gpu import Report
from tests.bench.engine_gpu_model import LLAMA_3_8B, SMALL, Cache, in_blocks, random_llama
from tests.bench.engine_gpu_steady import Case
from worker import decode_layers
from worker.decode_graphs import DecodeGraphs
from worker.decode_state import RowStart
from worker.models.gpu_attention import GpuAttention
from worker.models.llama import Llama, LlamaConfig
from worker.sequence import Sampling

PARTS = ("tilings", "check", "steps", "lanes", "small")
# By whether weights are FP8: producers, bytes of a row, stages under way.
CUTS = {
    False: ((4, 1024, (2, 3, 4)), (2, 1024, (3,)), (4, 2048, (2, 16)), (2, 2048, (1, 2, 16)), (4, 512, (5, 6))),
    True: ((4, 1024, (3,)), (2, 1024, (2, 3, 4)), (2, 2048, (1, 2, 3, 16))),
}
TILINGS = {
    fp8: [
        LinearTiling(8, producers, row_bytes, in_flight=in_flight)
        for producers, row_bytes, all_in_flight in cuts
        for in_flight in all_in_flight
    ]
    for fp8, cuts in CUTS.items()
}
REPLAYS, TURNS = 12, 3
STEPS = (
    Case("b1-128", 1, 128),
    Case("b1-128-cublas", 1, 128, few_rows=0, steps=64),
    Case("b1-128-fp8", 1, 128, fp8=True),
    Case("b1-4k", 1, 4096, steps=64),
    Case("b1-4k-tq4", 1, 4096, "tq4", steps=64),
    Case("b2-4k", 2, 4096, steps=64),
    Case("b2-4k-cublas", 2, 4096, few_rows=0, steps=64),
    Case("b4-4k", 4, 4096, steps=64),
    Case("b4-4k-cublas", 4, 4096, few_rows=0, steps=64),
    Case("b8-4k", 8, 4096, steps=64),
    Case("b8-4k-cublas", 8, 4096, few_rows=0, steps=64),
    Case("b8-4k-fp8", 8, 4096, fp8=True, steps=64),
    Case("b64-4k", 64, 4096, steps=64),
    Case("b64-4k-tq4", 64, 4096, "tq4", steps=64),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(PARTS[:3]), help="parts, in this order; commas between")
    parser.add_argument("--cases", default="", help="of steps; commas between")
    parser.add_argument("--seconds", type=float, default=120.0, help="no case begins after so long")
    parser.add_argument("--out", type=Path, help="file for a JSON line a case")
    parser.add_argument("--records", type=Path, help="file for records of what was timed")
    parser.add_argument("--commit", default="unknown", help="what the records say was run")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("cannot run: torch sees no CUDA device", file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    out = options.out or (Path(os.environ["OUT"]) / "bench_few_rows.jsonl" if "OUT" in os.environ else None)
    report = Report(out, time.monotonic() + options.seconds)
    facts = bench_engine_gpu._facts(device, options.commit)
    facts["command"] = facts["command"].replace("bench_engine_gpu", "bench_few_rows")
    report.say(facts)
    parts = options.only.split(",")
    if parts == ["small"]:
        for fp8 in (False, True):
            config = LlamaConfig.parse(SMALL)
            tiling = linear_tiling(fp8=fp8)._replace(lanes=32)
            call = partial(engine_gpu_linear.check_chain, config, device, fp8=fp8, turns=8, tiling=tiling)
            report.run("small", f"fp8 {fp8}", call)
        return 0 if all(line["ok"] for line in report.lines) else 1
    report.run("build", "cells", lambda: _build(device))
    read = float(report.run("machine", "ceilings", lambda: bench_engine_gpu._ceilings(device)).get("read", 4.2e12))
    with torch.inference_mode():
        network = random_llama(dict(LLAMA_3_8B), device, 5000)
    chosen = {fp8: linear_tiling(fp8=fp8) for fp8 in (False, True)}
    if "tilings" in parts:
        chosen |= _tilings(report, network, device)
    if "lanes" in parts:
        for fp8, lanes in [(fp8, lanes) for fp8 in chosen for lanes in (1, 32, 1, 32)]:
            of = in_blocks(network) if fp8 else network
            tiling = chosen[fp8]._replace(lanes=lanes)
            name = f"{'fp8' if fp8 else 'bf16'}-lanes{lanes}"
            report.run("lanes", name, partial(_one_tiling, of, tiling, fp8, device))
    facts |= {"tilings": {"fp8" if fp8 else "bf16": str(tiling) for fp8, tiling in chosen.items()}}
    report.say({"chosen": facts["tilings"]})
    if "check" in parts:
        _check(report, device, chosen)
    if "steps" in parts:
        names = {name for name in options.cases.split(",") if name}
        for case in STEPS:
            if not names or case.name in names:
                with _cut(chosen[case.fp8]):
                    report.run("steady", case.name, partial(engine_gpu_steady.measure, network, case, read, device))
    if options.records:
        records = _records(report.lines, facts, read)
        options.records.write_text("".join(json.dumps(record, default=str) + "\n" for record in records))
    failed = [f"{line['part']} {line['case']}" for line in report.lines if not line["ok"]]
    for line in report.lines:  # the reply carries the end of the output
        if line["part"] in ("tilings", "steady"):
            short = {k: line.get(k) for k in ("step_ms", "chains_ms", "between_ms", "of_floor", "crashed") if k in line}
            print(f"{line['part']:8} {line['case']:28} {short}", flush=True)
    print(f"{len(report.lines) - len(failed)} passed, {len(failed)} failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _records(lines: Sequence[dict[str, Any]], facts: dict[str, Any], read: float) -> list[dict[str, Any]]:
    """As bench_engine_gpu makes them, with cuBLAS in the same run as the rival, and what the checks found."""
    records = bench_engine_gpu._records(lines, facts, read)
    repeats, fp8 = {case.name: case.steps for case in STEPS}, {case.name for case in STEPS if case.fp8}
    own = {case.name for case in STEPS if 0 < case.rows <= case.few_rows}
    by_cublas = {
        record["case"].removesuffix("-cublas"): record["value"]
        for record in records
        if record["case"].endswith("-cublas")
    }
    for record in records:
        name = record["case"]
        kind = "fp8" if name in fp8 else "bf16"
        found = [line.get("errors") for line in lines if line["part"] == "check" and line["case"].endswith(kind)]
        worst = max((error for errors in found if errors for error in errors.values()), default=None)
        error = f"products: {worst:.4f} of their norm at most, against float32" if worst and name in own else None
        record |= {"bench": "few_rows", "repeats": repeats.get(name, 0), "error": error}
        if name in by_cublas:
            record |= {"rival": "cuBLAS for the products of the same step", "rival_value": by_cublas[name]}
    return records


def _build(device: torch.device) -> dict[str, Any]:
    arch = loader.arch_of(device)
    cells = [linear_cell("bf16", fp8=fp8, tiling=tiling) for fp8, tilings in TILINGS.items() for tiling in tilings]
    cells += [linear_cell("bf16", fp8=fp8, tiling=linear_tiling(fp8=fp8)._replace(lanes=32)) for fp8 in TILINGS]
    cells += [decode_cell(DecodeShape(128, 32, 8, kind, kind, "bf16"), arch) for kind in ("dense", "tq4")]
    cells += [step_cell("bf16"), sample_cell("bf16")]
    results = build(dict.fromkeys(cells), [arch], default_folder())
    errors = [f"{result.cell.name}: {result.error}"[:800] for result in results if result.error]
    return {"ok": not errors, "compiled": sum(result.compiled for result in results), "errors": errors}


def _check(report: Report, device: torch.device, chosen: dict[bool, LinearTiling]) -> None:
    config = LlamaConfig.parse(LLAMA_3_8B)
    report.run("check", "codes", lambda: engine_gpu_linear.check_codes(device))
    for fp8, tiling in chosen.items():
        kind = "fp8" if fp8 else "bf16"
        for shape in engine_gpu_linear.shapes(config):
            call = partial(engine_gpu_linear.check, shape, device, fp8=fp8, tiling=tiling)
            report.run("check", f"{shape.name}-{kind}", call)
        report.run(
            "check", f"chain-{kind}", partial(engine_gpu_linear.check_chain, config, device, fp8=fp8, tiling=tiling)
        )


def _tilings(report: Report, network: Llama, device: torch.device) -> dict[bool, LinearTiling]:
    """The fastest, by whether weights are FP8."""
    best: dict[bool, LinearTiling] = {}
    for fp8, tilings in TILINGS.items():
        if fp8:
            network = in_blocks(network)
        least = float("inf")
        for tiling in tilings:
            kind = "fp8" if fp8 else "bf16"
            name = f"{kind}-p{tiling.producers}-b{tiling.row_bytes}-f{tiling.in_flight}"
            line = report.run("tilings", name, partial(_one_tiling, network, tiling, fp8, device))
            if line["ok"] and line["step_ms"] < least:
                least, best[fp8] = line["step_ms"], tiling
    return best


@contextmanager
def _cut(tiling: LinearTiling) -> Iterator[None]:
    """Decode steps that are made meanwhile have their chains cut so."""
    setattr(decode_layers, "LinearChain", partial(LinearChain, tiling=tiling))  # noqa: B010 - mypy
    try:
        yield
    finally:
        setattr(decode_layers, "LinearChain", LinearChain)  # noqa: B010


def _one_tiling(network: Llama, tiling: LinearTiling, fp8: bool, device: torch.device) -> dict[str, Any]:
    """Milliseconds of a step of one row with 128 tokens: whole, chains alone, and what lies between them alone."""
    with _cut(tiling):
        cache = Cache.make(network.config, "dense", 1, 512, device)
        cache.fill()
        heads = network.config.q_heads
        attention = GpuAttention(cache.kv, q_heads=heads, max_sequences=1, max_sequence_tokens=512)
        attention.load()
        graphs = DecodeGraphs(
            network, cache.kv, attention, max_sequences=1, max_sequence_tokens=512, buckets=(), few_rows=8
        )
        graphs.capture()
        start = RowStart(
            token=3,
            num_tokens=128,
            limit=512,
            sampling=Sampling(),
            pages=cache.pages(0, 128),
            bases=cache.bases(128),
            tail_slots=cache.slots(0),
        )
        graphs.enter(0, start)
        with torch.inference_mode():
            tokens = graphs.tokens(graphs.launch(1))
            graphs.state.patches[:, 0] = 0  # every replay finds none
            layers = graphs.layers
            assert isinstance(layers, decode_layers.DecodeLayers)
            step = _milliseconds(graphs._replays[next(iter(graphs._replays))])
            chains = _milliseconds(_captured(partial(_chains, layers, True)))
            between = _milliseconds(_captured(partial(_chains, layers, False)))
        plan = layers._chains[-1].plans[1]
        edges = _edges(partial(layers.run, 1)) if tiling == linear_tiling(fp8=False) and not fp8 else None
    return {
        "ok": tokens[0] >= 0,
        "step_ms": step[0],
        "chains_ms": chains[0],
        "between_ms": between[0],
        "spread": [step, chains, between],
        "stages": plan.stages,
        "edges": edges,
        "logits_finite": bool(layers.logits.isfinite().all()),
    }


def _chains(layers: decode_layers.DecodeLayers, chains: bool) -> None:
    """The launches of a step that are chains of products, or those that are neither that nor its begin and end."""
    run, none = layers._chains, (lambda *calls: None)
    kernels, sample = layers._kernels, layers._sample
    if chains:
        layers._chains[0](layers._qkv_call(0, 1))
        for index in range(layers._network.config.num_layers):
            layers._few_after(index, 1)
        return
    try:
        layers._chains = [none] * len(run)  # type: ignore[list-item]
        layers._sample = lambda logits, state: None  # type: ignore[assignment]
        layers.run(1)
    finally:
        layers._chains, layers._kernels, layers._sample = run, kernels, sample


def _captured(call: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _milliseconds(replay: Callable[[], None]) -> list[float]:
    """Of one of many replays in a row; several times, the fastest first."""
    found = []
    replay()
    for _ in range(TURNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(REPLAYS):
            replay()
        end.record()
        end.synchronize()
        found.append(round(float(begin.elapsed_time(end)) / REPLAYS, 4))
    return sorted(found)


def _edges(call: Callable[[], None]) -> dict[str, Any]:
    """Edges of the captured step by kind: 1 is programmatic, 0 is a full dependency."""
    try:
        from cuda.bindings import runtime

        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            call()
        raw = runtime.cudaGraph_t(graph.raw_cuda_graph())
        _, _, _, _, count = runtime.cudaGraphGetEdges(raw, 0)
        _, _, _, data, count = runtime.cudaGraphGetEdges(raw, count)
        kinds = Counter(int(each.type) for each in data[:count])
    except Exception as error:  # noqa: BLE001 - a fact less
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    return {"edges": int(count), "kinds": dict(kinds)}


if __name__ == "__main__":
    sys.exit(main())
