"""Sealing and refilling on a GPU: all regions of a layer group in one launch of the kernels.

Groups that no kernel packs (``worker.gpu_kernels.page_kernels`` says which) are left to ``worker.kv_moves``, which
packs them by PyTorch on the same device; a log line and ``tailpack features`` say so.

``worker.kv_moves`` says what is due; here it becomes tables in device memory. Checksums come back with the launch that
wrote the pages, because the store cannot read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
import torch

from kernels import loader
from kernels.page_sums import checksum_keys, page_sums
from kernels.pages_cuda import (
    NO_BAD_ROW,
    PageGroup,
    PageRows,
    RegionRows,
    page_group,
    page_table,
    raise_bad_row,
    region_table,
    restore_pages,
    seal_pages,
)
from kvstore.geometry import LayerGroup
from protos.errors import InternalError
from worker.gpu_kernels import page_kernels
from worker.kv_view import KvView, RegionView, Workspace

log = structlog.get_logger("engine")

_WORDS = (1 << 64) - 1  # checksums are unsigned, torch's integers are not


@dataclass(frozen=True)
class Sealing:
    """Pages that are being packed on the device, or only summed up: then ``pages`` is empty."""

    pages: tuple[PageRows, ...]
    _results: torch.Tensor  # i64, in host memory once ``_done``: a checksum a page, then the flag of a bad row
    _done: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]

    def checksums(self) -> list[int]:
        """Waits until the pages are packed. Raises RowError: a row is not finite; they are not to be used."""
        if self._done is not None:
            self._done.synchronize()
        *checksums, first_bad_row = self._results.tolist()
        raise_bad_row(first_bad_row, self.pages)
        return [checksum & _WORDS for checksum in checksums]


class GpuPages:
    """The packed layer groups of one attachment, as the page kernels take them.

    Args:
        kv: its arenas lie on a GPU.

    Raises what ``page_group`` raises: a width or dtype without a kernel, by name.
    """

    def __init__(self, kv: KvView) -> None:
        self._views: dict[str, list[RegionView]] = {}
        self._groups: dict[str, PageGroup] = {}
        for group in kv.geometry.groups:
            if group.packed and not page_kernels(group):
                widths = sorted({region.dim for region in group.paged_regions})
                log.warning("no kernel packs such rows, PyTorch does", group=group.name, mode=group.mode, widths=widths)
            elif group.packed:
                views = [view for view in kv.by_group[group.name] if view.packed is not None]
                self._views[group.name] = views
                self._groups[group.name] = page_group(kv.page_bytes(group.name), _sources(group, views))
        self._dense = {g.name: kv.page_bytes(g.name) for g in kv.geometry.groups if g.has_pages and not g.packed}
        self._keys: dict[int, torch.Tensor] = {}  # by bytes of a page

    def packs(self, group: str) -> bool:
        """Whether the kernels pack and unpack this group's pages."""
        return group in self._groups

    def load(self) -> None:
        """Loads the kernels, compiling what no archive has: seconds, before the worker reports ready."""
        for group in self._groups.values():
            loader.load(group.cell, group.arena.device.index or 0)
        for arena in self._dense.values():
            self._keys[arena.shape[1]] = checksum_keys(arena.shape[1], arena.device)

    def start_seal(self, group: str, pages: Sequence[PageRows], workspace: Workspace | None = None) -> Sealing:
        """Packs the pages' rows out of tails and workspace. Does not wait: what is launched next on this stream finds
        the pages packed.

        ``workspace`` None: all rows are in tails.
        """
        due = self._groups[group]
        device = due.arena.device
        if workspace is not None:
            sources = tuple(
                replace(source, workspace=workspace.of(view))
                for source, view in zip(due.sources, self._views[group], strict=True)
            )
            due = replace(due, regions=_on(region_table(sources), device), sources=sources)
        results = torch.zeros(len(pages) + 1, dtype=torch.int64)
        results[-1] = NO_BAD_ROW
        results = _on(results, device)
        seal_pages(due, _table(due, pages, seal=True), results[:-1], results[-1:])
        return _told(tuple(pages), results)

    def start_sums(self, group: str, pages: Sequence[int]) -> Sealing:
        """The checksums of a dense group's pages, when what was launched before is done. Does not wait."""
        arena = self._dense[group]
        sums = page_sums(arena, pages, self._keys[arena.shape[1]])
        return _told((), torch.cat((sums, sums.new_full((1,), NO_BAD_ROW))))

    def refill(self, group: str, pages: Sequence[PageRows]) -> None:
        """Unpacks tokens [begin, end) of the pages into the tail rings that they name."""
        due = self._groups[group]
        restore_pages(due, _table(due, pages))


def _table(group: PageGroup, pages: Sequence[PageRows], *, seal: bool = False) -> torch.Tensor:
    if any(page.page < 0 for page in pages):  # which the kernels would skip without a word
        raise InternalError("rows of a page that is not held", given=[page.page for page in pages], allowed="0 or more")
    return _on(page_table(group, pages, seal=seal), group.arena.device)


def _told(pages: tuple[PageRows, ...], results: torch.Tensor) -> Sealing:
    """``results`` as they will be in host memory."""
    if not results.is_cuda:
        return Sealing(pages, results, None)
    told = torch.empty(results.shape, dtype=results.dtype, pin_memory=True)
    told.copy_(results, non_blocking=True)
    return Sealing(pages, told, _event_behind(results.device))


def _event_behind(device: torch.device) -> torch.cuda.Event:
    """Comes once all is done that was launched on the device's stream: its own, whatever GPU is the thread's."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def _on(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device; of a GPU's, nobody waits for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _sources(group: LayerGroup, views: Sequence[RegionView]) -> list[RegionRows]:
    """The regions that have pages, in the order of the group's layout."""
    planes = dict(zip(((r.layer, r.kind) for r in group.paged_regions), group.layout().regions, strict=True))
    return [
        RegionRows(
            planes[view.region.layer, view.region.kind], view.region.dim, ratio=view.region.ratio, tail=view.tail
        )
        for view in views
    ]
