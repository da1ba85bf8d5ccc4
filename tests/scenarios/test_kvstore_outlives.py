"""Real stores and workers that die: who goes on with the memory, and who is let near it."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.client import Admitted, Attachment, OpenRequest
from kvstore.fd_server import TICKET_BYTES, fetch
from protos import kvstore_pb2, kvstore_pb2_grpc, rpc
from protos.errors import KvStoreLost, PermissionDenied, Unavailable
from tests.scenarios import test_kvstore_packed as packed
from tests.scenarios.kvstore_process import GEOMETRY, PAGE_BYTES, StoreProcess, eventually, worker_process
from tests.unit.descriptors import open_descriptors

PROMPT = list(range(200))


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kv") as made:
        yield Path(made)


def begun(attachment: Attachment, name: str = "r") -> int:
    """A sequence with 200 tokens in pages, one of them sealed."""
    (opened,) = attachment.open([OpenRequest(name, "salt", PROMPT, 300, b"frozen")])
    assert isinstance(opened, Admitted)
    pages = attachment.reserve([(opened.slot, 200, 1)])[opened.slot]
    for group, new in pages.items():
        for page in new:
            attachment.arenas[group].page(page.page_id)[:4] = struct.pack("<I", 7000 + page.index)
    attachment.control.commit(opened.slot, 200)
    attachment.seal([(opened.slot, 200, 1)])
    return opened.slot


def goes_on(attachment: Attachment, slot: int) -> None:
    """Another 100 tokens, over the pages that were there."""
    control = attachment.control
    ids = control.sequence_pages(slot, "full")
    assert [struct.unpack("<I", attachment.arenas["full"].page(page)[:4])[0] for page in ids] == [7000, 7001]
    control.append_tokens(slot, [1] * 100)
    attachment.reserve([(slot, 300, 1)])
    control.commit(slot, 300)
    assert attachment.seal([(slot, 300, 1)]).bases[slot] == {"full": 256, "window": 256}
    assert attachment.verify() == []


def test_a_new_store_takes_the_memory_over_from_a_living_worker(folder: Path) -> None:
    with StoreProcess(folder=folder) as store:
        attachment = store.attach()
        slot = begun(attachment)
        epoch, incarnation = attachment.epoch, attachment.store_incarnation
        store.stop(signal.SIGKILL)
        with pytest.raises(KvStoreLost):
            attachment.reserve([(slot, 300, 1)])
    with StoreProcess(folder=folder) as store:
        attachment.reattach(20)
        assert attachment.lost is None
        assert attachment.epoch > epoch
        assert attachment.store_incarnation != incarnation
        (adopted,) = attachment.adopted
        assert (adopted.slot, adopted.request_id, adopted.tenant_salt) == (slot, "r", "salt")
        assert (adopted.token_ids, adopted.num_committed, adopted.intact) == (PROMPT, 200, True)
        assert (adopted.frozen_request, adopted.max_tokens, adopted.num_prompt_tokens) == (b"frozen", 300, 200)
        assert {name: list(ids) for name, ids in adopted.pages.items()} == {
            name: attachment.control.sequence_pages(slot, name) for name in ("full", "window")
        }
        goes_on(attachment, slot)
        (taken,) = [line for line in store.log() if line["event"] == "memory of another store taken over"]
        assert taken["sequences"] == 1
        assert (store.device().sequences, store.device().orphans) == (1, 0)
        (cached,) = attachment.open([OpenRequest("again", "salt", PROMPT, 250)])
        assert isinstance(cached, Admitted)
        assert cached.num_cached == 128, "the prefix index is there again"
        attachment.close()
        assert store.device().sequences == 0


def test_the_memory_passes_through_many_stores(folder: Path) -> None:
    with StoreProcess(folder=folder) as store:
        attachment = store.attach()
        slot = begun(attachment)
        store.stop(signal.SIGKILL)
    for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        with StoreProcess(folder=folder) as store:
            attachment.reattach(20)
            assert attachment.verify() == []
            assert [each.slot for each in attachment.adopted] == [slot]
            store.stop(signum)
            eventually(lambda: attachment.lost is not None)
            assert not attachment.revoked, "a store that stops leaves its workers the memory"
    with StoreProcess(folder=folder) as store:
        attachment.reattach(20)
        goes_on(attachment, slot)
        attachment.close()


def test_a_store_that_nobody_brings_memory_starts_empty(folder: Path) -> None:
    with StoreProcess(folder=folder) as store:
        attachment = store.attach()
        begun(attachment)
        store.stop(signal.SIGKILL)
    with StoreProcess(folder=folder) as store:
        with store.attach(worker_id="another") as other:
            assert other.adopted == ()
            with pytest.raises(KvStoreLost, match=r"in use|OTHER_MEMORY"):
                attachment.reattach(0.5)
        with pytest.raises(KvStoreLost):
            attachment.reattach(1)
    attachment.close()


def test_reattach_waits_for_a_store_and_not_for_ever(folder: Path) -> None:
    with StoreProcess(folder=folder) as store:
        attachment = store.attach()
        slot = begun(attachment)
        attachment.reattach(5)  # it lives: nothing to do
        store.stop(signal.SIGKILL)
    eventually(lambda: attachment.lost is not None)
    with pytest.raises(KvStoreLost, match="no other one came within"):
        attachment.reattach(0.5)
    started: list[StoreProcess] = []
    later = threading.Timer(0.5, lambda: started.append(StoreProcess(folder=folder)))
    later.start()
    try:
        attachment.reattach(30)
        goes_on(attachment, slot)
        attachment.close()
    finally:
        later.join()
        started[0].stop()
    with pytest.raises(KvStoreLost):
        attachment.reattach(0.2)


def test_what_was_reserved_before_the_store_died_is_handed_out_again() -> None:
    with tempfile.TemporaryDirectory(prefix="kv") as made:
        with StoreProcess(folder=Path(made)) as store:
            attachment = packed.attach(store)
            (opened,) = attachment.open([OpenRequest("r", "", packed.PROMPT, 800)])
            assert isinstance(opened, Admitted)
            handed = attachment.reserve([(opened.slot, 400, 1)])
            assert handed[opened.slot]["full"]
            store.stop(signal.SIGKILL)
        with StoreProcess(folder=Path(made)) as store:
            attachment.reattach(20)
            again = attachment.reserve([(opened.slot, 400, 1)])
            assert again[opened.slot]["full"] == handed[opened.slot]["full"]
            attachment.control.commit(opened.slot, 400)
            first = attachment.seal([(opened.slot, 400, 1)])
            assert attachment.seal([(opened.slot, 400, 1)]).bases == first.bases, "found done"
            assert attachment.verify() == []
            attachment.close()


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda a: a.control.slots["committed"].__setitem__(0, 1 << 40), "BAD_CONTROL_BLOCK"),
        (lambda a: a.control.pages["full"]["refs"].__setitem__(0, 77), "BAD_CONTROL_BLOCK"),
        (lambda a: a._mapped.memories[1].fds, ""),  # no harm
        (lambda a: setattr(a._mapped, "memories", a._mapped.memories[::-1]), "BAD_MEMORY"),
        (lambda a: setattr(a._mapped, "memories", a._mapped.memories[1:]), "no descriptors for this ticket"),
    ],
)
def test_a_damaged_block_is_refused_and_the_store_starts_empty_when_asked_anew(
    folder: Path, harm: Callable[[Attachment], object], reason: str
) -> None:
    with StoreProcess(folder=folder) as store:
        attachment = store.attach()
        slot = begun(attachment)
        assert slot == 0
        store.stop(signal.SIGKILL)
    harm(attachment)
    with StoreProcess(folder=folder) as store:
        if not reason:
            attachment.reattach(20)
            attachment.close()
            return
        with pytest.raises(KvStoreLost, match=reason):
            attachment.reattach(20)
        assert store.process.poll() is None
        assert store.stats().devices == []
        with store.attach() as anew:
            assert anew.adopted == ()
        assert store.log()[-1]["event"] == "detached"
    attachment.close()


def test_a_worker_that_is_stopped_is_killed_before_it_can_wake_up() -> None:
    code = (
        "a = attach()\n"
        "slot = a.open([OpenRequest('r', 's', [1, 2, 3], 200, b'frozen')])[0].slot\n"
        "page = a.reserve([(slot, 3, 1)])[slot]['full'][0].page_id; a.control.commit(slot, 3)\n"
        "a.arenas['full'].page(page)[:4] = b'rows'; say(page)\n"
        "while True: a.arenas['full'].page(page)[4:8] = b'busy'\n"
    )
    with StoreProcess() as store, worker_process(store, code) as worker:
        assert worker.stdout
        page = int(worker.stdout.readline())
        time.sleep(1.5)
        assert store.device().suspects_killed == 0
        stopped = time.monotonic()
        os.kill(worker.pid, signal.SIGSTOP)
        assert worker.wait(60) == -signal.SIGKILL
        print(f"killed {time.monotonic() - stopped:.2f} s after it was stopped")
        with store.attach() as attachment:
            (adopted,) = attachment.adopted
            assert (adopted.num_committed, adopted.frozen_request) == (3, b"frozen")
            assert bytes(attachment.arenas["full"].page(page)[:8]) == b"rowsbusy"
            attachment.arenas["full"].page(page)[4:8] = b"mine"
            time.sleep(0.2)
            assert bytes(attachment.arenas["full"].page(page)[4:8]) == b"mine"
        assert store.device().suspects_killed == 1
        assert any("stopped" in line.get("why", "") for line in store.log())


def test_a_worker_that_holds_the_interpreter_for_seconds_is_not_suspect() -> None:
    """Nor one whose processors are all busy: a long prefill looks like that."""
    code = (
        "import threading, time\n"
        "a = attach(); say('attached')\n"
        "def burn():\n"
        "    while True: sum(i * i for i in range(10000))\n"
        "for _ in range(4): threading.Thread(target=burn, daemon=True).start()\n"
        "time.sleep(1.0)\n"
        "pow(3, 12_000_000); say('held')\n"  # in C, without letting go
        "sys.stdin.readline(); a.open([]); say(a.lost)\n"
    )
    with StoreProcess() as store, worker_process(store, code) as worker:
        assert worker.stdout
        assert worker.stdin
        assert worker.stdout.readline() == "attached\n"
        assert worker.stdout.readline() == "held\n"
        worker.stdin.write("\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "None\n"
        assert store.device().suspects_killed == 0


def test_a_worker_that_hangs_is_killed_after_the_timeout() -> None:
    """It lives, and its heartbeat does not: as a process would look whose every thread is stuck."""
    code = (
        "import time; from kvstore import session; session.HEARTBEAT_S = 0.05\n"
        "a = attach(); time.sleep(0.5); a._session._over.set(); say('on'); sys.stdin.readline()\n"
    )
    with StoreProcess("--heartbeat-timeout", "1.5") as store, worker_process(store, code) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == "on\n"
        assert worker.wait(60) == -signal.SIGKILL
        assert any("no heartbeat" in line.get("why", "") for line in store.log())


def test_orphans_are_released_when_nobody_comes() -> None:
    code = "a = attach(); a.open([OpenRequest('r', '', [1], 200)]); say('on'); sys.stdin.readline()\n"
    with StoreProcess("--orphan-timeout", "0.5") as store, worker_process(store, code) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == "on\n"
        os.kill(worker.pid, signal.SIGKILL)
        eventually(lambda: store.device().orphans_released == 1)
        assert [(g.pages_promised, g.pages_open) for g in store.device().groups] == [(0, 0)] * 2


def test_sockets_and_their_folder_are_this_users_alone(folder: Path) -> None:
    folder.chmod(0o755)
    with StoreProcess(folder=folder) as store:
        assert folder.stat().st_mode & 0o777 == 0o700
        for name in ("kvstore.sock", "kvstore-fds.sock"):
            assert (folder / name).stat().st_mode & 0o077 == 0, name
        assert any("this user's alone now" in line["event"] for line in store.log())


# --- hostile handshakes ---


def asked(device: str) -> kvstore_pb2.AttachOpen:
    return kvstore_pb2.AttachOpen(
        worker_id="w",
        device=device,
        geometry=GEOMETRY.to_proto(),
        geometry_digest=GEOMETRY.digest(),
        arena_bytes=8 * PAGE_BYTES,
        max_sequences=4,
        max_sequence_tokens=1024,
        holds_memory=True,
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[StoreProcess]:
    with StoreProcess() as store:
        yield store
        assert store.process.poll() is None, "it outlived them all"
        store.attach(device="cpu:last").close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.binary(max_size=64), num_fds=st.integers(0, 5))
def test_the_descriptor_socket_outlives_any_bytes(shared: StoreProcess, text: bytes, num_fds: int) -> None:
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(num_fds)]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rude:
            rude.settimeout(60)
            rude.connect(str(shared.folder / "kvstore-fds.sock"))
            try:
                socket.send_fds(rude, [text or b"x"], fds)
                rude.shutdown(socket.SHUT_WR)
                assert rude.recv(16) == b""
            except (BrokenPipeError, ConnectionResetError):
                pass
    finally:
        for fd in fds:
            os.close(fd)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_delivery_of_anything_is_refused_by_name(shared: StoreProcess, data: st.DataObject) -> None:
    """A worker that says it holds memory brings what it likes: descriptors of anything, and any number of them."""
    kinds: list[Callable[[], int]] = [
        lambda: os.open("/dev/null", os.O_RDWR),
        lambda: os.memfd_create("empty"),
        lambda: memfd(1 << 20),
        lambda: socket.socket(socket.AF_UNIX).detach(),
        lambda: os.open("/proc/self/status", os.O_RDONLY),
    ]
    wanted = 1 + len(GEOMETRY.groups)
    count = data.draw(st.one_of(st.just(wanted), st.integers(0, 6)))
    fds = [data.draw(st.sampled_from(kinds))() for _ in range(count)]
    said = data.draw(st.one_of(st.just(struct.pack("<I", count)), st.binary(min_size=1, max_size=8)))
    try:
        with rpc.sync_channel(f"unix:{shared.socket}") as channel:
            requests = Requests(asked("cpu:hostile"))
            stream = kvstore_pb2_grpc.KvStoreStub(channel).Attach(iter(requests.next, None))
            ask = next(iter(stream)).adopt
            assert [entry.kind for entry in ask.entries] == ["control", "arena", "arena"]
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(60)
                connection.connect(ask.fd_socket)
                connection.sendall(ask.fd_ticket)
                socket.send_fds(connection, [said], fds)
                kept = connection.recv(1)
            assert kept in (b"", b"K")
            if kept:
                with pytest.raises(Exception) as caught:
                    next(iter(stream))
                assert rpc.error_from(caught.value).reason in ("BAD_MEMORY", "BAD_CONTROL_BLOCK")  # type: ignore[arg-type]
            requests.end()
            stream.cancel()
    finally:
        for fd in fds:
            os.close(fd)
    eventually(lambda: not any(device.device == "cpu:hostile" for device in shared.stats().devices))


class Requests:
    """The request side of a stream, held open until it is ended."""

    def __init__(self, first: kvstore_pb2.AttachOpen) -> None:
        self._first: kvstore_pb2.AttachOpen | None = first
        self._over = threading.Event()

    def next(self) -> kvstore_pb2.AttachRequest | None:
        if self._first is not None:
            first, self._first = self._first, None
            return kvstore_pb2.AttachRequest(open=first)
        self._over.wait(30)
        return None

    def end(self) -> None:
        self._over.set()


def memfd(num_bytes: int) -> int:
    fd = os.memfd_create("some", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    return fd


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(answer=st.binary(max_size=200), num_fds=st.integers(0, 4))
def test_a_worker_outlives_any_store(answer: bytes, num_fds: int) -> None:
    """What answers on the descriptor socket is not believed either; descriptors that come are closed."""
    before = open_descriptors()
    with tempfile.TemporaryDirectory(prefix="kv") as made:
        path = Path(made) / "fds"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(path))
        listener.listen(1)

        def serve() -> None:
            connection, _ = listener.accept()
            fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(num_fds)]
            with connection:
                connection.recv(TICKET_BYTES)
                if answer:
                    socket.send_fds(connection, [answer], fds)
            for fd in fds:
                os.close(fd)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            _, fds = fetch(path, bytes(TICKET_BYTES), timeout_s=60)
            for fd in fds:
                os.close(fd)
        except (PermissionDenied, Unavailable):
            pass
        thread.join(60)
        listener.close()
    assert not open_descriptors() - before


def test_another_users_process_gets_nothing(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with StoreProcess(folder=folder) as store:
        folder.chmod(0o711)  # as if somebody had opened it again
        (folder / "kvstore-fds.sock").chmod(0o666)
        code = (
            "import os, socket, sys; os.setuid(65534)\n"
            "for name in ('kvstore.sock', 'kvstore-fds.sock'):\n"
            "    s = socket.socket(socket.AF_UNIX); s.settimeout(60)\n"
            "    try: s.connect(sys.argv[1] + '/' + name); s.sendall(b'x' * 16); print(name, s.recv(10))\n"
            "    except OSError as refused: print(name, type(refused).__name__)\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=30, check=True
        )
        grpc_socket, fd_socket = done.stdout.splitlines()
        assert grpc_socket == "kvstore.sock PermissionError"
        ends = ("b''", "ConnectionResetError", "BrokenPipeError")  # by what came of its bytes first
        assert fd_socket in [f"kvstore-fds.sock {end}" for end in ends]
        eventually(lambda: any("another user" in line["event"] for line in store.log()))
