"""Host memory as a file descriptor: memfd arenas of equal pages or tail slots, made by the store, mapped by workers.

Memory is checked before it is asked for, and allocated for good before anyone maps it (a memfd page that cannot be had
later would be a SIGBUS in the middle of a step). Size seals make sure that no holder can shrink it under the others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import structlog

from kvstore.geometry import CacheGeometry
from kvstore.memory_limit import check_memory
from protos.errors import CapacityError, ConfigError
from protos.page_hash import PAGE_TOKENS

log = structlog.get_logger("kvstore.arena")

PREFAULT_CHUNK_BYTES = 8 << 20
PROGRESS_BYTES = 1 << 30  # arenas from this size on log their progress
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def pages_per_group(geometry: CacheGeometry, arena_bytes: int, num_tail_slots: int = 0) -> dict[str, int]:
    """How many pages each group gets out of ``arena_bytes``, once ``num_tail_slots`` tail slots a group are set aside.

    A dense sequence needs as many pages in every group and a packed one hardly fewer, so every group gets
    (arena_bytes - tails) // (sum of page bytes); a group in mode window has none.

    Raises:
        ConfigError: ARENA_TOO_SMALL, there is no room for the tails and one page of each group.
    """
    one_of_each = sum(group.page_bytes for group in geometry.groups)
    tails = num_tail_slots * geometry.tail_bytes
    if arena_bytes < tails + one_of_each:
        raise ConfigError(
            "the arenas have no room for the tails and one page of each layer group",
            reason="ARENA_TOO_SMALL",
            given=f"{arena_bytes} bytes",
            allowed=f"at least {tails + one_of_each} bytes ({num_tail_slots} tails of {geometry.tail_bytes} bytes, "
            f"{PAGE_TOKENS} tokens of {one_of_each} bytes)",
            hint="raise the arena size, or lower max_sequences or checkpoint_slots",
        )
    count = (arena_bytes - tails) // one_of_each if one_of_each else 0
    return {group.name: count if group.has_pages else 0 for group in geometry.groups}


@dataclass(frozen=True)
class Memory:
    """An owned memfd of fixed size. Its bytes live until every descriptor and mapping of it is gone."""

    fd: int
    num_bytes: int

    @staticmethod
    def allocate(name: str, num_bytes: int, *, on_progress: Callable[[int], None] | None = None) -> Memory:
        """A zeroed memfd of ``num_bytes``, every page of it present.

        Raises:
            CapacityError: NOT_ENOUGH_MEMORY, the kernel has no room; nothing is left behind.
        """
        fd = os.memfd_create(f"tailpack-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            os.posix_fallocate(fd, 0, num_bytes)  # fails at once, and whole, where there is no room
            _touch(fd, num_bytes, on_progress)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except OSError as failure:
            os.close(fd)
            raise CapacityError(
                f"the kernel has no memory for {name}: {failure.strerror}",
                reason="NOT_ENOUGH_MEMORY",
                given=f"{num_bytes} bytes",
                hint="make the arenas smaller or free memory on this machine",
            ) from failure
        return Memory(fd, num_bytes)

    def map(self) -> mmap.mmap:
        """A shared, writable mapping; it holds a descriptor of its own."""
        return mmap.mmap(self.fd, self.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        os.close(self.fd)


def _touch(fd: int, num_bytes: int, on_progress: Callable[[int], None] | None) -> None:
    """Writes zeros: allocated pages are cleared at their first use, which in a virtual machine can be very slow.

    Writing, unlike touching a mapping, lets other threads of the store run meanwhile.
    """
    zeros = memoryview(bytes(PREFAULT_CHUNK_BYTES))
    done = 0
    while done < num_bytes:
        done += os.pwrite(fd, zeros[: num_bytes - done], done)
        if on_progress:
            on_progress(done)


@dataclass(frozen=True)
class StoreArena:
    """The store's side of one group's arena: ``num_pages`` pages (or tail slots) of ``page_bytes`` in one memfd."""

    group: str
    num_pages: int
    page_bytes: int
    memory: Memory


@dataclass(frozen=True)
class Arenas:
    """A device's arenas by group: ``pages`` of the groups that have pages, ``tails`` of those that have tails."""

    pages: dict[str, StoreArena]
    tails: dict[str, StoreArena]

    def close(self) -> None:
        for arena in (*self.pages.values(), *self.tails.values()):
            arena.memory.close()


def allocate_arenas(geometry: CacheGeometry, arena_bytes: int, *, device: str, num_tail_slots: int = 0) -> Arenas:
    """Arenas of all groups, prefaulted; all or none. Takes seconds for some GiB: keep it off the event loop.

    Raises:
        ConfigError: ARENA_TOO_SMALL. CapacityError: NOT_ENOUGH_MEMORY, before anything is allocated where that can be
        known.
    """
    counts = pages_per_group(geometry, arena_bytes, num_tail_slots)
    made = Arenas({}, {})
    wanted = [(made.pages, g.name, counts[g.name], g.page_bytes) for g in geometry.groups if counts[g.name]]
    wanted += [
        (made.tails, g.name, num_tail_slots, geometry.tail_slot_bytes(g))
        for g in geometry.groups
        if g.has_tail and num_tail_slots
    ]
    total = sum(count * size for *_, count, size in wanted)
    check_memory(total, what=f"the arenas of {device}")
    progress = _Progress(device, total)
    try:
        for arenas, name, count, size in wanted:
            what = "pages" if arenas is made.pages else "tails"
            memory = Memory.allocate(f"{device}-{name}-{what}", count * size, on_progress=progress.within)
            progress.done += count * size
            arenas[name] = StoreArena(name, count, size, memory)
    except BaseException:
        made.close()
        raise
    return made


class _Progress:
    """Logs at most once a second while a large allocation runs."""

    def __init__(self, device: str, total: int) -> None:
        self.done = 0
        self._device, self._total, self._last = device, total, time.monotonic()

    def within(self, num_bytes: int) -> None:
        now = time.monotonic()
        if self._total >= PROGRESS_BYTES and now - self._last >= 1:
            self._last = now
            ready = self.done + num_bytes
            log.info(
                "allocating arenas",
                device=self._device,
                ready=f"{ready / 2**30:.1f} of {self._total / 2**30:.1f} GiB",
                percent=round(100 * ready / self._total),
            )


class Arena:
    """A worker's side: the mapped pages of one group, or its tail slots.

    ``buffer`` is writable and num_pages * page_bytes long; it stays valid until ``close``. Views that others took of
    it (a torch tensor) keep the mapping alive after that, but an attachment that ended must not write through them.
    """

    def __init__(self, group: str, num_pages: int, page_bytes: int, mapping: mmap.mmap) -> None:
        self.group = group
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self._mapping = mapping
        self.buffer = memoryview(mapping)

    def page(self, page: int) -> memoryview:
        """The bytes of one page."""
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} of {self.num_pages}")
        return self.buffer[page * self.page_bytes : (page + 1) * self.page_bytes]

    def close(self) -> None:
        """Unmaps where nobody else holds a view; else the last view's end does."""
        try:
            self.buffer.release()
            self._mapping.close()
        except BufferError:
            pass  # the owner of the view decides when the memory goes

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
