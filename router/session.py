"""Many calls in one stream (Router.Session): of a short request, a stream of its own costs more than all the rest.

Each call is a task that goes through router/generation.py as a call of Generate does. What they all have to say in one
turn of the event loop goes out as one message, and what they submit goes to a worker as one. Nobody waits for a slow
reader but its own call: that may have WINDOW_BYTES on the way, and behind these its answer gathers in its relay, within
the bounds that hold there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import partial

from protos import router_pb2, rpc
from protos.errors import CapacityError, DeadlineExceeded, InternalError, InvalidRequest, TailpackError
from router.admission import Call
from router.client_settings import MAX_TIMEOUT_S
from router.generation import Answer
from router.requests import Requests

MAX_CALLS = 4096
"""Open at one time in one session: as many as a router takes by default."""

WINDOW_BYTES = 64 << 10
"""Of one call's chunks, sent and not said to be taken: some thousand tokens."""

FULL_MESSAGE_BYTES = 256 << 10
"""A message with as much takes no more answers."""

MAX_UNWRITTEN = 2
"""With more messages that wait to be written, no call begins: what those that were left had to say is among them."""

STALLED_S = rpc.STALLED_S

UNHEARD_S = 10.0
"""A session without calls whose caller does not end it behind a goodbye for so long is ended."""


class _Outgoing:
    """A message that gathers while the one before it is written."""

    __slots__ = ("message", "num_bytes", "written")

    def __init__(self) -> None:
        self.message = router_pb2.SessionResponse()
        self.num_bytes = 0  # of its answers, about
        self.written = asyncio.Event()


class _Window:
    """What of a call's answer is on its way."""

    __slots__ = ("_opened", "_sent_bytes", "_taken_bytes")

    def __init__(self) -> None:
        self._sent_bytes = 0
        self._taken_bytes = 0
        self._opened: asyncio.Event | None = None

    @property
    def is_full(self) -> bool:
        return self._sent_bytes - self._taken_bytes >= WINDOW_BYTES

    def send(self, num_bytes: int) -> None:
        self._sent_bytes += num_bytes

    def take(self, num_bytes: int) -> None:
        """num_bytes: of all chunks so far. Raises InvalidRequest (BROKEN_SESSION) where that cannot be."""
        if not self._taken_bytes <= num_bytes <= self._sent_bytes:
            raise _broken(
                "what was taken of a call does not fit what was sent",
                num_bytes,
                f"{self._taken_bytes} to {self._sent_bytes} bytes",
            )
        self._taken_bytes = num_bytes
        if self._opened is not None and not self.is_full:
            self._opened.set()

    async def room(self) -> None:
        """Until it is not full. Raises CapacityError (SLOW_READER) where that takes too long."""
        self._opened = asyncio.Event()
        try:
            async with asyncio.timeout(STALLED_S):
                await self._opened.wait()
        except TimeoutError:
            raise CapacityError(
                "the caller does not read its answer",
                reason="SLOW_READER",
                given=f"{self._sent_bytes - self._taken_bytes} bytes that were not taken for {STALLED_S:g} s",
            ) from None


class _Call:
    """From its beginning until its last word is written or its caller has left it."""

    __slots__ = ("number", "task", "window")

    def __init__(self, number: int) -> None:
        self.number = number
        self.window = _Window()
        self.task: asyncio.Task[None]


class Session:
    """One stream. Of one event loop."""

    def __init__(self, requests: Requests, tenant: Callable[[], str]) -> None:
        """tenant: of whoever opened it, now. Raises TailpackError where that is no longer let in."""
        self._requests = requests
        self._tenant = tenant
        self._calls: dict[int, _Call] = {}
        self._last_number = 0
        self._outbox: deque[_Outgoing] = deque()
        self._wake = asyncio.Event()
        self._is_read = False  # to its end: no calls will follow
        self._idle_since_s = 0.0  # on the loop's clock, where it has no calls
        self._look: asyncio.TimerHandle | None = None
        self._said_goodbye = False
        self._is_left = False  # by a caller who heard no goodbye
        self._handler: asyncio.Task[object] | None = None
        self._failure: Exception | None = None

    async def serve(
        self, requests: AsyncIterator[router_pb2.SessionRequest]
    ) -> AsyncGenerator[router_pb2.SessionResponse, None]:
        """What is to be sent, until all calls have ended and none will follow. What runs when it is left, ends.

        Raises:
            Unavailable: DRAINING. CapacityError: TOO_MANY_SESSIONS. InvalidRequest: BROKEN_SESSION: what no client of
                this protocol would send.
        """
        self._requests.admission.check_open()
        self._requests.check_room_for_a_session()
        self._requests.sessions.add(self)
        self._handler = asyncio.current_task()
        self._idle_since_s = asyncio.get_running_loop().time()
        self._look_for_calls()
        reader = asyncio.create_task(self._read(requests))
        try:
            welcome = router_pb2.SessionWelcome(max_calls=MAX_CALLS, window_bytes=WINDOW_BYTES)
            yield router_pb2.SessionResponse(welcome=welcome)
            while (outgoing := await self._next()) is not None:
                yield outgoing.message
                outgoing.written.set()
        finally:
            self._requests.sessions.discard(self)
            reader.cancel()
            if self._look is not None:
                self._look.cancel()
            for call in self._calls.values():
                call.task.cancel()

    def say_goodbye(self) -> None:
        """The caller ends the stream behind its last call."""
        self._outgoing().message.goodbye = True
        self._said_goodbye = True

    def _look_for_calls(self) -> None:
        """Says goodbye where there were none for long; ends the stream where the caller minds no goodbye, and at last
        the handler, where it waits for a caller that reads nothing.
        """
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._calls or (self._outbox and not self._said_goodbye):
            self._idle_since_s = now_s  # at the earliest
        patience_s = UNHEARD_S if self._said_goodbye else self._requests.session_idle_s
        if now_s - self._idle_since_s >= patience_s:
            if self._is_left:
                if self._handler is not None:
                    self._handler.cancel()
                return
            if self._said_goodbye:
                self._is_left = True
                self._wake.set()
            else:
                self.say_goodbye()
            self._idle_since_s, patience_s = now_s, UNHEARD_S
        self._look = loop.call_at(self._idle_since_s + patience_s, self._look_for_calls)

    # --- what is sent ---

    def _outgoing(self) -> _Outgoing:
        """What goes out next, to be added to."""
        if not self._outbox or self._outbox[-1].num_bytes >= FULL_MESSAGE_BYTES:
            self._outbox.append(_Outgoing())
            self._wake.set()
        return self._outbox[-1]

    async def _next(self) -> _Outgoing | None:
        while not self._outbox and self._failure is None:
            if (self._is_read or self._is_left) and not self._calls:
                return None
            self._wake.clear()
            await self._wake.wait()
        if self._failure is not None:
            raise self._failure
        return self._outbox.popleft()

    def _accept(self, call: _Call, request_id: str) -> None:
        outgoing = self._outgoing()
        outgoing.num_bytes += outgoing.message.answers.add(number=call.number, request_id=request_id).ByteSize()

    async def _send(self, call: _Call, chunk: router_pb2.GenerateResponse) -> None:
        """Returns when it is written and its caller has room for another: until then the answer gathers."""
        outgoing = self._outgoing()
        outgoing.message.answers.add(number=call.number, chunk=chunk)
        num_bytes = chunk.ByteSize()
        outgoing.num_bytes += num_bytes
        call.window.send(num_bytes)
        await outgoing.written.wait()
        if call.window.is_full and not chunk.finish_reason:
            await call.window.room()

    async def _send_error(self, number: int, error: TailpackError) -> None:
        """Returns when it is written, so that errors do not gather either."""
        outgoing = self._outgoing()
        outgoing.num_bytes += outgoing.message.answers.add(number=number, error=rpc.to_detail(error)).ByteSize()
        await outgoing.written.wait()

    # --- what comes ---

    async def _read(self, requests: AsyncIterator[router_pb2.SessionRequest]) -> None:
        try:
            async for message in requests:
                for number in message.left:
                    if (call := self._calls.get(number)) is not None:
                        call.task.cancel()
                for taken in message.taken:
                    if (call := self._calls.get(taken.number)) is not None:
                        call.window.take(taken.num_bytes)
                if message.calls:
                    await self._begin(message.calls)
            self._is_read = True
        except Exception as failure:  # noqa: BLE001 - serve raises it
            self._failure = failure
        self._wake.set()

    async def _begin(self, calls: Sequence[router_pb2.SessionCall]) -> None:
        tenant, refusal = "", None
        try:
            tenant = self._tenant()
        except TailpackError as refused:
            refusal = refused
        for call in calls:
            while len(self._outbox) > MAX_UNWRITTEN:  # reading goes on when these are read
                await self._outbox[0].written.wait()
            if call.number <= self._last_number:
                raise _broken("a call's number is not higher than those before", call.number, self._last_number + 1)
            self._last_number = call.number
            if (refused_now := refusal or self._refusal()) is not None:
                await self._send_error(call.number, refused_now)
                continue
            asked = call
            if len(calls) > 1:  # one that lasts would keep the memory of all
                asked = router_pb2.SessionCall()
                asked.CopyFrom(call)
            begun = self._calls[call.number] = _Call(call.number)
            begun.task = asyncio.create_task(self._run(begun, asked, tenant))
            begun.task.add_done_callback(partial(self._ended, call.number))  # also of one that is left before it runs

    def _refusal(self) -> TailpackError | None:
        if len(self._calls) < MAX_CALLS:
            return None
        return CapacityError(
            "this session has too many calls",
            reason="TOO_MANY_CALLS",
            allowed=f"{MAX_CALLS} at one time",
            retry_after_ms=1000,
        )

    # --- a call ---

    async def _run(self, call: _Call, asked: router_pb2.SessionCall, tenant: str) -> None:
        timeout_s = min(asked.timeout_ms / 1e3, MAX_TIMEOUT_S) if asked.timeout_ms else None
        try:
            async with asyncio.timeout(timeout_s) as limit:
                await self._answer(call, asked, tenant, limit.when())
        except TimeoutError as failure:
            error = DeadlineExceeded("the deadline passed") if limit.expired() else _named(failure)
            await self._send_error(call.number, error)
        except Exception as failure:  # noqa: BLE001 - the boundary
            await self._send_error(call.number, _named(failure))

    async def _answer(self, call: _Call, asked: router_pb2.SessionCall, tenant: str, deadline: float | None) -> None:
        """deadline: on the loop's clock."""
        resumes = asked.WhichOneof("call") == "resume"
        metadata = rpc.metadata_of("" if resumes else asked.request_id, tenant, asked.traceparent)
        its = Call(
            asked.resume.request_id if resumes else metadata.request_id,
            tenant,
            metadata.traceparent,
            partial(_remaining_s, deadline),
            door="session",
            own_id=metadata.own_id,
        )
        if resumes:
            async with self._requests.resume(asked.resume, its) as answer:
                self._accept(call, its.request_id)
                await self._relay(call, answer)
        elif asked.HasField("generate"):
            if asked.generate.resumable or not its.own_id:
                self._accept(call, its.request_id)
            async with self._requests.answer(asked.generate, its) as answer:
                await self._relay(call, answer)
        else:
            raise InvalidRequest("a call of nothing, or of what this version does not know", reason="EMPTY_CALL")

    async def _relay(self, call: _Call, answer: Answer) -> None:
        ended = False
        async for chunk in answer:
            ended = bool(chunk.finish_reason)
            await self._send(call, chunk)
        if not ended:  # else its caller would wait for ever: no end of a stream tells it
            raise InternalError("the answer ended without its last chunk", reason="TOKEN_GAP")

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._calls[number]
        if not self._calls:
            self._idle_since_s = asyncio.get_running_loop().time()
            self._wake.set()


def _remaining_s(deadline: float | None) -> float | None:
    return None if deadline is None else deadline - asyncio.get_running_loop().time()


def _named(failure: Exception) -> TailpackError:
    return rpc.by_name(failure, "router", "Session")


def _broken(what: str, given: object, allowed: object) -> InvalidRequest:
    return InvalidRequest(what, reason="BROKEN_SESSION", given=given, allowed=allowed)
