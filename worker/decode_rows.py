"""Which sequence has which row of the captured decode steps, and what has changed about it since the step before.

A sequence that went on as its row foresaw (one token more, the one that was drawn) needs nothing but the pages that are
new to it. One that did anything else meanwhile (a prompt chunk, a rollback, a drop) enters anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.decode_graphs import DecodeGraphs
from worker.decode_state import RowStart
from worker.scheduler import Work
from worker.sequence import Sequence as Seq

NO_LIMIT = (1 << 31) - 1  # the engine decides where a sequence ends


@dataclass
class _Row:
    """What the device has of a sequence, once the step under way is done."""

    token: int
    num_tokens: int
    pages: dict[str, list[int]]
    bases: dict[str, int]
    tail_slots: dict[str, int]


class DecodeRows:
    """Engine steps of decode rows alone. Used by the engine thread only.

    Args:
        graphs: captured, no row in use.
    """

    def __init__(self, graphs: DecodeGraphs) -> None:
        self._graphs = graphs
        self._row_of: dict[Seq, int] = {}
        self._rows: dict[int, _Row] = {}
        self.num_entered = 0
        """Times that a sequence took a row; a steady run adds none."""

    @staticmethod
    def takes(work: Sequence[Work]) -> bool:
        """Whether a step is one token of each sequence, all drawn on the device: no prompt, no guess, no logprobs."""
        return bool(work) and all(
            w.count == 1 and not w.num_drafts and w.wants_logits and w.sequence.request.sampling.logprobs is None
            for w in work
        )

    def run(self, work: Sequence[Work]) -> list[int]:
        """Computes the step; returns the token that each work's sequence drew.

        Raises:
            InternalError: NOT_FINITE; or more sequences than the graphs have rows.
        """
        graphs, sequences = self._graphs, [w.sequence for w in work]
        for gone in self._row_of.keys() - {*sequences}:
            self._leave(gone)
        bucket = graphs.bucket_of(len(sequences))
        for each in sequences:
            row = self._row_of.get(each)
            if row is not None and row >= bucket:  # a smaller graph serves them, if it moves down
                self._leave(each)
                row = None
            if row is None or not self._follows(row, each):
                self._enter(each, row)
            else:
                self._update(row, each)
        drawn = graphs.tokens(graphs.launch(1 + max(self._rows)))
        tokens = []
        for each in sequences:
            row = self._row_of[each]
            state, token = self._rows[row], drawn[row]
            state.token, state.num_tokens = token, state.num_tokens + 1
            tokens.append(token)
        return tokens

    def _follows(self, row: int, sequence: Seq) -> bool:
        state = self._rows[row]
        return (
            state.num_tokens == len(sequence.token_ids)
            and state.token == sequence.token_ids[-1]
            and state.tail_slots == sequence.tail_slots
        )

    def _enter(self, sequence: Seq, row: int | None) -> None:
        if row is None:
            row = next(free for free in range(len(self._rows) + 1) if free not in self._rows)
        self._row_of[sequence] = row
        self._rows[row] = _Row(
            token=sequence.token_ids[-1],
            num_tokens=len(sequence.token_ids),
            pages={name: list(page_ids) for name, page_ids in sequence.pages.items()},
            bases=dict(sequence.bases),
            tail_slots=dict(sequence.tail_slots),
        )
        self.num_entered += 1
        start = RowStart(
            token=sequence.token_ids[-1],
            num_tokens=len(sequence.token_ids),
            limit=NO_LIMIT,
            sampling=sequence.request.sampling,
            pages=sequence.pages,
            bases=sequence.bases,
            tail_slots=sequence.tail_slots,
            seen=sequence.token_ids,
        )
        self._graphs.enter(row, start)

    def _update(self, row: int, sequence: Seq) -> None:
        """Pages that are new or freed, and bases that have moved."""
        state = self._rows[row]
        for name, page_ids in sequence.pages.items():
            known = state.pages[name]
            if page_ids == known:
                continue
            same = next((i for i, (a, b) in enumerate(zip(page_ids, known, strict=False)) if a != b), len(known))
            self._graphs.set_pages(row, name, same, page_ids[same:])
            state.pages[name] = list(page_ids)
        for name, base in sequence.bases.items():
            if base != state.bases[name]:
                self._graphs.set_base(row, name, base)
                state.bases[name] = base

    def _leave(self, sequence: Seq) -> None:
        row = self._row_of.pop(sequence)
        del self._rows[row]
        self._graphs.leave(row)
