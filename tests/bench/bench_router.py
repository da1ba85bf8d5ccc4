"""What the router costs: CPU time of its process per relayed message and per request, and tokens per CPU second.

    python -m tests.bench.bench_router [--seconds 5] [--repeats 3] [--out FILE.jsonl]

Three processes: a worker without a model that sends one message a step for all sequences, the router, and this one with
the callers. Only the router's CPU time counts (user + system, all threads), so a busy machine disturbs it little. The
floor is a bare grpc.aio server that sends the same messages at the same pace without any worker, tokens or text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from protos import errors, router_pb2, router_pb2_grpc, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from router.client import AsyncTailpack, build_request
from router.service import SERVICE_NAME
from tests.scenarios.fake_worker import SERVICE_NAME as WORKER_NAME
from tests.scenarios.fake_worker import worker_info
from tests.scenarios.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKEN = 300  # of the tiny tokenizer: a few letters


class StepWorker(worker_pb2_grpc.WorkerServicer):
    """Every `every_s`: one message with `per_step` tokens for each sequence, as a real worker's step makes it."""

    def __init__(self, every_s: float, per_step: int) -> None:
        self._every_s = every_s
        self._per_step = per_step

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        running: dict[str, tuple[int, int]] = {}  # emitted, limit
        ended: list[worker_pb2.SequenceOutput] = []

        async def read() -> None:
            async for message in requests:
                if message.WhichOneof("message") == "submit":
                    running[message.submit.request_id] = (0, message.submit.stop.max_tokens)
                elif message.abort.request_id in running:
                    del running[message.abort.request_id]
                    ended.append(
                        worker_pb2.SequenceOutput(
                            request_id=message.abort.request_id, finish_reason=types_pb2.FINISH_REASON_ABORTED
                        )
                    )

        reader = asyncio.create_task(read())
        load = types_pb2.WorkerLoad(pages_free=100_000, pages_total=100_000)
        info = worker_info(max_sequence_tokens=1 << 24)
        yield worker_pb2.WorkerMessage(welcome=worker_pb2.Welcome(info=info, load=load))
        try:
            due = time.monotonic()
            while True:
                due = max(due + self._every_s, time.monotonic() - self._every_s)
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                outputs, ended = ended, []
                for request_id, (emitted, limit) in list(running.items()):
                    count = min(self._per_step, limit - emitted)
                    output = worker_pb2.SequenceOutput(
                        request_id=request_id, token_offset=emitted, token_ids=[TOKEN] * count
                    )
                    running[request_id] = (emitted + count, limit)
                    if emitted + count >= limit:
                        del running[request_id]
                        output.finish_reason = types_pb2.FINISH_REASON_LENGTH
                    outputs.append(output)
                if outputs:
                    yield worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(sequences=outputs, load=load))
        finally:
            reader.cancel()

    async def Find(self, request: Any, context: Any) -> worker_pb2.FindResponse:
        return worker_pb2.FindResponse()

    async def Abort(self, request: Any, context: Any) -> worker_pb2.AbortResponse:
        return worker_pb2.AbortResponse()

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        return worker_pb2.InfoResponse()


class BareRouter(router_pb2_grpc.RouterServicer):
    """The floor: the same messages to callers, from nothing."""

    def __init__(self, every_s: float, per_step: int) -> None:
        self._every_s = every_s
        self._per_step = per_step

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        request_id = rpc.call_metadata(context).request_id
        emitted = 0
        while emitted < request.stop.max_tokens:
            chunk = router_pb2.GenerateResponse(
                request_id=request_id, text="text" * self._per_step, text_offset=4 * emitted
            )
            chunk.token_ids.extend([TOKEN] * self._per_step)
            chunk.token_offset = emitted
            emitted += self._per_step
            if emitted >= request.stop.max_tokens:
                chunk.finish_reason = types_pb2.FINISH_REASON_LENGTH
                chunk.usage.output_tokens = emitted
            yield chunk
            await asyncio.sleep(self._every_s)

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        raise errors.NotFound("nothing is kept here", reason="UNKNOWN_REQUEST")
        yield

    async def Cancel(self, request: Any, context: Any) -> router_pb2.CancelResponse:
        return router_pb2.CancelResponse()

    async def ListWorkers(self, request: Any, context: Any) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse()

    async def Stats(self, request: Any, context: Any) -> router_pb2.StatsResponse:
        return router_pb2.StatsResponse()


@dataclass(frozen=True)
class Case:
    """streams: at one time. tokens: of each answer; None goes on until the time is over."""

    name: str
    unit: str
    streams: int
    every_s: float
    per_step: int
    tokens: int | None


CASES = [
    Case("relay-64-streams-1-token", "us/message", streams=64, every_s=0.02, per_step=1, tokens=None),
    Case("relay-64-streams-8-tokens", "us/message", streams=64, every_s=0.02, per_step=8, tokens=None),
    Case("relay-1-stream-1-token", "us/message", streams=1, every_s=0.005, per_step=1, tokens=None),
    Case("request-16-callers-1-token", "us/request", streams=16, every_s=0.001, per_step=1, tokens=1),
    Case("tokens-64-streams-unpaced-8-tokens", "tokens/CPU-s", streams=64, every_s=0.0, per_step=8, tokens=None),
]


@dataclass
class Measured:
    cpu_s: float
    wall_s: float
    messages: int
    requests: int
    tokens: int

    def value(self, unit: str) -> float:
        match unit:
            case "us/message":
                return 1e6 * self.cpu_s / self.messages
            case "us/request":
                return 1e6 * self.cpu_s / self.requests
            case _:
                return self.tokens / self.cpu_s


async def load(address: str, pid: int, case: Case, seconds: float) -> Measured:
    """Drives `case.streams` callers; measures the process behind the address over `seconds`, after a warm-up."""
    counted = Measured(0.0, 0.0, 0, 0, 0)
    request = build_request("The quick brown fox jumps over the lazy dog.", max_tokens=case.tokens or 1 << 20)

    async def caller(client: AsyncTailpack) -> None:
        while True:
            async for chunk in client.stream(request):
                counted.messages += 1
                counted.tokens += len(chunk.token_ids)
            counted.requests += 1

    async with AsyncTailpack(address) as client:
        callers = [asyncio.create_task(caller(client)) for _ in range(case.streams)]
        await asyncio.sleep(min(1.0, seconds))
        process = psutil.Process(pid)
        before, started = process.cpu_times(), time.monotonic()
        counted.messages = counted.requests = counted.tokens = 0
        await asyncio.sleep(seconds)
        after = process.cpu_times()
        counted.wall_s = time.monotonic() - started
        counted.cpu_s = after.user + after.system - before.user - before.system
        result = Measured(**vars(counted))
        for task in callers:
            task.cancel()
        for ended in await asyncio.gather(*callers, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
    return result


def spawn(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["address"]


async def measure(case: Case, model: Path, seconds: float) -> tuple[float, float]:
    """(value, floor) in the case's unit."""
    pace = ["--every-s", str(case.every_s), "--per-step", str(case.per_step)]
    started: list[subprocess.Popen[str]] = []
    try:
        worker, worker_address = spawn("tests.bench.bench_router", "--role", "worker", *pace)
        started.append(worker)
        router, address = spawn(
            "protos.cli", "router", "serve", "--listen", "127.0.0.1:0", "--worker", worker_address,
            "--model-dir", str(model),
        )  # fmt: skip
        started.append(router)
        async with AsyncTailpack(address) as client:
            while not any(status.state == "ready" for status in await client.list_workers()):
                await asyncio.sleep(0.05)
        value = (await load(address, router.pid, case, seconds)).value(case.unit)
        for process in started:
            process.kill()
        bare, address = spawn("tests.bench.bench_router", "--role", "bare", *pace)
        started.append(bare)
        floor = (await load(address, bare.pid, case, seconds)).value(case.unit)
        return value, floor
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def record(case: Case, values: list[float], floors: list[float], command: str) -> dict[str, Any]:
    """One line as the records of this project have it."""
    return {
        "bench": "router",
        "case": case.name,
        "value": round(statistics.median(values), 1),
        "unit": case.unit,
        "spread": [round(min(values), 1), round(max(values), 1)],
        "repeats": len(values),
        "floor": round(statistics.median(floors), 1),
        "floor_by": "CPU of a bare grpc.aio server that sends the same messages, same run",
        "rival": None,
        "rival_why": "no other router speaks this protocol; the bare server stands in",
        "error": None,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} CPUs, {_cpu_model()}",
        "load_average": [round(load, 1) for load in psutil.getloadavg()],  # others at work on the machine
        "versions": {name: version(name) for name in ("grpcio", "protobuf", "uvloop", "tokenizers")}
        | {"python": platform.python_version()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
        "command": command,
        "kind": "measured",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


async def run(seconds: float, repeats: int, cases: list[Case], command: str) -> list[dict[str, Any]]:
    records = []
    with tempfile.TemporaryDirectory() as folder:
        model = write_tokenizer(Path(folder))
        for case in cases:
            pairs = [await measure(case, model, seconds) for _ in range(repeats)]
            values, floors = [value for value, _ in pairs], [floor for _, floor in pairs]
            records.append(record(case, values, floors, command))
            print(f"{case.name:36} {records[-1]['value']:>10.1f} {case.unit:12} floor {records[-1]['floor']:.1f}")
    return records


async def serve_role(role: str, every_s: float, per_step: int) -> None:
    server = rpc.RpcServer(role)
    if role == "worker":
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, StepWorker(every_s, per_step), WORKER_NAME)
    else:
        server.add(router_pb2_grpc.add_RouterServicer_to_server, BareRouter(every_s, per_step), SERVICE_NAME)
    print(json.dumps({"address": await server.start("127.0.0.1:0")}), flush=True)
    await asyncio.sleep(600)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--role", choices=["worker", "bare"], help=argparse.SUPPRESS)
    parser.add_argument("--every-s", type=float, default=0.01, help=argparse.SUPPRESS)
    parser.add_argument("--per-step", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        rpc.run(serve_role(options.role, options.every_s, options.per_step))
        return
    command = f"python -m tests.bench.bench_router --seconds {options.seconds:g} --repeats {options.repeats}"
    records = rpc.run(run(options.seconds, options.repeats, CASES, command))
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in records))


if __name__ == "__main__":
    main()
