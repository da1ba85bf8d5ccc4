"""Whether a process is alive and ready, over plain HTTP: for kubelet, whose probes have no client certificates.

GET /health/live    200 while the event loop runs; 503: it is stuck, and only a restart helps
GET /health/ready   200 while work is taken

The same is told by grpc.health.v1 at every gRPC door. This page has nothing else on it, so it needs no TLS.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from protos.cli_options import advanced_option
from protos.metrics import OFF, EventLoopProbe
from protos.small_http import Answer, SmallHttpServer

STUCK_S = 30.0
"""An event loop that has run nothing for so long is taken for dead. Loading and compiling is done off the loop."""

LIVE = "/health/live"
READY = "/health/ready"


class HealthServer(SmallHttpServer):
    """Args:
    ready: whether work is taken; any thread.
    probe: of the event loop that does the work.
    """

    def __init__(self, ready: Callable[[], bool], probe: EventLoopProbe) -> None:
        super().__init__("health")
        self._ready = ready
        self._probe = probe

    def answer(self, path: str, headers: Mapping[str, str]) -> Answer | None:
        if path not in (LIVE, READY):
            return None
        if (silent_s := self._probe.silent_s) > STUCK_S:
            return _no(f"the event loop has run nothing for {silent_s:.0f} s")
        if path == READY and not self._ready():
            return _no("not ready")
        return Answer("200 OK", b"yes\n")


def _no(why: str) -> Answer:
    return Answer("503 Service Unavailable", f"{why}\n".encode())


@asynccontextmanager
async def serving_health(
    address: str, ready: Callable[[], bool], probe: EventLoopProbe | None = None
) -> AsyncIterator[str | None]:
    """Serves the health of the process whose event loop runs here.

    Args:
        address: host:port, or OFF.
        ready: whether work is taken; called in another thread.
        probe: that runs already; None: one of its own.

    Yields:
        The server's URL, without a path; None: it is off.

    Raises:
        ConfigError: what SmallHttpServer.start raises.
    """
    if address == OFF:
        yield None
        return
    running: asyncio.Task[None] | None = None
    if probe is None:
        probe = EventLoopProbe()
        running = asyncio.create_task(probe.run())
    server = HealthServer(ready, probe)
    try:
        yield server.start(address)
    finally:
        await asyncio.to_thread(server.stop)
        if running is not None:
            running.cancel()


def health_option(command: Any) -> Any:
    """``--health``, alike on every server command."""
    option = advanced_option(
        "--health",
        default=OFF,
        show_default=True,
        metavar="HOST:PORT",
        help="Where /health/live and /health/ready are, in plain HTTP, or none.",
    )
    return option(command)
