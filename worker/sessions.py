"""Router sessions: from the engine thread's step results to one message a step and session.

The engine thread hands a whole step over with one call_soon_threadsafe. What a session has not sent yet is merged, so a
router that reads slowly gets fewer, larger messages, and one that does not read at all is ended at a fixed bound.
Outputs of resumable and adopted sequences go to their logs (worker/resumable.py); a session reads those as it sends.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from protos import rpc, worker_pb2
from protos.errors import CapacityError, InvalidRequest, TailpackError
from worker.engine import Engine
from worker.resumable import Answers, Subscription
from worker.sequence import Output, StepResult

LOAD_INTERVAL_S = 0.5
"""A session hears from an idle worker this often. The protocol promises once a second."""

MAX_PENDING_TOKENS = 1 << 18
"""Tokens (with their logprobs' entries) that wait for a router that does not read. Then its session ends."""

MAX_MESSAGE_WEIGHT = 1 << 17
"""The same, of what subscriptions add to one message."""

EXPIRY_INTERVAL_S = 0.25
"""How late a grace time may end."""


class RouterSession:
    """What one router has not been sent yet. Event loop only."""

    def __init__(self, owner: str, engine: Engine, answers: Answers) -> None:
        self.owner = owner
        self.subscriptions: dict[str, Subscription] = {}
        self._engine = engine
        self._answers = answers
        self._news: dict[str, Subscription] = {}  # of the subscriptions, those that may have something to take
        self._pending: list[worker_pb2.SequenceOutput] = []
        self._latest: dict[str, worker_pb2.SequenceOutput] = {}  # of _pending, by request id
        self._weight = 0
        self._goodbye: str | None = None
        self._ended = False
        self._failure: TailpackError | None = None
        self._changed = asyncio.Event()

    def add(self, outputs: Iterable[worker_pb2.SequenceOutput]) -> None:
        """Queues a step's outputs; fails the session (CapacityError SLOW_ROUTER) when too much waits."""
        if self._failure is not None:
            return
        for output in outputs:
            self._merge(output)
        if self._weight > MAX_PENDING_TOKENS:
            self.end(
                CapacityError(
                    "the router does not read its session",
                    reason="SLOW_ROUTER",
                    given=f"{self._weight} tokens wait",
                    allowed=MAX_PENDING_TOKENS,
                )
            )
        self._changed.set()

    def _merge(self, output: worker_pb2.SequenceOutput) -> None:
        self._weight += 1 + len(output.token_ids) + sum(1 + len(position.top) for position in output.logprobs)
        earlier = self._latest.get(output.request_id)
        # A finished sequence takes nothing more: what follows under its id is a new one.
        if earlier is None or earlier.finish_reason:
            self._pending.append(output)
            self._latest[output.request_id] = output
            return
        offset = earlier.token_offset
        earlier.MergeFrom(output)  # appends tokens and logprobs; sets the last output's fields
        earlier.token_offset = offset

    # --- subscriptions ---

    def check_name(self, name: str) -> None:
        """Raises InvalidRequest where a subscription of this name is open."""
        if name in self.subscriptions:
            raise InvalidRequest("this subscription is open already", reason="SUBSCRIPTION_IN_USE", given=name)

    def subscribed(self, subscription: Subscription) -> None:
        self.subscriptions[subscription.name] = subscription

    def news(self, subscription: Subscription) -> None:
        self._news[subscription.name] = subscription
        self._changed.set()

    def leave(self, name: str, *, delivered: bool) -> None:
        """The router has left a subscription, or is through with it. Nothing happens where none has this name."""
        subscription = self.subscriptions.pop(name, None)
        if subscription is None:
            return
        self._news.pop(name, None)
        self._answers.leave(subscription, delivered=delivered)
        if not subscription.told_end:
            self.add([worker_pb2.SequenceOutput(request_id=name, token_offset=subscription.position, left=True)])

    def _leave_all(self) -> None:
        for subscription in self.subscriptions.values():
            self._answers.leave(subscription)
        self.subscriptions.clear()
        self._news.clear()

    def _pieces(self) -> list[worker_pb2.SequenceOutput]:
        pieces: list[worker_pb2.SequenceOutput] = []
        weight = 0
        while self._news and weight < MAX_MESSAGE_WEIGHT:
            subscription = self._news.pop(next(iter(self._news)))
            if (piece := subscription.take()) is not None:
                pieces.append(piece)
                weight += 1 + len(piece.token_ids) * subscription.answer.weight
            if subscription.told_end and not subscription.answer.lasts:
                self.leave(subscription.name, delivered=True)
        if self._news:
            self._changed.set()
        return pieces

    # --- its end, and what it says ---

    def say_goodbye(self, why: str) -> None:
        """Tells the router that no new sequences are taken."""
        self._goodbye = why
        self._changed.set()

    def end(self, failure: TailpackError | None = None) -> None:
        """No more messages, after those that wait; with a ``failure``, which ``next`` raises, at once."""
        self._ended = True
        if failure is not None and self._failure is None:
            self._failure = failure
            self._pending.clear()
            self._latest.clear()
            # Now, not when the handler ends: it may be stuck in a write that the router does not read.
            self.abandon()
        self._changed.set()

    def abandon(self) -> None:
        """Nobody is left to read what its sequences say: they are aborted, or left alone if they are resumable."""
        self._leave_all()
        self._engine.abort_owner(self.owner)

    async def next(self) -> worker_pb2.WorkerMessage | None:
        """The next message; None at the end.

        Without news it reports the load every LOAD_INTERVAL_S.

        Raises:
            TailpackError: that of ``end``.
        """
        if not self._changed.is_set():
            timer = asyncio.get_running_loop().call_later(LOAD_INTERVAL_S, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                timer.cancel()
        if self._failure is not None:
            raise self._failure
        if self._goodbye is not None:
            why, self._goodbye = self._goodbye, None
            return worker_pb2.WorkerMessage(goodbye=worker_pb2.Goodbye(why=why))
        if self._ended and not self._pending and not self._news:
            return None
        if not self._ended:
            self._changed.clear()
        outputs, self._pending = self._pending, []
        outputs += self._pieces()
        self._latest.clear()
        self._weight = 0
        return worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(sequences=outputs, load=self._engine.load()))


class Sessions:
    """All sessions of a worker. ``emit`` is for the engine thread, everything else for the event loop.

    Args:
        clock: seconds, for grace times; only differences count.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float] = time.monotonic) -> None:
        self.answers = Answers(clock)
        self._loop = loop
        self._sessions: dict[str, RouterSession] = {}
        self._numbers = itertools.count()

    def emit(self, result: StepResult) -> None:
        """Hands a step's outputs to the event loop. Engine thread."""
        self._loop.call_soon_threadsafe(self._deliver, result)

    @contextmanager
    def open(self, router: str, engine: Engine) -> Iterator[RouterSession]:
        """A session of this router, under an owner name that no other session has, not even its next one.

        However it ends, its sequences are abandoned.
        """
        session = RouterSession(f"{router}#{next(self._numbers)}", engine, self.answers)
        self._sessions[session.owner] = session
        try:
            yield session
        finally:
            del self._sessions[session.owner]
            session.abandon()

    async def expire_forever(self) -> None:
        """Ends grace times that are over, until cancelled."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self.answers.expire()

    def say_goodbye(self, why: str) -> None:
        for session in self._sessions.values():
            session.say_goodbye(why)

    def end(self, failure: TailpackError | None = None) -> None:
        for session in self._sessions.values():
            session.end(failure)

    def _deliver(self, result: StepResult) -> None:
        by_owner: dict[str, list[worker_pb2.SequenceOutput]] = {}
        for output in result.outputs:
            by_owner.setdefault(output.owner, []).append(output_message(output))
        for owner, outputs in by_owner.items():
            if session := self._sessions.get(owner):
                session.add(outputs)
            else:  # of a resumable or adopted sequence; or the router has gone, and its sequences are being aborted
                self.answers.take(owner, outputs)


def output_message(output: Output) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(
        request_id=output.request_id,
        token_offset=output.token_offset,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        finish_reason=output.finish_reason,
        error=rpc.to_detail(output.error) if output.error is not None else None,
        usage=output.usage,
        timings=output.timings,
        seed=output.seed or 0,
    )
