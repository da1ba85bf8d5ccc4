"""The supervisor behind ``tailpack up``: kvstore, Ray, workers and router on this machine, and their orderly end.

Started in this order; stopped as router (running answers may end), workers, Ray, kvstore.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import grpc
from rich.console import Console

from kvstore.memory_limit import HEADROOM_BYTES, available_bytes
from protos import rpc, worker_pb2, worker_pb2_grpc
from protos.errors import CapacityError, ModelError, PreconditionFailed, TailpackError, Unavailable
from worker import gguf_model
from worker.child import Child, ChildDied, kill_descendants
from worker.config import WorkerConfig

DEFAULT_ARENA_BYTES = 1 << 30
LEAST_ARENA_BYTES = 16 << 20
OBJECT_STORE_BYTES = 80 << 20  # Ray's own; the least it takes. Nothing of ours goes through it
START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0  # weights of gigabytes from a cold disk
ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class ClusterConfig:
    """What to run. ``kv_bytes`` None takes what is free, at most 1 GiB a worker; ``threads`` 0 divides the cores."""

    model: Path
    name: str
    listen: str
    workers: int = 1
    kv_bytes: int | None = None
    deterministic: bool = False
    dtype: str = "float32"
    kv_mode: str = "dense"
    max_running: int = 16
    max_waiting: int = 1024
    max_sequence_tokens: int = 0
    prefill_chunk: int = 256
    threads: int = 0
    drain_s: float = 10.0

    @staticmethod
    def of(model: str, listen: str, *, name: str | None = None, **settings: Any) -> ClusterConfig:
        """Checks what can be checked before anything heavy starts, and unpacks a GGUF file once.

        Raises:
            ConfigError: the address is taken or malformed, or a worker's setting is bad.
            ModelError: the model is not there or unreadable.
            CapacityError: NOT_ENOUGH_MEMORY.
        """
        rpc.check_free(listen)
        folder, default_name = resolve_model(model)
        config = ClusterConfig(model=folder, name=name or default_name, listen=listen, **settings)
        config.worker(0, Path("unknown yet"), config.kv_bytes or DEFAULT_ARENA_BYTES)
        arena_bytes_of(config)
        return config

    def worker(self, index: int, kv_socket: Path, arena_bytes: int) -> WorkerConfig:
        cores = len(os.sched_getaffinity(0))
        return WorkerConfig(
            model=self.model,
            name=self.name,
            kv_socket=kv_socket,
            worker_id=f"worker-{index}",
            dtype=self.dtype,
            kv_mode=self.kv_mode,
            arena_bytes=arena_bytes,
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_sequence_tokens=self.max_sequence_tokens,
            prefill_chunk=self.prefill_chunk,
            deterministic=self.deterministic,
            device=f"cpu:{index}",
            threads=self.threads or max(1, cores // self.workers),
        )


def resolve_model(model: str) -> tuple[Path, str]:
    """(Hugging Face folder, name) of "smollm2", a folder, or a GGUF file (unpacked into the cache when it is new).

    Raises:
        ModelError: there is no such model, or it is not readable.
    """
    if model == "smollm2":
        return gguf_model.model_folder(gguf_model.demo_gguf()), model
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            raise ModelError("not a model folder", given=path, allowed="config.json and *.safetensors in it")
        return path.absolute(), path.absolute().name
    if path.suffix == ".gguf":
        return gguf_model.model_folder(path), path.stem
    raise ModelError("no such model", given=model, allowed="smollm2, a model folder, or a .gguf file")


def arena_bytes_of(config: ClusterConfig) -> int:
    """Bytes of each worker's KV arenas.

    Raises:
        CapacityError: NOT_ENOUGH_MEMORY, they do not fit beside the weights.
    """
    available, limited_by = available_bytes()
    weights = sum(path.stat().st_size for path in config.model.glob("*.safetensors"))
    room = (available - HEADROOM_BYTES) // config.workers - weights
    arena_bytes = config.kv_bytes if config.kv_bytes is not None else min(DEFAULT_ARENA_BYTES, room // 2)
    if arena_bytes > room or (config.kv_bytes is None and arena_bytes < LEAST_ARENA_BYTES):
        raise CapacityError(
            "not enough memory for the KV arenas",
            reason="NOT_ENOUGH_MEMORY",
            given=f"{config.workers} workers with {weights >> 20} MiB of weights and "
            f"{max(arena_bytes, LEAST_ARENA_BYTES) >> 20} MiB of arenas each",
            allowed=f"{(available - HEADROOM_BYTES) >> 20} MiB for all of it ({limited_by})",
            hint="fewer workers, or a smaller --kv-bytes",
        )
    return arena_bytes


class Interrupted(BaseException):
    """The first Ctrl-C or SIGTERM, raised in the main thread while the cluster starts or runs."""


class Cluster:
    """A running cluster; a context manager. ``check`` tells when something broke."""

    def __init__(self, config: ClusterConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self.folder = Path(tempfile.mkdtemp(prefix="tp-"))  # short: socket paths end at 107 bytes
        self.logs = self.folder / "logs"
        self.router_address = ""
        self.kv_socket = self.folder / "kvstore.sock"
        self._kvstore: Child | None = None
        self._router: Child | None = None
        self._ray_started = False
        self._ray_processes: _Watched | None = None
        self._actors: list[Any] = []
        self._workers: list[_Worker] = []
        self._keep_logs = False
        self.stopping = False

    def __enter__(self) -> Cluster:
        self.logs.mkdir()
        try:
            self._start()
        except BaseException as error:
            self._keep_logs = _needs_logs(error)
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._keep_logs = _needs_logs(error)
        self.stop()

    def describe(self) -> dict[str, Any]:
        """Addresses and process ids, as the ready file has them."""
        assert self._kvstore is not None and self._router is not None
        return {
            "router": self.router_address,
            "workers": [worker.address for worker in self._workers],
            "kvstore": str(self.kv_socket),
            "logs": str(self.logs),
            "pids": {
                "supervisor": os.getpid(),
                "kvstore": self._kvstore.pid,
                "router": self._router.pid,
                "workers": [worker.pid for worker in self._workers],
            },
        }

    def check(self) -> None:
        """Looks after everything once. Reports workers that Ray restarted.

        Raises:
            ChildDied: the kvstore, the router or Ray has ended.
        """
        for child in (self._kvstore, self._router):
            if child is not None and not child.running:
                raise child.died()
        if self._ray_processes is not None and (dead := self._ray_processes.dead()):
            raise ChildDied(f"{dead} of Ray ended", hint=f"its logs: {self.folder}/session_latest/logs")
        for worker in self._workers:
            worker.look(self.console)

    # --- up ---

    def _start(self) -> None:
        config = self.config
        arena_bytes = arena_bytes_of(config)
        with self._stage("kvstore") as done:
            self._kvstore = Child(
                "kvstore", ["kvstore", "serve", "--socket-dir", str(self.folder)], self.logs / "kvstore.log"
            )
            ready = self._kvstore.wait_ready(START_TIMEOUT_S)
            self.kv_socket = Path(str(ready["socket"]).removeprefix("unix:"))
            done(f"unix:{self.kv_socket}")
        with self._stage("Ray") as done:
            self._start_ray()
            done("local, without dashboard")
        with self._stage("workers") as done:
            self._start_workers(arena_bytes)
            done(f"{', '.join(w.address for w in self._workers)}; {config.name}, {arena_bytes >> 20} MiB of KV each")
        with self._stage("router") as done:
            arguments = ["router", "serve", "--listen", config.listen, "--model-dir", str(config.model)]
            arguments += ["--drain-s", str(config.drain_s)]
            for worker in self._workers:
                arguments += ["--worker", worker.address]
            self._router = Child("router", arguments, self.logs / "router.log")
            self.router_address = str(self._router.wait_ready(START_TIMEOUT_S)["address"])
            self._wait_router_ready()
            done(self.router_address)

    def _start_ray(self) -> None:
        # Explicit, whatever the caller's shell says: a local cluster needs no token file in the home folder, and a
        # product does not report usage.
        os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
        import ray

        before = {child.pid for child in (self._kvstore, self._router) if child is not None}
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._ray_started = True
        try:
            ray.init(
                address="local",
                namespace="tailpack",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="WARNING",
                _temp_dir=str(self.folder),
            )
        except (ray.exceptions.RayError, RuntimeError, OSError, ValueError) as failure:
            raise Unavailable("Ray does not start", reason="RAY_NOT_STARTED", hint=str(failure)) from failure
        finally:
            for number, handler in handlers.items():  # Ray takes SIGTERM for itself
                signal.signal(number, handler)
        self._ray_processes = _Watched(exclude=before)

    def _start_workers(self, arena_bytes: int) -> None:
        import ray

        from worker import actor

        for index in range(self.config.workers):
            worker_config = self.config.worker(index, self.kv_socket, arena_bytes)
            log_file = self.logs / f"worker-{index}.log"
            self._actors.append(
                actor.create(worker_config, _free_address(), drain_s=self.config.drain_s, log_file=log_file)
            )
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        answers = [handle.ready.remote() for handle in self._actors]
        waiting = list(answers)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=0.5)
            for answer in done:
                self._result(answer)  # raises by name what kept the worker from starting
            if self._kvstore is not None and not self._kvstore.running:
                raise self._kvstore.died()
            if time.monotonic() > deadline:
                raise Unavailable("workers are not ready", reason="START_TIMEOUT", given=f"{LOAD_TIMEOUT_S:g} s")
        self._workers = [_Worker(ready) for ready in (self._result(answer) for answer in answers)]

    def _result(self, answer: Any) -> Any:
        import ray

        try:
            return ray.get(answer, timeout=ANSWER_TIMEOUT_S)
        except ray.exceptions.RayTaskError as failure:
            if isinstance(failure.cause, TailpackError):
                raise failure.cause from None
            raise
        except ray.exceptions.RayActorError as failure:
            raise ChildDied("a worker ended while it started", hint=f"logs: {self.logs}; {failure}") from failure

    def _wait_router_ready(self) -> None:
        """Until the router has a worker: the first request must not be refused."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        deadline = time.monotonic() + START_TIMEOUT_S
        with rpc.sync_channel(self.router_address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service="tailpack.v1.Router")
            while time.monotonic() < deadline:
                with contextlib.suppress(grpc.RpcError):
                    if stub.Check(request, timeout=ANSWER_TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING:
                        return
                assert self._router is not None
                if not self._router.running:
                    raise self._router.died()
                time.sleep(0.05)
        raise Unavailable("the router finds no worker", reason="START_TIMEOUT", hint=f"its log: {self.logs}/router.log")

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[Any]:
        started = time.monotonic()
        with self.console.status(f"starting {name} ...") if self.console.is_terminal else contextlib.nullcontext():
            if not self.console.is_terminal:
                self.console.print(f"starting {name} ...", highlight=False)
            yield lambda what: self.console.print(
                f"[green]✓[/] {name:<8} {what}  [dim]({time.monotonic() - started:.1f} s)[/]", highlight=False
            )

    # --- down ---

    def stop(self) -> None:
        """Stops everything, each part whether or not the one before could be stopped. Leaves no process of ours."""
        self.stopping = True
        grace_s = self.config.drain_s + 5.0
        self.console.print("stopping ... (Ctrl-C ends everything at once)", highlight=False)
        with contextlib.ExitStack() as last_to_first:
            last_to_first.callback(self._remove_folder)
            last_to_first.callback(kill_descendants)  # what did not end by itself
            if self._kvstore is not None:
                last_to_first.callback(self._kvstore.stop, 5.0)
            if self._ray_started:
                last_to_first.callback(self._stop_ray)
            if self._actors:
                last_to_first.callback(self._stop_workers, grace_s)
            if self._router is not None:
                last_to_first.callback(self._router.stop, grace_s)

    def _stop_workers(self, grace_s: float) -> None:
        import ray

        if not ray.is_initialized():
            return
        if self._workers:  # else they never took a request
            ends = [handle.stop.remote() for handle in self._actors]
            ray.wait(ends, num_returns=len(ends), timeout=grace_s)
        for handle in self._actors:
            ray.kill(handle, no_restart=True)

    def _stop_ray(self) -> None:
        import ray

        ray.shutdown()

    def _remove_folder(self) -> None:
        if self._keep_logs:
            self.console.print(f"logs are kept in {self.logs}", highlight=False)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)


def _needs_logs(error: BaseException | None) -> bool:
    """False where the message says it all: the caller's mistake, or a wish."""
    return error is not None and not isinstance(error, Interrupted | PreconditionFailed | CapacityError)


class _Watched:
    """Direct children of this process that are there now, but for some: Ray's servers."""

    def __init__(self, exclude: set[int]) -> None:
        import psutil

        self._processes = [p for p in psutil.Process().children() if p.pid not in exclude]
        self._names = {p.pid: p.name() for p in self._processes}

    def dead(self) -> str | None:
        """The name of one that has ended."""
        import psutil

        for process in self._processes:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return self._names[process.pid]
        return None


class _Worker:
    """A started worker as seen from outside. Ray restarts it; this only reports it."""

    def __init__(self, ready: Any) -> None:
        self.address: str = ready.address
        self.worker_id: str = ready.worker_id
        self.pid: int = ready.pid
        self._incarnation: str = ready.incarnation
        self._answers = True

    def look(self, console: Console) -> None:
        with rpc.sync_channel(self.address) as channel:
            try:
                info = worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(), timeout=ANSWER_TIMEOUT_S).info
            except grpc.RpcError as failure:
                if self._answers:
                    console.print(f"{self.worker_id} does not answer: {rpc.error_from(failure).message}")
                self._answers = False
                return
        if info.incarnation != self._incarnation:
            console.print(f"{self.worker_id} was restarted by Ray")
        self._incarnation, self._answers = info.incarnation, True


def _free_address() -> str:
    """A port for a worker that keeps it over restarts."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@contextlib.contextmanager
def interruptible(cluster: Cluster) -> Iterator[None]:
    """First SIGINT or SIGTERM: raises Interrupted in the main thread. Any later one: ends everything at once.

    The later ones are seen by a thread of their own, for the main thread may be waiting deep inside a library.
    """
    read, write = socket.socketpair()
    write.setblocking(False)

    def first(number: int, frame: FrameType | None) -> None:
        if not cluster.stopping:
            cluster.stopping = True
            raise Interrupted

    def watch() -> None:
        seen = 0
        while signals := read.recv(16):
            seen += sum(byte in (signal.SIGINT, signal.SIGTERM) for byte in signals)
            if seen > 1:
                cluster.console.print("ending everything at once", highlight=False)
                kill_descendants()
                shutil.rmtree(cluster.folder, ignore_errors=True)
                os._exit(130)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    old = {number: signal.signal(number, first) for number in (signal.SIGINT, signal.SIGTERM)}
    old_fd = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        write.close()
        read.close()


def run(config: ClusterConfig, ready_file: Path | None) -> int:
    """Runs a cluster until Ctrl-C or SIGTERM (exit status 0), or until something it needs dies (1)."""
    console = Console(highlight=False)
    cluster = Cluster(config, console)
    with interruptible(cluster):
        try:
            with cluster:
                _greet(cluster, console)
                if ready_file is not None:
                    _write_atomically(ready_file, json.dumps(cluster.describe()))
                while True:
                    cluster.check()
                    time.sleep(0.5)
        except Interrupted:
            console.print("stopped")
            return 0
        except TailpackError as failure:
            Console(stderr=True, highlight=False).print(f"Error: {failure}", markup=False, soft_wrap=True)
            return 1
        finally:
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)


def _greet(cluster: Cluster, console: Console) -> None:
    console.print(f"logs     {cluster.logs}")
    router = "" if cluster.router_address == "127.0.0.1:7700" else f" --router {cluster.router_address}"
    console.print(f"\nTry:  [bold]tailpack generate{router} 'What is the capital of France?'[/]")
    console.print("Ctrl-C stops the cluster.\n")


def _write_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.rename(path)
