"""Chaos on a whole cluster: ``tailpack up`` with Ray, two workers and a router, and callers who use our client."""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil

from kvstore import client as kvstore
from protos.errors import TailpackError
from router.client import AsyncTailpack
from tests.chaos.blows import Blow, Report, RoundFailed, Victims, plan
from tests.chaos.client_streams import HANG_S, PATIENT, ClientStreams, undisturbed_by_client
from tests.chaos.streams import asks
from tests.e2e.cluster import (
    ClusterProcess,
    left_in_shared_memory,
    running,
    shared_memory_files,
    wait_gone,
    write_tiny_model,
)
from worker.cluster import DEATHS_S, MAX_DEATHS

NUM_ASKS = 8
PAUSE_S = 1.0
ALL_UP_SHARE = 0.3  # Ray takes seconds to bring a worker back
OPTIONS = ["--device", "cpu", "--workers", "2", "--deterministic", "--kv-bytes", "16M", "--max-running", "4"]
OPTIONS += ["--threads", "1", "--recover-wait", "120"]  # of a machine that is busy
VICTIMS: Victims = [
    (("worker-0",), 27),
    (("worker-1",), 27),
    (("kvstore",), 22),
    (("router",), 10),
    (("worker-0", "worker-1"), 4),
    (("router", "worker-1"), 10),
]


async def run(seed: int, num_blows: int, folder: Path) -> Report:
    """One cluster, from its start to its end, under a plan of blows.

    Args:
        num_blows: signals that find somebody alive; one or two more where several are hit at once.
        folder: for the model and the cluster's files.

    Raises:
        RoundFailed: a stream was not what it must be, or something is left.
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
        report.parts_s["start"] = round(time.monotonic() - began, 2)
        try:
            async with AsyncTailpack(cluster.router, retry=PATIENT) as client:
                with report.part("undisturbed"):
                    answers = await asyncio.gather(*[undisturbed_by_client(client, ask) for ask in wanted])
                streams = ClientStreams(
                    client,
                    f"c{seed}",
                    random.Random(f"streams {seed}"),
                    dict(zip(wanted, answers, strict=True)),
                )
                blows = plan(seed, VICTIMS, pause_s=PAUSE_S, routers=True, all_up_share=ALL_UP_SHARE)
                with report.part("blows"):
                    await _under_blows(cluster, client, streams, num_blows, blows, report)
                with report.part("idle"):
                    await _idle(cluster, client)
            report.streams, report.counts = len(streams.ended), streams.counts
            report.tokens = sum(len(stream.got) for stream in streams.ended)
            processes = cluster.descendants()
            with report.part("stop"):
                assert await asyncio.to_thread(cluster.stop) == 0, "`up` ended badly"
                assert wait_gone(processes) == []
            assert left_in_shared_memory(before) == set()
            assert not cluster.folder.exists()
        except Exception as failure:
            kept = Path(tempfile.mkdtemp(prefix="tpc-"))
            for log in [*(cluster.folder / "logs").glob("*.log"), cluster.log_file]:
                shutil.copy(log, kept)
            told = f"seed {seed}, whole cluster, logs in {kept}: {type(failure).__name__}: {failure}"
            raise RoundFailed(f"{told}\n{cluster.log[-3000:]}", kept) from failure
    report.seconds = round(time.monotonic() - began, 3)
    return report


async def _under_blows(
    cluster: ClusterProcess,
    client: AsyncTailpack,
    streams: ClientStreams,
    num_blows: int,
    blows: Iterator[Blow],
    report: Report,
) -> None:
    reading = asyncio.create_task(streams.run())
    dealing = asyncio.create_task(_deal(cluster, client, streams, num_blows, blows, report))
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
    cluster: ClusterProcess,
    client: AsyncTailpack,
    streams: ClientStreams,
    num_blows: int,
    blows: Iterator[Blow],
    report: Report,
) -> None:
    going_on: list[asyncio.Task[None]] = []
    doomed: list[psutil.Process] = []
    deaths: dict[str, list[float]] = {}  # of what `up` itself starts again, but not more often than so
    while report.blows < num_blows:
        blow = next(blows)
        if blow.all_up:
            await _all_up(cluster, client, doomed)
        await asyncio.sleep(blow.after_s)
        assert cluster.process.poll() is None, "`up` has ended"
        there = await asyncio.to_thread(processes_of, cluster)
        for name in blow.victims:
            process = there.get(name)
            now = time.monotonic()
            recent = deaths[name] = [at for at in deaths.get(name, []) if now - at < 1.5 * DEATHS_S]
            if process is None or (name in ("kvstore", "router") and len(recent) >= MAX_DEATHS - 1):
                continue
            recent.append(now)
            if name == "router":
                streams.router_deaths.append(time.monotonic())
            try:
                process.send_signal(blow.signum)
            except psutil.NoSuchProcess:
                continue
            report.hit(name, blow.signum)
            with cluster.log_file.open("a") as log:
                log.write(f"{datetime.now(UTC).isoformat(timespec='milliseconds')} chaos: {blow}\n")
            if not blow.stop_s:
                doomed.append(process)
            else:
                going_on.append(asyncio.create_task(_go_on(process, blow.stop_s)))
    await asyncio.gather(*going_on)


async def _all_up(cluster: ClusterProcess, client: AsyncTailpack, doomed: list[psutil.Process]) -> None:
    """Waits until what was hit is gone, the router has every worker, and the store as well."""
    deadline = time.monotonic() + HANG_S
    assert await asyncio.to_thread(wait_gone, doomed, HANG_S) == []
    doomed.clear()
    while True:
        try:
            workers = await client.list_workers()
            devices = (await asyncio.to_thread(cluster.kv_stats)).devices
            told = f"{[(w.address, w.state, w.why) for w in workers]}, {[(d.device, d.worker_id) for d in devices]}"
            if all(worker.state == "ready" for worker in workers) and (
                sum(bool(device.worker_id) for device in devices) == len(workers)
            ):
                return
        except TailpackError as away:
            told = str(away)
        assert time.monotonic() < deadline, f"not up again: {told}"
        await asyncio.sleep(0.1)


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
