"""One worker in one process: model, attachment, engine, server, brought up in this order and taken down in reverse.

The same shell runs inside a Ray actor (worker/actor.py) and alone (`tailpack worker serve`).

The engine thread and the event loop share a GIL. Measured 2026-11-30 (`python -m tests.bench.bench_gil`, two cores
shared with other work, cases loop-lag-p99-* and info-latency-p99-*): with eight sequences decoding, the loop's lag
has a median of 0.1 to 1 ms and a 99th percentile of 2 to 11 ms, against 0.7 to 3.7 ms with an idle engine; a call
takes up to 17 ms at the 99th percentile, where a cancel may take 100. Switch intervals from Python's own 5 ms down to
0.1 ms make no difference beyond the noise: torch lets go of the GIL in every operation. So the server stays in the
process, and the interval as Python has it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import structlog
import torch

from kernels.loader import arch_of
from kvstore.client import Attachment, attach, stats
from kvstore.weights_client import OLDER_STORE, Lease
from protos import kvstore_pb2, rpc, types_pb2, worker_pb2_grpc
from protos.errors import InternalError, NotBuilt, PreconditionFailed, TailpackError
from protos.metrics import OFF, serving_metrics
from protos.page_hash import PAGE_TOKENS
from protos.tls import ServerTls
from protos.tls_metrics import CertificateCollector
from protos.tracing import Tracing
from protos.version import release
from worker import owners
from worker.config import WorkerConfig
from worker.device_memory import DeviceMemory
from worker.engine import Engine
from worker.gpu import memory_of, store_name, torch_device
from worker.laps import Laps
from worker.lasting import LastingAttachment
from worker.ledger import Ledger
from worker.memory_budget import Budget, planned
from worker.memory_meter import HOST
from worker.memory_plan import ACTIVATIONS
from worker.metrics import StepObserver, WorkerCollector
from worker.model_runner import check_tiles
from worker.service import SERVICE, WorkerService
from worker.sessions import Sessions
from worker.switches import switches
from worker.tracing import SequenceSpans
from worker.weights import Model, Plan, load_model
from worker.weights_arena import open_model

log = structlog.get_logger("worker")

ATTACH_RETRY_S = 5.0
KV_STATS_TIMEOUT_S = 2.0
MEMORY_LOOK_S = 15.0
ENGINE_STOP_S = 30.0  # the step it is in: at most one prefill chunk


Prepared = tuple[Model, Lease | None]
"""A model, and the lease of its weights where the store holds them."""


def prepare(config: WorkerConfig) -> Prepared:
    """What a worker needs besides the KV memory. Raises what ``open_model`` raises."""
    if config.weights_arena:
        try:
            return open_model(config)
        except NotBuilt as older:  # a store of the release before, while both are replaced
            if older.reason != OLDER_STORE:
                raise
            log.warning("weights are loaded for this process alone", why=str(older))
    return load_model(config), None


def stand_by(config: WorkerConfig) -> Prepared | None:
    """What can be done for a worker while another process still is it, without more memory than this process's own.

    On a GPU only libraries are loaded: a context there would take half a gigabyte, so it is made when the turn comes.
    Elsewhere the weights are mapped, where the store has them or gets them, and what deterministic mode rests on is
    proved.

    Raises:
        PreconditionFailed: NOT_DETERMINISTIC.
    """
    if config.on_gpu:
        import cupy  # noqa: F401 - for the time that it takes
        from cuda.bindings import driver  # noqa: F401

        return None
    torch.set_num_threads(config.num_threads)
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))  # its threads and product library start at the first one
    if not config.weights_arena:
        return None
    try:
        model, lease = open_model(config)
    except TailpackError as failure:  # the store is away, say; when the turn comes it is tried again
        log.warning("nothing is prepared while standing by", why=str(failure))
        return None
    if config.deterministic:
        with torch.inference_mode():
            check_tiles(model.network)
        model = dataclasses.replace(model, tiles_checked=True)
    return model, lease


@dataclass(frozen=True)
class Running:
    """A worker that is ready."""

    address: str
    info: types_pb2.WorkerInfo
    metrics: str | None = None
    """URL of its metrics."""


async def serve(
    config: WorkerConfig,
    listen: str,
    stop: asyncio.Event,
    *,
    on_ready: Callable[[Running], None],
    drain_s: float = 30.0,
    metrics: str = OFF,
    tls: ServerTls | None = None,
    tracing: Tracing | None = None,
    laps: Laps | None = None,
    prepared: Prepared | None = None,
) -> None:
    """Runs a worker until ``stop`` is set, then drains it: running sequences have ``drain_s`` seconds to end.

    Args:
        listen: ``host:port``; port 0 takes a free one.
        on_ready: called once, when requests are taken.
        metrics: host:port of the page for Prometheus, or OFF.
        tls: of both; None: plain text.
        tracing: where spans go; None: nowhere.
        laps: of this start so far.
        prepared: what ``prepare`` gave; None: that comes first. The lease is this worker's.

    Raises:
        ConfigError, ModelError, PreconditionFailed, CapacityError: it cannot start. Among them NO_SUCH_GPU.
        KvStoreLost: the kvstore went away and none came back in time, or it took the memory away.
        InternalError: the engine stopped at a broken invariant, or does not stop; then the KV memory goes to nobody
            else before this process is gone.
        WorkerLost: DEVICE_FAILED. As where it fails to go on with what it adopted, the store has ended the process by
            then, or will: all sequences are the next worker's.
    """
    laps = laps or Laps()
    torch.set_num_threads(config.num_threads)
    rpc.check_free(listen)  # before minutes of loading weights, not after
    if metrics != OFF:
        rpc.check_free(metrics)
    server = rpc.RpcServer("worker", tls=tls)  # and TLS's files neither
    loop = asyncio.get_running_loop()
    broken: asyncio.Future[TailpackError] = loop.create_future()

    def settle(why: TailpackError) -> None:
        if not broken.done():
            broken.set_result(why)

    def break_down(why: TailpackError) -> None:  # any thread
        loop.call_soon_threadsafe(settle, why)

    health = _Health(server, loop)
    device = store_name(config.device)
    log.info("prompt tokens of a step", at_most=config.chunk_tokens, asked_for=config.prefill_chunk or "default")
    ledger, budget = await asyncio.to_thread(_open_books, config, device)
    model, lease = prepared if prepared is not None else await asyncio.to_thread(prepare, config)
    owners.loaded(ledger, config, model)
    laps.lap("weights")
    with (
        lease or nullcontext(),
        await asyncio.to_thread(_attach, config, device, model) as attachment,
        _left_if_it_fails(attachment),
    ):
        laps.lap("attach")
        model = _within(model, attachment)
        lasting = LastingAttachment(attachment, config.kv_socket, config.kv_reattach_s, health.store_is_away)
        sessions = Sessions(loop)
        observer = StepObserver(sessions.emit)
        engine = Engine(
            config,
            model,
            lasting,
            observer.emit,
            on_failed=break_down,
            spans=SequenceSpans(tracing) if tracing is not None else None,
        )
        info = _info(config, device, model)
        owners.made(ledger, config, engine, [*attachment.arenas.values(), *attachment.tails.values()])
        memory = partial(owners.told, ledger, config, device)
        service = WorkerService(engine, sessions, info, memory, partial(_kv, config, device))
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service, SERVICE)
        if attachment.adopted:
            _adopt(engine, sessions, config)
        else:
            await asyncio.to_thread(engine.warm_up)  # ready means that it has generated a token
        _close_books(ledger, budget, stepped=not attachment.adopted)
        laps.lap("engine")
        engine.start()
        expiry = asyncio.create_task(sessions.expire_forever(), name="grace times")
        watch = asyncio.create_task(_watch(ledger, engine), name="memory")
        try:
            collector = WorkerCollector(engine, observer, info, memory, sessions.answers)
            certificate = CertificateCollector(server.certificate)
            metrics_tls = server.certificate.ssl_context() if server.certificate else None
            async with serving_metrics("worker", metrics, collector, certificate, tls=metrics_tls) as url:
                address = await server.start(listen)
                await health.set_serving(True)
                laps.lap("doors")
                log.info(
                    "worker ready",
                    worker=config.worker_id,
                    address=address,
                    incarnation=info.incarnation,
                    metrics=url,
                    adopted=len(attachment.adopted),
                    **laps.ms,
                )
                on_ready(Running(address, info, url))
                if not await _until_stopped(stop, broken):
                    await health.set_serving(False)
                    service.drain("the worker is stopping")
                    await _drained(engine, sessions, broken, drain_s)
                if engine.device_failed:
                    attachment.abandon()
                    raise broken.result()
                if broken.done():
                    engine.stop_because(broken.result())  # sequences end by name; harmless when it is the engine's own
                    await asyncio.to_thread(engine.stop, ENGINE_STOP_S)
                sessions.end()
                await server.stop(1.0)
        finally:
            expiry.cancel()
            watch.cancel()
            try:
                await asyncio.to_thread(engine.stop, ENGINE_STOP_S)
            except InternalError:  # it may still be writing
                attachment.abandon()
                raise
    if broken.done():
        raise broken.result()


def _open_books(config: WorkerConfig, device: str) -> tuple[Ledger, Budget | None]:
    """Before anything is allocated. Raises what ``planned`` and ``Budget.demand`` raise; there is a budget on a GPU."""
    if not config.on_gpu:
        return owners.begin(config), None
    plan, gpu = Plan.of(config), torch_device(config.device)
    try:
        stored = stats(config.kv_socket, timeout_s=KV_STATS_TIMEOUT_S)
    except TailpackError:  # what it holds is not known; attaching will tell why
        stored = None
    budget = planned(plan, torch.cuda.mem_get_info(gpu)[0], arch_of(gpu), stored, device)
    log.info("memory budget", budget=str(budget))
    budget.demand()
    return owners.begin(config, budget), budget


def _close_books(ledger: Ledger, budget: Budget | None, *, stepped: bool) -> None:
    """Every owner is known by now; but what a first step makes libraries load, where there was none yet. Raises
    CapacityError (MEMORY_BUDGET).
    """
    if stepped:
        owners.ready(ledger)
    reading = ledger.read()
    log.info("memory by owner", **{f"{each.memory} {each.owner}": each.num_bytes for each in reading.owned})
    if budget is not None:
        ((memory, measured),) = ((m, each) for m, each in reading.measured.items() if m != HOST)
        owned = [(each.owner, each.num_bytes) for each in reading.owned if each.memory == memory]
        budget.demand_measured(measured.free, dict(owned).get(ACTIVATIONS, 0), owned)


async def _watch(ledger: Ledger, engine: Engine) -> None:
    """Looks for growth for as long as the worker serves, from its first steps on."""
    while True:
        await asyncio.sleep(MEMORY_LOOK_S)
        if not ledger.settled and engine.load().num_steps:
            await asyncio.to_thread(owners.ready, ledger)
        engine.memory_grown_bytes = await asyncio.to_thread(ledger.alarm_bytes)


@contextmanager
def _left_if_it_fails(attachment: Attachment) -> Iterator[None]:
    """Who fails to go on with what an earlier life left does not give it up: without a goodbye the next may try. The
    store ends this process for that, as any that may still write; so it says why first.
    """
    try:
        yield
    except Exception as failure:
        if attachment.adopted:
            log.error("not adopted: left to the next worker", why=str(failure), exc_info=failure)
            attachment.abandon()
        raise


class _Health:
    """Whether the worker says that it is ready: it takes requests, and its kvstore is there."""

    def __init__(self, server: rpc.RpcServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._serving = self._away = False

    async def set_serving(self, serving: bool) -> None:
        self._serving = serving
        await self._server.set_ready(self._serving and not self._away)

    def store_is_away(self, away: bool) -> None:
        """Any thread."""

        async def tell() -> None:
            self._away = away
            await self._server.set_ready(self._serving and not self._away)

        asyncio.run_coroutine_threadsafe(tell(), self._loop)


def _adopt(engine: Engine, sessions: Sessions, config: WorkerConfig) -> None:
    """Takes over what an earlier life of this worker left: its first step proves the path whole, as a warm-up would."""
    for sequence in engine.adopt():
        request = sequence.request
        abort = partial(engine.abort, request.request_id, owner=request.owner)
        emitted = sequence.token_ids[sequence.num_prompt :]
        let_go = partial(engine.let_go, request.owner)
        sessions.answers.adopt(request, emitted, abort, let_go, grace_s=config.adopt_grace_s)


def _attach(config: WorkerConfig, device: str, model: Model) -> Attachment:
    """Attaches. A predecessor killed a moment ago may still be in the store's books, so DEVICE_BUSY is retried."""
    deadline = time.monotonic() + ATTACH_RETRY_S
    memory = DeviceMemory(memory_of(device)) if config.on_gpu else None
    while True:
        try:
            return attach(
                config.kv_socket,
                worker_id=config.worker_id,
                device=device,
                device_memory=memory,
                geometry=model.geometry,
                arena_bytes=config.arena_bytes,
                max_sequences=config.num_slots,
                max_sequence_tokens=model.info.max_sequence_tokens,
                weights_digest=model.info.weights_digest,
                checkpoint_slots=config.num_checkpoints if model.geometry.tail_bytes else 0,
            )
        except PreconditionFailed as refused:
            if refused.reason != "DEVICE_BUSY" or time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _within(model: Model, attachment: Attachment) -> Model:
    """The model, its longest sequence no longer than the KV memory holds alone: what is promised can be kept.

    Groups with a window hold a part of a sequence only, and set no limit.
    """
    pages = [a.num_pages for name, a in attachment.arenas.items() if not model.geometry.group(name).window]
    room = min(pages, default=1 << 31) * PAGE_TOKENS
    if room >= model.info.max_sequence_tokens:
        return model
    log.warning(
        "KV memory holds less than the model's longest sequence",
        room_tokens=room,
        max_sequence_tokens=model.info.max_sequence_tokens,
    )
    info = types_pb2.ModelInfo()
    info.CopyFrom(model.info)
    info.max_sequence_tokens = room
    return dataclasses.replace(model, info=info)


def _info(config: WorkerConfig, device: str, model: Model) -> types_pb2.WorkerInfo:
    return types_pb2.WorkerInfo(
        worker_id=config.worker_id,
        incarnation=secrets.token_hex(8),
        model=model.info,
        kv_mode=f"{config.kv_mode} {config.preset}".strip(),
        device=device,
        geometry_digest=model.geometry.digest(),
        deterministic=config.deterministic,
        max_running=config.max_running,
        switches=switches(
            config, model.geometry, arch_of(torch_device(config.device)) if config.on_gpu else "", model.form
        ),
        version=release(),
        features=["logprobs", "seed", "emitted_token_ids", "prefix_reuse", "resume", "adopt", "batch"],
    )


def _kv(config: WorkerConfig, device: str) -> kvstore_pb2.DeviceStats | None:
    """What the kvstore says of this worker's device; None where it does not answer now."""
    try:
        devices = stats(config.kv_socket, timeout_s=KV_STATS_TIMEOUT_S).devices
    except TailpackError:
        return None
    return next((told for told in devices if told.device == device), None)


async def _until_stopped(stop: asyncio.Event, broken: asyncio.Future[TailpackError]) -> bool:
    """Waits; True when the worker broke."""
    waiting = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((waiting, broken), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return broken.done()


async def _drained(engine: Engine, sessions: Sessions, broken: asyncio.Future[TailpackError], limit_s: float) -> None:
    """Waits until no sequence runs or waits, and no kept answer waits for its caller; at most ``limit_s`` seconds."""
    deadline = asyncio.get_running_loop().time() + limit_s
    while (load := engine.load()).num_running + load.num_waiting + (owed := sessions.answers.num_owed):
        left_s = deadline - asyncio.get_running_loop().time()
        if left_s <= 0 or broken.done():
            log.warning("sequences cut short", running=load.num_running, waiting=load.num_waiting, kept_answers=owed)
            return
        await asyncio.sleep(min(0.05, left_s))
