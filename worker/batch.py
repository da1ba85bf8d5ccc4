"""One step's work as the model sees it: rows, the tiles they are computed in, the pages that spans read and write.

A batch is passed, never fetched. ``build_batch`` is pure: it takes the plan and returns tensors.

Deterministic mode (DESIGN.md 3.5) fixes shapes. A matrix product gives a row the same bits whatever its position in the
tile and whatever the other rows hold, but not when the number of rows differs. So every row is computed in a tile whose
size follows from the sequence alone: decode rows in tiles of 8; prompt rows in spans of 128 on a grid from the
prompt's start, the last span in the smallest tile that holds it. Rows of several sequences share tiles of a size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from protos.page_hash import PAGE_TOKENS

GRID_TOKENS = 128
"""Deterministic mode computes prompt positions in spans [128 k, 128 k + 128); equal to a page, so that a whole page is
always computed in one shape."""

TILE_ROWS = (8, 16, 32, 64, 128)
"""Tile sizes of deterministic mode. Never one row: a product of one row runs another code path of the BLAS."""

DECODE_TILE = TILE_ROWS[0]

_ROW_MULTIPLE = 4  # other mode: 2 or 3 rows cost more than 4 in MKL's sgemm, 6 more than 8


@dataclass(frozen=True)
class SpanWork:
    """``count`` tokens of one sequence from position ``start`` on, to be computed now.

    ``pages`` is the sequence's page table (page ids in token order) and has room for start + count tokens.
    ``is_prompt`` tells prompt positions from emitted ones; ``wants_logits`` asks for those behind the last token.
    """

    token_ids: Sequence[int]
    start: int
    pages: Sequence[int]
    is_prompt: bool
    wants_logits: bool

    @property
    def count(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Span:
    """Rows [first_row, first_row + num_rows) are tokens [start, start + num_rows) of one sequence.

    ``full_pages`` [P] int64 are its pages wholly below ``start``; ``last_page`` holds rows [0, last_rows) below start.
    For a decode row (num_rows 1) ``last_rows`` includes the row itself, and a page that it fills counts as last.
    """

    first_row: int
    num_rows: int
    start: int
    full_pages: torch.Tensor
    last_page: int
    last_rows: int


@dataclass(frozen=True)
class Batch:
    """Tensors of one step over R rows, padding included; W rows are real, S ask for logits.

    Attributes:
        token_ids: [R] int64; 0 in padding rows.
        positions: [R] int64; 0 in padding rows.
        tiles: row ranges (first, end) that cover [0, R); every product over rows runs once per tile.
        spans: disjoint, in row order; padding rows are in none.
        write_rows: [W] int64, or None when no row is padding.
        write_pages, write_slots: [W] int64, where each real row's KV goes: page id and row in the page.
        logit_rows: [S] int64, padded like decode rows; only the first ``num_logits`` count.
        logit_tiles: as ``tiles``, over ``logit_rows``.
        deterministic: a row's bits must not depend on R either.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    tiles: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...]
    write_rows: torch.Tensor | None
    write_pages: torch.Tensor
    write_slots: torch.Tensor
    logit_rows: torch.Tensor
    logit_tiles: tuple[tuple[int, int], ...]
    num_logits: int
    deterministic: bool = False


def build_batch(work: Sequence[SpanWork], *, deterministic: bool) -> Batch:
    """Lays the spans out in rows. Logits come in the order of the spans in ``work`` that want them."""
    pieces = _on_grid(work) if deterministic else [(i, w) for i, w in enumerate(work)]
    if deterministic:  # rows of one tile size side by side; the sort is stable
        pieces.sort(key=lambda piece: tile_rows(piece[1].count))
    token_ids: list[int] = []
    positions: list[int] = []
    pages: list[int] = []
    slots: list[int] = []
    real: list[int] = []
    spans: list[Span] = []
    tiles: list[tuple[int, int]] = []
    last_row: dict[int, int] = {}
    for at, (index, piece) in enumerate(pieces):
        first, count = len(token_ids), piece.count
        token_ids += piece.token_ids
        positions += range(piece.start, piece.start + count)
        pages += [piece.pages[p // PAGE_TOKENS] for p in range(piece.start, piece.start + count)]
        slots += [p % PAGE_TOKENS for p in range(piece.start, piece.start + count)]
        real += range(first, first + count)
        spans.append(_span(first, piece))
        if piece.start + count == work[index].start + work[index].count:  # the pieces are sorted by tile size
            last_row[index] = first + count - 1
        if deterministic and (at + 1 == len(pieces) or tile_rows(pieces[at + 1][1].count) != tile_rows(count)):
            tiles += _close_tiles(token_ids, positions, tiles[-1][1] if tiles else 0, tile_rows(count))
    if not deterministic:
        padding = -len(token_ids) % _ROW_MULTIPLE if len(token_ids) > 1 else 0
        token_ids += [0] * padding
        positions += [0] * padding
        tiles = [(0, len(token_ids))]
    logit_rows = [last_row[i] for i, w in enumerate(work) if w.wants_logits]
    num_logits = len(logit_rows)
    if deterministic:
        logit_rows += [0] * (-num_logits % DECODE_TILE)
        logit_tiles = tuple((a, a + DECODE_TILE) for a in range(0, len(logit_rows), DECODE_TILE))
    else:
        logit_rows += [0] * (-num_logits % _ROW_MULTIPLE if num_logits > 1 else 0)
        logit_tiles = ((0, len(logit_rows)),) if logit_rows else ()
    return Batch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        tiles=tuple(tiles),
        spans=tuple(spans),
        write_rows=None if len(real) == len(token_ids) else torch.tensor(real),
        write_pages=torch.tensor(pages),
        write_slots=torch.tensor(slots),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        logit_tiles=logit_tiles,
        num_logits=num_logits,
        deterministic=deterministic,
    )


def tile_rows(count: int) -> int:
    """The tile size of deterministic mode for a span of ``count`` rows, 1 to 128."""
    return next(rows for rows in TILE_ROWS if rows >= count)


def _on_grid(work: Sequence[SpanWork]) -> list[tuple[int, SpanWork]]:
    """Cuts prompt spans at multiples of 128 and emitted tokens into single rows: shapes that no scheduling changes."""
    pieces = []
    for index, span in enumerate(work):
        assert not span.is_prompt or span.start % GRID_TOKENS == 0, "a prompt span starts off the grid"
        step = GRID_TOKENS if span.is_prompt else 1
        for offset in range(0, span.count, step):
            token_ids = span.token_ids[offset : offset + step]
            pieces.append((index, SpanWork(token_ids, span.start + offset, span.pages, span.is_prompt, False)))
    return pieces


def _close_tiles(token_ids: list[int], positions: list[int], first: int, rows: int) -> list[tuple[int, int]]:
    """Pads the rows from ``first`` on to whole tiles of ``rows`` and returns those."""
    padding = (first - len(token_ids)) % rows
    token_ids += [0] * padding
    positions += [0] * padding
    return [(a, a + rows) for a in range(first, len(token_ids), rows)]


def _span(first_row: int, piece: SpanWork) -> Span:
    # A decode row reads itself from its page; a prefill span reads its own rows from the step's workspace.
    visible = piece.start + 1 if piece.count == 1 else piece.start
    num_full = max(0, visible - 1) // PAGE_TOKENS
    last_rows = visible - num_full * PAGE_TOKENS
    return Span(
        first_row=first_row,
        num_rows=piece.count,
        start=piece.start,
        full_pages=torch.tensor(piece.pages[:num_full], dtype=torch.int64),
        last_page=piece.pages[num_full] if last_rows else -1,
        last_rows=last_rows,
    )
