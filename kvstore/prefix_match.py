"""How far a prompt can be resumed from cached pages and kept tails (DESIGN.md 3.4). Pure: looks and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.checkpoints import Checkpoint
from kvstore.geometry import CacheGeometry, LayerGroup
from kvstore.group_pages import NO_PAGE, worst_pages
from kvstore.kept_boundaries import KeptBoundaries, KeptTails
from kvstore.pending_rings import PendingRings
from kvstore.prefix_index import PrefixIndex
from kvstore.retention import dense_base, is_dense_again, pages_for
from protos.page_hash import PAGE_TOKENS

_NO_HASH = bytes(16)


@dataclass(frozen=True)
class GroupMatch:
    """pages[i] holds tokens [128 i, ...); NO_PAGE stands before ``first_page``. ``shadows`` (index -> page) hold what
    the tail is refilled from; ``copied``: the page whose rows go to the new open page.
    """

    pages: list[int]
    base: int
    shadows: Mapping[int, int] = field(default_factory=dict)
    refill: tuple[int, int, list[int]] | None = None  # first token, tokens, pages
    lossy_end: int = 0
    first_page: int = 0
    rings: PendingRings | None = None
    copied: int | None = None


@dataclass(frozen=True)
class Match:
    """``num_tokens`` tokens can be taken over. ``checkpoint``: its tails are copied; else tails are refilled."""

    num_tokens: int
    groups: Mapping[str, GroupMatch]
    checkpoint: Checkpoint | None = None
    inexact_from: int | None = None

    @property
    def exact(self) -> bool:
        return self.inexact_from is None


def find_match(
    geometry: CacheGeometry,
    index: PrefixIndex,
    kept: KeptBoundaries,
    *,
    salt: str,
    hashes: Sequence[bytes],
    tokens: Sequence[int],
    max_tokens: int,
    exact_only: bool,
) -> Match | None:
    """The longest boundary at which every group holds what it needs and that leaves a token to compute; None: none.

    An exact match goes on as the sequence that left it behind would have, had it not been released. That may differ
    from a sequence computed at once: of two prefill chunks, the second read what the first had packed.

    Args:
        hashes: of the whole pages of ``tokens``.
        exact_only: only what is exactly what this sequence would compute.
    """
    finder = _Finder(geometry, index, kept, hashes, len(tokens) - 1, max_tokens)
    pages = finder.at_page_boundary(exact_only)
    least = pages.num_tokens if pages else 0
    for checkpoint in _checkpoints(kept, salt, hashes, tokens):
        if min(checkpoint.num_tokens, len(tokens) - 1) < least:
            break
        found = finder.at_checkpoint(checkpoint)
        if found and found.num_tokens >= max(1, least) and (found.exact or not exact_only):
            return found
    return pages


def _checkpoints(
    kept: KeptBoundaries, salt: str, hashes: Sequence[bytes], tokens: Sequence[int]
) -> Iterator[Checkpoint]:
    """Longest first, one of all the tokens included: it serves with one token taken back."""
    one_more = [*tokens, 0]
    chain = [*hashes, _NO_HASH] if len(one_more) % PAGE_TOKENS == 0 else hashes
    return kept.cache.matches(salt, chain, one_more)


class _Finder:
    def __init__(
        self,
        geometry: CacheGeometry,
        index: PrefixIndex,
        kept: KeptBoundaries,
        hashes: Sequence[bytes],
        most: int,
        max_tokens: int,
    ) -> None:
        self._geometry = geometry
        self._index = index
        self._kept = kept
        self._hashes = hashes
        self._most = most  # tokens that may be taken over
        self._max_tokens = max_tokens

    def at_page_boundary(self, exact_only: bool) -> Match | None:
        """Pages alone: exact where all groups are dense; elsewhere the window is refilled. Not where rows are pending
        or not all is kept behind a window.
        """
        groups = self._geometry.groups
        if any(group.has_pending or group.retention != "all" for group in groups):
            return None
        all_dense = not any(group.packed for group in groups)
        if exact_only and not all_dense:
            return None
        windowed = {g.name: self._first_page_of(g) for g in groups if g.retained_window}
        num_pages = self._index.longest(self._hashes[: self._most // PAGE_TOKENS], windowed)
        if exact_only:
            marked = self._first_inexact({group.name: range(num_pages) for group in groups})
            num_pages = num_pages if marked is None else marked
        if not num_pages:
            return None
        num_tokens = num_pages * PAGE_TOKENS
        matches = {group.name: self._from_pages(group, num_tokens) for group in groups}
        marked = self._first_inexact({group.name: range(self._first(group, num_tokens), num_pages) for group in groups})
        inexact = [] if marked is None else [marked * PAGE_TOKENS]
        if any(match.lossy_end for match in matches.values()):
            inexact.append(num_tokens)
        return Match(num_tokens, matches, inexact_from=min(inexact, default=None))

    def at_checkpoint(self, checkpoint: Checkpoint) -> Match | None:
        """The tails of a checkpoint over cached pages, with a token taken back where none would be left to compute."""
        kept = self._kept.tails(checkpoint)
        num_tokens = min(checkpoint.num_tokens, self._most)
        matches: dict[str, GroupMatch] = {}
        needed: dict[str, range] = {}
        for group in self._geometry.groups:
            indices, found = self._at_checkpoint(group, num_tokens, checkpoint, kept)
            if found is None:
                return None
            matches[group.name], needed[group.name] = found, indices
        marked = self._first_inexact(needed)
        inexact = [] if marked is None else [marked * PAGE_TOKENS]
        if kept.inexact_from is not None and kept.inexact_from < num_tokens:
            inexact.append(kept.inexact_from)
        return Match(num_tokens, matches, checkpoint, min(inexact, default=None)) if num_tokens else None

    def _at_checkpoint(
        self, group: LayerGroup, num_tokens: int, checkpoint: Checkpoint, kept: KeptTails
    ) -> tuple[range, GroupMatch | None]:
        """What one group takes over, and the indices of the pages that this rests on; None where something is gone."""
        rings = kept.rings.get(group.name)
        if rings is not None and not rings.hold(num_tokens):
            return range(0), None
        whole, rest = divmod(num_tokens, PAGE_TOKENS)
        if group.mode == "dense":
            from_kept = rest > 0 and checkpoint.num_tokens // PAGE_TOKENS == whole
            indices = range(whole + (rest > 0 and not from_kept))
            pages = self._pages(group, indices)
            if pages is None:
                return indices, None
            copied = self._kept.open_page(checkpoint, group.name) if from_kept else pages[whole] if rest else None
            return indices, GroupMatch(pages[:whole], whole * PAGE_TOKENS, rings=rings, copied=copied)
        base = kept.bases[group.name]
        if not is_dense_again(num_tokens, base, group.effective_window):
            return range(0), None
        if group.retention == "checkpoints":  # no query reads these pages: those that are there will do
            there = [self._index.page(group.name, self._hashes[i]) for i in range(base // PAGE_TOKENS)]
            return range(0), GroupMatch([NO_PAGE if page is None else page for page in there], base, rings=rings)
        indices = range(self._first(group, num_tokens), base // PAGE_TOKENS) if group.has_pages else range(0)
        pages = self._pages(group, indices)
        if pages is None:
            return indices, None
        first = indices.start
        return indices, GroupMatch([NO_PAGE] * first + pages, base, first_page=first, rings=rings)

    def _pages(self, group: LayerGroup, indices: range) -> list[int] | None:
        """The pages of these indices; None where one is gone."""
        found = self._index.pages(group.name, [self._hashes[i] for i in indices]) if indices else None
        return found.pages if found else None if indices else []

    def _from_pages(self, group: LayerGroup, num_tokens: int) -> GroupMatch:
        first, last = self._first(group, num_tokens), num_tokens // PAGE_TOKENS
        found = self._index.pages(group.name, self._hashes[first:last])
        pages = [NO_PAGE] * first + (found.pages if found else [])
        if group.mode == "dense":
            return GroupMatch(pages, num_tokens)
        base = dense_base(num_tokens, group.effective_window, self._geometry.margin)
        behind = pages[base // PAGE_TOKENS :]
        refill = (base, num_tokens - base, behind)
        # Pages that sealing will never reach are read once, for the refill, and not held.
        worst = worst_pages(group, self._geometry.margin, self._max_tokens)
        shadows = {i: pages[i] for i in range(base // PAGE_TOKENS, min(last, worst))}
        return GroupMatch(pages[: base // PAGE_TOKENS], base, shadows, refill, lossy_end=num_tokens, first_page=first)

    def _first(self, group: LayerGroup, num_tokens: int) -> int:
        """Index of the first page that a sequence of ``num_tokens`` tokens needs."""
        return self._first_page_of(group)(pages_for(num_tokens)) if group.retained_window else 0

    def _first_page_of(self, group: LayerGroup) -> Callable[[int], int]:
        def first(num_pages: int) -> int:
            num_tokens = num_pages * PAGE_TOKENS
            # A page more than the window reaches, so that a checkpoint between two boundaries has its window too.
            reach = max(0, num_tokens - PAGE_TOKENS - group.retained_window - self._geometry.margin)
            base = dense_base(max(0, num_tokens - PAGE_TOKENS), group.effective_window, self._geometry.margin)
            return min(reach, base) // PAGE_TOKENS

        return first

    def _first_inexact(self, ranges: Mapping[str, range]) -> int | None:
        """Lowest index of a page with the mark, among the given ones."""
        marked = []
        for group, indices in ranges.items():
            found = self._index.pages(group, [self._hashes[i] for i in indices]) if indices else None
            if found is not None and not found.exact:
                marked.append(next(i for i in indices if not self._is_exact(group, i)))
        return min(marked, default=None)

    def _is_exact(self, group: str, index: int) -> bool:
        found = self._index.pages(group, [self._hashes[index]])
        return found is not None and found.exact
