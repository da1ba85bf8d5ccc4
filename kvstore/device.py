"""One device's memory and sequences: arenas, control block, and the pure tables that the control block mirrors."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from kvstore import messages
from kvstore.answers import Admitted, Adopted, Checkpointed, Forked, NewPage, Refused, SealResult, Truncated
from kvstore.arena import (
    ArenaPlan,
    Arenas,
    Memory,
    allocate_arenas,
    chunk_sizes,
    close_all,
    demand_distinct_memory,
    held_arenas,
    pages_per_group,
    planned_arenas,
)
from kvstore.checksum import NO_CHECKSUM
from kvstore.control import ControlBlock, bad_block, check_fits
from kvstore.control_layout import MAX_FROZEN_BYTES, MAX_ID_BYTES, ControlShape, page_flags
from kvstore.device_stats import device_stats
from kvstore.events import EventLog
from kvstore.geometry import CacheGeometry
from kvstore.group_record import record_of
from kvstore.memory_limit import check_memory
from kvstore.pages import PageState
from kvstore.rebuild import demand_same, rebuild
from kvstore.recovery import LastWords, demand_possible, last_words, why_void
from kvstore.sequence_pages import SealedPage
from kvstore.sequences import SequenceTable
from kvstore.verify import Verifier
from protos import kvstore_pb2
from protos.errors import ConfigError, InternalError, InvalidRequest, PreconditionFailed
from protos.page_hash import ROOT

log = structlog.get_logger("kvstore.device")

COMPARED_BYTES = 1 << 30
"""Of pages, before a worker goes on with what another left: less than a second."""

MAX_SEQUENCES = 1 << 16
MAX_SEQUENCE_TOKENS = 1 << 24
MAX_CHECKPOINT_SLOTS = 1 << 16
MAX_WEIGHTS_DIGEST_BYTES = 64
EVENTS_KEPT = 1 << 16
GPU = "cuda:"  # how the names of devices begin whose memory is a GPU's
GRANULARITIES = (4096, 1 << 30)  # of device memory; powers of two


@dataclass(frozen=True)
class DeviceSpec:
    """What an attachment asks for. Memory is kept for the next attachment when its spec is equal.

    ``arena_bytes`` covers pages and tails; ``checkpoint_slots`` are tails kept beside those of the sequences.
    ``memory_granularity``: of a GPU's memory, which comes in chunks that are multiples of it (so an arena can take up
    to that much more than its pages); 0: host memory.
    """

    device: str
    geometry: CacheGeometry
    arena_bytes: int
    max_sequences: int
    max_sequence_tokens: int
    weights_digest: bytes
    checkpoint_slots: int = 0
    memory_granularity: int = 0

    def __post_init__(self) -> None:
        check_fits("device", self.device.encode(), MAX_ID_BYTES)
        check_fits("weights_digest", self.weights_digest, MAX_WEIGHTS_DIGEST_BYTES)
        for name, value, least, limit in (
            ("max_sequences", self.max_sequences, 1, MAX_SEQUENCES),
            ("max_sequence_tokens", self.max_sequence_tokens, 1, MAX_SEQUENCE_TOKENS),
            ("checkpoint_slots", self.checkpoint_slots, 0, MAX_CHECKPOINT_SLOTS),
        ):
            if not least <= value <= limit:
                raise ConfigError(f"{name} is out of range", given=value, allowed=f"{least} to {limit}")
        if not self.device:
            raise ConfigError("an attachment names its device", given="''", allowed='for example "cpu:0"')
        if self.device.startswith(GPU) != self.on_gpu:
            raise ConfigError(
                f"memory_granularity does not go with device {self.device}",
                given=self.memory_granularity,
                allowed=f"more than 0 for {GPU}..., 0 for any other",
            )
        least_granularity, most_granularity = GRANULARITIES
        granularity = self.memory_granularity
        if self.on_gpu and (
            not least_granularity <= granularity <= most_granularity or granularity & (granularity - 1)
        ):
            raise ConfigError(
                "memory_granularity is out of range",
                given=granularity,
                allowed=f"a power of two, {least_granularity} to {most_granularity}",
            )

    @property
    def on_gpu(self) -> bool:
        """Whether the arenas are device memory, which a worker has to make."""
        return self.memory_granularity > 0

    @property
    def num_tail_slots(self) -> int:
        """Tail slots of each group that has tails."""
        return self.max_sequences + self.checkpoint_slots

    @property
    def num_pages(self) -> dict[str, int]:
        """Pages of each group, for sequences.

        Raises ConfigError when the arenas have no room for tails and a page of each group.
        """
        return pages_per_group(self.geometry, self.arena_bytes, self.num_tail_slots, self.checkpoint_slots)

    @property
    def control_shape(self) -> ControlShape:
        """Raises ConfigError when the arenas have no room for tails and a page of each group."""
        counts = self.num_pages
        return ControlShape(
            tuple(counts[group.name] for group in self.geometry.groups), self.max_sequences, self.max_sequence_tokens
        )

    def plan(self) -> tuple[list[ArenaPlan], list[tuple[int, ...]]]:
        """The arenas, and the sizes of each one's chunks (none in host memory).

        Raises ConfigError when the arenas have no room for tails and a page of each group.
        """
        arenas = planned_arenas(self.geometry, self.arena_bytes, self.num_tail_slots, self.checkpoint_slots)
        if not self.on_gpu:
            return arenas, [()] * len(arenas)
        return arenas, chunk_sizes(arenas, self.memory_granularity)

    def entries(self) -> list[kvstore_pb2.FdEntry]:
        """What a worker maps, in order: the control block, then the arenas.

        Raises ConfigError when the arenas have no room for tails and a page of each group.
        """
        control = kvstore_pb2.FdEntry(kind="control", num_bytes=self.control_shape.num_bytes)
        return [control, *messages.arena_entries(*self.plan())]

    @property
    def host_bytes(self) -> int:
        """Host memory that the device takes: control block, and arenas that are not a GPU's."""
        arenas, _ = self.plan()
        return self.control_shape.num_bytes + (0 if self.on_gpu else sum(arena.num_bytes for arena in arenas))

    @property
    def device_bytes(self) -> int:
        """Device memory that it takes."""
        return sum(map(sum, self.plan()[1]))


@dataclass(frozen=True)
class NewSequence:
    """A sequence to open; ids and tokens as they came."""

    request_id: str
    tenant_salt: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    frozen_request: bytes
    reuse: bool = True
    exact_only: bool = False


class Device:
    """Owns the memory of one device. Methods run on one thread; ``allocate`` may run on any."""

    def __init__(self, spec: DeviceSpec, arenas: Arenas, control_memory: Memory, control: ControlBlock) -> None:
        self.spec = spec
        self.arenas = arenas
        self.control_memory = control_memory
        self.control = control
        self.events = EventLog(secrets.token_hex(8), EVENTS_KEPT)
        self.table = SequenceTable(
            spec.geometry,
            spec.num_pages,
            max_sequences=spec.max_sequences,
            max_sequence_tokens=spec.max_sequence_tokens,
            weights_digest=spec.weights_digest,
            checkpoint_slots=spec.checkpoint_slots,
            events=self.events,
        )
        self.verifier = Verifier(self.table, self.control, arenas)
        self._has_sealed = False
        self._damaged: list[tuple[str, int]] = []  # pages, found before an adoption
        self._copies_asked: set[int] = set()  # slots into which the last answer asked for copies, at a truncate

    @staticmethod
    def allocate(spec: DeviceSpec, fds: Sequence[int] = ()) -> Device:
        """Raises ConfigError (ARENA_TOO_SMALL) or CapacityError (NOT_ENOUGH_MEMORY); then nothing is left behind.

        Args:
            fds: of the chunks of a GPU's memory, all arenas' in the order of ``spec.plan()``. They are the device's
                from here on.
        """
        try:
            check_memory(spec.host_bytes, what=f"the arenas and control block of {spec.device}")
            control_memory = Memory.allocate(f"{spec.device}-control", spec.control_shape.num_bytes)
        except BaseException:
            close_all(fds)
            raise
        control = ControlBlock.format(
            control_memory.map(),
            spec.control_shape,
            device=spec.device,
            geometry_digest=spec.geometry.digest(),
            weights_digest=spec.weights_digest,
            groups={group.name: group.page_bytes for group in spec.geometry.groups},
        )
        if spec.on_gpu:
            return Device(spec, held_arenas(*spec.plan(), fds), control_memory, control)
        try:
            arenas = allocate_arenas(
                spec.geometry,
                spec.arena_bytes,
                device=spec.device,
                num_tail_slots=spec.num_tail_slots,
                num_checkpoint_slots=spec.checkpoint_slots,
            )
        except BaseException:
            control_memory.close()
            raise
        return Device(spec, arenas, control_memory, control)

    @staticmethod
    def take_over(spec: DeviceSpec, fds: Sequence[int]) -> Device:
        """The memory of a store that is gone, with its sequences as they stand in the control block.

        Args:
            fds: of ``spec.entries()``. They are the device's from here on.

        Raises:
            PreconditionFailed: BAD_MEMORY, a descriptor is not what it should be; BAD_CONTROL_BLOCK. Nothing is left
            behind then.
        """
        try:
            control_memory = Memory.held(fds[0], spec.control_shape.num_bytes)
            arenas = held_arenas(*spec.plan(), fds[1:])
            demand_distinct_memory([control_memory, *(arena.memory for arena in arenas.all())])
            control = ControlBlock(control_memory.map())
            demand_same(
                control,
                spec.control_shape,
                device=spec.device,
                geometry=spec.geometry,
                weights_digest=spec.weights_digest,
            )
            finished = control.replay()
            device = Device(spec, arenas, control_memory, control)
            rebuild(device.table, control.copy())
            device.verify_rebuilt()
            device.compare_pages()
        except BaseException:
            close_all(fds)
            raise
        log.info(
            "memory of another store taken over",
            device=spec.device,
            sequences=len(device.table),
            pages_cached={name: table.num_cached for name, table in device.table.groups.items()},
            pages_sealed={name: table.num_sealed for name, table in device.table.groups.items()},
            writes_finished=finished,
            checkpoints="forgotten: they are not in the control block" if spec.checkpoint_slots else "none",
        )
        return device

    def compare_pages(self) -> None:
        """Behind a death and before ``adopt``: compares pages with their checksums, where the store can read them, up
        to COMPARED_BYTES; the idle check has the others in time. Any thread, with nobody attached.
        """
        self._damaged, compared = self.verifier.damaged(COMPARED_BYTES)
        for group, page in self._damaged:
            log.error("a page is damaged: nobody goes on from it", device=self.spec.device, group=group, page=page)
        log.info(
            "pages compared with their checksums",
            device=self.spec.device,
            compared=compared,
            unreadable=self.verifier.num_unreadable,
            damaged=len(self._damaged),
        )

    def verify_rebuilt(self) -> None:
        """Raises PreconditionFailed (BAD_CONTROL_BLOCK) where the tables do not give back the block they came from."""
        try:
            problems = self.verifier.tables()
        except InternalError as contradiction:
            raise bad_block("it contradicts itself", contradiction.message, contradiction.allowed) from contradiction
        if problems:
            raise bad_block("it contradicts itself", problems[0], "no problem")

    def manifest(self) -> tuple[kvstore_pb2.FdManifest, list[int]]:
        """What a worker maps, and the descriptors in the same order. The device keeps owning them."""
        memories = (self.control_memory, *(arena.memory for arena in self.arenas.all()))
        return kvstore_pb2.FdManifest(entries=self.spec.entries()), [fd for memory in memories for fd in memory.fds]

    # --- the ends of attachments ---

    def adopt(self, epoch: int, *, living: bool) -> list[Adopted]:
        """Makes the sequences that are there those of a new attachment.

        Args:
            living: their worker goes on with them (its store is gone); else it is gone, and what it had begun is
                settled first.

        Raises:
            PreconditionFailed: BAD_CONTROL_BLOCK, the worker left lengths that cannot be. Nothing was changed.
        """
        slots = self.table.slots
        words = {slot: last_words(self.control, slot) for slot in slots}
        free = self.control.free_slots()
        for slot in slots:
            demand_possible(slot, words[slot], self.spec.max_sequence_tokens, free)
        self._copies_asked.clear()
        self.control.epoch = epoch
        damaged, self._damaged = self._damaged, []
        with self.control.together():
            self._condemn(damaged)
        adopted = []
        for slot in slots:
            before = self._held(slot)
            with self.control.together():
                if not living:
                    log_of = partial(self.control.tokens, slot)
                    sealed = self.table.settle_reserved(slot, words[slot].committed, words[slot].packed, log_of)
                    self._mirror_sealed(slot, sealed, before, {})
                    for name, pages in before.items():  # one that was to be completed in place is sealed again
                        self._mirror_pages(name, pages)
                    self.control.forget_packed(slot)
                self.control.write_epoch(slot, epoch)
            adopted.append(self._adopted(slot, words[slot], damaged))
        return adopted

    def _adopted(self, slot: int, words: LastWords, damaged: Sequence[tuple[str, int]]) -> Adopted:
        sequence, control = self.table.sequence(slot), self.control
        void = why_void(words, sequence.groups.values())
        if any(page in sequence.groups[name].held() for name, page in damaged):
            void = "a page of it is damaged"
        if void:
            log.info("a sequence cannot be gone on with", device=self.spec.device, slot=slot, why=void)
        inexact_from = sequence.inexact_from
        return Adopted(
            slot=slot,
            request_id=sequence.request_id,
            tenant_salt=sequence.salt,
            num_prompt_tokens=control.num_prompt_tokens(slot),
            token_ids=control.token_log(slot),
            num_committed=words.committed,
            max_tokens=sequence.max_tokens,
            frozen_request=control.frozen_request(slot),
            pages=sequence.pages,
            bases=sequence.bases,
            tail_slots={name: slot for name, state in sequence.groups.items() if state.group.has_tail},
            prefix_exact=inexact_from is None or inexact_from >= words.committed,
            num_cached=min(control.num_cached(slot), words.committed),
            intact=void is None,
        )

    # --- the calls of the attachment ---

    def open(self, sequences: Iterable[NewSequence]) -> list[Admitted | Refused]:
        """Admits or refuses each, in order. Raises InvalidRequest for a malformed one before any is admitted."""
        sequences = list(sequences)
        for new in sequences:
            self.table.demand_valid(len(new.prompt_token_ids), new.max_tokens)
            check_fits("request_id", new.request_id.encode(), MAX_ID_BYTES)
            check_fits("tenant_salt", new.tenant_salt.encode(), MAX_ID_BYTES)
            _check_frozen(new.frozen_request)
        self._confirm()
        results: list[Admitted | Refused] = []
        for new in sequences:
            result = self.table.open(
                new.request_id,
                new.tenant_salt,
                new.prompt_token_ids,
                new.max_tokens,
                reuse=new.reuse,
                exact_only=new.exact_only,
            )
            if isinstance(result, Admitted):
                with self.control.together():
                    self.control.open_slot(
                        result.slot,
                        epoch=self.control.epoch,
                        request_id=new.request_id.encode(),
                        salt=new.tenant_salt.encode(),
                        frozen=new.frozen_request,
                        max_tokens=new.max_tokens,
                        prompt=new.prompt_token_ids,
                        num_cached=result.num_cached,
                    )
                    self._mirror_sequence(result.slot)
            results.append(result)
        return results

    def reserve(
        self, wanted: Sequence[tuple[int, int, int]], *, repeat: bool = False
    ) -> dict[int, dict[str, list[NewPage]]]:
        """Hands out promised pages; with ``repeat`` those again that packed groups have reserved and not sealed."""
        self._confirm()
        handed = self.table.reserve(wanted, repeat=repeat)
        with self.control.together():
            for slot, groups in handed.items():
                self.control.forget_packed(slot)
                for name, pages in groups.items():
                    self._mirror_pages(name, [page.page_id for page in pages])
                self._write_groups(slot)
        return handed

    def seal(
        self, wanted: Sequence[tuple[int, int, int]], checksums: Mapping[tuple[str, int], int] | None = None
    ) -> SealResult:
        """Seals what each (slot, num_tokens, step_tokens) allows; all or none.

        Raises:
            NotFound: UNKNOWN_SLOT. PreconditionFailed: NOT_COMMITTED, rows that the worker has not declared as written;
            NOT_RESERVED.
        """
        for slot, num_tokens, step_tokens in wanted:
            self.table.sequence(slot)
            self._demand_committed(slot, num_tokens)
            self.table.demand_reserved(slot, num_tokens, step_tokens)
        self._confirm()
        count = 0
        with self.control.together():
            for slot, num_tokens, step_tokens in wanted:
                before = self._held(slot)
                sealed = self.table.seal(slot, num_tokens, step_tokens, partial(self.control.tokens, slot))
                self._mirror_sealed(slot, sealed, before, checksums or {})
                count += len(sealed)
        sequences = {slot: self.table.sequence(slot) for slot, *_ in wanted}
        return SealResult(
            count,
            {slot: sequence.bases for slot, sequence in sequences.items()},
            {slot: {n: g.first_page for n, g in sequence.groups.items()} for slot, sequence in sequences.items()},
        )

    def truncate(self, slot: int, num_tokens: int) -> Truncated:
        self._confirm()
        before = self._held(slot)
        length = self._lengths(slot)[0]
        result = self.table.truncate(slot, num_tokens, length, partial(self.control.tokens, slot))
        kept = min(self.control.committed(slot), result.num_tokens)
        with self.control.together():
            self.control.cut(slot, num_tokens, kept)
            if result.copies or result.tail_copies or result.refills:
                self._copies_asked.add(slot)
                self.control.write_copies_asked(slot, kept)
            self._mirror_sequence(slot, before)
        return result

    def fork(self, slot: int, request_id: str, max_tokens: int, frozen_request: bytes) -> Forked | Refused:
        check_fits("request_id", request_id.encode(), MAX_ID_BYTES)
        _check_frozen(frozen_request)
        parent = self.table.sequence(slot)
        self._confirm()
        length = self._lengths(slot)[1]
        result = self.table.fork(slot, request_id, max_tokens, length)
        if isinstance(result, Forked):
            with self.control.together():
                self.control.open_slot(
                    result.slot,
                    epoch=self.control.epoch,
                    request_id=request_id.encode(),
                    salt=parent.salt.encode(),
                    frozen=frozen_request or self.control.frozen_request(slot),
                    max_tokens=max_tokens,
                    prompt=self.control.tokens(slot, 0, length),
                    num_prompt_tokens=self.control.num_prompt_tokens(slot),
                    num_cached=self.control.num_cached(slot),
                )
                self._mirror_sequence(result.slot)
        return result

    def checkpoint(self, slot: int, num_tokens: int, kind: str) -> Checkpointed:
        """Raises what SequenceTable.checkpoint raises, and PreconditionFailed (NOT_COMMITTED)."""
        self.table.sequence(slot)
        self._demand_committed(slot, num_tokens)
        self._confirm()
        checkpointed = self.table.checkpoint(slot, num_tokens, kind, partial(self.control.tokens, slot))
        with self.control.together():  # the table has heard how long the sequence is
            self._write_groups(slot)
        return checkpointed

    def release(self, slots: Sequence[int], damaged: Sequence[tuple[str, int]] = ()) -> int:
        """Returns the number of pages that nobody holds now, all groups together; cached ones are among them.

        Args:
            damaged: (group, page), which nobody goes on from any more.

        Raises:
            NotFound: UNKNOWN_SLOT. InvalidRequest: BAD_PAGE. Nothing was released then.
        """
        for name, page in damaged:
            table = self.table.groups.get(name)
            if table is None or not 0 <= page < table.num_pages:
                raise InvalidRequest("there is no such page", reason="BAD_PAGE", given=f"{page} of group {name[:64]!r}")
        count = 0
        held = {slot: self._held(slot) for slot in dict.fromkeys(slots)}
        let_go = self.table.release(slots)
        self._confirm()
        with self.control.together():
            for slot, groups in let_go.items():
                self.control.close_slot(slot)
                for name, pages in held[slot].items():
                    self._mirror_pages(name, pages)
                count += sum(map(len, groups.values()))
            self._condemn(damaged)
        return count

    def _condemn(self, damaged: Sequence[tuple[str, int]]) -> None:
        for name, page in damaged:
            self.table.condemn(name, page)
            self._mirror_pages(name, [page])

    def release_all(self, *, goodbye: bool) -> tuple[int, int]:
        """Ends every sequence; returns (sequences, pages).

        ``goodbye``: the worker said that it is done, so it made the copies that it was last asked for.
        """
        slots = self.table.slots
        self.table.end_attachment(confirmed=goodbye)
        return len(slots), self.release(slots)

    # --- looking ---

    def stats(self) -> kvstore_pb2.DeviceStats:
        """Everything but who is attached."""
        stats = device_stats(self.table, self.arenas)
        stats.device = self.spec.device
        stats.epoch = self.control.epoch
        stats.control_bytes = self.control_memory.num_bytes
        stats.memory = "device" if self.spec.on_gpu else "host"
        return stats

    def close(self) -> None:
        """Gives up descriptors and mapping. The bytes go when the last worker that maps them does."""
        self.verifier.close()
        del self.control  # unmaps now, whoever still refers to this device
        self.arenas.close()
        self.control_memory.close()

    # --- the control block ---

    def _confirm(self) -> None:
        """The worker has made the copies that the last answer asked for: it calls again, or said goodbye."""
        self.table.confirm()
        for slot in self._copies_asked:
            self.control.write_copies_asked(slot, None)
        self._copies_asked.clear()

    def _lengths(self, slot: int) -> tuple[int, int]:
        """(logged, committed) of a sequence, as the worker wrote them.

        Raises InvalidRequest (BAD_LENGTHS) where that cannot be.
        """
        logged, committed = self.control.logged(slot), self.control.committed(slot)
        if not committed <= logged <= self.spec.max_sequence_tokens:
            raise InvalidRequest(
                f"the lengths of slot {slot} in the control block cannot be",
                reason="BAD_LENGTHS",
                given=f"{logged} logged, {committed} committed",
                allowed=f"committed <= logged <= {self.spec.max_sequence_tokens}",
            )
        return logged, committed

    def _demand_committed(self, slot: int, num_tokens: int) -> None:
        committed = self._lengths(slot)[1]
        if num_tokens > committed:
            raise PreconditionFailed(
                f"slot {slot} has rows that are not committed",
                reason="NOT_COMMITTED",
                given=num_tokens,
                allowed=f"0 to {committed}",
            )

    def _log_first_seal(self) -> None:
        """Says once that the configured modes are at work, and what they cost."""
        self._has_sealed = True
        geometry = self.spec.geometry
        log.info(
            "first pages sealed",
            device=self.spec.device,
            modes=geometry.modes,
            bytes_per_token=geometry.bytes_per_token,
            dense_windows={group.name: group.effective_window for group in geometry.groups},
            margin=geometry.margin,
            tail_bytes=geometry.tail_bytes,
        )

    def _held(self, slot: int) -> dict[str, list[int]]:
        """Pages of a sequence by group, before a call that may let some go."""
        sequence = self.table.sequence(slot)
        return {name: sequence.groups[name].held() for name in self.table.groups}

    def _mirror_sequence(self, slot: int, before: Mapping[str, Sequence[int]] | None = None) -> None:
        """Writes what a sequence holds now, and the entries of its pages and of those it held ``before``."""
        for name, pages in self._held(slot).items():
            self._mirror_pages(name, dict.fromkeys([*(before or {}).get(name, ()), *pages]))
        self._write_groups(slot)

    def _mirror_sealed(
        self,
        slot: int,
        sealed: Sequence[SealedPage],
        before: Mapping[str, Sequence[int]],
        checksums: Mapping[tuple[str, int], int],
    ) -> None:
        """Writes pages that became immutable, and those that the sequence held ``before`` and holds no more."""
        after = self._held(slot)
        touched = {name: list(set(pages).difference(after[name])) for name, pages in before.items()}
        for page in sealed:
            if not page.relinked:
                checksum = checksums.get((page.group, page.page), NO_CHECKSUM)
                self.control.write_page_hash(page.group, page.page, page.hash, page.parent, checksum)
            touched[page.group] += [page.page, *([] if page.replaced is None else [page.replaced])]
        for name, pages in touched.items():
            self._mirror_pages(name, pages)
        self._write_groups(slot)
        if sealed and not self._has_sealed:
            self._log_first_seal()

    def _write_groups(self, slot: int) -> None:
        sequence = self.table.sequence(slot)
        for name, state in sequence.groups.items():
            self.control.write_group(slot, name, record_of(state, slot))
        self.control.write_inexact_from(slot, sequence.inexact_from)

    def _mirror_pages(self, group: str, pages: Iterable[int]) -> None:
        """Writes the page entries as the table has them."""
        table, index = self.table.groups[group], self.table.index
        for page in dict.fromkeys(pages):
            state = table.state(page)
            if state in (PageState.FREE, PageState.OPEN):
                self.control.write_page_hash(group, page, ROOT, ROOT, NO_CHECKSUM)
            flags = page_flags(index.is_exact(group, page))
            generation, refs = table.generation(page), table.refs(page)
            self.control.write_page(group, page, generation=generation, state=state, refs=refs, flags=flags)


def _check_frozen(frozen_request: bytes) -> None:
    check_fits(
        "frozen_request",
        frozen_request,
        MAX_FROZEN_BYTES,
        hint="leave out the prompt and emitted tokens: they are in the token log",
    )
