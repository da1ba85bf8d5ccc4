"""config.json: any value of any key is either used or refused by name, never a traceback and never taken in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import ConfigError, ModelError, TailpackError
from tests.unit.tiny import TINY, config_for, write_model
from worker import model_config
from worker.models.llama import Llama
from worker.weights import load_model

ODD: tuple[Any, ...] = (
    None, 0, -1, 1, 1.5, "x", "", [], {}, True, float("inf"), float("nan"), 2**63, 2**40, 10**9, 10**400,
    [1, 2], [None],
)  # fmt: skip
KEYS = (
    *TINY, "rope_scaling", "rope_parameters", "sliding_window", "use_sliding_window", "attention_bias", "mlp_bias",
    "partial_rotary_factor", "quantization_config", "layer_types", "max_window_layers", "torch_dtype",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", vocab_size=64, num_hidden_layers=1, max_position_embeddings=256)


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("key", KEYS)
def test_every_odd_value_is_used_or_refused_by_name(tmp_path: Path, key: str, model_type: str) -> None:
    folder = write_model(
        tmp_path / "m", model_type=model_type, vocab_size=64, num_hidden_layers=1, max_position_embeddings=256
    )
    original = json.loads((folder / "config.json").read_text())
    for value in ODD:
        edit(
            folder, **{**original, key: value, **({"use_sliding_window": True} if key != "use_sliding_window" else {})}
        )
        try:
            model = load_model(config_for(folder))
        except TailpackError:
            continue
        assert isinstance(model.network, Llama)
        assert torch.isfinite(model.network.cos).all() and torch.isfinite(model.network.sin).all(), (key, value)
        assert model.network.config.norm_eps > 0, (key, value)
        assert all(0 <= token < 64 for token in model.eos_token_ids), (key, value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": []}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_parameters.rope_theta"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 4, "high_freq_factor": 4}}, "high_freq_factor"),
        ({"sliding_window": "x"}, "sliding_window"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"tie_word_embeddings": "x"}, "tie_word_embeddings"),
        ({"quantization_config": {"quant_method": "gptq"}}, "QUANTIZATION_NOT_BUILT"),
        ({"layer_types": "x"}, "layer_types"),
        ({"eos_token_id": "x"}, "eos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
        ({"eos_token_id": 64}, "0 to 63"),
    ],
)
def test_bad_values_are_named_before_anything_starts_and_by_the_worker(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    model_config.check_folder(folder, 0)
    edit(folder, **changes)
    with pytest.raises(ModelError, match=named):
        model_config.check_folder(folder, 0)
    with pytest.raises(ModelError, match=named):
        load_model(config_for(folder))


def test_ends_of_sequence_in_generation_config_are_checked_too(folder: Path) -> None:
    generation = folder / "generation_config.json"
    for bad in ("x", -1, [None], 99999999999, True):
        generation.write_text(json.dumps({"eos_token_id": bad}))
        with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
            load_model(config_for(folder))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_nested_without_end_is_unreadable(folder: Path, name: str) -> None:
    (folder / name).write_text("[" * 100_000)
    with pytest.raises(ModelError, match=name) as refused:
        load_model(config_for(folder))
    assert refused.value.reason == "UNREADABLE_WEIGHTS"


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), "float32"), (float("inf"), "float32"), (1e6, "float16")])
def test_weights_that_are_not_finite_are_named(folder: Path, value: float, dtype: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][7] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds NaN or infinity"):
        load_model(config_for(folder, dtype=dtype))


def test_null_is_absent(folder: Path) -> None:
    edit(folder, rms_norm_eps=None, rope_theta=None, rope_scaling={"rope_theta": None}, mlp_bias=None)
    model = load_model(config_for(folder))
    assert model.network.config.norm_eps == 1e-6


def test_a_folder_without_tokenizer_or_positions_enough_is_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        model_config.check_folder(folder, 0)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="at most 256"):
        model_config.check_folder(folder, 257)
