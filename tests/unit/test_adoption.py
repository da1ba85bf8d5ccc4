"""A worker that is killed at any point of a step, and the one after it: the same tokens, nothing computed twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.unit.lives import Lives
from tests.unit.tiny import Harness, config_for, request, write_model
from worker.sequence import Request
from worker.weights import Model, load_model

MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "turboquant": {"kv_mode": "turboquant"},
    "turboquant with dense edges": {"kv_mode": "turboquant", "dense_layers": (1, 0)},
    "fp8": {"kv_mode": "fp8"},
    "window": {"kv_mode": "window"},
}
SLIDING = {"model_type": "mistral", "sliding_window": 64}
SETTINGS: dict[str, Any] = {"deterministic": True, "max_running": 4}


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 97) for _ in range(length)]


def requests() -> list[Request]:
    """One queues behind four. Prompts of several chunks, and of one; lengths that seal while they decode."""
    return [
        request("long", prompt(1, 402), 9),
        request("border", prompt(2, 270), 12),
        request("short", prompt(3, 5), 30),
        request("sampled", prompt(4, 130), 20, temperature=1.0, seed=7, repetition_penalty=1.2),
        request("queued", prompt(5, 300), 6),
    ]


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mode: str) -> Path:
    changes = SLIDING if mode == "window" else {}
    return write_model(tmp_path_factory.mktemp("model"), seed=8, **changes)


@pytest.fixture(scope="module")
def model(folder: Path, mode: str) -> Model:
    return load_model(config_for(folder, **MODES[mode]))


@pytest.fixture(scope="module")
def undisturbed(model: Model, folder: Path) -> dict[str, list[int]]:
    return Harness(model, config_for(folder, **SETTINGS), num_pages=64).run(*requests())


@pytest.mark.parametrize("seed", range(6))
def test_many_deaths_change_no_token(
    model: Model, folder: Path, undisturbed: dict[str, list[int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    lives = Lives(model, config_for(folder, **SETTINGS), monkeypatch, seed=seed)
    lives.points.kill = lambda number, name: rng.random() < 0.02
    tokens = lives.run(*requests())
    assert lives.num_lives > 5
    assert tokens == undisturbed, f"seed {seed}, killed at {lives.killed_at}"
