"""Whether sequences, page tables, prefix index and checkpoints of a device agree. O(pages)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvstore.checkpoints import CheckpointCache
from kvstore.group_pages import GroupPages
from kvstore.pages import PageState, PageTable
from kvstore.prefix_index import PrefixIndex
from kvstore.sequence_pages import SequencePages
from protos.errors import InternalError


def check_sequences(
    groups: Mapping[str, PageTable],
    index: PrefixIndex,
    checkpoints: CheckpointCache,
    sequences: Sequence[SequencePages],
) -> None:
    """Raises InternalError when they do not."""
    index.check()
    checkpoints.check()
    for name, table in groups.items():
        table.check()
        states = [sequence.groups[name] for sequence in sequences]
        refs = Counter(page for state in states for page in state.held())
        for page in range(table.num_pages):
            _check_page(name, table, index, page, refs[page])
        if sum(state.promised for state in states) != table.num_promised:
            raise InternalError(f"group {name!r}: promises of sequences differ from those of the table")
        for sequence_state in states:
            _check_state(sequence_state)


def _check_page(name: str, table: PageTable, index: PrefixIndex, page: int, holders: int) -> None:
    if holders != table.refs(page):
        raise InternalError(f"group {name!r}: holders of page {page} differ", given=table.refs(page), allowed=holders)
    known, state = index.hash_of(name, page) is not None, table.state(page)
    if known and index.is_pinned(name, page) != (state == PageState.SEALED):
        raise InternalError(f"group {name!r}: page {page} is {state.name}, but the index has it otherwise")
    if state == PageState.CACHED and not known:
        raise InternalError(f"group {name!r}: page {page} is cached, and the index does not know it")


def _check_state(state: GroupPages) -> None:
    name = state.group.name
    if state.promised != state.still_promised():
        raise InternalError(f"group {name!r}: a promise is off", given=state.promised, allowed=state.still_promised())
    if state.group.packed and len(state.pages) != state.num_sealed:
        raise InternalError(f"group {name!r}: pages differ from the base", given=len(state.pages), allowed=state.base)
    if any(index < state.num_sealed for index in (*state.shadows, *state.handed)):
        raise InternalError(f"group {name!r}: a shadow lies below the base", given=sorted(state.shadows))
