"""Bytes that gather for callers who do not read, of all answers of one router together."""

from __future__ import annotations

from typing import Protocol

DEFAULT_MAX_UNREAD_BYTES = 512 << 20
"""Of all answers. One alone may have relay.MAX_PENDING_BYTES."""


class Holder(Protocol):
    """An answer with something unread."""

    @property
    def num_unread_bytes(self) -> int: ...

    def shed(self, num_bytes: int, allowed: int) -> None:
        """Drops what is unread and ends the answer with SLOW_READER. num_bytes: of all answers; allowed: of those."""


class Unread:
    """A counter, and who holds what it counts. Of one event loop."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_UNREAD_BYTES) -> None:
        self.num_bytes = 0
        self.num_shed = 0  # answers that were ended
        self._max_bytes = max_bytes
        self._holders: set[Holder] = set()

    def grow(self, holder: Holder, num_bytes: int) -> None:
        """The holder has so many more. Above the limit the answer that holds most ends: its caller reads least."""
        self._holders.add(holder)
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            largest = max(self._holders, key=lambda each: each.num_unread_bytes)
            self.num_shed += 1
            largest.shed(self.num_bytes, self._max_bytes)

    def free(self, holder: Holder, num_bytes: int) -> None:
        """The holder has none left of the bytes it had; any number of times."""
        self._holders.discard(holder)
        self.num_bytes -= num_bytes
