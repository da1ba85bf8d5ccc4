"""The GPU engine's benchmark at a tiny size, over the CUDA sources on a CPU: it cannot rot."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import bench_engine_gpu
from tests.kernels.emulator import needs_compiler
from tests.unit.emulated_step import EmulatedStep


@needs_compiler
@pytest.mark.slow
def test_every_part_runs_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    EmulatedStep(monkeypatch)
    out, records = tmp_path / "out.jsonl", tmp_path / "records.jsonl"
    options = ["--device", "cpu", "--only", "equal,linear,steady", "--out", str(out), "--records", str(records)]
    status = bench_engine_gpu.main(options)
    lines = [json.loads(line) for line in out.read_text().splitlines()][1:]
    assert status == 0, [line for line in lines if not line["ok"]]
    assert {line["part"] for line in lines} == {"equal", "linear", "steady"}
    assert [json.loads(line)["case"] for line in records.read_text().splitlines()] == ["tiny", "tiny-dense"]


def test_the_engine_alone_runs_small(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    assert bench_engine_gpu.main(["--device", "cpu", "--only", "capacity,long", "--records", str(records)]) == 0
    kept = {record["case"]: record for record in map(json.loads, records.read_text().splitlines())}
    assert set(kept) == {"capacity-400-dense", "capacity-400-tq4", "capacity-400-tq4-over-dense", "long-16-steps"}
    assert kept["capacity-400-dense"]["value"] == 8 and kept["long-16-steps"]["facts"]["steps"] == 16
