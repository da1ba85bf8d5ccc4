"""A store's tables out of the control block of a store that is gone.

The block was written by another process and shared with a worker, so it is read like a message of a stranger: from a
copy that nobody else can change, every number checked before it is used. What does not fit together is refused by name
(BAD_CONTROL_BLOCK), never repaired. Checkpoints are not in the block: they are forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.control import ControlBlock, bad_block
from kvstore.control_layout import (
    EXACT,
    MAX_FROZEN_BYTES,
    MAX_ID_BYTES,
    PAGE_EXACT,
    PAGE_INDEXED,
    SLOT_FREE,
    SLOT_LIVE,
    ControlShape,
)
from kvstore.geometry import CacheGeometry, LayerGroup
from kvstore.group_pages import NO_PAGE, GroupPages
from kvstore.group_record import GroupRecord, state_of
from kvstore.pages import PageState
from kvstore.recovery import demand_possible, last_words
from kvstore.sequence_pages import KnownPage, SequencePages
from kvstore.sequences import SequenceTable
from protos.errors import InternalError
from protos.page_hash import PAGE_TOKENS, ROOT

MAX_COUNT = 1 << 62  # of generations and epochs: they grow


def demand_same(
    control: ControlBlock,
    shape: ControlShape,
    *,
    device: str,
    geometry: CacheGeometry,
    weights_digest: bytes,
) -> None:
    """Raises PreconditionFailed (BAD_CONTROL_BLOCK) where the block is not that of this device, geometry and sizes."""
    names = tuple(group.name for group in geometry.groups)
    for what, found, expected in (
        ("sizes", control.shape, shape),
        ("layer groups", control.group_names, names),
        ("device", control.device, device),
        ("geometry digest", control.geometry_digest.hex(), geometry.digest().hex()),
        ("weights digest", control.weights_digest.hex(), weights_digest.hex()),
        ("page bytes", control.page_bytes, tuple(group.page_bytes for group in geometry.groups)),
    ):
        if found != expected:
            raise bad_block(f"its {what} differ from what is asked for", found, expected)
    if control.epoch > MAX_COUNT:  # the next one is greater
        raise bad_block("its epoch", control.epoch, f"up to {MAX_COUNT}")


def rebuild(table: SequenceTable, control: ControlBlock) -> None:
    """Fills an empty table from a block that ``demand_same`` passed.

    Raises:
        PreconditionFailed: BAD_CONTROL_BLOCK; the table is of no use then.
    """
    pages = {name: _pages(name, control, table.groups[name].num_pages) for name in table.groups}
    sequences = [_sequence(slot, table, control, pages) for slot in _live(control)]
    try:
        table.restore(sequences, pages)
    except InternalError as contradiction:  # of the block, not of this process
        raise bad_block("it contradicts itself", contradiction.message, contradiction.given) from contradiction


def _pages(name: str, control: ControlBlock, count: int) -> list[KnownPage]:
    entries = control.pages[name]
    if len(entries) != count:
        raise bad_block(f"pages of group {name!r}", len(entries), count)
    pages = []
    rows = zip(*(entries[field].tolist() for field in ("state", "refs", "generation", "flags", "tier")), strict=True)
    for number, (state, refs, generation, flags, tier) in enumerate(rows):
        known, exact = bool(flags & PAGE_INDEXED), bool(flags & PAGE_EXACT)
        held = refs > 0
        if (
            state not in list(PageState)
            or held != (state in (PageState.OPEN, PageState.SEALED))
            or (state == PageState.CACHED and not known)
            or (state in (PageState.FREE, PageState.OPEN) and known)
            or flags & ~(PAGE_INDEXED | PAGE_EXACT)
            or (exact and not known)
            or tier
            or generation > MAX_COUNT
        ):
            raise bad_block(
                f"page {number} of group {name!r}",
                f"state {state}, {refs} holders, generation {generation}, flags {flags}, tier {tier}",
                "what a store writes",
            )
        page_hash, parent = bytes(entries["hash"][number]), bytes(entries["parent"][number])
        pages.append(KnownPage(PageState(state), refs, generation, page_hash, parent, exact if known else None))
    by_hash = Counter(page.hash for page in pages if page.exact is not None)
    if any(count > 1 for count in by_hash.values()):
        raise bad_block(f"the index of group {name!r}", "two pages of one hash", "one page a hash")
    return pages


def _live(control: ControlBlock) -> list[int]:
    states = control.slots["state"].tolist()
    odd = [state for state in states if state not in (SLOT_FREE, SLOT_LIVE)]
    if odd:
        raise bad_block("the state of a slot", odd[0], f"{SLOT_FREE} or {SLOT_LIVE}")
    return control.live_slots()


def _sequence(
    slot: int, table: SequenceTable, control: ControlBlock, pages: Mapping[str, list[KnownPage]]
) -> SequencePages:
    entry, most = control.slots[slot], table.max_sequence_tokens
    for name, limit in (("request_id", MAX_ID_BYTES), ("salt", MAX_ID_BYTES), ("frozen", MAX_FROZEN_BYTES)):
        if int(entry[f"{name}_bytes"]) > limit:
            raise bad_block(f"the length of slot {slot}'s {name}", int(entry[f"{name}_bytes"]), f"up to {limit}")
    try:
        request_id, salt = control.request_id(slot), control.salt(slot)
    except UnicodeDecodeError as malformed:
        raise bad_block(f"a text of slot {slot}", str(malformed), "UTF-8") from malformed
    words = last_words(control, slot)
    demand_possible(slot, words, most, control.free_slots())
    max_tokens, inexact_from = int(entry["max_tokens"]), int(entry["inexact_from"])
    _demand(slot, "max_tokens", max_tokens, 1, most)
    _demand(slot, "num_prompt_tokens", control.num_prompt_tokens(slot), 1, most)
    _demand(slot, "num_cached", control.num_cached(slot), 0, most)
    _demand(slot, "epoch", int(entry["epoch"]), 0, control.epoch)
    if inexact_from != EXACT:
        _demand(slot, "inexact_from", inexact_from, 0, most)
    groups = {
        group.name: _group(slot, group, table.geometry, control, pages.get(group.name, []))
        for group in table.geometry.groups
    }
    end = max(max(state.base, state.lossy_end) for state in groups.values())
    _demand(slot, "tokens that are in pages or dequantised", end, 0, words.logged)
    hashes = table.hashes(control.tokens(slot, 0, end), salt)
    sequence = SequencePages(
        slot, request_id, salt, max_tokens, groups, hashes, None if inexact_from == EXACT else inexact_from
    )
    _demand_hashes(sequence, pages)
    return sequence


def _group(
    slot: int, group: LayerGroup, geometry: CacheGeometry, control: ControlBlock, pages: list[KnownPage]
) -> GroupPages:
    record = control.group_record(slot, group.name)
    shape = control.shape
    what = f"in group {group.name!r}"
    _demand(slot, f"base {what}", record.base, 0, shape.max_pages * PAGE_TOKENS, multiple=PAGE_TOKENS)
    ahead = len(record.page_ids)
    num_sealed = record.base // PAGE_TOKENS
    if group.mode == "dense":
        _demand(slot, f"pages {what}", record.num_pages, num_sealed, shape.max_pages)
        _demand(slot, f"pages ahead {what}", ahead, record.num_pages, record.num_pages)
    elif group.has_pages:
        _demand(slot, f"pages {what}", record.num_pages, num_sealed, num_sealed)
        _demand(slot, f"pages ahead {what}", ahead, record.num_pages, shape.max_pages)
    else:
        _demand(slot, f"pages {what}", max(record.num_pages, ahead), 0, 0)
    _demand(slot, f"first page {what}", record.first_page, 0, record.num_pages)
    _demand(slot, f"reserved pages {what}", record.handed_end, 0, ahead if group.packed else 0)
    tail_slot = slot if group.has_tail else -1
    _demand(slot, f"tail slot {what}", record.tail_slot, tail_slot, tail_slot)
    for name, value in (
        ("dequantised rows", record.lossy_end),
        ("ring", record.ring_first),
        ("ring", record.ring_written),
    ):
        _demand(slot, f"{name} {what}", value, 0, shape.max_sequence_tokens)
    _demand(slot, f"pages that may be needed {what}", record.worst, 0, shape.max_pages)
    _demand(slot, f"prompt pages {what}", record.prompt_pages.stop, 0, shape.max_pages + 1)
    if record.split:
        index, page, tokens, _ = record.split
        last = shape.max_pages - 1 if group.packed else -1
        _demand(slot, f"the index of a cut page {what}", index, record.num_pages, last)
        _demand(slot, f"tokens of a cut page {what}", tokens, 1, PAGE_TOKENS - 1)
        _demand(slot, f"a cut page {what}", page, 0, len(pages) - 1)
    for page in record.page_ids:
        _demand(slot, f"a page id {what}", page, NO_PAGE, len(pages) - 1)
    state = state_of(record, group, geometry, lambda page: pages[page].state == PageState.SEALED)
    _demand_states(slot, state, record, pages)
    return state


def _demand_states(slot: int, state: GroupPages, record: GroupRecord, pages: list[KnownPage]) -> None:
    """Pages below the base and shadows are sealed, the others open; each is held once; none is missing."""
    where = f"slot {slot} in group {state.group.name!r}"
    for index, page in enumerate(state.pages):
        if page == NO_PAGE:
            # A prefix match may leave any of them out where no query reads them.
            if state.group.packed and (index < state.first_page or state.group.keep_every > 1):
                continue
            raise bad_block(f"page {index} of {where}", "none", "a page")
        expected = PageState.SEALED if index < state.num_sealed else PageState.OPEN
        if index < state.first_page or pages[page].state != expected:
            raise bad_block(f"page {index} of {where}", pages[page].state.name, expected.name)
    for index, shadow in state.shadows.items():
        if pages[shadow.page].state != PageState.SEALED:
            raise bad_block(f"page {index} of {where}", pages[shadow.page].state.name, PageState.SEALED.name)
    for index in range(record.num_pages, record.handed_end):
        if state.keeps(index) and index not in state.handed:
            raise bad_block(f"reserved page {index} of {where}", "none", "a page")
    for index, new in state.handed.items():
        if new.page_id < 0 or (new.source is None and pages[new.page_id].state != PageState.OPEN):
            raise bad_block(f"reserved page {index} of {where}", new.page_id, "an open page")
        if index >= record.handed_end:
            raise bad_block(f"page {index} of {where}", "open and not reserved", "a reserved page")
    held = state.held()
    if len(set(held)) != len(held):
        raise bad_block(f"the pages of {where}", "one twice", "each once")


def _demand_hashes(sequence: SequencePages, pages: Mapping[str, list[KnownPage]]) -> None:
    """Sealed pages stand for the tokens in the log."""
    for name, state in sequence.groups.items():
        for index in range(state.num_sealed if state.group.has_pages else 0):
            page = state.pages[index]
            if page == NO_PAGE:
                continue
            parent = sequence.hashes[index - 1] if index else ROOT
            if (pages[name][page].hash, pages[name][page].parent) != (sequence.hashes[index], parent):
                raise bad_block(
                    f"the hash of page {page} in group {name!r}, slot {sequence.slot}",
                    pages[name][page].hash.hex(),
                    f"{sequence.hashes[index].hex()}, of the token log",
                )


def _demand(slot: int, what: str, value: int, least: int, most: int, *, multiple: int = 1) -> None:
    if not least <= value <= most or value % multiple:
        raise bad_block(f"{what} of slot {slot}", value, f"{least} to {most}")
