"""The prefix benchmark runs small, so it cannot rot. No time is asserted."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.bench.bench_prefix import run
from tests.unit.tiny import write_model


def test_the_benchmark_runs(tmp_path: Path) -> None:
    options = argparse.Namespace(prefix=600, own=10, modes="dense,turboquant", threads=1, repeats=3)
    records = run(write_model(tmp_path, head_dim=16), options, "test")
    cases = {record["case"]: record for record in records}
    assert len(cases) == len(records) == 10 and all(record["value"] > 0 for record in records)
    reused = {
        case: (line["cached_prompt_tokens"], line["prefix_exact"])
        for case, line in cases.items()
        if "model" in line and "prefix_exact" in line
    }
    assert reused["dense-shared-time-to-first-token"] == ([512] * 3, [True] * 3)
    assert reused["dense-cold-time-to-first-token"] == ([0] * 3, [True] * 3)
    assert reused["turboquant-again-time-to-first-token"][0] == [609] * 3
    assert not reused["turboquant-shared-time-to-first-token"][1][0], "no checkpoint where the prefix ends, and said so"
    assert max(cases[f"dense-{case}-time-to-first-token"]["error"] for case in ("shared", "again")) < 1e-3
