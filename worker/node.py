"""``tailpack worker node``: the workers of one Ray node, where something else, as KubeRay, runs Ray itself.

It has Ray run a worker for each GPU of this node: a detached actor, pinned to the node and restarted for ever. Then it
watches them, passes their logs on, and on SIGTERM drains them. When it dies itself the workers run on, and the next one
finds them. When this node's Ray ends, it ends as well: what is started next belongs to another node, and a driver has
no way there. No token and no KV byte comes by here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from protos.errors import CapacityError, ConfigError, TailpackError, Unavailable
from protos.health import serving_health
from protos.metrics import OFF
from protos.tls import ServerTls
from worker.config import WorkerConfig, default_dtype
from worker.gpu import Gpu

log = structlog.get_logger("node")

NAMESPACE = "tailpack"
RAY_TIMEOUT_S = 120.0  # Ray of a pod that starts, and its head's
RAY_RETRY_S = 2.0
GPU_TIMEOUT_S = 60.0
LOOK_S = 1.0
ANSWER_TIMEOUT_S = 5.0
END_MARGIN_S = 10.0
"""Behind the drain's grace, for a worker's last step and its end."""
MAX_LOG_BYTES = 32 << 20


@dataclass(frozen=True)
class NodeConfig:
    """What to run on this node.

    Attributes:
        settings: of every worker, as WorkerConfig has them, but for worker_id and device; dtype may be None, threads 0.
        listen: host:port of the first worker; the others' ports follow.
        metrics: the same, of their pages for Prometheus, or OFF.
        device: "cpu", or "cuda": a worker for each GPU of the node.
        workers: how many, on the CPU; on GPUs how many there must be, where it is not 0.
        node_name: workers are called node_name-0, node_name-1, ...
        log_dir: holds the workers' logs until they are passed on.
        drain_file: who makes it asks for a drain, as SIGTERM does: what ends Ray's container, and with it the workers.
        drained_file: made when all have ended. Both are removed at the start.
        standby: a second process a worker, which takes over when it dies.
    """

    settings: dict[str, Any]
    listen: str
    metrics: str
    health: str
    device: str
    workers: int
    node_name: str
    ray_address: str
    log_dir: Path
    drain_s: float
    drain_file: Path | None = None
    drained_file: Path | None = None
    tls: ServerTls | None = None
    otlp_endpoint: str | None = None
    standby: bool = False

    def worker(self, index: int, count: int, gpu: Gpu | None) -> WorkerConfig:
        """Of ``count`` workers, which share the node's cores where nothing else is asked for."""
        device = gpu.device if gpu is not None else f"cpu:{index}"
        dtype = self.settings["dtype"] or default_dtype(device)
        threads = self.settings["threads"] or max(1, len(os.sched_getaffinity(0)) // count)
        own = {"worker_id": f"{self.node_name}-{index}", "device": device, "dtype": dtype, "threads": threads}
        return WorkerConfig.from_dict({**self.settings, **own})


def devices(wanted: str, workers: int, gpus: Sequence[Gpu]) -> list[Gpu | None]:
    """One entry a worker: its GPU, or None for the CPU.

    Raises:
        ConfigError: NO_GPU; CapacityError: NOT_ENOUGH_GPUS, another number of GPUs is there than was asked for.
    """
    if wanted == "cpu":
        return [None] * (workers or 1)
    if not gpus:
        raise ConfigError(
            "this node has no GPU",
            reason="NO_GPU",
            given="0 GPUs visible to its Ray container",
            hint="give the Ray container GPUs, or use --device cpu",
        )
    if workers not in (0, len(gpus)):
        raise CapacityError(
            "this node has another number of GPUs",
            reason="NOT_ENOUGH_GPUS",
            given=f"{len(gpus)} GPUs: {', '.join(gpu.uuid for gpu in gpus)}",
            allowed=f"{workers} workers",
        )
    return list(gpus)


def port_after(address: str, index: int) -> str:
    """host:port, so many ports further; OFF stays OFF."""
    if address == OFF:
        return OFF
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + index}"


def server_pidfd(socket_path: str) -> int | None:
    """A pidfd of the process that listens at a unix socket; None: it is not visible from here. Raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_TIMEOUT_S)
        probe.connect(socket_path)
        pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return os.pidfd_open(pid) if pid else None


def has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


class LogTail:
    """Passes what a file gains on to a stream, and keeps the file small. Who writes it must append (O_APPEND)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = path.stat().st_size if path.exists() else 0  # an earlier one passed on what is there

    def pass_on(self, out: Any) -> None:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                if data := file.read():
                    out.write(data)
                    out.flush()
                    self._at += len(data)
            if self._at > MAX_LOG_BYTES:  # what is written in this very moment is lost
                os.truncate(self.path, 0)
                self._at = 0
        except FileNotFoundError:
            return


class Node:
    """The workers of this node, seen from their driver."""

    def __init__(self, config: NodeConfig) -> None:
        self.config = config
        self.ready = False
        self._handles: list[list[Any]] = []  # of each worker: its actor, and its standby's
        self._tails: list[LogTail] = []
        self._raylet: int | None = None  # pidfd

    async def run(self) -> None:
        """Until SIGTERM or SIGINT, or the drain file is there; then drains.

        Raises:
            TailpackError: they cannot be started. Unavailable: Ray cannot be reached, has ended, or has given a worker
                up.
        """
        config = self.config
        for file in (config.drain_file, config.drained_file):
            if file is not None:
                file.unlink(missing_ok=True)
        config.log_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        stop = asyncio.Event()
        try:
            async with serving_health(config.health, lambda: self.ready):
                await self._connect(stop)
                if not stop.is_set():
                    await asyncio.to_thread(self._start)
                    await self._watch(stop)
                self.ready = False
                await self._drain()
        finally:
            self._pass_logs_on()
        if config.drained_file is not None:
            config.drained_file.touch()

    async def _connect(self, stop: asyncio.Event) -> None:
        import ray

        deadline = time.monotonic() + RAY_TIMEOUT_S
        while not stop.is_set():
            _watch_signals(stop)
            try:
                ray.init(
                    address=self.config.ray_address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level="WARNING",
                )
            except (ray.exceptions.RayError, RuntimeError, OSError) as failure:  # ConnectionError: not there yet
                if time.monotonic() > deadline:
                    raise Unavailable(
                        "Ray cannot be reached",
                        reason="RAY_NOT_STARTED",
                        given=self.config.ray_address,
                        hint=str(failure),
                    ) from failure
                await asyncio.sleep(RAY_RETRY_S)
                continue
            _watch_signals(stop)  # Ray takes SIGTERM for itself
            return

    def _start(self) -> None:
        import ray

        from worker import actor

        config = self.config
        node_id = ray.get_runtime_context().get_node_id()
        (here,) = (each for each in ray.nodes() if each["NodeID"] == node_id)
        self._raylet = server_pidfd(here["RayletSocketName"])
        if self._raylet is None:
            log.warning("Ray's process is not visible from here: its end will not be noticed", node=node_id)
        gpus = actor.gpus_of(node_id, GPU_TIMEOUT_S) if config.device == "cuda" else ()
        wanted = devices(config.device, config.workers, gpus)
        for index, gpu in enumerate(wanted):
            log_file = config.log_dir / f"worker-{index}.log"
            self._tails.append(LogTail(log_file))
            make = partial(
                actor.create,
                config.worker(index, len(wanted), gpu),
                port_after(config.listen, index),
                drain_s=config.drain_s,
                log_file=log_file,
                metrics=port_after(config.metrics, index),
                otlp_endpoint=config.otlp_endpoint,
                tls=config.tls,
                pinned_to=node_id,
            )
            self._handles.append([make()] + ([make(standby=True)] if config.standby else []))
        log.info(
            "workers asked for", node=node_id, count=len(self._handles), devices=[gpu and gpu.uuid for gpu in gpus]
        )

    async def _watch(self, stop: asyncio.Event) -> None:
        while not stop.is_set() and not self._is_asked_to_drain():
            ready = all(await asyncio.gather(*(self._is_any_ready(handles) for handles in self._handles)))
            self._pass_logs_on()
            if self._raylet is not None and has_ended(self._raylet):
                raise Unavailable(
                    "this node's Ray has ended",
                    reason="RAY_ENDED",
                    hint="see why in its container's log; with Ray started again, start this again",
                )
            if ready != self.ready:
                log.info("all workers are ready" if ready else "a worker is not ready")
                if ready:
                    print(json.dumps({"ready": True, "workers": len(self._handles)}), flush=True)
            self.ready = ready
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), LOOK_S)

    def _is_asked_to_drain(self) -> bool:
        return self.config.drain_file is not None and self.config.drain_file.exists()

    async def _is_any_ready(self, handles: list[Any]) -> bool:
        """Of a worker and its standby, which may have changed places."""
        return any(await asyncio.gather(*(self._is_ready(handle) for handle in handles)))

    async def _is_ready(self, handle: Any) -> bool:
        """Raises Unavailable: Ray does not restart it any more, as when its node was lost."""
        import ray

        try:
            return bool(await asyncio.wait_for(handle.is_ready.remote(), ANSWER_TIMEOUT_S))
        except ray.exceptions.ActorUnavailableError:
            return False  # Ray restarts it
        except ray.exceptions.RayActorError as dead:
            raise Unavailable("Ray has given a worker up", reason="WORKER_GIVEN_UP", hint=str(dead)) from dead
        except (ray.exceptions.RayError, TimeoutError):
            return False

    async def _drain(self) -> None:
        """Lets running answers end, then ends the workers for good. Never raises: Ray may be gone already."""
        import ray

        limit_s = self.config.drain_s + END_MARGIN_S
        log.info("draining", workers=len(self._handles), grace_s=self.config.drain_s)
        every = [handle for handles in self._handles for handle in handles]
        drains = asyncio.gather(*(_stop(handle) for handle in every))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not drains.done():
                    self._pass_logs_on()
                    await asyncio.wait((drains,), timeout=LOOK_S)
        for handle in every:
            with contextlib.suppress(Exception):
                ray.kill(handle, no_restart=True)
        with contextlib.suppress(Exception):
            ray.shutdown()
        log.info("drained")

    def _pass_logs_on(self) -> None:
        for tail in self._tails:
            tail.pass_on(sys.stderr.buffer)


async def _stop(handle: Any) -> None:
    import ray

    with contextlib.suppress(ray.exceptions.RayError, TailpackError):
        await handle.stop.remote()


def _watch_signals(stop: asyncio.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
