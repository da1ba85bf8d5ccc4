"""Deterministic mode: a sequence's tokens and logits are the same bits alone, in any company, and resumed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from kvstore.geometry import CacheGeometry, LayerGroup, Region
from protos.errors import InternalError, PreconditionFailed
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker.batch import TILE_ROWS, SpanWork, build_batch
from worker.model_runner import Step, check_tiles
from worker.models import layers
from worker.scheduler import Work
from worker.sequence import Request
from worker.weights import Model, load_model

LENGTHS = (1, 2, 7, 8, 9, 31, 64, 100, 127, 128, 129, 200, 256, 301, 402)


MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "turboquant": {"kv_mode": "turboquant"},
    "turboquant with dense edges": {"kv_mode": "turboquant", "dense_layers": (1, 0)},
    "fp8": {"kv_mode": "fp8"},
    "window": {"kv_mode": "window"},
    "window with dense edges": {"kv_mode": "window", "dense_layers": (1, 0)},
}
SLIDING = {"model_type": "mistral", "sliding_window": 64}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, mode: str) -> Path:
    changes = SLIDING if mode.startswith("window") else {}
    return write_model(tmp_path_factory.mktemp("model"), seed=8, hidden_size=96, intermediate_size=200, **changes)


@pytest.fixture(scope="module")
def model(folder: Path, mode: str) -> Model:
    return load_model(config_for(folder, **MODES[mode]))


def requests(max_tokens: int = 12) -> list[Request]:
    rng = random.Random(1)
    return [
        request(f"r{n}", [rng.randrange(TINY["vocab_size"]) for _ in range(n)], max_tokens + n % 5) for n in LENGTHS
    ]


class Recorder:
    """Keeps the logits of every (request id, position) that a harness computes."""

    def __init__(self, model: Model, folder: Path, **changes: int) -> None:
        self.harness = Harness(model, config_for(folder, **{"deterministic": True, **changes}), num_pages=200)
        self.logits: dict[tuple[str, int], torch.Tensor] = {}
        run = self.harness.engine._runner.run

        def recording(work: Sequence[Work]) -> Step:
            step = run(work)
            for row, w in enumerate(w for w in work if w.wants_logits):
                self.logits[(w.sequence.request.request_id, w.end)] = step.logits[row].clone()
            return step

        self.harness.engine._runner.run = recording  # type: ignore[method-assign]

    def same_bits(self, other: Recorder) -> None:
        for key in self.logits.keys() & other.logits.keys():
            assert torch.equal(self.logits[key], other.logits[key]), f"logits of {key} differ"


@pytest.fixture(scope="module")
def alone(model: Model, folder: Path) -> Recorder:
    """Every sequence by itself."""
    recorder = Recorder(model, folder, max_running=1)
    for r in requests():
        recorder.harness.run(r)
    return recorder


@pytest.mark.parametrize(
    ("max_running", "prefill_chunk", "order"), [(16, 256, 0), (16, 1, 1), (5, 1024, 2), (3, 130, 3), (2, 40, 4)]
)
def test_same_bits_in_any_company(
    model: Model, folder: Path, alone: Recorder, max_running: int, prefill_chunk: int, order: int
) -> None:
    shuffled = requests()
    random.Random(order).shuffle(shuffled)
    recorder = Recorder(model, folder, max_running=max_running, prefill_chunk=prefill_chunk)
    half = len(shuffled) // 2
    for r in shuffled[:half]:
        recorder.harness.engine.submit(r)
    recorder.harness.step(4)
    recorder.harness.run(*shuffled[half:])
    for r in shuffled:
        assert recorder.harness.tokens(r.request_id) == alone.harness.tokens(r.request_id)
    assert recorder.logits.keys() == alone.logits.keys()
    recorder.same_bits(alone)


@pytest.mark.parametrize("cut", [1, 3, 11])
def test_same_bits_when_emitted_tokens_are_computed_again(
    model: Model, folder: Path, alone: Recorder, cut: int
) -> None:
    recorder = Recorder(model, folder, max_running=6)
    recorder.harness.run(
        *(
            request(r.request_id, r.prompt, r.stop.max_tokens, emitted=alone.harness.tokens(r.request_id)[:cut])
            for r in requests()
        )
    )
    for r in requests():
        assert recorder.harness.tokens(r.request_id) == alone.harness.tokens(r.request_id)[cut:]
        assert recorder.harness.outputs[r.request_id][0].token_offset == cut
    assert recorder.logits.keys() < alone.logits.keys()
    recorder.same_bits(alone)


def test_rows_of_a_tile_do_not_know_their_place(model: Model) -> None:
    with torch.inference_mode():
        check_tiles(model.network)


def test_a_product_that_knows_its_place_is_found_out(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    right = layers.linear

    def wrong(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tiles: tuple[tuple[int, int], ...]
    ) -> torch.Tensor:
        out = right(x, weight, bias, tiles)
        out[-1] *= 1 + 2**-22  # one ulp or two, in the tile's last row
        return out

    monkeypatch.setattr(layers, "linear", wrong)
    with torch.inference_mode(), pytest.raises(PreconditionFailed) as refused:
        check_tiles(model.network)
    assert refused.value.reason == "NOT_DETERMINISTIC"


# Eight threads: ATen then shares out elementwise work in pieces that end inside a row.
WIDE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1}


def test_same_bits_when_many_threads_share_the_elementwise_work(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **WIDE)
    wide = load_model(config_for(folder, threads=8))
    rng = random.Random(9)
    prompt = [rng.randrange(TINY["vocab_size"]) for _ in range(128)]
    alone = Recorder(wide, folder, threads=8)
    alone.harness.run(request("r", prompt, 2))
    company = Recorder(wide, folder, threads=8)
    company.harness.engine.submit(request("mate", [5, 6, 7], 9))
    company.harness.step(2)  # it decodes: 128 rows and its tile of 8 are one batch
    company.harness.run(request("r", prompt, 2))
    assert ("r", 128) in alone.logits
    company.same_bits(alone)


@pytest.mark.parametrize(
    ("threads", "width"), [(8, 1536), (3, 8960), (5, 11008), (6, 14336), (6, 18944), (3, 40000), (2, 1111)]
)
def test_a_row_of_swiglu_does_not_know_the_batch(threads: int, width: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(threads * width)
        gate, up = torch.randn(136, 2 * width, generator=generator).chunk(2, dim=-1)
        batch = layers.swiglu(gate, up, deterministic=True)
        assert torch.allclose(batch, layers.swiglu(gate, up, deterministic=False), atol=1e-5)
        for first, end in ((0, 8), (8, 136), (8, 24), (3, 4), (50, 114)):
            assert torch.equal(layers.swiglu(gate[first:end], up[first:end], deterministic=True), batch[first:end])
    finally:
        torch.set_num_threads(before)


def test_an_operation_that_knows_the_batch_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = load_model(config_for(write_model(tmp_path, **WIDE)))
    right = layers.swiglu

    def wrong(gate: torch.Tensor, up: torch.Tensor, *, deterministic: bool) -> torch.Tensor:
        out = right(gate, up, deterministic=deterministic)
        return out * (1 + 2**-20) if len(out) == 136 else out

    monkeypatch.setattr(layers, "swiglu", wrong)
    with torch.inference_mode(), pytest.raises(PreconditionFailed, match="136 rows") as refused:
        check_tiles(wide.network)
    assert refused.value.reason == "NOT_DETERMINISTIC"


def test_tiles_follow_from_the_sequence_alone() -> None:
    rng = random.Random(2)
    geometry = CacheGeometry((LayerGroup("g", (Region(0, "k", 1, 8, "float32"),)),))
    for _ in range(50):
        work = []
        for _ in range(rng.randrange(1, 12)):
            prompt_span = rng.random() < 0.5
            start = 128 * rng.randrange(3) if prompt_span else rng.randrange(300)
            count = rng.randrange(1, 400) if prompt_span else 1
            work.append(SpanWork([7] * count, start, {"g": list(range(9))}, prompt_span, True))
        batch = build_batch(work, geometry, deterministic=True)
        assert batch.tiles[0][0] == 0 and batch.tiles[-1][1] == len(batch.token_ids)
        assert all(a[1] == b[0] for a, b in zip(batch.tiles, batch.tiles[1:], strict=False))
        for span in batch.spans:
            (size,) = {end - first for first, end in batch.tiles if first <= span.first_row < end}
            assert size == min(rows for rows in TILE_ROWS if rows >= span.num_rows)
        assert sum(span.num_rows for span in batch.spans) == sum(w.count for w in work)
        writes = batch.groups["g"].pages
        assert writes is not None
        assert int((batch.token_ids == 7).sum()) == len(writes.pages)


@pytest.mark.parametrize("mode", ["window", "fp8"])
def test_two_spans_of_one_sequence_never_meet_a_tail(mode: Literal["window", "fp8"]) -> None:
    group = LayerGroup("g", (Region(0, "k", 1, 64, "float32"),), mode=mode, window=64 if mode == "window" else 0)
    work = [SpanWork([7] * 129, 0, {}, True, True, tail_slots={"g": 3})]
    with pytest.raises(InternalError, match="two spans of one sequence"):
        build_batch(work, CacheGeometry((group,)), deterministic=True)
