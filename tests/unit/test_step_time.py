"""What prompt tokens take, learnt from steps; and chunks that are cut to a time."""

from __future__ import annotations

import random

import pytest

from tests.unit.test_scheduler import sequence
from worker.scheduler import TimeBudget, schedule
from worker.step_time import FIRST_TOKENS, LEAST_TOKENS, PrefillTime


def true_seconds(chunks: list[tuple[int, int]], noise: float = 1.0) -> float:
    tokens = sum(count for _, count in chunks)
    pairs = sum(count * (start + count / 2) for start, count in chunks)
    return noise * (4e-3 + 30e-6 * tokens + 1.2e-9 * pairs + 9e-8 * sum(start for start, _ in chunks))


@pytest.mark.parametrize("seed", range(5))
def test_a_long_prompt_stays_within_the_time(seed: int) -> None:
    """As the engine does it: it learns from the very chunks that it cuts, of one prompt, with noise."""
    rng = random.Random(seed)
    takes, start, late, steps, budget = PrefillTime(), 0, 0, 0, 0.02
    while start < 100_000:
        count = max(LEAST_TOKENS, takes.most_tokens([], start, budget))
        took = true_seconds([(start, count)], rng.uniform(0.97, 1.03))
        takes.observe([(start, count)], took)
        steps, late, start = steps + 1, late + (took > 1.15 * budget), start + count
    assert late <= max(2, steps // 100)
    shortest = sum(1 for _ in _ideal(budget))
    assert steps <= 1.25 * shortest


def _ideal(budget: float) -> list[int]:
    counts, start = [], 0
    while start < 100_000:
        count = next(n for n in range(4096, 0, -8) if true_seconds([(start, n)]) <= budget)
        counts.append(count)
        start += count
    return counts


def test_a_step_that_costs_much_in_itself_is_worth_its_tokens() -> None:
    """The first took a second, kernels being loaded; no step fits the time, whatever its tokens."""
    takes, chunks = PrefillTime(), [(0, 4096)]
    takes.observe(chunks, 1.0)
    for turn in range(12):
        count = max(takes.least_tokens(0), takes.most_tokens([], 0, 0.02))
        takes.observe([(0, count)], 38e-3 + 30e-6 * count * (1 + turn % 3 / 100))
    assert 200 <= count <= 500


def test_several_prompts_share_a_step() -> None:
    takes = PrefillTime()
    for start in range(0, 40_000, 700):
        for chunks in ([(start, 300)], [(start, 64), (2 * start, 200)]):
            takes.observe(chunks, true_seconds(chunks))
    chunks = [(5_000, 120), (20_000, 90)]
    assert takes.seconds(chunks) == pytest.approx(true_seconds(chunks), rel=0.05)
    count = takes.most_tokens(chunks, 1_000, true_seconds([*chunks, (1_000, 77)]))
    assert abs(count - 77) <= 15


def test_nothing_known_and_nonsense() -> None:
    takes = PrefillTime()
    assert takes.seconds([(0, 9)]) == 0 and takes.most_tokens([(0, 100)], 0, 0.0) == FIRST_TOKENS - 100
    takes.observe([(0, 9)], 0.0)  # a clock that did not move
    assert not takes.num_seen


def test_chunks_are_cut_where_others_decode() -> None:
    takes = PrefillTime()
    for start in range(0, 8_000, 100):
        takes.observe([(start, 100 + start % 37)], 1e-4 * (100 + start % 37))
    long, decoding = sequence(5_000, 0), sequence(10, 10, 1)

    def count(*running: object, seconds: float, deterministic: bool = False) -> int:
        budget = TimeBudget(seconds, takes)
        work = schedule(running, prefill_budget=4096, deterministic=deterministic, time_budget=budget)  # type: ignore[arg-type]
        return next(w.count for w in work if w.sequence is long)

    assert count(long, seconds=0.02) == 4096  # nobody waits
    assert 150 <= count(long, decoding, seconds=0.02) <= 200
    assert count(long, decoding, seconds=0.0) == LEAST_TOKENS
    assert count(long, decoding, seconds=0.02, deterministic=True) == 128
    assert count(long, decoding, seconds=0.0, deterministic=True) == 128  # a span of the grid, at least
