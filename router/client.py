"""The Python client, for code with an event loop (AsyncTailpack) and without (Tailpack, router/sync_client.py).

async with AsyncTailpack("127.0.0.1:7700") as client:
    async for chunk in client.generate("What is the capital of France?"):
        print(chunk.text, end="")
    answer = await client.complete("And of Spain?", max_tokens=20)

Answers of one client come in one stream, a session, where the router has these (session=False: each in its own).
Errors arrive as TailpackError (protos/errors.py); nothing of gRPC shows. What was not answered yet is tried again where
that may help, and a `resumable` answer goes on after a lost connection: router/answer_state.py says when. Chunks come
without gap or repeat, or TOKEN_GAP is raised. Leaving the loop ends the request and the work behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from protos import router_pb2, router_pb2_grpc, rpc
from protos.errors import RequestCancelled, TailpackError, Unavailable
from protos.tls import ClientTls
from router.answer import Answer, Chunk
from router.answer_state import AnswerState, Failure, RetryPolicy
from router.async_session import AsyncSession
from router.client_request import PREFIX_REUSE, Message, Parameters, Prompt, as_chat, build_request
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
from router.client_settings import (
    CANCEL_TIMEOUT_S,
    DEFAULT_ADDRESS,
    MAX_TIMEOUT_S,
    UNARY_TIMEOUT_S,
    Settings,
    addresses,
    ignore,
)
from router.sync_client import Tailpack

__all__ = [
    "DEFAULT_ADDRESS",
    "MAX_TIMEOUT_S",
    "PREFIX_REUSE",
    "Answer",
    "AsyncTailpack",
    "Chunk",
    "ClientTls",
    "Message",
    "Parameters",
    "Prompt",
    "RetryPolicy",
    "Tailpack",
    "as_chat",
    "build_request",
]


class AsyncTailpack:
    """A cluster, by the address of a router or of several. One event loop; close it, or use it in `async with`."""

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
        """Connects to nothing yet.

        Args:
            address: "host:port", or several routers of the same workers, "host:port,host:port": the next one is tried
                where one fails, and the one that answered last is asked first.
            tenant: on whose behalf, where routers do not tell it from the token.
            token: sent as `authorization: Bearer`; readable on the way unless tls is given.
            session: answers share one stream to a router that has the feature, which costs it less than half as much.
                False: each has a stream of its own, as for a balancer that spreads streams and not connections.
            retry: when to try again. RetryPolicy(max_retries=0): never.
            on_retry: told the error and the seconds to wait before each further try.

        Raises:
            ConfigError: BAD_ADDRESS. InvalidRequest: a tenant or token that cannot be sent.
        """
        self._settings = Settings(addresses(address), tenant, token, tls, retry, on_retry)
        self._channels: dict[int, grpc.aio.Channel] = {}  # by the address's index; grpc.aio wants a running loop
        self._may_share = session
        self._sessions: dict[int, asyncio.Task[AsyncSession | NoSessions | Failure]] = {}  # likewise
        self._address = 0  # index of the router that answered last
        self._open: set[AnswerState] = set()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what still runs, resumable answers too."""
        if self._closed:
            return
        await asyncio.gather(*map(self._end, list(self._open)))
        self._closed = True
        for opening in self._sessions.values():
            if _opened(opening) and isinstance(session := opening.result(), AsyncSession):
                await session.close()
            opening.cancel()
        for channel in self._channels.values():
            await channel.close()

    # --- answers ---

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
    ) -> AsyncGenerator[Chunk, None]:
        """Streams the answer to a prompt.

        Args:
            prompt: text, chat messages (role, content), or token ids. Text is one user message, behind `system` where
                given; with chat=False it is continued as it is.
            request_id: for Cancel and logs; made up where None. The same on every try.
            timeout_s: of everything, tries and waits included.
            traceparent: W3C trace context. Where None and OpenTelemetry is in use, that of the current span.
            parameters: see Parameters.

        Yields:
            Chunks; the last one has finish_reason, usage and timings.

        Raises:
            InvalidRequest, TooLarge, NotBuilt: at once; nothing was sent.
            TailpackError: from the loop, after what was emitted: as the router says, or Unavailable when none can be
                reached, DeadlineExceeded, InternalError (TOKEN_GAP). PreconditionFailed: NOT_A_ROUTER.
        """
        request = build_request(as_chat(prompt, system) if isinstance(prompt, str) and chat else prompt, **parameters)
        return self.stream(request, request_id=request_id, timeout_s=timeout_s, traceparent=traceparent)

    async def complete(
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
        """The whole answer. Arguments and errors as of generate."""
        chunks = self.generate(
            prompt,
            chat=chat,
            system=system,
            request_id=request_id,
            timeout_s=timeout_s,
            traceparent=traceparent,
            **parameters,
        )
        return Answer.of([chunk async for chunk in chunks])

    def stream(
        self,
        request: router_pb2.GenerateRequest,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """As generate, of a request from build_request."""
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
    ) -> AsyncGenerator[Chunk, None]:
        """Goes on with a resumable answer that another client, or process, began.

        Args:
            token_offset, text_offset: what of it is here, in tokens and in UTF-8 bytes: the first chunk begins there.
            resume_grace_ms: as its request has it.

        Raises:
            NotFound: UNKNOWN_REQUEST: no router has it. Others as generate.
        """
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

    async def _answer(self, state: AnswerState, metadata: tuple[tuple[str, str], ...]) -> AsyncGenerator[Chunk, None]:
        self._open.add(state)
        try:
            while not state.ended:
                address = state.address
                chunks = self._call(state, metadata)
                try:
                    async for chunk in chunks:
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
                    await asyncio.sleep(delay_s)
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if self._closed and not (task is not None and task.cancelling()):
                        raise RequestCancelled("the client was closed") from None
                    raise
                finally:
                    await chunks.aclose()  # leaving an `async for` does not end a call
        finally:
            self._open.discard(state)
            await self._end(state)

    async def _call(self, state: AnswerState, metadata: tuple[tuple[str, str], ...]) -> AsyncGenerator[Chunk, None]:
        """One call of an answer. Raises CallFailed."""
        address, message = state.address, state.message()
        session = None
        if self._may_share and message.ByteSize() <= MAX_REQUEST_BYTES:
            session = await self._session(address, state.remaining_s(time.monotonic()))
        if session is not None and session.has_room:
            chunks = session.chunks(
                message,
                request_id=state.request_id,
                traceparent=dict(metadata).get("traceparent", ""),
                timeout_s=state.remaining_s(time.monotonic()),
            )
            with contextlib.suppress(SessionEnds):
                async with contextlib.aclosing(chunks):
                    async for chunk in chunks:
                        yield chunk
                return
        if self._closed:  # by another, between a goodbye and this
            raise RequestCancelled("the client was closed")
        chunks = self._own_stream(address, message, state.remaining_s(time.monotonic()), metadata)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _own_stream(
        self,
        address: int,
        message: router_pb2.GenerateRequest | router_pb2.ResumeRequest,
        timeout_s: float | None,
        metadata: tuple[tuple[str, str], ...],
    ) -> AsyncGenerator[Chunk, None]:
        stub = self._stub(address)
        call: Any
        if isinstance(message, router_pb2.ResumeRequest):
            call = stub.Resume(message, timeout=timeout_s, metadata=metadata)
        else:
            call = stub.Generate(message, timeout=timeout_s, metadata=metadata)
        try:
            async for chunk in call:
                yield chunk
        except grpc.RpcError as failed:
            raise CallFailed(self._settings.failure(failed, address, await call.initial_metadata())) from None
        finally:
            call.cancel()

    async def _session(self, address: int, timeout_s: float | None) -> AsyncSession | None:
        """That with a router, opened where there is none; None: this router has no sessions. Raises CallFailed."""
        opening = self._sessions.get(address)
        if opening is None or (opening.done() and not (_opened(opening) and is_usable(opening.result()))):
            opening = self._sessions[address] = asyncio.create_task(self._open_session(address))
        try:
            async with asyncio.timeout(timeout_s):
                opened = await asyncio.shield(opening)
        except TimeoutError:
            raise CallFailed(out_of_time()) from None
        if isinstance(opened, Failure):
            raise CallFailed(opened)
        return opened if isinstance(opened, AsyncSession) else None

    async def _open_session(self, address: int) -> AsyncSession | NoSessions | Failure:
        stub, metadata = self._stub(address), self._settings.metadata()
        try:
            stats = await stub.Stats(router_pb2.StatsRequest(), timeout=UNARY_TIMEOUT_S, metadata=metadata)
            if FEATURE not in stats.features:
                return NoSessions(time.monotonic())
        except grpc.RpcError as failed:
            return self._settings.not_opened(failed, address)
        session = AsyncSession(stub, metadata, partial(self._settings.lost, address=address))
        try:
            async with asyncio.timeout(UNARY_TIMEOUT_S):
                await session.open()
            return session
        except grpc.RpcError as failed:
            if (why := why_none(failed)) is not None:
                return self._settings.no_sessions(address, why)
            return self._settings.not_opened(failed, address)
        except TimeoutError:
            await session.close()
            return self._settings.no_sessions(address, f"no welcome within {UNARY_TIMEOUT_S:g} s")
        except Unavailable:
            return not_opened()

    async def _end(self, state: AnswerState) -> None:
        """Ends the work behind a resumable answer that is left. Best effort: else its grace time does."""
        if state.abandoned and not self._closed:
            state.leave()
            with contextlib.suppress(TailpackError):
                await self._cancel(state.request_id, CANCEL_TIMEOUT_S)

    # --- the cluster ---

    async def cancel(self, request_id: str) -> bool:
        """Ends a request of this tenant, wherever it runs. False: there is none."""
        return await self._cancel(request_id, UNARY_TIMEOUT_S)

    async def _cancel(self, request_id: str, timeout_s: float) -> bool:
        request = router_pb2.CancelRequest(request_id=request_id)
        answer: router_pb2.CancelResponse = await self._unary(lambda stub: stub.Cancel, request, timeout_s)
        return answer.found

    async def list_workers(self, *, with_kv: bool = False) -> Sequence[router_pb2.WorkerStatus]:
        """The workers as one router sees them; with_kv: and what their kvstores hold."""
        answer: router_pb2.ListWorkersResponse = await self._unary(
            lambda stub: stub.ListWorkers, router_pb2.ListWorkersRequest(with_kv=with_kv), UNARY_TIMEOUT_S
        )
        return answer.workers

    async def stats(self) -> router_pb2.StatsResponse:
        """Of one router."""
        answer: router_pb2.StatsResponse = await self._unary(
            lambda stub: stub.Stats, router_pb2.StatsRequest(), UNARY_TIMEOUT_S
        )
        return answer

    async def _unary(
        self,
        method: Callable[[router_pb2_grpc.RouterAsyncStub], Callable[..., Awaitable[Any]]],
        request: Any,
        timeout_s: float,
    ) -> Any:
        """Of the first router that can be reached, beginning with the one that answered last."""
        metadata, num_addresses = self._settings.metadata(), len(self._settings.addresses)
        for turn in range(num_addresses):
            address = (self._address + turn) % num_addresses
            try:
                return await method(self._stub(address))(request, timeout=timeout_s, metadata=metadata)
            except grpc.RpcError as failed:
                error = self._settings.error(failed, address)
                if not isinstance(error, Unavailable) or turn == num_addresses - 1:
                    raise error from failed
        raise AssertionError("there is at least one address")

    def _stub(self, address: int) -> router_pb2_grpc.RouterAsyncStub:
        if self._closed:
            raise RuntimeError("the client is closed")
        if address not in self._channels:
            self._channels[address] = rpc.channel(self._settings.addresses[address], tls=self._settings.tls)
        return router_pb2_grpc.RouterStub(self._channels[address])


def _opened(opening: asyncio.Task[AsyncSession | NoSessions | Failure]) -> bool:
    """Whether it has come to an end by itself: an exception, as of a certificate that is just replaced, may pass."""
    return opening.done() and not opening.cancelled() and opening.exception() is None
