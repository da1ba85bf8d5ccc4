"""The doors' benchmark runs small here, so that it cannot rot. Its figures are not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bench_doors import RELAY, REQUEST, measure
from tests.bench.bench_router import Case
from tests.scenarios.tiny_tokenizer import write_tokenizer


@pytest.mark.parametrize(("door", "case"), [("http", RELAY), ("kserve", REQUEST)])
async def test_it_measures(door: str, case: Case, tmp_path: Path) -> None:
    assert await measure(door, case, write_tokenizer(tmp_path), 0.2) > 0
