"""How long the event loop waits for the GIL while the engine steps: `python -m tests.bench.bench_gil [--record]`.

One worker with one engine thread decodes eight sequences for a router in another process, which also calls Info all the
time. For each switch interval (sys.setswitchinterval) it gives the loop's lag (how much later than asked a 1 ms timer
fires), the latency of Info as the other process sees it (what a cancel would take to be heard), and tokens/s. The floor
of both times is the same worker while its engine is idle, measured in the same run. The rival is Python's own 5 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import grpc
import torch

from protos import logs, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from tests.e2e.cluster import write_tiny_model
from worker import gguf_model, shell
from worker.config import WorkerConfig

INTERVALS_S = (0.005, 0.001, 0.0005, 0.0001)
DEFAULT_S = 0.005  # Python's own
NUM_SEQUENCES = 8
THREADS = 1
RESULTS = Path(__file__).parent / "results"


@contextmanager
def kvstore(folder: Path) -> Iterator[Path]:
    """A store of its own; yields its socket."""
    command = [sys.executable, "-m", "protos.cli", "kvstore", "serve", "--socket-dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        yield Path(json.loads(process.stdout.readline())["socket"].removeprefix("unix:"))
    finally:
        process.terminate()
        process.wait(10)
        if process.stdout:
            process.stdout.close()


async def loop_lag(seconds: float) -> list[float]:
    """By how much later than asked a 1 ms timer fires, in seconds."""
    lags = []
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        await asyncio.sleep(0.001)
        lags.append(time.perf_counter() - began - 0.001)
    return lags


async def router(address: str, num_sequences: int, seconds: float) -> dict[str, Any]:
    """The other process: keeps the engine busy and times Info. Seconds, and tokens/s."""
    async with rpc.channel(address) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        session = stub.Session()
        await session.write(worker_pb2.RouterMessage(hello=worker_pb2.Hello(router_id="bench", incarnation="1")))

        async def submit(request_id: str) -> None:
            stop = types_pb2.StopConditions(max_tokens=400, ignore_eos=True)
            submit = worker_pb2.Submit(request_id=request_id, prompt_token_ids=[7] * 8, stop=stop)
            await session.write(worker_pb2.RouterMessage(submit=submit))

        for number in range(num_sequences):
            await submit(f"{number}")

        async def read() -> None:
            while isinstance(message := await session.read(), worker_pb2.WorkerMessage):
                for output in message.step.sequences:
                    assert not output.HasField("error"), output.error
                    if output.finish_reason:
                        await submit(output.request_id)  # always as many

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.5)
        before = (await stub.Info(worker_pb2.InfoRequest())).load.tokens_emitted
        latencies = []
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            called = time.perf_counter()
            answer = await stub.Info(worker_pb2.InfoRequest())
            latencies.append(time.perf_counter() - called)
            await asyncio.sleep(0.003)
        tokens = (answer.load.tokens_emitted - before) / (time.perf_counter() - began)
        if reader.done():
            reader.result()
        reader.cancel()
        session.cancel()
    return {"info_s": latencies, "tokens_per_s": tokens}


async def measure_one(config: WorkerConfig, interval_s: float, num_sequences: int, seconds: float) -> dict[str, Any]:
    """One worker, up and down again."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    sys.setswitchinterval(interval_s)
    worker = asyncio.create_task(shell.serve(config, "127.0.0.1:0", stop, on_ready=ready.set_result, drain_s=0.0))
    await asyncio.wait((worker, ready), return_when=asyncio.FIRST_COMPLETED)
    if worker.done():
        worker.result()
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.bench_gil", "--router", ready.result().address),
        *("--sequences", str(num_sequences), "--seconds", str(seconds)),
        stdout=asyncio.subprocess.PIPE,
    )
    await asyncio.sleep(1.5)  # the other process starts
    lags = await loop_lag(seconds)
    out, _ = await client.communicate()
    stop.set()
    await worker
    return {"lag_s": lags, **json.loads(out)}


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest, in microseconds."""
    cuts = statistics.quantiles(values, n=100)
    return {"p50": cuts[49] * 1e6, "p99": cuts[98] * 1e6, "max": max(values) * 1e6}


def measure(
    model: Path, name: str, seconds: float, intervals_s: Sequence[float] = INTERVALS_S, arena_bytes: int = 512 << 20
) -> list[dict[str, Any]]:
    """Records for one model."""
    records: list[dict[str, Any]] = []
    before = sys.getswitchinterval()
    with tempfile.TemporaryDirectory(prefix="tp-") as folder, kvstore(Path(folder)) as socket:
        config = WorkerConfig(
            model=model, name=name, kv_socket=socket, worker_id="bench", threads=THREADS, arena_bytes=arena_bytes
        )
        try:
            idle = rpc.run(measure_one(config, intervals_s[0], 0, seconds))
            runs = {s: rpc.run(measure_one(config, s, NUM_SEQUENCES, seconds)) for s in intervals_s}
        finally:
            sys.setswitchinterval(before)
    for figure, source in (("loop-lag", "lag_s"), ("info-latency", "info_s")):
        for interval_s, run in runs.items():
            found, floor = quantiles(run[source]), quantiles(idle[source])
            records.append(
                {
                    "bench": "gil",
                    "case": f"{figure}-p99-{name}-{interval_s * 1e6:.0f}us",
                    "value": round(found["p99"], 1),
                    "unit": "us",
                    "spread": [round(found["p50"], 1), round(found["max"], 1)],
                    "repeats": len(run[source]),
                    "floor": round(floor["p99"], 1),
                    "floor_by": "the same worker with an idle engine",
                    **_rival(quantiles(runs[DEFAULT_S][source])["p99"] if DEFAULT_S in runs else None),
                }
            )
    for interval_s, run in runs.items():
        records.append(
            {
                "bench": "gil",
                "case": f"decode-{NUM_SEQUENCES}-{name}-{interval_s * 1e6:.0f}us",
                "value": round(run["tokens_per_s"], 1),
                "unit": "tokens/s",
                "floor": None,
                "floor_by": "not a bound: shows what the interval costs the engine",
                **_rival(runs[DEFAULT_S]["tokens_per_s"] if DEFAULT_S in runs else None),
            }
        )
    return records


def _rival(value: float | None) -> dict[str, Any]:
    if value is None:
        return {"rival": None, "rival_value": None, "rival_why": "the default interval was not run"}
    return {"rival": "Python's default switch interval, 5 ms", "rival_value": round(value, 1)}


def describe(command: str, commit: str | None = None) -> dict[str, Any]:
    """The keys that say where and when. ``commit`` None: git is asked."""
    if commit is None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    return {
        "error": None,
        "kind": "measured",
        "machine": f"{machine_name()} for the engine; load average {os.getloadavg()[0]:.1f} before the run",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "grpcio": grpc.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command,
    }


def machine_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {os.cpu_count()} cores, {THREADS} thread"


@click.command()
@click.option("--router", "address", hidden=True, help="Be the other process.")
@click.option("--sequences", default=NUM_SEQUENCES, hidden=True)
@click.option("--seconds", default=5.0, show_default=True, help="Of each run.")
@click.option("--record", is_flag=True, help="Write the lines under tests/bench/results.")
def main(address: str | None, sequences: int, seconds: float, record: bool) -> None:
    """Print one record a line; with --record write them to a new file too."""
    if address:
        print(json.dumps(rpc.run(router(address, sequences, seconds))))
        return
    logs.configure("bench", level="warning")
    common = describe(f"python -m tests.bench.bench_gil --seconds {seconds:g}")
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        records = measure(write_tiny_model(Path(folder) / "tiny"), "tiny", seconds, arena_bytes=64 << 20)
    records += measure(gguf_model.model_folder(gguf_model.demo_gguf()), "smollm2", seconds)
    lines = [json.dumps(line | common) for line in records]
    for line in lines:
        click.echo(line)
    if record:
        slug = f"cpu{os.cpu_count()}"
        (RESULTS / f"{slug}-gil-{datetime.now(UTC):%Y-%m-%d}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
