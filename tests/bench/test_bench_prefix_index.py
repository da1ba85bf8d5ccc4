"""The prefix index's benchmark runs small here, so that it cannot rot. Its figures are not looked at."""

from __future__ import annotations

from tests.bench.bench_prefix_index import record, run


def test_it_measures() -> None:
    figures = run(num_prefixes=2_000, num_pages=1_024, seconds=0.01, repeats=1)
    assert len({figure.case for figure in figures}) == len(figures) == 9
    assert all(record(figure, "a test")["value"] > 0 for figure in figures if "growth" not in figure.case)
