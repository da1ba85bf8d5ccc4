"""The parts of DeepSeek-V4 by themselves: what a comparison of whole models on short texts would not show."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from protos.errors import ModelError
from tests.unit.deepseek_v4_tiny import Driver, make_batch, random_weights, reference_model, tiny_config
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_checkpoint import tensors
from worker.models.deepseek_v4_config import Yarn
from worker.models.deepseek_v4_hyper import HyperWeights, mixing, read_streams, write_streams
from worker.models.deepseek_v4_indexer import choose, index_scores
from worker.models.deepseek_v4_moe import MoeWeights, _grouped, clamped_swiglu
from worker.models.deepseek_v4_pieces import by_rows
from worker.models.deepseek_v4_rope import frequencies, layer_frequencies, rotate_last, rotation

# --- the indexer ---


def test_of_equal_scores_the_lowest_row_is_chosen_and_hidden_rows_never_are() -> None:
    rng = random.Random(5)
    for topk in (1, 3, 8):
        scores = torch.tensor([[float(rng.choice((-1, 0, 0, 2))) for _ in range(40)] for _ in range(60)])
        scores[:, ::7] *= -0.0  # equal to 0 as well
        num_visible = torch.tensor([rng.randrange(41) for _ in range(60)])
        expected = []
        for row, visible in zip(scores.tolist(), num_visible.tolist(), strict=True):
            best = sorted(range(visible), key=lambda i: (-row[i], i))[:topk]
            expected.append(sorted(best) + [-1] * (topk - len(best)))
        assert choose(scores, num_visible, topk).tolist() == expected


def test_scores_are_the_weighted_sum_of_what_is_positive_whatever_is_computed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(1)
    queries, weights, keys = (torch.randn(shape, generator=generator) for shape in ((9, 4, 6), (9, 4), (11, 6)))
    expected = torch.einsum("th,thn->tn", weights, torch.einsum("thd,nd->thn", queries, keys).relu())
    torch.testing.assert_close(index_scores(queries, weights, keys), expected)
    monkeypatch.setattr("worker.models.deepseek_v4_indexer._SCORES", 100)
    torch.testing.assert_close(index_scores(queries, weights, keys), expected)


def test_gathering_in_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(hca_ratio=16, hc_sinkhorn_iters=2)
    weights, tokens = random_weights(config, 2), [7 * i % 97 for i in range(90)]
    whole = Driver(config, weights).run(tokens, [90])
    monkeypatch.setattr("worker.models.deepseek_v4_attention._GATHERED", 8 * 32 * 5)
    torch.testing.assert_close(Driver(config, weights).run(tokens, [90]), whole, atol=2e-5, rtol=0)


# --- rotary embedding ---

FLASH_YARN = Yarn(factor=16, original_positions=65536, beta_fast=32, beta_slow=1)


def test_frequencies_are_the_references_bit_for_bit_at_the_published_sizes() -> None:
    from transformers import DeepseekV4Config as TheirConfig
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

    yarn = {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    theirs = DeepseekV4RotaryEmbedding(TheirConfig(num_hidden_layers=2, rope_parameters=yarn))
    config = replace(tiny_config(), rope_dim=64, yarn=FLASH_YARN)
    torch.testing.assert_close(layer_frequencies(config, 0), theirs.main_inv_freq, rtol=0, atol=0)
    for ratio in (4, 128):
        torch.testing.assert_close(layer_frequencies(config, ratio), theirs.compress_inv_freq, rtol=2e-7, atol=0)


def test_yarn_keeps_fast_dims_and_divides_slow_ones() -> None:
    plain, stretched = frequencies(64, 160000.0, None), frequencies(64, 160000.0, FLASH_YARN)
    ratio = plain / stretched
    assert torch.equal(ratio[:15], torch.ones(15)) and torch.equal(ratio[25:], torch.full((7,), 16.0))
    assert (ratio.diff() >= 0).all()


def test_yarn_whose_bounds_fall_on_one_dim_is_a_step() -> None:
    stretched = frequencies(8, 10000.0, Yarn(factor=4, original_positions=7, beta_fast=2, beta_slow=1))
    assert torch.isfinite(stretched).all()


def test_positions_of_a_million_are_told_apart_and_turn_as_float32_angles() -> None:
    inverse = frequencies(64, 160000.0, FLASH_YARN)
    positions = torch.tensor([0, 1, 1_000_000, 1_000_001, 1_048_575])
    by = rotation(inverse, positions)
    angles = (positions.float().unsqueeze(1) * inverse).double()
    torch.testing.assert_close(by.cos.double(), angles.cos(), atol=3e-7, rtol=0)
    torch.testing.assert_close(by.sin.double(), angles.sin(), atol=3e-7, rtol=0)
    assert (by.cos[2] - by.cos[3]).abs().max() > 0.1


def test_pairs_are_interleaved_on_the_last_dims_and_the_inverse_turns_back() -> None:
    x = torch.randn(3, 2, 10, generator=torch.Generator().manual_seed(1))
    by = rotation(torch.tensor([0.5, 0.25]), torch.tensor([0, 1, 6]))
    turned = rotate_last(x, by)
    assert torch.equal(turned[..., :6], x[..., :6])
    pairs = torch.view_as_complex(x[..., 6:].view(3, 2, 2, 2))
    angles = torch.tensor([[0.0, 0.0], [0.5, 0.25], [3.0, 1.5]]).unsqueeze(1)
    expected = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    torch.testing.assert_close(turned[..., 6:], expected)
    torch.testing.assert_close(rotate_last(turned, by.inverse), x)


# --- streams and experts ---


def test_the_mixing_matrix_carries_stream_j_into_stream_k() -> None:
    config = tiny_config()
    generator = torch.Generator().manual_seed(2)
    weights = HyperWeights(*(torch.randn(shape, generator=generator) for shape in ((24, 256), (24,), (3,))))
    streams, y = torch.randn(5, 4, 64, generator=generator), torch.randn(5, 64, generator=generator)
    by = mixing(streams, weights, config, ((0, 5),))
    torch.testing.assert_close(by.carry.sum(1), torch.ones(5, 4), atol=1e-5, rtol=0)  # ends on its columns
    assert (by.carry - by.carry.transpose(1, 2)).abs().max() > 0.05
    read, written = read_streams(streams, by.read), write_streams(streams, y, by)
    for row in range(5):
        torch.testing.assert_close(read[row], sum(by.read[row, j] * streams[row, j] for j in range(4)))
        for k in range(4):
            carried = sum(by.carry[row, j, k] * streams[row, j] for j in range(4))
            torch.testing.assert_close(written[row, k], by.write[row, k] * y[row] + carried)


def test_the_gate_is_clamped_above_only() -> None:
    gate_up = torch.tensor([[20.0, -20.0, 1.0, 3.0, 20.0, -20.0]])
    out = clamped_swiglu(gate_up, 10.0, deterministic=False)
    expected = F.silu(torch.tensor([[10.0, -20.0, 1.0]])) * torch.tensor([[3.0, 10.0, -10.0]])
    assert torch.equal(out, expected)


@pytest.mark.parametrize("which", ["experts.0", "experts.5", "shared_experts"])
def test_the_clamp_binds_in_every_expert(which: str) -> None:
    """With the limit far away the logits are others, so models that agree at this limit agree about the clamp."""
    config = tiny_config(compress_ratios=[0], num_hidden_layers=1, num_hash_layers=0, num_experts_per_tok=8)
    weights, tokens = random_weights(config, 1), list(range(20))
    for part in ("w1", "w3"):
        for name in weights:
            if name.endswith(f"{part}.weight") and f".{which}." not in name:
                weights[name] = weights[name] * 1e-3  # so that no other is clamped
    clamped = Driver(config, weights).run(tokens, [20])
    free = Driver(replace(config, swiglu_limit=1e9), weights).run(tokens, [20])
    assert (clamped - free).abs().max() > 1e-2


def test_grouped_products_give_each_row_its_own_experts_sum() -> None:
    """A GPU's way through the experts: experts that nobody chose among them, and one that all rows did."""
    generator = torch.Generator().manual_seed(3)
    num_rows, num_experts, chosen, hidden, inner = 9, 8, 3, 64, 32
    up, down = (
        torch.randn(shape, generator=generator).mul_(shape[-1] ** -0.5).bfloat16()
        for shape in ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner))
    )
    x = (4 * torch.randn(num_rows, hidden, generator=generator)).bfloat16()
    unused = torch.empty(0)
    weights = MoeWeights(unused, None, None, up, down, unused, unused)
    config: Any = SimpleNamespace(num_experts=num_experts, experts_per_token=chosen, swiglu_limit=2.0)
    choices = ((5, 1, 2), (1, 5, 6), (6, 2, 5))  # of 0, 3, 4 and 7 nothing
    experts = torch.tensor([choices[row % 3] for row in range(num_rows)])
    shares = torch.rand(num_rows, chosen, generator=generator)
    sorted_experts, order = experts.flatten().sort(stable=True)
    got = _grouped(x, order // chosen, order, sorted_experts, shares.flatten()[order], weights, config)
    want = torch.zeros(num_rows, hidden)
    for row in range(num_rows):
        for expert, share in zip(experts[row].tolist(), shares[row], strict=True):
            gated = clamped_swiglu((up[expert].float() @ x[row].float())[None], 2.0, deterministic=False)[0]
            want[row] += share * (down[expert].float() @ gated)
    assert got.dtype == torch.float32
    errors = (got - want).norm(dim=1) / want.norm(dim=1)
    assert errors.max() < 1e-2, errors


@pytest.mark.parametrize("expert", [-1, 8])
def test_a_table_that_names_an_expert_that_is_not_there_is_refused(expert: int) -> None:
    config = tiny_config()
    weights = random_weights(config, 1)
    weights["layers.1.ffn.gate.tid2eid"][96, 2] = expert
    with pytest.raises(ModelError, match=r"layers\.1\.ffn\.gate\.tid2eid") as caught:
        DeepseekV4(config, weights)
    assert caught.value.reason == "BAD_TENSOR"


# --- deterministic mode ---


@pytest.mark.parametrize("count", [1, 21])
def test_a_row_has_the_same_bits_alone_and_in_any_company(count: int) -> None:
    config = tiny_config(hca_ratio=16, hc_sinkhorn_iters=4)
    driver = Driver(config, random_weights(config, 6))
    rng = random.Random(6)
    sequences = [driver.rows.add() for _ in range(11)]
    for sequence in sequences:
        driver.step([(sequence, [rng.randrange(97) for _ in range(rng.randrange(1, 90))])])
    ours, tokens = sequences[4], [rng.randrange(97) for _ in range(count)]
    (alone,) = driver.step([(driver.rows.fork(ours), tokens)], deterministic=True)
    for trial in range(6):
        mates = rng.sample([s for s in sequences if s != ours], k=2 + trial)
        place = rng.randrange(len(mates) + 1)
        work = [(driver.rows.fork(s), [rng.randrange(97) for _ in range(rng.choice((1, 1, 5)))]) for s in mates]
        work.insert(place, (driver.rows.fork(ours), tokens))
        assert torch.equal(driver.step(work, deterministic=True)[place], alone)


def test_pieces_of_rows_have_the_same_bits_in_any_order() -> None:
    torch.set_num_threads(3)  # a third of the values ends inside a vector register
    x = torch.randn(704, 272, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(704, generator=torch.Generator().manual_seed(2))
    for function in (torch.cos, torch.sin, F.softplus):
        here, there = (by_rows(function, rows, deterministic=True) for rows in (x, x[order]))
        assert torch.equal(here[order], there)
        torch.testing.assert_close(here, function(x))


# --- the MTP block ---


@pytest.mark.parametrize("chunks", [(40,), (7,), (23, 1)])
def test_the_draft_block_is_a_layer_of_the_reference_over_both_projections(chunks: tuple[int, ...]) -> None:
    config = tiny_config(compress_ratios=[0, 4, 0], num_hidden_layers=2, num_nextn_predict_layers=1, num_hash_layers=1)
    weights = random_weights(config, 8)
    rng = random.Random(8)
    tokens = [rng.randrange(97) for _ in range(41)]
    driver = Driver(config, weights, drafts=True)
    sequence = driver.rows.add()
    streams, logits = [], []
    sizes = list(chunks)
    with torch.inference_mode():
        while (at := driver.rows.lengths[sequence]) < 40:
            end = min(40, at + (sizes.pop(0) if len(sizes) > 1 else sizes[0]))
            batch = make_batch([(at, tokens[at:end])])
            driver.rows.begin(batch, [sequence])
            streams.append(driver.model.streams(batch, driver.rows))
            drafted = driver.model.draft(0, streams[-1], torch.tensor(tokens[at + 1 : end + 1]), batch, driver.rows)
            logits.append(driver.model.draft_logits(0, drafted, batch))
            driver.rows.end()

    reference = _reference_of_draft(config, weights)
    before = torch.cat(streams).double()
    after = weights["embed.weight"][torch.tensor(tokens[1:])].double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return weights[f"mtp.0.{name}.weight"].double() * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    projected = norm(after, "enorm") @ weights["mtp.0.e_proj.weight"].double().t()
    mixed = projected.unsqueeze(1) + norm(before, "hnorm") @ weights["mtp.0.h_proj.weight"].double().t()

    def substitute(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return (mixed.float().unsqueeze(0), *args[1:]), kwargs

    reference.model.layers[0].register_forward_pre_hook(substitute, with_kwargs=True)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens[:40]]), use_cache=False).logits[0]
    assert theirs.std() > 0.5
    torch.testing.assert_close(torch.cat(logits), theirs, atol=2e-5, rtol=0)


def _reference_of_draft(config: Any, weights: dict[str, torch.Tensor]) -> Any:
    """transformers' model of one layer with the block's weights, head and norm."""
    one = replace(config, num_layers=1, ratios=(0,), num_hash_layers=0, num_draft_layers=0)
    names = {name: name for name in tensors(one) if name in ("embed.weight", "head.weight")}
    names |= {name: "mtp.0." + name.removeprefix("layers.0.") for name in tensors(one) if name not in names}
    return reference_model(one, {name: weights[theirs] for name, theirs in names.items()})
