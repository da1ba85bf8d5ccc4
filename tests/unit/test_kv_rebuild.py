"""A store's tables out of the control block of one that died: wherever it died, and from a hostile block."""

from __future__ import annotations

import fcntl
import os
import random
import struct
import zlib
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.answers import Admitted, Forked
from kvstore.control import ControlBlock
from kvstore.device import Device, NewSequence
from kvstore.geometry import LayerGroup
from kvstore.journal import Journal
from protos.errors import InternalError, PreconditionFailed, TailpackError
from tests.unit.kv_oracle import DENSE, FULL, GEOMETRIES, PENDING, RATIO_4, SLIDING, Worker

TOKENS = random.Random(11).choices(range(1000), k=1400)
SEED = int(os.environ.get("TAILPACK_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 32)


def busy(*groups: LayerGroup, **more: int) -> Worker:
    """A device with all that a block can hold: shared and cached pages, shadows, a split page, reserved ones."""
    w = Worker(groups or (SLIDING, FULL, DENSE), num_pages=60, max_sequences=5, **more)

    def opened(salt: str, length: int, max_tokens: int) -> int:
        new = w.open(salt, TOKENS[:length], max_tokens)
        assert isinstance(new, Admitted)
        while w.expected[new.slot].num_rows < length:
            w.prefill(new.slot, 64)
        return new.slot

    first = opened("a", 700, 1000)
    opened("a", 500, 1000)
    w.release(opened("gone", 400, 500))
    last = opened("é", 300, 1000)
    if w.truncate(first, 450) is None:
        w.release(first)
        first = opened("a", 610, 1000)
    assert isinstance(w.fork(first, 800), Forked)
    for slot in w.expected:
        w._log(slot)
    w.device.reserve([(first, 700, 1), (last, 600, 1)])
    return w


def taken_over(w: Worker, block: bytes | None = None) -> Device:
    """Another store's device over copies of the memory, with ``block`` in place of the control block."""
    fds = [os.dup(fd) for fd in w.device.manifest()[1]]
    if block is not None:
        copy = os.memfd_create("copy", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(copy, block)
        fcntl.fcntl(copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.close(fds[0])
        fds[0] = copy
    return Device.take_over(w.device.spec, fds)


def block_of(w: Worker) -> bytes:
    return bytes(w.device.control.journal._memory)


def described(device: Device) -> object:
    """All that a table is, but for orders that only time tells."""
    table = device.table
    pages = {
        name: [
            (t.state(p), t.refs(p), t.generation(p), table.index.hash_of(name, p), table.index.is_exact(name, p))
            for p in range(t.num_pages)
        ]
        for name, t in table.groups.items()
    }
    counts = {
        name: (t.num_promised, t.num_free, t.num_open, t.num_sealed, t.num_cached) for name, t in table.groups.items()
    }
    sequences = {
        slot: (table.sequence(slot).groups, table.sequence(slot).inexact_from, table.sequence(slot).salt)
        for slot in sorted(table.slots)
    }
    return deepcopy((pages, counts, sequences))


@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_another_store_has_the_same_tables(geometry: str) -> None:
    w = busy(*GEOMETRIES[geometry])
    device = taken_over(w)
    assert described(device) == described(w.device)
    assert device.verifier.tables() == []
    device.close()
    w.store_dies()
    w.check()
    w.verify()


CALLS: dict[str, Callable[[Worker], object]] = {
    "open": lambda w: w.device.open([NewSequence("r", "a", TOKENS[:450], 600, b"")]),
    "reserve": lambda w: w.device.reserve([(min(w.expected), 900, 1)]),
    "seal": lambda w: w.device.seal([(min(w.expected), 910, 1)]),
    "truncate": lambda w: w.device.truncate(sorted(w.expected)[1], 300),
    "truncate to nothing": lambda w: w.device.truncate(max(w.expected), 0),
    "release": lambda w: w.device.release(list(w.expected)),
    "fork": lambda w: w.device.fork(min(w.expected), "f", 700, b""),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_a_call_is_there_whole_or_not_at_all_wherever_the_store_is_killed(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its n-th write to the block, for every n: another store finds it as before, or as after."""
    w = busy(max_tokens=1000)
    if call == "seal":
        slot = min(w.expected)
        e = w.expected[slot]
        e.append(TOKENS[len(e.tokens) : 910])
        e.num_rows = 910
        w._log(slot)
        w.device.reserve([(slot, 910, 1)])
    before = described(w.device)
    watched = Watched(w.device.control)
    monkeypatch.setattr(w.device.control.journal, "_memory", watched)
    CALLS[call](w)
    monkeypatch.undo()
    after = described(w.device)
    assert before != after
    found, block = [], bytearray(watched.began)
    for place, data in [*watched.writes, (slice(0, 0), b"")]:
        device = taken_over(w, bytes(block))
        found.append(described(device))
        device.close()
        block[place] = data
    done = found.index(after)
    assert 0 < done < len(found) - 3, "it is done while there is more to write"
    assert found == [before] * done + [after] * (len(found) - done)


class Watched:
    """Notes what is written to a block by its journal, in order."""

    def __init__(self, control: ControlBlock) -> None:
        self.memory = control.journal._memory
        self.writes: list[tuple[slice, bytes]] = []
        self.began = b""

    def __getitem__(self, place: slice) -> memoryview:
        return self.memory[place]

    def __setitem__(self, place: slice, data: bytes) -> None:
        self.began = self.began or bytes(self.memory)  # with all that went into a slot that is free yet
        self.writes.append((place, bytes(data)))
        self.memory[place] = data


def test_writes_of_a_call_that_raises_are_not_made() -> None:
    memory = memoryview(bytearray(4096))
    journal = Journal(memory, 1024, 1024)
    with pytest.raises(ZeroDivisionError), journal.together():
        journal.write(0, b"abc")
        raise ZeroDivisionError
    assert bytes(memory) == bytes(4096)
    with journal.together():
        journal.write(0, b"abc")
        journal.write(1, b"x")
        journal.write(0, b"abd")
        assert bytes(memory[:3]) == bytes(3)
    assert bytes(memory[:3]) == b"abd"
    with pytest.raises(InternalError), journal.together(), journal.together():
        pass
    with pytest.raises(InternalError, match="too short"), journal.together():
        journal.write(2048, bytes(range(1, 256)) * 5)


@pytest.mark.parametrize(
    ("length", "text", "crc"),
    [
        (1 << 40, b"", None),
        (5000, b"", None),
        (8, b"\0" * 8, None),  # cut short
        (16, struct.pack("<QI", 0, 400) + b"abcd", None),  # more bytes than there are
        (16, struct.pack("<QI", 3000, 4) + b"abcd", None),  # out of the places allowed
        (16, struct.pack("<QI", (1 << 64) - 2, 4) + b"abcd", None),
        (16, struct.pack("<QI", 100, 4) + b"abcd", 7),
    ],
)
def test_a_damaged_journal_is_refused_by_name(length: int, text: bytes, crc: int | None) -> None:
    memory = memoryview(bytearray(4096))
    memory[1024 : 1024 + 12 + len(text)] = struct.pack("<QI", length, zlib.crc32(text) if crc is None else crc) + text
    before = bytes(memory)
    with pytest.raises(PreconditionFailed) as caught:
        Journal(memory, 1024, 1024).replay(range(64, 1024))
    assert caught.value.reason == "BAD_CONTROL_BLOCK"
    assert bytes(memory) == before


# --- hostile blocks ---


def refused_or_sound(w: Worker, block: bytes) -> str | None:
    """Takes the block over; returns why it was refused. What is not refused must be sound."""
    try:
        device = taken_over(w, block)
    except PreconditionFailed as refused:
        assert refused.reason == "BAD_CONTROL_BLOCK", refused
        return str(refused)
    try:
        device.table.check()
        assert device.verifier.tables() == []
        device.adopt(device.control.epoch + 1, living=False)
        device.table.check()
        assert device.verifier.tables() == []
        for slot in device.table.slots:
            try:
                device.truncate(slot, 0)
            except TailpackError as error:
                assert not isinstance(error, InternalError), error
        device.release(device.table.slots)
        device.table.check()
        assert all(not (t.num_open or t.num_sealed or t.num_promised) for t in device.table.groups.values())
    except PreconditionFailed as refused:
        assert refused.reason == "BAD_CONTROL_BLOCK", refused
        return str(refused)
    finally:
        device.close()
    return None


@pytest.fixture(scope="module")
def hostile() -> Worker:
    return busy(SLIDING, FULL, DENSE, LayerGroup("csa", (RATIO_4, PENDING), "turboquant", "tq4", window=64))


def test_flipped_bits_are_refused_or_do_no_harm(hostile: Worker) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    block, control = block_of(hostile), hostile.device.control
    sections = control._sections
    live = control.live_slots()
    refused = 0
    for _ in range(400):
        changed = bytearray(block)
        for _ in range(rng.choice([1, 1, 1, 3])):
            name = rng.choice(
                ["header", "groups", "pages", "slots", "sequence_groups", "page_ids", "token_log", "journal"]
            )
            at, size = (0, 400) if name == "header" else sections[name]
            if name in ("slots", "sequence_groups", "page_ids", "token_log"):
                size //= control.shape.max_sequences
                at += rng.choice(live) * size
                size = 700 if name == "slots" else min(size, 4 * 700)
            if name == "journal":
                size = 24
            place = at + rng.randrange(size)
            changed[place] = rng.choice([changed[place] ^ 1 << rng.randrange(8), 0, 255, rng.randrange(256)])
        refused += refused_or_sound(hostile, bytes(changed)) is not None
    assert refused > 100


FIELDS = {
    "slots": (
        "logged committed packed saved state max_tokens epoch inexact_from request_id_bytes salt_bytes frozen_bytes "
        "num_prompt_tokens num_cached copies_asked copies_made"
    ),
    "sequence_groups": (
        "base num_pages first_page handed_end lossy_end ring_first ring_written ahead_end split_index split_page "
        "split_tokens split_reopened worst prompt_first prompt_end tail_slot"
    ),
    "pages": "state refs tier flags generation checksum",
    "header": (
        "version num_groups max_sequences max_sequence_tokens num_bytes epoch weights_digest_bytes device_bytes"
    ),
    "groups": "name_bytes num_pages page_bytes first_entry",
}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_value_in_any_field_is_refused_or_does_no_harm(hostile: Worker, data: st.DataObject) -> None:
    block = bytearray(block_of(hostile))
    control = ControlBlock(memoryview(block))
    section = data.draw(st.sampled_from(list(FIELDS)))
    name = data.draw(st.sampled_from(FIELDS[section].split()))
    live = control.live_slots()
    if section == "slots":
        array, index = control.slots[name], data.draw(st.integers(0, len(control.slots) - 1))
    elif section == "sequence_groups":
        array = control.sequence_groups[name].reshape(-1)
        index = data.draw(st.sampled_from(live)) * len(control.group_names) + data.draw(st.integers(0, 3))
    elif section == "pages":
        array = control.pages[data.draw(st.sampled_from(control.group_names))][name]
        index = data.draw(st.integers(0, len(array) - 1))
    elif section == "header":
        array, index = control._header[name], 0
    else:
        array, index = control._groups[name], data.draw(st.integers(0, 3))
    most = np.iinfo(array.dtype).max
    value = data.draw(
        st.one_of(
            st.integers(0, 20),
            st.integers(max(0, most - 3), most),
            st.integers(0, min(most, 1 << 33)),
            st.just(128),
            st.just(1000),
        )
    )
    array[index] = value
    refused_or_sound(hostile, bytes(block))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_page_ids_are_refused_or_do_no_harm(hostile: Worker, data: st.DataObject) -> None:
    block = bytearray(block_of(hostile))
    control = ControlBlock(memoryview(block))
    slot = data.draw(st.sampled_from(control.live_slots()))
    ids = control.page_ids[slot, data.draw(st.integers(0, 3))]
    for _ in range(data.draw(st.integers(1, 3))):
        ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(
            st.one_of(st.integers(0, 70), st.just(0xFFFFFFFF), st.just(1 << 31))
        )
    refused_or_sound(hostile, bytes(block))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.binary(max_size=5000), at=st.integers(0, 8192))
def test_bytes_of_any_kind_are_refused(hostile: Worker, text: bytes, at: int) -> None:
    block = bytearray(block_of(hostile))
    block[at : at + len(text)] = text
    refused_or_sound(hostile, bytes(block[: len(block_of(hostile))]))
    with pytest.raises(PreconditionFailed):
        ControlBlock(memoryview(bytearray(text)))


def test_every_field_that_matters_is_looked_at(hostile: Worker) -> None:
    """One wrong value of each kind, and the name of what is wrong in the message."""
    control, live = hostile.device.control, hostile.device.control.live_slots()
    slot = live[0]

    def with_change(change: Callable[[ControlBlock], None]) -> str:
        block = bytearray(block_of(hostile))
        change(ControlBlock(memoryview(block)))
        why = refused_or_sound(hostile, bytes(block))
        assert why is not None
        return why

    def set_slot(name: str, value: int) -> Callable[[ControlBlock], None]:
        return lambda c: c.slots[name].__setitem__(slot, value)

    def set_group(name: str, value: int, group: int = 1) -> Callable[[ControlBlock], None]:
        return lambda c: c.sequence_groups[name].__setitem__((slot, group), value)

    sealed = hostile.table.sequence(slot).groups["full"].pages[0]

    def set_page(name: str, value: object, page: int = sealed) -> Callable[[ControlBlock], None]:
        return lambda c: c.pages["full"][name].__setitem__(page, value)

    for change, word in (
        (set_slot("state", 2), "state of a slot"),
        (set_slot("state", 0), "holders of page"),
        (set_slot("committed", 5000), "lengths of slot"),
        (set_slot("request_id_bytes", 257), "request_id"),
        (set_slot("salt_bytes", 257), "salt"),
        (set_slot("frozen_bytes", 1 << 31), "frozen"),
        (set_slot("max_tokens", 0), "max_tokens"),
        (set_slot("epoch", 1 << 63), "epoch"),
        (set_slot("num_cached", 1 << 31), "num_cached"),
        (set_slot("inexact_from", 1 << 40), "inexact_from"),
        (set_group("base", 129), "base"),
        (set_group("base", 1 << 40), "base"),
        (set_group("num_pages", 1), "pages"),
        (set_group("tail_slot", slot + 1), "tail slot"),
        (set_group("lossy_end", 1 << 40), "dequantised"),
        (set_group("ring_written", 1 << 40), "ring"),
        (set_group("worst", 1 << 20), "may be needed"),
        (set_group("prompt_end", 1 << 20), "prompt pages"),
        (set_page("state", 9), "page"),
        (set_page("refs", 0), "page"),
        (set_page("refs", 40), "holders of page"),
        (set_page("flags", 4), "flags"),
        (set_page("tier", 1), "tier"),
        (set_page("generation", 1 << 63), "generation"),
        (set_page("hash", 7), "hash of page"),
        (set_page("parent", 7), "hash of page"),
    ):  # fmt: skip
        why = with_change(change)
        assert word in why, (word, why)
    token_log = control._token_log
    assert token_log.shape[1] == 1400
    assert "token log" in with_change(lambda c: c._token_log.__setitem__((slot, 5), 999999))
    text = hostile.table.sequence(max(live)).salt
    assert text
    assert "text of slot" in with_change(lambda c: c.slots["request_id"].__setitem__((slot, 0), 0xFF))


def test_a_block_of_another_device_or_geometry_is_refused(hostile: Worker) -> None:
    spec = hostile.device.spec
    changes: list[tuple[str, Callable[[ControlBlock], None]]] = [
        ("device", lambda c: c._header["device"].__setitem__((0, 0), ord("x"))),
        ("geometry digest", lambda c: c._header["geometry_digest"].__setitem__((0, 0), 1 ^ spec.geometry.digest()[0])),
        ("weights digest", lambda c: c._header["weights_digest"].__setitem__((0, 0), 0)),
        ("layer groups", lambda c: c._groups["name"].__setitem__((0, 0), ord("x"))),
        ("epoch", lambda c: c._header["epoch"].__setitem__(0, (1 << 64) - 1)),
        ("page bytes", lambda c: c._groups["page_bytes"].__setitem__(0, 1)),
    ]
    for word, change in changes:
        block = bytearray(block_of(hostile))
        change(ControlBlock(memoryview(block)))
        why = refused_or_sound(hostile, bytes(block))
        assert why is not None
        assert word in why


def test_descriptors_that_are_not_the_memory_are_refused_and_closed() -> None:
    w = busy(FULL, replace(FULL, name="twin"))

    def taken(change: Callable[[list[int]], None]) -> None:
        fds = [os.dup(fd) for fd in w.device.manifest()[1]]
        change(fds)
        with pytest.raises(PreconditionFailed) as caught:
            Device.take_over(w.device.spec, fds)
        assert caught.value.reason == "BAD_MEMORY"
        for fd in fds:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(fd)

    def replaced(index: int, fd: int) -> Callable[[list[int]], None]:
        def change(fds: list[int]) -> None:
            os.close(fds[index])
            fds[index] = fd

        return change

    def unsealed(content: bytes) -> int:
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, content)
        return fd

    taken(replaced(0, unsealed(block_of(w))))
    taken(replaced(0, os.open("/dev/null", os.O_RDWR)))
    taken(replaced(1, unsealed(bytes(4096))))
    reader, writer = os.pipe()
    taken(replaced(2, reader))
    os.close(writer)
    taken(lambda fds: fds.reverse())
    taken(lambda fds: replaced(2, os.dup(fds[1]))(fds))  # as large, and sealed


def test_a_sound_block_is_taken_over_from_a_copy(hostile: Worker) -> None:
    assert refused_or_sound(hostile, block_of(hostile)) is None
