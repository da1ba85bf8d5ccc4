"""DeepSeek-V4: weights and forward pass. Plain PyTorch, over rows that someone else keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.linear_cuda import ROW_TYPES
from kernels.v4_step_cuda import V4Step
from protos.errors import ModelError
from worker.batch import Batch
from worker.models.deepseek_v4_attention import attention
from worker.models.deepseek_v4_compressor import CompressorWeights
from worker.models.deepseek_v4_config import CSA_RATIO, DeepseekV4Config
from worker.models.deepseek_v4_hyper import HyperWeights, head_streams, mixing, read_streams, write_streams
from worker.models.deepseek_v4_moe import MoeWeights, moe
from worker.models.deepseek_v4_projections import (
    AttentionWeights,
    IndexerWeights,
    LayerRope,
    normed,
    project,
    project_out,
)
from worker.models.deepseek_v4_rope import layer_frequencies, rotation
from worker.models.deepseek_v4_rows import Rows
from worker.models.deepseek_v4_step_rows import StepReads
from worker.models.layers import Weights, linear


class BlockWeights(NamedTuple):
    """One layer, main or draft."""

    attn_mixing: HyperWeights
    attn_norm: torch.Tensor
    attn: AttentionWeights
    ffn_mixing: HyperWeights
    ffn_norm: torch.Tensor
    ffn: MoeWeights


class DraftWeights(NamedTuple):
    """One MTP block. e_proj, h_proj [hidden, hidden]; norms [hidden] float32."""

    e_proj: torch.Tensor
    h_proj: torch.Tensor
    e_norm: torch.Tensor
    h_norm: torch.Tensor
    block: BlockWeights
    head_mixing: HyperWeights
    norm: torch.Tensor


class DeepseekV4:
    """Weights and forward pass.

    Args:
        config: parsed shapes.
        weights: all of ``deepseek_v4_checkpoint.tensors`` without quantisation, float32 where ``kept_in_float32`` says
            so; taken out as they are used, so that fusing needs little room.

    Raises (constructor):
        ModelError: BAD_TENSOR, a table of experts names one that is not there.
    """

    def __init__(self, config: DeepseekV4Config, weights: Weights) -> None:
        self.config = config
        self.embed = weights.pop("embed.weight")
        self.head = weights.pop("head.weight")
        self.norm = weights.pop("norm.weight").float()
        self.head_mixing = _take_mixing(weights, "hc_head_")
        self.layers = [_take_block(weights, f"layers.{i}.", config, ratio) for i, ratio in enumerate(config.ratios)]
        self.drafts = [_take_draft(weights, f"mtp.{i}.", config) for i in range(config.num_draft_layers)]
        by_ratio = {ratio: layer_frequencies(config, ratio) for ratio in {0, *config.ratios}}
        self.frequencies = {ratio: values.to(self.device) for ratio, values in by_ratio.items()}
        self.kernels: V4Step | None = None  # of what lies between the matrix products
        if self.embed.is_cuda and self.embed.dtype in ROW_TYPES and _fits_kernels(config):
            self.kernels = V4Step(self.embed.dtype, config.hc_mult, config.sinkhorn_iterations)

    @property
    def device(self) -> torch.device:
        """Where the weights are, and every tensor of a forward pass."""
        return self.embed.device

    def forward(self, batch: Batch, rows: Rows) -> torch.Tensor:
        """Logits [num_logits, vocab_size] float32; the step's rows are kept in ``rows``."""
        return self.logits(self.streams(batch, rows), batch)

    def streams(self, batch: Batch, rows: Rows | StepReads) -> torch.Tensor:
        """The residual streams behind the last layer, [R, hc_mult, hidden]: what the head and the MTP block read."""
        streams, ropes = self.stem(batch), self.ropes(batch)
        for layer in range(self.config.num_layers):
            streams = self.layer(layer, streams, batch, ropes, rows)
        return streams

    def stem(self, batch: Batch) -> torch.Tensor:
        """The streams ahead of the first layer, [R, hc_mult, hidden]."""
        return F.embedding(batch.token_ids, self.embed).unsqueeze(1).expand(-1, self.config.hc_mult, -1)

    def ropes(self, batch: Batch) -> dict[int, LayerRope]:
        """By ratio, for the batch's positions."""
        return {
            ratio: LayerRope(frequencies, rotation(frequencies, batch.positions, deterministic=batch.deterministic))
            for ratio, frequencies in self.frequencies.items()
        }

    def layer(
        self,
        layer: int,
        streams: torch.Tensor,
        batch: Batch,
        ropes: Mapping[int, LayerRope],
        rows: Rows | StepReads,
    ) -> torch.Tensor:
        """The streams behind a layer, [R, hc_mult, hidden]."""
        rope = ropes[self.config.ratios[layer]]
        return _block(streams, layer, self.layers[layer], self.config, batch, rope, rows, self.kernels)

    def logits(self, streams: torch.Tensor, batch: Batch) -> torch.Tensor:
        """streams [R, hc_mult, hidden] -> logits [num_logits, vocab_size] float32 of the rows that want them."""
        return self._logits(streams, self.head_mixing, self.norm, batch)

    def draft(
        self, draft: int, streams: torch.Tensor, next_token_ids: torch.Tensor, batch: Batch, rows: Rows
    ) -> torch.Tensor:
        """One MTP block: guesses the token behind next_token_ids.

        Args:
            draft: which block.
            streams: [R, hc_mult, hidden] of the batch's rows, out of ``streams`` or the draft before.
            next_token_ids: [R] int64, the token that follows each row's.

        Returns:
            [R, hc_mult, hidden], for ``draft_logits``; the block's raw rows are kept as those of layer
            ``num_layers + draft``, at the rows' own positions.
        """
        config, weights = self.config, self.drafts[draft]
        embedded = normed(F.embedding(next_token_ids, self.embed), weights.e_norm, config.norm_eps)
        before = normed(streams, weights.h_norm, config.norm_eps)
        token = linear(embedded, weights.e_proj, None, batch.tiles)
        mixed = [linear(stream, weights.h_proj, None, batch.tiles) + token for stream in before.unbind(1)]
        layer, rope = config.num_layers + draft, self.ropes(batch)[0]
        # The block's router has no table, so the token ids of the batch are not looked at.
        streams = torch.stack(mixed, dim=1)
        return _block(streams, layer, weights.block, config, batch, rope, rows, self.kernels)

    def draft_logits(self, draft: int, streams: torch.Tensor, batch: Batch) -> torch.Tensor:
        """What ``draft`` returned -> logits [num_logits, vocab_size] float32."""
        weights = self.drafts[draft]
        return self._logits(streams, weights.head_mixing, weights.norm, batch)

    def row_parts(self, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """x [R, hidden] through what of a layer works on single rows (q stands in for what attention gives): [R, ...];
        and through the head: logits [R, vocab_size]. For comparing bits.
        """
        layer = self.config.ratios.index(CSA_RATIO) if CSA_RATIO in self.config.ratios else 0
        weights, config = self.layers[layer], self.config
        streams = torch.stack([x * (1 + stream) for stream in range(config.hc_mult)], dim=1)
        by = mixing(streams, weights.attn_mixing, config, batch.tiles)
        read = normed(read_streams(streams, by.read), weights.attn_norm, config.norm_eps)
        parts = project(read, weights.attn, config, batch, self.ropes(batch)[config.ratios[layer]])
        streams = write_streams(streams, project_out(parts.q, weights.attn, config, batch.tiles), by)
        by = mixing(streams, weights.ffn_mixing, config, batch.tiles)
        read = normed(read_streams(streams, by.read), weights.ffn_norm, config.norm_eps)
        streams = write_streams(streams, moe(read, weights.ffn, config, batch), by)
        seen = (streams, *(part for part in parts if part is not None))
        return torch.cat([part.flatten(1).float() for part in seen], dim=1), self.logits(streams, batch)

    def _logits(self, streams: torch.Tensor, mixing: HyperWeights, norm: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not batch.num_logits:
            return self.norm.new_empty((0, self.config.vocab_size))
        x = head_streams(streams[batch.logit_rows], mixing, self.config, batch.logit_tiles)
        x = normed(x, norm, self.config.norm_eps)
        return linear(x, self.head, None, batch.logit_tiles).float()[: batch.num_logits]


def _fits_kernels(config: DeepseekV4Config) -> bool:
    """Whether kernels.v4_step_cuda takes rows of this model."""
    normed_widths = (config.head_dim, config.index_dim, config.q_lora_rank)
    fits = all(width % 64 == 0 and width <= 2048 for width in normed_widths) and config.num_experts <= 512
    streams = config.hc_mult in (2, 4) and config.hc_mult * config.hidden_size % 256 == 0
    return fits and streams and config.hidden_size % 8 == config.expert_width % 8 == 0


def _block(
    streams: torch.Tensor,
    layer: int,
    weights: BlockWeights,
    config: DeepseekV4Config,
    batch: Batch,
    rope: LayerRope,
    rows: Rows | StepReads,
    kernels: V4Step | None,
) -> torch.Tensor:
    """Attention and experts, each between reading and writing the streams [R, hc_mult, hidden]. ``kernels``: take them
    where no deterministic mode forbids it.
    """
    if kernels is not None and not batch.deterministic:
        norm_eps, eps, streams = config.norm_eps, config.hc_eps, streams.contiguous()
        read = kernels.hyper_read(streams, *weights.attn_mixing, weights.attn_norm, norm_eps=norm_eps, eps=eps)
        x = attention(read.x, layer, weights.attn, config, batch, rope, rows, kernels)
        streams = kernels.hyper_write(streams, x, read.write, read.carry)
        read = kernels.hyper_read(streams, *weights.ffn_mixing, weights.ffn_norm, norm_eps=norm_eps, eps=eps)
        x = moe(read.x, weights.ffn, config, batch, kernels)
        return kernels.hyper_write(streams, x, read.write, read.carry)
    by = mixing(streams, weights.attn_mixing, config, batch.tiles)
    x = normed(read_streams(streams, by.read), weights.attn_norm, config.norm_eps)
    streams = write_streams(streams, attention(x, layer, weights.attn, config, batch, rope, rows), by)
    by = mixing(streams, weights.ffn_mixing, config, batch.tiles)
    x = normed(read_streams(streams, by.read), weights.ffn_norm, config.norm_eps)
    return write_streams(streams, moe(x, weights.ffn, config, batch), by)


def _take_block(weights: Weights, at: str, config: DeepseekV4Config, ratio: int) -> BlockWeights:
    return BlockWeights(
        attn_mixing=_take_mixing(weights, at + "hc_attn_"),
        attn_norm=weights.pop(at + "attn_norm.weight").float(),
        attn=_take_attention(weights, at + "attn.", ratio),
        ffn_mixing=_take_mixing(weights, at + "hc_ffn_"),
        ffn_norm=weights.pop(at + "ffn_norm.weight").float(),
        ffn=_take_moe(weights, at + "ffn.", config),
    )


def _take_draft(weights: Weights, at: str, config: DeepseekV4Config) -> DraftWeights:
    return DraftWeights(
        e_proj=weights.pop(at + "e_proj.weight"),
        h_proj=weights.pop(at + "h_proj.weight"),
        e_norm=weights.pop(at + "enorm.weight").float(),
        h_norm=weights.pop(at + "hnorm.weight").float(),
        block=_take_block(weights, at, config, 0),
        head_mixing=_take_mixing(weights, at + "hc_head_"),
        norm=weights.pop(at + "norm.weight").float(),
    )


def _take_mixing(weights: Weights, at: str) -> HyperWeights:
    return HyperWeights(*(weights.pop(at + name).float() for name in ("fn", "base", "scale")))


def _take_attention(weights: Weights, at: str, ratio: int) -> AttentionWeights:
    indexer = None
    if ratio == CSA_RATIO:
        indexer = IndexerWeights(
            wq_b=weights.pop(at + "indexer.wq_b.weight"),
            weights_proj=weights.pop(at + "indexer.weights_proj.weight"),
            compressor=_take_compressor(weights, at + "indexer.compressor."),
        )
    return AttentionWeights(
        wq_a=weights.pop(at + "wq_a.weight"),
        q_norm=weights.pop(at + "q_norm.weight").float(),
        wq_b=weights.pop(at + "wq_b.weight"),
        wkv=weights.pop(at + "wkv.weight"),
        kv_norm=weights.pop(at + "kv_norm.weight").float(),
        sink=weights.pop(at + "attn_sink").float(),
        wo_a=weights.pop(at + "wo_a.weight"),
        wo_b=weights.pop(at + "wo_b.weight"),
        compressor=_take_compressor(weights, at + "compressor.") if ratio else None,
        indexer=indexer,
    )


def _take_compressor(weights: Weights, at: str) -> CompressorWeights:
    names = ("wkv.weight", "wgate.weight", "ape", "norm.weight")
    return CompressorWeights(*(weights.pop(at + name).float() for name in names))


def _take_moe(weights: Weights, at: str, config: DeepseekV4Config) -> MoeWeights:
    def up_parts(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return weights.pop(f"{at}{name}.w1.weight"), weights.pop(f"{at}{name}.w3.weight")

    bias, table = weights.pop(at + "gate.bias", None), weights.pop(at + "gate.tid2eid", None)
    known = table is not None and not table.is_meta  # else shapes alone are wanted
    if table is not None and known and not 0 <= int(table.min()) <= int(table.max()) < config.num_experts:
        raise ModelError(
            f"tensor {at}gate.tid2eid names experts that are not there",
            reason="BAD_TENSOR",
            given=f"{int(table.min())} to {int(table.max())}",
            allowed=f"0 to {config.num_experts - 1}",
        )
    shared_up = torch.cat(up_parts("shared_experts"))
    # Filled in place, for experts are nearly all of the model: gathered in a list, a layer's would be there twice.
    up = shared_up.new_empty((config.num_experts, 2 * config.expert_width, config.hidden_size))
    down = shared_up.new_empty((config.num_experts, config.hidden_size, config.expert_width))
    for expert in range(config.num_experts):
        torch.cat(up_parts(f"experts.{expert}"), out=up[expert])
        down[expert] = weights.pop(f"{at}experts.{expert}.w2.weight")
    return MoeWeights(
        gate=weights.pop(at + "gate.weight").float(),
        bias=None if bias is None else bias.float(),
        table=None if table is None else table.long(),
        up=up,
        down=down,
        shared_up=shared_up,
        shared_down=weights.pop(at + "shared_experts.w2.weight"),
    )
