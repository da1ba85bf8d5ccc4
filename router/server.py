"""The router process: its requests behind an RpcServer, from start to a drained stop."""

from __future__ import annotations

import asyncio
import gc
import signal
import ssl
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from protos import kserve_pb2_grpc, router_pb2_grpc, rpc, tracing, types_pb2
from protos.health import serving_health
from protos.metrics import OFF, PATH, EventLoopProbe, MetricsServer, Page, ProcessMetrics, exported, metrics_page
from protos.small_http import CONNECTION_TIMEOUT_S
from protos.tls import ClientTls, ServerTls
from protos.tls_metrics import CertificateCollector
from router import discovery, kserve
from router.admission import DEFAULT_MAX_IN_FLIGHT, DEFAULT_MAX_REQUEST_BYTES
from router.auth import Authenticator
from router.discovery import WorkerDns
from router.http import HttpDoor
from router.http_server import HttpServer
from router.kserve import KserveService
from router.metrics import RouterCollector
from router.recovery import DEFAULT_RECOVER_WAIT_S
from router.requests import DEFAULT_MAX_SESSIONS, DEFAULT_SESSION_IDLE_S, Requests
from router.service import SERVICE_NAME, RouterService
from router.tokenizer import Tokenizer
from router.unread import DEFAULT_MAX_UNREAD_BYTES

log = structlog.get_logger("router")


@dataclass(frozen=True)
class RouterConfig:
    """listen: host:port, port 0 takes a free one. drain_s: how long running streams may go on after SIGTERM.

    worker_dns: names behind which more workers are; looked up again and again. health: host:port of a plain HTTP page
    that says whether this process is alive and ready, or OFF. metrics: host:port of /metrics alone, or OFF.

    http: host:port of the HTTP door, port 0 a free one; None: behind listen's; OFF: no such door. Without tokens it has
    /metrics as well: with them, that would show the tenants to whoever reaches it.

    log_prompts: a request's line in the log has its prompt as well. otlp_endpoint: where spans go. tokens: file of
    tenants' tokens; None: callers are taken at their word. tls: of this router's doors; worker_tls: of the way to
    the workers. local_socket: a unix socket that takes the same calls in plain text, without tokens: its folder's
    permissions say who may. recover_wait_s: router/recovery.py. session_idle_s, max_sessions: router/requests.py.
    """

    listen: str
    workers: tuple[str, ...]
    model_dir: Path
    drain_s: float = 60.0
    max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    max_unread_bytes: int = DEFAULT_MAX_UNREAD_BYTES
    log_prompts: bool = False
    otlp_endpoint: str | None = None
    tokens: Path | None = None
    tls: ServerTls | None = None
    worker_tls: ClientTls | None = None
    local_socket: Path | None = None
    http: str | None = None
    worker_dns: tuple[WorkerDns, ...] = ()
    health: str = OFF
    metrics: str = OFF
    recover_wait_s: float = DEFAULT_RECOVER_WAIT_S
    session_idle_s: float = DEFAULT_SESSION_IDLE_S
    max_sessions: int = DEFAULT_MAX_SESSIONS

    @property
    def http_address(self) -> str:
        if self.http is not None:
            return self.http
        if self.listen.startswith("unix:"):
            return OFF
        host, _, port = self.listen.rpartition(":")
        return f"{host}:{int(port) + 1 if int(port) else 0}"


async def serve(config: RouterConfig, listening: Callable[[str, str | None, str | None], None]) -> None:
    """Runs until SIGTERM or SIGINT, then drains; a second signal ends it at once.

    Args:
        listening: told the bound address of gRPC, and the URLs of the HTTP door and of the metrics, or None.

    Raises:
        ConfigError, ModelError: it cannot start.
    """
    rpc.check_free(config.listen)  # before the tokenizer is read, which takes a second
    for door in (config.http_address, config.health, config.metrics):
        if door != OFF:
            rpc.check_free(door)
    authenticator = Authenticator(config.tokens)
    tenant_of = authenticator.tenant_of if authenticator.demands_tokens else None
    server = rpc.RpcServer(
        "router", tls=config.tls, tenant_of=tenant_of, open_methods=kserve.OPEN_METHODS, stalled_s=rpc.STALLED_S
    )
    local = rpc.RpcServer("router's local socket", stalled_s=rpc.STALLED_S) if config.local_socket else None
    _tell_who_may_call(config)
    ready = asyncio.Event()
    not_ready = asyncio.Event()

    def on_ready(any_ready: bool) -> None:
        (ready if any_ready else not_ready).set()
        (not_ready if any_ready else ready).clear()

    stop, stop_now = _watch_signals()
    async with AsyncExitStack() as stack:  # whatever fails here, what runs by then is stopped, the newest first
        traces = tracing.configure("router", config.otlp_endpoint)
        if traces is not None:
            stack.push_async_callback(asyncio.to_thread, traces.stop)
        requests = Requests(
            Tokenizer(config.model_dir),
            list(config.workers),
            max_in_flight=config.max_in_flight,
            max_request_bytes=config.max_request_bytes,
            max_unread_bytes=config.max_unread_bytes,
            recover_wait_s=config.recover_wait_s,
            session_idle_s=config.session_idle_s,
            max_sessions=config.max_sessions,
            log_prompts=config.log_prompts,
            tracing=traces,
            limits_of=authenticator.limits_of,
            worker_tls=config.worker_tls,
            switches=switches(config),
            on_ready=on_ready,
        )
        stack.push_async_callback(requests.close)
        server.add(router_pb2_grpc.add_RouterServicer_to_server, RouterService(requests), SERVICE_NAME)
        server.add(
            kserve_pb2_grpc.add_GRPCInferenceServiceServicer_to_server, KserveService(requests), kserve.SERVICE_NAME
        )
        address = await server.start(config.listen)
        stack.push_async_callback(server.stop, 0.0)
        servers = [server]
        if local is not None:
            local.add(router_pb2_grpc.add_RouterServicer_to_server, RouterService(requests), SERVICE_NAME)
            await local.start(f"unix:{config.local_socket}")
            stack.push_async_callback(local.stop, 0.0)
            servers.append(local)
        http_url: str | None = None
        if config.http_address != OFF:
            http = HttpServer(HttpDoor(requests, tenant_of=tenant_of), _tls_of(server))
            stack.push_async_callback(http.stop)
            http_url = await http.start(config.http_address)
        gc.collect()
        gc.freeze()  # what is loaded by now stays: going through it in each full collection holds all streams up 15 ms
        requests.start()
        probe = EventLoopProbe()
        tasks = [asyncio.create_task(_mirror_health(servers, ready, not_ready)), asyncio.create_task(probe.run())]
        if config.worker_dns:
            registry = requests.registry
            following = discovery.follow(
                config.worker_dns,
                add=registry.add,
                forget=registry.forget,
                states=registry.states,
                keep=config.workers,
            )
            tasks.append(asyncio.create_task(following))
        for task in tasks:
            stack.callback(task.cancel)
        certificate = CertificateCollector(server.certificate)
        stack.enter_context(
            exported(ProcessMetrics("router", probe), RouterCollector(requests, authenticator), certificate)
        )
        metrics_url = f"{http_url}{PATH}" if http_url is not None and tenant_of is None else None
        if config.metrics != OFF:
            metrics = MetricsServer(_page_of(asyncio.get_running_loop()), tls=_tls_of(server))
            stack.push_async_callback(asyncio.to_thread, metrics.stop)
            metrics_url = metrics.start(config.metrics)
        await stack.enter_async_context(serving_health(config.health, lambda: server.ready, probe))
        listening(address, http_url, metrics_url)
        await stop.wait()
        tasks[0].cancel()
        for each in servers:
            await each.set_ready(False)
        log.info("draining", in_flight=requests.admission.num_in_flight, grace_s=config.drain_s)
        await _first(requests.drain(config.drain_s), stop_now.wait())
        log.info("stopping", in_flight=requests.admission.num_in_flight)


def _page_of(loop: asyncio.AbstractEventLoop) -> Page:
    """The page as this loop makes it, for a server in another thread: what it reads, and clears up, is the loop's."""

    async def page(accept: str) -> tuple[bytes, str]:
        return metrics_page(accept)

    return lambda accept: asyncio.run_coroutine_threadsafe(page(accept), loop).result(CONNECTION_TIMEOUT_S)


def _tls_of(server: rpc.RpcServer) -> ssl.SSLContext | None:
    """For another door with the same certificate, a renewed one included; None: in plain text."""
    return server.certificate.ssl_context() if server.certificate is not None else None


def switches(config: RouterConfig) -> list[types_pb2.Switch]:
    """What was asked for. It all runs: what cannot be had has ended the start by name."""
    asked = {
        "tls": config.tls and ("mutual" if config.tls.client_ca else "server"),
        "tls-to-workers": config.worker_tls and ("mutual" if config.worker_tls.cert else "server"),
        "tokens": config.tokens and str(config.tokens),
        "traces": config.otlp_endpoint,
        "log-prompts": "on" if config.log_prompts else None,
    }
    return [types_pb2.Switch(name=k, configured=v or "off", engaged=v or "") for k, v in asked.items()]


def _tell_who_may_call(config: RouterConfig) -> None:
    if config.tokens is None:
        log.info("no tokens are demanded: whoever reaches this router may call it, as any tenant")
        return
    doors = [door for door in (config.listen, config.http_address) if door != OFF and not rpc.is_loopback(door)]
    if doors and config.tls is None:
        log.warning("tokens travel in plain text", doors=doors, hint="serve TLS: --tls-cert and --tls-key")


async def _mirror_health(servers: list[rpc.RpcServer], ready: asyncio.Event, not_ready: asyncio.Event) -> None:
    """Health is ready exactly while some worker is."""
    while True:
        await ready.wait()
        for server in servers:
            await server.set_ready(True)
        await not_ready.wait()
        for server in servers:
            await server.set_ready(False)


def _watch_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Two events: the first SIGTERM or SIGINT sets the one, the second both."""
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop, stop_now


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.create_task(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
