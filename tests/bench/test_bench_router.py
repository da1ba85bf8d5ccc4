"""The router's benchmark runs small here, so that it cannot rot. Its figures are not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.bench_router import CASES, TTFT, Case, measure, record
from tests.scenarios.tiny_tokenizer import write_tokenizer

LOOKED_AT = [case for case in CASES if case.unit == TTFT or case.name == "session-relay-64-streams-1-token"]


@pytest.mark.parametrize("case", LOOKED_AT, ids=lambda case: case.name)
async def test_it_measures(case: Case, tmp_path: Path) -> None:
    got = await measure(case, write_tokenizer(tmp_path), 0.3)
    assert got.floor > 0
    assert got.value > 0 or case.unit == TTFT  # differences
    assert (got.generate is not None) == (case.door == "session")
    record(case, [got, got], "the command")
