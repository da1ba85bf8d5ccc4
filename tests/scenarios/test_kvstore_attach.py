"""Attaching to a real store: memory that is shared, who is let in, and what a detach frees."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from kvstore import client, session
from kvstore.client import Admitted, OpenRequest
from kvstore.fd_server import fetch
from kvstore.geometry import LAYOUT_VERSION
from protos import kvstore_pb2, kvstore_pb2_grpc, rpc
from protos.errors import (
    CapacityError,
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    KvStoreLost,
    PermissionDenied,
    PreconditionFailed,
    TailpackError,
    Unavailable,
)
from tests.scenarios.kvstore_process import (
    GEOMETRY,
    PAGE_BYTES,
    StoreProcess,
    eventually,
    geometry,
    worker_process,
)


@pytest.fixture(scope="module")
def shared_store() -> Iterator[StoreProcess]:
    with StoreProcess() as running:
        yield running


@pytest.fixture
def store(shared_store: StoreProcess) -> Iterator[StoreProcess]:
    """The module's store, nobody attached before and after."""
    yield shared_store
    eventually(lambda: all(not device.worker_id for device in shared_store.stats().devices))


def asked(**changes: object) -> kvstore_pb2.AttachOpen:
    fields = {
        "worker_id": "w0",
        "device": "cpu:0",
        "pid": os.getpid(),
        "geometry": GEOMETRY.to_proto(),
        "geometry_digest": GEOMETRY.digest(),
        "arena_bytes": 8 * PAGE_BYTES,
        "max_sequences": 4,
        "max_sequence_tokens": 1024,
        **changes,
    }
    return kvstore_pb2.AttachOpen(**fields)  # type: ignore[arg-type]


def raw_attach_error(store: StoreProcess, *messages: kvstore_pb2.AttachRequest) -> TailpackError:
    """The error of an Attach that sends these messages, without our client in between."""
    with rpc.sync_channel(f"unix:{store.socket}") as channel:
        stream = kvstore_pb2_grpc.KvStoreStub(channel).Attach(iter(messages))
        with pytest.raises(grpc.RpcError) as caught:
            next(iter(stream))
        return rpc.error_from(caught.value)


def test_sizes_are_those_of_the_formula(store: StoreProcess) -> None:
    with store.attach(pages=8) as attachment:
        for group in GEOMETRY.groups:
            arena = attachment.arenas[group.name]
            assert (arena.num_pages, arena.page_bytes) == (8, group.page_bytes)
            assert len(arena.buffer) == 8 * group.page_bytes
        stats = store.device()
        assert {g.group: g.arena_bytes for g in stats.groups} == {g.name: 8 * g.page_bytes for g in GEOMETRY.groups}
        assert stats.control_bytes == attachment.control.num_bytes
        assert (stats.worker_id, stats.epoch) == ("w0", attachment.epoch)
        assert attachment.control.epoch == attachment.epoch


def test_rows_and_words_are_seen_by_the_next_process(store: StoreProcess) -> None:
    code = (
        "a = attach()\n"
        "slot = a.open([OpenRequest('r', 's', [1, 2, 3], 200, b'frozen')])[0].slot\n"
        "page = a.reserve([(slot, 3, 1)])[slot]['full'][0].page_id\n"
        "a.arenas['full'].page(page)[:5] = b'rows!'\n"
        "a.control.append_tokens(slot, [4]); a.control.commit(slot, 3)\n"
        "say(slot, page); sys.stdin.readline(); a.close(); say('closed'); sys.stdin.readline()\n"
    )
    with worker_process(store, code) as worker:
        assert worker.stdout
        assert worker.stdin
        slot, page = map(int, worker.stdout.readline().split())
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "closed\n"
        with store.attach() as attachment:  # the same memory: the arena was kept
            assert bytes(attachment.arenas["full"].page(page)[:5]) == b"rows!"
            assert attachment.control.live_slots() == []
            assert attachment.control.token_log(slot) == []


def test_a_killed_workers_sequences_are_the_next_workers(store: StoreProcess) -> None:
    code = (
        "a = attach()\n"
        "s = [r.slot for r in a.open([OpenRequest(f'r{i}', '', [1] * 130, 256, b'') for i in range(3)])]\n"
        "a.reserve([(slot, 130, 1) for slot in s]); a.control.commit(s[0], 130); a.seal([(s[0], 130, 1)])\n"
        "say(a.epoch); sys.stdin.readline()\n"
    )
    with worker_process(store, code) as worker:
        assert worker.stdout
        epoch = int(worker.stdout.readline())
        before = store.device()
        assert (before.sequences, before.orphans, before.worker_id) == (3, 0, "other")
        assert [(g.pages_free, g.pages_open, g.pages_sealed) for g in before.groups] == [(2, 5, 1)] * 2
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda: store.device().orphans == 3)
        after = store.device()
        assert after.worker_id == ""
        assert [(g.pages_free, g.pages_open, g.pages_sealed) for g in after.groups] == [(2, 5, 1)] * 2
        with store.attach() as attachment:
            assert attachment.epoch > epoch
            assert sorted(each.request_id for each in attachment.adopted) == ["r0", "r1", "r2"]
            assert attachment.control.live_slots() == sorted(each.slot for each in attachment.adopted)
        freed = store.device()
        assert [g.pages_free + g.pages_cached for g in freed.groups] == [8, 8]
        assert [(g.pages_promised, g.pages_open, g.pages_sealed) for g in freed.groups] == [(0, 0, 0)] * 2


def test_a_second_attachment_is_refused_while_the_first_lives(store: StoreProcess) -> None:
    with store.attach(worker_id="first") as attachment:
        with pytest.raises(PreconditionFailed) as caught:
            store.attach(worker_id="second")
        assert caught.value.reason == "DEVICE_BUSY"
        assert "'first'" in (caught.value.allowed or "")
        with store.attach(worker_id="elsewhere", device="cpu:1") as other:
            assert other.epoch > attachment.epoch
            assert {device.worker_id for device in store.stats().devices} == {"first", "elsewhere"}
        assert len(attachment.open([OpenRequest("r", "", [1], 1)])) == 1
    store.attach(worker_id="second").close()


def test_a_worker_that_lost_its_stream_but_lives_is_killed(store: StoreProcess) -> None:
    # It still maps the memory and may write; nobody else gets it until the process is gone.
    code = (
        "a = attach(device='cpu:9'); say(a.epoch); sys.stdin.readline()\n"
        "a._session._stream.cancel(); sys.stdin.readline()\n"
    )
    with worker_process(store, code) as worker:
        assert worker.stdout
        assert worker.stdin
        worker.stdout.readline()
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.wait(60) == -signal.SIGKILL
        store.attach(device="cpu:9").close()
    assert sum(device.suspects_killed for device in store.stats().devices if device.device == "cpu:9") == 1


def test_calls_of_an_epoch_that_is_over_are_refused(store: StoreProcess) -> None:
    with store.attach() as attachment:
        epoch = attachment.epoch
        with rpc.sync_channel(f"unix:{store.socket}") as channel:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            calls: list[Callable[[], object]] = [
                lambda: stub.Open(kvstore_pb2.OpenRequest(epoch=epoch - 1)),
                lambda: stub.Reserve(kvstore_pb2.ReserveRequest(epoch=epoch - 1)),
                lambda: stub.Seal(kvstore_pb2.SealRequest(epoch=epoch - 1)),
                lambda: stub.Truncate(kvstore_pb2.TruncateRequest(epoch=epoch - 1)),
                lambda: stub.Release(kvstore_pb2.ReleaseRequest(epoch=epoch - 1)),
                lambda: stub.Release(kvstore_pb2.ReleaseRequest(epoch=epoch + 1)),  # nobody's
                lambda: stub.Open(kvstore_pb2.OpenRequest()),
            ]
            for call in calls:
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                error = rpc.error_from(caught.value)
                assert (type(error), error.reason) == (PreconditionFailed, "STALE_EPOCH")
    with pytest.raises(KvStoreLost, match="was closed"):
        attachment.open([])


def test_a_geometry_digest_that_differs_is_printed_from_both_sides(store: StoreProcess) -> None:
    error = raw_attach_error(store, kvstore_pb2.AttachRequest(open=asked(geometry_digest=b"\xab" * 16)))
    assert (type(error), error.reason) == (PreconditionFailed, "GEOMETRY_MISMATCH")
    assert "ab" * 16 in str(error)
    assert GEOMETRY.digest().hex() in str(error)


def test_another_layout_version_is_refused(store: StoreProcess) -> None:
    other = GEOMETRY.to_proto()
    other.layout_version = LAYOUT_VERSION + 1
    error = raw_attach_error(store, kvstore_pb2.AttachRequest(open=asked(geometry=other)))
    assert error.reason == "GEOMETRY_MISMATCH"
    assert f"layout {LAYOUT_VERSION + 1} (worker)" in str(error)
    assert f"layout {LAYOUT_VERSION} (store)" in str(error)


def test_a_store_that_answers_with_other_sizes_is_refused_by_the_worker(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smaller_pages(*args: object, **more: object) -> object:
        manifest, fds = fetch(*args, **more)  # type: ignore[arg-type]
        manifest.entries[1].page_bytes //= 2
        return manifest, fds

    monkeypatch.setattr("kvstore.mapping.fetch", smaller_pages)
    with pytest.raises(PreconditionFailed) as caught:
        store.attach()
    assert caught.value.reason == "GEOMETRY_MISMATCH"


@pytest.mark.parametrize(
    ("changes", "kind", "reason"),
    [
        ({"arena_bytes": 1 << 50}, CapacityError, "NOT_ENOUGH_MEMORY"),
        ({"max_sequences": 1 << 16, "max_sequence_tokens": 1 << 24}, CapacityError, "NOT_ENOUGH_MEMORY"),
        ({"arena_bytes": PAGE_BYTES - 1}, ConfigError, "ARENA_TOO_SMALL"),
        ({"max_sequences": 0}, ConfigError, "BAD_CONFIG"),
        ({"max_sequences": (1 << 16) + 1}, ConfigError, "BAD_CONFIG"),
        ({"max_sequence_tokens": 0}, ConfigError, "BAD_CONFIG"),
        ({"device": ""}, ConfigError, "BAD_CONFIG"),
        ({"device": "x" * 300}, InvalidRequest, "FIELD_TOO_LONG"),
        ({"worker_id": ""}, InvalidRequest, "INVALID_REQUEST"),
        ({"weights_digest": b"x" * 65}, InvalidRequest, "FIELD_TOO_LONG"),
    ],
)
def test_what_cannot_be_attached_is_refused_by_name(
    store: StoreProcess, changes: dict[str, object], kind: type[TailpackError], reason: str
) -> None:
    with pytest.raises(TailpackError) as caught:
        store.attach(**changes)  # type: ignore[arg-type]
    assert caught.value.reason == reason
    assert isinstance(caught.value, kind) or kind is ConfigError  # ConfigError comes back as its family
    assert caught.value.given
    assert caught.value.allowed
    store.attach().close()  # nobody else is hurt
    assert any(line["event"] == "attach refused" and reason in line["why"] for line in store.log())


def test_the_stores_own_memory_limit() -> None:
    with StoreProcess("--memory-limit", str(20 * PAGE_BYTES)) as limited:
        with pytest.raises(CapacityError) as caught:
            limited.attach(pages=21)
        assert caught.value.reason == "NOT_ENOUGH_MEMORY"
        with limited.attach(pages=12), pytest.raises(CapacityError):
            limited.attach(pages=12, device="cpu:1")
        limited.attach(pages=14).close()  # the first memory is given up for it


def test_another_geometry_gets_new_memory_after_the_first_worker_left(store: StoreProcess) -> None:
    store.attach().close()
    other = geometry(num_layers=3)
    with store.attach(geometry=other, arena_bytes=1 << 20) as attachment:
        assert attachment.arenas["full"].page_bytes == other.group("full").page_bytes
        (device,) = [d for d in store.stats().devices if d.device == "cpu:0"]
        assert device.geometry_digest == other.digest()
    with store.attach() as attachment:
        assert len(attachment.arenas["full"].buffer) == 8 * GEOMETRY.group("full").page_bytes


def test_an_attach_that_does_not_open_is_refused(store: StoreProcess) -> None:
    for messages in ([], [kvstore_pb2.AttachRequest()], [kvstore_pb2.AttachRequest(heartbeat=kvstore_pb2.Heartbeat())]):
        assert raw_attach_error(store, *messages).reason == "BAD_ATTACH"


def test_a_ticket_is_good_once_and_only_while_attached(store: StoreProcess) -> None:
    with rpc.sync_channel(f"unix:{store.socket}") as channel:
        stream = kvstore_pb2_grpc.KvStoreStub(channel).Attach(iter([kvstore_pb2.AttachRequest(open=asked(device="t"))]))
        attached = next(iter(stream)).attached
        path = Path(attached.fd_socket)
        # The request stream is at its end, so the attachment is over as soon as the store has seen that.
        assert list(stream) == []
        with pytest.raises(PermissionDenied) as caught:
            fetch(path, attached.fd_ticket, timeout_s=60)
        assert caught.value.reason == "TICKET_REFUSED"
    with pytest.raises(PermissionDenied):
        fetch(path, bytes(16), timeout_s=60)
    with store.attach() as attachment, pytest.raises(PermissionDenied):
        fetch(path, attachment._session.attached.fd_ticket, timeout_s=60)


def test_the_descriptor_socket_survives_rude_clients(store: StoreProcess) -> None:
    path = str(store.folder / "kvstore-fds.sock")
    rude = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(8)]
    for index, connection in enumerate(rude):
        connection.connect(path)
        connection.sendall(b"x" * index * 3)
    rude[0].close()
    store.attach().close()
    for connection in rude:
        connection.close()
    assert Path(path).stat().st_mode & 0o077 == 0


def test_no_store_there() -> None:
    with pytest.raises(Unavailable) as caught:
        client.attach(
            Path("/tmp/no-such-folder/kvstore.sock"),
            worker_id="w",
            device="cpu:0",
            geometry=GEOMETRY,
            arena_bytes=1 << 20,
            max_sequences=1,
            max_sequence_tokens=10,
            weights_digest=b"",
        )
    assert caught.value.reason == "KVSTORE_NOT_THERE"
    assert "/tmp/no-such-folder/kvstore.sock" in str(caught.value)


def test_the_time_to_attach_covers_all_memory_that_the_store_touches(
    store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    real = session.Session

    def watched(socket: Path, asked: kvstore_pb2.AttachOpen, timeout_s: float, on_lost: object) -> object:
        limits.append(timeout_s)
        return real(socket, asked, timeout_s, on_lost)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "Session", watched)
    with store.attach(timeout_s=1.0, max_sequences=8, max_sequence_tokens=1 << 20) as attachment:
        num_bytes = attachment.control.num_bytes + sum(len(arena.buffer) for arena in attachment.arenas.values())
        assert attachment.control.num_bytes > 30 << 20
    assert 1.0 + num_bytes / client.SLOWEST_PREFAULT <= limits[0] < 1.1 + 1.1 * num_bytes / client.SLOWEST_PREFAULT


def test_a_silent_store_ends_the_attach_in_time() -> None:
    with StoreProcess() as stopped:
        os.kill(stopped.process.pid, signal.SIGSTOP)
        try:
            started = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                stopped.attach(timeout_s=1)
            assert time.monotonic() - started < 20  # a bound, not a measurement: without one it would hang
        finally:
            os.kill(stopped.process.pid, signal.SIGCONT)


def test_many_attachments_leave_no_descriptor_and_no_memory_behind(store: StoreProcess) -> None:
    def descriptors(pid: int) -> int:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))

    store.attach().close()
    store.attach().close()
    pid = store.process.pid
    before, ours = descriptors(pid), descriptors(os.getpid())
    for index in range(30):
        attachment = store.attach(pages=8 + index % 2)  # every second one has new memory
        assert isinstance(attachment.open([OpenRequest("r", "", [1], 1)])[0], Admitted)
        attachment.close()
    eventually(lambda: descriptors(pid) <= before + 1)
    eventually(lambda: descriptors(os.getpid()) <= ours + 2)
    maps = Path(f"/proc/{pid}/maps").read_text().count("tailpack-cpu:0-")
    assert maps <= 2
