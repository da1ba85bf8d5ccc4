"""What callers ask for during chaos, and what they must get: exactly the tokens of an undisturbed run.

``Caller`` plays the router at one worker: a session, what runs in it, and after a death the same again at the next one,
with the tokens that are here. It knows the contract only: offsets without gap or repeat, tokens that never change.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.errors import AlreadyExists, TailpackError, Unavailable

EOS = types_pb2.FINISH_REASON_EOS
LENGTH = types_pb2.FINISH_REASON_LENGTH
ABORTED = types_pb2.FINISH_REASON_ABORTED
ERROR = types_pb2.FINISH_REASON_ERROR
RECONNECT_S = 0.02
SILENCE_S = 120.0
"""A worker says something every second; a bound on what would otherwise hang."""


@dataclass(frozen=True)
class Ask:
    """A request without its id. ``seed`` None: greedy."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()

    def submit(self, request_id: str, emitted: list[int]) -> worker_pb2.Submit:
        sampling = types_pb2.Sampling()
        if self.seed is not None:
            sampling = types_pb2.Sampling(temperature=1.0, top_k=20, seed=self.seed)
        return worker_pb2.Submit(
            request_id=request_id,
            prompt_token_ids=self.prompt,
            sampling=sampling,
            stop=types_pb2.StopConditions(
                max_tokens=self.max_tokens, ignore_eos=True, stop_token_ids=self.stop_token_ids
            ),
            emitted_token_ids=emitted,
        )


def asks(rng: random.Random, count: int, *, vocab_size: int, prompts: Sequence[int], most_tokens: int) -> list[Ask]:
    """Prompts of these lengths in turn, greedy but for every fourth."""
    made = []
    for number in range(count):
        prompt = tuple(rng.randrange(3, vocab_size) for _ in range(prompts[number % len(prompts)]))
        seed = rng.getrandbits(60) if number % 4 == 3 else None
        made.append(Ask(prompt, rng.randint(most_tokens // 2, most_tokens), seed))
    return made


@dataclass(frozen=True)
class Whole:
    """A whole answer."""

    token_ids: tuple[int, ...]
    reason: int
    text: str  # of a router's; else empty


@dataclass
class Stream:
    """One answer as it comes. ``expected``: what an undisturbed run said; None: this is that run.

    Raises:
        AssertionError: from ``take``: a token, an offset or the end is wrong.
    """

    request_id: str
    ask: Ask
    expected: Whole | None
    got: list[int] = field(default_factory=list)
    text: str = ""
    reason: int = 0
    cancelled: bool = False
    joins: int = 0  # submissions after the first

    def take(self, output: Any) -> None:
        what = f"{self.request_id} (prompt {len(self.ask.prompt)}, max {self.ask.max_tokens}, {self.joins} joins)"
        assert output.token_offset == len(self.got), (
            f"{what}: offset {output.token_offset} where {len(self.got)} tokens are here"
        )
        self.got += output.token_ids
        self.text += getattr(output, "text", "")
        if self.expected is not None:
            wanted = self.expected.token_ids[: len(self.got)]
            if tuple(self.got) != wanted:
                pairs = enumerate(itertools.zip_longest(self.got, wanted))
                at = next(index for index, (got, want) in pairs if got != want)
                raise AssertionError(
                    f"{what}: token {at} of {len(self.got)} is {self.got[at]}, undisturbed "
                    f"{wanted[at] if at < len(wanted) else 'none'}; this output began at {output.token_offset}"
                )
        if output.finish_reason:
            self.reason = output.finish_reason
            if self.reason != ABORTED or not self.cancelled:
                assert output.usage.output_tokens == len(self.got), f"{what}: usage {output.usage.output_tokens}"
                if self.expected is not None:
                    assert self.whole() == self.expected, f"{what}: {self.whole()}, undisturbed {self.expected}"

    def whole(self) -> Whole:
        return Whole(tuple(self.got), self.reason, self.text)


class Caller:
    """Keeps ``at_once`` streams open at one worker until ``finish``, then lets those end that are there.

    Args:
        next_stream: makes the next one; None: there is none any more.
        cancel: whether a stream that has just said something is to be cancelled.
    """

    def __init__(
        self,
        address: str,
        next_stream: Callable[[], Stream | None],
        *,
        at_once: int = 4,
        cancel: Callable[[Stream], bool] = lambda stream: False,
        name: str = "chaos",
    ) -> None:
        self.live: dict[str, Stream] = {}
        self.ended: list[Stream] = []
        self.counts: Counter[str] = Counter()
        self.loads: list[types_pb2.WorkerLoad] = []  # the last one of each session
        self.news = asyncio.Event()  # something came
        self._address = address
        self._next_stream = next_stream
        self._at_once = at_once
        self._cancel = cancel
        self._name = name
        self._finishing = False
        self._call: Any = None
        self._incarnations = itertools.count()

    def finish(self) -> None:
        """No new streams from here on."""
        self._finishing = True

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.got) for stream in (*self.ended, *self.live.values()))

    async def run(self) -> None:
        """Until all have ended, or one is wrong.

        Raises:
            AssertionError: a stream is not what it must be.
        """
        while not (self._finishing and not self.live):
            try:
                async with rpc.channel(self._address) as channel:
                    await self._session(worker_pb2_grpc.WorkerStub(channel))
            except grpc.RpcError as lost:
                error = rpc.error_from(lost)
                self.counts[f"session: {error.reason}"] += 1
                assert _again(error) or not rpc.is_ours(lost), f"a session failed: {error!r}"
            except (_SessionEnded, asyncio.InvalidStateError):  # the latter from a write to a call that has just ended
                self.counts["session: ended"] += 1
            if self.live or not self._finishing:
                await asyncio.sleep(RECONNECT_S)

    async def _session(self, stub: Any) -> None:
        call = stub.Session()
        try:
            hello = worker_pb2.Hello(router_id=self._name, incarnation=str(next(self._incarnations)))
            await call.write(worker_pb2.RouterMessage(hello=hello))
            welcome = await self._read(call)
            self.loads.append(welcome.welcome.load)
            for stream in list(self.live.values()):
                stream.joins += 1
                await self._submit(call, stream)
            while True:
                while not self._finishing and len(self.live) < self._at_once:
                    if (following := self._next_stream()) is None:
                        self._finishing = True
                        break
                    self.live[following.request_id] = following
                    await self._submit(call, following)
                if not self.live and self._finishing:
                    return
                message = await self._read(call)
                if message.WhichOneof("message") == "goodbye":
                    self.counts["goodbye"] += 1
                    continue
                self.loads[-1] = message.step.load
                for output in message.step.sequences:
                    await self._take(call, output)
                self.news.set()
        finally:
            call.cancel()

    async def _read(self, call: Any) -> Any:
        async with asyncio.timeout(SILENCE_S):
            message = await call.read()
        if message is grpc.aio.EOF:
            raise _SessionEnded
        return message

    async def _submit(self, call: Any, stream: Stream) -> None:
        await call.write(worker_pb2.RouterMessage(submit=stream.ask.submit(stream.request_id, stream.got)))
        if stream.cancelled:
            await call.write(worker_pb2.RouterMessage(abort=worker_pb2.Abort(request_id=stream.request_id)))

    async def _take(self, call: Any, output: Any) -> None:
        stream = self.live.get(output.request_id)
        assert stream is not None, f"an output of {output.request_id}, which does not run"
        if output.finish_reason == ERROR:
            error = rpc.from_detail(output.error)
            self.counts[f"error: {error.reason}"] += 1
            # The worker may see the end of a session after we do, and have the same request still.
            again = _again(error) or (isinstance(error, AlreadyExists) and stream.joins > 0)
            assert again, f"{stream.request_id} failed after {len(stream.got)} tokens: {error}"
            raise _SessionEnded
        stream.take(output)
        if stream.reason:
            del self.live[stream.request_id]
            self.ended.append(stream)
            self.counts["ended"] += 1
        elif output.more:
            await call.write(worker_pb2.RouterMessage(more=worker_pb2.More(subscription_id=stream.request_id)))
        elif not stream.cancelled and self._cancel(stream):
            stream.cancelled = True
            self.counts["cancelled"] += 1
            await call.write(worker_pb2.RouterMessage(abort=worker_pb2.Abort(request_id=stream.request_id)))


class _SessionEnded(Exception):
    """Of a session: the worker ended it, or says that the same must be asked for at another."""


def _again(error: TailpackError) -> bool:
    """Whether a router would place it again: the worker or its store is gone."""
    return isinstance(error, Unavailable)


async def undisturbed(address: str, wanted: list[Ask]) -> dict[Ask, Whole]:
    """What the worker there says to each of them, in one session, all at once as far as it takes them."""
    left = [Stream(f"reference-{number}", ask, None) for number, ask in enumerate(wanted)]
    caller = Caller(address, lambda: left.pop() if left else None, at_once=8, name="reference")
    await caller.run()
    assert len(caller.ended) == len(wanted)
    return {stream.ask: stream.whole() for stream in caller.ended}
