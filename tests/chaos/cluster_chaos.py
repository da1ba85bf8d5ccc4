"""Chaos on a whole cluster: ``tailpack up`` with Ray, two workers and a router, and callers who use our client."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil

from kvstore import client as kvstore
from protos import types_pb2
from protos.errors import TailpackError, Unavailable
from router.client import AsyncTailpack, RetryPolicy
from tests.chaos.blows import Blow, Report, Victims, plan
from tests.chaos.streams import Ask, Stream, Whole, asks
from tests.e2e.cluster import (
    ClusterProcess,
    running,
    shared_memory_files,
    wait_gone,
    write_tiny_model,
)

NUM_ASKS = 8
AT_ONCE = 6
PAUSE_S = 1.6
HANG_S = 120.0
"""A bound on what would otherwise hang; nothing is measured by it."""
OPTIONS = ["--workers", "2", "--deterministic", "--kv-bytes", "16M", "--max-running", "4", "--threads", "1"]
VICTIMS: Victims = [
    (("worker-0",), 27),
    (("worker-1",), 27),
    (("kvstore",), 22),
    (("router",), 10),
    (("worker-0", "worker-1"), 4),
    (("kvstore", "worker-0"), 5),
    (("router", "worker-1"), 5),
]
PATIENT = RetryPolicy(max_retries=60, first_delay_s=0.05, max_delay_s=0.5)


async def run(seed: int, num_blows: int, folder: Path) -> Report:
    """One cluster, from its start to its end, under a plan of blows.

    Args:
        num_blows: signals that find somebody alive; one or two more where several are hit at once.
        folder: for the model and the cluster's files.

    Raises:
        AssertionError: a stream was not what it must be, or something is left. The message names the seed.
    """
    report, began, before = Report("cluster", seed), time.monotonic(), shared_memory_files()
    model = folder / "tiny"
    if not model.exists():
        write_tiny_model(model)
    wanted = asks(
        random.Random(f"asks {seed}"), NUM_ASKS, vocab_size=600, prompts=(1, 60, 127, 128, 129, 300), most_tokens=700
    )
    files = folder / f"cluster-{seed}"
    files.mkdir()
    with running(files, model, OPTIONS) as cluster:
        try:
            async with AsyncTailpack(cluster.router, retry=PATIENT) as client:
                expected = dict(
                    zip(wanted, await asyncio.gather(*[_undisturbed(client, a) for a in wanted]), strict=True)
                )
                streams = _Streams(client, f"c{seed}", random.Random(f"streams {seed}"), expected)
                await _under_blows(cluster, streams, num_blows, plan(seed, VICTIMS, pause_s=PAUSE_S), report)
                await _idle(cluster, client)
            report.streams, report.counts = len(streams.ended), streams.counts
            report.tokens = sum(len(stream.got) for stream in streams.ended)
            processes = cluster.descendants()
            assert await asyncio.to_thread(cluster.stop) == 0, "`up` ended badly"
            assert wait_gone(processes) == []
            assert shared_memory_files() <= before
            assert not cluster.folder.exists()
        except Exception as failure:
            raise AssertionError(
                f"seed {seed}, whole cluster, logs in {cluster.folder}: {type(failure).__name__}: {failure}\n"
                f"{cluster.log[-3000:]}"
            ) from failure
    report.seconds = round(time.monotonic() - began, 3)
    return report


async def _undisturbed(client: AsyncTailpack, ask: Ask) -> Whole:
    stream = Stream("reference", ask, None)
    await _read(client, stream, f"reference-{id(ask)}", resumable=False)
    return stream.whole()


async def _read(client: AsyncTailpack, stream: Stream, request_id: str, *, resumable: bool) -> None:
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


class _Streams:
    """Keeps ``AT_ONCE`` streams open until ``finish``. Two of three are resumable; only these outlive a router."""

    def __init__(self, client: AsyncTailpack, prefix: str, rng: random.Random, expected: dict[Ask, Whole]) -> None:
        self.ended: list[Stream] = []
        self.live: dict[str, Stream] = {}
        self.counts: Counter[str] = Counter()
        self.router_deaths: list[float] = []
        self._client = client
        self._prefix = prefix
        self._rng = rng
        self._expected = expected
        self._numbers = itertools.count()
        self._finishing = False

    def finish(self) -> None:
        self._finishing = True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._caller())

    async def _caller(self) -> None:
        while not self._finishing:
            ask, number = self._rng.choice(list(self._expected)), next(self._numbers)
            stream = Stream(f"{self._prefix}-{number}", ask, self._expected[ask])
            self.live[stream.request_id] = stream
            began = time.monotonic()
            try:
                await _read(self._client, stream, stream.request_id, resumable=number % 3 != 2)
            except TailpackError as error:
                router_died = any(death > began - 1.0 for death in self.router_deaths)
                if number % 3 != 2 or not router_died or not isinstance(error, Unavailable):
                    raise AssertionError(
                        f"{stream.request_id} failed after {len(stream.got)} of {ask.max_tokens} tokens: {error}"
                    ) from error
                self.counts["lost with their router"] += 1  # nobody else has them, and their callers know
            else:
                assert stream.reason == types_pb2.FINISH_REASON_LENGTH
                self.ended.append(stream)
            del self.live[stream.request_id]


async def _under_blows(
    cluster: ClusterProcess, streams: _Streams, num_blows: int, blows: Iterator[Blow], report: Report
) -> None:
    reading = asyncio.create_task(streams.run())
    dealing = asyncio.create_task(_deal(cluster, streams, num_blows, blows, report))
    try:
        await asyncio.wait([dealing, reading], return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
        await dealing
        streams.finish()
        async with asyncio.timeout(HANG_S):
            await reading
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    except TimeoutError:
        open_ones = [f"{s.request_id}: {len(s.got)} of {s.ask.max_tokens}" for s in streams.live.values()]
        raise AssertionError(f"streams do not end: {open_ones}") from None
    finally:
        for task in (dealing, reading):
            task.cancel()
        await asyncio.gather(dealing, reading, return_exceptions=True)


async def _deal(
    cluster: ClusterProcess, streams: _Streams, num_blows: int, blows: Iterator[Blow], report: Report
) -> None:
    going_on: list[asyncio.Task[None]] = []
    while report.blows < num_blows:
        blow = next(blows)
        await asyncio.sleep(blow.after_s)
        assert cluster.process.poll() is None, "`up` has ended"
        there = await asyncio.to_thread(processes_of, cluster)
        for name in blow.victims:
            process = there.get(name)
            if process is None:
                continue
            if name == "router":
                streams.router_deaths.append(time.monotonic())
            try:
                process.send_signal(blow.signum)
            except psutil.NoSuchProcess:
                continue
            report.hit(name, blow.signum)
            if blow.stop_s:
                going_on.append(asyncio.create_task(_go_on(process, blow.stop_s)))
    await asyncio.gather(*going_on)


async def _go_on(process: psutil.Process, after_s: float) -> None:
    await asyncio.sleep(after_s)
    try:
        process.send_signal(signal.SIGCONT)  # compares start times: a pid that was used again is not it
    except psutil.NoSuchProcess:
        return


def processes_of(cluster: ClusterProcess) -> dict[str, psutil.Process]:
    """What can be hit now: "kvstore", "router", "worker-0", "worker-1"."""
    found: dict[str, psutil.Process] = {}
    workers: list[psutil.Process] = []
    for process in cluster.descendants():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command and command[0].startswith("ray::WorkerActor"):
            workers.append(process)
        elif command[3:5] in (["kvstore", "serve"], ["router", "serve"]):
            found[command[3]] = process
    for index, process in enumerate(sorted(workers, key=lambda worker: worker.pid)):
        found[f"worker-{index}"] = process
    return found


async def _idle(cluster: ClusterProcess, client: AsyncTailpack) -> None:
    """Waits until all workers are back, and nothing runs, waits, is held or promised anywhere."""
    deadline, left = time.monotonic() + HANG_S, [""]
    while left:
        assert time.monotonic() < deadline, f"left: {left}"
        await asyncio.sleep(0.2)
        try:
            workers, stats = await client.list_workers(), await client.stats()
            devices = (await asyncio.to_thread(cluster.kv_stats)).devices
        except TailpackError as away:
            left = [str(away)]
            continue
        left = [f"{worker.address} is {worker.state}" for worker in workers if worker.state != "ready"]
        for worker in workers:
            counts = (worker.in_flight, worker.load.num_running, worker.load.num_waiting, worker.load.queued_tokens)
            left += [f"{worker.address} has {counts}"] if any(counts) else []
        left += [f"{stats.in_flight} in flight at the router"] if stats.in_flight or stats.streams else []
        for device in devices:
            held = [device.sequences, *(group.pages_promised + group.pages_open for group in device.groups)]
            left += [f"{device.device} holds {held}"] if any(held) else []
    problems = await asyncio.to_thread(kvstore.verify, cluster.kv_socket)
    assert not problems, problems
