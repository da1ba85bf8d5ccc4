"""Tiny random DeepSeek-V4 models, the rows of their sequences in plain memory, and transformers' own V4 beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from worker.batch import DECODE_TILE, Batch, Span
from worker.kv_view import TORCH_DTYPES
from worker.models import deepseek_v4_attention, deepseek_v4_decode
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_checkpoint import is_integer, tensors
from worker.models.deepseek_v4_config import (
    CSA_RATIO,
    DeepseekV4Config,
)
from worker.models.deepseek_v4_geometry import RAW_ROW, cache_geometry
from worker.models.deepseek_v4_indexer import choose

MARGIN = 16

TINY: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 97,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "compress_ratios": [0, 4, 128, 4, 128],
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_hash_layers": 2,
    "swiglu_limit": 1.5,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def tiny_config(*, hca_ratio: int = 128, **changes: Any) -> DeepseekV4Config:
    """``hca_ratio``: another than the model's own, so that few tokens make many blocks. Both are only numbers to us."""
    config = DeepseekV4Config.parse({**TINY, **changes})
    return replace(config, ratios=tuple(hca_ratio if ratio == 128 else ratio for ratio in config.ratios))


def random_weights(config: DeepseekV4Config, seed: int) -> dict[str, torch.Tensor]:
    """Everything random, float32, what a fresh model has as zeros too: sinks, ape, biases, tables of experts."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tensors(config).items():
        noise = torch.randn(shape, generator=generator)
        if is_integer(name):
            order = torch.rand(shape[0], config.num_experts, generator=generator).argsort(-1)
            weights[name] = order[:, : shape[1]].contiguous()
        elif name.endswith("norm.weight"):
            weights[name] = 1 + 0.2 * noise
        elif name.endswith(("attn_sink", "ape")):
            weights[name] = noise
        elif name.endswith(("_base", "_scale")):
            weights[name] = 0.5 * noise
        elif name.endswith("gate.bias"):
            weights[name] = 0.3 * noise
        elif name == "embed.weight":
            weights[name] = noise
        else:
            weights[name] = noise * shape[-1] ** -0.5
    return weights


@dataclass
class Held:
    """Rows [first, end) of one kind of one sequence; the others of ``rows`` are NaN."""

    rows: torch.Tensor
    first: int = 0
    end: int = 0

    def forget(self, first: int, end: int) -> None:
        """Keeps what lies in [first, end)."""
        first, end = max(self.first, first), min(self.end, end)
        self.rows[self.first : first] = torch.nan
        self.rows[end : self.end] = torch.nan
        self.first, self.end = min(first, end), end


class MemoryRows:
    """Rows of sequences in plain memory; of kinds in rings, no more than what the next token reads and the margin.

    Raises AssertionError where a row is asked for that a cache would not hold any more, or not yet.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        *,
        capacity: int = 512,
        margin: int = MARGIN,
        dtype: str = "float32",
        drafts: bool = False,
    ) -> None:
        self.config, self.capacity, self.margin = config, capacity, margin
        self.regions = {
            (region.layer, region.kind): region
            for group in cache_geometry(config, dtype, drafts=drafts).groups
            for region in group.regions
        }
        self.lengths: list[int] = []
        self.rows: list[dict[tuple[int, str], Held]] = []
        self.batch: Batch | None = None
        self.sequences: Sequence[int] = ()
        self.read: set[tuple[int, str]] = set()

    def add(self) -> int:
        self.lengths.append(0)
        self.rows.append(
            {
                key: Held(
                    torch.full(
                        (self.capacity // region.ratio, region.heads, region.dim),
                        torch.nan,
                        dtype=TORCH_DTYPES[region.dtype],
                    )
                )
                for key, region in self.regions.items()
            }
        )
        return len(self.lengths) - 1

    def fork(self, sequence: int) -> int:
        self.lengths.append(self.lengths[sequence])
        self.rows.append({key: replace(held, rows=held.rows.clone()) for key, held in self.rows[sequence].items()})
        return len(self.lengths) - 1

    def ring(self, layer: int, kind: str) -> int | None:
        """Rows that a ring keeps; None: all are kept."""
        ratio = self.config.layer_ratio(layer)
        if kind == RAW_ROW:
            return self.config.window - 1 + self.margin
        if self.regions[layer, kind].tail_only:
            return (2 * ratio if ratio == CSA_RATIO else ratio) - 1 + self.margin
        return None

    def truncate(self, sequence: int, num_tokens: int) -> None:
        """Rows past num_tokens are forgotten; what a ring has overwritten does not come back."""
        assert num_tokens <= self.lengths[sequence]
        self.lengths[sequence] = num_tokens
        for key, held in self.rows[sequence].items():
            held.forget(0, num_tokens // self.regions[key].ratio)

    def begin(self, batch: Batch, sequences: Sequence[int]) -> None:
        """The spans of ``batch`` are of these sequences."""
        self.batch, self.sequences, self.read = batch, sequences, set()
        for span, sequence in zip(batch.spans, sequences, strict=True):
            assert span.start == self.lengths[sequence]

    def held(self, span: int, layer: int, kind: str, first: int, end: int) -> torch.Tensor:
        assert self.batch is not None
        self.read.add((layer, kind))
        held = self.rows[self.sequences[span]][layer, kind]
        assert end <= self.batch.spans[span].start // self.regions[layer, kind].ratio, "rows of this step"
        assert first == end or held.first <= first <= end <= held.end, (
            f"{kind} rows [{first}, {end}) of layer {layer} are asked for, held are [{held.first}, {held.end})"
        )
        return held.rows[first:end]

    def chosen(self, span: int, layer: int, kind: str, numbers: torch.Tensor) -> torch.Tensor:
        held = self.rows[self.sequences[span]][layer, kind]
        assert held.first == 0 and int(numbers.max()) < held.end
        return held.rows[numbers]

    def decode(self) -> None:
        """Every span is read by itself."""

    def keep(self, layer: int, kind: str, rows: torch.Tensor) -> None:
        assert self.batch is not None and len(rows) == len(self.batch.token_ids)
        for span, sequence in zip(self.batch.spans, self.sequences, strict=True):
            self._store(sequence, layer, kind, span.start, rows[span.first_row : span.first_row + span.num_rows])

    def keep_blocks(self, span: int, layer: int, kind: str, first: int, rows: torch.Tensor) -> None:
        assert len(rows)
        self._store(self.sequences[span], layer, kind, first, rows)

    def _store(self, sequence: int, layer: int, kind: str, first: int, rows: torch.Tensor) -> None:
        held, region = self.rows[sequence][layer, kind], self.regions[layer, kind]
        assert rows.shape[1:] == (region.heads, region.dim) and rows.dtype == held.rows.dtype
        assert first == held.end, f"{kind} rows of layer {layer} from {first} on, held to {held.end}"
        held.rows[first : first + len(rows)] = rows
        held.end += len(rows)

    def end(self) -> None:
        """The step is over: the sequences have grown, and rings move on, which a span of many rows must not see."""
        assert self.batch is not None
        for span, sequence in zip(self.batch.spans, self.sequences, strict=True):
            self.lengths[sequence] += span.num_rows
            for key, held in self.rows[sequence].items():
                assert held.end == self.lengths[sequence] // self.regions[key].ratio, f"rows of {key} are missing"
                size = self.ring(*key)
                if size is not None:
                    held.forget(self.lengths[sequence] - size, held.end)


def make_batch(work: Sequence[tuple[int, Sequence[int]]], *, padding: int = 0, deterministic: bool = False) -> Batch:
    """Spans of (start, token ids) and padding rows behind them; logits of every row of a span.

    ``deterministic``: in tiles of 8 rows, the last one padded.
    """
    spans: list[Span] = []
    token_ids: list[int] = []
    positions: list[int] = []
    for start, tokens in work:
        spans.append(Span(len(token_ids), len(tokens), start))
        token_ids += tokens
        positions += range(start, start + len(tokens))
    num_rows = len(token_ids)
    logit_rows = list(range(num_rows))
    if deterministic:
        padding = -num_rows % DECODE_TILE
        logit_rows += [0] * padding
    all_rows = num_rows + padding
    tiles = tuple((a, a + DECODE_TILE) for a in range(0, all_rows, DECODE_TILE)) if deterministic else ((0, all_rows),)
    return Batch(
        token_ids=torch.tensor(token_ids + [0] * padding),
        positions=torch.tensor(positions + [0] * padding),
        tiles=tiles,
        spans=tuple(spans),
        padded=padding > 0,
        groups={},
        workspace_rows=torch.empty(0, dtype=torch.int64),
        workspace_of_work=(),
        first_row_of_work=(),
        logit_rows=torch.tensor(logit_rows),
        logit_tiles=tiles if deterministic else ((0, num_rows),),
        num_logits=num_rows,
        deterministic=deterministic,
    )


class Driver:
    """A model and sequences that grow by steps."""

    def __init__(self, config: DeepseekV4Config, weights: dict[str, torch.Tensor], **rows: Any) -> None:
        self.model = DeepseekV4(config, dict(weights))
        self.rows = MemoryRows(config, **rows)

    def step(
        self, work: Sequence[tuple[int, Sequence[int]]], *, padding: int = 0, deterministic: bool = False
    ) -> list[torch.Tensor]:
        """(sequence, new tokens) each -> logits [new tokens, vocab_size] each."""
        spans = [(self.rows.lengths[sequence], tokens) for sequence, tokens in work]
        batch = make_batch(spans, padding=padding, deterministic=deterministic)
        self.rows.begin(batch, [sequence for sequence, _ in work])
        with torch.inference_mode():
            logits = self.model.forward(batch, self.rows)
        self.rows.end()
        return [logits[s.first_row : s.first_row + s.num_rows] for s in batch.spans]

    def run(self, tokens: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """A new sequence in steps of these sizes, the last one repeated -> logits [tokens, vocab_size]."""
        sequence, at, out = self.rows.add(), 0, []
        sizes = list(chunks)
        while at < len(tokens):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            out += self.step([(sequence, tokens[at : at + size])])
            at += size
        return torch.cat(out)


def reference_model(config: DeepseekV4Config, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' DeepseekV4ForCausalLM with the same float32 weights."""
    from transformers import DeepseekV4Config as TheirConfig
    from transformers import DeepseekV4ForCausalLM

    names = {0: "sliding_attention", CSA_RATIO: "compressed_sparse_attention"}
    hca_ratio = max(config.ratios)
    yarn = config.yarn
    rope: dict[str, Any] = {"rope_type": "default"}
    if yarn is not None:
        rope = {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    theirs = TheirConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.expert_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=1,
        head_dim=config.head_dim,
        qk_rope_head_dim=config.rope_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        n_routed_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        routed_scaling_factor=config.routed_scale,
        layer_types=[names.get(ratio, "heavily_compressed_attention") for ratio in config.ratios],
        compress_rates={"compressed_sparse_attention": CSA_RATIO, "heavily_compressed_attention": hca_ratio},
        num_hash_layers=config.num_hash_layers,
        swiglu_limit=config.swiglu_limit,
        sliding_window=config.window,
        index_n_heads=config.index_heads,
        index_head_dim=config.index_dim,
        index_topk=config.index_topk,
        hc_mult=config.hc_mult,
        hc_sinkhorn_iters=config.sinkhorn_iterations,
        hc_eps=config.hc_eps,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        compress_rope_theta=config.compress_rope_theta,
        rope_parameters=rope,
        max_position_embeddings=config.max_positions,
    )
    model = DeepseekV4ForCausalLM(theirs).eval()
    missing, unexpected = model.load_state_dict(_their_names(config, weights), strict=False)
    assert not unexpected and not missing, (missing, unexpected)
    return model


def _their_names(config: DeepseekV4Config, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for name, tensor in weights.items():
        if name.startswith("mtp.") or ".ffn.experts." in name:
            continue
        for ours, theirs in (
            ("indexer.compressor.", "compressor.indexer."),
            ("attn.indexer.weights_proj", "attn.compressor.indexer.scorer.weights_proj"),
            ("attn.indexer.", "attn.compressor.indexer."),
            ("compressor.norm", "compressor.kv_norm"),
            ("compressor.indexer.norm", "compressor.indexer.kv_norm"),
            ("attn_norm", "input_layernorm"),
            ("ffn_norm", "post_attention_layernorm"),
            ("hc_head_", "hc_head.hc_"),
            ("hc_attn_", "attn_hc."),
            ("hc_ffn_", "ffn_hc."),
            (".attn.", ".self_attn."),
            (".ffn.", ".mlp."),
            ("wq_a", "q_a_proj"),
            ("wq_b", "q_b_proj"),
            ("wkv", "kv_proj"),
            ("wgate", "gate_proj"),
            ("wo_a", "o_a_proj"),
            ("wo_b", "o_b_proj"),
            ("q_norm", "q_a_norm"),
            ("ape", "position_bias"),
            ("attn_sink", "sinks"),
            ("gate.bias", "gate.e_score_correction_bias"),
            ("shared_experts.w1", "shared_experts.gate_proj"),
            ("shared_experts.w3", "shared_experts.up_proj"),
            ("shared_experts.w2", "shared_experts.down_proj"),
            ("embed.weight", "embed_tokens.weight"),
        ):
            name = name.replace(ours, theirs)
        out["lm_head.weight" if name == "head.weight" else "model." + name] = tensor
    for layer in range(config.num_layers):
        at, theirs = f"layers.{layer}.ffn.experts.", f"model.layers.{layer}.mlp.experts."
        experts = range(config.num_experts)
        up = [torch.cat([weights[f"{at}{e}.{w}.weight"] for w in ("w1", "w3")]) for e in experts]
        out[theirs + "gate_up_proj"] = torch.stack(up)
        out[theirs + "down_proj"] = torch.stack([weights[f"{at}{e}.w2.weight"] for e in experts])
    return out


def reference_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab_size] of one forward pass without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def watched_gaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Between the worst score that was chosen and the best that was not, of every choice from here on, as they come."""
    seen: list[float] = []

    def watched(scores: torch.Tensor, num_visible: torch.Tensor, topk: int) -> torch.Tensor:
        for row, visible in zip(scores, num_visible.tolist(), strict=True):
            if visible > topk:
                best = row[:visible].topk(topk + 1).values
                seen.append(float(best[-2] - best[-1]))
        return choose(scores, num_visible, topk)

    for module in (deepseek_v4_attention, deepseek_v4_decode):
        monkeypatch.setattr(module, "choose", watched)
    return seen
