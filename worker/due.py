"""What a step needs of the store, from token counts alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvstore.geometry import CacheGeometry, LayerGroup
from kvstore.retention import kept_pages, most_end_pages, pages_for, sealed_base
from protos.page_hash import PAGE_TOKENS


class Held(Protocol):
    """What a sequence holds, by layer group; ``worker.sequence.Sequence`` is one."""

    @property
    def pages(self) -> Mapping[str, list[int]]: ...
    @property
    def bases(self) -> Mapping[str, int]: ...


def base_after(geometry: CacheGeometry, group: LayerGroup, base: int, num_tokens: int, step_tokens: int) -> int:
    """A group's base after sealing at (num_tokens, step_tokens); in mode dense the start of the open page."""
    if group.mode == "dense":
        return max(base, num_tokens // PAGE_TOKENS * PAGE_TOKENS)
    return sealed_base(base, num_tokens, step_tokens, group.effective_window, geometry.margin)


def needs_pages(geometry: CacheGeometry, held: Held, num_tokens: int, step_tokens: int) -> bool:
    """Whether a step to ``num_tokens`` tokens needs pages that the sequence does not hold yet."""
    for group in geometry.groups:
        if group.mode == "dense":
            if pages_for(num_tokens) > len(held.pages[group.name]):
                return True
        elif group.has_pages and _moves(geometry, group, held, num_tokens, step_tokens):
            return True
    return False


def seals(geometry: CacheGeometry, held: Held, num_tokens: int, step_tokens: int) -> bool:
    """Whether the base of any group moves at ``num_tokens`` tokens."""
    return any(_moves(geometry, group, held, num_tokens, step_tokens) for group in geometry.groups)


def worst_pages(geometry: CacheGeometry, group: LayerGroup, num_tokens: int) -> int:
    """Pages that a sequence of ``num_tokens`` tokens holds at most."""
    if group.mode == "dense":
        return pages_for(num_tokens)
    sealed = base_after(geometry, group, 0, num_tokens, 1) // PAGE_TOKENS if group.has_pages else 0
    most = kept_pages(sealed, group.keep_every) + most_end_pages(group.window)
    return sealed if group.keep_every == 1 else min(sealed, most)


def _moves(geometry: CacheGeometry, group: LayerGroup, held: Held, num_tokens: int, step_tokens: int) -> bool:
    base = held.bases[group.name]
    return base_after(geometry, group, base, num_tokens, step_tokens) > base
