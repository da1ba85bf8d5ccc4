"""Loading a folder: what fits together is read, all else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import ConfigError, ModelError
from tests.unit.tiny import Harness, config_for, request, write_model
from worker.weights import INDEX_FILE, Model, load_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def load(folder: Path) -> Model:
    return load_model(config_for(folder))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def lose_a_shard(folder: Path) -> None:
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_info_says_what_was_loaded(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    seen: list[tuple[int, int]] = []
    model = load_model(config_for(folder, max_sequence_tokens=500), lambda done, total: seen.append((done, total)))
    expected = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert model.info.num_parameters == expected and model.info.max_sequence_tokens == 500
    assert model.eos_token_ids == (2, 5) == tuple(model.info.eos_token_ids)
    assert len(model.info.weights_digest) == len(model.info.tokenizer_digest) == 16
    assert seen == sorted(seen) and 0 < seen[-1][0] <= seen[-1][1]
    assert len(model.geometry.groups) == 1 and len(model.geometry.groups[0].regions) == 6


def test_shards_are_the_same_model(folder: Path) -> None:
    whole, before = load(folder), Harness.load(folder).run(request("r", [3, 4, 5], 6))
    shard(folder)
    assert load(folder).info == whole.info
    assert Harness.load(folder).run(request("r", [3, 4, 5], 6)) == before


def test_the_digest_covers_every_value_and_name(folder: Path, tmp_path: Path) -> None:
    digest = load(folder).info.weights_digest
    assert load(write_model(tmp_path / "again")).info.weights_digest == digest
    change(folder, lambda t: t["model.layers.2.mlp.down_proj.weight"][0, 0].add_(1e-3))
    assert load(folder).info.weights_digest != digest
    assert load(write_model(tmp_path / "other", seed=1)).info.weights_digest != digest


def test_harmless_leftovers_are_passed_over(folder: Path) -> None:
    info = load(folder).info
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    change(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert load(folder).info == info


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(folder: Path, dtype: str) -> None:
    harness = Harness.load(folder, dtype=dtype)
    assert harness.engine._model.geometry.groups[0].regions[0].dtype == dtype
    assert len(harness.run(request("r", list(range(3, 140)), 6))["r"]) == 6


def test_auto_takes_the_models_dtype(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    assert load_model(config_for(folder, dtype="auto")).geometry.groups[0].regions[0].dtype == "bfloat16"
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "float8"}))
    with pytest.raises(ModelError, match="float8"):
        load_model(config_for(folder, dtype="auto"))


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def garbage(file: Path) -> None:
    file.write_bytes(b"\xff" * 4000)


CASES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no folder": (lambda f: f.rename(f.parent / "gone"), "UNREADABLE_WEIGHTS", "config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "UNREADABLE_WEIGHTS", "config.json"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "UNREADABLE_WEIGHTS", "config.json"),
    "another architecture": (
        lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'),
        "ARCHITECTURE_NOT_BUILT",
        "gpt2",
    ),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "BAD_MODEL", "no weights"),
    "cut short": (lambda f: truncate(f / "model.safetensors"), "UNREADABLE_WEIGHTS", "model.safetensors"),
    "garbage": (lambda f: garbage(f / "model.safetensors"), "UNREADABLE_WEIGHTS", "model.safetensors"),
    "missing": (lambda f: change(f, lambda t: t.pop("model.norm.weight")), "MISSING_TENSOR", "model.norm.weight"),
    "unexpected": (
        lambda f: change(f, lambda t: t.update({"model.extra": torch.ones(2)})),
        "UNEXPECTED_TENSOR",
        "model.extra",
    ),
    "mis-shaped": (
        lambda f: change(f, lambda t: t.update({"model.norm.weight": torch.ones(47)})),
        "BAD_TENSOR",
        "model.norm.weight",
    ),
    "integers": (
        lambda f: change(f, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int32)})),
        "BAD_TENSOR",
        "model.norm.weight",
    ),
    "twice": (
        lambda f: save_file({"model.norm.weight": torch.ones(48)}, f / "second.safetensors"),
        "BAD_MODEL",
        "in two files",
    ),
    "shard missing": (
        lose_a_shard,
        "UNREADABLE_WEIGHTS",
        "model-00002-of-00002.safetensors",
    ),
    "index without map": (lambda f: (f / INDEX_FILE).write_text("{}"), "BAD_MODEL", "weight_map"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit_is_refused_by_name(folder: Path, case: str) -> None:
    spoil, reason, named = CASES[case]
    spoil(folder)
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert refused.value.reason == reason and named in str(refused.value)


def test_more_tokens_than_the_model_has_positions_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_sequence_tokens"):
        load_model(config_for(folder, max_sequence_tokens=1025))
