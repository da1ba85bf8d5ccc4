"""The KvStore gRPC service: the calls of the one attachment each device has, and those that need none.

Handlers run on one event loop and do not await between reading and changing the tables, so they need no lock: a call is
done wholly, or not at all. Who is attached stands in ``attachments``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import structlog

from kvstore import messages
from kvstore.attachments import Attachments
from kvstore.device import Device, NewSequence
from kvstore.events import Event, EventKind
from kvstore.weights import WeightsStore
from protos import kvstore_pb2, kvstore_pb2_grpc
from protos.errors import NotFound
from protos.version import release

log = structlog.get_logger("kvstore")

IDLE_CHECK_S = 5.0  # without a call for so long, the store checks itself
VERIFY_SLICE_PAGES = 64  # of each group, between which other calls are answered
IDLE_CHECK_PAGES = 16  # of each group, a check: the loop is busy for that long
WATCH_POLL_S = 0.05
WATCH_BATCH = 4096  # events in one message
Context = grpc.aio.ServicerContext[Any, Any]


class KvStoreService(kvstore_pb2_grpc.KvStoreServicer):
    """Args:
    attachments: who holds which device.
    weights: who uses which model's weights.
    incarnation: a random name of this process's life.
    """

    def __init__(self, attachments: Attachments, weights: WeightsStore, *, incarnation: str) -> None:
        self._held = attachments
        self._weights = weights
        self._incarnation = incarnation
        self._started_ns = time.monotonic_ns()
        self._last_call_ns = self._started_ns
        self._problems: dict[str, list[str]] = {}  # device -> what the idle check found, so that it is logged once

    async def Attach(
        self, requests: AsyncIterator[kvstore_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[kvstore_pb2.AttachResponse]:
        async with aclosing(self._held.serve(requests)) as answers:
            async for answer in answers:
                yield answer

    async def Weights(
        self, requests: AsyncIterator[kvstore_pb2.WeightsRequest], context: Context
    ) -> AsyncIterator[kvstore_pb2.WeightsResponse]:
        async with aclosing(self._weights.serve(requests)) as answers:
            async for answer in answers:
                yield answer

    @contextmanager
    def _device(self, epoch: int) -> Iterator[Device]:
        """The device of a live epoch. A broken invariant inside marks the store as failed.

        Raises:
            PreconditionFailed: STALE_EPOCH.
        """
        attached = self._held.of_epoch(epoch)
        self._last_call_ns = time.monotonic_ns()
        with self._held.invariants(attached.device):
            yield attached.device

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
            return messages.reserve_message(device.reserve(_wanted(request.sequences), repeat=request.repeat))

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
            damaged = [(pages.group, page) for pages in request.damaged for page in pages.page_ids]
            return kvstore_pb2.ReleaseResponse(pages_freed=device.release(list(request.slots), damaged))

    # --- without an attachment ---

    async def Verify(self, request: kvstore_pb2.VerifyRequest, context: Context) -> kvstore_pb2.VerifyResponse:
        problems: list[str] = []
        compared = unreadable = 0
        for name, device in sorted(self._held.devices.items()):
            with self._held.invariants(device):
                found = device.verifier.tables()
            unreadable += device.verifier.num_unreadable
            for first in range(0, device.verifier.num_pages, VERIFY_SLICE_PAGES):
                if self._held.devices.get(name) is not device:  # given up meanwhile
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
            for name, device in list(self._held.devices.items()):
                with self._held.invariants(device):
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
        if request.device not in self._held.devices:
            raise NotFound(
                "no such device",
                reason="UNKNOWN_DEVICE",
                given=request.device,
                allowed=", ".join(sorted(self._held.devices)) or "none yet",
            )
        incarnation, cursor, started = request.incarnation, int(request.cursor), False
        while (device := self._held.devices.get(request.device)) is not None and not self._held.stopping:
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
        for name, device in sorted(self._held.devices.items()):
            stats = device.stats()
            if name in self._held.attached:
                stats.worker_id = self._held.attached[name].worker_id
            stats.orphans = self._held.num_orphans(name)
            for what in ("sequences_adopted", "orphans_released", "suspects_killed"):
                setattr(stats, what, self._held.counts[what, name])
            devices.append(stats)
        return kvstore_pb2.KvStatsResponse(
            store_incarnation=self._incarnation,
            uptime_ns=time.monotonic_ns() - self._started_ns,
            devices=devices,
            version=release(),
            weights=self._weights.stats(),
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
