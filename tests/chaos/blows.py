"""What is done to processes, and when: from a seed, so that it can be done again."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class RoundFailed(AssertionError):
    """The message names the seed. ``logs``: the folder in which they are kept."""

    def __init__(self, message: str, logs: Path) -> None:
        super().__init__(message)
        self.logs = logs


Victims = Sequence[tuple[tuple[str, ...], int]]
"""Who is hit together, and how often."""


@dataclass(frozen=True)
class Blow:
    """``after_s`` behind the last one, or behind all being up again, a signal for each victim. SIGSTOP is followed by
    SIGCONT ``stop_s`` later.
    """

    after_s: float
    all_up: bool
    victims: tuple[str, ...]
    signum: int
    stop_s: float = 0.0

    def __str__(self) -> str:
        stop = f" for {self.stop_s:.2f} s" if self.stop_s else ""
        return f"{signal.Signals(self.signum).name} {' and '.join(self.victims)}{stop}"


def plan(
    seed: int, victims: Victims, *, pause_s: float, routers: bool = False, all_up_share: float = 0.65
) -> Iterator[Blow]:
    """Blows without end, mostly kills.

    Args:
        pause_s: about as long as a process takes to come back, on a machine with nothing else to do.
        routers: are hit as well. Then nothing is left of an answer whose worker is told to end, or dies before another
            store has its memory; so workers are not told to end, and around a store's death all must be up.
        all_up_share: of the blows; the others come before what was hit before is back.
    """
    rng = random.Random(f"plan {seed}")
    store_was_hit = False
    while True:
        (names,) = rng.choices([names for names, _ in victims], [weight for _, weight in victims])
        (signum,) = rng.choices([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], [80, 10, 10])
        if routers and signum == signal.SIGTERM and any(name.startswith("worker") for name in names):
            signum = signal.SIGKILL
        stop_s = rng.choice([0.02, 0.1, 0.4, 1.6]) if signum == signal.SIGSTOP else 0.0
        all_up = rng.random() < all_up_share or (routers and (store_was_hit or "kvstore" in names))
        store_was_hit = "kvstore" in names
        yield Blow(rng.uniform(0.0, 1.3 * pause_s), all_up, names, signum, stop_s)


@dataclass
class Report:
    """What one run saw."""

    setting: str
    seed: int
    blows: int = 0  # signals that found somebody alive
    kills: Counter[str] = field(default_factory=Counter)  # the same, by victim and signal
    streams: int = 0  # that ended as they should
    interrupted: int = 0  # of these, those that met a death
    tokens: int = 0
    seconds: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)  # where they went
    counts: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.parts_s[name] = round(time.monotonic() - began, 2)

    def hit(self, name: str, signum: int) -> None:
        self.blows += 1
        self.kills[f"{name.partition('-')[0]} {signal.Signals(signum).name}"] += 1

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
