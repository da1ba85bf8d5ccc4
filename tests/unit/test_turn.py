"""Whose turn it is to be a worker: one process at a time, and the next as soon as it is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from protos import logs
from protos.errors import PreconditionFailed
from worker import actor, standby, turn
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
        await asyncio.wait_for(came.wait(), 60)
        assert not third.take()


async def test_who_is_stopped_before_it_attached_loses_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def prepared(config: WorkerConfig) -> None:
        return None

    monkeypatch.setattr(standby, "_prepare", prepared)
    monkeypatch.setattr(turn, "LOOK_S", 0.02)
    monkeypatch.setattr(turn, "STOPPED_S", 0.1)
    config = WorkerConfig(tmp_path, "tiny", worker_id="w", kv_socket=tmp_path / "kvstore.sock")
    with holding(Turn.path(config.kv_socket, config.worker_id)) as worker:
        waiting = asyncio.create_task(standby.begin(config, asyncio.Event()))
        await asyncio.sleep(0.3)
        assert worker.poll() is None and not waiting.done(), "one that runs keeps it, however long it takes"
        os.kill(worker.pid, signal.SIGSTOP)
        assert await asyncio.wait_for(waiting, 20) is not None
        assert worker.wait(10) == -signal.SIGKILL


class Looked:
    """A process as a look at /proc finds it each time: stopped, having used so much."""

    def __init__(self, *ticks: int) -> None:
        self._ticks = iter(ticks)

    def is_stopped(self) -> bool:
        return True

    def cpu_ticks(self) -> list[str]:
        return [str(next(self._ticks)), "0"]


@pytest.mark.parametrize(("ticks", "stays"), [((7, 7, 7, 7, 7, 7, 7, 7), True), ((7, 7, 8), False)])
async def test_a_process_that_is_let_go_between_two_looks_is_not_stopped(
    monkeypatch: pytest.MonkeyPatch, ticks: tuple[int, ...], stays: bool
) -> None:
    monkeypatch.setattr(turn, "LOOK_S", 0.05)
    monkeypatch.setattr(turn, "STOPPED_S", 0.12)
    looked: Any = Looked(*ticks)
    assert await turn._stays_stopped(looked) == stays


async def test_who_looks_goes_on_where_it_cannot_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn, "LOOK_S", 0.01)
    looks = 0
    again = asyncio.Event()

    def holder(self: Turn) -> int | None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise IndexError("a line that was cut")
        again.set()
        return None

    monkeypatch.setattr(Turn, "_holder", holder)
    looking = asyncio.create_task(Turn(tmp_path / "w.turn").end_stopped())
    await asyncio.wait_for(again.wait(), 60)
    looking.cancel()


@pytest.mark.parametrize(
    ("asked", "awaited", "stays"), [(True, True, True), (False, True, False), (False, False, True)]
)
async def test_a_start_that_failed_stays_for_who_asks_why_and_else_keeps_nobody_from_the_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, awaited: bool, stays: bool
) -> None:
    go_on, over = threading.Event(), threading.Event()
    stayed: list[float] = []

    async def fails(*arguments: object) -> None:
        await asyncio.to_thread(go_on.wait, 20)
        raise PreconditionFailed("a bad checkpoint", reason="BAD_CHECKPOINT")

    monkeypatch.setattr(actor, "begin", fails)
    monkeypatch.setattr(actor, "ASKED_S", 20.0 if asked else 0.0)
    monkeypatch.setattr(logs, "configure", lambda component: None)
    monkeypatch.setattr(actor, "time", SimpleNamespace(sleep=stayed.append))
    monkeypatch.setattr(actor, "os", SimpleNamespace(_exit=lambda status: over.set()))
    config = WorkerConfig(tmp_path, "tiny", worker_id="w", kv_socket=tmp_path / "kvstore.sock")
    path = Turn.path(config.kv_socket, config.worker_id)
    holder, next_one = Turn(path), Turn(path)
    assert holder.take()
    came = asyncio.Event()
    if awaited:
        came = next_one.wait()
        await asyncio.to_thread(until_it_is, lambda: Turn.is_awaited(path))
        assert not came.is_set()
    assert Turn.is_awaited(path) == awaited
    made = actor.WorkerActor(config.to_dict(), "127.0.0.1:0", 0.0)
    answer = asyncio.create_task(made.ready()) if asked else None
    go_on.set()
    if answer is not None:
        with pytest.raises(PreconditionFailed, match="a bad checkpoint"):
            await answer
    assert await asyncio.to_thread(over.wait, 20)
    assert stayed == ([actor.LAST_WORDS_S] if stays else [])
    holder.give_back()
    if awaited:
        await asyncio.wait_for(came.wait(), 60)
    next_one.give_back()


def until_it_is(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_turn_that_comes_behind_the_end_of_the_loop_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", broken.append)
    holder, mine = Turn(tmp_path / "w.turn"), Turn(tmp_path / "w.turn")
    assert holder.take()
    before = set(threading.enumerate())

    async def waits() -> None:
        mine.wait()

    asyncio.run(waits())
    (waiting,) = set(threading.enumerate()) - before
    holder.give_back()
    waiting.join(60)
    assert not waiting.is_alive() and not broken
    mine.give_back()


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
            await asyncio.wait_for(standby.begin(config, asyncio.Event()), 60)
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(Turn(path).wait().wait(), 60)
