"""Weights in FP8 blocks: what they stand for, that nothing else of them is held, and where they are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels.linear_cuda import dequantized
from protos.errors import ConfigError, ModelError
from tests.unit.tiny import config_for, write_model
from worker import weights
from worker.config import WorkerConfig
from worker.models.block_weight import BlockWeight
from worker.models.layers import linear
from worker.models.llama import PRODUCTS, Llama
from worker.switches import switches
from worker.weights import load_model

SHAPE: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
SETTINGS: Mapping[str, Any] = {
    "device": "cuda:0",
    "dtype": "bfloat16",
    "decode_graphs": True,
    "weights": "fp8_block",
}


@pytest.mark.parametrize("rows", [256, 211, 60])
def test_a_block_weight_is_within_e4m3_of_its_original(rows: int) -> None:
    torch.manual_seed(rows)
    original = (torch.randn(rows, 384) * torch.rand(rows, 1)).to(torch.bfloat16)
    block = BlockWeight.of(original, "o")
    dense = block.dense()
    assert dense.dtype == torch.bfloat16 and dense.shape == original.shape
    assert torch.equal(dense, dequantized(block.codes, block.scales, torch.bfloat16))
    tops = [original[at : at + 128].abs().amax() for at in range(0, rows, 128)]
    largest = torch.stack(tops).repeat_interleave(128)[:rows, None]
    assert bool(((dense - original).abs() <= original.abs() / 15 + largest / 2**14).all())  # half a step of 3 bits
    assert block.num_bytes < 0.6 * 2 * original.numel()
    x = torch.randn(20, 384).to(torch.bfloat16)
    assert torch.equal(linear(x, block, None, ((0, 20),)), F.linear(x, dense))


def test_widths_that_make_no_blocks_are_refused() -> None:
    with pytest.raises(ModelError, match="down does not go into blocks"):
        BlockWeight.of(torch.zeros(128, 96), "down")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(weights, "torch_device", lambda device: torch.device("cpu"))
    return write_model(tmp_path / "model", **SHAPE)


def test_nothing_of_the_originals_is_held(folder: Path) -> None:
    config = config_for(folder, **SETTINGS)
    model, plain = load_model(config), load_model(replace(config, weights=""))
    network, original = model.network, plain.network
    assert isinstance(network, Llama) and isinstance(original, Llama)
    for layer, before in zip(network.layers, original.layers, strict=True):
        for name in PRODUCTS:
            weight, was = getattr(layer, name), getattr(before, name)
            assert isinstance(weight, BlockWeight)
            assert (weight.dense().float() - was.float()).norm() < 0.04 * was.float().norm()
    assert isinstance(network.lm_head, BlockWeight)
    assert model.uses[0].num_bytes == network.weight_bytes < 0.7 * original.weight_bytes
    assert model.info.weights_digest != plain.info.weights_digest, "their KV is not the same"


def test_a_head_tied_to_the_embedding_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(weights, "torch_device", lambda device: torch.device("cpu"))
    folder = write_model(tmp_path / "tied", **{**SHAPE, "tie_word_embeddings": True})
    network = load_model(config_for(folder, **SETTINGS)).network
    assert isinstance(network, Llama) and network.lm_head is network.embed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weights": "int4"}, "weights is not known"),
        ({"device": "cpu:0", "decode_graphs": False}, "would not engage"),
        ({"decode_graphs": False}, "would not engage"),
    ],
    ids=str,
)
def test_settings_that_it_does_not_go_with(tmp_path: Path, change: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_for(tmp_path, **{**SETTINGS, **change})


def test_another_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="llama in float16"):
        load_model(config_for(folder, **{**SETTINGS, "dtype": "float16"}))


def test_features_show_it_with_its_record(folder: Path) -> None:
    config: WorkerConfig = config_for(folder, **SETTINGS)
    model = load_model(config)
    (told,) = (each for each in switches(config, model.geometry, "sm_90a", model.form) if each.name == "weights")
    assert (told.configured, told.engaged) == ("fp8_block", "fp8_block")
    assert (Path("tests/bench/results") / told.evidence).name.startswith("h200-few_rows")
