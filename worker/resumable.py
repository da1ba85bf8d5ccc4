"""Answers that outlive their callers or their worker: what sequences emitted, and who reads it.

An ``Answer`` is the log of one sequence. A ``Subscription`` reads it from some token on, for one session, as fast as
that session is read: the log is the buffer, so a replay and a live stream are the same thing, and several may read at
once.

    submit -> runs, subscribed -> (last subscription ends) runs alone -> ended, kept -> forgotten
                    ^ resume ___________________________|_________________|

Adopted sequences have an answer, too, resumable or not: they run alone until their router submits them again, which
joins. One that is not resumable then lasts as long as it is subscribed to.

Forgotten are: what nobody was subscribed to for its grace time (aborted first, if it still runs); what was cancelled;
what failed before its first token; and, where the bounds are reached, the answers that ended first. What is forgotten
is as if it had never been: a later resume is answered UNKNOWN_REQUEST.

Event loop only. No clock of its own, no I/O.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

import structlog

from protos import types_pb2, worker_pb2
from protos.errors import AlreadyExists, CapacityError, InvalidRequest, NotFound
from protos.limits import MAX_RESUME_GRACE_MS
from worker.sequence import Request

log = structlog.get_logger("worker")

MAX_CALLER_REQUEST_BYTES = 8 << 10
MAX_PIECE_WEIGHT = 1 << 10
"""Tokens, with their logprobs' entries, that a subscription sends before it waits for More where more is there."""

DELIVERED_LASTS_S = 3.0
"""A router says that its caller has all of an answer when it has written the last of it. What it wrote may still be in
its buffers: should router and worker die then, the next worker can answer from the slot, which is kept so much longer.
"""

_TOKEN_BYTES = 4
_POSITION_BYTES = 48  # of one position's log-probabilities: a bytes object around what follows
_LOGPROB_BYTES = 13  # of one TokenLogprob as serialised, at most
_ANSWER_BYTES = 2048  # of the objects around a log, roughly


@dataclass(frozen=True)
class Limits:
    """max_kept: answers that have ended. max_bytes: of all logs; a running one counts with all it may come to."""

    max_kept: int = 4096
    max_bytes: int = 256 << 20


class Reader(Protocol):
    """A session, as a subscription sees it."""

    def news(self, subscription: Subscription) -> None:
        """The subscription has something to take."""


@dataclass(eq=False)
class Answer:
    """One resumable or adopted sequence: what it emitted so far, and whether it goes on."""

    submit: worker_pb2.Submit  # without its tokens
    owner: str  # of the engine's request: outputs and aborts are this sequence's by it, whoever else has its id
    num_prompt_tokens: int
    num_bytes: int  # of its log: while it runs all it may come to, afterwards what it is
    abort: Callable[[], object]  # tells the engine
    let_go: Callable[[], object]  # tells it that nobody waits for what ended
    token_ids: array[int]
    grace_s: float = 0.0
    logprobs_from: int = 0  # the first token whose logprobs can be here: those before were emitted elsewhere
    logprobs: list[bytes] = field(default_factory=list)  # serialised PositionLogprobs, one a token when asked for
    adopted: Request | None = None  # of a sequence that came from another life of this worker
    lasts: bool = True  # without a subscription, too
    seed: int = 0
    last: worker_pb2.SequenceOutput | None = None  # finish reason, error, usage and timings
    subscriptions: set[Subscription] = field(default_factory=set)
    idle_since: float | None = None  # clock; while nobody is subscribed: since when, or since its end if that was later
    is_complete: bool = False  # its router has seen all it wanted: the abort that follows is no loss
    is_forgotten: bool = False  # nobody finds it any more; it may still run for a step
    delivered_at: float | None = None  # clock
    has_slot: bool = True  # in the store, so far as the engine has room; false: it was told that it may let go

    @property
    def was_delivered(self) -> bool:
        return self.delivered_at is not None

    @property
    def weight(self) -> int:
        """Of one token of a message."""
        return 1 + (2 + self.submit.sampling.logprobs if self.submit.sampling.HasField("logprobs") else 0)

    @property
    def is_resumable(self) -> bool:
        return self.submit.HasField("resumable")

    def measured_bytes(self) -> int:
        size = _ANSWER_BYTES + self.submit.ByteSize() + _TOKEN_BYTES * len(self.token_ids)
        return size + sum(_POSITION_BYTES + len(position) for position in self.logprobs)


@dataclass(eq=False)
class Subscription:
    """One session's place in an answer. ``name`` stands as request_id in its outputs."""

    name: str
    answer: Answer
    reader: Reader
    position: int = 0
    waits_for_more: bool = False
    told_end: bool = False
    joined: bool = False  # a submission that found its sequence here; until that is told

    def take(self) -> worker_pb2.SequenceOutput | None:
        """What the reader has not had, at most a piece; None: nothing, or it has to say More first."""
        answer = self.answer
        if self.told_end or self.waits_for_more:
            return None
        end = min(len(answer.token_ids), self.position + max(1, MAX_PIECE_WEIGHT // answer.weight))
        # Tokens without the logprobs that were asked for share no output with others.
        if answer.weight > 1 and self.position < answer.logprobs_from:
            end = min(end, answer.logprobs_from)
        ended = answer.last is not None and end == len(answer.token_ids)
        if end == self.position and not ended:
            return None
        output = worker_pb2.SequenceOutput()
        if ended and answer.last is not None:
            output.CopyFrom(answer.last)
            self.told_end = True
        output.request_id = self.name
        output.token_offset = self.position
        output.token_ids.extend(answer.token_ids[self.position : end])
        first = answer.logprobs_from
        for position in answer.logprobs[max(0, self.position - first) : max(0, end - first)]:
            output.logprobs.add().MergeFromString(position)
        output.seed = answer.seed
        output.joined, self.joined = self.joined, False
        output.more = self.waits_for_more = end < len(answer.token_ids)
        self.position = end
        return output

    def go_on(self) -> None:
        """The reader said More."""
        self.waits_for_more = False
        self.reader.news(self)


class Answers:
    """All resumable and adopted sequences of a worker, running and kept.

    Args:
        clock: seconds; only differences count.
    """

    def __init__(self, clock: Callable[[], float], limits: Limits | None = None) -> None:
        self._clock = clock
        self._limits = limits or Limits()
        self._by_id: dict[str, Answer] = {}
        self._by_owner: dict[str, Answer] = {}  # those that run
        self._kept: dict[str, Answer] = {}  # those that ended, in that order
        self._running_bytes = 0
        self._kept_bytes = 0
        self._numbers = itertools.count()
        self.num_joined = 0
        """Submissions that went on with an adopted sequence, ever."""

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._running_bytes + self._kept_bytes

    @property
    def num_owed(self) -> int:
        """Answers that run or are kept and that no caller has had in full, so far as their routers said."""
        return sum(not answer.was_delivered for answer in self._by_id.values())

    def new_owner(self) -> str:
        return f"resumable#{next(self._numbers)}"  # no session's owner: those have a "/" before the number

    def find(self, request_id: str, tenant: str) -> Answer | None:
        """The answer, running or kept. Another tenant's is not found."""
        answer = self._by_id.get(request_id)
        return answer if answer is not None and answer.submit.tenant == tenant else None

    def holds(self, request_id: str) -> bool:
        return request_id in self._by_id

    def open(
        self,
        submit: worker_pb2.Submit,
        owner: str,
        abort: Callable[[], object],
        reader: Reader,
        let_go: Callable[[], object] = lambda: None,
    ) -> Subscription:
        """Takes in a resumable submission, before the engine does, and subscribes its session to it.

        Returns:
            The subscription. It is to a new answer if that has this ``owner``; else the same request is here already.

        Raises:
            InvalidRequest: BAD_RESUME_GRACE, BAD_CALLER_REQUEST.
            AlreadyExists: another request has this id (DUPLICATE_REQUEST).
            CapacityError: the log may grow larger than there is room beside those that run (RESUME_LOG_FULL).
        """
        _check(submit)
        there = self._by_id.get(submit.request_id)
        if there is not None:
            digest, emitted = submit.resumable.request_digest, array("I", submit.emitted_token_ids)
            same = there.submit.tenant == submit.tenant and there.submit.resumable.request_digest == digest != b""
            if same and there.token_ids[: len(emitted)] == emitted:
                return self._subscribe(there, submit.request_id, reader, len(emitted), joined=True)
            raise duplicate(submit.request_id)
        kept = worker_pb2.Submit(
            request_id=submit.request_id, tenant=submit.tenant, sampling=submit.sampling, resumable=submit.resumable
        )
        emitted = array("I", submit.emitted_token_ids)
        answer = Answer(kept, owner, len(submit.prompt_token_ids), _most_bytes(submit), abort, let_go, emitted)
        answer.grace_s, answer.logprobs_from = submit.resumable.grace_ms / 1000, len(emitted)
        self._make_room(answer.num_bytes)
        self._add(answer)
        return self._subscribe(answer, submit.request_id, reader, len(emitted))

    def adopt(
        self,
        request: Request,
        emitted: Iterable[int],
        abort: Callable[[], object],
        let_go: Callable[[], object] = lambda: None,
        *,
        grace_s: float,
    ) -> None:
        """Takes in a sequence of an earlier life of this worker. Nobody is subscribed to it yet.

        Args:
            request: its owner is the sequence's in the engine.
            emitted: its tokens so far.
            grace_s: until its router is back, where the request does not say so itself.
        """
        submit = replace(request, prompt=(), emitted=()).to_proto()
        size = _most_bytes(submit)
        answer = Answer(submit, request.owner, len(request.prompt), size, abort, let_go, array("I", emitted))
        answer.grace_s = submit.resumable.grace_ms / 1000 if answer.is_resumable else grace_s
        answer.logprobs_from, answer.adopted = len(answer.token_ids), request
        answer.idle_since = self._clock()
        self._add(answer)

    def adopted(self, request_id: str, tenant: str) -> Answer | None:
        """The answer of an adopted sequence that a submission under this id may join, or has to end."""
        answer = self.find(request_id, tenant)
        return answer if answer is not None and answer.adopted is not None else None

    def join(self, answer: Answer, submit: worker_pb2.Submit, reader: Reader) -> Subscription:
        """Subscribes the session of a submission that ``goes_on_with`` the answer, behind the tokens that it has."""
        self.num_joined += 1
        if submit.HasField("resumable"):
            answer.submit.resumable.CopyFrom(submit.resumable)
            answer.grace_s = submit.resumable.grace_ms / 1000
        answer.lasts = answer.is_resumable
        return self._subscribe(answer, submit.request_id, reader, len(submit.emitted_token_ids), joined=True)

    def resume(self, request_id: str, tenant: str, name: str, reader: Reader) -> Subscription:
        """Subscribes a session from token 0 on. Raises NotFound (UNKNOWN_REQUEST)."""
        answer = self.find(request_id, tenant)
        if answer is None or not answer.is_resumable:
            raise NotFound("no such request runs or is kept here", reason="UNKNOWN_REQUEST")
        return self._subscribe(answer, name, reader)

    def leave(self, subscription: Subscription, *, delivered: bool = False) -> None:
        """Ends a subscription; with the last one the grace time begins."""
        answer = subscription.answer
        if delivered and subscription.told_end and not answer.was_delivered:
            answer.delivered_at = self._clock()
        answer.subscriptions.discard(subscription)
        if answer.subscriptions:
            return
        if answer.lasts:
            answer.idle_since = self._clock()
        else:
            self.cancel(answer)

    def complete(self, answer: Answer) -> None:
        """Ends a sequence whose answer is complete; what it emitted is kept."""
        if answer.last is None:
            answer.is_complete = True
            answer.abort()

    def cancel(self, answer: Answer) -> None:
        """Ends a sequence for all that are subscribed, and forgets it."""
        self._forget(answer)
        if answer.last is None:
            answer.abort()

    def take(self, owner: str, outputs: Iterable[worker_pb2.SequenceOutput]) -> None:
        """What a step made for the sequence of this owner."""
        answer = self._by_owner.get(owner)
        if answer is None:
            return
        for output in outputs:
            answer.token_ids.extend(output.token_ids)
            answer.logprobs += [position.SerializeToString() for position in output.logprobs]
            answer.seed = answer.seed or output.seed
            if output.finish_reason:
                self._end(answer, output)
        for subscription in answer.subscriptions:
            subscription.reader.news(subscription)

    def expire(self) -> None:
        """Forgets what nobody was subscribed to for its grace time; aborts it first, if it runs. Lets go of the slots
        of what was delivered some time ago."""
        now = self._clock()
        for answer in self._kept.values():
            if answer.has_slot and answer.delivered_at is not None and now - answer.delivered_at >= DELIVERED_LASTS_S:
                answer.has_slot = False
                answer.let_go()
        over = [a for a in self._by_id.values() if a.idle_since is not None and now - a.idle_since >= a.grace_s]
        for answer in over:
            if answer.last is None:
                log.info("aborted: nobody resumed it", request_id=answer.submit.request_id, grace_s=answer.grace_s)
            self.cancel(answer)

    def drop(self, owner: str) -> None:
        """The engine did not take the sequence."""
        answer = self._by_owner.pop(owner)
        self._running_bytes -= answer.num_bytes
        del self._by_id[answer.submit.request_id]

    def _add(self, answer: Answer) -> None:
        self._by_id[answer.submit.request_id] = self._by_owner[answer.owner] = answer
        self._running_bytes += answer.num_bytes

    def _subscribe(
        self, answer: Answer, name: str, reader: Reader, position: int = 0, *, joined: bool = False
    ) -> Subscription:
        subscription = Subscription(name, answer, reader, position, joined=joined)
        answer.subscriptions.add(subscription)
        answer.idle_since = None
        if answer.last is not None or position < len(answer.token_ids):
            reader.news(subscription)
        return subscription

    def _end(self, answer: Answer, output: worker_pb2.SequenceOutput) -> None:
        del self._by_owner[answer.owner]
        self._running_bytes -= answer.num_bytes
        answer.last = worker_pb2.SequenceOutput()
        answer.last.CopyFrom(output)
        answer.last.ClearField("token_ids")
        answer.last.ClearField("logprobs")
        if answer.idle_since is not None:
            answer.idle_since = self._clock()
        aborted = output.finish_reason == types_pb2.FINISH_REASON_ABORTED and not answer.is_complete
        # A refusal is no answer: the router may place the request elsewhere.
        refused = output.finish_reason == types_pb2.FINISH_REASON_ERROR and not answer.token_ids
        if aborted or refused or answer.is_forgotten:
            self._forget(answer)
            return
        answer.num_bytes = answer.measured_bytes()
        self._kept[answer.owner] = answer
        self._kept_bytes += answer.num_bytes
        while len(self._kept) > self._limits.max_kept:
            self._lose_oldest("as many answers are kept as may be")

    def _make_room(self, num_bytes: int) -> None:
        if self._running_bytes + num_bytes > self._limits.max_bytes:
            raise CapacityError(
                "the logs of resumable requests may come to more than this worker keeps",
                reason="RESUME_LOG_FULL",
                given=f"{num_bytes} bytes at most, beside {self._running_bytes} of those that run",
                allowed=f"{self._limits.max_bytes} bytes",
                hint="ask for fewer max_tokens or logprobs, or make it not resumable",
                retry_after_ms=1000,
            )
        while self._kept and self.num_bytes + num_bytes > self._limits.max_bytes:
            self._lose_oldest("as many bytes are kept as may be")

    def _lose_oldest(self, why: str) -> None:
        answer = next(iter(self._kept.values()))
        log.warning(
            "kept answer lost: it cannot be resumed any more",
            why=why,
            request_id=answer.submit.request_id,
            num_tokens=len(answer.token_ids),
            num_bytes=answer.num_bytes,
            num_kept=len(self._kept),
            was_delivered=answer.was_delivered,
        )
        self._forget(answer)

    def _forget(self, answer: Answer) -> None:
        """Nobody finds it from here on. Who is subscribed reads on to its end."""
        if not answer.is_forgotten and answer.last is not None and answer.has_slot:
            answer.has_slot = False
            answer.let_go()
        answer.is_forgotten = True
        if self._by_id.get(answer.submit.request_id) is answer:
            del self._by_id[answer.submit.request_id]
        if self._kept.pop(answer.owner, None) is not None:
            self._kept_bytes -= answer.num_bytes


def duplicate(request_id: str) -> AlreadyExists:
    return AlreadyExists(
        "another request with this id runs or is kept here", reason="DUPLICATE_REQUEST", given=request_id
    )


def _check(submit: worker_pb2.Submit) -> None:
    resumable = submit.resumable
    if resumable.grace_ms > MAX_RESUME_GRACE_MS:
        raise InvalidRequest(
            "the grace time of a resumable request is too long",
            reason="BAD_RESUME_GRACE",
            given=f"{resumable.grace_ms} ms",
            allowed=f"at most {MAX_RESUME_GRACE_MS} ms",
        )
    if len(resumable.caller_request) > MAX_CALLER_REQUEST_BYTES:
        raise InvalidRequest(
            "what the router wants kept of the request is too large",
            reason="BAD_CALLER_REQUEST",
            given=f"{len(resumable.caller_request)} bytes",
            allowed=f"at most {MAX_CALLER_REQUEST_BYTES} bytes",
        )


def goes_on_with(request: Request, answer: Answer) -> bool:
    """Whether a submission is for the very sequence that was adopted, and all that it has yet to get is there."""
    adopted = answer.adopted
    if adopted is None or (request.resumable is not None) != answer.is_resumable:
        return False
    if request.resumable is not None and request.resumable.request_digest != answer.submit.resumable.request_digest:
        return False
    if request.sampling.seed not in (None, adopted.sampling.seed):
        return False
    same_sampling = replace(request.sampling, seed=adopted.sampling.seed) == adopted.sampling
    if (request.prompt, request.stop) != (adopted.prompt, adopted.stop) or not same_sampling:
        return False
    if request.sampling.logprobs is not None and len(request.emitted) < answer.logprobs_from:
        return False
    return answer.token_ids[: len(request.emitted)] == array("I", request.emitted)


def _most_bytes(submit: worker_pb2.Submit) -> int:
    """Of a log when it has max_tokens."""
    sampling = submit.sampling
    position = _POSITION_BYTES + _LOGPROB_BYTES * (1 + sampling.logprobs) if sampling.HasField("logprobs") else 0
    fixed = _ANSWER_BYTES + len(submit.resumable.caller_request) + 1024
    return fixed + submit.stop.max_tokens * (_TOKEN_BYTES + position)
