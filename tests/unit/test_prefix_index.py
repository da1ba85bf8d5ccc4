"""The prefix index: what is found, what goes first, and that it never says a page is there that is not."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.events import EventKind, EventLog
from kvstore.prefix_index import Added, Evicted, PrefixIndex
from protos.errors import InternalError
from protos.page_hash import HASH_BYTES, PAGE_TOKENS, ROOT, page_hashes

WEIGHTS, GEOMETRY = b"w" * 16, b"g" * 16


def chain(text: str) -> list[bytes]:
    """A page hash per letter; texts with a common beginning have a common chain, as page_hash makes it."""
    return [blake2b(text[:end].encode(), digest_size=HASH_BYTES).digest() for end in range(1, len(text) + 1)]


def index(*groups: str, windowed: Sequence[str] = ()) -> PrefixIndex:
    return PrefixIndex(groups or ("full",), windowed=windowed)


def add(
    into: PrefixIndex, text: str, first_page: int, *, group: str = "full", start: int = 0, exact: bool = True
) -> list[int]:
    """Adds pages [start, len(text)) of the text, pinned, with ids from first_page on; returns the ids."""
    hashes = [ROOT, *chain(text)]
    pages = []
    for at in range(start, len(text)):
        page = first_page + at - start
        assert into.add(group, hashes[at + 1], page, parent=hashes[at], exact=exact) == Added(True)
        pages.append(page)
    return pages


def found(into: PrefixIndex, text: str, group: str = "full") -> list[int]:
    return into.lookup(chain(text))[group].pages


def victims(into: PrefixIndex, count: int, group: str = "full") -> list[int]:
    return [victim.page for victim in into.evict(group, count)]


# --- lookup ---


def test_leading_pages_of_each_group() -> None:
    pages = index("full", "other")
    add(pages, "abcd", 10)
    add(pages, "ab", 20, group="other")
    assert found(pages, "abcd") == [10, 11, 12, 13]
    assert found(pages, "abcx") == [10, 11, 12]
    assert found(pages, "xbcd") == []
    assert found(pages, "") == []
    assert found(pages, "abcd", "other") == [20, 21]
    assert pages.longest(chain("abcd")) == 2
    assert (pages.page("full", chain("abc")[2]), pages.page("other", chain("abc")[2])) == (12, None)
    assert pages.hash_of("full", 11) == chain("ab")[1]
    assert pages.hash_of("full", 20) is None
    pages.check()


def test_a_page_behind_a_gap_is_not_found() -> None:
    pages = index()
    add(pages, "abcd", 0)
    pages.remove("full", 1)
    assert found(pages, "abcd") == [0]
    assert pages.pages("full", chain("abcd")[2:]) is not None
    assert pages.pages("full", chain("abcd")) is None


def test_page_id_zero_is_a_page() -> None:
    pages = index()
    add(pages, "a", 0)
    assert found(pages, "a") == [0]
    assert not pages.remove("full", 0)


def test_continues_tells_a_split_from_the_end_of_a_chain() -> None:
    pages = index()
    add(pages, "abc", 0)
    a, b, c = chain("abc")
    assert [pages.continues("full", h) for h in (a, b, c)] == [True, True, False]
    pages.remove("full", 2)
    assert not pages.continues("full", b)


def test_another_salt_never_hits() -> None:
    tokens = list(range(3 * PAGE_TOKENS))

    def hashes(salt: str) -> list[bytes]:
        return list(page_hashes(tokens, salt=salt, weights_digest=WEIGHTS, geometry_digest=GEOMETRY))

    pages = index()
    for at, page_hash in enumerate(hashes("one")):
        pages.add("full", page_hash, at, parent=[ROOT, *hashes("one")][at], exact=True)
    assert pages.lookup(hashes("one"))["full"].pages == [0, 1, 2]
    for salt in ("two", "", "One", "one "):
        assert pages.lookup(hashes(salt))["full"].pages == []
        assert all(pages.pages("full", [page_hash]) is None for page_hash in hashes(salt))


def test_three_processes_find_the_same_pages() -> None:
    program = (
        "from protos.page_hash import page_hashes\n"
        "hashes = page_hashes(range(384), salt='t', weights_digest=b'w' * 16, geometry_digest=b'g' * 16)\n"
        "print(' '.join(h.hex() for h in hashes))"
    )
    answers = []
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        answers.append([bytes.fromhex(word) for word in done.stdout.split()])
    pages = index()
    for at, page_hash in enumerate(answers[0]):
        pages.add("full", page_hash, at, parent=[ROOT, *answers[0]][at], exact=True)
    assert [pages.lookup(hashes)["full"].pages for hashes in answers] == [[0, 1, 2]] * 3


# --- groups that keep only a window ---


def test_a_windowed_group_needs_only_the_pages_of_its_window() -> None:
    # A model with window layers gave up their first pages; that must not cost the hit (first-block keys lost).
    pages = index("full", "window", windowed=["window"])
    add(pages, "abcdef", 0)
    add(pages, "abcdef", 10, group="window", start=3)

    def two_pages(k: int) -> int:
        return max(0, k - 2)

    assert pages.longest(chain("abcdef")) == 0
    assert pages.longest(chain("abcdef"), {"window": two_pages}) == 6
    assert pages.longest(chain("abcdex"), {"window": two_pages}) == 5
    assert pages.longest(chain("abcdxx"), {"window": two_pages}) == 0  # page c of the window is gone
    assert pages.longest(chain("abcdxx"), {"window": lambda k: max(0, k - 1)}) == 4
    assert pages.pages("window", chain("abcdef")[3:]) is not None


def test_windowed_pages_go_oldest_first_even_in_front_of_others() -> None:
    pages = index("full", "window", windowed=["window"])
    held = add(pages, "abcd", 0, group="window")
    pages.unpin("window", held[:2])  # they slid out of the window; c and d are still held
    assert victims(pages, 9, "window") == [0, 1]
    pages.unpin("window", held[2:])
    assert victims(pages, 1, "window") == [2]
    assert found(pages, "abcd", "window") == []
    pages.check()


# --- inexact pages ---


def test_inexact_pages_are_reported_and_can_be_shunned() -> None:
    pages = index()
    add(pages, "ab", 0)
    add(pages, "abcd", 2, start=2, exact=False)
    assert [pages.lookup(chain(t))["full"].exact for t in ("ab", "abc", "abcd", "")] == [True, False, False, True]
    exact = pages.lookup(chain("abcd"), exact_only=True)["full"]
    assert (exact.pages, exact.exact) == ([0, 1], True)
    assert pages.lookup(chain("abcd"))["full"].first_inexact == 2
    assert (pages.longest(chain("abcd")), pages.longest(chain("abcd"), exact_only=True)) == (4, 2)
    assert pages.longest(chain("abcd"), {"full": lambda k: k - 1}, exact_only=True) == 2
    pages.remove("full", 2)
    assert pages.lookup(chain("abcd"))["full"].exact


def test_an_exact_page_takes_the_place_of_an_inexact_one() -> None:
    log = EventLog("one", 100)
    pages = PrefixIndex(["full"], events=log)
    add(pages, "ab", 0, exact=False)
    a, b = chain("ab")
    assert pages.add("full", a, 7, parent=ROOT, exact=True) == Added(True, replaced=0)  # still held by somebody
    assert pages.unpin("full", [0, 1]) == [0]  # who gives it back as one that is not kept
    assert pages.add("full", b, 8, parent=a, exact=True) == Added(True, free=1, replaced=1)
    assert pages.lookup([a, b])["full"].pages == [7, 8]
    assert pages.lookup([a, b])["full"].exact
    assert log.cursor == 2  # nothing appeared or went
    pages.check()


def test_an_inexact_page_never_takes_the_place_of_an_exact_one() -> None:
    pages = index()
    add(pages, "a", 0)
    assert pages.add("full", chain("a")[0], 5, parent=ROOT, exact=False) == Added(False)
    assert pages.add("full", chain("a")[0], 6, parent=ROOT, exact=True) == Added(False)
    assert pages.lookup(chain("a"))["full"].exact
    assert pages.unpin("full", [5]) == [5]


def test_adding_the_same_page_again_changes_nothing() -> None:
    log = EventLog("one", 100)
    pages = PrefixIndex(["full"], events=log)
    add(pages, "ab", 0)
    pages.unpin("full", [0, 1])
    assert pages.add("full", chain("a")[0], 0, parent=ROOT, exact=True) == Added(True)
    assert (pages.num_idle("full"), pages.is_pinned("full", 0), log.cursor) == (1, True, 2)
    pages.check()


# --- eviction ---


def test_children_go_before_parents_and_older_chains_before_younger() -> None:
    pages = index()
    old, young = add(pages, "abc", 0), add(pages, "xyz", 10)
    pages.unpin("full", old)
    pages.unpin("full", young)
    assert victims(pages, 4) == [2, 1, 0, 12]
    assert victims(pages, 9) == [11, 10]
    assert victims(pages, 1) == []
    assert pages.num_cached("full") == 0


def test_an_old_parent_waits_for_its_young_child() -> None:
    pages = index()
    trunk, other = add(pages, "ab", 0), add(pages, "x", 5)
    branch = add(pages, "abc", 2, start=2)
    pages.unpin("full", trunk)  # does not happen while somebody holds c by the same pages; the index copes
    pages.unpin("full", other)
    pages.unpin("full", branch)
    assert victims(pages, 2) == [5, 2]  # x is older than c, and b may not go before c
    assert victims(pages, 2) == [1, 0]


def test_pinned_pages_never_go() -> None:
    pages = index()
    held = add(pages, "abc", 0)
    assert victims(pages, 3) == []
    pages.unpin("full", held)
    pages.pin("full", held[:2])
    pages.pin("full", held[:2])  # by somebody else: who counts is PageTable
    assert (pages.num_idle("full"), victims(pages, 3)) == (1, [2])
    assert found(pages, "abc") == [0, 1]
    pages.check()


def test_use_makes_young() -> None:
    pages = index()
    for first, text in ((0, "ab"), (10, "xy"), (20, "pq")):
        pages.unpin("full", add(pages, text, first))
    pages.pin("full", [0, 1])
    pages.unpin("full", [0, 1])
    pages.touch("full", [10, 11])
    found(pages, "pq")  # looking is no use
    assert victims(pages, 6) == [21, 20, 1, 0, 11, 10]


def test_a_parent_of_a_held_child_may_go() -> None:
    # Two sequences computed page a at the same time; one of them holds its own copy of it, and the b that was added.
    pages = index()
    (a,) = add(pages, "a", 0)
    assert pages.add("full", chain("a")[0], 9, parent=ROOT, exact=True) == Added(False)
    add(pages, "ab", 1, start=1)
    pages.unpin("full", [a])
    assert pages.num_idle("full") == 1
    assert pages.evict("full", 5) == [Evicted(0, chain("a")[0])]
    assert found(pages, "ab") == []
    assert pages.unpin("full", [9, 1]) == [9]
    add(pages, "a", 3)
    assert found(pages, "ab") == [3, 1]
    pages.check()


def test_clear_leaves_pinned_pages_to_their_holders() -> None:
    log = EventLog("one", 100)
    pages = PrefixIndex(["full", "other"], events=log)
    pages.unpin("full", add(pages, "ab", 0))
    held = add(pages, "xy", 5, group="other")
    assert pages.clear() == {"full": [0, 1], "other": []}
    assert (found(pages, "ab"), found(pages, "xy", "other")) == ([], [])
    assert [event.kind for event in log.since("one", 4).events] == [EventKind.CLEARED]
    assert pages.unpin("other", held) == held
    pages.check()


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda p: p.add("full", chain("z")[0], 1, parent=ROOT, exact=True), "page 1 is cached"),
        (lambda p: p.add("full", b"short", 7, parent=ROOT, exact=True), "another length"),
        (lambda p: p.add("full", chain("z")[0], 7, parent=b"", exact=True), "another length"),
        (lambda p: p.pin("full", [7]), "page 7 is not cached"),
        (lambda p: p.touch("full", [7]), "page 7 is not cached"),
        (lambda p: p.remove("full", 7), "page 7 is not cached"),
        (lambda p: p.unpin("full", [2]), "page 2 is idle already"),
    ],
)
def test_misuse_is_a_bug(misuse: object, words: str) -> None:
    pages = index()
    add(pages, "abc", 0)
    pages.unpin("full", [2])
    with pytest.raises(InternalError, match=words):
        misuse(pages)  # type: ignore[operator]
    assert found(pages, "abc") == [0, 1, 2]
    pages.check()


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda g: g.page_of.pop(chain("a")[0]),
        lambda g: g.page_of.__setitem__(chain("q")[0], 1),
        lambda g: g.cached.pop(1),
        lambda g: setattr(g, "num_idle", 0),
        lambda g: g.queue.clear(),
        lambda g: g.queue.extend(list(g.queue)),
        lambda g: g.children.clear(),
        lambda g: g.idle_children.clear(),
        lambda g: g.inexact.add(chain("a")[0]),
        lambda g: setattr(g.cached[0], "pinned", False),
    ],
)
def test_check_finds_corruption(corrupt: object) -> None:
    pages = index()
    add(pages, "abc", 0)
    pages.unpin("full", [1, 2])
    pages.check()
    corrupt(pages._groups["full"])  # type: ignore[operator]
    with pytest.raises(InternalError):
        pages.check()


# --- memory ---


def test_memory_is_flat_over_random_prefixes() -> None:
    """A cache of 500 pages, 12,000 prompts that mostly have pages of their own; the benchmark does a million."""
    seed = 20260
    rng = random.Random(seed)
    log = EventLog("one", 256)
    pages = PrefixIndex(["full"], events=log)
    free = list(range(500))

    def prompt() -> None:
        hashes = [rng.randbytes(HASH_BYTES) for _ in range(rng.randint(1, 4))]
        if len(free) < len(hashes):
            free.extend(victim.page for victim in pages.evict("full", len(hashes) - len(free)))
        mine = [free.pop() for _ in hashes]
        for parent, page_hash, page in zip([ROOT, *hashes], hashes, mine, strict=False):
            pages.add("full", page_hash, page, parent=parent, exact=rng.random() < 0.9)
        assert pages.unpin("full", mine) == []
        if rng.random() < 0.2:
            free.extend(page for page in mine if pages.remove("full", page))

    tracemalloc.start()
    try:
        sizes = []
        for count in (2_000, 5_000, 5_000):
            for _ in range(count):
                prompt()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    pages.check()
    assert pages.num_cached("full") + len(free) == 500, f"seed {seed}"
    assert max(sizes) <= 1.25 * sizes[0], f"seed {seed}: {sizes}"


def test_pages_that_are_removed_and_not_evicted_leave_nothing_behind() -> None:
    pages = index()
    add(pages, "k", 10_000)
    for number in range(5_000):
        pages.add("full", number.to_bytes(16, "big"), number, parent=ROOT, exact=number % 2 == 0)
        pages.unpin("full", [number])
        assert pages.remove("full", number)
    group = pages._groups["full"]
    sizes = [len(x) for x in (group.cached, group.page_of, group.inexact, group.children, group.idle_children)]
    assert sizes == [1, 1, 0, 1, 0]
    assert len(group.queue) <= 100
    pages.check()


# --- against an oracle that searches for everything ---


@dataclass
class Kept:
    hash: bytes
    parent: bytes
    exact: bool
    pinned: bool
    used: int


class IndexMachine(RuleBasedStateMachine):
    """Any order of calls on a small tree of chains, proper or not; the oracle is a dict of pages."""

    GROUPS = ("full", "window")
    TEXTS = tuple(a + b + c for a in "ab" for b in "ab" for c in ("", "a", "b", "ab"))

    @initialize()
    def start(self) -> None:
        self.log = EventLog("one", 1_000_000)
        self.index = PrefixIndex(self.GROUPS, windowed=["window"], events=self.log)
        self.kept: dict[str, dict[int, Kept]] = {name: {} for name in self.GROUPS}
        self.told: set[tuple[str, bytes]] = set()
        self.cursor = 0
        self.clock = 0

    def holder(self, group: str, page_hash: bytes) -> int | None:
        return next((page for page, kept in self.kept[group].items() if kept.hash == page_hash), None)

    def use(self, group: str, pages: list[int]) -> None:
        for page in pages if group == "window" else pages[::-1]:
            self.clock += 1
            self.kept[group][page].used = self.clock

    @rule(
        group=st.sampled_from(GROUPS),
        text=st.sampled_from(TEXTS),
        page=st.integers(0, 30),
        exact=st.booleans(),
        pinned=st.booleans(),
    )
    def add(self, group: str, text: str, page: int, exact: bool, pinned: bool) -> None:
        hashes = [ROOT, *chain(text)]
        page_hash, parent = hashes[-1], hashes[-2]
        mine = self.kept[group]
        if page in mine and mine[page].hash != page_hash:
            with pytest.raises(InternalError, match="is cached"):
                self.index.add(group, page_hash, page, parent=parent, exact=exact, pinned=pinned)
            return
        answer = self.index.add(group, page_hash, page, parent=parent, exact=exact, pinned=pinned)
        if page in mine:
            assert answer == Added(True)
            mine[page].pinned |= pinned
            return
        other = self.holder(group, page_hash)
        if other is not None and (mine[other].exact or not exact):
            assert answer == Added(False)
            return
        assert answer == Added(True, other if other is not None and not mine[other].pinned else None, other)
        if other is not None:
            del mine[other]
        self.clock += 1
        mine[page] = Kept(page_hash, parent, exact, pinned, self.clock)

    @rule(group=st.sampled_from(GROUPS), data=st.data())
    def pin(self, group: str, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.kept[group]) or [0]), unique=True))
        if set(pages) <= set(self.kept[group]):
            self.index.pin(group, pages)
            for page in pages:
                self.kept[group][page].pinned = True

    @rule(group=st.sampled_from(GROUPS), text=st.sampled_from(TEXTS))
    def attach(self, group: str, text: str) -> None:
        pages = self.index.lookup(chain(text))[group].pages
        self.index.pin(group, pages)
        for page in pages:
            self.kept[group][page].pinned = True

    @rule(group=st.sampled_from(GROUPS), data=st.data(), stranger=st.integers(50, 60))
    def unpin(self, group: str, data: st.DataObject, stranger: int) -> None:
        pinned = sorted(page for page, kept in self.kept[group].items() if kept.pinned)
        pages = data.draw(st.lists(st.sampled_from(pinned), unique=True)) if pinned else []
        assert self.index.unpin(group, [*pages, stranger]) == [stranger]
        self.use(group, pages)
        for page in pages:
            self.kept[group][page].pinned = False

    @rule(group=st.sampled_from(GROUPS), data=st.data())
    def touch(self, group: str, data: st.DataObject) -> None:
        if self.kept[group]:
            pages = data.draw(st.lists(st.sampled_from(sorted(self.kept[group])), unique=True))
            self.index.touch(group, pages)
            self.use(group, pages)

    @rule(group=st.sampled_from(GROUPS), count=st.integers(0, 8))
    def evict(self, group: str, count: int) -> None:
        mine = self.kept[group]
        expected = []
        for _ in range(count):
            idle = {page: kept for page, kept in mine.items() if not kept.pinned}
            parents = {kept.parent for kept in idle.values()} if group == "full" else set()
            ready = [page for page, kept in idle.items() if kept.hash not in parents]
            assert bool(ready) == bool(idle)  # whatever is idle can go
            if not ready:
                break
            page = min(ready, key=lambda page: idle[page].used)
            expected.append(Evicted(page, mine.pop(page).hash))
        assert self.index.evict(group, count) == expected

    @rule(group=st.sampled_from(GROUPS), data=st.data())
    def remove(self, group: str, data: st.DataObject) -> None:
        if self.kept[group]:
            page = data.draw(st.sampled_from(sorted(self.kept[group])))
            assert self.index.remove(group, page) == (not self.kept[group].pop(page).pinned)

    @rule()
    def clear(self) -> None:
        idle = {name: {page for page, k in mine.items() if not k.pinned} for name, mine in self.kept.items()}
        assert {name: set(pages) for name, pages in self.index.clear().items()} == idle
        self.kept = {name: {} for name in self.GROUPS}

    @rule(text=st.sampled_from(TEXTS), exact_only=st.booleans(), window=st.integers(1, 3))
    def look(self, text: str, exact_only: bool, window: int) -> None:
        hashes = chain(text)
        holds: dict[str, list[bool]] = {}
        for group in self.GROUPS:
            kept = [self.kept[group][p] if (p := self.holder(group, h)) is not None else None for h in hashes]
            holds[group] = [k is not None and (k.exact or not exact_only) for k in kept]
            count = next((at for at, there in enumerate(holds[group]) if not there), len(hashes))
            answer = self.index.lookup(hashes, exact_only=exact_only)[group]
            assert answer.pages == [self.holder(group, h) for h in hashes[:count]]
            marked = [at for at, k in enumerate(kept[:count]) if k is not None and not k.exact]
            assert answer.first_inexact == (marked[0] if marked else None)
        best = max(
            k for k in range(len(hashes) + 1) if all(holds["full"][:k]) and all(holds["window"][max(0, k - window) : k])
        )
        needs = {"window": lambda k: max(0, k - window)}
        assert self.index.longest(hashes, needs, exact_only=exact_only) == best

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        for group in self.GROUPS:
            mine = self.kept[group]
            assert self.index.num_cached(group) == len(mine)
            assert self.index.num_idle(group) == sum(not kept.pinned for kept in mine.values())
            for text in self.TEXTS:
                page_hash = chain(text)[-1]
                assert self.index.page(group, page_hash) == self.holder(group, page_hash)
                follows = any(kept.parent == page_hash for kept in mine.values())
                assert self.index.continues(group, page_hash) == follows

    @invariant()
    def events_tell_it_all(self) -> None:
        """One who applied every event knows exactly what is there: no event came twice or for nothing."""
        batch = self.log.since("one", self.cursor)
        self.cursor = batch.cursor
        for event in batch.events:
            key = (event.group, event.hash)
            if event.kind is EventKind.CLEARED:
                self.told.clear()
            elif event.kind is EventKind.ADDED:
                assert key not in self.told
                self.told.add(key)
            else:
                self.told.remove(key)  # KeyError: a removal that cannot be resolved
        assert self.told == {(name, kept.hash) for name, mine in self.kept.items() for kept in mine.values()}


IndexMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
