"""Decides what a step computes. Pure: no clock, no I/O, no tensors.

Every running sequence that has one token to compute gets its row in every step. Prompt tokens, oldest sequence first,
fill what the step's budget leaves, of tokens and, where others decode, of time; a long prompt is cut into chunks, so
running sequences never wait for a whole one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from worker.batch import GRID_TOKENS
from worker.sequence import Sequence
from worker.step_time import PrefillTime


@dataclass(frozen=True)
class Work:
    """Compute ``count`` tokens of ``sequence``, at least one, from ``start`` on; the last ``num_drafts`` of them are
    guesses. ``start`` is what the sequence has computed when the step begins.
    """

    sequence: Sequence
    start: int
    count: int
    num_drafts: int = 0

    @property
    def end(self) -> int:
        """Tokens of the sequence whose rows are written afterwards."""
        return self.start + self.count

    @property
    def certain_end(self) -> int:
        """``end`` without the guesses."""
        return self.end - self.num_drafts

    @property
    def token_ids(self) -> list[int]:
        """What is computed, guesses included."""
        sequence = self.sequence
        return sequence.token_ids[self.start : self.end] + sequence.drafts[: self.num_drafts]

    @property
    def wants_logits(self) -> bool:
        """Whether the work reaches the newest token, so that the next one can be drawn; and one more a guess."""
        return self.certain_end == len(self.sequence.token_ids)


class TimeBudget(NamedTuple):
    """For prompt tokens in a step in which others decode: ``seconds``, and what tokens take."""

    seconds: float
    takes: PrefillTime


def schedule(
    running: Iterable[Sequence],
    *,
    prefill_budget: int,
    deterministic: bool,
    one_span: bool = False,
    time_budget: TimeBudget | None = None,
) -> list[Work]:
    """The step's work, in the order of ``running`` (oldest first); every sequence appears at most once.

    Args:
        prefill_budget: most prompt tokens, decode rows not counted. At least 1, so something always runs.
        deterministic: prompt chunks end on the grid or at the prompt's end, and at least one span of the grid runs;
            emitted tokens that are computed again run one a step, as they did the first time.
        one_span: at most one span of the grid a sequence and step. Deterministic mode needs it where a group has a
            tail: a step's rows reach the ring after all of its spans, and what a span reads packed follows from where
            the step starts.
        time_budget: None: there is none. It never goes below ``PrefillTime.least_tokens``, or a span of the grid.
    """
    running = list(running)
    work: list[Work] = []
    left = prefill_budget
    prefilled = False
    chunks: list[tuple[int, int]] = []
    if not any(decodes(sequence, deterministic) for sequence in running):
        time_budget = None  # nobody waits for the step
    for sequence in running:
        if decodes(sequence, deterministic):
            num_drafts = len(sequence.drafts) if sequence.num_uncomputed == 1 else 0
            work.append(Work(sequence, sequence.num_computed, 1 + num_drafts, num_drafts))
            continue
        start = sequence.num_computed
        remaining = (sequence.num_prompt if deterministic else len(sequence.token_ids)) - start
        to_grid = GRID_TOKENS - start % GRID_TOKENS
        if one_span:
            remaining = min(remaining, to_grid)
        if start < sequence.junction < start + remaining:  # on the grid; a checkpoint is taken there
            remaining = sequence.junction - start
        count = min(remaining, left)
        if time_budget is not None:
            takes = time_budget.takes
            least = 0 if prefilled else min(count, takes.least_tokens(start))
            count = max(least, min(count, takes.most_tokens(chunks, start, time_budget.seconds)))
        if deterministic and count < remaining:
            count = max(0, (start + count) // GRID_TOKENS * GRID_TOKENS - start)
            if count == 0 and not prefilled:
                count = min(remaining, to_grid)
        if count > 0:
            work.append(Work(sequence, start, count))
            chunks.append((start, count))
            left = max(0, left - count)
            prefilled = True
    return work


def decodes(sequence: Sequence, deterministic: bool) -> bool:
    """Whether the sequence's next token is a row by itself."""
    replaying = deterministic and sequence.num_computed >= sequence.num_prompt
    return replaying or sequence.num_uncomputed == 1
