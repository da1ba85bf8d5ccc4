"""Which sequence has which row of the captured decode steps, and what has changed about it since the step before.

A sequence that went on as its row foresaw (one token more) needs nothing but the pages that are new to it, and a token
where it is not the one drawn. One that did anything else meanwhile (a prompt chunk, a rollback, a drop) enters anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protos.errors import InternalError
from protos.page_hash import PAGE_TOKENS
from worker.decode_graphs import DecodeGraphs
from worker.decode_state import SLOTS, STOPS, RowStart
from worker.scheduler import Work
from worker.sequence import Sampling
from worker.sequence import Sequence as Seq

NO_LIMIT = (1 << 31) - 1  # the engine decides where a sequence ends
CHECKED_ROWS = PAGE_TOKENS  # of one sequence, at most: any ring holds them, and they are in one page


@dataclass
class _Row:
    """What the device has of a sequence, once the steps under way are done.

    ``token``: the newest; None while the step that draws it is not read.
    """

    token: int | None
    num_tokens: int
    pages: dict[str, list[int]]
    bases: dict[str, int]
    tail_slots: dict[str, int]
    stops: tuple[int, ...]


class DecodeRows:
    """Engine steps of decode rows: one token of each sequence. Used by the engine thread only.

    Args:
        graphs: captured, no row in use.
        eos_token_ids: the model's.
    """

    def __init__(self, graphs: DecodeGraphs, eos_token_ids: Sequence[int] = ()) -> None:
        self._graphs = graphs
        self._eos_token_ids = tuple(eos_token_ids)
        self._row_of: dict[Seq, int] = {}
        self._rows: dict[int, _Row] = {}
        self._launched: dict[int, list[int]] = {}  # step -> the row of each work; of steps that are not read
        self.num_entered = 0
        """Times that a sequence took a row; a steady run adds none."""

    @property
    def graphs(self) -> DecodeGraphs:
        return self._graphs

    def launch(self, work: Sequence[Work]) -> int:
        """Launches a step, which computes the token at each work's ``start``, and returns its number.

        That token is the sequence's, or the one that the step before draws where the sequence does not have it yet.

        Raises:
            InternalError: more sequences than the graphs have rows; or a token that nobody knows.
        """
        graphs, row_of = self._graphs, self._row_of
        if len(row_of) != len(work) or any(w.sequence not in row_of for w in work):
            for gone in row_of.keys() - {w.sequence for w in work}:
                self._leave(gone)
        bucket = graphs.bucket_of(len(work))
        for w in work:
            row = row_of.get(w.sequence)
            if row is not None and row >= bucket and w.start < len(w.sequence.token_ids):
                self._leave(w.sequence)  # a smaller graph serves them, if it moves down
                row = None
            if row is None or not self._follows(row, w):
                self._enter(w, row)
            else:
                self._update(row, w.sequence)
        number = graphs.launch(1 + max(self._rows))
        for state in self._rows.values():
            state.num_tokens, state.token = state.num_tokens + 1, None
        self._launched[number] = [row_of[w.sequence] for w in work]
        self._launched.pop(number - SLOTS, None)  # one that nobody asked about
        return number

    def tokens(self, number: int, work: Sequence[Work]) -> list[int]:
        """What each work of a step drew. Waits for the step, and not for those behind it.

        Raises:
            InternalError: NOT_FINITE.
        """
        drawn = self._graphs.tokens(number)
        tokens = [drawn[row] for row in self._launched.pop(number)]
        for w, token in zip(work, tokens, strict=True):
            at = self._row_of.get(w.sequence)
            if at is not None and self._rows[at].num_tokens == w.end + 1:  # no step behind it has begun
                self._rows[at].token = token
        return tokens

    def logits(self, w: Work) -> torch.Tensor:
        """[vocab_size] f32 in host memory, of the newest step. Waits for it."""
        return self._graphs.layers.logits[self._row_of[w.sequence]].float().cpu()

    def spreads(self, num_sequences: int) -> bool:
        """Whether so few sequences would have a smaller graph if they moved together."""
        return self._graphs.bucket_of(num_sequences) < self._graphs.bucket_of(1 + max(self._rows, default=0))

    def moved_row(self, sequence: Seq) -> int | None:
        """A row whose bits depend on its place among the rows, or on the others; None: there is none.

        Tokens of one sequence stand for sequences: all of a step are appended before any is attended to, and each sees
        those before it. They run in order, in other orders, every other one alone, and one alone; but for the first
        time over rows that hold the same. No row may be in use.

        Args:
            sequence: whose first tokens are computed, and may be overwritten.
        """
        graphs = self._graphs
        rows = min(graphs.state.max_rows, sequence.num_computed, CHECKED_ROWS)
        generator = torch.Generator().manual_seed(20260102)
        orders: list[list[int]] = [
            list(range(rows)),
            *(torch.randperm(rows, generator=generator).tolist() for _ in range(2)),
        ]
        orders += [list(range(1, rows, 2))[::-1], [rows // 2]]
        first = torch.empty(0)
        for order in orders:
            for row, position in enumerate(order):
                start = RowStart(
                    token=(7 * position + 3) % graphs.layers.logits.shape[1],
                    num_tokens=position + 1,
                    limit=position + 1,
                    sampling=Sampling(),
                    pages=sequence.pages,
                    bases={},  # so few tokens are in the ring yet
                    tail_slots=sequence.tail_slots,
                )
                graphs.enter(row, start)
            graphs.tokens(graphs.launch(len(order)))
            logits = graphs.layers.logits[: len(order)].clone()
            if not len(first):
                first = logits
            for row, position in enumerate(order):
                graphs.leave(row)
                if not torch.equal(logits[row], first[position]):
                    return int(position)
        return None

    def _follows(self, at: int, w: Work) -> bool:
        """Whether the row goes on; patches its token where that alone is another."""
        row, sequence = self._rows[at], w.sequence
        if row.num_tokens != w.start + 1 or row.tail_slots != sequence.tail_slots:
            return False
        if w.start >= len(sequence.token_ids):
            return row.token is None
        token = sequence.token_ids[w.start]
        if row.token != token or token in row.stops:
            if sequence.request.sampling.repetition_penalty != 1.0:
                return False  # the token that was drawn counts as seen
            self._graphs.set_token(at, token, w.start + 1)
        return True

    def _enter(self, w: Work, row: int | None) -> None:
        sequence = w.sequence
        if w.start >= len(sequence.token_ids):
            raise InternalError(
                "a decode row's token is not known", given=w.start, allowed=f"below {len(sequence.token_ids)}"
            )
        if row is None:
            row = next(free for free in range(len(self._rows) + 1) if free not in self._rows)
        seen, stop = sequence.token_ids[: w.start + 1], sequence.request.stop
        stops = (*(() if stop.ignore_eos else self._eos_token_ids), *stop.stop_token_ids)[:STOPS]
        self._row_of[sequence] = row
        self._rows[row] = _Row(
            token=seen[-1],
            num_tokens=len(seen),
            pages={name: list(page_ids) for name, page_ids in sequence.pages.items()},
            bases=dict(sequence.bases),
            tail_slots=dict(sequence.tail_slots),
            stops=stops,
        )
        self.num_entered += 1
        start = RowStart(
            token=seen[-1],
            num_tokens=len(seen),
            limit=NO_LIMIT,
            sampling=sequence.request.sampling,
            pages=sequence.pages,
            bases=sequence.bases,
            tail_slots=sequence.tail_slots,
            seen=seen,
            stops=stops,
        )
        self._graphs.enter(row, start)

    def _update(self, at: int, sequence: Seq) -> None:
        """Pages that are new or freed, and bases that have moved."""
        row = self._rows[at]
        for name, page_ids in sequence.pages.items():
            known = row.pages[name]
            if page_ids == known:
                continue
            same = next((i for i, (a, b) in enumerate(zip(page_ids, known, strict=False)) if a != b), len(known))
            self._graphs.set_pages(at, name, same, page_ids[same:])
            row.pages[name] = list(page_ids)
        for name, base in sequence.bases.items():
            if base != row.bases[name]:
                self._graphs.set_base(at, name, base)
                row.bases[name] = base

    def _leave(self, sequence: Seq) -> None:
        row = self._row_of.pop(sequence)
        del self._rows[row]
        self._graphs.leave(row)
