"""A worker's attachment to the kvstore: mapped arenas, the control block, and the calls. Synchronous and thread-safe.

Hot path: at most two calls a step (``reserve`` and ``seal`` for all sequences that cross a page border; most steps need
none). Token logging and commits are plain memory writes through ``control``.

The worker does what an answer asks for (copies, tail copies, refills, in this order) before its next call: the sources
may be handed on after that. Rows that come with a new sequence (``num_cached``, a fork's) are committed by the worker,
once they are there.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

import grpc

from kvstore import messages
from kvstore.answers import (
    Admitted,
    Checkpointed,
    Forked,
    NewPage,
    PageCopy,
    Refill,
    Refused,
    Relinked,
    SealResult,
    Split,
    TailCopy,
    Truncated,
)
from kvstore.arena import Arena, Memory, close_all
from kvstore.checksum import page_checksum
from kvstore.control import ControlBlock, ControlShape
from kvstore.fd_server import deliver, fetch, num_descriptors
from kvstore.geometry import CacheGeometry
from kvstore.retention import pages_for, sealed_base
from protos import kvstore_pb2, kvstore_pb2_grpc, rpc
from protos.errors import (
    ConfigError,
    DeadlineExceeded,
    KvStoreLost,
    PermissionDenied,
    PreconditionFailed,
    RequestCancelled,
    TailpackError,
    Unavailable,
)

__all__ = [
    "Admitted",
    "Arena",
    "Attachment",
    "Checkpointed",
    "ControlBlock",
    "DeviceMemory",
    "Forked",
    "NewPage",
    "OpenRequest",
    "PageCopy",
    "Refill",
    "Refused",
    "Relinked",
    "SealResult",
    "Split",
    "TailCopy",
    "Truncated",
    "attach",
    "page_checksum",
    "stats",
    "verify",
    "watch",
]

CALL_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
VERDICT_TIMEOUT_S = 1.0
SLOWEST_PREFAULT = 64 << 20
"""Bytes a second. A virtual machine that gets its memory page by page was seen to do 125 MB/s."""


class DeviceMemory(Protocol):
    """What a worker on a GPU brings along: neither the store nor this module can make a GPU's memory."""

    @property
    def granularity(self) -> int:
        """Sizes of chunks are multiples of it; a power of two, in bytes."""

    def create(self, chunk_bytes: Sequence[int]) -> list[int]:
        """Zeroed chunks of these sizes, as descriptors that alone keep them alive; all or none.

        Raises:
            CapacityError: NOT_ENOUGH_MEMORY.
        """


@dataclass(frozen=True)
class OpenRequest:
    """A sequence to admit. ``max_tokens`` is the worst case, prompt and output together.

    ``frozen_request`` is kept in the control block (at most control.MAX_FROZEN_BYTES): what a new worker needs besides
    the token log. The prompt is in the log already; leave it out.

    ``reuse`` False computes the prompt even where its pages are cached; ``exact_only`` takes only what is exactly what
    this sequence would have computed (Admitted.prefix_exact is then True).
    """

    request_id: str
    tenant_salt: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    frozen_request: bytes = b""
    reuse: bool = True
    exact_only: bool = False


def attach(
    socket: Path,
    *,
    worker_id: str,
    device: str,
    geometry: CacheGeometry,
    arena_bytes: int,
    max_sequences: int,
    max_sequence_tokens: int,
    weights_digest: bytes,
    checkpoint_slots: int = 0,
    device_memory: DeviceMemory | None = None,
    timeout_s: float = 30.0,
    on_lost: Callable[[str], None] | None = None,
) -> Attachment:
    """Takes hold of a device's arenas and maps those in host memory; a GPU's are the caller's to map.

    Args:
        socket: the store's gRPC socket.
        device: "cpu:0", or "cuda:GPU-<uuid>".
        arena_bytes: for pages and tails together.
        checkpoint_slots: tails kept beside those of the sequences, for exact resumes.
        device_memory: of a "cuda:" device, and of no other.
        timeout_s: for the store to answer, besides the time to touch new host arenas and their control block
            (SLOWEST_PREFAULT bytes a second).
        on_lost: called once, from a thread of its own, when the attachment ends other than by ``close``; never where
            there was none.

    Raises:
        Unavailable: KVSTORE_NOT_THERE. DeadlineExceeded: no answer in time.
        PreconditionFailed: DEVICE_BUSY, GEOMETRY_MISMATCH. CapacityError: NOT_ENOUGH_MEMORY, of the host or of the GPU.
        ConfigError: ARENA_TOO_SMALL.
    """
    asked = kvstore_pb2.AttachOpen(
        worker_id=worker_id,
        device=device,
        pid=os.getpid(),
        geometry=geometry.to_proto(),
        geometry_digest=geometry.digest(),
        arena_bytes=arena_bytes,
        max_sequences=max_sequences,
        max_sequence_tokens=max_sequence_tokens,
        weights_digest=weights_digest,
        checkpoint_slots=checkpoint_slots,
        memory_granularity=device_memory.granularity if device_memory else 0,
    )
    # The store touches the control block too. How many pages it describes is the store's to say; not more than these.
    most_pages = tuple(arena_bytes // group.page_bytes for group in geometry.groups if group.page_bytes)
    control_bytes = ControlShape(most_pages, max_sequences, max_sequence_tokens).num_bytes
    touched_bytes = control_bytes + (0 if device_memory else arena_bytes)
    session = _Session(socket, asked, timeout_s + touched_bytes / SLOWEST_PREFAULT, on_lost)
    session.attach(device_memory)
    try:
        if session.attached.geometry_digest != geometry.digest():
            raise _mismatch(session.attached.geometry_digest.hex(), geometry.summary())
        arenas, tails, control = _map(session.attached, geometry, device, timeout_s)
    except BaseException:
        session.close()
        raise
    return Attachment(session, geometry, arenas, tails, control)


def stats(socket: Path, *, timeout_s: float = CALL_TIMEOUT_S) -> kvstore_pb2.KvStatsResponse:
    """The store's numbers, without an attachment. Raises Unavailable (KVSTORE_NOT_THERE)."""
    with rpc.sync_channel(f"unix:{socket}") as channel:
        try:
            return kvstore_pb2_grpc.KvStoreStub(channel).Stats(kvstore_pb2.KvStatsRequest(), timeout=timeout_s)
        except grpc.RpcError as failure:
            raise _not_there(socket, rpc.error_from(failure)) from failure


def verify(socket: Path, *, timeout_s: float = 60.0) -> list[str]:
    """Integrity problems that the store finds in its tables, hashes and checksums; empty when all is well."""
    with rpc.sync_channel(f"unix:{socket}") as channel:
        try:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            return list(stub.Verify(kvstore_pb2.VerifyRequest(), timeout=timeout_s).problems)
        except grpc.RpcError as failure:
            raise _not_there(socket, rpc.error_from(failure)) from failure


def watch(
    socket: Path, device: str, *, incarnation: str = "", cursor: int = 0, timeout_s: float | None = None
) -> Iterator[kvstore_pb2.WatchResponse]:
    """Which pages of a device can be reused, as they come and go. Close the iterator to end the stream.

    The first response is a snapshot unless ``cursor`` is one that this ``incarnation`` still remembers. ``lost`` says
    that what the caller had is void; a snapshot comes with it.

    Raises:
        Unavailable: KVSTORE_NOT_THERE. NotFound: UNKNOWN_DEVICE.
    """
    with rpc.sync_channel(f"unix:{socket}") as channel:
        request = kvstore_pb2.WatchRequest(device=device, incarnation=incarnation, cursor=cursor)
        stream = kvstore_pb2_grpc.KvStoreStub(channel).Watch(request, timeout=timeout_s)
        try:
            yield from stream
        except grpc.RpcError as failure:
            raise _not_there(socket, rpc.error_from(failure)) from failure
        finally:
            stream.cancel()


class Attachment:
    """A live hold on one device's memory; a context manager that detaches.

    After it ended (``close``, or the store went away) every call raises KvStoreLost. The mappings stay readable while
    someone holds a view of them; writing through them after ``close`` is a bug of the caller, as the store may hand
    them on.
    """

    def __init__(
        self,
        session: _Session,
        geometry: CacheGeometry,
        arenas: Mapping[str, Arena],
        tails: Mapping[str, Arena],
        control: ControlBlock,
    ) -> None:
        self._session = session
        self.epoch: int = session.attached.epoch
        self.store_incarnation: str = session.attached.store_incarnation
        self.geometry = geometry
        self.arenas = MappingProxyType(dict(arenas))
        """By group, of the groups that have pages. In host memory or, on a GPU, chunks to map."""
        self.tails = MappingProxyType(dict(tails))
        """By group, of the groups that have a tail; a page of these arenas is a tail slot."""
        self.control = control

    @property
    def lost(self) -> str | None:
        """Why the attachment is over; None while it lives."""
        return self._session.lost

    def open(self, sequences: Sequence[OpenRequest]) -> list[Admitted | Refused]:
        """Admits each, with cached pages of its prompt pinned and the rest of its worst case promised, or refuses it;
        answers in the order asked.

        Raises:
            InvalidRequest, TooLarge: one of them is malformed; then none was admitted.
        """
        request = kvstore_pb2.OpenRequest(
            epoch=self.epoch,
            sequences=[
                kvstore_pb2.OpenSequence(
                    request_id=s.request_id,
                    tenant_salt=s.tenant_salt,
                    prompt_token_ids=s.prompt_token_ids,
                    max_tokens=s.max_tokens,
                    frozen_request=s.frozen_request,
                    no_reuse=not s.reuse,
                    exact_only=s.exact_only,
                )
                for s in sequences
            ],
        )
        response = self._session.call(self._session.stub.Open, request)
        return [messages.open_from(result) for result in response.results]

    def due(self, slot: int, num_tokens: int, step_tokens: int) -> bool:
        """Whether ``reserve`` would hand out anything at (num_tokens, step_tokens); reads the control block only."""
        for group in self.geometry.groups:
            if group.packed:
                base = self.control.base(slot, group.name)
                if sealed_base(base, num_tokens, step_tokens, group.effective_window, self.geometry.margin) > base:
                    return True
            elif group.has_pages and pages_for(num_tokens) > self.control.num_pages(slot, group.name):
                return True
        return False

    def reserve(self, wanted: Sequence[tuple[int, int, int]]) -> dict[int, dict[str, list[NewPage]]]:
        """Hands out promised pages for each (slot, num_tokens, step_tokens).

        Dense groups get pages until ``num_tokens`` tokens have room. Packed groups get the pages that sealing at
        (num_tokens, step_tokens) will need; ``NewPage.source`` says what is in them already.

        Returns:
            slot -> group -> new pages in token order; slots that needed none are left out.

        Raises:
            NotFound: UNKNOWN_SLOT. InvalidRequest: OVER_PROMISE, DUPLICATE_SLOT. Nothing was reserved then.
        """
        self._session.demand_alive()
        # The control block says what a slot has, so only steps that cross a page border cost a call.
        short = [w for w in wanted if not self.control.is_live(w[0]) or self.due(*w)]
        if not short:
            return {}
        request = kvstore_pb2.ReserveRequest(epoch=self.epoch, sequences=_slot_tokens(short))
        return messages.reserve_from(self._session.call(self._session.stub.Reserve, request))

    def seal(
        self,
        sealed: Sequence[tuple[int, int, int]],
        checksums: Mapping[tuple[str, int], int] | None = None,
    ) -> SealResult:
        """Declares tokens [0, num_tokens) of each (slot, num_tokens, step_tokens) final and the pages reserved for them
        written: they are published, and the bases of packed groups move.

        Args:
            checksums: (group, page id) -> ``page_checksum`` of pages that were written; what ``verify`` compares.

        Raises:
            PreconditionFailed: NOT_COMMITTED, commit first; NOT_RESERVED, reserve the same numbers first.
        """
        request = kvstore_pb2.SealRequest(
            epoch=self.epoch,
            sequences=_slot_tokens(sealed),
            checksums=[
                kvstore_pb2.PageChecksum(group=group, page_id=page_id, checksum=checksum)
                for (group, page_id), checksum in (checksums or {}).items()
            ],
        )
        return messages.seal_from(self._session.call(self._session.stub.Seal, request))

    def truncate(self, slot: int, num_tokens: int) -> Truncated:
        """Forgets the tokens from num_tokens on; logged and committed lengths are lowered before this returns.

        Raises:
            PreconditionFailed: TRUNCATE_EXTENDS; TRUNCATE_TOO_DEEP, what the tail would be refilled from is not there.
            CapacityError: ARENA_FULL, pages that are shared with others have no replacement now.
            Nothing was changed then.
        """
        request = kvstore_pb2.TruncateRequest(epoch=self.epoch, slot=slot, num_tokens=num_tokens)
        return messages.truncate_from(self._session.call(self._session.stub.Truncate, request))

    def fork(self, slot: int, request_id: str, max_tokens: int, frozen_request: bytes = b"") -> Forked | Refused:
        """A new sequence with the committed tokens of another; sealed pages are shared, open pages and tails copied.

        Args:
            max_tokens: worst case of the new sequence, from its first token.
            frozen_request: of the new sequence; empty: the parent's.

        Raises:
            NotFound: UNKNOWN_SLOT. InvalidRequest, TooLarge: max_tokens.
        """
        request = kvstore_pb2.ForkRequest(
            epoch=self.epoch, slot=slot, request_id=request_id, max_tokens=max_tokens, frozen_request=frozen_request
        )
        return messages.fork_from(self._session.call(self._session.stub.Fork, request))

    def checkpoint(self, slot: int, num_tokens: int, kind: str) -> Checkpointed:
        """Keeps the sequence's tails and open pages as they are now, so that its first ``num_tokens`` tokens can be
        resumed exactly.

        Args:
            num_tokens: the committed length; or less, while the tails still hold that window.
            kind: "prompt_end", "turn_end" or "junction".

        Returns:
            Copies that the caller makes before its next call; empty when no checkpoint is taken (no budget, or it is
            there already).

        Raises:
            InvalidRequest: UNKNOWN_CHECKPOINT_KIND. PreconditionFailed: CHECKPOINT_NOT_DENSE.
        """
        request = kvstore_pb2.CheckpointRequest(epoch=self.epoch, slot=slot, num_tokens=num_tokens, kind=kind)
        return messages.checkpoint_from(self._session.call(self._session.stub.Checkpoint, request))

    def release(self, slots: Sequence[int]) -> int:
        """Ends sequences; pages with a hash stay cached for others. Returns the pages let go.

        Raises:
            NotFound: UNKNOWN_SLOT; then none was released.
        """
        request = kvstore_pb2.ReleaseRequest(epoch=self.epoch, slots=slots)
        return int(self._session.call(self._session.stub.Release, request).pages_freed)

    def verify(self) -> list[str]:
        """Integrity problems that the store finds; empty when all is well."""
        return list(self._session.call(self._session.stub.Verify, kvstore_pb2.VerifyRequest()).problems)

    def watch(self, *, incarnation: str = "", cursor: int = 0) -> Iterator[kvstore_pb2.WatchResponse]:
        """See ``kvstore.client.watch``; of this attachment's device."""
        request = kvstore_pb2.WatchRequest(device=self._session.device, incarnation=incarnation, cursor=cursor)
        stream = self._session.call(self._session.stub.Watch, request, timeout_s=None)
        try:
            yield from stream
        finally:
            stream.cancel()

    def stats(self) -> kvstore_pb2.KvStatsResponse:
        response: kvstore_pb2.KvStatsResponse = self._session.call(
            self._session.stub.Stats, kvstore_pb2.KvStatsRequest()
        )
        return response

    def close(self) -> None:
        """Detaches: the store frees all that this attachment held. Returns when it has, and is harmless the second
        time.
        """
        self._session.close()
        for arena in (*self.arenas.values(), *self.tails.values()):
            arena.close()

    def abandon(self) -> None:
        """Ends the attachment without saying that the memory is left alone: a thread of this process may still write to
        it. The store gives the device to nobody until the process is gone. ``close`` afterwards is harmless.
        """
        self._session.abandon()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Session:
    """The Attach stream with its reader thread, and the channel of the calls."""

    def __init__(
        self,
        socket: Path,
        asked: kvstore_pb2.AttachOpen,
        timeout_s: float,
        on_lost: Callable[[str], None] | None,
    ) -> None:
        self.lost: str | None = None
        self.device = asked.device
        self.attached = kvstore_pb2.Attached()  # what the store answered; filled by ``attach``
        self._socket = socket
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._channel = rpc.sync_channel(f"unix:{socket}")
        self.stub = kvstore_pb2_grpc.KvStoreStub(self._channel)
        self._outgoing: queue.SimpleQueue[kvstore_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._outgoing.put(kvstore_pb2.AttachRequest(open=asked))
        self._stream: Any = self.stub.Attach(iter(self._outgoing.get, None))
        self._answers: queue.SimpleQueue[kvstore_pb2.Attached | kvstore_pb2.CreateMemory | TailpackError]
        self._answers = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="kvstore-attachment", daemon=True)
        self._reader.start()

    def attach(self, device_memory: DeviceMemory | None) -> None:
        """Waits until the store has attached us, and makes a GPU's memory where it asks for that.

        Raises what the store answered, or what kept the memory from being made; the session is over then.
        """
        try:
            self.attached = self._attached(device_memory)
        except BaseException:
            self._end("never attached", tell=False)
            self._stream.cancel()
            self._channel.close()
            raise

    def _attached(self, device_memory: DeviceMemory | None) -> kvstore_pb2.Attached:
        answer = self._answer()
        if isinstance(answer, kvstore_pb2.CreateMemory):
            if device_memory is None:
                raise ConfigError(f"the store asks for device memory of {self.device}", given="none is at hand")
            fds = device_memory.create([size for arena in answer.arenas for size in arena.chunk_bytes])
            try:
                deliver(Path(answer.fd_socket), answer.fd_ticket, fds, timeout_s=self._timeout_s)
            except (PermissionDenied, Unavailable) as failure:
                raise self._verdict(failure) from failure
            finally:
                close_all(fds)
            answer = self._answer()
        assert isinstance(answer, kvstore_pb2.Attached)
        return answer

    def _verdict(self, failure: TailpackError) -> TailpackError:
        """Why a delivery failed: what the stream says, where it ends too (the store died, or waits no longer)."""
        try:
            answer = self._answers.get(timeout=VERDICT_TIMEOUT_S)
        except queue.Empty:
            return failure
        return _not_there(self._socket, answer) if isinstance(answer, TailpackError) else failure

    def _answer(self) -> kvstore_pb2.Attached | kvstore_pb2.CreateMemory:
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            answer = DeadlineExceeded("the kvstore did not answer the attach in time", given=f"{self._timeout_s:.1f} s")
        if isinstance(answer, TailpackError):
            raise _not_there(self._socket, answer)
        return answer

    def demand_alive(self) -> None:
        """Raises KvStoreLost when the attachment is over."""
        if self.lost is not None:
            raise _lost(self.lost)

    def call(self, method: Any, request: Any, *, timeout_s: float | None = CALL_TIMEOUT_S) -> Any:
        """One unary call. Raises KvStoreLost when the attachment is over or the store does not answer."""
        self.demand_alive()
        try:
            return method(request, timeout=timeout_s)
        except ValueError as failure:  # the channel was closed by another thread
            raise _lost(self.lost or str(failure)) from failure
        except grpc.RpcError as failure:
            error = rpc.error_from(failure)
            if isinstance(error, DeadlineExceeded):
                # Whether the store did what it was asked is unknown: nothing can be built on this attachment.
                self._end(f"the store did not answer within {CALL_TIMEOUT_S} s", tell=True)
            elif isinstance(error, RequestCancelled) or error.reason == "STALE_EPOCH":
                # How a store that stops answers a call in flight; the reader may not have read `revoked` yet.
                self._end(f"the store ended the attachment: {error.message}", tell=True)
            elif not isinstance(error, Unavailable) and self.lost is None:
                raise error from failure
            raise _lost(self.lost or str(error)) from failure

    def abandon(self) -> None:
        """Ends the stream without a goodbye; nor is that of a later ``close`` sent any more."""
        self._end("the attachment was abandoned", tell=False)

    def close(self) -> None:
        """Says that the memory is left alone, waits for the store to end the stream, closes the channel."""
        self._outgoing.put(kvstore_pb2.AttachRequest(detach=kvstore_pb2.Detach()))
        self._end("the attachment was closed", tell=False)
        if threading.current_thread() is not self._reader:  # on_lost may close
            self._reader.join(CLOSE_TIMEOUT_S)
        self._channel.close()

    def _read(self) -> None:
        why, attached = "the store ended the attachment", False
        try:
            for message in self._stream:
                kind = message.WhichOneof("message")
                if kind == "attached":
                    attached = True
                    self._answers.put(message.attached)
                elif kind == "create":
                    self._answers.put(message.create)
                elif kind == "revoked":
                    why = message.revoked.why
        except grpc.RpcError as failure:
            error = rpc.error_from(failure)
            self._answers.put(error)
            why = f"connection to the store lost: {error.message}"
        else:
            self._answers.put(Unavailable(why))
        self._end(why, tell=attached)  # a refusal is the caller's answer: nothing was lost

    def _end(self, why: str, *, tell: bool) -> None:
        """Marks the attachment as over; the first caller decides why, and whether on_lost hears of it."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
        self._outgoing.put(None)  # half-closes the stream and ends gRPC's sender thread
        if tell and self._on_lost:
            self._on_lost(why)


def _map(
    attached: kvstore_pb2.Attached, geometry: CacheGeometry, device: str, timeout_s: float
) -> tuple[dict[str, Arena], dict[str, Arena], ControlBlock]:
    """Fetches page arenas, tail arenas and the control block, and maps those in host memory. Their descriptors are
    closed again (mappings hold their own); those of device memory are the arenas' from here on.
    """
    manifest, fds = fetch(Path(attached.fd_socket), attached.fd_ticket, timeout_s=timeout_s)
    arenas: dict[str, Arena] = {}
    tails: dict[str, Arena] = {}
    control: ControlBlock | None = None
    with ExitStack() as on_error:
        rest = iter(fds)
        memories = [
            Memory(tuple(islice(rest, num_descriptors(entry))), entry.num_bytes, tuple(entry.chunk_bytes))
            for entry in manifest.entries
        ]
        for memory in memories:
            on_error.callback(memory.close)
        for entry, memory in zip(manifest.entries, memories, strict=True):
            if memory.readable and os.fstat(memory.fd).st_size != entry.num_bytes:
                size = os.fstat(memory.fd).st_size
                raise _mismatch(f"{size} bytes behind {entry.kind} {entry.group}", f"{entry.num_bytes}")
            if entry.kind == "control":
                control = ControlBlock(memory.map())
                continue
            group = geometry.group(entry.group)
            expected = group.page_bytes if entry.kind == "arena" else geometry.tail_slot_bytes(group)
            if entry.page_bytes != expected or entry.num_pages * expected != entry.num_bytes:
                raise _mismatch(f"{entry.page_bytes} bytes a page in {entry.kind} {entry.group}", f"{expected}")
            # Populated: the first step that reaches a page must not pay for its fault.
            mapped = memory.map(populate=True) if memory.readable else memory
            by_group = arenas if entry.kind == "arena" else tails
            by_group[entry.group] = Arena(entry.group, entry.num_pages, expected, mapped, device)
        paged = {group.name for group in geometry.groups if group.has_pages}
        tailed = {group.name for group in geometry.groups if group.has_tail}
        if control is None or set(arenas) != paged or set(tails) != tailed:
            raise _mismatch(
                f"arenas {sorted(arenas)}, tails {sorted(tails)}, control block {control is not None}",
                geometry.summary(),
            )
        if control.geometry_digest != geometry.digest():
            raise _mismatch(f"{control.geometry_digest.hex()} in the control block", geometry.summary())
        on_error.pop_all()
    for memory in memories:
        if memory.readable:
            memory.close()
    return arenas, tails, control


def _slot_tokens(wanted: Sequence[tuple[int, int, int]]) -> list[kvstore_pb2.SlotTokens]:
    return [
        kvstore_pb2.SlotTokens(slot=slot, num_tokens=num_tokens, step_tokens=step_tokens)
        for slot, num_tokens, step_tokens in wanted
    ]


def _mismatch(store: str, worker: str) -> PreconditionFailed:
    return PreconditionFailed(
        "the store's memory does not fit this geometry",
        reason="GEOMETRY_MISMATCH",
        given=f"{store} (store)",
        allowed=f"{worker} (worker)",
        hint="run worker and store of the same version",
    )


def _lost(why: str) -> KvStoreLost:
    return KvStoreLost(f"no kvstore: {why}", hint="attach again; sequences are computed again from their token logs")


def _not_there(socket: Path, error: TailpackError) -> TailpackError:
    """Plain gRPC unavailability, named; other errors as they are."""
    if not isinstance(error, Unavailable) or error.reason != Unavailable.default_reason:
        return error
    return Unavailable(
        "no kvstore answers on this socket",
        reason="KVSTORE_NOT_THERE",
        given=socket,
        allowed="the socket of a running store",
        hint="start one with `tailpack kvstore serve`",
    )
