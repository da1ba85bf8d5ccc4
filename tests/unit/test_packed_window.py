"""The load-bearing promise: inside a model window of at most 256 tokens, attention reads what a dense cache gives it.

A window of 128 tokens, one head of width 512. A prompt and 400 decode steps, with rollbacks inside the margin after
which other tokens follow. What attention reads is compared byte for byte with an oracle that keeps every row as it was
computed, and logits bit for bit with mode dense through the same attention code.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker.batch import Place, Span
from worker.kv_view import KvView, RegionView
from worker.models import attention
from worker.sequence import Sequence, StepResult
from worker.weights import load_model

WINDOW = 128
MODES: dict[str, dict[str, Any]] = {
    "tq4": {"kv_mode": "turboquant"},
    "tq3v2": {"kv_mode": "turboquant", "kv_preset": "tq3v2"},
    "fp8": {"kv_mode": "fp8"},
    "window": {"kv_mode": "window"},
}
VOCAB = TINY["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        tmp_path_factory.mktemp("model"),
        seed=6,
        model_type="mistral",
        sliding_window=WINDOW,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=512,
    )


class Walk(Harness):
    """One sequence whose steps are driven by hand. Records what attention reads and every row of logits."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
        config = config_for(folder, **changes)
        super().__init__(load_model(config), config)
        self.logits: list[torch.Tensor] = []
        self.num_reads = 0
        self._rows: dict[tuple[int, str], torch.Tensor] = {}  # every row as it was computed, by position
        self._monkeypatch = monkeypatch
        self._real = attention.dense_rows
        run = self.engine._runner.run

        def recording(work: Any) -> Any:
            step = run(work)
            self.logits += [row.clone() for row in step.logits]
            return step

        self.engine._runner.run = recording  # type: ignore[method-assign]

    def _take(self, result: StepResult) -> None:
        """Offsets go back with a rollback."""

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            with self._monkeypatch.context() as patch:
                patch.setattr(attention, "dense_rows", self._dense_rows)
                super().step()

    def _dense_rows(
        self, kv: KvView, view: RegionView, place: Place, first: int, own: torch.Tensor, span: Span
    ) -> torch.Tensor:
        rows = self._real(kv, view, place, first, own, span)
        key = (view.region.layer, view.region.kind)
        kept = self._rows.setdefault(key, own.new_empty((1024, *own.shape[1:])))
        kept[span.start : span.start + span.num_rows] = own
        assert first == max(0, span.start - WINDOW + 1), "the whole window is read densely"
        expected = kept[first : span.start + span.num_rows]
        assert torch.equal(rows.view(torch.int32), expected.view(torch.int32)), f"{key} at {span.start} differs"
        self.num_reads += 1
        return rows

    @property
    def sequence(self) -> Sequence:
        (sequence,) = self.engine._running
        return sequence

    def walk(self, prompt: list[int], num_steps: int, seed: int) -> None:
        rng = random.Random(seed)
        self.engine.submit(request("r", prompt, 900))
        while not self.logits:
            self.step()
        for i in range(num_steps):
            if i % 23 == 22:
                length = self.sequence.num_computed
                with torch.inference_mode():
                    self.engine.truncate(self.sequence, length - rng.randrange(1, 17), rng.randrange(VOCAB))
            self.step()


@pytest.mark.parametrize(
    ("mode", "num_prompt", "chunk"),
    [("tq4", 1, 64), ("tq4", 37, 64), ("tq4", 401, 512), ("tq3v2", 260, 256), ("fp8", 130, 50), ("window", 401, 512)],
)
def test_attention_reads_what_a_dense_cache_holds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mode: str, num_prompt: int, chunk: int
) -> None:
    rng = random.Random(num_prompt)
    prompt = [rng.randrange(VOCAB) for _ in range(num_prompt)]
    walks = [Walk(folder, monkeypatch, prefill_chunk=chunk, **settings) for settings in ({}, MODES[mode])]
    for walk in walks:
        walk.walk(prompt, 400, seed=1)
    dense, packed = walks
    assert packed.sequence.token_ids == dense.sequence.token_ids
    assert len(packed.logits) == len(dense.logits) == 401 and packed.num_reads == dense.num_reads > 400 * 4
    for i, (ours, theirs) in enumerate(zip(packed.logits, dense.logits, strict=True)):
        assert torch.equal(ours, theirs), f"logits {i} differ"
    load = packed.engine.load()
    assert (load.rows_dequantised_attention, load.rows_dequantised_rollback) == (0, 0)
    assert (load.pages_packed > 0) == (mode != "window"), "the mode must have engaged"
    assert packed.attachment.verify() == []
    packed.engine.abort("r")
    packed.step()
    packed.attachment.check_empty()
