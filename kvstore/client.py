"""A worker's attachment to the kvstore: mapped arenas, the control block, and the calls. Synchronous and thread-safe.

Hot path: at most one call a step (``reserve`` for all sequences that cross a page border; most steps need none). Token
logging and commits are plain memory writes through ``control``.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import grpc

from kvstore.arena import Arena
from kvstore.control import ControlBlock, ControlShape
from kvstore.fd_server import fetch
from kvstore.geometry import CacheGeometry
from kvstore.sequences import Admitted, PageCopy, Refused
from protos import kvstore_pb2, kvstore_pb2_grpc, rpc
from protos.errors import (
    DeadlineExceeded,
    KvStoreLost,
    PreconditionFailed,
    RequestCancelled,
    TailpackError,
    Unavailable,
)

__all__ = ["Admitted", "Arena", "Attachment", "ControlBlock", "OpenRequest", "PageCopy", "Refused", "attach", "stats"]

CALL_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
SLOWEST_PREFAULT = 64 << 20
"""Bytes a second. A virtual machine that gets its memory page by page was seen to do 125 MB/s."""


@dataclass(frozen=True)
class OpenRequest:
    """A sequence to admit. ``max_tokens`` is the worst case, prompt and output together.

    ``frozen_request`` is kept in the control block (at most control.MAX_FROZEN_BYTES): what a new worker needs besides
    the token log. The prompt is in the log already; leave it out.
    """

    request_id: str
    tenant_salt: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    frozen_request: bytes = b""


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
    timeout_s: float = 30.0,
    on_lost: Callable[[str], None] | None = None,
) -> Attachment:
    """Takes hold of a device's arenas and maps them.

    Args:
        socket: the store's gRPC socket.
        timeout_s: for the store to answer, besides the time to touch new arenas and their control block
            (SLOWEST_PREFAULT bytes a second).
        on_lost: called once, from a thread of its own, when the attachment ends other than by ``close``.

    Raises:
        Unavailable: KVSTORE_NOT_THERE. DeadlineExceeded: no answer in time.
        PreconditionFailed: DEVICE_BUSY, GEOMETRY_MISMATCH. CapacityError: NOT_ENOUGH_MEMORY. ConfigError:
        ARENA_TOO_SMALL.
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
    )
    # The store touches the control block too. How many pages it describes is the store's to say; not more than these.
    most_pages = tuple(arena_bytes // group.page_bytes for group in geometry.groups if group.page_bytes)
    control_bytes = ControlShape(most_pages, max_sequences, max_sequence_tokens).num_bytes
    session = _Session(socket, asked, timeout_s + (arena_bytes + control_bytes) / SLOWEST_PREFAULT, on_lost)
    try:
        if session.attached.geometry_digest != geometry.digest():
            raise _mismatch(session.attached.geometry_digest.hex(), geometry.summary())
        arenas, control = _map(session.attached, geometry, timeout_s)
    except BaseException:
        session.close()
        raise
    return Attachment(session, geometry, arenas, control)


def stats(socket: Path, *, timeout_s: float = CALL_TIMEOUT_S) -> kvstore_pb2.KvStatsResponse:
    """The store's numbers, without an attachment. Raises Unavailable (KVSTORE_NOT_THERE)."""
    with rpc.sync_channel(f"unix:{socket}") as channel:
        try:
            return kvstore_pb2_grpc.KvStoreStub(channel).Stats(kvstore_pb2.KvStatsRequest(), timeout=timeout_s)
        except grpc.RpcError as failure:
            raise _not_there(socket, rpc.error_from(failure)) from failure


class Attachment:
    """A live hold on one device's memory; a context manager that detaches.

    After it ended (``close``, or the store went away) every call raises KvStoreLost. The mappings stay readable while
    someone holds a view of them; writing through them after ``close`` is a bug of the caller, as the store may hand
    them on.
    """

    def __init__(
        self, session: _Session, geometry: CacheGeometry, arenas: Mapping[str, Arena], control: ControlBlock
    ) -> None:
        self._session = session
        self.epoch: int = session.attached.epoch
        self.store_incarnation: str = session.attached.store_incarnation
        self.geometry = geometry
        self.arenas = MappingProxyType(dict(arenas))
        self.control = control

    @property
    def lost(self) -> str | None:
        """Why the attachment is over; None while it lives."""
        return self._session.lost

    def open(self, sequences: Sequence[OpenRequest]) -> list[Admitted | Refused]:
        """Admits each, with the pages of its worst case promised, or refuses it; answers in the order asked.

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
                )
                for s in sequences
            ],
        )
        response = self._session.call(self._session.stub.Open, request)
        return [
            Admitted(r.slot)
            if r.admitted
            else Refused(r.short_group, int(r.pages_needed), int(r.pages_free), int(r.pages_total))
            for r in response.results
        ]

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> dict[int, dict[str, list[int]]]:
        """Makes room for ``num_tokens`` tokens of each (slot, num_tokens), out of what was promised.

        Returns:
            slot -> group -> new page ids in token order; slots that already had room are left out.

        Raises:
            NotFound: UNKNOWN_SLOT. InvalidRequest: OVER_PROMISE, DUPLICATE_SLOT. Nothing was reserved then.
        """
        self._session.demand_alive()
        # The control block says how many pages a slot has, so only steps that cross a page border cost a call.
        short = [(slot, num_tokens) for slot, num_tokens in wanted if num_tokens > self.control.room(slot)]
        if not short:
            return {}
        request = kvstore_pb2.ReserveRequest(epoch=self.epoch, sequences=_slot_tokens(short))
        response = self._session.call(self._session.stub.Reserve, request)
        return {s.slot: {g.group: list(g.page_ids) for g in s.groups} for s in response.sequences}

    def seal(self, sealed: Sequence[tuple[int, int]]) -> int:
        """Declares tokens [0, num_tokens) of each slot final; whole pages below are immutable from now on.

        Returns:
            Pages sealed by this call, all groups together.

        Raises:
            PreconditionFailed: NOT_COMMITTED, commit first.
        """
        request = kvstore_pb2.SealRequest(epoch=self.epoch, sequences=_slot_tokens(sealed))
        return int(self._session.call(self._session.stub.Seal, request).pages_sealed)

    def truncate(self, slot: int, num_tokens: int) -> list[PageCopy]:
        """Forgets the tokens from num_tokens on; logged and committed lengths are lowered before this returns.

        Returns:
            Copies that the caller makes before it writes to any page. Both pages are in its arenas.

        Raises:
            PreconditionFailed: TRUNCATE_EXTENDS.
        """
        request = kvstore_pb2.TruncateRequest(epoch=self.epoch, slot=slot, num_tokens=num_tokens)
        response = self._session.call(self._session.stub.Truncate, request)
        return [PageCopy(c.group, c.from_page, c.to_page, c.num_tokens) for c in response.copies]

    def release(self, slots: Sequence[int]) -> int:
        """Ends sequences; returns the pages freed. Raises NotFound (UNKNOWN_SLOT): then none was released."""
        request = kvstore_pb2.ReleaseRequest(epoch=self.epoch, slots=slots)
        return int(self._session.call(self._session.stub.Release, request).pages_freed)

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
        for arena in self.arenas.values():
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
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._channel = rpc.sync_channel(f"unix:{socket}")
        self.stub = kvstore_pb2_grpc.KvStoreStub(self._channel)
        self._outgoing: queue.SimpleQueue[kvstore_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._outgoing.put(kvstore_pb2.AttachRequest(open=asked))
        self._stream: Any = self.stub.Attach(iter(self._outgoing.get, None))
        first: queue.SimpleQueue[kvstore_pb2.Attached | TailpackError] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, args=(first,), name="kvstore-attachment", daemon=True)
        self._reader.start()
        try:
            answer = first.get(timeout=timeout_s)
        except queue.Empty:
            answer = DeadlineExceeded("the kvstore did not answer the attach in time", given=f"{timeout_s:.1f} s")
        if isinstance(answer, TailpackError):
            self._end("never attached", tell=False)
            self._stream.cancel()
            self._channel.close()
            raise _not_there(socket, answer)
        self.attached = answer

    def demand_alive(self) -> None:
        """Raises KvStoreLost when the attachment is over."""
        if self.lost is not None:
            raise _lost(self.lost)

    def call(self, method: Any, request: Any) -> Any:
        """One unary call. Raises KvStoreLost when the attachment is over or the store does not answer."""
        self.demand_alive()
        try:
            return method(request, timeout=CALL_TIMEOUT_S)
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

    def _read(self, first: queue.SimpleQueue[kvstore_pb2.Attached | TailpackError]) -> None:
        why = "the store ended the attachment"
        try:
            for message in self._stream:
                kind = message.WhichOneof("message")
                if kind == "attached":
                    first.put(message.attached)
                elif kind == "revoked":
                    why = message.revoked.why
        except grpc.RpcError as failure:
            error = rpc.error_from(failure)
            first.put(error)
            why = f"connection to the store lost: {error.message}"
        else:
            first.put(Unavailable(why))
        self._end(why, tell=True)

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
    attached: kvstore_pb2.Attached, geometry: CacheGeometry, timeout_s: float
) -> tuple[dict[str, Arena], ControlBlock]:
    """Fetches and maps everything; the descriptors are closed again (mappings hold their own)."""
    manifest, fds = fetch(Path(attached.fd_socket), attached.fd_ticket, timeout_s=timeout_s)
    arenas: dict[str, Arena] = {}
    control: ControlBlock | None = None
    try:
        for entry, fd in zip(manifest.entries, fds, strict=True):
            if os.fstat(fd).st_size != entry.num_bytes:
                raise _mismatch(f"{os.fstat(fd).st_size} bytes behind {entry.kind} {entry.group}", f"{entry.num_bytes}")
            if entry.kind == "control":
                control = ControlBlock(mmap.mmap(fd, entry.num_bytes))
            else:
                expected = geometry.group(entry.group).page_bytes
                if entry.page_bytes != expected or entry.num_pages * expected != entry.num_bytes:
                    raise _mismatch(f"{entry.page_bytes} bytes a page in group {entry.group}", f"{expected}")
                # Populated: the first step that reaches a page must not pay for its fault.
                mapping = mmap.mmap(fd, entry.num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                arenas[entry.group] = Arena(entry.group, entry.num_pages, expected, mapping)
    finally:
        for fd in fds:
            os.close(fd)
    if control is None or set(arenas) != {group.name for group in geometry.groups}:
        raise _mismatch(f"arenas {sorted(arenas)}, control block {control is not None}", geometry.summary())
    if control.geometry_digest != geometry.digest():
        raise _mismatch(f"{control.geometry_digest.hex()} in the control block", geometry.summary())
    return arenas, control


def _slot_tokens(pairs: Sequence[tuple[int, int]]) -> list[kvstore_pb2.SlotTokens]:
    return [kvstore_pb2.SlotTokens(slot=slot, num_tokens=num_tokens) for slot, num_tokens in pairs]


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
