"""Who may ask for which width: every refusal has its own name and its own message."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kernels import widths
from kernels.cells import ARCHES
from kernels.errors import (
    ArgumentError,
    KernelError,
    MixedWidthsError,
    UncompiledWidthError,
    UnmeasuredDefaultError,
    WidthError,
)

RESULTS = Path(__file__).parents[1] / "bench" / "results"


def test_presets_have_the_bits_of_their_names() -> None:
    assert {name: (p.key_bits, p.value_bits) for name, p in widths.PRESETS.items()} == {
        "tq4": (4, 4),
        "tq4v3": (4, 3),
        "tq3": (3, 3),
        "tq3v2": (3, 2),
    }


@pytest.mark.parametrize("width", widths.COMPILED_WIDTHS)
@pytest.mark.parametrize("name", widths.PRESETS)
def test_compiled_widths_may_be_asked_for_by_name(width: int, name: str) -> None:
    assert widths.require_explicit(name, width, width).name == name


@pytest.mark.parametrize(
    ("key", "value", "error", "words"),
    [
        (96, 128, UncompiledWidthError, ["key width 96", "64, 128, 256, 512", "mode dense"]),
        (128, 80, UncompiledWidthError, ["value width 80", "64, 128, 256, 512"]),
        (192, 128, UncompiledWidthError, ["key width 192"]),
        (256, 512, MixedWidthsError, ["key width 256, value width 512", "equal widths"]),
    ],
)
def test_keys_and_values_are_refused_apart(key: int, value: int, error: type[KernelError], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        widths.require_explicit("tq4", key, value)
    assert type(caught.value) is error
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_default_never_picks_the_unmeasured_and_says_how_to_opt_in(monkeypatch: pytest.MonkeyPatch) -> None:
    run = widths.Measurement("sm_90a", 128, "tq4", "machine-attention-2026-12-01.jsonl")
    monkeypatch.setattr(widths, "MEASURED", (run,))
    assert widths.require_default("tq4", 128, 128, "sm_90a").name == "tq4"
    for name, width, arch in (("tq4", 64, "sm_90a"), ("tq3", 128, "sm_90a"), ("tq4", 128, "sm_100a")):
        with pytest.raises(
            UnmeasuredDefaultError,
            match=rf"{name} at width {width} on {arch}.*tq4 at 128 on sm_90a.*preset '{name}' by name",
        ):
            widths.require_default(name, width, width, arch)
    with pytest.raises(UncompiledWidthError):
        widths.require_default("tq4", 96, 96, "sm_90a")


def test_every_measured_default_is_compiled() -> None:
    for run in widths.MEASURED:
        assert run.arch in ARCHES and run.width in widths.COMPILED_WIDTHS and run.preset in widths.PRESETS


def test_measured_is_exactly_what_the_records_show() -> None:
    """Every timed run of packed attention, and nothing else."""
    for record in {run.record for run in widths.MEASURED}:
        lines = [json.loads(line) for line in (RESULTS / record).read_text().splitlines()]
        ran = {(line["arch"], line["width"], line["mode"]) for line in lines if line.get("mode") in widths.PRESETS}
        assert ran == {(run.arch, run.width, run.preset) for run in widths.MEASURED if run.record == record}


def test_the_three_refusals_are_distinct_and_an_unknown_preset_is_a_fourth() -> None:
    refusals = (UncompiledWidthError, MixedWidthsError, UnmeasuredDefaultError)
    for one in refusals:
        assert issubclass(one, WidthError) and issubclass(one, ValueError)
        assert not any(issubclass(one, other) for other in refusals if other is not one)
    with pytest.raises(ArgumentError, match=r"tq5.*tq4, tq4v3, tq3, tq3v2"):
        widths.preset("tq5")
