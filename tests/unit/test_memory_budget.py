"""The start-up budget of a worker on a GPU: what it plans is what is made, and it refuses what does not add up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protos import kvstore_pb2
from protos.errors import CapacityError
from tests.unit.fake_gpu_kernels import ARCH, FakeGpuKernels
from tests.unit.gpu_pair import MODES, SHAPE
from tests.unit.tiny import Harness, config_for, write_model
from worker import shell
from worker.decode_state import DecodeState
from worker.held import storages
from worker.memory_budget import ARENAS, RESERVE, Budget, planned
from worker.memory_plan import ACTIVATIONS, BUFFERS, GRAPH_POOLS, LIBRARIES, STATE, WORKSPACES, Use, total
from worker.weights import Plan

DEVICE = "cuda:GPU-0"
FREE = 8 << 30


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    FakeGpuKernels(monkeypatch)
    return write_model(tmp_path / "model", seed=3, **SHAPE)


@pytest.fixture
def plan(folder: Path) -> Callable[..., Plan]:
    def make(**settings: Any) -> Plan:
        given = {"dtype": "float16", "device": "cuda:0", "arena_bytes": 64 << 20, "max_running": 4, **settings}
        return Plan.of(config_for(folder, **given))

    return make


def budget(plan: Plan, free: int = FREE, stored: kvstore_pb2.KvStatsResponse | None = None) -> Budget:
    return planned(plan, free, ARCH, stored, DEVICE)


def sizes(found: Budget) -> dict[str, int]:
    return {use.owner: use.num_bytes for use in found.uses}


@pytest.mark.parametrize("mode", ["dense", "tq4", "fp8", "dense edges"])
def test_what_is_planned_is_what_is_made(plan: Callable[..., Plan], folder: Path, mode: str) -> None:
    settings = {"dtype": "float16", "device": "cuda:0", "max_running": 4, **MODES[mode]}
    told = sizes(budget(plan(**{**MODES[mode], "decode_graphs": True})))
    engine = Harness.load(folder, **settings).engine
    kv = storages(vars(engine.runner.kv))
    made = sum(storage.num_bytes for storage in storages(engine.runner.attention) - kv)
    # A dense group without pages of its own brings one that is never read, and the buffer is aligned.
    assert 0 <= made - told[WORKSPACES] < 64 << 10, (made, told[WORKSPACES])
    geometry = engine._model.geometry
    state = DecodeState(geometry, engine._model.info.vocab_size, 4, 1024, torch.device("cpu"))
    assert told[STATE] == state.num_bytes
    assert told[BUFFERS] > 0 and told[GRAPH_POOLS] > 0 and told[ACTIVATIONS] > 0 and told[RESERVE] > 0
    assert told[ARENAS] >= 64 << 20
    assert told[LIBRARIES] == 4 * (32 << 20), "graphs of 1, 2 and 4 sequences, and the eager step"


def test_without_captured_steps_nothing_is_planned_for_them(plan: Callable[..., Plan]) -> None:
    told = sizes(budget(plan()))
    assert not {STATE, BUFFERS, GRAPH_POOLS} & set(told) and WORKSPACES in told


def test_the_largest_step_is_planned_for_at_the_chunk_that_is_computed(plan: Callable[..., Plan]) -> None:
    named = {chunk: planned_activations(plan(prefill_chunk=chunk, decode_graphs=True)) for chunk in (0, 256, 1024)}
    assert named[0] == named[1024] > named[256]


def planned_activations(of: Plan) -> int:
    """Beside what reading a weight takes, which tiny models' steps do not reach."""
    return sizes(planned(replace(of, uses=(*of.uses[:-1], Use("reading", 0))), FREE, ARCH, None, DEVICE))[ACTIVATIONS]


def test_it_is_refused_with_the_table_where_it_does_not_add_up(plan: Callable[..., Plan]) -> None:
    fits = budget(plan())
    replace(fits, room=total(fits.uses)).demand()
    with pytest.raises(CapacityError) as refused:
        replace(fits, room=total(fits.uses) - 1).demand()
    assert refused.value.reason == "MEMORY_BUDGET"
    for owner in ("weights", ARENAS, WORKSPACES, ACTIVATIONS, RESERVE, "in all"):
        assert owner in str(refused.value)
    with pytest.raises(CapacityError) as refused:
        budget(plan(), free=1000)
    assert refused.value.reason == "MODEL_TOO_LARGE"


def test_a_worker_draws_its_budget_up_before_it_reads_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("weights are read before the budget adds up")

    monkeypatch.setattr(shell, "prepare", never)
    monkeypatch.setattr(shell, "store_name", lambda device: DEVICE)
    monkeypatch.setattr(shell, "torch_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(shell, "arch_of", lambda device: ARCH)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    config = config_for(folder, dtype="float16", device="cuda:0", arena_bytes=64 << 20)
    with pytest.raises(CapacityError) as refused:
        asyncio.run(shell.serve(config, "127.0.0.1:0", asyncio.Event(), on_ready=never))
    assert refused.value.reason == "MEMORY_BUDGET"


def test_what_the_kvstore_holds_for_the_worker_is_not_asked_for_twice(plan: Callable[..., Plan]) -> None:
    stored = kvstore_pb2.KvStatsResponse(
        devices=[
            kvstore_pb2.DeviceStats(device=DEVICE, groups=[kvstore_pb2.GroupStats(arena_bytes=5 << 20)] * 2),
            kvstore_pb2.DeviceStats(device="cuda:GPU-1", groups=[kvstore_pb2.GroupStats(arena_bytes=7 << 20)]),
        ],
        weights=[kvstore_pb2.WeightsStats(memory=DEVICE, num_bytes=3 << 20)],
    )
    assert budget(plan(), stored=stored).room == FREE + (13 << 20)


def test_what_is_left_after_the_start_must_do_for_the_largest_step() -> None:
    found = Budget((Use("weights", 100 << 20), Use(ACTIVATIONS, 50 << 20)), 200 << 20)
    found.demand_measured(30 << 20, 20 << 20, [("weights", 100 << 20)])
    with pytest.raises(CapacityError) as refused:
        found.demand_measured(30 << 20, (20 << 20) - 1, [("weights", 100 << 20), ("unknown", 70 << 20)])
    assert refused.value.reason == "MEMORY_BUDGET"
    for word in ("planned: weights 100.0 MiB", "measured: weights 100 MiB, unknown 70 MiB", "50 MiB left"):
        assert word in str(refused.value)
