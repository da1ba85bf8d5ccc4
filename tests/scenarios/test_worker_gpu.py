"""An engine on GPU memory that a store process holds: what it serves, what it leaves, and the next worker's hits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos import types_pb2 as pb
from tests.scenarios.fake_gpu import DEVICE, FakeGpu, Memory, attach, mappings
from tests.scenarios.kvstore_process import StoreProcess
from tests.unit.fake_gpu_kernels import FakeGpuKernels
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker import kv_view
from worker.engine import Engine
from worker.weights import Model, load_model


@pytest.fixture
def store() -> Iterator[StoreProcess]:
    with StoreProcess() as process:
        yield process


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY["vocab_size"]) for _ in range(length)]


class Served(Harness):
    """A harness whose pages and tails are on the fake GPU."""

    def __init__(self, model: Model, store: StoreProcess, gpu: FakeGpu, **settings: Any) -> None:
        config = config_for(Path("unused"), device=DEVICE, **settings)
        super().__init__(model, config)
        self.memory = Memory(gpu)
        self.real = attach(
            store,
            self.memory,
            geometry=model.geometry,
            arena_bytes=64 << 20,
            max_sequences=config.num_slots,
            max_sequence_tokens=model.info.max_sequence_tokens,
            weights_digest=model.info.weights_digest,
            checkpoint_slots=config.num_checkpoints,
        )
        self.engine = Engine(config, model, self.real, self._take)


@pytest.mark.parametrize("dense_layers", [(0, 0), (1, 0)])
@pytest.mark.parametrize("mode", ["turboquant", "fp8"])
def test_the_next_worker_goes_on_in_the_memory_of_the_last(
    tmp_path: Path, store: StoreProcess, monkeypatch: pytest.MonkeyPatch, mode: str, dense_layers: tuple[int, int]
) -> None:
    FakeGpuKernels(monkeypatch)
    gpu = FakeGpu()
    monkeypatch.setattr(kv_view, "memory_of", lambda device: gpu)
    settings: dict[str, Any] = {"kv_mode": mode, "dense_layers": dense_layers, "dtype": "float16"}
    model = load_model(config_for(write_model(tmp_path, seed=4, head_dim=64), device=DEVICE, **settings))
    requests = [request(f"r{i}", prompt(i, 150 + 90 * i), 60) for i in range(4)]
    expected = Harness(model, config_for(tmp_path, device=DEVICE, **settings)).run(*requests)

    there = Served(model, store, gpu, **settings)
    assert there.run(*requests) == expected
    group, device = store.device().groups[0], store.device()
    assert (device.memory, group.mode) == ("device", mode)
    assert group.pages_sealed_ever == there.engine.load().pages_packed > 0 and group.pages_cached > 0
    assert len(there.memory.asked) == 1 and mappings() > 0
    there.real.close()
    del there

    after = Served(model, store, gpu, **settings)
    assert after.memory.asked == [], "the store has the memory already"
    history = [*requests[3].prompt, *expected["r3"]]
    after.run(request("next", history + prompt(9, 30), 20, reuse=pb.PREFIX_REUSE_EXACT))
    usage = after.outputs["next"][-1].usage
    assert usage is not None and usage.prefix_exact
    assert usage.cached_prompt_tokens == (len(history) - 1 if dense_layers == (0, 0) else 384)
    fresh = Harness(model, config_for(tmp_path, device=DEVICE, **settings))
    fresh.run(*requests)
    fresh.run(request("next", history + prompt(9, 30), 20, reuse=pb.PREFIX_REUSE_EXACT))
    assert after.tokens("next") == fresh.tokens("next")
    after.real.close()
