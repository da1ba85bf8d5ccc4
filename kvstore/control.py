"""The control block: shared memory beside a device's arenas, from which sequences can be rebuilt after a crash.

One memfd of fixed layout, little-endian, mapped by the store and the worker:

    header                                 4096 bytes                       store, before the worker maps it
    group entries [num_groups]             128 bytes each                   store, before
    page entries [group][page]             64 bytes each                    store
    slot entries [max_sequences]           SLOT_DTYPE                       store (words marked W: worker)
    sequence groups [slot][group]          32 bytes each                    store
    page ids [slot][group][max_pages]      u32, NO_PAGE_ID where none       store
    token log [slot][max_sequence_tokens]  u32                              store (the prompt, at Open), then worker

Sections start at multiples of 4096. The two words that the worker writes, ``logged`` and ``committed``, stand on a
cache line of their own; the store sets them at Open (prompt length, 0), at Truncate (it lowers them, while the worker
waits for the answer) and at Release. Word writes are aligned 8-byte stores.

Order of writes, so that what a reader finds after a crash is never ahead of the rows:
  worker: rows, token log, ``logged``; ``committed`` after the rows it covers. A token is logged before it is sent.
  store, Open: everything else of the slot, then ``state``. Release: ``state`` first.
  store, Truncate: ``committed``, ``logged``, then bases and pages. Reserve and Seal: page entries, page ids, then
  ``num_pages`` and ``base`` of each group.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.geometry import MAX_NAME_BYTES
from protos.errors import InvalidRequest, PreconditionFailed
from protos.page_hash import HASH_BYTES, PAGE_TOKENS

MAGIC = b"TAILPKCB"
VERSION = 3
MAX_ID_BYTES = 256
MAX_FROZEN_BYTES = 16 << 10
SECTION_ALIGNMENT = 4096

SLOT_FREE, SLOT_LIVE = 0, 1
NO_PAGE_ID = (1 << 32) - 1
EXACT = (1 << 64) - 1

HEADER_DTYPE = np.dtype(
    [
        ("magic", "u1", 8),
        ("version", "<u4"),
        ("num_groups", "<u4"),
        ("max_sequences", "<u4"),
        ("max_sequence_tokens", "<u4"),
        ("num_bytes", "<u8"),  # of the whole block
        ("epoch", "<u8"),
        ("geometry_digest", "u1", 16),
        ("weights_digest", "u1", 64),
        ("weights_digest_bytes", "<u4"),
        ("device_bytes", "<u4"),
        ("device", "u1", MAX_ID_BYTES),
    ]
)
GROUP_DTYPE = np.dtype(
    [
        ("name", "u1", MAX_NAME_BYTES),
        ("name_bytes", "<u4"),
        ("num_pages", "<u4"),
        ("page_bytes", "<u8"),
        ("first_entry", "<u8"),  # index of its page 0 among the page entries
        ("reserved", "u1", 40),
    ]
)
PAGE_DTYPE = np.dtype(
    [
        ("hash", "u1", HASH_BYTES),
        ("parent", "u1", HASH_BYTES),
        ("generation", "<u8"),
        ("checksum", "<u8"),  # checksum.page_checksum, or 0: not known
        ("state", "<u4"),  # pages.PageState
        ("refs", "<u4"),  # sequences that hold it
        ("tier", "<u4"),  # 0: the arena
        ("reserved", "<u4"),
    ]
)
SLOT_DTYPE = np.dtype(
    [
        ("logged", "<u8"),  # W: tokens in the token log
        ("committed", "<u8"),  # W: tokens whose rows are written
        ("worker_reserved", "u1", 48),
        ("state", "<u4"),  # SLOT_FREE, SLOT_LIVE
        ("max_tokens", "<u4"),
        ("epoch", "<u8"),  # of the attachment that opened it
        ("inexact_from", "<u8"),  # first token computed after an inexact resume; EXACT: none
        ("request_id_bytes", "<u4"),
        ("salt_bytes", "<u4"),
        ("frozen_bytes", "<u4"),
        ("store_reserved", "u1", 28),
        ("request_id", "u1", MAX_ID_BYTES),
        ("salt", "u1", MAX_ID_BYTES),
        ("frozen", "u1", MAX_FROZEN_BYTES),
    ]
)
SEQUENCE_GROUP_DTYPE = np.dtype(
    [
        ("base", "<u8"),  # first token that is not in a sealed page
        ("num_pages", "<u4"),  # page ids that are set
        ("first_page", "<u4"),  # index of the first page that is still held
        ("tail_slot", "<i4"),  # -1: the group has no tail
        ("reserved", "u1", 12),
    ]
)
_HEADER_BYTES = 4096


@dataclass(frozen=True)
class ControlShape:
    """What decides the size of the block: pages per group (in geometry order), slots, the longest sequence."""

    num_pages: tuple[int, ...]
    max_sequences: int
    max_sequence_tokens: int

    @property
    def max_pages(self) -> int:
        """Page ids of one sequence in one group."""
        return -(-self.max_sequence_tokens // PAGE_TOKENS)

    def sections(self) -> dict[str, tuple[int, int]]:
        """name -> (offset, bytes)."""
        sizes = {
            "groups": len(self.num_pages) * GROUP_DTYPE.itemsize,
            "pages": sum(self.num_pages) * PAGE_DTYPE.itemsize,
            "slots": self.max_sequences * SLOT_DTYPE.itemsize,
            "sequence_groups": self.max_sequences * len(self.num_pages) * SEQUENCE_GROUP_DTYPE.itemsize,
            "page_ids": self.max_sequences * len(self.num_pages) * self.max_pages * 4,
            "token_log": self.max_sequences * self.max_sequence_tokens * 4,
        }
        sections, offset = {}, _HEADER_BYTES
        for name, size in sizes.items():
            sections[name] = (offset, size)
            offset += -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        return sections

    @property
    def num_bytes(self) -> int:
        offset, size = self.sections()["token_log"]
        return offset + -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


class ControlBlock:
    """A mapped control block. The store makes it with ``format``; everyone else opens it with the constructor.

    Not synchronised: a slot's worker words and its token log behind the prompt have one writer at a time.

    Raises (constructor):
        PreconditionFailed: BAD_CONTROL_BLOCK, the memory is no control block of this version, or is too short.
    """

    def __init__(self, memory: mmap.mmap | memoryview) -> None:
        # An array over all of the memory first: numpy would otherwise report a short block as a TypeError of its own.
        raw = np.frombuffer(memory, dtype=np.uint8)
        if raw.size < _HEADER_BYTES:
            raise _bad("it is shorter than its header", raw.size, f"at least {_HEADER_BYTES} bytes")
        self._header = raw[: HEADER_DTYPE.itemsize].view(HEADER_DTYPE)
        header = self._header[0]
        if header["magic"].tobytes() != MAGIC:
            raise _bad("its magic is wrong", header["magic"].tobytes().hex(), MAGIC.hex())
        if header["version"] != VERSION:
            raise _bad("its version is another", int(header["version"]), VERSION)
        num_groups = int(header["num_groups"])
        if _HEADER_BYTES + num_groups * GROUP_DTYPE.itemsize > raw.size:
            raise _bad("it is shorter than its groups", raw.size, num_groups)
        self._groups = raw[_HEADER_BYTES : _HEADER_BYTES + num_groups * GROUP_DTYPE.itemsize].view(GROUP_DTYPE)
        self.shape = ControlShape(
            tuple(int(n) for n in self._groups["num_pages"]),
            int(header["max_sequences"]),
            int(header["max_sequence_tokens"]),
        )
        self.num_bytes = self.shape.num_bytes
        if not self.num_bytes == int(header["num_bytes"]) <= raw.size:
            raise _bad("its size differs from its header", raw.size, self.num_bytes)
        self.group_names = tuple(
            bytes(entry["name"][: int(entry["name_bytes"])]).decode("ascii", "replace") for entry in self._groups
        )
        self._group_index = {name: index for index, name in enumerate(self.group_names)}
        self._map_sections(raw)

    def _map_sections(self, raw: npt.NDArray[np.uint8]) -> None:
        parts = {name: raw[at : at + size] for name, (at, size) in self.shape.sections().items()}
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
        entries = raw[_HEADER_BYTES : _HEADER_BYTES + len(groups) * GROUP_DTYPE.itemsize].view(GROUP_DTYPE)
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
        return bytes(self._header["device"][0][: int(self._header["device_bytes"][0])]).decode()

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

    # --- reading ---

    def logged(self, slot: int) -> int:
        """Tokens in the log."""
        return int(self._logged[slot])

    def committed(self, slot: int) -> int:
        """Tokens whose rows are written."""
        return int(self._committed[slot])

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

    def request_id(self, slot: int) -> str:
        return self._text(slot, "request_id").decode()

    def salt(self, slot: int) -> str:
        return self._text(slot, "salt").decode()

    def frozen_request(self, slot: int) -> bytes:
        return self._text(slot, "frozen")

    def sequence_pages(self, slot: int, group: str) -> list[int]:
        """Page ids of a sequence in one group, in token order; -1 behind the model's window."""
        ids = self.page_ids[slot, self._group_index[group], : self.num_pages(slot, group)]
        return [-1 if page == NO_PAGE_ID else page for page in ids.tolist()]

    def _text(self, slot: int, name: str) -> bytes:
        return bytes(self.slots[name][slot][: int(self.slots[f"{name}_bytes"][slot])])

    # --- the store's writes ---

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
    ) -> None:
        """Fills a free slot and makes it live. Lengths were checked by ``check_fits``."""
        entry = self.slots[slot]
        entry["epoch"], entry["max_tokens"], entry["inexact_from"] = epoch, max_tokens, EXACT
        self.sequence_groups[slot] = 0
        for name, value in (("request_id", request_id), ("salt", salt), ("frozen", frozen)):
            entry[f"{name}_bytes"] = _put(entry[name], value)
        self._committed[slot] = 0
        self._token_log[slot, : len(prompt)] = np.fromiter(prompt, dtype=np.uint32, count=len(prompt))
        self._logged[slot] = len(prompt)
        entry["state"] = SLOT_LIVE

    def close_slot(self, slot: int) -> None:
        entry = self.slots[slot]
        entry["state"] = SLOT_FREE
        self.sequence_groups[slot] = 0
        self._committed[slot] = 0
        self._logged[slot] = 0

    def cut(self, slot: int, num_tokens: int, num_committed: int | None = None) -> None:
        """Lowers the logged length to at most num_tokens, the committed one to at most num_committed (or as many)."""
        self._committed[slot] = min(self.committed(slot), num_tokens if num_committed is None else num_committed)
        self._logged[slot] = min(self.logged(slot), num_tokens)

    def write_group(
        self, slot: int, group: str, *, base: int, pages: Sequence[int], first_page: int = 0, tail_slot: int = -1
    ) -> None:
        """Sets what a sequence holds in one group: page ids (-1: none there), then their number and the base."""
        index = self._group_index[group]
        ids = np.asarray(pages, dtype=np.int64)
        self.page_ids[slot, index, : len(pages)] = np.where(ids < 0, NO_PAGE_ID, ids)
        entry = self.sequence_groups[slot, index]
        entry["first_page"], entry["tail_slot"] = first_page, tail_slot
        entry["num_pages"], entry["base"] = len(pages), base

    def write_inexact_from(self, slot: int, token: int | None) -> None:
        self.slots["inexact_from"][slot] = EXACT if token is None else token


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


def _bad(what: str, given: object, allowed: object) -> PreconditionFailed:
    return PreconditionFailed(
        f"this memory is no control block that we can read: {what}",
        reason="BAD_CONTROL_BLOCK",
        given=given,
        allowed=allowed,
        hint="store and worker must be of the same version",
    )
