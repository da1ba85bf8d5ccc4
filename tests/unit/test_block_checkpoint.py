"""Checkpoints in FP8 blocks: held as their files have them on a GPU, dequantised on a CPU, refused by name where they
cannot be either.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from kernels.linear_cuda import LinearWeight, Link
from protos.errors import ConfigError, ModelError, TailpackError
from tests.kernels.emulator import needs_compiler
from tests.kernels.test_linear_on_cpu import chain_of, run, worst
from tests.unit.block_checkpoint import QUANTIZATION, SCALE_DTYPES, write_blocks, write_dequantized
from tests.unit.fake_gpu_kernels import ARCH, FakeGpuKernels
from tests.unit.test_llama import reference, same_as_reference
from tests.unit.tiny import Harness, config_for, request
from worker import weights
from worker.config import WorkerConfig
from worker.memory_budget import planned
from worker.memory_plan import ACTIVATIONS, FROM_FP8, GRAPH_POOLS, IN_BLOCKS, WEIGHTS
from worker.models.block_weight import BlockWeight
from worker.models.llama import Llama
from worker.quantization import StoredBlocks, stored_blocks
from worker.switches import switches
from worker.weights import Model, Plan, load_model, planned_uses
from worker.weights_form import WeightsForm
from worker.weights_layout import Layout, tensors

PARTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
GPU = {"device": "cuda:0", "dtype": "auto", "decode_graphs": True}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_blocks(tmp_path / "model")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "torch_device", lambda device: torch.device("cpu"))


def held_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where it is a CPU in float32."""
    monkeypatch.setattr(WeightsForm, "of", staticmethod(lambda *_, **__: WeightsForm(stored=True, held=True)))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("scales", SCALE_DTYPES)
@pytest.mark.usefixtures("on_gpu")
def test_a_gpu_holds_codes_and_scales_as_the_files_have_them(tmp_path: Path, scales: str) -> None:
    folder = write_blocks(tmp_path / "model", scales=scales, hidden_size=640)
    stored = load_file(folder / "model.safetensors")
    model = load_model(config_for(folder, **GPU))
    network = model.network
    assert isinstance(network, Llama)
    for index, layer in enumerate(network.layers):
        for product, names in PARTS.items():
            weight = getattr(layer, product)
            parts = [f"model.layers.{index}.{name}.weight" for name in names]
            assert isinstance(weight, BlockWeight) and weight.dtype == torch.bfloat16
            assert torch.equal(bits(weight.codes), torch.cat([bits(stored[part]) for part in parts]))
            by_block = torch.cat([stored[f"{part}_scale_inv"].float() for part in parts])
            assert weight.scales.dtype == torch.float32 and torch.equal(weight.scales, by_block)
    for held, name in ((network.lm_head, "lm_head.weight"), (network.embed, "model.embed_tokens.weight")):
        assert isinstance(held, torch.Tensor) and torch.equal(held, stored[name])
    uses = {use.owner: use.num_bytes for use in model.uses}
    assert uses.keys() == {WEIGHTS, IN_BLOCKS}
    assert sum(uses.values()) == network.weight_bytes + 2 * 640 * 5, "norms beside them"
    assert model.info.num_parameters == sum(t.numel() for name, t in stored.items() if "_scale_inv" not in name)


@needs_compiler
@pytest.mark.usefixtures("on_gpu")
def test_the_kernel_multiplies_by_the_values_that_the_files_stand_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = write_blocks(tmp_path / "model", hidden_size=640, num_hidden_layers=1)
    network = load_model(config_for(folder, **GPU)).network
    assert isinstance(network, Llama)
    plain = load_file(write_dequantized(tmp_path / "plain", folder) / "model.safetensors")
    for product, names in PARTS.items():
        held = getattr(network.layers[0], product)
        x = torch.randn(2, held.codes.shape[1]).to(torch.bfloat16)
        got = run(chain_of(Link(LinearWeight(held.codes, held.scales, gated=product == "gate_up"))), x, None, seed=1)
        want = [F.linear(x.double(), plain[f"model.layers.0.{name}.weight"].double()) for name in names]
        assert worst(got, F.silu(want[0]) * want[1] if product == "gate_up" else torch.cat(want, dim=-1)) < 1e-2


@pytest.mark.parametrize("held", [True, False], ids=["in blocks", "dequantised"])
def test_tokens_are_those_of_a_plain_model_of_the_same_values(
    tmp_path: Path, folder: Path, held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = reference(write_dequantized(tmp_path / "plain", folder))
    if held:
        held_as_they_are(monkeypatch)
    harness = Harness.load(folder, prefill_chunk=100)
    assert isinstance(harness.engine._model.network.layers[1].down, BlockWeight) == held  # type: ignore[union-attr]
    rng = random.Random(7)
    prompts = [[rng.randrange(211) for _ in range(n)] for n in (1, 40, 130)]
    tokens = harness.run(*(request(f"r{i}", prompt, 6) for i, prompt in enumerate(prompts)))
    for i, prompt in enumerate(prompts):
        same_as_reference(model, prompt, tokens[f"r{i}"])


@pytest.mark.parametrize("shape", [{}, {"hidden_size": 200, "head_dim": 40}], ids=["blocks", "parts of blocks"])
def test_a_cpu_holds_exactly_code_times_scale(tmp_path: Path, shape: dict[str, Any]) -> None:
    folder = write_blocks(tmp_path / "model", **shape)
    model = load_model(config_for(folder))
    plain = load_model(config_for(write_dequantized(tmp_path / "plain", folder)))
    mine, theirs = dict(tensors(model.network)), dict(tensors(plain.network))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[path], theirs[path]) for path in mine)
    assert model.uses[1].owner == FROM_FP8 and planned_uses(folder, "float32")[1] == model.uses[1]


def test_bf16_dequantises_what_a_gpu_would_hold(folder: Path, on_gpu: None) -> None:
    as_stored, asked, dequantised = (
        load_model(config_for(folder, **GPU, weights=form)) for form in ("", "fp8_block", "bf16")
    )
    assert as_stored.info == asked.info and as_stored.form == asked.form
    assert dequantised.info.weights_digest != as_stored.info.weights_digest, "their KV is not the same"
    assert isinstance(as_stored.network, Llama) and isinstance(dequantised.network, Llama)
    for layer, before in zip(dequantised.network.layers, as_stored.network.layers, strict=True):
        assert torch.equal(layer.gate_up, before.gate_up.dense())  # type: ignore[arg-type, union-attr]
    assert all(not isinstance(each.lm_head, BlockWeight) for each in (as_stored.network, asked.network))  # type: ignore[union-attr]


def test_what_is_engaged_is_told(folder: Path, on_gpu: None) -> None:
    def told(model: Model, config: WorkerConfig, arch: str = "sm_90a") -> tuple[str, str, bool]:
        (switch,) = (each for each in switches(config, model.geometry, arch, model.form) if each.name == "weights")
        return switch.configured, switch.engaged, bool(switch.evidence)

    config = config_for(folder, **GPU)
    model = load_model(config)
    assert told(model, config) == ("as stored", "fp8_block, as stored", True)
    eager = replace(config, decode_graphs=False)
    assert told(load_model(eager), eager) == ("as stored", "dequantised from fp8_block", False)
    bf16 = replace(config, weights="bf16")
    assert told(load_model(bf16), bf16) == ("bf16", "dequantised from fp8_block", False)
    cpu = config_for(folder)
    assert told(load_model(cpu), cpu, "") == ("as stored", "dequantised from fp8_block", False)


@pytest.mark.parametrize("head", [128, 64])
def test_layers_that_the_checkpoint_keeps_are_left_alone(
    tmp_path: Path, head: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where their heads would not go into blocks."""
    kept = ("layers.0.mlp.down_proj", "q_proj", "k_proj", "v_proj")
    folder = write_blocks(tmp_path / "model", kept=kept, head_dim=head)
    plain = load_model(config_for(write_dequantized(tmp_path / "plain", folder))).network
    held_as_they_are(monkeypatch)
    network = load_model(config_for(folder)).network
    assert isinstance(network, Llama) and isinstance(plain, Llama)
    first, second = network.layers
    assert isinstance(second.down, BlockWeight) and isinstance(second.gate_up, BlockWeight)
    assert torch.equal(first.down, plain.layers[0].down) and torch.equal(second.qkv, plain.layers[1].qkv)  # type: ignore[arg-type]


def test_null_is_as_if_it_were_not_there() -> None:
    asked = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    nulls = dict.fromkeys(("fmt", "activation_scheme", "scale_fmt", "dequantize", "modules_to_not_convert"))
    assert stored_blocks({"quantization_config": {**asked, **nulls}}) == StoredBlocks()


def test_names_of_modules_that_are_kept() -> None:
    blocks = StoredBlocks(("model.layers.1", "lm_head", "mlp.up_proj", "layers.2.mlp", "proj"))
    held = {
        name for name in ("1.mlp.up_proj", "10.mlp.down_proj", "3.mlp.up_proj") if blocks.holds(f"model.layers.{name}")
    }
    assert held == {"10.mlp.down_proj"}
    assert blocks.holds("model.layers.0.self_attn.o_proj"), "no part of a word"


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors")


UP = "model.layers.1.mlp.up_proj.weight"
SPOILED: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str, str]] = {
    "no scale": (lambda t: t.pop(f"{UP}_scale_inv"), "MISSING_TENSOR", f"{UP}_scale_inv"),
    "scales of other blocks": (
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(4, 2)}),
        "BAD_TENSOR",
        f"{UP}_scale_inv",
    ),
    "integers for scales": (
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(2, 1, dtype=torch.uint8)}),
        "BAD_TENSOR",
        f"{UP}_scale_inv",
    ),
    "a scale that is NaN": (
        lambda t: t.update({f"{UP}_scale_inv": torch.full((2, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)}),
        "BAD_TENSOR",
        "NaN",
    ),
    "a code that is NaN": (lambda t: t[UP].view(torch.uint8)[3, 5].fill_(0xFF), "BAD_TENSOR", UP),
    "not quantised": (lambda t: t.update({UP: torch.ones(256, 128)}), "BAD_TENSOR", UP),
    "a head in blocks": (
        lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(2, 1)}),
        "UNEXPECTED_TENSOR",
        "lm_head.weight_scale_inv",
    ),
    "static activations' scales": (
        lambda t: t.update({UP.replace("weight", "input_scale"): torch.ones(1)}),
        "UNEXPECTED_TENSOR",
        "up_proj.input_scale",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
@pytest.mark.parametrize("settings", [{}, GPU], ids=["cpu", "gpu"])
@pytest.mark.usefixtures("on_gpu")
def test_files_that_do_not_fit_are_refused_by_name(folder: Path, case: str, settings: dict[str, Any]) -> None:
    spoil, reason, named = SPOILED[case]
    edit(folder, spoil)
    with pytest.raises(ModelError) as refused:
        load_model(config_for(folder, **settings))
    assert refused.value.reason == reason and named in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"quant_method": "gptq"}, "quant_method"),
        ({"quant_method": None}, "quant_method"),
        ({"weight_block_size": [64, 128]}, "weight_block_size"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"scale_fmt": "int8"}, "scale_fmt"),
        ({"dequantize": True}, "dequantize"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"ignored_layers": ["re:.*mlp"]}, "ignored_layers"),
        ({"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
    ],
)
def test_another_quantisation_is_refused_by_name(tmp_path: Path, asked: dict[str, Any], named: str) -> None:
    folder = write_blocks(tmp_path / "model", asked={**QUANTIZATION, **asked})
    with pytest.raises(ModelError, match=named) as refused:
        load_model(config_for(folder))
    assert refused.value.reason == "QUANTIZATION_NOT_BUILT"


def fail_to_read(*_: object) -> None:
    raise AssertionError("weights are read before they are known to go")


@pytest.mark.parametrize(
    ("changes", "settings", "named"),
    [
        ({"head_dim": 64}, {}, "q_proj, self_attn.k_proj, self_attn.v_proj cannot be held"),
        ({"hidden_size": 192, "head_dim": 128}, {}, "rows of 192"),
        ({"kept": ("k_proj",)}, {}, "12 of 14 products in blocks"),
        ({"kept": ("0.mlp.down_proj",)}, {}, "13 of 14 products in blocks"),
        ({}, {"dtype": "float16"}, "in float16"),
        ({}, {"dtype": "float16", "weights": "bf16"}, "llama in float16"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("on_gpu")
def test_what_a_gpu_cannot_hold_is_refused_before_it_is_read_and_a_way_is_told(
    tmp_path: Path, changes: dict[str, Any], settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_blocks(tmp_path / "model", **changes)
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "load", fail_to_read)
        with pytest.raises(TailpackError, match=named) as refused:
            load_model(config_for(folder, **{**GPU, **settings}))
    assert refused.value.reason in ("NO_BLOCKS", "WEIGHTS_NOT_ENGAGED")
    load_model(config_for(folder))
    if "weights" not in settings:
        way, value = ("dtype", "bfloat16") if "dtype" in settings else ("weights", "bf16")
        assert f"--{way} {value}" in str(refused.value)
        load_model(config_for(folder, **{**GPU, **settings, way: value}))


def test_fp8_block_is_for_gpus_and_bf16_for_what_is_in_bfloat16(folder: Path) -> None:
    with pytest.raises(ConfigError, match="leave --weights out"):
        config_for(folder, weights="fp8_block")
    with pytest.raises(ConfigError, match="llama in float32"):
        load_model(config_for(folder, weights="bf16"))


def test_layouts_are_known_without_weights_and_those_of_forms_differ(folder: Path, on_gpu: None) -> None:
    layouts = []
    for form in ("", "bf16"):
        plan = Plan.of(config_for(folder, **GPU, weights=form))
        layout = Layout.of(plan.without_weights())
        assert layout == Layout.of(plan.load()[0])
        layouts.append(layout.digest())
    assert len({*layouts}) == 2


def test_a_gpus_budget_counts_blocks_and_a_weight_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpuKernels(monkeypatch)
    blocks, plain = (
        {use.owner: use.num_bytes for use in planned(Plan.of(config), 8 << 30, ARCH, None, "cuda:0").uses}
        for config in (config_for(folder, **GPU, weights=form) for form in ("", "bf16"))
    )
    codes = sum(t.numel() for name, t in load_file(folder / "model.safetensors").items() if t.element_size() == 1)
    assert codes < blocks[IN_BLOCKS] < 1.01 * codes and blocks[IN_BLOCKS] < 0.51 * plain[FROM_FP8]
    assert blocks[WEIGHTS] == plain[WEIGHTS]
    anew = int(1.5 * 2 * 512 * 128)  # of gate and up
    assert blocks[GRAPH_POOLS] - plain[GRAPH_POOLS] == blocks[ACTIVATIONS] - plain[ACTIVATIONS] == anew


def test_a_config_alone_tells_the_same_sizes(folder: Path) -> None:
    from click.testing import CliRunner

    from worker.size_cli import size

    (folder / "tokenizer.json").write_text("{}")
    alone = folder.parent / "config.json"
    alone.write_text((folder / "config.json").read_text())
    owners = []
    for model in (folder, alone):
        answer = CliRunner().invoke(size, ["--model", str(model), "--gpu", "h200", "--dtype", "bfloat16", "--json"])
        assert answer.exit_code == 0, answer.output
        uses = json.loads(answer.output)["uses"]
        owners.append([(use["owner"], use["num_bytes"]) for use in uses if "weights" in use["owner"]])
    assert owners[0] == owners[1] and FROM_FP8 in dict(owners[0])
