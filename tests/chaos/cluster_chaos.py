"""Chaos on a whole cluster: ``tailpack up`` with Ray, two workers, perhaps a warm standby of each, and a router, and
callers who use our client.
"""

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

PLAIN, STANDBY = KINDS = ("cluster", "cluster+standby")
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
STANDBY_VICTIMS: Victims = [
    *VICTIMS,
    (("standby-0",), 14),
    (("standby-1",), 14),
    (("worker-0", "standby-0"), 14),
    (("worker-0", "standby-0", "worker-1", "standby-1"), 4),
    (("kvstore", "standby-1"), 6),
]


async def run(seed: int, num_blows: int, folder: Path, *, standby: bool = False) -> Report:
    """One cluster, from its start to its end, under a plan of blows.

    Args:
        num_blows: signals that find somebody alive; one or two more where several are hit at once.
        folder: for the model and the cluster's files.
        standby: each worker has one, which is hit as well.

    Raises:
        RoundFailed: a stream was not what it must be, or something is left.
    """
    report = Report(STANDBY if standby else PLAIN, seed)
    began, before = time.monotonic(), shared_memory_files()
    victims, options = (STANDBY_VICTIMS, [*OPTIONS, "--standby"]) if standby else (VICTIMS, OPTIONS)
    model = folder / "tiny"
    if not model.exists():
        write_tiny_model(model)
    wanted = asks(
        random.Random(f"asks {seed}"), NUM_ASKS, vocab_size=600, prompts=(1, 60, 127, 128, 129, 300), most_tokens=700
    )
    files = folder / f"cluster-{seed}"
    files.mkdir()
    with running(files, model, options) as cluster:
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
                blows = plan(seed, victims, pause_s=PAUSE_S, routers=True, all_up_share=ALL_UP_SHARE)
                with report.part("blows"):
                    await _under_blows(cluster, client, streams, num_blows, blows, report)
                with report.part("idle"):
                    await _idle(cluster, client)
            report.streams, report.counts = len(streams.ended), streams.counts
            if standby:
                report.counts["standby took over"] = cluster.log.count("'s standby took over")
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


def kind_of(seed: int) -> str:
    """Which of KINDS a seed plays."""
    return random.Random(f"kind {seed}").choice(KINDS)


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
            await _all_up(cluster, client, doomed, standby=report.setting == STANDBY)
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


async def _all_up(
    cluster: ClusterProcess, client: AsyncTailpack, doomed: list[psutil.Process], *, standby: bool
) -> None:
    """Waits until what was hit is gone, the router has every worker, the store as well, and every standby waits."""
    deadline = time.monotonic() + HANG_S
    assert await asyncio.to_thread(wait_gone, doomed, HANG_S) == []
    doomed.clear()
    while True:
        try:
            workers = await client.list_workers()
            devices = (await asyncio.to_thread(cluster.kv_stats)).devices
            told = f"{[(w.address, w.state, w.why) for w in workers]}, {[(d.device, d.worker_id) for d in devices]}"
            if (
                all(worker.state == "ready" for worker in workers)
                and sum(bool(device.worker_id) for device in devices) == len(workers)
                and (not standby or await asyncio.to_thread(_in_queue, cluster))
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
    """What can be hit now: "kvstore", "router", "worker-0", "worker-1", and each one's "standby-0", "standby-1". An
    actor that has not asked for its turn yet has a name that is free, of a worker first.
    """
    found: dict[str, psutil.Process] = {}
    beginning: list[psutil.Process] = []
    for process in cluster.descendants():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command and command[0].startswith("ray::WorkerActor"):
            if name := _place(process):
                found[name] = process
            else:
                beginning.append(process)
        elif command[3:5] in (["kvstore", "serve"], ["router", "serve"]):
            found[command[3]] = process
    free = [name for name in ("worker-0", "worker-1", "standby-0", "standby-1") if name not in found]
    return found | dict(zip(free, sorted(beginning, key=lambda actor: actor.pid), strict=False))


def _place(process: psutil.Process) -> str | None:
    """What the turns' files say (worker/turn.py): who has the lock of "worker-0.turn" is "worker-0", and who has only
    opened it "standby-0". None: it has opened none.
    """
    try:
        for link in Path(f"/proc/{process.pid}/fd").iterdir():
            file = link.readlink()
            if file.suffix == ".turn":
                has_it = "FLOCK" in Path(f"/proc/{process.pid}/fdinfo/{link.name}").read_text()
                return file.stem if has_it else file.stem.replace("worker", "standby")
    except OSError:  # it has ended meanwhile
        pass
    return None


def _in_queue(cluster: ClusterProcess) -> bool:
    """Whether each worker's actor and its standby's have asked for their turn."""
    actors = [process for name, process in processes_of(cluster).items() if name.startswith(("worker", "standby"))]
    return len(actors) == 4 and None not in map(_place, actors)


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
