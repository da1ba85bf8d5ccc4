"""How long a cancel takes to reach the worker: `python -m tests.bench.bench_cancel [--record]`.

A kvstore, a worker with the real engine, and a router, each a process; the callers are here. Measured from the moment a
caller ends its call to the moment the worker's engine is told ("heard", which may take 100 ms), and to the moment the
sequence has ended and its pages are free ("freed", which waits for the step that runs just then). All read one clock,
CLOCK_MONOTONIC. The floor is one hop: the same process leaves a bare grpc.aio server, in turn with each measured call.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from protos import logs, router_pb2, router_pb2_grpc, rpc, types_pb2
from router.client import AsyncTailpack, RetryPolicy
from router.service import SERVICE_NAME
from tests.bench.bench_gil import RESULTS, describe, kvstore
from tests.bench.router_servers import BareRouter
from tests.e2e.cluster import write_tiny_model
from tests.scenarios.cable import Cable
from worker import gguf_model, shell
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.sequence import Request, StepResult

LIMIT_MS = 100.0
NUM_OTHERS = 8
OUTPUT_TOKENS = 400
ONCE = RetryPolicy(max_retries=0)
SETTLE_S = 30.0  # a bound on what would otherwise hang


# --- what runs in the other processes ---


def say(event: str, request_id: str) -> None:
    """One line for the process that started this one."""
    line = json.dumps({"event": event, "request_id": request_id, "at_ns": time.monotonic_ns()})
    os.write(sys.stdout.fileno(), f"{line}\n".encode())  # in one piece: two threads tell events


class TellingEngine(Engine):
    """The engine, which also says when it is told of an abort and when an aborted sequence has ended."""

    def __init__(self, config: Any, model: Any, attachment: Any, emit: Callable[[StepResult], None], **more: Any):
        def tell(result: StepResult) -> None:
            for output in result.outputs:
                if output.finish_reason == types_pb2.FINISH_REASON_ABORTED:
                    say("freed", output.request_id)
            emit(result)

        super().__init__(config, model, attachment, tell, **more)

    def submit(self, request: Request) -> None:
        say("submitted", request.request_id)
        super().submit(request)

    def abort(self, request_id: str, *, tenant: str | None = None, owner: str | None = None) -> bool:
        say("heard", request_id)
        return super().abort(request_id, tenant=tenant, owner=owner)


async def worker_role(model: Path, socket: Path, arena_bytes: int) -> None:
    shell.Engine = TellingEngine  # type: ignore[attr-defined, assignment]  # shell.serve makes its own
    config = WorkerConfig(
        model=model, name="bench", kv_socket=socket, worker_id="bench", threads=1, arena_bytes=arena_bytes
    )
    await shell.serve(
        config,
        "127.0.0.1:0",
        asyncio.Event(),
        on_ready=lambda running: print(json.dumps({"address": running.address}), flush=True),
    )


class LeavableServer(BareRouter):
    """Streams slowly, and says when the caller has left."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        request_id = rpc.call_metadata(context).request_id
        try:
            yield router_pb2.GenerateResponse(request_id=request_id)
            await asyncio.sleep(SETTLE_S)
        finally:
            say("heard", request_id)


async def bare_role() -> None:
    server = rpc.RpcServer("bare")
    server.add(router_pb2_grpc.add_RouterServicer_to_server, LeavableServer(0.0, 1), SERVICE_NAME)
    print(json.dumps({"address": await server.start("127.0.0.1:0")}), flush=True)
    await asyncio.Event().wait()


# --- this process ---


@dataclass
class Listener:
    """A process of ours that says its address first, and then when it heard of what."""

    process: asyncio.subprocess.Process
    address: str
    _times: dict[tuple[str, str], int] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            said = json.loads(line)
            self._times.setdefault((said["event"], said["request_id"]), said["at_ns"])
            self._changed.set()

    async def time_of(self, event: str, request_id: str) -> int:
        """time.monotonic_ns when it came about; waits until it has."""
        async with asyncio.timeout(SETTLE_S):
            while (event, request_id) not in self._times:
                self._changed.clear()
                await self._changed.wait()
        return self._times[event, request_id]


@asynccontextmanager
async def listener(*arguments: str) -> AsyncIterator[Listener]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    reader: asyncio.Task[None] | None = None
    try:
        said: dict[str, str] = {}
        while "address" not in said:  # a worker tells of its own first request before
            line = await process.stdout.readline()
            assert line, f"{arguments} ended with {await process.wait()}"
            said = json.loads(line)
        made = Listener(process, said["address"])
        reader = asyncio.create_task(made.read())
        yield made
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        if reader is not None:
            await reader


Leave = Callable[[], Awaitable[object]]


@dataclass(frozen=True)
class Case:
    """Callers that end their calls, one behind the other.

    Attributes:
        way: "leave" (the call is cancelled), "Cancel" (the RPC), or "reset" (the connection is).
        others: sequences that decode meanwhile.
        await_tokens: the caller ends its call when it has so many; 0: as soon as the worker has its prompt.
    """

    name: str
    way: str = "leave"
    others: int = NUM_OTHERS
    prompt_tokens: int = 8
    await_tokens: int = 3


CASES = [
    Case("leave-alone", others=0),
    Case("leave-among-8"),
    Case("Cancel-among-8", way="Cancel"),
    Case("reset-among-8", way="reset"),
    Case("leave-prefill-among-8", prompt_tokens=900, await_tokens=0),
]


@dataclass
class Scene:
    router: str
    worker: Listener
    bare: Listener
    client: AsyncTailpack


async def one(scene: Scene, case: Case, request_id: str) -> dict[str, float]:
    """One call that is ended: milliseconds until it was heard, freed, and heard by the bare server."""
    if case.way == "reset":
        cable = Cable(scene.router)
        async with cable.plugged() as address, AsyncTailpack(address, retry=ONCE) as client:

            async def cut() -> None:
                cable.cut()

            ended_ns = await _call_and_end(client, scene.worker, case, request_id, cut)
    else:
        ended_ns = await _call_and_end(
            scene.client, scene.worker, case, request_id, lambda: scene.client.cancel(request_id)
        )
    heard_ns = await scene.worker.time_of("heard", request_id)
    freed_ns = await scene.worker.time_of("freed", request_id)

    async with rpc.channel(scene.bare.address) as channel:
        call = router_pb2_grpc.RouterStub(channel).Generate(
            router_pb2.GenerateRequest(), metadata=rpc.metadata(request_id)
        )
        await call.read()
        left_ns = time.monotonic_ns()
        call.cancel()
        floor_ns = await scene.bare.time_of("heard", request_id) - left_ns
    return {"heard": (heard_ns - ended_ns) / 1e6, "freed": (freed_ns - ended_ns) / 1e6, "floor": floor_ns / 1e6}


async def _call_and_end(client: AsyncTailpack, worker: Listener, case: Case, request_id: str, end: Leave) -> int:
    """Calls, waits for the moment, ends the call. time.monotonic_ns just before that."""
    chunks = client.generate([7] * case.prompt_tokens, request_id=request_id, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    first = asyncio.ensure_future(anext(chunks))
    if case.await_tokens:
        num_tokens = len((await first).token_ids)
        while num_tokens < case.await_tokens:
            num_tokens += len((await anext(chunks)).token_ids)
    else:
        await worker.time_of("submitted", request_id)
    ended_ns = time.monotonic_ns()
    if case.way == "leave":
        first.cancel()  # while it waits for its first token, this ends the call
        await asyncio.gather(first, return_exceptions=True)
        await chunks.aclose()
        return ended_ns
    await end()
    with contextlib.suppress(Exception):  # ABORTED or a broken connection, as the case has it
        async for _ in chunks:
            pass
    return ended_ns


async def _others(client: AsyncTailpack) -> None:
    while True:
        async for _ in client.generate([7] * 8, max_tokens=OUTPUT_TOKENS, ignore_eos=True):
            pass


async def measure(
    model: Path, name: str, repeats: int, cases: Sequence[Case] = CASES, arena_bytes: int = 64 << 20
) -> list[dict[str, Any]]:
    """Records for one model: two a case."""
    records: list[dict[str, Any]] = []
    here = "tests.bench.bench_cancel"
    with tempfile.TemporaryDirectory(prefix="tp-") as folder, kvstore(Path(folder)) as socket:
        role = ("--role", "worker", "--model", str(model), "--socket", str(socket), "--arena-bytes", str(arena_bytes))
        async with (
            listener(here, *role) as worker,
            listener(here, "--role", "bare") as bare,
            listener(
                *("protos.cli", "router", "serve", "--listen", "127.0.0.1:0"),
                *("--worker", worker.address, "--model-dir", str(model)),
            ) as router,
            AsyncTailpack(router.address, retry=ONCE) as client,
        ):
            while not any(status.state == "ready" for status in await client.list_workers()):
                await asyncio.sleep(0.05)
            scene = Scene(router.address, worker, bare, client)
            for case in cases:
                others = [asyncio.create_task(_others(client)) for _ in range(case.others)]
                await asyncio.sleep(0.5)
                load = os.getloadavg()[0]
                times = [await one(scene, case, f"{case.name}-{number}") for number in range(repeats)]
                for task in others:
                    task.cancel()
                for ended in await asyncio.gather(*others, return_exceptions=True):
                    if isinstance(ended, Exception):
                        raise ended
                records += [record(f"{case.name}-{name}", what, times, load) for what in ("heard", "freed")]
    return records


def record(case: str, what: str, times: Sequence[dict[str, float]], load: float) -> dict[str, Any]:
    values = sorted(time[what] for time in times)
    line: dict[str, Any] = {
        "bench": "cancel",
        "case": f"{what}-{case}",
        "value": round(statistics.median(values), 2),
        "unit": "ms",
        "spread": [round(values[0], 2), round(values[-1], 2)],
        "repeats": len(values),
        "p99": round(values[math.ceil(0.99 * len(values)) - 1], 2),
        "floor": round(statistics.median(time["floor"] for time in times), 2),
        "floor_by": "one hop: a bare grpc.aio server's handler ends, in turn with the calls",
        "rival": None,
        "rival_why": "no other router speaks this protocol; the bare server stands in",
        "load_average": round(load, 1),
    }
    if what == "heard":
        line |= {"limit": LIMIT_MS, "num_over_limit": sum(value > LIMIT_MS for value in values)}
    return line


@click.command()
@click.option(
    "--repeats", default=100, show_default=True, type=click.IntRange(min=1), help="Calls ended, of each case."
)
@click.option("--record", "write", is_flag=True, help="Write the lines under tests/bench/results.")
@click.option("--smollm2", is_flag=True, help="Measure with SmolLM2 too, whose steps are long; a tenth of the repeats.")
@click.option("--role", type=click.Choice(["worker", "bare"]), hidden=True)
@click.option("--model", type=click.Path(path_type=Path), hidden=True)
@click.option("--socket", type=click.Path(path_type=Path), hidden=True)
@click.option("--arena-bytes", default=64 << 20, hidden=True)
def main(
    repeats: int, write: bool, smollm2: bool, role: str | None, model: Path, socket: Path, arena_bytes: int
) -> None:
    """Print one record a line; with --record write them to a new file too."""
    logs.configure("bench", level="warning")
    if role is not None:
        rpc.run(worker_role(model, socket, arena_bytes) if role == "worker" else bare_role())
        return
    command = f"python -m tests.bench.bench_cancel --repeats {repeats}{' --smollm2' if smollm2 else ''}"
    common = describe(command)
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        records = rpc.run(measure(write_tiny_model(Path(folder) / "tiny"), "tiny", repeats))
    if smollm2:
        folder_of = gguf_model.model_folder(gguf_model.demo_gguf())
        records += rpc.run(measure(folder_of, "smollm2", max(1, repeats // 10), arena_bytes=512 << 20))
    lines = [json.dumps(line | common) for line in records]
    for line in lines:
        click.echo(line)
    if write:
        slug = f"cpu{os.cpu_count()}"
        (RESULTS / f"{slug}-cancel-{datetime.now(UTC):%Y-%m-%d}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
