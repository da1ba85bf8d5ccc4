"""200 deaths of stores, workers and routers at random moments, without Ray; `make chaos` deals 1,800."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.run import Round, play
from tests.chaos.zygote import Zygote

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    with Zygote() as running:
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize(
    ("kind", "blows"),
    [
        ("dense", 50),
        ("dense*2", 25),
        ("dense*2+2", 25),
        ("recompute", 30),
        ("turboquant", 40),
        ("turboquant*2", 20),
        ("v4", 10),
    ],
)
async def test_every_stream_is_what_it_would_have_been(zygote: Zygote, models: Path, kind: str, blows: int) -> None:
    wanted = Round(kind, random.randrange(1 << 32), blows)
    print(f"again: python -m tests.chaos.run --only {wanted}")
    report = await play(zygote, wanted, models)
    print(report)
    assert report.blows >= blows
    if "+" not in kind:  # what routers went through, callers are not told
        assert report.interrupted > 0
