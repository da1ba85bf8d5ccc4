"""Figures in the README come from records; this compares them."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_table_of_kv_modes_is_what_the_record_says() -> None:
    readme = (ROOT / "README.md").read_text()
    (name,) = set(re.findall(r"tests/bench/results/\S+quality\S+\.jsonl", readme))
    records = [json.loads(line) for line in (ROOT / name).read_text().splitlines()]
    by_mode = {r["mode"]: r for r in records if r["edges"] == [0, 0]}
    rows = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d.]+)% \| ([\d.]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert [row[0] for row in rows] == list(by_mode)
    for mode, size, top1, kl, perplexity in rows:
        record = by_mode[mode]
        assert float(size.replace(",", "")) == record["bytes_per_token_bf16"], mode
        assert abs(float(top1) - 100 * record["top1_agreement"]) <= 0.05, mode
        assert abs(float(kl) - record["value"]) <= 5e-5, mode
        assert abs(float(perplexity) - record["perplexity"]) <= 5e-4, mode
        assert round(100 * record["rows_read_packed_share"]) in (0, 82), mode


def test_the_table_of_kernels_is_what_the_record_says() -> None:
    readme = (ROOT / "README.md").read_text()
    (name,) = set(re.findall(r"tests/bench/results/h200-kernels-\S+\.jsonl", readme))
    records = {r["case"]: r for r in map(json.loads, (ROOT / name).read_text().splitlines())}
    rows = re.findall(r"^\| (decode-\w+) \| .+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", readme, re.MULTILINE)
    assert len(rows) == 6
    for case, rival_ms, ms, times in rows:
        record = records[case]
        assert abs(float(rival_ms) - record["rival_value"]) <= 5e-4, case
        assert abs(float(ms) - record["value"]) <= 5e-4, case
        assert abs(float(times) - record["rival_value"] / record["value"]) <= 0.05, case


def test_it_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
