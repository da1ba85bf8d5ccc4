"""What a client has of one answer, and what it does when a call ends early: try again, resume, or give up. Pure.

Both flavours of the client drive one AnswerState per request: no clock, no random numbers, no I/O here.
"""

from __future__ import annotations

from dataclasses import dataclass

from protos import router_pb2
from protos.errors import (
    AlreadyExists,
    CapacityError,
    DeadlineExceeded,
    InternalError,
    NotFound,
    RequestCancelled,
    TailpackError,
    Unavailable,
)
from protos.limits import DEFAULT_RESUME_GRACE_MS

WRONG_DOOR = ("SERVER_CERTIFICATE_REFUSED", "TLS_NOT_SPOKEN")
"""Reasons of connections that fail the same way each time."""

MAX_HINT_MS = 60_000
"""Who is told to come back later than this gives up."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to try again. Waits grow from first_delay_s by two each round, up to max_delay_s, less a random part of up
    to half; a router's hint to wait longer is added to.

    Args:
        max_retries: rounds through the addresses after the first one, in a row without a new token. 0: never try again,
            and never resume. An answer that is kept for us is asked for as long as it is kept, whatever this number.
    """

    max_retries: int = 4
    first_delay_s: float = 0.1
    max_delay_s: float = 2.0

    def delay_s(self, num_rounds: int, hint_s: float, jitter: float) -> float:
        """Before round num_rounds (1 is the first again). jitter: in [0, 1)."""
        backoff = min(self.max_delay_s, self.first_delay_s * 2.0 ** min(num_rounds - 1, 30))
        return hint_s + backoff * (0.5 + 0.5 * jitter)


@dataclass(frozen=True)
class Failure:
    """How one call ended.

    Args:
        spoken: a router said so; else a connection failed, or a router that stopped cut its calls.
        accepted: the router had the request (it had sent the call's first metadata).
    """

    error: TailpackError
    spoken: bool
    accepted: bool


class AnswerState:
    """Offsets that must be next, and the tries so far. One request id on all of them."""

    def __init__(
        self,
        request_id: str,
        request: router_pb2.GenerateRequest | None,
        policy: RetryPolicy,
        *,
        num_addresses: int = 1,
        first_address: int = 0,
        deadline_s: float | None = None,
        token_offset: int = 0,
        text_offset: int = 0,
        resume_grace_ms: int = 0,
    ) -> None:
        """request None: an answer that somebody else began is resumed at the offsets given.

        Args:
            deadline_s: on the clock of now_s; None: none.
        """
        self.request_id = request_id
        self.address = first_address  # index: where the next call goes
        self.num_tokens = token_offset
        self.num_text_bytes = text_offset
        self.num_retries = 0  # calls after the first
        self.ended = False  # the last chunk is here
        self._request = request
        self._policy = policy
        self._num_addresses = num_addresses
        self._deadline_s = deadline_s
        self.resumable = request is None or request.resumable
        grace_ms = resume_grace_ms if request is None else request.resume_grace_ms
        self._grace_s = (grace_ms or DEFAULT_RESUME_GRACE_MS) / 1e3
        self._num_failures = 0  # in a row
        self._num_unknown = 0  # of these, routers that do not know the answer
        self._hint_s = 0.0  # the longest of this round
        self._loss: Failure | None = None  # the first in the row
        self._lost_s = 0.0
        self._kept = request is None  # a router keeps the answer for us
        self._sent = False
        self._given_up = False

    # --- what to send ---

    @property
    def resuming(self) -> bool:
        return self._request is None or self._begun

    @property
    def _begun(self) -> bool:
        return bool(self.num_tokens or self.num_text_bytes)

    def message(self) -> router_pb2.GenerateRequest | router_pb2.ResumeRequest:
        """Of the next call. A ResumeRequest is for Resume."""
        self._sent = True
        if self._request is not None and not self._begun:
            return self._request
        return router_pb2.ResumeRequest(
            request_id=self.request_id, token_offset=self.num_tokens, text_offset=self.num_text_bytes
        )

    def remaining_s(self, now_s: float) -> float | None:
        """Of the deadline, for the next call. Raises DeadlineExceeded where nothing is left."""
        if self._deadline_s is None:
            return None
        if now_s >= self._deadline_s:
            raise DeadlineExceeded("the deadline passed between two tries")
        return self._deadline_s - now_s

    @property
    def abandoned(self) -> bool:
        """Whether a router would run on for us though nobody reads: it must be told (Cancel). Losing the call is enough
        where the request is not resumable; one that could not be reached, or refused, has nothing to cancel.
        """
        return self.resumable and self._sent and not self.ended and not self._given_up

    def leave(self) -> None:
        """Somebody tells the routers: no longer abandoned."""
        self._given_up = True

    # --- what came ---

    def take(self, chunk: router_pb2.GenerateResponse) -> None:
        """Checks a chunk against what is here.

        Raises:
            InternalError: TOKEN_GAP.
        """
        if chunk.request_id != self.request_id:
            raise _gap("a chunk of another request", chunk.request_id, self.request_id)
        if self.ended:
            raise _gap("a chunk behind the last one", f"token offset {chunk.token_offset}", "none")
        for what, given, expected in (
            ("tokens", chunk.token_offset, self.num_tokens),
            ("text", chunk.text_offset, self.num_text_bytes),
        ):
            if given != expected:
                kind = "gap" if given > expected else "repeat"
                raise _gap(f"a {kind} in the {what}", f"offset {given}", f"offset {expected}")
        if chunk.logprobs and len(chunk.logprobs) != len(chunk.token_ids):
            raise _gap("log-probabilities that do not match the tokens", len(chunk.logprobs), len(chunk.token_ids))
        self.num_tokens += len(chunk.token_ids)
        self.num_text_bytes += len(chunk.text.encode())
        if chunk.finish_reason:
            if chunk.usage.output_tokens != self.num_tokens:
                raise _gap("an end that does not fit the tokens", chunk.usage.output_tokens, self.num_tokens)
            self.ended = True
        if chunk.token_ids or chunk.text or chunk.finish_reason:
            self._num_failures = self._num_unknown = 0
            self._hint_s = 0.0
            self._loss = None

    def check_ended(self) -> None:
        """At the end of a stream without an error. Raises InternalError (TOKEN_GAP) where the last chunk is missing."""
        if not self.ended:
            raise _gap("an answer without its last chunk", f"end after {self.num_tokens} tokens", "a finish reason")

    def failed(self, failure: Failure, *, now_s: float, jitter: float) -> float:
        """Takes the end of a call by an error. Returns how many seconds to wait before the next, whose message and
        address this object tells. jitter: a random number in [0, 1).

        Raises:
            TailpackError: there is no next try.
        """
        num_tries = self._num_failures
        if self._loss is None:
            self._loss, self._lost_s = failure, now_s
        if self.resumable and failure.accepted and (self._begun or not failure.spoken):
            self._kept = True  # a router that refuses a request keeps nothing of it
        unknown = self.resuming and isinstance(failure.error, NotFound)
        if self._policy.max_retries == 0 or not (unknown or _passes(failure, again=num_tries > 0)):
            self._give_up(failure.error)
        if self._begun and not self.resumable:
            self._give_up(failure.error)
        self._num_failures += 1
        self._num_unknown += unknown
        if self._num_unknown >= self._num_addresses:  # no router has it any more
            self._give_up(self._lost_for_good(failure.error))
        self.num_retries += 1
        self.address = (self.address + 1) % self._num_addresses
        self._hint_s = max(self._hint_s, (failure.error.retry_after_ms or 0) / 1e3)
        num_rounds, tried = divmod(self._num_failures, self._num_addresses)
        delay_s = 0.0  # another address, which knows nothing of this one's troubles
        if not tried:
            delay_s = self._policy.delay_s(num_rounds, self._hint_s, jitter)
            self._hint_s = 0.0
            kept = self._kept and now_s + delay_s < self._lost_s + self._grace_s
            if num_rounds > self._policy.max_retries and not kept:
                self._give_up(failure.error)
        if self._deadline_s is not None and now_s + delay_s >= self._deadline_s:
            self._give_up(failure.error)
        return delay_s

    def _give_up(self, error: TailpackError) -> None:
        # A deadline or a gap of ours ends what may still run; what cannot be reached cannot be ended either, and may be
        # resumed by its id while it is kept.
        self._given_up = not isinstance(error, DeadlineExceeded)
        raise error

    def _lost_for_good(self, error: TailpackError) -> TailpackError:
        assert self._loss is not None
        if self._loss.error is error:  # resumed by its id, and there is no such request
            return error
        if self._loss.spoken:
            return self._loss.error
        return Unavailable(
            f"the connection was lost after {self.num_tokens} tokens, and no router has the answer any more",
            reason="ANSWER_LOST",
            given=self._loss.error.message[:200],
            hint="send the request again; a longer resume_grace_ms keeps an answer longer",
        )


def _passes(failure: Failure, *, again: bool) -> bool:
    """Whether what ended a call may be over soon. The caller's own mistakes never are."""
    error = failure.error
    match error:
        case Unavailable() | CapacityError() if (error.retry_after_ms or 0) > MAX_HINT_MS:
            return False
        case Unavailable():
            return error.reason not in WRONG_DOOR
        case CapacityError():
            return error.retry_after_ms is not None  # where waiting helps, the router says how long
        case RequestCancelled():
            return not failure.spoken  # a router that stops cuts its calls
        case AlreadyExists():
            return again  # the call before this one: its router has yet to see that it was lost
        case _:
            return False


def _gap(what: str, given: object, allowed: object) -> InternalError:
    return InternalError(f"the router sent {what}", reason="TOKEN_GAP", given=given, allowed=allowed)
