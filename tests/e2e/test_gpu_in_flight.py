"""The script that watches memory behind a process's end, small and on a CPU: it passes, and it can fail."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.e2e import gpu_in_flight


def one_death() -> dict[str, Any]:
    return gpu_in_flight.run_case("cpu:0", "kernel", 1, 0.2, time.monotonic() + 60, seed=0)


def test_nothing_changes_behind_the_end_of_the_writer() -> None:
    found = one_death()
    assert found["passed"], found
    assert found["deaths"][0]["words_moving_before"] > 0


def test_a_writer_that_lives_on_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_in_flight.Writer, "is_gone", lambda writer: True)
    monkeypatch.setattr(gpu_in_flight, "DEADLY", 0)  # reaches nobody
    found = one_death()
    assert not found["passed"] and found["deaths"][0]["samples_that_differed_after"] > 0, found
