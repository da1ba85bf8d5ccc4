"""Where a sequence goes. Pure: values in, a choice out; no clock, no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from protos.page_hash import PAGE_TOKENS

SEQUENCE_COST_TOKENS = 64
"""What a sequence that is there costs the next one, in prompt tokens to compute. A decode row costs about one token a
step, and a step computes a few hundred prompt tokens, so the exact figure matters little: it makes idle workers win."""


@dataclass(frozen=True)
class Placement:
    """What a sequence will ask of a worker."""

    prompt_tokens: int
    max_tokens: int

    @property
    def num_pages(self) -> int:
        """Pages of one layer group at worst."""
        return -(-(self.prompt_tokens + self.max_tokens) // PAGE_TOKENS)


@dataclass(frozen=True)
class Candidate:
    """A ready worker as this router sees it: the last report, corrected by what this router did since."""

    worker: str
    num_sequences: int
    queued_tokens: int  # prompt tokens not yet computed
    pages_free: int  # may be below zero: promised by this router since the report
    pages_total: int  # 0: the worker reports no pages

    def cost_tokens(self) -> int:
        return self.queued_tokens + SEQUENCE_COST_TOKENS * self.num_sequences


def choose(
    candidates: Iterable[Candidate], placement: Placement, request_id: str, tried: Collection[str] = ()
) -> str | None:
    """The worker with the least work ahead among those with room for the pages; without room anywhere, among all.

    A tie is broken by a hash of request and worker: the same everywhere, yet many routers do not all pick one worker.

    Returns:
        Its name; None when every candidate was tried.
    """

    def rank(candidate: Candidate) -> tuple[bool, int]:
        crowded = candidate.pages_total > 0 and candidate.pages_free < placement.num_pages
        return crowded, candidate.cost_tokens()

    def draw(worker: str) -> tuple[bytes, str]:
        return hashlib.blake2b(f"{request_id}\0{worker}".encode(), digest_size=8).digest(), worker

    ranks = {candidate.worker: rank(candidate) for candidate in candidates if candidate.worker not in tried}
    if not ranks:
        return None
    least = min(ranks.values())
    tied = [worker for worker, its in ranks.items() if its == least]
    return tied[0] if len(tied) == 1 else min(tied, key=draw)


@dataclass
class OwnLoad:
    """What this router has placed on one worker and has not seen end. Counted at placement, not at the first answer."""

    num_sequences: int = 0
    queued_tokens: int = 0  # prompts whose first token has not come
    num_pages: int = 0

    def copy(self) -> OwnLoad:
        return OwnLoad(self.num_sequences, self.queued_tokens, self.num_pages)


def candidate(
    worker: str,
    *,
    reported_sequences: int,
    reported_queued_tokens: int,
    pages_free: int,
    pages_total: int,
    own: OwnLoad,
    own_at_report: OwnLoad,
) -> Candidate:
    """Combines a report with this router's own count, without counting its own sequences twice.

    What others have there = the report minus what was ours when it came; then ours as of now is added. Pages: the free
    ones of the report, minus what was promised since.
    """
    return Candidate(
        worker=worker,
        num_sequences=max(0, reported_sequences - own_at_report.num_sequences) + own.num_sequences,
        queued_tokens=max(0, reported_queued_tokens - own_at_report.queued_tokens) + own.queued_tokens,
        pages_free=pages_free - max(0, own.num_pages - own_at_report.num_pages),
        pages_total=pages_total,
    )
