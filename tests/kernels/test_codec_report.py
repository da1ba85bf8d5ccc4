"""The report's figures: section by section against what theory says, and its files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from kernels import codec_report
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS

# Normalised MSE of random unit vectors, exact codebooks, by numerical integration.
EXPECTED = {
    1: (0.35839, 0.36089, 0.36214, 0.36276),
    2: (0.11453, 0.11600, 0.11674, 0.11711),
    3: (0.03339, 0.03397, 0.03426, 0.03440),
    4: (0.00913, 0.00932, 0.00941, 0.00945),
}
PAPER = {1: 0.68018, 2: 0.17004, 3: 0.04251, 4: 0.01063}
CORRECTED_128 = {2: 0.1188, 3: 0.0338, 4: 0.0092}


@pytest.mark.parametrize("bits", EXPECTED)
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_distortion_within_two_percent(width: int, bits: int) -> None:
    line = codec_report.measure_distortion(width, bits, 8192, seed=20250425)
    expected = EXPECTED[bits][COMPILED_WIDTHS.index(width)]
    assert line.expected == pytest.approx(expected, abs=6e-6)
    assert line.floor == 4.0**-bits and line.paper_bound == pytest.approx(PAPER[bits], abs=1e-5)
    assert line.exact == pytest.approx(expected, rel=0.02)
    assert line.floor < line.exact < line.paper_bound
    if bits not in PACKED_BITS:
        assert (line.grid, line.corrected, line.cosine) == (None, None, None)
        return
    assert line.grid == pytest.approx(expected, rel=0.02)
    if width == 128:
        assert line.corrected == pytest.approx(CORRECTED_128[bits], rel=0.01)


def test_special_rows_with_and_without_signs() -> None:
    rows = codec_report.special_rows(128, seed=3)
    lines = {
        (name, bits): codec_report.measure_special(name, x, bits) for name, x in rows.items() for bits in PACKED_BITS
    }
    assert all(line.finite for line in lines.values())
    for bits, unsigned in ((4, 0.88), (3, 0.61), (2, 0.28)):
        line = lines["constant", bits]
        assert line.without_signs == pytest.approx(unsigned, abs=0.005) and line.with_signs is not None
        assert line.with_signs > {4: 0.995, 3: 0.985, 2: 0.945}[bits]
        for name in ("zero", "norm 1e-11"):
            assert lines[name, bits].exact_zero
        for name in ("norm 1e36", "norm 1e-9"):
            assert lines[name, bits].with_signs == pytest.approx(lines["random", bits].with_signs, abs=1e-5)


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_the_unbiased_variant_is_unbiased_and_noisier(bits: int) -> None:
    """Its second stage must do something: without it the slope would be that of one bit less."""
    mean, stored, qjl = codec_report.measure_inner_products(128, bits, 4096, seed=5)
    shrinkage = 1 - EXPECTED[bits][1]  # <u, c> = ||c||^2 = 1 - mse
    assert mean.slope == pytest.approx(shrinkage, abs=0.01)
    assert stored.slope == pytest.approx(shrinkage**0.5, abs=0.01)
    assert qjl.slope == pytest.approx(1, abs=0.015) and qjl.slope > 1 - EXPECTED[bits - 1][1] + 0.02
    assert qjl.rms_error > 1.5 * stored.rms_error and qjl.attention_error > stored.attention_error


def test_the_inner_product_error_is_what_the_variance_formula_gives() -> None:
    """QJL: variance of sqrt(pi/2)/d * <S q, sign(S r)> ||r|| is (pi/2 ||q||^2 ||r||^2 - <q, r>^2) / d."""
    *_, qjl = codec_report.measure_inner_products(128, 3, 8192, seed=6)
    residual = EXPECTED[2][1]
    assert qjl.rms_error == pytest.approx(((torch.pi / 2 - 1 / 128) * residual) ** 0.5, rel=0.05)


def test_the_command_prints_three_tables_and_writes_both_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(codec_report.report, ["--rows", "64", "--out", str(tmp_path)], env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    for words in (
        "Distortion of random unit vectors",
        "Special rows, width 128",
        "Inner products",
        "exact zeros",
        "QJL",
    ):
        assert words in result.output
    assert (tmp_path / "distortion.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "distortion.svg").read_text()


def test_without_matplotlib_there_are_tables_and_the_way_to_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(codec_report.report, ["--rows", "64", "--out", "plots"])
    assert result.exit_code == 0 and "Inner products" in result.output
    assert "(.venv/bin/pip install matplotlib)" in result.output and not Path("plots").exists()
    quiet = CliRunner().invoke(codec_report.report, ["--rows", "64", "--no-plot"])
    assert quiet.exit_code == 0 and "matplotlib" not in quiet.output


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_off_a_terminal_the_tables_are_80_columns_and_whole(columns: str) -> None:
    result = CliRunner().invoke(codec_report.report, ["--rows", "64", "--no-plot"], env={"COLUMNS": columns})
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in result.output
    header = ["width", "bits", "4^-b", "paper", "<=", "expected", "exact", "grid", "stored", "scale", "cosine"]
    assert header in [line.split() for line in lines]
    (row,) = (line.split() for line in lines if line.split()[:2] == ["512", "4"])
    assert row[2:5] == ["0.00391", "0.0106", "0.00945"] and len(row) == 9
