"""Settings: unknown keys and bad values are fatal, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from protos.errors import ConfigError
from worker.config import WorkerConfig

LEAST: dict[str, Any] = {"model": "m", "name": "n", "kv_socket": "s", "worker_id": "w"}


def test_a_config_survives_its_own_dict() -> None:
    config = WorkerConfig.from_dict({**LEAST, "deterministic": "yes", "max_running": "3", "threads": 2})
    assert config.deterministic and config.max_running == 3 and config.model == Path("m") and config.num_threads == 2
    assert WorkerConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("word", ["0", "false", "No", "off", "", False])
def test_off_is_off(word: object) -> None:
    assert not WorkerConfig.from_dict({**LEAST, "deterministic": word}).deterministic


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_runing": 3}, "max_runing"),
        ({"max_running": 0}, "max_running"),
        ({"max_running": "many"}, "max_running"),
        ({"max_running": 2.5}, "max_running"),
        ({"threads": -1}, "threads"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"deterministic": "perhaps"}, "deterministic"),
        ({"dtype": "int8"}, "dtype"),
        ({"kv_mode": "turboquant"}, "kv_mode"),
        ({"device": "cuda:0"}, "device"),
        ({"name": ""}, "name"),
        ({"model": None}, "model"),
    ],
)
def test_bad_values_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WorkerConfig.from_dict({**LEAST, **changes})


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="worker_id"):
        WorkerConfig.from_dict({k: v for k, v in LEAST.items() if k != "worker_id"})
