"""What the store asks the worker to do with rows: copy pages and tails, refill tails, pack pages, keep tails filled.

Each is one call for all that is due in a step; all layers of a group go together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kernels.page_codec import RegionRows, copy_records, pack_pages
from kernels.pages_cuda import PageRows
from kvstore.client import NewPage, PageCopy, Refill, Relinked, Split, TailCopy, page_checksum
from protos.page_hash import PAGE_TOKENS
from worker.gpu_pages import GpuPages, Sealing
from worker.kv_view import KvView, RegionView, Workspace, place_of


@dataclass(frozen=True)
class SpanRows:
    """Where the rows of one sequence's newest span are, in one layer group: tokens [start, start + count).

    Rows below ``start`` are in the ring ``tail_slot``; those of the span in the workspace from ``workspace_row`` on, or
    in the ring as well where that is -1.
    """

    group: str
    tail_slot: int
    start: int
    count: int
    workspace_row: int


@dataclass(frozen=True)
class SealJob:
    """Pages of one sequence and group that are due: fresh ones are packed, others completed or left alone."""

    rows: SpanRows
    pages: Sequence[NewPage]


def copy_pages(kv: KvView, copies: Iterable[PageCopy]) -> None:
    """Copies the rows of the first ``num_tokens`` tokens of a page to another, all regions (a truncate, a fork)."""
    for copy in copies:
        for view in kv.by_group[copy.group]:
            num_rows = copy.num_tokens // view.region.ratio
            if view.pages is not None:
                view.pages[copy.to_page, :num_rows] = view.pages[copy.from_page, :num_rows]
            elif view.packed is not None:
                copy_records(copy.from_page, copy.to_page, [view.packed.planes], num_rows)


def copy_tails(kv: KvView, copies: Iterable[TailCopy]) -> None:
    for copy in copies:
        kv.copy_tail(copy.group, copy.from_slot, copy.to_slot)


def refill_tails(kv: KvView, refills: Iterable[Refill], reason: str, on_gpu: GpuPages | None = None) -> None:
    """Dequantises tokens out of pages into tail rings; counted under ``reason``. Lossy."""
    for refill in refills:
        if on_gpu is not None and on_gpu.packs(refill.group):
            on_gpu.refill(refill.group, _refilled(refill))
            for view in kv.by_group[refill.group]:
                kv.counters.rows_dequantised[reason] += (
                    refill.num_tokens // view.region.ratio * (view.packed is not None)
                )
            continue
        place = place_of([-1] * (refill.first_token // PAGE_TOKENS) + refill.page_ids, base=1 << 62)
        for view in kv.by_group[refill.group]:
            if view.packed is None:
                continue
            rows = kv.span(view, place, refill.first_token, refill.num_tokens, reason)
            _to_ring(view, refill.tail_slot, refill.first_token // view.region.ratio, rows)


@dataclass(frozen=True)
class Packing:
    """Pages whose checksums are known, and those that a GPU is still at."""

    known: dict[tuple[str, int], int]
    _under_way: list[tuple[str, Sequence[int], Sealing]]

    def checksums(self) -> dict[tuple[str, int], int]:
        """(group, page id) -> checksum of each. Waits for the GPU, as far as that. Raises what ``Sealing`` does."""
        for group, pages, sealing in self._under_way:
            self.known.update(zip(((group, page) for page in pages), sealing.checksums(), strict=True))
        self._under_way.clear()
        return self.known

    def sum_pages(self, on_gpu: GpuPages, group: str, pages: Sequence[int]) -> None:
        """Dense pages, too, once what was asked of the GPU before is done."""
        self._under_way.append((group, pages, on_gpu.start_sums(group, pages)))


def pack(kv: KvView, jobs: Sequence[SealJob], workspace: Workspace | None, on_gpu: GpuPages | None = None) -> Packing:
    """Packs every page that is due, all sequences and all layers of a group in one call of the codec.

    Does not wait for a GPU's kernels.

    Args:
        workspace: None: all rows are in tails.
    """
    began_ns = time.perf_counter_ns()
    checksums: dict[tuple[str, int], int] = {}
    under_way: list[tuple[str, Sequence[int], Sealing]] = []
    for group, views in kv.by_group.items():
        due = [(job, page) for job in jobs if job.rows.group == group for page in job.pages]
        if not due:
            continue
        if on_gpu is not None and on_gpu.packs(group):
            under_way += _pack_on_gpu(kv, on_gpu, group, due, workspace)
            continue
        workspace = workspace or Workspace()
        fresh = [(job, page) for job, page in due if page.source is None]
        if fresh:
            _pack_rows(views, fresh, workspace)
        for job, page in due:
            if isinstance(page.source, Split):
                _complete(views, job, page, page.source, workspace)
            if isinstance(page.source, Relinked):
                kv.counters.pages_relinked += 1
            else:
                kv.counters.pages_packed += 1
                checksums[group, page.page_id] = page_checksum(kv.page_memory(group, page.page_id))
    kv.counters.seal_ns += time.perf_counter_ns() - began_ns
    return Packing(checksums, under_way)


def fill_tails(kv: KvView, kept: Iterable[tuple[SpanRows, int]], workspace: Workspace) -> None:
    """Copies prefill rows out of the workspace into the tails.

    Args:
        kept: a span and its group's base after sealing: rows below it are in pages.
    """
    began_ns = time.perf_counter_ns()
    for span, base in kept:
        for view in kv.by_group[span.group]:
            if view.tail is None:  # its rows are in dense pages
                continue
            ratio = view.region.ratio
            begin, end = span.start // ratio, (span.start + span.count) // ratio
            in_pages = 0 if view.region.tail_only else base // ratio
            first = max(begin, in_pages, end - view.tail.shape[1])
            if first < end:
                rows = workspace.rows(view, span.workspace_row, span.start, first, end)
                _to_ring(view, span.tail_slot, first, rows)
    kv.counters.append_ns += time.perf_counter_ns() - began_ns


def _pack_on_gpu(
    kv: KvView, on_gpu: GpuPages, group: str, due: Sequence[tuple[SealJob, NewPage]], workspace: Workspace | None
) -> list[tuple[str, Sequence[int], Sealing]]:
    """As ``pack``, of one group."""
    written: list[tuple[int, PageRows]] = []
    for job, page in due:
        if isinstance(page.source, Relinked):
            kv.counters.pages_relinked += 1
            continue
        kept = 0
        if isinstance(page.source, Split):
            kept = page.source.num_tokens
            if page.source.from_page != page.page_id:
                arena = kv.page_bytes(group)
                arena[page.page_id] = arena[page.source.from_page]
        written.append((page.page_id, _page_rows_of(job.rows, page, kept)))
    if not written:
        return []
    kv.counters.pages_packed += len(written)
    sealing = on_gpu.start_seal(group, [rows for _, rows in written], workspace)
    return [(group, [page_id for page_id, _ in written], sealing)]


def _page_rows_of(span: SpanRows, page: NewPage, kept: int) -> PageRows:
    """Where the rows of page ``page.index`` are: in the ring below the span's start, in the workspace from there on."""
    first = page.index * PAGE_TOKENS
    in_ring = PAGE_TOKENS if span.workspace_row < 0 else min(PAGE_TOKENS, max(0, span.start - first))
    behind = span.workspace_row + first + in_ring - span.start if in_ring < PAGE_TOKENS else 0
    return PageRows(page.page_id, first, span.tail_slot, in_ring, behind, begin=kept)


def _refilled(refill: Refill) -> list[PageRows]:
    """The pages that a refill reads, each with the part of it that goes into the ring."""
    first_page, end = refill.first_token // PAGE_TOKENS, refill.first_token + refill.num_tokens
    pages = []
    for index, page_id in enumerate(refill.page_ids, first_page):
        first = index * PAGE_TOKENS
        begin, stop = max(refill.first_token, first) - first, min(end, first + PAGE_TOKENS) - first
        pages.append(PageRows(page_id, first, refill.tail_slot, PAGE_TOKENS, 0, begin, stop))
    return pages


def _pack_rows(views: Sequence[RegionView], due: Sequence[tuple[SealJob, NewPage]], workspace: Workspace) -> None:
    page_ids = torch.tensor([page.page_id for _, page in due])
    regions = []
    for view in views:
        if view.packed is not None:
            rows = torch.stack([_page_rows(view, job.rows, page.index, workspace) for job, page in due])
            regions.append(RegionRows(*view.packed, rows))
    pack_pages(page_ids, regions)


def _complete(views: Sequence[RegionView], job: SealJob, page: NewPage, split: Split, workspace: Workspace) -> None:
    """A page that the cut of a truncate divided: records below the cut are copied, the rest is packed."""
    page_ids = torch.tensor([page.page_id])
    for view in views:
        if view.packed is None:
            continue
        num_rows = split.num_tokens // view.region.ratio
        if split.from_page != page.page_id:
            copy_records(split.from_page, page.page_id, [view.packed.planes], num_rows)
        rows = _page_rows(view, job.rows, page.index, workspace)[num_rows:]
        if len(rows):
            pack_pages(page_ids, [RegionRows(*view.packed, rows.unsqueeze(0))], num_rows)


def _page_rows(view: RegionView, span: SpanRows, index: int, workspace: Workspace) -> torch.Tensor:
    """Dense rows [rows_per_page, heads, dim] of page ``index``: from the ring, the workspace, or both."""
    first, end = index * PAGE_TOKENS, (index + 1) * PAGE_TOKENS
    ratio = view.region.ratio
    split = end if span.workspace_row < 0 else min(end, max(first, span.start))
    parts = view.ring(span.tail_slot, first // ratio, (split - first) // ratio) if first < split else []
    if split < end:
        parts.append(workspace.rows(view, span.workspace_row, span.start, split // ratio, end // ratio))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _to_ring(view: RegionView, slot: int, first_row: int, rows: torch.Tensor) -> None:
    done = 0
    for part in view.ring(slot, first_row, len(rows)):
        part.copy_(rows[done : done + len(part)])
        done += len(part)
