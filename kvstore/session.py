"""The Attach stream of a worker: a reader thread, a thread for heartbeats, and the channel of the calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc

from kvstore.arena import close_all
from kvstore.fd_server import deliver
from protos import kvstore_pb2, kvstore_pb2_grpc, rpc
from protos.errors import (
    ConfigError,
    DeadlineExceeded,
    KvStoreLost,
    PermissionDenied,
    RequestCancelled,
    TailpackError,
    Unavailable,
)

CALL_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
VERDICT_TIMEOUT_S = 1.0
HEARTBEAT_S = 0.25
MAX_HEARTBEATS_WAITING = 4


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


_Answer = kvstore_pb2.Attached | kvstore_pb2.CreateMemory | kvstore_pb2.AdoptMemory


class Session:
    """One stream, from `open` to its end."""

    def __init__(
        self,
        socket: Path,
        asked: kvstore_pb2.AttachOpen,
        timeout_s: float,
        on_lost: Callable[[str], None] | None,
    ) -> None:
        self.lost: str | None = None
        self.revoked = False
        """The store ended the attachment for good: the memory is not this worker's any more."""
        self.device = asked.device
        self.attached = kvstore_pb2.Attached()  # what the store answered; filled by ``attach``
        self._socket = socket
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._channel = rpc.sync_channel(f"unix:{socket}")
        self.stub = kvstore_pb2_grpc.KvStoreStub(self._channel)
        self._outgoing: queue.SimpleQueue[kvstore_pb2.AttachRequest | None] = queue.SimpleQueue()
        self._outgoing.put(kvstore_pb2.AttachRequest(open=asked))
        self._stream: Any = self.stub.Attach(iter(self._outgoing.get, None))
        self._answers: queue.SimpleQueue[_Answer | TailpackError] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="kvstore-attachment", daemon=True)
        self._reader.start()
        threading.Thread(target=self._beat, name="kvstore-heartbeat", daemon=True).start()

    def attach(self, device_memory: DeviceMemory | None, held_fds: Sequence[int] | None = None) -> None:
        """Waits until the store has attached us; makes a GPU's memory, or brings the memory that we hold, where it asks
        for that.

        Args:
            held_fds: of all memory, where `open` said `holds_memory`.

        Raises what the store answered, or what kept the memory from being made; the session is over then.
        """
        try:
            self.attached = self._attached(device_memory, held_fds)
        except BaseException:
            self._end("never attached", tell=False)
            self._stream.cancel()
            self._channel.close()
            raise

    def _attached(self, device_memory: DeviceMemory | None, held_fds: Sequence[int] | None) -> kvstore_pb2.Attached:
        answer = self._answer()
        if isinstance(answer, kvstore_pb2.AdoptMemory) and held_fds is not None:
            self._deliver(answer, held_fds)
            answer = self._answer()
        elif held_fds is not None:
            raise KvStoreLost("the store does not take memory over", hint="an older one; start the worker anew")
        elif isinstance(answer, kvstore_pb2.CreateMemory):
            if device_memory is None:
                raise ConfigError(f"the store asks for device memory of {self.device}", given="none is at hand")
            fds = device_memory.create([size for arena in answer.arenas for size in arena.chunk_bytes])
            try:
                self._deliver(answer, fds)
            finally:
                close_all(fds)
            answer = self._answer()
        assert isinstance(answer, kvstore_pb2.Attached)
        return answer

    def _deliver(self, asked: kvstore_pb2.CreateMemory | kvstore_pb2.AdoptMemory, fds: Sequence[int]) -> None:
        try:
            deliver(Path(asked.fd_socket), asked.fd_ticket, fds, timeout_s=self._timeout_s)
        except (PermissionDenied, Unavailable) as failure:
            raise self._verdict(failure) from failure

    def _verdict(self, failure: TailpackError) -> TailpackError:
        """Why a delivery failed: what the stream says, where it ends too (the store died, or waits no longer)."""
        try:
            answer = self._answers.get(timeout=VERDICT_TIMEOUT_S)
        except queue.Empty:
            return failure
        return not_there(self._socket, answer) if isinstance(answer, TailpackError) else failure

    def _answer(self) -> _Answer:
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            answer = DeadlineExceeded("the kvstore did not answer the attach in time", given=f"{self._timeout_s:.1f} s")
        if isinstance(answer, TailpackError):
            raise not_there(self._socket, answer)
        return answer

    def demand_alive(self) -> None:
        """Raises KvStoreLost when the attachment is over."""
        if self.lost is not None:
            raise lost(self.lost)

    def call(self, method: Any, request: Any, *, bounded: bool = True) -> Any:
        """One call. Raises KvStoreLost when the attachment is over or the store does not answer in CALL_TIMEOUT_S."""
        self.demand_alive()
        try:
            return method(request, timeout=CALL_TIMEOUT_S if bounded else None)
        except ValueError as failure:  # the channel was closed by another thread
            raise lost(self.lost or str(failure)) from failure
        except grpc.RpcError as failure:
            error = rpc.error_from(failure)
            if isinstance(error, DeadlineExceeded):
                # Whether the store did what it was asked is unknown: nothing can be built on this attachment.
                self._end(f"the store did not answer within {CALL_TIMEOUT_S} s", tell=True)
            elif isinstance(error, RequestCancelled) or error.reason == "STALE_EPOCH":
                # How a store that stops answers a call in flight; the reader may not have read `revoked` yet.
                self._end(f"the store ended the attachment: {error.message}", tell=True)
            elif isinstance(error, Unavailable):
                # A call may hear of the store's end before the reader does, and what is not over cannot be reattached.
                self._end(f"the store does not answer: {error.message}", tell=True)
            elif self.lost is None:
                raise error from failure
            raise lost(self.lost or str(error)) from failure

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

    def drop(self) -> None:
        """Ends a session whose store is gone, without a goodbye: another one follows."""
        self._end("the attachment goes on with another store", tell=False)
        self._stream.cancel()
        self._channel.close()

    def _beat(self) -> None:
        beat = kvstore_pb2.AttachRequest(heartbeat=kvstore_pb2.Heartbeat())
        while not self._over.wait(HEARTBEAT_S):
            if self._outgoing.qsize() < MAX_HEARTBEATS_WAITING:  # else the store does not read them
                self._outgoing.put(beat)

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
                elif kind == "adopt":
                    self._answers.put(message.adopt)
                elif kind == "revoked":
                    why = message.revoked.why
                    self.revoked = not message.revoked.store_stops
        except grpc.RpcError as failure:
            error = rpc.error_from(failure)
            self._answers.put(error)
            why = f"connection to the store lost: {error.message}"
        except ValueError as failure:  # the channel was closed by another thread
            why = str(failure)
        else:
            self._answers.put(Unavailable(why))
        self._end(why, tell=attached)  # a refusal is the caller's answer: nothing was lost

    def _end(self, why: str, *, tell: bool) -> None:
        """Marks the attachment as over; the first caller decides why, and whether on_lost hears of it."""
        with self._lock:
            if self.lost is not None:
                return
            self.lost = why
        self._over.set()
        self._outgoing.put(None)  # half-closes the stream and ends gRPC's sender thread
        if tell and self._on_lost:
            self._on_lost(why)


def lost(why: str) -> KvStoreLost:
    return KvStoreLost(f"no kvstore: {why}", hint="attach again; sequences are computed again from their token logs")


def not_there(socket: Path, error: TailpackError) -> TailpackError:
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
