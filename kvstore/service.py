"""The KvStore gRPC service: who is attached to which device, and the calls of the one attachment each device has.

Handlers run on one event loop and do not await between reading and changing the tables, so they need no lock.

Memory of a device is kept when its attachment ends. The next one gets the same memory when it asks for the same spec
(geometry, sizes, weights digest); otherwise the memory is given up and made anew, which is safe because a detach
released every sequence. An attachment that ended without a Detach message is suspect: mappings
cannot be revoked, so its device stays busy until the process that took the descriptors is gone.

A GPU's memory is made by the worker that attaches first, at the store's request (CreateMemory); from then on it is held
and handed on like any other.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import structlog

from kvstore import messages
from kvstore.arena import close_all
from kvstore.device import Device, DeviceSpec, NewSequence
from kvstore.events import Event, EventKind
from kvstore.fd_server import Delivery, FdServer
from kvstore.geometry import LAYOUT_VERSION, CacheGeometry
from protos import kvstore_pb2, kvstore_pb2_grpc
from protos.errors import CapacityError, InternalError, InvalidRequest, NotFound, PreconditionFailed, Unavailable
from protos.version import release

log = structlog.get_logger("kvstore")

SUSPECT_WAIT_S = 2.0  # a killed process closes its sockets shortly before it counts as gone
IDLE_CHECK_S = 5.0  # without a call for so long, the store checks itself
CREATE_TIMEOUT_S = 60.0  # for a worker to make its GPU's memory and bring it
VERIFY_SLICE_PAGES = 64  # of each group, between which other calls are answered
IDLE_CHECK_PAGES = 16  # of each group, a check: the loop is busy for that long
WATCH_POLL_S = 0.05
WATCH_BATCH = 4096  # events in one message
Context = grpc.aio.ServicerContext[Any, Any]


class Attached:
    """One worker's hold on one device."""

    def __init__(self, worker_id: str, epoch: int, device: Device) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.device = device
        self.revoked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.holder: int | None = None  # pidfd of the process that took the descriptors
        self.holder_unseen = False  # it took them, but its process is not visible from here

    def taken_by(self, pid: int) -> None:
        try:
            self.holder = os.pidfd_open(pid)
        except (OSError, ValueError):  # pid 0: a process of another pid namespace
            self.holder_unseen = True


class _Claim:
    """The right to attach to a device; it lasts until the memory that was begun under it is there."""

    def __init__(self) -> None:
        self._ready: asyncio.Task[Device] | None = None

    async def finish(self, allocation: Coroutine[Any, Any, Device]) -> Device:
        # A task of its own: when the caller goes away meanwhile, the memory still ends up with its owner.
        self._ready = asyncio.create_task(allocation)
        return await asyncio.shield(self._ready)

    def when_finished(self, do: Callable[[], None]) -> None:
        if self._ready is None or self._ready.done():
            do()
        else:
            self._ready.add_done_callback(lambda _: do())


class KvStoreService(kvstore_pb2_grpc.KvStoreServicer):
    """Args:
    fd_server: where workers fetch descriptors; started and stopped by the owner.
    incarnation: a random name of this process's life.
    memory_limit: bytes that all devices together may take; None: what the machine has.
    """

    def __init__(self, fd_server: FdServer, *, incarnation: str, memory_limit: int | None = None) -> None:
        self.failed = asyncio.Event()
        """Set when an invariant broke: the process must stop (its tables cannot be trusted)."""
        self._fd_server = fd_server
        self._incarnation = incarnation
        self._memory_limit = memory_limit
        self._started_ns = time.monotonic_ns()
        # Epochs grow over restarts of the store too, so that a worker of the one before is never mistaken for one of
        # ours.
        self._last_epoch = time.time_ns() // 1_000_000
        self._devices: dict[str, Device] = {}
        self._attached: dict[str, Attached] = {}
        self._attaching: set[str] = set()
        self._allocating = asyncio.Lock()
        self._suspects: dict[str, int] = {}  # device -> pidfd
        self._stopping = False
        self._last_call_ns = self._started_ns
        self._problems: dict[str, list[str]] = {}  # device -> what the idle check found, so that it is logged once

    # --- attachments ---

    async def Attach(
        self, requests: AsyncIterator[kvstore_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[kvstore_pb2.AttachResponse]:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "open":
            raise InvalidRequest("the first message of Attach is `open`", reason="BAD_ATTACH")
        ended = asyncio.create_task(_until_detach(requests))
        try:
            with self._refusals_logged(first.open):
                spec = spec_of(first.open)
                with self._claimed(spec.device) as claim:
                    fds: list[int] = []
                    if spec.on_gpu and await self._kept(spec) is None:
                        self._demand_room(spec)
                        arenas, sizes = spec.plan()
                        with self._fd_server.expect(sum(map(len, sizes))) as (ticket, delivery):
                            create = kvstore_pb2.CreateMemory(
                                fd_ticket=ticket,
                                fd_socket=str(self._fd_server.path),
                                arenas=messages.arena_entries(arenas, sizes),
                            )
                            yield kvstore_pb2.AttachResponse(create=create)
                            await _delivered(delivery, ended)
                            fds = delivery.take()
                    attached = await self._attach(spec, first.open.worker_id, claim, fds)
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
                )
            )
            endings: set[asyncio.Future[Any]] = {ended, attached.revoked}
            await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
            if attached.revoked.done():
                why = attached.revoked.result()
                yield kvstore_pb2.AttachResponse(revoked=kvstore_pb2.Revoked(why=why))
            elif not ended.cancelled() and ended.exception() is None and ended.result():
                goodbye, why = True, "closed by the worker"
        finally:
            self._fd_server.withdraw(ticket)
            self._detach(attached, why, goodbye=goodbye)

    @contextmanager
    def _claimed(self, name: str) -> Iterator[_Claim]:
        """Lets nobody else attach to the device inside. Raises Unavailable (STOPPING), DEVICE_BUSY."""
        if self._stopping:
            raise _stopping()
        holder = self._attached.get(name)
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

    async def _kept(self, spec: DeviceSpec) -> Device | None:
        """The device's memory where the store holds it; any that does not fit is given up.

        Raises DEVICE_BUSY; or ARENA_TOO_SMALL or NOT_ENOUGH_MEMORY, and then nothing is given up.
        """
        await self._demand_no_suspect(spec.device)
        kept = self._devices.get(spec.device)
        if kept is None or kept.spec == spec:
            return kept
        self._demand_room(spec)
        log.info(
            "memory given up: the next worker asks for another",
            device=spec.device,
            host_bytes=kept.spec.host_bytes,
            device_bytes=kept.spec.device_bytes,
        )
        self._devices.pop(spec.device).close()
        return None

    async def _allocate(self, spec: DeviceSpec, fds: Sequence[int]) -> Device:
        """New memory, which ``fds`` are of where it is a GPU's. Raises ARENA_TOO_SMALL or NOT_ENOUGH_MEMORY."""
        async with self._allocating:  # one at a time: what fits is known once the one before is in the books
            try:
                self._demand_room(spec)
            except BaseException:
                close_all(fds)
                raise
            device = self._devices[spec.device] = await asyncio.to_thread(Device.allocate, spec, fds)
        return device

    def _demand_room(self, spec: DeviceSpec) -> None:
        """Raises ARENA_TOO_SMALL; NOT_ENOUGH_MEMORY, what other devices take leaves no room within the limit."""
        taken = sum(device.spec.host_bytes for name, device in self._devices.items() if name != spec.device)
        if self._memory_limit is not None and taken + spec.host_bytes > self._memory_limit:
            raise CapacityError(
                f"the memory of {spec.device} does not fit the store's memory limit",
                reason="NOT_ENOUGH_MEMORY",
                given=f"{spec.host_bytes} bytes",
                allowed=f"{max(0, self._memory_limit - taken)} of {self._memory_limit} bytes",
                hint="make the arenas smaller or raise --memory-limit",
            )

    async def _attach(self, spec: DeviceSpec, worker_id: str, claim: _Claim, fds: Sequence[int] = ()) -> Attached:
        """``fds`` of a GPU's memory that the worker made; they are the device's from here on."""
        device = await self._kept(spec) or await claim.finish(self._allocate(spec, fds))
        if self._stopping:
            raise _stopping()
        self._last_epoch += 1
        device.control.epoch = self._last_epoch
        attached = self._attached[spec.device] = Attached(worker_id, self._last_epoch, device)
        log.info(
            "attached",
            device=spec.device,
            worker=worker_id,
            epoch=attached.epoch,
            modes=spec.geometry.modes,
            pages={group: table.num_pages for group, table in device.table.groups.items()},
            tail_slots=spec.num_tail_slots if spec.geometry.tail_bytes else 0,
            host_bytes=spec.host_bytes,
            device_bytes=spec.device_bytes,
            geometry=spec.geometry.summary(),
        )
        return attached

    async def _demand_no_suspect(self, name: str) -> None:
        pidfd = self._suspects.get(name)
        if pidfd is None:
            return
        if not await asyncio.to_thread(_exited, pidfd, SUSPECT_WAIT_S):
            raise _busy(name, "a process that lost its attachment and still maps the memory")
        os.close(self._suspects.pop(name))

    def _detach(self, attached: Attached, why: str, *, goodbye: bool) -> None:
        name = attached.device.spec.device
        del self._attached[name]
        with self._invariants(attached.device):
            # A store that stops leaves the control block as it is, like one that dies: its workers go on with it.
            sequences, pages = (0, 0) if self._stopping else attached.device.release_all(goodbye=goodbye)
        if goodbye:
            if attached.holder is not None:
                os.close(attached.holder)
        elif attached.holder is not None:
            self._suspects[name] = attached.holder
        elif attached.holder_unseen:  # nobody can tell when it is gone: leave it the memory
            self._devices.pop(name).close()
        log.info(
            "detached",
            device=name,
            worker=attached.worker_id,
            epoch=attached.epoch,
            why=why,
            sequences_released=sequences,
            pages_freed=pages,
        )

    @contextmanager
    def _refusals_logged(self, asked: kvstore_pb2.AttachOpen) -> Iterator[None]:
        try:
            yield
        except Exception as refusal:
            log.warning("attach refused", device=asked.device, worker=asked.worker_id, pid=asked.pid, why=str(refusal))
            raise

    def revoke_all(self, why: str) -> None:
        """Tells every worker that its attachment is over, and takes no new ones."""
        self._stopping = True
        for attached in self._attached.values():
            if not attached.revoked.done():
                attached.revoked.set_result(why)

    def close(self) -> None:
        """Gives up all memory; after the server has stopped."""
        for device in self._devices.values():
            device.close()
        for pidfd in self._suspects.values():
            os.close(pidfd)
        self._devices.clear()
        self._suspects.clear()

    @contextmanager
    def _device(self, epoch: int) -> Iterator[Device]:
        """The device of a live epoch. A broken invariant inside marks the store as failed.

        Raises:
            PreconditionFailed: STALE_EPOCH.
        """
        for attached in self._attached.values():
            if attached.epoch == epoch:
                self._last_call_ns = time.monotonic_ns()
                with self._invariants(attached.device):
                    yield attached.device
                return
        raise PreconditionFailed(
            "this epoch is over",
            reason="STALE_EPOCH",
            given=epoch,
            allowed=", ".join(str(a.epoch) for a in self._attached.values()) or "nobody is attached",
            hint="attach again",
        )

    @contextmanager
    def _invariants(self, device: Device) -> Iterator[None]:
        """A broken invariant inside marks the store as failed: its tables cannot be trusted."""
        try:
            yield
        except InternalError as bug:
            log.critical("invariant broken, the store stops", device=device.spec.device, error=str(bug))
            self.failed.set()
            raise

    # --- the calls of an attachment ---

    async def Open(self, request: kvstore_pb2.OpenRequest, context: Context) -> kvstore_pb2.OpenResponse:
        with self._device(request.epoch) as device:
            results = device.open(
                NewSequence(
                    s.request_id,
                    s.tenant_salt,
                    s.prompt_token_ids,
                    s.max_tokens,
                    s.frozen_request,
                    reuse=not s.no_reuse,
                    exact_only=s.exact_only,
                )
                for s in request.sequences
            )
        return kvstore_pb2.OpenResponse(results=map(messages.open_message, results))

    async def Reserve(self, request: kvstore_pb2.ReserveRequest, context: Context) -> kvstore_pb2.ReserveResponse:
        with self._device(request.epoch) as device:
            return messages.reserve_message(device.reserve(_wanted(request.sequences)))

    async def Seal(self, request: kvstore_pb2.SealRequest, context: Context) -> kvstore_pb2.SealResponse:
        with self._device(request.epoch) as device:
            checksums = {(c.group, c.page_id): int(c.checksum) for c in request.checksums}
            return messages.seal_message(device.seal(_wanted(request.sequences), checksums))

    async def Truncate(self, request: kvstore_pb2.TruncateRequest, context: Context) -> kvstore_pb2.TruncateResponse:
        with self._device(request.epoch) as device:
            return messages.truncate_message(device.truncate(request.slot, request.num_tokens))

    async def Fork(self, request: kvstore_pb2.ForkRequest, context: Context) -> kvstore_pb2.ForkResponse:
        with self._device(request.epoch) as device:
            result = device.fork(request.slot, request.request_id, request.max_tokens, request.frozen_request)
            return messages.fork_message(result)

    async def Checkpoint(
        self, request: kvstore_pb2.CheckpointRequest, context: Context
    ) -> kvstore_pb2.CheckpointResponse:
        with self._device(request.epoch) as device:
            return messages.checkpoint_message(device.checkpoint(request.slot, request.num_tokens, request.kind))

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: Context) -> kvstore_pb2.ReleaseResponse:
        with self._device(request.epoch) as device:
            return kvstore_pb2.ReleaseResponse(pages_freed=device.release(list(request.slots)))

    # --- without an attachment ---

    async def Verify(self, request: kvstore_pb2.VerifyRequest, context: Context) -> kvstore_pb2.VerifyResponse:
        problems: list[str] = []
        compared = unreadable = 0
        for name, device in sorted(self._devices.items()):
            with self._invariants(device):
                found = device.verifier.tables()
            unreadable += device.verifier.num_unreadable
            for first in range(0, device.verifier.num_pages, VERIFY_SLICE_PAGES):
                if self._devices.get(name) is not device:  # given up meanwhile
                    break
                wrong, count = device.verifier.checksums(range(first, first + VERIFY_SLICE_PAGES))
                found += wrong
                compared += count
                await asyncio.sleep(0)  # workers wait for their answers meanwhile
            problems += [f"{name}: {problem}" for problem in found]
        return kvstore_pb2.VerifyResponse(problems=problems, pages_checked=compared, pages_unreadable=unreadable)

    async def check_when_idle(self) -> None:
        """Checks every device after a while without calls, a few pages at a time; until cancelled.

        Raises:
            InternalError: tables are at odds; ``failed`` is set.
        """
        while True:
            await asyncio.sleep(IDLE_CHECK_S)
            if time.monotonic_ns() - self._last_call_ns < IDLE_CHECK_S * 1e9:
                continue
            for name, device in list(self._devices.items()):
                with self._invariants(device):
                    found = device.verifier.tables() + device.verifier.next_checksums(IDLE_CHECK_PAGES)
                for problem in found:
                    if problem not in self._problems.setdefault(name, []):
                        self._problems[name].append(problem)
                        log.error("integrity problem", device=name, problem=problem)

    def num_problems(self, device: str) -> int:
        """What the idle check has found on a device."""
        return len(self._problems.get(device, ()))

    async def Watch(
        self, request: kvstore_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.WatchResponse]:
        if request.device not in self._devices:
            raise NotFound(
                "no such device",
                reason="UNKNOWN_DEVICE",
                given=request.device,
                allowed=", ".join(sorted(self._devices)) or "none yet",
            )
        incarnation, cursor, started = request.incarnation, int(request.cursor), False
        while (device := self._devices.get(request.device)) is not None and not self._stopping:
            batch = device.events.since(incarnation, cursor, WATCH_BATCH)
            if batch.lost:
                known = device.events.snapshot(device.table.index.contents())
                events = [kvstore_pb2.PageEvent(hash=h, group=g) for g, hashes in known.hashes.items() for h in hashes]
                yield kvstore_pb2.WatchResponse(
                    incarnation=known.incarnation,
                    cursor=known.cursor,
                    lost=bool(incarnation),
                    snapshot=True,
                    added=events,
                )
                incarnation, cursor = known.incarnation, known.cursor
            elif batch.events or not started:
                yield _watch_response(batch.incarnation, batch.cursor, batch.events)
                cursor = batch.cursor
            else:
                await asyncio.sleep(WATCH_POLL_S)
            started = True

    async def Stats(self, request: kvstore_pb2.KvStatsRequest, context: Context) -> kvstore_pb2.KvStatsResponse:
        return self.stats()

    def stats(self) -> kvstore_pb2.KvStatsResponse:
        """Event loop only."""
        devices = []
        for name, device in sorted(self._devices.items()):
            stats = device.stats()
            if name in self._attached:
                stats.worker_id = self._attached[name].worker_id
            devices.append(stats)
        return kvstore_pb2.KvStatsResponse(
            store_incarnation=self._incarnation,
            uptime_ns=time.monotonic_ns() - self._started_ns,
            devices=devices,
            version=release(),
        )


def spec_of(asked: kvstore_pb2.AttachOpen) -> DeviceSpec:
    """What an AttachOpen asks for, checked.

    Raises:
        PreconditionFailed: GEOMETRY_MISMATCH, both sides printed.
        ConfigError, InvalidRequest: something is malformed or out of range.
    """
    if asked.geometry.layout_version != LAYOUT_VERSION:
        raise PreconditionFailed(
            "worker and store lay pages out differently",
            reason="GEOMETRY_MISMATCH",
            given=f"layout {asked.geometry.layout_version} (worker)",
            allowed=f"layout {LAYOUT_VERSION} (store)",
            hint="run worker and store of the same version",
        )
    geometry = CacheGeometry.from_proto(asked.geometry)
    if geometry.digest() != asked.geometry_digest:
        raise PreconditionFailed(
            "worker and store compute different geometry digests",
            reason="GEOMETRY_MISMATCH",
            given=f"{asked.geometry_digest.hex() or 'none'} (worker)",
            allowed=f"{geometry.summary()} (store)",
            hint="run worker and store of the same version",
        )
    if not asked.worker_id:
        raise InvalidRequest("an attachment names its worker", given="''", allowed="any other name")
    return DeviceSpec(
        device=asked.device,
        geometry=geometry,
        arena_bytes=asked.arena_bytes,
        max_sequences=asked.max_sequences,
        max_sequence_tokens=asked.max_sequence_tokens,
        weights_digest=asked.weights_digest,
        checkpoint_slots=asked.checkpoint_slots,
        memory_granularity=asked.memory_granularity,
    )


def _wanted(sequences: Any) -> list[tuple[int, int, int]]:
    return [(s.slot, s.num_tokens, s.step_tokens) for s in sequences]


def _watch_response(incarnation: str, cursor: int, events: Iterable[Event]) -> kvstore_pb2.WatchResponse:
    """The last word on each page of a batch: what came and went within it is told once."""
    last = {(event.group, event.hash): event.kind for event in events}
    by_kind = {
        kind: [kvstore_pb2.PageEvent(hash=h, group=g) for (g, h), last_kind in last.items() if last_kind is kind]
        for kind in (EventKind.ADDED, EventKind.REMOVED)
    }
    return kvstore_pb2.WatchResponse(
        incarnation=incarnation, cursor=cursor, added=by_kind[EventKind.ADDED], removed=by_kind[EventKind.REMOVED]
    )


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


def _exited(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


async def _delivered(delivery: Delivery, ended: asyncio.Task[bool]) -> None:
    """Waits for a worker to bring its GPU's memory. Raises Unavailable: it left, or it takes too long."""
    arrived = asyncio.create_task(delivery.arrived.wait())
    endings: set[asyncio.Future[Any]] = {arrived, ended}
    try:
        await asyncio.wait(endings, timeout=CREATE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        arrived.cancel()
    if not delivery.arrived.is_set():
        why = "left before it brought" if ended.done() else f"did not bring within {CREATE_TIMEOUT_S:g} s"
        raise Unavailable(
            f"the worker {why} the memory it was asked for",
            reason="MEMORY_NOT_DELIVERED",
            given="no descriptors",
            allowed=f"{delivery.num_fds} descriptors",
        )


async def _until_detach(requests: AsyncIterator[kvstore_pb2.AttachRequest]) -> bool:
    """Reads heartbeats; True when the worker said that it is done, False when the stream just ended.

    The end alone says nothing: a connection that broke can look like a stream that was closed.
    """
    async for request in requests:
        if request.WhichOneof("message") == "detach":
            return True
    return False
