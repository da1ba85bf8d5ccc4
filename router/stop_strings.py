"""Ends a text before a stop string, also when one spans several chunks.

The match that counts is the one that is complete first; of those that end at the same character, the longest. So what
is kept does not depend on how the text was cut into chunks, and a stream ends as soon as a stop string is there.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Holds back only the longest end of the text that may be the start of a stop string.

    One Knuth-Morris-Pratt automaton per stop string: constant amortised time per character and stop string.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """stop_strings: none of them empty (validated before)."""
        self.matched: str | None = None
        self._stops = [(stop, _failure(stop)) for stop in stop_strings]
        self._states = [0] * len(self._stops)  # characters of each stop string that the text now ends with
        self._held = ""

    def push(self, text: str) -> str:
        """Takes new text; returns what may be shown now. After a match nothing more is shown."""
        if not self._stops:
            return text
        if self.matched is not None:
            return ""
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            character = buffer[end - 1]
            complete = 0
            for which, (stop, failure) in enumerate(self._stops):
                state = self._states[which]
                while state and stop[state] != character:
                    state = failure[state]
                state += stop[state] == character
                if state == len(stop):
                    complete = max(complete, state)
                self._states[which] = state
            if complete:
                self.matched = buffer[end - complete : end]
                self._held = ""
                return buffer[: end - complete]
        keep = len(buffer) - max(self._states)
        self._held = buffer[keep:]
        return buffer[:keep]

    def flush(self) -> str:
        """At the end of the text: what was held back was no stop string after all."""
        held, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return held


def _failure(stop: str) -> list[int]:
    """failure[k]: length of the longest proper prefix of ``stop`` that ends ``stop[:k]``."""
    table = [0] * (len(stop) + 1)
    state = 0
    for k in range(1, len(stop)):
        while state and stop[state] != stop[k]:
            state = table[state]
        state += stop[state] == stop[k]
        table[k + 1] = state
    return table
