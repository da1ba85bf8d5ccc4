"""DeepSeek-V4's config.json.

A layer has a *ratio*: 0 attends to its window of raw rows alone; 4 (CSA, compressed sparse attention) adds a row for
every 4 tokens, of which the lightning indexer picks some; 128 (HCA, heavily compressed attention) adds one for every
128 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from protos.errors import ModelError

MODEL_TYPE = "deepseek_v4"
CSA_RATIO, HCA_RATIO = 4, 128
FP4_BLOCK = 32
"""FP4 weights along the last axis that share a scale."""


@dataclass(frozen=True)
class Yarn:
    """YaRN's stretch (Peng et al. 2023, "YaRN"), without amplitude scaling."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class DeepseekV4Config:
    """What config.json says, in its own words; ``parse`` refuses by name what is missing and what is not built."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    rope_dim: int  # the last of a head's dims
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int  # tokens whose raw rows a query reads, its own included
    ratios: tuple[int, ...]  # of the main layers
    index_heads: int
    index_dim: int
    index_topk: int
    num_experts: int
    experts_per_token: int
    expert_width: int
    routed_scale: float
    num_hash_layers: int  # the first layers, which look experts up by token id
    swiglu_limit: float
    hc_mult: int  # residual streams
    sinkhorn_iterations: int
    hc_eps: float
    norm_eps: float
    rope_theta: float  # of layers with ratio 0, never stretched
    compress_rope_theta: float  # of all other layers
    yarn: Yarn | None  # of all other layers
    max_positions: int
    num_draft_layers: int  # MTP blocks, "mtp.N."
    weight_block: tuple[int, int] | None  # FP8 weights with a scale for each block; None: weights in one of our dtypes
    fp4_experts: bool

    @staticmethod
    def parse(config: Mapping[str, Any]) -> DeepseekV4Config:
        """Raises ModelError: a key is missing or malformed, or it asks for what is not built."""
        _demand_built(config)
        num_layers, num_draft_layers = (
            _integer(config, "num_hidden_layers"),
            _integer(config, "num_nextn_predict_layers", least=0),
        )
        block, fp4_experts = _quantization(config)
        parsed = DeepseekV4Config(
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=_integer(config, "hidden_size"),
            num_layers=num_layers,
            num_heads=_integer(config, "num_attention_heads"),
            head_dim=_integer(config, "head_dim"),
            rope_dim=_integer(config, "qk_rope_head_dim"),
            q_lora_rank=_integer(config, "q_lora_rank"),
            o_groups=_integer(config, "o_groups"),
            o_lora_rank=_integer(config, "o_lora_rank"),
            window=_integer(config, "sliding_window"),
            ratios=_ratios(config, num_layers, num_draft_layers),
            index_heads=_integer(config, "index_n_heads"),
            index_dim=_integer(config, "index_head_dim"),
            index_topk=_integer(config, "index_topk"),
            num_experts=_integer(config, "n_routed_experts"),
            experts_per_token=_integer(config, "num_experts_per_tok"),
            expert_width=_integer(config, "moe_intermediate_size"),
            routed_scale=_number(config, "routed_scaling_factor"),
            num_hash_layers=_integer(config, "num_hash_layers", least=0),
            swiglu_limit=_number(config, "swiglu_limit"),
            hc_mult=_integer(config, "hc_mult"),
            sinkhorn_iterations=_integer(config, "hc_sinkhorn_iters"),
            hc_eps=_number(config, "hc_eps"),
            norm_eps=_number(config, "rms_norm_eps"),
            rope_theta=_number(config, "rope_theta"),
            compress_rope_theta=_number(config, "compress_rope_theta"),
            yarn=_yarn(config),
            max_positions=_integer(config, "max_position_embeddings"),
            num_draft_layers=num_draft_layers,
            weight_block=block,
            fp4_experts=fp4_experts,
        )
        _demand_fit(parsed)
        return parsed

    def layer_ratio(self, layer: int) -> int:
        """Draft layers, which follow the main ones, have ratio 0."""
        return self.ratios[layer] if layer < self.num_layers else 0


def pending_width(ratio: int, dim: int) -> int:
    """Values of a pending row: with overlap (CSA) a token gives one share to its own block and one to the next."""
    return 2 * dim if ratio == CSA_RATIO else dim


def _demand_built(config: Mapping[str, Any]) -> None:
    for key, built in (
        ("model_type", MODEL_TYPE),
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
    ):
        if config.get(key) != built:
            raise ModelError(f"config.json: this {key} is not built", given=config.get(key), allowed=built)
    for key, built in (("hidden_act", "silu"), ("attention_bias", False), ("tie_word_embeddings", False)):
        if config.get(key, built) != built:
            raise ModelError(f"config.json: this {key} is not built", given=config[key], allowed=built)
    for key in ("layer_types", "mlp_layer_types", "compress_rates", "rope_parameters"):
        if key in config:  # transformers' own spelling: read half, YaRN would be lost without a word
            raise ModelError(
                f"config.json: {key} is not read, the official spelling is",
                given=config[key],
                allowed="compress_ratios, num_hash_layers, rope_theta, compress_rope_theta and rope_scaling",
                hint="use config.json as the model's authors publish it",
            )
    for key in config:
        if key.startswith("dspark_"):
            raise ModelError("config.json: DSpark's draft layers are not built", given=key, allowed="MTP blocks")


def _demand_fit(c: DeepseekV4Config) -> None:
    for holds, given, allowed in (
        (c.num_heads % c.o_groups == 0, f"{c.num_heads} heads, o_groups {c.o_groups}", "heads a multiple of o_groups"),
        (
            c.rope_dim % 2 == 0 and c.rope_dim <= min(c.head_dim, c.index_dim),
            f"qk_rope_head_dim {c.rope_dim}, head_dim {c.head_dim}, index_head_dim {c.index_dim}",
            "an even qk_rope_head_dim inside both",
        ),
        (
            c.experts_per_token <= c.num_experts,
            f"num_experts_per_tok {c.experts_per_token}, n_routed_experts {c.num_experts}",
            "no more than there are",
        ),
        (
            c.num_hash_layers <= c.num_layers,
            f"num_hash_layers {c.num_hash_layers}, num_hidden_layers {c.num_layers}",
            "no more than there are",
        ),
        (
            not c.fp4_experts or not (c.hidden_size % FP4_BLOCK or c.expert_width % FP4_BLOCK),
            f"FP4 experts of {c.hidden_size} x {c.expert_width}",
            f"multiples of {FP4_BLOCK}",
        ),
    ):
        if not holds:
            raise ModelError("config.json: sizes do not fit together", given=given, allowed=allowed)


def _ratios(config: Mapping[str, Any], num_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    given = config.get("compress_ratios")
    if (
        not isinstance(given, list)
        or not all(type(ratio) is int and ratio in (0, CSA_RATIO, HCA_RATIO) for ratio in given)
        or len(given) != num_layers + num_draft_layers
        or any(given[num_layers:])
    ):
        raise ModelError(
            "config.json: compress_ratios is missing or malformed",
            given=given,
            allowed=f"{num_layers} of 0, {CSA_RATIO}, {HCA_RATIO}, and a 0 for each of {num_draft_layers} draft layers",
        )
    return tuple(given[:num_layers])


def _yarn(config: Mapping[str, Any]) -> Yarn | None:
    if "rope_scaling" not in config:  # null says that there is none
        raise ModelError("config.json: rope_scaling is missing", given="nothing", allowed="an object, or null")
    rope = config["rope_scaling"]
    if rope is None:
        return None
    known = {"type", "rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow"}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn" or set(rope) - known:
        raise ModelError(
            "this rotary embedding is not built",
            reason="ROPE_NOT_BUILT",
            given=rope,
            allowed=f"type yarn with {', '.join(sorted(known - {'type', 'rope_type'}))}, or null",
        )
    return Yarn(
        factor=_number(rope, "factor"),
        original_positions=_integer(rope, "original_max_position_embeddings"),
        beta_fast=_number(rope, "beta_fast"),
        beta_slow=_number(rope, "beta_slow"),
    )


def _quantization(config: Mapping[str, Any]) -> tuple[tuple[int, int] | None, bool]:
    """Block of an FP8 scale, None where weights are not quantised; and whether experts are FP4."""
    quantization, expert_dtype = config.get("quantization_config"), config.get("expert_dtype")
    if quantization is None and expert_dtype is None:
        return None, False
    block = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    fits = (
        isinstance(quantization, Mapping)
        and (quantization.get("quant_method"), quantization.get("fmt")) == ("fp8", "e4m3")
        and expert_dtype in ("fp4", "fp8")
        and isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )
    if not fits or not isinstance(block, list):
        raise ModelError(
            "these quantised weights are not built",
            reason="QUANTIZATION_NOT_BUILT",
            given=f"quantization_config {quantization}, expert_dtype {expert_dtype}",
            allowed="quant_method fp8, fmt e4m3 with weight_block_size, expert_dtype fp4 or fp8; or neither key",
        )
    return (block[0], block[1]), expert_dtype == "fp4"


def _integer(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        allowed = f"an integer of at least {least}"
        raise ModelError(f"config.json: {key} is missing or malformed", given=value, allowed=allowed)
    return value


def _number(config: Mapping[str, Any], key: str) -> float:
    value = config.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelError(f"config.json: {key} is missing or malformed", given=value, allowed="a number above 0")
    return float(value)
