"""What a worker promises fits what it was given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.tiny import config_for, write_model
from worker.shell import _within
from worker.weights import load_model


@pytest.mark.parametrize(("num_pages", "longest"), [(3, 384), (7, 896), (8, 1024), (100, 1024)])
def test_a_sequence_is_never_longer_than_the_kv_memory(tmp_path: Path, num_pages: int, longest: int) -> None:
    model = load_model(config_for(write_model(tmp_path / "m")))
    (group,) = model.geometry.groups
    attachment: Any = SimpleNamespace(arenas={group.name: SimpleNamespace(num_pages=num_pages)})
    assert _within(model, attachment).info.max_sequence_tokens == longest
    assert model.info.max_sequence_tokens == 1024  # what the store was told
