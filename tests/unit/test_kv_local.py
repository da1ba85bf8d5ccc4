"""An attachment of this process alone, over host memory and over a device's."""

from __future__ import annotations

import os
from collections.abc import Sequence

import psutil
import pytest

from kvstore.client import Admitted, OpenRequest
from kvstore.geometry import CacheGeometry, LayerGroup, Region, apply_mode
from kvstore.local import LocalAttachment
from protos.errors import ConfigError

GPU = "cuda:GPU-0"


class Made:
    """Device memory of memfds; knows what it made."""

    granularity = 4096

    def __init__(self) -> None:
        self.fds: list[int] = []

    def create(self, chunk_bytes: Sequence[int]) -> list[int]:
        for size in chunk_bytes:
            self.fds.append(os.memfd_create("chunk"))
            os.ftruncate(self.fds[-1], size)
        return list(self.fds)


def geometry() -> CacheGeometry:
    regions = tuple(Region(layer=0, kind=kind, heads=2, dim=64, dtype="bfloat16") for kind in ("k", "v"))
    return apply_mode(CacheGeometry((LayerGroup(name="full", regions=regions),)), "turboquant", "tq4")


def attachment(device: str = "cpu:0", memory: Made | None = None) -> LocalAttachment:
    return LocalAttachment(
        geometry(), num_pages=6, max_sequences=2, max_sequence_tokens=512, device=device, device_memory=memory
    )


def num_fds() -> int:
    return psutil.Process().num_fds()


def opened(local: LocalAttachment) -> int:
    (admitted,) = local.open([OpenRequest("r", "", [1, 2, 3], 300, b"", False, False)])
    assert isinstance(admitted, Admitted)
    return admitted.slot


def test_a_devices_memory_comes_as_chunks_of_whoever_makes_it() -> None:
    made = Made()
    before = num_fds()
    with attachment(GPU, made) as local:
        pages, tails = local.arenas["full"], local.tails["full"]
        assert pages.chunks is not None and tails.chunks is not None and pages.device == GPU
        assert sum(pages.chunks.chunk_bytes) >= pages.num_pages * pages.page_bytes and pages.num_pages == 6
        sizes = [os.fstat(fd).st_size for fd in (*pages.chunks.fds, *tails.chunks.fds)]
        assert sizes == [*pages.chunks.chunk_bytes, *tails.chunks.chunk_bytes]
        assert not set(pages.chunks.fds) & set(made.fds), "descriptors of its own"
        slot = opened(local)
        assert local.reserve([(slot, 300, 1)]) and local.release([slot]) >= 0
    assert num_fds() == before


def test_host_memory_is_mapped() -> None:
    with attachment() as local:
        assert local.arenas["full"].chunks is None and len(local.arenas["full"].page(5)) > 0


def test_a_device_without_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="memory_granularity"):
        attachment(GPU)
