"""Speculative decoding by DeepSeek-V4's MTP block (Leviathan et al. 2023; DeepSeek-V3 report, section 2.2).

The block reads what the model leaves behind its last layer for a token, and the token that follows, and guesses the one
behind that. Its guesses are checked by the next step, which computes them as decode rows behind the newest token: a
guess that the model says itself is accepted, and the first that it does not say ends the row. So the tokens are those
of plain decoding whatever is guessed; what is rejected was never logged or committed, and is written over.

One block guesses several tokens in a row, out of its own streams in place of the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from protos.errors import InternalError
from worker.batch import Batch, Place, rows_alone
from worker.kv_view import KvView, place_of
from worker.model_runner import Step
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_geometry import RAW, RAW_ROW
from worker.models.deepseek_v4_kv_rows import KvRows
from worker.sampler import Drawn
from worker.scheduler import Work
from worker.sequence import Sequence as Seq

_BLOCK = 0  # of the model's MTP blocks


class _Lead(NamedTuple):
    """Where a sequence's next guess comes from: streams [hc_mult, hidden] of its newest row, and the first guess."""

    sequence: Seq
    streams: torch.Tensor
    guess: int


def accepted(drafts: Sequence[int], drawn: Sequence[Drawn]) -> list[Drawn]:
    """What a step says that checked ``drafts``: the tokens drawn, up to the first that was not guessed, it included.

    Args:
        drawn: behind the newest token, and behind each of the drafts.
    """
    said = [drawn[0]]
    for guess, follows in zip(drafts, drawn[1:], strict=True):
        if said[-1].token_id != guess:
            break
        said.append(follows)
    return said


class Drafter:
    """Guesses up to ``num_drafts`` tokens of each greedy sequence. Used by the engine thread only.

    Args:
        kv: whose raw rows include the MTP blocks'.
    """

    def __init__(self, network: DeepseekV4, kv: KvView, num_drafts: int) -> None:
        self._network = network
        self._kv = kv
        self._num_drafts = num_drafts
        self._leads: list[_Lead] = []

    def follow(self, work: Sequence[Work], step: Step, said: Sequence[Sequence[Drawn]]) -> None:
        """Runs the block over a step's rows, before they are moved, so that it has seen what the model has.

        Args:
            said: what follows each work's newest token, as ``accepted`` has it; nothing where it is not reached.
        """
        batch = step.batch
        assert step.streams is not None and batch is not None
        next_token_ids = torch.zeros_like(batch.token_ids)
        last_rows: list[int] = []
        leading: list[tuple[Seq, int]] = []
        for w, new, row in zip(work, said, batch.first_row_of_work, strict=True):
            start, known = w.start, w.sequence.token_ids
            follows = [*known[start + 1 : w.certain_end + 1], *(drawn.token_id for drawn in new)][: w.count]
            next_token_ids[row : row + len(follows)] = torch.tensor(follows)
            if new and _wants_drafts(w.sequence):
                last_rows.append(row + len(follows) - 1)
                leading.append((w.sequence, len(leading)))
        rows = KvRows(self._kv, step.workspace, batch)
        streams = self._network.draft(_BLOCK, step.streams, next_token_ids, batch, rows)
        self._leads.clear()
        if leading:
            at = torch.tensor(last_rows)
            of_last = replace(batch, logit_rows=at, logit_tiles=((0, len(at)),), num_logits=len(at))
            guesses = self._guesses(streams, of_last)
            self._leads += [_Lead(sequence, streams[at[i]], guesses[i]) for sequence, i in leading]

    def propose(self) -> None:
        """Sets ``drafts`` of the sequences that the last ``follow`` led, once their rows are where they stay."""
        leads = [lead for lead in self._leads if not lead.sequence.finished and self._room(lead.sequence) > 0]
        self._leads.clear()
        for lead in leads:
            lead.sequence.drafts = [lead.guess]
        rows = _GuessedRows(self._kv, [lead.sequence for lead in leads])
        streams = {at: lead.streams for at, lead in enumerate(leads)}
        for depth in range(1, self._num_drafts):
            rows.active = [at for at in streams if self._room(leads[at].sequence) > depth]
            if not rows.active:
                break
            sequences = [leads[at].sequence for at in rows.active]
            newest = [sequence.drafts[-1] for sequence in sequences]
            batch = rows_alone(newest, [sequence.num_computed + depth - 1 for sequence in sequences])
            batch = batch.to(self._network.device)
            before = torch.stack([streams[at] for at in rows.active])
            out = self._network.draft(_BLOCK, before, batch.token_ids, batch, rows)
            for at, sequence, after, guess in zip(rows.active, sequences, out, self._guesses(out, batch), strict=True):
                sequence.drafts.append(guess)
                streams[at] = after

    def _guesses(self, streams: torch.Tensor, batch: Batch) -> list[int]:
        ids: list[int] = self._network.draft_logits(_BLOCK, streams, batch).argmax(-1).tolist()
        return ids

    def _room(self, sequence: Seq) -> int:
        """How many guesses can be of use: a step says one token more than it accepts."""
        stop = sequence.request.stop
        left = min(stop.max_tokens - sequence.num_emitted, sequence.max_total_tokens - len(sequence.token_ids))
        return min(self._num_drafts, left - 1)


class _GuessedRows:
    """The block's raw rows of sequences, and behind them those of guesses, which nobody keeps: the ``Rows`` of a batch
    whose row i is of sequence ``active[i]``.
    """

    def __init__(self, kv: KvView, sequences: Sequence[Seq]) -> None:
        self._kv = kv
        self._lengths = [sequence.num_computed for sequence in sequences]
        self._places: list[Place] = [
            place_of(s.pages.get(RAW, ()), s.bases.get(RAW, 0), s.tail_slots.get(RAW, -1)) for s in sequences
        ]
        self._guessed: list[list[torch.Tensor]] = [[] for _ in sequences]
        self.active: list[int] = []

    def held(self, span: int, layer: int, kind: str, first: int, end: int) -> torch.Tensor:
        at = self.active[span]
        length = self._lengths[at]
        begin = min(first, length)
        rows = self._kv.span(self._kv.view(layer, kind), self._places[at], begin, length - begin, "attention")
        return torch.cat((rows, *self._guessed[at]))[first - begin : end - begin]

    def keep(self, layer: int, kind: str, rows: torch.Tensor) -> None:
        assert kind == RAW_ROW
        for at, row in zip(self.active, torch.split(rows, 1), strict=True):
            self._guessed[at].append(row)

    def decode(self) -> None:
        """Each guess is read by itself."""

    def chosen(self, span: int, layer: int, kind: str, numbers: torch.Tensor) -> torch.Tensor:
        raise InternalError("an MTP block reads raw rows alone", given=kind, allowed=RAW_ROW)

    def keep_blocks(self, span: int, layer: int, kind: str, first: int, rows: torch.Tensor) -> None:
        raise InternalError("an MTP block has raw rows alone", given=kind, allowed=RAW_ROW)


def _wants_drafts(sequence: Seq) -> bool:
    sampling = sequence.request.sampling
    return sampling.greedy and sampling.repetition_penalty == 1.0
