"""What a worker and its share of the kvstore need for so many sequences of so many tokens, and how many fit.

Sizes in, sizes out: nothing is loaded, no device is asked. The arenas are planned by the kvstore's own arithmetic
(``kvstore.device.DeviceSpec``), so what stands here is what a store takes when it is asked for the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvstore.arena import bytes_for_pages
from kvstore.device import DeviceSpec
from kvstore.geometry import CacheGeometry
from kvstore.group_pages import GroupPages
from kvstore.retention import pages_for
from worker.config import WorkerConfig
from worker.memory_plan import Use, total

GRANULARITY = 2 << 20
"""Of device memory: CUDA's minimum (cuMemGetAllocationGranularity) on every GPU that kernels are built for."""
MAX_RUNNING = 4096  # WorkerConfig's limit
# Host memory of a process besides weights, arenas and workspaces. On a CPU 199 and 46 MiB were seen (`tailpack memory`,
# and RSS, of tests/e2e's tiny cluster, x86-64, 2026-11-30). With CUDA it was not measured: a generous guess.
WORKER_PROCESS_BYTES = 256 << 20
GPU_WORKER_PROCESS_BYTES = 3 << 30
STORE_PROCESS_BYTES = 64 << 20


@dataclass(frozen=True)
class Machine:
    """Where a worker is to run.

    Attributes:
        on_gpu: whether weights and arenas are on a GPU; else in host memory.
        num_bytes: of that memory.
        reserved_bytes: of them, left to everything else: CUDA's context, workspaces and activations.
    """

    on_gpu: bool
    num_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Need:
    """What one worker takes, by who takes it and owner. Everything of ``device`` is on its GPU.

    ``worker`` and ``kvstore`` is host memory, charged to the process (in Kubernetes: the container) of that name: the
    kernel charges shared memory to whoever touches it first, which is the store.
    ``arena_bytes``: as a worker asks for it (--arena-bytes, --kv-bytes). ``num_pages``: by group, for sequences.
    """

    arena_bytes: int
    num_pages: dict[str, int]
    device: tuple[Use, ...]
    worker: tuple[Use, ...]
    kvstore: tuple[Use, ...]

    @property
    def limiting_bytes(self) -> int:
        """Of the memory that weights and arenas are in."""
        return total(self.device) or total(self.worker) + total(self.kvstore)


def spec_of(config: WorkerConfig, geometry: CacheGeometry, tokens: int, arena_bytes: int) -> DeviceSpec:
    """The attachment that a worker of ``config`` asks for, where its longest sequence is of ``tokens`` tokens."""
    return DeviceSpec(
        device=config.device,
        geometry=geometry,
        arena_bytes=arena_bytes,
        max_sequences=config.num_slots,
        max_sequence_tokens=tokens,
        weights_digest=b"",
        checkpoint_slots=config.num_checkpoints if geometry.tail_bytes else 0,
        memory_granularity=GRANULARITY if config.on_gpu else 0,
    )


def arena_bytes_for(config: WorkerConfig, geometry: CacheGeometry, tokens: int) -> int:
    """The least arenas that hold ``config.max_running`` sequences at once, each of ``tokens`` tokens, prompt and output
    together, no two sharing a page; and that let a worker promise that length (worker.shell clips it to what the pages
    of groups without a window hold alone).
    """
    spec = spec_of(config, geometry, tokens, 1)
    worst = max(GroupPages.empty(group, geometry, tokens, tokens).worst for group in geometry.groups)
    alone = pages_for(tokens) if any(g.has_pages and not g.window for g in geometry.groups) else 0
    num_pages = max(1, config.max_running * worst, alone)
    return bytes_for_pages(geometry, num_pages, spec.num_tail_slots, spec.checkpoint_slots)


def need(config: WorkerConfig, geometry: CacheGeometry, weights: Sequence[Use], tokens: int, machine: Machine) -> Need:
    """What ``config.max_running`` sequences of ``tokens`` tokens take.

    Args:
        weights: what ``worker.weights.planned_uses`` says.

    Raises:
        ConfigError: a number is out of the store's range.
    """
    arena_bytes = arena_bytes_for(config, geometry, tokens)
    spec = spec_of(config, geometry, tokens, arena_bytes)
    num_pages = spec.num_pages
    arenas = []
    for arena, chunks in zip(*spec.plan(), strict=True):
        what, slots = ("pages", num_pages[arena.group]) if arena.kind == "arena" else ("tails", spec.max_sequences)
        sizes = {
            f"{what} {arena.group}": slots * arena.page_bytes,
            f"{what} {arena.group}, checkpoints": (arena.num_pages - slots) * arena.page_bytes,
            f"rounding of {what} {arena.group}": sum(chunks) - arena.num_bytes if chunks else 0,
        }
        arenas += [Use(owner, size) for owner, size in sizes.items() if size]
    store = (Use("control block", spec.control_shape.num_bytes), Use("process, about", STORE_PROCESS_BYTES))
    if machine.on_gpu:
        reserved = Use("context, workspaces, activations, at most", machine.reserved_bytes)
        process = Use("process, about", GPU_WORKER_PROCESS_BYTES)
        return Need(arena_bytes, num_pages, (*weights, *arenas, reserved), (process,), store)
    process = Use("process, about", WORKER_PROCESS_BYTES)
    workspaces = Use("workspaces, activations, at most", machine.reserved_bytes)
    return Need(arena_bytes, num_pages, (), (*weights, process, workspaces), (*arenas, *store))


def most_sequences(
    config: WorkerConfig, geometry: CacheGeometry, weights: Sequence[Use], tokens: int, machine: Machine
) -> int:
    """The most sequences of ``tokens`` tokens that ``machine`` holds at once, at most MAX_RUNNING; 0: not one."""

    def fits(sequences: int) -> bool:
        asked = replace(config, max_running=sequences)
        return need(asked, geometry, weights, tokens, machine).limiting_bytes <= machine.num_bytes

    least, over = 0, MAX_RUNNING + 1  # `least` fit; `over` do not, or are not allowed
    while over - least > 1:
        middle = (least + over) // 2
        least, over = (middle, over) if fits(middle) else (least, middle)
    return least
