"""Who may ask for which width: every refusal has its own name and its own message."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernels import widths
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
    run = widths.Measurement(128, "tq4", "machine-attention-2026-12-01.jsonl")
    monkeypatch.setattr(widths, "MEASURED", (run,))
    assert widths.require_default("tq4", 128, 128).name == "tq4"
    for name, width in (("tq4", 64), ("tq3", 128)):
        with pytest.raises(
            UnmeasuredDefaultError, match=rf"{name} at width {width}.*tq4 at 128.*preset '{name}' by name"
        ):
            widths.require_default(name, width, width)
    with pytest.raises(UncompiledWidthError):
        widths.require_default("tq4", 96, 96)


def test_every_measured_default_is_compiled_and_on_record() -> None:
    for run in widths.MEASURED:
        assert run.width in widths.COMPILED_WIDTHS and run.preset in widths.PRESETS
        assert (RESULTS / run.record).is_file()


def test_the_three_refusals_are_distinct_and_an_unknown_preset_is_a_fourth() -> None:
    refusals = (UncompiledWidthError, MixedWidthsError, UnmeasuredDefaultError)
    for one in refusals:
        assert issubclass(one, WidthError) and issubclass(one, ValueError)
        assert not any(issubclass(one, other) for other in refusals if other is not one)
    with pytest.raises(ArgumentError, match=r"tq5.*tq4, tq4v3, tq3, tq3v2"):
        widths.preset("tq5")
