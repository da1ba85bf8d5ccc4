"""DeepSeek-V4's logits are transformers' own, within 2e-5, however a sequence is cut into steps and rolled back.

The indexer's choice is a step function: where two scores at its edge differ by less than rounding, two right
computations choose different rows and part by tenths. The seeds here leave a gap there, and the tests check that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.unit.deepseek_v4_tiny import (
    MARGIN,
    TINY,
    Driver,
    random_weights,
    reference_logits,
    reference_model,
    tiny_config,
    watched_gaps,
)
from worker.models.deepseek_v4_checkpoint import kept_in_float32
from worker.models.deepseek_v4_geometry import INDEX_KEY

TOLERANCE = 2e-5
GAP = 1e-5
CHUNKS: dict[str, tuple[int, ...]] = {
    "1": (1,),
    "1 behind 115": (115, 1),
    **{str(size): (size,) for size in (2, 3, 7, 16, 40, 130)},
    "whole": (1000,),
}

FEW = {"hc_sinkhorn_iters": 4}  # the balancing takes most of a tiny model's time
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "the model's own ratios": (1, {}),  # and so more tokens than in the others
    "no YaRN, HCA of 16": (2, {"rope_scaling": None, "hca_ratio": 16, **FEW}),
    "every row chosen": (3, {"index_topk": 512, "hca_ratio": 16, "num_hash_layers": 0, **FEW}),
    "compressed layers only, groups of one head": (
        4,
        {"compress_ratios": [128, 128, 4, 128, 4], "o_groups": 4, "num_hash_layers": 5, "hca_ratio": 32, **FEW},
    ),
    "window alone, wider than a chunk": (
        5,
        {"compress_ratios": [0, 0], "num_hidden_layers": 2, "sliding_window": 64, "num_hash_layers": 1},
    ),
}


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY["vocab_size"]) for _ in range(count)]


def check(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    assert ours.dtype == torch.float32 and ours.shape == theirs.shape
    difference = (ours - theirs).abs().amax(1)
    worst = int(difference.argmax())
    assert difference.max() <= TOLERANCE, f"{what}: row {worst} of {len(ours)} differs by {difference[worst]:.3g}"


@pytest.fixture
def gaps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Between the worst score that was chosen and the best that was not, of every choice that the test makes."""
    return watched_gaps(monkeypatch)


def run_together(driver: Driver, tokens: Sequence[int], chunks: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Each name's sequence in steps of its sizes, the last repeated, all in one ragged batch a step."""
    sequences = {name: driver.rows.add() for name in chunks}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in chunks}
    for number in range(len(tokens)):
        work, names = [], []
        for name, sequence in sequences.items():
            at, sizes = driver.rows.lengths[sequence], chunks[name]
            if at < len(tokens):
                work.append((sequence, tokens[at : at + sizes[min(number, len(sizes) - 1)]]))
                names.append(name)
        if not work:
            break
        for name, rows in zip(names, driver.step(work, padding=number % 3), strict=True):
            logits[name].append(rows)
    return {name: torch.cat(rows) for name, rows in logits.items()}


@pytest.mark.parametrize("name", VARIANTS)
def test_every_way_of_cutting_a_sequence_gives_the_reference_logits(name: str, gaps: list[float]) -> None:
    seed, changes = VARIANTS[name]
    config = tiny_config(**changes)
    weights, tokens = random_weights(config, seed), random_tokens(263 if 128 in config.ratios else 150, seed)
    theirs = reference_logits(reference_model(config, weights), tokens)
    ours = run_together(Driver(config, weights), tokens, CHUNKS)
    if 4 in config.ratios and config.index_topk < 37:
        print(f"smallest gap {min(gaps):.2g}")
        assert min(gaps) > GAP, f"seed {seed} makes a near-tie of {min(gaps):.2g}: take another"
    else:
        assert not gaps
    for cut, logits in ours.items():
        check(logits, theirs, f"chunks {cut}")


def test_rollback_by_1_to_16_tokens_at_every_phase_of_both_ratios(gaps: list[float]) -> None:
    """Rings are no deeper than the window or the block and the margin, so a row too few would be missed."""
    config = tiny_config(compress_ratios=[4, 128], num_hidden_layers=2, num_hash_layers=1, hc_sinkhorn_iters=2)
    weights, tokens, junk = random_weights(config, 11), random_tokens(260, 11), random_tokens(16, 12)
    theirs = reference_logits(reference_model(config, weights), tokens)
    driver = Driver(config, weights)
    first = driver.rows.add()
    driver.step([(first, tokens[:121])])
    depths = {depth: driver.rows.fork(first) for depth in range(1, MARGIN + 1)}
    for length in range(121, 121 + 128 + 10):
        driver.step([(sequence, junk[:depth]) for depth, sequence in depths.items()])
        for sequence in depths.values():
            driver.rows.truncate(sequence, length)
        ours = driver.step([(sequence, tokens[length : length + 1]) for sequence in depths.values()])
        for depth, logits in zip(depths, ours, strict=True):
            check(logits, theirs[length : length + 1], f"token {length} behind a rollback by {depth}")
    print(f"smallest gap {min(gaps):.2g}")
    assert min(gaps) > GAP


def test_rollback_of_single_steps_and_of_chunks_that_the_rest_follows_in_one_chunk(gaps: list[float]) -> None:
    config = tiny_config(hca_ratio=16, **FEW)
    weights, tokens, junk = random_weights(config, 2), random_tokens(110, 21), random_tokens(16, 22)
    theirs = reference_logits(reference_model(config, weights), tokens)
    driver = Driver(config, weights)
    start = driver.rows.add()
    driver.step([(start, tokens[:60])])
    for length in range(60, 76):
        sequence = driver.rows.fork(start)
        depth = 1 + (length * 7) % 16
        for token in junk[:depth]:
            driver.step([(sequence, [token])])
        driver.rows.truncate(sequence, length)
        (rest,) = driver.step([(sequence, tokens[length:])])
        check(rest, theirs[length:], f"tokens behind {length}, after a rollback by {depth}")
        driver.step([(start, tokens[length : length + 1])])
    print(f"smallest gap {min(gaps):.2g}")
    assert min(gaps) > GAP


def test_at_a_page_boundary_a_resume_needs_the_window_and_four_pending_rows() -> None:
    """Nothing waits in HCA there, and in CSA only the first halves of the last block."""
    config = tiny_config(hc_sinkhorn_iters=2)
    weights, tokens = random_weights(config, 3), random_tokens(150, 3)
    theirs = reference_logits(reference_model(config, weights), tokens)
    driver = Driver(config, weights)
    sequence = driver.rows.add()
    for length in (128, 130):
        driver.step([(sequence, tokens[driver.rows.lengths[sequence] : length])])
        resumed = driver.rows.fork(sequence)
        for (layer, kind), held in driver.rows.rows[resumed].items():
            if kind == "raw":
                held.forget(length - config.window + 1, length)
            elif driver.rows.regions[layer, kind].tail_only:
                held.forget(length if kind == "hca_pending" else 124, length)
        if length == 128:
            (logits,) = driver.step([(resumed, tokens[128:])])
            check(logits, theirs[128:], "tokens behind the resume")
        else:  # the first two rows of HCA's block are gone; they are asked for when it is full
            driver.step([(resumed, tokens[130:])])
            with pytest.raises(AssertionError, match=r"hca_pending rows \[128, 150\) of layer 2 are asked for"):
                driver.step([(resumed, random_tokens(106, 4))])


def test_a_ring_without_room_for_the_rollback_is_missed() -> None:
    config = tiny_config(compress_ratios=[4, 128], num_hidden_layers=2, hc_sinkhorn_iters=2)
    driver = Driver(config, random_weights(config, 1), margin=MARGIN - 1)
    sequence = driver.rows.add()
    driver.step([(sequence, random_tokens(140, 1))])
    driver.rows.truncate(sequence, 140 - MARGIN)
    with pytest.raises(AssertionError, match=r"raw rows \[109, 124\) of layer 0 are asked for, held are \[110"):
        driver.step([(sequence, [5])])


def test_index_keys_are_kept_but_not_read_while_every_row_is_chosen() -> None:
    config = tiny_config(index_topk=8, num_hidden_layers=2, compress_ratios=[4, 0], **FEW)
    driver = Driver(config, random_weights(config, 1))
    sequence = driver.rows.add()
    for token in random_tokens(40, 1):
        driver.step([(sequence, [token])])
        num_rows = driver.rows.lengths[sequence] // 4
        assert ((0, INDEX_KEY) in driver.rows.read) == (num_rows > 8)
        assert driver.rows.rows[sequence][0, INDEX_KEY].end == num_rows


@pytest.mark.parametrize("seed", [1, 2])
def test_bfloat16_stays_beside_float32(seed: int) -> None:
    """Judged by the distributions: one rounding at the edge of the indexer's choice moves a logit by tenths."""
    config = tiny_config(hca_ratio=16, **FEW)
    weights, tokens = random_weights(config, seed), random_tokens(120, seed)
    exact = Driver(config, weights).run(tokens, [120])
    half = {n: w if kept_in_float32(n) or not w.is_floating_point() else w.bfloat16() for n, w in weights.items()}
    driver = Driver(config, half, dtype="bfloat16")
    rounded = driver.run(tokens, [50, 1])
    assert {str(held.rows.dtype) for held in driver.rows.rows[0].values()} == {"torch.bfloat16", "torch.float32"}
    divergence = torch.nn.functional.kl_div(
        rounded.log_softmax(-1), exact.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    print(f"KL mean {divergence.mean():.2g}, greatest {divergence.max():.2g}")
    assert divergence.mean() < 5e-3
    assert (rounded.argmax(-1) == exact.argmax(-1)).float().mean() > 0.85
