"""Sampling: each rule against a plain loop over tokens, and independence of everything but (row, seed, position)."""

from __future__ import annotations

import itertools
import math
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.errors import InternalError
from worker.sampler import Draw, sample, uniform
from worker.seen import Seen
from worker.sequence import Sampling


def draw(logits: list[float] | torch.Tensor, position: int = 3, history: list[int] | None = None, **kw: Any) -> int:
    row = torch.as_tensor(logits, dtype=torch.float32)
    token_ids = history if history is not None else [0] * position
    return sample(row.unsqueeze(0), [Draw(Sampling(**kw), token_ids)])[0].token_id


def plain_keep(probabilities: list[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The kept ids, the slow way: most likely first, equals by id."""
    order = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
    kept = order[: top_k or len(order)]
    total, mass, nucleus = sum(probabilities[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        mass += probabilities[i]
        if mass >= top_p * total:
            break
    best = probabilities[order[0]]
    return sorted(i for i in nucleus if probabilities[i] >= min_p * best)


def plain_draw(logits: list[float], position: int, s: Sampling, history: list[int]) -> int:
    values = list(logits)
    for i in set(history):
        values[i] = values[i] / s.repetition_penalty if values[i] > 0 else values[i] * s.repetition_penalty
    values = [v / s.temperature for v in values]
    top = max(values)
    weights = [math.exp(v - top) for v in values]
    probabilities = [w / sum(weights) for w in weights]
    kept = plain_keep(probabilities, s.top_k, s.top_p, s.min_p)
    assert s.seed is not None
    target, mass = uniform(s.seed, position) * sum(probabilities[i] for i in kept), 0.0
    for i in kept:
        mass += probabilities[i]
        if mass > target:
            return i
    return kept[-1]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_draws_are_those_of_a_plain_loop(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 40))
    # Eighths are exact in float32, so equal probabilities are really equal.
    logits = [v / 8 for v in data.draw(st.lists(st.integers(-60, 60), min_size=size, max_size=size))]
    history = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=10))
    s = Sampling(
        temperature=data.draw(st.sampled_from([0.3, 1.0, 2.5])),
        top_k=data.draw(st.integers(0, size + 2)),
        top_p=data.draw(st.sampled_from([0.013, 0.31, 0.77, 1.0])),
        min_p=data.draw(st.sampled_from([0.0, 0.011, 0.43])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 2.0])),
        seed=data.draw(st.integers(0, 2**64 - 1)),
    )
    ours = sample(torch.tensor([logits]), [Draw(s, history)])[0].token_id
    assert ours == plain_draw(logits, len(history), s, history)


def test_a_large_vocabulary_takes_the_same_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    for case in range(12):
        logits = torch.randn(5000, generator=generator) * (0.1 if case % 2 else 4)
        logits = (logits * 8).round() / 8
        s = Sampling(temperature=1.0, top_k=(0, 7, 3000)[case % 3], top_p=(0.2, 0.95)[case % 2], seed=case)
        expected = plain_draw(logits.tolist(), 1, s, [0])
        assert sample(logits.unsqueeze(0), [Draw(s, [0])])[0].token_id == expected


def test_uniform_depends_on_seed_and_position_and_is_uniform() -> None:
    assert uniform(1, 2) == uniform(1, 2)
    assert len({uniform(s, p) for s in range(50) for p in range(50)}) == 2500
    values = [uniform(7, p) for p in range(20000)]
    assert min(values) >= 0 and max(values) < 1
    for tenth in range(10):
        share = sum(tenth / 10 <= v < (tenth + 1) / 10 for v in values) / len(values)
        assert abs(share - 0.1) < 0.01


def test_frequencies_follow_the_distribution() -> None:
    probabilities = [0.5, 0.3, 0.15, 0.05]
    logits = [math.log(p) for p in probabilities]
    counted = Counter(draw(logits, position, temperature=1.0, seed=11) for position in range(4000))
    for token, probability in enumerate(probabilities):
        assert abs(counted[token] / 4000 - probability) < 0.03


def test_a_row_does_not_know_its_mates() -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(9, 300, generator=generator)
    draws = [Draw(Sampling(temperature=1.5, top_p=0.9, seed=i, logprobs=i), [i, 2 * i]) for i in range(8)]
    draws.append(Draw(Sampling(logprobs=3), [1]))
    together = sample(rows, draws)
    for i, d in enumerate(draws):
        assert sample(rows[i : i + 1], [d]) == [together[i]]
    backwards = sample(rows.flip(0), draws[::-1])
    assert backwards[::-1] == together


def test_greedy_with_a_repetition_penalty() -> None:
    assert draw([1.0, 2.0, 1.9], history=[1]) == 1
    assert draw([1.0, 2.0, 1.9], history=[1], repetition_penalty=1.2) == 2
    assert draw([-1.0, -2.0, -1.9], history=[0, 0], repetition_penalty=2.5) == 2


class Watched(list[int]):
    """A token list that counts how many of its tokens are looked at."""

    looked_at = 0

    def __getitem__(self, key: Any) -> Any:
        part = super().__getitem__(key)
        self.looked_at += len(part) if isinstance(key, slice) else 1
        return part

    def __iter__(self) -> Any:
        self.looked_at += len(self)
        return super().__iter__()


def test_a_penalty_looks_at_each_token_once() -> None:
    history, plain, seen = Watched([1] * 10_000), [1] * 10_000, Seen()
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=1.0, repetition_penalty=1.5, seed=1)
    for _ in range(100):
        drawn = sample(logits.unsqueeze(0), [Draw(sampling, history, seen)])[0].token_id
        assert drawn == draw(logits, history=plain, temperature=1.0, repetition_penalty=1.5, seed=1)
        history.append(drawn)
        plain.append(drawn)
    assert history.looked_at <= 10_000 + 100 * 4


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_what_was_seen_is_right_however_the_list_changes(data: st.DataObject) -> None:
    tokens, seen = [data.draw(st.integers(0, 9))], Seen()
    for _ in range(data.draw(st.integers(1, 12))):
        assert seen.mask(tokens, 10).nonzero().squeeze(1).tolist() == sorted(set(tokens))
        match data.draw(st.sampled_from(["grow", "cut", "fork"])):
            case "grow":
                tokens += data.draw(st.lists(st.integers(0, 9), max_size=3))
            case "cut":  # as after a rollback: what stays, then another token
                del tokens[data.draw(st.integers(0, len(tokens) - 1)) :]
                tokens.append(data.draw(st.integers(0, 9)))
            case "fork":
                tokens = [*tokens, data.draw(st.integers(0, 9))]


def test_logprobs_are_a_log_softmax_before_every_filter() -> None:
    logits = torch.tensor([[0.5, 2.0, -1.0, 1.0]])
    sampling = Sampling(temperature=0.2, top_k=1, repetition_penalty=9.0, seed=1, logprobs=2)
    (drawn,) = sample(logits, [Draw(sampling, [1])])
    expected = torch.log_softmax(logits[0], 0)
    assert drawn.logprobs is not None
    assert drawn.logprobs.chosen.logprob == pytest.approx(float(expected[drawn.token_id]), abs=1e-6)
    assert [t.token_id for t in drawn.logprobs.top] == [1, 3]
    (without,) = sample(logits, [Draw(Sampling(logprobs=0), [1])])
    assert without.logprobs is not None and not without.logprobs.top and without.logprobs.chosen.token_id == 1


def test_the_most_likely_others_come_in_order_of_ids_when_equal() -> None:
    for size in (30, 5000):
        logits = torch.zeros(1, size)
        logits[0, size // 2] = 1.0
        (drawn,) = sample(logits, [Draw(Sampling(logprobs=20), [1])])
        assert drawn.logprobs is not None
        rest = [i for i in range(size) if i != size // 2]
        assert [t.token_id for t in drawn.logprobs.top] == [size // 2, *rest[:19]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_a_bug_not_a_token(bad: float) -> None:
    with pytest.raises(InternalError, match="row 1"):
        sample(torch.tensor([[1.0, 2.0], [bad, 1.0]]), [Draw(Sampling(), [0]), Draw(Sampling(), [0])])


TINIEST = 5e-324
LARGEST = 3.4e38  # near float32's end, as a model's logits may be without being infinite


@pytest.mark.parametrize(
    "logits",
    [
        [1.0, 2.0, -3.0, 0.0, 2.0],
        [LARGEST, -LARGEST, 0.0, 1e-45, LARGEST],
        [-LARGEST] * 5,
        [0.0] * 5,
        [3.0, float("-inf"), float("-inf"), 2.0, 1.0],
    ],
)
def test_the_corners_of_every_range_draw_a_token(logits: list[float]) -> None:
    corners = itertools.product(
        (0.0, TINIEST, 1e-310, sys.float_info.min, 1e-40, 1.0, 100.0),  # temperature
        (0, 1, 2, 2**32 - 1),  # top_k
        (TINIEST, 0.5, 1.0),  # top_p
        (0.0, TINIEST, 0.5, 1.0),  # min_p
        (0.01, 1.0, 100.0),  # repetition_penalty
        (0, 2**64 - 1),  # seed
    )
    rows = []
    for temperature, top_k, top_p, min_p, penalty, seed in corners:
        sampling = Sampling(temperature, top_k, top_p, min_p, penalty, seed)
        rows.append((sampling, Draw(sampling, [0, 2])))
    drawn = sample(torch.tensor([logits] * len(rows)), [d for _, d in rows])
    for (sampling, _), result in zip(rows, drawn, strict=True):
        assert logits[result.token_id] > float("-inf"), sampling
        if sampling.temperature <= 1e-40 and sampling.repetition_penalty == 1.0:
            assert logits[result.token_id] == max(logits), sampling
