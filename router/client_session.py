"""The caller's side of a session of many calls (Router.Session): what is open, and what is to be said. No I/O here.

router/async_session.py and router/sync_session.py are what reads and writes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from protos import router_pb2, rpc
from protos.errors import DeadlineExceeded, TailpackError, Unavailable
from router.answer import Chunk
from router.answer_state import Failure

FEATURE = "session"
"""Of routers that have sessions; no other is asked for one."""

TOO_MANY = "TOO_MANY_SESSIONS"

ASK_AGAIN_S = 60.0
"""A router without sessions may be replaced by one that has them."""

MAX_REQUEST_BYTES = 64 << 10
"""A larger request gets a stream of its own: it would hold up those behind it."""

FULL_MESSAGE_BYTES = 1 << 20
"""A message with as much takes no more calls: gRPC takes none above 64 MiB, and ends the session."""


class CallFailed(Exception):
    """How one call ended, where it ended in an error."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.error)
        self.failure = failure


class SessionEnds(Exception):
    """No call begins here any more, and this one did not: it needs another session, or a stream of its own."""


@dataclass(frozen=True)
class Lost:
    """The session is over. spoken: as of Failure."""

    error: TailpackError
    spoken: bool


@dataclass(frozen=True)
class NoSessions:
    """A router said at this time (time.monotonic) that it has none."""

    at_s: float


class Shared(Protocol):
    @property
    def is_over(self) -> bool: ...


def is_usable(opened: Shared | NoSessions | Failure) -> bool:
    """Whether what came of opening a session holds for further calls."""
    if isinstance(opened, NoSessions):
        return time.monotonic() - opened.at_s < ASK_AGAIN_S
    return not isinstance(opened, Failure) and not opened.is_over


def why_none(failed: grpc.RpcError) -> str | None:
    """Why none can be had for now, where opening one failed for that: whoever answers there knows of no such thing, or
    has too many. None: it failed otherwise.
    """
    if getattr(failed, "code", lambda: None)() is grpc.StatusCode.UNIMPLEMENTED:
        return "UNIMPLEMENTED"
    return TOO_MANY if rpc.error_from(failed).reason == TOO_MANY else None


def not_opened() -> Failure:
    """Of calls for which there is no session, though their router has them."""
    return Failure(Unavailable("the router does not answer"), spoken=False, accepted=False)


def out_of_time() -> Failure:
    return Failure(DeadlineExceeded("the deadline passed"), spoken=False, accepted=False)


Item = router_pb2.SessionAnswer | Lost
"""What a call hears: answers, and last of all perhaps that its session is over."""


class Calls:
    """The calls of one session. Of one thread at a time.

    Attributes:
        lost: why it is over; None: it is not.
    """

    def __init__(self) -> None:
        self.lost: Lost | None = None
        self.window_bytes = 0
        self._max_calls = 0
        self._leaves = False
        self._hears: dict[int, Callable[[Item], None]] = {}  # by number
        self._last_number = 0
        self._unsent = deque([router_pb2.SessionRequest()])  # never empty
        self._last_bytes = 0  # of the calls in the last of them
        self._some = False

    @property
    def is_over(self) -> bool:
        """Whether no calls can begin here any more."""
        return self._leaves or self.lost is not None

    @property
    def is_through(self) -> bool:
        """Whether the router waits for no more than the end of what is said here."""
        return self._leaves and not self._hears

    @property
    def has_room(self) -> bool:
        return len(self._hears) < self._max_calls

    # --- what is to be said ---

    def begin(
        self,
        message: router_pb2.GenerateRequest | router_pb2.ResumeRequest,
        hear: Callable[[Item], None],
        *,
        request_id: str,
        traceparent: str,
        timeout_s: float | None,
    ) -> int:
        """The number of a new call. hear: told all that comes of it, in order.

        Raises SessionEnds: the router said goodbye, perhaps since the caller looked.
        """
        if self._leaves:
            raise SessionEnds
        number = self._last_number = self._last_number + 1
        if self.lost is not None:
            hear(self.lost)
            return number
        if self._last_bytes >= FULL_MESSAGE_BYTES:
            self._unsent.append(router_pb2.SessionRequest())
            self._last_bytes = 0
        call = self._unsent[-1].calls.add(number=number, traceparent=traceparent)
        if isinstance(message, router_pb2.ResumeRequest):
            call.resume.CopyFrom(message)
        else:
            call.generate.CopyFrom(message)
            call.request_id = request_id
        if timeout_s is not None:
            call.timeout_ms = max(1, int(1e3 * timeout_s))
        self._last_bytes += call.ByteSize()
        self._hears[number] = hear
        self._some = True
        return number

    def took(self, number: int, num_bytes: int) -> None:
        """num_bytes: of the call's chunks so far."""
        if number in self._hears:
            self._unsent[0].taken.add(number=number, num_bytes=num_bytes)
            self._some = True

    def leave(self, number: int) -> None:
        """Ends a call that runs. Nothing more is heard of it."""
        if self._hears.pop(number, None) is None:
            return
        self._some = True
        for message in self._unsent:
            for index, call in enumerate(message.calls):
                if call.number == number:
                    del message.calls[index]
                    return
        self._unsent[0].left.append(number)

    def outgoing(self) -> router_pb2.SessionRequest | None:
        """What is to be said next; None: nothing by now. Ask until there is nothing."""
        if not self._some:
            return None
        message = self._unsent.popleft()
        if not self._unsent:
            self._unsent.append(router_pb2.SessionRequest())
            self._last_bytes = 0
            self._some = False
        return message

    # --- what comes ---

    def welcome(self, welcome: router_pb2.SessionWelcome) -> None:
        self._max_calls, self.window_bytes = welcome.max_calls, welcome.window_bytes

    def take(self, message: router_pb2.SessionResponse) -> None:
        for answer in message.answers:
            hear = self._hears.get(answer.number)
            if hear is not None:
                if answer.chunk.finish_reason or answer.HasField("error"):
                    self._hears.pop(answer.number, None)
                hear(answer)
        self._leaves |= message.goodbye

    def lose(self, lost: Lost) -> None:
        """The session is over, with all its calls. Only the first time counts."""
        if self.lost is None:
            self.lost = lost
            hears, self._hears = self._hears, {}
            for hear in hears.values():
                hear(lost)


class Reading:
    """What one caller has read of a call.

    Attributes:
        ended: nothing more comes.
    """

    def __init__(self, window_bytes: int) -> None:
        self.ended = False
        self._accepted = False
        self._num_bytes = 0
        self._told_bytes = 0
        self._tell_every = window_bytes // 2

    def take(self, item: Item) -> Chunk | None:
        """The chunk in it, if there is one. Raises CallFailed."""
        if isinstance(item, Lost):
            self.ended = True
            raise CallFailed(Failure(item.error, item.spoken, self._accepted))
        if item.HasField("error"):
            self.ended = True
            raise CallFailed(Failure(rpc.from_detail(item.error), True, self._accepted))
        if item.request_id:
            self._accepted = True
        if not item.HasField("chunk"):
            return None
        self.ended = bool(item.chunk.finish_reason)
        self._num_bytes += item.chunk.ByteSize()
        return item.chunk

    def due(self) -> int | None:
        """The bytes that the router is to be told of now; None: later."""
        if self._num_bytes - self._told_bytes < self._tell_every:
            return None
        self._told_bytes = self._num_bytes
        return self._num_bytes
