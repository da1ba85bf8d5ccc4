"""An engine with packed KV over a real store process: what it says, what the store says, and the next worker's hits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore import client
from protos import types_pb2 as pb
from tests.scenarios.kvstore_process import StoreProcess
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker.engine import Engine
from worker.lasting import LastingAttachment
from worker.weights import Model, load_model


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    with StoreProcess() as process:
        yield process


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY["vocab_size"]) for _ in range(length)]


class Served(Harness):
    """A harness whose attachment is that of a store process."""

    def __init__(self, model: Model, store: StoreProcess, **settings: Any) -> None:
        config = config_for(Path("unused"), **settings)
        super().__init__(model, config)
        self.real = store.attach(
            geometry=model.geometry,
            arena_bytes=64 << 20,
            max_sequences=config.num_slots,
            max_sequence_tokens=model.info.max_sequence_tokens,
            weights_digest=model.info.weights_digest,
            checkpoint_slots=config.num_checkpoints,
        )
        lasting = LastingAttachment(self.real, config.kv_socket, 0.0, lambda away: None)
        self.engine = Engine(config, model, lasting, self._take)


@pytest.mark.parametrize("dense_layers", [(0, 0), (1, 0)])
@pytest.mark.parametrize("settings", [{"kv_mode": "turboquant"}, {"kv_mode": "fp8"}])
def test_a_store_process_serves_packed_kv(
    tmp_path: Path, store: StoreProcess, settings: dict[str, Any], dense_layers: tuple[int, int]
) -> None:
    settings = {**settings, "dense_layers": dense_layers, "deterministic": True}
    model = load_model(config_for(write_model(tmp_path, seed=4, head_dim=16), **settings))
    here = Harness(model, config_for(tmp_path, **settings))
    requests = [request(f"r{i}", prompt(i, 150 + 90 * i), 60) for i in range(4)]
    expected = here.run(*requests)

    there = Served(model, store, **settings)
    assert there.run(*requests) == expected
    packed = store.device().groups[0]
    assert (packed.mode, packed.preset) == (settings["kv_mode"], "tq4" if settings["kv_mode"] == "turboquant" else "")
    assert packed.pages_sealed_ever == there.engine.load().pages_packed > 0 and packed.pages_cached > 0
    assert client.verify(store.socket) == []

    history = [*requests[3].prompt, *expected["r3"]]
    there.run(request("next", history + prompt(9, 30), 20, reuse=pb.PREFIX_REUSE_EXACT))
    usage = there.outputs["next"][-1].usage
    assert usage is not None and usage.prefix_exact
    assert usage.cached_prompt_tokens == len(history) - 1
    there.real.close()
    del there.engine

    after = Served(model, store, **settings)
    after.run(request("r3", requests[3].prompt, 60, reuse=pb.PREFIX_REUSE_ANY))
    usage = after.outputs["r3"][-1].usage
    assert usage is not None and usage.cached_prompt_tokens > 300, "cached pages outlive the worker"
    assert store.device().prefix_tokens_reused > 300
    after.real.close()


def test_rollback_and_fork_through_a_store_process(tmp_path: Path, store: StoreProcess) -> None:
    settings: dict[str, Any] = {"kv_mode": "turboquant"}
    model = load_model(config_for(write_model(tmp_path, seed=4, head_dim=16), **settings))
    there, here = Served(model, store, **settings), Harness(model, config_for(tmp_path, **settings))
    ends = []
    for harness in (here, there):
        harness.engine._emit = lambda result: None
        harness.engine.submit(request("r", prompt(1, 180), 700))
        harness.step(350)
        (sequence,) = harness.engine._running
        with torch.inference_mode():
            assert not harness.engine.truncate(sequence, 200, next_token=3).exact
            child = harness.engine.fork(sequence, "child")
            assert child is not None
            harness.engine.truncate(child, 190, next_token=4)
        harness.step(200)
        ends.append((sequence.token_ids, child.token_ids, harness.engine.load().pages_relinked))
        for name in ("r", "child"):
            harness.engine.abort(name)
        harness.step()
    assert ends[0] == ends[1] and ends[0][2] > 0
    assert client.verify(store.socket) == []
    device = store.device()
    assert (device.truncates_deep, device.truncates_exact, device.forks, device.sequences) == (1, 1, 1, 0)
    there.real.close()
