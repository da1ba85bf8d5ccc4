"""The benchmark itself, small, so that it cannot rot. No time is asserted."""

from __future__ import annotations

from tests.bench import bench_codec


def test_every_case_gives_a_whole_record() -> None:
    lines = bench_codec.measure(rows=64, repeats=1)
    assert [line["case"] for line in lines][:2] == ["pack-d64-b4", "unpack-d64-b4"]
    assert set(bench_codec.TARGET) <= {line["case"] for line in lines}
    for line in lines:
        assert line["value"] > 0 and line["floor"] > 0 and 0 < line["error"] < 0.2
        assert (line["rival"] is None) == ("rival_why" in line)
