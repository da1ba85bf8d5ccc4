"""The engine's benchmark runs small, so it cannot rot. No time is asserted."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from tests.bench.bench_engine import run
from tests.unit.tiny import write_model


def test_the_benchmark_runs(tmp_path: Path) -> None:
    options = argparse.Namespace(threads=1, tokens=3, prompt=8, repeats=1)
    records = run(write_model(tmp_path, vocab_size=1000), options)
    cases = {record["case"]: record for record in records}
    # Not above 0: a rate is of a difference of times, and of three tokens noise may make it negative.
    assert len(cases) == 11 and all(math.isfinite(record["value"]) for record in records)
    assert round(cases["engine_1"]["rival_value"], 3) == cases["transformers_generate_1"]["value"]
