"""One sequence of the table, in all its layer groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.group_pages import GroupPages
from kvstore.pages import PageState

Tokens = Callable[[int, int], Sequence[int]]
"""tokens(first, last): the logged ids of [first, last) of a sequence."""


@dataclass(frozen=True)
class SealedPage:
    """Page ``index`` of a sequence became immutable. ``relinked``: it was so before, and nothing was written.
    ``replaced``: an inexact page of the same hash, which this one took the place of in the index.
    """

    group: str
    index: int
    page: int
    hash: bytes
    parent: bytes
    relinked: bool
    replaced: int | None = None


@dataclass(frozen=True)
class KnownPage:
    """A page as a store that is gone had it. ``exact`` None: the prefix index did not know it."""

    state: PageState
    refs: int
    generation: int
    hash: bytes
    parent: bytes
    exact: bool | None


@dataclass
class SequencePages:
    """One sequence. ``hashes``: the chain of its first whole pages, as far as some group was sealed.

    ``inexact_from``: first token that was computed after an inexact resume; what stands behind it carries the mark.
    """

    slot: int
    request_id: str
    salt: str
    max_tokens: int
    groups: dict[str, GroupPages]
    hashes: list[bytes] = field(default_factory=list)
    inexact_from: int | None = None

    @property
    def bases(self) -> dict[str, int]:
        return {name: state.base for name, state in self.groups.items()}

    @property
    def pages(self) -> dict[str, list[int]]:
        return {name: state.pages for name, state in self.groups.items()}

    def mark_inexact(self, num_tokens: int) -> None:
        """After a rollback to ``num_tokens``: what comes next is inexact where its window has dequantised rows, or was
        so before.
        """
        if any(state.tail_is_lossy(num_tokens) for state in self.groups.values()):
            self.inexact_since(num_tokens)
        elif self.inexact_from is not None and self.inexact_from >= num_tokens:
            self.inexact_from = None

    def inexact_since(self, token: int) -> None:
        """Tokens from this one on carry the mark, too."""
        self.inexact_from = token if self.inexact_from is None else min(self.inexact_from, token)
