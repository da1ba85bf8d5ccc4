"""The engine over captured decode steps against the engine without: whole lives of sequences, over the CUDA sources."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import ConfigError
from tests.kernels.emulator import needs_compiler
from tests.unit.emulated_step import EmulatedStep
from tests.unit.gpu_pair import MODES, prompt
from tests.unit.test_decode_graphs import SHAPE
from tests.unit.tiny import Harness, config_for, request, write_model
from worker import engine as engine_module
from worker import model_runner
from worker.decode_graphs import DecodeGraphs
from worker.decode_rows import DecodeRows
from worker.models.llama_fused import FusedLlama
from worker.sampler import sample

pytestmark = [needs_compiler, pytest.mark.slow]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[Harness, Harness]]:
    """The same engine without and with captured steps."""
    EmulatedStep(monkeypatch)
    monkeypatch.setattr(model_runner, "DecodeGraphs", partial(DecodeGraphs, buckets=(1, 2)))

    def make(**settings: Any) -> tuple[Harness, Harness]:
        path = write_model(tmp_path / "model", seed=5, **SHAPE)
        settings = {"dtype": "float16", "device": "cuda:0", "prefill_chunk": 256, "max_running": 4, **settings}
        return Harness.load(path, **settings), Harness.load(path, decode_graphs=True, **settings)

    return make


def rows_of(harness: Harness) -> DecodeRows:
    decode: DecodeRows | None = harness.engine._runner._decode
    assert decode is not None
    return decode


@pytest.mark.parametrize("mode", ["dense", "tq4"])
def test_sequences_of_different_lengths_come_and_go(pair: Callable[..., tuple[Harness, Harness]], mode: str) -> None:
    """Through page ends, seals, ends of sequences, and others that start meanwhile in rows of their own."""
    plain, captured = pair(**MODES[mode])
    requests = [request(f"r{i}", prompt(i, length), tokens) for i, (length, tokens) in enumerate(_LIVES)]
    want = plain.run(*requests)
    assert captured.run(*requests) == want
    rows = rows_of(captured)
    # One enters once, and once more where it moves down to a smaller graph.
    assert len(requests) <= rows.num_entered <= 2 * len(requests)
    assert len(rows._rows) <= 4 and rows._rows.keys() == {*rows._row_of.values()}


_LIVES = ((120, 20), (3, 9), (270, 12), (30, 4), (14, 16), (250, 30))


def test_sampled_sequences_and_those_that_want_logprobs(
    pair: Callable[..., tuple[Harness, Harness]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, captured = pair()
    requests = [
        request("a", prompt(1, 20), 9, temperature=0.9, seed=7, top_k=20, repetition_penalty=1.2),
        request("b", prompt(2, 30), 5, logprobs=2),
        request("c", prompt(3, 10), 12),
    ]
    want = plain.run(*requests)
    drawn_by_host = []

    def counted(logits: Any, draws: Any) -> Any:
        drawn_by_host.append(len(draws))
        return sample(logits, draws)

    monkeypatch.setattr(engine_module, "sample", counted)
    assert captured.run(*requests) == want
    # Steps with b in them, and prompts, draw on the host; the others do not.
    assert 0 < sum(drawn_by_host) < sum(len(tokens) for tokens in want.values())


def test_a_rollback_enters_anew(pair: Callable[..., tuple[Harness, Harness]]) -> None:
    tokens = []
    for harness in pair():
        harness.engine._emit = lambda result: None  # offsets go back with a rollback
        harness.engine.submit(request("r", prompt(1, 40), 999))
        harness.step(8)
        (sequence,) = harness.engine._running
        harness.engine.truncate(sequence, 42, next_token=7)
        harness.step(6)
        tokens.append(list(sequence.token_ids))
    assert tokens[0] == tokens[1]


def test_the_device_learns_what_was_sealed(pair: Callable[..., tuple[Harness, Harness]]) -> None:
    """Its tokens would not tell: the ring still holds the rows that are packed."""
    _, captured = pair(**MODES["tq4"])
    captured.engine.submit(request("r", prompt(1, 262), 999))
    captured.step(16)
    with torch.inference_mode():
        captured.engine._land_early()  # the device is a step ahead
    (sequence,) = captured.engine._running
    state = rows_of(captured)._graphs.state
    assert sequence.bases["full"] == 128
    assert state.row_words("base full", 1).tolist() == [128]
    assert state.table("full", 1)[0, :2].tolist() == [*sequence.pages["full"], -1]
    assert state.row_words("num_tokens", 1).tolist() == [len(sequence.token_ids)]


@pytest.mark.parametrize("mode", ["dense", "tq4"])
def test_prompts_by_the_steps_kernels_give_the_same_tokens(
    pair: Callable[..., tuple[Harness, Harness]], mode: str
) -> None:
    """Norms, rotary embedding and SwiGLU by the kernels against PyTorch's, chunk by chunk and in mixed company."""
    plain, fused = pair(prefill_chunk=32, **MODES[mode])
    runner: Any = fused.engine._runner
    runner._fused = FusedLlama(runner._network)
    requests = [request(f"r{i}", prompt(i, length), 3) for i, length in enumerate((40, 3, 50))]
    assert fused.run(*requests) == plain.run(*requests)


@pytest.mark.parametrize("settings", [{"device": "cpu:0"}, {"device": "cuda:0", "drafts": 1}])
def test_graphs_that_would_not_engage_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="decode_graphs would not engage"):
        config_for(tmp_path, decode_graphs=True, **settings)
