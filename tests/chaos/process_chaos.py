"""Chaos on one node without Ray: a plan of blows from a seed, dealt while callers stream."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.blows import Blow, Report, Victims, plan
from tests.chaos.node import Node, Server
from tests.chaos.settings import KINDS
from tests.chaos.streams import Ask, Caller, Stream, Whole, asks, undisturbed
from tests.chaos.zygote import Zygote

NUM_ASKS = 10
AT_ONCE = 5  # at each worker: one more than run
DRAIN_S = 60.0
"""For the last streams to end in; a bound on what would otherwise hang."""


async def run(
    zygote: Zygote, kind: str, seed: int, num_blows: int, folder: Path, *, num_workers: int = 1, num_cancels: int = 5
) -> Report:
    """One node, from its start to its end, under a plan of blows.

    Args:
        folder: of models.
        num_blows: signals that find somebody alive; one more where two are hit at once.
        num_cancels: streams of a hundred that are cancelled.

    Raises:
        AssertionError: a stream was not what it must be, something is left, or a process ended by itself. The message
            names the seed; the node's folder with its logs is kept.
    """
    made_of = KINDS[kind]
    report, began = Report(kind, seed), time.monotonic()
    rng = random.Random(f"asks {seed}")
    wanted = asks(
        rng, NUM_ASKS, vocab_size=made_of.vocab_size, prompts=made_of.prompts, most_tokens=made_of.most_tokens
    )
    node = Node(zygote, made_of.setting(kind, folder, num_workers=num_workers))
    callers: list[Caller] = []
    try:
        async with node:
            expected = await undisturbed(node.addresses[0], wanted)
            await node.idle()
            files = node.memory_files()
            for index, address in enumerate(node.addresses):
                source = _Source(
                    f"{kind}-{seed}-{index}", random.Random(f"streams {seed} {index}"), expected, num_cancels
                )
                callers.append(
                    Caller(address, source.next_stream, at_once=AT_ONCE, cancel=source.cancel, name=f"chaos-{index}")
                )
            blows = plan(seed, victims_of(num_workers), pause_s=made_of.pause_s)
            await _under_blows(node, callers, num_blows, blows, report)
            await node.idle()
            assert node.memory_files() == files, f"memory files: {node.memory_files()}, before {files}"
            await node.stop()
            assert not node.faults, node.faults
    except Exception as failure:
        raise AssertionError(f"seed {seed}, setting {kind}, logs in {node.folder}: {failure}") from failure
    streams = [stream for caller in callers for stream in caller.ended]
    for caller in callers:
        report.counts.update(caller.counts)
    report.streams, report.tokens = len(streams), sum(len(stream.got) for stream in streams)
    report.interrupted = sum(stream.joins > 0 for stream in streams)
    report.counts["submitted again"] = sum(stream.joins for stream in streams)
    report.seconds = round(time.monotonic() - began, 3)
    return report


def victims_of(num_workers: int) -> Victims:
    workers = tuple(f"worker-{index}" for index in range(num_workers))
    alone = [((worker,), 60 // num_workers) for worker in workers]
    return [*alone, (("kvstore",), 28), (("kvstore", *workers), 12)]


class _Source:
    """Streams without end, by a seed."""

    def __init__(self, prefix: str, rng: random.Random, expected: dict[Ask, Whole], num_cancels: int) -> None:
        self._prefix = prefix
        self._rng = rng
        self._expected = expected
        self._asks = list(expected)
        self._num = 0
        self._num_cancels = num_cancels
        self._cancel_at: dict[str, int] = {}

    def next_stream(self) -> Stream:
        ask = self._rng.choice(self._asks)
        stream = Stream(f"{self._prefix}-{self._num}", ask, self._expected[ask])
        self._num += 1
        if self._rng.randrange(100) < self._num_cancels:
            self._cancel_at[stream.request_id] = self._rng.randrange(ask.max_tokens)
        return stream

    def cancel(self, stream: Stream) -> bool:
        return len(stream.got) > self._cancel_at.get(stream.request_id, stream.ask.max_tokens)


async def _under_blows(
    node: Node, callers: list[Caller], num_blows: int, blows: Iterator[Blow], report: Report
) -> None:
    """Deals the blows while the callers run, and lets all end that is open then."""
    running = [asyncio.create_task(caller.run()) for caller in callers]
    dealing = asyncio.create_task(_deal(node, num_blows, blows, report))
    try:
        # A caller ends by itself only by a wrong stream.
        await asyncio.wait([dealing, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            if task.done():
                task.result()
        await dealing
        for caller in callers:
            caller.finish()
        async with asyncio.timeout(DRAIN_S):
            await asyncio.gather(*running)
    except TimeoutError:
        open_ones = [
            f"{stream.request_id}: {len(stream.got)} of {stream.ask.max_tokens} tokens"
            for caller in callers
            for stream in caller.live.values()
        ]
        raise AssertionError(f"streams do not end: {open_ones}") from None
    finally:
        for task in (dealing, *running):
            task.cancel()
        await asyncio.gather(dealing, *running, return_exceptions=True)


async def _deal(node: Node, num_blows: int, blows: Iterator[Blow], report: Report) -> None:
    servers = {server.name: server for server in node.servers}
    going_on: list[asyncio.Task[None]] = []
    while report.blows < num_blows:
        blow = next(blows)
        await asyncio.sleep(blow.after_s)
        for name in blow.victims:
            if node.send(servers[name], blow.signum):
                report.hit(name, blow.signum)
                if blow.stop_s:
                    going_on.append(asyncio.create_task(_go_on(servers[name], blow.stop_s)))
    await asyncio.gather(*going_on)


async def _go_on(server: Server, after_s: float) -> None:
    process = server.process  # of this life: the next one is not stopped
    await asyncio.sleep(after_s)
    if process is not None:
        process.send(signal.SIGCONT)
