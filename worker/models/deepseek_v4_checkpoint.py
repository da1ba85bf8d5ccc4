"""The tensors of DeepSeek-V4's official checkpoint: names, shapes, and what the model computes them in."""

from __future__ import annotations

from worker.models.deepseek_v4_config import CSA_RATIO, FP4_BLOCK, DeepseekV4Config, pending_width

Shapes = dict[str, tuple[int, ...]]


def tensors(config: DeepseekV4Config) -> Shapes:
    """Name and shape of every tensor of the official checkpoint, scales of quantised ones included.

    FP4 weights are packed, two to a byte along the last axis. ``kept_in_float32`` and ``is_integer`` say the rest.
    """
    hidden = config.hidden_size
    shapes: Shapes = {
        "embed.weight": (config.vocab_size, hidden),
        "head.weight": (config.vocab_size, hidden),
        "norm.weight": (hidden,),
        **_hc_head(config, ""),
    }
    for layer in range(config.num_layers):
        shapes |= _block(config, f"layers.{layer}.", config.ratios[layer], hashed=layer < config.num_hash_layers)
    for draft in range(config.num_draft_layers):
        at = f"mtp.{draft}."
        shapes |= _block(config, at, 0, hashed=False) | _hc_head(config, at)
        shapes |= {at + name + ".weight": (hidden,) for name in ("enorm", "hnorm", "norm")}
        for name in ("e_proj", "h_proj"):
            shapes |= _fp8(config, at + name, hidden, hidden)
    return shapes


def _block(config: DeepseekV4Config, at: str, ratio: int, *, hashed: bool) -> Shapes:
    hidden, streams = config.hidden_size, config.hc_mult
    rows = (2 + streams) * streams
    shapes: Shapes = {at + "attn_norm.weight": (hidden,), at + "ffn_norm.weight": (hidden,)}
    for part in ("attn", "ffn"):
        shapes[f"{at}hc_{part}_fn"] = (rows, streams * hidden)
        shapes[f"{at}hc_{part}_base"] = (rows,)
        shapes[f"{at}hc_{part}_scale"] = (3,)
    return shapes | _attention(config, at + "attn.", ratio) | _moe(config, at + "ffn.", hashed=hashed)


def _attention(config: DeepseekV4Config, at: str, ratio: int) -> Shapes:
    heads = config.num_heads * config.head_dim
    shapes: Shapes = {
        at + "q_norm.weight": (config.q_lora_rank,),
        at + "kv_norm.weight": (config.head_dim,),
        at + "attn_sink": (config.num_heads,),
    }
    for name, out, inside in (
        ("wq_a", config.q_lora_rank, config.hidden_size),
        ("wq_b", heads, config.q_lora_rank),
        ("wkv", config.head_dim, config.hidden_size),
        ("wo_a", config.o_groups * config.o_lora_rank, heads // config.o_groups),
        ("wo_b", config.hidden_size, config.o_groups * config.o_lora_rank),
    ):
        shapes |= _fp8(config, at + name, out, inside)
    if ratio:
        shapes |= _compressor(config, at + "compressor.", ratio, config.head_dim)
    if ratio == CSA_RATIO:
        shapes |= _fp8(config, at + "indexer.wq_b", config.index_heads * config.index_dim, config.q_lora_rank)
        shapes[at + "indexer.weights_proj.weight"] = (config.index_heads, config.hidden_size)
        shapes |= _compressor(config, at + "indexer.compressor.", ratio, config.index_dim)
    return shapes


def _compressor(config: DeepseekV4Config, at: str, ratio: int, dim: int) -> Shapes:
    width = pending_width(ratio, dim)
    return {
        at + "wkv.weight": (width, config.hidden_size),
        at + "wgate.weight": (width, config.hidden_size),
        at + "ape": (ratio, width),
        at + "norm.weight": (dim,),
    }


def _moe(config: DeepseekV4Config, at: str, *, hashed: bool) -> Shapes:
    shapes: Shapes = {at + "gate.weight": (config.num_experts, config.hidden_size)}
    if hashed:
        shapes[at + "gate.tid2eid"] = (config.vocab_size, config.experts_per_token)
    else:
        shapes[at + "gate.bias"] = (config.num_experts,)
    sizes = (
        ("w1", config.expert_width, config.hidden_size),
        ("w2", config.hidden_size, config.expert_width),
        ("w3", config.expert_width, config.hidden_size),
    )
    for name, out, inside in sizes:
        shapes |= _fp8(config, f"{at}shared_experts.{name}", out, inside)
        for expert in range(config.num_experts):
            shapes |= (_fp4 if config.fp4_experts else _fp8)(config, f"{at}experts.{expert}.{name}", out, inside)
    return shapes


def _hc_head(config: DeepseekV4Config, at: str) -> Shapes:
    streams = config.hc_mult
    return {
        at + "hc_head_fn": (streams, streams * config.hidden_size),
        at + "hc_head_base": (streams,),
        at + "hc_head_scale": (1,),
    }


def _fp8(config: DeepseekV4Config, name: str, out: int, inside: int) -> Shapes:
    shapes: Shapes = {name + ".weight": (out, inside)}
    if config.weight_block is not None:
        rows, columns = config.weight_block
        shapes[name + ".scale"] = (-(-out // rows), -(-inside // columns))
    return shapes


def _fp4(config: DeepseekV4Config, name: str, out: int, inside: int) -> Shapes:
    return {name + ".weight": (out, inside // 2), name + ".scale": (out, inside // FP4_BLOCK)}


def kept_in_float32(name: str) -> bool:
    """Whether the model computes with this tensor in float32, whatever its own dtype is."""
    last = name.rpartition(".")[2]
    return (
        last.startswith("hc_")
        or last in ("attn_sink", "ape")
        or name.endswith(("norm.weight", "gate.weight", "gate.bias"))
        or (".compressor." in name and last == "weight")
    )


def is_integer(name: str) -> bool:
    """Whether this tensor is a table of expert numbers."""
    return name.endswith("tid2eid")
