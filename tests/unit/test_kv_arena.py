"""Arenas: sizes by formula, seals, and memory that is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore import memory_limit
from kvstore.arena import (
    CHUNK_BYTES,
    MAX_CHUNKS,
    PREFAULT_CHUNK_BYTES,
    Arena,
    ArenaPlan,
    Memory,
    allocate_arenas,
    chunk_sizes,
    pages_per_group,
)
from kvstore.geometry import CacheGeometry, LayerGroup, Region, apply_mode
from kvstore.memory_limit import HEADROOM_BYTES, available_bytes, cgroup_room, check_memory
from protos.errors import CapacityError, ConfigError, PreconditionFailed
from tests.unit.descriptors import open_descriptors

K = Region(0, "k", 2, 64, "float32")
GEOMETRY = CacheGeometry(
    (LayerGroup("full", (K, Region(0, "v", 2, 64, "float32"))), LayerGroup("window", (K,), window=128))
)
FULL_BYTES, WINDOW_BYTES = 2 * 65536, 65536


@pytest.fixture
def page_memory() -> Iterator[Memory]:
    made = Memory.allocate("test", 3 * FULL_BYTES)
    yield made
    made.close()


def test_every_group_gets_as_many_pages() -> None:
    one = FULL_BYTES + WINDOW_BYTES
    assert pages_per_group(GEOMETRY, 10 * one) == {"full": 10, "window": 10}
    assert pages_per_group(GEOMETRY, 11 * one - 1) == {"full": 10, "window": 10}
    assert pages_per_group(GEOMETRY, 10 * one, num_tail_slots=7) == {"full": 10, "window": 10}  # dense: no tails


def test_tails_come_out_of_the_same_bytes() -> None:
    packed = apply_mode(GEOMETRY, "turboquant", "tq4")
    tails = 3 * packed.tail_bytes
    one = sum(group.page_bytes for group in packed.groups)
    assert pages_per_group(packed, tails + 5 * one, 3) == {"full": 5, "window": 5}
    with pytest.raises(ConfigError, match="no room for the tails") as caught:
        pages_per_group(packed, tails + one - 1, 3)
    assert caught.value.reason == "ARENA_TOO_SMALL"


@pytest.mark.parametrize(("mode", "preset"), [("turboquant", "tq3v2"), ("fp8", ""), ("dense", "")])
def test_measured_arena_use_equals_the_formula_to_the_byte(mode: str, preset: str) -> None:
    geometry = apply_mode(GEOMETRY, mode, preset, (0, 0))
    made = allocate_arenas(geometry, 20 << 20, device="cpu:0", num_tail_slots=4)
    counts = pages_per_group(geometry, 20 << 20, 4)
    for group in geometry.groups:
        sizes = {kind: arenas.get(group.name) for kind, arenas in (("pages", made.pages), ("tails", made.tails))}
        assert sizes["pages"]
        assert os.fstat(sizes["pages"].memory.fd).st_size == counts[group.name] * group.page_bytes
        if mode == "dense":
            assert sizes["tails"] is None
        else:
            assert sizes["tails"]
            assert os.fstat(sizes["tails"].memory.fd).st_size == 4 * geometry.tail_slot_bytes(group)
    made.close()


def test_mode_window_has_tails_and_no_pages() -> None:
    ring = CacheGeometry((LayerGroup("ring", (K,), "window", window=128),))
    made = allocate_arenas(ring, 4 * ring.tail_bytes, device="cpu:0", num_tail_slots=4)
    assert (list(made.pages), [arena.num_pages for arena in made.tails.values()]) == ([], [4])
    made.close()


def test_no_room_for_a_page_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        pages_per_group(GEOMETRY, FULL_BYTES + WINDOW_BYTES - 1)
    assert caught.value.reason == "ARENA_TOO_SMALL"
    assert str(FULL_BYTES + WINDOW_BYTES) in (caught.value.allowed or "")


def test_arenas_have_exactly_the_bytes_of_the_formula_and_all_are_present() -> None:
    arenas = allocate_arenas(GEOMETRY, 5 * (FULL_BYTES + WINDOW_BYTES) + 1000, device="cpu:0").pages
    assert {name: arena.memory.num_bytes for name, arena in arenas.items()} == {
        "full": 5 * FULL_BYTES,
        "window": 5 * WINDOW_BYTES,
    }
    for arena in arenas.values():
        stat = os.fstat(arena.memory.fd)
        assert stat.st_size == arena.num_pages * arena.page_bytes
        assert stat.st_blocks * 512 >= stat.st_size  # prefaulted, not a hole
        arena.memory.close()


def test_size_is_sealed(page_memory: Memory) -> None:
    for num_bytes in (0, 4 * FULL_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(page_memory.fd, num_bytes)
    assert os.fstat(page_memory.fd).st_size == 3 * FULL_BYTES


def test_mappings_share_bytes(page_memory: Memory) -> None:
    with page_memory.map() as one, page_memory.map() as two:
        assert one[:16] == bytes(16)
        one[-4:] = b"tail"
        assert two[-4:] == b"tail"


def test_pages_of_an_arena(page_memory: Memory) -> None:
    with Arena("full", 3, FULL_BYTES, page_memory.map()) as arena:
        arena.page(2)[:3] = b"abc"
        assert bytes(arena.buffer[2 * FULL_BYTES : 2 * FULL_BYTES + 3]) == b"abc"
        assert len(arena.buffer) == 3 * FULL_BYTES
        for bad in (3, -1):
            with pytest.raises(IndexError):
                arena.page(bad)


def test_a_view_that_outlives_the_arena_stays_valid(page_memory: Memory) -> None:
    arena = Arena("full", 3, FULL_BYTES, page_memory.map())
    view = arena.page(0)
    arena.close()
    view[:2] = b"ok"
    assert bytes(view[:2]) == b"ok"


def test_a_kernel_without_room_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(28, "No space left on device")

    before = open_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(CapacityError) as caught:
        allocate_arenas(GEOMETRY, 10 << 20, device="cpu:0")
    assert caught.value.reason == "NOT_ENOUGH_MEMORY"
    assert not open_descriptors() - before


def test_the_second_arena_failing_gives_the_first_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.posix_fallocate, []

    def second_fails(fd: int, offset: int, num_bytes: int) -> None:
        calls.append(num_bytes)
        if len(calls) == 2:
            raise OSError(12, "Cannot allocate memory")
        real(fd, offset, num_bytes)

    before = open_descriptors()
    monkeypatch.setattr(os, "posix_fallocate", second_fails)
    with pytest.raises(CapacityError):
        allocate_arenas(GEOMETRY, 10 << 20, device="cpu:0")
    assert not open_descriptors() - before


def test_memory_is_checked_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> int:
        raise AssertionError("memory was asked for")

    monkeypatch.setattr(os, "memfd_create", never)
    with pytest.raises(CapacityError) as caught:
        allocate_arenas(GEOMETRY, 1 << 50, device="cpu:0")
    error = caught.value
    assert error.reason == "NOT_ENOUGH_MEMORY"
    assert str((1 << 50) // (FULL_BYTES + WINDOW_BYTES) * (FULL_BYTES + WINDOW_BYTES)) in (error.given or "")
    assert "bytes" in (error.allowed or "")
    assert error.hint


def test_headroom_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "available_bytes", lambda: (HEADROOM_BYTES + 1000, "in a test"))
    check_memory(1000, what="x")
    with pytest.raises(CapacityError, match="not enough memory for x"):
        check_memory(1001, what="x")


def test_this_machine_has_some() -> None:
    available, limited_by = available_bytes()
    assert available > 0
    assert limited_by


def _files(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_cgroup_v2_limits_of_the_group_and_its_ancestors(tmp_path: Path) -> None:
    _files(tmp_path / "pod", memory__max="1000\n", memory__current="900\n", memory__stat="anon 1\ninactive_file 50\n")
    _files(tmp_path / "pod" / "store", memory__max="max\n", memory__current="10\n")
    assert cgroup_room("0::/pod/store\n", tmp_path) == [150]
    _files(tmp_path / "pod" / "store", memory__max="100\n", memory__current="120\n")
    assert cgroup_room("0::/pod/store\n", tmp_path) == [0, 150]


def test_cgroup_v1_memory_hierarchy(tmp_path: Path) -> None:
    _files(
        tmp_path / "memory" / "a",
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="400",
        memory__stat="inactive_file 7\ntotal_inactive_file 100\n",
    )
    # What Linux writes for "no limit" where a page has 4096 bytes.
    _files(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes="400")
    assert cgroup_room("5:devices:/x\n4:memory:/a\n", tmp_path) == [700]
    assert cgroup_room("4:memory:/\n", tmp_path) == []


@pytest.mark.parametrize("membership", ["", "0::/gone\n", "0::/../outside\n", "3:cpu:/a\n"])
def test_cgroups_without_a_limit(membership: str, tmp_path: Path) -> None:
    assert cgroup_room(membership, tmp_path) == []


def test_every_byte_is_touched_and_reported() -> None:
    seen: list[int] = []
    num_bytes = 2 * PREFAULT_CHUNK_BYTES + 4096
    Memory.allocate("test", num_bytes, on_progress=seen.append).close()
    assert seen == [PREFAULT_CHUNK_BYTES, 2 * PREFAULT_CHUNK_BYTES, num_bytes]


MIB = 1 << 20


@settings(max_examples=200, deadline=None)
@given(
    arenas=st.lists(st.tuples(st.integers(1, 1 << 20), st.integers(1, 4 * MIB)), min_size=1, max_size=MAX_CHUNKS),
    granularity=st.sampled_from([4096, 2 * MIB, 1 << 30]),
)
def test_chunks_cover_every_arena_with_less_than_a_granule_to_spare(
    arenas: list[tuple[int, int]], granularity: int
) -> None:
    plans = [ArenaPlan("arena", f"g{i}", num_pages, page_bytes) for i, (num_pages, page_bytes) in enumerate(arenas)]
    sizes = chunk_sizes(plans, granularity)
    assert sum(map(len, sizes)) <= MAX_CHUNKS
    for plan, chunks in zip(plans, sizes, strict=True):
        assert 0 <= sum(chunks) - plan.num_bytes < granularity
        assert all(size > 0 and size % granularity == 0 for size in chunks)
        assert len(set(chunks[:-1])) <= 1


def test_chunks_are_no_larger_than_they_must_be() -> None:
    def cut(num_bytes: int) -> tuple[int, ...]:
        return chunk_sizes([ArenaPlan("arena", "full", 1, num_bytes)], 2 * MIB)[0]

    assert cut(1) == (2 * MIB,)
    assert cut(CHUNK_BYTES) == (CHUNK_BYTES,)
    assert cut(CHUNK_BYTES + 1) == (CHUNK_BYTES, 2 * MIB)
    assert cut(MAX_CHUNKS * CHUNK_BYTES) == (CHUNK_BYTES,) * MAX_CHUNKS
    assert cut(MAX_CHUNKS * CHUNK_BYTES + 1) == (2 * CHUNK_BYTES,) * (MAX_CHUNKS // 2) + (2 * MIB,)


def test_more_arenas_than_descriptors_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        chunk_sizes([ArenaPlan("arena", f"g{i}", 1, 4096) for i in range(MAX_CHUNKS + 1)], 4096)
    assert caught.value.reason == "TOO_MANY_ARENAS"


def test_device_memory_has_no_buffer_and_says_so(page_memory: Memory) -> None:
    with Arena("full", 3, FULL_BYTES, Memory((), 3 * FULL_BYTES, (4 * FULL_BYTES,)), "cuda:GPU-0") as arena:
        assert arena.chunks is not None and not arena.chunks.readable
        assert arena.chunks.allocated_bytes == 4 * FULL_BYTES
        with pytest.raises(PreconditionFailed) as caught:
            arena.page(0)
        assert caught.value.reason == "DEVICE_MEMORY"
    assert page_memory.readable and page_memory.allocated_bytes == page_memory.num_bytes
