"""Sequences that have ended and whose callers do not have all of it yet. Their slots stay in the store, with their
token logs, so that the next worker can answer from them if this one dies; they are the first to go for want of room.
"""

from __future__ import annotations

from worker.sequence import Sequence
from worker.sequence_kv import SequenceKv


class Ended:
    """Used by the engine thread only. What is in here computes nothing any more."""

    def __init__(self, held: SequenceKv) -> None:
        self._held = held
        self._by_owner: dict[str, Sequence] = {}  # the one that ended first is first

    def __len__(self) -> int:
        return len(self._by_owner)

    def add(self, sequence: Sequence) -> None:
        self._held.keep_turn(sequence)
        self._held.count_anew(sequence)
        self._by_owner[sequence.request.owner] = sequence

    def let_go(self, owner: str) -> bool:
        """Nobody waits for it any more; whether it was here."""
        sequence = self._by_owner.pop(owner, None)
        if sequence is not None:
            self._held.release(sequence, keep=False)
        return sequence is not None

    def make_room(self) -> bool:
        """Gives up the one that ended first; False: there is none."""
        return bool(self._by_owner) and self.let_go(next(iter(self._by_owner)))
