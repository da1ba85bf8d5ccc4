"""The router's benchmark runs small here, so that it cannot rot. Its figures are not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bench_router import CASES, Case, measure
from tests.scenarios.tiny_tokenizer import write_tokenizer


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=lambda case: case.name)
async def test_it_measures(case: Case, tmp_path: Path) -> None:
    value, floor = await measure(case, write_tokenizer(tmp_path), 0.3)
    assert value > 0
    assert floor > 0
