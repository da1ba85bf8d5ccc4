"""How long the parts of a start take: told by the line that says that a worker is ready."""

from __future__ import annotations

import time

import psutil


class Laps:
    """``ms``: what each part took, in milliseconds, by "<part>_ms"."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, part: str) -> None:
        """A part has ended; the next one begins."""
        now = time.monotonic()
        self.ms[f"{part}_ms"] = round((now - self._since) * 1e3, 1)
        self._since = now


def process_age_ms() -> float:
    """Since the kernel made this process; good to 10 ms."""
    return round((time.time() - psutil.Process().create_time()) * 1e3, 1)
