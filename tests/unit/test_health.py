"""The page that says whether a process is alive and ready."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request

import pytest

from protos.errors import ConfigError
from protos.health import STUCK_S, HealthServer, serving_health
from protos.metrics import OFF, EventLoopProbe


async def status(url: str) -> int:
    def get() -> int:
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return int(response.status)
        except urllib.error.HTTPError as refused:
            return refused.code

    return await asyncio.to_thread(get)


async def test_alive_and_ready_are_told_apart() -> None:
    ready = [False]
    async with serving_health("127.0.0.1:0", lambda: ready[0]) as url:
        assert url is not None
        assert [await status(f"{url}/health/{kind}") for kind in ("live", "ready")] == [200, 503]
        ready[0] = True
        assert [await status(f"{url}/health/{kind}") for kind in ("live", "ready")] == [200, 200]
        assert await status(f"{url}/metrics") == 404
        with pytest.raises(ConfigError):
            async with serving_health(url.removeprefix("http://"), lambda: True):
                pass
    with pytest.raises(OSError):
        await status(f"{url}/health/live")


async def test_off() -> None:
    async with serving_health(OFF, lambda: True) as url:
        assert url is None


def test_a_stuck_event_loop_is_neither() -> None:
    probe = EventLoopProbe()
    server = HealthServer(lambda: True, probe)
    try:
        for path in ("/health/live", "/health/ready"):
            answer = server.answer(path, {})
            assert answer is not None and answer.status.startswith("200")
        probe._ticked_ns = time.monotonic_ns() - int((STUCK_S + 1) * 1e9)
        for path in ("/health/live", "/health/ready"):
            answer = server.answer(path, {})
            assert answer is not None and answer.status.startswith("503") and b"31 s" in answer.body
    finally:
        server.stop()
