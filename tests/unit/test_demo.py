"""What the demo prints: a table that a terminal of 80 columns holds, and where an answer was cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from worker.demo import Answer, _lines, _report

LONG = "Explain gravity to a child in two sentences, and then once more in the words of a pirate at sea."


def answers() -> list[Answer]:
    short = Answer("What is 2 + 2?", "4", "worker-0", 10.0, 10.0421, 10.5, 8, 36, finished=True)
    long = Answer(LONG, "It pulls", "worker-11", 10.0, 11.2346, 13.5, 64, 1042, finished=True, cut=True)
    return [short, long]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_table_fits_80_columns_and_only_prompts_are_cut(terminal: bool) -> None:
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal, no_color=True, color_system=None, highlight=False)
    _report(console, answers(), 3.5, "9 of 4096 pages at once (0.7 MiB, 128 tokens each)")
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    header, first, second = lines[1:4]
    assert header.split() == ["prompt", "worker", "in", "out", "TTFT", "ms", "tokens/s", "pages"]
    assert first.split()[-6:] == ["worker-0", "36", "8", "42", "15.3", "1"]
    assert second.split()[-6:] == ["worker-11", "1042", "64", "1235", "27.8", "9"] and "…" in second
    assert lines[4] == ""  # a row is one line
    assert lines[5].startswith("72 tokens in 3.5 s")


def test_an_answer_cut_at_the_token_limit_says_so() -> None:
    whole, cut = (_lines(answer).plain for answer in answers())
    assert whole.endswith("  4")
    assert cut.endswith("It pulls … (64 tokens)")
