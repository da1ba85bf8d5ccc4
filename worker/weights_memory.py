"""Memory for a model's weights as descriptors: filled once, then mapped read-only by any number of processes.

On the host it is a memfd that nobody can write to any more, shared by all workers of a NUMA node. On a GPU it is chunks
as of the KV arenas; a GPU's mappings cannot be kept from writing, and nothing of ours does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from kvstore.arena import ArenaPlan, Memory, chunk_sizes, close_all
from protos.errors import CapacityError
from worker.device_memory import DeviceArena, Driver
from worker.weights_layout import Layout, Place, replace_tensors

HOST = "host"
_LIBC = ctypes.CDLL(None)
_NODES = Path("/sys/devices/system/node")


def host_memory(cpus: set[int], nodes: Path = _NODES) -> str:
    """ "host:node<n>" where these CPUs are all of one NUMA node and there are others, else "host"."""
    by_node = {}
    for folder in nodes.glob("node[0-9]*"):
        try:
            by_node[folder.name] = _numbers((folder / "cpulist").read_text())
        except (OSError, ValueError):
            return HOST
    mine = [name for name, own in by_node.items() if cpus & own]
    return f"{HOST}:{mine[0]}" if len(by_node) > 1 and len(mine) == 1 else HOST


def _numbers(text: str) -> set[int]:
    """Of "0-3,8"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def fill(network: Any, layout: Layout, driver: Driver | None) -> Memory:
    """Moves a network's tensors into new memory, which nobody can write to any more where it is the host's.

    Tensor by tensor, each of which goes once it is there: little more than one copy of all is there at any time. The
    network is left without values (torch's device "meta").

    Args:
        driver: of the GPU that the network is on; None: it is on the host.

    Raises:
        CapacityError: NOT_ENOUGH_MEMORY.
    """
    with _filling(layout, driver) as (room, sealed):
        done: set[str] = set()

        def move(path: str, tensor: torch.Tensor) -> torch.Tensor:
            place = layout.by_path[path]
            if place.name not in done:
                assert (tensor.dtype, tuple(tensor.shape)) == (place.dtype, place.shape), path
                room(place)(tensor)
                done.add(place.name)
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

        replace_tensors(network, move)
        if driver is None:
            _LIBC.malloc_trim(0)  # the C library keeps what was freed in pieces of up to 32 MiB: nearly all of a model
        return sealed()


def mapped(memory: Memory, driver: Driver | None) -> torch.Tensor:
    """u8 [memory.num_bytes] of the weights; it and its views keep the mapping. The descriptors stay the caller's."""
    if driver is not None:
        return DeviceArena(driver, memory.fds, memory.chunk_bytes, memory.num_bytes).tensor()
    with warnings.catch_warnings():  # that the memory cannot be written to, which is what is wanted
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory.map_read_only(), dtype=torch.uint8)


_Room = Callable[[Place], Callable[[torch.Tensor], None]]


@contextmanager
def _filling(layout: Layout, driver: Driver | None) -> Iterator[tuple[_Room, Callable[[], Memory]]]:
    """(what makes room for a tensor and then takes it, what ends it). Nothing stays where it is not ended."""
    with ExitStack() as undo:
        yield _host_filling(layout, undo) if driver is None else _device_filling(layout, driver, undo)


def _host_filling(layout: Layout, undo: ExitStack) -> tuple[_Room, Callable[[], Memory]]:
    memory = Memory((os.memfd_create("tailpack-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),), layout.num_bytes)
    on_error = undo.enter_context(ExitStack())
    on_error.callback(memory.close)
    os.ftruncate(memory.fd, memory.num_bytes)
    mapping = memory.map()

    def room(place: Place) -> Callable[[torch.Tensor], None]:
        try:  # a page that cannot be had would be a SIGBUS
            os.posix_fallocate(memory.fd, place.offset, place.num_bytes)
        except OSError as failure:
            raise CapacityError(
                f"the kernel has no memory for weights: {failure.strerror}",
                reason="NOT_ENOUGH_MEMORY",
                given=f"{memory.num_bytes} bytes; {place.offset} were there",
            ) from failure
        return lambda tensor: _write(mapping, place, tensor)

    def sealed() -> Memory:
        mapping.close()
        memory.seal()
        on_error.pop_all()
        return memory

    return room, sealed


def _write(mapping: mmap.mmap, place: Place, tensor: torch.Tensor) -> None:
    memory = torch.frombuffer(mapping, dtype=torch.uint8, count=place.num_bytes, offset=place.offset)
    memory.view(place.dtype).view(place.shape).copy_(tensor)


def _device_filling(layout: Layout, driver: Driver, undo: ExitStack) -> tuple[_Room, Callable[[], Memory]]:
    """Chunk by chunk: the GPU has no room for two copies of a model."""
    (sizes,) = chunk_sizes([ArenaPlan("weights", "", 1, layout.num_bytes)], driver.granularity)
    total, made, fds = sum(sizes), [0], list[int]()
    address = driver.reserve(total)
    undo.callback(driver.free, address, total)
    on_error = ExitStack()
    undo.push(on_error)
    on_error.callback(lambda: close_all(fds))

    def room(place: Place) -> Callable[[torch.Tensor], None]:
        while made[0] < place.offset + place.num_bytes:
            if torch.cuda.is_available():
                torch.cuda.empty_cache()  # what was moved so far is torch's no more
            fds.append(_chunk(driver, address + made[0], sizes[len(fds)], undo))
            made[0] += sizes[len(fds) - 1]
        memory = driver.tensor(address, made[0], None)

        def take(tensor: torch.Tensor) -> None:
            place.view(memory).copy_(tensor)

        return take

    def sealed() -> Memory:
        driver.synchronize()
        on_error.pop_all()
        return Memory(tuple(fds), layout.num_bytes, tuple(sizes))

    return room, sealed


def _chunk(driver: Driver, address: int, num_bytes: int, undo: ExitStack) -> int:
    """Makes a chunk, zeroed, mapped there until ``undo``. Returns its descriptor."""
    handle = driver.create(num_bytes)
    try:
        driver.map(address, num_bytes, handle)
        undo.callback(driver.unmap, address, num_bytes)
        driver.zero(address, num_bytes)
        return driver.export_fd(handle)
    finally:
        driver.release(handle)


def damaged(memory: torch.Tensor, layout: Layout, checksums: Sequence[int]) -> str | None:
    """The first tensor whose bytes are not what its checksum says; None: there is none."""
    for place, checksum in zip(layout.places, checksums, strict=True):
        if place.checksum(memory) != checksum:
            return place.name
    return None
