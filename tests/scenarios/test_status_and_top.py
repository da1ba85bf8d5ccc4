"""`tailpack status`, `features` and `top` against a router in this process; `top` in a terminal of its own."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from protos import types_pb2
from router.features_cli import features
from router.status_cli import status, top
from tests.scenarios.fake_worker import Script
from tests.scenarios.router_harness import cluster

ENTER_SCREEN, LEAVE_SCREEN, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


async def invoke(command: object, *arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, command, arguments)  # type: ignore[arg-type]


async def test_status_tells_workers_and_what_they_do(folder: Path) -> None:
    async with cluster(folder, Script([5], endless=True, every_s=0.01), num_workers=2) as it:
        streams = [it.client.generate("x") for _ in range(3)]
        for stream in streams:
            await anext(stream)
        as_json = await invoke(status, "--router", it.address, "--json")
        as_text = await invoke(status, "--router", it.address)
        for stream in streams:
            await stream.aclose()
        await it.settled()
    told = json.loads(as_json.output)
    assert as_json.exit_code == as_text.exit_code == 0
    assert told["in_flight"] == 3
    assert [worker["state"] for worker in told["workers"]] == ["ready", "ready"]
    assert told["ttft"]["p50"] > 0
    assert it.workers[0].info.worker_id in as_text.output


async def test_status_without_a_ready_worker_or_router_says_so_by_its_exit_status(folder: Path) -> None:
    async with cluster(folder, Script([5]), num_workers=0, addresses=["127.0.0.1:1"], wait=False) as it:
        no_worker = await invoke(status, "--router", it.address)
    assert no_worker.exit_code == 1
    assert "connecting" in no_worker.output
    no_router = await invoke(status, "--router", it.address)
    assert no_router.exit_code != 0
    assert getattr(no_router.exception, "reason", "") == "UNAVAILABLE"


async def test_features_are_told_by_each_process(folder: Path) -> None:
    async with cluster(folder, Script([5])) as it:
        it.requests._switches = [*it.requests._switches, _not_engaged()]
        answer = await invoke(features, "--router", it.address, "--json")
    told = [json.loads(line) for line in answer.output.splitlines()]
    assert {"name": "example", "state": "not engaged"}.items() <= told[-1].items()


def _not_engaged() -> types_pb2.Switch:
    return types_pb2.Switch(name="example", configured="on")


async def test_top_without_a_terminal_is_refused_by_name() -> None:
    assert getattr((await invoke(top)).exception, "reason", "") == "NO_TERMINAL"


@pytest.mark.parametrize("end", [b"q", signal.SIGTERM, signal.SIGINT], ids=["q", "SIGTERM", "SIGINT"])
async def test_top_leaves_the_terminal_as_it_was(folder: Path, end: bytes | signal.Signals) -> None:
    async with cluster(folder, Script([5], endless=True, every_s=0.01)) as it:
        stream = it.client.generate("x")
        await anext(stream)
        shown, status_of, restored = await _watched(it.address, end)
        await stream.aclose()
        await it.settled()
    assert status_of == 0, shown
    assert restored, "the terminal's settings are others than before"
    assert shown.count(ENTER_SCREEN) == shown.count(LEAVE_SCREEN) == 1
    assert shown.rindex(SHOW_CURSOR) > shown.index(ENTER_SCREEN)
    assert it.workers[0].info.worker_id.encode() in shown


async def test_top_outlives_its_router(folder: Path) -> None:
    async with cluster(folder, Script([5])) as it:
        pass
    shown, status_of, restored = await _watched(it.address, b"q", until=b"no answer from")
    assert (status_of, restored) == (0, True), shown


async def _watched(address: str, end: bytes | signal.Signals, until: bytes = b"TTFT") -> tuple[bytes, int, bool]:
    """Runs `top` in an 80x24 terminal until it has shown something, ends it. All that it wrote, its exit status, and
    whether the terminal's settings are what they were."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(its)
    command = [sys.executable, "-m", "protos.cli", "top", "--router", address, "--interval", "0.2"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment, start_new_session=True)
    shown = b""
    try:
        os.set_blocking(mine, False)
        async with asyncio.timeout(60):
            while until not in shown:
                shown += _read(mine)
                assert process.poll() is None, shown
                await asyncio.sleep(0.02)
            if isinstance(end, bytes):
                os.write(mine, end)
            else:
                process.send_signal(end)
            while process.poll() is None:
                shown += _read(mine)
                await asyncio.sleep(0.02)
        shown += _read(mine)
        return shown, process.returncode, termios.tcgetattr(its) == before
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        os.close(mine)
        os.close(its)


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 1 << 16)
    except BlockingIOError:
        return b""


def test_an_interval_is_a_number() -> None:
    result = CliRunner().invoke(top, ["--interval", "nan"])
    assert result.exit_code == 2 and "finite" in result.output
