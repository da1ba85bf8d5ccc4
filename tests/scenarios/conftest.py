"""The tiny tokenizer that routers under test use."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.tokenizer import Tokenizer
from tests.scenarios.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return write_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def text_ids(folder: Path, request: pytest.FixtureRequest) -> list[int]:
    """The token ids of the module's TEXT."""
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(request.module.TEXT)
    tokenizer.close()
    return ids
