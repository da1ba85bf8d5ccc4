"""Which pending rows a sequence still has. They wait for the rest of their block, and no page holds them. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore.geometry import CacheGeometry, LayerGroup, Region


@dataclass(frozen=True)
class PendingRings:
    """The rings of one sequence's pending rows in one layer group.

    A ring that keeps R rows, in which rows up to length ``written`` were written at some time, holds tokens from
    max(first, written - R) on: also after a rollback, which brings nothing back that was overwritten.

    Attributes:
        regions: the group's pending regions, each with the rows that its ring keeps: all but those that steps under way
            (which are told of later, or never, where their tokens were guesses) may have written over.
        first: no token before it was ever written since the rings were last filled.
        written: the longest that the sequence has been since.
    """

    regions: tuple[tuple[Region, int], ...] = ()
    first: int = 0
    written: int = 0

    @staticmethod
    def of(group: LayerGroup, geometry: CacheGeometry) -> PendingRings:
        under_way = geometry.steps_under_way
        pending = (region for region in group.regions if region.tail_only)
        return PendingRings(tuple((region, geometry.ring_rows(group, region) - under_way) for region in pending))

    def after(self, length: int) -> PendingRings:
        """Rows up to ``length`` have been written, over those a ring's length before."""
        return self if length <= self.written else replace(self, written=length)

    def hold(self, num_tokens: int) -> bool:
        """Whether all rows are there that a sequence of ``num_tokens`` may read again."""
        return all(self._hold(region, rows, num_tokens) for region, rows in self.regions)

    def _hold(self, region: Region, rows: int, num_tokens: int) -> bool:
        needed = region.first_pending(num_tokens)
        return needed == num_tokens or needed >= max(self.first, self.written - rows)

    def cut(self, num_tokens: int) -> PendingRings:
        """After a rollback to ``num_tokens``: where a ring has nothing left from before, all begin there."""
        first = max([self.first, *(self.written - rows for _, rows in self.regions)])
        return self if num_tokens >= first else replace(self, first=num_tokens, written=num_tokens)
