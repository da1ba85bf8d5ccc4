"""Chooses the next token of each row of logits. A row's result depends on that row alone.

Random numbers are a function of (seed, position), so sampling has no state: a resumed sequence draws what it would have
drawn. Filters go in this order: repetition penalty, temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from protos import types_pb2
from protos.errors import InternalError
from worker.seen import Seen
from worker.sequence import Sampling

_PERSON = b"tailpack-draw-v1"


@dataclass(frozen=True)
class Draw:
    """One row's task.

    ``token_ids``: the prompt and all output so far; the token drawn gets position len(token_ids). ``seen``: the
    sequence's own, from draw to draw.
    """

    sampling: Sampling
    token_ids: Sequence[int]
    seen: Seen = field(default_factory=Seen)


@dataclass(frozen=True)
class Drawn:
    token_id: int
    logprobs: types_pb2.PositionLogprobs | None


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """One token for each row.

    Args:
        logits: [S, vocab_size] float32; not changed.
        draws: S tasks. A sampled one has a seed.

    Raises:
        InternalError: a row holds NaN or an infinite maximum: the model is broken, and no token would be true.
    """
    if not draws:
        return []
    best_values, best_ids = logits.max(dim=-1)
    finite = torch.isfinite(best_values)
    if not bool(finite.all()):
        row = int((~finite).nonzero()[0])
        raise InternalError("the model's logits are not finite", given=f"row {row}: maximum {best_values[row]}")
    greedy_ids = best_ids.tolist()
    drawn = []
    for row, draw in enumerate(draws):
        sampling = draw.sampling
        token_id = greedy_ids[row]
        if not sampling.greedy or sampling.repetition_penalty != 1.0:
            token_id = _draw_row(logits[row], draw)
        told = None if sampling.logprobs is None else logprobs(logits[row], token_id, sampling.logprobs)
        drawn.append(Drawn(token_id, told))
    return drawn


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on nothing but (seed, position)."""
    digest = blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=_PERSON).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw_row(logits: torch.Tensor, draw: Draw) -> int:
    sampling = draw.sampling
    logits = logits.double()
    if sampling.repetition_penalty != 1.0:
        seen = draw.seen.mask(draw.token_ids, len(logits))
        logits = _penalise(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return int(logits.argmax())
    # The maximum first: a temperature near 0 would take every logit beyond what a double holds.
    probabilities = torch.softmax((logits - logits.max()) / sampling.temperature, dim=-1)
    kept = _keep(probabilities, sampling)
    if sampling.seed is None:
        raise InternalError("a sampled sequence has no seed")
    # Inverse CDF in the order of token ids; the last kept token takes what rounding leaves over.
    cumulative = torch.where(kept, probabilities, 0.0).cumsum(0)
    target = uniform(sampling.seed, len(draw.token_ids)) * cumulative[-1]
    index = int(torch.searchsorted(cumulative, target, right=True))
    return min(index, int(kept.nonzero()[-1]))


def _penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Keskar et al. 2019 ("CTRL"), section 4.1, with negative logits multiplied instead of divided."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def _keep(probabilities: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[vocab_size] bool: the tokens that may be drawn, the most likely one always. Equals are taken in order of ids."""
    vocab_size = len(probabilities)
    kept = torch.ones(vocab_size, dtype=torch.bool)
    if 0 < sampling.top_k < vocab_size or sampling.top_p < 1.0:
        limit = min(sampling.top_k or vocab_size, vocab_size)
        ordered, ids = _most_likely(probabilities, limit)
        if sampling.top_p < 1.0:
            cumulative = ordered.cumsum(0)
            limit = int(torch.searchsorted(cumulative, sampling.top_p * cumulative[-1])) + 1
        kept = torch.zeros(vocab_size, dtype=torch.bool)
        kept[ids[:limit]] = True
    if sampling.min_p > 0.0:
        kept &= probabilities >= sampling.min_p * probabilities.max()
    return kept


def _most_likely(probabilities: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest probabilities and their ids, largest first, equals in order of ids."""
    if count > len(probabilities) // 4:
        ordered, ids = probabilities.sort(descending=True, stable=True)
        return ordered[:count], ids[:count]
    # Far cheaper than sorting a vocabulary; which of several equals topk returns is not defined, so take them all.
    least = torch.topk(probabilities, count).values[-1]
    ids = (probabilities >= least).nonzero().squeeze(1)
    ordered, order = probabilities[ids].sort(descending=True, stable=True)
    return ordered[:count], ids[order[:count]]


def logprobs(logits: torch.Tensor, token_id: int, num_top: int) -> types_pb2.PositionLogprobs:
    """Of the model's own distribution: before penalty, temperature and filters."""
    all_of_them = torch.log_softmax(logits, dim=-1)
    none = all_of_them[:0]
    values, ids = _most_likely(all_of_them, min(num_top, len(all_of_them))) if num_top else (none, none)
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=token_id, logprob=float(all_of_them[token_id])),
        top=[
            types_pb2.TokenLogprob(token_id=int(i), logprob=p)
            for p, i in zip(values.tolist(), ids.tolist(), strict=True)
        ],
    )
