"""The client for code without an event loop: router/client.py says what it does; this is the same, blocking."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Generator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from protos import router_pb2, router_pb2_grpc, rpc
from protos.errors import DeadlineExceeded, RequestCancelled, TailpackError, Unavailable
from protos.tls import ClientTls
from router.answer import Answer, Chunk
from router.answer_state import AnswerState, Failure, RetryPolicy
from router.client_request import Parameters, Prompt, as_chat, build_request
from router.client_session import (
    FEATURE,
    MAX_REQUEST_BYTES,
    CallFailed,
    NoSessions,
    SessionEnds,
    is_usable,
    not_opened,
    out_of_time,
    why_none,
)
from router.client_settings import CANCEL_TIMEOUT_S, DEFAULT_ADDRESS, UNARY_TIMEOUT_S, Settings, addresses, ignore
from router.sync_session import SyncSession


class Tailpack:
    """A cluster, by the address of a router or of several. Threads may share it.

    with Tailpack("127.0.0.1:7700") as client:
        for chunk in client.generate("What is the capital of France?"):
            print(chunk.text, end="")
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        tenant: str | None = None,
        token: str | None = None,
        tls: ClientTls | None = None,
        session: bool = True,
        retry: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        on_retry: Callable[[TailpackError, float], None] = ignore,
    ) -> None:
        """As AsyncTailpack. Raises ConfigError, InvalidRequest."""
        self._settings = Settings(addresses(address), tenant, token, tls, retry, on_retry)
        self._channels = [rpc.sync_channel(one, tls=tls) for one in self._settings.addresses]
        self._stubs = [router_pb2_grpc.RouterStub(channel) for channel in self._channels]
        self._may_share = session
        self._sessions: list[SyncSession | NoSessions | None] = [None] * len(self._stubs)
        self._not_opened: list[tuple[Failure, float] | None] = [None] * len(self._stubs)  # the last, and when
        self._opening = [threading.Lock() for _ in self._stubs]
        self._address = 0  # index of the router that answered last
        self._open: set[AnswerState] = set()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs, resumable answers too."""
        if self._closed:
            return
        for state in list(self._open):
            self._end(state)
        self._closed = True
        for session in self._sessions:
            if isinstance(session, SyncSession):
                session.close()
        for channel in self._channels:
            channel.close()

    def generate(
        self,
        prompt: Prompt,
        *,
        chat: bool = True,
        system: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> Generator[Chunk, None, None]:
        """As AsyncTailpack.generate."""
        request = build_request(as_chat(prompt, system) if isinstance(prompt, str) and chat else prompt, **parameters)
        return self.stream(request, request_id=request_id, timeout_s=timeout_s, traceparent=traceparent)

    def complete(
        self,
        prompt: Prompt,
        *,
        chat: bool = True,
        system: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
        **parameters: Unpack[Parameters],
    ) -> Answer:
        """As AsyncTailpack.complete."""
        chunks = self.generate(
            prompt,
            chat=chat,
            system=system,
            request_id=request_id,
            timeout_s=timeout_s,
            traceparent=traceparent,
            **parameters,
        )
        return Answer.of(list(chunks))

    def stream(
        self,
        request: router_pb2.GenerateRequest,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> Generator[Chunk, None, None]:
        """As AsyncTailpack.stream."""
        state = self._settings.answer(request, request_id=request_id, timeout_s=timeout_s, first_address=self._address)
        return self._answer(state, self._settings.metadata(state.request_id, traceparent))

    def resume(
        self,
        request_id: str,
        *,
        token_offset: int,
        text_offset: int,
        timeout_s: float | None = None,
        resume_grace_ms: int = 0,
    ) -> Generator[Chunk, None, None]:
        """As AsyncTailpack.resume."""
        state = self._settings.answer(
            None,
            request_id=request_id,
            timeout_s=timeout_s,
            first_address=self._address,
            token_offset=token_offset,
            text_offset=text_offset,
            resume_grace_ms=resume_grace_ms,
        )
        return self._answer(state, self._settings.metadata(request_id))

    def _answer(self, state: AnswerState, metadata: tuple[tuple[str, str], ...]) -> Generator[Chunk, None, None]:
        self._open.add(state)
        try:
            while not state.ended:
                address = state.address
                chunks = self._call(state, metadata)
                try:
                    for chunk in chunks:
                        state.take(chunk)
                        self._address = address
                        yield chunk
                    state.check_ended()
                except CallFailed as failed:
                    if state.ended:
                        return
                    if self._closed:
                        raise RequestCancelled("the client was closed") from None
                    delay_s = state.failed(failed.failure, now_s=time.monotonic(), jitter=random.random())
                    self._settings.on_retry(failed.failure.error, delay_s)
                    time.sleep(delay_s)
                finally:
                    chunks.close()
        finally:
            self._open.discard(state)
            self._end(state)

    def _call(self, state: AnswerState, metadata: tuple[tuple[str, str], ...]) -> Generator[Chunk, None, None]:
        """One call of an answer. Raises CallFailed."""
        address, message = state.address, state.message()
        session = None
        if self._may_share and message.ByteSize() <= MAX_REQUEST_BYTES:
            session = self._session(address, state.remaining_s(time.monotonic()))
        if session is not None and session.has_room:
            with contextlib.suppress(SessionEnds):
                yield from session.chunks(
                    message,
                    request_id=state.request_id,
                    traceparent=dict(metadata).get("traceparent", ""),
                    timeout_s=state.remaining_s(time.monotonic()),
                )
                return
        if self._closed:  # by another, between a goodbye and this
            raise RequestCancelled("the client was closed")
        yield from self._own_stream(address, message, state.remaining_s(time.monotonic()), metadata)

    def _own_stream(
        self,
        address: int,
        message: router_pb2.GenerateRequest | router_pb2.ResumeRequest,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> Generator[Chunk, None, None]:
        stub = self._stubs[address]
        call: Any
        if isinstance(message, router_pb2.ResumeRequest):
            call = stub.Resume(message, timeout=timeout_s, metadata=metadata)
        else:
            call = stub.Generate(message, timeout=timeout_s, metadata=metadata)
        try:
            yield from call
        except grpc.RpcError as failed:
            raise CallFailed(self._settings.failure(failed, address, call.initial_metadata())) from None
        finally:
            call.cancel()

    def _session(self, address: int, timeout_s: float | None) -> SyncSession | None:
        """As AsyncTailpack._session. Threads that need one wait for whoever opens it."""
        opening, began_s = self._opening[address], time.monotonic()
        deadline_s = None if timeout_s is None else began_s + timeout_s
        if not opening.acquire(timeout=-1 if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)):
            raise CallFailed(out_of_time())
        try:
            opened = self._sessions[address]
            if opened is None or not is_usable(opened):
                if (failed := self._not_opened[address]) is not None and began_s < failed[1]:
                    raise CallFailed(failed[0])  # it was opened for this call too
                opened = self._sessions[address] = self._open_session(address, deadline_s)
            return opened if isinstance(opened, SyncSession) else None
        finally:
            opening.release()

    def _open_session(self, address: int, deadline_s: float | None) -> SyncSession | NoSessions:
        """deadline_s: of the call that opens it, on time.monotonic's clock."""
        stub, metadata = self._stubs[address], self._settings.metadata()
        wait_s, in_time = _wait_s(deadline_s)
        try:
            stats = stub.Stats(router_pb2.StatsRequest(), timeout=wait_s, metadata=metadata)
        except grpc.RpcError as failed:
            raise self._not_open(address, self._settings.not_opened(failed, address, in_time=in_time)) from None
        if FEATURE not in stats.features:
            return NoSessions(time.monotonic())
        wait_s, in_time = _wait_s(deadline_s)
        session = SyncSession(stub, metadata, partial(self._settings.lost, address=address))
        try:
            session.open(wait_s)
            return session
        except grpc.RpcError as failed:
            if (why := why_none(failed)) is not None:
                return self._settings.no_sessions(address, why)
            raise self._not_open(address, self._settings.not_opened(failed, address, in_time=in_time)) from None
        except TimeoutError:
            if in_time:
                return self._settings.no_sessions(address, f"no welcome within {UNARY_TIMEOUT_S:g} s")
            raise CallFailed(out_of_time()) from None
        except Unavailable:
            raise self._not_open(address, not_opened()) from None

    def _not_open(self, address: int, failure: Failure) -> CallFailed:
        """Keeps it for those that wait meanwhile, unless it may be the end of one call's time."""
        if not isinstance(failure.error, DeadlineExceeded):
            self._not_opened[address] = failure, time.monotonic()
        return CallFailed(failure)

    def _end(self, state: AnswerState) -> None:
        """Ends the work behind a resumable answer that is left. Best effort: else its grace time does."""
        if state.abandoned and not self._closed:
            state.leave()
            with contextlib.suppress(TailpackError):
                self._cancel(state.request_id, CANCEL_TIMEOUT_S)

    def cancel(self, request_id: str) -> bool:
        """As AsyncTailpack.cancel."""
        return self._cancel(request_id, UNARY_TIMEOUT_S)

    def _cancel(self, request_id: str, timeout_s: float) -> bool:
        request = router_pb2.CancelRequest(request_id=request_id)
        answer: router_pb2.CancelResponse = self._unary(lambda stub: stub.Cancel, request, timeout_s)
        return answer.found

    def list_workers(self, *, with_kv: bool = False) -> Sequence[router_pb2.WorkerStatus]:
        """As AsyncTailpack.list_workers."""
        answer: router_pb2.ListWorkersResponse = self._unary(
            lambda stub: stub.ListWorkers, router_pb2.ListWorkersRequest(with_kv=with_kv), UNARY_TIMEOUT_S
        )
        return answer.workers

    def stats(self) -> router_pb2.StatsResponse:
        """As AsyncTailpack.stats."""
        answer: router_pb2.StatsResponse = self._unary(
            lambda stub: stub.Stats, router_pb2.StatsRequest(), UNARY_TIMEOUT_S
        )
        return answer

    def _unary(self, method: Callable[[router_pb2_grpc.RouterStub], Any], request: Any, timeout_s: float) -> Any:
        """Of the first router that can be reached, beginning with the one that answered last."""
        metadata = self._settings.metadata()
        for turn in range(len(self._stubs)):
            address = (self._address + turn) % len(self._stubs)
            try:
                return method(self._stubs[address])(request, timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as failed:
                error = self._settings.error(failed, address)
                if not isinstance(error, Unavailable) or turn == len(self._stubs) - 1:
                    raise error from failed
        raise AssertionError("there is at least one address")


def _wait_s(deadline_s: float | None) -> tuple[float, bool]:
    """How long to wait for a router, and whether that is not cut short by the deadline of a call."""
    left_s = UNARY_TIMEOUT_S if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    return min(left_s, UNARY_TIMEOUT_S), left_s >= UNARY_TIMEOUT_S
