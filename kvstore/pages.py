"""Page accounting of one layer group: which pages are free, promised, open, sealed or cached, and how many hold them.

Pure: values in, values out; no memory is touched here. A page goes FREE -> OPEN (``take``) -> SEALED (``seal``). Sealed
pages may be shared: ``share`` and ``drop`` count who holds them. A page that nobody holds any more is CACHED where the
prefix index knows it, else FREE. A promise is a count, not a page: of the pages that are free or can be had by evicting
a cached one, ``num_promised`` are spoken for, so that a sequence that was admitted never waits for a page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum

from protos.errors import InternalError


class PageState(IntEnum):
    """Values as they stand in the control block."""

    FREE = 0
    OPEN = 1  # being written by its one holder
    SEALED = 2  # immutable, held by one or more
    CACHED = 3  # immutable, held by nobody, known to the prefix index


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
        self.num_cached = 0
        self._free = list(range(num_pages - 1, -1, -1))  # a stack: the page freed last is warm, and is taken first
        self._state = bytearray(num_pages)
        self._refs = [0] * num_pages
        self._generation = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds and the index does not know; some of them may be promised."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that can still be promised."""
        return self.num_free + self.num_cached - self.num_promised

    def state(self, page: int) -> PageState:
        return PageState(self._state[page])

    def refs(self, page: int) -> int:
        """How many hold the page."""
        return self._refs[page]

    def generation(self, page: int) -> int:
        return self._generation[page]

    # --- promises ---

    def promise(self, count: int) -> None:
        """Sets ``count`` available pages aside. The caller looked at ``num_available`` first."""
        if not 0 <= count <= self.num_available:
            raise self._bug("promise beyond the available pages", given=count, allowed=self.num_available)
        self.num_promised += count

    def unpromise(self, count: int) -> None:
        """Gives up a promise that was not used."""
        if not 0 <= count <= self.num_promised:
            raise self._bug("more promises given up than made", given=count, allowed=self.num_promised)
        self.num_promised -= count

    # --- pages in sequences ---

    def take(self, count: int) -> list[int]:
        """Turns ``count`` promised pages into open ones with one holder. The caller evicted enough first."""
        if not 0 <= count <= min(self.num_promised, self.num_free):
            raise self._bug(
                "more pages taken than promised or free", given=count, allowed=min(self.num_promised, self.num_free)
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._state[page] = PageState.OPEN
            self._refs[page] = 1
        self.num_promised -= count
        self.num_open += count
        return pages

    def seal(self, pages: Iterable[int]) -> None:
        """Makes open pages immutable."""
        pages = list(pages)
        self._demand(pages, (PageState.OPEN,))
        for page in pages:
            self._state[page] = PageState.SEALED
        self.num_open -= len(pages)
        self.num_sealed += len(pages)

    def share(self, pages: Iterable[int]) -> None:
        """One more holder of sealed or cached pages."""
        pages = list(pages)
        self._demand(pages, (PageState.SEALED, PageState.CACHED))
        cached = sum(self._state[page] == PageState.CACHED for page in pages)
        if cached > self.num_available:
            raise self._bug("cached pages shared that back promises", given=cached, allowed=self.num_available)
        for page in pages:
            if self._state[page] == PageState.CACHED:
                self._state[page] = PageState.SEALED
                self.num_cached -= 1
                self.num_sealed += 1
            self._refs[page] += 1

    def drop(self, pages: Sequence[int], is_known: Callable[[int], bool] = lambda page: False) -> list[int]:
        """One holder fewer of open or sealed pages; returns those that nobody holds now, in the order given.

        They are cached where ``is_known`` says that the prefix index knows them, else free again.
        """
        self._demand(pages, (PageState.OPEN, PageState.SEALED))
        let_go = []
        for page in reversed(pages):  # so that the next take returns them in the same order
            self._refs[page] -= 1
            if self._refs[page]:
                continue
            let_go.append(page)
            if self._state[page] == PageState.OPEN:
                self.num_open -= 1
            else:
                self.num_sealed -= 1
            if is_known(page):
                self._state[page] = PageState.CACHED
                self.num_cached += 1
            else:
                self._free_page(page)
        return let_go[::-1]

    def reopen(self, page: int) -> None:
        """Lets the one holder of a sealed page write it again; the prefix index must have forgotten it."""
        self._demand([page], (PageState.SEALED,))
        if self._refs[page] != 1:
            raise self._bug(f"page {page} is seen by others", given=self._refs[page], allowed="one holder")
        self._state[page] = PageState.OPEN
        self.num_sealed -= 1
        self.num_open += 1

    def uncache(self, pages: Iterable[int]) -> None:
        """The prefix index has let these cached pages go: they are free."""
        pages = list(pages)
        self._demand(pages, (PageState.CACHED,))
        for page in pages:
            self.num_cached -= 1
            self._free_page(page)

    def restore(self, pages: Sequence[tuple[PageState, int, int]]) -> None:
        """Makes an unused table what another was: (state, refs, generation) of every page. Nothing is promised yet."""
        if len(pages) != self.num_pages or self.num_free != self.num_pages:
            raise self._bug("another number of pages is restored", given=len(pages), allowed=self.num_pages)
        self._state = bytearray(state for state, _, _ in pages)
        self._refs = [refs for _, refs, _ in pages]
        self._generation = [generation for _, _, generation in pages]
        self._free = [page for page in range(self.num_pages - 1, -1, -1) if self._state[page] == PageState.FREE]
        _, self.num_open, self.num_sealed, self.num_cached = (self._state.count(state) for state in PageState)

    # --- checks ---

    def check(self) -> None:
        """Raises InternalError when the counters, the lists and the pages do not agree. O(num_pages)."""
        counts = [self._state.count(state) for state in PageState]
        if counts != [self.num_free, self.num_open, self.num_sealed, self.num_cached]:
            raise self._bug("counters differ from the pages", given=counts)
        if len(set(self._free)) != len(self._free) or any(self._state[page] for page in self._free):
            raise self._bug("the free list holds a page twice or one that is in use")
        if not 0 <= self.num_promised <= self.num_free + self.num_cached:
            raise self._bug("promises without pages", given=self.num_promised, allowed=self.num_free + self.num_cached)
        for page, (refs, state) in enumerate(zip(self._refs, self._state, strict=True)):
            if (refs > 0) != (state in (PageState.OPEN, PageState.SEALED)) or (state == PageState.OPEN and refs != 1):
                raise self._bug(f"page {page} is {PageState(state).name} with {refs} holders")

    def _free_page(self, page: int) -> None:
        self._state[page] = PageState.FREE
        self._generation[page] += 1
        self._free.append(page)

    def _demand(self, pages: Sequence[int], states: tuple[PageState, ...]) -> None:
        if len(set(pages)) != len(pages):
            raise self._bug("a page is named twice", given=pages)
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise self._bug("page out of range", given=page, allowed=f"0 to {self.num_pages - 1}")
            if self._state[page] not in states:
                found = PageState(self._state[page]).name
                raise self._bug(f"page {page} is {found}", given=found, allowed=" or ".join(s.name for s in states))

    def _bug(self, what: str, *, given: object = None, allowed: object = None) -> InternalError:
        return InternalError(f"page accounting of group {self.group!r}: {what}", given=given, allowed=allowed)
