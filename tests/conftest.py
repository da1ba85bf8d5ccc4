"""Shared by all kinds of tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import structlog

from protos import logs

if TYPE_CHECKING:
    from tests.e2e.cluster import ClusterProcess

# Without it structlog's default renders every local variable of a traceback: slow, and it would hide what users see.
logs.configure("test", json=True)
_LOGS = structlog.get_config()["wrapper_class"]


@pytest.fixture(autouse=True)
def _logs_as_they_were() -> Iterator[None]:
    """A command under test may have set up logging as it likes: not for the tests behind it."""
    yield
    if structlog.get_config()["wrapper_class"] is not _LOGS:
        logs.configure("test", json=True)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """Two deterministic workers on a random tiny llama, shared by e2e and load tests: starting Ray takes seconds."""
    from tests.e2e.cluster import tiny_cluster  # not for tests that need no cluster

    with tiny_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running
