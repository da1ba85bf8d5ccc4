"""What grows without bound in a round ends it by name."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from tests.chaos.memory_guard import MemoryGrew, MemoryGuard


async def grow(swallow: bool) -> None:
    kept: list[bytes] = []
    while True:
        try:
            kept += [b"x" * (1 << 21) for _ in range(2)]  # not zeros: those are not there until they are written
            await asyncio.sleep(0.01)
        except MemoryGrew:
            if not swallow or len(kept) > 400:
                raise


@pytest.mark.parametrize("swallow", [False, True])
def test_a_round_that_grows_is_told_what_grows_and_where(swallow: bool) -> None:
    """Also where somebody takes the first word for an error like any other."""
    with pytest.raises(MemoryGrew) as told, MemoryGuard("a round", growth_bytes=64 << 20):
        asyncio.run(grow(swallow))
    assert "2 MiB: bytes of 2097152 in a list b'xxxx" in str(told.value)
    assert "coro=<grow()" in str(told.value) or "in grow" in str(told.value)


@pytest.fixture
def server() -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-c", "kept = b'x' * (1 << 27); input()"], stdin=subprocess.PIPE) as process:
        yield psutil.Process(process.pid)
        process.kill()


def test_a_server_that_grows_is_named(server: psutil.Process) -> None:
    told = rf"process {server.pid} has grown to 1\d\d MiB: .*kept = "
    with pytest.raises(MemoryGrew, match=told), MemoryGuard("a round", server_bytes=100 << 20):
        asyncio.run(asyncio.sleep(60))


def test_a_round_that_does_not_grow_is_left_alone() -> None:
    with MemoryGuard("a round"):
        asyncio.run(asyncio.sleep(1.2))
