"""`tailpack kernels profile`: what it makes of the CTAs' slots, and what it says without a GPU."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kernels import phase_profile
from kernels.cells import AttentionVariant, packed_cell, rows_cell
from kernels.cli import kernels_group
from kernels.decode import DecodeLayer
from kernels.page_codec import unpack_pages
from kernels.phase_profile import Phase, ProfileShape, summarise

VARIANT = AttentionVariant(vectors=8, profile=True)


def test_marks_count_from_the_first_start_and_idle_ctas_do_not_count() -> None:
    cell = packed_cell(128, "tq4", VARIANT)
    rows = [
        [5_000, 7_000, 8_000, 8_500, 90_000, 95_000, 99_000, 12],
        [6_000, 7_500, 0, 9_500, 80_000, 85_000, 89_000, 10],
        [0] * 8,
    ]
    phases = {phase.name: phase for phase in summarise(cell, rows)}
    assert list(phases) == ["start", "dependencies", "first_page", "tail", "producer", "consumer", "epilogue", "items"]
    assert phases["start"] == Phase("start", "mark", 0.5, 0.0, 1.0)
    assert phases["first_page"] == Phase("first_page", "mark", 3.0, 3.0, 3.0)
    assert phases["epilogue"].most == 94.0
    assert phases["items"] == Phase("items", "count", 11.0, 10.0, 12.0)
    assert summarise(cell, [[0] * 8]) == []


def test_sums_are_not_marks() -> None:
    rows = [[1_000, 2_000, 3_000, 40_000, 5_000, 60_000, 7, 0], [1_500, 2_000, 3_000, 20_000, 3_000, 50_000, 5, 0]]
    phases = {phase.name: phase for phase in summarise(rows_cell(64, "fp8", VARIANT), rows)}
    assert list(phases) == ["start", "dependencies", "first_unit", "attend", "combine", "end", "units"]
    assert phases["attend"] == Phase("attend", "sum", 30.0, 20.0, 40.0)
    assert phases["end"].most == 59.0


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(kernels_group, ["profile"])
    assert result.exit_code == 2
    assert "no CUDA device" in result.output


def test_the_table_and_the_json(monkeypatch: pytest.MonkeyPatch) -> None:
    answer: dict[str, Any] = {
        "cell": "c",
        "device": "d",
        "ms": 0.25,
        "ctas": 264,
        "phases": [vars(Phase("start", "mark", 0.5, 0.0, 1.0)), vars(Phase("items", "count", 3.0, 1.0, 4.0))],
    }
    asked: list[ProfileShape] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def stand_in(shape: ProfileShape, device: torch.device) -> dict[str, Any]:
        asked.append(shape)
        return answer

    monkeypatch.setattr(phase_profile, "profile", stand_in)
    text = CliRunner().invoke(kernels_group, ["profile", "--width", "64", "--shared"]).output
    assert "c on d: 250.0 us a call, 264 CTAs" in text
    assert "start                0.5       0.0       1.0  us from the first CTA's start" in text
    assert asked == [ProfileShape(width=64, shared=True)]
    assert json.loads(CliRunner().invoke(kernels_group, ["profile", "--json"]).output) == answer


@pytest.mark.parametrize(
    "shape",
    [
        ProfileShape(batch=2, tokens=300, kv_heads=2),
        ProfileShape(mode="tq3v2", width=64, batch=1, tokens=128, group=8),
        ProfileShape(mode="fp8", width=64, batch=1, tokens=128),
        ProfileShape(mode="dense", width=64, batch=1, tokens=128),
        ProfileShape(mode="tq4", width=512, batch=1, tokens=128, kv_heads=1, group=8, shared=True),
    ],
    ids=lambda shape: f"{shape.mode}-{shape.width}",
)
def test_a_profiled_layer_reads_finite_pages(monkeypatch: pytest.MonkeyPatch, shape: ProfileShape) -> None:
    of_arch = partial(DecodeLayer, arch="sm_90a")  # a CPU has none of its own
    monkeypatch.setattr(phase_profile, "DecodeLayer", of_arch)
    layer, batch = phase_profile._layer(shape, torch.device("cpu"))
    assert layer.cell.variant.endswith("-profile") and layer.cell.source in phase_profile.SLOTS
    assert sorted(batch.page_table.flatten().tolist()) == list(range(batch.page_table.numel()))
    keys, _ = phase_profile._pages(shape, 3, torch.device("cpu"))
    rows = keys if isinstance(keys, torch.Tensor) else unpack_pages(torch.arange(3), *keys, torch.float32)
    assert bool(rows.isfinite().all()) and bool((rows != 0).any())
