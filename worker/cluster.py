"""A cluster on this machine: kvstore, Ray, workers and router, and their orderly end.

Started in this order; stopped as router (running answers may end), workers, Ray, kvstore. A worker that dies is started
again by Ray, or its warm standby takes over; kvstore and router are started again by ``check``, at the addresses that
they had.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import psutil
from rich.console import Console

from protos import router_pb2, router_pb2_grpc, rpc, worker_pb2, worker_pb2_grpc
from protos.errors import CapacityError, ModelError, PreconditionFailed, TailpackError, Unavailable
from protos.metrics import OFF
from worker import memory_plan
from worker.child import STARTING, Child, ChildDied, kill_descendants, last_problem
from worker.cluster_config import ClusterConfig, arena_bytes_of, memory_table

OBJECT_STORE_BYTES = 80 << 20  # Ray's own; the least it takes. Nothing of ours goes through it
START_TIMEOUT_S = 60.0
LOAD_TIMEOUT_S = 600.0  # weights of gigabytes from a cold disk
ANSWER_TIMEOUT_S = 2.0
STOOD_BY_S = 0.5  # who waited for longer was there before the death
MAX_FAILED_STARTS = 5  # in a row, of a worker that Ray restarts; then the cluster gives up
MAX_DEATHS = 5  # of the kvstore or the router, each within ...
DEATHS_S = 60.0  # ... so long; then the cluster gives up


class Interrupted(BaseException):
    """The first Ctrl-C or SIGTERM, raised in the main thread while the cluster starts or runs."""


class Cluster:
    """A running cluster; a context manager. ``check`` tells when something broke."""

    def __init__(self, config: ClusterConfig, console: Console) -> None:
        self.config = config
        self.console = console
        # Of this user only, for the sockets and logs tell everything. Short, for socket paths end at 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="tp-"))
        self.logs = self.folder / "logs"
        self._ray_folder = self.folder / "ray"
        self.router_address = ""
        self.http_url: str | None = None
        self.router_socket = self.folder / "router.sock"  # needs neither token nor certificate
        self.kv_socket = self.folder / "kvstore.sock"
        self._kvstore: Child | None = None
        self._router: Child | None = None
        self._kvstore_arguments: list[str] = []
        self._router_arguments: list[str] = []
        self._deaths: dict[str, list[float]] = {}  # by child: when it was started again
        self._ray_started = False
        self._ray_processes: _Watched | None = None
        self._metrics: list[str | None] = []  # URLs
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
            "http": self.http_url,
            "router_socket": str(self.router_socket),
            "workers": [worker.address for worker in self._workers],
            "devices": [gpu.device for gpu in self.config.gpus] or ["cpu"],
            "kvstore": str(self.kv_socket),
            "metrics": [url for url in self._metrics if url],
            "logs": str(self.logs),
            "pids": {
                "supervisor": os.getpid(),
                "kvstore": self._kvstore.pid,
                "router": self._router.pid,
                "workers": [worker.pid for worker in self._workers],
            },
        }

    def check(self) -> bool:
        """Looks after everything once. Starts a kvstore or a router again that has ended, and reports workers that Ray
        restarted. Whether ``describe`` says something else now.

        Raises:
            ChildDied: the kvstore or the router ends again and again (or once, with ``no_restart``), Ray has ended, or
                a worker does not come back.
        """
        changed = False
        if self._kvstore is not None and not self._kvstore.running:
            self._kvstore = self._again(self._kvstore, self._kvstore_arguments)
            changed = True
        if self._router is not None and not self._router.running:
            self._router = self._again(self._router, self._router_arguments)
            changed = True
        if self._ray_processes is not None and (dead := self._ray_processes.dead()):
            raise ChildDied(f"{dead} of Ray ended", hint=f"its logs: {self._ray_folder}/session_latest/logs")
        for worker in self._workers:
            changed |= worker.look(self.console)
        return changed

    def _again(self, dead: Child, arguments: list[str]) -> Child:
        """A child in place of one that has ended. Raises ChildDied: it is not to be, or it was tried often enough."""
        while True:
            why, now = dead.died(), time.monotonic()
            deaths = self._deaths[dead.name] = [at for at in self._deaths.get(dead.name, []) if now - at < DEATHS_S]
            if self.config.no_restart or len(deaths) >= MAX_DEATHS:
                raise why
            deaths.append(now)
            dead.stop(0.0)
            child = Child(dead.name, arguments, dead.log_file)
            try:
                child.wait_ready(START_TIMEOUT_S)
            except ChildDied:  # while it started: one death more
                dead = child
                continue
            self.console.print(f"{why.message}; it was started again", markup=False, highlight=False, soft_wrap=True)
            return child

    # --- up ---

    def _start(self) -> None:
        config = self.config
        arena_bytes = arena_bytes_of(config)
        with self._stage("kvstore") as done:
            metrics = _metrics_address(config.metrics, 0)
            self._kvstore_arguments = ["kvstore", "serve", "--socket-dir", str(self.folder), "--metrics", metrics]
            self._kvstore = Child("kvstore", self._kvstore_arguments, self.logs / "kvstore.log")
            ready = self._kvstore.wait_ready(START_TIMEOUT_S)
            self._metrics.append(ready["metrics"])
            self.kv_socket = Path(str(ready["socket"]).removeprefix("unix:"))
            done(f"unix:{self.kv_socket}")
        with self._stage("Ray") as done:
            self._start_ray()
            done("local, without dashboard")
        memory = memory_plan.table(memory_table(config, arena_bytes))
        self.console.print(f"memory of each worker: {memory}", highlight=False, soft_wrap=True)
        with self._stage("workers") as done:
            self._start_workers(arena_bytes)
            addresses, longest = ", ".join(w.address for w in self._workers), self._workers[0].max_sequence_tokens
            kv = f"{arena_bytes >> 20} MiB of KV each, sequences of up to {longest} tokens"
            where = f" on {', '.join(gpu.uuid for gpu in config.gpus)}" if config.gpus else ""
            done(f"{addresses}{where}; {config.name}, {kv}")
        with self._stage("router") as done:
            arguments = ["router", "serve", "--listen", config.listen, "--model-dir", str(config.model)]
            arguments += ["--drain-s", str(config.drain_s), "--otlp-endpoint", config.otlp_endpoint or "none"]
            arguments += ["--log-prompts"] if config.log_prompts else []
            arguments += ["--recover-wait", str(config.recover_wait_s)] if config.recover_wait_s is not None else []
            arguments += ["--http", config.http] if config.http is not None else []
            arguments += ["--metrics", _metrics_address(config.metrics, 1 + config.workers)]
            arguments += ["--local-socket", str(self.router_socket)]
            arguments += ["--tokens", str(config.tokens)] if config.tokens else []
            if config.tls is not None:
                arguments += ["--tls-cert", str(config.tls.cert), "--tls-key", str(config.tls.key)]
                arguments += ["--tls-client-ca", str(config.tls.client_ca)] if config.tls.client_ca else []
            for worker in self._workers:
                arguments += ["--worker", worker.address]
            self._router = Child("router", arguments, self.logs / "router.log")
            listening = self._router.wait_ready(START_TIMEOUT_S)
            self.router_address, self.http_url = str(listening["address"]), listening["http"]
            self._router_arguments = _at_the_same_doors(arguments, self.router_address, self.http_url)
            self._metrics.append(listening["metrics"])
            self._wait_router_ready()
            done(self.router_address + (f", {self.http_url}" if self.http_url else ""))

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
                num_cpus=self.config.workers,  # so many processes Ray starts ahead; it would one for each core
                num_gpus=len(self.config.gpus),
                object_store_memory=OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="WARNING",
                _temp_dir=str(self._ray_folder),  # Ray opens it to everybody, so it holds nothing of ours
            )
        except (ray.exceptions.RayError, RuntimeError, OSError, ValueError) as failure:
            raise Unavailable("Ray does not start", reason="RAY_NOT_STARTED", hint=str(failure)) from failure
        finally:
            for number, handler in handlers.items():  # Ray takes SIGTERM for itself
                signal.signal(number, handler)
        # What Ray would print itself of every worker that dies: a kilobyte that does not say why. _Worker.look does.
        ray._private.worker._worker_logs_enabled = False
        self._ray_processes = _Watched(exclude=before)

    def _start_workers(self, arena_bytes: int) -> None:
        import ray

        from worker import actor

        log_files = [self.logs / f"worker-{index}.log" for index in range(self.config.workers)]
        makers = [
            partial(
                actor.create,
                self.config.worker(index, self.kv_socket, arena_bytes),
                _free_address(),
                drain_s=self.config.drain_s,
                log_file=log_file,
                metrics=_metrics_address(self.config.metrics, 1 + index),
                otlp_endpoint=self.config.otlp_endpoint,
            )
            for index, log_file in enumerate(log_files)
        ]
        self._actors = [make() for make in makers]
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        answers = [handle.ready.remote() for handle in self._actors]
        waiting = list(answers)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=0.5)
            for answer in done:
                _started(answer, log_files[answers.index(answer)])
            if self._kvstore is not None and not self._kvstore.running:
                raise self._kvstore.died()
            if time.monotonic() > deadline:
                raise Unavailable("workers are not ready", reason="START_TIMEOUT", given=f"{LOAD_TIMEOUT_S:g} s")
        self._workers = [
            _Worker(_started(answer, log_file), log_file) for answer, log_file in zip(answers, log_files, strict=True)
        ]
        self._metrics += [worker.metrics for worker in self._workers]
        if self.config.standby:  # now: beside the workers' own start they would only hold it up
            self._actors += [make(standby=True) for make in makers]

    def _wait_router_ready(self) -> None:
        """Until the router has a worker: the first request must not be refused.

        Raises:
            ModelError: WORKER_REFUSED, the router does not take a worker; it would not later either.
        """
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        deadline = time.monotonic() + START_TIMEOUT_S
        with rpc.sync_channel(f"unix:{self.router_socket}") as channel:
            stub, router = health_pb2_grpc.HealthStub(channel), router_pb2_grpc.RouterStub(channel)
            request = health_pb2.HealthCheckRequest(service="tailpack.v1.Router")
            while time.monotonic() < deadline:
                with contextlib.suppress(grpc.RpcError):
                    if stub.Check(request, timeout=ANSWER_TIMEOUT_S).status == health_pb2.HealthCheckResponse.SERVING:
                        return
                    for worker in router.ListWorkers(router_pb2.ListWorkersRequest(), timeout=ANSWER_TIMEOUT_S).workers:
                        if worker.state == "refused":
                            raise ModelError(
                                "the router does not take a worker", reason="WORKER_REFUSED", given=worker.why
                            )
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
                f"[green]✓[/] {name:<8} {what}  [dim]({time.monotonic() - started:.1f} s)[/]", soft_wrap=True
            )

    # --- down ---

    def stop(self) -> None:
        """Stops everything, each part whether or not the one before could be stopped. Leaves no process of ours."""
        self.stopping = True
        grace_s = self.config.drain_s + 5.0
        wait = "stopping ..."
        if count := self._answers_in_flight():
            wait = f"waiting up to {self.config.drain_s:g} s for {count} answer{'s' if count > 1 else ''} ..."
        self.console.print(f"{wait} (Ctrl-C ends everything at once)", highlight=False)
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

    def _answers_in_flight(self) -> int:
        """Requests that the router has at workers; 0 where it cannot say."""
        if self._router is None or not self._router.running or not self.router_address:
            return 0
        with rpc.sync_channel(f"unix:{self.router_socket}") as channel:
            try:
                stub = router_pb2_grpc.RouterStub(channel)
                return stub.Stats(router_pb2.StatsRequest(), timeout=ANSWER_TIMEOUT_S).in_flight
            except grpc.RpcError:
                return 0

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
        self._processes = [p for p in psutil.Process().children() if p.pid not in exclude]
        self._names = {p.pid: p.name() for p in self._processes}

    def dead(self) -> str | None:
        """The name of one that has ended."""
        for process in self._processes:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return self._names[process.pid]
        return None


class _Worker:
    """A started worker as seen from outside. Ray restarts it; this reports it and why, and gives up in the end."""

    def __init__(self, ready: Any, log_file: Path) -> None:
        self.address: str = ready.address
        self.worker_id: str = ready.worker_id
        self.pid: int = ready.pid
        self.max_sequence_tokens: int = ready.max_sequence_tokens
        self.metrics: str | None = ready.metrics
        self._incarnation: str = ready.incarnation
        self._answers = True
        self._log_file = log_file
        self._log_seen = log_file.stat().st_size  # up to where it last was ready
        self._num_starts = 0  # since then
        self._num_restarts = 0
        self._channel = rpc.sync_channel(self.address)  # for as long as this process lives

    def look(self, console: Console) -> bool:
        """Asks it once; whether it is another process now. Raises ChildDied: it has failed to start MAX_FAILED_STARTS
        times in a row.
        """
        stub = worker_pb2_grpc.WorkerStub(self._channel)
        try:
            info = stub.Info(worker_pb2.InfoRequest(), timeout=ANSWER_TIMEOUT_S).info
        except grpc.RpcError as failure:
            if self._answers:
                self._say(console, f"does not answer: {rpc.error_from(failure).message}")
            self._answers = False
            self._count_starts(console)
            return False
        restarted = info.incarnation != self._incarnation
        if restarted:
            self._num_restarts += 1
            life = self._newest_life()
            how = "'s standby took over" if life.get("stood_by_s", 0.0) > STOOD_BY_S else " was restarted by Ray"
            console.print(
                f"{self.worker_id}{how} (restart {self._num_restarts}); {self._why()}", markup=False, soft_wrap=True
            )
            self.pid = life.get("pid", self.pid)
            self._log_seen, self._num_starts = self._log_file.stat().st_size, 0
        self._incarnation, self._answers = info.incarnation, True
        return restarted

    def _newest_life(self) -> dict[str, Any]:
        """The first line of the life that its log tells of last."""
        for line in reversed(self._log().splitlines()):
            if f'"{STARTING}"' in line:
                life: dict[str, Any] = json.loads(line)
                return life
        return {}

    def _count_starts(self, console: Console) -> None:
        num_starts = self._log().count(f'"{STARTING}"')
        if num_starts > MAX_FAILED_STARTS:
            raise ChildDied(
                f"{self.worker_id} does not come back: it failed to start {MAX_FAILED_STARTS} times in a row",
                given=last_problem(self._log()),
                hint=f"its log: {self._log_file}",
            )
        if num_starts > self._num_starts:
            self._say(console, f"is started again, attempt {num_starts} of {MAX_FAILED_STARTS}; {self._why()}")
        self._num_starts = num_starts

    def _log(self) -> str:
        """Its log since it was last ready."""
        with self._log_file.open(errors="replace") as file:
            file.seek(self._log_seen)
            return file.read()

    def _why(self) -> str:
        problem = last_problem(self._log())
        return f"its log ends in: {problem}" if problem else f"its log says nothing: {self._log_file}"

    def _say(self, console: Console, what: str) -> None:
        console.print(f"{self.worker_id} {what}", markup=False, soft_wrap=True)


def _started(answer: Any, log_file: Path) -> Any:
    """What a worker's ``ready`` answered. Raises by name what kept it from starting."""
    import ray

    hint = f"its log: {log_file}"
    try:
        return ray.get(answer, timeout=ANSWER_TIMEOUT_S)
    except ray.exceptions.RayTaskError as failure:
        if isinstance(failure.cause, TailpackError):
            raise failure.cause from None
        cause = f"{type(failure.cause).__name__}: {failure.cause}"
        raise ChildDied("a worker failed while it started", given=cause, hint=hint) from failure
    except ray.exceptions.RayActorError as failure:
        problem = last_problem(log_file.read_text(errors="replace")) if log_file.exists() else None
        raise ChildDied("a worker ended while it started", given=problem, hint=hint) from failure


def _free_address(host: str = "127.0.0.1") -> str:
    """A port for a worker that keeps it over restarts."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), 0), family=family) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def _at_the_same_doors(arguments: list[str], address: str, http_url: str | None) -> list[str]:
    """A router's arguments with the ports that it took."""
    arguments = list(arguments)
    arguments[arguments.index("--listen") + 1] = address
    if http_url is not None:
        http = http_url.partition("://")[2]
        at = arguments.index("--http") + 1 if "--http" in arguments else None
        arguments = [*arguments, "--http", http] if at is None else [*arguments[:at], http, *arguments[at + 1 :]]
    return arguments


def _metrics_address(first: str, index: int) -> str:
    """Of a worker's or the router's metrics, where the kvstore's are at ``first``; port 0 is a free one; or OFF."""
    if first == OFF:
        return OFF
    host, _, port = first.rpartition(":")
    return f"{host}:{int(port) + index}" if int(port) else _free_address(host)
