"""Loading DeepSeek-V4 from its official checkpoint's form: what is read, what it takes, what is refused by name."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import CapacityError, ConfigError, ModelError
from tests.unit import tiny
from tests.unit.deepseek_v4_tiny import Driver, MemoryRows
from tests.unit.tiny import config_for
from worker import checkpoint, cluster_config, tiny_v4, weights
from worker.cluster_config import ClusterConfig
from worker.families import DeepseekV4Architecture, architecture
from worker.memory_plan import FROM_FP4, FROM_FP8, WEIGHTS, demand_fit, table, total, weight_uses
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_quantized import dequantized_fp4, dequantized_fp8
from worker.weights import Model, load_model, planned_uses

FILE = "model.safetensors"
BF16: dict[str, Any] = {"expert_dtype": None, "quantization_config": None}
FP8_BASE: dict[str, Any] = {"expert_dtype": "fp8"}
SMALL: dict[str, Any] = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0], "n_routed_experts": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_v4.write_model(tmp_path / "model", **SMALL)


def load(folder: Path, **changes: Any) -> Model:
    return load_model(config_for(folder, **changes))


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def network(model: Model) -> DeepseekV4:
    assert isinstance(model.network, DeepseekV4)
    return model.network


# --- what is read ---


def test_the_whole_model_is_what_its_tensors_say_by_hand(folder: Path) -> None:
    model, tensors = load(folder), load_file(folder / FILE)
    block = (128, 128)
    layer = network(model).layers[1]
    at = "layers.1.attn."
    assert torch.equal(layer.attn.wq_b, dequantized_fp8(tensors[at + "wq_b.weight"], tensors[at + "wq_b.scale"], block))
    up = [
        dequantized_fp4(tensors[f"layers.1.ffn.experts.3.{w}.weight"], tensors[f"layers.1.ffn.experts.3.{w}.scale"])
        for w in ("w1", "w3")
    ]
    assert torch.equal(layer.ffn.up[3], torch.cat(up))
    assert layer.ffn.table is not None and layer.ffn.table.dtype == torch.int64
    assert torch.equal(layer.ffn.table, tensors["layers.1.ffn.gate.tid2eid"].long())
    assert layer.ffn.bias is None and network(model).layers[2].ffn.bias is not None
    assert torch.equal(network(model).embed, tensors["embed.weight"].float())
    assert torch.equal(network(model).drafts[0].e_norm, tensors["mtp.0.enorm.weight"].float())
    assert len(model.info.weights_digest) == 16 and model.info.architecture == "deepseek_v4"
    names = [name for name in tensors if not name.endswith(".scale")]
    packed = [name for name in names if ".ffn.experts." in name]
    assert model.info.num_parameters == sum(tensors[name].numel() for name in (*names, *packed))


def test_a_dtype_other_than_float32_leaves_what_is_computed_in_float32_alone(folder: Path) -> None:
    full, half = network(load(folder)), network(load(folder, dtype="bfloat16"))
    layer = half.layers[1]
    for tensor in (half.embed, layer.attn.wq_b, layer.ffn.up, layer.ffn.shared_down):
        assert tensor.dtype == torch.bfloat16
    for name in ("gate", "bias", "table"):
        assert getattr(full.layers[2].ffn, name) is None or torch.equal(
            getattr(full.layers[2].ffn, name), getattr(half.layers[2].ffn, name)
        )
    for full_part, half_part in zip(full.layers[1].attn_mixing, layer.attn_mixing, strict=True):
        assert half_part.dtype == torch.float32 and torch.equal(full_part, half_part)
    assert torch.equal(layer.attn.sink, full.layers[1].attn.sink)
    # FP8 and FP4 values times powers of two are exact in bfloat16.
    assert torch.equal(layer.attn.wq_b.float(), full.layers[1].attn.wq_b)
    assert torch.equal(layer.ffn.up.float(), full.layers[1].ffn.up)


@pytest.mark.parametrize("changes", [BF16, FP8_BASE, {"rope_scaling": None}], ids=["bf16", "fp8 experts", "no yarn"])
def test_every_form_of_checkpoint_loads_and_computes(tmp_path: Path, changes: dict[str, Any]) -> None:
    folder = tiny_v4.write_model(tmp_path / "model", **{**SMALL, **changes})
    loaded = network(load(folder))
    driver = Driver.__new__(Driver)
    driver.model, driver.rows = loaded, MemoryRows(loaded.config)
    logits = driver.run([7 * i % 263 for i in range(20)], [20])
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_float32_scales_are_numbers_and_not_bytes(tmp_path: Path) -> None:
    folder = tiny_v4.write_model(tmp_path / "model", **{**SMALL, **FP8_BASE})
    before = network(load(folder)).layers[0].attn.wq_b

    def widen(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".scale")]:
            tensors[name] = 3 * tensors[name].float()

    edit(folder, widen)
    torch.testing.assert_close(network(load(folder)).layers[0].attn.wq_b, 3 * before, rtol=0, atol=0)


def test_the_digest_covers_scales_names_and_every_byte(folder: Path) -> None:
    seen = {load(folder).info.weights_digest}

    def change_scale(tensors: dict[str, torch.Tensor]) -> None:
        tensors["layers.0.attn.wkv.scale"].view(torch.uint8)[0, 0] += 1

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        a, b = "layers.0.ffn.experts.0.w1.", "layers.0.ffn.experts.0.w3."
        for kind in ("weight", "scale"):
            tensors[a + kind], tensors[b + kind] = tensors[b + kind], tensors[a + kind]

    for number, change in enumerate((change_scale, swap), 2):
        edit(folder, change)
        seen.add(load(folder).info.weights_digest)
        assert len(seen) == number


# --- what it takes ---


def test_one_tensor_is_in_memory_beside_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is dropped before the next is read, so quantised experts never pile up."""
    alive: list[str] = []
    most = 0
    original = checkpoint.Tensors._read

    def read(self: checkpoint.Tensors, name: str) -> torch.Tensor:
        nonlocal most
        tensor = original(self, name)
        alive.append(name)
        weakref.finalize(tensor, alive.remove, name)
        most = max(most, len(alive))
        return tensor

    monkeypatch.setattr(checkpoint.Tensors, "_read", read)
    load(folder)
    assert most <= 2 and not alive  # a weight and its scales


def test_what_is_planned_is_what_is_held(folder: Path) -> None:
    planned = {use.owner: use for use in planned_uses(folder, "bfloat16")}
    model = load(folder, dtype="bfloat16")
    held = 0
    seen: set[int] = set()

    def count(value: object) -> None:
        nonlocal held
        if isinstance(value, torch.Tensor):
            if value.data_ptr() not in seen:
                seen.add(value.data_ptr())
                held += value.nbytes
        elif isinstance(value, tuple | list):
            for part in value:
                count(part)

    net = network(model)
    count([net.embed, net.head, net.norm, net.head_mixing, net.layers, net.drafts])
    assert total(model.uses) == held
    assert set(planned) == {WEIGHTS, FROM_FP8, FROM_FP4, "reading one weight"}
    assert planned[FROM_FP4].num_bytes > 3 * planned[FROM_FP4].file_bytes  # 4.25 bits become 16
    assert sum(use.file_bytes for use in planned.values()) == sum(t.nbytes for t in load_file(folder / FILE).values())


FLASH: dict[str, Any] = {  # ten of its layers, for the test's time
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 10,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "compress_ratios": [0, 0, *[4, 128] * 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "max_position_embeddings": 1048576,
}


ROOM = 100 << 30


def test_flash_is_refused_with_what_it_would_take_and_nothing_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder as the published one by its config and headers; its data are holes of a sparse file."""
    folder = tmp_path / "flash"
    folder.mkdir()
    config = {**tiny_v4.CONFIG, **FLASH}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    _write_sparse(folder / FILE, architecture(config).tensors())
    monkeypatch.setattr(cluster_config, "available_bytes", lambda: (ROOM, "available on this machine"))
    with pytest.raises(CapacityError) as caught:
        ClusterConfig.of(model=str(folder), listen="127.0.0.1:0", device="cpu", dtype="bfloat16")
    assert caught.value.reason == "MODEL_TOO_LARGE"
    uses = {use.owner: use for use in planned_uses(folder, "bfloat16")}
    # Ten layers and the MTP block of 256 experts of 3 x 4096 x 2048 weights: 4.25 bits each in the files, 16 here.
    experts = 11 * 256 * 3 * 4096 * 2048
    assert uses[FROM_FP4] == (FROM_FP4, 2 * experts, experts * 17 // 32)
    assert f"{FROM_FP4} {2 * experts / 2**30:.1f} GiB ({experts * 17 / 32 / 2**30:.1f} GiB in files)" in str(
        caught.value
    )
    monkeypatch.setattr(weights, "available_bytes", lambda: (ROOM, "available on this machine"))
    monkeypatch.setattr(checkpoint.Tensors, "_read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(CapacityError) as caught:
        load(folder, dtype="bfloat16")
    assert caught.value.reason == "MODEL_TOO_LARGE"


def _write_sparse(file: Path, expected: dict[str, checkpoint.Expected]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, wanted in expected.items():
        dtype = "F8_E8M0" if wanted.is_scale else "BF16" if wanted.dtypes == checkpoint.FLOATS else wanted.dtypes[0]
        num_bytes = checkpoint.Stored(file, dtype, wanted.shape).num_bytes
        header[name] = {"dtype": dtype, "shape": wanted.shape, "data_offsets": [at, at + num_bytes]}
        at += num_bytes
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        os.truncate(file, 8 + len(text) + at)


def test_the_table_names_every_owner_and_fits_exactly() -> None:
    shapes = DeepseekV4Architecture.parse(tiny_v4.CONFIG)
    found = {
        name: checkpoint.Stored(Path("x"), "F8_E8M0" if w.is_scale else w.dtypes[0], w.shape)
        for name, w in shapes.tensors().items()
    }
    uses = weight_uses(shapes.tensors(), found, "float32")
    demand_fit(uses, total(uses), "here")
    with pytest.raises(CapacityError) as caught:
        demand_fit(uses, total(uses) - 1, "here")
    assert caught.value.given == table(uses) and all(use.owner in table(uses) for use in uses)


# --- what is refused ---

E4M3 = torch.float8_e4m3fn


def _retype(name: str, dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


BAD: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str, str]] = {
    "a scale is missing": (lambda t: t.pop("layers.0.attn.wkv.scale"), "MISSING_TENSOR", "layers.0.attn.wkv.scale"),
    "transformers' own name": (
        lambda t: t.update({"layers.0.attn.norm.weight": t.pop("layers.0.attn.kv_norm.weight")}),
        "MISSING_TENSOR",
        "layers.0.attn.kv_norm.weight",
    ),
    "a compressor where there is none": (
        lambda t: t.update({"layers.0.attn.compressor.ape": torch.ones(4, 256)}),
        "UNEXPECTED_TENSOR",
        "layers.0.attn.compressor.ape",
    ),
    "FP8 that is not": (_retype("layers.0.attn.wkv.weight", torch.bfloat16), "BAD_TENSOR", "layers.0.attn.wkv.weight"),
    "FP8 that is no weight": (_retype("layers.0.attn_norm.weight", E4M3), "BAD_TENSOR", "layers.0.attn_norm.weight"),
    "scales of another block": (
        lambda t: t.update({"layers.0.attn.wq_b.scale": torch.full((8, 1), 127, dtype=torch.uint8)}),
        "BAD_TENSOR",
        "layers.0.attn.wq_b.scale",
    ),
    "a table of floats": (
        _retype("layers.0.ffn.gate.tid2eid", torch.float32),
        "BAD_TENSOR",
        "layers.0.ffn.gate.tid2eid",
    ),
    "an expert that is not there": (
        lambda t: t["layers.1.ffn.gate.tid2eid"].fill_(4),
        "BAD_TENSOR",
        "layers.1.ffn.gate.tid2eid",
    ),
    "a scale that is NaN": (
        lambda t: t["layers.0.ffn.experts.2.w2.scale"].view(torch.uint8).fill_(255),
        "BAD_TENSOR",
        "layers.0.ffn.experts.2.w2.weight",
    ),
    "an FP8 NaN": (
        lambda t: t["mtp.0.attn.wkv.weight"].view(torch.uint8).fill_(0x7F),
        "BAD_TENSOR",
        "mtp.0.attn.wkv.weight",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_by_name(folder: Path, case: str) -> None:
    change, reason, named = BAD[case]
    edit(folder, change)
    with pytest.raises(ModelError) as refused:
        load(folder)
    assert refused.value.reason == reason and named in str(refused.value)


def test_a_checkpoint_that_is_cut_anywhere_is_refused_by_name(folder: Path) -> None:
    whole = (folder / FILE).read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for length in (0, 4, 8, 8 + header // 2, 8 + header, len(whole) // 2, len(whole) - 1):
        (folder / FILE).write_bytes(whole[:length])
        for look in (load, lambda folder: planned_uses(folder, "float32")):
            with pytest.raises(ModelError) as refused:
                look(folder)
            assert refused.value.reason == "UNREADABLE_WEIGHTS" and FILE in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "QUANTIZATION_NOT_BUILT"),
        ({"quantization_config": {**tiny_v4.CONFIG["quantization_config"], "fmt": "e5m2"}}, "QUANTIZATION_NOT_BUILT"),
        ({"expert_dtype": "nvfp4"}, "QUANTIZATION_NOT_BUILT"),
        ({"expert_dtype": None}, "QUANTIZATION_NOT_BUILT"),
        ({"compress_ratios": [0, 4, 128, 4]}, "compress_ratios"),
        ({"index_topk": None}, "index_topk"),
        ({"swiglu_limit": None}, "swiglu_limit"),
        ({"rope_scaling": None}, "rope_scaling is missing"),
        ({"n_routed_experts": 10**9}, "n_routed_experts"),
        ({"rope_parameters": {"main": {}}}, "rope_parameters"),
    ],
)
def test_configs_that_are_not_understood_are_refused_before_anything_starts(
    folder: Path, changes: dict[str, Any], named: str
) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    for look in (load, lambda folder: ClusterConfig.of(model=str(folder), listen="127.0.0.1:0", device="cpu")):
        with pytest.raises(ModelError, match=named):
            look(folder)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kv_mode": "turboquant", "dense_layers": (1, 1)}, "dense_layers"),
        ({"kv_mode": "window", "kv_retention": "all"}, "RETENTION_MISMATCH"),
        ({"kv_mode": "dense", "kv_retention": "checkpoints"}, "RETENTION_MISMATCH"),
        ({"kv_mode": "dense", "checkpoints": 0}, "PREFIX_REUSE_OFF"),
        ({"kv_mode": "turboquant", "checkpoints": 0}, "PREFIX_REUSE_OFF"),
    ],
)
def test_what_the_family_has_not_is_refused_by_name(folder: Path, settings: dict[str, Any], named: str) -> None:
    shapes = architecture(json.loads((folder / "config.json").read_text()))
    with pytest.raises(ConfigError, match=named):
        shapes.geometry(config_for(folder, **settings), "float32", 512)
    with pytest.raises(ConfigError, match=named):  # before anything starts
        ClusterConfig.of(model=str(folder), listen="127.0.0.1:0", device="cpu", **settings)


@pytest.mark.parametrize(
    "settings",
    [{"kv_retention": "none"}, {"pack_compressed": "tq4"}, {"drafts": 1}, {"checkpoints": 4}],  # in kv_mode dense
    ids=lambda s: next(iter(s)),
)
def test_what_only_this_family_has_is_refused_by_name_elsewhere(tmp_path: Path, settings: dict[str, Any]) -> None:
    folder = tiny.write_model(tmp_path)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=next(iter(settings))):
        load_model(config_for(folder, **settings))
    with pytest.raises(ConfigError, match=next(iter(settings))):
        ClusterConfig.of(model=str(folder), listen="127.0.0.1:0", device="cpu", **settings)


def test_settings_of_the_family_reach_its_geometry_through_the_whole_cluster(folder: Path) -> None:
    asked: dict[str, Any] = {
        "kv_mode": "turboquant",
        "kv_retention": "checkpoints",
        "pack_compressed": "tq3",
        "drafts": 2,
    }
    cluster = ClusterConfig.of(model=str(folder), listen="127.0.0.1:0", device="cpu", **asked)
    shapes = architecture(json.loads((folder / "config.json").read_text()))
    raw, compressed = shapes.geometry(cluster.worker(0, Path("s"), 1 << 26), "float32", 512).groups
    assert (raw.mode, raw.preset, raw.keep_every) == ("turboquant", "tq4", 16)
    assert (compressed.mode, compressed.preset) == ("turboquant", "tq3")
    assert {region.layer for region in raw.regions} == {0, 1, 2, 3}  # the MTP block's rows among them


def test_mode_dense_takes_a_number_of_checkpoints(folder: Path) -> None:
    """Its pending rows lie in tails in every mode, and nothing but a checkpoint can be resumed."""
    model = load(folder, checkpoints=3, max_sequence_tokens=512)
    assert model.geometry.tail_bytes > 0 and not any(group.packed for group in model.geometry.groups)


def test_a_window_that_is_wider_than_the_dense_tail_is_refused_where_raw_rows_are_packed(folder: Path) -> None:
    """There decode would read packed raw rows, which this family's modes promise never to."""
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 512}
    shapes = architecture(config)
    shapes.geometry(config_for(folder), "float32", 2048)
    with pytest.raises(ConfigError, match="DENSE_REACH_PAST_WINDOW"):
        shapes.geometry(config_for(folder, kv_mode="turboquant"), "float32", 2048)


# --- tiny-v4 ---


def test_tiny_v4_is_made_once_and_is_the_same_everywhere(tmp_path: Path) -> None:
    made = tiny_v4.model_folder(tmp_path / "a")
    stamp = (made / FILE).stat().st_mtime_ns
    assert tiny_v4.model_folder(tmp_path / "a") == made and (made / FILE).stat().st_mtime_ns == stamp
    other = tiny_v4.model_folder(tmp_path / "b")
    for name in ("config.json", FILE, "tokenizer.json"):
        assert (made / name).read_bytes() == (other / name).read_bytes()
    assert [path.name for path in (tmp_path / "a").iterdir()] == [made.name]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError) as caught:
        tiny_v4.model_folder(blocked)
    assert caught.value.reason == "CACHE_NOT_WRITABLE"


def test_tiny_v4_has_every_kind_of_part() -> None:
    shapes = DeepseekV4Architecture.parse(tiny_v4.CONFIG).shapes
    assert {*shapes.ratios} == {0, 4, 128} and shapes.num_draft_layers == 1
    assert 0 < shapes.num_hash_layers < shapes.num_layers
    assert shapes.fp4_experts and shapes.weight_block == (128, 128) and shapes.yarn is not None
    assert shapes.index_topk * 4 < 512  # binds within a prompt of the end-to-end test
    assert replace(shapes, window=128) == shapes
