"""What a sequence holds in one layer group, as it stands in the control block: what another process goes on from.

    [0, num_pages)              pages: of packed groups sealed ones, of dense groups open ones too; -1: none is held
    [num_pages, ahead_end)      packed groups: shadows, and pages that are reserved for the next seal; -1: neither

A reserved page that nothing stood behind is open, a shadow is sealed: so a page's state tells them apart. A reserved
page that is relinked is the shadow itself. Only the last shadow can hold less than a page's records (a truncate
cut it); it has words of its own (``split_*``), because a page may be reserved at its index as well.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.answers import NewPage, Relinked, Split
from kvstore.control_layout import NO_PAGE_ID, SEQUENCE_GROUP_DTYPE
from kvstore.geometry import CacheGeometry, LayerGroup
from kvstore.group_pages import NO_PAGE, GroupPages, Shadow
from kvstore.pending_rings import PendingRings
from protos.errors import InternalError
from protos.page_hash import PAGE_TOKENS

_FIELDS = struct.Struct("<QIIiIQQQIIIIIIII")
_PADDING = bytes(SEQUENCE_GROUP_DTYPE.itemsize - _FIELDS.size)


@dataclass(frozen=True)
class GroupRecord:
    """``page_ids`` are those of [0, ahead_end); the first ``num_pages`` are pages, -1 stands where none is held.

    ``split``: (index, page, tokens, reopened) of a shadow that holds less than a page; None: there is none.
    """

    base: int
    page_ids: Sequence[int]
    num_pages: int
    first_page: int = 0
    tail_slot: int = -1
    handed_end: int = 0
    lossy_end: int = 0
    ring_first: int = 0
    ring_written: int = 0
    split: tuple[int, int, int, bool] | None = None
    worst: int = 0
    prompt_pages: range = range(0)

    def pack(self) -> bytes:
        """The entry's bytes; page ids stand elsewhere."""
        index, page, tokens, reopened = self.split or (0, 0, 0, False)
        return (
            _FIELDS.pack(
                self.base,
                self.num_pages,
                self.first_page,
                self.tail_slot,
                self.handed_end,
                self.lossy_end,
                self.ring_first,
                self.ring_written,
                len(self.page_ids),
                index,
                page,
                tokens,
                reopened,
                self.worst,
                self.prompt_pages.start,
                self.prompt_pages.stop,
            )
            + _PADDING
        )

    @staticmethod
    def unpack(fields: bytes, page_ids: Sequence[int]) -> GroupRecord:
        """``page_ids``: all that have a place; the entry says how many are set."""
        base, num_pages, first_page, tail_slot, handed_end, *more = _FIELDS.unpack_from(fields)
        lossy_end, ring_first, ring_written, ahead_end, index, page, tokens, reopened, worst, prompt_first, end = more
        ids = [NO_PAGE if page_id == NO_PAGE_ID else page_id for page_id in page_ids[:ahead_end]]
        split = (index, page, tokens, bool(reopened)) if tokens else None
        return GroupRecord(
            base,
            ids,
            num_pages,
            first_page,
            tail_slot,
            handed_end,
            lossy_end,
            ring_first,
            ring_written,
            split,
            worst,
            range(prompt_first, end),
        )


def record_of(state: GroupPages, slot: int) -> GroupRecord:
    """What is to be written of a group of the sequence in ``slot``."""
    split: tuple[int, int, int, bool] | None = None
    ahead: dict[int, int] = {}
    for index, shadow in state.shadows.items():
        if shadow.whole:
            ahead[index] = shadow.page
        elif split is not None:
            raise InternalError("two shadows hold less than a page", given=(split[0], index))
        else:
            split = (index, shadow.page, shadow.num_tokens, shadow.reopened)
    for index, new in state.handed.items():
        if isinstance(new.source, Split) and new.source.from_page == new.page_id:
            if split is not None:
                raise InternalError("two shadows hold less than a page", given=(split[0], index))
            split = (index, new.page_id, new.source.num_tokens, True)
        ahead[index] = new.page_id
    end = max([len(state.pages), *(index + 1 for index in ahead)])
    ids = [*state.pages, *(ahead.get(index, NO_PAGE) for index in range(len(state.pages), end))]
    return GroupRecord(
        base=state.base,
        page_ids=ids,
        num_pages=len(state.pages),
        first_page=state.first_page,
        tail_slot=slot if state.group.has_tail else -1,
        handed_end=max(state.handed, default=-1) + 1,
        lossy_end=state.lossy_end,
        ring_first=state.rings.first,
        ring_written=state.rings.written,
        split=split,
        worst=state.worst,
        prompt_pages=state.prompt_pages,
    )


def state_of(
    record: GroupRecord, group: LayerGroup, geometry: CacheGeometry, is_sealed: Callable[[int], bool]
) -> GroupPages:
    """The reverse. The caller has checked the record's numbers, and counts promises afterwards.

    Args:
        is_sealed: whether a page is immutable.
    """
    state = GroupPages(
        group,
        geometry.margin,
        record.worst,
        PendingRings(PendingRings.of(group, geometry).regions, record.ring_first, record.ring_written),
        record.prompt_pages,
        pages=list(record.page_ids[: record.num_pages]),
        base=record.base,
        first_page=record.first_page,
        lossy_end=record.lossy_end,
    )
    split_index, split_page, split_tokens, reopened = record.split or (-1, NO_PAGE, 0, False)
    for index in range(record.num_pages, max(len(record.page_ids), split_index + 1)):
        page = record.page_ids[index] if index < len(record.page_ids) else NO_PAGE
        handed = index < record.handed_end and state.keeps(index)
        if index == split_index:
            source = Split(split_page, split_tokens)
            if not (handed and page == split_page):  # else it is completed in place, and no shadow any more
                state.shadows[index] = Shadow(split_page, split_tokens, reopened)
            if handed:
                state.handed[index] = NewPage(index, page, source)
        elif page != NO_PAGE and is_sealed(page):
            state.shadows[index] = Shadow(page, PAGE_TOKENS)
            if handed:
                state.handed[index] = NewPage(index, page, Relinked())
        elif page != NO_PAGE:
            state.handed[index] = NewPage(index, page)
    return state
