"""A bound on the memory of a chaos round: it fails by name before it can take the machine with it.

Once a process of such a run was seen at 19 GB, and nobody knows what grew. So the report says: which process, and of
our own what is large or many, and where each task stands.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
import traceback
from collections import Counter, deque
from types import FrameType, TracebackType
from typing import Any

import psutil

LOOK_S = 0.5
MAX_GROWTH_BYTES = 1 << 30
"""Of the process that plays the round; one takes about 100 MB."""
MAX_SERVER_BYTES = 3 << 30
"""Of each process under it; a worker with a small model takes about 400 MB, Ray's head less."""
LARGE_BYTES = 1 << 20
PLAIN = (list, dict, set, frozenset, tuple, deque, bytes, bytearray, str)
GIVE_UP_LOOKS = 20  # after the first report, where the main thread does not come to raise it


class MemoryGrew(Exception):
    """The message says what."""


class MemoryGuard:
    """A context manager of the main thread, in which it raises MemoryGrew wherever that is. What swallows it is told
    again; where the main thread runs no Python any more, the process is ended.
    """

    def __init__(
        self, name: str, *, growth_bytes: int = MAX_GROWTH_BYTES, server_bytes: int = MAX_SERVER_BYTES
    ) -> None:
        self._name = name
        self._process = psutil.Process()
        self._growth_bytes = growth_bytes
        self._limit = self._process.memory_info().rss + growth_bytes
        self._server_bytes = server_bytes
        self._over = threading.Event()
        self._told = ""
        self._thread = threading.Thread(target=self._watch, name="memory guard", daemon=True)
        self._old_handler: Any = None

    def __enter__(self) -> MemoryGuard:
        self._old_handler = signal.signal(signal.SIGUSR1, self._raise)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGUSR1, self._old_handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if not self._over.is_set():
            raise MemoryGrew(self._told)

    def _watch(self) -> None:
        looks = 0
        while not self._over.wait(LOOK_S):
            if not self._told:
                self._told = self._look()
                if self._told:
                    print(f"{self._name}: {self._told}", file=sys.stderr, flush=True)
            if self._told:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                looks += 1
                if looks > GIVE_UP_LOOKS:
                    os.abort()

    def _look(self) -> str:
        """What is too large; empty: nothing."""
        rss = self._process.memory_info().rss
        if rss > self._limit:
            return (
                f"this process has grown to {rss >> 20} MiB (by {self._growth_bytes >> 20} may it):\n{what_is_here()}"
            )
        for child in self._process.children(recursive=True):
            try:
                rss = child.memory_info().rss
                if rss > self._server_bytes:
                    child.suspend()  # it grows no further while this is told; whoever plays the round ends it
                    return f"process {child.pid} has grown to {rss >> 20} MiB: {' '.join(child.cmdline())[:300]}"
            except psutil.Error:
                continue
        return ""


def what_is_here() -> str:
    """The largest objects, the most frequent kinds, and where each thread and task stands."""
    objects = gc.get_objects()
    kinds = Counter(type(each).__qualname__ for each in objects)
    large: list[tuple[int, str]] = []
    for each in objects:
        _note_large(each, each, large)
        for referred in gc.get_referents(each):
            if type(referred) in (bytes, bytearray, str):
                _note_large(referred, each, large)
    lines = [f"{len(objects)} objects: {kinds.most_common(12)}"]
    lines += [f"  {size >> 20} MiB: {what}" for size, what in sorted(large, reverse=True)[:12]]
    for ident, frame in sys._current_frames().items():
        lines += [f"thread {ident}:", *(line.rstrip() for line in traceback.format_stack(frame, limit=8))]
    tasks = [each for each in objects if issubclass(type(each), asyncio.Task) and not each.done()]
    lines += [repr(task)[:400] for task in tasks[:40]]
    return "\n".join(lines)


def _note_large(each: Any, owner: Any, large: list[tuple[int, str]]) -> None:
    size = sys.getsizeof(each, 0)
    if size > LARGE_BYTES:
        what = type(each).__qualname__ + (f" of {len(each)}" if type(each) in PLAIN else "")
        begin = repr(each[:80]) if type(each) in (bytes, bytearray, str) else ""
        large.append((size, f"{what} in a {type(owner).__qualname__} {begin}"))
