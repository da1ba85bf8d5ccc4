"""Memory as file descriptors: arenas of equal pages or tail slots, held by the store, mapped by workers.

Host memory is a memfd that the store makes. It is checked before it is asked for, and allocated for good before anyone
maps it (a memfd page that cannot be had later would be a SIGBUS in the middle of a step). Size seals make sure that no
holder can shrink it under the others.

Device memory is made by a worker, in chunks, at the store's request. The store only holds the descriptors: that keeps
the memory and its contents alive, and it needs no GPU library to do so.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

import structlog

from kvstore.geometry import CacheGeometry, LayerGroup
from kvstore.memory_limit import check_memory
from kvstore.retention import most_end_pages
from protos.errors import CapacityError, ConfigError, PreconditionFailed
from protos.page_hash import PAGE_TOKENS

log = structlog.get_logger("kvstore.arena")

PREFAULT_CHUNK_BYTES = 8 << 20
PROGRESS_BYTES = 1 << 30  # arenas from this size on log their progress
CHUNK_BYTES = 1 << 30  # of device memory
MAX_CHUNKS = 252  # of one device: with the control block, what one message carries (SCM_MAX_FD is 253)
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def pages_per_group(
    geometry: CacheGeometry, arena_bytes: int, num_tail_slots: int = 0, num_checkpoint_slots: int = 0
) -> dict[str, int]:
    """How many pages each group gets for sequences out of ``arena_bytes``, once ``num_tail_slots`` tail slots a group
    and the pages of ``num_checkpoint_slots`` checkpoints (``CacheGeometry.keeps_open_pages``) are set aside.

    A dense sequence needs as many pages in every group and a packed one hardly fewer, so every group gets the same
    number; a group in mode window has none, and one that keeps every n-th page an n-th, and those of the prompt ends.

    Raises:
        ConfigError: ARENA_TOO_SMALL, there is no room for the tails and one page of each group.
    """
    aside = _bytes_aside(geometry, num_tail_slots, num_checkpoint_slots)
    one_of_each = sum(group.page_bytes for group in geometry.groups if group.keep_every == 1)
    if arena_bytes < aside + one_of_each:
        raise ConfigError(
            "the arenas have no room for the tails and one page of each layer group",
            reason="ARENA_TOO_SMALL",
            given=f"{arena_bytes} bytes",
            allowed=f"at least {aside + one_of_each} bytes ({num_tail_slots} tails of {geometry.tail_bytes} bytes, "
            f"{aside - num_tail_slots * geometry.tail_bytes} bytes of pages beside them, "
            f"{PAGE_TOKENS} tokens of {one_of_each} bytes)",
            hint="raise the arena size, or lower max_sequences or checkpoint_slots",
        )
    bytes_of_pages, pages = _share(geometry)
    count = (arena_bytes - aside) * pages // bytes_of_pages if bytes_of_pages else 0
    return {
        g.name: count // g.keep_every + _end_pages(g, num_tail_slots) if g.has_pages else 0 for g in geometry.groups
    }


def bytes_for_pages(
    geometry: CacheGeometry, num_pages: int, num_tail_slots: int = 0, num_checkpoint_slots: int = 0
) -> int:
    """The least bytes of which ``pages_per_group`` gives each group that keeps all its pages ``num_pages``."""
    bytes_of_pages, pages = _share(geometry)
    return _bytes_aside(geometry, num_tail_slots, num_checkpoint_slots) + -(-num_pages * bytes_of_pages // pages)


def _bytes_aside(geometry: CacheGeometry, num_tail_slots: int, num_checkpoint_slots: int) -> int:
    """Tails, open pages of checkpoints, and pages of prompt ends."""
    kept = num_checkpoint_slots * sum(g.page_bytes for g in geometry.groups if geometry.keeps_open_pages(g))
    ends = sum(_end_pages(group, num_tail_slots) * group.page_bytes for group in geometry.groups)
    return num_tail_slots * geometry.tail_bytes + kept + ends


def _end_pages(group: LayerGroup, num_sequences: int) -> int:
    """Pages beside the n-th ones, and one for what an n-th of the others' number leaves over."""
    return most_end_pages(group.window) * num_sequences + 1 if group.keep_every > 1 else 0


def _share(geometry: CacheGeometry) -> tuple[int, int]:
    """(bytes, pages): what so many pages of a long sequence take, all groups, as whole numbers."""
    pages = math.lcm(*(group.keep_every for group in geometry.groups))
    return sum(group.page_bytes * (pages // group.keep_every) for group in geometry.groups), pages


@dataclass(frozen=True)
class ArenaPlan:
    """An arena that a device needs. ``kind``: "arena" (of pages) or "tails" (of tail slots)."""

    kind: str
    group: str
    num_pages: int
    page_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.page_bytes


def planned_arenas(
    geometry: CacheGeometry, arena_bytes: int, num_tail_slots: int = 0, num_checkpoint_slots: int = 0
) -> list[ArenaPlan]:
    """The arenas of all groups, pages first; pages for checkpoints stand behind those for sequences.

    Raises ConfigError (ARENA_TOO_SMALL).
    """
    counts = pages_per_group(geometry, arena_bytes, num_tail_slots, num_checkpoint_slots)
    for group in geometry.groups:
        if geometry.keeps_open_pages(group):
            counts[group.name] += num_checkpoint_slots
    pages = [ArenaPlan("arena", g.name, counts[g.name], g.page_bytes) for g in geometry.groups if counts[g.name]]
    tails = [
        ArenaPlan("tails", g.name, num_tail_slots, geometry.tail_slot_bytes(g))
        for g in geometry.groups
        if g.has_tail and num_tail_slots
    ]
    return pages + tails


def chunk_sizes(arenas: Sequence[ArenaPlan], granularity: int) -> list[tuple[int, ...]]:
    """How device memory for these arenas is cut: sizes in bytes of each arena's chunks, in order.

    Chunks are multiples of ``granularity``. All but an arena's last are CHUNK_BYTES, or larger where there would be
    more than MAX_CHUNKS in all; the last is as small as the arena lets it be.

    Raises:
        ConfigError: TOO_MANY_ARENAS, each needs a chunk of its own.
    """
    if len(arenas) > MAX_CHUNKS:
        raise ConfigError(
            "the layer groups need more arenas than descriptors can be handed over at once",
            reason="TOO_MANY_ARENAS",
            given=len(arenas),
            allowed=f"up to {MAX_CHUNKS}",
        )
    chunk = -(-CHUNK_BYTES // granularity) * granularity
    while sum(-(-arena.num_bytes // chunk) for arena in arenas) > MAX_CHUNKS:
        chunk *= 2
    sizes = []
    for arena in arenas:
        num_bytes = -(-arena.num_bytes // granularity) * granularity
        whole, rest = divmod(num_bytes, chunk)
        sizes.append((chunk,) * whole + ((rest,) if rest else ()))
    return sizes


@dataclass(frozen=True)
class Memory:
    """Owned memory of fixed size. Its bytes live until every descriptor and mapping of it is gone.

    Attributes:
        fds: host memory: one memfd. Device memory: one a chunk, to be mapped side by side.
        num_bytes: what is used of it, from its start.
        chunk_bytes: sizes of the chunks of device memory; empty for host memory.
    """

    fds: tuple[int, ...]
    num_bytes: int
    chunk_bytes: tuple[int, ...] = ()

    @property
    def readable(self) -> bool:
        """Whether this process can map and read it."""
        return not self.chunk_bytes

    @property
    def fd(self) -> int:
        """The one descriptor of host memory."""
        (fd,) = self.fds
        return fd

    @property
    def allocated_bytes(self) -> int:
        """What it takes: of device memory, whole chunks."""
        return sum(self.chunk_bytes) or self.num_bytes

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
        return Memory((fd,), num_bytes)

    @staticmethod
    def held(fd: int, num_bytes: int, *, read_only: bool = False) -> Memory:
        """Host memory that another process made, and this one was handed. ``read_only``: nobody can write to it.

        Raises:
            PreconditionFailed: BAD_MEMORY, it is no memfd of this size whose size is sealed: whoever else holds it
            could cut it off under us.
        """
        try:
            seals, size = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size
        except OSError:
            seals, size = 0, 0
        wanted = _SIZE_SEALS | (fcntl.F_SEAL_WRITE if read_only else 0)
        if seals & wanted != wanted or size != num_bytes:
            raise PreconditionFailed(
                "a descriptor is not the memory that it should be",
                reason="BAD_MEMORY",
                given=f"{size} bytes, seals {seals:#x}",
                allowed=f"a memfd of {num_bytes} bytes, seals {wanted:#x}",
            )
        return Memory((fd,), num_bytes)

    def seal(self) -> None:
        """Nobody can write to it from here on. Raises OSError (EBUSY): a writable mapping of it is left."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | _SIZE_SEALS)

    def map_read_only(self) -> mmap.mmap:
        """A mapping of host memory that faults when it is written to; it holds a descriptor of its own."""
        # Private, for older kernels take a shared mapping of sealed memory for one that might be written to later.
        return mmap.mmap(self.fd, self.num_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ)

    def map(self, *, populate: bool = False) -> mmap.mmap:
        """A shared, writable mapping of host memory; it holds a descriptor of its own.

        ``populate``: with all pages present, so that none has to be faulted in at its first use.
        """
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        return mmap.mmap(self.fd, self.num_bytes, flags, mmap.PROT_READ | mmap.PROT_WRITE)

    def close(self) -> None:
        close_all(self.fds)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


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
    """The store's side of one group's arena: ``num_pages`` pages (or tail slots) of ``page_bytes`` side by side."""

    group: str
    num_pages: int
    page_bytes: int
    memory: Memory


@dataclass(frozen=True)
class Arenas:
    """A device's arenas by group: ``pages`` of the groups that have pages, ``tails`` of those that have tails."""

    pages: dict[str, StoreArena]
    tails: dict[str, StoreArena]

    def add(self, plan: ArenaPlan, memory: Memory) -> None:
        arenas = self.pages if plan.kind == "arena" else self.tails
        arenas[plan.group] = StoreArena(plan.group, plan.num_pages, plan.page_bytes, memory)

    def all(self) -> list[StoreArena]:
        """In the order of ``planned_arenas``."""
        return [*self.pages.values(), *self.tails.values()]

    def close(self) -> None:
        for arena in self.all():
            arena.memory.close()


def allocate_arenas(
    geometry: CacheGeometry,
    arena_bytes: int,
    *,
    device: str,
    num_tail_slots: int = 0,
    num_checkpoint_slots: int = 0,
) -> Arenas:
    """Arenas of all groups, prefaulted; all or none. Takes seconds for some GiB: keep it off the event loop.

    Raises:
        ConfigError: ARENA_TOO_SMALL. CapacityError: NOT_ENOUGH_MEMORY, before anything is allocated where that can be
        known.
    """
    plans = planned_arenas(geometry, arena_bytes, num_tail_slots, num_checkpoint_slots)
    made = Arenas({}, {})
    total = sum(plan.num_bytes for plan in plans)
    check_memory(total, what=f"the arenas of {device}")
    progress = _Progress(device, total)
    try:
        for plan in plans:
            what = "pages" if plan.kind == "arena" else "tails"
            memory = Memory.allocate(f"{device}-{plan.group}-{what}", plan.num_bytes, on_progress=progress.within)
            progress.done += plan.num_bytes
            made.add(plan, memory)
    except BaseException:
        made.close()
        raise
    return made


def held_arenas(plans: Sequence[ArenaPlan], sizes: Sequence[tuple[int, ...]], fds: Sequence[int]) -> Arenas:
    """Arenas of memory that others made: ``fds`` of all arenas in order, of each chunk of a GPU's. The arenas own them
    from here on; where this raises, they stay the caller's.

    Raises:
        PreconditionFailed: BAD_MEMORY, of host memory. A GPU's cannot be looked at.
    """
    made, rest = Arenas({}, {}), list(fds)
    for plan, chunk_bytes in zip(plans, sizes, strict=True):
        count = max(1, len(chunk_bytes))
        here, rest = rest[:count], rest[count:]
        memory = Memory(tuple(here), plan.num_bytes, chunk_bytes)
        made.add(plan, memory if chunk_bytes else Memory.held(memory.fd, plan.num_bytes))
    return made


def demand_distinct_memory(memories: Sequence[Memory]) -> None:
    """Raises PreconditionFailed (BAD_MEMORY) where two descriptors of host memory are of the same."""
    files = [os.fstat(memory.fd) for memory in memories if memory.readable]
    if len({(file.st_dev, file.st_ino) for file in files}) != len(files):
        raise PreconditionFailed(
            "two descriptors are of the same memory", reason="BAD_MEMORY", allowed="memory of its own for each arena"
        )


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
    """A worker's side: the pages of one group, or its tail slots.

    Host memory comes mapped: ``buffer`` is writable and num_pages * page_bytes long; it stays valid until ``close``.
    Views that others took of it (a torch tensor) keep the mapping alive after that, but an attachment that ended must
    not write through them.

    The memory of a GPU, ``device``, comes as ``chunks``, to be mapped by a library that this package does not know.
    The descriptors stay this arena's.
    """

    def __init__(
        self, group: str, num_pages: int, page_bytes: int, memory: mmap.mmap | Memory, device: str = ""
    ) -> None:
        self.group = group
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.device = device
        self.chunks = memory if isinstance(memory, Memory) else None
        self._mapping = None if isinstance(memory, Memory) else memory
        self._buffer = None if self._mapping is None else memoryview(self._mapping)

    @property
    def buffer(self) -> memoryview:
        """Raises PreconditionFailed (DEVICE_MEMORY): the host cannot read it."""
        if self._buffer is None:
            raise PreconditionFailed(
                f"the arena of layer group {self.group!r} is device memory",
                reason="DEVICE_MEMORY",
                given=f"{self.num_pages} pages in chunks",
                allowed="host memory",
                hint="map its chunks (worker.device_memory)",
            )
        return self._buffer

    def page(self, page: int) -> memoryview:
        """The bytes of one page."""
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} of {self.num_pages}")
        return self.buffer[page * self.page_bytes : (page + 1) * self.page_bytes]

    def close(self) -> None:
        """Unmaps where nobody else holds a view; else the last view's end does. Harmless the second time."""
        if self.chunks is not None:
            close_all(self.chunks.fds)
            self.chunks = replace(self.chunks, fds=())
        if self._buffer is None or self._mapping is None:
            return
        try:
            self._buffer.release()
            self._mapping.close()
        except BufferError:
            pass  # the owner of the view decides when the memory goes

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
