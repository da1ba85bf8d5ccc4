"""Who holds which device: attaching, adopting, detaching, and what becomes of workers that are suspect.

Memory of a device is kept when its attachment ends. A worker that says goodbye releases its sequences; those of another
stay, for the next worker that asks for the same spec (geometry, sizes, weights digest) to adopt under a new epoch.
Where nobody comes within the orphan timeout they are released, and where the next worker asks for another spec they go
with the memory.

An attachment that ends without a goodbye leaves a suspect: mappings cannot be revoked, so its process is killed, and
the device stays busy until it is gone (``suspects``). A worker that falls silent is suspect as well.

A GPU's memory is made by the worker that attaches first, at the store's request (CreateMemory); from then on it is held
and handed on like any other. Memory of a store that is gone is brought by the worker that maps it (AdoptMemory).

All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import structlog

from kvstore import messages
from kvstore.answers import Adopted
from kvstore.arena import close_all
from kvstore.attach_stream import ask_for, delivered, num_fds, spec_of, until_detach
from kvstore.device import Device, DeviceSpec
from kvstore.fd_server import FdServer
from kvstore.suspects import Holder, Pulse
from protos import kvstore_pb2
from protos.errors import CapacityError, InternalError, InvalidRequest, PreconditionFailed, Unavailable

log = structlog.get_logger("kvstore")
T = TypeVar("T")

SUSPECT_WAIT_S = 2.0  # a killed process closes its sockets shortly before it counts as gone
WATCH_EVERY_S = 0.25
STOPPED_AFTER_S = 1.0  # of silence: a process that is stopped by then is suspect
DEAF_S = 1.0  # late for a look: the store itself was not running
DEFAULT_HEARTBEAT_TIMEOUT_S = 10.0
DEFAULT_ORPHAN_TIMEOUT_S = 120.0


class Attached:
    """One worker's hold on one device."""

    def __init__(
        self, worker_id: str, epoch: int, device: Device, adopted: Sequence[Adopted] = (), pulse: Pulse | None = None
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.device = device
        self.adopted = adopted
        self.pulse = pulse or Pulse(time.monotonic())
        self.revoked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.holder: Holder | None = None  # who took the descriptors, or brought them

    def taken_by(self, holder: Holder) -> None:
        if self.holder is not None:
            self.holder.close()
        self.holder = holder

    def revoke(self, why: str) -> None:
        if not self.revoked.done():
            self.revoked.set_result(why)


class _Claim:
    """The right to attach to a device; it lasts until what was begun under it is done: memory that is made or taken
    over, pages that are compared.
    """

    def __init__(self) -> None:
        self._ready: asyncio.Task[Any] | None = None

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        # A task of its own: when the caller goes away meanwhile, the memory still ends up with its owner, and no thread
        # reads a device that the next claim changes.
        self._ready = task = asyncio.create_task(work)
        return await asyncio.shield(task)

    def when_finished(self, do: Callable[[], None]) -> None:
        if self._ready is None or self._ready.done():
            do()
        else:
            self._ready.add_done_callback(lambda _: do())


class Attachments:
    """Args:
    fd_server: where workers fetch and bring descriptors; started and stopped by the owner.
    incarnation: a random name of this process's life.
    memory_limit: bytes that all devices together may take; None: what the machine has.
    heartbeat_timeout_s: silence after which a worker is suspect, whatever its process does.
    orphan_timeout_s: for how long sequences wait for a worker that adopts them.
    """

    def __init__(
        self,
        fd_server: FdServer,
        *,
        incarnation: str,
        memory_limit: int | None = None,
        heartbeat_timeout_s: float = DEFAULT_HEARTBEAT_TIMEOUT_S,
        orphan_timeout_s: float = DEFAULT_ORPHAN_TIMEOUT_S,
    ) -> None:
        self.failed = asyncio.Event()
        """Set when an invariant broke: the process must stop (its tables cannot be trusted)."""
        self.stopping = False
        self.devices: dict[str, Device] = {}
        self.attached: dict[str, Attached] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        """(what, device) -> how often since the start."""
        self._fd_server = fd_server
        self._incarnation = incarnation
        self._memory_limit = memory_limit
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._orphan_timeout_s = orphan_timeout_s
        # Epochs grow over restarts of the store too, so that a worker of the one before is never mistaken for one of
        # ours.
        self._last_epoch = time.time_ns() // 1_000_000
        self._attaching: set[str] = set()
        self._allocating = asyncio.Lock()
        self._suspects: dict[str, Holder] = {}  # by device
        self._orphaned_s: dict[str, float] = {}  # device -> since when its sequences are nobody's

    def of_epoch(self, epoch: int) -> Attached:
        """Raises PreconditionFailed (STALE_EPOCH) when no live attachment has it."""
        for attached in self.attached.values():
            if attached.epoch == epoch:
                return attached
        raise PreconditionFailed(
            "this epoch is over",
            reason="STALE_EPOCH",
            given=epoch,
            allowed=", ".join(str(a.epoch) for a in self.attached.values()) or "nobody is attached",
            hint="attach again",
        )

    @contextmanager
    def invariants(self, device: Device) -> Iterator[None]:
        """A broken invariant inside marks the store as failed: its tables cannot be trusted."""
        try:
            yield
        except InternalError as bug:
            log.critical("invariant broken, the store stops", device=device.spec.device, error=str(bug))
            self.failed.set()
            raise

    # --- a worker's stream ---

    async def serve(
        self, requests: AsyncIterator[kvstore_pb2.AttachRequest]
    ) -> AsyncGenerator[kvstore_pb2.AttachResponse, None]:
        """The life of one attachment: what Attach answers."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidRequest("the first message of Attach is `open`", reason="BAD_ATTACH")
        pulse = Pulse(time.monotonic())
        ended = asyncio.create_task(until_detach(requests, pulse))
        try:
            with self._refusals_logged(first.open):
                spec = spec_of(first.open)
                with self._claimed(spec.device) as claim:
                    fds: list[int] = []
                    holder: Holder | None = None
                    bring = await self._to_bring(spec, holds_memory=first.open.holds_memory)
                    if bring is not None:
                        with self._fd_server.expect(num_fds(bring)) as (ticket, delivery):
                            yield ask_for(bring, ticket, str(self._fd_server.path), adopt=first.open.holds_memory)
                            await delivered(delivery, ended)
                            fds, holder = delivery.take()
                    if first.open.holds_memory and holder is not None:
                        attached = await self._adopt(spec, first.open.worker_id, claim, fds, holder)
                    else:
                        if holder is not None:  # who made memory maps it only once it fetches it
                            holder.close()
                        attached = await self._attach(spec, first.open.worker_id, claim, fds, adopts=first.open.adopts)
                    attached.pulse = pulse
            async with aclosing(self._serve_attached(attached, ended)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            ended.cancel()

    async def _serve_attached(
        self, attached: Attached, ended: asyncio.Task[bool]
    ) -> AsyncGenerator[kvstore_pb2.AttachResponse, None]:
        """From the first answer to the detach."""
        ticket = self._fd_server.issue(*attached.device.manifest(), attached.taken_by)
        why = "connection lost"
        goodbye = False
        try:
            yield kvstore_pb2.AttachResponse(
                attached=kvstore_pb2.Attached(
                    epoch=attached.epoch,
                    fd_ticket=ticket,
                    fd_socket=str(self._fd_server.path),
                    geometry_digest=attached.device.spec.geometry.digest(),
                    store_incarnation=self._incarnation,
                    adopted=map(messages.adopted_message, attached.adopted),
                )
            )
            endings: set[asyncio.Future[Any]] = {ended, attached.revoked}
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if attached.revoked.done():
                why = attached.revoked.result()
                revoked = kvstore_pb2.Revoked(why=why, store_stops=self.stopping)
                yield kvstore_pb2.AttachResponse(revoked=revoked)
            elif not ended.cancelled() and ended.exception() is None and ended.result():
                goodbye, why = True, "closed by the worker"
        finally:
            self._fd_server.withdraw(ticket)
            self._detach(attached, why, goodbye=goodbye)

    @contextmanager
    def _claimed(self, name: str) -> Iterator[_Claim]:
        """Lets nobody else attach to the device inside. Raises Unavailable (STOPPING), DEVICE_BUSY."""
        if self.stopping:
            raise _stopping()
        holder = self.attached.get(name)
        if holder or name in self._attaching:
            raise _busy(
                name, f"worker {holder.worker_id!r}, epoch {holder.epoch}" if holder else "a worker that attaches now"
            )
        self._attaching.add(name)
        claim = _Claim()
        try:
            yield claim
        finally:
            claim.when_finished(lambda: self._attaching.discard(name))

    async def _to_bring(self, spec: DeviceSpec, *, holds_memory: bool) -> list[kvstore_pb2.FdEntry] | None:
        """What the worker is to bring: all memory that it holds of a store that is gone, or what only it can make;
        None: nothing.

        Raises:
            PreconditionFailed: DEVICE_BUSY; OTHER_MEMORY, this store has memory of the device already.
        """
        if holds_memory:
            if spec.device in self.devices:
                raise PreconditionFailed(
                    f"the store has memory of {spec.device} already",
                    reason="OTHER_MEMORY",
                    given="memory of another store",
                    allowed="what this one holds",
                    hint="start the worker anew: its sequences are computed again from their token logs",
                )
            self._demand_room(spec)
            return spec.entries()
        if not spec.on_gpu or await self._kept(spec) is not None:
            return None
        self._demand_room(spec)
        return spec.entries()[1:]  # the control block is the store's own

    async def _kept(self, spec: DeviceSpec) -> Device | None:
        """The device's memory where the store holds it; any that does not fit is given up, with what is in it.

        Raises DEVICE_BUSY; or ARENA_TOO_SMALL or NOT_ENOUGH_MEMORY, and then nothing is given up.
        """
        await self._demand_no_suspect(spec.device)
        kept = self.devices.get(spec.device)
        if kept is None or kept.spec == spec:
            return kept
        self._demand_room(spec)
        self._give_up(spec.device, "the next worker asks for another")
        return None

    def _give_up(self, name: str, why: str) -> None:
        """Lets a device's memory go, with the sequences that wait for a worker."""
        device = self.devices.pop(name)
        orphans = len(device.table)
        self.counts["orphans_released", name] += orphans
        self._orphaned_s.pop(name, None)
        log.info(
            f"memory given up: {why}",
            device=name,
            host_bytes=device.spec.host_bytes,
            device_bytes=device.spec.device_bytes,
            sequences_lost=orphans,
        )
        device.close()

    async def _allocate(self, spec: DeviceSpec, fds: Sequence[int]) -> Device:
        """New memory, which ``fds`` are of where it is a GPU's. Raises ARENA_TOO_SMALL or NOT_ENOUGH_MEMORY."""
        async with self._allocating:  # one at a time: what fits is known once the one before is in the books
            try:
                self._demand_room(spec)
            except BaseException:
                close_all(fds)
                raise
            device = self.devices[spec.device] = await asyncio.to_thread(Device.allocate, spec, fds)
        return device

    def _demand_room(self, spec: DeviceSpec) -> None:
        """Raises ARENA_TOO_SMALL; NOT_ENOUGH_MEMORY, what other devices take leaves no room within the limit."""
        taken = sum(device.spec.host_bytes for name, device in self.devices.items() if name != spec.device)
        if self._memory_limit is not None and taken + spec.host_bytes > self._memory_limit:
            raise CapacityError(
                f"the memory of {spec.device} does not fit the store's memory limit",
                reason="NOT_ENOUGH_MEMORY",
                given=f"{spec.host_bytes} bytes",
                allowed=f"{max(0, self._memory_limit - taken)} of {self._memory_limit} bytes",
                hint="make the arenas smaller or raise --memory-limit",
            )

    async def _attach(
        self, spec: DeviceSpec, worker_id: str, claim: _Claim, fds: Sequence[int] = (), *, adopts: bool = True
    ) -> Attached:
        """``fds`` of a GPU's memory that the worker made; they are the device's from here on."""
        device = await self._kept(spec)
        if device is None:
            device = await claim.finish(self._allocate(spec, fds))
        if not adopts and len(device.table):
            self._release_orphans(device, "the next worker cannot adopt them")
        if len(device.table):  # whoever died may have written anywhere
            await claim.finish(asyncio.to_thread(device.compare_pages))
        return self._attach_to(device, worker_id, living=False)

    async def _adopt(
        self, spec: DeviceSpec, worker_id: str, claim: _Claim, fds: Sequence[int], holder: Holder
    ) -> Attached:
        """Takes over memory of a store that is gone, which ``holder`` maps. Raises BAD_CONTROL_BLOCK, BAD_MEMORY."""
        try:
            device = await claim.finish(self._take_over(spec, fds))
            attached = self._attach_to(device, worker_id, living=True)
        except BaseException:
            claim.when_finished(lambda: self._not_adopted(spec.device, holder))
            raise
        attached.holder = holder
        return attached

    async def _take_over(self, spec: DeviceSpec, fds: Sequence[int]) -> Device:
        device = self.devices[spec.device] = await asyncio.to_thread(Device.take_over, spec, fds)
        return device

    def _not_adopted(self, name: str, holder: Holder) -> None:
        """The worker left while its memory was taken over, or was refused."""
        taken = name in self.devices
        self._let_go(name, holder, harmless=not taken or self.stopping)
        if name in self.devices:
            self._orphaned_s[name] = time.monotonic()

    def _attach_to(self, device: Device, worker_id: str, *, living: bool) -> Attached:
        """``living``: the sequences are this worker's own, and it goes on with them."""
        if self.stopping:
            raise _stopping()
        name = device.spec.device
        self._last_epoch = max(self._last_epoch, device.control.epoch) + 1
        try:
            with self.invariants(device):
                adopted = device.adopt(self._last_epoch, living=living)
        except PreconditionFailed as bad:
            self._give_up(name, f"what the last worker left cannot be adopted ({bad.reason})")
            raise
        self._orphaned_s.pop(name, None)
        self.counts["sequences_adopted", name] += len(adopted)
        attached = self.attached[name] = Attached(worker_id, self._last_epoch, device, adopted)
        spec = device.spec
        log.info(
            "attached",
            device=name,
            worker=worker_id,
            epoch=attached.epoch,
            modes=spec.geometry.modes,
            pages={group: table.num_pages for group, table in device.table.groups.items()},
            tail_slots=spec.num_tail_slots if spec.geometry.tail_bytes else 0,
            host_bytes=spec.host_bytes,
            device_bytes=spec.device_bytes,
            geometry=spec.geometry.summary(),
            adopted=len(adopted),
            void=sum(not each.intact for each in adopted),
        )
        return attached

    # --- the end of an attachment ---

    async def _demand_no_suspect(self, name: str) -> None:
        suspect = self._suspects.get(name)
        if suspect is None:
            return
        if not await suspect.wait(SUSPECT_WAIT_S):
            raise _busy(name, "a process that lost its attachment and still maps the memory")
        self._suspects.pop(name).close()

    def _detach(self, attached: Attached, why: str, *, goodbye: bool) -> None:
        device, holder = attached.device, attached.holder
        name = device.spec.device
        del self.attached[name]
        sequences = pages = 0
        try:
            if not self.stopping:
                with self.invariants(device):
                    if goodbye:
                        sequences, pages = device.release_all(goodbye=True)
                    else:
                        device.table.end_attachment(confirmed=False)
            # A store that stops leaves everything as it is, like one that dies: its workers go on with it.
        finally:
            self._let_go(name, holder, harmless=goodbye or self.stopping)
        log.info(
            "detached",
            device=name,
            worker=attached.worker_id,
            epoch=attached.epoch,
            why=why,
            sequences_released=sequences,
            sequences_kept=len(device.table),
            pages_freed=pages,
        )
        if name in self.devices and len(device.table) and not self.stopping:
            self._orphaned_s[name] = time.monotonic()

    def _let_go(self, name: str, holder: Holder | None, *, harmless: bool) -> None:
        """Of the process that maps a device: what it may still do to the memory is brought to an end."""
        if holder is None:
            return
        if harmless:
            holder.close()
        elif holder.visible:
            self._kill(name, holder)
            self._suspects[name] = holder
        else:  # nobody can tell when it is gone: leave it the memory
            log.warning(
                "a worker that is not visible from here was lost, and its memory with it: share the process namespace",
                device=name,
            )
            self._give_up(name, "the process that maps it cannot be seen")

    def _kill(self, name: str, holder: Holder) -> None:
        if holder.kill():
            self.counts["suspects_killed", name] += 1
            log.warning(
                "suspect killed: it lost its attachment and may write to the memory", device=name, pid=holder.pid
            )

    def _release_orphans(self, device: Device, why: str) -> None:
        name = device.spec.device
        with self.invariants(device):
            sequences, pages = device.release_all(goodbye=False)
        self._orphaned_s.pop(name, None)
        self.counts["orphans_released", name] += sequences
        log.warning(f"orphans released: {why}", device=name, sequences=sequences, pages_freed=pages)

    # --- watching ---

    async def watch(self) -> None:
        """Looks after workers that fall silent and sequences that nobody adopts; until cancelled."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            now_s = time.monotonic()
            if now_s - last_s > WATCH_EVERY_S + DEAF_S:
                log.warning("the store was not running for a while", seconds=round(now_s - last_s, 3))
                for attached in self.attached.values():
                    attached.pulse.forgive(now_s)
            last_s = now_s
            self.look(now_s)

    def look(self, now_s: float) -> None:
        """One look of ``watch``, at a time of the monotonic clock."""
        for name, attached in list(self.attached.items()):
            why = self._why_suspect(attached, now_s)
            if why is None or attached.revoked.done():
                continue
            log.warning("worker is suspect", device=name, worker=attached.worker_id, epoch=attached.epoch, why=why)
            if attached.holder is not None and attached.holder.visible:
                self._kill(name, attached.holder)
            attached.revoke(why)
        for name, since_s in list(self._orphaned_s.items()):
            if name not in self.attached and name not in self._attaching and now_s - since_s > self._orphan_timeout_s:
                self._release_orphans(self.devices[name], f"nobody adopted them in {self._orphan_timeout_s:g} s")

    def _why_suspect(self, attached: Attached, now_s: float) -> str | None:
        silent_s = attached.pulse.silent_s(now_s)
        if silent_s > self._heartbeat_timeout_s:
            return f"no heartbeat for {silent_s:.1f} s"
        if silent_s > STOPPED_AFTER_S and attached.holder is not None:
            if attached.holder.is_gone():
                return "its process is gone"
            if attached.holder.is_stopped():
                return f"its process is stopped, and silent for {silent_s:.1f} s"
        return None

    @contextmanager
    def _refusals_logged(self, asked: kvstore_pb2.AttachOpen) -> Iterator[None]:
        try:
            yield
        except Exception as refusal:
            log.warning("attach refused", device=asked.device, worker=asked.worker_id, pid=asked.pid, why=str(refusal))
            raise

    def num_orphans(self, name: str) -> int:
        """Sequences of a device that wait for a worker."""
        return 0 if name in self.attached else len(self.devices[name].table)

    # --- the end of the store ---

    def revoke_all(self, why: str) -> None:
        """Tells every worker that the store stops, and takes no new ones."""
        self.stopping = True
        for attached in self.attached.values():
            attached.revoke(why)

    def close(self) -> None:
        """Gives up all memory; after the server has stopped."""
        for device in self.devices.values():
            device.close()
        for suspect in self._suspects.values():
            suspect.close()
        self.devices.clear()
        self._suspects.clear()


def _busy(device: str, holder: str) -> PreconditionFailed:
    return PreconditionFailed(
        f"device {device} is in use",
        reason="DEVICE_BUSY",
        given=device,
        allowed=f"one attachment at a time; held by {holder}",
        hint="end that worker first, or attach to another device",
    )


def _stopping() -> Unavailable:
    return Unavailable("the store is stopping", reason="STOPPING")
