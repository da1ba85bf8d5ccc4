"""The control block's layout, its words, and what a reader refuses."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np
import pytest

from kvstore.control import ControlBlock, check_fits
from kvstore.control_layout import (
    GROUP_DTYPE,
    HEADER_DTYPE,
    MAX_FROZEN_BYTES,
    PAGE_DTYPE,
    SEQUENCE_GROUP_DTYPE,
    SLOT_DTYPE,
    ControlShape,
)
from kvstore.group_record import GroupRecord
from protos.errors import InvalidRequest, PreconditionFailed

SHAPE = ControlShape(num_pages=(5, 3), max_sequences=4, max_sequence_tokens=300)


def memory(shape: ControlShape = SHAPE) -> mmap.mmap:
    return mmap.mmap(-1, shape.num_bytes)


def block(mapped: mmap.mmap) -> ControlBlock:
    return ControlBlock.format(
        mapped,
        SHAPE,
        device="cpu:0",
        geometry_digest=b"g" * 15 + b"\0",
        weights_digest=b"w" * 16,
        groups={"full": 512, "window": 256},
    )


def test_entry_sizes_and_offsets_are_frozen() -> None:
    # Another process, maybe of another build, reads this memory: a change needs a new VERSION.
    assert (PAGE_DTYPE.itemsize, GROUP_DTYPE.itemsize, SLOT_DTYPE.itemsize) == (64, 128, 128 + 512 + MAX_FROZEN_BYTES)
    assert SEQUENCE_GROUP_DTYPE.itemsize == 128
    fields: Any = HEADER_DTYPE.fields or {}
    assert [fields[name][1] for name in ("magic", "version", "num_bytes", "epoch", "geometry_digest")] == [
        0,
        8,
        24,
        32,
        40,
    ]
    slot: Any = SLOT_DTYPE.fields or {}
    words = ("logged", "committed", "packed", "saved", "copies_made", "state", "num_prompt_tokens", "request_id")
    assert [slot[name][1] for name in words] == [0, 8, 16, 24, 40, 64, 100, 128]
    group: Any = SEQUENCE_GROUP_DTYPE.fields or {}
    assert [group[name][1] for name in ("base", "tail_slot", "lossy_end", "ahead_end", "worst", "prompt_end")] == [
        *(0, 16, 24),
        *(48, 68, 76),
    ]
    for dtype in (HEADER_DTYPE, GROUP_DTYPE, PAGE_DTYPE, SLOT_DTYPE, SEQUENCE_GROUP_DTYPE):
        for name, (kind, offset, *_) in (dtype.fields or {}).items():
            assert offset % kind.base.alignment == 0, f"{name} is not aligned"


def test_the_workers_words_share_no_cache_line_with_the_stores() -> None:
    at = SHAPE.sections()["slots"][0]
    assert at % 64 == 0
    assert SLOT_DTYPE.itemsize % 64 == 0


def test_sections_follow_each_other_without_overlap() -> None:
    end = 4096
    for offset, size in SHAPE.sections().values():
        assert offset % 4096 == 0
        assert offset >= end
        end = offset + size
    assert SHAPE.num_bytes >= end
    assert SHAPE.max_pages == 3


def test_bytes_stand_where_the_layout_says() -> None:
    mapped = memory()
    b = block(mapped)
    b.epoch = 77
    b.open_slot(2, epoch=77, request_id=b"r", salt=b"", frozen=b"", max_tokens=300, prompt=[9, 8, 4_000_000_000])
    b.write_group(2, "full", GroupRecord(base=0, page_ids=[4], num_pages=1))
    b.write_group(2, "window", GroupRecord(base=128, page_ids=[-1, 1], num_pages=2, first_page=1, tail_slot=2))
    b.write_inexact_from(2, 130)
    sections = SHAPE.sections()
    assert mapped[:8] == b"TAILPKCB"
    assert struct.unpack_from("<IIII", mapped, 8) == (5, 2, 4, 300)
    assert struct.unpack_from("<QQ", mapped, 24) == (SHAPE.num_bytes, 77)
    slot = sections["slots"][0] + 2 * SLOT_DTYPE.itemsize
    assert struct.unpack_from("<QQ", mapped, slot) == (3, 0)
    assert struct.unpack_from("<IIQQ", mapped, slot + 64) == (1, 300, 77, 130)
    groups = sections["sequence_groups"][0] + 2 * 2 * 128
    assert struct.unpack_from("<QIIi", mapped, groups) == (0, 1, 0, -1)
    assert struct.unpack_from("<QIIi", mapped, groups + 128) == (128, 2, 1, 2)
    ids = sections["page_ids"][0] + 2 * 2 * 3 * 4
    assert struct.unpack_from("<6I", mapped, ids) == (4, 2**32 - 1, 2**32 - 1, 2**32 - 1, 1, 2**32 - 1)
    log = sections["token_log"][0] + 2 * 300 * 4
    assert struct.unpack_from("<3I", mapped, log) == (9, 8, 4_000_000_000)


def test_a_second_view_of_the_memory_reads_what_was_written() -> None:
    mapped = memory()
    writer = block(mapped)
    reader = ControlBlock(mapped)
    writer.epoch = 5
    writer.open_slot(
        1, epoch=5, request_id="reqü".encode(), salt=b"t", frozen=b"\0f\0", max_tokens=300, prompt=list(range(200))
    )
    writer.write_group(1, "full", GroupRecord(base=128, page_ids=[3, 1, 4], num_pages=3))
    writer.write_group(1, "window", GroupRecord(base=256, page_ids=[-1, 2], num_pages=2, first_page=1))
    writer.append_tokens(1, [11, 12])
    writer.commit(1, 201)
    assert (reader.epoch, reader.device, reader.group_names) == (5, "cpu:0", ("full", "window"))
    assert reader.geometry_digest == b"g" * 15 + b"\0"
    assert reader.live_slots() == [1]
    assert (reader.request_id(1), reader.salt(1), reader.frozen_request(1)) == ("reqü", "t", b"\0f\0")
    assert reader.token_log(1) == [*range(200), 11, 12]
    assert (reader.logged(1), reader.committed(1)) == (202, 201)
    assert reader.sequence_pages(1, "full") == [3, 1, 4]
    assert reader.sequence_pages(1, "window") == [-1, 2]
    assert [(reader.base(1, g), reader.num_pages(1, g)) for g in ("full", "window")] == [(128, 3), (256, 2)]
    assert [reader.is_live(slot) for slot in (-1, 0, 1, 4)] == [False, False, True, False]


def test_pages_of_groups_are_separate_entries() -> None:
    mapped = memory()
    b = block(mapped)
    b.pages["full"]["generation"] = 7
    assert not b.pages["window"]["generation"].any()
    assert (len(b.pages["full"]), len(b.pages["window"])) == (5, 3)


def test_a_slot_used_again_shows_nothing_of_the_one_before() -> None:
    b = block(memory())
    b.open_slot(0, epoch=1, request_id=b"long-name", salt=b"s", frozen=b"abc", max_tokens=9, prompt=[1, 2, 3])
    b.commit(0, 3)
    b.write_group(0, "full", GroupRecord(base=128, page_ids=[1, 2], num_pages=2))
    b.close_slot(0)
    assert b.live_slots() == []
    assert (b.token_log(0), b.committed(0), b.num_pages(0, "full"), b.base(0, "full")) == ([], 0, 0, 0)
    b.open_slot(0, epoch=1, request_id=b"x", salt=b"", frozen=b"", max_tokens=9, prompt=[7])
    assert (b.request_id(0), b.salt(0), b.frozen_request(0), b.token_log(0)) == ("x", "", b"", [7])


def test_cut_lowers_and_never_raises() -> None:
    b = block(memory())
    b.open_slot(0, epoch=1, request_id=b"x", salt=b"", frozen=b"", max_tokens=9, prompt=[1, 2, 3, 4])
    b.commit(0, 2)
    b.cut(0, 3)
    assert (b.logged(0), b.committed(0)) == (3, 2)
    b.cut(0, 2, 1)  # a kept boundary: the tokens stay, their rows do not
    assert (b.logged(0), b.committed(0)) == (2, 1)
    b.cut(0, 1)
    assert (b.logged(0), b.committed(0)) == (1, 1)
    b.append_tokens(0, [5])
    assert b.token_log(0) == [1, 5]


def test_the_log_is_bounded() -> None:
    b = block(memory())
    b.open_slot(0, epoch=1, request_id=b"x", salt=b"", frozen=b"", max_tokens=300, prompt=[1] * 299)
    b.append_tokens(0, [2])
    with pytest.raises(InvalidRequest) as caught:
        b.append_tokens(0, [3])
    assert (caught.value.reason, b.logged(0), b.token_log(1)) == ("LOG_FULL", 300, [])


def test_a_commit_ahead_of_the_log_is_refused() -> None:
    b = block(memory())
    b.open_slot(0, epoch=1, request_id=b"x", salt=b"", frozen=b"", max_tokens=9, prompt=[1, 2])
    for bad in (3, -1):
        with pytest.raises(InvalidRequest) as caught:
            b.commit(0, bad)
        assert (caught.value.reason, b.committed(0)) == ("COMMIT_AHEAD", 0)


def _poke(offset: int, value: bytes) -> mmap.mmap:
    mapped = memory()
    block(mapped)
    mapped[offset : offset + len(value)] = value
    return mapped


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (memory, "magic"),
        (lambda: _poke(0, b"X"), "magic"),
        (lambda: _poke(8, b"\1"), "version"),
        (lambda: _poke(12, struct.pack("<I", 1 << 30)), "shorter than its groups"),
        (lambda: _poke(16, struct.pack("<I", 5)), "size differs"),
        (lambda: _poke(24, struct.pack("<Q", SHAPE.num_bytes - 4096)), "size differs"),
        (lambda: mmap.mmap(-1, 4000), "shorter than its header"),
        (lambda: memoryview(_poke(0, b"T"))[: SHAPE.num_bytes - 4096], "size differs"),
    ],
)
def test_a_reader_refuses_memory_that_is_no_control_block(bad: object, words: str) -> None:
    with pytest.raises(PreconditionFailed, match=words) as caught:
        ControlBlock(bad())  # type: ignore[operator]
    assert caught.value.reason == "BAD_CONTROL_BLOCK"


def test_check_fits_names_the_field() -> None:
    check_fits("salt", b"abc", 3)
    with pytest.raises(InvalidRequest, match="salt is too long"):
        check_fits("salt", b"abcd", 3)


def test_token_ids_are_kept_as_unsigned_32_bit() -> None:
    b = block(memory())
    b.open_slot(0, epoch=1, request_id=b"x", salt=b"", frozen=b"", max_tokens=9, prompt=[2**32 - 1, 0])
    b.append_tokens(0, np.array([2**31], dtype=np.int64).tolist())
    assert b.token_log(0) == [2**32 - 1, 0, 2**31]
    with pytest.raises(OverflowError):
        b.append_tokens(0, [-1])
    assert b.logged(0) == 3
