"""Chaos on one node without Ray: a plan of blows from a seed, dealt while callers stream."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from router.client import AsyncTailpack
from tests.chaos.blows import Blow, Report, RoundFailed, Victims, plan
from tests.chaos.client_streams import PATIENT, ClientStreams, undisturbed_by_client
from tests.chaos.node import Node, Server
from tests.chaos.settings import KINDS
from tests.chaos.streams import Ask, Caller, Stream, Whole, asks, undisturbed
from tests.chaos.zygote import Zygote

NUM_ASKS = 10
AT_ONCE = 5  # at each worker: one more than run
NUM_CANCELS = 5  # of a hundred streams
DRAIN_S = 120.0
"""For the last streams to end in; a bound on what would otherwise hang."""


class Load(Protocol):
    """Callers of one kind; ``run`` ends when all streams have that were begun before ``finish``."""

    live: dict[str, Stream]
    ended: list[Stream]
    counts: Counter[str]

    async def run(self) -> None: ...
    def finish(self) -> None: ...


async def run(
    zygote: Zygote,
    kind: str,
    seed: int,
    num_blows: int,
    folder: Path,
    *,
    num_workers: int = 1,
    num_routers: int = 0,
) -> Report:
    """One node, from its start to its end, under a plan of blows.

    Args:
        folder: of models.
        num_blows: signals that find somebody alive; one more where two are hit at once.
        num_routers: 0: callers speak with the workers themselves; else they use our client, and routers are hit, too.

    Raises:
        RoundFailed: a stream was not what it must be, something is left, or a process ended by itself. The node's
            folder is kept.
    """
    made_of = KINDS[kind]
    report, began = Report(kind, seed), time.monotonic()
    wanted = asks(
        random.Random(f"asks {seed}"),
        NUM_ASKS,
        vocab_size=made_of.vocab_size,
        prompts=made_of.prompts,
        most_tokens=made_of.most_tokens,
    )
    node = Node(zygote, made_of.setting(kind, folder, num_workers=num_workers, num_routers=num_routers))
    try:
        async with node, AsyncExitStack() as clients:
            loads: list[Load] = []
            if num_routers:
                client = await clients.enter_async_context(AsyncTailpack(",".join(node.doors), retry=PATIENT))
                answers = await asyncio.gather(*[undisturbed_by_client(client, ask) for ask in wanted])
                expected = dict(zip(wanted, answers, strict=True))
                streams = ClientStreams(
                    client,
                    f"{kind}-{seed}",
                    random.Random(f"streams {seed}"),
                    expected,
                )
                loads.append(streams)
            else:
                expected = await undisturbed(node.addresses[0], wanted)
                for index, address in enumerate(node.addresses):
                    source = _Source(f"{kind}-{seed}-{index}", random.Random(f"streams {seed} {index}"), expected)
                    name = f"chaos-{index}"
                    loads.append(Caller(address, source.next_stream, at_once=AT_ONCE, cancel=source.cancel, name=name))
            await node.idle()
            files = node.memory_files()
            blows = plan(seed, victims_of(num_workers, num_routers), pause_s=made_of.pause_s, routers=num_routers > 0)
            await _under_blows(node, loads, num_blows, blows, report)
            await node.idle()
            await node.hold(files)
            await node.stop()
            assert not node.faults, node.faults
    except Exception as failure:
        told = f"seed {seed}, setting {kind}, logs in {node.folder}: {type(failure).__name__}: {failure}"
        raise RoundFailed(told, node.folder) from failure
    ended = [stream for load in loads for stream in load.ended]
    for load in loads:
        report.counts.update(load.counts)
    report.streams, report.tokens = len(ended), sum(len(stream.got) for stream in ended)
    report.interrupted = sum(stream.joins > 0 for stream in ended)
    report.counts["submitted again"] = sum(stream.joins for stream in ended)
    for load in loads:
        if isinstance(load, Caller):
            report.counts["adopted"] += sum(last.sequences_adopted for last in load.loads)
            report.counts["tokens lost"] += sum(last.tokens_recomputed_after_adoption for last in load.loads)
    report.seconds = round(time.monotonic() - began, 3)
    return report


def victims_of(num_workers: int, num_routers: int) -> Victims:
    workers = tuple(f"worker-{index}" for index in range(num_workers))
    routers = tuple(f"router-{index}" for index in range(num_routers))
    alone = [((name,), 60 // len(names)) for names in (workers, routers) for name in names]
    together: list[tuple[tuple[str, ...], int]] = [((router, workers[-1]), 12) for router in routers]
    return [*alone, (("kvstore",), 28), *(together or [(("kvstore", *workers), 12)])]


class _Source:
    """Streams without end, by a seed."""

    def __init__(self, prefix: str, rng: random.Random, expected: dict[Ask, Whole]) -> None:
        self._prefix = prefix
        self._rng = rng
        self._expected = expected
        self._asks = list(expected)
        self._num = 0
        self._cancel_at: dict[str, int] = {}

    def next_stream(self) -> Stream:
        ask = self._rng.choice(self._asks)
        stream = Stream(f"{self._prefix}-{self._num}", ask, self._expected[ask])
        self._num += 1
        if self._rng.randrange(100) < NUM_CANCELS:
            self._cancel_at[stream.request_id] = self._rng.randrange(ask.max_tokens)
        return stream

    def cancel(self, stream: Stream) -> bool:
        return len(stream.got) > self._cancel_at.get(stream.request_id, stream.ask.max_tokens)


async def _under_blows(node: Node, loads: list[Load], num_blows: int, blows: Iterator[Blow], report: Report) -> None:
    """Deals the blows while the callers run, and lets all end that is open then."""
    running = [asyncio.create_task(load.run()) for load in loads]
    dealing = asyncio.create_task(_deal(node, loads, num_blows, blows, report))
    try:
        # A caller ends by itself only by a wrong stream.
        await asyncio.wait([dealing, *running], return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            if task.done():
                task.result()
        await dealing
        for load in loads:
            load.finish()
        async with asyncio.timeout(DRAIN_S):
            await asyncio.gather(*running)
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    except TimeoutError:
        open_ones = [
            f"{stream.request_id}: {len(stream.got)} of {stream.ask.max_tokens} tokens"
            for load in loads
            for stream in load.live.values()
        ]
        raise AssertionError(f"streams do not end: {open_ones}") from None
    finally:
        for task in (dealing, *running):
            task.cancel()
        await asyncio.gather(dealing, *running, return_exceptions=True)


async def _deal(node: Node, loads: list[Load], num_blows: int, blows: Iterator[Blow], report: Report) -> None:
    servers = {server.name: server for server in node.servers}
    going_on: list[asyncio.Task[None]] = []
    while report.blows < num_blows:
        blow = next(blows)
        if blow.all_up:
            await node.all_up()
        await asyncio.sleep(blow.after_s)
        node.note(str(blow))
        for name in blow.victims:
            if node.send(servers[name], blow.signum):
                report.hit(name, blow.signum)
                for load in loads:
                    if isinstance(load, ClientStreams) and servers[name] in node.routers:
                        load.router_deaths.append(time.monotonic())
                if blow.stop_s:
                    going_on.append(asyncio.create_task(_go_on(servers[name], blow.stop_s)))
    await asyncio.gather(*going_on)


async def _go_on(server: Server, after_s: float) -> None:
    process = server.process  # of this life: the next one is not stopped
    await asyncio.sleep(after_s)
    if process is not None:
        process.send(signal.SIGCONT)
