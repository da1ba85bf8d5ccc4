"""A load test's outcome as a table, as records (one JSON object a line), and as a plot."""

from __future__ import annotations

import math
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from protos.metrics import build_version
from router.bench_load import UNFINISHED, Run
from router.bench_statistics import Durations

PERCENTILES = (50, 90, 99)


def name(run: Run) -> str:
    """Of the case: the loop and the mixes, such as closed-8-p128-o64."""
    load = run.load
    loop = f"closed-{load.concurrency}" if load.concurrency else f"open-{load.rate:g}"
    return f"{loop}-p{load.prompt_tokens.mean:.0f}-o{load.max_tokens.mean:.0f}"


def latencies(run: Run) -> dict[str, tuple[str, Durations]]:
    """By their names in records: words for people, and the durations."""
    measured = run.measured
    return {
        "ttft": ("first token (TTFT)", measured.ttft),
        "itl": ("between chunks (ITL)", measured.itl),
        "tpot": ("per output token (TPOT)", measured.tpot),
        "e2e": ("whole answer", measured.e2e),
    }


def rates(run: Run) -> dict[str, tuple[str, float]]:
    """By their names in records: unit and value, of the window."""
    measured = run.measured
    return {
        "output-throughput": ("tokens/s", measured.per_second(measured.window_tokens)),
        "request-rate": ("requests/s", measured.per_second(measured.window_ended)),
    }


def show(run: Run, console: Console) -> None:
    """The table for people. Milliseconds."""
    load, measured = run.load, run.measured
    loop = f"closed loop of {load.concurrency}" if load.concurrency else f"open loop at {load.rate:g} requests/s"
    cut = "; interrupted" if run.interrupted else ""
    console.print(
        f"{run.model.name}: {measured.num_answered} answers in {measured.window_s:.1f} s "
        f"after {measured.begin_s:g} s of warm-up, {loop}{cut}"
    )
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("milliseconds")
    for column in ("p50", "p90", "p99", "max", "count"):
        table.add_column(column, justify="right", no_wrap=True)
    for words, durations in latencies(run).values():
        figures = [durations.percentile(q) for q in PERCENTILES] + [durations.max_s]
        table.add_row(words, *(_ms(figure) if durations.count else "-" for figure in figures), str(durations.count))
    console.print(table)
    tokens, requests = (value for _, value in rates(run).values())
    chunks = f", {measured.num_chunk_tokens / measured.num_chunks:.1f} tokens a chunk" if measured.num_chunks else ""
    if measured.window_s:
        console.print(f"{tokens:.1f} output tokens/s, {requests:.2f} answers/s{chunks}")
    else:
        console.print("it ended before anything was measured")
    if measured.cached_tokens:
        console.print(f"{measured.cached_tokens / measured.prompt_tokens:.1%} of the prompts' tokens were cached")
    if measured.errors:
        errors = ", ".join(f"{reason} {count}" for reason, count in measured.errors.most_common())
        console.print(f"not answered: {errors}", style="red", markup=False)
        if measured.errors[UNFINISHED] and load.rate:
            console.print(
                f"UNFINISHED: not done {load.drain_s:g} s after the last was sent; the cluster did not keep up with "
                f"{load.rate:g} requests/s. Lower --rate; --concurrency shows what the cluster can do.",
                style="yellow",
            )
    else:
        console.print("no errors")
    lag, cpu = run.generator.lag, run.generator.cpu_share
    own = f"load generator: event loop late by {_ms(lag.percentile(99))} ms (p99), {cpu:.0%} of a core"
    console.print(own if lag.count else "load generator: not measured, the window was too short")
    if busy := run.generator.busy(measured.late):
        console.print(
            f"The load generator was a bottleneck: {busy}. Latencies are partly its own, or of what else runs on this "
            "machine: send less from here, or run it elsewhere.",
            style="yellow",
        )


def _ms(seconds: float) -> str:
    ms = seconds * 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def records(run: Run, label: str | None) -> list[dict[str, Any]]:
    """One for each figure, with the keys that all of this project's records have."""
    measured, generator = run.measured, run.generator
    common = {
        "repeats": 1,
        "floor": None,
        "floor_by": None,
        "floor_why": "depends on the cluster's model and machine, which this command does not know",
        "rival": None,
        "rival_value": None,
        "rival_why": "one cluster was measured",
        "error": None,
        "model": run.model.name,
        "load": _load(run),
        "answered": measured.num_answered,
        "errors": dict(measured.errors),
        "generator": {
            "lag_p99_ms": _number(generator.lag.percentile(99) * 1e3),
            "late_p99_ms": _number(measured.late.percentile(99) * 1e3),
            "cpu_share": _number(generator.cpu_share),
            "bottleneck": bool(generator.busy(measured.late)),
        },
        "interrupted": run.interrupted,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} CPUs, {_cpu_model()} (the load generator's)",
        "load_average": [round(load, 1) for load in psutil.getloadavg()],
        "versions": {package: version(package) for package in ("grpcio", "protobuf")}
        | {"python": platform.python_version(), "tailpack": build_version()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "command": shlex.join(["tailpack", *sys.argv[1:]]),
        "kind": "measured",
    }
    found: list[dict[str, Any]] = []
    for metric, (_, durations) in latencies(run).items():
        percentiles = {f"p{q}": _number(durations.percentile(q) * 1e3) for q in PERCENTILES}
        percentiles |= {"min": _number(durations.min_s * 1e3), "max": _number(durations.max_s * 1e3)}
        one = {"case": metric, "value": percentiles["p50"], "unit": "ms"}
        found.append(one | {"count": durations.count, "percentiles": percentiles})
    for metric, (unit, value) in rates(run).items():
        found.append({"case": metric, "value": _number(value), "unit": unit})
    for record in found:
        record["spread"] = [record["value"], record["value"]]  # over the repeats, of which there is one
        record["case"] = f"{label or name(run)}-{record['case']}"
    return [{"bench": "cluster"} | record | common for record in found]


def _load(run: Run) -> dict[str, Any]:
    load = run.load
    return {
        "concurrency": load.concurrency,
        "rate": load.rate,
        "prompt_tokens": str(load.prompt_tokens),
        "max_tokens": str(load.max_tokens),
        "seconds": load.seconds,
        "requests": load.requests,
        "warmup_s": load.warmup_s,
        "window_s": _number(run.measured.window_s),
        "seed": load.seed,
        "prefix_reuse": load.prefix_reuse,
        "own_streams": load.own_streams,
    }


def _number(value: float) -> float | None:
    """Four digits; JSON has no NaN and no infinity."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")


def _commit() -> str | None:
    """Of the source tree that this runs from, where it is one."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() or None
