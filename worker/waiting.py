"""The queue of sequences that wait for KV memory, oldest first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Self

from worker.sequence import Sequence


class Waiting(deque[Sequence]):
    """A deque that knows how many prompt tokens wait in it: the load is reported twice a step, and a queue may be long.

    Nothing of a sequence in it is computed. Of deque's methods that change it, those below are for use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens = 0

    def __iadd__(self, added: Iterable[Sequence]) -> Self:
        for sequence in added:
            self.append(sequence)
        return self

    def append(self, added: Sequence) -> None:
        super().append(added)
        self.num_tokens += added.num_prompt

    def appendleft(self, added: Sequence) -> None:
        super().appendleft(added)
        self.num_tokens += added.num_prompt

    def popleft(self) -> Sequence:
        taken = super().popleft()
        self.num_tokens -= taken.num_prompt
        return taken

    def remove(self, taken: Sequence) -> None:
        super().remove(taken)
        self.num_tokens -= taken.num_prompt

    def clear(self) -> None:
        super().clear()
        self.num_tokens = 0
