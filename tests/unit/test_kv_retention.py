"""retention_floor over the range where each of its three terms binds, and what sealing makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.geometry import CacheGeometry, LayerGroup, Region
from kvstore.retention import dense_base, is_dense_again, pages_for, retention_floor, sealed_base

WINDOWS = st.sampled_from([1, 64, 100, 128, 200, 256, 4096])


def reach(position: int, window: int) -> int:
    """First token that a query at this position attends to."""
    return max(0, position - window + 1)


@pytest.mark.parametrize(
    ("n", "t", "window", "margin", "floor"),
    [
        (1000, 1, 128, 16, 1000 - 128 - 16),  # the rollback binds: a decode step
        (1000, 17, 128, 16, 1000 - 128 - 16),  # both alike
        (1000, 18, 128, 16, 1000 - 128 - 17),  # the step's own reach binds: a long verify step
        (1000, 100, 128, 16, 1000 - 128 - 99),
        (1000, 1, 128, 0, 1000 - 128),
        (144, 1, 128, 16, 0),
        (145, 1, 128, 16, 1),
        (10, 1, 128, 16, 0),  # nothing before token 0
        (1000, 900, 128, 16, 0),
    ],
)
def test_each_term_where_it_binds(n: int, t: int, window: int, margin: int, floor: int) -> None:
    assert retention_floor(n, t, window, margin) == floor


@given(n=st.integers(1, 5000), t=st.integers(1, 300), window=WINDOWS, margin=st.integers(0, 300))
def test_no_query_of_this_step_or_after_a_rollback_reaches_behind_the_floor(
    n: int, t: int, window: int, margin: int
) -> None:
    floor = retention_floor(n, t, window, margin)
    t = min(t, n)
    for position in (n - t, n - 1, n):  # this step's first and last query, the next one
        assert reach(position, window) >= floor
    for rolled_back in (1, margin // 2, margin):
        if rolled_back <= min(margin, n):
            assert reach(n - rolled_back, window) >= floor
    assert floor >= 0


@given(n=st.integers(1, 5000), window=WINDOWS, margin=st.integers(0, 300))
def test_the_floor_is_not_lower_than_it_must_be(n: int, window: int, margin: int) -> None:
    """One step or one token of margin more would be refused at most one token further up."""
    floor = retention_floor(n, 1, window, margin)
    if floor:
        assert reach(n - margin, window) - floor == 1


@given(
    base=st.integers(0, 20).map(lambda pages: pages * 128),
    ahead=st.integers(0, 3000),
    t=st.integers(1, 40),
    window=WINDOWS,
    margin=st.integers(0, 64),
)
def test_sealing_moves_by_pages_while_the_floor_is_a_page_ahead(
    base: int, ahead: int, t: int, window: int, margin: int
) -> None:
    n = base + ahead
    expected = base
    while retention_floor(n, t, window, margin) >= expected + 128:
        expected += 128
    assert sealed_base(base, n, t, window, margin) == expected


@given(window=st.sampled_from([64, 128, 200, 256]), margin=st.integers(0, 100), steps=st.lists(st.integers(1, 9)))
def test_the_tail_never_holds_more_than_its_bound(window: int, margin: int, steps: list[int]) -> None:
    group = LayerGroup("g", (Region(0, "k", 1, 64, "float32"),), "turboquant", "tq4", window=window)
    tail_tokens = CacheGeometry((group,), margin=margin).tail_tokens(group)
    n = base = 0
    for chunk in (1, 500, 37):  # prefill: sealed with t = 1, whatever the chunk
        n += chunk
        base = sealed_base(base, n, 1, window, margin)
        assert n - base < window + margin + 128
    for t in steps * 20:
        n += t
        assert n - base <= tail_tokens  # before it is sealed
        base = sealed_base(base, n, t, window, margin)
        assert is_dense_again(n, base, window)
        assert is_dense_again(max(0, n - margin), base, window)


@given(n=st.integers(0, 5000), window=WINDOWS, margin=st.integers(0, 100))
def test_the_base_after_a_deep_rollback_makes_the_window_dense_again(n: int, window: int, margin: int) -> None:
    base = dense_base(n, window, margin)
    assert base % 128 == 0
    assert is_dense_again(max(0, n - margin), base, window)
    assert n - base < window + margin + 128


def test_pages_for() -> None:
    assert [pages_for(n) for n in (0, 1, 127, 128, 129, 256)] == [0, 1, 1, 1, 2, 2]
