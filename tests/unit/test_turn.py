"""Whose turn it is to be a worker: one process at a time, and the next as soon as it is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protos.errors import PreconditionFailed
from worker import standby
from worker.config import WorkerConfig
from worker.turn import Turn

HOLDER = """
import sys
from pathlib import Path
from worker.turn import Turn

turn = Turn(Path(sys.argv[1]))
print(turn.take(), flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        try:
            yield process
        finally:
            process.kill()


async def test_who_stands_by_has_its_turn_when_the_worker_is_gone_and_not_before(tmp_path: Path) -> None:
    path = Turn.path(tmp_path / "kvstore.sock", "worker-0")
    with holding(path) as worker:
        mine, third = Turn(path), Turn(path)
        assert not mine.take() and not third.take()
        came = mine.wait()
        os.kill(worker.pid, signal.SIGSTOP)  # it may wake up: the store ends it, nobody else takes its place before
        await asyncio.sleep(0.2)
        assert not came.is_set()
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(came.wait(), 20)
        assert not third.take()


def test_workers_of_one_node_have_turns_of_their_own(tmp_path: Path) -> None:
    turns = [Turn(Turn.path(tmp_path / "kvstore.sock", f"worker-{index}")) for index in range(2)]
    assert all(turn.take() for turn in turns)


async def test_who_cannot_be_prepared_ends_before_its_turn_and_keeps_nobody_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(config: WorkerConfig) -> None:
        await asyncio.sleep(0.2)  # by then it waits for its turn
        raise PreconditionFailed("not deterministic", reason="NOT_DETERMINISTIC")

    monkeypatch.setattr(standby, "_prepare", fails)
    config = WorkerConfig(tmp_path, "tiny", worker_id="w", kv_socket=tmp_path / "kvstore.sock")
    path = Turn.path(config.kv_socket, config.worker_id)
    with holding(path) as worker:
        with pytest.raises(PreconditionFailed, match="not deterministic"):
            await asyncio.wait_for(standby.begin(config, asyncio.Event()), 10)
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(Turn(path).wait().wait(), 5)
