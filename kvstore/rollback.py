"""How far a sequence can be taken back, and what every group is then. Pure: plans, and changes nothing.

All groups go back together. A group's window has to be dense again at the new length: it is in the tail still, or the
tail is refilled from pages. Pending rows cannot be computed again from pages; where a ring has lost some that the new
length needs, the sequence goes back to the last kept boundary at or below it, and the caller computes the tokens from
there again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvstore.checkpoints import Checkpoint
from kvstore.group_pages import Cut, GroupPages, cut_dense, cut_packed
from kvstore.kept_boundaries import KeptBoundaries
from kvstore.pages import PageTable
from kvstore.sequence_pages import SequencePages
from protos.errors import CapacityError, PreconditionFailed
from protos.page_hash import PAGE_TOKENS, ROOT

Chain = Callable[[Sequence[int]], Sequence[bytes]]
"""The hashes of the whole pages of a sequence's tokens."""


@dataclass(frozen=True)
class Rollback:
    """The sequence will have ``num_tokens`` tokens with rows; ``checkpoint``: its tails become the sequence's."""

    num_tokens: int
    cuts: dict[str, Cut]
    checkpoint: Checkpoint | None = None

    @property
    def refills(self) -> bool:
        return any(cut.refill is not None for cut in self.cuts.values())


def plan_rollback(
    sequence: SequencePages, num_tokens: int, length: int, head: Sequence[int], kept: KeptBoundaries, chain: Chain
) -> Rollback:
    """Takes a sequence of ``length`` tokens back to ``num_tokens``, or to the last kept boundary below.

    Args:
        head: the sequence's first ``num_tokens`` tokens.

    Raises:
        PreconditionFailed: TRUNCATE_TOO_DEEP, it cannot be taken there and no boundary is kept.
    """
    cuts: dict[str, Cut] = {}
    why: list[str] = []
    for name, state in sequence.groups.items():
        cut = cut_dense(state, num_tokens) if state.group.mode == "dense" else cut_packed(state, num_tokens)
        if isinstance(cut, str):
            why.append(cut)
            continue
        cuts[name] = cut
        pending = num_tokens and state.group.has_pending
        if pending and (cut.refill is not None or not state.rings.after(length).hold(num_tokens)):
            why.append(f"group {name!r} has rows that wait for the rest of their block, and some are gone")
    if not why:
        return Rollback(num_tokens, cuts)
    found = _kept_boundary(sequence, head, kept, chain)
    if found:
        return found
    raise PreconditionFailed(
        f"slot {sequence.slot} cannot go back that far: {why[0]}",
        reason="TRUNCATE_TOO_DEEP",
        given=num_tokens,
        allowed=f"lengths whose window is in the tail (bases {sequence.bases}), or a kept checkpoint below",
        hint="compute the sequence again from its token log, or keep checkpoints",
    )


def _kept_boundary(sequence: SequencePages, head: Sequence[int], kept: KeptBoundaries, chain: Chain) -> Rollback | None:
    """The longest checkpoint of these very tokens, and the cuts that go with it."""
    one_more = [*head, 0]
    hashes = list(chain(head))
    if len(one_more) // PAGE_TOKENS > len(hashes):
        hashes.append(bytes(len(ROOT)))
    for checkpoint in kept.cache.matches(sequence.salt, hashes, one_more):
        tails = kept.tails(checkpoint)
        cuts: dict[str, Cut] = {}
        for name, state in sequence.groups.items():
            if state.group.mode == "dense":
                cuts[name] = cut_dense(state, checkpoint.num_tokens)
            elif tails.bases[name] <= state.base:
                cut = cut_packed(state, checkpoint.num_tokens, tails.bases[name])
                if isinstance(cut, Cut):
                    cuts[name] = cut
        if len(cuts) == len(sequence.groups):
            return Rollback(checkpoint.num_tokens, cuts, checkpoint)
    return None


def demand_affordable(sequence: SequencePages, cuts: Mapping[str, Cut], tables: Mapping[str, PageTable]) -> None:
    """Makes sure that there are the pages that the cuts ask for; plans to complete one in place where no other is.

    Raises:
        CapacityError: ARENA_FULL.
    """
    for name, table in tables.items():
        state, cut = sequence.groups[name], cuts[name]
        let_go = sum(table.refs(page) == 1 for page in cut.dropped)
        promise = after_cut(state, cut).still_promised() - state.promised
        short = promise - table.num_available - let_go
        if short <= 0:
            continue
        alone = [s for s in cut.shadows.values() if not s.whole and not s.reopened and table.refs(s.page) == 1]
        if short > 1 or not alone:
            raise CapacityError(
                f"group {name!r} has no pages in place of those that are shared",
                reason="ARENA_FULL",
                given=f"{promise} pages",
                allowed=f"{table.num_available + let_go} of {table.num_pages} pages",
                hint="release or drop another sequence, then truncate again",
                retry_after_ms=100,
            )
        alone[0].reopened = True


def after_cut(state: GroupPages, cut: Cut) -> GroupPages:
    """The state that a cut leaves; its pages are not counted yet."""
    return replace(
        state,
        pages=list(cut.pages),
        base=cut.base,
        first_page=min(state.first_page, len(cut.pages)),
        shadows=cut.shadows,
        handed={},
    )
