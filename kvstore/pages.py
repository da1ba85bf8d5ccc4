"""Page accounting of one layer group: which pages are free, promised, open or sealed, and who holds them.

Pure: values in, values out; no memory is touched here. A page goes FREE -> OPEN (``take``) -> SEALED (``seal``) -> FREE
(``free``). A promise is a count, not a page: of the free pages, ``num_promised`` are spoken for, so that a sequence
that was admitted never waits for a page.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from protos.errors import InternalError

NOBODY = -1


class PageState(IntEnum):
    """Values as they stand in the control block."""

    FREE = 0
    OPEN = 1
    SEALED = 2


class PageTable:
    """The pages [0, num_pages) of one group. Every method either succeeds or raises InternalError and changes nothing.

    ``generation`` of a page grows by one each time it is freed: a reader that saw another number read another page.
    """

    def __init__(self, group: str, num_pages: int) -> None:
        self.group = group
        self.num_pages = num_pages
        self.num_promised = 0
        self.num_open = 0
        self.num_sealed = 0
        self.num_sealed_ever = 0
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is warm, and is taken first
        self._state = bytearray(num_pages)
        self._owner = [NOBODY] * num_pages
        self._generation = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds; some of them may be promised."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that can still be promised."""
        return self.num_free - self.num_promised

    def state(self, page: int) -> PageState:
        return PageState(self._state[page])

    def owner(self, page: int) -> int:
        """Slot of the sequence that holds the page, or NOBODY."""
        return self._owner[page]

    def generation(self, page: int) -> int:
        return self._generation[page]

    def promise(self, count: int) -> None:
        """Sets ``count`` free pages aside. The caller looked at ``num_available`` first."""
        if not 0 <= count <= self.num_available:
            raise self._bug("promise beyond the free pages", given=count, allowed=self.num_available)
        self.num_promised += count

    def unpromise(self, count: int) -> None:
        """Gives up a promise that was not used."""
        if not 0 <= count <= self.num_promised:
            raise self._bug("more promises given up than made", given=count, allowed=self.num_promised)
        self.num_promised -= count

    def take(self, owner: int, count: int) -> list[int]:
        """Turns ``count`` promised pages into open ones held by ``owner``."""
        if not 0 <= count <= self.num_promised:
            raise self._bug("more pages taken than promised", given=count, allowed=self.num_promised)
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._state[page] = PageState.OPEN
            self._owner[page] = owner
        self.num_promised -= count
        self.num_open += count
        return pages

    def seal(self, owner: int, pages: Iterable[int]) -> None:
        """Makes open pages immutable."""
        pages = list(pages)
        self._demand(owner, pages, (PageState.OPEN,))
        for page in pages:
            self._state[page] = PageState.SEALED
        self.num_open -= len(pages)
        self.num_sealed += len(pages)
        self.num_sealed_ever += len(pages)

    def free(self, owner: int, pages: Iterable[int], *, keep_promise: bool = False) -> None:
        """Takes pages back. With ``keep_promise`` as many stay promised, for a sequence that may grow again."""
        pages = list(pages)
        self._demand(owner, pages, (PageState.OPEN, PageState.SEALED))
        for page in reversed(pages):  # so that the next take returns them in the same order
            if self._state[page] == PageState.OPEN:
                self.num_open -= 1
            else:
                self.num_sealed -= 1
            self._state[page] = PageState.FREE
            self._owner[page] = NOBODY
            self._generation[page] += 1
            self._free.append(page)
        if keep_promise:
            self.num_promised += len(pages)

    def replace_sealed(self, owner: int, page: int) -> int:
        """Swaps a sealed page of ``owner`` for an open one, without touching promises; returns the open page.

        It is another page whenever one is free. When every page is handed out it is the same page, reopened: its owner
        is the only one who can see it, so nothing that is read elsewhere changes, and the swap cannot fail for want of
        room.
        """
        self._demand(owner, [page], (PageState.SEALED,))
        if not self._free:
            self.free(owner, [page], keep_promise=True)
            return self.take(owner, 1)[0]
        self.num_promised += 1  # backed by the sealed page, which is free in a moment
        new = self.take(owner, 1)[0]
        self.free(owner, [page])
        return new

    def check(self) -> None:
        """Raises InternalError when the counters, the free list and the pages do not agree. O(num_pages)."""
        counts = [self._state.count(state) for state in PageState]
        if counts != [self.num_free, self.num_open, self.num_sealed]:
            raise self._bug("counters differ from the pages", given=counts)
        if len(set(self._free)) != len(self._free) or any(self._state[page] for page in self._free):
            raise self._bug("the free list holds a page twice or one that is in use")
        if not 0 <= self.num_promised <= self.num_free:
            raise self._bug("promises without pages", given=self.num_promised, allowed=self.num_free)
        if any(
            (owner == NOBODY) != (state == PageState.FREE)
            for owner, state in zip(self._owner, self._state, strict=True)
        ):
            raise self._bug("a free page has an owner, or a held one has none")

    def _demand(self, owner: int, pages: list[int], states: tuple[PageState, ...]) -> None:
        if len(set(pages)) != len(pages):
            raise self._bug("a page is named twice", given=pages)
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise self._bug("page out of range", given=page, allowed=f"0 to {self.num_pages - 1}")
            if self._state[page] not in states:
                found = PageState(self._state[page]).name
                raise self._bug(f"page {page} is {found}", given=found, allowed=" or ".join(s.name for s in states))
            if self._owner[page] != owner:
                raise self._bug(f"page {page} is held by another sequence", given=owner, allowed=self._owner[page])

    def _bug(self, what: str, *, given: object = None, allowed: object = None) -> InternalError:
        return InternalError(f"page accounting of group {self.group!r}: {what}", given=given, allowed=allowed)
