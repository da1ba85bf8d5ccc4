"""Shared by all kinds of tests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import structlog

from protos import logs

if TYPE_CHECKING:
    from tests.e2e.cluster import ClusterProcess

# Before anything imports torch: tiny products gain nothing from threads, and lose much where the machine is busy. A
# worker that is started takes the number that it is told.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # as in protos/cli.py
# Without it structlog's default renders every local variable of a traceback: slow, and it would hide what users see.
logs.configure("test", json=True)
# How fast this machine is fails no test; of what an example may take and draw, hypothesis has limits by default.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")
_LOGS = structlog.get_config()["wrapper_class"]


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: all files that share ``cluster`` go to one process, for each would start its own."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

    files = [path for kind in ("e2e", "load") for path in (Path(__file__).parent / kind).glob("test_*.py")]
    sharing = {path.name for path in files if re.search(r"def test_\w+\(\s*cluster:", path.read_text())}
    scheduling = LoadFileScheduling(config, log)

    def split_scope(nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "cluster" if Path(file).name in sharing else file

    scheduling._split_scope = split_scope
    return scheduling


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
