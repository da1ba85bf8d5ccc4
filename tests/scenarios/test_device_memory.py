"""A GPU's memory in a real store, with real workers: made by the first, held by the store, mapped by the next."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvstore.arena import CHUNK_BYTES, MAX_CHUNKS
from kvstore.client import Admitted, Attachment, Forked, OpenRequest
from kvstore.fd_server import deliver, fetch
from kvstore.geometry import CacheGeometry, LayerGroup, Region, apply_mode
from protos import kvstore_pb2, kvstore_pb2_grpc, rpc
from protos.errors import (
    CapacityError,
    PermissionDenied,
    PreconditionFailed,
    TailpackError,
    Unavailable,
)
from tests.scenarios.fake_gpu import (
    DEVICE,
    GRANULARITY,
    WORKER,
    FakeGpu,
    Memory,
    attach,
    descriptors,
    mappings,
    tensors,
)
from tests.scenarios.kvstore_process import GEOMETRY, PAGE_BYTES, StoreProcess, eventually, geometry, worker_process
from worker.device_memory import DeviceArena
from worker.kv_view import KvView

TURBOQUANT = apply_mode(
    CacheGeometry((LayerGroup("full", tuple(Region(0, kind, 1, 64, "float32") for kind in "kv")),)), "turboquant", "tq4"
)


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    with StoreProcess() as running:
        yield running
    assert descriptors() == 0
    eventually(lambda: mappings() == 0)


def whole(num_bytes: int) -> int:
    return -(-num_bytes // GRANULARITY) * GRANULARITY


def random_bytes(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def test_a_killed_workers_bytes_are_there_for_the_next(store: StoreProcess) -> None:
    code = (
        WORKER + "import torch; gpu = FakeGpu(); memory = Memory(gpu); a = attach_gpu(memory)\n"
        "for seed, pages in enumerate(tensors(a, gpu).values()):\n"
        "    assert not pages.any(), 'not zeroed'\n"
        "    pages[:] = torch.randint(0, 256, pages.shape, dtype=torch.uint8,\n"
        "        generator=torch.Generator().manual_seed(seed))\n"
        "say(len(memory.asked)); sys.stdin.readline()\n"
    )
    with worker_process(store, code) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == "1\n"
        held = descriptors(store.process.pid)
        assert held == len(GEOMETRY.groups)
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(60)
    assert descriptors(store.process.pid) == held, "the store alone keeps the memory"
    gpu = FakeGpu()
    memory = Memory(gpu)
    with attach(store, memory) as attachment:
        assert memory.asked == []
        for seed, pages in enumerate(tensors(attachment, gpu).values()):
            assert torch.equal(pages, random_bytes(pages.shape, seed))


def test_an_arena_of_several_chunks_is_one_range_of_addresses(store: StoreProcess) -> None:
    group = LayerGroup("full", tuple(Region(layer, "k", 8, 128, "float32") for layer in range(64)))  # 32 MiB a page
    large = CacheGeometry((group,))
    num_pages = 5 * CHUNK_BYTES // 2 // group.page_bytes
    gpu = FakeGpu()
    memory = Memory(gpu)
    with attach(store, memory, geometry=large, arena_bytes=num_pages * group.page_bytes) as attachment:
        assert memory.asked == [[CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES // 2]]
        pages = tensors(attachment, gpu)["full"]
        assert pages.shape == (num_pages, group.page_bytes)
        for page in (0, CHUNK_BYTES // group.page_bytes, num_pages - 1):  # memory that is not touched takes none
            pages[page, -8:] = page
        assert pages.view(-1)[CHUNK_BYTES - 4 : CHUNK_BYTES + 4].tolist() == [0] * 8
        pages.view(-1)[CHUNK_BYTES - 4 : CHUNK_BYTES + 4] = 7
        del pages
        again = tensors(attachment, gpu)["full"].view(-1)
        assert again[CHUNK_BYTES - 4 : CHUNK_BYTES + 4].tolist() == [7] * 8
        assert again[-8:].tolist() == [num_pages - 1] * 8


def test_the_store_decides_sizes_and_tells_them(store: StoreProcess) -> None:
    memory = Memory(FakeGpu())
    arena_bytes = 60 * PAGE_BYTES
    with attach(store, memory, geometry=TURBOQUANT, arena_bytes=arena_bytes, checkpoint_slots=2) as attachment:
        tails = 6 * TURBOQUANT.tail_bytes
        (group,) = TURBOQUANT.groups
        num_pages = (arena_bytes - tails) // group.page_bytes
        assert attachment.arenas["full"].num_pages == num_pages
        assert attachment.tails["full"].num_pages == 6
        assert memory.asked == [[whole(num_pages * group.page_bytes), whole(tails)]]
        device = store.device()
        assert (device.device, device.memory) == (DEVICE, "device")
        assert device.groups[0].arena_bytes == sum(memory.asked[0])
        assert device.control_bytes == attachment.control.num_bytes
        with store.attach() as host:
            assert {d.device: d.memory for d in store.stats().devices} == {DEVICE: "device", "cpu:0": "host"}
            assert host.arenas["full"].chunks is None
    (attached,) = [line for line in store.log() if line["event"] == "attached" and line["device"] == DEVICE]
    assert attached["device_bytes"] == sum(memory.asked[0])
    assert attached["host_bytes"] == device.control_bytes


def test_calls_work_on_device_pages_as_on_any(store: StoreProcess) -> None:
    gpu = FakeGpu()
    with attach(store, Memory(gpu)) as a:
        (opened,) = a.open([OpenRequest("r", "", [1] * 300, 400)])
        assert isinstance(opened, Admitted)
        handed = a.reserve([(opened.slot, 300, 1)])[opened.slot]
        pages = tensors(a, gpu)
        for group, new in handed.items():
            for page in new:
                pages[group][page.page_id] = page.page_id
        a.control.commit(opened.slot, 300)
        wrong = {("full", page.page_id): 12345 for page in handed["full"][:2]}
        assert a.seal([(opened.slot, 300, 1)], wrong).pages_sealed == 4
        assert a.verify() == [], "the store cannot read these pages"
        with rpc.sync_channel(f"unix:{store.socket}") as channel:
            answer = kvstore_pb2_grpc.KvStoreStub(channel).Verify(kvstore_pb2.VerifyRequest())
        assert answer.pages_checked == 0
        entry = a.control.pages["full"][handed["full"][0].page_id]
        assert entry["checksum"] == 12345, "it is kept all the same"
        forked = a.fork(opened.slot, "f", 400)
        assert isinstance(forked, Forked)
        assert a.truncate(opened.slot, 200).exact
        assert a.release([opened.slot, forked.slot]) > 0


def test_a_view_of_the_cache_is_over_the_shared_memory(store: StoreProcess) -> None:
    for life in range(2):
        gpu = FakeGpu()
        with attach(store, Memory(gpu), geometry=TURBOQUANT, arena_bytes=40 * PAGE_BYTES) as attachment:
            view = KvView(TURBOQUANT, attachment.arenas, attachment.tails, gpu)
            tail = view.view(0, "k").tail
            assert tail is not None
            if life == 0:
                tail[3] = 2.5
                view.copy_tail("full", 3, 1)
            assert tail[[0, 1, 2, 3], 0, 0, 0].tolist() == [0.0, 2.5, 0.0, 2.5]
            assert bytes(view.page_memory("full", 0)) == bytes(TURBOQUANT.groups[0].page_bytes)
            del tail, view


def test_views_keep_the_memory_mapped_and_the_last_one_unmaps_it(store: StoreProcess) -> None:
    gpu = FakeGpu()
    attachment = attach(store, Memory(gpu))
    arena = DeviceArena.of(gpu, attachment.arenas["full"])
    gpu.calls.clear()
    view = arena.tensor().view(-1)[5:]
    arena.close()
    arena.close()
    attachment.close()
    view[:] = 1
    assert int(view.sum(dtype=torch.int64)) == arena.num_bytes - 5
    assert (gpu.calls, mappings()) == ([], 1)
    del view
    eventually(lambda: mappings() == 0)
    assert gpu.calls == ["synchronize", "unmap", "free"]


def test_another_geometry_gets_new_memory_and_the_old_goes(store: StoreProcess) -> None:
    memory = Memory(FakeGpu())
    attach(store, memory).close()
    attach(store, memory).close()
    assert len(memory.asked) == 1
    held = descriptors(store.process.pid)
    with attach(store, memory, geometry=geometry(num_layers=3), arena_bytes=1 << 20) as attachment:
        assert len(memory.asked) == 2
        assert descriptors(store.process.pid) == held
        assert not tensors(attachment, FakeGpu())["full"].any()
    attach(store, memory, pages=9).close()  # another size, too
    assert len(memory.asked) == 3
    for _ in range(20):
        attach(store, memory, pages=8 + len(memory.asked) % 2).close()
    assert descriptors(store.process.pid) == held


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"arena_bytes": PAGE_BYTES - 1}, "ARENA_TOO_SMALL"),
        ({"max_sequence_tokens": 1 << 17}, "NOT_ENOUGH_MEMORY"),  # of the store's limit, for the control block
    ],
)
def test_a_worker_that_cannot_be_served_does_not_cost_the_memory_that_is_kept(
    changes: dict[str, int], reason: str
) -> None:
    with StoreProcess("--memory-limit", str(1 << 20)) as limited:
        memory = Memory(FakeGpu())
        attach(limited, memory).close()
        with pytest.raises(TailpackError) as caught:
            attach(limited, memory, **changes)
        assert caught.value.reason == reason
        attach(limited, memory).close()
        assert len(memory.asked) == 1


def test_a_gpu_without_room_is_named_and_leaves_nothing(store: StoreProcess) -> None:
    room = whole(8 * GEOMETRY.group("full").page_bytes)  # for the first arena, not for the second
    with pytest.raises(CapacityError) as caught:
        attach(store, Memory(FakeGpu(room)))
    assert caught.value.reason == "NOT_ENOUGH_MEMORY"
    total = room + whole(8 * GEOMETRY.group("window").page_bytes)
    assert f"{total} bytes; {room} were there" in str(caught.value)
    assert (descriptors(), mappings()) == (0, 0)
    eventually(lambda: _can_attach(store))


def test_a_store_that_dies_before_the_delivery(store: StoreProcess) -> None:
    def kill() -> None:
        store.stop(signal.SIGKILL)

    with pytest.raises(Unavailable):
        attach(store, Memory(FakeGpu(), kill), timeout_s=60)


def test_a_store_that_dies_in_the_delivery(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(path: Path, ticket: bytes, fds: list[int], *, timeout_s: float) -> None:
        store.stop(signal.SIGKILL)
        raise PermissionDenied("what the end of the connection looks like", reason="TICKET_REFUSED")

    monkeypatch.setattr("kvstore.session.deliver", dies)
    with pytest.raises(Unavailable) as caught:
        attach(store, Memory(FakeGpu()), timeout_s=60)
    assert caught.value.reason == "KVSTORE_NOT_THERE"


def test_a_worker_that_dies_before_the_delivery(store: StoreProcess) -> None:
    code = WORKER + "def wait():\n    say('made'); sys.stdin.readline()\nattach_gpu(Memory(FakeGpu(), wait))\n"
    with worker_process(store, code) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == "made\n"
        with pytest.raises(PreconditionFailed) as caught:
            attach(store, Memory(FakeGpu()))
        assert caught.value.reason == "DEVICE_BUSY"
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(60)
    eventually(lambda: _can_attach(store))
    memory = Memory(FakeGpu())
    attach(store, memory).close()
    assert memory.asked == []


def _can_attach(store: StoreProcess) -> bool:
    try:
        attach(store, Memory(FakeGpu())).close()
    except PreconditionFailed as busy:
        assert busy.reason == "DEVICE_BUSY"
        return False
    return True


def test_a_worker_that_dies_after_the_delivery_leaves_the_memory_to_the_next(store: StoreProcess) -> None:
    code = (
        WORKER + "def fetch(*args, **more):\n"
        "    say('delivered'); sys.stdin.readline()\n"
        "mapping.fetch = fetch\n"
        "attach_gpu(Memory(FakeGpu()))\n"
    )
    with worker_process(store, code) as worker:
        assert worker.stdout
        assert worker.stdout.readline() == "delivered\n"
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait(60)
    eventually(lambda: not store.device().worker_id)
    gpu = FakeGpu()
    memory = Memory(gpu)
    with attach(store, memory) as attachment:
        assert memory.asked == []
        assert not tensors(attachment, gpu)["full"].any()


def test_what_is_delivered_must_be_what_is_asked_for(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_less(path: Path, ticket: bytes, fds: list[int], *, timeout_s: float) -> None:
        deliver(path, ticket, fds[1:], timeout_s=timeout_s)

    with monkeypatch.context() as patch:
        patch.setattr("kvstore.session.deliver", one_less)
        with pytest.raises(PermissionDenied) as caught:
            attach(store, Memory(FakeGpu()))
        assert caught.value.reason == "TICKET_REFUSED"
    eventually(lambda: any("not what is expected" in line["event"] for line in store.log()))
    assert descriptors(store.process.pid) == 0
    eventually(lambda: _can_attach(store))


def test_tickets_are_good_once_and_for_one_thing(store: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[Path, bytes]] = []

    def refused(path: Path, ticket: bytes, fds: list[int]) -> None:
        with pytest.raises(PermissionDenied) as caught:
            deliver(path, ticket, fds, timeout_s=60)
        assert caught.value.reason == "TICKET_REFUSED"

    def delivers(path: Path, ticket: bytes, fds: list[int], *, timeout_s: float) -> None:
        refused(path, bytes(16), fds)
        deliver(path, ticket, fds, timeout_s=timeout_s)
        refused(path, ticket, fds)
        used.append((path, ticket))

    monkeypatch.setattr("kvstore.session.deliver", delivers)
    with attach(store, Memory(FakeGpu())) as attachment:
        (path, ticket) = used[0]
        with pytest.raises(PermissionDenied):
            fetch(path, ticket, timeout_s=60)
        with pytest.raises(PermissionDenied):
            fetch(path, attachment._session.attached.fd_ticket, timeout_s=60)
    assert descriptors(store.process.pid) == len(GEOMETRY.groups)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device_memory": None}, "BAD_CONFIG"),
        ({"device": "cpu:0"}, "BAD_CONFIG"),
        ({"arena_bytes": PAGE_BYTES - 1}, "ARENA_TOO_SMALL"),
        ({"max_sequences": 1 << 16, "max_sequence_tokens": 1 << 24}, "NOT_ENOUGH_MEMORY"),  # the control block's
    ],
)
def test_what_cannot_be_attached_is_refused_before_memory_is_made_or_gives_it_back(
    store: StoreProcess, changes: dict[str, object], reason: str
) -> None:
    with pytest.raises(TailpackError) as caught:
        attach(store, Memory(FakeGpu()), **changes)
    assert caught.value.reason == reason
    assert descriptors(store.process.pid) == 0


@pytest.mark.parametrize("granularity", [1, 2048, 3 << 20, 1 << 31])
def test_an_odd_granularity_is_refused(store: StoreProcess, granularity: int) -> None:
    memory = Memory(FakeGpu())
    memory.granularity = granularity
    with pytest.raises(PreconditionFailed, match="memory_granularity is out of range"):
        attach(store, memory)


def test_device_memory_does_not_count_against_the_stores_memory_limit() -> None:
    with StoreProcess("--memory-limit", str(1 << 20)) as limited:
        attachment: Attachment
        with attach(limited, Memory(FakeGpu()), arena_bytes=64 << 20, max_sequences=1) as attachment:
            assert attachment.control.num_bytes < 1 << 20 < 60 << 20 < limited.device().groups[0].arena_bytes * 2
            with pytest.raises(CapacityError):
                limited.attach(arena_bytes=2 << 20)
            limited.attach(pages=1, max_sequences=1).close()
        with pytest.raises(CapacityError, match="memory limit"):
            attach(limited, Memory(FakeGpu()), max_sequences=4, max_sequence_tokens=1 << 17)


def test_the_store_may_hold_the_descriptors_of_many_gpus(store: StoreProcess) -> None:
    soft, hard = resource.prlimit(store.process.pid, resource.RLIMIT_NOFILE)
    assert soft >= min(hard, 8 * MAX_CHUNKS)


def test_no_attachment_needs_more_descriptors_than_one_message_carries(store: StoreProcess) -> None:
    group = LayerGroup("full", tuple(Region(layer, "k", 8, 512, "float32") for layer in range(512)))  # 1 GiB a page
    memory = Memory(FakeGpu())
    large = CacheGeometry((group,))
    with attach(store, memory, geometry=large, arena_bytes=2 * MAX_CHUNKS * group.page_bytes, max_sequences=1):
        assert len(memory.asked[0]) == MAX_CHUNKS
        assert set(memory.asked[0]) == {2 * CHUNK_BYTES}
