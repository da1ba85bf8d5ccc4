"""What routers learn about this store's pages: a bounded log of pages that became reusable or stopped being so.

Pure: values in, values out. An event names a page by (group, hash) and nothing else, so it can be applied without
knowing the page before it: a removal always resolves. A reader keeps (incarnation, cursor) and a set per group, and

- applies a batch only when it is not ``lost`` and ``first`` is its own cursor; else a batch went missing;
- on a missing batch, a lost flag or another incarnation believes nothing until it has a snapshot.

So what it believes is at every cursor what the store held at that cursor, or less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice


class EventKind(Enum):
    ADDED = "added"
    REMOVED = "removed"
    CLEARED = "cleared"
    """Every page of every group went; group and hash are empty."""


@dataclass(frozen=True, slots=True)
class Event:
    kind: EventKind
    group: str
    hash: bytes


@dataclass(frozen=True)
class EventBatch:
    """Events [first, cursor) of one incarnation, in the order they happened.

    With ``lost`` there are none: what the reader knows cannot be brought up to date, it needs a snapshot. Without
    events (first == cursor) a batch still tells the reader that it has missed nothing.
    """

    incarnation: str
    first: int
    cursor: int
    lost: bool
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Snapshot:
    """All that was reusable at ``cursor``: hashes per group. Reading goes on with ``since(incarnation, cursor)``."""

    incarnation: str
    cursor: int
    hashes: Mapping[str, tuple[bytes, ...]]


class EventLog:
    """The newest ``capacity`` events.

    Args:
        incarnation: of the store (of the device's arenas, where they are made anew): never used twice, so that a cursor
            of an earlier life, which may well be in range, is not taken for one of this life.
        capacity: events kept, at least 1; a reader that falls further behind has lost.
    """

    def __init__(self, incarnation: str, capacity: int) -> None:
        if not incarnation or capacity < 1:
            raise ValueError(f"an event log needs an incarnation and room; given: {incarnation!r}, {capacity}")
        self.incarnation = incarnation
        self.capacity = capacity
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """Events ever logged; the position of the next one."""
        return self._cursor

    @property
    def num_kept(self) -> int:
        return len(self._ring)

    def added(self, group: str, page_hash: bytes) -> None:
        self._append(Event(EventKind.ADDED, group, page_hash))

    def removed(self, group: str, page_hash: bytes) -> None:
        self._append(Event(EventKind.REMOVED, group, page_hash))

    def cleared(self) -> None:
        self._append(Event(EventKind.CLEARED, "", b""))

    def since(self, incarnation: str, cursor: int, limit: int | None = None) -> EventBatch:
        """Events from ``cursor`` on, at most ``limit``; lost when they are gone, of another life, or yet to come."""
        oldest = self._cursor - len(self._ring)
        if incarnation != self.incarnation or not oldest <= cursor <= self._cursor:
            return EventBatch(self.incarnation, self._cursor, self._cursor, True, ())
        last = self._cursor if limit is None else min(self._cursor, cursor + limit)
        events = tuple(islice(self._ring, cursor - oldest, last - oldest))
        return EventBatch(self.incarnation, cursor, last, False, events)

    def snapshot(self, contents: Mapping[str, Iterable[bytes]]) -> Snapshot:
        """Of ``contents``, which is ``PrefixIndex.contents()`` of this very moment."""
        return Snapshot(self.incarnation, self._cursor, {group: tuple(hashes) for group, hashes in contents.items()})

    def _append(self, event: Event) -> None:
        self._ring.append(event)
        self._cursor += 1
