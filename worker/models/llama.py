"""The llama family: llama, mistral, qwen2 (bias on q, k, v), qwen3 (norm on q and k). Plain PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from kvstore.geometry import CacheGeometry, LayerGroup, Region
from protos.errors import ModelError
from worker.batch import Batch
from worker.kv_view import KvView, Workspace
from worker.models import layers
from worker.models.attention import Attend, attend
from worker.models.block_weight import DEQUANTIZE, BlockWeight, Weight
from worker.models.layers import Weights, rms_norm, rope_tables, rotate
from worker.quantization import SCALE

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
PRODUCTS = ("qkv", "o", "gate_up", "down")  # of a layer
_QKV, _GATE_UP = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")
LAYER_PRODUCTS = (*_QKV, "self_attn.o_proj", *_GATE_UP, "mlp.down_proj")  # modules of a layer, in Hugging Face's naming
FULL, WINDOWED = "full", "window"
"""Layer groups: layers that attend to everything, and those with a sliding window."""


@dataclass(frozen=True)
class LlamaConfig:
    """What config.json says about the shapes; ``parse`` refuses by name what the family does not do."""

    model_type: str
    num_layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # of each layer, in tokens, the query's own included; 0: attends to everything

    @staticmethod
    def parse(config: Mapping[str, Any]) -> LlamaConfig:
        """Raises ModelError: a key is missing or of the wrong kind, or it asks for what is not built."""
        kind = str(config.get("model_type"))
        hidden, q_heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        attention_bias = bool(config.get("attention_bias", False))
        parsed = LlamaConfig(
            model_type=kind,
            num_layers=_integer(config, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_integer(config, "intermediate_size"),
            q_heads=q_heads,
            kv_heads=_integer(config, "num_key_value_heads", q_heads),
            head_dim=_integer(config, "head_dim", 128 if kind == "qwen3" else hidden // q_heads),
            vocab_size=_integer(config, "vocab_size"),
            max_positions=_integer(config, "max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind == "qwen2" or attention_bias,
            o_bias=kind != "qwen2" and attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind == "qwen3",
            windows=_windows(config, kind, _integer(config, "num_hidden_layers")),
        )
        if parsed.q_heads % parsed.kv_heads or parsed.head_dim % 2:
            raise ModelError(
                "the heads do not fit together",
                given=f"{parsed.q_heads} query heads, {parsed.kv_heads} KV heads, head_dim {parsed.head_dim}",
                allowed="query heads a multiple of KV heads, head_dim even",
            )
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError("this activation is not built", given=config["hidden_act"], allowed="silu")
        return parsed

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that the weights must hold, in Hugging Face's naming."""
        q, kv, hidden = self.q_heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
            for name, out, inside, bias in (
                ("self_attn.q_proj", q, hidden, self.qkv_bias),
                ("self_attn.k_proj", kv, hidden, self.qkv_bias),
                ("self_attn.v_proj", kv, hidden, self.qkv_bias),
                ("self_attn.o_proj", hidden, q, self.o_bias),
                ("mlp.gate_proj", self.intermediate, hidden, self.mlp_bias),
                ("mlp.up_proj", self.intermediate, hidden, self.mlp_bias),
                ("mlp.down_proj", hidden, self.intermediate, self.mlp_bias),
            ):
                shapes[f"{at}{name}.weight"] = (out, inside)
                if bias:
                    shapes[f"{at}{name}.bias"] = (out,)
            if self.qk_norm:
                shapes[at + "self_attn.q_norm.weight"] = shapes[at + "self_attn.k_norm.weight"] = (self.head_dim,)
        return shapes

    def geometry(self, dtype: str, max_sequence_tokens: int) -> CacheGeometry:
        """K and V of every token, mode dense; layers with a window are a group of their own.

        A window that no sequence outgrows is none.
        """
        by_window: dict[int, list[Region]] = {}
        for layer, window in enumerate(self.windows):
            regions = by_window.setdefault(window if window < max_sequence_tokens else 0, [])
            regions += (
                Region(layer=layer, kind=kind, heads=self.kv_heads, dim=self.head_dim, dtype=dtype)
                for kind in ("k", "v")
            )
        return CacheGeometry(
            tuple(
                LayerGroup(WINDOWED if window else FULL, tuple(regions), window=window)
                for window, regions in sorted(by_window.items())
            )
        )


def _windows(config: Mapping[str, Any], kind: str, num_layers: int) -> tuple[int, ...]:
    """Each layer's sliding window; 0: none.

    Llama has none, mistral has one for all, qwen for the upper layers where asked; a list ``layer_types`` says it layer
    by layer.
    """
    asked = kind == "mistral" or (kind in ("qwen2", "qwen3") and bool(config.get("use_sliding_window", False)))
    if not asked or config.get("sliding_window") is None:
        return (0,) * num_layers
    window = _integer(config, "sliding_window")
    types = config.get("layer_types")
    if types is None:
        first = 0 if kind == "mistral" else int(config.get("max_window_layers", 28))
        return tuple(window if layer >= first else 0 for layer in range(num_layers))
    if len(types) != num_layers or not {*types} <= {"full_attention", "sliding_attention"}:
        raise ModelError(
            "layer_types does not fit the layers",
            given=types,
            allowed=f"{num_layers} of full_attention, sliding_attention",
        )
    return tuple(window if each == "sliding_attention" else 0 for each in types)


@dataclass(frozen=True)
class _Layer:
    """Weights of one layer; q, k, v and gate, up are fused along the output axis."""

    input_norm: torch.Tensor
    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Weight
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: Weight
    gate_up_bias: torch.Tensor | None
    down: Weight
    down_bias: torch.Tensor | None


class Llama:
    """Weights and forward pass.

    Args:
        config: parsed shapes.
        raw: config.json, for the rotary embedding.
        weights: every tensor of ``config.tensors()``; taken out as they are used, so that fusing needs little room.
            A product's may be codes of FP8 blocks; then their scales are beside them.
        max_sequence_tokens: how many positions are prepared.
    """

    def __init__(
        self,
        config: LlamaConfig,
        raw: Mapping[str, Any],
        weights: Weights,
        max_sequence_tokens: int,
    ) -> None:
        self.config = config
        self.embed = weights.pop("model.embed_tokens.weight")
        self.norm = weights.pop("model.norm.weight")
        self.lm_head: Weight = self.embed if config.tied else weights.pop("lm_head.weight")
        dtype = self.embed.dtype
        self.layers = [_take_layer(weights, f"model.layers.{i}.", dtype) for i in range(config.num_layers)]
        cos, sin = rope_tables(raw, config.head_dim, max_sequence_tokens)
        self.cos, self.sin = (table.to(self.embed).unsqueeze(1) for table in (cos, sin))

    @property
    def device(self) -> torch.device:
        """Where the weights are, and every tensor of a forward pass."""
        return self.embed.device

    def use_blocks(self, *, head: bool = True) -> None:
        """Quantise the products' weights to blocks of FP8, layer by layer, and let the originals go. The embedding
        stays, so that a head that is tied to it does. Raises ModelError: NO_BLOCKS, a width is no multiple of 128."""
        for index, layer in enumerate(self.layers):
            if not isinstance(layer.qkv, BlockWeight):
                qkv, o, gate_up, down = (BlockWeight.of(getattr(layer, name), name) for name in PRODUCTS)
                self.layers[index] = replace(layer, qkv=qkv, o=o, gate_up=gate_up, down=down)
        if head and not self.config.tied and not isinstance(self.lm_head, BlockWeight):
            self.lm_head = BlockWeight.of(self.lm_head, "lm_head")

    @property
    def weight_bytes(self) -> int:
        """Of the products' weights and the embedding, as they are held."""
        held = [getattr(layer, name) for layer in self.layers for name in PRODUCTS]
        held += [self.embed] if self.config.tied else [self.embed, self.lm_head]
        return sum(w.num_bytes if isinstance(w, BlockWeight) else w.numel() * w.element_size() for w in held)

    def forward(self, batch: Batch, kv: KvView, workspace: Workspace, attend: Attend = attend) -> torch.Tensor:
        """Writes the batch's KV rows into pages, tails and workspace; returns logits [num_logits, vocab_size] f32."""
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        x = F.embedding(batch.token_ids, self.embed)
        for index, layer in enumerate(self.layers):
            q, k, v = self.project(layer, x, cos, sin, batch)
            k_view, v_view = kv.view(index, "k"), kv.view(index, "v")
            for view, rows in ((k_view, k), (v_view, v)):
                kv.append(view, rows, batch.groups[view.group.name])
                workspace.keep(view, rows)
            attended = attend(q, k, v, k_view, v_view, kv, batch)
            x = self.feed_forward(layer, x, attended, batch)
        return self.logits(x[batch.logit_rows], batch)[: batch.num_logits]

    def row_parts(self, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """x [R, hidden] through layer 0 without attention (V stands in for it), and through the output matrix. For
        comparing bits.
        """
        layer = self.layers[0]
        q, k, v = self.project(layer, x, self.cos[5:6], self.sin[5:6], batch)  # one position for all rows
        mixed = q + (k + v).repeat_interleave(self.config.q_heads // self.config.kv_heads, dim=1)
        out = self.feed_forward(layer, x, mixed, batch)
        return out, self.logits(out, batch)

    def project(
        self, layer: _Layer, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [R, hidden] -> q [R, q_heads, dim], k and v [R, kv_heads, dim]; q and k rotated."""
        c = self.config
        heads = layers.linear(rms_norm(x, layer.input_norm, c.norm_eps), layer.qkv, layer.qkv_bias, batch.tiles)
        heads = heads.view(-1, c.q_heads + 2 * c.kv_heads, c.head_dim)
        qk, v = heads[:, : c.q_heads + c.kv_heads], heads[:, c.q_heads + c.kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(qk[:, : c.q_heads], layer.q_norm, c.norm_eps)
            k = rms_norm(qk[:, c.q_heads :], layer.k_norm, c.norm_eps)
            qk = torch.cat((q, k), dim=1)
        qk = rotate(qk, cos, sin)
        return qk[:, : c.q_heads], qk[:, c.q_heads :], v

    def feed_forward(self, layer: _Layer, x: torch.Tensor, attended: torch.Tensor, batch: Batch) -> torch.Tensor:
        """The rest of a layer: attended [R, q_heads, dim] and the residual x [R, hidden] -> [R, hidden]."""
        x = x + layers.linear(attended.reshape(len(x), -1), layer.o, layer.o_bias, batch.tiles)
        normed = rms_norm(x, layer.post_norm, self.config.norm_eps)
        gate, up = layers.linear(normed, layer.gate_up, layer.gate_up_bias, batch.tiles).chunk(2, dim=-1)
        gated = layers.swiglu(gate, up, deterministic=batch.deterministic)
        return x + layers.linear(gated, layer.down, layer.down_bias, batch.tiles)

    def logits(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [S, hidden] -> [S, vocab_size] float32."""
        if not batch.num_logits:
            return x.new_empty((0, self.config.vocab_size), dtype=torch.float32)
        return layers.linear(
            rms_norm(x, self.norm, self.config.norm_eps), self.lm_head, None, batch.logit_tiles
        ).float()


def _take_layer(weights: Weights, at: str, dtype: torch.dtype) -> _Layer:
    def bias(*names: str) -> torch.Tensor | None:
        parts = [part for name in names if (part := weights.pop(f"{at}{name}.bias", None)) is not None]
        return _joined(parts) if parts else None

    def product(*names: str) -> Weight:
        parts = [weights.pop(f"{at}{name}.weight") for name in names]
        scales = [weights.pop(f"{at}{name}.weight{SCALE}", None) for name in names]
        there = [each for each in scales if each is not None]
        if not there:
            return _joined(parts)
        what = f"{at}{', '.join(names)}"
        if len(there) < len(names):
            raise ModelError(
                f"{what} are one product here: all of them are in blocks of FP8, or none",
                reason="NO_BLOCKS",
                given=f"{len(there)} of {len(names)} in blocks",
                hint=DEQUANTIZE,
            )
        return BlockWeight.joined(parts, there, dtype, what)

    return _Layer(
        input_norm=weights.pop(at + "input_layernorm.weight"),
        qkv=product(*_QKV),
        qkv_bias=bias(*_QKV),
        q_norm=weights.pop(at + "self_attn.q_norm.weight", None),
        k_norm=weights.pop(at + "self_attn.k_norm.weight", None),
        o=product("self_attn.o_proj"),
        o_bias=bias("self_attn.o_proj"),
        post_norm=weights.pop(at + "post_attention_layernorm.weight"),
        gate_up=product(*_GATE_UP),
        gate_up_bias=bias(*_GATE_UP),
        down=product("mlp.down_proj"),
        down_bias=bias("mlp.down_proj"),
    )


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(f"config.json: {key} is missing or malformed", given=value, allowed="an integer of at least 1")
    return value
