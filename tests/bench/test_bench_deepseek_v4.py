"""The DeepSeek-V4 bench runs, small and on a CPU; its bytes are those of the model's own description."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.bench import bench_deepseek_v4 as bench
from tests.bench import deepseek_v4_graphs
from tests.kernels.emulator import needs_compiler
from worker.models.deepseek_v4_config import DeepseekV4Config


def test_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    records, threads = tmp_path / "records.jsonl", torch.get_num_threads()
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "WARM_UPS", 0)
    monkeypatch.setattr(
        sys, "argv", ["bench", "--device", "cpu", "--only", "eager", "--batches", "1,3", "--records", str(records)]
    )
    torch.set_num_threads(1)
    try:
        with pytest.raises(SystemExit) as status:
            bench.main()
    finally:
        torch.set_num_threads(threads)
    assert status.value.code == 0
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    by_case = {line["case"]: line for line in lines}
    kinds = [f"decode-{kind}-b3-1k" for kind in ("swa", "csa", "hca", "step")]
    assert {*kinds, *(f"{kind}-blocks-end" for kind in kinds)} <= set(by_case)
    assert all(by_case[kind]["value"] > by_case[kind]["floor"] > 0 for kind in kinds)


@needs_compiler
@pytest.mark.slow
def test_captured_steps_are_compared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, few in (("COMPARED", 2), ("LOOPED", 1)):
        monkeypatch.setattr(deepseek_v4_graphs, name, few)
    asked = ["bench", "--device", "cpu", "--only", "graphs", "--batches", "3", "--tokens", "512", "--layers", "4"]
    monkeypatch.setattr(sys, "argv", asked)
    with pytest.raises(SystemExit) as status:
        bench.main()
    assert status.value.code == 0
    equal, timed = [json.loads(line) for line in capsys.readouterr().out.splitlines() if "graphs-" in line]
    assert (equal["case"], timed["case"]) == ("graphs-equal-b3-512", "graphs-b3-512")
    assert equal["passed"] and not equal["tokens_parted"] and timed["fine"]


def test_bytes_of_flash() -> None:
    """Figures of the model's specification: 6,880 B a token of compressed rows, 1,024 B of each layer's raw row."""
    flash = DeepseekV4Config.parse(bench.FLASH)
    by_mode = {name: found["value"] for name, found in bench.bytes_per_token(flash)}
    assert by_mode["window"] == 6880 and by_mode["dense"] == 6880 + 43 * 1024
    assert by_mode["fp8"] == 6880 + 43 * 590 and by_mode["turboquant-tq4"] == 6880 + 43 * 260
    assert bench.kv_bytes_read(flash, 4, 131072) == 2 * ((128 + 512) * 512 + 32768 * 128)
    assert bench.kv_bytes_read(flash, 128, 131072) == 2 * (128 + 1024) * 512
    weights = bench.LayerBytes.of(flash, 4)
    assert weights.expert == 2 * 3 * 4096 * 2048
    layers = range(flash.num_layers)
    whole = sum(bench.LayerBytes.of(flash, layer).always for layer in layers) + 43 * 256 * weights.expert
    assert whole / 2 == pytest.approx(284e9, rel=0.02)
