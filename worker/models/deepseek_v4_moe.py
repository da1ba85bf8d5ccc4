"""DeepSeek-V4's mixture of experts: the router, the clamped SwiGLU, and the expert that every token uses."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.v4_step_cuda import Routed, V4Step, takes_experts
from worker.batch import DECODE_TILE, Batch
from worker.models.deepseek_v4_config import DeepseekV4Config
from worker.models.deepseek_v4_pieces import by_rows
from worker.models.layers import Tiles, linear, swiglu

FEW_ROWS = 64  # so few have few rows an expert


class MoeWeights(NamedTuple):
    """E routed experts of width I, and the shared one.

    Attributes:
        gate: [E, hidden] float32.
        bias: [E] float32, added for the choice of experts only; None in hash layers.
        table: [vocab_size, experts per token] int64, the experts of each token id; None in other layers.
        up: [E, 2 I, hidden], w1 above w3. down: [E, hidden, I].
        shared_up: [2 I, hidden]. shared_down: [hidden, I].
    """

    gate: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor
    shared_up: torch.Tensor
    shared_down: torch.Tensor


def route(
    x: torch.Tensor, weights: MoeWeights, config: DeepseekV4Config, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [R, hidden] -> experts [R, K] int64 and their weights [R, K] float32.

    Of equal affinities the lower expert is chosen.
    """
    logits = linear(x.float(), weights.gate, None, batch.tiles)
    affinity = by_rows(F.softplus, logits, deterministic=batch.deterministic).sqrt()
    if weights.table is not None:
        experts = weights.table[batch.token_ids]
    else:
        assert weights.bias is not None
        order = (affinity + weights.bias).sort(dim=-1, descending=True, stable=True).indices
        experts = order[:, : config.experts_per_token]
    chosen = affinity.gather(1, experts)
    return experts, chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * config.routed_scale


def clamped_swiglu(gate_up: torch.Tensor, limit: float, *, deterministic: bool) -> torch.Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) of [R, 2 I] -> [R, I] float32: gate is not bounded below."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return swiglu(gate.clamp(max=limit), up.clamp(-limit, limit), deterministic=deterministic)


def moe(
    x: torch.Tensor, weights: MoeWeights, config: DeepseekV4Config, batch: Batch, kernels: V4Step | None = None
) -> torch.Tensor:
    """x [R, hidden] -> [R, hidden] in x's dtype: the routed experts' weighted sum plus the shared expert.

    On a GPU in bfloat16 all experts' products are two calls (``_grouped``) and the host waits for nothing; elsewhere,
    and in deterministic mode, it goes from expert to expert and waits once, for how many rows each has. With
    ``kernels`` each thing between the products is one launch.
    """
    if kernels is not None:
        return _by_kernels(x, weights, config, batch, kernels)
    experts, shares = route(x, weights, config, batch)
    gate_up = linear(x, weights.shared_up, None, batch.tiles)
    gated = clamped_swiglu(gate_up, config.swiglu_limit, deterministic=batch.deterministic)
    out = linear(gated.to(x.dtype), weights.shared_down, None, batch.tiles).float()
    # Rows by their experts, of one expert in rising order: a row's sum has one order in every batch.
    sorted_experts, order = experts.flatten().sort(stable=True)
    rows, shares = order // config.experts_per_token, shares.flatten()[order]
    if x.is_cuda and x.dtype == torch.bfloat16 and not batch.deterministic:
        return (out + _grouped(x, rows, order, sorted_experts, shares, weights, config)).to(x.dtype)
    first = 0
    for expert, count in enumerate(sorted_experts.bincount(minlength=config.num_experts).tolist()):
        if count:
            some = rows[first : first + count]
            out.index_add_(0, some, _expert(x[some], shares[first : first + count], expert, weights, config, batch))
            first += count
    return out.to(x.dtype)


def routed(x: torch.Tensor, weights: MoeWeights, config: DeepseekV4Config, batch: Batch, kernels: V4Step) -> Routed:
    """As ``route``."""
    logits = linear(x.float(), weights.gate, None, batch.tiles)
    chosen, scale = config.experts_per_token, config.routed_scale
    return kernels.route(logits, weights.bias, weights.table, batch.token_ids, num_chosen=chosen, scale=scale)


def _by_kernels(
    x: torch.Tensor, weights: MoeWeights, config: DeepseekV4Config, batch: Batch, kernels: V4Step
) -> torch.Tensor:
    by, limit = routed(x, weights, config, batch, kernels), config.swiglu_limit
    gated = kernels.swiglu(linear(x, weights.shared_up, None, batch.tiles), None, limit)
    shared = linear(gated, weights.shared_down, None, batch.tiles)
    rows, shares = kernels.spread(x, by)
    if len(x) <= FEW_ROWS and takes_experts(weights.up, weights.down):
        gated = kernels.experts_up(rows, shares, weights.up, by, limit)
        return kernels.gather_sum(shared, kernels.experts_down(gated, weights.down, by), by)
    gate_up = F.grouped_mm(rows, weights.up.transpose(1, 2), offs=by.ends)
    gated = kernels.swiglu(gate_up, shares, limit)
    return kernels.gather_sum(shared, F.grouped_mm(gated, weights.down.transpose(1, 2), offs=by.ends), by)


def _grouped(
    x: torch.Tensor,
    rows: torch.Tensor,
    order: torch.Tensor,
    sorted_experts: torch.Tensor,
    shares: torch.Tensor,
    weights: MoeWeights,
    config: DeepseekV4Config,
) -> torch.Tensor:
    """The routed experts' sums of x [R, hidden], float32.

    Args:
        rows, sorted_experts, shares: [R K], sorted by expert; ``order`` [R K] is where each was before.
    """
    ends = torch.arange(config.num_experts, device=x.device)
    ends = torch.searchsorted(sorted_experts, ends, right=True).to(torch.int32)  # of each expert's rows
    gate_up = F.grouped_mm(x[rows], weights.up.transpose(1, 2), offs=ends)
    gated = clamped_swiglu(gate_up, config.swiglu_limit, deterministic=False) * shares.unsqueeze(-1)
    routed = F.grouped_mm(gated.to(x.dtype), weights.down.transpose(1, 2), offs=ends)
    unsorted = torch.empty_like(routed).index_copy_(0, order, routed)
    return unsorted.view(len(x), config.experts_per_token, -1).sum(1, dtype=torch.float32)


def _expert(
    x: torch.Tensor, shares: torch.Tensor, expert: int, weights: MoeWeights, config: DeepseekV4Config, batch: Batch
) -> torch.Tensor:
    """x [r, hidden], shares [r] -> [r, hidden] float32: the share is multiplied in before the last product."""
    num_rows = len(x)
    tiles: Tiles = ((0, num_rows),)
    if batch.deterministic:  # how many rows meet in an expert is chance, so the shape of its products must not be
        padding = -num_rows % DECODE_TILE
        x, shares = F.pad(x, (0, 0, 0, padding)), F.pad(shares, (0, padding))
        tiles = tuple((first, first + DECODE_TILE) for first in range(0, len(x), DECODE_TILE))
    gate_up = linear(x, weights.up[expert], None, tiles)
    gated = clamped_swiglu(gate_up, config.swiglu_limit, deterministic=batch.deterministic)
    gated = (gated * shares.unsqueeze(-1)).to(x.dtype)
    return linear(gated, weights.down[expert], None, tiles)[:num_rows].float()
