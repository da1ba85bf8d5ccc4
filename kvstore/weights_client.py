"""A worker's use of the weights that the store holds: found there, or made and given to it; kept over stores' deaths.

    with use_weights(socket, worker_id=..., key=..., memory=..., model=...) as lease:
        while (found := lease.found) is not None:   # descriptors and manifest; map and check it
            lease.refuse("its layout is another")   # or be content
        lease.give(memory, manifest)                # where there is none: others wait for this one

From then on a thread of the lease holds the stream open, and brings the memory to the next store should this one die.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import structlog

from kvstore.arena import Memory
from kvstore.fd_server import deliver, fetch
from kvstore.session import not_there
from protos import kvstore_pb2, kvstore_pb2_grpc, rpc
from protos.errors import NotBuilt, PreconditionFailed, TailpackError, Unavailable

log = structlog.get_logger("worker.weights")

TIMEOUT_S = 30.0  # of descriptors' way
RETRY_S = 0.5  # until the next store is looked for
JOIN_S = 2.0
OLDER_STORE = "OLDER_KVSTORE"


@dataclass(frozen=True)
class Found:
    """Weights that are there already. The descriptors are the lease's."""

    memory: Memory
    manifest: kvstore_pb2.WeightsManifest


class Lease:
    """See ``use_weights``. Ends with ``close``, and with the process."""

    def __init__(self, socket: Path, asked: kvstore_pb2.WeightsOpen) -> None:
        self.found: Found | None = None
        """None: they are to be made and given."""
        self._socket = socket
        self._asked = asked
        self._given: Found | None = None  # ours, or what we found and use: what a next store gets
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream = _Stream(socket, asked)
        try:
            self._look()
        except BaseException:
            self._stream.close()
            raise

    def refuse(self, why: str) -> None:
        """What was found is not to be used. The store gives it up; ``found`` says what there is then.

        Raises:
            TailpackError: the store went away meanwhile.
        """
        assert self.found is not None
        log.error("weights refused: the store's are not this model's", why=why, key=self._asked.key.hex())
        self.found.memory.close()
        self.found = None
        self._stream.send(kvstore_pb2.WeightsRequest(refused=kvstore_pb2.WeightsRefused(why=why)))
        self._look()

    def give(self, memory: Memory, manifest: kvstore_pb2.WeightsManifest) -> None:
        """Hands over what was made; its descriptors are the lease's from here on. A store that is gone gets them when
        it is back.
        """
        self._given = Found(memory, manifest)
        try:
            self._stream.send(kvstore_pb2.WeightsRequest(filled=_filled(self._given)))
            self._bring()
        except TailpackError as failure:
            log.warning("the store did not take the weights; the next one is asked", why=str(failure))
            self._stream.close()
        self._hold()

    def use(self) -> None:
        """What was found is in use."""
        assert self.found is not None
        self._given = self.found
        self._hold()

    def close(self) -> None:
        """Lets go of descriptors and stream; mappings stay. Harmless the second time."""
        self._closed.set()
        self._stream.close()
        if self._thread is not None:
            self._thread.join(JOIN_S)
            self._thread = None
        for each in {id(e): e for e in (self.found, self._given) if e is not None}.values():
            each.memory.close()
        self.found = self._given = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look(self) -> None:
        """Waits for what the store says: others may be making them."""
        try:
            answer = self._stream.receive()
        except NotBuilt as older:
            raise NotBuilt(
                "the kvstore is an older one and holds no weights", reason=OLDER_STORE, given=self._socket
            ) from older
        if answer.WhichOneof("message") == "fill":
            self.found = None
            return
        if answer.WhichOneof("message") != "ready":
            raise Unavailable("the store answers out of turn", given=answer.WhichOneof("message"))
        ready = answer.ready
        manifest, fds = fetch(Path(ready.fd_socket), ready.fd_ticket, timeout_s=TIMEOUT_S)
        memory = Memory(tuple(fds), ready.filled.num_bytes, tuple(ready.filled.chunk_bytes))
        try:
            (entry,) = manifest.entries
            if (entry.kind, entry.num_bytes, tuple(entry.chunk_bytes)) != (
                "weights",
                memory.num_bytes,
                memory.chunk_bytes,
            ):
                raise ValueError(f"{len(fds)} descriptors of {entry.kind}, {entry.num_bytes} bytes")
            if memory.readable:
                memory = Memory.held(memory.fd, memory.num_bytes, read_only=True)
        except (ValueError, PreconditionFailed) as bad:
            self.found = Found(memory, ready.filled.manifest)
            self.refuse(str(bad))
            return
        self.found = Found(memory, ready.filled.manifest)

    def _bring(self) -> None:
        """Until the store says that it has them."""
        assert self._given is not None
        answer = self._stream.receive()
        if answer.WhichOneof("message") == "deliver":
            asked = answer.deliver
            deliver(Path(asked.fd_socket), asked.fd_ticket, self._given.memory.fds, timeout_s=TIMEOUT_S)
            answer = self._stream.receive()
        if answer.WhichOneof("message") != "kept":
            raise Unavailable("the store answers out of turn", given=answer.WhichOneof("message"))

    def _hold(self) -> None:
        self._thread = threading.Thread(target=self._keep, name="weights", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        """Waits for the stream's end; then brings the memory to the next store, as long as it takes."""
        assert self._given is not None
        self._stream.wait()
        told = ""
        while not self._closed.wait(RETRY_S):
            asked = kvstore_pb2.WeightsOpen()
            asked.CopyFrom(self._asked)
            asked.held.CopyFrom(_filled(self._given))
            stream = self._stream = _Stream(self._socket, asked)
            try:
                self._bring()
                log.info("weights brought to the next kvstore", key=asked.key.hex())
                stream.wait()
            except TailpackError as failure:
                if failure.reason != "KVSTORE_NOT_THERE" and str(failure) != told and not self._closed.is_set():
                    told = str(failure)
                    log.warning("the kvstore does not take the weights", why=told)
            finally:
                stream.close()


def use_weights(socket: Path, *, worker_id: str, key: bytes, memory: str, model: str, form: str = "") -> Lease:
    """Asks the store for weights, and waits while another worker makes them.

    Args:
        socket: the store's gRPC socket.
        key: 16 bytes, of all that decides the bytes.
        memory: "host", "host:node<n>" or "cuda:GPU-<uuid>".
        form: how they are held, for people: "weights in FP8 blocks".

    Raises:
        Unavailable: KVSTORE_NOT_THERE. NotBuilt: OLDER_KVSTORE, which holds none.
    """
    return Lease(socket, kvstore_pb2.WeightsOpen(worker_id=worker_id, key=key, memory=memory, model=model, form=form))


class _Stream:
    """One call of Weights. Every failure is a TailpackError."""

    def __init__(self, socket: Path, asked: kvstore_pb2.WeightsOpen) -> None:
        self._socket = socket
        self._outgoing: queue.SimpleQueue[kvstore_pb2.WeightsRequest | None] = queue.SimpleQueue()
        self._outgoing.put(kvstore_pb2.WeightsRequest(open=asked))
        self._channel = rpc.sync_channel(f"unix:{socket}")
        self._call: Any = kvstore_pb2_grpc.KvStoreStub(self._channel).Weights(iter(self._outgoing.get, None))

    def send(self, request: kvstore_pb2.WeightsRequest) -> None:
        self._outgoing.put(request)

    def receive(self) -> kvstore_pb2.WeightsResponse:
        try:
            answer: kvstore_pb2.WeightsResponse = next(self._call)
        except StopIteration:
            raise Unavailable("the store ended the stream") from None
        except grpc.RpcError as failure:
            raise not_there(self._socket, rpc.error_from(failure)) from failure
        except ValueError as failure:  # the channel was closed by another thread
            raise Unavailable("the stream is closed", hint=str(failure)) from failure
        return answer

    def wait(self) -> None:
        """For its end."""
        try:
            while True:
                self.receive()
        except TailpackError:
            return

    def close(self) -> None:
        self._outgoing.put(None)
        self._call.cancel()
        self._channel.close()


def _filled(given: Found) -> kvstore_pb2.WeightsFilled:
    return kvstore_pb2.WeightsFilled(
        num_bytes=given.memory.num_bytes, chunk_bytes=given.memory.chunk_bytes, manifest=given.manifest
    )
