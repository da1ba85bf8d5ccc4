"""Which pages can be used again, by (group, page hash), and which of them may be evicted next (DESIGN.md 3.4).

Pure: values in, values out. The index counts no references: ``PageTable`` does. Here a page is *pinned* (somebody holds
it) or *idle* (kept only because a prompt may want it). What a page's hash stands for, salt included, is page_hash's.

Order of eviction: the page idle longest goes first, and never before an idle page that follows it in its chain, for a
page is found only through those in front of it. A page whose follower is pinned may go: whoever holds the follower then
holds a copy of this page of his own, which the index does not know. The follower cannot be found until the page is
added again: a lookup may undercount, never overcount. In *windowed* groups, whose sequences give up the pages behind
the model's window, a page is found without those in front of it, so there only age counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.events import EventLog
from protos.errors import InternalError
from protos.page_hash import HASH_BYTES


@dataclass(frozen=True, slots=True)
class Leading:
    """The pages of a prompt's chain that a group holds, from its first on without a gap.

    ``first_inexact``: index of the first one that is marked; None where all are exact.
    """

    pages: list[int]
    first_inexact: int | None

    @property
    def exact(self) -> bool:
        return self.first_inexact is None


@dataclass(frozen=True, slots=True)
class Added:
    """``indexed``: the page is now what its hash stands for; else the group holds another page of that hash.

    ``replaced``: an inexact page that an exact one took the place of. ``free``: the same where it was idle; the caller
    gives it back to the arena.
    """

    indexed: bool
    free: int | None = None
    replaced: int | None = None


@dataclass(frozen=True, slots=True)
class Evicted:
    page: int
    hash: bytes


class PrefixIndex:
    """The reusable pages of one device.

    Args:
        groups: layer groups that have pages.
        windowed: those of them whose sequences hold only the pages of a window.
        events: told of every hash that appears or goes.
    """

    def __init__(
        self, groups: Sequence[str], *, windowed: Collection[str] = (), events: EventLog | None = None
    ) -> None:
        self._groups = {name: _Group(name, name in windowed, events) for name in groups}
        self._events = events

    # --- reading; changes nothing, the order of eviction included ---

    def lookup(self, hashes: Sequence[bytes], *, exact_only: bool = False) -> dict[str, Leading]:
        """For each group the leading pages of the chain ``hashes`` that it holds, with ``exact_only`` up to the first
        that is marked inexact.
        """
        return {name: group.leading(hashes, exact_only) for name, group in self._groups.items()}

    def pages(self, group: str, hashes: Sequence[bytes]) -> Leading | None:
        """The pages of exactly these hashes, wherever in their chain; None when one is not there."""
        found = self._groups[group].leading(hashes, False)
        return found if len(found.pages) == len(hashes) else None

    def longest(
        self,
        hashes: Sequence[bytes],
        first_page: Mapping[str, Callable[[int], int]] | None = None,
        *,
        exact_only: bool = False,
    ) -> int:
        """The greatest k such that every group holds what a sequence of the k pages ``hashes[:k]`` needs.

        A group needs pages [0, k); a group of ``first_page`` needs pages [first_page[group](k), k). The caller leaves
        a token to compute by giving the hashes of at most (prompt length - 1) // 128 pages. With ``exact_only`` a page
        that is marked inexact counts as missing.
        """
        first_page = first_page or {}
        best = len(hashes)
        for name, group in self._groups.items():
            if name not in first_page:
                best = min(best, len(group.leading(hashes[:best], exact_only).pages))
        runs = [(first, self._groups[name].run_starts(hashes[:best], exact_only)) for name, first in first_page.items()]
        while best > 0 and any(starts[best] > first(best) for first, starts in runs):
            best -= 1
        return best

    def page(self, group: str, page_hash: bytes) -> int | None:
        """The page of that hash, if there is one."""
        return self._groups[group].page_of.get(page_hash)

    def hash_of(self, group: str, page: int) -> bytes | None:
        """The hash that the page stands for; None when the index does not know the page."""
        cached = self._groups[group].cached.get(page)
        return cached.hash if cached else None

    def is_exact(self, group: str, page: int) -> bool | None:
        """Whether the page is not marked inexact; None when the index does not know the page."""
        cached = self._groups[group].cached.get(page)
        return cached.exact if cached else None

    def is_pinned(self, group: str, page: int) -> bool:
        cached = self._groups[group].cached.get(page)
        return cached is not None and cached.pinned

    def continues(self, group: str, page_hash: bytes) -> bool:
        """Whether a page that follows this one is there; a prompt that matches up to here and goes on otherwise splits
        from it (see ``JunctionNotes``).
        """
        return page_hash in self._groups[group].children

    def num_cached(self, group: str) -> int:
        return len(self._groups[group].cached)

    def num_idle(self, group: str) -> int:
        """Pages that ``evict`` can give."""
        return self._groups[group].num_idle

    def contents(self) -> dict[str, list[bytes]]:
        """All hashes of each group, for a snapshot."""
        return {name: list(group.page_of) for name, group in self._groups.items()}

    # --- changing ---

    def add(self, group: str, page_hash: bytes, page: int, *, parent: bytes, exact: bool, pinned: bool = True) -> Added:
        """Makes a sealed page findable. Where the hash has a page already, that one stays, unless it is marked inexact
        and the new one is exact. Adding the very same page again (relinked) changes nothing but its pin.

        Args:
            parent: hash of the page before it in its chain, or ROOT.
            exact: False marks a page made after an inexact resume.

        Raises:
            InternalError: the page is known under another hash, or the hash is not 16 bytes.
        """
        return self._groups[group].add(page_hash, page, parent, exact, pinned)

    def pin(self, group: str, pages: Iterable[int]) -> None:
        """Somebody holds these pages now: they cannot be evicted. Pinning a pinned page changes nothing.

        Raises:
            InternalError: the index does not know a page.
        """
        self._groups[group].pin(pages)

    def unpin(self, group: str, pages: Sequence[int]) -> list[int]:
        """Nobody holds these pages, given in token order, any longer. Those that the index knows stay as idle ones.

        Returns:
            The pages that the index does not know; the caller gives them back to the arena.

        Raises:
            InternalError: a page is idle already.
        """
        return self._groups[group].unpin(pages)

    def touch(self, group: str, pages: Sequence[int]) -> None:
        """Makes idle pages, in token order, the youngest without pinning them. ``pin`` and ``unpin`` imply it."""
        self._groups[group].touch(pages)

    def evict(self, group: str, count: int) -> list[Evicted]:
        """Takes ``count`` idle pages out, or as many as there are, in the order that the module's text gives."""
        return self._groups[group].evict(count)

    def remove(self, group: str, page: int) -> bool:
        """Makes a page unfindable (its checksum failed, its holder will write to it); its pin ends with it.

        Returns:
            True when the page was idle, so that the caller gives it back to the arena.

        Raises:
            InternalError: the index does not know the page.
        """
        return self._groups[group].remove(page)

    def clear(self) -> dict[str, list[int]]:
        """Makes every page unfindable; returns the idle ones per group, for the arena. Pinned ones stay with those who
        hold them.
        """
        idle = {name: group.clear() for name, group in self._groups.items()}
        if self._events is not None:
            self._events.cleared()
        return idle

    def check(self) -> None:
        """Raises InternalError when the index contradicts itself. O(pages)."""
        for group in self._groups.values():
            group.check()


@dataclass(slots=True, eq=False)
class _Cached:
    page: int
    hash: bytes
    parent: bytes
    exact: bool
    pinned: bool
    tick: int  # of its last use; unique among the pages of a group
    queued: bool = False  # whether the queue holds an entry of it


class _Group:
    """One group's pages.

    ``queue`` is a heap of (tick, page) that holds every page that may go next, and others: an entry is judged when it
    is popped. So touching, pinning and unpinning cost no search, and a page has at most one entry.
    """

    def __init__(self, name: str, windowed: bool, events: EventLog | None) -> None:
        self.name = name
        self.windowed = windowed
        self.events = events
        self.ticks = 0
        self._empty()

    def _empty(self) -> None:
        self.page_of: dict[bytes, int] = {}
        self.cached: dict[int, _Cached] = {}
        self.inexact: set[bytes] = set()
        self.children: dict[bytes, int] = {}  # hash -> cached pages that follow it
        self.idle_children: dict[bytes, int] = {}  # hash -> those of them that are idle
        self.queue: list[tuple[int, _Cached]] = []
        self.num_idle = 0

    def leading(self, hashes: Sequence[bytes], exact_only: bool) -> Leading:
        # Stops at the first None, without a step of the interpreter per page.
        pages: list[int] = list(iter(map(self.page_of.get, hashes).__next__, None))
        if not self.inexact or self.inexact.isdisjoint(hashes[: len(pages)]):
            return Leading(pages, None)
        first = next(index for index, page_hash in enumerate(hashes) if page_hash in self.inexact)
        return Leading(pages[:first], None) if exact_only else Leading(pages, first)

    def run_starts(self, hashes: Sequence[bytes], exact_only: bool) -> list[int]:
        """At index k the least s such that pages [s, k) are all there."""
        starts = [0]
        for index, page_hash in enumerate(hashes):
            missing = page_hash not in self.page_of or (exact_only and page_hash in self.inexact)
            starts.append(index + 1 if missing else starts[-1])
        return starts

    def add(self, page_hash: bytes, page: int, parent: bytes, exact: bool, pinned: bool) -> Added:
        if len(page_hash) != HASH_BYTES or len(parent) != HASH_BYTES:
            raise self._bug("a hash has another length", given=(len(page_hash), len(parent)), allowed=HASH_BYTES)
        known = self.cached.get(page)
        if known is not None:
            if known.hash != page_hash:
                raise self._bug(f"page {page} is cached", given=page_hash.hex(), allowed=known.hash.hex())
            if pinned:
                self.pin([page])
            return Added(True)
        free = replaced = None
        holder = self.page_of.get(page_hash)
        if holder is not None:
            old = self.cached[holder]
            if old.exact or not exact:
                return Added(False)
            self._forget(old)
            replaced = holder
            free = None if old.pinned else holder
        elif self.events is not None:
            self.events.added(self.name, page_hash)
        cached = _Cached(page, page_hash, parent, exact, True, self._tick())
        self.page_of[page_hash] = page
        self.cached[page] = cached
        if not exact:
            self.inexact.add(page_hash)
        self.children[parent] = self.children.get(parent, 0) + 1
        if not pinned:
            self._make_idle(cached)
        return Added(True, free, replaced)

    def pin(self, pages: Iterable[int]) -> None:
        for page in pages:
            cached = self._known(page)
            if not cached.pinned:
                cached.pinned = True
                self._end_idle(cached)

    def unpin(self, pages: Sequence[int]) -> list[int]:
        unknown = []
        for page in pages if self.windowed else reversed(pages):
            cached = self.cached.get(page)
            if cached is None:
                unknown.append(page)
            elif not cached.pinned:
                raise self._bug(f"page {page} is idle already", given=page)
            else:
                cached.tick = self._tick()
                self._make_idle(cached)
        return unknown if self.windowed else unknown[::-1]

    def touch(self, pages: Sequence[int]) -> None:
        for page in pages if self.windowed else reversed(pages):
            self._known(page).tick = self._tick()

    def evict(self, count: int) -> list[Evicted]:
        victims: list[Evicted] = []
        while len(victims) < count and self.queue:
            tick, cached = heapq.heappop(self.queue)
            cached.queued = False
            if not self._may_go(cached):
                continue
            if tick != cached.tick:
                self._enqueue(cached)  # it was used since
                continue
            self._drop(cached)
            victims.append(Evicted(cached.page, cached.hash))
        return victims

    def remove(self, page: int) -> bool:
        cached = self._known(page)
        self._drop(cached)
        return not cached.pinned

    def clear(self) -> list[int]:
        idle = [cached.page for cached in self.cached.values() if not cached.pinned]
        self._empty()
        return idle

    def _tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def _may_go(self, cached: _Cached) -> bool:
        if cached.pinned or self.cached.get(cached.page) is not cached:
            return False
        return self.windowed or cached.hash not in self.idle_children

    def _enqueue(self, cached: _Cached) -> None:
        if not cached.queued:
            cached.queued = True
            heapq.heappush(self.queue, (cached.tick, cached))

    def _make_idle(self, cached: _Cached) -> None:
        cached.pinned = False
        self.num_idle += 1
        self.idle_children[cached.parent] = self.idle_children.get(cached.parent, 0) + 1
        if self._may_go(cached):
            self._enqueue(cached)

    def _end_idle(self, cached: _Cached) -> None:
        self.num_idle -= 1
        if not _decrement(self.idle_children, cached.parent):
            page = self.page_of.get(cached.parent)
            if page is not None and self._may_go(self.cached[page]):
                self._enqueue(self.cached[page])

    def _drop(self, cached: _Cached) -> None:
        self._forget(cached)
        if self.events is not None:
            self.events.removed(self.name, cached.hash)

    def _forget(self, cached: _Cached) -> None:
        del self.page_of[cached.hash], self.cached[cached.page]
        self.inexact.discard(cached.hash)
        _decrement(self.children, cached.parent)
        if not cached.pinned:
            self._end_idle(cached)
        if len(self.queue) > 2 * len(self.cached) + 64:  # entries of pages that were removed, not evicted
            self.queue = [entry for entry in self.queue if self.cached.get(entry[1].page) is entry[1]]
            heapq.heapify(self.queue)

    def _known(self, page: int) -> _Cached:
        try:
            return self.cached[page]
        except KeyError:
            raise self._bug(f"page {page} is not cached", given=page) from None

    def check(self) -> None:
        if {page_hash: cached.page for cached in self.cached.values() for page_hash in (cached.hash,)} != self.page_of:
            raise self._bug("hashes and pages differ")
        if any(cached.page != page for page, cached in self.cached.items()):
            raise self._bug("a page is filed under another id")
        idle = [cached for cached in self.cached.values() if not cached.pinned]
        if len(idle) != self.num_idle:
            raise self._bug("idle pages are miscounted", given=self.num_idle, allowed=len(idle))
        if _count(self.cached.values()) != self.children or _count(idle) != self.idle_children:
            raise self._bug("followers are miscounted")
        if self.inexact != {cached.hash for cached in self.cached.values() if not cached.exact}:
            raise self._bug("inexact marks differ from the pages")
        queued = [cached for _, cached in self.queue]
        if len(set(map(id, queued))) != len(queued) or not all(cached.queued for cached in queued):
            raise self._bug("the queue holds a page twice")
        if not {id(c) for c in idle if self._may_go(c)} <= set(map(id, queued)):
            raise self._bug("a page that may go is not queued")

    def _bug(self, what: str, *, given: object = None, allowed: object = None) -> InternalError:
        return InternalError(f"prefix index of group {self.name!r}: {what}", given=given, allowed=allowed)


def _decrement(counts: dict[bytes, int], key: bytes) -> int:
    left = counts[key] - 1
    if left:
        counts[key] = left
    else:
        del counts[key]
    return left


def _count(pages: Iterable[_Cached]) -> dict[bytes, int]:
    counts: dict[bytes, int] = {}
    for cached in pages:
        counts[cached.parent] = counts.get(cached.parent, 0) + 1
    return counts
