"""What `tailpack bench` counts: mixes, arrivals, percentiles, and what belongs to the window."""

from __future__ import annotations

import math
import random
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import InvalidRequest
from router.bench_statistics import Durations, Ended, Measured, Mix, poisson_arrivals


@given(st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=300), st.floats(0.1, 100))
def test_percentiles_are_the_nearest_rank_within_a_quarter_percent(values: list[float], q: float) -> None:
    durations = Durations()
    for value in values:
        durations.add(value)
    exact = sorted(values)[max(1, math.ceil(len(values) * q / 100)) - 1]
    assert durations.percentile(q) == pytest.approx(exact, rel=0.0026)
    assert (durations.count, durations.max_s, durations.min_s) == (len(values), max(values), min(values))
    assert durations.percentile(100) == max(values)
    assert durations.mean_s == pytest.approx(sum(values) / len(values))


@given(st.lists(st.floats(0, 1e4), min_size=1, max_size=100))
def test_a_distribution_rises_to_all(values: list[float]) -> None:
    durations = Durations()
    for value in values:
        durations.add(value)
    points = list(durations.cumulated())
    assert all(before[0] <= after[0] and before[1] < after[1] for before, after in pairwise(points))
    assert points[-1][1] == len(values)


def test_memory_does_not_grow_with_the_number() -> None:
    rng, durations = random.Random(1), Durations()
    for _ in range(100_000):
        durations.add(rng.lognormvariate(-4, 1))
    assert len(durations._buckets) < 2500


def test_nothing_has_no_percentiles() -> None:
    assert math.isnan(Durations().percentile(50)) and math.isnan(Durations().mean_s)


@pytest.mark.parametrize(
    ("text", "tokens", "shares", "mean"),
    [("128", (128,), (1,), 128), ("10:3,20:1", (10, 20), (0.75, 0.25), 12.5), ("1,2,3", (1, 2, 3), (1 / 3,) * 3, 2)],
)
def test_mixes(text: str, tokens: tuple[int, ...], shares: tuple[float, ...], mean: float) -> None:
    mix = Mix.parse(text)
    assert mix.tokens == tokens and mix.mean == pytest.approx(mean)
    rng, drawn = random.Random(2), 20_000
    counts = dict.fromkeys(tokens, 0)
    for _ in range(drawn):
        counts[mix.draw(rng)] += 1
    for count, share in zip(tokens, shares, strict=True):
        assert abs(counts[count] / drawn - share) < 0.02
    assert Mix.parse(str(mix)).tokens == tokens


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-1", "1.5", "8:", "8:0", "8:-1", "8:nan", "8:inf", "8,", "8:1:1", "1e9"]
)
def test_bad_mixes_are_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        Mix.parse(text)
    assert caught.value.reason == "BAD_MIX"


def test_arrivals_are_poisson_at_the_rate_and_the_same_with_the_same_seed() -> None:
    rate, number = 50.0, 20_000
    times = list(islice(poisson_arrivals(rate, 7), number))
    assert times == list(islice(poisson_arrivals(rate, 7), number))
    assert times[:10] != list(islice(poisson_arrivals(rate, 8), 10))
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    mean = sum(gaps) / number
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / number)
    # Of an exponential distribution mean and deviation are 1 / rate; one in e gaps is longer than the mean.
    assert mean == pytest.approx(1 / rate, rel=0.03) and spread == pytest.approx(1 / rate, rel=0.05)
    assert sum(gap > 1 / rate for gap in gaps) / number == pytest.approx(1 / math.e, abs=0.02)


def ended(due_s: float, ended_s: float, *, sent_s: float | None = None, reason: str = "") -> Ended:
    """One of 11 tokens, whose first came 1 s before its last."""
    sent_s = due_s if sent_s is None else sent_s
    return Ended(due_s, sent_s, ended_s - 1.0, ended_s, ended_s, 100, 40, 11, reason)


def test_latencies_count_from_when_a_request_was_due() -> None:
    measured = Measured(begin_s=0.0)
    measured.ended(ended(1.0, 9.0, sent_s=6.0))
    assert (measured.ttft.max_s, measured.e2e.max_s, measured.late.max_s) == (7.0, 8.0, 5.0)
    assert measured.tpot.max_s == pytest.approx(0.1)
    assert (measured.prompt_tokens, measured.cached_tokens) == (100, 40)


def test_the_warm_up_is_left_out() -> None:
    measured = Measured(begin_s=10.0)
    measured.chunk(9.0, 4, None, 8.0)
    measured.chunk(12.0, 4, 9.0, 8.0)  # of a request of the warm-up: its pace does not count, its tokens do
    measured.ended(ended(8.0, 12.0))
    measured.ended(ended(8.0, 12.0, reason="BROKEN"))
    measured.end_s = 15.0
    assert (measured.num_answered, measured.num_warmup, measured.errors.total()) == (0, 2, 0)
    assert (measured.itl.count, measured.ttft.count) == (0, 0)
    assert (measured.window_tokens, measured.window_ended) == (4, 1)
    assert measured.per_second(measured.window_tokens) == pytest.approx(4 / 5)


def test_what_comes_behind_the_window_counts_for_latencies_and_not_for_rates() -> None:
    measured = Measured(begin_s=0.0)
    measured.chunk(1.0, 2, None, 0.5)
    measured.end_s = 2.0
    measured.chunk(3.0, 2, 1.0, 0.5)
    measured.ended(ended(0.5, 3.0))
    assert (measured.window_tokens, measured.window_ended, measured.num_answered) == (2, 0, 1)
    assert (measured.itl.count, measured.itl.max_s, measured.e2e.max_s) == (1, 2.0, 2.5)


def test_errors_are_counted_by_reason_and_have_no_latency() -> None:
    measured = Measured(begin_s=0.0)
    for reason in ("NO_CAPACITY", "NO_CAPACITY", "WORKER_LOST"):
        measured.ended(ended(1.0, 2.0, reason=reason))
    assert measured.errors == {"NO_CAPACITY": 2, "WORKER_LOST": 1}
    assert (measured.e2e.count, measured.num_answered, measured.errors_by_second[2]) == (0, 0, 3)
