"""20 deaths in a whole cluster at random moments, with warm standbys or without; `make chaos` deals 200."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.chaos import cluster_chaos
from tests.chaos.cluster_chaos import kind_of
from tests.chaos.run import CLUSTER, Round, play, rounds
from worker.turn import Turn

NUM_BLOWS = 20


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_stream_of_a_cluster_is_what_it_would_have_been(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    wanted = Round(kind_of(seed), seed, NUM_BLOWS)
    print(f"again: python -m tests.chaos.run --only {wanted}")
    report = await play(None, wanted, tmp_path)
    print(report)
    assert report.blows >= NUM_BLOWS


def test_a_seed_says_whether_a_cluster_has_standbys_and_the_round_names_it() -> None:
    planned = rounds(0, 400, 1)
    assert [each.blows for each in planned] == [20] * 20
    assert {each.kind for each in planned} == set(cluster_chaos.KINDS)
    assert planned == rounds(0, 400, 1) == [Round.parse(str(each)) for each in planned]
    assert {each.level for each in planned} == {CLUSTER}
    assert {each.kind for each in rounds(0, 400, 1, standby=True)} == {cluster_chaos.STANDBY}


ACTOR = """
import sys
from pathlib import Path
from worker.turn import Turn

print("begun", flush=True)
sys.stdin.readline()
turn = Turn(Path(sys.argv[1]))
while True:
    print(turn.take(), flush=True)
    sys.stdin.readline()
"""


@contextmanager
def actor(path: Path) -> Iterator[tuple[psutil.Process, Callable[[], str]]]:
    """A process, and what makes it ask for its turn; not this one, which may have other tests' turns."""
    command = [sys.executable, "-c", ACTOR, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        asks, says = process.stdin, process.stdout

        def ask() -> str:
            asks.write("\n")
            asks.flush()
            return says.readline().strip()

        try:
            assert says.readline() == "begun\n"
            yield psutil.Process(process.pid), ask
        finally:
            process.kill()


def test_who_is_the_worker_of_a_pair_is_who_has_its_turn(tmp_path: Path) -> None:
    path = Turn.path(tmp_path / "kvstore.sock", "worker-1")
    with actor(path) as (second, asks_second):
        with actor(path) as (first, asks_first):
            assert cluster_chaos._place(first) is None
            assert asks_first() == "True" and asks_second() == "False"
            assert (cluster_chaos._place(first), cluster_chaos._place(second)) == ("worker-1", "standby-1")
        assert asks_second() == "True"
        assert cluster_chaos._place(second) == "worker-1"
