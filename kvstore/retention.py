"""What must stay dense, and how far a sequence may be sealed (DESIGN.md 3.2). Pure arithmetic on token counts."""

from __future__ import annotations

from protos.page_hash import PAGE_TOKENS


def retention_floor(n: int, t: int, window: int, margin: int) -> int:
    """First token that must stay dense.

    Args:
        n: the sequence's length after this step's tokens were appended.
        t: tokens that this decode or verify step put into the tail; 1 for a prefill chunk.
        window: tokens that a query attends to densely, itself included.
        margin: tokens that a rollback may take back.

    Three terms: this step's first query stands at n - t and reaches back to n - t - (window - 1); a rollback of
    ``margin`` tokens followed by a decode reaches back as if the step had margin + 1 tokens; nothing lies before 0.
    """
    return max(0, n - (window + max(t - 1, margin)))


def sealed_base(base: int, n: int, t: int, window: int, margin: int) -> int:
    """The base after sealing: it moves by 128 while the retention floor is at least 128 tokens ahead of it."""
    ahead = retention_floor(n, t, window, margin) - base
    return base + max(0, ahead) // PAGE_TOKENS * PAGE_TOKENS


def dense_base(n: int, window: int, margin: int) -> int:
    """Where the base of a sequence of length n stands when everything was sealed in time, one token at a time."""
    return sealed_base(0, n, 1, window, margin)


def is_dense_again(n: int, base: int, window: int) -> bool:
    """Whether the window of the next token (position n) lies wholly in the tail, so that a truncate to n is exact."""
    return max(0, n - window + 1) >= base


def pages_for(num_tokens: int) -> int:
    """Pages that hold ``num_tokens`` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


def is_kept(index: int, keep_every: int, also: range) -> bool:
    """Whether page ``index`` of a sequence is kept: every ``keep_every``-th is, and those of ``also``."""
    return (index + 1) % keep_every == 0 or index in also


def kept_pages(num_pages: int, keep_every: int, also: range = range(0)) -> int:
    """How many of a sequence's pages [0, num_pages) are kept."""
    extra = sum((index + 1) % keep_every != 0 for index in also if index < num_pages)
    return num_pages // keep_every + extra


def end_pages(num_tokens: int, window: int) -> range:
    """Indices of the pages that hold the window of the token behind ``num_tokens`` tokens."""
    return range(max(0, num_tokens - window + 1) // PAGE_TOKENS, pages_for(num_tokens))


def most_end_pages(window: int) -> int:
    """The most that ``end_pages`` can be."""
    return pages_for(window) + 1
