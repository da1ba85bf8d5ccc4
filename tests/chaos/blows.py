"""What is done to processes, and when: from a seed, so that it can be done again."""

from __future__ import annotations

import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Victims = Sequence[tuple[tuple[str, ...], int]]
"""Who is hit together, and how often."""


@dataclass(frozen=True)
class Blow:
    """``after_s`` behind the last one, a signal for each victim. SIGSTOP is followed by SIGCONT ``stop_s`` later."""

    after_s: float
    victims: tuple[str, ...]
    signum: int
    stop_s: float = 0.0

    def __str__(self) -> str:
        stop = f" for {self.stop_s:.2f} s" if self.stop_s else ""
        return f"{signal.Signals(self.signum).name} {' and '.join(self.victims)}{stop}"


def plan(seed: int, victims: Victims, *, pause_s: float) -> Iterator[Blow]:
    """Blows without end: mostly kills, a third of them before what was hit before is back.

    Args:
        pause_s: about as long as a process takes to come back.
    """
    rng = random.Random(f"plan {seed}")
    while True:
        (names,) = rng.choices([names for names, _ in victims], [weight for _, weight in victims])
        (signum,) = rng.choices([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], [80, 10, 10])
        stop_s = rng.choice([0.02, 0.1, 0.4, 1.6]) if signum == signal.SIGSTOP else 0.0
        after_s = pause_s * (rng.uniform(0.0, 0.5) if rng.random() < 0.3 else rng.uniform(0.5, 2.5))
        yield Blow(after_s, names, signum, stop_s)


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
    counts: Counter[str] = field(default_factory=Counter)

    def hit(self, name: str, signum: int) -> None:
        self.blows += 1
        self.kills[f"{name.partition('-')[0]} {signal.Signals(signum).name}"] += 1

    def as_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, Counter) else value for name, value in vars(self).items()}
