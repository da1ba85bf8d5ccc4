"""Torch views of the mapped KV pages, by layer group and region. Views only: no byte is copied here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch

from kvstore.geometry import CacheGeometry
from protos.errors import ConfigError

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MappedArena(Protocol):
    """What a view needs of ``kvstore.client.Arena``: ``buffer`` is writable and num_pages * page_bytes long."""

    @property
    def num_pages(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def buffer(self) -> memoryview: ...


class KvView:
    """The arenas of one attachment as tensors.

    ``planes[(layer, kind)]`` has shape [num_pages, rows_per_page, heads, dim] in the region's dtype; page p, row r is
    token ``r * ratio`` of that page. Rows are contiguous, pages are ``page_bytes`` apart. The tensors hold the mapping:
    drop the view before the attachment is closed.

    Raises:
        ConfigError: an arena does not have the geometry's page size.
    """

    def __init__(self, geometry: CacheGeometry, arenas: Mapping[str, MappedArena]) -> None:
        self.geometry = geometry
        self.planes: dict[tuple[int, str], torch.Tensor] = {}
        for group in geometry.groups:
            arena = arenas[group.name]
            if arena.page_bytes != group.page_bytes or arena.buffer.nbytes != arena.num_pages * group.page_bytes:
                raise ConfigError(
                    f"the arena of layer group {group.name!r} does not fit the geometry",
                    given=f"{arena.buffer.nbytes} bytes in {arena.num_pages} pages of {arena.page_bytes}",
                    allowed=f"pages of {group.page_bytes} bytes",
                )
            # By way of numpy, which holds on to the buffer; torch.frombuffer lets the mapping go under the tensor.
            raw = torch.from_numpy(np.frombuffer(arena.buffer, dtype=np.uint8))
            for plane in group.planes():
                dtype = TORCH_DTYPES[plane.region.dtype]
                rows, heads, dim = plane.shape
                key = (plane.region.layer, plane.region.kind)
                self.planes[key] = raw.view(dtype).as_strided(
                    size=(arena.num_pages, rows, heads, dim),
                    stride=(group.page_bytes // dtype.itemsize, heads * dim, dim, 1),
                    storage_offset=plane.offset // dtype.itemsize,
                )

    def plane(self, layer: int, kind: str) -> torch.Tensor:
        return self.planes[(layer, kind)]


def copy_page_rows(view: KvView, group: str, from_page: int, to_page: int, num_tokens: int) -> None:
    """Copies the first ``num_tokens`` tokens of a page, all its regions (a truncate into a sealed page)."""
    for plane in view.geometry.group(group).planes():
        rows = num_tokens // plane.region.ratio
        tensor = view.plane(plane.region.layer, plane.region.kind)
        tensor[to_page, :rows] = tensor[from_page, :rows]
