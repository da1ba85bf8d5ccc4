"""Boundaries that sequences can go back to, or be resumed at, exactly: what the slots and pages of checkpoints hold,
and the copies of them that a worker is making. Pure.

A checkpoint keeps every tail of a sequence. Beside tails, a dense group's newest rows lie in an open page, which is
private: pages behind those of the group's page table, one for each checkpoint, take a copy of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.answers import Checkpointed, PageCopy, TailCopy
from kvstore.checkpoints import Checkpoint, CheckpointCache, CheckpointKind
from kvstore.geometry import CacheGeometry
from kvstore.pending_rings import PendingRings
from kvstore.retention import is_dense_again
from kvstore.sequence_pages import SequencePages
from protos.errors import InvalidRequest, PreconditionFailed
from protos.page_hash import PAGE_TOKENS

CHECKPOINT_KINDS: tuple[CheckpointKind, ...] = ("prompt_end", "turn_end", "junction")


@dataclass(frozen=True)
class KeptTails:
    """What the tail slots of a checkpoint hold, by group; no row was dequantised.

    ``inexact_from``: first token computed after an inexact resume.
    """

    bases: Mapping[str, int]
    rings: Mapping[str, PendingRings]
    inexact_from: int | None = None


class KeptBoundaries:
    """The checkpoints of one device.

    Args:
        num_pages: pages of each group, without those for checkpoints.
        slots: the tail slots for checkpoints, in every group that has tails.
    """

    def __init__(self, geometry: CacheGeometry, num_pages: Mapping[str, int], slots: range) -> None:
        self._tailed = [group.name for group in geometry.groups if group.has_tail]
        self._paged = [group.name for group in geometry.groups if geometry.keeps_open_pages(group)]
        self._num_pages = num_pages
        self._first_slot = slots.start
        self.cache = CheckpointCache(dict.fromkeys(self._tailed, slots))
        self._tails: dict[int, KeptTails] = {}  # by tail slot
        self._under_way: list[Checkpoint] = []  # copies that the last answer asked for

    def tails(self, checkpoint: Checkpoint) -> KeptTails:
        return self._tails[_slot(checkpoint)]

    def open_page(self, checkpoint: Checkpoint, group: str) -> int:
        """The page that holds the rows of a dense group behind the checkpoint's last whole page."""
        return self._num_pages[group] + _slot(checkpoint) - self._first_slot

    # --- copies under way ---

    def confirm(self) -> None:
        """The worker has made the copies that the last answer asked for: it calls again, or said goodbye."""
        for checkpoint in self._under_way:
            if checkpoint.pins:
                self.cache.unpin(checkpoint)
            else:
                self.cache.commit(checkpoint)
        self._under_way.clear()

    def end_attachment(self, *, confirmed: bool) -> None:
        if confirmed:
            self.confirm()
        self._under_way.clear()
        self.cache.end_attachment()

    def restore(self, checkpoint: Checkpoint, slot: int) -> list[TailCopy]:
        """The copies that make a sequence's tails those of the checkpoint, which stays until they are made."""
        self.cache.pin(checkpoint)
        self._under_way.append(checkpoint)
        return [TailCopy(name, kept_slot, slot) for name, kept_slot in checkpoint.slots.items()]

    # --- keeping ---

    def keep(
        self, sequence: SequencePages, num_tokens: int, kind: str, log: Sequence[int], hashes: Sequence[bytes]
    ) -> Checkpointed:
        """Keeps what a resume at ``num_tokens`` needs: see ``SequenceTable.checkpoint``.

        Args:
            log, hashes: the sequence's first ``num_tokens`` tokens and the chain of their whole pages.
        """
        exact = sequence.inexact_from is None or sequence.inexact_from >= num_tokens
        checkpoint = self.cache.put(sequence.salt, hashes, log, exact=exact, kind=_known(kind, num_tokens))
        if checkpoint is None:
            return Checkpointed()
        for name in self._tailed:
            sequence.groups[name].wrote(num_tokens)
        kept = KeptTails(
            bases={name: sequence.groups[name].base for name in self._tailed},
            rings={name: sequence.groups[name].rings for name in self._tailed},
            inexact_from=sequence.inexact_from,
        )
        self._tails[_slot(checkpoint)] = kept
        self._under_way.append(checkpoint)
        whole, rest = divmod(num_tokens, PAGE_TOKENS)
        copies = [
            PageCopy(name, sequence.groups[name].pages[whole], self.open_page(checkpoint, name), rest)
            for name in (self._paged if rest else ())
        ]
        return Checkpointed(copies, [TailCopy(name, sequence.slot, kept) for name, kept in checkpoint.slots.items()])

    def can_keep(self, sequence: SequencePages, num_tokens: int, kind: str) -> bool:
        """Whether there is a budget, and no tail has dequantised rows (resuming from pages gives as much).

        Raises:
            InvalidRequest: UNKNOWN_CHECKPOINT_KIND, or no tokens. PreconditionFailed: CHECKPOINT_NOT_DENSE, a tail no
            longer holds what ``num_tokens`` needs.
        """
        _known(kind, num_tokens)
        states = [sequence.groups[name] for name in self._tailed]
        if not self.cache.budget or any(state.lossy_end for state in states):
            return False
        for state in states:
            dense = state.group.mode == "dense" or is_dense_again(num_tokens, state.base, state.window)
            if not dense or not state.rings.after(num_tokens).hold(num_tokens):
                raise PreconditionFailed(
                    f"the tail of slot {sequence.slot} in group {state.group.name!r} lacks what this length needs",
                    reason="CHECKPOINT_NOT_DENSE",
                    given=num_tokens,
                    allowed=f"base {state.base}, window {state.window}, rows written up to {state.rings.written}",
                    hint="take checkpoints as the sequence passes them",
                )
        return True


def _known(kind: str, num_tokens: int) -> CheckpointKind:
    known: CheckpointKind | None = next((k for k in CHECKPOINT_KINDS if k == kind), None)
    if known is None or num_tokens < 1:
        raise InvalidRequest(
            "no such checkpoint",
            reason="UNKNOWN_CHECKPOINT_KIND",
            given=f"{kind!r} at {num_tokens} tokens",
            allowed=f"{', '.join(CHECKPOINT_KINDS)}; 1 token or more",
        )
    return known


def _slot(checkpoint: Checkpoint) -> int:
    """Its slot in every group that has tails."""
    return next(iter(checkpoint.slots.values()))
