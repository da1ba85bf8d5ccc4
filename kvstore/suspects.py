"""Processes that may still write to memory they lost: seen by pidfd, killed, and waited for.

A mapping cannot be revoked. So a worker whose stream ended without a goodbye, or that fell silent, is killed, and its
device is given to nobody until it is gone: when its pidfd says so, its threads, its mappings and what it had in flight
on a GPU are gone with it (tests/e2e/gpu_in_flight.py, on an H200: up to 20 ms behind the signal memory still changed,
and never behind the pidfd).
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path

import structlog

log = structlog.get_logger("kvstore.suspects")


class Holder:
    """A process that took a device's descriptors. The pid is the kernel's word; 0: it is not visible from here."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = -1
        self._killed = False
        if pid:
            try:
                self._pidfd = os.pidfd_open(pid)
            except ProcessLookupError:
                pass  # it is gone already
            except OSError as failure:
                log.warning("a process that maps memory cannot be watched", pid=pid, error=str(failure))
                self.pid = 0

    @property
    def visible(self) -> bool:
        """Whether its end can be seen, and brought about."""
        return self.pid != 0

    def is_gone(self) -> bool:
        return self.visible and (self._pidfd < 0 or _readable(self._pidfd, 0))

    def is_stopped(self) -> bool:
        """Whether it is held by a signal (SIGSTOP); one that a debugger holds is not."""
        return self._stat()[:1] == ["T"]

    def cpu_ticks(self) -> list[str]:
        """Of time on a CPU so far, in user mode and in the kernel; empty: it is gone."""
        return self._stat()[11:13]

    def _stat(self) -> list[str]:
        """proc(5), /proc/pid/stat, from the state on; empty: it is gone."""
        try:
            # The name in parentheses may hold anything; the state follows its end.
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return []

    def kill(self) -> bool:
        """SIGKILL; False where it was sent before, or could not be. Never to this process itself: it can be trusted."""
        if self._killed or self.is_gone() or self.pid == os.getpid():
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError as failure:
            log.error("a suspect could not be killed", pid=self.pid, error=str(failure))
            return False
        self._killed = True
        return True

    async def wait(self, timeout_s: float) -> bool:
        """Whether it is gone, after at most so long."""
        if self._pidfd < 0:
            return self.visible
        return await asyncio.to_thread(_readable, self._pidfd, timeout_s)

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


class Pulse:
    """When a worker was last heard of, in seconds of a monotonic clock that the caller reads. Pure."""

    def __init__(self, now_s: float) -> None:
        self._heard_s = now_s
        self.beats = False
        """Whether it sends heartbeats at all; an older worker does not."""

    def beat(self, now_s: float) -> None:
        self.beats, self._heard_s = True, now_s

    def forgive(self, now_s: float) -> None:
        """The store itself was not listening: nothing that it did not hear counts."""
        self._heard_s = max(self._heard_s, now_s)

    def silent_s(self, now_s: float) -> float:
        """0 of a worker that sends no heartbeats."""
        return now_s - self._heard_s if self.beats else 0.0


def _readable(pidfd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))
