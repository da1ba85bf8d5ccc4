"""What this process takes of host and device memory as the system counts it, whoever of us holds it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import psutil
import torch

from worker.held import Storage

HOST = "host"


@dataclass(frozen=True)
class Measured:
    """One memory, now; bytes.

    Attributes:
        used: of the host: resident and this process's alone, mapped arenas are not. Of a GPU: by everybody, for CUDA
            tells no more; a worker has its GPU for itself.
        reserved: of those, what torch's allocator keeps. pools: of those, for CUDA graphs. allocated: what torch has
            given out, of either.
        total, free: of a GPU.
        blocks: [begin, end) of addresses that torch's allocator keeps, in order.
    """

    used: int
    reserved: int = 0
    pools: int = 0
    pools_allocated: int = 0
    allocated: int = 0
    total: int = 0
    free: int = 0
    blocks: tuple[tuple[int, int], ...] = ()

    def has(self, storage: Storage) -> bool:
        """Whether torch's allocator gave it out."""
        at = bisect_right(self.blocks, (storage.address, 1 << 64)) - 1
        return at >= 0 and storage.address < self.blocks[at][1]


Meter = Callable[[], dict[str, Measured]]
"""By memory: HOST, and torch's name of the GPU, "cuda:0"."""


def meter(device: torch.device) -> Meter:
    """Of the host, and of ``device`` where it is a GPU. Makes a context there."""
    if device.type != "cuda":
        return lambda: {HOST: host()}
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return lambda: {HOST: host(), str(device): gpu(device)}


def host() -> Measured:
    resident = psutil.Process().memory_info()
    return Measured(used=max(0, int(resident.rss - resident.shared)))


def gpu(device: torch.device) -> Measured:
    free, total = torch.cuda.mem_get_info(device)
    pools = pools_allocated = 0
    blocks = []
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        if segment["device"] != (device.index or 0):
            continue
        blocks.append((segment["address"], segment["address"] + segment["total_size"]))
        if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            pools += segment["total_size"]
            pools_allocated += segment["allocated_size"]
    return Measured(
        used=total - free,
        reserved=torch.cuda.memory_reserved(device),
        pools=pools,
        pools_allocated=pools_allocated,
        allocated=torch.cuda.memory_allocated(device),
        total=total,
        free=free,
        blocks=tuple(sorted(blocks)),
    )
