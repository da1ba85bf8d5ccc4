"""Hands file descriptors to workers over a plain unix socket, against a ticket that is good for one connection.

A connection: the worker sends its 16-byte ticket, the server answers with a length-prefixed (u32, little-endian)
FdManifest whose first bytes carry the descriptors (SCM_RIGHTS), then closes. A wrong or used ticket, or a process of
another user, gets a close without an answer.
"""

from __future__ import annotations

import array
import asyncio
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
from google.protobuf.message import DecodeError

from protos import kvstore_pb2
from protos.errors import PermissionDenied, Unavailable

log = structlog.get_logger("kvstore.fds")

TICKET_BYTES = 16
TICKET_TIMEOUT_S = 5.0
MAX_FDS = 253  # the kernel's SCM_MAX_FD
MAX_MANIFEST_BYTES = 1 << 20
_UCRED = struct.Struct("3i")  # pid, uid, gid
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class _Parcel:
    manifest: kvstore_pb2.FdManifest
    fds: list[int]
    on_taken: Callable[[int], None]


class FdServer:
    """Listens from ``start`` to ``stop``, on the running event loop."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._parcels: dict[bytes, _Parcel] = {}
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._serving: set[asyncio.Task[None]] = set()

    def issue(self, manifest: kvstore_pb2.FdManifest, fds: list[int], on_taken: Callable[[int], None]) -> bytes:
        """A ticket for these descriptors, which stay the caller's. ``on_taken`` gets the pid that fetched them.

        The pid is the kernel's word (SO_PEERCRED); 0 when the process is not visible from here.
        """
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._parcels[ticket] = _Parcel(manifest, fds, on_taken)
        return ticket

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
            connection, _ = await loop.sock_accept(listener)
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
            text = parcel.manifest.SerializeToString()
            try:
                # A fresh socket's buffer holds far more than a manifest, so this does not block.
                socket.send_fds(connection, [_LENGTH.pack(len(text)) + text], parcel.fds)
            except OSError as failure:
                log.warning("descriptors could not be sent", pid=pid, error=str(failure))
                return
            parcel.on_taken(pid)


async def _receive_ticket(connection: socket.socket) -> bytes:
    loop, received = asyncio.get_running_loop(), b""
    while len(received) < TICKET_BYTES:
        part = await loop.sock_recv(connection, TICKET_BYTES - len(received))
        if not part:
            raise ConnectionError("the connection ended inside the ticket")
        received += part
    return received


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
        _close(fds)
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
        _close(fds)
        raise Unavailable("the descriptor socket sent no manifest", given=path, hint=str(malformed)) from malformed
    if len(fds) != len(manifest.entries):
        _close(fds)
        raise Unavailable("descriptors were lost on the way", given=len(fds), allowed=len(manifest.entries))
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


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
