"""The supervisor's eyes: a router that refuses the workers, a worker that dies again and again, what logs say of it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from protos import router_pb2, router_pb2_grpc, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.errors import ConfigError, ModelError
from protos.metrics import OFF
from worker import cluster
from worker.child import STARTING, ChildDied, last_problem
from worker.cluster import MAX_FAILED_STARTS, Cluster
from worker.cluster_config import ClusterConfig

ROUTER = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
WORKER = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name
MISMATCH = "model m does not fit this router's tokenizer: its tokenizer.json is another one [TOKENIZER_MISMATCH]"


class FakeRouter(router_pb2_grpc.RouterServicer):
    state = "connecting"

    in_flight = 0

    async def Stats(self, request: Any, context: Any) -> router_pb2.StatsResponse:
        return router_pb2.StatsResponse(in_flight=self.in_flight)

    async def ListWorkers(self, request: Any, context: Any) -> router_pb2.ListWorkersResponse:
        why = MISMATCH if self.state == "refused" else ""
        return router_pb2.ListWorkersResponse(workers=[router_pb2.WorkerStatus(state=self.state, why=why)])


class FakeWorker(worker_pb2_grpc.WorkerServicer):
    incarnation = "first"

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        return worker_pb2.InfoResponse(info=types_pb2.WorkerInfo(incarnation=self.incarnation))


@pytest.fixture
def starting() -> Iterator[Cluster]:
    """A cluster whose router runs, and does not tell yet that it is ready."""
    one = Cluster(ClusterConfig(model=Path("m"), name="m", listen=""), Console(file=StringIO()))
    one._router = SimpleNamespace(running=True)  # type: ignore[assignment]
    yield one
    shutil.rmtree(one.folder)


def test_only_this_user_reads_sockets_and_logs(starting: Cluster) -> None:
    assert starting.kv_socket.parent.stat().st_mode & 0o777 == 0o700
    assert starting.folder == starting.logs.parent == starting.kv_socket.parent


@pytest.mark.parametrize(("count", "said"), [(0, "stopping ..."), (1, "1 answer ..."), (3, "up to 10 s for 3 answers")])
async def test_stopping_says_what_it_waits_for(
    starting: Cluster, router: FakeRouter, monkeypatch: pytest.MonkeyPatch, count: int, said: str
) -> None:
    router.in_flight = count
    monkeypatch.setattr(starting, "_remove_folder", lambda: None)
    monkeypatch.setattr(cluster, "kill_descendants", lambda: None)  # those of the tests beside this one
    starting._router.stop = lambda _grace_s: None  # type: ignore[union-attr, method-assign]
    await asyncio.to_thread(starting.stop)
    assert said in starting.console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
async def router(starting: Cluster) -> AsyncIterator[FakeRouter]:
    server, servicer = rpc.RpcServer("router"), FakeRouter()  # type: ignore[abstract]
    server.add(router_pb2_grpc.add_RouterServicer_to_server, servicer, ROUTER)
    starting.router_address = await server.start(f"unix:{starting.router_socket}")
    yield servicer
    await server.stop(0)


async def test_a_router_that_refuses_the_workers_ends_the_start_at_once(starting: Cluster, router: FakeRouter) -> None:
    waiting = asyncio.create_task(asyncio.to_thread(starting._wait_router_ready))
    await asyncio.sleep(0.3)
    assert not waiting.done()  # connecting is no failure
    router.state = "refused"
    with pytest.raises(ModelError, match="TOKENIZER_MISMATCH"):
        await asyncio.wait_for(waiting, 30)


class Watching:
    """A worker that is watched, and what was said about it."""

    def __init__(self, address: str, log_file: Path) -> None:
        self._output = StringIO()
        self._log_file = log_file
        self.log("ready before", level="error")  # what lies before its start is no news
        ready = SimpleNamespace(
            address=address, worker_id="worker-0", pid=1, incarnation="first", max_sequence_tokens=1024, metrics=None
        )
        self._worker = cluster._Worker(ready, log_file)

    def log(self, event: str, level: str = "info", **fields: str) -> None:
        with self._log_file.open("a") as file:
            file.write(json.dumps({"event": event, "level": level, **fields}) + "\n")

    async def look(self) -> str:
        """One look; what is new to say."""
        before = len(self._output.getvalue())
        await asyncio.to_thread(self._worker.look, Console(file=self._output, width=300))
        return self._output.getvalue()[before:]


async def test_a_worker_that_never_starts_again_is_given_up_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cluster, "ANSWER_TIMEOUT_S", 0.2)
    watching = Watching(f"unix:{tmp_path}/nobody.sock", tmp_path / "worker-0.log")
    assert "does not answer" in await watching.look()
    assert await watching.look() == ""  # said once
    for attempt in range(1, MAX_FAILED_STARTS + 1):
        watching.log(STARTING)
        watching.log("worker failed", level="error", error=f"no room, try {attempt} [ARENA_FULL]")
        said = await watching.look()
        assert f"attempt {attempt} of {MAX_FAILED_STARTS}" in said and f"no room, try {attempt} [ARENA_FULL]" in said
        assert "ready before" not in said and await watching.look() == ""
    watching.log(STARTING)
    with pytest.raises(ChildDied, match=r"worker-0 does not come back.*no room, try 5 \[ARENA_FULL\]"):
        await watching.look()


async def test_a_worker_that_comes_back_is_counted_and_its_end_is_quoted(tmp_path: Path) -> None:
    server, servicer = rpc.RpcServer("worker"), FakeWorker()  # type: ignore[abstract]
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, WORKER)
    watching = Watching(await server.start("127.0.0.1:0"), tmp_path / "worker-0.log")
    assert await watching.look() == ""
    for number in (1, 2):
        watching.log("worker failed", level="error", error=f"the sums came out wrong {number} [INTERNAL]")
        watching.log(STARTING)
        servicer.incarnation = f"life {number}"
        said = await watching.look()
        assert f"(restart {number})" in said and f"came out wrong {number} [INTERNAL]" in said
        assert await watching.look() == ""
    await server.stop(0)


def line(event: str, level: str, **fields: str) -> str:
    return json.dumps({"event": event, "level": level, **fields})


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([], None),
        ([line("listening", "info"), line("router connected", "info")], None),
        ([line("slow disk", "warning"), line("router connected", "info")], "slow disk"),
        ([line("worker failed", "error", error="no room [ARENA_FULL]")], "worker failed: no room [ARENA_FULL]"),
        ([line("bug", "error", exception="Traceback:\n  x\nValueError: 7")], "bug: ValueError: 7"),
        (["Traceback (most recent call last):", "  x", "ValueError: 7", line("bye", "info"), ""], "ValueError: 7"),
        (["Error: taken [PORT_IN_USE]", "I0102 12:34:56.789 1 server.cc:7] shut down"], "Error: taken [PORT_IN_USE]"),
        ([line("bad", "error", why="\x1b[31mred\n")], "bad: \\x1b[31mred\\n"),
    ],
)
def test_a_log_s_last_problem(lines: list[str], problem: str | None) -> None:
    assert last_problem("\n".join(lines)) == problem


def test_of_metrics_the_kvstore_is_first_then_the_workers_then_the_router() -> None:
    first = "127.0.0.1:9100"
    asked = [cluster._metrics_address(first, index) for index in range(4)]  # two workers
    assert asked == [f"127.0.0.1:{port}" for port in (9100, 9101, 9102, 9103)]
    free = cluster._metrics_address("127.0.0.1:0", 3)
    assert free.startswith("127.0.0.1:") and not free.endswith(":0")
    assert cluster._metrics_address(OFF, 3) == OFF


def test_a_taken_port_of_the_routers_metrics_is_found_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:  # the kvstore's, two workers', the router's
            ClusterConfig.of("smollm2", "127.0.0.1:0", workers=2, metrics=f"127.0.0.1:{port - 3}")
    assert caught.value.reason == "PORT_IN_USE"
