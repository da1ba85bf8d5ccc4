"""A histogram with fixed bounds: counted on the hot path, read by Stats, by Prometheus and by the terminal view.

Observing costs a binary search and two additions (about 0.4 us), and takes no lock: one thread observes, any thread
reads. What a reader sees may be one observation short in its sum, never wrong in its counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Of what a person waits for: queueing, prefill, the first token, a whole request."""

STEP_BOUNDS_S = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0),
)
"""Of a step, and so of the time between two tokens."""

LAG_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Of an event loop that runs late."""


class Histogram:
    """Durations in seconds, since it was made.

    Attributes:
        bounds: upper bounds in seconds, inclusive, growing.
        counts: of each bound those above the one before; one more, at the end, for what is above all.
        sum_s: of all durations.
    """

    __slots__ = ("bounds", "counts", "sum_s")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ValueError(f"bounds are to grow: {bounds}")
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum_s = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Counts ``count`` durations of ``seconds`` each."""
        self.counts[bisect_left(self.bounds, seconds)] += count
        self.sum_s += seconds * count

    @property
    def total(self) -> int:
        return sum(self.counts)


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """The duration that a share ``q`` of all does not exceed, in seconds; None where nothing was counted.

    Linear within a bucket, as Prometheus' histogram_quantile: the first one begins at 0, and what is above all bounds
    is taken to be at the last of them.
    """
    total = sum(counts)
    if not total:
        return None
    rank, below, lower = q * total, 0, 0.0
    for upper, count in zip(bounds, counts, strict=False):
        if count and below + count >= rank:
            return lower + (upper - lower) * max(0.0, rank - below) / count
        below, lower = below + count, upper
    return bounds[-1]
