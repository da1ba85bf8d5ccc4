"""Sequences that ran when a device failed. One of them may have broken it, and would break it again; so after the
failure the others get a step first, and then each of these runs alone until it gets further. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from worker.sequence import Sequence


class Trials:
    """Args:
    suspects: each with the failures of devices that it took part in, at the length that it has. Those with the fewest
        are tried first: whoever broke one alone does not keep the others from getting further.
    """

    def __init__(self, suspects: Iterable[tuple[Sequence, int]] = ()) -> None:
        in_order = sorted(suspects, key=lambda pair: pair[1])
        self._left = [(sequence, sequence.num_computed) for sequence, _ in in_order]
        self._begun = False

    def of(self, running: list[Sequence]) -> list[Sequence]:
        """Those that may be in the next step: all that run, but for what is on trial."""
        self._left = [(each, length) for each, length in self._left if each in running and each.num_computed == length]
        if not self._left:
            return running
        if not self._begun:
            self._begun = True
            suspects = {sequence for sequence, _ in self._left}
            if others := [sequence for sequence in running if sequence not in suspects]:
                return others
        return [self._left[0][0]]
