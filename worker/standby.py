"""From a process that might be a worker to the one that is: it waits for its turn, warm.

Heavy imports are here and below, not at the top: the line that begins a life comes before them, and tells what they
took.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from protos import rpc
from protos.errors import ConfigError
from protos.metrics import OFF
from worker.child import STARTING
from worker.config import WorkerConfig
from worker.laps import Laps, process_age_ms
from worker.turn import Turn

if TYPE_CHECKING:  # it brings torch
    from worker.shell import Prepared

log = structlog.get_logger("worker")

PORTS_S = 5.0


@dataclass(frozen=True)
class Begun:
    """What ``shell.serve`` is given by a process whose turn it is."""

    laps: Laps
    prepared: Prepared | None


async def begin(config: WorkerConfig, stop: asyncio.Event, *doors: str) -> Begun | None:
    """Waits for this process's turn to be the worker, prepared as far as ``shell.stand_by`` goes; then logs STARTING.

    Args:
        stop: ends the wait: None is the answer then.
        doors: addresses that will be listened on.
    """
    turn, stood_by_s = Turn(Turn.path(config.kv_socket, config.worker_id)), 0.0
    preparing: asyncio.Task[Prepared | None] | None = None
    if not turn.take():  # another process is this worker, or is just ending
        came, since = turn.wait(), time.monotonic()
        preparing = asyncio.create_task(_prepare(config))
        preparing.add_done_callback(partial(_failed, over := asyncio.Event()))
        watching = asyncio.create_task(turn.end_stopped())
        try:
            if not await _either(came, stop, over):
                return None
        finally:
            watching.cancel()
        if over.is_set():  # at once, not at its turn; and its last words must not keep the next one from it
            turn.give_back()
            await preparing
        stood_by_s = time.monotonic() - since
    log.info(
        STARTING,
        worker=config.worker_id,
        pid=os.getpid(),
        process_ms=process_age_ms(),
        stood_by_s=round(stood_by_s, 3),
    )
    laps = Laps()
    from worker import shell  # noqa: F401 - for the time that it takes

    laps.lap("imports")
    prepared = await preparing if preparing is not None else None
    await _until_free(*doors)
    return Begun(laps, prepared)


async def _prepare(config: WorkerConfig) -> Prepared | None:
    from worker import shell

    prepared = await asyncio.to_thread(shell.stand_by, config)
    log.info("worker standing by", worker=config.worker_id, pid=os.getpid(), weights_mapped=prepared is not None)
    return prepared


def _failed(over: asyncio.Event, preparing: asyncio.Task[Prepared | None]) -> None:
    if not preparing.cancelled() and preparing.exception() is not None:
        over.set()


async def _either(came: asyncio.Event, stop: asyncio.Event, over: asyncio.Event) -> bool:
    """Waits for one of them; whether it is not ``stop``."""
    waits = [asyncio.create_task(event.wait()) for event in (came, stop, over)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waits:
            each.cancel()
    return not stop.is_set()


async def _until_free(*addresses: str) -> None:
    """A process that ends gives its lock back before the last of its ports; who is in the way longer is named later."""
    deadline = time.monotonic() + PORTS_S
    for address in addresses:
        while address != OFF and time.monotonic() < deadline:
            try:
                rpc.check_free(address)
            except ConfigError:
                await asyncio.sleep(0.01)
            else:
                break
