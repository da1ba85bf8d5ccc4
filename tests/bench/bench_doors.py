"""What the router's other doors cost: CPU time of its process per streamed event and request, beside its gRPC API.

    python -m tests.bench.bench_doors [--seconds 5] [--repeats 3] [--out FILE.jsonl]

The worker without a model and the way of counting are those of bench_router; each repeat starts its processes anew and
drives one door with one case. Callers of HTTP send raw requests on kept connections and look at nothing but frames.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil

from protos import kserve_pb2, kserve_pb2_grpc, rpc
from router.client import AsyncTailpack, build_request
from tests.bench.bench_router import CASES, ROOT, Case, Counted, Measured, cores, record, spawn
from tests.scenarios.http_harness import read_chunk, read_head, request_bytes
from tests.scenarios.tiny_tokenizer import write_tokenizer

PROMPT = "The quick brown fox jumps over the lazy dog."
RELAY, REQUEST = (
    next(case for case in CASES if case.name == name)
    for name in ("relay-64-streams-1-token", "request-16-callers-1-token")
)
Caller = Callable[[str, str, Case, Counted], Coroutine[Any, Any, None]]
"""One caller for ever: gRPC address, HTTP URL, what is asked, where to count."""


async def grpc_caller(address: str, http: str, case: Case, counted: Counted) -> None:
    request = build_request(PROMPT, max_tokens=case.tokens or 1 << 20)
    async with AsyncTailpack(address, session=False) as client:
        while True:
            async for chunk in client.stream(request):
                counted.messages += 1
                counted.tokens += len(chunk.token_ids)
            counted.requests += 1


async def http_caller(address: str, http: str, case: Case, counted: Counted) -> None:
    host, _, port = http.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    stream = case.tokens is None
    body = {"prompt": PROMPT, "max_tokens": case.tokens or 1 << 20, "temperature": 0, "stream": stream}
    try:
        while True:
            writer.write(request_bytes("POST", "/v1/completions", body))
            status, headers = await read_head(reader)
            assert status == 200, status
            if stream:
                while events := await read_chunk(reader):
                    counted.messages += events.count(b"data: ")
            else:
                await reader.readexactly(int(headers["content-length"]))
            counted.requests += 1
    finally:
        writer.close()


async def kserve_caller(address: str, http: str, case: Case, counted: Counted) -> None:
    request = kserve_pb2.ModelInferRequest()
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(PROMPT.encode())
    request.parameters["max_tokens"].int64_param = case.tokens or 1 << 20
    async with rpc.channel(address) as channel:
        stub: Any = kserve_pb2_grpc.GRPCInferenceServiceStub(channel)
        while True:
            if case.tokens is not None:
                await stub.ModelInfer(request)
            else:
                call = stub.ModelStreamInfer()
                await call.write(request)
                await call.done_writing()
                async for _ in call:
                    counted.messages += 1
            counted.requests += 1


DOORS: dict[str, Caller] = {"grpc": grpc_caller, "http": http_caller, "kserve": kserve_caller}


async def measure(door: str, case: Case, model: Path, seconds: float) -> float:
    """The case's value through a door, in the case's unit."""
    pace = ["--every-s", str(case.every_s), "--per-step", str(case.per_step)]
    router_core, other_cores = cores()
    worker, at = spawn(other_cores, "tests.bench.bench_router", "--role", "worker", *pace)
    arguments = ["--listen", "127.0.0.1:0", "--worker", at.address, "--model-dir", str(model)]
    router = subprocess.Popen(
        [sys.executable, "-m", "protos.cli", "router", "serve", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    os.sched_setaffinity(router.pid, router_core)
    try:
        assert router.stdout is not None
        ready = json.loads(router.stdout.readline())
        async with AsyncTailpack(ready["address"]) as client:
            while not any(status.state == "ready" for status in await client.list_workers()):
                await asyncio.sleep(0.05)
        return (await _load(DOORS[door], ready, router.pid, case, seconds)).value(case.unit)
    finally:
        for process in (router, worker):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


async def _load(caller: Caller, ready: dict[str, str], pid: int, case: Case, seconds: float) -> Counted:
    counted = Counted()
    callers = [asyncio.create_task(caller(ready["address"], ready["http"], case, counted)) for _ in range(case.streams)]
    await asyncio.sleep(min(1.0, seconds))
    process = psutil.Process(pid)
    before, started = process.cpu_times(), time.monotonic()
    counted.messages = counted.requests = counted.tokens = 0
    await asyncio.sleep(seconds)
    after = process.cpu_times()
    counted.wall_s = time.monotonic() - started
    counted.cpu_s = after.user + after.system - before.user - before.system
    result = Counted(**vars(counted))
    for task in callers:
        task.cancel()
    for ended in await asyncio.gather(*callers, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended
    return result


async def run(seconds: float, repeats: int, command: str) -> list[dict[str, Any]]:
    """One record for each case and door; its floor is the gRPC API's own figure in the same run."""
    records = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tokenizer(Path(folder))
        for case in (RELAY, REQUEST):
            values: dict[str, list[float]] = {door: [] for door in DOORS}
            loads: list[float] = []
            for _ in range(repeats):  # doors in turn: what else runs on the machine disturbs all of them alike
                for door in DOORS:
                    values[door].append(await measure(door, case, model, seconds))
                loads.append(psutil.getloadavg()[0])
            for door in ("http", "kserve"):
                both = zip(values[door], values["grpc"], loads, strict=True)
                line = record(case, [Measured(value, grpc, None, None, load) for value, grpc, load in both], command)
                del line["forwarder"], line["generate"]  # the gRPC API's own comparisons
                line |= {"bench": "doors", "case": f"{door}-{case.name}", "floor_by": "the router's gRPC API, same run"}
                line["limit"] = None  # issue 7 asks nothing of these doors
                records.append(line)
                print(f"{line['case']:36} {line['value']:>10.1f} {case.unit:12} grpc {line['floor']:.1f}", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    command = f"python -m tests.bench.bench_doors --seconds {options.seconds:g} --repeats {options.repeats}"
    records = rpc.run(run(options.seconds, options.repeats, command))
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in records))


if __name__ == "__main__":
    main()
