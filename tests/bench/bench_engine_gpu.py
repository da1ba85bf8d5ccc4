"""The decode runner on a GPU: right first, then products, then steady state at Llama-3-8B's geometry, random weights.

    python3 -m tests.bench.bench_engine_gpu --records FILE --commit SHA        everything, within about four minutes
    python3 -m tests.bench.bench_engine_gpu --only equal,linear                parts, of PARTS
    python3 -m tests.bench.bench_engine_gpu --only steady --cases b1-128,b64-4k

equal: greedy tokens of captured steps against those of the eager runner on a small random model, every kind of page.
linear: products of few rows, right, then beside cuBLAS; draws. steady: at least 256 generated tokens a sequence after
a warm-up: tokens a second, the step's time, its floor (bytes of weights and KV over the bandwidth that a kernel which
only reads has in the same run), idle time, launches, allocations and waits a step. capacity: the most sequences of
32,768 tokens that the card serves, dense and tq4, opened and decoded by the worker's engine. long: 20,000 steps of the
engine with sequences coming and going. rival: transformers, compiled, beside the engine (a minute of compiling each).

Every case is one JSON line on standard output and in --out FILE (or $OUT/bench_engine_gpu.jsonl); --records FILE takes
those with a time, as tests/bench/results has them. Exit status: 0 all passed, 1 a case failed, 2 this machine cannot.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels import loader
from kernels.cells import Cell
from kernels.cubins import build, default_folder
from kernels.decode_cells import DecodeShape, decode_cell
from kernels.page_cells import APPEND_CELL, fp8_cell, seal_cell
from kernels.step_cells import linear_cell, sample_cell, step_cell
from tests.bench import (
    engine_gpu_capacity,
    engine_gpu_equal,
    engine_gpu_linear,
    engine_gpu_long,
    engine_gpu_rival,
    engine_gpu_steady,
)
from tests.bench.engine_gpu_capacity import Size
from tests.bench.engine_gpu_long import Run
from tests.bench.engine_gpu_model import LLAMA_3_8B, SMALL, random_llama
from tests.bench.engine_gpu_rival import Side
from tests.bench.engine_gpu_steady import Case
from tests.bench.kernel_timing import Timer, ceilings
from worker.models.llama import Llama, LlamaConfig
from worker.weights import Model

PARTS = ("equal", "linear", "steady", "capacity", "long", "rival")
LONG_LAYERS = 6  # of Llama-3-8B's 32: a step takes little, and the host's share shows
SECONDS = 270.0  # no case begins later
CASES = (
    Case("b1-128", 1, 128),
    Case("b64-4k", 64, 4096),
    Case("b32-16k", 32, 16384),
    Case("b32-16k-tq4", 32, 16384, "tq4"),
    Case("b1-128-cublas", 1, 128, few_rows=0, steps=64),
    Case("b1-128-fp8", 1, 128, fp8=True),
    Case("b64-4k-tq4", 64, 4096, "tq4"),
    Case("b1-4k", 1, 4096),
    Case("b1-4k-tq4", 1, 4096, "tq4"),
    Case("b8-4k", 8, 4096),
    Case("b8-4k-cublas", 8, 4096, few_rows=0, steps=64),
)
TINY_STEADY = (Case("tiny", 2, 150, "tq4", steps=4), Case("tiny-dense", 1, 20, steps=3, few_rows=0))

TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 300,
}


class Report:
    """Prints and keeps JSON lines; no fault of one case hides another."""

    def __init__(self, file: Path | None, deadline: float) -> None:
        self.lines: list[dict[str, Any]] = []
        self._file, self._deadline = file, deadline

    def run(self, part: str, case: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        began = time.monotonic()
        if began > self._deadline:
            facts: dict[str, Any] = {"ok": False, "skipped": "out of time"}
        else:
            try:
                facts = call()
            except Exception as error:  # noqa: BLE001 - the others shall run
                trace = traceback.format_exc()[-2500:]
                facts = {"ok": False, "crashed": f"{type(error).__name__}: {error}"[:1500], "trace": trace}
        line = {"part": part, "case": case, "seconds": round(time.monotonic() - began, 2), **facts}
        self.lines.append(line)
        self.say(line)
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return line

    def say(self, line: dict[str, Any]) -> None:
        text = json.dumps(line, default=str)
        print(text, flush=True)
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(text + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only", default="equal,linear,steady,capacity,long", help="parts, in this order; commas between"
    )
    parser.add_argument("--cases", default="", help="of steady; commas between")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny sizes, for tests")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no case begins after so long")
    parser.add_argument("--out", type=Path, help="file for a JSON line a case")
    parser.add_argument("--records", type=Path, help="file for records of what was timed")
    parser.add_argument("--commit", default="unknown", help="what the records say was run")
    options = parser.parse_args(arguments)
    device = torch.device(options.device, *([0] if options.device == "cuda" else []))
    if device.type == "cuda" and not torch.cuda.is_available():
        print("cannot run: torch sees no CUDA device", file=sys.stderr)
        return 2
    out = options.out or (Path(os.environ["OUT"]) / "bench_engine_gpu.jsonl" if "OUT" in os.environ else None)
    report = Report(out, time.monotonic() + options.seconds)
    facts = _facts(device, options.commit)
    report.say(facts)
    parts = options.only.split(",")
    if unknown := {*parts} - {*PARTS}:
        raise SystemExit(f"no such part: {', '.join(sorted(unknown))}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        report.run("build", "cells", lambda: _build(device))
    read = 1e12
    if device.type == "cuda" and {"linear", "steady"} & {*parts}:
        rates = report.run("machine", "ceilings", lambda: _ceilings(device))
        read = float(rates.get("read", 4.2e12))
    for part in parts:
        if part == "equal":
            _equal(report, device)
        elif part == "linear":
            _linear(report, device)
        elif part == "capacity":
            _capacity(report, device)
        elif part == "long":
            _long(report, device)
        elif part == "rival":
            _rival(report, device)
        else:
            _steady(report, device, read, [name for name in options.cases.split(",") if name])
    if options.records:
        options.records.write_text("".join(json.dumps(line) + "\n" for line in _records(report.lines, facts, read)))
    failed = [f"{line['part']} {line['case']}" for line in report.lines if not line["ok"]]
    print(f"{len(report.lines) - len(failed)} passed, {len(failed)} failed: {', '.join(failed)}", flush=True)
    return 1 if failed else 0


def _equal(report: Report, device: torch.device) -> None:
    sizes: dict[str, Any] = {}
    if device.type == "cpu":
        sizes = {"raw": SMALL | TINY, "lengths": (9, 3), "num_compared": 3}
    for mode in ("dense", "tq4", "fp8"):
        for few_rows in (8, 0):
            report.run(
                "equal",
                f"{mode}-{'own' if few_rows else 'cublas'}",
                partial(engine_gpu_equal.compare, mode, device, few_rows=few_rows, **sizes),
            )


def _linear(report: Report, device: torch.device) -> None:
    shapes = engine_gpu_linear.shapes(LlamaConfig.parse(LLAMA_3_8B if device.type == "cuda" else SMALL))
    if device.type == "cpu":
        shapes = shapes[1:2]
    report.run("linear", "codes", lambda: engine_gpu_linear.check_codes(device))
    for fp8 in (False, True):
        for shape in shapes:
            kind = "fp8" if fp8 else "bf16"
            report.run(
                "linear",
                f"check-{shape.name}-{kind}",
                partial(engine_gpu_linear.check, shape, device, fp8=fp8),
            )
    if device.type == "cpu":
        return
    wanted: list[tuple[int, str]] = [(1, "ours"), (1, "cublas"), (1, "ours fp8"), (4, "ours"), (8, "ours")]
    wanted += [(8, "cublas"), (16, "cublas"), (32, "cublas"), (64, "cublas"), (64, "scaled_mm")]
    for rows, kind in wanted:
        for shape in shapes:
            report.run(
                "linear",
                f"{shape.name}-m{rows}-{kind}",
                partial(engine_gpu_linear.measure, shape, device, rows, kind),
            )
    for rows in (1, 64):
        for name, settings in (("greedy", {}), ("top-k-top-p", {"temperature": 0.8, "top_k": 50, "top_p": 0.9})):
            report.run(
                "linear",
                f"draw-{name}-m{rows}",
                partial(engine_gpu_linear.measure_draw, rows, settings, device),
            )


def _steady(report: Report, device: torch.device, read: float, names: Sequence[str]) -> None:
    cases: Iterable[Case] = CASES if device.type == "cuda" else TINY_STEADY
    chosen = [case for case in cases if not names or case.name in names]
    if unknown := {*names} - {case.name for case in chosen}:
        raise SystemExit(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in cases)}")
    networks: list[Llama] = []

    def make() -> dict[str, Any]:
        raw = dict(LLAMA_3_8B)
        if device.type == "cpu":
            raw |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
            raw |= {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": 300}
        longest = max(case.num_tokens + case.steps for case in chosen) + 512
        with torch.inference_mode():
            networks.append(random_llama(raw, device, longest))
        return {"ok": True}

    report.run("steady", "model", make)
    for case in chosen:
        report.run(
            "steady",
            case.name,
            partial(lambda case: engine_gpu_steady.measure(networks[0], case, read, device), case),
        )


def _capacity(report: Report, device: torch.device) -> None:
    raw, size = dict(LLAMA_3_8B), Size()
    if device.type == "cpu":
        raw, size = SMALL | TINY, Size(num_tokens=400, machine_bytes=7 << 20, warm_up=1, steps=2)
    bases: list[Model] = []

    def make() -> dict[str, Any]:
        bases.append(engine_gpu_capacity.random_weights(raw, device, size))
        return {"ok": True}

    report.run("capacity", "model", make)
    found = {
        mode: report.run(
            "capacity",
            f"{size.num_tokens}-{mode}",
            partial(lambda mode: engine_gpu_capacity.measure(raw, bases[0], mode, device, size), mode),
        )
        for mode in engine_gpu_capacity.MODES
    }
    if all("sequences" in line for line in found.values()):
        ratio = found["tq4"]["sequences"] / found["dense"]["sequences"]
        report.run("capacity", f"{size.num_tokens}-tq4-over-dense", lambda: {"ok": True, "ratio": ratio})


def _long(report: Report, device: torch.device) -> None:
    raw, run = LLAMA_3_8B | {"num_hidden_layers": LONG_LAYERS}, Run()
    if device.type == "cpu":
        raw, run = SMALL | TINY, Run(steps=16, warm_up=2, num_running=2, longest=512, looks=4)
    report.run("long", f"{run.steps}-steps", partial(engine_gpu_long.measure, raw, device, run))


def _rival(report: Report, device: torch.device) -> None:
    """The engine first; compiling costs a minute each."""
    raw, sides = dict(LLAMA_3_8B), {"b1-128": Side(1, 128, steps=256), "b32-16k": Side(32, 16384)}
    if device.type == "cpu":
        raw, sides = SMALL | TINY, {"b1-128": Side(1, 128, steps=4)}
    made: list[Any] = []

    def make() -> dict[str, Any]:
        longest = max(side.longest for side in sides.values())
        made.append(engine_gpu_capacity.random_weights(raw, device, Size(num_tokens=longest)))
        return {"ok": True}

    report.run("rival", "model", make)

    def run_ours(name: str, mode: str) -> None:
        case = partial(engine_gpu_rival.ours, raw, made[0], mode, sides[name], device)
        report.run("rival", f"{name}-{mode}", case)

    def make_theirs() -> dict[str, Any]:
        import transformers

        made.append(engine_gpu_rival.rival_model(raw, device))
        return {"ok": True, "transformers": transformers.__version__}

    for name in sides:
        for mode in engine_gpu_capacity.MODES if name != "b1-128" else ("dense",):
            run_ours(name, mode)
    report.run("rival", "transformers-model", make_theirs)
    for name, side in sides.items():
        for call in (engine_gpu_rival.compiled, engine_gpu_rival.captured):  # the second where the first cannot be had
            case = f"{name}-transformers-{call.__name__}"
            if report.run("rival", case, partial(call, made[1], side, device))["ok"]:
                break


def _ceilings(device: torch.device) -> dict[str, Any]:
    found = ceilings(Timer(device), device)
    return {"ok": True, "read": found.read, "copy": found.copy, "flops": found.flops}


def _build(device: torch.device) -> dict[str, Any]:
    """Compile in a process for each CPU what the cases need: one by one it would take a minute."""
    arch = loader.arch_of(device)
    own = [(8, 2), (32, 8)]
    cells: list[Cell] = [
        decode_cell(DecodeShape(128, q, kv, keys, values, "bf16"), arch)
        for q, kv in own
        for keys, values in (("dense", "dense"), ("fp8", "fp8"), ("tq4", "tq4"))
    ]
    cells += [linear_cell("bf16", fp8=fp8) for fp8 in (False, True)]
    cells += [step_cell("bf16"), sample_cell("bf16"), seal_cell(128, "bf16"), fp8_cell("bf16"), APPEND_CELL]
    results = build(dict.fromkeys(cells), [arch], default_folder())
    errors = [f"{result.cell.name}: {result.error}"[:800] for result in results if result.error]
    return {"ok": not errors, "compiled": sum(result.compiled for result in results), "errors": errors}


def _records(lines: Sequence[dict[str, Any]], facts: dict[str, Any], read: float) -> list[dict[str, Any]]:
    records = []
    for line in lines:
        common = {"bench": "engine_gpu", "case": line["case"], "rival": None, "rival_value": None, **facts}
        if line["part"] == "steady" and "step_ms" in line:
            records.append(
                common
                | {
                    "value": line["step_ms"],
                    "unit": "ms a step",
                    "floor": line["floor_ms"],
                    "floor_by": f"bytes: {line['weights_gb']} GB of weights and {line['kv_gb']} GB of KV read at "
                    f"{read / 1e12:.2f} TB/s",
                    "repeats": next((c.steps for c in CASES if c.name == line["case"]), 0),
                    "rival_why": "transformers' static cache is a run of its own",
                    "error": "tokens of a small model are those of the eager runner, in the same run",
                    "facts": {k: v for k, v in line.items() if k not in ("part", "case", "profile")},
                    "kind": "measured",
                }
            )
        elif line["part"] == "capacity" and ("sequences" in line or "ratio" in line):
            records.append(
                common
                | {
                    "case": f"capacity-{line['case']}",
                    "value": line.get("sequences", line.get("ratio")),
                    "unit": "sequences" if "sequences" in line else "ratio",
                    "floor": None,
                    "floor_by": "bytes: weights and KV on the card, with 4 GiB left for all else",
                    "rival_why": "mode dense is a case beside it",
                    "error": None,
                    "facts": {k: v for k, v in line.items() if k not in ("part", "case")},
                    "kind": "measured",
                }
            )
        elif line["part"] == "long" and line.get("last_over_second_quarter"):
            records.append(
                common
                | {
                    "case": f"long-{line['case']}",
                    "value": line["last_over_second_quarter"],
                    "unit": "tokens/s of the last quarter over the second's",
                    "floor": None,
                    "floor_by": "nothing may change: 1",
                    "rival_why": "the run is its own measure",
                    "error": f"pages that do not verify: {len(line['problems'])}",
                    "facts": {k: v for k, v in line.items() if k not in ("part", "case")},
                    "kind": "measured",
                }
            )
        elif line["part"] == "rival" and "tokens_per_s" in line:
            rows = line["case"].rsplit("-transformers", 1)[0]
            theirs = {x["case"]: x for x in lines if x["case"].startswith("-".join(rows.split("-")[:2]) + "-transf")}
            best = max((x for x in theirs.values() if "tokens_per_s" in x), key=lambda x: x["tokens_per_s"], default={})
            records.append(
                common
                | {
                    "case": f"rival-{line['case']}",
                    "value": line["tokens_per_s"],
                    "unit": "tokens/s",
                    "floor": None,
                    "floor_by": "the steady cases have floors",
                    "rival": best.get("how") and f"transformers, static cache, {best['how']}",
                    "rival_value": best.get("tokens_per_s"),
                    "rival_why": None if best else "transformers did not run",
                    "error": None,
                    "facts": {k: v for k, v in line.items() if k not in ("part", "case")},
                    "kind": "measured",
                }
            )
        elif line["part"] == "linear" and "mb" in line:
            records.append(
                common
                | {
                    "value": line["tb_s"],
                    "unit": "TB/s of weights",
                    "floor": round(read / 1e12, 3),
                    "floor_by": "bytes: a kernel that only reads, in the same run",
                    "rival_why": "cuBLAS is a case beside it",
                    "error": None,
                    "kind": "measured",
                }
            )
    return records


def _facts(device: torch.device, commit: str) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()}, no GPU"
    return {
        "machine": name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": " ".join(["python3 -m tests.bench.bench_engine_gpu", *(Path(word).name for word in sys.argv[1:])]),
    }


if __name__ == "__main__":
    sys.exit(main())
