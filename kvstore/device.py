"""One device's memory and sequences: arenas, control block, and the pure tables that the control block mirrors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from kvstore.arena import Memory, StoreArena, allocate_arenas, pages_per_group, tail_slots_per_group
from kvstore.control import MAX_FROZEN_BYTES, MAX_ID_BYTES, ControlBlock, ControlShape, check_fits
from kvstore.geometry import CacheGeometry
from kvstore.memory_limit import check_memory
from kvstore.pages import PageState, PageTable
from kvstore.sequences import Admitted, PageCopy, Refused, SequenceTable
from protos import kvstore_pb2
from protos.errors import ConfigError, PreconditionFailed
from protos.page_hash import PAGE_TOKENS

MAX_SEQUENCES = 1 << 16
MAX_SEQUENCE_TOKENS = 1 << 24
MAX_WEIGHTS_DIGEST_BYTES = 64


@dataclass(frozen=True)
class DeviceSpec:
    """What an attachment asks for. Memory is kept for the next attachment when its spec is equal."""

    device: str
    geometry: CacheGeometry
    arena_bytes: int
    max_sequences: int
    max_sequence_tokens: int
    weights_digest: bytes

    def __post_init__(self) -> None:
        check_fits("device", self.device.encode(), MAX_ID_BYTES)
        check_fits("weights_digest", self.weights_digest, MAX_WEIGHTS_DIGEST_BYTES)
        for name, value, limit in (
            ("max_sequences", self.max_sequences, MAX_SEQUENCES),
            ("max_sequence_tokens", self.max_sequence_tokens, MAX_SEQUENCE_TOKENS),
        ):
            if not 1 <= value <= limit:
                raise ConfigError(f"{name} is out of range", given=value, allowed=f"1 to {limit}")
        if not self.device:
            raise ConfigError("an attachment names its device", given="''", allowed='for example "cpu:0"')

    @property
    def control_shape(self) -> ControlShape:
        """Raises ConfigError when the arenas have no room for a page of each group."""
        counts = pages_per_group(self.geometry, self.arena_bytes)
        return ControlShape(
            tuple(counts[group.name] for group in self.geometry.groups), self.max_sequences, self.max_sequence_tokens
        )

    @property
    def num_bytes(self) -> int:
        """Memory the device takes: arenas and control block."""
        counts = pages_per_group(self.geometry, self.arena_bytes)
        arenas = sum(counts[group.name] * group.page_bytes for group in self.geometry.groups)
        return arenas + self.control_shape.num_bytes


@dataclass(frozen=True)
class NewSequence:
    """A sequence to open; ids and tokens as they came."""

    request_id: str
    tenant_salt: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    frozen_request: bytes


class Device:
    """Owns the memory of one device. Methods run on one thread; ``allocate`` may run on any."""

    def __init__(self, spec: DeviceSpec, arenas: dict[str, StoreArena], control_memory: Memory) -> None:
        self.spec = spec
        self.arenas = arenas
        self.control_memory = control_memory
        self.control = ControlBlock.format(
            control_memory.map(),
            spec.control_shape,
            device=spec.device,
            geometry_digest=spec.geometry.digest(),
            weights_digest=spec.weights_digest,
            groups={group.name: group.page_bytes for group in spec.geometry.groups},
        )
        self.table = SequenceTable(
            [PageTable(arena.group, arena.num_pages) for arena in arenas.values()],
            max_sequences=spec.max_sequences,
            max_sequence_tokens=spec.max_sequence_tokens,
            weights_digest=spec.weights_digest,
            geometry_digest=spec.geometry.digest(),
        )

    @staticmethod
    def allocate(spec: DeviceSpec) -> Device:
        """Raises ConfigError (ARENA_TOO_SMALL) or CapacityError (NOT_ENOUGH_MEMORY); then nothing is left behind."""
        check_memory(spec.num_bytes, what=f"the arenas and control block of {spec.device}")
        control_memory = Memory.allocate(f"{spec.device}-control", spec.control_shape.num_bytes)
        try:
            arenas = allocate_arenas(spec.geometry, spec.arena_bytes, device=spec.device)
        except BaseException:
            control_memory.close()
            raise
        return Device(spec, arenas, control_memory)

    def manifest(self) -> tuple[kvstore_pb2.FdManifest, list[int]]:
        """What a worker maps, and the descriptors in the same order. The device keeps owning them."""
        control = kvstore_pb2.FdEntry(kind="control", num_bytes=self.control_memory.num_bytes)
        entries, fds = [control], [self.control_memory.fd]
        for arena in self.arenas.values():
            entries.append(
                kvstore_pb2.FdEntry(
                    kind="arena",
                    group=arena.group,
                    num_bytes=arena.memory.num_bytes,
                    num_pages=arena.num_pages,
                    page_bytes=arena.page_bytes,
                )
            )
            fds.append(arena.memory.fd)
        return kvstore_pb2.FdManifest(entries=entries), fds

    def open(self, sequences: Iterable[NewSequence]) -> list[Admitted | Refused]:
        """Admits or refuses each, in order. Raises InvalidRequest for a malformed one before any is admitted."""
        sequences = list(sequences)
        for new in sequences:
            self.table.demand_valid(len(new.prompt_token_ids), new.max_tokens)
            check_fits("request_id", new.request_id.encode(), MAX_ID_BYTES)
            check_fits("tenant_salt", new.tenant_salt.encode(), MAX_ID_BYTES)
            check_fits(
                "frozen_request",
                new.frozen_request,
                MAX_FROZEN_BYTES,
                hint="leave out the prompt and emitted tokens: they are in the token log",
            )
        results: list[Admitted | Refused] = []
        for new in sequences:
            result = self.table.open(new.request_id, new.tenant_salt, len(new.prompt_token_ids), new.max_tokens)
            if isinstance(result, Admitted):
                self.control.open_slot(
                    result.slot,
                    epoch=self.control.epoch,
                    request_id=new.request_id.encode(),
                    salt=new.tenant_salt.encode(),
                    frozen=new.frozen_request,
                    max_tokens=new.max_tokens,
                    prompt=new.prompt_token_ids,
                )
            results.append(result)
        return results

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> dict[int, dict[str, list[int]]]:
        handed = self.table.reserve(wanted)
        for slot, groups in handed.items():
            count = len(next(iter(groups.values())))
            for name, pages in groups.items():
                self._mirror(name, pages)
            self.control.write_page_ids(slot, groups, first=self.table.sequence(slot).num_pages - count)
        return handed

    def seal(self, wanted: Sequence[tuple[int, int]]) -> int:
        """Seals the whole pages of each (slot, num_tokens); returns how many, all groups together.

        Raises:
            NotFound: UNKNOWN_SLOT. PreconditionFailed: NOT_COMMITTED, rows that the worker has not declared as written.
        """
        for slot, num_tokens in wanted:
            self.table.sequence(slot)
            if num_tokens > self.control.committed(slot):
                raise PreconditionFailed(
                    f"slot {slot} has rows that are not committed",
                    reason="NOT_COMMITTED",
                    given=num_tokens,
                    allowed=f"0 to {self.control.committed(slot)}",
                )
        count = 0
        for slot, num_tokens in wanted:
            sealed = self.table.seal(slot, num_tokens, partial(self.control.tokens, slot))
            for page in sealed:
                for name, page_id in page.pages.items():
                    entry = self.control.pages[name][page_id : page_id + 1]
                    entry["hash"] = list(page.hash)
                    entry["parent"] = list(page.parent)
                    entry["state"] = self.table.groups[name].state(page_id)
                    count += 1
            if sealed:
                self.control.write_base(slot, len(self.table.sequence(slot).hashes) * PAGE_TOKENS)
        return count

    def truncate(self, slot: int, num_tokens: int) -> list[PageCopy]:
        sequence = self.table.sequence(slot)
        result = self.table.truncate(slot, num_tokens, self.control.logged(slot))
        self.control.cut(slot, num_tokens)
        self.control.write_base(slot, len(sequence.hashes) * PAGE_TOKENS)
        self.control.write_page_ids(slot, sequence.pages)
        for name, pages in result.freed.items():
            self._mirror(name, [*pages, *sequence.pages[name][-1:]])
        return result.copies

    def release(self, slots: Sequence[int]) -> int:
        """Returns the number of pages freed, all groups together."""
        count = 0
        for slot, groups in self.table.release(slots).items():
            self.control.close_slot(slot)
            for name, pages in groups.items():
                self._mirror(name, pages)
                count += len(pages)
        return count

    def release_all(self) -> tuple[int, int]:
        """Ends every sequence; returns (sequences, pages)."""
        slots = self.table.slots
        return len(slots), self.release(slots)

    def stats(self) -> kvstore_pb2.DeviceStats:
        """Everything but who is attached."""
        tail_slots = tail_slots_per_group(self.spec.geometry)
        groups = []
        for group in self.spec.geometry.groups:
            table, arena = self.table.groups[group.name], self.arenas[group.name]
            groups.append(
                kvstore_pb2.GroupStats(
                    group=group.name,
                    mode=group.mode,
                    page_bytes=group.page_bytes,
                    pages_total=table.num_pages,
                    pages_free=table.num_free,
                    pages_promised=table.num_promised,
                    pages_open=table.num_open,
                    pages_sealed=table.num_sealed,
                    pages_sealed_ever=table.num_sealed_ever,
                    tail_slots_total=tail_slots[group.name],
                    arena_bytes=arena.memory.num_bytes,
                )
            )
        return kvstore_pb2.DeviceStats(
            device=self.spec.device,
            epoch=self.control.epoch,
            geometry_digest=self.spec.geometry.digest(),
            sequences=len(self.table),
            max_sequences=self.spec.max_sequences,
            groups=groups,
            control_bytes=self.control_memory.num_bytes,
        )

    def close(self) -> None:
        """Gives up descriptors and mapping. The bytes go when the last worker that maps them does."""
        del self.control  # unmaps now, whoever still refers to this device
        for arena in self.arenas.values():
            arena.memory.close()
        self.control_memory.close()

    def _mirror(self, group: str, pages: Sequence[int]) -> None:
        """Writes the page entries of free and open pages as the table has them."""
        table, entries = self.table.groups[group], self.control.pages[group]
        for page in pages:
            entry = entries[page : page + 1]
            entry["state"] = table.state(page)
            entry["owner"] = table.owner(page)
            entry["generation"] = table.generation(page)
            if table.state(page) != PageState.SEALED:
                entry["hash"] = 0
                entry["parent"] = 0
