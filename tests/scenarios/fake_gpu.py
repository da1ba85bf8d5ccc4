"""A GPU for machines without one: its memory is memfds, its addresses are this process's own.

Descriptors behave like CUDA's: they keep memory and contents alive, in any process. What is mapped lies side by side in
a reserved range, so a tensor over it is one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kvstore.client import Attachment
from protos.errors import CapacityError, PreconditionFailed
from tests.scenarios.kvstore_process import StoreProcess
from worker.device_memory import DeviceArena, DeviceMemory

DEVICE = "cuda:GPU-00000000-1111-2222-3333-444444444444"
GRANULARITY = 64 << 10
NAME = "fake-gpu"  # of its memfds, as /proc/<pid>/fd has it
GARBAGE = b"\xab" * 4096

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_PROT_NONE, _MAP_FIXED, _MAP_NORESERVE, _MADV_REMOVE = 0, 0x10, 0x4000, 9


class FakeGpu:
    """``worker.device_memory.Driver``. ``calls`` are the names of what was called, in order."""

    def __init__(self, budget_bytes: int = 1 << 40) -> None:
        self.granularity = GRANULARITY
        self.calls: list[str] = []
        self._left = budget_bytes

    def create(self, num_bytes: int) -> int:
        self.calls.append("create")
        if num_bytes > self._left:
            raise CapacityError("the fake GPU is full", reason="NOT_ENOUGH_MEMORY")
        assert num_bytes > 0 and num_bytes % self.granularity == 0
        self._left -= num_bytes
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        for at in (0, num_bytes - len(GARBAGE)):  # as a GPU's: contents undefined
            os.pwrite(fd, GARBAGE, at)
        return fd

    def export_fd(self, handle: int) -> int:
        self.calls.append("export")
        return os.dup(handle)

    def import_fd(self, fd: int) -> int:
        self.calls.append("import")
        return os.dup(fd)

    def release(self, handle: int) -> None:
        self.calls.append("release")
        os.close(handle)

    def reserve(self, num_bytes: int) -> int:
        self.calls.append("reserve")
        return _map(None, num_bytes, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)

    def free(self, address: int, num_bytes: int) -> None:
        self.calls.append("free")
        assert _LIBC.munmap(address, num_bytes) == 0

    def map(self, address: int, num_bytes: int, handle: int) -> None:
        self.calls.append("map")
        if os.fstat(handle).st_size != num_bytes:
            raise PreconditionFailed("the fake GPU maps all of a chunk", reason="CUDA_ERROR_INVALID_VALUE")
        _map(address, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, handle)

    def unmap(self, address: int, num_bytes: int) -> None:
        self.calls.append("unmap")
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _map(address, num_bytes, _PROT_NONE, flags, -1)

    def zero(self, address: int, num_bytes: int) -> None:
        self.calls.append("zero")
        assert _LIBC.madvise(address, num_bytes, _MADV_REMOVE) == 0  # zeros that take no memory

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def tensor(self, address: int, num_bytes: int, owner: object) -> torch.Tensor:
        class Held(ctypes.c_uint8 * num_bytes):  # type: ignore[misc]
            pass

        memory = Held.from_address(address)
        memory.owner = owner
        return torch.frombuffer(memory, dtype=torch.uint8)


class Memory(DeviceMemory):
    """What a worker brings along; ``before_delivery`` runs when the memory is made and not yet handed over."""

    def __init__(self, gpu: FakeGpu, before_delivery: Callable[[], None] = lambda: None) -> None:
        super().__init__(gpu)
        self.asked: list[list[int]] = []
        self._before_delivery = before_delivery

    def create(self, chunk_bytes: Sequence[int]) -> list[int]:
        self.asked.append(list(chunk_bytes))
        fds = super().create(chunk_bytes)
        self._before_delivery()
        return fds


def attach(store: StoreProcess, memory: DeviceMemory, **changes: Any) -> Attachment:
    return store.attach(**{"device": DEVICE, "device_memory": memory, **changes})


def tensors(attachment: Attachment, gpu: FakeGpu) -> dict[str, torch.Tensor]:
    """The page arenas, u8 [num_pages, page_bytes]."""
    return {
        name: DeviceArena.of(gpu, arena).tensor().view(arena.num_pages, arena.page_bytes)
        for name, arena in attachment.arenas.items()
    }


def descriptors(pid: int | str = "self") -> int:
    """Descriptors of the fake GPU's memory that a process has open."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            count += NAME in str(entry.readlink())
    return count


def mappings() -> int:
    """Mappings of the fake GPU's memory in this process."""
    return sum(NAME in line for line in Path("/proc/self/maps").read_text().splitlines())


WORKER = """
import os
from tests.scenarios.fake_gpu import DEVICE, FakeGpu, Memory, tensors
def attach_gpu(memory, pages=8):
    return client.attach(store_socket, worker_id='other', device=DEVICE, geometry=GEOMETRY,
        arena_bytes=pages * PAGE_BYTES, max_sequences=4, max_sequence_tokens=1024, weights_digest=b'w' * 16,
        device_memory=memory)
"""
"""Ahead of the code of a ``worker_process``: it may attach to the GPU."""


def _map(address: int | None, num_bytes: int, protection: int, flags: int, fd: int) -> int:
    found = _LIBC.mmap(address, num_bytes, protection, flags, fd, 0)
    if found in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return int(found)
