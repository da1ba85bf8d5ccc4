"""The benchmark itself, small, so that it cannot rot. No time is asserted."""

from __future__ import annotations

from pathlib import Path

from tests.bench.bench_cancel import CASES, measure
from tests.e2e.cluster import write_tiny_model


async def test_every_case_gives_a_whole_record(tmp_path: Path) -> None:
    records = await measure(write_tiny_model(tmp_path / "tiny"), "tiny", 2)
    assert [line["case"] for line in records] == [
        f"{what}-{case.name}-tiny" for case in CASES for what in ("heard", "freed")
    ]
    for line in records:
        assert 0 < line["spread"][0] <= line["value"] <= line["p99"] <= line["spread"][1]
        assert line["repeats"] == 2 and line["floor"] > 0
