"""What a worker retains of host and device memory, every byte with its owner; what has none is "unknown".

Three kinds of owners. Objects: all tensors that are reached from them, each storage once, the first owner has it. Of
torch's allocator: its graph pools, and what it keeps for activations. Phases: what appeared beside all these while
something was done at the start (a context made, kernels loaded), measured before and after. From ``settle`` on, when
the worker is ready, whatever appears beside all owners is unknown; a serving process does not grow.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from worker.held import Storage, storages
from worker.memory_meter import HOST, Measured, Meter
from worker.memory_plan import ACTIVATIONS, GRAPH_POOLS, LIBRARIES, UNKNOWN

log = structlog.get_logger("worker")

LIMITS = {HOST: 512 << 20}
"""How far unknown may grow before it is an alarm: the interpreter's heap on the host."""
DEVICE_LIMIT = 64 << 20


class Owned(NamedTuple):
    """``memory``: HOST, or the meter's name of the GPU. ``planned``: at most, by the budget; 0: not by itself."""

    memory: str
    owner: str
    num_bytes: int
    planned: int = 0


class Reading(NamedTuple):
    """``grown``: by memory, since ``settle``: unknown bytes, and activations beyond their plan."""

    owned: list[Owned]
    grown: dict[str, int]
    measured: dict[str, Measured]


@dataclass
class _Books:
    """Of one memory."""

    objects: dict[str, set[Storage]] = field(default_factory=dict)
    elsewhere: int = 0  # told by the store: arenas of KV and weights that are mapped here
    parts: dict[str, dict[str, int]] = field(default_factory=dict)  # of an owner of objects: owners within
    phases: dict[str, int] = field(default_factory=dict)
    rest: int = 0  # used, and nobody's yet, at the last mark
    libraries: int = 0


class Ledger:
    """Of one process. Any thread.

    Args:
        meter: what the system counts. What is used at first belongs to ``began``.
        planned: bytes by (memory, owner), as the start-up budget has them.
    """

    def __init__(self, meter: Meter, began: str, planned: Mapping[tuple[str, str], int] | None = None) -> None:
        self._meter = meter
        self._planned = dict(planned or {})
        self._lock = threading.Lock()
        measured = meter()
        self._books = {memory: _Books() for memory in measured}
        self._alarmed: set[str] = set()
        self.settled = False
        self._mark(began, measured)

    def claim(self, owner: str, *roots: object) -> None:
        """All memory that is reached from ``roots`` and that nobody has claimed is ``owner``'s."""
        with self._lock:
            claimed = {storage for books in self._books.values() for own in books.objects.values() for storage in own}
            for storage in storages(*roots) - claimed:
                books = self._books.get(HOST if storage.memory == "cpu" else storage.memory)
                if books is not None:
                    books.objects.setdefault(owner, set()).add(storage)

    def divide(self, memory: str, owner: str, parts: Mapping[str, int]) -> None:
        """So much of what ``owner`` claimed is shown as ``parts``."""
        with self._lock:
            self._books[memory].parts[owner] = dict(parts)

    def elsewhere(self, memory: str, num_bytes: int, *roots: object) -> None:
        """So much of ``memory`` is mapped here and told by the kvstore; tensors of ``roots`` lie in it. On the host it
        is shared memory, which is not counted here.
        """
        self.claim("", *roots)
        with self._lock:
            self._books[memory].elsewhere += num_bytes if memory != HOST else 0

    def mark(self, phase: str) -> None:
        """What appeared since the last mark, beside objects and torch's allocator, is ``phase``'s."""
        with self._lock:
            self._mark(phase, self._meter())

    def settle(self, phase: str) -> None:
        """The last mark. What torch has given out to nobody that is known are its libraries' workspaces."""
        with self._lock:
            measured = self._meter()
            for memory, books in self._books.items():
                books.libraries = max(0, _given_out(measured[memory], books))
            self._mark(phase, measured)
            self.settled = True

    def read(self) -> Reading:
        """Now, the host first; owners in the order that they were named, "unknown" last of each memory."""
        with self._lock:
            measured = self._meter()
            owned = [each for memory in self._books for each in self._read(memory, measured[memory])]
            grown = dict.fromkeys(self._books, 0)
            for each in owned if self.settled else ():
                if each.owner == UNKNOWN:
                    grown[each.memory] += each.num_bytes
                elif each.owner == ACTIVATIONS and each.planned:
                    grown[each.memory] += max(0, each.num_bytes - each.planned)
            return Reading(owned, grown, measured)

    def alarm_bytes(self) -> int:
        """What has grown beyond its limit, all memories together; 0: nothing. The first of each is logged."""
        reading, total = self.read(), 0
        for memory, size in reading.grown.items():
            limit = LIMITS.get(memory, DEVICE_LIMIT)
            if size <= limit:
                continue
            total += size
            if memory not in self._alarmed:
                self._alarmed.add(memory)
                owners = {each.owner: each.num_bytes for each in reading.owned if each.memory == memory}
                log.warning(
                    "memory without an owner grows",
                    memory=memory,
                    grown_mib=size >> 20,
                    limit_mib=limit >> 20,
                    owners=owners,
                )
        return total

    def _mark(self, phase: str, measured: dict[str, Measured]) -> None:
        for memory, books in self._books.items():
            rest = _rest(measured[memory], books)
            books.phases[phase] = books.phases.get(phase, 0) + rest - books.rest
            books.rest = rest

    def _read(self, memory: str, now: Measured) -> list[Owned]:
        books = self._books[memory]
        sizes = {owner: _total(own) for owner, own in books.objects.items() if owner}
        for owner, parts in books.parts.items():
            rest = max(0, sizes.pop(owner, 0) - sum(parts.values()))
            sizes = {**parts, owner: rest, **sizes}
        if now.blocks or now.reserved:
            sizes[GRAPH_POOLS] = now.pools
            sizes[LIBRARIES] = books.libraries
            in_torch = sum(_total({s for s in own if now.has(s)}) for own in books.objects.values())
            sizes[ACTIVATIONS] = max(0, now.reserved - now.pools - in_torch - books.libraries)
        sizes |= {phase: max(0, size) for phase, size in books.phases.items()}
        unknown = _rest(now, books) - sum(books.phases.values())
        sizes[UNKNOWN] = max(0, unknown)
        return [Owned(memory, o, n, self._planned.get((memory, o), 0)) for o, n in sizes.items() if n or o == UNKNOWN]


def _total(own: set[Storage]) -> int:
    return sum(storage.num_bytes for storage in own)


def _in_torch(now: Measured, books: _Books) -> int:
    return sum(_total({s for s in own if now.has(s)}) for own in books.objects.values())


def _given_out(now: Measured, books: _Books) -> int:
    """By torch, outside of graph pools, to nobody that is known."""
    return now.allocated - now.pools_allocated - _in_torch(now, books)


def _rest(now: Measured, books: _Books) -> int:
    """Used and neither torch's, nor of objects that are elsewhere, nor told by the store."""
    objects = sum(_total({s for s in own if not now.has(s)}) for owner, own in books.objects.items() if owner)
    return now.used - now.reserved - books.elsewhere - objects
