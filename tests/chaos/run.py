"""All of chaos, and a record of it: `python -m tests.chaos.run [-j N] [--records FILE]`.

Rounds, each with a seed of its own: a fresh node (or a whole cluster), a plan of blows, callers who stream. Several are
played at once, each in a process of its own. One that fails says what went wrong and how it is played again, keeps its
logs, and is counted; the others go on. With the same records file it goes on where it was stopped, and plays those
rounds again that failed. One alone, in this process: `--only KIND:SEED:BLOWS`.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import click

from protos import logs
from tests.bench.bench_gil import describe
from tests.chaos import cluster_chaos, process_chaos
from tests.chaos.blows import Report, RoundFailed
from tests.chaos.memory_guard import MemoryGrew, MemoryGuard
from tests.chaos.zygote import Zygote

CLUSTER = cluster_chaos.PLAIN
PROCESS_BLOWS, CLUSTER_BLOWS = 60, 20  # of a round
EXPECTED_S = {CLUSTER: 150.0, "process": 90.0}  # of a round, until one has been seen
MAX_ROUND_S = 1200.0
"""A bound on a round that hangs in spite of its own bounds."""
EXIT_NOT_ALL = 75
STOP_S = 60.0  # for a round that is told to end


@dataclass(frozen=True)
class Round:
    """``kind``: of settings.KINDS, perhaps with "*N" workers and "+N" routers; or of cluster_chaos.KINDS."""

    kind: str
    seed: int
    blows: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}:{self.blows}"

    @property
    def level(self) -> str:
        return CLUSTER if self.kind in cluster_chaos.KINDS else "process"

    @staticmethod
    def parse(text: str) -> Round:
        kind, seed, blows = text.split(":")
        return Round(kind, int(seed), int(blows))


# In turn; the slow one less often.
ROUNDS = ("dense", "turboquant", "dense*2+2", "recompute", "turboquant*2", "dense*2", "v4", "turboquant+2")


def rounds(process: int, cluster: int, seed: int, *, standby: bool = False) -> list[Round]:
    """With so many blows at process level and of whole clusters; these one in two until there are no more, for they
    take longest. ``standby``: all clusters have standbys, not just those whose seed says so.
    """
    nodes, number = [], 0
    while process > 0:
        nodes.append(Round(ROUNDS[number % len(ROUNDS)], seed + number, min(process, PROCESS_BLOWS)))
        process, number = process - PROCESS_BLOWS, number + 1
    clusters = []
    while cluster > 0:
        kind = cluster_chaos.STANDBY if standby else cluster_chaos.kind_of(seed + number)
        clusters.append(Round(kind, seed + number, min(cluster, CLUSTER_BLOWS)))
        cluster, number = cluster - CLUSTER_BLOWS, number + 1
    paired = [each for pair in zip(clusters, nodes, strict=False) for each in pair]
    common = len(paired) // 2
    return [*paired, *clusters[common:], *nodes[common:]]


async def play(zygote: Zygote | None, wanted: Round, folder: Path) -> Report:
    """Raises AssertionError, as process_chaos.run and cluster_chaos.run do. A cluster needs no zygote."""
    with MemoryGuard(str(wanted)):
        if wanted.level == CLUSTER:
            standby = wanted.kind == cluster_chaos.STANDBY
            return await cluster_chaos.run(wanted.seed, wanted.blows, folder, standby=standby)
        assert zygote is not None
        numbers, _, routers = wanted.kind.partition("+")
        kind, _, workers = numbers.partition("*")
        return await process_chaos.run(
            zygote,
            kind,
            wanted.seed,
            wanted.blows,
            folder,
            num_workers=int(workers or 1),
            num_routers=int(routers or 0),
        )


def play_to_end(wanted: Round, failed_logs: Path | None = None) -> dict[str, Any]:
    """The round's record, but for what all have in common. Logs of one that fails are copied to ``failed_logs``."""
    with tempfile.TemporaryDirectory(prefix="tp-chaos-") as folder:
        try:
            if wanted.level == CLUSTER:
                report = asyncio.run(play(None, wanted, Path(folder)))
            else:
                with Zygote() as zygote:
                    report = asyncio.run(play(zygote, wanted, Path(folder)))
        except RoundFailed as wrong:
            if failed_logs is not None:
                kept = failed_logs / str(wanted).replace(":", "-")
                kept.mkdir(parents=True, exist_ok=True)
                for log in wrong.logs.glob("*.log"):
                    shutil.copy(log, kept)
            return _failed(wanted, str(wrong))
        except MemoryGrew as grew:
            return _failed(wanted, str(grew))
    record = {"bench": "chaos", "case": str(wanted), "value": report.blows, "unit": "blows", "error": None}
    return record | report.as_dict()


def _failed(wanted: Round, why: str) -> dict[str, Any]:
    return {"bench": "chaos", "case": str(wanted), "value": None, "unit": "blows", "error": why}


class Lane:
    """One round in a process of its own, forked from this one: nothing is imported again."""

    def __init__(self, wanted: Round, folder: Path, failed_logs: Path | None) -> None:
        self.round = wanted
        self.began = time.monotonic()
        self._result = folder / f"{wanted}.json"
        self._output = folder / f"{wanted}.out"
        self._failed_logs = failed_logs
        self.process: BaseProcess = get_context("fork").Process(target=self._play)
        self.process.start()

    def _play(self) -> None:
        os.setsid()  # Ctrl-C is the parent's
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.default_int_handler)
        with self._output.open("wb") as output:
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        line = play_to_end(self.round, self._failed_logs)
        draft = self._result.with_suffix(".draft")
        draft.write_text(json.dumps(line))
        draft.rename(self._result)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def line(self) -> dict[str, Any]:
        """Of one that has ended."""
        self.process.join()
        if self._result.exists():
            line: dict[str, Any] = json.loads(self._result.read_text())
            return line
        text = self._output.read_bytes()[-4000:].decode(errors="replace")
        return _failed(self.round, f"its process ended with {self.process.exitcode}: {text}")

    def end(self) -> None:
        """As Ctrl-C does, so that it takes its servers with it."""
        for signum in (signal.SIGINT, signal.SIGKILL):
            if self.process.is_alive() and self.process.pid is not None:
                os.kill(self.process.pid, signum)
                self.process.join(STOP_S)


@dataclass
class Rounds:
    """Plays rounds, ``at_once`` of them.

    Args:
        left: not begun.
        deadline: of time.monotonic(), by which all have ended; no round begins that would probably be cut.
        lines: of those that have ended, in this run and before.
    """

    left: list[Round]
    at_once: int
    file: Path | None
    failed_logs: Path | None
    common: dict[str, Any]
    deadline: float
    lines: list[dict[str, Any]]
    lanes: list[Lane] = field(default_factory=list)

    def run(self) -> list[Round]:
        """Returns those that were cut, or never began."""
        cut: list[Round] = []
        with tempfile.TemporaryDirectory(prefix="tp-chaos-") as folder:
            try:
                while self._begin(Path(folder)):
                    until = min([self.deadline, *(lane.began + MAX_ROUND_S for lane in self.lanes)])
                    connection.wait([lane.process.sentinel for lane in self.lanes], max(0.0, until - time.monotonic()))
                    self._collect()
                    if time.monotonic() >= self.deadline:
                        break
            finally:
                for lane in self.lanes:
                    if lane.process.pid is not None:
                        os.kill(lane.process.pid, signal.SIGINT)  # all at once, then each in turn
                for lane in self.lanes:
                    lane.end()
                    cut.append(lane.round)
        return [*cut, *self.left]

    def _begin(self, folder: Path) -> bool:
        """Fills the lanes. Whether anything runs."""
        for each in list(self.left):
            if len(self.lanes) < self.at_once and time.monotonic() + self._expected_s(each) < self.deadline:
                self.left.remove(each)
                self.lanes.append(Lane(each, folder, self.failed_logs))
        return bool(self.lanes)

    def _expected_s(self, wanted: Round) -> float:
        """As long as the longest of its level so far."""
        seen = [line["wall_s"] for line in self.lines if Round.parse(line["case"]).level == wanted.level]
        return max(seen, default=EXPECTED_S[wanted.level])

    def _collect(self) -> None:
        for lane in list(self.lanes):
            if not lane.process.is_alive():
                line = lane.line()
            elif lane.seconds > MAX_ROUND_S:
                lane.end()
                line = _failed(lane.round, f"it had not ended after {MAX_ROUND_S:g} s")
            else:
                continue
            self.lanes.remove(lane)
            when = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "wall_s": round(lane.seconds, 1)}
            self.lines.append(self.common | line | when)
            _write(self.file, self.lines)
            self._tell(lane.round, self.lines[-1])

    def _tell(self, played: Round, line: dict[str, Any]) -> None:
        told = json.dumps(line.get("kills"))
        if line["error"]:
            told = f"FAILED: {line['error']}\n  again: python -m tests.chaos.run --only {played}"
        blows = sum(each["value"] or 0 for each in self.lines)
        total = f"[{len(self.lines)} of {len(self.lines) + len(self.lanes) + len(self.left)} rounds, {blows} blows]"
        click.echo(f"{time.strftime('%H:%M:%S')} {total} {played} in {line['wall_s']:.0f} s: {told}", err=True)


def _summary(lines: list[dict[str, Any]], common: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all rounds, by level, where there were any."""
    found = []
    for level in ("process", CLUSTER):
        mine = [line for line in lines if Round.parse(line["case"]).level == level]
        if not mine:
            continue
        passed = [line for line in mine if line["error"] is None]
        kills: Counter[str] = Counter()
        for line in passed:
            kills.update(line["kills"])
        totals = {
            name: round(sum(line[name] for line in passed), 1)
            for name in ("streams", "interrupted", "tokens", "seconds")
        }
        about = {"rounds": len(mine), "failed_rounds": len(mine) - len(passed), "kills": dict(kills), **totals}
        blows = sum(line["value"] for line in passed)
        found.append(common | {"bench": "chaos", "case": f"all, {level}", "value": blows, "unit": "blows"} | about)
    return found


@click.command()
@click.option("--process", default=1800, show_default=True, help="Blows at process level.")
@click.option("--cluster", default=200, show_default=True, help="Blows of whole clusters.")
@click.option("--standby", is_flag=True, help="All clusters have warm standbys; else the seed decides.")
@click.option("--seed", default=1, show_default=True, help="Of the first round.")
@click.option("-j", "at_once", default=(os.cpu_count() or 2) // 2 + 1, show_default=True, help="Rounds at once.")
@click.option("--seconds", type=float, help="End by then; what is left is for the next run with the same records.")
@click.option("--only", metavar="KIND:SEED:BLOWS", help="This round alone, in this process.")
@click.option("--records", "file", type=click.Path(path_type=Path, dir_okay=False), help="Written after each round.")
@click.option(
    "--failed-logs", type=click.Path(path_type=Path, file_okay=False), help="Folder for logs of rounds that fail."
)
@click.option("--commit", help="What the records say was run; else git is asked.")
def main(
    process: int,
    cluster: int,
    standby: bool,
    seed: int,
    at_once: int,
    seconds: float | None,
    only: str | None,
    file: Path | None,
    failed_logs: Path | None,
    commit: str | None,
) -> None:
    """Deal blows until all are dealt; exit 1 where a round failed, 75 where some were not played for want of time."""
    logs.configure("chaos", level="error")
    if only is not None:
        line = play_to_end(Round.parse(only), failed_logs)
        click.echo(json.dumps(line))
        sys.exit(bool(line["error"]))
    command = f"python -m tests.chaos.run -j {at_once} --process {process} --cluster {cluster} --seed {seed}"
    command += " --standby" if standby else ""
    common = describe(command, commit)
    lines = _already(file)
    done = {line["case"] for line in lines}
    left = [each for each in rounds(process, cluster, seed, standby=standby) if str(each) not in done]
    deadline = time.monotonic() + (seconds or float("inf"))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    playing = Rounds(left, at_once, file, failed_logs, common, deadline, lines)
    not_played = playing.run()
    summary = _summary(lines, common)
    for line in summary:
        click.echo(json.dumps(line))
    _write(file, [*lines, *summary])
    if not_played:
        click.echo(f"not played: {len(not_played)} rounds: {', '.join(map(str, not_played))}", err=True)
    failed = any(line["error"] for line in lines)
    sys.exit(1 if failed else EXIT_NOT_ALL if not_played else 0)


def _already(file: Path | None) -> list[dict[str, Any]]:
    """Rounds that passed."""
    if file is None or not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line["error"] is None and not line["case"].startswith("all, ")]


def _write(file: Path | None, lines: list[dict[str, Any]]) -> None:
    if file is None:
        return
    draft = file.with_suffix(".draft")
    draft.write_text("".join(json.dumps(line) + "\n" for line in lines))
    draft.rename(file)


if __name__ == "__main__":
    main()
