"""Throughput of the PyTorch codec on a CPU with two threads: `python -m tests.bench.bench_codec [--record]`.

Every line is one JSON record (value, floor, rival, error). The floor is memory traffic: bytes read and written per
value at the copy bandwidth measured in the same run. The rival is a per-row cast to float8_e4m3fn, what one would write
in three lines instead; it keeps about twice the bytes. Figures count values of the rows, not codes.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from kernels import turboquant as tq

THREADS = 2
TARGET = {"pack-d128-b4": 20e6}  # values/s asked for, on two cores
CASES = ((64, 4), (128, 4), (128, 3), (128, 2), (256, 4), (512, 4), (96, 4))
RESULTS = Path(__file__).parent / "results"


def timed(call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each of `repeats` calls, after two that are not counted."""
    out = []
    for turn in range(repeats + 2):
        start = clock()
        call()
        if turn >= 2:
            out.append(clock() - start)
    return out


def machine_name() -> str:
    info = Path("/proc/cpuinfo")
    models = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {THREADS} threads"


def to_fp8(rows: torch.Tensor) -> torch.Tensor:
    amax = rows.abs().amax(1, keepdim=True).float()
    return (rows * (448 / amax)).to(torch.float8_e4m3fn)


def measure(rows: int, repeats: int) -> list[dict[str, Any]]:
    """Records of all cases with about `rows` rows of 128 (as many values at other widths)."""
    machine = machine_name()
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        big = torch.ones(rows * 128 * 4, dtype=torch.uint8)
        target = torch.empty_like(big)
        bandwidth = 2 * big.numel() / statistics.median(timed(lambda: target.copy_(big), repeats))
        out = []
        for d, bits in CASES:
            x = torch.randn(rows * 128 // d, d, generator=torch.Generator().manual_seed(d)).bfloat16()
            packed = tq.pack(x, bits)
            traffic = 2 + tq.record_bytes(d, bits) / d
            back = tq.unpack(packed, d, bits)
            error = ((x.float() - back).square().sum(1) / x.float().square().sum(1)).mean().item()
            rival = x.numel() / statistics.median(timed(lambda x=x: to_fp8(x), repeats))  # type: ignore[misc]
            calls: dict[str, Callable[[], object]] = {
                "pack": lambda x=x, bits=bits: tq.pack(x, bits),  # type: ignore[misc]
                "unpack": lambda p=packed, d=d, bits=bits: tq.unpack(p, d, bits, torch.bfloat16),  # type: ignore[misc]
            }
            for verb, call in calls.items():
                rates = [x.numel() / seconds for seconds in timed(call, repeats)]
                cpu = statistics.median(timed(call, repeats, time.process_time))
                out.append(
                    {
                        "bench": "codec",
                        "case": f"{verb}-d{d}-b{bits}",
                        "value": statistics.median(rates),
                        "unit": "values/s",
                        "spread": [min(rates), max(rates)],
                        "repeats": repeats,
                        "per_cpu_second": x.numel() / cpu,  # all threads; what a busy machine disturbs least
                        "floor": bandwidth / traffic,
                        "floor_by": f"bytes: {traffic:.3f} B a value at {bandwidth / 1e9:.2f} GB/s, copying",
                        "rival": "per-row cast to float8_e4m3fn" if verb == "pack" else None,
                        "rival_value": rival if verb == "pack" else None,
                        **({"rival_why": "a cast back is only a copy"} if verb == "unpack" else {}),
                        "error": error,
                        "kind": "measured",
                        "machine": machine,
                    }
                )
        return out
    finally:
        torch.set_num_threads(before)


@click.command()
@click.option("--rows", default=65536, show_default=True)
@click.option("--repeats", default=15, show_default=True)
@click.option("--record", is_flag=True, help="Write the lines under tests/bench/results.")
def main(rows: int, repeats: int, record: bool) -> None:
    """Print one record a line; with --record write them to a new file too."""
    now = datetime.now(UTC)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    common = {
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "load_average": [round(load, 1) for load in os.getloadavg()],  # other work on the machine when the run began
        "date": now.isoformat(timespec="seconds"),
        "commit": commit,
        "command": f"python -m tests.bench.bench_codec --rows {rows} --repeats {repeats}",
    }
    lines = [json.dumps(line | common) for line in measure(rows, repeats)]
    for text in lines:
        click.echo(text)
    if record:
        slug = f"cpu{os.cpu_count()}"
        (RESULTS / f"{slug}-codec-{now:%Y-%m-%d}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
