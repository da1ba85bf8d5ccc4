"""A session of many calls with a router, for threads without an event loop."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from typing import Any

import grpc

from protos import router_pb2, router_pb2_grpc
from protos.errors import RequestCancelled, Unavailable
from router.answer import Chunk
from router.client_session import CallFailed, Calls, Item, Lost, Reading, out_of_time


class SyncSession:
    """One stream, read by a thread of its own; open it first. Threads may share it."""

    def __init__(
        self,
        stub: router_pb2_grpc.RouterStub,
        metadata: tuple[tuple[str, str], ...],
        lost: Callable[[grpc.RpcError], Lost],
    ) -> None:
        """lost: says what the stream's end by an error means."""
        self._lost = lost
        self._calls = Calls()
        self._changed = threading.Condition()  # of _calls
        self._opened: Future[None] = Future()
        self._stream: Any = stub.Session(self._outgoing(), metadata=metadata)
        threading.Thread(target=self._read, name="tailpack session", daemon=True).start()

    def open(self, timeout_s: float) -> None:
        """Until the router welcomes it. Raises grpc.RpcError, Unavailable, TimeoutError."""
        try:
            self._opened.result(timeout_s)
        except TimeoutError:
            self.close()
            raise

    @property
    def is_over(self) -> bool:
        return self._calls.is_over

    @property
    def has_room(self) -> bool:
        return self._calls.has_room

    def chunks(
        self,
        message: router_pb2.GenerateRequest | router_pb2.ResumeRequest,
        *,
        request_id: str,
        traceparent: str,
        timeout_s: float | None,
    ) -> Generator[Chunk, None, None]:
        """One call. Raises CallFailed; SessionEnds at its beginning."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        reading = Reading(self._calls.window_bytes)
        with self._changed:
            number = self._calls.begin(
                message, inbox.put, request_id=request_id, traceparent=traceparent, timeout_s=timeout_s
            )
            self._changed.notify()
        try:
            while not reading.ended:
                try:
                    item = inbox.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise CallFailed(out_of_time()) from None
                chunk = reading.take(item)
                if chunk is not None:
                    yield chunk  # what comes back for more has taken this one
                    if (num_bytes := reading.due()) is not None:
                        with self._changed:
                            self._calls.took(number, num_bytes)
                            self._changed.notify()
        finally:
            with self._changed:
                self._calls.leave(number)
                self._changed.notify()

    def close(self) -> None:
        """Ends its calls."""
        self._lose(Lost(RequestCancelled("the session was closed"), spoken=True))
        self._stream.cancel()

    def _outgoing(self) -> Iterator[router_pb2.SessionRequest]:
        """In a thread of gRPC's."""
        while True:
            with self._changed:
                while (message := self._calls.outgoing()) is None:
                    if self._calls.lost is not None or self._calls.is_through:
                        return  # which ends our side
                    self._changed.wait()
            yield message

    def _read(self) -> None:
        try:
            first = next(self._stream, None)
            if first is None or not first.HasField("welcome"):
                raise Unavailable("the router ended a session at its beginning")
            with self._changed:
                self._calls.welcome(first.welcome)
                self._calls.take(first)
            self._opened.set_result(None)
            for message in self._stream:
                with self._changed:
                    self._calls.take(message)
                    if self._calls.is_through:
                        self._changed.notify()
            self._lose(Lost(Unavailable("the router ended the session"), spoken=False))
        except (grpc.RpcError, Unavailable) as failed:
            if not self._opened.done():
                self._opened.set_exception(failed)
            self._lose(self._lost(failed) if isinstance(failed, grpc.RpcError) else Lost(failed, spoken=False))
        finally:  # nobody else would tell those who wait, whatever ended this thread
            ended = Unavailable("the reader of the session ended")
            if not self._opened.done():
                self._opened.set_exception(ended)
            self._lose(Lost(ended, spoken=False))

    def _lose(self, lost: Lost) -> None:
        with self._changed:
            self._calls.lose(lost)
            self._changed.notify()
