"""DeepSeek-V4's captured decode steps against the engine's own, over PyTorch on a CPU; a graph is a row of launches.

What nobody holds of pages and tails is NaN, so a row that is read for nothing and not hidden shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.v4_step_cells import V4_KERNELS, v4_step_cell
from kernels.v4_step_cuda import V4Step
from protos.errors import ConfigError
from tests.kernels.emulator import Emulator, needs_compiler
from tests.unit.deepseek_v4_engine import Reference, engine_model
from tests.unit.deepseek_v4_tiny import random_weights, tiny_config
from tests.unit.emulated_step import EmulatedStep
from tests.unit.test_engine_v4 import SMALL, prompt
from tests.unit.tiny import Harness, config_for, request
from worker import model_runner
from worker.decode_graphs import DecodeGraphs
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_checkpoint import is_integer, kept_in_float32
from worker.models.deepseek_v4_geometry import cache_geometry, with_raw_mode
from worker.sequence import Request
from worker.v4_decode_layers import reaches

pytestmark = [needs_compiler, pytest.mark.slow]
MODES = {"dense": ("dense", ""), "turboquant": ("turboquant", "tq4"), "window": ("window", "")}
Pair = Callable[..., tuple[Harness, Harness]]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The same engine without and with captured steps."""
    EmulatedStep(monkeypatch)
    monkeypatch.setattr(model_runner, "DecodeGraphs", partial(DecodeGraphs, buckets=(1, 2)))

    def make(mode: str = "dense", hca_ratio: int = 16, **changes: Any) -> tuple[Harness, Harness]:
        reference = Reference(tiny_config(hca_ratio=hca_ratio, **{**SMALL, **changes}), seed=2)
        settings: dict[str, Any] = {"device": "cuda:0", "prefill_chunk": 512, "max_running": 4}
        settings["kv_mode"] = MODES[mode][0]
        plain, captured = (
            Harness(reference.model(*MODES[mode]), config_for(Path("none"), decode_graphs=on, **settings), num_pages=64)
            for on in (False, True)
        )
        return plain, captured

    return make


def graphs_of(harness: Harness) -> DecodeGraphs:
    rows = harness.engine._runner._decode
    assert rows is not None
    return rows.graphs


def run_beside(plain: Harness, captured: Harness, requests: list[Request]) -> None:
    want, before = plain.run(*requests), graphs_of(captured).state.num_launched
    assert captured.run(*requests) == want
    assert graphs_of(captured).state.num_launched - before >= max(len(tokens) for tokens in want.values()) - 2
    assert captured.attachment.verify() == []


@pytest.mark.parametrize("mode", MODES)
def test_sequences_come_and_go(pair: Pair, mode: str) -> None:
    """Through page ends, ring wraps, blocks of 4 and 16 tokens, and reaches of 128 and 512 tokens."""
    plain, captured = pair(mode)
    assert graphs_of(captured).layers.reaches == (128, 512, 1024)
    lives = ((120, 14), (1, 24), (250, 12), (14, 9), (100, 12))
    run_beside(plain, captured, [request(f"r{i}", prompt(i, length), count) for i, (length, count) in enumerate(lives)])


def test_blocks_of_a_page_each(pair: Pair) -> None:
    """HCA blocks as long as the model's own end on the way; every CSA row is read, so nothing is chosen."""
    plain, captured = pair("window", hca_ratio=128, index_topk=512)
    lives = ((125, 8), (250, 9), (5, 12))
    run_beside(plain, captured, [request(f"r{i}", prompt(i, length), count) for i, (length, count) in enumerate(lives)])


def test_kept_rows_are_the_engines(pair: Pair) -> None:
    """Of three sequences the second goes, so that its row is padding: what it held stays NaN."""
    plain, captured = pair("window")
    kept = []
    for harness in (plain, captured):
        harness.run(
            *(request(f"r{i}", prompt(i, length), count) for i, length, count in ((1, 61, 9), (2, 30, 3), (3, 9, 9)))
        )
        kv = harness.engine._runner.kv
        kept.append({key: (view.tail if view.tail is not None else view.pages) for key, view in kv.regions.items()})
    for key, rows in kept[0].items():
        want, got = rows, kept[1][key]
        assert want is not None and got is not None and want.isnan().equal(got.isnan()), key
        assert (want - got).nan_to_num().abs().max() < 2e-5, key


def test_kernels_between_the_products_say_the_same(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    """In bf16 a rounding may fall the other way: logits of a step behind the same tokens."""
    widths = {
        "head_dim": 64,
        "q_lora_rank": 64,
        "index_head_dim": 64,
        "num_hidden_layers": 2,
        "compress_ratios": [4, 128],
    }
    config = tiny_config(hca_ratio=16, **{**SMALL, **widths})
    weights = {
        name: value if kept_in_float32(name) or is_integer(name) else value.bfloat16()
        for name, value in random_weights(config, 2).items()
    }
    library = Emulator.of(v4_step_cell("bf16", 4, 20))
    launched: set[str] = set()

    def launch(name: str, ctas: int, arguments: tuple[torch.Tensor | int, ...], shared_bytes: int) -> None:
        launched.add(name)
        library.call(f"v4_{name}", ctas, *arguments)

    logits, tokens = [], []
    for kernels in (None, V4Step(torch.bfloat16, 4, 20, launch)):
        network = DeepseekV4(config, dict(weights))
        geometry = with_raw_mode(cache_geometry(config, "bfloat16"), "window")
        settings: dict[str, Any] = {"device": "cuda:0", "prefill_chunk": 512, "max_running": 2, "kv_mode": "window"}
        harness = Harness(
            engine_model(network, geometry), config_for(Path("none"), decode_graphs=True, **settings), num_pages=16
        )
        harness.engine.submit(request("a", prompt(1, 139), 40))  # both kinds choose or read rows of 34 and of 8 blocks
        harness.step()
        network.kernels = kernels
        harness.step(6)
        tokens.append(harness.tokens("a")[:6])
        logits.append(graphs_of(harness).layers.logits[0].clone())
    assert launched == {*V4_KERNELS} and tokens[0] == tokens[1]
    assert 0 < (logits[0] - logits[1]).norm() < 0.03 * logits[0].norm()


def test_drafts_and_packed_compressed_rows_are_refused(tmp_path: Path, pair: Pair) -> None:
    with pytest.raises(ConfigError, match="decode_graphs would not engage"):
        config_for(tmp_path, decode_graphs=True, device="cuda:0", drafts=2)
    model = Reference(tiny_config(**SMALL), seed=2).model("window", pack_compressed="tq4")
    with pytest.raises(ConfigError, match="decode_graphs would not engage"):
        Harness(model, config_for(tmp_path, decode_graphs=True, device="cuda:0", kv_mode="window"), num_pages=16)


@pytest.mark.parametrize(("topk", "most", "want"), [(512, 131072, (2048, 8192, 32768, 131072)), (32, 100, (128,))])
def test_reaches_grow_to_the_longest_sequence(topk: int, most: int, want: tuple[int, ...]) -> None:
    assert reaches(tiny_config(index_topk=topk), most) == want
