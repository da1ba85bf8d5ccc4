"""Histograms against plain counting, and quantiles against the values that went in."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.histogram import LATENCY_BOUNDS_S, Histogram, quantile

BOUNDS = (0.1, 0.5, 2.0)


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 4))))
def test_counts_are_what_plain_counting_gives(observed: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for seconds, count in observed:
        histogram.observe(seconds, count)
    edges = (-1.0, *BOUNDS, float("inf"))
    expected = [
        sum(count for seconds, count in observed if low < seconds <= high) for low, high in itertools.pairwise(edges)
    ]
    assert histogram.counts == expected
    assert histogram.total == sum(count for _, count in observed)
    assert histogram.sum_s == pytest.approx(sum(seconds * count for seconds, count in observed))


def test_a_bound_belongs_to_its_own_bucket() -> None:
    histogram = Histogram(BOUNDS)
    for seconds in (0.1, 0.5, 2.0, 2.0000001):
        histogram.observe(seconds)
    assert histogram.counts == [1, 1, 1, 1]


@given(st.lists(st.floats(0.0005, 119.0), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(observed: list[float], q: float) -> None:
    histogram = Histogram(LATENCY_BOUNDS_S)
    for seconds in observed:
        histogram.observe(seconds)
    estimated = quantile(histogram.bounds, histogram.counts, q)
    assert estimated is not None
    # The smallest value that a share q does not exceed.
    ranked = sorted(observed)
    true = next(v for i, v in enumerate(ranked, 1) if i >= q * len(ranked) * (1 - 1e-12))
    upper = next(bound for bound in LATENCY_BOUNDS_S if true <= bound)
    lower = max((bound for bound in (0.0, *LATENCY_BOUNDS_S) if bound < upper), default=0.0)
    assert lower <= estimated <= upper


@pytest.mark.parametrize(
    ("counts", "share", "seconds"),
    [
        ((0, 0, 0, 0), 0.5, None),
        ((10, 0, 0, 0), 0.5, 0.005),
        ((5, 5, 0, 0), 0.5, 0.01),
        ((0, 10, 0, 0), 0.5, 0.055),
        ((0, 0, 0, 3), 0.5, 1.0),  # above the last bound
        ((99, 0, 1, 0), 0.99, 0.01),
    ],
)
def test_quantiles_are_linear_inside_a_bucket(counts: tuple[int, ...], share: float, seconds: float | None) -> None:
    assert quantile((0.01, 0.1, 1.0), counts, share) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_have_to_grow(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="grow"):
        Histogram(bounds)
