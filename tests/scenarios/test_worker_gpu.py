"""An engine on GPU memory that a store process holds: what it serves, what it leaves, and the next worker's hits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from protos import types_pb2 as pb
from tests.scenarios.fake_gpu import DEVICE, FakeGpu, Memory, attach, mappings
from tests.scenarios.kvstore_process import StoreProcess
from tests.unit.fake_gpu_kernels import FakeGpuKernels
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker import kv_moves, kv_view
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
    """A harness whose pages and tails are on the fake GPU."""

    def __init__(self, model: Model, store: StoreProcess, gpu: FakeGpu, **settings: Any) -> None:
        config = config_for(Path("unused"), device=DEVICE, **settings)
        super().__init__(model, config)
        self.gpu, self.memory = gpu, Memory(gpu)
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
        lasting = LastingAttachment(self.real, config.kv_socket, 0.0, lambda away: None)
        self.engine = Engine(config, model, lasting, self._take)


@pytest.mark.parametrize(("mode", "dense_layers"), [("turboquant", (0, 0)), ("turboquant", (1, 0)), ("fp8", (0, 0))])
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
    assert usage.cached_prompt_tokens == len(history) - 1
    fresh = Harness(model, config_for(tmp_path, device=DEVICE, **settings))
    fresh.run(*requests)
    fresh.run(request("next", history + prompt(9, 30), 20, reuse=pb.PREFIX_REUSE_EXACT))
    assert after.tokens("next") == fresh.tokens("next")
    after.real.close()


def served(tmp_path: Path, store: StoreProcess, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Served:
    """An engine whose fake GPU's ``calls`` also have a "write" for all that is asked of its memory, and a "told" for
    all that the store, or a reader of the control block, is told."""
    FakeGpuKernels(monkeypatch)
    gpu = FakeGpu()
    monkeypatch.setattr(kv_view, "memory_of", lambda device: gpu)
    settings = {"kv_mode": "turboquant", "dtype": "float16", **settings}
    model = load_model(config_for(write_model(tmp_path, seed=4, head_dim=64), device=DEVICE, **settings))
    there = Served(model, store, gpu, **settings)

    def noting(owner: object, name: str, what: str) -> None:
        real = getattr(owner, name)

        def note(*arguments: Any, **more: Any) -> Any:
            if what == "told" or owner is not kv_moves or len(list(arguments[1])):
                gpu.calls.append(what)
            return real(*arguments, **more)

        monkeypatch.setattr(owner, name, note)

    for name in ("copy_pages", "copy_tails", "refill_tails", "fill_tails"):
        noting(kv_moves, name, "write")
    noting(there.engine._runner, "run", "write")
    for name in ("open", "reserve", "seal", "truncate", "fork", "checkpoint", "release"):
        noting(there.real, name, "told")
    noting(there.real.control, "commit", "told")
    gpu.calls.clear()
    return there


@pytest.mark.parametrize("dense_layers", [(0, 0), (1, 0)])
def test_nobody_is_told_of_rows_that_a_gpu_has_not_written_yet(
    tmp_path: Path, store: StoreProcess, monkeypatch: pytest.MonkeyPatch, dense_layers: tuple[int, int]
) -> None:
    there = served(tmp_path, store, monkeypatch, dense_layers=dense_layers, prefill_chunk=512, checkpoints=2)
    there.run(*(request(f"r{i}", prompt(i, 150 + 300 * i), 60) for i in range(3)))
    history = [*prompt(2, 750), *there.tokens("r2")]
    there.run(request("next", [*history, *prompt(9, 30)], 20))
    there.run(request("refilled", [*prompt(2, 400), *prompt(9, 90)], 20, reuse=pb.PREFIX_REUSE_ANY))
    there.engine.submit(request("parent", prompt(7, 290), 80))
    there.step(10)
    (parent,) = there.engine._running
    there.engine._emit = lambda result: None  # offsets go back with a rollback
    with torch.inference_mode():
        assert there.engine.fork(parent, "child") is not None
        there.engine.truncate(parent, 291, next_token=5)
    there.step(10)
    calls = there.gpu.calls
    written = False
    for at, call in enumerate(calls):
        assert not (call == "told" and written), f"call {at}, behind {calls[max(0, at - 5) : at]}"
        written = {"write": True, "synchronize": False}.get(call, written)
    assert calls.count("told") > 100 < calls.count("write")
    there.real.close()


def test_an_engine_that_breaks_leaves_nothing_to_be_written(
    tmp_path: Path, store: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = served(tmp_path, store, monkeypatch)

    def breaks(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(there.engine._held, "keep_rows", breaks)
    there.engine.start()
    there.engine.submit(request("r", prompt(1, 40), 5))
    assert there.engine.failed.wait(60)
    calls = there.gpu.calls
    assert "write" in calls and "synchronize" in calls[calls.index("write") :]
    there.engine.stop(20)
    there.real.close()
