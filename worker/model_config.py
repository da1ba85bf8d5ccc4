"""config.json and generation_config.json: every value that is used has its type and its range, or is refused by name.

Needs no tensor library, so the supervisor reads a model's configuration before it starts anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protos.errors import ConfigError, ModelError
from worker.quantization import stored_blocks

# Key -> least and greatest value. Wide: they keep out what cannot be meant, not what is unusual.
_INTEGERS = {
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 24),
    "num_hidden_layers": (1, 4096),
    "num_attention_heads": (1, 1 << 16),
    "num_key_value_heads": (1, 1 << 16),
    "head_dim": (1, 1 << 16),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 24),
    "sliding_window": (1, 1 << 31),
    "max_window_layers": (0, 4096),
    "moe_intermediate_size": (1, 1 << 24),
    "n_routed_experts": (1, 1 << 16),
    "num_nextn_predict_layers": (0, 64),
    "qk_rope_head_dim": (1, 1 << 16),
    "q_lora_rank": (1, 1 << 20),
    "o_lora_rank": (1, 1 << 20),
    "index_n_heads": (1, 1 << 16),
    "index_head_dim": (1, 1 << 16),
    "index_topk": (1, 1 << 24),
    "hc_mult": (1, 64),
    "hc_sinkhorn_iters": (1, 1024),
}
_NUMBERS = {
    "rms_norm_eps": (1e-12, 1.0),
    "rope_theta": (1.0, 1e15),
    "compress_rope_theta": (1.0, 1e15),
    "partial_rotary_factor": (0.0, 1.0),
}
_FLAGS = ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window")
_ROPE_NUMBERS = {
    "rope_theta": _NUMBERS["rope_theta"],
    "partial_rotary_factor": _NUMBERS["partial_rotary_factor"],
    "factor": (1.0, 1e6),
    "low_freq_factor": (1e-3, 1e6),
    "high_freq_factor": (1e-3, 1e6),
    "original_max_position_embeddings": (1.0, float(1 << 24)),
}
_NULL_SAYS_NONE = ("rope_scaling",)  # DeepSeek-V4 must say whether it stretches
_QUANTIZED = ("deepseek_v4",)  # families with quantised weights of their own kind, which they check by themselves


def read_json(file: Path) -> Mapping[str, Any]:
    """A JSON object out of a file of the model folder.

    Raises:
        ModelError: UNREADABLE_WEIGHTS, the file cannot be read or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"cannot read {file.name}: {error}",
            reason="UNREADABLE_WEIGHTS",
            given=file,
            allowed="a readable, whole file",
        ) from error
    return value


def checked(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """config.json with every value as it must be, and without those that are null: absent is what that means.

    What must be there, the model family says.

    Raises:
        ModelError: a value is of another type or out of its range (BAD_MODEL), or asks for what is not built
            (QUANTIZATION_NOT_BUILT).
    """
    config = {
        key: {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value
        for key, value in config.items()
        if value is not None or key in _NULL_SAYS_NONE
    }
    for key, (least, most) in _INTEGERS.items():
        _integer(config, key, least, most)
    for key, limits in _NUMBERS.items():
        _number(config, key, *limits)
    for key in _FLAGS:
        if not isinstance(config.get(key, False), bool):
            raise _refused(key, config[key], "true or false")
    for key in ("rope_parameters", "rope_scaling"):
        if config.get(key) is not None:
            _check_rope(key, config[key])
    layer_types = config.get("layer_types", [])
    if not isinstance(layer_types, list) or not all(isinstance(each, str) for each in layer_types):
        raise _refused("layer_types", layer_types, "a list of names")
    if config.get("model_type") not in _QUANTIZED:
        stored_blocks(config)
    return config


def eos_token_ids(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ends of sequence: those of generation_config.json, which chat models extend, and of config.json, in order.

    Raises:
        ModelError: one is no token id of the vocabulary.
    """
    generation = folder / "generation_config.json"
    ids: set[int] = set()
    for name, source in (
        ("config.json", config),
        (generation.name, read_json(generation) if generation.exists() else {}),
    ):
        value = source.get("eos_token_id")
        for token_id in value if isinstance(value, list) else [] if value is None else [value]:
            if not _is_integer(token_id) or not 0 <= token_id < config["vocab_size"]:
                allowed = f"token ids, 0 to {config['vocab_size'] - 1}"
                raise ModelError(f"{name}: eos_token_id is malformed", given=_shown(value), allowed=allowed)
            ids.add(token_id)
    return tuple(sorted(ids))


def check_folder(folder: Path, max_sequence_tokens: int) -> None:
    """What can be said of a model folder without reading its weights.

    Raises:
        ModelError: config.json or generation_config.json is malformed, or there is no tokenizer.json.
        ConfigError: ``max_sequence_tokens`` is more than the model's.
    """
    config = checked(read_json(folder / "config.json"))
    if "vocab_size" in config:
        eos_token_ids(folder, config)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(
            "the model folder holds no tokenizer", reason="BAD_TOKENIZER", given=folder, allowed="tokenizer.json in it"
        )
    check_length(config, max_sequence_tokens)


def check_length(config: Mapping[str, Any], max_sequence_tokens: int) -> None:
    """Raises ConfigError: ``max_sequence_tokens`` is more than the model has positions."""
    most = config.get("max_position_embeddings")
    if most is not None and max_sequence_tokens > most:
        raise ConfigError(
            "max_sequence_tokens is more than the model's positions",
            given=max_sequence_tokens,
            allowed=f"at most {most}",
        )


def _check_rope(key: str, rope: Any) -> None:
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise _refused(key, rope, "an object of plain values")
    for name, limits in _ROPE_NUMBERS.items():
        _number(rope, name, *limits, prefix=f"{key}.")
    low, high = rope.get("low_freq_factor", 0), rope.get("high_freq_factor", math.inf)
    if low >= high:
        raise _refused(f"{key}.high_freq_factor", high, f"more than low_freq_factor, {low}")


def _integer(config: Mapping[str, Any], key: str, least: int, most: int) -> None:
    value = config.get(key)
    if value is not None and not (_is_integer(value) and least <= value <= most):
        raise _refused(key, value, f"an integer from {least} to {most}")


def _number(config: Mapping[str, Any], key: str, least: float, most: float, *, prefix: str = "") -> None:
    value = config.get(key)
    if value is None:
        return
    # An integer first: one of hundreds of digits is no float.
    fits = isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most
    if not fits or not math.isfinite(value):
        raise _refused(f"{prefix}{key}", value, f"a number from {least:g} to {most:g}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(key: str, value: object, allowed: str) -> ModelError:
    return ModelError(f"config.json: {key} is malformed", given=_shown(value), allowed=allowed)


def _shown(value: object) -> str:
    # Python spells no integer of more than 4300 digits.
    try:
        text = repr(value)
    except ValueError:
        text = "a number of thousands of digits"
    return text if len(text) <= 200 else f"{text[:200]}..."
