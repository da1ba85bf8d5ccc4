"""What one core of router costs: CPU per request and per relayed message, the wait it adds, and tokens a CPU second.

    python -m tests.bench.bench_router [--seconds 4] [--repeats 5] [--case NAME]... [--out FILE.jsonl]

Three processes: the router, alone on one core, and on the others a worker without a model and the callers. Only the
router's CPU time counts (user + system, all threads), so that a busy machine disturbs it little; waits it disturbs a
lot. The floor is a bare grpc.aio server on the router's core, in the same run: it sends the same messages at the same
pace, without any worker, tokens or text. The forwarder is another one, between callers and worker like the router: what
grpc.aio costs of the router's work, and what lies above it is the router's own.

Cases: `request-*`: the whole life of a request of one token, from closed loops of callers, each as a call of Generate;
`session-*`: the same in one session of many calls, beside the same by Generate (`generate`), also at random times, so
that hardly two come together; `stats-*`: a plain unary call; `relay-*`: messages of running streams at a pace;
`tokens-*`: streams of a worker that never rests, so many tokens a message or more; `ttft-half-load`: the first token as
a caller sees it, less the same on the bare server. There requests come at random, at half the rate that takes the
router's whole core by `request-64-callers-at-once`. Bare server and forwarder have no sessions: theirs are calls of
Generate.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import psutil

from protos import router_pb2, router_pb2_grpc, rpc
from router.async_session import AsyncSession
from router.client import AsyncTailpack, build_request
from router.client_session import Lost
from tests.bench import router_servers
from tests.scenarios.tiny_tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "The quick brown fox jumps over the lazy dog."
WARM_UP_S = 1.0
CALLERS_AT_ONCE = 64


@dataclass(frozen=True)
class Case:
    """streams: at one time. every_s: between a worker's steps. per_step: tokens of each stream in one. tokens: of each
    answer; None goes on until the time is over. door: "generate", "session" or "stats". rate: of requests a
    second, at random times; None: closed loops.
    """

    name: str
    unit: str
    streams: int = CALLERS_AT_ONCE
    every_s: float = 0.0
    per_step: int = 1
    tokens: int | None = None
    door: str = "generate"
    rate: float | None = None
    limit: float | None = None  # what issue 7 asks for; above it, or below for tokens, is too bad

    def kept(self, value: float) -> bool:
        return self.limit is None or (value >= self.limit if self.unit == "tokens/CPU-s" else value <= self.limit)


TTFT = "ms added"
CASES = [
    Case("request-64-callers-at-once", "us/request", tokens=1, limit=350.0),
    Case("request-16-callers-1-token", "us/request", streams=16, every_s=0.001, tokens=1),
    Case("session-64-callers-at-once", "us/request", tokens=1, door="session", limit=350.0),
    Case("session-16-callers-1-token", "us/request", streams=16, every_s=0.001, tokens=1, door="session", limit=350.0),
    Case("session-at-random-500-a-second", "us/request", every_s=0.001, tokens=1, door="session", rate=500.0),
    Case("session-relay-64-streams-1-token", "us/message", every_s=0.02, door="session", limit=75.0),
    Case("stats-64-callers", "us/call", door="stats", limit=350.0),
    Case("ttft-half-load", TTFT, tokens=1, limit=1.0),
    Case("relay-64-streams-1-token", "us/message", every_s=0.02, limit=75.0),
    Case("relay-64-streams-8-tokens", "us/message", every_s=0.02, per_step=8, limit=75.0),
    Case("relay-1-stream-1-token", "us/message", streams=1, every_s=0.005),
    Case("tokens-64-streams-unpaced-8-tokens", "tokens/CPU-s", per_step=8),
    Case("tokens-64-streams-unpaced-16-tokens", "tokens/CPU-s", per_step=16, limit=300_000.0),
    Case("tokens-64-streams-unpaced-32-tokens", "tokens/CPU-s", per_step=32),
]


@dataclass
class Counted:
    cpu_s: float = 0.0
    wall_s: float = 0.0
    messages: int = 0
    requests: int = 0
    tokens: int = 0

    def value(self, unit: str) -> float:
        match unit:
            case "us/message":
                return 1e6 * self.cpu_s / self.messages
            case "us/request" | "us/call":
                return 1e6 * self.cpu_s / self.requests
            case "tokens/CPU-s":
                return self.tokens / self.cpu_s
        raise ValueError(unit)


@dataclass(frozen=True)
class Server:
    address: str
    pid: int


class Callers:
    """Calls one server, with as little work a call as grpc.aio allows: the router's client does more."""

    def __init__(self, server: Server, channel: grpc.aio.Channel, session: AsyncSession | None = None) -> None:
        """session: what answers come in; None: each has a call of Generate."""
        self.counted = Counted()
        self.waits_s: list[float] = []
        self._process = psutil.Process(server.pid)
        self._stub = router_pb2_grpc.RouterStub(channel)
        self._session = session
        self._numbers = itertools.count()

    async def answer(self, request: router_pb2.GenerateRequest) -> None:
        started = time.perf_counter()
        first = True
        async for chunk in self._chunks(request, f"bench-{id(self)}-{next(self._numbers)}"):
            if first:
                self.waits_s.append(time.perf_counter() - started)
                first = False
            self.counted.messages += 1
            self.counted.tokens += len(chunk.token_ids)
        self.counted.requests += 1

    async def _chunks(
        self, request: router_pb2.GenerateRequest, request_id: str
    ) -> AsyncGenerator[router_pb2.GenerateResponse, None]:
        if self._session is not None:
            chunks = self._session.chunks(request, request_id=request_id, traceparent="", timeout_s=None)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk
            return
        call = self._stub.Generate(request, metadata=(("x-request-id", request_id),))
        try:
            while isinstance(answered := await call.read(), router_pb2.GenerateResponse):
                yield answered
        finally:
            call.cancel()

    async def closed_loop(self, case: Case) -> None:
        request = build_request(PROMPT, max_tokens=case.tokens or 1 << 20)
        while True:
            if case.unit == "us/call":
                await self._stub.Stats(router_pb2.StatsRequest())
                self.counted.requests += 1
            else:
                await self.answer(request)

    async def open_loop(self, case: Case, rate: float) -> None:
        """Requests come at random times, `rate` a second on average, whatever became of those before."""
        request, due = build_request(PROMPT, max_tokens=case.tokens), time.perf_counter()
        async with asyncio.TaskGroup() as running:
            while True:
                due += random.expovariate(rate)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                running.create_task(self.answer(request))

    async def measured(self, seconds: float, *loops: Any) -> Counted:
        """Runs the loops; counts over `seconds`, after a warm-up."""
        tasks = [asyncio.create_task(loop) for loop in loops]
        await asyncio.sleep(min(WARM_UP_S, seconds))
        self.counted = Counted()
        self.waits_s.clear()
        before, started = self._process.cpu_times(), time.monotonic()
        await asyncio.sleep(seconds)
        after, counted = self._process.cpu_times(), self.counted
        counted.wall_s = time.monotonic() - started
        counted.cpu_s = after.user + after.system - before.user - before.system
        self.counted = Counted()  # what still comes does not count
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        return counted


@asynccontextmanager
async def callers(server: Server, door: str = "generate") -> AsyncIterator[Callers]:
    async with rpc.channel(server.address) as channel:
        if door != "session":
            yield Callers(server, channel)
            return
        lost = lambda failed: Lost(rpc.error_from(failed), spoken=False)
        session = AsyncSession(router_pb2_grpc.RouterStub(channel), (), lost)
        await session.open()
        yield Callers(server, channel, session)
        await session.close()


async def cost(server: Server, case: Case, seconds: float, door: str | None = None) -> float:
    """In the case's unit. door: instead of the case's."""
    async with callers(server, door or case.door) as each:
        if case.rate is not None:
            loops = [each.open_loop(case, case.rate)]
        else:
            loops = [each.closed_loop(case) for _ in range(case.streams)]
        return (await each.measured(seconds, *loops)).value(case.unit)


async def first_token_ms(server: Server, case: Case, rate: float, seconds: float) -> float:
    """The median wait for the first token."""
    async with callers(server) as each:
        await each.measured(seconds, each.open_loop(case, rate))
        return 1e3 * statistics.median(each.waits_s)


def cores() -> tuple[set[int], set[int]]:
    """(the router's, everybody else's): the same where there is only one."""
    *others, last = sorted(os.sched_getaffinity(0))
    return {last}, set(others) or {last}


def spawn(on: set[int], *arguments: str) -> tuple[subprocess.Popen[str], Server]:
    process = subprocess.Popen(
        [sys.executable, "-m", *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    os.sched_setaffinity(process.pid, on)  # before it has other threads, which inherit it
    assert process.stdout is not None
    return process, Server(json.loads(process.stdout.readline())["address"], process.pid)


@asynccontextmanager
async def bed(case: Case, model: Path) -> AsyncIterator[tuple[Server, Server, Server]]:
    """(router, bare server, forwarder); those that are not called cost nothing."""
    pace = ["--every-s", str(case.every_s), "--per-step", str(case.per_step)]
    router_core, other_cores = cores()
    started: list[subprocess.Popen[str]] = []
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, other_cores)
        worker_process, worker = spawn(other_cores, "tests.bench.bench_router", "--role", "worker", *pace)
        started.append(worker_process)
        router_process, router = spawn(
            router_core, "protos.cli", "router", "serve", "--listen", "127.0.0.1:0", "--http", "none",
            "--worker", worker.address, "--model-dir", str(model),
        )  # fmt: skip
        started.append(router_process)
        bare_process, bare = spawn(router_core, "tests.bench.bench_router", "--role", "bare", *pace)
        started.append(bare_process)
        forwarder_process, forwarder = spawn(
            router_core, "tests.bench.bench_router", "--role", "forwarder", "--worker", worker.address
        )
        started.append(forwarder_process)
        async with AsyncTailpack(router.address) as client:
            while not any(status.state == "ready" for status in await client.list_workers()):
                await asyncio.sleep(0.05)
        yield router, bare, forwarder
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Measured:
    """In the case's unit. floor: a bare server's. forwarder, generate: of the same by these ways; None: no such."""

    value: float
    floor: float
    forwarder: float | None
    generate: float | None
    load: float


async def measure(case: Case, model: Path, seconds: float) -> Measured:
    async with bed(case, model) as (router, bare, forwarder):
        generate: float | None = None
        if case.unit == TTFT:
            full = 1e6 / await cost(router, CASES[0], seconds)
            waits = [await first_token_ms(each, case, full / 2, seconds) for each in (router, bare, forwarder)]
            value, floor, forwarded = waits[0] - waits[1], waits[1], waits[2] - waits[1]
        else:
            ways = "generate" if case.door == "session" else case.door
            value = await cost(router, case, seconds)
            floor, forwarded = [await cost(each, case, seconds, ways) for each in (bare, forwarder)]
            if case.door == "session":
                generate = await cost(router, case, seconds, "generate")
        return Measured(value, floor, forwarded, generate, psutil.getloadavg()[0])


def record(case: Case, measured: list[Measured], command: str) -> dict[str, Any]:
    """One line as the records of this project have it."""
    digits = 3 if case.unit == TTFT else 1
    values, floors, loads = ([getattr(each, name) for each in measured] for name in ("value", "floor", "load"))

    def median(name: str) -> float | None:
        known = [value for each in measured if (value := getattr(each, name)) is not None]
        return round(statistics.median(known), digits) if known else None

    floor_by = "a bare grpc.aio server on the same core that sends the same messages, same run"
    return {
        "bench": "router",
        "case": case.name,
        "value": round(statistics.median(values), digits),
        "unit": case.unit,
        "spread": [round(min(values), digits), round(max(values), digits)],
        "repeats": len(values),
        "limit": case.limit,
        "floor": round(statistics.median(floors), digits),
        "floor_by": f"whole wait with {floor_by}" if case.unit == TTFT else f"CPU of {floor_by}",
        "floor_spread": [round(min(floors), digits), round(max(floors), digits)],
        "forwarder": median("forwarder"),  # grpc.aio's part of the value
        "generate": median("generate"),  # each request as a call of its own
        "rival": None,
        "rival_why": "no other router speaks this protocol; the bare server stands in",
        "error": None,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} CPUs, {_cpu_model()}",
        "load_average": [round(statistics.median(loads), 1), round(max(loads), 1)],  # ours is part of it
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
    """All cases once, then all again: what disturbs the machine for a while does not hit one case alone."""
    measured: dict[str, list[Measured]] = {case.name: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        model = write_tokenizer(Path(folder))
        for _ in range(repeats):
            for case in cases:
                measured[case.name].append(await measure(case, model, seconds))
    records = []
    for case in cases:
        each = record(case, measured[case.name], command)
        records.append(each)
        asked = "" if case.limit is None else f"asked {case.limit:<9g}{'' if case.kept(each['value']) else ' MISSED'}"
        print(
            f"{case.name:36}{each['value']:>12} {case.unit:13}{each['spread']!s:22} floor {each['floor']:<11}"
            f"forwarder {each['forwarder'] or '-':<11}generate {each['generate'] or '-':<11}"
            f"load {each['load_average'][0]:<5} {asked}"
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", action="append", choices=[case.name for case in CASES], help="default: all")
    parser.add_argument("--out", type=Path, help="records are appended")
    parser.add_argument("--role", choices=["worker", "bare", "forwarder"], help=argparse.SUPPRESS)
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--every-s", type=float, default=0.01, help=argparse.SUPPRESS)
    parser.add_argument("--per-step", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        rpc.run(router_servers.serve(options.role, options.every_s, options.per_step, options.worker))
        return
    cases = [case for case in CASES if not options.case or case.name in options.case]
    command = f"python -m tests.bench.bench_router --seconds {options.seconds:g} --repeats {options.repeats}"
    command += "".join(f" --case {name}" for name in options.case or ())
    records = rpc.run(run(options.seconds, options.repeats, cases, command))
    if options.out:
        with options.out.open("a") as out:
            out.writelines(json.dumps(line) + "\n" for line in records)


if __name__ == "__main__":
    main()
