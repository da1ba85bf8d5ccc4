"""Torch views of the mapped KV memory, by layer group and region: pages, tail rings, and what reads them.

Dense groups keep their rows in pages as computed. Packed groups keep tokens [0, base) in pages, as records, and the
rest in the tail, a ring a region. Groups in mode window keep the tail alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kernels.attention import PackedRegion
from kernels.page_codec import PackedRows, arena_planes, row_codec, unpack_pages
from kvstore.client import Arena
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from protos.errors import ConfigError, PreconditionFailed
from protos.page_hash import PAGE_TOKENS
from worker.batch import Batch, DecodeRows, GroupBatch, Place
from worker.device_memory import DeviceArena, Driver
from worker.gpu import memory_of

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
REASONS = ("attention", "rollback", "resume")


@dataclass
class KvCounters:
    """What happened to rows since the start. A row counts once a region, all its heads together.

    ``rows_dequantised``: packed rows that were read, by reason: "attention", "rollback" (a tail refilled after a deep
    truncate), "resume" (a tail refilled from a cached prefix).
    """

    pages_packed: int = 0
    pages_relinked: int = 0
    rows_dequantised: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    append_ns: int = 0
    seal_ns: int = 0


@dataclass(frozen=True)
class RegionView:
    """One region in every page and every tail slot.

    Attributes:
        pages: dense groups: [num_pages, rows_per_page, heads, dim] in the region's dtype.
        packed: packed groups: planes and codec.
        tail: groups with a tail: [num_slots, ring rows, heads, dim]; row i = t // ratio of token t is at i % ring rows.
    """

    region: Region
    group: LayerGroup
    dtype: torch.dtype
    pages: torch.Tensor | None
    packed: PackedRegion | None
    tail: torch.Tensor | None

    def ring(self, slot: int, first_row: int, num_rows: int) -> list[torch.Tensor]:
        """Rows [first_row, first_row + num_rows) of a tail ring as one view, or two where the ring wraps."""
        assert self.tail is not None
        size = self.tail.shape[1]
        at = first_row % size
        before_wrap = min(num_rows, size - at)
        views = [self.tail[slot, at : at + before_wrap]]
        if before_wrap < num_rows:
            views.append(self.tail[slot, : num_rows - before_wrap])
        return views


class Places(NamedTuple):
    """Where the rows of B sequences of one layer group are, on the memory's device.

    Attributes:
        table: [B, P] int64, page ids in token order; another page's behind the last of a sequence.
        slots: [B] int64, tail slots; None in groups without a tail.
    """

    table: torch.Tensor
    slots: torch.Tensor | None

    @staticmethod
    def of(decode: DecodeRows) -> Places:
        slots = decode.step.tail_slots
        return Places(decode.step.page_table.long().clamp(min=0), None if slots is None else slots.long())


class KvView:
    """The arenas of one attachment as tensors, in host memory or on the GPU that they are of. They hold the mapping:
    drop the view before the attachment is closed.

    Args:
        driver: of the GPU's memory; None: CUDA's.

    Raises:
        ConfigError: an arena does not have the geometry's sizes; or its GPU is not visible here (NO_SUCH_GPU).
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        arenas: Mapping[str, Arena],
        tails: Mapping[str, Arena],
        driver: Driver | None = None,
    ) -> None:
        self.geometry = geometry
        self.counters = KvCounters()
        self.regions: dict[tuple[int, str], RegionView] = {}
        self.by_group: dict[str, list[RegionView]] = {group.name: [] for group in geometry.groups}
        self._pages: dict[str, torch.Tensor] = {}
        self._tail_slots: dict[str, torch.Tensor] = {}
        devices = [arena.device for arena in (*arenas.values(), *tails.values()) if arena.chunks is not None]
        driver = self._driver = (driver or memory_of(devices[0])) if devices else None
        for group in geometry.groups:
            pages = tail = None
            if group.has_pages:
                pages = _bytes(arenas[group.name], group.page_bytes, f"the arena of layer group {group.name!r}", driver)
                self._pages[group.name] = pages
            if group.has_tail:
                slot_bytes = geometry.tail_slot_bytes(group)
                tail = _bytes(tails[group.name], slot_bytes, f"the tails of layer group {group.name!r}", driver)
                self._tail_slots[group.name] = tail
            self._add(group, pages, tail)

    def _add(self, group: LayerGroup, pages: torch.Tensor | None, tail: torch.Tensor | None) -> None:
        dense, packed, rings = {}, {}, {}
        if pages is not None and group.packed:
            for region, at in zip(group.paged_regions, group.layout().regions, strict=True):
                codec = row_codec(group.codec(region), region.dim)
                planes = arena_planes(pages, at, region.heads, region.rows_per_page, codec)
                packed[region.layer, region.kind] = PackedRegion(planes, codec)
        elif pages is not None:
            for plane in group.planes():
                key = (plane.region.layer, plane.region.kind)
                dense[key] = _rows(pages, plane.offset, plane.shape, TORCH_DTYPES[plane.region.dtype])
        if tail is not None:
            for plane in self.geometry.tail_planes(group):
                key = (plane.region.layer, plane.region.kind)
                rings[key] = _rows(tail, plane.offset, plane.shape, TORCH_DTYPES[plane.region.dtype])
        for region in group.regions:
            key = (region.layer, region.kind)
            dtype = TORCH_DTYPES[region.dtype]
            self.regions[key] = RegionView(region, group, dtype, dense.get(key), packed.get(key), rings.get(key))
            self.by_group[group.name].append(self.regions[key])

    def view(self, layer: int, kind: str) -> RegionView:
        return self.regions[layer, kind]

    def page_memory(self, group: str, page: int) -> memoryview:
        """The bytes of a page; of a page on a GPU, a copy."""
        return self._pages[group][page].cpu().numpy().data

    def page_bytes(self, group: str) -> torch.Tensor:
        """u8 [num_pages, page_bytes]: the arena of a group that has pages."""
        return self._pages[group]

    def settle(self) -> None:
        """Returns when all that was asked of the memory is done: a GPU does it later than it is asked. What the store,
        or who reads the control block, is told to be there must be there, should this process be killed next.
        """
        if self._driver is not None:
            self._driver.synchronize()

    def copy_tail(self, group: str, from_slot: int, to_slot: int) -> None:
        """Copies all bytes of a tail slot."""
        tails = self._tail_slots[group]
        tails[to_slot] = tails[from_slot]

    def append(self, view: RegionView, rows: torch.Tensor, where: GroupBatch) -> None:
        """Writes this step's rows [R, heads, dim] of a region with a row a token where they go: the tails of decode
        rows, where the region has a tail, else dense pages.

        Raises:
            PreconditionFailed: GEOMETRY_MISMATCH, the rows have other heads or another width than the sequence's.
        """
        if rows.shape[1:] != (view.region.heads, view.region.dim):  # one head would be spread over all without a word
            raise PreconditionFailed(
                f"rows of region {view.region.kind!r} of layer {view.region.layer} do not fit its cache",
                reason="GEOMETRY_MISMATCH",
                given=f"{' x '.join(map(str, rows.shape[1:]))} a token",
                allowed=f"{view.region.heads} x {view.region.dim}",
                hint="head counts and widths cannot change in the middle of a sequence",
            )
        began_ns = time.perf_counter_ns()
        if view.tail is not None:
            tails = where.tails
            assert tails is not None
            if len(tails.rows):
                view.tail[tails.slots, tails.at(view.tail.shape[1])] = rows[tails.rows]
        else:
            pages = where.pages
            assert view.pages is not None and pages is not None
            if len(pages.pages):
                view.pages[pages.pages, pages.at] = rows if pages.rows is None else rows[pages.rows]
        self.counters.append_ns += time.perf_counter_ns() - began_ns

    def append_blocks(self, view: RegionView, place: Place, first: int, rows: torch.Tensor) -> None:
        """Writes rows [N, heads, dim] of blocks [first, first + N) of a sequence: to its dense pages, else its tail."""
        began_ns = time.perf_counter_ns()
        blocks = torch.arange(first, first + len(rows))  # beside page_ids, in host memory
        if view.tail is not None:
            view.tail[place.tail_slot, blocks % view.tail.shape[1]] = rows
        else:
            assert view.pages is not None
            view.pages[place.page_ids[blocks // view.pages.shape[1]], blocks % view.pages.shape[1]] = rows
        self.counters.append_ns += time.perf_counter_ns() - began_ns

    def span(self, view: RegionView, place: Place, first: int, length: int, reason: str) -> torch.Tensor:
        """Rows of tokens [first, first + length) of a sequence, [rows, heads, dim] in the region's dtype.

        Total over retained rows: a view where they lie side by side in the tail or in one dense page, a copy where
        they do not, dequantised (and counted under ``reason``) where they are packed.

        Raises:
            PreconditionFailed: ROWS_FREED, some lie in pages behind the model's window that are gone.
        """
        ratio = view.region.ratio
        begin, end = first // ratio, (first + length) // ratio
        parts: list[torch.Tensor] = []
        if view.packed is not None:
            split = min(end, max(begin, place.base // ratio))
            if begin < split:
                parts.append(self._dequantised(view, view.packed, place, begin, split, reason))
            begin = split
        if view.tail is not None:
            parts += view.ring(place.tail_slot, begin, end - begin)
        else:
            parts += _page_rows(view, place, begin, end)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def rows_at(self, view: RegionView, place: Place, numbers: torch.Tensor) -> torch.Tensor:
        """Rows by their ``numbers`` [M] int64, out of a dense group's pages: [M, heads, dim], a copy of those alone."""
        assert view.pages is not None
        per_page = view.pages.shape[1]
        return view.pages[place.page_ids.to(numbers.device)[numbers // per_page], numbers % per_page]

    def gather(self, view: RegionView, where: Places, numbers: torch.Tensor) -> torch.Tensor:
        """Rows by their ``numbers`` [B, N] int64, of each of B sequences its own: [B, N, heads, dim], one copy.

        Out of tail rings, where the region has one, else dense pages.
        """
        if view.tail is not None:
            assert where.slots is not None
            return _wide(view.tail)[where.slots.unsqueeze(1), numbers % view.tail.shape[1]].view(view.dtype)
        assert view.pages is not None
        per_page = view.pages.shape[1]
        return _wide(view.pages)[where.table.gather(1, numbers // per_page), numbers % per_page].view(view.dtype)

    def gather_pages(self, view: RegionView, where: Places, first: int, end: int) -> torch.Tensor:
        """Rows of pages [first, end) of each of B sequences' tables, [B, rows, heads, dim], one copy; of a sequence
        that has fewer pages, another's rows.
        """
        assert view.pages is not None
        return _wide(view.pages)[where.table[:, first:end]].view(view.dtype).flatten(1, 2)

    def put(self, view: RegionView, where: Places, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes a row of each of B sequences, rows [B, heads, dim] by their ``numbers`` [B], to its dense pages."""
        assert view.pages is not None
        per_page = view.pages.shape[1]
        pages = where.table.gather(1, (numbers // per_page).unsqueeze(1)).squeeze(1)
        view.pages[pages, numbers % per_page] = rows

    def packed_rows_at(self, view: RegionView, place: Place, numbers: torch.Tensor, reason: str) -> torch.Tensor:
        """As ``rows_at`` out of packed pages, dequantised and counted under ``reason``."""
        assert view.packed is not None
        per_page, (planes, codec) = view.region.rows_per_page, view.packed
        pages, rows = place.page_ids.to(numbers.device)[numbers // per_page], numbers % per_page
        self.counters.rows_dequantised[reason] += len(numbers)
        return codec.unpack(PackedRows(planes.codes[pages, :, rows], planes.scales[pages, :, rows]), view.dtype)

    def _dequantised(
        self, view: RegionView, packed: PackedRegion, place: Place, begin: int, end: int, reason: str
    ) -> torch.Tensor:
        per_page = view.region.rows_per_page
        page_ids = place.page_ids[begin // per_page : -(-end // per_page)]
        demand_held(view, page_ids, begin // per_page)
        rows = unpack_pages(page_ids, packed.planes, packed.codec, view.dtype).flatten(0, 1)
        skip = begin % per_page
        self.counters.rows_dequantised[reason] += end - begin
        return rows[skip : skip + end - begin]


class Workspace:
    """The KV rows of a step's prefill spans, in the order of ``Batch.workspace_rows``, until they are sealed. Without a
    batch there are none.
    """

    def __init__(self, batch: Batch | None = None) -> None:
        self._wanted = batch.workspace_rows if batch is not None else torch.empty(0, dtype=torch.int64)
        self._rows: dict[tuple[int, str], torch.Tensor] = {}
        self._blocks: dict[tuple[int, str, int], tuple[int, torch.Tensor]] = {}

    def keep(self, view: RegionView, rows: torch.Tensor) -> None:
        """Keeps a copy of what belongs here of this step's rows [R, heads, dim]; those of dense pages are there yet."""
        if view.tail is not None and len(self._wanted):
            self._rows[view.region.layer, view.region.kind] = rows[self._wanted]

    def keep_blocks(self, view: RegionView, workspace_row: int, first: int, rows: torch.Tensor) -> None:
        """Keeps rows [N, heads, dim] of blocks [first, first + N) of the span at ``workspace_row``."""
        self._blocks[view.region.layer, view.region.kind, workspace_row] = (first, rows)

    def rows(self, view: RegionView, workspace_row: int, start: int, first: int, end: int) -> torch.Tensor:
        """Region rows [first, end) of the span at ``workspace_row`` that begins at token ``start``: [end - first,
        heads, dim], a view. Of a ratio above 1 those of the blocks that the span completed.
        """
        if view.region.ratio == 1:
            at = workspace_row - start
            return self._rows[view.region.layer, view.region.kind][at + first : at + end]
        at, rows = self._blocks[view.region.layer, view.region.kind, workspace_row]
        return rows[first - at : end - at]

    def of(self, view: RegionView) -> torch.Tensor | None:
        """All of a region's rows [P, heads, dim]; None where the step has none."""
        return self._rows.get((view.region.layer, view.region.kind))


def _bytes(arena: Arena, size: int, what: str, driver: Driver | None) -> torch.Tensor:
    """u8 [num_pages, size]."""
    num_bytes = arena.buffer.nbytes if arena.chunks is None else arena.chunks.num_bytes
    if arena.page_bytes != size or num_bytes != arena.num_pages * size:
        raise ConfigError(
            f"{what} does not fit the geometry",
            given=f"{num_bytes} bytes in {arena.num_pages} pieces of {arena.page_bytes}",
            allowed=f"pieces of {size} bytes",
        )
    if arena.chunks is not None:
        assert driver is not None
        return DeviceArena.of(driver, arena).tensor().view(arena.num_pages, size)
    # By way of numpy, which holds on to the buffer; torch.frombuffer lets the mapping go under the tensor.
    return torch.from_numpy(np.frombuffer(arena.buffer, dtype=np.uint8)).view(arena.num_pages, size)


def _rows(raw: torch.Tensor, offset: int, shape: tuple[int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """A plane of rows in every page of ``raw`` u8 [num_pages, page_bytes], as [num_pages, rows, heads, dim]."""
    rows, heads, dim = shape
    return raw.view(dtype).as_strided(
        size=(len(raw), rows, heads, dim),
        stride=(raw.shape[1] // dtype.itemsize, heads * dim, dim, 1),
        storage_offset=offset // dtype.itemsize,
    )


def _page_rows(view: RegionView, place: Place, begin: int, end: int) -> list[torch.Tensor]:
    """Rows [begin, end) of a dense group: a view where they lie in one page, else one copy."""
    assert view.pages is not None
    per_page = view.region.rows_per_page
    demand_held(view, place.page_ids[begin // per_page : -(-end // per_page)], begin // per_page)
    if begin == end:
        return [view.pages[:0].flatten(0, 1)]
    first, last = begin // per_page, (end - 1) // per_page
    if first == last:
        rows = view.pages[int(place.page_ids[first])]
    else:
        rows = view.pages[place.page_ids[first : last + 1].to(view.pages.device)].flatten(0, 1)
    return [rows[begin - first * per_page : end - first * per_page]]


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in elements of 16 bytes where it fits: copying by index takes time by the element."""
    steps = (*rows.stride()[:-1], rows.storage_offset(), rows.shape[-1])
    wide = torch.complex128.itemsize // rows.element_size()
    return rows if any(step % wide for step in steps) else rows.view(torch.complex128)


def demand_held(view: RegionView, page_ids: torch.Tensor, first_page: int) -> None:
    """``page_ids``, in host memory, from page ``first_page`` on. Raises PreconditionFailed: ROWS_FREED."""
    if len(page_ids) and int(page_ids.min()) < 0:
        index = first_page + int((page_ids < 0).nonzero()[0])
        raise PreconditionFailed(
            f"rows of layer group {view.group.name!r} were freed behind the model's window",
            reason="ROWS_FREED",
            given=f"tokens from {index * PAGE_TOKENS} on",
            allowed="tokens that the sequence still holds",
        )


def place_of(page_ids: Sequence[int], base: int = 0, tail_slot: int = -1) -> Place:
    """A place for reading by ``KvView.span`` outside a step."""
    return Place(torch.tensor(page_ids, dtype=torch.int64), base, tail_slot)
