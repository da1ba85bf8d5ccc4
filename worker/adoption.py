"""Sequences that an earlier life of this worker left behind, and how the engine goes on with each.

    0 .................. committed ............ logged
    [ rows are in memory ][ tokens are known   ]
                          computed again as they are: prompt as prefill, what was emitted by decode steps, as they were
                          the first time; behind the last of them the next token is drawn

Nothing below ``committed`` is computed again. What cannot be gone on with (a worker died before it had copied what is
cached of the prompt, or while it filled the rings that hold the newest rows) is computed again from its tokens, like
what was dropped for want of pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import structlog

from kvstore.client import Adopted
from protos import types_pb2
from protos.errors import InvalidRequest
from worker.sequence import Request, Sequence, validate

log = structlog.get_logger("engine")


@dataclass
class Adoption:
    """What becomes of adopted slots.

    Attributes:
        going_on: sequences at their committed length, the longest first, with what the store holds of them.
        again: sequences to compute again from their tokens; what they held is among ``released``.
        released: slots to give back.
        num_lost_tokens: that were committed and are computed again all the same.
    """

    going_on: list[tuple[Sequence, Adopted]] = field(default_factory=list)
    again: list[Sequence] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    num_lost_tokens: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        return [*(sequence for sequence, _ in self.going_on), *self.again]


def plan_adoption(
    found: Iterable[Adopted], model: types_pb2.ModelInfo, *, now_ns: int, not_of: str, most: int
) -> Adoption:
    """Decides about every adopted slot. Pure.

    Args:
        not_of: a request id whose sequence nobody waits for.
        most: sequences that may go on at once.
    """
    adoption = Adoption()
    # Two of one id: the worker died while a sequence that grew moved from one slot to the other.
    by_id: dict[str, list[Adopted]] = {}
    for held in found:
        by_id.setdefault(held.request_id, []).append(held)
    for request_id, slots in by_id.items():
        best = max(slots, key=_progress)
        adoption.released += [held.slot for held in slots if held is not best]
        sequence = None if request_id == not_of else _sequence(best, model, now_ns)
        if sequence is None:
            adoption.released.append(best.slot)
        elif best.intact and (best.num_committed or not any(best.bases.values())):
            adoption.going_on.append((sequence, best))
        else:
            _compute_again(adoption, sequence, best)
    adoption.going_on.sort(key=lambda pair: -pair[0].num_computed)
    for sequence, held in adoption.going_on[most:]:
        _compute_again(adoption, sequence, held)
    del adoption.going_on[most:]
    return adoption


def _progress(held: Adopted) -> tuple[bool, int, int, int]:
    return held.intact, held.num_committed, len(held.token_ids), held.max_tokens


def _sequence(held: Adopted, model: types_pb2.ModelInfo, now_ns: int) -> Sequence | None:
    """The sequence at its committed length; None where its request is none of ours, or not this model's."""
    owner = f"adopted#{held.slot}"  # no session's owner, nor a resumable sequence's
    try:
        request = Request.thawed(held.frozen_request, held.token_ids, owner)
        validate(request, model)
        if (request.request_id, request.tenant) != (held.request_id, held.tenant_salt):
            raise InvalidRequest("it is of another request", reason="BAD_FROZEN_REQUEST", given=request.request_id)
    except InvalidRequest as malformed:
        log.warning("an adopted sequence is given up", request_id=held.request_id, slot=held.slot, why=str(malformed))
        return None
    longest = min(len(request.prompt) + request.stop.max_tokens, model.max_sequence_tokens)
    return Sequence(
        request,
        longest,
        now_ns,
        token_ids=list(held.token_ids),
        num_computed=held.num_committed,
        num_cached=held.num_cached,
        prefix_exact=held.prefix_exact,
        adopted=True,
    )


def _compute_again(adoption: Adoption, sequence: Sequence, held: Adopted) -> None:
    if held.num_committed:
        log.warning(
            "an adopted sequence is computed again",
            request_id=held.request_id,
            num_committed=held.num_committed,
            num_logged=len(held.token_ids),
        )
    adoption.num_lost_tokens += held.num_committed
    adoption.released.append(held.slot)
    adoption.again.append(sequence)
    sequence.num_computed = 0
    # What went out stays as exact as it was; what never began is opened as if for the first time.
    sequence.num_dropped = int(sequence.num_emitted > 0)
