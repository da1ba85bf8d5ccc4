"""Where everything stands in the control block: entry types, section sizes. A change needs a new VERSION."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvstore.geometry import MAX_NAME_BYTES
from protos.page_hash import HASH_BYTES, PAGE_TOKENS

MAGIC = b"TAILPKCB"
VERSION = 5
MAX_ID_BYTES = 256
MAX_FROZEN_BYTES = 16 << 10
SECTION_ALIGNMENT = 4096
JOURNAL_ENTRY_BYTES = 12  # in front of each write: where, and how many bytes

SLOT_FREE, SLOT_LIVE = 0, 1
PAGE_INDEXED, PAGE_EXACT = 1, 2
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
        ("flags", "<u4"),  # PAGE_INDEXED, PAGE_EXACT
    ]
)
PAGE_GENERATION_AT, PAGE_CHECKSUM_AT, PAGE_STATE_AT = 32, 40, 48  # bytes into an entry; state, refs, tier, flags
SLOT_DTYPE = np.dtype(
    [
        ("logged", "<u8"),  # W: tokens in the token log
        ("committed", "<u8"),  # W: tokens whose rows are written
        ("packed", "<u8"),  # W: reserved pages of tokens below are written, in every packed group
        ("saved", "<u8"),  # W: a length << 32 | a slot + 1: its tails are this one's before that length is committed
        ("adoptions", "<u8"),  # W: a length << 32 | what ended at that length: see count_adoption, count_failure
        ("copies_made", "<u8"),  # W: 1: those that the last truncate asked for
        ("worker_reserved", "u1", 16),
        ("state", "<u4"),  # SLOT_FREE, SLOT_LIVE
        ("max_tokens", "<u4"),
        ("epoch", "<u8"),  # of the attachment that opened it
        ("inexact_from", "<u8"),  # first token computed after an inexact resume; EXACT: none
        ("request_id_bytes", "<u4"),
        ("salt_bytes", "<u4"),
        ("frozen_bytes", "<u4"),
        ("num_prompt_tokens", "<u4"),  # as opened; a fork's: its parent's
        ("num_cached", "<u4"),  # tokens that a prefix match gave
        ("copies_asked", "<u4"),  # 1 + the length of a truncate whose copies the worker has not confirmed; 0: none
        ("store_reserved", "u1", 16),
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
        # What stands behind num_pages, in packed groups: see group_record.
        ("handed_end", "<u4"),  # pages of indices [num_pages, handed_end) are reserved
        ("lossy_end", "<u8"),  # tail rows [base, lossy_end) were dequantised
        ("ring_first", "<u8"),  # see PendingRings
        ("ring_written", "<u8"),
        ("ahead_end", "<u4"),  # page ids are set up to here: of reserved pages, and of shadows
        ("split_index", "<u4"),  # where split_tokens is not 0: the shadow of this index holds so many tokens' records,
        ("split_page", "<u4"),  # is this page,
        ("split_tokens", "<u4"),
        ("split_reopened", "<u4"),  # and is to be completed in place
        ("worst", "<u4"),  # pages that may be needed have lower indices
        ("prompt_first", "<u4"),  # indices kept besides every keep_every-th
        ("prompt_end", "<u4"),
        ("reserved", "u1", 48),
    ]
)
HEADER_BYTES = 4096


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
            "journal": journal_bytes(self),
        }
        sections, offset = {}, HEADER_BYTES
        for name, size in sizes.items():
            sections[name] = (offset, size)
            offset += -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT
        return sections

    @property
    def num_bytes(self) -> int:
        offset, size = self.sections()["journal"]
        return offset + -(-size // SECTION_ALIGNMENT) * SECTION_ALIGNMENT


def page_flags(exact: bool | None) -> int:
    """Of a page entry. ``exact``: whether the page is exact; None: the prefix index does not know it."""
    return 0 if exact is None else PAGE_INDEXED | (PAGE_EXACT if exact else 0)


def journal_bytes(shape: ControlShape) -> int:
    """Room for the writes of any one call: every page entry, in two parts and with a page id of its own; every slot and
    what it holds; the page ids of one sequence."""
    groups, pages = len(shape.num_pages), sum(shape.num_pages)
    per_page = PAGE_DTYPE.itemsize + 4 + 3 * JOURNAL_ENTRY_BYTES
    per_slot = 128 + 3 * JOURNAL_ENTRY_BYTES + groups * (SEQUENCE_GROUP_DTYPE.itemsize + JOURNAL_ENTRY_BYTES)
    row = groups * shape.max_pages * (4 + JOURNAL_ENTRY_BYTES)
    return SECTION_ALIGNMENT + pages * per_page + shape.max_sequences * per_slot + row
