"""Who is suspect, when; what becomes of sequences that nobody adopts. In one process, with processes as victims."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore.answers import Admitted
from kvstore.attachments import Attached, Attachments
from kvstore.device import DeviceSpec, NewSequence
from kvstore.fd_server import FdServer
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from kvstore.suspects import Holder, Pulse
from protos.errors import PreconditionFailed

GEOMETRY = CacheGeometry((LayerGroup("full", (Region(0, "k", 1, 16, "float32"),)),))
SPEC = DeviceSpec("cpu:0", GEOMETRY, 8 * GEOMETRY.groups[0].page_bytes, 2, 256, b"w")


@pytest.fixture
async def held(tmp_path: Path) -> AsyncIterator[Attachments]:
    made = Attachments(FdServer(tmp_path / "fds"), incarnation="t", heartbeat_timeout_s=10.0, orphan_timeout_s=120.0)
    yield made
    made.close()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(60)


async def attach(held: Attachments, victim: subprocess.Popen[bytes] | None = None) -> Attached:
    with held._claimed(SPEC.device) as claim:
        attached = await held._attach(SPEC, "w", claim)
    if victim:
        attached.taken_by(Holder(victim.pid))
    attached.pulse.beat(0.0)
    return attached


def test_a_pulse_counts_what_it_did_not_hear() -> None:
    pulse = Pulse(5.0)
    assert pulse.silent_s(100.0) == 0.0, "an older worker sends none"
    pulse.beat(6.0)
    assert pulse.silent_s(7.5) == 1.5
    pulse.forgive(9.0)
    assert pulse.silent_s(9.5) == 0.5
    pulse.forgive(1.0)
    assert pulse.silent_s(9.5) == 0.5


async def test_a_busy_worker_is_suspect_only_after_the_timeout(
    held: Attachments, victim: subprocess.Popen[bytes]
) -> None:
    attached = await attach(held, victim)
    held.look(9.9)
    assert not attached.revoked.done()
    assert victim.poll() is None
    held.look(10.1)
    assert "no heartbeat for 10.1 s" in attached.revoked.result()
    assert victim.wait(60) == -signal.SIGKILL
    assert held.counts["suspects_killed", "cpu:0"] == 1


async def test_a_stopped_worker_is_suspect_after_a_second(held: Attachments, victim: subprocess.Popen[bytes]) -> None:
    attached = await attach(held, victim)
    os.kill(victim.pid, signal.SIGSTOP)
    while not Holder(victim.pid).is_stopped():
        await asyncio.sleep(0.01)
    held.look(0.9)
    assert not attached.revoked.done(), "its heartbeats may be under way"
    held.look(1.1)
    assert "stopped" in attached.revoked.result()
    assert victim.wait(60) == -signal.SIGKILL


async def test_a_worker_whose_process_is_gone_is_suspect_after_a_second(
    held: Attachments, victim: subprocess.Popen[bytes]
) -> None:
    attached = await attach(held, victim)
    victim.kill()
    victim.wait(60)
    held.look(1.1)
    assert "gone" in attached.revoked.result()
    assert held.counts["suspects_killed", "cpu:0"] == 0, "its pid may be another's by now"


async def test_who_sends_no_heartbeats_is_never_suspect_for_that(
    held: Attachments, victim: subprocess.Popen[bytes]
) -> None:
    attached = await attach(held, victim)
    attached.pulse = Pulse(0.0)
    held.look(1e6)
    assert not attached.revoked.done()


async def test_the_device_is_busy_until_the_suspect_is_gone(
    held: Attachments, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.attachments.SUSPECT_WAIT_S", 0.05)
    attached = await attach(held, victim)
    monkeypatch.setattr(Holder, "kill", lambda self: False)
    held._detach(attached, "lost", goodbye=False)
    with pytest.raises(PreconditionFailed, match="still maps the memory") as caught:
        await attach(held)
    assert caught.value.reason == "DEVICE_BUSY"
    victim.kill()
    victim.wait(60)
    assert (await attach(held)).epoch > attached.epoch


async def test_the_device_is_busy_until_its_pages_are_compared_also_where_who_asked_went_away(
    held: Attachments, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await attach(held)
    first.device.open([NewSequence("r", "", [1, 2], 200, b"")])
    held._detach(first, "lost", goodbye=False)
    begun, go_on = threading.Event(), threading.Event()

    def compare() -> None:
        begun.set()
        go_on.wait(20)

    monkeypatch.setattr(first.device, "compare_pages", compare)
    going_away = asyncio.create_task(attach(held))
    try:
        assert await asyncio.to_thread(begun.wait, 20)
        going_away.cancel()
        with pytest.raises(asyncio.CancelledError):
            await going_away
        with pytest.raises(PreconditionFailed, match="attaches now"):
            await attach(held)
        held.look(1e9)  # nor are its sequences taken from under the thread that reads
        assert held.num_orphans("cpu:0") == 1
    finally:
        go_on.set()
    while held._attaching:
        await asyncio.sleep(0.01)
    assert [each.request_id for each in (await attach(held)).adopted] == ["r"]


async def test_a_goodbye_leaves_no_suspect_and_no_sequence(held: Attachments, victim: subprocess.Popen[bytes]) -> None:
    attached = await attach(held, victim)
    attached.device.open([NewSequence("r", "", [1, 2], 200, b"")])
    held._detach(attached, "bye", goodbye=True)
    assert victim.poll() is None
    assert (held.num_orphans("cpu:0"), len(attached.device.table)) == (0, 0)
    assert (await attach(held)).adopted == []


async def test_orphans_wait_and_are_released_when_nobody_comes(
    held: Attachments, victim: subprocess.Popen[bytes]
) -> None:
    for late in (False, True):
        attached = await attach(held)
        (opened,) = attached.device.open([NewSequence("r", "", [1, 2], 200, b"")])
        assert isinstance(opened, Admitted)
        held._detach(attached, "lost", goodbye=False)
        now = time.monotonic()
        held.look(now + (121.0 if late else 119.0))
        assert held.num_orphans("cpu:0") == (0 if late else 1)
        again = await attach(held)
        assert [each.request_id for each in again.adopted] == ([] if late else ["r"])
        held.look(now + 1e6)
        assert len(again.device.table) == (0 if late else 1), "what is adopted is no orphan"
        held._detach(again, "bye", goodbye=True)
    assert held.counts["orphans_released", "cpu:0"] == 1
    assert held.counts["sequences_adopted", "cpu:0"] == 1


async def test_orphans_go_with_the_memory_where_another_spec_is_asked_for(held: Attachments) -> None:
    attached = await attach(held)
    attached.device.open([NewSequence("r", "", [1, 2], 200, b"")])
    held._detach(attached, "lost", goodbye=False)
    other = DeviceSpec("cpu:0", GEOMETRY, SPEC.arena_bytes, 3, 256, b"w")
    with held._claimed("cpu:0") as claim:
        assert (await held._attach(other, "w", claim)).adopted == []
    assert held.counts["orphans_released", "cpu:0"] == 1


async def test_an_older_worker_gets_no_orphans(held: Attachments) -> None:
    attached = await attach(held)
    attached.device.open([NewSequence("r", "", [1, 2], 200, b"")])
    held._detach(attached, "lost", goodbye=False)
    with held._claimed("cpu:0") as claim:
        again = await held._attach(SPEC, "w", claim, adopts=False)
    assert (again.adopted, len(again.device.table)) == ([], 0)


async def test_what_cannot_be_adopted_is_refused_once_and_then_the_store_starts_empty(held: Attachments) -> None:
    attached = await attach(held)
    attached.device.open([NewSequence("r", "", [1, 2], 200, b"")])
    attached.device.control.slots["committed"][0] = 99
    attached.device.control.slots["committed"][1] = 99
    held._detach(attached, "lost", goodbye=False)
    with pytest.raises(PreconditionFailed) as caught:
        await attach(held)
    assert caught.value.reason == "BAD_CONTROL_BLOCK"
    assert not held.failed.is_set()
    again = await attach(held)
    assert (again.adopted, len(again.device.table)) == ([], 0)


def test_a_holder_that_is_gone_or_hidden(victim: subprocess.Popen[bytes]) -> None:
    assert not Holder(0).visible
    assert not Holder(0).kill()
    assert not Holder(os.getpid()).kill(), "never this process itself"
    holder = Holder(victim.pid)
    assert not holder.is_gone()
    assert not holder.is_stopped()
    victim.kill()
    victim.wait(60)
    assert holder.is_gone()
    assert not holder.kill()
    late = Holder(victim.pid)
    assert late.is_gone()
    for each in (holder, late):
        each.close()
        each.close()


async def test_a_store_that_was_not_running_forgives(held: Attachments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock jumps between two looks: nobody is suspect for what it did not hear."""
    attached = await attach(held)
    now = [1000.0]
    monkeypatch.setattr("kvstore.attachments.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("kvstore.attachments.WATCH_EVERY_S", 0.01)
    attached.pulse.beat(1000.0)
    watching = asyncio.create_task(held.watch())
    await asyncio.sleep(0.05)
    now[0] += 60.0
    await asyncio.sleep(0.1)
    assert not attached.revoked.done()
    for _ in range(12):  # now it listens, and hears nothing
        now[0] += 0.9
        await asyncio.sleep(0.03)
    assert attached.revoked.done()
    watching.cancel()
