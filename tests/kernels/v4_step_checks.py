"""The kernels of deepseek_v4's decode step beside the model's own PyTorch, on a device or an emulator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from kernels.v4_step_cuda import V4Step
from worker.models import deepseek_v4_moe as moe
from worker.models.deepseek_v4_compressor import CompressorWeights, compressed_rows, pool
from worker.models.deepseek_v4_hyper import HyperWeights, Mixing, mixing, read_streams, rms, write_streams
from worker.models.deepseek_v4_indexer import choose
from worker.models.deepseek_v4_projections import normed
from worker.models.deepseek_v4_rope import Rotation, rotate_last, rotation

_NAMES = ("hidden", "heads", "dim", "rope", "experts", "chosen", "width", "keys", "inner")
SMALL = dict(zip(_NAMES, (256, 3, 128, 64, 20, 6, 72, 150, 256), strict=True))
FLASH = dict(zip(_NAMES, (4096, 64, 512, 64, 256, 6, 2048, 1160, 2048), strict=True))


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape and got.dtype == want.dtype, (got.shape, want.shape, got.dtype, want.dtype)
    return float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-20))


def checks(step: V4Step, rows: int, sizes: dict[str, int], device: torch.device) -> Iterator[tuple[str, float]]:
    """Names and errors by norm; 0 or 1 for what must be the same."""
    size = SimpleNamespace(**sizes)
    generator = torch.Generator(device).manual_seed(rows)

    def random(*shape: int, dtype: torch.dtype = step.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def floats(*shape: int) -> torch.Tensor:
        return random(*shape, dtype=torch.float32)

    h, hidden, eps = step.streams, size.hidden, 1e-6
    outputs = h * (2 + h)
    config: Any = SimpleNamespace(hc_mult=h, hc_eps=eps, norm_eps=eps, sinkhorn_iterations=20)
    weights = HyperWeights(floats(outputs, h * hidden) * (h * hidden) ** -0.5, floats(outputs), floats(3))
    streams, y, norm = 3 * random(rows, h, hidden), random(rows, hidden), 1 + 0.2 * floats(hidden)
    read = step.hyper_read(streams, *weights, norm, norm_eps=eps, eps=eps)
    by = mixing(streams, weights, config, ((0, rows),))
    yield "read", error(read.x, normed(read_streams(streams, by.read), norm, eps))
    yield "read.write", error(read.write, by.write)
    yield "read.carry", error(read.carry, by.carry)
    yield "write", error(step.hyper_write(streams, y, by.write, by.carry), write_streams(streams, y, Mixing(*by)))

    positions = torch.randint(0, 5000, (rows,), generator=generator, device=device)
    turn = rotation(1e4 ** -(torch.arange(size.rope // 2, device=device) / (size.rope // 2)), positions)
    none = Rotation(turn.cos[:, :0].contiguous(), turn.sin[:, :0].contiguous())
    q, weight = 2 * random(rows, size.heads, size.dim), 1 + 0.2 * floats(size.dim)
    got = step.rotate(q, turn.cos, turn.sin, normed=True, eps=eps)
    yield "rotate rms", error(got, rotate_last(rms(q, eps).to(q.dtype), turn))
    got = step.rotate(q[:, :1].contiguous(), turn.cos, turn.sin, normed=True, weight=weight, eps=eps)
    yield "rotate norm", error(got, rotate_last(normed(q[:, :1], weight, eps), turn))
    yield "rotate", error(step.rotate(q, turn.cos, turn.sin), rotate_last(q, turn))
    wide = floats(rows, size.heads, size.dim)
    got = step.rotate(wide, turn.cos, turn.sin, inverse=True)
    yield "rotate inverse", error(got, rotate_last(wide, turn.inverse).to(step.dtype))
    got = step.rotate(q, none.cos, none.sin, normed=True, weight=weight, eps=eps)
    yield "norm", error(got, normed(q, weight, eps))

    logits, bias = floats(rows, size.experts), 0.1 * floats(size.experts)
    if rows > 1:
        logits[1] = logits[1].sign()  # equals, of which the lower are chosen
    tokens = torch.randint(0, 50, (rows,), generator=generator, device=device)
    order = torch.rand(50, size.experts, generator=generator, device=device).argsort(-1)
    table = order[:, : size.chosen].contiguous()
    config = SimpleNamespace(experts_per_token=size.chosen, routed_scale=1.5)
    batch: Any = SimpleNamespace(tiles=((0, rows),), deterministic=False, token_ids=tokens)
    for name, some_bias, some_table in (("bias", bias, None), ("table", None, table)):
        by_identity: Any = SimpleNamespace(
            gate=torch.eye(size.experts, device=device), bias=some_bias, table=some_table
        )
        experts, shares = moe.route(logits, by_identity, config, batch)
        routed = step.route(logits, some_bias, some_table, tokens, num_chosen=size.chosen, scale=1.5)
        if some_table is None:
            exact = torch.equal(routed.experts.long(), experts)
        else:
            exact = torch.equal(routed.experts.long().sort(-1).values, experts.sort(-1).values)
        yield f"route {name}", 0.0 if exact else 1.0
        yield f"route {name} shares", error(routed.shares, shares)
        sorted_experts, at = experts.flatten().sort(stable=True)
        place = torch.empty_like(at)
        place[at] = torch.arange(len(at), device=device)
        ends = torch.searchsorted(sorted_experts, torch.arange(size.experts, device=device), right=True)
        yield f"order {name}", 0.0 if torch.equal(routed.place.long(), place) else 1.0
        yield f"ends {name}", 0.0 if torch.equal(routed.ends.long(), ends) else 1.0
    x = random(rows, hidden)
    spread, sorted_shares = step.spread(x, routed)
    rows_of = at // size.chosen
    yield "spread", 0.0 if torch.equal(spread, x[rows_of]) else 1.0
    yield "spread shares", error(sorted_shares, shares.flatten()[at])

    gate_up = 4 * random(len(at), 2 * size.width)
    plain = moe.clamped_swiglu(gate_up, 3.0, deterministic=False)
    yield "swiglu", error(step.swiglu(gate_up, None, 3.0), plain.to(step.dtype))
    got = step.swiglu(gate_up, sorted_shares, 3.0)
    yield "swiglu shares", error(got, (plain * sorted_shares.unsqueeze(-1)).to(step.dtype))
    up = random(size.experts, 2 * size.inner, hidden) * hidden**-0.5
    down = random(size.experts, hidden, size.inner) * size.inner**-0.5
    some = routed.experts.flatten().long()[at]
    gate_up = torch.stack([row.float() @ up[expert].float().t() for row, expert in zip(spread, some, strict=True)])
    plain = moe.clamped_swiglu(gate_up.to(step.dtype), 3.0, deterministic=False) * sorted_shares.unsqueeze(-1)
    gated = plain.to(step.dtype)
    yield "experts up", error(step.experts_up(spread, sorted_shares, up, routed, 3.0), gated)
    want = torch.stack([row.float() @ down[expert].float().t() for row, expert in zip(gated, some, strict=True)])
    yield "experts down", error(step.experts_down(gated, down, routed), want.to(step.dtype))
    del up, down
    results, shared = random(len(at), hidden), random(rows, hidden)
    summed = torch.empty_like(results).index_copy_(0, at, results).view(rows, size.chosen, -1)
    want = (shared.float() + summed.sum(1, dtype=torch.float32)).to(step.dtype)
    yield "sum", error(step.gather_sum(shared, results, routed), want)

    scores, sinks = 20 * floats(rows, size.heads, size.keys), floats(size.heads)
    hides = torch.rand(rows, size.keys, generator=generator, device=device) < 0.3
    hides[:, 5] = False
    hides[0, 6:] = True
    scores[0, :, 7] = torch.nan  # hidden
    lacking = (scores * 0.04).masked_fill(hides.unsqueeze(1), -torch.inf)
    all_ = torch.cat((lacking, sinks.view(1, -1, 1).expand(rows, -1, 1)), dim=-1).softmax(-1)[..., :-1]
    yield "softmax", error(step.softmax(scores, hides, sinks, 0.04), all_.to(step.dtype))

    scores = floats(rows, 700)
    scores[:, ::3] = scores[:, ::3].round()  # equals, zeros of both signs among them
    visible = torch.tensor([(3, 90, 700, 333, 91)[row % 5] for row in range(rows)], device=device)
    scores[:, 650] = torch.where(visible > 650, scores[:, 650], torch.nan)
    yield "choose", 0.0 if torch.equal(step.choose(scores, visible, 90), choose(scores, visible, 90)) else 1.0

    for name, ratio, overlap in (("csa", 4, 1), ("hca", 16, 0)):
        yield f"complete {name}", _complete_error(step, rows, size.dim, ratio, overlap, random, device)


def _complete_error(
    step: V4Step,
    rows: int,
    dim: int,
    ratio: int,
    overlap: int,
    random: Callable[..., torch.Tensor],
    device: torch.device,
) -> float:
    """Sequences of all lengths, block 0 and padding among them, in rings that have gone round."""
    width, ring, per_page = dim * (1 + overlap), 40, 128 // ratio
    pending = random(rows + 1, ring, 2, width, dtype=torch.float32)
    ape = torch.zeros(ratio, width, device=device)
    norm = 1 + 0.2 * random(dim, dtype=torch.float32)
    unused = pending.new_empty(width, 1)
    weights = CompressorWeights(unused, unused, ape, norm)
    frequencies = 1e4 ** -(torch.arange(32, device=device) / 32)
    lengths = torch.tensor(
        [(ratio * (1 + 3 * row % 40) if row % 3 else row % 2 * ratio) for row in range(rows)], device=device
    )
    slots = torch.arange(rows, 0, -1, device=device)
    table = torch.stack([torch.arange(6, device=device) * rows + row for row in range(rows)])
    pages = torch.full((6 * rows, per_page, dim), 7.0, dtype=step.dtype, device=device)
    want = pages.clone()
    for row, length in enumerate(lengths.tolist()):
        if length % ratio or not length:
            continue
        block = length // ratio - 1
        tokens = torch.arange(max(0, (block - overlap) * ratio), length, device=device)
        held = pending[slots[row], tokens % ring]
        first = int(tokens[0])
        values = pool(held, first, range(block, block + 1), weights)
        number = torch.tensor([block], device=device)
        made = compressed_rows(values, number, weights, frequencies, step.dtype, 1e-6)
        want[table[row, block // per_page], block % per_page] = made[0, 0]
    step.complete(pending, slots, lengths, pages, table, norm, frequencies, ratio=ratio, eps=1e-6)
    return error(pages, want)
