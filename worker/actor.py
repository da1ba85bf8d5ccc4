"""The Ray actor around a worker. Ray places it, watches it and restarts it; no token travels through Ray.

The constructor starts everything and always takes the same port, so a restart needs nobody's help: routers reconnect.
Two actors of one worker are a worker and its warm standby, which takes over where the first one dies; Ray restarts that
as the next standby.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import structlog
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from protos import logs, rpc, tracing
from protos.errors import TailpackError
from protos.metrics import OFF
from protos.tls import ServerTls
from worker.config import WorkerConfig
from worker.standby import begin
from worker.turn import Turn

if TYPE_CHECKING:  # both bring torch, which takes seconds: not before somebody waits for it
    from worker.gpu import Gpu
    from worker.shell import Running

log = structlog.get_logger("worker")

LAST_WORDS_S = 5.0
"""How long a worker that could not start stays to tell ``ready`` why, before Ray restarts it."""
ASKED_S = 0.5
"""The call may be under way. Where none comes, as at all that Ray starts again, nobody is told: a start that failed
must not keep its turn from who stands by. Where nobody does, it stays: Ray starts it again without a pause.
"""


@dataclass(frozen=True)
class Ready:
    """What a started worker says about itself."""

    address: str
    worker_id: str
    incarnation: str
    pid: int
    max_sequence_tokens: int
    metrics: str | None


class WorkerActor:
    """A worker in an actor process. Its server has a thread and event loop of its own; Ray's only hears the methods."""

    def __init__(
        self,
        config: dict[str, Any],
        listen: str,
        drain_s: float,
        log_file: str | None = None,
        metrics: str = OFF,
        otlp_endpoint: str | None = None,
        tls: ServerTls | None = None,
    ) -> None:
        """
        Args:
            config: WorkerConfig.to_dict().
            listen: ``host:port`` with a fixed port.
            drain_s: how long ``stop`` lets running sequences go on.
            log_file: where this process's stderr goes; None leaves it to Ray.
            metrics: host:port of the page for Prometheus, with a fixed port, or OFF.
            otlp_endpoint: where spans go; None: nowhere.
            tls: of its doors; None: plain text.
        """
        if log_file is not None:
            descriptor = os.open(log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            os.dup2(descriptor, 2)
            os.close(descriptor)
        logs.configure("worker")
        if uuid := WorkerConfig.from_dict(config).gpu_uuid:
            # Ours, not the one that Ray picks at each restart: its memory holds this worker's sequences. CUDA reads it
            # at its first call.
            os.environ["CUDA_VISIBLE_DEVICES"] = uuid
        self._config = config
        self._listen = listen
        self._drain_s = drain_s
        self._metrics = metrics
        self._otlp_endpoint = otlp_endpoint
        self._tls = tls
        self._ready: concurrent.futures.Future[Ready] = concurrent.futures.Future()
        self._asked = threading.Event()  # for ``ready``
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._stop: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        threading.Thread(target=self._main, name="worker", daemon=True).start()

    async def ready(self) -> Ready:
        """Waits until requests are taken. Raises the TailpackError that kept the worker from starting."""
        self._asked.set()
        return await asyncio.shield(asyncio.wrap_future(self._ready))

    async def is_ready(self) -> bool:
        """Whether requests are taken now."""
        stopping = self._stop is not None and self._stop[1].is_set()
        return self._ready.done() and self._ready.exception() is None and not stopping

    async def stop(self) -> None:
        """Drains and takes everything down. The process stays, for Ray to end."""
        if self._stop is not None:
            loop, event = self._stop
            loop.call_soon_threadsafe(event.set)
            await asyncio.wrap_future(self._ended)

    def _main(self) -> None:
        try:
            rpc.run(self._serve())
        except BaseException as failure:  # the thread's boundary
            named = isinstance(failure, TailpackError)
            log.error("worker failed", error=str(failure), exc_info=None if named else failure)
            if not self._ready.done():
                self._ready.set_exception(failure)
                if self._asked.wait(ASKED_S) or not self._is_awaited():
                    time.sleep(LAST_WORDS_S)
            os._exit(1)  # Ray restarts the actor; a half-dead worker must not linger
        self._ended.set_result(None)

    def _is_awaited(self) -> bool:
        config = WorkerConfig.from_dict(self._config)
        return Turn.is_awaited(Turn.path(config.kv_socket, config.worker_id))

    async def _serve(self) -> None:
        stop = asyncio.Event()
        self._stop = (asyncio.get_running_loop(), stop)
        config = WorkerConfig.from_dict(self._config)
        begun = await begin(config, stop, self._listen, self._metrics)
        if begun is None:
            return
        from worker import shell

        traces = tracing.configure("worker", self._otlp_endpoint)
        try:
            await shell.serve(
                config,
                self._listen,
                stop,
                on_ready=self._on_ready,
                drain_s=self._drain_s,
                metrics=self._metrics,
                tls=self._tls,
                tracing=traces,
                laps=begun.laps,
                prepared=begun.prepared,
            )
        finally:
            if traces is not None:
                traces.stop()

    def _on_ready(self, running: Running) -> None:
        info = running.info
        longest = info.model.max_sequence_tokens
        self._ready.set_result(
            Ready(running.address, info.worker_id, info.incarnation, os.getpid(), longest, running.metrics)
        )


def actor_options(config: WorkerConfig, *, standby: bool = False) -> dict[str, Any]:
    """What Ray is told about a worker. Of a pair one has the GPU in Ray's books, whichever is the worker."""
    return {
        "name": f"{config.worker_id}-standby" if standby else config.worker_id,
        "num_cpus": 0,  # Ray's idea of cores must not decide how many workers fit
        "num_gpus": 1 if config.on_gpu and not standby else 0,
        "max_restarts": -1,  # for ever
        "max_task_retries": 0,
    }


def create(
    config: WorkerConfig,
    listen: str,
    *,
    drain_s: float,
    log_file: Path | None = None,
    metrics: str = OFF,
    otlp_endpoint: str | None = None,
    tls: ServerTls | None = None,
    pinned_to: str | None = None,
    standby: bool = False,
) -> Any:
    """Starts a worker as a named actor of the current Ray namespace. Returns its handle at once; then ask ``ready``.

    Args:
        pinned_to: id of the Ray node that it runs on and nowhere else; it then outlives this driver, and one that runs
            already is returned. None: it ends with this driver.
        standby: a second one of the same worker. Whichever of the two has its turn (worker/turn.py) is the worker; the
            other has imported all it needs, has mapped the weights where they are in host memory, and takes over.
    """
    options = actor_options(config, standby=standby)
    if pinned_to is not None:
        options |= {
            # With the node's id: what died with an earlier node of this name must not be taken for it.
            "name": f"{options['name']}@{pinned_to[:12]}",
            "lifetime": "detached",
            "get_if_exists": True,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(pinned_to, soft=False),
        }
    return (
        ray.remote(WorkerActor)
        .options(**options)
        .remote(config.to_dict(), listen, drain_s, str(log_file) if log_file else None, metrics, otlp_endpoint, tls)
    )


def _gpus() -> tuple[Gpu, ...]:
    from worker.gpu import visible_gpus

    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides GPUs from who asked for none; the container's are ours
    return visible_gpus()


def gpus_of(node_id: str, timeout_s: float) -> tuple[Gpu, ...]:
    """The GPUs that a worker on this Ray node would see.

    Raises:
        TailpackError: what visible_gpus raises. ray.exceptions.RayError: the node could not be asked.
    """
    there = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(_gpus).options(num_cpus=0, max_calls=1, scheduling_strategy=there)
    try:
        answer: tuple[Gpu, ...] = ray.get(task.remote(), timeout=timeout_s)
    except ray.exceptions.RayTaskError as failure:
        if isinstance(failure.cause, TailpackError):
            raise failure.cause from None
        raise
    return answer
