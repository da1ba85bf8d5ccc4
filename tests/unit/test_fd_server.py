"""The worker's side of the descriptor socket, against servers that say something else than ours."""

from __future__ import annotations

import os
import socket
import struct
import threading
from pathlib import Path

import pytest

from kvstore.fd_server import fetch
from protos import kvstore_pb2
from protos.errors import Unavailable


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


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("manifest", [b"\xff\xff\xff", b""], ids=["malformed", "of no descriptor"])
def test_a_bad_manifest_is_named_and_leaks_nothing(tmp_path: Path, manifest: bytes) -> None:
    before = open_descriptors()
    with (tmp_path / "file").open("wb") as file:
        server = answer_once(tmp_path / "s", manifest, [file.fileno()])
        with pytest.raises(Unavailable):
            fetch(tmp_path / "s", bytes(16), timeout_s=5)
        server.join(5)
    assert open_descriptors() == before


def test_descriptors_never_pass_to_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As they arrive, not some lines later: another thread may start a program at any time.
    monkeypatch.setattr(os, "set_inheritable", lambda fd, inheritable: None)
    manifest = kvstore_pb2.FdManifest(entries=[kvstore_pb2.FdEntry(kind="control")] * 2).SerializeToString()
    with (tmp_path / "file").open("wb") as file:
        server = answer_once(tmp_path / "s", manifest, [file.fileno(), file.fileno()])
        _, fds = fetch(tmp_path / "s", bytes(16), timeout_s=5)
        server.join(5)
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    for fd in fds:
        os.close(fd)
