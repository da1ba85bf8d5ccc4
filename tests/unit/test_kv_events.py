"""The event log, and that a reader who follows its rules never believes in a page that was not there."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.events import Event, EventBatch, EventKind, EventLog, Snapshot
from kvstore.prefix_index import PrefixIndex
from protos.page_hash import ROOT

Pages = frozenset[tuple[str, bytes]]


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


# --- the log ---


def test_events_come_in_order_and_once() -> None:
    log = EventLog("one", 10)
    log.added("full", name(1))
    log.removed("full", name(1))
    first = log.since("one", 0)
    assert first == EventBatch(
        "one",
        0,
        2,
        False,
        (Event(EventKind.ADDED, "full", name(1)), Event(EventKind.REMOVED, "full", name(1))),
    )
    assert log.since("one", first.cursor) == EventBatch("one", 2, 2, False, ())
    log.cleared()
    assert log.since("one", first.cursor).events == (Event(EventKind.CLEARED, "", b""),)


def test_a_limit_splits_without_a_gap() -> None:
    log = EventLog("one", 10)
    for number in range(5):
        log.added("full", name(number))
    cursor = 0
    seen: list[Event] = []
    while cursor < log.cursor:
        batch = log.since("one", cursor, limit=2)
        assert batch.first == cursor
        assert 1 <= len(batch.events) <= 2
        seen.extend(batch.events)
        cursor = batch.cursor
    assert [event.hash for event in seen] == [name(number) for number in range(5)]


def test_the_ring_is_bounded_and_says_what_is_lost() -> None:
    log = EventLog("one", 3)
    for number in range(10):
        log.added("full", name(number))
    assert (log.num_kept, log.cursor) == (3, 10)
    assert log.since("one", 6) == EventBatch("one", 10, 10, True, ())
    assert [event.hash for event in log.since("one", 7).events] == [name(7), name(8), name(9)]


@pytest.mark.parametrize(
    ("incarnation", "cursor"),
    [("one", 4), ("one", -1), ("zero", 2), ("", 0), ("zero", 0)],
    ids=["yet to come", "negative", "other life, in range", "new reader", "other life, at its start"],
)
def test_lost(incarnation: str, cursor: int) -> None:
    log = EventLog("one", 10)
    for number in range(3):
        log.added("full", name(number))
    assert log.since(incarnation, cursor) == EventBatch("one", 3, 3, True, ())


def test_snapshot_is_of_its_cursor() -> None:
    log = EventLog("one", 10)
    index = PrefixIndex(["full", "other"], events=log)
    index.add("full", name(1), 0, parent=ROOT, exact=True)
    snapshot = log.snapshot(index.contents())
    index.add("full", name(2), 1, parent=name(1), exact=True)
    assert snapshot == Snapshot("one", 1, {"full": (name(1),), "other": ()})
    assert [event.hash for event in log.since("one", snapshot.cursor).events] == [name(2)]


@pytest.mark.parametrize(("incarnation", "capacity"), [("", 10), ("one", 0)])
def test_a_log_without_a_name_or_room_is_refused(incarnation: str, capacity: int) -> None:
    with pytest.raises(ValueError, match="incarnation and room"):
        EventLog(incarnation, capacity)


# --- a reader over a lossy connection, a store that restarts ---


class Reader:
    """As a router follows a store: the rules of the module's text, and nothing else."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.cursor = 0
        self.pages: set[tuple[str, bytes]] = set()
        self.needs_snapshot = True
        self.num_snapshots = 0

    def apply(self, batch: EventBatch) -> None:
        if batch.lost or batch.incarnation != self.incarnation or batch.first != self.cursor:
            self.pages.clear()
            self.needs_snapshot = True
        if self.needs_snapshot:
            return
        for event in batch.events:
            if event.kind is EventKind.CLEARED:
                self.pages.clear()
            elif event.kind is EventKind.ADDED:
                self.pages.add((event.group, event.hash))
            else:
                self.pages.discard((event.group, event.hash))
        self.cursor = batch.cursor

    def take(self, snapshot: Snapshot) -> None:
        self.incarnation, self.cursor = snapshot.incarnation, snapshot.cursor
        self.pages = {(group, page_hash) for group, hashes in snapshot.hashes.items() for page_hash in hashes}
        self.needs_snapshot = False
        self.num_snapshots += 1


class Store:
    """An index under random use, with what it held at every cursor of every life."""

    def __init__(self, rng: random.Random, capacity: int) -> None:
        self.rng = rng
        self.capacity = capacity
        self.lives = 0
        self.truth: dict[tuple[str, int], Pages] = {}
        self.restart()

    def restart(self) -> None:
        """The same address, a new life: nothing is cached, events are counted from 0 again."""
        self.lives += 1
        self.log = EventLog(f"life-{self.lives}", self.capacity)
        self.index = PrefixIndex(["full", "window"], windowed=["window"], events=self.log)
        self.note()

    def note(self) -> None:
        self.truth[self.log.incarnation, self.log.cursor] = self.held()

    def held(self) -> Pages:
        return frozenset((group, page_hash) for group, hashes in self.index.contents().items() for page_hash in hashes)

    def change(self) -> None:
        group = self.rng.choice(["full", "window"])
        kind = self.rng.random()
        if kind < 0.6:
            number = self.rng.randrange(1, 40)
            page = self.rng.randrange(1000)
            if self.index.hash_of(group, page) is None:
                parent = name(number // 2) if number > 1 else ROOT
                self.index.add(group, name(number), page, parent=parent, exact=self.rng.random() < 0.8, pinned=False)
        elif kind < 0.99:
            self.index.evict(group, 1)
        else:
            self.index.clear()
        self.note()


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_converges_whatever_is_dropped(seed: int) -> None:
    """Every 7th batch is lost on its way, the store restarts now and then, the ring is short."""
    rng = random.Random(seed)
    store, reader = Store(rng, capacity=30), Reader()
    sent = (store.log.incarnation, store.log.cursor)  # what the stream has sent, whether or not it arrived
    for number in range(1, 400):
        for _ in range(rng.choice([0, 1, 5, 40])):  # 40: further than the ring reaches
            store.change()
        if rng.random() < 0.02:
            store.restart()
        batch = store.log.since(*sent)
        sent = (batch.incarnation, batch.cursor)
        if number % 7:
            reader.apply(batch)
        if reader.needs_snapshot and rng.random() < 0.5:
            reader.take(store.log.snapshot(store.index.contents()))
            sent = (reader.incarnation, reader.cursor)
        believed = store.truth.get((reader.incarnation, reader.cursor), frozenset())
        assert reader.pages <= believed, f"seed {seed}: believes in pages that were not there"
        assert reader.needs_snapshot or reader.pages == believed, f"seed {seed}: missed pages without knowing it"
    # Quiet at last: one more exchange, and the reader knows everything.
    reader.apply(store.log.since(*sent))
    if reader.needs_snapshot:
        reader.take(store.log.snapshot(store.index.contents()))
    assert reader.pages == store.held(), f"seed {seed}"
    assert reader.num_snapshots > 5
    assert store.lives > 1


def test_a_restart_at_the_same_address_leaves_no_credit() -> None:
    rng = random.Random(1)
    store, reader = Store(rng, capacity=100), Reader()
    for number in range(5):
        store.index.add("full", name(number), number, parent=ROOT, exact=True)
    reader.take(store.log.snapshot(store.index.contents()))
    assert len(reader.pages) == 5
    store.restart()
    for number in range(100, 105):  # the new life reaches the very cursor that the reader stands at
        store.index.add("full", name(number), number, parent=ROOT, exact=True)
    reader.apply(store.log.since(reader.incarnation, reader.cursor))
    assert reader.pages == set()
    assert reader.needs_snapshot


def test_a_new_life_is_known_by_its_name_alone() -> None:
    # The one batch that was flagged as lost is lost itself, and the new life counts on from where the reader stands.
    log, reader = EventLog("one", 100), Reader()
    log.added("full", name(1))
    reader.take(log.snapshot({"full": [name(1)]}))
    log = EventLog("two", 100)
    log.added("full", name(2))
    assert log.since("one", reader.cursor).lost
    log.added("full", name(3))
    batch = log.since("two", reader.cursor)
    assert (batch.first, batch.lost) == (reader.cursor, False)
    reader.apply(batch)
    assert reader.pages == set()
    assert reader.needs_snapshot


def test_a_flush_leaves_no_credit() -> None:
    log = EventLog("one", 100)
    index = PrefixIndex(["full", "window"], events=log)
    reader = Reader()
    reader.take(log.snapshot(index.contents()))
    index.add("full", name(1), 0, parent=ROOT, exact=True, pinned=False)
    index.add("window", name(1), 0, parent=ROOT, exact=True)
    reader.apply(log.since("one", reader.cursor))
    assert len(reader.pages) == 2
    index.clear()
    reader.apply(log.since("one", reader.cursor))
    assert reader.pages == set()
    index.add("full", name(1), 3, parent=ROOT, exact=True)
    reader.apply(log.since("one", reader.cursor))
    assert reader.pages == {("full", name(1))}


@given(
    capacity=st.integers(1, 20),
    steps=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5) | st.none()), max_size=30),
)
def test_what_is_read_is_what_was_written(capacity: int, steps: list[tuple[int, int | None]]) -> None:
    """Against a list that keeps all: a batch is the list's slice, or lost exactly when the ring is too short."""
    log, cursor = EventLog("one", capacity), 0
    everything: list[bytes] = []
    for count, limit in steps:
        for _ in range(count):
            everything.append(name(len(everything)))
            log.added("full", everything[-1])
        batch = log.since("one", cursor, limit)
        assert batch.lost == (cursor < len(everything) - capacity)
        expected = [] if batch.lost else everything[cursor : None if limit is None else cursor + limit]
        assert [event.hash for event in batch.events] == expected
        assert batch.cursor == (len(everything) if batch.lost else cursor + len(expected))
        cursor = batch.cursor
