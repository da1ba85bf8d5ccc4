"""Hands file descriptors to workers, and takes some in, over a plain unix socket. A ticket is good for one connection.

A connection: the worker sends its 16-byte ticket. With a ticket to fetch, the server answers with a length-prefixed
(u32, little-endian) FdManifest whose first bytes carry the descriptors (SCM_RIGHTS), then closes. With a ticket to
deliver, the worker then sends the number of descriptors (u32, little-endian), which carries them; the server answers
with one byte, KEPT, once it has them, and closes. A wrong or used ticket, a process of another user, or another number
of descriptors than expected gets a close without an answer.
"""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from kvstore.arena import close_all
from kvstore.suspects import Holder
from protos import kvstore_pb2
from protos.errors import PermissionDenied, Unavailable

log = structlog.get_logger("kvstore.fds")

TICKET_BYTES = 16
TICKET_TIMEOUT_S = 5.0
ACCEPT_RETRY_S = 0.1
MAX_FDS = 253  # the kernel's SCM_MAX_FD
MAX_MANIFEST_BYTES = 1 << 20
KEPT = b"K"
_UCRED = struct.Struct("3i")  # pid, uid, gid
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class _Parcel:
    manifest: kvstore_pb2.FdManifest
    fds: list[int]
    on_taken: Callable[[Holder], None]


class Delivery:
    """Descriptors that a worker is to bring; a context manager that closes those that nobody took.

    Used on one event loop.
    """

    def __init__(self, num_fds: int) -> None:
        self.num_fds = num_fds
        self.arrived = asyncio.Event()
        self._fds: list[int] = []
        self._holder: Holder | None = None
        self._closed = False

    def bring(self, fds: list[int], holder: Holder) -> bool:
        """False: not what is expected, or too late; descriptors and holder stay the caller's."""
        if self._closed or self.arrived.is_set() or len(fds) != self.num_fds:
            return False
        self._fds, self._holder = fds, holder
        self.arrived.set()
        return True

    def take(self) -> tuple[list[int], Holder | None]:
        """The descriptors and who brought them, once they have arrived; they are the caller's from here on."""
        fds, self._fds = self._fds, []
        holder, self._holder = self._holder, None
        return fds, holder

    def close(self) -> None:
        self._closed = True
        fds, holder = self.take()
        close_all(fds)
        if holder is not None:
            holder.close()


class FdServer:
    """Listens from ``start`` to ``stop``, on the running event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parcels: dict[bytes, _Parcel | Delivery] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def issue(self, manifest: kvstore_pb2.FdManifest, fds: list[int], on_taken: Callable[[Holder], None]) -> bytes:
        """A ticket for these descriptors, which stay the caller's. ``on_taken`` gets the process that fetched them,
        which is the caller's to close.
        """
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._parcels[ticket] = _Parcel(manifest, fds, on_taken)
        return ticket

    @contextmanager
    def expect(self, num_fds: int) -> Iterator[tuple[bytes, Delivery]]:
        """A ticket to deliver so many descriptors, void at the end of the block; what nobody took is closed then."""
        ticket, delivery = secrets.token_bytes(TICKET_BYTES), Delivery(num_fds)
        self._parcels[ticket] = delivery
        try:
            yield ticket, delivery
        finally:
            self.withdraw(ticket)
            delivery.close()

    def withdraw(self, ticket: bytes) -> None:
        """The ticket is void from now on, if it was not used."""
        self._parcels.pop(ticket, None)

    async def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self.path))
        self.path.chmod(0o600)
        self._listener.listen(64)
        self._accepting = asyncio.create_task(self._accept(self._listener))

    async def stop(self) -> None:
        """Ends the listener and what it serves, and removes the socket."""
        tasks = [task for task in (self._accepting, *self._serving) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener:
            self._listener.close()
            self.path.unlink(missing_ok=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as failure:  # out of descriptors: the caller waits in the backlog meanwhile
                log.error("no connection could be taken", error=str(failure))
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            connection.setblocking(False)
            task = asyncio.create_task(self._serve(connection))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)

    async def _serve(self, connection: socket.socket) -> None:
        with connection:
            pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid != os.geteuid():
                log.warning("descriptors refused: another user", pid=pid, uid=uid)
                return
            try:
                ticket = await asyncio.wait_for(_receive_ticket(connection), TICKET_TIMEOUT_S)
            except (TimeoutError, OSError) as failure:
                log.warning("descriptors refused: no ticket came", pid=pid, error=str(failure))
                return
            parcel = self._parcels.pop(ticket, None)
            if parcel is None:
                log.warning("descriptors refused: ticket is unknown or was used", pid=pid)
                return
            holder = Holder(pid)  # while it waits for our answer: later its pid may be another's
            if isinstance(parcel, Delivery):
                if not await _take_in(connection, parcel, holder):
                    holder.close()
                return
            text = parcel.manifest.SerializeToString()
            try:
                # A fresh socket's buffer holds far more than a manifest, so this does not block.
                socket.send_fds(connection, [_LENGTH.pack(len(text)) + text], parcel.fds)
            except OSError as failure:
                log.warning("descriptors could not be sent", pid=pid, error=str(failure))
                holder.close()
                return
            parcel.on_taken(holder)


async def _receive_ticket(connection: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < TICKET_BYTES:
        part = await loop.sock_recv(connection, TICKET_BYTES - len(received))
        if not part:
            raise ConnectionError("the connection ended inside the ticket")
        received += part
    return received


async def _take_in(connection: socket.socket, delivery: Delivery, holder: Holder) -> bool:
    """Whether the delivery has the descriptors, and with them the process that brought them."""
    pid = holder.pid
    try:
        await asyncio.wait_for(_readable(connection), TICKET_TIMEOUT_S)
        data, fds = _receive_fds(connection)
    except (TimeoutError, OSError) as failure:
        log.warning("descriptors refused: none came", pid=pid, error=str(failure))
        return False
    if data != _LENGTH.pack(len(fds)) or not delivery.bring(fds, holder):
        close_all(fds)
        log.warning("descriptors refused: not what is expected", pid=pid, given=len(fds), expected=delivery.num_fds)
        return False
    with suppress(OSError):  # the worker is gone; the descriptors are here all the same
        connection.send(KEPT)
    return True


async def _readable(connection: socket.socket) -> None:
    """Waits. asyncio's own receiving functions drop what comes beside the bytes."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection.fileno())


def deliver(path: Path, ticket: bytes, fds: Sequence[int], *, timeout_s: float) -> None:
    """The worker's side: hands descriptors to the store, which has its own copies when this returns.

    Raises:
        PermissionDenied: TICKET_REFUSED. Unavailable: the socket is not there, or went silent.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(ticket)
            try:
                socket.send_fds(connection, [_LENGTH.pack(len(fds))], list(fds))
                answer = connection.recv(len(KEPT))
            except (BrokenPipeError, ConnectionResetError):  # closed before it read all
                answer = b""
    except OSError as failure:
        raise Unavailable("the descriptor socket does not answer", given=path, hint=str(failure)) from failure
    if answer != KEPT:
        raise PermissionDenied(
            "the store took no descriptors for this ticket",
            reason="TICKET_REFUSED",
            given=f"{len(fds)} descriptors",
            hint="tickets are good once, while the store waits for them, and for processes of the store's user",
        )


def fetch(path: Path, ticket: bytes, *, timeout_s: float) -> tuple[kvstore_pb2.FdManifest, list[int]]:
    """The worker's side: exchanges the ticket for descriptors, which the caller owns from here on.

    Raises:
        PermissionDenied: TICKET_REFUSED. Unavailable: the socket is not there, or went silent.
    """
    fds: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(ticket)
            data, fds = _receive_fds(connection)
            while data and (len(data) < _LENGTH.size or len(data) < _LENGTH.size + _LENGTH.unpack_from(data)[0]):
                part = connection.recv(1 << 16)
                if not part or len(data) > MAX_MANIFEST_BYTES:
                    raise ConnectionError("the manifest is cut short or too long")
                data += part
    except OSError as failure:
        close_all(fds)
        raise Unavailable("the descriptor socket does not answer", given=path, hint=str(failure)) from failure
    if not data:
        raise PermissionDenied(
            "the store gave no descriptors for this ticket",
            reason="TICKET_REFUSED",
            hint="tickets are good once, while the attachment lives, and for processes of the store's user",
        )
    try:
        manifest = kvstore_pb2.FdManifest.FromString(data[_LENGTH.size :])
    except DecodeError as malformed:
        close_all(fds)
        raise Unavailable("the descriptor socket sent no manifest", given=path, hint=str(malformed)) from malformed
    expected = sum(num_descriptors(entry) for entry in manifest.entries)
    if len(fds) != expected:
        close_all(fds)
        raise Unavailable("descriptors were lost on the way", given=len(fds), allowed=expected)
    return manifest, fds


def _receive_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Like socket.recv_fds, which has no say about CLOEXEC: a program started meanwhile would inherit descriptors."""
    fds = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(
        1 << 16, socket.CMSG_SPACE(MAX_FDS * fds.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist()


def num_descriptors(entry: kvstore_pb2.FdEntry) -> int:
    """Descriptors that come with an entry: one, or one a chunk."""
    return max(1, len(entry.chunk_bytes))
