"""DeepSeek-V4's config.json, checkpoint names and cache geometry, against the published models' numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.geometry import CacheGeometry
from protos.errors import ConfigError, ModelError
from tests.unit.deepseek_v4_tiny import TINY, tiny_config
from worker.models.deepseek_v4_checkpoint import is_integer, kept_in_float32, tensors
from worker.models.deepseek_v4_config import DeepseekV4Config
from worker.models.deepseek_v4_geometry import COMPRESSED, RAW, cache_geometry, demand_raw_reach, with_raw_mode

FLASH: dict[str, Any] = {
    **TINY,
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "compress_ratios": [0, 0, *([4, 128] * 20), 4, 0],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "swiglu_limit": 10.0,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
PRO: dict[str, Any] = {
    **FLASH,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "compress_ratios": [128, 128, *([4, 128] * 29), 4, 0],
    "index_topk": 1024,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "routed_scaling_factor": 2.5,
}


@pytest.mark.parametrize(("config", "growing", "raw"), [(FLASH, 6880, 44032), (PRO, 9848, 62464)])
def test_bytes_a_token_are_those_of_the_published_models(config: dict[str, Any], growing: int, raw: int) -> None:
    geometry = cache_geometry(DeepseekV4Config.parse(config), "bfloat16")
    assert geometry.group(COMPRESSED).page_bytes == 128 * growing
    assert geometry.group(RAW).page_bytes == 128 * raw
    assert geometry.group(RAW).window == 128 and geometry.group(COMPRESSED).window == 0
    assert geometry.group(COMPRESSED).has_pending and not geometry.group(RAW).has_pending
    with_drafts = cache_geometry(DeepseekV4Config.parse(config), "bfloat16", drafts=True)
    assert with_drafts.group(RAW).page_bytes == 128 * (raw + 1024)


def test_modes_of_the_raw_rows_on_flash() -> None:
    geometry = cache_geometry(DeepseekV4Config.parse(FLASH), "bfloat16")

    def a_token(changed: CacheGeometry) -> tuple[float, float]:
        return tuple(changed.group(name).page_bytes / 128 for name in (RAW, COMPRESSED))  # type: ignore[return-value]

    assert a_token(with_raw_mode(geometry, "turboquant", "tq4")) == (43 * 260, 6880)
    assert a_token(with_raw_mode(geometry, "fp8")) == (43 * 590, 6880)
    assert a_token(with_raw_mode(geometry, "window")) == (0, 6880)
    raw, packed = a_token(with_raw_mode(geometry, "turboquant", "tq4", pack_compressed="tq4"))
    records = 21 * (260 + 68) / 4 + 20 * 260 / 128  # 1762.6; a page's one HCA record is padded to 128-byte planes
    assert raw == 43 * 260 and records <= packed < 1800
    least = with_raw_mode(geometry, "window", pack_compressed="tq4")
    assert a_token(least) == (0, packed)
    assert {region.kind for region in least.group(COMPRESSED).paged_regions} == {"csa", "hca", "index"}


def test_retention_of_raw_rows_on_flash() -> None:
    """Every raw row packed costs more than all else that V4 keeps; one page in 16 and nothing do not."""
    geometry = cache_geometry(DeepseekV4Config.parse(FLASH), "bfloat16")
    assert with_raw_mode(geometry, "turboquant", "tq4").bytes_per_token == 11180 + 6880
    kept = with_raw_mode(geometry, "turboquant", "tq4", retention="checkpoints")
    assert (kept.group(RAW).keep_every, kept.group(RAW).retention) == (16, "checkpoints")
    assert kept.bytes_per_token == 11180 / 16 + 6880
    assert with_raw_mode(geometry, "fp8", retention="checkpoints", keep_every=5).group(RAW).keep_every == 5
    assert with_raw_mode(geometry, "window", retention="none") == with_raw_mode(geometry, "window")
    for mode, retention in [("window", "all"), ("turboquant", "none"), ("dense", "checkpoints"), ("fp8", "some")]:
        with pytest.raises(ConfigError, match=f"does not go with their mode {mode}") as caught:
            with_raw_mode(geometry, mode, "tq4" if mode == "turboquant" else "", retention=retention)
        assert caught.value.reason == "RETENTION_MISMATCH"


def test_raw_rows_that_are_read_past_the_window_stay_dense() -> None:
    geometry = cache_geometry(DeepseekV4Config.parse(FLASH), "bfloat16")
    demand_raw_reach(geometry, 0)
    for changed in (with_raw_mode(geometry, "turboquant", "tq4"), with_raw_mode(geometry, "window")):
        demand_raw_reach(changed, 128)
        with pytest.raises(ConfigError) as caught:
            demand_raw_reach(changed, 0)
        assert caught.value.reason == "DENSE_REACH_PAST_WINDOW"


def test_pending_rows_are_float32_rings_deeper_than_their_block_and_the_margin() -> None:
    config = DeepseekV4Config.parse(FLASH)
    geometry = cache_geometry(config, "bfloat16")
    group = geometry.group(COMPRESSED)
    rings = {(p.region.layer, p.region.kind): p for p in geometry.tail_planes(group)}
    assert {kind for _, kind in rings} == {"csa_pending", "hca_pending", "index_pending"}
    for (layer, kind), plane in rings.items():
        ratio = config.layer_ratio(layer)
        rows, heads, dim = plane.shape
        assert plane.region.dtype == "float32" and heads == 2
        assert dim == {"csa_pending": 1024, "hca_pending": 512, "index_pending": 256}[kind]
        block = ratio if kind == "hca_pending" else 2 * ratio
        assert 0 <= rows - (block - 1 + geometry.margin + 3 * geometry.max_step_tokens) < 8
    assert len(rings) == 21 * 2 + 20
    assert geometry.tail_bytes == sum(p.num_bytes for p in rings.values()) == 26_460_160
    plain = replace(geometry, max_step_tokens=1)  # without drafts; at rings of the blocks alone it would be 12.2 MB
    assert plain.tail_bytes == 19_333_120


def test_names_and_shapes_of_the_official_checkpoint() -> None:
    shapes = tensors(DeepseekV4Config.parse(FLASH))
    assert {name: shapes[name] for name in EXPECTED} == EXPECTED
    assert not {name for name in ABSENT if name in shapes}
    per_expert = 6
    assert sum(".ffn.experts." in name for name in shapes) == 44 * 256 * per_expert
    assert sum(name.startswith("layers.7.") and ".ffn.experts." not in name for name in shapes) == 2 + 6 + 17 + 2 + 6
    expert_bytes = sum(shape[0] * shape[1] for name, shape in shapes.items() if ".ffn.experts." in name)
    assert expert_bytes == 44 * 256 * 3 * (4096 * 2048 // 2 + 4096 * 2048 // 32)  # 151 GB of FP4 experts


EXPECTED: dict[str, tuple[int, ...]] = {
    "embed.weight": (129280, 4096),
    "head.weight": (129280, 4096),
    "norm.weight": (4096,),
    "hc_head_fn": (4, 16384),
    "hc_head_base": (4,),
    "hc_head_scale": (1,),
    "layers.0.attn_norm.weight": (4096,),
    "layers.0.hc_attn_fn": (24, 16384),
    "layers.0.hc_ffn_base": (24,),
    "layers.0.hc_ffn_scale": (3,),
    "layers.0.attn.wq_a.weight": (1024, 4096),
    "layers.0.attn.wq_a.scale": (8, 32),
    "layers.0.attn.q_norm.weight": (1024,),
    "layers.0.attn.wq_b.weight": (32768, 1024),
    "layers.0.attn.wkv.weight": (512, 4096),
    "layers.0.attn.kv_norm.weight": (512,),
    "layers.0.attn.attn_sink": (64,),
    "layers.0.attn.wo_a.weight": (8192, 4096),
    "layers.0.attn.wo_b.weight": (4096, 8192),
    "layers.2.attn.compressor.wkv.weight": (1024, 4096),
    "layers.2.attn.compressor.ape": (4, 1024),
    "layers.2.attn.compressor.norm.weight": (512,),
    "layers.2.attn.indexer.wq_b.weight": (8192, 1024),
    "layers.2.attn.indexer.wq_b.scale": (64, 8),
    "layers.2.attn.indexer.weights_proj.weight": (64, 4096),
    "layers.2.attn.indexer.compressor.wgate.weight": (256, 4096),
    "layers.2.attn.indexer.compressor.ape": (4, 256),
    "layers.2.attn.indexer.compressor.norm.weight": (128,),
    "layers.3.attn.compressor.wkv.weight": (512, 4096),
    "layers.3.attn.compressor.ape": (128, 512),
    "layers.2.ffn.gate.tid2eid": (129280, 6),
    "layers.3.ffn.gate.bias": (256,),
    "layers.3.ffn.gate.weight": (256, 4096),
    "layers.42.ffn.experts.255.w1.weight": (2048, 2048),
    "layers.42.ffn.experts.255.w1.scale": (2048, 128),
    "layers.42.ffn.experts.255.w2.weight": (4096, 1024),
    "layers.42.ffn.experts.255.w2.scale": (4096, 64),
    "layers.42.ffn.shared_experts.w2.weight": (4096, 2048),
    "layers.42.ffn.shared_experts.w2.scale": (32, 16),
    "mtp.0.e_proj.weight": (4096, 4096),
    "mtp.0.enorm.weight": (4096,),
    "mtp.0.hc_head_fn": (4, 16384),
    "mtp.0.ffn.gate.bias": (256,),
}
ABSENT = (
    "layers.0.attn.compressor.ape",
    "layers.3.attn.indexer.wq_b.weight",
    "layers.2.ffn.gate.bias",
    "layers.3.ffn.gate.tid2eid",
    "layers.2.attn.compressor.wkv.scale",
    "mtp.0.ffn.gate.tid2eid",
    "mtp.0.attn.compressor.ape",
    "mtp.0.embed.weight",
    "layers.43.attn_norm.weight",
)


def test_what_is_kept_in_float32() -> None:
    config = {**TINY, "num_nextn_predict_layers": 1, "compress_ratios": [0, 4, 128, 4, 128, 0]}
    names = tensors(DeepseekV4Config.parse(config))
    exact = {name.split(".", 2)[-1] for name in names if kept_in_float32(name)}
    assert {"attn.attn_sink", "hc_attn_fn", "hc_ffn_scale", "attn.compressor.ape", "attn.q_norm.weight"} <= exact
    assert {"attn.compressor.wkv.weight", "attn.indexer.compressor.wgate.weight", "ffn.gate.weight"} <= exact
    assert {"ffn.gate.bias", "attn_norm.weight", "enorm.weight", "hnorm.weight"} <= exact
    assert not any("experts" in name or "wq_" in name or "wo_" in name or "_proj" in name for name in exact)
    assert {name for name in names if is_integer(name)} == {
        "layers.0.ffn.gate.tid2eid",
        "layers.1.ffn.gate.tid2eid",
    }


@pytest.mark.parametrize("key", [key for key in TINY if key not in ("hidden_act", "tie_word_embeddings")])
def test_nothing_is_assumed_in_place_of_a_missing_key(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        DeepseekV4Config.parse({k: v for k, v in TINY.items() if k != key})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "deepseek_v41"}, "model_type"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"num_key_value_heads": 2}, "num_key_value_heads"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"compress_ratios": [0, 4, 128, 4]}, "compress_ratios"),
        ({"compress_ratios": [0, 4, 128, 4, 2]}, "compress_ratios"),
        ({"compress_ratios": [0, 4, 128, 4, True]}, "compress_ratios"),
        ({"compress_ratios": [0, 4, 128, 4, 128, 4], "num_nextn_predict_layers": 1}, "compress_ratios"),
        ({"o_groups": 3}, "o_groups"),
        ({"qk_rope_head_dim": 18}, "qk_rope_head_dim"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"num_hash_layers": 6}, "num_hash_layers"),
        ({"swiglu_limit": 0}, "swiglu_limit"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_parameters": {"main": {}, "compress": {}}}, "rope_parameters"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {**TINY["rope_scaling"], "mscale": 1.0}}, "rotary"),
        ({"rope_scaling": {**TINY["rope_scaling"], "type": "llama3"}}, "rotary"),
        ({"dspark_block_size": 5}, "DSpark"),
        ({"expert_dtype": "fp4"}, "quantised"),
        ({**{k: FLASH[k] for k in ("quantization_config", "expert_dtype")}, "moe_intermediate_size": 40}, "FP4"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"(?i){named}"):
        DeepseekV4Config.parse({**TINY, **changes})


def test_a_checkpoint_without_quantisation_has_no_scales() -> None:
    assert not any(name.endswith(".scale") for name in tensors(tiny_config()))
    assert tensors(tiny_config())["layers.4.ffn.experts.7.w1.weight"] == (32, 64)
