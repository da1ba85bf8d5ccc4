"""``tiny-v4``: a random DeepSeek-V4 of a few megabytes, written as a real model folder, to try the family anywhere.

It has every kind of layer (window alone, CSA with a binding index_topk, HCA), layers that look experts up by token id,
an MTP block, FP8 weights and FP4 experts, in the official checkpoint's names. What it says means nothing. Its tokenizer
has a token for every byte and DeepSeek-V4's own special tokens.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from hashlib import blake2b
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

from protos.errors import ConfigError
from worker.checkpoint import FP4, FP8, INTEGERS, SCALES, Expected
from worker.families import architecture
from worker.gguf_model import CACHE_HINT, cache_root

NAME = "tiny-v4"
FORMAT = 1  # raise it when what is written changes other than by CONFIG
SEED = 20261130

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
SPECIAL = (BOS, EOS, PAD)  # ids 0, 1, 2, and without text
TURNS = ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>")

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 263,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "compress_ratios": [0, 0, 4, 128, 4, 128, 0],
    "index_n_heads": 8,
    "index_head_dim": 64,
    "index_topk": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 2,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def model_folder(cache: Path | None = None) -> Path:
    """The folder, written when the cache does not hold it.

    Safe with several processes at once: each writes a draft of its own, and the first one renamed is kept.

    Args:
        cache: where model folders are kept; None for ``gguf_model.cache_root()``.

    Raises:
        ConfigError: CACHE_NOT_WRITABLE.
    """
    root = cache or cache_root()
    made_of = json.dumps([FORMAT, SEED, CONFIG]).encode()
    folder = root / f"{NAME}-{blake2b(made_of, digest_size=8).hexdigest()}"
    if folder.is_dir():  # renamed when it was whole
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=root))
    except OSError as failure:
        raise ConfigError(
            f"the cache folder cannot be written: {failure.strerror}",
            reason="CACHE_NOT_WRITABLE",
            given=root,
            allowed="a folder to write in",
            hint=CACHE_HINT,
        ) from failure
    try:
        write_model(draft)
        draft.chmod(0o755)
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def write_model(folder: Path, *, seed: int = SEED, **changes: Any) -> Path:
    """Writes config.json with these ``changes``, model.safetensors and tokenizer.json."""
    config = {**CONFIG, **changes}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, wanted in architecture(config).tensors().items():
        tensors[name] = _random(name, wanted, generator, config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def _random(name: str, wanted: Expected, generator: torch.Generator, config: dict[str, Any]) -> torch.Tensor:
    """Large enough, what a fresh model has as zeros too, that every part shows in the logits."""
    shape = wanted.shape
    if wanted.dtypes == INTEGERS:
        order = torch.rand(shape[0], config["n_routed_experts"], generator=generator).argsort(-1)
        return order[:, : shape[1]].contiguous()
    if wanted.dtypes == SCALES:  # 2^-5 to 2^-3, as bytes
        exponents = torch.randint(122, 125, shape, generator=generator, dtype=torch.uint8)
        return exponents.view(torch.float8_e8m0fnu)
    if wanted.dtypes == FP4:
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    noise = torch.randn(shape, generator=generator)
    if wanted.dtypes == FP8:
        return noise.to(torch.float8_e4m3fn)
    if name.endswith("norm.weight"):
        value = 1 + 0.2 * noise
    elif name.endswith(("attn_sink", "ape")) or name == "embed.weight":
        value = noise
    elif name.endswith(("_base", "_scale")):
        value = 0.5 * noise
    elif name.endswith("gate.bias"):
        value = 0.3 * noise
    else:
        value = noise * shape[-1] ** -0.5
    return value if wanted.held == "float32" else value.bfloat16()


def write_tokenizer(folder: Path) -> None:
    """A token for every byte, and DeepSeek-V4's special tokens and marks of turns."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL, *alphabet]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in TURNS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
