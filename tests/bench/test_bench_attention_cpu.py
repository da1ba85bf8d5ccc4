"""The benchmark of attention runs small here, so that it cannot rot. Its figures are not looked at."""

from __future__ import annotations

import json

import pytest

from tests.bench.bench_attention_cpu import MODES, Shape, measure, record


@pytest.mark.parametrize("mode", sorted(MODES))
def test_it_measures(mode: str) -> None:
    for measured in measure(mode, Shape(layers=2, tokens=256), repeats=2, chunk=9):
        assert measured.error is None or measured.error < 1e-5
        assert json.loads(json.dumps(record(measured, "test")))["value"] > 0
