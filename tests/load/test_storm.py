"""A small storm in each run; `python -m tests.load.storm --full` makes a large one."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.load.storm import MARK, SMALL, check, storm


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_storm_leaves_nothing_and_shows_nobody_another_s_text(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with capture_logs() as logs:
        outcome = await storm(tmp_path, SMALL, seed)
    check(SMALL, outcome.ends)
    assert any(line["event"] == "request" for line in logs)
    told = str(logs)
    assert MARK not in told
    assert not any(token in told for token in outcome.tokens)
    assert not [line for line in logs if line["log_level"] == "error"]
