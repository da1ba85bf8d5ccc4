"""A GPU's memory as file descriptors: chunks are made, handed over, and mapped side by side in one range of addresses.

Whoever holds a chunk's descriptor keeps its memory and contents alive, without loading CUDA; so the kvstore holds them
and workers come and go. A chunk is zeroed when it is made. Every worker, its maker too, maps what it gets from the
store.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from kvstore.client import Arena
from protos.errors import CapacityError


class Driver(Protocol):
    """What is needed of one GPU; ``worker.gpu.CudaMemory``. Addresses and sizes are multiples of ``granularity`` bytes.

    Every call may raise CapacityError (NOT_ENOUGH_MEMORY), or PreconditionFailed whose reason is CUDA's own name.
    """

    @property
    def granularity(self) -> int: ...
    def create(self, num_bytes: int) -> Any:
        """A handle of new memory, contents undefined."""

    def export_fd(self, handle: Any) -> int:
        """A descriptor of a handle's memory, the caller's to close."""

    def import_fd(self, fd: int) -> Any:
        """A handle of a descriptor's memory; the descriptor stays the caller's."""

    def release(self, handle: Any) -> None:
        """The memory stays as long as a descriptor or a mapping of it does."""

    def reserve(self, num_bytes: int) -> int:
        """A range of addresses with nothing behind them."""

    def free(self, address: int, num_bytes: int) -> None: ...
    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Puts all of a handle's memory there, readable and writable. Undone by ``unmap`` of the same range."""

    def unmap(self, address: int, num_bytes: int) -> None: ...
    def zero(self, address: int, num_bytes: int) -> None:
        """Returns when it is done."""

    def synchronize(self) -> None:
        """Waits for everything that this process has asked of the GPU."""

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        """u8 [num_bytes] over this memory, no copy; it and its views keep ``owner`` alive."""


class DeviceMemory:
    """A GPU as ``kvstore.client.attach`` wants it: it makes memory and gives it away as descriptors."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.granularity = driver.granularity

    def create(self, chunk_bytes: Sequence[int]) -> list[int]:
        """See ``kvstore.client.DeviceMemory``."""
        with ExitStack() as on_error:
            fds: list[int] = []
            for size in chunk_bytes:
                try:
                    fds.append(self._chunk(size))
                except CapacityError as full:
                    raise CapacityError(
                        "the GPU has no room for the KV arenas",
                        reason=full.reason,
                        given=f"{sum(chunk_bytes)} bytes; {sum(chunk_bytes[: len(fds)])} were there",
                        hint="make the arenas smaller, or end what else uses this GPU",
                    ) from full
                on_error.callback(os.close, fds[-1])
            on_error.pop_all()
        return fds

    def _chunk(self, num_bytes: int) -> int:
        driver = self._driver
        with ExitStack() as undo:
            handle = driver.create(num_bytes)
            undo.callback(driver.release, handle)
            address = driver.reserve(num_bytes)
            undo.callback(driver.free, address, num_bytes)
            driver.map(address, num_bytes, handle)
            undo.callback(driver.unmap, address, num_bytes)
            driver.zero(address, num_bytes)
            return driver.export_fd(handle)


class DeviceArena:
    """An arena's chunks, mapped side by side. The memory stays mapped until ``close`` and the end of every view.

    Raises (constructor; nothing stays mapped then):
        PreconditionFailed: a descriptor is not a chunk of that size (reason: CUDA's name for it).
    """

    def __init__(self, driver: Driver, fds: Sequence[int], chunk_bytes: Sequence[int], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._driver = driver
        self._mapping: _Mapping | None = _Mapping(driver, fds, chunk_bytes)

    @staticmethod
    def of(driver: Driver, arena: Arena) -> DeviceArena:
        """Maps what an attachment got from the store; its descriptors stay the attachment's."""
        assert arena.chunks is not None
        return DeviceArena(driver, arena.chunks.fds, arena.chunks.chunk_bytes, arena.num_pages * arena.page_bytes)

    def tensor(self) -> torch.Tensor:
        """u8 [num_bytes] on the GPU, no copy. ``cupy.asarray`` of it makes none either."""
        assert self._mapping is not None
        return self._driver.tensor(self._mapping.address, self.num_bytes, self._mapping)

    def close(self) -> None:
        """Unmaps where nobody else holds a view; else the last view's end does. Harmless the second time."""
        self._mapping = None


class _Mapping:
    """A mapped range. It ends with the last reference to it; at the end of the process CUDA clears up by itself."""

    def __init__(self, driver: Driver, fds: Sequence[int], chunk_bytes: Sequence[int]) -> None:
        total = sum(chunk_bytes)
        with ExitStack() as undo:
            at = self.address = driver.reserve(total)
            undo.callback(driver.free, self.address, total)
            for fd, size in zip(fds, chunk_bytes, strict=True):
                handle = driver.import_fd(fd)
                try:
                    driver.map(at, size, handle)
                finally:
                    driver.release(handle)  # the mapping holds the memory from here on
                undo.callback(driver.unmap, at, size)
                at += size
            undo.callback(driver.synchronize)  # what still runs may use it
            weakref.finalize(self, undo.pop_all().close).atexit = False
