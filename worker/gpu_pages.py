"""Sealing, refilling and restoring on a GPU: all regions of a layer group in one launch of the kernels.

``worker.kv_moves`` says what is due; here it becomes tables in device memory. Checksums come back with the launch that
wrote the pages, because the store cannot read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.attention import PackedRegion
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
from protos.page_hash import PAGE_TOKENS
from worker.kv_view import KvView, RegionView, Workspace

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
        self._blocks: dict[tuple[int, int], PageGroup] = {}
        for group in kv.geometry.groups:
            if group.packed:
                views = [view for view in kv.by_group[group.name] if view.packed is not None]
                sources = _sources(group, views)
                self._views[group.name] = views
                self._groups[group.name] = page_group(kv.page_bytes(group.name), sources)
                for view, source in zip(views, sources, strict=True):
                    assert view.packed is not None
                    self._blocks[_key(view.packed)] = replace(self._groups[group.name], sources=(source,))
        self._table: tuple[tuple[int, ...], torch.Tensor] | None = None

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
        seal_pages(due, page_table(due, pages).to(device), results[:-1], results[-1:])
        *checksums, first_bad_row = results.tolist()
        raise_bad_row(first_bad_row, pages)
        return [checksum & _WORDS for checksum in checksums]

    def refill(self, group: str, pages: Sequence[PageRows]) -> None:
        """Unpacks tokens [begin, end) of the pages into the tail rings that they name."""
        due = self._groups[group]
        restore_pages(due, page_table(due, pages).to(due.arena.device))

    def restore(self, region: PackedRegion, page_ids: torch.Tensor, out: torch.Tensor) -> None:
        """``kernels.prefill.Restore``: whole pages of one region into ``out`` [pages, 128, heads, dim]."""
        block = self._blocks[_key(region)]
        (source,) = block.sources
        source = replace(source, tail=None, workspace=out.flatten(0, 1))
        regions = region_table([source]).to(block.arena.device)
        units = [(0, head, row, 0) for row in range(0, out.shape[1], 32) for head in range(out.shape[2])]
        block = replace(
            block,
            regions=regions,
            sources=(source,),
            units=torch.tensor(units, dtype=torch.int32, device=block.arena.device),
        )
        restore_pages(block, self._pages_of(block, page_ids))

    def _pages_of(self, group: PageGroup, page_ids: torch.Tensor) -> torch.Tensor:
        """The table of whole pages one behind the other. All layers of a step ask for the same one."""
        ids = tuple(page_ids.tolist())
        if self._table is None or self._table[0] != ids:
            pages = [
                PageRows(page, first_token=i * PAGE_TOKENS, workspace_token=i * PAGE_TOKENS)
                for i, page in enumerate(ids)
            ]
            self._table = ids, page_table(group, pages).to(group.arena.device)
        return self._table[1]


def _sources(group: LayerGroup, views: Sequence[RegionView]) -> list[RegionRows]:
    """The regions that have pages, in the order of the group's layout."""
    planes = dict(zip(((r.layer, r.kind) for r in group.paged_regions), group.layout().regions, strict=True))
    return [
        RegionRows(
            planes[view.region.layer, view.region.kind], view.region.dim, ratio=view.region.ratio, tail=view.tail
        )
        for view in views
    ]


def _key(region: PackedRegion) -> tuple[int, int]:
    heads = region.planes.heads
    return heads.data_ptr(), heads.shape[1]
