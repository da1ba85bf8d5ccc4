"""What the service does where a real process is hard to bring: slow allocations, lost callers, broken invariants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.answers import Admitted
from kvstore.attachments import Attached, Attachments
from kvstore.device import Device, DeviceSpec, NewSequence
from kvstore.fd_server import FdServer
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from kvstore.pages import PageState
from kvstore.service import KvStoreService
from kvstore.suspects import Holder
from kvstore.weights import WeightsStore
from protos import kvstore_pb2
from protos.errors import InternalError, PreconditionFailed, Unavailable

GEOMETRY = CacheGeometry((LayerGroup("full", (Region(0, "k", 1, 16, "float32"),)),))
SPEC = DeviceSpec("cpu:0", GEOMETRY, 8 * GEOMETRY.groups[0].page_bytes, 2, 256, b"w")
CONTEXT: Any = None


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Attachments]:
    made = Attachments(FdServer(tmp_path / "fds"), incarnation="test")
    yield made
    made.close()


@pytest.fixture
def service(held: Attachments) -> KvStoreService:
    return KvStoreService(held, WeightsStore(held._fd_server), incarnation="test")


async def attach(held: Attachments, spec: DeviceSpec, worker_id: str) -> Attached:
    with held._claimed(spec.device) as claim:
        return await held._attach(spec, worker_id, claim)


class SlowAllocation:
    """Of memory: it is under way until ``go_on``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on, self._began = threading.Event(), threading.Event()
        real = Device.allocate

        def allocate(spec: DeviceSpec, fds: Sequence[int]) -> Device:
            self._began.set()
            assert self.go_on.wait(60)
            return real(spec, fds)

        monkeypatch.setattr(Device, "allocate", staticmethod(allocate))

    async def began(self) -> None:
        assert await asyncio.to_thread(self._began.wait, 60)


async def test_a_device_that_is_being_made_is_busy(held: Attachments, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowAllocation(monkeypatch)
    attaching = [asyncio.create_task(attach(held, SPEC, f"w{i}")) for i in range(3)]
    await asyncio.wait(attaching[1:])
    slow.go_on.set()
    results = await asyncio.gather(*attaching, return_exceptions=True)
    assert [getattr(r, "worker_id", None) or getattr(r, "reason", None) for r in results] == [
        "w0",
        "DEVICE_BUSY",
        "DEVICE_BUSY",
    ]


async def test_devices_made_at_the_same_time_share_the_memory_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowAllocation(monkeypatch)
    limited = Attachments(FdServer(tmp_path / "fds"), incarnation="test", memory_limit=2 * SPEC.host_bytes)
    specs = [replace(SPEC, device=f"cpu:{i}") for i in range(3)]
    attaching = [asyncio.create_task(attach(limited, spec, "w")) for spec in specs]
    await slow.began()
    slow.go_on.set()
    results = await asyncio.gather(*attaching, return_exceptions=True)
    assert [getattr(r, "reason", "attached") for r in results] == ["attached", "attached", "NOT_ENOUGH_MEMORY"]
    assert sum(device.spec.host_bytes for device in limited.devices.values()) <= 2 * SPEC.host_bytes
    limited.close()


async def test_a_caller_that_leaves_meanwhile_leaves_the_memory_to_the_next(
    held: Attachments, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowAllocation(monkeypatch)
    first = asyncio.create_task(attach(held, SPEC, "gone"))
    await slow.began()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    with pytest.raises(PreconditionFailed):
        await attach(held, SPEC, "early")
    slow.go_on.set()
    while held._attaching:
        await asyncio.sleep(0.01)
    kept = held.devices["cpu:0"]
    attached = await attach(held, SPEC, "next")
    assert attached.device is kept


async def test_a_store_that_stops_meanwhile_attaches_nobody(held: Attachments, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowAllocation(monkeypatch)
    first = asyncio.create_task(attach(held, SPEC, "late"))
    await slow.began()
    held.revoke_all("test")
    slow.go_on.set()
    with pytest.raises(Unavailable) as caught:
        await first
    assert caught.value.reason == "STOPPING"
    with pytest.raises(Unavailable):
        await attach(held, SPEC, "later")


async def test_a_failed_allocation_frees_the_name(held: Attachments, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(spec: DeviceSpec, fds: Sequence[int]) -> Device:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Device, "allocate", staticmethod(allocate))
        with pytest.raises(MemoryError):
            await attach(held, SPEC, "first")
    assert (await attach(held, SPEC, "second")).worker_id == "second"


async def test_a_holder_that_is_not_visible_keeps_its_memory(held: Attachments) -> None:
    # Another pid namespace: the store cannot see when it is gone, so the next worker gets memory of its own.
    attached = await attach(held, SPEC, "hidden")
    attached.taken_by(Holder(0))
    held._detach(attached, "lost", goodbye=False)
    assert (await attach(held, SPEC, "next")).device is not attached.device


async def test_a_verify_of_many_pages_lets_other_calls_run(
    held: Attachments, service: KvStoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.service.VERIFY_SLICE_PAGES", 2)
    device = (await attach(held, SPEC, "w")).device
    (result,) = device.open([NewSequence("r", "", [1] * 256, 256, b"")])
    assert isinstance(result, Admitted)
    pages = device.reserve([(result.slot, 256, 1)])[result.slot]["full"]
    device.control.commit(result.slot, 256)
    device.seal([(result.slot, 256, 1)], {("full", page.page_id): 7 for page in pages})
    order: list[str] = []

    async def other() -> None:
        for _ in range(3):
            order.append("call")
            await asyncio.sleep(0)

    real = device.verifier.checksums

    def checksums(pages: range | None = None) -> tuple[list[str], int]:
        order.append("slice")
        return real(pages)

    monkeypatch.setattr(device.verifier, "checksums", checksums)
    answer, _ = await asyncio.gather(service.Verify(kvstore_pb2.VerifyRequest(), CONTEXT), other())
    assert order[:6] == ["slice", "call"] * 3
    assert (answer.pages_checked, answer.pages_unreadable, len(answer.problems)) == (2, 0, 2)
    arena = device.arenas.pages["full"]
    in_a_gpu = replace(arena.memory, chunk_bytes=(arena.memory.num_bytes,))
    device.arenas.pages["full"] = replace(arena, memory=in_a_gpu)
    answer = await service.Verify(kvstore_pb2.VerifyRequest(), CONTEXT)
    assert (answer.pages_checked, answer.pages_unreadable, len(answer.problems)) == (0, 2, 0)


async def test_a_broken_invariant_fails_the_store(held: Attachments, service: KvStoreService) -> None:
    attached = await attach(held, SPEC, "w")
    (result,) = attached.device.open([NewSequence("r", "", [1], 200, b"")])
    assert isinstance(result, Admitted)
    attached.device.reserve([(result.slot, 200, 1)])
    attached.device.table.groups["full"]._state[0] = PageState.FREE
    assert not held.failed.is_set()
    with pytest.raises(InternalError, match="page 0 is FREE"):
        await service.Release(kvstore_pb2.ReleaseRequest(epoch=attached.epoch, slots=[result.slot]), CONTEXT)
    assert held.failed.is_set()


async def test_an_invariant_that_breaks_in_a_detach_fails_the_store(
    held: Attachments, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise InternalError("the tables are at odds")

    attached = await attach(held, SPEC, "w")
    monkeypatch.setattr(attached.device, "release_all", broken)
    with pytest.raises(InternalError):
        held._detach(attached, "test", goodbye=True)
    assert held.failed.is_set()
    assert not held.attached, "nobody holds the device any more"


async def test_mistakes_of_a_caller_do_not_fail_the_store(held: Attachments, service: KvStoreService) -> None:
    attached = await attach(held, SPEC, "w")
    with pytest.raises(Exception, match="no such sequence"):
        await service.Release(kvstore_pb2.ReleaseRequest(epoch=attached.epoch, slots=[1]), CONTEXT)
    assert not held.failed.is_set()


async def test_epochs_grow(held: Attachments, tmp_path: Path) -> None:
    epochs = []
    for _ in range(3):
        attached = await attach(held, SPEC, "w")
        epochs.append(attached.epoch)
        held._detach(attached, "test", goodbye=True)
    assert epochs == sorted(set(epochs))
    await asyncio.sleep(0.01)
    later = Attachments(FdServer(tmp_path / "other"), incarnation="later")
    assert (await attach(later, SPEC, "w")).epoch > epochs[-1]
    later.close()


async def gpu_attach(stays_s: float) -> AsyncIterator[kvstore_pb2.AttachRequest]:
    """A worker on a GPU that asks for memory, says no more, and leaves."""
    asked = kvstore_pb2.AttachOpen(
        worker_id="slow",
        device="cuda:GPU-0",
        geometry=GEOMETRY.to_proto(),
        geometry_digest=GEOMETRY.digest(),
        arena_bytes=SPEC.arena_bytes,
        max_sequences=2,
        max_sequence_tokens=256,
        memory_granularity=4096,
    )
    yield kvstore_pb2.AttachRequest(open=asked)
    await asyncio.sleep(stays_s)


@pytest.mark.parametrize(("limit_s", "stays_s", "why"), [(0.05, 60, "did not bring within"), (60, 0.05, "left before")])
async def test_memory_that_is_not_delivered_is_not_waited_for(
    held: Attachments,
    service: KvStoreService,
    monkeypatch: pytest.MonkeyPatch,
    limit_s: float,
    stays_s: float,
    why: str,
) -> None:
    monkeypatch.setattr("kvstore.attach_stream.BRING_TIMEOUT_S", limit_s)
    answers = service.Attach(gpu_attach(stays_s), CONTEXT)
    assert (await anext(answers)).WhichOneof("message") == "create"
    assert held._attaching == {"cuda:GPU-0"}
    with pytest.raises(Unavailable, match=why) as caught:
        await asyncio.wait_for(anext(answers), 60)
    assert caught.value.reason == "MEMORY_NOT_DELIVERED"
    assert (held._attaching, held._fd_server._parcels, held.devices) == (set(), {}, {})
