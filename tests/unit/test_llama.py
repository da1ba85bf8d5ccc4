"""The llama family against transformers on random tiny models: greedy tokens and logits, in float32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.errors import ModelError
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker.models.layers import rope_tables
from worker.models.llama import LlamaConfig
from worker.weights import load_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa3": {},
    "mha": {"num_key_value_heads": 6},
    "gqa7": {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 56},
    "untied": {"tie_word_embeddings": False},
    "wide_heads": {"head_dim": 32},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
    "mistral_window": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 60},
    "qwen2_window": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "use_sliding_window": True,
        "sliding_window": 60,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}


def reference(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def same_as_reference(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Every token is the reference's most likely one after the same history, or within 1e-4 of it."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    short = logits.max(-1).values - logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    assert float(short.max()) <= 1e-4, f"token {int(short.argmax())} is {float(short.max()):.3g} below the best"


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, variant: str) -> None:
    folder = write_model(tmp_path, seed=sorted(VARIANTS).index(variant), **VARIANTS[variant])
    model = reference(folder)
    rng = random.Random(5)
    prompts = [[rng.randrange(TINY["vocab_size"]) for _ in range(n)] for n in (1, 2, 40, 127, 128, 129, 300)]
    for deterministic in (False, True):
        harness = Harness.load(folder, deterministic=deterministic, prefill_chunk=300 if deterministic else 100)
        tokens = harness.run(*(request(f"r{i}", p, 9) for i, p in enumerate(prompts)))
        for i, prompt in enumerate(prompts):
            assert len(tokens[f"r{i}"]) == 9
            same_as_reference(model, prompt, tokens[f"r{i}"])


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 40, 130])
def test_odd_chunk_sizes_give_the_same_logits(tmp_path: Path, chunk: int) -> None:
    folder = write_model(tmp_path, seed=1)
    rng = random.Random(chunk)
    prompt = [rng.randrange(TINY["vocab_size"]) for _ in range(277)]
    logprobs = []
    for size in (chunk, 1024):
        harness = Harness.load(folder, prefill_chunk=size)
        harness.run(request("r", prompt, 3, logprobs=20))
        logprobs.append([[t.logprob for t in p.top] for o in harness.outputs["r"] for p in o.logprobs])
    assert torch.allclose(torch.tensor(logprobs[0]), torch.tensor(logprobs[1]), atol=2e-4)


def test_llama3_rope_table_is_that_of_transformers() -> None:
    from transformers import LlamaConfig as HfConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "hidden_size": 64, "num_attention_heads": 1}
    embedding = LlamaRotaryEmbedding(HfConfig(**config, max_position_embeddings=512))
    cos, sin = embedding(torch.zeros(1, 512, 64), torch.arange(512).unsqueeze(0))
    ours = rope_tables(config, 64, 512)
    assert torch.allclose(ours[0], cos[0, :, :32], atol=1e-5)
    assert torch.allclose(ours[1], sin[0, :, :32], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "ROPE_NOT_BUILT"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "BAD_MODEL"),
        ({"partial_rotary_factor": 0.5}, "ROPE_NOT_BUILT"),
    ],
)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    folder = write_model(tmp_path, **changes)
    with pytest.raises(ModelError) as refused:
        load_model(config_for(folder))
    assert refused.value.reason == reason


def test_a_window_that_no_sequence_outgrows_is_none(tmp_path: Path) -> None:
    folder = write_model(tmp_path, model_type="mistral", sliding_window=512)
    (group,) = load_model(config_for(folder, max_sequence_tokens=512)).geometry.groups
    assert (group.name, group.window) == ("full", 0)
    (group,) = load_model(config_for(folder, max_sequence_tokens=513)).geometry.groups
    assert (group.name, group.window) == ("window", 512)


def test_layers_with_and_without_a_window_are_two_groups(tmp_path: Path) -> None:
    folder = write_model(tmp_path, **VARIANTS["qwen2_window"])
    groups = load_model(config_for(folder)).geometry.groups
    assert [(g.name, g.window, sorted({r.layer for r in g.regions})) for g in groups] == [
        ("full", 0, [0]),
        ("window", 60, [1, 2]),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 4},
        {"hidden_size": None},
        {"head_dim": 7},
        {"model_type": "mistral", "sliding_window": 9, "layer_types": ["full_attention"] * 2},
        {"model_type": "mistral", "sliding_window": 9, "layer_types": ["chunked_attention"] * 3},
        {"model_type": "mistral", "sliding_window": 0},
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        LlamaConfig.parse({**TINY, **change})
