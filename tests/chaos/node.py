"""One node without Ray: a kvstore, workers and perhaps routers as processes, each started again when it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore import client
from protos import kvstore_pb2, worker_pb2, worker_pb2_grpc
from protos.errors import TailpackError
from protos.rpc import sync_channel
from tests.chaos.dying_worker import Death
from tests.chaos.zygote import Forked, Zygote

HANG_S = 120.0
"""A bound on what would otherwise hang; nothing is measured by it."""
AGAIN_S = 0.02
"""Between a process's end and its next start."""
LAST_BYTES = 1 << 16  # of a log that is told of
KILLED = -signal.SIGKILL
NOT_OURS = "ended by nobody here"


@dataclass(frozen=True)
class Setting:
    """What a node runs.

    Args:
        model: folder or name; llama's small ones and tiny-v4.
        options: of its workers.
        device: of all workers, each with an index of its own: "cpu" or "cuda".
    """

    name: str
    model: Path | str
    options: tuple[str, ...] = ()
    num_workers: int = 1
    num_routers: int = 0
    device: str = "cpu"


class Server:
    """A process by its name, over all its lives."""

    def __init__(self, name: str, arguments: list[str], folder: Path) -> None:
        self.name = name
        self.arguments = arguments
        self.log = folder / f"{name}.log"
        self.out = folder / f"{name}.out"
        self.deaths: list[Death] = []  # of its next lives
        self.process: Forked | None = None
        self.ends: Counter[str] = Counter()
        self.signalled = False  # this life, by us
        self.doomed = False  # this life is to end by what we sent
        self.died: list[Death] = []  # those of ``deaths`` that came

    @property
    def alive(self) -> bool:
        return self.process is not None and not self.process.ended()

    @property
    def is_ready(self) -> bool:
        return self.alive and self.process is not None and self.process.ready() is not None


@dataclass
class Node:
    """Servers of one setting in one folder of their own; an async context manager."""

    zygote: Zygote
    setting: Setting
    faults: list[str] = field(default_factory=list)
    """What went wrong that no death explains."""
    errors_expected: bool = False
    """In logs."""

    def __post_init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tpc-"))
        self.socket_dir = self.folder / "kv"
        self.kv_socket = self.socket_dir / "kvstore.sock"
        self.store = Server(
            "kvstore", ["kvstore", "serve", "--socket-dir", str(self.socket_dir), "--log-json"], self.folder
        )
        self._ports: list[socket.socket] = []
        self.workers: list[Server] = []
        self.addresses: list[str] = []
        for index in range(self.setting.num_workers):
            address = self._port()
            arguments = ["worker", "serve", "--model", str(self.setting.model), "--kv-socket", str(self.kv_socket)]
            arguments += [
                "--listen",
                address,
                "--worker-id",
                f"worker-{index}",
                "--device",
                f"{self.setting.device}:{index}",
            ]
            arguments += ["--deterministic", "--threads", "1", "--drain-s", "0.2", "--log-json"]
            arguments += ["--otlp-endpoint", "none", "--adopt-grace-s", "5", *self.setting.options]
            self.workers.append(Server(f"worker-{index}", arguments, self.folder))
            self.addresses.append(address)
        self.routers: list[Server] = []
        self.doors: list[str] = []
        for index in range(self.setting.num_routers):
            door = self._port()
            arguments = ["router", "serve", "--listen", door, "--http", "none", "--model-dir", str(self.setting.model)]
            arguments += ["--drain-s", "0.2", "--log-json", "--otlp-endpoint", "none"]
            for address in self.addresses:
                arguments += ["--worker", address]
            self.routers.append(Server(f"router-{index}", arguments, self.folder))
            self.doors.append(door)
        self.servers = [self.store, *self.workers, *self.routers]
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def _port(self) -> str:
        """An address of its own for a server, over all its lives: a socket that never listens keeps it from becoming
        the caller's end of somebody's connection while the server is away.
        """
        kept = socket.socket()
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        self._ports.append(kept)
        return f"127.0.0.1:{kept.getsockname()[1]}"

    async def __aenter__(self) -> Node:
        self._start(self.store)
        await self.ready(self.store)
        for server in (*self.workers, *self.routers):
            self._start(server)
        await self.ready(*self.servers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        for server in self.servers:
            if server.process is not None and server.alive:
                server.signalled = True
                server.process.send(signal.SIGKILL)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self.servers:
            if server.process is not None:
                await _until(server.process.ended, f"{server.name} does not end")
                server.process.reap()
        for port in self._ports:
            port.close()
        if error is None and not self.faults:
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- lives ---

    def _start(self, server: Server) -> None:
        self._tasks.append(asyncio.create_task(self._live(server), name=server.name))

    async def _live(self, server: Server) -> None:
        while not self._stopping:
            server.signalled = server.doomed = False
            death = server.deaths.pop(0) if server.deaths else None
            server.process = self.zygote.fork(server.arguments, log=server.log, out=server.out, death=death)
            await _ended(server.process)
            status = server.process.reap()
            self.note(f"{server.name} ended with {status}")
            how = signal.Signals(-status).name if status < 0 else f"exit {status}"
            server.ends[how] += 1
            if death is not None and status == KILLED and not server.signalled:
                server.died.append(death)
            self._judge(server, status, death)
            await asyncio.sleep(AGAIN_S)

    def _judge(self, server: Server, status: int, death: Death | None) -> None:
        """An end is explained by a signal of ours, by a death that was asked for, by the store that ends a suspect
        (SIGKILL), or, of a worker, by the end of its store.
        """
        explained = server.signalled or (death is not None and status == KILLED)
        explained |= server in self.workers and status in (KILLED, 1)
        if not explained:
            self.faults.append(f"{server.name} {NOT_OURS}: status {status}; {last_lines(server.log)}")

    async def ready(self, *servers: Server) -> None:
        """Waits until they are."""
        for server in servers or self.servers:
            await _until(lambda s=server: s.is_ready, f"{server.name} is not ready", lambda s=server: last_lines(s.log))  # type: ignore[misc]

    async def all_up(self) -> None:
        """Waits until what was hit is gone, all are ready, and the store has every worker."""
        await _until(lambda: not any(server.doomed for server in self.servers), "what was hit does not end")
        await self.ready()
        await _until(self._all_attached, "a worker is not attached")

    def _all_attached(self) -> bool:
        try:
            devices = self.kv_stats().devices
        except TailpackError:
            return False
        return sum(bool(device.worker_id) for device in devices) == len(self.workers)

    def send(self, server: Server, signum: int) -> bool:
        """Whether it was alive."""
        if not server.alive or server.process is None:
            return False
        if signum != signal.SIGCONT:
            server.signalled = True
        server.doomed |= signum in (signal.SIGKILL, signal.SIGTERM)
        server.process.send(signum)
        return True

    def note(self, what: str) -> None:
        """Into the node's own log, with the time that its servers' logs have."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        with (self.folder / "chaos.log").open("a") as log:
            log.write(json.dumps({"timestamp": now, "level": "info", "component": "chaos", "event": what}) + "\n")

    # --- what is there ---

    def kv_stats(self) -> kvstore_pb2.KvStatsResponse:
        return client.stats(self.kv_socket)

    def load(self, index: int = 0) -> Any:
        with sync_channel(self.addresses[index]) as channel:
            return worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(), timeout=60).load

    async def idle(self) -> None:
        """Waits until every counter is back where it was: nothing runs or waits, nothing is held or promised.

        Raises:
            AssertionError: with what is left.
        """
        await self.all_up()
        await _until(lambda: not self._left(), "something is left", lambda: "; ".join(self._left()))
        problems = client.verify(self.kv_socket)
        assert not problems, problems
        for server in self.servers:
            loud = [record for record in records(server.log) if record["level"] in ("error", "critical")]
            assert not loud or self.errors_expected, f"{server.name}: {json.dumps(loud[:3])}"

    def _left(self) -> list[str]:
        left = []
        try:
            devices = self.kv_stats().devices
            for index in range(len(self.workers)):
                load = self.load(index)
                counts = {name: getattr(load, name) for name in ("num_running", "num_waiting", "queued_tokens")}
                left += [f"worker-{index}: {count} {name}" for name, count in counts.items() if count]
        except Exception as away:  # noqa: BLE001 - asked again; in the end it is what is told
            return [f"not answered: {away}"]
        for device in devices:
            if device.sequences:
                left.append(f"{device.device}: {device.sequences} sequences")
            for group in device.groups:
                if group.pages_promised or group.pages_open:
                    left.append(f"{group.group}: {group.pages_promised} promised, {group.pages_open} open")
                if group.pages_free + group.pages_cached != group.pages_total:
                    kept = f"{group.pages_free} free, {group.pages_cached} cached"
                    left.append(f"{group.group}: {kept} of {group.pages_total} pages")
                if group.tail_slots_used > device.checkpoints:
                    left.append(f"{group.group}: {group.tail_slots_used} tails, {device.checkpoints} checkpoints")
        return left

    def memory_files(self) -> dict[str, int]:
        """Memory files that each process holds."""
        return {server.name: num_memory_files(server) for server in (self.store, *self.workers)}

    async def hold(self, files: dict[str, int]) -> None:
        """Waits until each process has so many: weights are brought to a new store when it is noticed.

        Raises:
            AssertionError: with what they have.
        """
        await _until(lambda: self.memory_files() == files, f"not {files}", lambda: f"{self.memory_files()}")

    async def stop(self) -> None:
        """Orderly: routers, workers, store; nothing of them may be left.

        Raises:
            AssertionError: by what is.
        """
        self._stopping = True
        for kind in (self.routers, self.workers, [self.store]):
            for server in kind:
                self.send(server, signal.SIGTERM)
            for server in kind:
                process = server.process
                assert process is not None
                await _until(process.ended, f"{server.name} does not end")
                assert process.reap() == 0, f"{server.name} ended with {process.reap()}: {last_lines(server.log)}"
        assert list(self.socket_dir.iterdir()) == [], "sockets are left"


def num_memory_files(server: Server) -> int:
    """Different ones: a mapping of Python's has a descriptor of its own."""
    assert server.process is not None
    files = set()
    for descriptor in Path(f"/proc/{server.process.pid}/fd").iterdir():
        with suppress(OSError):
            if str(descriptor.readlink()).startswith("/memfd:"):
                files.add(descriptor.stat().st_ino)
    return len(files)


def records(log: Path) -> list[dict[str, Any]]:
    """Of a log; lines that are none are left out."""
    found = []
    with log.open(errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                found.append(record)
    return found


def last_lines(log: Path, count: int = 12) -> str:
    if not log.exists():
        return f"{log}: not there"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - LAST_BYTES))
        text = file.read().decode(errors="replace")
    return f"{log}:\n" + "\n".join(line[:1500] for line in text.splitlines()[-count:])


async def _ended(process: Forked) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(process.pidfd, over.set)
    try:
        await over.wait()
    finally:
        loop.remove_reader(process.pidfd)


async def _until(condition: Callable[[], bool], what: str, told: Callable[[], str] = lambda: "") -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {told()}"
        await asyncio.sleep(0.01)
