"""The worker's side of the descriptor socket, against servers that say something else than ours."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvstore.fd_server import MAX_MANIFEST_BYTES, FdServer, deliver, fetch
from kvstore.server import _sole_store
from kvstore.suspects import Holder
from protos import kvstore_pb2
from protos.errors import ConfigError, PermissionDenied, Unavailable
from tests.unit.descriptors import open_descriptors


def answer_once(path: Path, manifest: bytes, fds: list[int]) -> threading.Thread:
    """Serves one ticket with these bytes and descriptors."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(1)

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(16)
            socket.send_fds(connection, [struct.pack("<I", len(manifest)) + manifest], fds)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@pytest.mark.parametrize("manifest", [b"\xff\xff\xff", b""], ids=["malformed", "of no descriptor"])
def test_a_bad_manifest_is_named_and_leaks_nothing(tmp_path: Path, manifest: bytes) -> None:
    before = open_descriptors()
    with (tmp_path / "file").open("wb") as file:
        server = answer_once(tmp_path / "s", manifest, [file.fileno()])
        with pytest.raises(Unavailable):
            fetch(tmp_path / "s", bytes(16), timeout_s=60)
        server.join(60)
    assert not open_descriptors() - before


def test_a_manifest_without_end_is_given_up(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen(1)
    sent = 0

    def serve() -> None:
        nonlocal sent
        with listener, listener.accept()[0] as connection, suppress(OSError):
            connection.recv(16)
            connection.sendall(struct.pack("<I", (1 << 32) - 1))
            while sent < 8 * MAX_MANIFEST_BYTES:
                connection.sendall(bytes(1 << 16))
                sent += 1 << 16

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(Unavailable, match="too long"):
        fetch(tmp_path / "s", bytes(16), timeout_s=60)
    thread.join(60)
    assert sent < 4 * MAX_MANIFEST_BYTES


async def test_as_many_descriptors_are_taken_as_are_said_to_come(tmp_path: Path) -> None:
    server, before = FdServer(tmp_path / "s"), open_descriptors()
    await server.start()
    with server.expect(1) as (ticket, delivery), (tmp_path / "file").open("wb") as file:
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        writer.write(ticket)
        await writer.drain()
        sender = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))
        with sender:
            sender.setblocking(True)
            socket.send_fds(sender, [struct.pack("<I", 2)], [file.fileno()])
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert not delivery.arrived.is_set()
        writer.close()
    await server.stop()
    assert not open_descriptors() - before


def test_a_socket_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError) as refused, _sole_store(tmp_path):
        pass
    assert refused.value.reason == "SOCKET_DIR_NOT_OURS"


def test_descriptors_never_pass_to_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As they arrive, not some lines later: another thread may start a program at any time.
    monkeypatch.setattr(os, "set_inheritable", lambda fd, inheritable: None)
    manifest = kvstore_pb2.FdManifest(entries=[kvstore_pb2.FdEntry(kind="control")] * 2).SerializeToString()
    with (tmp_path / "file").open("wb") as file:
        server = answer_once(tmp_path / "s", manifest, [file.fileno(), file.fileno()])
        _, fds = fetch(tmp_path / "s", bytes(16), timeout_s=60)
        server.join(60)
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    for fd in fds:
        os.close(fd)


async def test_what_is_delivered_and_not_taken_is_closed(tmp_path: Path) -> None:
    server, before = FdServer(tmp_path / "s"), open_descriptors()
    with server.expect(2) as (_, delivery):
        fds = [os.open(tmp_path, os.O_RDONLY) for _ in range(2)]
        holder, other = Mock(spec=Holder), Mock(spec=Holder)
        assert not delivery.bring(fds[:1], holder)
        assert not delivery.arrived.is_set()
        assert delivery.bring(fds, holder)
        assert not delivery.bring(fds, other), "once"
    assert not open_descriptors() - before
    assert holder.close.called and not other.close.called
    assert delivery.take() == ([], None)


async def test_what_is_delivered_too_late_stays_the_bringers(tmp_path: Path) -> None:
    with FdServer(tmp_path / "s").expect(1) as (_, delivery):
        pass
    fd = os.open(tmp_path, os.O_RDONLY)
    holder = Mock(spec=Holder)
    assert not delivery.bring([fd], holder) and not holder.close.called
    os.close(fd)


@pytest.mark.parametrize("answer", [b"", b"?"])
def test_a_delivery_that_is_not_kept_is_named(tmp_path: Path, answer: bytes) -> None:
    before = open_descriptors()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen(1)

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(16)
            connection.recv(4)  # without room for descriptors: they are dropped
            connection.send(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with (tmp_path / "file").open("wb") as file, pytest.raises(PermissionDenied) as caught:
        deliver(tmp_path / "s", bytes(16), [file.fileno()], timeout_s=60)
    thread.join(60)
    assert caught.value.reason == "TICKET_REFUSED"
    assert not open_descriptors() - before


async def test_a_store_that_was_out_of_descriptors_answers_afterwards(tmp_path: Path) -> None:
    server = FdServer(tmp_path / "s")
    await server.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(60)
        next_free = os.dup(caller.fileno())
        os.close(next_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_free, hard))
        try:
            caller.connect(str(tmp_path / "s"))
            await asyncio.sleep(0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        caller.sendall(bytes(16))
        assert await asyncio.to_thread(caller.recv, 1) == b"", "an unknown ticket: closed without an answer"
    await server.stop()
