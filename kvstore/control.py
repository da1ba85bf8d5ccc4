"""The control block: shared memory beside a device's arenas, from which sequences can be rebuilt after a crash.

One memfd of fixed layout, little-endian, mapped by the store and the worker (entry types in ``control_layout``):

    header                                 4096 bytes                       store, before the worker maps it
    group entries [num_groups]             128 bytes each                   store, before
    page entries [group][page]             64 bytes each                    store
    slot entries [max_sequences]           SLOT_DTYPE                       store (words marked W: worker)
    sequence groups [slot][group]          128 bytes each                   store
    page ids [slot][group][max_pages]      u32, NO_PAGE_ID where none       store
    token log [slot][max_sequence_tokens]  u32                              store (the prompt, at Open), then worker
    journal                                see ``journal``                  store

Sections start at multiples of 4096. The words that the worker writes, ``logged``, ``committed``, ``packed``, ``saved``
and ``copies_made``, stand on a cache line of their own; the store sets them at Open (prompt length, 0, 0, 0, 0), at
Truncate (it lowers them, while the worker waits for the answer), at the call behind a Truncate (``copies_made``) and at
Release. Word writes are aligned 8-byte stores.

Order of writes, so that what a reader finds after a crash is never ahead of the rows:
  worker: rows, ``packed`` where reserved pages were written, token log, ``logged``; ``committed`` after the rows it
  covers. A token is logged before it is sent. Where rows of a tail are overwritten that the committed length needs, a
  copy of the tail is made before, and ``saved`` says where, until the new length is committed.
  store: what one call changes goes through the journal, so it is there whole or not at all. Open fills the rest of a
  free slot before.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from kvstore.control_layout import (
    EXACT,
    GROUP_DTYPE,
    HEADER_BYTES,
    HEADER_DTYPE,
    MAGIC,
    NO_PAGE_ID,
    PAGE_CHECKSUM_AT,
    PAGE_DTYPE,
    PAGE_GENERATION_AT,
    PAGE_STATE_AT,
    SEQUENCE_GROUP_DTYPE,
    SLOT_DTYPE,
    SLOT_FREE,
    SLOT_LIVE,
    VERSION,
    ControlShape,
)
from kvstore.group_record import GroupRecord
from kvstore.journal import Journal
from protos.errors import InvalidRequest, PreconditionFailed

_WORD = struct.Struct("<Q")
_HALF = struct.Struct("<I")
_MOST_ENDS = (1 << 16) - 1
_PAGE_STATE = struct.Struct("<4I")
_SLOT_AT = {name: field[1] for name, field in (SLOT_DTYPE.fields or {}).items()}
_SLOT_BYTES = {name: field[0].itemsize for name, field in (SLOT_DTYPE.fields or {}).items()}


class ControlBlock:
    """A mapped control block. The store makes it with ``format``; everyone else opens it with the constructor.

    Not synchronised: a slot's worker words and its token log behind the prompt have one writer at a time.

    Raises (constructor):
        PreconditionFailed: BAD_CONTROL_BLOCK, the memory is no control block of this version, or is too short.
    """

    def __init__(self, memory: mmap.mmap | memoryview) -> None:
        # An array over all of the memory first: numpy would otherwise report a short block as a TypeError of its own.
        raw = np.frombuffer(memory, dtype=np.uint8)
        self._bytes = memoryview(memory).cast("B")
        if raw.size < HEADER_BYTES:
            raise bad_block("it is shorter than its header", raw.size, f"at least {HEADER_BYTES} bytes")
        self._header = raw[: HEADER_DTYPE.itemsize].view(HEADER_DTYPE)
        header = self._header[0]
        if header["magic"].tobytes() != MAGIC:
            raise bad_block("its magic is wrong", header["magic"].tobytes().hex(), MAGIC.hex())
        if header["version"] != VERSION:
            raise bad_block("its version is another", int(header["version"]), VERSION)
        num_groups = int(header["num_groups"])
        if HEADER_BYTES + num_groups * GROUP_DTYPE.itemsize > raw.size:
            raise bad_block("it is shorter than its groups", raw.size, num_groups)
        self._groups = raw[HEADER_BYTES : HEADER_BYTES + num_groups * GROUP_DTYPE.itemsize].view(GROUP_DTYPE)
        self.shape = ControlShape(
            tuple(int(n) for n in self._groups["num_pages"]),
            int(header["max_sequences"]),
            int(header["max_sequence_tokens"]),
        )
        self.num_bytes = self.shape.num_bytes
        if not self.num_bytes == int(header["num_bytes"]) <= raw.size:
            raise bad_block("its size differs from its header", raw.size, self.num_bytes)
        self.group_names = tuple(
            bytes(entry["name"][: int(entry["name_bytes"])]).decode("ascii", "replace") for entry in self._groups
        )
        self._group_index = {name: index for index, name in enumerate(self.group_names)}
        self._sections = self.shape.sections()
        self._first_entry = dict(zip(self.group_names, accumulate(self.shape.num_pages, initial=0), strict=False))
        self.journal = Journal(self._bytes, *self._sections["journal"])
        self._map_sections(raw)

    def _map_sections(self, raw: npt.NDArray[np.uint8]) -> None:
        parts = {name: raw[at : at + size] for name, (at, size) in self._sections.items()}
        slots, groups, max_pages = self.shape.max_sequences, len(self.group_names), self.shape.max_pages
        all_pages = parts["pages"].view(PAGE_DTYPE)
        self.pages: dict[str, npt.NDArray[np.void]] = {}
        first = 0
        for name, num_pages in zip(self.group_names, self.shape.num_pages, strict=True):
            self.pages[name] = all_pages[first : first + num_pages]
            first += num_pages
        self.slots = parts["slots"].view(SLOT_DTYPE)
        self.sequence_groups = parts["sequence_groups"].view(SEQUENCE_GROUP_DTYPE).reshape(slots, groups)
        self.page_ids = parts["page_ids"].view("<u4").reshape(slots, groups, max_pages)
        self._token_log = parts["token_log"].view("<u4").reshape(slots, self.shape.max_sequence_tokens)
        self._logged = self.slots["logged"]
        self._state = self.slots["state"]
        self._num_pages = self.sequence_groups["num_pages"]
        self._bases = self.sequence_groups["base"]
        self._committed = self.slots["committed"]
        self._packed = self.slots["packed"]
        self._saved = self.slots["saved"]
        self._adoptions = self.slots["adoptions"]
        self._copies_made = self.slots["copies_made"]

    @classmethod
    def format(
        cls,
        memory: mmap.mmap,
        shape: ControlShape,
        *,
        device: str,
        geometry_digest: bytes,
        weights_digest: bytes,
        groups: Mapping[str, int],
    ) -> ControlBlock:
        """Writes the header of a zeroed memory of ``shape.num_bytes`` bytes and opens it. ``groups``: name -> page
        bytes.
        """
        raw = np.frombuffer(memory, dtype=np.uint8)
        entries = raw[HEADER_BYTES : HEADER_BYTES + len(groups) * GROUP_DTYPE.itemsize].view(GROUP_DTYPE)
        first = 0
        for entry, (name, page_bytes), num_pages in zip(entries, groups.items(), shape.num_pages, strict=True):
            entry["name_bytes"] = _put(entry["name"], name.encode())
            entry["num_pages"], entry["page_bytes"], entry["first_entry"] = num_pages, page_bytes, first
            first += num_pages
        header = raw[: HEADER_DTYPE.itemsize].view(HEADER_DTYPE)[0]
        header["version"], header["num_groups"] = VERSION, len(groups)
        header["max_sequences"], header["max_sequence_tokens"] = shape.max_sequences, shape.max_sequence_tokens
        header["num_bytes"] = shape.num_bytes
        _put(header["geometry_digest"], geometry_digest)
        header["weights_digest_bytes"] = _put(header["weights_digest"], weights_digest)
        header["device_bytes"] = _put(header["device"], device.encode())
        header["magic"] = np.frombuffer(MAGIC, dtype=np.uint8)
        return cls(memory)

    # --- header ---

    @property
    def epoch(self) -> int:
        return int(self._header["epoch"][0])

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._header["epoch"][0] = epoch

    @property
    def geometry_digest(self) -> bytes:
        return bytes(self._header["geometry_digest"][0])

    @property
    def device(self) -> str:
        text = bytes(self._header["device"][0][: int(self._header["device_bytes"][0])])
        return text.decode("utf-8", "replace")

    @property
    def page_bytes(self) -> tuple[int, ...]:
        """Of each group."""
        return tuple(int(num_bytes) for num_bytes in self._groups["page_bytes"])

    @property
    def weights_digest(self) -> bytes:
        return bytes(self._header["weights_digest"][0][: int(self._header["weights_digest_bytes"][0])])

    # --- the worker's words ---

    def append_tokens(self, slot: int, token_ids: Sequence[int]) -> None:
        """Adds tokens to the log, then their count to the length word. Before they are sent to anyone.

        Raises:
            InvalidRequest: LOG_FULL, the log has no room; nothing was written.
        """
        logged = int(self._logged[slot])
        end = logged + len(token_ids)
        if end > self.shape.max_sequence_tokens:
            raise InvalidRequest(
                f"token log of slot {slot} is full",
                reason="LOG_FULL",
                given=end,
                allowed=self.shape.max_sequence_tokens,
            )
        self._token_log[slot, logged:end] = token_ids
        self._logged[slot] = end

    def commit(self, slot: int, num_tokens: int) -> None:
        """Declares that the rows of tokens [0, num_tokens) are written.

        Raises:
            InvalidRequest: COMMIT_AHEAD, more tokens than are logged.
        """
        if not 0 <= num_tokens <= int(self._logged[slot]):
            raise InvalidRequest(
                f"slot {slot} has fewer tokens in its log",
                reason="COMMIT_AHEAD",
                given=num_tokens,
                allowed=f"0 to {int(self._logged[slot])}",
            )
        self._committed[slot] = num_tokens

    def mark_packed(self, slot: int, num_tokens: int) -> None:
        """Declares that the pages reserved for tokens [0, num_tokens) are written, in every packed group. After they
        are, and before ``commit``: prefill rows that go to pages are nowhere else.
        """
        self._packed[slot] = num_tokens

    def mark_saved(self, slot: int, num_tokens: int, in_slot: int) -> None:
        """Set while rows of the tail are overwritten that the committed length needs and ``num_tokens``, which is
        committed next, does not: the tails of ``in_slot``, which nobody has, are what this slot's were.
        """
        self._saved[slot] = num_tokens << 32 | in_slot + 1

    def clear_saved(self, slot: int) -> None:
        """Behind the commit; or the tails are what they were."""
        self._saved[slot] = 0

    def mark_copied(self, slot: int) -> None:
        """The copies that a truncate asked for are in place: what it left can be gone on with."""
        self._copies_made[slot] = 1

    def count_adoption(self, slot: int) -> int:
        """Notes that a worker takes over what another left; returns how many did so since it last got any further."""
        return self._count_end(slot, adoptions=1)[0]

    def count_failure(self, slot: int) -> None:
        """Notes that the device failed in a step of this sequence."""
        self._count_end(slot, failures=1)

    def clear_ends(self, slot: int) -> None:
        """Forgets the adoptions and failures so far."""
        self._adoptions[slot] = 0

    def failures(self, slot: int) -> int:
        """How often the device failed in its steps since it last got any further."""
        return self._ends(slot)[1]

    def _ends(self, slot: int) -> tuple[int, int]:
        """(adoptions, failures) at the committed length."""
        num_tokens, counts = divmod(int(self._adoptions[slot]), 1 << 32)
        failures, adoptions = divmod(counts, 1 << 16)
        return (adoptions, failures) if num_tokens == self.committed(slot) else (0, 0)

    def _count_end(self, slot: int, *, adoptions: int = 0, failures: int = 0) -> tuple[int, int]:
        before = self._ends(slot)
        adoptions, failures = min(before[0] + adoptions, _MOST_ENDS), min(before[1] + failures, _MOST_ENDS)
        self._adoptions[slot] = self.committed(slot) << 32 | failures << 16 | adoptions
        return adoptions, failures

    # --- reading ---

    def logged(self, slot: int) -> int:
        """Tokens in the log."""
        return int(self._logged[slot])

    def committed(self, slot: int) -> int:
        """Tokens whose rows are written."""
        return int(self._committed[slot])

    def packed(self, slot: int) -> int:
        """See ``mark_packed``."""
        return int(self._packed[slot])

    def saved_in(self, slot: int) -> int | None:
        """Where the tails of a slot are that its worker did not come to commit: see ``mark_saved``. None: in place."""
        num_tokens, in_slot = divmod(int(self._saved[slot]), 1 << 32)
        return in_slot - 1 if num_tokens > self.committed(slot) else None

    def is_live(self, slot: int) -> bool:
        return 0 <= slot < self.shape.max_sequences and int(self._state[slot]) == SLOT_LIVE

    def base(self, slot: int, group: str) -> int:
        """First token of a sequence that is not in a sealed page of the group."""
        return int(self._bases[slot, self._group_index[group]])

    def tail_slot(self, slot: int, group: str) -> int | None:
        """The tail slot of a sequence in one group; None: the group has no tail."""
        tail_slot = int(self.sequence_groups[slot, self._group_index[group]]["tail_slot"])
        return tail_slot if tail_slot >= 0 else None

    def num_pages(self, slot: int, group: str) -> int:
        """Page ids of a sequence in one group; in packed groups, of sealed pages only."""
        return int(self._num_pages[slot, self._group_index[group]])

    def token_log(self, slot: int) -> list[int]:
        return self.tokens(slot, 0, self.logged(slot))

    def tokens(self, slot: int, first: int, last: int) -> list[int]:
        """Logged ids of tokens [first, last)."""
        ids: list[int] = self._token_log[slot, first:last].tolist()
        return ids

    def live_slots(self) -> list[int]:
        return [int(slot) for slot in np.flatnonzero(self.slots["state"] == SLOT_LIVE)]

    def free_slots(self) -> set[int]:
        return {int(slot) for slot in np.flatnonzero(self.slots["state"] == SLOT_FREE)}

    def request_id(self, slot: int) -> str:
        return self._text(slot, "request_id").decode()

    def salt(self, slot: int) -> str:
        return self._text(slot, "salt").decode()

    def num_prompt_tokens(self, slot: int) -> int:
        """As opened."""
        return int(self.slots["num_prompt_tokens"][slot])

    def num_cached(self, slot: int) -> int:
        """Tokens that a prefix match gave."""
        return int(self.slots["num_cached"][slot])

    def frozen_request(self, slot: int) -> bytes:
        return self._text(slot, "frozen")

    def sequence_pages(self, slot: int, group: str) -> list[int]:
        """Page ids of a sequence in one group, in token order; -1 behind the model's window."""
        ids = self.page_ids[slot, self._group_index[group], : self.num_pages(slot, group)]
        return [-1 if page == NO_PAGE_ID else page for page in ids.tolist()]

    def _text(self, slot: int, name: str) -> bytes:
        return bytes(self.slots[name][slot][: int(self.slots[f"{name}_bytes"][slot])])

    def copy(self) -> ControlBlock:
        """All of it as it is now, in memory that nobody else can change."""
        return ControlBlock(memoryview(bytearray(self._bytes)))

    # --- the store's writes ---

    def replay(self) -> int:
        """Finishes the writes of a call that was cut off in another process; returns how many.

        Raises PreconditionFailed (BAD_CONTROL_BLOCK); nothing was written.
        """
        return self.journal.replay(range(self._sections["pages"][0], self._sections["token_log"][0]))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What the store writes inside is there whole or not at all, also when the process is killed."""
        with self.journal.together():
            yield

    def open_slot(
        self,
        slot: int,
        *,
        epoch: int,
        request_id: bytes,
        salt: bytes,
        frozen: bytes,
        max_tokens: int,
        prompt: Sequence[int],
        num_prompt_tokens: int | None = None,
        num_cached: int = 0,
    ) -> None:
        """Fills a free slot and makes it live. Lengths were checked by ``check_fits``.

        ``prompt``: tokens that are logged from the start, of which the first ``num_prompt_tokens`` are the prompt
        (None: all).
        """
        entry = self.slots[slot]
        entry["epoch"], entry["max_tokens"], entry["inexact_from"] = epoch, max_tokens, EXACT
        entry["num_prompt_tokens"] = len(prompt) if num_prompt_tokens is None else num_prompt_tokens
        entry["num_cached"], entry["copies_asked"] = num_cached, 0
        self.sequence_groups[slot] = 0
        self.page_ids[slot] = NO_PAGE_ID
        for name, value in (("request_id", request_id), ("salt", salt), ("frozen", frozen)):
            entry[f"{name}_bytes"] = _put(entry[name], value)
        self._committed[slot] = self._packed[slot] = self._saved[slot] = 0
        self._adoptions[slot] = self._copies_made[slot] = 0
        self._token_log[slot, : len(prompt)] = np.fromiter(prompt, dtype=np.uint32, count=len(prompt))
        self._logged[slot] = len(prompt)
        self._write_word(slot, "state", SLOT_LIVE)

    def close_slot(self, slot: int) -> None:
        self._write_word(slot, "state", SLOT_FREE)
        for name in ("logged", "committed", "packed", "saved", "copies_made"):
            self._write_word(slot, name, 0)
        for group in self.group_names:
            self.journal.write(self._group_at(slot, group), bytes(SEQUENCE_GROUP_DTYPE.itemsize))

    def write_epoch(self, slot: int, epoch: int) -> None:
        """The sequence is another attachment's from here on."""
        self._write_word(slot, "epoch", epoch)

    def forget_packed(self, slot: int) -> None:
        """Pages are about to be handed out that are not written."""
        self._write_word(slot, "packed", 0)

    def cut(self, slot: int, num_tokens: int, num_committed: int | None = None) -> None:
        """Lowers the logged length to at most num_tokens, the committed one to at most num_committed (or as many). No
        reserved page counts as written any more.
        """
        kept = min(self.committed(slot), num_tokens if num_committed is None else num_committed)
        self._write_word(slot, "committed", kept)
        self._write_word(slot, "logged", min(self.logged(slot), num_tokens))
        self.forget_packed(slot)
        self._write_word(slot, "saved", 0)

    def write_group(self, slot: int, group: str, record: GroupRecord) -> None:
        """Sets what a sequence holds in one group; once in a call."""
        ids = np.asarray(record.page_ids, dtype=np.int64)
        ids = np.where(ids < 0, NO_PAGE_ID, ids).astype("<u4")
        different = np.flatnonzero(self.page_ids[slot, self._group_index[group], : len(ids)] != ids)
        row = self._sections["page_ids"][0]
        row += (slot * len(self.group_names) + self._group_index[group]) * self.shape.max_pages * 4
        for run in np.split(different, np.flatnonzero(np.diff(different) != 1) + 1):
            if len(run):
                self.journal.write(row + 4 * int(run[0]), ids[run[0] : run[-1] + 1].tobytes())
        self.journal.write(self._group_at(slot, group), record.pack())

    def group_record(self, slot: int, group: str) -> GroupRecord:
        """What ``write_group`` wrote, or whatever stands there: no number is checked."""
        index = self._group_index[group]
        fields = self.sequence_groups[slot, index].tobytes()
        return GroupRecord.unpack(fields, self.page_ids[slot, index].tolist())

    def write_inexact_from(self, slot: int, token: int | None) -> None:
        self._write_word(slot, "inexact_from", EXACT if token is None else token)

    def write_copies_asked(self, slot: int, num_committed: int | None) -> None:
        """Of a truncate to ``num_committed`` tokens: it asks for copies, and until the worker has made them it commits
        no further. None: they are made.
        """
        self._write_word(slot, "copies_asked", 0 if num_committed is None else num_committed + 1)
        self._write_word(slot, "copies_made", 0)

    def lacks_copies(self, slot: int) -> bool:
        """Whether copies that a truncate asked for may not have been made."""
        asked = int(self.slots["copies_asked"][slot])
        return 0 < asked > self.committed(slot) and not self._copies_made[slot]

    def write_page_hash(self, group: str, page: int, page_hash: bytes, parent: bytes, checksum: int) -> None:
        at = self._page_at(group, page)
        self.journal.write(at, page_hash + parent)
        self.journal.write(at + PAGE_CHECKSUM_AT, _WORD.pack(checksum))

    def write_page(self, group: str, page: int, *, generation: int, state: int, refs: int, flags: int) -> None:
        """``flags``: PAGE_INDEXED, PAGE_EXACT."""
        at = self._page_at(group, page)
        self.journal.write(at + PAGE_GENERATION_AT, _WORD.pack(generation))
        self.journal.write(at + PAGE_STATE_AT, _PAGE_STATE.pack(state, refs, 0, flags))

    def _write_word(self, slot: int, name: str, value: int) -> None:
        at = self._sections["slots"][0] + slot * SLOT_DTYPE.itemsize + _SLOT_AT[name]
        self.journal.write(at, (_WORD if _SLOT_BYTES[name] == _WORD.size else _HALF).pack(value))

    def _group_at(self, slot: int, group: str) -> int:
        place = slot * len(self.group_names) + self._group_index[group]
        return self._sections["sequence_groups"][0] + place * SEQUENCE_GROUP_DTYPE.itemsize

    def _page_at(self, group: str, page: int) -> int:
        return self._sections["pages"][0] + (self._first_entry[group] + page) * PAGE_DTYPE.itemsize


def check_fits(name: str, value: bytes, limit: int, hint: str | None = None) -> None:
    """Raises InvalidRequest (FIELD_TOO_LONG) when a field does not fit its place in a slot."""
    if len(value) > limit:
        raise InvalidRequest(
            f"{name} is too long",
            reason="FIELD_TOO_LONG",
            given=f"{len(value)} bytes",
            allowed=f"{limit} bytes",
            hint=hint,
        )


def _put(field: npt.NDArray[np.uint8], value: bytes) -> int:
    """Writes value into the front of a byte field; returns its length."""
    field[: len(value)] = np.frombuffer(value, dtype=np.uint8)
    return len(value)


def bad_block(what: str, given: object, allowed: object) -> PreconditionFailed:
    return PreconditionFailed(
        f"this memory is no control block that we can read: {what}",
        reason="BAD_CONTROL_BLOCK",
        given=given,
        allowed=allowed,
        hint="store and worker must be of the same version",
    )
