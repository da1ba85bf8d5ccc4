"""The kvstore process: one per socket folder, from start to a clean stop."""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from kvstore.attachments import DEFAULT_HEARTBEAT_TIMEOUT_S, DEFAULT_ORPHAN_TIMEOUT_S, Attachments
from kvstore.fd_server import FdServer
from kvstore.metrics import KvStoreMetrics
from kvstore.service import KvStoreService
from kvstore.weights import DEFAULT_GRACE_S, WeightsStore
from protos import kvstore_pb2, kvstore_pb2_grpc
from protos.errors import ConfigError, InternalError
from protos.health import serving_health
from protos.metrics import OFF, serving_metrics
from protos.rpc import RpcServer
from protos.tls import ServerCertificate, ServerTls
from protos.tls_metrics import CertificateCollector

log = structlog.get_logger("kvstore")

SOCKET_NAME = "kvstore.sock"
FD_SOCKET_NAME = "kvstore-fds.sock"
MAX_SOCKET_PATH_BYTES = 107  # sun_path
STOP_GRACE_S = 1.0


async def serve(
    socket_dir: Path,
    *,
    memory_limit: int | None,
    on_ready: Callable[[str, str | None], None],
    metrics: str = OFF,
    metrics_tls: ServerTls | None = None,
    health: str = OFF,
    heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
    orphan_timeout_s: float = DEFAULT_ORPHAN_TIMEOUT_S,
    weights_grace_s: float = DEFAULT_GRACE_S,
) -> None:
    """Serves until SIGTERM or SIGINT; then tells the workers, stops, and removes its sockets.

    Args:
        socket_dir: made when missing; this user's, and made readable by no other.
        memory_limit: bytes for all devices together, or None.
        on_ready: called once calls are answered, with the address and, if there is one, the URL of the metrics.
        metrics: host:port of the page for Prometheus, or OFF.
        health: host:port of the page that says whether it is alive and ready (protos/health.py), or OFF.
        heartbeat_timeout_s, orphan_timeout_s: see ``Attachments``.
        weights_grace_s: see ``WeightsStore``.
        metrics_tls: of that page; None: plain text. The sockets need none: the folder is its user's alone.

    Raises:
        ConfigError: SOCKET_IN_USE, SOCKET_PATH_TOO_LONG, or the folder cannot be used; PORT_IN_USE, BAD_ADDRESS; TLS_*.
        InternalError: an invariant broke.
    """
    socket_dir = socket_dir.absolute()
    with _sole_store(socket_dir):
        fd_server = FdServer(socket_dir / FD_SOCKET_NAME)
        incarnation = secrets.token_hex(8)
        attachments = Attachments(
            fd_server,
            incarnation=incarnation,
            memory_limit=memory_limit,
            heartbeat_timeout_s=heartbeat_timeout_s,
            orphan_timeout_s=orphan_timeout_s,
        )
        weights = WeightsStore(fd_server, grace_s=weights_grace_s)
        service = KvStoreService(attachments, weights, incarnation=incarnation)
        server = RpcServer("kvstore")
        name = kvstore_pb2.DESCRIPTOR.services_by_name["KvStore"].full_name
        server.add(kvstore_pb2_grpc.add_KvStoreServicer_to_server, service, name)
        stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, _resolve, stop, signal.Signals(signum).name)
        numbers = KvStoreMetrics(asyncio.get_running_loop(), service)
        certificate = ServerCertificate(metrics_tls, "kvstore") if metrics_tls else None
        context, expiry = certificate.ssl_context() if certificate else None, CertificateCollector(certificate)
        async with (
            serving_metrics("kvstore", metrics, numbers, expiry, tls=context) as url,
            serving_health(health, lambda: server.ready),
        ):
            await fd_server.start()
            try:
                address = await server.start(f"unix:{socket_dir / SOCKET_NAME}")
                (socket_dir / SOCKET_NAME).chmod(0o600)
                await server.set_ready(True)
                log.info("ready", socket=address, pid=os.getpid(), memory_limit=memory_limit, metrics=url)
                on_ready(address, url)
                failed = asyncio.create_task(attachments.failed.wait())
                checks = asyncio.create_task(service.check_when_idle())
                watching = asyncio.create_task(attachments.watch())
                watching_weights = asyncio.create_task(weights.watch())
                endings: set[asyncio.Future[Any]] = {stop, failed, watching, watching_weights}
                await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
                why = f"the store got {stop.result()}" if stop.done() else "the store broke an invariant"
                log.info("stopping", why=why)
                attachments.revoke_all(why)
                weights.stop()
                await server.stop(STOP_GRACE_S)
                tasks = (failed, checks, watching, watching_weights)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                await fd_server.stop()
                attachments.close()
                weights.close()
        if attachments.failed.is_set():
            raise InternalError("the store broke an invariant and stopped; its log says which")


@contextmanager
def _sole_store(socket_dir: Path) -> Iterator[None]:
    """Holds the folder against other stores, and clears away the sockets of a dead one.

    The lock is on the folder itself and ends with the process, however it ends; so sockets that stand in a folder that
    we could lock are leftovers of a dead store.
    """
    sockets = [socket_dir / SOCKET_NAME, socket_dir / FD_SOCKET_NAME]
    for path in sockets:
        if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                "the path of the socket is too long",
                reason="SOCKET_PATH_TOO_LONG",
                given=path,
                allowed=f"{MAX_SOCKET_PATH_BYTES} bytes",
                hint="choose a shorter --socket-dir",
            )
    try:
        socket_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = os.open(socket_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as failure:
        raise ConfigError("the socket folder cannot be used", given=socket_dir, hint=str(failure)) from failure
    try:
        _make_private(socket_dir, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "another kvstore serves in this folder",
                reason="SOCKET_IN_USE",
                given=sockets[0],
                hint="stop it first, or choose another --socket-dir",
            ) from None
        for path in sockets:
            if path.is_socket():
                log.info("removing the socket of a store that is gone", socket=str(path))
                path.unlink()
            elif path.exists():
                raise ConfigError(
                    "a file that is no socket stands where the store's socket goes",
                    reason="SOCKET_IN_USE",
                    given=path,
                    hint="remove it, or choose another --socket-dir",
                )
        yield
    finally:
        os.close(folder)


def _make_private(socket_dir: Path, folder: int) -> None:
    """Whoever can reach the sockets can have the memory, or put other memory in its place.

    Raises:
        ConfigError: SOCKET_DIR_NOT_OURS.
    """
    found = os.fstat(folder)
    if found.st_uid != os.geteuid():
        raise ConfigError(
            "the socket folder is another user's",
            reason="SOCKET_DIR_NOT_OURS",
            given=f"{socket_dir}, of uid {found.st_uid}",
            allowed=f"a folder of uid {os.geteuid()}",
            hint="choose a folder inside of it: it is made",
        )
    if found.st_mode & 0o077:
        os.fchmod(folder, 0o700)
        log.info("the socket folder is this user's alone now", folder=str(socket_dir), was=oct(found.st_mode & 0o777))


def _resolve(stop: asyncio.Future[str], signal_name: str) -> None:
    if not stop.done():
        stop.set_result(signal_name)
