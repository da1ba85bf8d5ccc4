"""20 deaths in a whole cluster at random moments, with warm standbys or without; `make chaos` deals 200."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.chaos.cluster_chaos import kind_of
from tests.chaos.run import Round, play

NUM_BLOWS = 20


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_every_stream_of_a_cluster_is_what_it_would_have_been(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    wanted = Round(kind_of(seed), seed, NUM_BLOWS)
    print(f"again: python -m tests.chaos.run --only {wanted}")
    report = await play(None, wanted, tmp_path)
    print(report)
    assert report.blows >= NUM_BLOWS
