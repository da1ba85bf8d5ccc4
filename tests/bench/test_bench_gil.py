"""The benchmark itself, small, so that it cannot rot. No time is asserted."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.bench import bench_gil
from tests.e2e.cluster import write_tiny_model


def test_every_case_gives_a_whole_record(tmp_path: Path) -> None:
    interval_s = sys.getswitchinterval()
    model = write_tiny_model(tmp_path / "tiny")
    records = bench_gil.measure(model, "tiny", 0.5, intervals_s=(0.001,), arena_bytes=64 << 20)
    assert [record["case"] for record in records] == [
        "loop-lag-p99-tiny-1000us",
        "info-latency-p99-tiny-1000us",
        "decode-8-tiny-1000us",
    ]
    assert all(record["value"] > 0 for record in records)
    assert all((record["rival"] is None) == ("rival_why" in record) for record in records)
    assert sys.getswitchinterval() == interval_s
