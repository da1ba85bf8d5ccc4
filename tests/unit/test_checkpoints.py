"""Checkpoints of tails: the longest that fits, in the salt it was made in, within the budget, never half copied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.checkpoints import Checkpoint, CheckpointCache, CheckpointKind, JunctionNotes
from protos.errors import InternalError
from protos.page_hash import page_hashes


@cache
def _chain(tokens: tuple[int, ...], salt: str) -> list[bytes]:
    return list(page_hashes(tokens, salt=salt, weights_digest=b"w" * 16, geometry_digest=b"g" * 16))


def chain(tokens: Sequence[int], salt: str = "t") -> list[bytes]:
    return _chain(tuple(tokens), salt)


def cache_of(budget: int, *groups: str) -> CheckpointCache:
    return CheckpointCache({group: range(10, 10 + budget) for group in groups or ("full",)})


def put(
    into: CheckpointCache,
    tokens: Sequence[int],
    salt: str = "t",
    *,
    exact: bool = True,
    kind: CheckpointKind = "prompt_end",
    commit: bool = True,
) -> Checkpoint | None:
    checkpoint = into.put(salt, chain(tokens, salt), tokens, exact=exact, kind=kind)
    if checkpoint is not None and commit:
        into.commit(checkpoint)
    into.check()
    return checkpoint


def made(into: CheckpointCache, tokens: Sequence[int], salt: str = "t", *, exact: bool = True) -> Checkpoint:
    checkpoint = put(into, tokens, salt, exact=exact)
    assert checkpoint is not None
    return checkpoint


def lengths(of: CheckpointCache, tokens: Sequence[int], salt: str = "t", most: int | None = None) -> list[int]:
    return [checkpoint.num_tokens for checkpoint in of.matches(salt, chain(tokens, salt), tokens, most=most)]


TEXT = list(range(5000, 5400))  # three pages and 16 tokens


def test_longest_first_and_one_token_is_left() -> None:
    kept = cache_of(8)
    for count in (3, 127, 128, 130, 256, 300, 399, 400):
        made(kept, TEXT[:count])
    assert lengths(kept, TEXT) == [399, 300, 256, 130, 128, 127, 3]
    assert lengths(kept, TEXT, most=400) == [400, 399, 300, 256, 130, 128, 127, 3]
    assert lengths(kept, TEXT, most=255) == [130, 128, 127, 3]
    assert lengths(kept, [*TEXT, 1]) == [400, 399, 300, 256, 130, 128, 127, 3]
    assert lengths(kept, TEXT[:256]) == [130, 128, 127, 3]  # 256 would leave nothing to compute
    assert lengths(kept, TEXT[:257]) == [256, 130, 128, 127, 3]
    assert lengths(kept, TEXT[:3]) == []
    assert lengths(kept, []) == []


def test_every_token_counts() -> None:
    kept = cache_of(2)
    made(kept, TEXT[:300])
    made(kept, TEXT[:100])
    for at in (0, 99, 127, 128, 255, 256, 299):
        changed = [*TEXT]
        changed[at] += 1
        assert lengths(kept, changed) == ([100] if at > 99 else [])
    assert lengths(kept, TEXT[:299]) == [100]
    assert lengths(kept, TEXT[1:]) == []


def test_another_salt_never_hits() -> None:
    # Also in front of the first page, where there is no hash that could hold the salt.
    kept = cache_of(8)
    for count in (5, 100, 128, 200):
        made(kept, TEXT[:count], "one")
    for salt in ("two", "", "One"):
        assert lengths(kept, TEXT, salt) == []
    assert lengths(kept, TEXT, "one") == [200, 128, 100, 5]
    made(kept, TEXT[:100], "two")
    assert lengths(kept, TEXT, "two") == [100]


def test_slots_of_every_group() -> None:
    kept = CheckpointCache({"full": [7, 9], "window": [0, 1]})
    one, two = made(kept, TEXT[:10]), made(kept, TEXT[:20])
    assert (one.slots, two.slots) == ({"full": 7, "window": 0}, {"full": 9, "window": 1})
    three = made(kept, TEXT[:30])
    assert three.slots == one.slots  # the oldest gave way
    assert lengths(kept, TEXT) == [30, 20]
    assert kept.num_evicted == 1


def test_use_keeps_a_checkpoint() -> None:
    kept = cache_of(3)
    for count in (10, 20, 30):
        made(kept, TEXT[:count])
    kept.pin(kept.checkpoints[0])
    kept.unpin(kept.checkpoints[-1])
    assert put(kept, TEXT[:20]) is None  # asked for again: as good as used
    made(kept, TEXT[:40])
    assert lengths(kept, TEXT) == [40, 20, 10]


def test_nobody_is_given_a_tail_that_is_not_copied() -> None:
    kept = cache_of(1)
    checkpoint = put(kept, TEXT[:10], commit=False)
    assert checkpoint is not None
    assert lengths(kept, TEXT) == []
    assert put(kept, TEXT[:20]) is None  # nor does its slot go to another while the copy is under way
    assert put(kept, TEXT[:10]) is None
    kept.commit(checkpoint)
    assert lengths(kept, TEXT) == [10]
    made(kept, TEXT[:20])


def test_a_pinned_tail_is_not_overwritten() -> None:
    kept = cache_of(1)
    checkpoint = made(kept, TEXT[:10], exact=False)
    kept.pin(checkpoint)
    assert put(kept, TEXT[:20]) is None
    assert put(kept, TEXT[:10], exact=True) is None
    assert not kept.remove(checkpoint)
    kept.unpin(checkpoint)
    assert kept.remove(checkpoint)
    assert made(kept, TEXT[:20]).slots == checkpoint.slots
    with pytest.raises(InternalError, match="no such checkpoint"):
        kept.pin(checkpoint)


def test_an_exact_tail_takes_the_place_of_an_inexact_one() -> None:
    kept = cache_of(2)
    inexact = made(kept, TEXT[:10], exact=False)
    assert put(kept, TEXT[:10], exact=False) is None
    exact = made(kept, TEXT[:10], exact=True)
    assert (exact.exact, exact.slots) == (True, inexact.slots)
    assert put(kept, TEXT[:10], exact=False) is None
    assert put(kept, TEXT[:10], exact=True) is None
    assert lengths(kept, TEXT) == [10]


def test_the_caller_removes_what_has_lost_its_pages_and_goes_on() -> None:
    kept = cache_of(4)
    for count in (100, 200, 300, 301):
        made(kept, TEXT[:count])
    for checkpoint in kept.matches("t", chain(TEXT), TEXT):
        if checkpoint.num_tokens == 200:
            break
        assert kept.remove(checkpoint)
        kept.check()
    assert lengths(kept, TEXT) == [200, 100]


def test_the_end_of_an_attachment_ends_pins_and_unfinished_copies() -> None:
    kept = cache_of(3)
    one, two = made(kept, TEXT[:10]), put(kept, TEXT[:20], commit=False)
    kept.pin(one)
    kept.end_attachment()
    kept.check()
    assert (lengths(kept, TEXT), one.pins) == ([10], 0)
    assert two is not None
    with pytest.raises(InternalError, match="no such checkpoint"):
        kept.commit(two)


def test_clear_leaves_what_is_being_copied() -> None:
    kept = cache_of(3)
    pinned, _, unfinished = made(kept, TEXT[:10]), made(kept, TEXT[:20]), put(kept, TEXT[:30], commit=False)
    kept.pin(pinned)
    kept.clear()
    kept.check()
    assert kept.checkpoints == [unfinished, pinned]


def test_without_a_budget_nothing_is_kept() -> None:
    for kept in (CheckpointCache({}), CheckpointCache({"full": []})):
        assert put(kept, TEXT) is None
        assert lengths(kept, TEXT) == []


def test_misuse_is_a_bug() -> None:
    kept = cache_of(1)
    checkpoint = made(kept, TEXT[:10])
    with pytest.raises(InternalError, match="unpinned more often"):
        kept.unpin(checkpoint)
    with pytest.raises(InternalError, match="not those of the tokens"):
        kept.put("t", [], TEXT, exact=True, kind="turn_end")
    with pytest.raises(InternalError, match="not those of the tokens"):
        list(kept.matches("t", chain(TEXT)[:1], TEXT))
    with pytest.raises(InternalError, match="no tokens"):
        kept.put("t", [], [], exact=True, kind="turn_end")
    with pytest.raises(ValueError, match="different numbers"):
        CheckpointCache({"full": [1, 2], "window": [1]})


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda k: k._free.clear(),
        lambda k: k._free.append(k._free[0]),
        lambda k: k._free.__setitem__(0, k.checkpoints[0].slots),
        lambda k: k._by_page.clear(),
        lambda k: next(iter(k._by_page.values())).lengths.update({11: 1}),
        lambda k: setattr(k.checkpoints[0], "tokens", (1, 2, 3)),
    ],
)
def test_check_finds_corruption(corrupt: object) -> None:
    kept = cache_of(2)
    made(kept, TEXT[:10])
    corrupt(kept)  # type: ignore[operator]
    with pytest.raises(InternalError):
        kept.check()


# --- against a list that compares everything ---


class CheckpointMachine(RuleBasedStateMachine):
    """Texts of two letters per 64 tokens, so that prompts share beginnings, pages and odd ends."""

    texts = st.tuples(st.text("ab", max_size=5), st.integers(0, 63))
    salts = st.sampled_from(["one", "two"])

    @staticmethod
    def tokens(text: tuple[str, int]) -> list[int]:
        return [ord(letter) * 1000 + at for letter in text[0] for at in range(64)] + [7] * text[1]

    @initialize(budget=st.integers(0, 4))
    def start(self, budget: int) -> None:
        self.cache = CheckpointCache({"full": range(budget), "window": range(100, 100 + budget)})
        self.budget = budget
        self.known: list[tuple[str, list[int], Checkpoint]] = []  # least recently used first

    def find(self, salt: str, tokens: list[int]) -> int | None:
        return next((at for at, (s, t, _) in enumerate(self.known) if (s, t) == (salt, tokens)), None)

    @rule(text=texts, salt=salts, exact=st.booleans(), commit=st.booleans())
    def put(self, text: tuple[str, int], salt: str, exact: bool, commit: bool) -> None:
        tokens = self.tokens(text)
        if not tokens:
            return
        answer = self.cache.put(salt, chain(tokens, salt), tokens, exact=exact, kind="turn_end")
        at = self.find(salt, tokens)
        if at is not None:
            entry = self.known.pop(at)
            if entry[2].exact or not exact or entry[2].pins or not entry[2].ready:
                assert answer is None
                self.known.append(entry)
                return
        elif len(self.known) == self.budget:
            idle = [entry for entry in self.known if entry[2].ready and not entry[2].pins]
            if not idle:
                assert answer is None
                return
            self.known.remove(idle[0])
        assert answer is not None
        assert (answer.num_tokens, answer.exact, answer.ready) == (len(tokens), exact, False)
        self.known.append((salt, tokens, answer))
        if commit:
            self.cache.commit(answer)

    @rule(text=texts, salt=salts, whole=st.booleans())
    def match(self, text: tuple[str, int], salt: str, whole: bool) -> None:
        tokens = self.tokens(text)
        most = len(tokens) if whole else len(tokens) - 1
        fitting = [c for s, t, c in self.known if s == salt and len(t) <= most and t == tokens[: len(t)] and c.ready]
        answer = list(self.cache.matches(salt, chain(tokens, salt), tokens, most=most))
        assert answer == sorted(fitting, key=lambda c: -c.num_tokens)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def pin_or_unpin(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.known))
        if entry[2].pins and data.draw(st.booleans()):
            self.cache.unpin(entry[2])
        else:
            self.cache.pin(entry[2])
            self.known.remove(entry)
            self.known.append(entry)

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def commit_or_remove(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.known))
        if data.draw(st.booleans()):
            self.cache.commit(entry[2])
        else:
            assert self.cache.remove(entry[2]) == (not entry[2].pins)
            if not entry[2].pins:
                self.known.remove(entry)

    @rule()
    def end_attachment(self) -> None:
        self.cache.end_attachment()
        self.known = [entry for entry in self.known if entry[2].ready]
        assert not any(entry[2].pins for entry in self.known)

    @invariant()
    def agrees(self) -> None:
        self.cache.check()
        assert self.cache.checkpoints == [entry[2] for entry in self.known]
        assert len(self.cache) <= self.budget


CheckpointMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestCheckpointMachine = CheckpointMachine.TestCase


# --- junctions ---


def page(number: int) -> bytes:
    return number.to_bytes(16, "big")


def test_a_junction_counts_from_its_second_time() -> None:
    notes = JunctionNotes(4)
    assert [notes.seen_before(page(1)) for _ in range(3)] == [False, True, True]
    assert not notes.seen_before(page(2))


def test_junctions_are_bounded_and_the_stale_one_goes() -> None:
    notes = JunctionNotes(2)
    for number in (1, 2, 1, 3):
        notes.seen_before(page(number))
    assert len(notes) == 2
    assert notes.seen_before(page(1))
    assert not notes.seen_before(page(2))  # was forgotten
    for number in range(1000):
        notes.seen_before(page(number))
    assert len(notes) == 2


@given(capacity=st.integers(1, 5), seen=st.lists(st.integers(0, 8), max_size=60))
def test_junctions_against_a_list(capacity: int, seen: list[int]) -> None:
    notes, recent = JunctionNotes(capacity), list[int]()
    for number in seen:
        assert notes.seen_before(page(number)) == (number in recent)
        recent = [*(n for n in recent if n != number), number][-capacity:]
