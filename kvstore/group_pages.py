"""What a sequence holds in one layer group, and what sealing and truncating make of it. Pure; no page is counted here.

Token ranges of a packed group at length n:

    0 ............ base ............ n
    [ pages, packed ][ tail, dense   ]      base is a multiple of 128
           [ shadows ]                      after a deep truncate: pages that hold those rows already

In mode dense there is no tail: ``base`` is the start of the open page, and pages behind it may be handed out ahead. In
mode window there are no pages: ``base`` is the first token still in the tail. Groups that keep every n-th page only
have NO_PAGE in place of the others, which are never handed out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.answers import NewPage, Relinked, Split
from kvstore.geometry import CacheGeometry, LayerGroup
from kvstore.pending_rings import PendingRings
from kvstore.retention import (
    dense_base,
    end_pages,
    is_dense_again,
    is_kept,
    kept_pages,
    pages_for,
    retention_floor,
    sealed_base,
)
from protos.page_hash import PAGE_TOKENS

NO_PAGE = -1  # stands for a page behind the model's window that was let go, or was never kept


@dataclass
class Shadow:
    """A sealed page from before a deep truncate. Its records of the first ``num_tokens`` tokens still hold.

    ``reopened``: nobody else sees it and no page is to be had, so it will be completed in place.
    """

    page: int
    num_tokens: int
    reopened: bool = False

    @property
    def whole(self) -> bool:
        return self.num_tokens == PAGE_TOKENS


@dataclass
class GroupPages:
    """One sequence in one group.

    pages[i] holds tokens [128 i, 128 (i + 1)); NO_PAGE before ``first_page``. worst: pages that may be needed have
    lower indices. handed: pages reserved for the next seal, by index. promised: pages set aside in the PageTable.
    lossy_end: tail rows [base, lossy_end) were dequantised. prompt_pages: indices kept besides every keep_every-th.
    """

    group: LayerGroup
    margin: int
    worst: int
    rings: PendingRings
    prompt_pages: range = range(0)
    pages: list[int] = field(default_factory=list)
    base: int = 0
    first_page: int = 0
    shadows: dict[int, Shadow] = field(default_factory=dict)
    handed: dict[int, NewPage] = field(default_factory=dict)
    promised: int = 0
    lossy_end: int = 0

    @staticmethod
    def empty(group: LayerGroup, geometry: CacheGeometry, num_prompt_tokens: int, max_tokens: int) -> GroupPages:
        worst = worst_pages(group, geometry.margin, max_tokens)
        prompt_pages = end_pages(num_prompt_tokens, group.effective_window) if group.keep_every > 1 else range(0)
        return GroupPages(group, geometry.margin, worst, PendingRings.of(group, geometry), prompt_pages)

    @property
    def window(self) -> int:
        return self.group.effective_window

    @property
    def num_sealed(self) -> int:
        """Whole pages below the base; in mode window, those that would be there."""
        return self.base // PAGE_TOKENS

    def held(self) -> list[int]:
        """Every page this sequence is a holder of, once."""
        fresh = [new.page_id for new in self.handed.values() if not isinstance(new.source, Relinked)]
        return [
            *(page for page in self.pages if page != NO_PAGE),
            *(shadow.page for shadow in self.shadows.values()),
            *fresh,
        ]

    def keeps(self, index: int) -> bool:
        """Whether page ``index`` is kept, once it is sealed."""
        return is_kept(index, self.group.keep_every, self.prompt_pages)

    @property
    def num_worst(self) -> int:
        """Pages that the sequence may come to hold."""
        return kept_pages(self.worst, self.group.keep_every, self.prompt_pages)

    def still_promised(self) -> int:
        """Pages that may have to be taken yet: indices of the worst case that nothing stands for."""
        ahead = {index for index, shadow in self.shadows.items() if shadow.whole or shadow.reopened}
        ahead |= set(self.handed)
        past = kept_pages(len(self.pages), self.group.keep_every, self.prompt_pages)
        return max(0, self.num_worst - past - sum(index < self.worst and self.keeps(index) for index in ahead))

    def sealed_base(self, num_tokens: int, step_tokens: int) -> int:
        """The base after sealing at (num_tokens, step_tokens)."""
        if self.group.mode == "dense":
            return max(self.base, num_tokens // PAGE_TOKENS * PAGE_TOKENS)
        return sealed_base(self.base, num_tokens, step_tokens, self.window, self.margin)

    def written_base(self, num_committed: int, num_packed: int) -> int:
        """The base that a worker which is gone had reached at ``num_committed`` tokens, with the pages that it had
        reserved written for tokens below ``num_packed``. Rows of a tail that its base had left behind are nowhere else.
        """
        if self.group.mode == "dense":
            return self.base
        due = sealed_base(self.base, num_committed, 1, self.window, self.margin)
        if not self.group.has_pages:
            return due
        index = self.num_sealed
        while index < due // PAGE_TOKENS:
            written = index in self.handed and (index + 1) * PAGE_TOKENS <= num_packed
            if self.keeps(index) and not written:
                break
            index += 1
        return index * PAGE_TOKENS

    def missing(self, num_tokens: int, step_tokens: int) -> list[int]:
        """Indices of pages to hand out for (num_tokens, step_tokens)."""
        if not self.group.has_pages:
            return []
        if self.group.packed:
            last = self.sealed_base(num_tokens, step_tokens) // PAGE_TOKENS
            return [i for i in range(self.num_sealed, last) if i not in self.handed and self.keeps(i)]
        return list(range(len(self.pages), pages_for(num_tokens)))

    def behind_window(self, num_tokens: int, step_tokens: int) -> range:
        """Indices of pages that the model's window leaves behind for good at this length."""
        if not self.group.retained_window:
            return range(0)
        floor = retention_floor(num_tokens, step_tokens, self.group.retained_window, self.margin)
        return range(self.first_page, max(self.first_page, min(floor // PAGE_TOKENS, len(self.pages))))

    def wrote(self, length: int) -> None:
        """Rows up to ``length`` have been written."""
        self.rings = self.rings.after(length)

    def tail_is_lossy(self, num_tokens: int) -> bool:
        """Whether the dense window of the token at ``num_tokens`` has dequantised rows in it."""
        return max(self.base, num_tokens - self.window + 1) < min(self.lossy_end, num_tokens)


@dataclass(frozen=True)
class Cut:
    """A group after a truncate. ``refill``: (first token, tokens, page ids) to dequantise into the tail."""

    base: int
    pages: list[int]
    shadows: dict[int, Shadow]
    dropped: list[int]
    refill: tuple[int, int, list[int]] | None = None
    copied: int | None = None  # dense: the sealed page whose rows below the cut go to a new open page


def worst_pages(group: LayerGroup, margin: int, max_tokens: int) -> int:
    """Pages that a sequence of ``max_tokens`` tokens may come to hold.

    Pages behind a model's window count too: a prefill chunk packs them before they are let go.
    """
    if group.mode == "dense":
        return pages_for(max_tokens)
    return dense_base(max_tokens, group.effective_window, margin) // PAGE_TOKENS if group.has_pages else 0


def unhanded(state: GroupPages) -> tuple[list[int], dict[int, Shadow]]:
    """Takes back what was reserved and not sealed: (pages to drop, shadows as they stand then)."""
    dropped, shadows = [], dict(state.shadows)
    for index, new in state.handed.items():
        if isinstance(new.source, Split) and new.source.from_page == new.page_id:
            shadows[index] = Shadow(new.page_id, new.source.num_tokens, reopened=True)
        elif not isinstance(new.source, Relinked):
            dropped.append(new.page_id)
    return dropped, shadows


def cut_dense(state: GroupPages, num_tokens: int) -> Cut:
    """Truncates a dense group to ``num_tokens`` tokens: always exact; a cut sealed page is copied."""
    keep, whole = pages_for(num_tokens), num_tokens // PAGE_TOKENS
    base = min(state.base, whole * PAGE_TOKENS)
    if whole < keep and whole < state.num_sealed:
        return Cut(base, state.pages[:whole], {}, state.pages[whole:], copied=state.pages[whole])
    return Cut(base, state.pages[:keep], {}, state.pages[keep:])


def cut_packed(state: GroupPages, num_tokens: int, kept_base: int | None = None) -> Cut | str:
    """Truncates a packed or window group to ``num_tokens`` tokens, or says why that cannot be done.

    While the next token's window lies in the tail, the base stays. Further back it moves to where ``num_tokens`` has
    its whole retention dense again: the tail is refilled from pages, and those pages stay as shadows, for sealing to
    link again. With ``kept_base`` the tail comes from a checkpoint whose base that is.
    """
    group, target = state.group, state.base
    dropped, shadows = unhanded(state)
    if kept_base is not None:
        target = kept_base
    elif not is_dense_again(num_tokens, state.base, state.window):
        if group.retention != "all" and num_tokens:
            what = "single pages" if group.has_pages else "nothing"
            return f"group {group.name!r} keeps {what} behind its window; its tail begins at token {state.base}"
        target = dense_base(num_tokens, state.window, state.margin)
    if state.first_page and num_tokens:
        needed = min(target, max(0, num_tokens - group.retained_window + 1))
        if state.first_page * PAGE_TOKENS > needed:
            freed = state.first_page * PAGE_TOKENS
            return f"group {group.name!r} has freed its pages before token {freed}, and would need token {needed}"
    first = target // PAGE_TOKENS
    refill = None
    end = min(state.base, num_tokens)
    if kept_base is None and end > target and target < state.base:
        refill = (target, end - target, state.pages[first : pages_for(end)])
    if group.has_pages:
        sealed = ((i, state.pages[i]) for i in range(first, state.num_sealed))
        shadows |= {i: Shadow(page, PAGE_TOKENS) for i, page in sealed if page != NO_PAGE}
    kept: dict[int, Shadow] = {}
    for index, shadow in sorted(shadows.items()):
        left = min(shadow.num_tokens, num_tokens - index * PAGE_TOKENS)
        if left > 0 and index < state.worst:
            kept[index] = Shadow(shadow.page, left, shadow.reopened and left < PAGE_TOKENS)
        else:
            dropped.append(shadow.page)
    return Cut(target, state.pages[:first] if group.has_pages else [], kept, dropped, refill)
