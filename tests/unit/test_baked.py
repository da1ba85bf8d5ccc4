"""Memory that captured decode steps have baked in: found whole, never freed or moved, and guarded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import InternalError
from tests.unit.gpu_pair import TQ4
from tests.unit.test_decode_graphs import SHAPE
from tests.unit.tiny import Harness, request, write_model
from tests.unit.torch_step import TorchStep
from worker.baked import Baked
from worker.decode_graphs import DecodeGraphs
from worker.held import held, storages

NUM_STEPS = 240  # on a GPU, 20,000: tests/bench/engine_gpu_long.py


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Harness:
    """The engine over captured steps, run by PyTorch."""
    TorchStep(monkeypatch)
    path = write_model(tmp_path / "model", seed=5, **{**SHAPE, "num_hidden_layers": 1})
    settings: dict[str, Any] = {"dtype": "float16", "device": "cuda:0", "max_running": 4, **TQ4}
    return Harness.load(path, decode_graphs=True, **settings)


def graphs_of(harness: Harness) -> DecodeGraphs:
    decode: Any = harness.engine._runner._decode
    graphs: DecodeGraphs = decode._graphs
    return graphs


def addresses(graphs: DecodeGraphs) -> dict[str, int]:
    """By where a tensor is: looked for anew each time."""
    found = held({"layers": vars(graphs.layers), "state": vars(graphs.state)})
    return {each.name: each.what.data_ptr() for each in found if isinstance(each.what, torch.Tensor)}


def test_nothing_moves_in_many_steps_with_sequences_coming_and_going(harness: Harness) -> None:
    graphs = graphs_of(harness)
    before = addresses(graphs)
    assert graphs.baked is not None and {name for name, _ in graphs.baked.tensors} == set(before)
    for name in ("words", "step", "seen", "patches", "drawn"):
        assert f"['state']['{name}']" in before
    network, kv = harness.engine._model.network, harness.engine._held.kv
    baked = storages(dict(graphs.baked.tensors))
    assert storages(network) <= baked, "every weight"
    assert storages(vars(kv)) <= baked, "all of the arenas"

    rng = random.Random(3)
    number = 0
    while harness.engine.load().num_steps < NUM_STEPS:
        if harness.engine.load().num_running + harness.engine.load().num_waiting < 5:
            sampling: dict[str, Any] = (
                {"temperature": 0.8, "repetition_penalty": 1.2, "seed": number} if number % 3 == 1 else {}
            )
            prompt = [rng.randrange(200) for _ in range(rng.choice((3, 40, 140, 280)))]
            harness.engine.submit(request(f"r{number}", prompt, rng.randrange(5, 60), **sampling))
            number += 1
            if number % 5 == 4:
                harness.engine.abort(f"r{number - 2}")
        harness.step()
    assert number > 15
    assert addresses(graphs) == before
    graphs.baked.check()


def replaced_words(graphs: DecodeGraphs) -> None:
    graphs.state.words = graphs.state.words.clone()


def freed_words(graphs: DecodeGraphs) -> None:
    graphs.state.words.untyped_storage().resize_(0)


def dropped_logits(graphs: DecodeGraphs) -> None:
    del graphs.layers.logits


def replaced_weight(graphs: DecodeGraphs) -> None:
    layer: Any = vars(graphs.layers)["_network"].layers[0]
    vars(layer)["qkv"] = layer.qkv.clone()


def replaced_layer(graphs: DecodeGraphs) -> None:
    layers: Any = graphs.layers
    layers._network.layers[0] = layers._network.layers[0].__class__(**vars(layers._network.layers[0]))


@pytest.mark.parametrize("change", [replaced_words, freed_words, dropped_logits, replaced_weight, replaced_layer])
def test_the_next_sequence_finds_what_moved(harness: Harness, change: Any) -> None:
    harness.run(request("first", (5, 6, 7), 3))
    change(graphs_of(harness))
    harness.engine.submit(request("second", (5, 6, 7), 3))
    with pytest.raises(InternalError) as refused:
        harness.step(5)
    assert refused.value.reason == "BAKED_MOVED"


def test_graphs_captured_anew_guard_what_is_there_then(harness: Harness) -> None:
    harness.run(request("first", (5, 6, 7), 3))
    graphs = graphs_of(harness)
    before = graphs.baked
    replaced_words(graphs)
    with torch.inference_mode():
        graphs.capture()
    assert before is not None and not before.tensors and graphs.baked is not None
    graphs.baked.check()


def test_it_cannot_be_released_while_a_graph_lives() -> None:
    words = torch.zeros(4)
    baked = Baked(words=words)
    with pytest.raises(InternalError) as refused:
        baked.release()
    assert refused.value.reason == "BAKED_IN_USE"
    baked.end()
    baked.release()
    assert not baked.tensors
