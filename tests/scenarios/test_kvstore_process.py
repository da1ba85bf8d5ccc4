"""The store as a process: starting, stopping, dying, and its command line."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.client import Admitted, Attachment, OpenRequest
from protos import rpc
from protos.errors import KvStoreLost, PreconditionFailed
from tests.scenarios.kvstore_process import GEOMETRY, ROOT, StoreProcess, eventually, unheard


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as made:
        yield Path(made)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_store_that_goes_away_is_told_once_and_calls_fail_by_name(signum: int) -> None:
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with StoreProcess() as store:
        attachment = store.attach(on_lost=told.put)
        (result,) = attachment.open([OpenRequest("r", "", [1, 2], 200)])
        assert isinstance(result, Admitted)
        page = attachment.reserve([(result.slot, 2, 1)])[result.slot]["full"][0].page_id
        attachment.arenas["full"].page(page)[:2] = b"ok"
        store.stop(signum)
        why = told.get(timeout=60)
        assert ("SIGTERM" in why) == (signum == signal.SIGTERM)
        calls = (
            lambda: attachment.open([]),
            lambda: attachment.reserve([(result.slot, 2, 1)]),
            lambda: attachment.seal([]),
            lambda: attachment.truncate(result.slot, 1),
            lambda: attachment.release([result.slot]),
            attachment.stats,
        )
        for call in calls:
            with pytest.raises(KvStoreLost):
                call()
        # What was mapped is still there: the worker may go on until it needs a page.
        assert bytes(attachment.arenas["full"].page(page)[:2]) == b"ok"
        assert attachment.control.token_log(result.slot) == [1, 2]
        attachment.close()
        attachment.close()
        assert told.empty()


class Cancelled(grpc.RpcError):
    """What a call in flight gets from a server that stops."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        return "Cancelled on the server side"


@pytest.mark.parametrize("how", ["stale epoch", "cancelled"])
def test_a_call_in_flight_while_the_store_stops_is_a_lost_store(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cancelled(request: object, timeout: float) -> object:
        raise Cancelled

    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with StoreProcess() as store:
        attachment = store.attach(on_lost=told.put)
        if how == "cancelled":
            monkeypatch.setattr(attachment._session.stub, "Open", cancelled)
        else:
            attachment.epoch -= 1
        with unheard(attachment):
            with pytest.raises(KvStoreLost):
                attachment.open([OpenRequest("r", "", [1], 1)])
            assert told.get(timeout=60) == attachment.lost
        attachment.close()
    assert told.empty()


def test_closing_tells_nobody() -> None:
    told: list[str] = []
    with StoreProcess() as store:
        attachment = store.attach(on_lost=told.append)
        attachment.close()
        with pytest.raises(KvStoreLost, match="was closed"):
            attachment.release([0])
    assert told == []


def test_who_was_never_attached_has_lost_nothing() -> None:
    """A worker tries again while its predecessor is in the books: what it is told of the first try must not end it."""
    told: list[str] = []
    with StoreProcess() as store:
        with store.attach():
            for _ in range(3):
                with pytest.raises(PreconditionFailed, match="in use"):
                    store.attach(on_lost=told.append)
        with store.attach(on_lost=told.append):
            assert told == []
    assert told == []


def test_on_lost_may_close_the_attachment() -> None:
    attachments: list[Attachment] = []
    done = threading.Event()

    def close(why: str) -> None:
        attachments[0].close()
        done.set()

    with StoreProcess() as store:
        attachments.append(store.attach(on_lost=close))
        store.stop(signal.SIGKILL)
        assert done.wait(60)


def test_a_store_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.session.CALL_TIMEOUT_S", 0.5)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    with StoreProcess() as store:
        attachment = store.attach(on_lost=told.put)
        with unheard(attachment):
            os.kill(store.process.pid, signal.SIGSTOP)
            try:
                with pytest.raises(KvStoreLost, match="did not answer"):
                    attachment.open([OpenRequest("r", "", [1], 1)])
                assert "did not answer" in told.get(timeout=60)
            finally:
                os.kill(store.process.pid, signal.SIGCONT)
        attachment.close()


def test_a_store_that_stood_still_holds_nobodys_silence_against_him() -> None:
    with StoreProcess("--heartbeat-timeout", "2") as store, store.attach() as attachment:
        eventually(lambda: bool(store.device().worker_id))
        os.kill(store.process.pid, signal.SIGSTOP)
        time.sleep(3.5)
        os.kill(store.process.pid, signal.SIGCONT)
        eventually(lambda: any("was not running" in line["event"] for line in store.log()))
        time.sleep(0.5)
        assert attachment.lost is None
        assert store.device().suspects_killed == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_it_cleanly_and_removes_its_sockets(folder: Path, signum: int) -> None:
    with StoreProcess(folder=folder) as store:
        assert store.ready == {"ready": True, "socket": f"unix:{folder}/kvstore.sock", "metrics": None}
        assert sorted(path.name for path in folder.iterdir()) == ["kvstore-fds.sock", "kvstore.sock"]
        attachment = store.attach()
        assert store.stop(signum) == 0
        assert list(folder.iterdir()) == []
        assert [line["event"] for line in store.log()] == ["ready", "attached", "stopping", "detached"]
        attachment.close()


def test_a_second_store_in_the_folder_is_refused_and_the_first_goes_on(folder: Path) -> None:
    with StoreProcess(folder=folder) as store:
        second = run_cli("serve", "--socket-dir", str(folder))
        assert (second.returncode, second.stdout) == (1, "")
        assert "SOCKET_IN_USE" in second.stderr
        assert str(folder) in second.stderr
        assert "Traceback" not in second.stderr
        store.attach().close()


def test_sockets_of_a_dead_store_are_cleared_away(folder: Path) -> None:
    with StoreProcess(folder=folder) as store:
        first = store.attach()
        store.stop(signal.SIGKILL)
        eventually(lambda: first.lost is not None)
    assert sorted(path.name for path in folder.iterdir()) == ["kvstore-fds.sock", "kvstore.sock"]
    with StoreProcess(folder=folder) as store, store.attach() as second:
        assert second.epoch > first.epoch
        assert second.store_incarnation != first.store_incarnation
    first.close()


@pytest.mark.parametrize("name", ["kvstore.sock", "kvstore-fds.sock"])
def test_a_file_in_place_of_a_socket_is_left_alone(folder: Path, name: str) -> None:
    (folder / name).write_text("mine")
    refused = run_cli("serve", "--socket-dir", str(folder))
    assert refused.returncode == 1
    assert name in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (folder / name).read_text() == "mine"


def test_a_folder_path_that_is_too_long_for_a_socket(folder: Path) -> None:
    refused = run_cli("serve", "--socket-dir", str(folder / ("x" * 100)))
    assert refused.returncode == 1
    assert "SOCKET_PATH_TOO_LONG" in refused.stderr


def test_a_folder_that_cannot_be_made(folder: Path) -> None:
    (folder / "file").write_text("")
    refused = run_cli("serve", "--socket-dir", str(folder / "file" / "below"))
    assert refused.returncode != 0
    assert "Traceback" not in refused.stderr


def test_health_tells_alive_and_ready() -> None:
    with StoreProcess() as store, rpc.sync_channel(f"unix:{store.socket}") as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "tailpack.v1.KvStore"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=60)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError):
            health.Check(health_pb2.HealthCheckRequest(service="no.such"), timeout=60)


def test_stats_as_a_table_and_as_json(folder: Path) -> None:
    with StoreProcess(folder=folder) as store:
        assert "no worker has attached yet" in run_cli("stats", "--socket-dir", str(folder)).stdout
        with store.attach() as attachment:
            attachment.open([OpenRequest("r", "", [1], 300)])
            for socket in (str(folder / "kvstore.sock"), f"unix:{folder}/kvstore.sock", f"unix:{folder}"):
                assert run_cli("stats", "--kv-socket", socket).returncode == 0, socket
            table = run_cli("stats", "--socket-dir", str(folder))
            assert table.returncode == 0
            rows = [line.split() for line in table.stdout.splitlines()]
            assert ["full", "dense", "256", "8", "8", "3", "0", "0", "0", "0", "0"] in rows
            assert "w0 attached" in table.stdout
            answer = json.loads(run_cli("stats", "--socket-dir", str(folder), "--json").stdout)
            (device,) = answer["devices"]
            assert device["geometry_digest"] == GEOMETRY.digest().hex()
            assert device["epoch"] == attachment.epoch
            assert [g["pages_promised"] for g in device["groups"]] == [3, 3]


def test_stats_without_a_store(folder: Path) -> None:
    refused = run_cli("stats", "--socket-dir", str(folder))
    assert refused.returncode == 1
    assert "KVSTORE_NOT_THERE" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_garbage_on_the_grpc_socket_hurts_nobody() -> None:
    with StoreProcess() as store:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rude:
                rude.connect(str(store.socket))
                rude.sendall(os.urandom(4096))
        store.attach().close()
