"""Captured decode steps against the engine's own, over the CUDA sources on a CPU; a graph is a row of launches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import InternalError
from tests.kernels.emulator import needs_compiler
from tests.unit.emulated_step import EmulatedStep
from tests.unit.gpu_pair import MODES, prompt
from tests.unit.tiny import Harness, request, write_model
from worker.decode_graphs import DecodeGraphs
from worker.decode_state import MAX_PATCHES, DecodeState, RowStart
from worker.models.llama import Llama
from worker.sequence import Sampling, Sequence

pytestmark = [needs_compiler, pytest.mark.slow]
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
NUM_STEPS = 12


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> EmulatedStep:
    return EmulatedStep(monkeypatch)


@pytest.fixture
def harness(kernels: EmulatedStep, tmp_path: Path) -> Callable[..., Harness]:
    def make(model: dict[str, Any] | None = None, **settings: Any) -> Harness:
        path = write_model(tmp_path / "model", seed=5, **{**SHAPE, **(model or {})})
        # In float16 fewer tokens hang on a rounding that may go either way.
        settings = {"dtype": "float16", "device": "cuda:0", "prefill_chunk": 512, **settings}
        return Harness.load(path, **settings)

    return make


def graphs_of(harness: Harness, **options: Any) -> DecodeGraphs:
    runner: Any = harness.engine._runner
    network = harness.engine._model.network
    assert isinstance(network, Llama)
    settings = {"max_sequences": 4, "max_sequence_tokens": 1024, "buckets": (1, 2, 4), **options}
    graphs = DecodeGraphs(network, runner.kv, runner._attend, **settings)
    graphs.capture()
    return graphs


def started(harness: Harness, lengths: tuple[int, ...], **sampling: Any) -> list[Sequence]:
    """Sequences with their prompts computed and one token drawn."""
    for i, length in enumerate(lengths):
        harness.engine.submit(request(f"r{i}", prompt(i, length), 100, **{**sampling, "seed": 5 + i}))
    while not all(len(harness.outputs.get(f"r{i}", ())) == 1 for i in range(len(lengths))):
        harness.step()
        assert all(len(outputs) <= 1 for outputs in harness.outputs.values()), "all prompts end in one step"
    return sorted(harness.engine._running, key=lambda sequence: sequence.request.request_id)


def enter(graphs: DecodeGraphs, harness: Harness, row: int, sequence: Sequence, limit: int = 1 << 20) -> None:
    """With a page more of each dense group, which no sequence has."""
    pages = {name: list(ids) for name, ids in sequence.pages.items()}
    for group in harness.engine._model.geometry.groups:
        if group.mode == "dense":
            pages[group.name].append(60 + row)
    start = RowStart(
        token=sequence.token_ids[-1],
        num_tokens=len(sequence.token_ids),
        limit=limit,
        sampling=sequence.request.sampling,
        pages=pages,
        bases=sequence.bases,
        tail_slots=sequence.tail_slots,
        seen=sequence.token_ids,
    )
    graphs.enter(row, start)


def run(graphs: DecodeGraphs, rows: int, steps: int = NUM_STEPS) -> list[list[int]]:
    """The tokens of each row, read a step late."""
    said: list[list[int]] = [[] for _ in range(rows)]
    with torch.inference_mode():
        for _ in range(steps):
            step = graphs.launch(rows)
            if step > 1:
                for row, token in enumerate(graphs.tokens(step - 1)):
                    said[row].append(token)
        for row, token in enumerate(graphs.tokens(step)):
            said[row].append(token)
    return said


@pytest.mark.parametrize("few_rows", [8, 0])
@pytest.mark.parametrize("mode", ["dense", "tq4", "fp8", "dense edges"])
def test_greedy_tokens_are_the_engines(harness: Callable[..., Harness], mode: str, few_rows: int) -> None:
    lengths = (122, 300, 5)
    reference = harness(**MODES[mode])
    started(reference, lengths)
    reference.step(NUM_STEPS)
    want = [reference.tokens(f"r{i}")[1 : 1 + NUM_STEPS] for i in range(len(lengths))]

    ours = harness(**MODES[mode])
    sequences = started(ours, lengths)
    graphs = graphs_of(ours, few_rows=few_rows)
    for row, sequence in enumerate(sequences):
        enter(graphs, ours, row, sequence)
    assert run(graphs, len(lengths)) == want


@pytest.mark.parametrize(
    "model",
    [
        {"model_type": "qwen2"},
        {"model_type": "qwen3", "head_dim": 64},
        {"model_type": "mistral", "sliding_window": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("few_rows", [8, 0])
def test_the_whole_family(harness: Callable[..., Harness], model: dict[str, Any], few_rows: int) -> None:
    mode = {"kv_mode": "window"} if "sliding_window" in model else {}
    reference, ours = harness(model, **mode), harness(model, **mode)
    started(reference, (40, 90))
    reference.step(NUM_STEPS)
    graphs = graphs_of(ours, few_rows=few_rows)
    for row, sequence in enumerate(started(ours, (40, 90))):
        enter(graphs, ours, row, sequence)
    assert run(graphs, 2) == [reference.tokens(f"r{i}")[1 : 1 + NUM_STEPS] for i in range(2)]


def test_sampled_tokens_are_the_engines(harness: Callable[..., Harness]) -> None:
    sampling = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.3}
    reference, ours = harness(), harness()
    started(reference, (30, 60), **sampling)
    reference.step(NUM_STEPS)
    graphs = graphs_of(ours, few_rows=0)
    for row, sequence in enumerate(started(ours, (30, 60), **sampling)):
        enter(graphs, ours, row, sequence)
    assert run(graphs, 2) == [reference.tokens(f"r{i}")[1 : 1 + NUM_STEPS] for i in range(2)]


def test_rows_come_and_go(harness: Callable[..., Harness]) -> None:
    """A row that ends or leaves draws nothing more, and hurts nobody; another takes its place."""
    reference = harness()
    started(reference, (20, 33, 47))
    reference.step(NUM_STEPS)
    want = [reference.tokens(f"r{i}")[1:] for i in range(3)]
    ours = harness()
    sequences = started(ours, (20, 33, 47))
    graphs = graphs_of(ours)
    enter(graphs, ours, 0, sequences[0], limit=len(sequences[0].token_ids) + 1)
    enter(graphs, ours, 1, sequences[1])
    assert run(graphs, 2, 4) == [[*want[0][:2], -1, -1], want[1][:4]]
    graphs.leave(1)
    enter(graphs, ours, 0, sequences[2])
    found = [graphs.tokens(graphs.launch(2)) for _ in range(2)]
    assert found == [[want[2][0], -1], [want[2][1], -1]]


def test_a_step_of_few_rows_makes_few_launches(harness: Callable[..., Harness], kernels: EmulatedStep) -> None:
    ours = harness()
    (sequence,) = started(ours, (20,))
    graphs = graphs_of(ours)
    enter(graphs, ours, 0, sequence)
    before = sum(kernels.launches.values())
    run(graphs, 1, 1)
    layers = SHAPE["num_hidden_layers"]
    assert sum(kernels.launches.values()) - before == 4 * layers + 4  # begin, embed, the first product, sample


@pytest.mark.parametrize("tied", [False, True])
def test_block_weights_are_what_is_read(harness: Callable[..., Harness], tied: bool) -> None:
    """Logits of few rows by codes and of few and many by weights made anew are alike, and near those of bf16."""
    model = {"hidden_size": 128, "intermediate_size": 128, "tie_word_embeddings": tied}
    ours = harness(model, dtype="bfloat16")
    (sequence,) = started(ours, (20,))
    network = ours.engine._model.network
    assert isinstance(network, Llama)
    found = {}
    for name, few_rows in (("bf16", 8), ("codes", 8), ("anew", 0)):
        if name == "codes":
            network.use_blocks()
        graphs = graphs_of(ours, few_rows=few_rows)
        enter(graphs, ours, 0, sequence)
        run(graphs, 1, 1)
        found[name] = graphs.layers.logits[0].float()
    size = found["bf16"].norm()
    assert 0 < (found["codes"] - found["anew"]).norm() < 0.02 * size
    assert 0.01 * size < (found["codes"] - found["bf16"]).norm() < 0.4 * size


def test_large_steps_and_old_tokens_are_refused(harness: Callable[..., Harness]) -> None:
    graphs = graphs_of(harness())
    with pytest.raises(InternalError, match="more rows"):
        graphs.launch(5)
    with pytest.raises(InternalError, match="not kept"):
        graphs.tokens(3)


def test_many_patches_and_long_tables(harness: Callable[..., Harness]) -> None:
    geometry = harness().engine._model.geometry
    state = DecodeState(geometry, 211, 3, 128 * 3000, torch.device("cpu"))
    pages = {"full": list(range(7, 3007))}
    start = RowStart(9, 400, 500, Sampling(temperature=0.5, seed=(1 << 63) + 3), pages, {}, {})
    for row in (0, 2):
        state.enter(row, start)
    assert state.next_step() == 1
    slot = state.patches[1]
    assert slot[0] == MAX_PATCHES
    for at, value in slot[1:].view(-1, 2).tolist():  # as the kernel does
        state.words[at] = value
    assert state.table("full", 3)[[0, 2]].tolist() == [pages["full"]] * 2 and (state.table("full", 3)[1] == -1).all()
    drawn = state.sampling(3)
    assert drawn.temperature.tolist() == [0.5, 0.0, 0.5] and drawn.num_tokens.tolist() == [400, 0, 400]
    assert [word & 0xFFFFFFFF for word in drawn.seed[2].tolist()] == [3, 1 << 31]
    with pytest.raises(InternalError, match="more pages"):
        state.set_pages(0, "full", 2999, [1, 2])
