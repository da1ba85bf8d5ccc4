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
    assert config.preset == "" and config.num_slots == 4
    packed = WorkerConfig.from_dict({**LEAST, "kv_mode": "turboquant", "dense_layers": "1,2", "admission": "recompute"})
    assert packed.preset == "tq4" and packed.dense_layers == (1, 2) and packed.num_slots == 17
    assert WorkerConfig.from_dict(packed.to_dict()) == packed


@pytest.mark.parametrize("device", ["cpu:0", "cpu:12", "cuda:0", "cuda:GPU-0b1c2d3e-0000-1111-2222-333344445555"])
def test_devices(device: str) -> None:
    assert WorkerConfig.from_dict({**LEAST, "device": device}).on_gpu == device.startswith("cuda")


@pytest.mark.parametrize(("decode_graphs", "tokens"), [(False, 256), (True, 1024)])
def test_a_step_computes_more_of_a_prompt_where_decode_steps_are_captured(decode_graphs: bool, tokens: int) -> None:
    given = {**LEAST, "device": "cuda:0", "decode_graphs": decode_graphs}
    assert WorkerConfig.from_dict(given).chunk_tokens == tokens
    assert WorkerConfig.from_dict({**given, "prefill_chunk": "300"}).chunk_tokens == 300


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
        ({"prefill_chunk": -1}, "prefill_chunk"),
        ({"deterministic": "perhaps"}, "deterministic"),
        ({"dtype": "int8"}, "dtype"),
        ({"kv_mode": "int4"}, "kv_mode"),
        ({"kv_mode": "turboquant", "kv_preset": "tq5"}, "kv_preset"),
        ({"kv_mode": "fp8", "kv_preset": "tq4"}, "kv_preset"),
        ({"kv_mode": "window", "checkpoints": 0}, "would switch prefix reuse off.*PREFIX_REUSE_OFF"),
        ({"kv_mode": "turboquant", "dense_layers": "2"}, "dense_layers"),
        ({"kv_mode": "turboquant", "dense_layers": "2,many"}, "dense_layers"),
        ({"admission": "hope"}, "admission"),
        ({"device": "cuda:"}, "device"),
        ({"device": "gpu:0"}, "device"),
        ({"device": "cuda:GPU-1"}, "device"),
        ({"device": "cuda:0 "}, "device"),
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
