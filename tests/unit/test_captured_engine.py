"""The engine over captured decode steps, by PyTorch: deterministic mode, and the host a step behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import PreconditionFailed
from tests.unit.gpu_pair import MODES, prompt
from tests.unit.test_decode_graphs import SHAPE
from tests.unit.tiny import Harness, request, write_model
from tests.unit.torch_step import TorchLayers, TorchStep
from worker.decode_rows import DecodeRows

_LIVES = ((120, 20), (3, 9), (270, 12), (30, 4), (14, 16), (250, 30))


def rows_of(harness: Harness) -> DecodeRows:
    decode: DecodeRows | None = harness.engine._runner._decode
    assert decode is not None
    return decode


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Harness]:
    """Deterministic mode over captured steps."""
    TorchStep(monkeypatch)
    path = write_model(tmp_path / "model", seed=5, **SHAPE)

    def make(**settings: Any) -> Harness:
        more = {"dtype": "float16", "device": "cuda:0", "max_running": 4, "deterministic": True, **settings}
        return Harness.load(path, decode_graphs=True, **more)

    return make


@pytest.mark.parametrize("mode", ["dense", "tq4"])
def test_deterministic_tokens_are_the_same_alone_batched_forked_and_computed_again(
    deterministic: Callable[..., Harness], mode: str
) -> None:
    requests = [request(f"r{i}", prompt(i, length), tokens) for i, (length, tokens) in enumerate(_LIVES[:4])]
    alone = deterministic(**MODES[mode])
    want = {name: tokens for each in requests for name, tokens in alone.run(each).items()}

    batched = deterministic(**MODES[mode])
    assert batched.run(*requests) == want
    # Prompts are computed by tiles, all that is behind them by captured steps.
    assert rows_of(batched).num_entered == len(requests)

    again = deterministic(**MODES[mode])
    cut = 7
    for each in requests:
        again.engine.submit(
            request(each.request_id, each.prompt, each.stop.max_tokens, emitted=want[each.request_id][:cut])
        )
    again.run()
    assert {each.request_id: again.tokens(each.request_id) for each in requests} == {
        name: tokens[cut:] for name, tokens in want.items()
    }

    forked = deterministic(**MODES[mode])
    forked.engine.submit(requests[0])
    forked.step(4)
    (parent,) = forked.engine._running
    with torch.inference_mode():
        assert forked.engine.fork(parent, "fork") is not None
    cut = len(forked.tokens("r0"))
    forked.engine.submit(requests[1])
    tokens = forked.run()
    assert forked.tokens("r0") == want["r0"] and forked.tokens("fork") == want["r0"][cut:] and not tokens


def test_deterministic_tokens_are_the_same_after_a_drop(deterministic: Callable[..., Harness]) -> None:
    requests = [request(f"r{i}", prompt(i, 10), 400) for i in range(3)]
    want = {name: tokens for each in requests for name, tokens in deterministic().run(each).items()}
    scarce = deterministic(admission="recompute", num_pages=10)
    assert scarce.run(*requests) == want
    assert scarce.engine.load().sequences_recomputed > 0


def test_rows_are_proved_before_the_worker_is_ready(
    deterministic: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    deterministic().engine.warm_up()
    right = TorchLayers.run

    def wrong(layers: TorchLayers, rows: int, reach: int) -> None:
        right(layers, rows, reach)
        layers.logits[rows - 1] *= 1 + 2**-20  # of a row in the last place

    monkeypatch.setattr(TorchLayers, "run", wrong)
    harness = deterministic()
    with pytest.raises(PreconditionFailed) as refused:
        harness.engine.warm_up()
    assert refused.value.reason == "NOT_DETERMINISTIC"
