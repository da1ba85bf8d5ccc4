"""What the store answers a worker, as values. Token counts are absolute; page ids are indices into a group's arena.

The worker does what an answer asks for (copies, then refills) before its next call: sources may be reused after that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Refill:
    """Dequantise tokens [first_token, first_token + num_tokens) out of ``page_ids`` into a tail ring. Lossy.

    ``first_token`` is a multiple of 128 and the first token of ``page_ids[0]``; the last page may be used in part.
    """

    group: str
    tail_slot: int
    first_token: int
    num_tokens: int
    page_ids: list[int]


@dataclass(frozen=True)
class TailCopy:
    """All bytes of a tail slot."""

    group: str
    from_slot: int
    to_slot: int


@dataclass(frozen=True)
class PageCopy:
    """Rows of the first ``num_tokens`` tokens go from ``from_page`` to ``to_page``. The worker copies, before it
    writes.
    """

    group: str
    from_page: int
    to_page: int
    num_tokens: int


@dataclass(frozen=True)
class Relinked:
    """The page holds exactly these rows already: pack nothing."""


@dataclass(frozen=True)
class Split:
    """Copy the records of the first ``num_tokens`` tokens out of ``from_page``, and pack the rest.

    ``from_page`` may be the page itself: then those records are in place.
    """

    from_page: int
    num_tokens: int


@dataclass(frozen=True)
class NewPage:
    """Page ``index`` of a sequence, tokens [128 index, 128 (index + 1)). ``source`` None: fresh, pack all of it."""

    index: int
    page_id: int
    source: Relinked | Split | None = None


@dataclass(frozen=True)
class Admitted:
    """``slot`` is the sequence's id until it is released.

    ``num_cached`` tokens need no computing: their rows are in ``pages`` (per group, in token order, shared and read
    only but for an open one behind ``bases``; -1 where a page behind the model's window is not held) and in the tail,
    once ``copies``, ``tail_copies`` and then ``refills`` are done. ``prefix_exact`` is False when some of those rows
    are not what the sequence would have computed by itself. ``tail_slots`` names the groups that have a tail.
    ``junction``: a length at which a checkpoint would serve others, as this boundary was met before; 0: none.
    """

    slot: int
    tail_slots: Mapping[str, int] = field(default_factory=dict)
    num_cached: int = 0
    prefix_exact: bool = True
    pages: Mapping[str, list[int]] = field(default_factory=dict)
    bases: Mapping[str, int] = field(default_factory=dict)
    refills: list[Refill] = field(default_factory=list)
    tail_copies: list[TailCopy] = field(default_factory=list)
    junction: int = 0
    copies: list[PageCopy] = field(default_factory=list)


@dataclass(frozen=True)
class Adopted:
    """A sequence that outlived its worker, or its store. Tokens [0, num_committed) need no computing; those behind them
    are logged, and were perhaps sent.

    ``num_prompt_tokens``: as opened; of a sequence that was computed again, tokens it had emitted are among them.
    ``token_ids``: all that are logged. ``num_cached``: of the committed tokens, those that a prefix match gave.
    ``prefix_exact`` is False when some rows are not what the sequence would have computed by itself. ``pages``,
    ``bases`` and ``tail_slots`` as in ``Admitted``: of packed groups, sealed pages only.

    ``intact`` False: rows below ``num_committed`` are missing, because a copy, a refill or a fill of its tail was cut
    off, or a page of it is not what was sealed. Nothing can be gone on with: release it and open it again.

    A worker that died while it replaced a sequence by a larger fork of itself leaves two slots of one request.
    """

    slot: int
    request_id: str
    tenant_salt: str
    num_prompt_tokens: int
    token_ids: list[int]
    num_committed: int
    max_tokens: int
    frozen_request: bytes
    pages: Mapping[str, list[int]]
    bases: Mapping[str, int]
    tail_slots: Mapping[str, int]
    prefix_exact: bool
    num_cached: int
    intact: bool


@dataclass(frozen=True)
class Refused:
    """No room now. ``short_group`` is the layer group without enough pages; empty: no slot is free.

    ``pages_free`` counts pages that are neither held nor promised, cached ones included. A sequence with
    ``pages_needed > pages_total`` can never be admitted.
    """

    short_group: str
    pages_needed: int
    pages_free: int
    pages_total: int


@dataclass(frozen=True)
class SealResult:
    """``bases``: slot -> group -> base, of the slots asked. ``first_pages``: index of the first page still held, where
    pages behind the model's window were freed.
    """

    pages_sealed: int
    bases: Mapping[int, Mapping[str, int]]
    first_pages: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Truncated:
    """The sequence has ``num_tokens`` tokens with rows; copies first, then tail copies, then refills.

    ``exact``: every row that attention will read densely is what it was. ``num_tokens`` is below what was asked where a
    group with pending rows had to go back to a kept boundary: compute the tokens from there again (they stay logged).
    """

    num_tokens: int
    copies: list[PageCopy]
    refills: list[Refill]
    exact: bool
    bases: Mapping[str, int]
    tail_copies: list[TailCopy] = field(default_factory=list)


@dataclass(frozen=True)
class Checkpointed:
    """Copies to make for a checkpoint: rows of open pages, and tails. None: no checkpoint is taken."""

    copies: list[PageCopy] = field(default_factory=list)
    tail_copies: list[TailCopy] = field(default_factory=list)


@dataclass(frozen=True)
class Forked:
    """A new sequence that shares sealed pages with its parent. Its open pages and tails are copies."""

    slot: int
    pages: Mapping[str, list[int]]
    bases: Mapping[str, int]
    copies: list[PageCopy]
    tail_copies: list[TailCopy]
    tail_slots: Mapping[str, int]
