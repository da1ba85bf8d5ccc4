"""A worker's attachment to the kvstore: mapped arenas, the control block, and the calls. Synchronous and thread-safe.

Hot path: at most two calls a step (``reserve`` and ``seal`` for all sequences that cross a page border; most steps need
none). Token logging and commits are plain memory writes through ``control``.

The worker does what an answer asks for (copies, tail copies, refills, in this order) before its next call: the sources
may be handed on after that. Rows that come with a new sequence (``num_cached``, a fork's) are committed by the worker,
once they are there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

import grpc

from kvstore import messages
from kvstore.answers import (
    Admitted,
    Adopted,
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
from kvstore.arena import Arena
from kvstore.checksum import page_checksum
from kvstore.control import ControlBlock
from kvstore.control_layout import ControlShape
from kvstore.geometry import CacheGeometry
from kvstore.mapping import Mapped, map_memory, mismatch
from kvstore.retention import pages_for, sealed_base
from kvstore.session import CALL_TIMEOUT_S, DeviceMemory, Session, lost, not_there
from protos import kvstore_pb2, kvstore_pb2_grpc, rpc
from protos.errors import DeadlineExceeded, PreconditionFailed, TailpackError, Unavailable

__all__ = [
    "Admitted",
    "Adopted",
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

REATTACH_EVERY_S = 0.1
SLOWEST_PREFAULT = 64 << 20
"""Bytes a second. A virtual machine that gets its memory page by page was seen to do 125 MB/s."""


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
        adopts=True,
    )
    # The store touches the control block too. How many pages it describes is the store's to say; not more than these.
    most_pages = tuple(arena_bytes // group.page_bytes for group in geometry.groups if group.page_bytes)
    control_bytes = ControlShape(most_pages, max_sequences, max_sequence_tokens).num_bytes
    touched_bytes = control_bytes + (0 if device_memory else arena_bytes)
    link = _Link(socket, asked, timeout_s + touched_bytes / SLOWEST_PREFAULT, on_lost)
    session = link.session()
    session.attach(device_memory)
    try:
        if session.attached.geometry_digest != geometry.digest():
            raise mismatch(session.attached.geometry_digest.hex(), geometry.summary())
        mapped = map_memory(session.attached, geometry, device, timeout_s)
    except BaseException:
        session.close()
        raise
    return Attachment(link, session, geometry, mapped)


def stats(socket: Path, *, timeout_s: float = CALL_TIMEOUT_S) -> kvstore_pb2.KvStatsResponse:
    """The store's numbers, without an attachment. Raises Unavailable (KVSTORE_NOT_THERE)."""
    with rpc.sync_channel(f"unix:{socket}") as channel:
        try:
            return kvstore_pb2_grpc.KvStoreStub(channel).Stats(kvstore_pb2.KvStatsRequest(), timeout=timeout_s)
        except grpc.RpcError as failure:
            raise not_there(socket, rpc.error_from(failure)) from failure


def verify(socket: Path, *, timeout_s: float = 60.0) -> list[str]:
    """Integrity problems that the store finds in its tables, hashes and checksums; empty when all is well."""
    with rpc.sync_channel(f"unix:{socket}") as channel:
        try:
            stub = kvstore_pb2_grpc.KvStoreStub(channel)
            return list(stub.Verify(kvstore_pb2.VerifyRequest(), timeout=timeout_s).problems)
        except grpc.RpcError as failure:
            raise not_there(socket, rpc.error_from(failure)) from failure


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
            raise not_there(socket, rpc.error_from(failure)) from failure
        finally:
            stream.cancel()


@dataclass(frozen=True)
class _Link:
    """What it takes to open a session with the store of this socket, whichever it is by then."""

    socket: Path
    asked: kvstore_pb2.AttachOpen
    timeout_s: float
    on_lost: Callable[[str], None] | None

    def session(self) -> Session:
        return Session(self.socket, self.asked, self.timeout_s, self.on_lost)

    def session_with_memory(self) -> Session:
        asked = kvstore_pb2.AttachOpen(holds_memory=True)
        asked.MergeFrom(self.asked)
        return Session(self.socket, asked, self.timeout_s, self.on_lost)


class Attachment:
    """A live hold on one device's memory; a context manager that detaches.

    After it ended (``close``, or the store went away) every call raises KvStoreLost. Where the store went away,
    ``reattach`` goes on with the next one. The mappings stay readable while someone holds a view of them; writing
    through them after ``close`` is a bug of the caller, as the store may hand them on.
    """

    def __init__(self, link: _Link, session: Session, geometry: CacheGeometry, mapped: Mapped) -> None:
        self._link = link
        self._session = session
        self._mapped = mapped
        self._repeated: set[int] = set()  # slots whose next reserve hands out again what was reserved
        self.geometry = geometry
        self.arenas = MappingProxyType(dict(mapped.arenas))
        """By group, of the groups that have pages. In host memory or, on a GPU, chunks to map."""
        self.tails = MappingProxyType(dict(mapped.tails))
        """By group, of the groups that have a tail; a page of these arenas is a tail slot."""
        self.control: ControlBlock = mapped.control
        self._take(session)

    def _take(self, session: Session) -> None:
        self._session = session
        self.epoch: int = session.attached.epoch
        self.store_incarnation: str = session.attached.store_incarnation
        self.adopted: tuple[Adopted, ...] = tuple(
            messages.adopted_from(message, self.control) for message in session.attached.adopted
        )
        """Sequences that were there already: at the start those of a worker that is gone, after ``reattach`` all of
        this worker's. They are this attachment's: those that it does not want it releases."""

    def reattach(self, timeout_s: float) -> None:
        """Goes on with the next store of the same socket, after this one died or stopped: hands it the memory, which it
        adopts. Returns when it has. Blocks; called by the thread that makes the calls, between two of them.

        Mappings, slots, pages and tails stay as they are; ``epoch``, ``store_incarnation`` and ``adopted`` change. Of a
        call that failed with KvStoreLost, either all was done or nothing; ``adopted`` and the control block say which:

        - open, fork: a slot in ``adopted`` that the caller does not know of. Release it and call again.
        - release: a slot that is not in ``adopted``.
        - reserve, seal: call again with the same numbers; what was done is found done. Dense groups: pages that were
          reserved stand in the control block (``sequence_pages``).
        - truncate: ``control.logged`` says; where copies were asked for and not made, the slot is not ``intact``.
        - checkpoint: all are forgotten.

        A slot that is not ``intact`` is to be released and opened again.

        Args:
            timeout_s: for a store to be there and to adopt.

        Raises:
            KvStoreLost: none came in time, the store ended the attachment itself, it refuses the memory
            (BAD_CONTROL_BLOCK, BAD_MEMORY) or holds other memory for the device. The memory is not this worker's then.
        """
        deadline = time.monotonic() + timeout_s
        if self._session.lost is None:
            return
        if self._session.revoked or not self._mapped.memories:
            raise lost(self._session.lost)
        self._session.drop()
        why: TailpackError = Unavailable(self._session.lost)
        while True:
            session = self._link.session_with_memory()
            try:
                session.attach(None, self._mapped.fds)
            except (Unavailable, DeadlineExceeded) as not_yet:
                why = not_yet
            except PreconditionFailed as refused:
                if refused.reason != "DEVICE_BUSY":
                    raise lost(str(refused)) from refused
                why = refused
            except TailpackError as refused:
                raise lost(str(refused)) from refused
            else:
                self._repeated = set(self.control.live_slots())
                self._take(session)
                return
            if time.monotonic() + REATTACH_EVERY_S > deadline:
                raise lost(f"no other one came within {timeout_s:g} s: {why}")
            time.sleep(REATTACH_EVERY_S)

    @property
    def revoked(self) -> bool:
        """Whether the store ended the attachment for good: ``reattach`` would be refused."""
        return self._session.revoked

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
        handed: dict[int, dict[str, list[NewPage]]] = {}
        for repeat in (False, True):
            sequences = _slot_tokens([w for w in short if (w[0] in self._repeated) == repeat])
            if sequences:
                request = kvstore_pb2.ReserveRequest(epoch=self.epoch, sequences=sequences, repeat=repeat)
                handed |= messages.reserve_from(self._session.call(self._session.stub.Reserve, request))
        self._repeated.difference_update(slot for slot, *_ in short)
        return handed

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

    def release(self, slots: Sequence[int], damaged: Mapping[str, Sequence[int]] | None = None) -> int:
        """Ends sequences; pages with a hash stay cached for others. Returns the pages let go.

        Args:
            damaged: by group, pages that are not what was sealed: nobody goes on from them any more.

        Raises:
            NotFound: UNKNOWN_SLOT; then none was released.
        """
        condemned = [
            kvstore_pb2.DamagedPages(group=name, page_ids=page_ids) for name, page_ids in (damaged or {}).items()
        ]
        request = kvstore_pb2.ReleaseRequest(epoch=self.epoch, slots=slots, damaged=condemned)
        return int(self._session.call(self._session.stub.Release, request).pages_freed)

    def verify(self) -> list[str]:
        """Integrity problems that the store finds; empty when all is well."""
        return list(self._session.call(self._session.stub.Verify, kvstore_pb2.VerifyRequest()).problems)

    def watch(self, *, incarnation: str = "", cursor: int = 0) -> Iterator[kvstore_pb2.WatchResponse]:
        """See ``kvstore.client.watch``; of this attachment's device."""
        request = kvstore_pb2.WatchRequest(device=self._session.device, incarnation=incarnation, cursor=cursor)
        stream = self._session.call(self._session.stub.Watch, request, bounded=False)
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
        self._mapped.close()

    def abandon(self) -> None:
        """Ends the attachment without saying that the memory is left alone: a thread of this process may still write to
        it. The store ends this process, and gives the device to nobody until it is gone. ``close`` afterwards is
        harmless.
        """
        self._session.abandon()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _slot_tokens(wanted: Sequence[tuple[int, int, int]]) -> list[kvstore_pb2.SlotTokens]:
    return [
        kvstore_pb2.SlotTokens(slot=slot, num_tokens=num_tokens, step_tokens=step_tokens)
        for slot, num_tokens, step_tokens in wanted
    ]
