"""`tailpack up` on GPUs, before anything starts: which it takes, and what it refuses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from protos.errors import CapacityError, ConfigError
from tests.unit.block_checkpoint import write_blocks
from tests.unit.tiny import write_model
from worker import cluster_config, demo
from worker.actor import actor_options
from worker.cli import demo as demo_command
from worker.cluster_config import (
    DEFAULT_GPU_ARENA_BYTES,
    GPU_HEADROOM_BYTES,
    ClusterConfig,
    arena_bytes_of,
    memory_table,
)
from worker.gpu import Gpu
from worker.memory_plan import FROM_FP8, IN_BLOCKS, total
from worker.weights import planned_uses

GPUS = tuple(Gpu(i, f"GPU-{i}0000000-1111-2222-3333-444444444444", "NVIDIA H200", 139 << 30) for i in range(2))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What there is; changed by the test."""
    there: dict[str, Any] = {"torch": True, "gpus": GPUS, "free": 100 << 30}
    monkeypatch.setattr("torch.cuda.is_available", lambda: there["torch"])
    monkeypatch.setattr(cluster_config, "visible_gpus", lambda: there["gpus"])
    monkeypatch.setattr(cluster_config, "free_bytes", lambda gpu: there["free"])
    return there


def config(model: Path, **settings: Any) -> ClusterConfig:
    return ClusterConfig.of(model=str(model), listen="127.0.0.1:0", **settings)


def test_a_gpu_is_used_where_one_is_there(model: Path, machine: dict[str, Any]) -> None:
    made = config(model, workers=2)
    assert (made.gpus, made.dtype) == (GPUS, "bfloat16")
    workers = [made.worker(i, Path("s"), 1 << 30) for i in range(2)]
    assert [w.device for w in workers] == [f"cuda:{gpu.uuid}" for gpu in GPUS]
    assert [w.gpu_uuid for w in workers] == [gpu.uuid for gpu in GPUS]
    assert [actor_options(w)["num_gpus"] for w in workers] == [1, 1]
    assert [actor_options(w, standby=True)["num_gpus"] for w in workers] == [0, 0]  # Ray knows one holder of a GPU
    assert config(model).gpus == GPUS[:1]
    assert config(model, dtype="float16").dtype == "float16"


def test_what_a_step_may_take_reaches_the_workers(model: Path, machine: dict[str, Any]) -> None:
    asked = config(model, step_time_budget_ms=30, prefill_chunk=300).worker(0, Path("s"), 1 << 30)
    assert (asked.step_time_budget_ms, asked.chunk_tokens) == (30, 300)
    unasked = config(model, decode_graphs=True).worker(0, Path("s"), 1 << 30)
    assert (unasked.step_time_budget_ms, unasked.chunk_tokens) == (-1, 1024)


@pytest.mark.parametrize(("device", "torch_has_one"), [("cpu", True), ("auto", False)])
def test_else_the_cpu(model: Path, machine: dict[str, Any], device: str, torch_has_one: bool) -> None:
    machine["torch"] = torch_has_one
    made = config(model, device=device, workers=3)
    assert (made.gpus, made.dtype) == ((), "float32")
    worker = made.worker(2, Path("s"), 1 << 30)
    assert (worker.device, worker.gpu_uuid, actor_options(worker)["num_gpus"]) == ("cpu:2", "", 0)


@pytest.mark.parametrize(("torch_has_one", "gpus"), [(False, GPUS), (True, ()), (False, ())])
def test_cuda_that_is_asked_for_and_not_there_is_refused(
    model: Path, machine: dict[str, Any], torch_has_one: bool, gpus: tuple[Gpu, ...]
) -> None:
    machine.update(torch=torch_has_one, gpus=gpus)
    with pytest.raises(ConfigError) as caught:
        config(model, device="cuda")
    assert caught.value.reason == "NO_GPU"


def test_more_workers_than_gpus_are_refused(model: Path, machine: dict[str, Any]) -> None:
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match="2 \\(NVIDIA H200, NVIDIA H200\\)") as caught:
            config(model, device=device, workers=3)
        assert caught.value.reason == "NOT_ENOUGH_GPUS"


def test_a_device_that_is_no_choice_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="auto, cpu, cuda"):
        config(model, device="gpu")


def test_arenas_take_what_the_fullest_gpu_has_left(model: Path, machine: dict[str, Any]) -> None:
    weights = total(planned_uses(model, "bfloat16"))
    assert arena_bytes_of(config(model)) == DEFAULT_GPU_ARENA_BYTES
    machine["free"] = GPU_HEADROOM_BYTES + weights + (4 << 30)
    assert arena_bytes_of(config(model)) == 3 << 30
    assert arena_bytes_of(config(model, kv_bytes=4 << 30)) == 4 << 30
    with pytest.raises(CapacityError, match=GPUS[0].uuid) as caught:
        config(model, kv_bytes=(4 << 30) + 1)
    assert caught.value.reason == "NOT_ENOUGH_MEMORY"
    machine["free"] = GPU_HEADROOM_BYTES + weights - 1
    with pytest.raises(CapacityError) as caught:
        config(model)
    assert caught.value.reason == "MODEL_TOO_LARGE"


def test_weights_count_as_they_will_be_held(tmp_path: Path, machine: dict[str, Any]) -> None:
    """And what would not engage is refused before anything starts."""
    folder = write_blocks(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    room = []
    for settings, owner in (
        ({"decode_graphs": True}, IN_BLOCKS),
        ({"weights": "bf16"}, FROM_FP8),
        ({}, FROM_FP8),
        ({"device": "cpu"}, FROM_FP8),
    ):
        made = config(folder, kv_bytes=1 << 20, **settings)
        (held,) = (use for use in memory_table(made, 1 << 20) if "FP8" in use.owner)
        assert held.owner == owner
        room.append(held.num_bytes)
    assert 1.9 * room[0] < room[1] == room[2] == room[3] / 2
    weights = total(planned_uses(folder, "bfloat16", captured=True))
    machine["free"] = GPU_HEADROOM_BYTES + weights + (2 << 20)
    assert arena_bytes_of(config(folder, kv_bytes=2 << 20, decode_graphs=True)) == 2 << 20
    with pytest.raises(CapacityError, match="weights"):
        config(folder, kv_bytes=2 << 20, weights="bf16")
    refused: list[dict[str, Any]] = [{"dtype": "float16", "decode_graphs": True}, {"device": "cpu", "weights": "bf16"}]
    for asked in refused:
        with pytest.raises(ConfigError) as caught:
            config(folder, **asked)
        assert caught.value.reason == "WEIGHTS_NOT_ENGAGED"


@pytest.mark.parametrize(
    ("options", "num_gpus", "workers", "kv_bytes"),
    [
        ([], 2, 2, 256 << 20),
        ([], 1, 1, 256 << 20),
        (["--device", "cpu", "--kv-mode", "turboquant"], 1, 2, 1 << 30),
        (["--workers", "1", "--kv-bytes", "2M"], 2, 1, 2 << 20),
    ],
)
def test_what_the_demo_takes_by_default(
    model: Path,
    machine: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    num_gpus: int,
    workers: int,
    kv_bytes: int,
) -> None:
    taken: list[ClusterConfig] = []

    def run(config: ClusterConfig, *_: Any) -> int:
        taken.append(config)
        return 0

    monkeypatch.setattr(demo, "run", run)
    machine["gpus"] = GPUS[:num_gpus]
    assert CliRunner().invoke(demo_command, ["--model", str(model), *options]).exit_code == 0
    assert [(config.workers, config.kv_bytes) for config in taken] == [(workers, kv_bytes)]


def test_a_demo_without_kv_memory_is_refused(model: Path, machine: dict[str, Any]) -> None:
    refused = CliRunner().invoke(demo_command, ["--model", str(model), "--kv-bytes", "0"])
    assert isinstance(refused.exception, ConfigError) and "kv_bytes is too small" in str(refused.exception)
