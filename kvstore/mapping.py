"""What a worker maps of a device: arenas and the control block, out of the descriptors that the store hands over."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvstore.arena import Arena, Memory, close_all
from kvstore.control import ControlBlock
from kvstore.fd_server import fetch, num_descriptors
from kvstore.geometry import CacheGeometry
from protos import kvstore_pb2
from protos.errors import PreconditionFailed


@dataclass
class Mapped:
    """``arenas`` and ``tails`` by group. ``memories``: all there is, in the order of the store's manifest; their
    descriptors are kept to hand them to the next store should this one die. Those of a GPU are the arenas' own.
    """

    arenas: dict[str, Arena]
    tails: dict[str, Arena]
    control: ControlBlock
    memories: tuple[Memory, ...]

    @property
    def fds(self) -> list[int]:
        """The control block's first."""
        return [fd for memory in self.memories for fd in memory.fds]

    def close(self) -> None:
        """Unmaps what nobody else has a view of, and lets go of the descriptors. Harmless the second time."""
        for arena in (*self.arenas.values(), *self.tails.values()):
            arena.close()
        for memory in self.memories:
            if memory.readable:
                memory.close()
        self.memories = ()


def map_memory(attached: kvstore_pb2.Attached, geometry: CacheGeometry, device: str, timeout_s: float) -> Mapped:
    """Fetches page arenas, tail arenas and the control block, and maps those in host memory.

    Raises:
        PreconditionFailed: GEOMETRY_MISMATCH, BAD_CONTROL_BLOCK. PermissionDenied, Unavailable: what ``fetch`` raises.
    """
    manifest, fds = fetch(Path(attached.fd_socket), attached.fd_ticket, timeout_s=timeout_s)
    with ExitStack() as on_error:
        on_error.callback(close_all, fds)
        mapped = _mapped(manifest.entries, fds, geometry, device)
        on_error.pop_all()
    return mapped


def _mapped(entries: Sequence[kvstore_pb2.FdEntry], fds: Sequence[int], geometry: CacheGeometry, device: str) -> Mapped:
    arenas: dict[str, Arena] = {}
    tails: dict[str, Arena] = {}
    control: ControlBlock | None = None
    rest = iter(fds)
    memories: list[Memory] = []
    for entry in entries:
        memory = Memory(tuple(islice(rest, num_descriptors(entry))), entry.num_bytes, tuple(entry.chunk_bytes))
        memories.append(memory)
        if memory.readable and os.fstat(memory.fd).st_size != entry.num_bytes:
            size = os.fstat(memory.fd).st_size
            raise mismatch(f"{size} bytes behind {entry.kind} {entry.group}", f"{entry.num_bytes}")
        if entry.kind == "control":
            control = ControlBlock(memory.map())
            continue
        group = geometry.group(entry.group)
        expected = group.page_bytes if entry.kind == "arena" else geometry.tail_slot_bytes(group)
        if entry.page_bytes != expected or entry.num_pages * expected != entry.num_bytes:
            raise mismatch(f"{entry.page_bytes} bytes a page in {entry.kind} {entry.group}", f"{expected}")
        # Populated: the first step that reaches a page must not pay for its fault.
        mapped = memory.map(populate=True) if memory.readable else memory
        by_group = arenas if entry.kind == "arena" else tails
        by_group[entry.group] = Arena(entry.group, entry.num_pages, expected, mapped, device)
    paged = {group.name for group in geometry.groups if group.has_pages}
    tailed = {group.name for group in geometry.groups if group.has_tail}
    if control is None or set(arenas) != paged or set(tails) != tailed:
        raise mismatch(
            f"arenas {sorted(arenas)}, tails {sorted(tails)}, control block {control is not None}", geometry.summary()
        )
    if control.geometry_digest != geometry.digest():
        raise mismatch(f"{control.geometry_digest.hex()} in the control block", geometry.summary())
    return Mapped(arenas, tails, control, tuple(memories))


def mismatch(store: str, worker: str) -> PreconditionFailed:
    return PreconditionFailed(
        "the store's memory does not fit this geometry",
        reason="GEOMETRY_MISMATCH",
        given=f"{store} (store)",
        allowed=f"{worker} (worker)",
        hint="run worker and store of the same version",
    )
