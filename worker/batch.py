"""One step's work as the model sees it: rows, the tiles they are computed in, the KV that spans read and write.

A batch is passed, never fetched. ``build_batch`` is pure: it takes the plan and returns tensors.

Deterministic mode (DESIGN.md 3.5) fixes shapes. A matrix product gives a row the same bits whatever its position in the
tile and whatever the other rows hold, but not when the number of rows differs. So every row is computed in a tile whose
size follows from the sequence alone: decode rows in tiles of 8; prompt rows in spans of 128 on a grid from the
prompt's start, the last span in the smallest tile that holds it. Rows of several sequences share tiles of a size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from kernels.decode_batch import Batch as DecodeBatch
from kvstore.geometry import CacheGeometry, LayerGroup
from protos.errors import InternalError
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

    ``pages`` is the sequence's page table by layer group (page ids in token order); in dense groups it has room for
    start + count tokens, in packed ones it covers ``bases[group]`` tokens. ``tail_slots`` names the groups with a tail.
    ``is_prompt`` tells prompt positions from emitted ones; ``wants_logits`` asks for those behind the last token. The
    last ``num_drafts`` tokens are guesses: all tokens run as decode rows then, and each one's logits are wanted.
    """

    token_ids: Sequence[int]
    start: int
    pages: Mapping[str, Sequence[int]]
    is_prompt: bool
    wants_logits: bool
    bases: Mapping[str, int] = field(default_factory=dict)
    tail_slots: Mapping[str, int] = field(default_factory=dict)
    num_drafts: int = 0

    @property
    def count(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True)
class Span:
    """Rows [first_row, first_row + num_rows) are tokens [start, start + num_rows) of one sequence.

    ``workspace_row``: where its rows lie in the step's workspace; -1 for a decode row, which goes into the tail.
    """

    first_row: int
    num_rows: int
    start: int
    workspace_row: int = -1


@dataclass(frozen=True)
class Place:
    """Where one sequence's rows of one layer group are.

    Tokens [0, base) are in ``page_ids`` [>= base / 128] int64, packed; the rest in ring ``tail_slot``. In dense groups
    every token is in its page (and pending rows, which have none, in the ring), and ``full_pages`` and ``last_page``
    split the table for the flash path: pages wholly below the span, and the page that holds rows [0, last_rows) below
    it. There a decode row (num_rows 1) counts itself, and a page that it fills counts as last.
    """

    page_ids: torch.Tensor
    base: int = 0
    tail_slot: int = -1
    full_pages: torch.Tensor | None = None
    last_page: int = -1
    last_rows: int = 0
    on_device: torch.Tensor | None = None
    """``page_ids`` of a prompt's span on the GPU."""


@dataclass(frozen=True)
class DecodeRows:
    """A step's decode rows (spans of one token) in one layer group, as a GPU's kernels read them: B sequences.

    Attributes:
        rows: [B] int64, their rows in the batch.
        step: where their KV is; one for all layers of the group, which check it once. num_tokens counts the row's own
            token, and in dense groups, which have no tail, all tokens are in pages.
    """

    rows: torch.Tensor
    step: DecodeBatch


@dataclass(frozen=True)
class PageWrites:
    """Rows that go to dense pages as they are computed.

    Attributes:
        rows: [W] int64, which of the batch; None: every row.
        pages, at: [W] int64, page id and row in the page.
    """

    rows: torch.Tensor | None
    pages: torch.Tensor
    at: torch.Tensor

    def to(self, device: torch.device) -> PageWrites:
        rows = None if self.rows is None else _sent(self.rows, device)
        return PageWrites(rows, _sent(self.pages, device), _sent(self.at, device))


@dataclass(frozen=True)
class TailWrites:
    """Decode rows, which go to tail rings as they are computed.

    Attributes:
        rows: [W] int64, which of the batch. slots, positions: [W] int64, tail slot and position of the token.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    _at: dict[int, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def at(self, ring_rows: int) -> torch.Tensor:
        """[W] int64, where a ring of so many rows, one a token, takes them: computed once a step and depth."""
        if ring_rows not in self._at:
            self._at[ring_rows] = self.positions % ring_rows
        return self._at[ring_rows]

    def to(self, device: torch.device) -> TailWrites:
        return TailWrites(_sent(self.rows, device), _sent(self.slots, device), _sent(self.positions, device))


@dataclass(frozen=True)
class GroupBatch:
    """What a step writes in one layer group, and where its spans' rows are.

    Attributes:
        places: one a span, in the order of ``Batch.spans``.
        pages: groups with a row a token in dense pages; None in others.
        tails: groups with a tail; None in others. A prefill span's rows wait in the workspace.
    """

    places: tuple[Place, ...]
    pages: PageWrites | None = None
    tails: TailWrites | None = None
    decode: DecodeRows | None = None  # on a GPU only: there a step's decode rows are attended in one call


@dataclass(frozen=True)
class Batch:
    """Tensors of one step over R rows, padding included; S of them ask for logits.

    Attributes:
        token_ids: [R] int64; 0 in padding rows.
        positions: [R] int64; 0 in padding rows.
        tiles: row ranges (first, end) that cover [0, R); every product over rows runs once per tile.
        spans: disjoint, in row order; padding rows are in none.
        padded: whether any row is padding.
        groups: by layer group.
        workspace_rows: [P] int64, rows of prefill spans, in row order.
        workspace_of_work: of each work, where its first row lies among those; -1: it is a decode row.
        first_row_of_work: of each work, where its first row lies in the batch.
        logit_rows: [S] int64, padded like decode rows; only the first ``num_logits`` count.
        logit_tiles: as ``tiles``, over ``logit_rows``.
        deterministic: a row's bits must not depend on R either.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    tiles: tuple[tuple[int, int], ...]
    spans: tuple[Span, ...]
    padded: bool
    groups: Mapping[str, GroupBatch]
    workspace_rows: torch.Tensor
    workspace_of_work: tuple[int, ...]
    first_row_of_work: tuple[int, ...]
    logit_rows: torch.Tensor
    logit_tiles: tuple[tuple[int, int], ...]
    num_logits: int
    deterministic: bool = False

    def to(self, device: torch.device) -> Batch:
        """The same step with its tensors on a GPU, and each group's decode rows gathered for one call. Does not wait
        for what the GPU has to do before.
        """
        groups = {
            name: replace(
                group,
                places=tuple(
                    replace(place, on_device=_sent(place.page_ids, device)) if span.num_rows > 1 else place
                    for span, place in zip(self.spans, group.places, strict=True)
                ),
                pages=None if group.pages is None else group.pages.to(device),
                tails=None if group.tails is None else group.tails.to(device),
                decode=_decode_rows(self.spans, group.places, device),
            )
            for name, group in self.groups.items()
        }
        return replace(
            self,
            token_ids=_sent(self.token_ids, device),
            positions=_sent(self.positions, device),
            workspace_rows=_sent(self.workspace_rows, device),
            logit_rows=_sent(self.logit_rows, device),
            groups=groups,
        )


def _sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; of a GPU's, nobody waits for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _decode_rows(spans: Sequence[Span], places: Sequence[Place], device: torch.device) -> DecodeRows | None:
    """One copy to the device carries all of them; None where the step has no decode rows."""
    decode = [(span, place) for span, place in zip(spans, places, strict=True) if span.num_rows == 1]
    if not decode:
        return None
    width = max(1, *(len(place.page_ids) for _, place in decode))
    table = np.full((len(decode), width + 4), -1, dtype=np.int32)
    for at, (span, place) in enumerate(decode):
        table[at, : len(place.page_ids)] = place.page_ids.numpy()
        in_pages = span.start + 1 if place.full_pages is not None else place.base  # dense groups have no tail
        table[at, width:] = (span.first_row, in_pages, span.start + 1, place.tail_slot)
    on_device = _sent(torch.from_numpy(table), device)
    rows, bases, num_tokens, tail_slots = on_device[:, width:].t().contiguous()
    has_tail = decode[0][1].tail_slot >= 0
    step = DecodeBatch(on_device[:, :width].contiguous(), bases, num_tokens, tail_slots if has_tail else None)
    return DecodeRows(rows.long(), step)


def build_batch(work: Sequence[SpanWork], geometry: CacheGeometry, *, deterministic: bool) -> Batch:
    """Lays the spans out in rows. Logits come in the order of the spans in ``work`` that want them: one row of a span,
    of one with drafts a row a token.

    Raises:
        InternalError: a work falls into two spans of the grid, and a group has a tail.
    """
    pieces = _on_grid(work) if deterministic else _drafts_apart(work)
    if deterministic:  # rows of one tile size side by side; the sort is stable
        pieces.sort(key=lambda piece: tile_rows(piece[1].count))
    token_ids: list[int] = []
    positions: list[int] = []
    real: list[int] = []
    workspace_rows: list[int] = []
    spans: list[Span] = []
    tiles: list[tuple[int, int]] = []
    wanted_rows: dict[int, list[int]] = {index: [] for index in range(len(work))}
    workspace_of_work: dict[int, int] = {}
    first_row_of_work: dict[int, int] = {}
    for at, (index, piece) in enumerate(pieces):
        first, count = len(token_ids), piece.count
        token_ids += piece.token_ids
        positions += range(piece.start, piece.start + count)
        real += range(first, first + count)
        spans.append(Span(first, count, piece.start, len(workspace_rows) if count > 1 else -1))
        workspace_of_work.setdefault(index, spans[-1].workspace_row)
        first_row_of_work.setdefault(index, first)
        if count > 1:
            workspace_rows += range(first, first + count)
        is_last = piece.start + count == work[index].start + work[index].count  # the pieces are sorted by tile size
        if work[index].wants_logits and (is_last or work[index].num_drafts):
            wanted_rows[index].append(first + count - 1)
        if deterministic and (at + 1 == len(pieces) or tile_rows(pieces[at + 1][1].count) != tile_rows(count)):
            tiles += _close_tiles(token_ids, positions, tiles[-1][1] if tiles else 0, tile_rows(count))
    if not deterministic:
        padding = -len(token_ids) % _ROW_MULTIPLE if len(token_ids) > 1 else 0
        token_ids += [0] * padding
        positions += [0] * padding
        tiles = [(0, len(token_ids))]
    logit_rows = [row for rows in wanted_rows.values() for row in rows]
    num_logits = len(logit_rows)
    if deterministic:
        logit_rows += [0] * (-num_logits % DECODE_TILE)
        logit_tiles = tuple((a, a + DECODE_TILE) for a in range(0, len(logit_rows), DECODE_TILE))
    else:
        logit_rows += [0] * (-num_logits % _ROW_MULTIPLE if num_logits > 1 else 0)
        logit_tiles = ((0, len(logit_rows)),) if logit_rows else ()
    padded = len(real) != len(token_ids)
    every_row = torch.tensor(real) if padded else None
    located = [(span, piece) for span, (_, piece) in zip(spans, pieces, strict=True)]
    return Batch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        tiles=tuple(tiles),
        spans=tuple(spans),
        padded=padded,
        groups={
            group.name: _dense_group(group, every_row, located)
            if group.mode == "dense"
            else GroupBatch(_ring_places(group, located), tails=_tail_writes(group, located))
            for group in geometry.groups
        },
        workspace_rows=torch.tensor(workspace_rows, dtype=torch.int64),
        workspace_of_work=tuple(workspace_of_work[index] for index in range(len(work))),
        first_row_of_work=tuple(first_row_of_work[index] for index in range(len(work))),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64),
        logit_tiles=logit_tiles,
        num_logits=num_logits,
        deterministic=deterministic,
    )


def rows_alone(token_ids: Sequence[int], positions: Sequence[int]) -> Batch:
    """One decode row a sequence, all of whose logits are wanted, apart from any layer group."""
    num_rows = len(token_ids)
    tiles = ((0, num_rows),)
    return Batch(
        token_ids=torch.tensor(token_ids),
        positions=torch.tensor(positions),
        tiles=tiles,
        spans=tuple(Span(row, 1, position) for row, position in enumerate(positions)),
        padded=False,
        groups={},
        workspace_rows=torch.empty(0, dtype=torch.int64),
        workspace_of_work=(-1,) * num_rows,
        first_row_of_work=tuple(range(num_rows)),
        logit_rows=torch.arange(num_rows),
        logit_tiles=tiles,
        num_logits=num_rows,
    )


def _dense_group(
    group: LayerGroup, every_row: torch.Tensor | None, located: Sequence[tuple[Span, SpanWork]]
) -> GroupBatch:
    """Every real row goes to its page; in groups with pending rows, which have no place there, those to the tail."""
    places, pages, rows = [], [], []
    for span, piece in located:
        table = piece.pages[group.name]
        end = span.start + span.num_rows
        pages += [table[p // PAGE_TOKENS] for p in range(span.start, end)]
        rows += [p % PAGE_TOKENS for p in range(span.start, end)]
        # A decode row reads itself from its page; a prefill span reads its own rows from the step's workspace.
        visible = span.start + 1 if span.num_rows == 1 else span.start
        num_full = max(0, visible - 1) // PAGE_TOKENS
        last_rows = visible - num_full * PAGE_TOKENS
        places.append(
            Place(
                page_ids=torch.tensor(table, dtype=torch.int64),
                tail_slot=piece.tail_slots.get(group.name, -1),
                full_pages=torch.tensor(table[:num_full], dtype=torch.int64),
                last_page=table[num_full] if last_rows else -1,
                last_rows=last_rows,
            )
        )
    writes = PageWrites(every_row, torch.tensor(pages), torch.tensor(rows))
    return GroupBatch(tuple(places), writes, _tail_writes(group, located) if group.has_tail else None)


def _ring_places(group: LayerGroup, located: Sequence[tuple[Span, SpanWork]]) -> tuple[Place, ...]:
    places = []
    for span, piece in located:
        table, base = piece.pages.get(group.name, ()), piece.bases.get(group.name, 0)
        _demand_held(group, span, table, base)
        places.append(Place(torch.tensor(table, dtype=torch.int64), base, piece.tail_slots[group.name]))
    return tuple(places)


def _tail_writes(group: LayerGroup, located: Sequence[tuple[Span, SpanWork]]) -> TailWrites:
    """Of decode rows."""
    decode, slots, positions = [], [], []
    chunks, together = set(), set()
    for span, piece in located:
        slot = piece.tail_slots[group.name]
        # A chunk's rows reach the ring after the step, so nothing else of its sequence may run beside it; decode rows
        # of one sequence may: each is in the ring before the next is attended.
        if slot in chunks or (span.num_rows > 1 and slot in together):
            raise InternalError(
                f"two spans of one sequence in a step, in layer group {group.name!r} with a tail",
                given=f"tail slot {slot} twice, {span.num_rows} rows at {span.start}",
                allowed="each once, but for single rows",
            )
        together.add(slot)
        if span.num_rows == 1:
            decode.append(span.first_row)
            slots.append(slot)
            positions.append(span.start)
        else:
            chunks.add(slot)
    rows, to, at = (torch.tensor(values, dtype=torch.int64) for values in (decode, slots, positions))
    return TailWrites(rows, to, at)


def _demand_held(group: LayerGroup, span: Span, table: Sequence[int], base: int) -> None:
    """No page that the span reads was freed: a kernel on a GPU would read whatever lies before the arena."""
    if not group.retained_window:
        return
    first = max(0, span.start - group.retained_window + 1) // PAGE_TOKENS
    if -1 in table[first : base // PAGE_TOKENS]:
        raise InternalError(
            f"a page inside the window of layer group {group.name!r} was freed",
            given=f"pages {list(table[first : base // PAGE_TOKENS])} from page {first} on",
            allowed="pages that the sequence holds",
        )


def tile_rows(count: int) -> int:
    """The tile size of deterministic mode for a span of ``count`` rows, 1 to 128."""
    return next(rows for rows in TILE_ROWS if rows >= count)


def _drafts_apart(work: Sequence[SpanWork]) -> list[tuple[int, SpanWork]]:
    """Works with drafts in single rows, so that each guess is checked by the very computation that it stands for."""
    pieces = []
    for index, span in enumerate(work):
        if not span.num_drafts:
            pieces.append((index, span))
            continue
        pieces += [
            (index, replace(span, token_ids=span.token_ids[at : at + 1], start=span.start + at, num_drafts=0))
            for at in range(span.count)
        ]
    return pieces


def _on_grid(work: Sequence[SpanWork]) -> list[tuple[int, SpanWork]]:
    """Cuts prompt spans at multiples of 128 and emitted tokens into single rows: shapes that no scheduling changes.

    A prompt span that starts off the grid, behind a prefix that was there already, first goes on to the grid.
    """
    pieces = []
    for index, span in enumerate(work):
        offset = 0
        while offset < span.count:
            step = GRID_TOKENS - (span.start + offset) % GRID_TOKENS if span.is_prompt else 1
            token_ids = span.token_ids[offset : offset + step]
            pieces.append((index, replace(span, token_ids=token_ids, start=span.start + offset, wants_logits=False)))
            offset += len(token_ids)
    return pieces


def _close_tiles(token_ids: list[int], positions: list[int], first: int, rows: int) -> list[tuple[int, int]]:
    """Pads the rows from ``first`` on to whole tiles of ``rows`` and returns those."""
    padding = (first - len(token_ids)) % rows
    token_ids += [0] * padding
    positions += [0] * padding
    return [(a, a + rows) for a in range(first, len(token_ids), rows)]
