"""All of chaos, and a record of it: `python -m tests.chaos.run [--process N] [--cluster N] [--records FILE]`.

Rounds, each with a seed of its own: a fresh node (or a whole cluster), a plan of blows, callers who stream. A round
that fails says what went wrong, keeps its logs, and is counted; the others go on. With the same records file it goes on
where it was stopped, and does the rounds again that failed. One round again: `--only KIND:SEED:BLOWS`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from protos import logs
from tests.bench.bench_gil import describe
from tests.chaos import cluster_chaos, process_chaos
from tests.chaos.blows import Report
from tests.chaos.zygote import Zygote

CLUSTER = "cluster"
PROCESS_BLOWS, CLUSTER_BLOWS = 60, 20  # of a round


@dataclass(frozen=True)
class Round:
    """``kind``: of settings.KINDS, perhaps with "*N" workers and "+N" routers; or "cluster"."""

    kind: str
    seed: int
    blows: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}:{self.blows}"

    @staticmethod
    def parse(text: str) -> Round:
        kind, seed, blows = text.split(":")
        return Round(kind, int(seed), int(blows))


# In turn; the slow one less often.
ROUNDS = ("dense", "turboquant", "dense*2+2", "recompute", "turboquant*2", "dense*2", "v4", "turboquant+2")


def rounds(process: int, cluster: int, seed: int) -> list[Round]:
    """With so many blows at process level and of whole clusters."""
    made, number = [], 0
    while process > 0:
        made.append(Round(ROUNDS[number % len(ROUNDS)], seed + number, min(process, PROCESS_BLOWS)))
        process, number = process - PROCESS_BLOWS, number + 1
    while cluster > 0:
        made.append(Round(CLUSTER, seed + number, min(cluster, CLUSTER_BLOWS)))
        cluster, number = cluster - CLUSTER_BLOWS, number + 1
    return made


async def play(zygote: Zygote, wanted: Round, folder: Path) -> Report:
    """Raises AssertionError, as process_chaos.run and cluster_chaos.run do."""
    if wanted.kind == CLUSTER:
        return await cluster_chaos.run(wanted.seed, wanted.blows, folder)
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


def _record(wanted: Round, report: Report | None, failure: str | None, common: dict[str, Any]) -> dict[str, Any]:
    told = report.as_dict() if report is not None else {}
    return {"bench": "chaos", "case": str(wanted), "value": report.blows if report else None, "unit": "blows"} | (
        told | common | {"error": failure}
    )


def _summary(lines: list[dict[str, Any]], common: dict[str, Any]) -> list[dict[str, Any]]:
    """Of all rounds, by level."""
    found = []
    for level in ("process", CLUSTER):
        mine = [line for line in lines if line["case"].startswith(CLUSTER) == (level == CLUSTER)]
        passed = [line for line in mine if line["error"] is None]
        kills: Counter[str] = Counter()
        for line in passed:
            kills.update(line["kills"])
        totals = {name: sum(line[name] for line in passed) for name in ("streams", "interrupted", "tokens", "seconds")}
        about = {"rounds": len(mine), "failed_rounds": len(mine) - len(passed), "kills": dict(kills), **totals}
        blows = sum(line["value"] for line in passed)
        found.append({"bench": "chaos", "case": f"all, {level}", "value": blows, "unit": "blows"} | about | common)
    return found


@click.command()
@click.option("--process", default=1800, show_default=True, help="Blows at process level.")
@click.option("--cluster", default=200, show_default=True, help="Blows of whole clusters.")
@click.option("--seed", default=1, show_default=True, help="Of the first round.")
@click.option("--only", metavar="KIND:SEED:BLOWS", help="This round alone.")
@click.option("--records", "file", type=click.Path(path_type=Path, dir_okay=False), help="Written after each round.")
def main(process: int, cluster: int, seed: int, only: str | None, file: Path | None) -> None:
    """Deal blows until all are dealt; exit 1 where a round failed."""
    logs.configure("chaos", level="error")
    wanted = [Round.parse(only)] if only else rounds(process, cluster, seed)
    command = f"python -m tests.chaos.run --process {process} --cluster {cluster} --seed {seed}"
    lines = _already(file)
    done = {line["case"] for line in lines}
    with tempfile.TemporaryDirectory(prefix="tp-chaos-") as folder, Zygote() as zygote:
        for each in wanted:
            if str(each) in done:
                continue
            report, failure, common = None, None, describe(command)
            try:
                report = asyncio.run(play(zygote, each, Path(folder)))
            except AssertionError as wrong:
                failure = str(wrong)
            lines.append(_record(each, report, failure, common))
            click.echo(f"{time.strftime('%H:%M:%S')} {each}: {failure or json.dumps(lines[-1]['kills'])}", err=True)
            _write(file, lines)
    summary = _summary(lines, describe(command))
    for line in summary:
        click.echo(json.dumps(line))
    _write(file, [*lines, *summary])
    sys.exit(any(line["error"] for line in lines))


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
