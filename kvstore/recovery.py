"""What is left of a sequence whose worker is gone: whether it can be gone on with, judged from the words that the
worker wrote last. Pure.

The worker writes rows, then ``packed`` (reserved pages are written), token log, ``logged``, ``committed``. Where a
chunk's rows overwrite others in a tail, it saves that in a free slot's first, which ``saved`` names until the chunk is
committed. Between any two of these it may have died:

    before ``committed``         rows behind it are of no account: they are computed again, over the same places
    logged, not committed        tokens that were perhaps sent; their rows are computed from the log
    committed, not sealed        pages that were written are sealed now (``GroupPages.written_base``)
    ``saved``, not committed     the next worker brings the tail back, before anything is opened
    before copies were made      committed stands below the base (open, fork), or where a truncate left it
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass

from kvstore.control import ControlBlock, bad_block
from kvstore.group_pages import GroupPages


@dataclass(frozen=True)
class LastWords:
    """Of one slot. ``saved_in``: the slot whose tails are this one's; None: they are in place. ``lacks_copies``: a
    truncate asked for copies, the worker did not say that it made them, and nothing was committed since.
    """

    logged: int
    committed: int
    packed: int
    saved_in: int | None
    lacks_copies: bool


def last_words(control: ControlBlock, slot: int) -> LastWords:
    """As they stand; see ``demand_possible``."""
    return LastWords(
        logged=control.logged(slot),
        committed=control.committed(slot),
        packed=control.packed(slot),
        saved_in=control.saved_in(slot),
        lacks_copies=control.lacks_copies(slot),
    )


def demand_possible(slot: int, words: LastWords, max_sequence_tokens: int, free: Container[int]) -> None:
    """Raises PreconditionFailed (BAD_CONTROL_BLOCK) where no worker of ours could have written them.

    Args:
        free: slots that no sequence has.
    """
    if not words.committed <= words.logged <= max_sequence_tokens:
        raise bad_block(
            f"lengths of slot {slot}",
            f"{words.logged} tokens logged, {words.committed} committed",
            f"committed <= logged <= {max_sequence_tokens}",
        )
    if words.saved_in is not None and words.saved_in not in free:
        raise bad_block(f"where the tail of slot {slot} is saved", f"slot {words.saved_in}", "a free slot")


def why_void(words: LastWords, groups: Iterable[GroupPages]) -> str | None:
    """Why rows below the committed length are missing; None: all are there."""
    if words.lacks_copies:
        return "copies of a truncate were not made"
    for state in groups:
        if words.committed < state.base:
            return f"rows of layer group {state.group.name!r} were not copied: it was just opened"
        if not state.rings.after(words.committed).hold(words.committed):
            return f"pending rows of layer group {state.group.name!r} are gone"
    return None
