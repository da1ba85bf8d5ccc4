"""What a load test counts: mixes, arrivals, durations and their percentiles, rates over a window. Pure.

All times are seconds on one clock that the caller reads; 0 is the start of the load.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from protos.errors import InvalidRequest

_RATIO = 1.005
_LOG_RATIO = math.log(_RATIO)
_SHORTEST_S = 1e-7
MAX_TOKENS = 1 << 24


@dataclass(frozen=True)
class Mix:
    """Numbers of tokens and how often each occurs; weights need not sum to one."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> Mix:
        """From "128:0.7,2048:0.3", or "128". Raises InvalidRequest (BAD_MIX)."""
        tokens, weights = [], []
        for part in text.split(","):
            number, colon, weight = part.partition(":")
            try:
                tokens.append(int(number))
                weights.append(float(weight) if colon else 1.0)
            except ValueError:
                raise _bad_mix(text) from None
        if not all(1 <= count <= MAX_TOKENS for count in tokens):
            raise _bad_mix(text)
        if not all(0 < weight <= 1e9 for weight in weights):  # NaN is outside too
            raise _bad_mix(text)
        return cls(tuple(tokens), tuple(weights))

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self.tokens, self.weights)[0]

    @property
    def mean(self) -> float:
        weighted = sum(count * weight for count, weight in zip(self.tokens, self.weights, strict=True))
        return weighted / sum(self.weights)

    def __str__(self) -> str:
        if len(self.tokens) == 1:
            return str(self.tokens[0])
        shares = (weight / sum(self.weights) for weight in self.weights)
        return ",".join(f"{count}:{share:.3g}" for count, share in zip(self.tokens, shares, strict=True))


def _bad_mix(text: str) -> InvalidRequest:
    return InvalidRequest(
        "a mix of lengths is malformed",
        reason="BAD_MIX",
        given=repr(text[:200]),
        allowed="tokens:weight with commas between, such as 128:0.7,2048:0.3, or one number of tokens",
    )


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """When requests of independent users arrive: gaps are exponential with mean 1 / rate seconds."""
    rng = random.Random(f"arrivals {seed}")
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate)
        yield at_s


@dataclass
class Durations:
    """Any number of them in bounded memory: counts in buckets whose bounds grow by 0.5%; least and most are exact.

    A percentile is at most 0.25% away from the exact one (nearest rank), above 0.1 microseconds.
    """

    count: int = 0
    sum_s: float = 0.0
    min_s: float = math.inf
    max_s: float = 0.0
    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, duration_s: float) -> None:
        duration_s = max(0.0, duration_s)
        self.count += 1
        self.sum_s += duration_s
        self.min_s = min(self.min_s, duration_s)
        self.max_s = max(self.max_s, duration_s)
        self._buckets[math.floor(math.log(max(duration_s, _SHORTEST_S)) / _LOG_RATIO)] += 1

    def percentile(self, q: float) -> float:
        """The least duration that at least q percent are at most as long as. NaN where there is none."""
        if not self.count:
            return math.nan
        rank = max(1, math.ceil(self.count * q / 100))
        if rank == self.count:
            return self.max_s
        return next(duration_s for duration_s, seen in self.cumulated() if seen >= rank)

    def cumulated(self) -> Iterator[tuple[float, int]]:
        """(duration, how many are at most as long), rising: what a distribution's plot shows."""
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            middle = math.exp((bucket + 0.5) * _LOG_RATIO)
            yield min(max(middle, self.min_s), self.max_s), seen

    @property
    def mean_s(self) -> float:
        return self.sum_s / self.count if self.count else math.nan


@dataclass(frozen=True)
class Ended:
    """One request, through. first_token_s None: it had none. reason: why it failed; "" where it did not."""

    intended_s: float  # when it was due: latencies count from here, however late it was sent
    sent_s: float
    first_token_s: float | None
    last_token_s: float | None
    ended_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    reason: str = ""


@dataclass
class Measured:
    """What a load test has seen. Latencies are of requests that were due in the window and were answered; rates are of
    what happened in the window, whichever request it was for.

    Args:
        begin_s: of the window: the end of the warm-up.
    """

    begin_s: float
    ttft: Durations = field(default_factory=Durations)  # due to first token
    itl: Durations = field(default_factory=Durations)  # between chunks of an answer, each with a token or more
    tpot: Durations = field(default_factory=Durations)  # of each answer: (last token - first) / (tokens - 1)
    e2e: Durations = field(default_factory=Durations)  # due to last chunk
    late: Durations = field(default_factory=Durations)  # due to sent: the load generator's own part
    errors: Counter[str] = field(default_factory=Counter)
    num_warmup: int = 0
    num_answered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_chunks: int = 0  # with tokens
    num_chunk_tokens: int = 0
    tokens_by_second: Counter[int] = field(default_factory=Counter)  # all of them, warm-up too
    ended_by_second: Counter[int] = field(default_factory=Counter)
    errors_by_second: Counter[int] = field(default_factory=Counter)
    in_flight_by_second: dict[int, int] = field(default_factory=dict)  # the most
    window_tokens: int = 0
    window_ended: int = 0
    end_s: float | None = None  # of the window; set when it is over

    def in_window(self, at_s: float) -> bool:
        return at_s >= self.begin_s and (self.end_s is None or at_s <= self.end_s)

    def chunk(self, at_s: float, num_tokens: int, since_s: float | None, intended_s: float) -> None:
        """A chunk with tokens came. since_s: the one before it of this answer; None: this is its first."""
        self.tokens_by_second[int(at_s)] += num_tokens
        if self.in_window(at_s):
            self.window_tokens += num_tokens
        if intended_s >= self.begin_s:
            self.num_chunks += 1
            self.num_chunk_tokens += num_tokens
            if since_s is not None:
                self.itl.add(at_s - since_s)

    def in_flight(self, at_s: float, count: int) -> None:
        self.in_flight_by_second[int(at_s)] = max(count, self.in_flight_by_second.get(int(at_s), 0))

    def ended(self, one: Ended) -> None:
        if one.reason:
            self.errors_by_second[int(one.ended_s)] += 1
        else:
            self.ended_by_second[int(one.ended_s)] += 1
            self.window_ended += self.in_window(one.ended_s)
        if one.intended_s < self.begin_s:
            self.num_warmup += 1
            return
        if one.reason:
            self.errors[one.reason] += 1
            return
        self.num_answered += 1
        self.prompt_tokens += one.prompt_tokens
        self.cached_tokens += one.cached_tokens
        self.late.add(one.sent_s - one.intended_s)
        self.e2e.add(one.ended_s - one.intended_s)
        if one.first_token_s is not None and one.last_token_s is not None:
            self.ttft.add(one.first_token_s - one.intended_s)
            if one.output_tokens > 1:
                self.tpot.add((one.last_token_s - one.first_token_s) / (one.output_tokens - 1))

    @property
    def window_s(self) -> float:
        return max(0.0, (self.end_s if self.end_s is not None else self.begin_s) - self.begin_s)

    def per_second(self, amount: float) -> float:
        return amount / self.window_s if self.window_s else math.nan
