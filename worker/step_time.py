"""How long prompt tokens take beside decode rows, learnt from the steps that were: so that a step's chunk can be cut to
a time. Pure: times come in and go out.

A step's prompt tokens take  a + b * tokens + c * pairs + d * before  seconds: ``tokens`` are computed, ``pairs`` of a
token and one that it sees are attended to, and ``before``, the tokens that were there already, are read once whatever
the chunk. The four follow from earlier steps by least squares, none below 0, older steps counting less.
"""

from __future__ import annotations

from collections.abc import Iterable

FORGET = 0.93  # what a step counts after the next one
RIDGE = 1e-6  # holds what no step has told apart near 0
SWEEPS = 40  # of coordinate descent over four unknowns
FIRST_TOKENS = 128  # while nothing is known
LEAST_TOKENS = 16  # so that a prompt gets further whatever a step costs,
LEAST_SHARE = 0.25  # and so many that they take this part of what the step costs without them
_UNITS = (1.0, 1e3, 1e7, 1e5)  # makes the unknowns alike


class PrefillTime:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._products = [[0.0] * 4 for _ in range(4)]
        self._targets = [0.0] * 4
        self._costs = [0.0] * 4
        self.num_seen = 0

    def observe(self, chunks: Iterable[tuple[int, int]], seconds: float) -> None:
        """A step that computed ``chunks``, (first position, tokens) each, and took so long beside its decode rows."""
        if seconds <= 0:
            return
        row = [each / seconds for each in _features(chunks)]  # so that errors count relative to the time
        for i in range(4):
            self._targets[i] = FORGET * self._targets[i] + row[i]
            for j in range(4):
                self._products[i][j] = FORGET * self._products[i][j] + row[i] * row[j]
        self.num_seen += 1
        costs, products = self._costs, self._products
        for _ in range(SWEEPS):
            for i in range(4):
                if products[i][i] > 0:
                    others = sum(products[i][j] * costs[j] for j in range(4) if j != i)
                    costs[i] = max(0.0, (self._targets[i] - others) / (products[i][i] * (1 + RIDGE)))

    def seconds(self, chunks: Iterable[tuple[int, int]]) -> float:
        """Of a step with these chunks; 0 while nothing is known."""
        return sum(cost * each for cost, each in zip(self._costs, _features(chunks), strict=True))

    def least_tokens(self, start: int) -> int:
        """Of a step's only chunk: fewer would be no use, for it is not they that cost."""
        if not self.num_seen:
            return LEAST_TOKENS
        return max(LEAST_TOKENS, self.most_tokens([], start, (1 + LEAST_SHARE) * self.seconds([(start, 0)])))

    def most_tokens(self, chunks: list[tuple[int, int]], start: int, seconds: float) -> int:
        """Of a chunk from ``start`` on, beside ``chunks``, so that all of them take at most so long; 0 or more."""
        if not self.num_seen:
            return max(0, FIRST_TOKENS - sum(count for _, count in chunks))
        low, high = 0, 1 << 20
        while low < high:
            count = (low + high + 1) // 2
            if self.seconds([*chunks, (start, count)]) <= seconds:
                low = count
            else:
                high = count - 1
        return low


def _features(chunks: Iterable[tuple[int, int]]) -> list[float]:
    tokens = pairs = before = 0.0
    for start, count in chunks:
        tokens, pairs, before = tokens + count, pairs + count * (start + count / 2), before + start
    return [x / unit for x, unit in zip((1.0, tokens, pairs, before), _UNITS, strict=True)]
