"""Dense edge layers beside groups with a tail: a checkpoint keeps tails and open pages, at any length."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from protos import types_pb2
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker.weights import load_model


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, TINY["vocab_size"]) for _ in range(length)]


@pytest.fixture(scope="module", params=["turboquant", "window"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=[129, 200, 256])
def window(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, window: int) -> Path:
    return write_model(
        tmp_path_factory.mktemp("model"),
        head_dim=16,
        num_hidden_layers=4,
        model_type="mistral",
        sliding_window=window,
    )


@pytest.mark.parametrize("dense_layers", [(1, 1), (1, 0)])
def test_a_prompt_of_any_length_ends_well(folder: Path, window: int, mode: str, dense_layers: tuple[int, int]) -> None:
    """Under every margin between the last page boundary and the prompt's end; and each is where others go on."""
    config = config_for(folder, kv_mode=mode, dense_layers=dense_layers, prefill_chunk=128)
    harness = Harness(load_model(config), config)
    for length in (511, 510, 470, 447, 400, 385, 384):
        harness.run(request(f"r{length}", prompt(length, length), 3))
        assert harness.reason(f"r{length}") == types_pb2.FINISH_REASON_LENGTH
    for length in (400, 384):
        ids = prompt(length, length) + prompt(1, 20)
        again = harness.run(request(f"again {length}", ids, 3, reuse=types_pb2.PREFIX_REUSE_EXACT))
        usage = harness.outputs[f"again {length}"][-1].usage
        assert len(again[f"again {length}"]) == 3 and usage is not None and usage.cached_prompt_tokens == length


def test_a_sequence_that_went_back_to_just_below_a_boundary_ends_well(tmp_path: Path) -> None:
    folder = write_model(tmp_path, head_dim=16)
    harness = Harness.load(folder, kv_mode="turboquant", dense_layers=(1, 0))
    harness.engine.submit(request("r", prompt(1, 200), 300))
    while not harness.engine._running or harness.engine._running[0].num_computed < 400:
        harness.step()
    sequence = harness.engine._running[0]
    assert sequence.bases["full"] == 256
    with torch.inference_mode():
        harness.engine.truncate(sequence, 383)
    harness.engine._emit = lambda result: harness.outputs.update(r=list(result.outputs))
    harness.engine.abort("r")
    harness.step()
    assert harness.reason("r") == types_pb2.FINISH_REASON_ABORTED
    harness.attachment.check_empty()
