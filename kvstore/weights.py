"""Memory of models' weights: made by the first worker of a model, mapped read-only by the others, outliving them all.

The store holds descriptors by key and knows who uses them. It reads neither weights nor their layout: the key names
what decides the bytes, and who maps them checks the manifest. A worker delivers memory once it is filled and, on the
host, sealed against writing; one that dies before leaves nothing behind.

All of it runs on one event loop.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

import structlog

from kvstore.arena import MAX_CHUNKS, Memory, close_all
from kvstore.attach_stream import delivered
from kvstore.fd_server import FdServer
from protos import kvstore_pb2
from protos.errors import InvalidRequest

log = structlog.get_logger("kvstore.weights")

DEFAULT_GRACE_S = 120.0
LOOK_S = 0.5
KEY_BYTES = 16
MAX_BYTES = 1 << 45
MAX_TENSORS = 1 << 16
MAX_NAME_BYTES = 200
MAX_MESSAGES_WAITING = 2
FILL_S = 600.0  # others wait for who fills; then they do it themselves
_MEMORY = re.compile(r"host(:node\d{1,4})?|cuda:GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_KEPT = kvstore_pb2.WeightsResponse(kept=kvstore_pb2.WeightsKept())
_FILL = kvstore_pb2.WeightsResponse(fill=kvstore_pb2.WeightsFill())


@dataclass
class Weights:
    """``users``: workers that map it; ``idle_since_s``: since when there is none, by a monotonic clock."""

    key: bytes
    where: str
    model: str
    form: str
    memory: Memory
    manifest: kvstore_pb2.WeightsManifest
    users: int = 0
    idle_since_s: float = 0.0


class WeightsStore:
    """Args:
    fd_server: where workers fetch and bring descriptors.
    grace_s: for how long memory without a user is kept.
    """

    def __init__(self, fd_server: FdServer, *, grace_s: float = DEFAULT_GRACE_S) -> None:
        self._fd_server = fd_server
        self._grace_s = grace_s
        self._held: dict[bytes, Weights] = {}
        self._filling: dict[bytes, asyncio.Event] = {}  # set when it is over, however it went
        self._inboxes: set[_Inbox] = set()

    async def serve(
        self, requests: AsyncIterator[kvstore_pb2.WeightsRequest]
    ) -> AsyncGenerator[kvstore_pb2.WeightsResponse, None]:
        """The life of one user: what Weights answers.

        Raises:
            InvalidRequest: BAD_WEIGHTS, a message is out of turn, malformed or out of bounds.
            PreconditionFailed: BAD_MEMORY, what was delivered is not what it should be.
            Unavailable: MEMORY_NOT_DELIVERED.
        """
        inbox = _Inbox(requests)
        self._inboxes.add(inbox)
        used: Weights | None = None
        try:
            asked = _opened(await inbox.get())
            offered = asked.held if asked.HasField("held") else None
            while not inbox.ended.done():
                if asked.key in self._held:
                    used = self._use(self._held[asked.key])
                    ticket = self._fd_server.issue(*_parcel(used), lambda holder: holder.close())
                    try:
                        yield _KEPT if offered is not None else _ready(used, ticket, str(self._fd_server.path))
                        if (request := await inbox.get()) is None:
                            return
                    finally:
                        self._fd_server.withdraw(ticket)
                    if request.WhichOneof("message") != "refused":
                        raise _bad("out of turn", request.WhichOneof("message"), "refused")
                    self._give_up(used, f"a worker refuses it: {request.refused.why[:MAX_NAME_BYTES]}")
                    self._leave(used)
                    used = offered = None
                elif offered is not None:
                    async for answer in self._take(asked, offered, inbox):
                        yield answer
                elif (other := self._filling.get(asked.key)) is not None:
                    if not await _either(other, inbox.ended, FILL_S) and self._filling.get(asked.key) is other:
                        log.warning("weights take too long: who waits makes them too", key=asked.key.hex())
                        del self._filling[asked.key]
                else:
                    over = self._filling[asked.key] = asyncio.Event()
                    self._make_room(asked)
                    try:
                        yield _FILL
                        if (request := await inbox.get()) is None:
                            return
                        if request.WhichOneof("message") != "filled":
                            raise _bad("out of turn", request.WhichOneof("message"), "filled")
                        offered = request.filled
                        _check_filled(offered, asked.memory)
                        async for answer in self._take(asked, offered, inbox):
                            yield answer
                    finally:
                        if self._filling.get(asked.key) is over:  # else another fills too
                            del self._filling[asked.key]
                        over.set()
        finally:
            self._inboxes.discard(inbox)
            inbox.ended.cancel()
            if used is not None:
                self._leave(used)

    async def _take(
        self, asked: kvstore_pb2.WeightsOpen, filled: kvstore_pb2.WeightsFilled, inbox: _Inbox
    ) -> AsyncGenerator[kvstore_pb2.WeightsResponse, None]:
        """Has memory delivered, and holds it."""
        with self._fd_server.expect(max(1, len(filled.chunk_bytes))) as (ticket, delivery):
            deliver = kvstore_pb2.WeightsDeliver(fd_ticket=ticket, fd_socket=str(self._fd_server.path))
            yield kvstore_pb2.WeightsResponse(deliver=deliver)
            await delivered(delivery, inbox.ended)
            fds, holder = delivery.take()
        if holder is not None:
            holder.close()
        self._keep(asked, filled, fds)

    def _keep(self, asked: kvstore_pb2.WeightsOpen, filled: kvstore_pb2.WeightsFilled, fds: Sequence[int]) -> None:
        """Takes memory in. Raises PreconditionFailed (BAD_MEMORY); nothing stays then."""
        try:
            memory = Memory(tuple(fds), filled.num_bytes, tuple(filled.chunk_bytes))
            if memory.readable:
                memory = Memory.held(memory.fd, filled.num_bytes, read_only=True)
        except BaseException:
            close_all(fds)
            raise
        if asked.key in self._held:  # two brought it at once
            memory.close()
            return
        self._held[asked.key] = Weights(
            asked.key, asked.memory, asked.model, asked.form, memory, filled.manifest, idle_since_s=time.monotonic()
        )
        log.info(
            "weights kept",
            key=asked.key.hex(),
            model=asked.model,
            memory=asked.memory,
            num_bytes=memory.allocated_bytes,
            tensors=len(filled.manifest.tensors),
            worker=asked.worker_id,
            brought_back=asked.HasField("held"),
        )

    def _use(self, weights: Weights) -> Weights:
        weights.users += 1
        return weights

    def _leave(self, weights: Weights) -> None:
        weights.users -= 1
        weights.idle_since_s = time.monotonic()
        if not weights.users and self._held.get(weights.key) is not weights:  # it was given up
            weights.memory.close()

    def _give_up(self, weights: Weights, why: str) -> None:
        """Nobody gets it any more. Its descriptors go with its last user; the memory itself with the last mapping."""
        if self._held.get(weights.key) is weights:
            del self._held[weights.key]
            log.warning("weights given up", key=weights.key.hex(), model=weights.model, memory=weights.where, why=why)

    # --- the rest ---

    async def watch(self) -> None:
        """Lets memory go that nobody uses; until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_S, max(0.05, self._grace_s)))
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        """One look of ``watch``, at a time of the monotonic clock."""
        for weights in list(self._held.values()):
            if not weights.users and now_s - weights.idle_since_s > self._grace_s:
                self._let_go(weights)

    def _make_room(self, asked: kvstore_pb2.WeightsOpen) -> None:
        """Before weights are made: what nobody uses there goes, so that an upgrade needs no room for both."""
        for weights in list(self._held.values()):
            if not weights.users and weights.where == asked.memory:
                self._let_go(weights)

    def _let_go(self, weights: Weights) -> None:
        del self._held[weights.key]
        log.info(
            "weights let go: nobody uses them",
            key=weights.key.hex(),
            model=weights.model,
            memory=weights.where,
            num_bytes=weights.memory.allocated_bytes,
        )
        weights.memory.close()

    def stats(self) -> list[kvstore_pb2.WeightsStats]:
        return [
            kvstore_pb2.WeightsStats(
                key=weights.key,
                memory=weights.where,
                model=weights.model,
                form=weights.form,
                num_bytes=weights.memory.allocated_bytes,
                users=weights.users,
            )
            for weights in self._held.values()
        ]

    def stop(self) -> None:
        """Ends all streams. The workers keep what they map, and bring it to the next store."""
        for inbox in self._inboxes:
            inbox.ended.cancel()

    def close(self) -> None:
        """Lets go of all memory; after the server has stopped."""
        for weights in self._held.values():
            weights.memory.close()
        self._held.clear()


class _Inbox:
    """A worker's messages; ``ended`` reads them, until the stream's end."""

    def __init__(self, requests: AsyncIterator[kvstore_pb2.WeightsRequest]) -> None:
        self._queue: asyncio.Queue[kvstore_pb2.WeightsRequest | None] = asyncio.Queue()
        self.ended = asyncio.create_task(self._read(requests))

    async def get(self) -> kvstore_pb2.WeightsRequest | None:
        """The next message; None: there comes no more."""
        return await self._queue.get()

    async def _read(self, requests: AsyncIterator[kvstore_pb2.WeightsRequest]) -> bool:
        try:
            async for request in requests:
                if self._queue.qsize() > MAX_MESSAGES_WAITING:
                    break
                self._queue.put_nowait(request)
        finally:
            self._queue.put_nowait(None)
        return True


async def _either(event: asyncio.Event, ended: asyncio.Task[bool], timeout_s: float) -> bool:
    """Waits for one of them; whether it came in time."""
    waiting = asyncio.create_task(event.wait())
    try:
        done, _ = await asyncio.wait((waiting, ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)
    finally:
        waiting.cancel()


def _opened(request: kvstore_pb2.WeightsRequest | None) -> kvstore_pb2.WeightsOpen:
    if request is None or request.WhichOneof("message") != "open":
        raise _bad("out of turn", request and request.WhichOneof("message"), "open")
    asked = request.open
    if len(asked.key) != KEY_BYTES:
        raise _bad("the key has another length", f"{len(asked.key)} bytes", f"{KEY_BYTES} bytes")
    if not _MEMORY.fullmatch(asked.memory):
        raise _bad("no such memory", asked.memory[:MAX_NAME_BYTES], "host, host:node<n>, cuda:GPU-<uuid>")
    for name in (asked.model, asked.worker_id):
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise _bad("a name is empty or too long", f"{len(name.encode())} bytes", f"1 to {MAX_NAME_BYTES}")
    if len(asked.form.encode()) > MAX_NAME_BYTES:
        raise _bad("the form is too long", f"{len(asked.form.encode())} bytes", f"at most {MAX_NAME_BYTES}")
    if asked.HasField("held"):
        _check_filled(asked.held, asked.memory)
    return asked


def _check_filled(filled: kvstore_pb2.WeightsFilled, where: str) -> None:
    """Raises InvalidRequest (BAD_WEIGHTS): what is said of the memory is out of bounds."""
    if not 0 < filled.num_bytes <= MAX_BYTES:
        raise _bad("the size is out of bounds", f"{filled.num_bytes} bytes", f"1 to {MAX_BYTES}")
    chunks = filled.chunk_bytes
    if where.startswith("host") != (not chunks) or len(chunks) > MAX_CHUNKS:
        raise _bad(f"chunks of {where}", len(chunks), f"none of the host's, 1 to {MAX_CHUNKS} of a GPU's")
    if chunks and (min(chunks) < 1 or not filled.num_bytes <= sum(chunks) <= MAX_BYTES):
        raise _bad("the chunks do not hold the weights", f"{sum(chunks)} bytes", f"{filled.num_bytes} or more")
    tensors = filled.manifest.tensors
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise _bad("the number of tensors is out of bounds", len(tensors), f"1 to {MAX_TENSORS}")
    if any(len(t.name.encode()) > MAX_NAME_BYTES or t.offset >= filled.num_bytes for t in tensors):
        raise _bad("a tensor's name is too long, or it lies outside", filled.num_bytes, "offsets below the size")


def _parcel(weights: Weights) -> tuple[kvstore_pb2.FdManifest, list[int]]:
    memory = weights.memory
    entry = kvstore_pb2.FdEntry(kind="weights", num_bytes=memory.num_bytes, chunk_bytes=memory.chunk_bytes)
    return kvstore_pb2.FdManifest(entries=[entry]), list(memory.fds)


def _ready(weights: Weights, ticket: bytes, path: str) -> kvstore_pb2.WeightsResponse:
    filled = kvstore_pb2.WeightsFilled(
        num_bytes=weights.memory.num_bytes, chunk_bytes=weights.memory.chunk_bytes, manifest=weights.manifest
    )
    return kvstore_pb2.WeightsResponse(ready=kvstore_pb2.WeightsReady(fd_ticket=ticket, fd_socket=path, filled=filled))


def _bad(what: str, given: object, allowed: str = "") -> InvalidRequest:
    return InvalidRequest(f"weights: {what}", reason="BAD_WEIGHTS", given=given, allowed=allowed or None)
