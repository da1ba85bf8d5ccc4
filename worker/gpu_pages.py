"""Sealing and refilling on a GPU: all regions of a layer group in one launch of the kernels.

Groups that no kernel packs (``worker.gpu_kernels.page_kernels`` says which) are left to ``worker.kv_moves``, which
packs them by PyTorch on the same device; a log line and ``tailpack features`` say so.

``worker.kv_moves`` says what is due; here it becomes tables in device memory. Checksums come back with the launch that
wrote the pages, because the store cannot read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog
import torch

from kernels import loader
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

    def packs(self, group: str) -> bool:
        """Whether the kernels pack and unpack this group's pages."""
        return group in self._groups

    def load(self) -> None:
        """Loads the kernels, compiling what no archive has: seconds, before the worker reports ready."""
        for group in self._groups.values():
            loader.load(group.cell, group.arena.device.index or 0)

    def seal(self, group: str, pages: Sequence[PageRows], workspace: Workspace) -> list[int]:
        """Packs the pages' rows out of tails and workspace; returns the pages' checksums.

        Raises:
            RowError: a row is not finite. Then the pages are not to be used.
        """
        due = self._groups[group]
        sources = tuple(
            replace(source, workspace=workspace.of(view))
            for source, view in zip(due.sources, self._views[group], strict=True)
        )
        device = due.arena.device
        due = replace(due, regions=region_table(sources).to(device), sources=sources)
        results = torch.zeros(len(pages) + 1, dtype=torch.int64)
        results[-1] = NO_BAD_ROW
        results = results.to(device)
        seal_pages(due, _table(due, pages, seal=True), results[:-1], results[-1:])
        *checksums, first_bad_row = results.tolist()
        raise_bad_row(first_bad_row, pages)
        return [checksum & _WORDS for checksum in checksums]

    def refill(self, group: str, pages: Sequence[PageRows]) -> None:
        """Unpacks tokens [begin, end) of the pages into the tail rings that they name."""
        due = self._groups[group]
        restore_pages(due, _table(due, pages))


def _table(group: PageGroup, pages: Sequence[PageRows], *, seal: bool = False) -> torch.Tensor:
    if any(page.page < 0 for page in pages):  # which the kernels would skip without a word
        raise InternalError("rows of a page that is not held", given=[page.page for page in pages], allowed="0 or more")
    return page_table(group, pages, seal=seal).to(group.arena.device)


def _sources(group: LayerGroup, views: Sequence[RegionView]) -> list[RegionRows]:
    """The regions that have pages, in the order of the group's layout."""
    planes = dict(zip(((r.layer, r.kind) for r in group.paged_regions), group.layout().regions, strict=True))
    return [
        RegionRows(
            planes[view.region.layer, view.region.kind], view.region.dim, ratio=view.region.ratio, tail=view.tail
        )
        for view in views
    ]
