"""Callers who use our client at routers, as anybody would: two of three requests are resumable."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter

from protos import types_pb2
from protos.errors import TailpackError, Unavailable
from router.client import AsyncTailpack, RetryPolicy
from tests.chaos.streams import Ask, Stream, Whole

HANG_S = 240.0
"""A bound on what would otherwise hang; nothing is measured by it."""
PATIENT = RetryPolicy(max_retries=60, first_delay_s=0.05, max_delay_s=0.5)


async def undisturbed_by_client(client: AsyncTailpack, ask: Ask) -> Whole:
    stream = Stream("reference", ask, None)
    await read(client, stream, f"reference-{id(ask)}", resumable=False)
    return stream.whole()


async def read(client: AsyncTailpack, stream: Stream, request_id: str, *, resumable: bool) -> None:
    """Offsets are the client's to check (TOKEN_GAP), tokens and end the stream's."""
    sampled = {} if stream.ask.seed is None else {"temperature": 1.0, "top_k": 20, "seed": stream.ask.seed}
    async for chunk in client.generate(
        list(stream.ask.prompt),
        chat=False,
        request_id=request_id,
        max_tokens=stream.ask.max_tokens,
        ignore_eos=True,
        resumable=resumable,
        timeout_s=HANG_S,
        **sampled,  # type: ignore[arg-type]
    ):
        stream.take(chunk)


class ClientStreams:
    """Keeps ``at_once`` streams open until ``finish``. Two of three are resumable; only these outlive their router."""

    def __init__(
        self,
        client: AsyncTailpack,
        prefix: str,
        rng: random.Random,
        expected: dict[Ask, Whole],
        *,
        at_once: int = 6,
    ) -> None:
        self.ended: list[Stream] = []
        self.live: dict[str, Stream] = {}
        self.counts: Counter[str] = Counter()
        self.router_deaths: list[float] = []
        self._client = client
        self._prefix = prefix
        self._rng = rng
        self._expected = expected
        self._numbers = itertools.count()
        self._at_once = at_once
        self._finishing = False

    def finish(self) -> None:
        self._finishing = True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(self._caller())

    async def _caller(self) -> None:
        while not self._finishing:
            ask, number = self._rng.choice(list(self._expected)), next(self._numbers)
            stream = Stream(f"{self._prefix}-{number}", ask, self._expected[ask])
            self.live[stream.request_id] = stream
            began = time.monotonic()
            try:
                await read(self._client, stream, stream.request_id, resumable=number % 3 != 2)
            except TailpackError as error:
                router_died = any(death > began - 10.0 for death in self.router_deaths)  # one that drains takes a while
                resumable = number % 3 != 2
                if router_died and not resumable and isinstance(error, Unavailable):
                    self.counts["lost with their router"] += 1  # nobody else has them, and their callers know
                else:
                    raise AssertionError(
                        f"{stream.request_id} failed after {len(stream.got)} of {ask.max_tokens} tokens: {error}"
                    ) from error
            else:
                assert stream.reason == types_pb2.FINISH_REASON_LENGTH
                self.ended.append(stream)
            del self.live[stream.request_id]
