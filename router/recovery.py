"""Where a sequence goes on when its worker fails: at that worker once it is back, else at another.

Before the first token any worker will do, at once. Behind it the worker is waited for, where it goes on with what its
memory has kept (the feature "adopt"): nothing is computed again there. When it does not come back in time, or without
the model, another worker computes the sequence again from the tokens that were sent (router/token_log.py). All of it
within the recover wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from protos import types_pb2
from protos.errors import (
    AlreadyExists,
    CapacityError,
    InvalidRequest,
    KvLost,
    KvStoreLost,
    NotFound,
    PreconditionFailed,
    TailpackError,
    Unavailable,
    WorkerLost,
)
from router.registry import ADOPT, EMITTED, Registry, WorkerLink
from router.relay import Relay
from router.subscription import Subscription

DEFAULT_RECOVER_WAIT_S = 30.0
MAX_FAILURES = 3
"""In a row, without a token between them: a request that takes its workers down must not take down all of them."""
RETRY_S = 0.25
"""Until workers that had no room, or where the id was in use still, are asked again."""
SEARCH_S = 0.5
"""Between two looks for an answer that has no worker."""
UNKNOWN_S = 3.0
"""Until an answer is lost that no worker has, though all can be asked: for who placed it to place it again."""

Outcome = Literal["joined", "recomputed", "lost"]

Links = Callable[[], list[WorkerLink]]
Choose = Callable[[list[WorkerLink]], WorkerLink | None]


class Recovery:
    """Of one sequence, from the first failure of a placement to its end.

    Attributes:
        outcomes: of the times that its worker was lost behind the first token, in order.
        wake: set where there may be news for who waits for a place.
    """

    def __init__(
        self,
        registry: Registry,
        relay: Relay,
        wait_s: float,
        told: Callable[[Outcome], None],
        *,
        needs_log: bool = True,
    ) -> None:
        """
        Args:
            told: of each outcome, as it comes.
            needs_log: the tokens that were sent are needed to go on.
        """
        self.outcomes: list[Outcome] = []
        self.wake = asyncio.Event()
        self._registry = registry
        self._relay = relay
        self._wait_s = wait_s
        self._told = told
        self._needs_log = needs_log
        self._num_tokens = -1  # at the last failure
        self._num_failures = 0  # since a token came
        self._tried: set[str] = set()  # addresses that refused it since
        self._first: TailpackError | None = None  # what began it
        self._last: TailpackError | None = None
        self._may_wait = False
        self._ends_s = 0.0
        self._awaited: str | None = None  # worker id

    @property
    def left_s(self) -> float:
        """Of the wait."""
        return 0.0 if self._registry.closed else self._ends_s - time.monotonic()

    @property
    def cancelled(self) -> bool:
        """Somebody ended the request: it has its last chunk."""
        return not self._relay.is_lost

    def failed(self, failure: TailpackError, stream: Subscription, info: types_pb2.WorkerInfo) -> None:
        """Takes in how a placement failed.

        Args:
            stream: of that placement.
            info: of its worker, as it was then.

        Raises:
            TailpackError: it does not go on: the failure itself, or WORKER_LOST where the sequence was lost before it.
        """
        if not self._relay.is_lost or self._registry.closed:
            raise failure  # not the worker's: a gap, a slow reader
        num_tokens = self._relay.num_tokens
        begun, again = num_tokens > 0, num_tokens == self._num_tokens
        if not _passes(failure, begun=begun, again=again):
            raise failure
        if not again:
            self._num_tokens, self._num_failures, self._first = num_tokens, 0, failure
            self._ends_s = time.monotonic() + self._wait_s
            self._tried.clear()
        self._last = failure
        is_loss = isinstance(failure, WorkerLost | KvStoreLost)
        self._may_wait = begun or is_loss or isinstance(failure, AlreadyExists)
        self._num_failures += is_loss or not begun
        self._awaited = info.worker_id if begun and self._relay.was_cut and ADOPT in info.features else None
        if not self._relay.was_cut:
            self._tried.add(stream.link.address)
        if begun and self._needs_log and not self._relay.log.whole:
            self._last = CapacityError("live streams had more tokens than this router keeps", reason="TOKEN_LOG_FULL")
            raise self.lost()
        if self._num_failures >= MAX_FAILURES:
            raise self.lost()

    def refused(self, link: WorkerLink) -> None:
        """It did not even take the submission."""
        self._tried.add(link.address)

    async def place(self, links: Links, choose: Choose) -> WorkerLink | None:
        """The next worker to try; None: the request was cancelled meanwhile.

        Args:
            links: those that may take the sequence now.
            choose: one of some.

        Raises:
            TailpackError: there is none within the wait.
        """
        with self._registry.watch(self.wake):
            while not self.cancelled:
                self.wake.clear()
                if self._registry.closed:
                    raise self.lost()
                if (link := self._pick(links(), choose)) is not None:
                    return link
                left_s = self.left_s
                if left_s <= 0 or not self._may_wait:
                    raise self.lost()
                if not await self.news(min(left_s, RETRY_S) if self._tried else left_s):
                    self._tried.clear()
        return None

    async def search(self, look: Callable[[], Awaitable[tuple[WorkerLink | None, list[str]]]]) -> WorkerLink | None:
        """As ``place``, for who reads an answer: the worker that has it now. It is looked for again and again: who
        placed it may be about to do so again.

        Args:
            look: returns (that worker, workers that did not answer and why).
        """
        unknown_since_s = time.monotonic()
        with self._registry.watch(self.wake):
            while not self.cancelled:
                self.wake.clear()
                link, failures = await look()
                if link is not None and link.address not in self._tried:
                    return link
                if failures:
                    self._last = Unavailable("; ".join(failures)[:500])
                if link is not None or failures or self._registry.is_any_away():
                    unknown_since_s = time.monotonic()
                if self.left_s <= 0 or time.monotonic() - unknown_since_s > UNKNOWN_S:
                    raise self.lost()
                if not await self.news(max(0.0, min(self.left_s, SEARCH_S))):
                    self._tried.clear()
        return None

    async def news(self, timeout_s: float) -> bool:
        """Waits for ``wake``, at most so long; whether it was set. Inside `registry.watch(wake)`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.wake.wait()
        except TimeoutError:
            return False
        return True

    def went_on(self, outcome: Outcome) -> None:
        """Tokens came of the newest placement."""
        if self._num_tokens > 0:
            self._end(outcome)

    def lost(self) -> TailpackError:
        """The error that the sequence ends with."""
        assert self._first is not None and self._last is not None
        if self._num_tokens == 0:
            return self._last
        self._end("lost")
        if isinstance(self._first, KvLost):
            return self._first
        given_up = self._num_failures >= MAX_FAILURES
        why = "so were those that took over" if given_up else f"no worker took over within {self._wait_s:g} s"
        return WorkerLost(
            f"{self._first.message}; {why}",
            given=self._first.given if self._last is self._first else str(self._last)[:500],
            hint="send the request again",
            retry_after_ms=500,
        )

    def _end(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)
        self._told(outcome)

    def _pick(self, links: list[WorkerLink], choose: Choose) -> WorkerLink | None:
        if self._awaited is not None:
            back = [link for link in self._registry.named(self._awaited) if link.away_since_s is None]
            for link in back:
                if link in links:
                    return link
            if not back and self.left_s > 0:
                return None
            self._awaited = None  # it does not take the sequence any more, or is too late
        return choose([link for link in links if link.address not in self._tried])


def takers(links: list[WorkerLink], info: types_pb2.WorkerInfo) -> list[WorkerLink]:
    """Of some workers those that can go on with what a worker like this began: behind its tokens, by its weights."""
    return [
        link
        for link in links
        if link.has(EMITTED) and link.info is not None and link.info.model.weights_digest == info.model.weights_digest
    ]


def _passes(failure: TailpackError, *, begun: bool, again: bool) -> bool:
    """Whether another placement may do better. again: it is how one failed that was tried for want of another."""
    if not again:
        return isinstance(failure, Unavailable | KvLost if begun else Unavailable | CapacityError)
    refusals = Unavailable | CapacityError | AlreadyExists
    if not begun:
        return isinstance(failure, refusals)
    return isinstance(failure, refusals | InvalidRequest | NotFound | PreconditionFailed | KvLost)
