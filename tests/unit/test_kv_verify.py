"""Checksums of pages that the store can read, and of those that lie in a GPU's memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kvstore.answers import Admitted
from kvstore.checksum import page_checksum
from kvstore.device import Device, DeviceSpec, NewSequence
from kvstore.geometry import CacheGeometry, LayerGroup, Region

K = Region(0, "k", 1, 16, "float32")
GEOMETRY = CacheGeometry((LayerGroup("full", (K,)), LayerGroup("other", (replace(K, layer=1),))))
SPEC = DeviceSpec("cpu:0", GEOMETRY, 8 * GEOMETRY.groups[0].page_bytes, 2, 384, b"w")


@pytest.fixture
def device() -> Iterator[Device]:
    """Three pages of each group are sealed, with their checksums: each filled with its own byte."""
    made = Device.allocate(SPEC)
    (result,) = made.open([NewSequence("r", "", [1] * 384, 384, b"")])
    assert isinstance(result, Admitted)
    checksums = {}
    for group, pages in made.reserve([(result.slot, 384, 1)])[result.slot].items():
        arena = made.arenas.pages[group]
        with arena.memory.map() as memory:
            for page in pages:
                at = slice(page.page_id * arena.page_bytes, (page.page_id + 1) * arena.page_bytes)
                memory[at] = bytes([page.index + 1]) * arena.page_bytes
                checksums[group, page.page_id] = page_checksum(memory[at])
    made.control.commit(result.slot, 384)
    made.seal([(result.slot, 384, 1)], checksums)
    yield made
    made.close()


def spoil(device: Device, group: str, byte: int) -> None:
    with device.arenas.pages[group].memory.map() as memory:
        memory[byte] ^= 1


def test_a_changed_byte_is_found_in_its_page(device: Device) -> None:
    assert device.verifier.checksums() == ([], 6)
    assert device.verifier.num_unreadable == 0
    spoil(device, "other", 2 * GEOMETRY.groups[1].page_bytes + 5)
    problems, compared = device.verifier.checksums()
    assert compared == 6
    assert len(problems) == 1 and "group 'other': the checksum of page 2" in problems[0]


def test_pages_in_device_memory_are_left_out_and_counted(device: Device) -> None:
    arena = device.arenas.pages["other"]
    on_gpu = replace(arena.memory, chunk_bytes=(arena.memory.num_bytes,))
    assert not on_gpu.readable
    spoil(device, "other", 5)
    spoil(device, "full", 5)
    device.arenas.pages["other"] = replace(arena, memory=on_gpu)
    problems, compared = device.verifier.checksums()
    assert (len(problems), compared, device.verifier.num_unreadable) == (1, 3, 3)
    assert "group 'full'" in problems[0]
    assert ["'full'" in problem for problem in device.verifier.next_checksums(4)] == [True]
    device.release(device.table.slots)
    assert device.verifier.num_unreadable == 3, "cached pages count as well"


@pytest.mark.parametrize("taken_over", [False, True], ids=["a worker's death", "a store's death"])
@pytest.mark.parametrize("held", [True, False], ids=["held", "cached"])
def test_behind_a_death_nobody_goes_on_from_a_damaged_page(device: Device, taken_over: bool, held: bool) -> None:
    if not held:
        device.release(device.table.slots)
    spoil(device, "other", GEOMETRY.groups[1].page_bytes + 5)
    if taken_over:
        _, fds = device.manifest()
        device = Device.take_over(SPEC, [os.dup(fd) for fd in fds])
    else:
        device.compare_pages()
    adopted = device.adopt(9, living=taken_over)
    assert [each.intact for each in adopted] == [False] * held
    device.release(device.table.slots)
    assert device.verifier.tables() == []
    (result,) = device.open([NewSequence("again", "", [1] * 384, 384, b"")])
    assert isinstance(result, Admitted)
    assert result.num_cached == 128, "the page in front of it is as it was sealed, and what follows is out of reach"
    device.release([result.slot])
    assert device.verifier.checksums()[0] == []
    if taken_over:
        device.close()


def test_no_more_is_compared_than_there_is_time_for(device: Device) -> None:
    for page in range(3):
        spoil(device, "full", page * GEOMETRY.groups[0].page_bytes)
    found, compared = device.verifier.damaged(2 * GEOMETRY.groups[0].page_bytes)
    assert (len(found), compared) == (2, 2)
    assert device.verifier.damaged(1 << 30)[1] == 6
