"""A worker's death at every cut of a step, a store's in the middle of its writes: what the next one finds."""

from __future__ import annotations

import random

import pytest

from kvstore.answers import Admitted, Forked
from kvstore.device import NewSequence
from kvstore.group_pages import GroupPages
from kvstore.pending_rings import PendingRings
from kvstore.recovery import LastWords, demand_possible, why_void
from protos.errors import PreconditionFailed
from tests.unit.kv_oracle import DENSE, FULL, GEOMETRIES, Worker

TOKENS = random.Random(9).choices(range(1000), k=1400)
CUTS = ["reserve", "rows", "packed", "log", "commit"]
DUE = [*range(264, 282, 3), *range(392, 402, 3)]  # lengths about those at which pages are due, for windows of 128


def opened(w: Worker, num_tokens: int, chunk: int = 64) -> int:
    answer = w.open("", TOKENS[:num_tokens], 1400, reuse=False)
    assert isinstance(answer, Admitted)
    finish(w, answer.slot, chunk)
    return answer.slot


def new_sequence(num_tokens: int, *, reuse: bool = True) -> NewSequence:
    return NewSequence("r", "", TOKENS[:num_tokens], 1400, b"frozen", reuse)


def finish(w: Worker, slot: int, chunk: int = 64) -> None:
    while w.expected[slot].num_rows < len(w.expected[slot].tokens):
        w.prefill(slot, chunk)


def goes_on(w: Worker, slot: int, count: int = 200) -> None:
    """All that stands is right, and stays so while it is gone on with."""
    w.check()
    w.verify()
    finish(w, slot)
    for _ in range(0, count, 5):
        n = len(w.expected[slot].tokens)
        w.decode(slot, TOKENS[n : n + 5])
    w.check()
    w.verify()
    assert w.packed_twice == 0
    w.release(slot)
    assert all(not (t.num_open or t.num_sealed or t.num_promised) for t in w.table.groups.values())


@pytest.mark.parametrize("after", CUTS)
@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_a_death_in_a_decode_step(geometry: str, after: str) -> None:
    w = Worker(GEOMETRIES[geometry], num_pages=16, max_step_tokens=9)
    for count in (1, 9):
        for n in DUE:
            slot = opened(w, n)
            (adopted,) = w.die_in_step(slot, TOKENS[n : n + count], after).values()
            assert adopted.intact
            assert adopted.num_committed == n + count * (after == "commit")
            assert len(adopted.token_ids) == n + count * (after in ("log", "commit"))
            goes_on(w, slot, 140)


@pytest.mark.parametrize("margin", [0, 3])
@pytest.mark.parametrize("geometry", ["packed", "sliding", "short window", "window and packed"])
def test_a_page_that_was_only_reserved_is_not_taken_for_a_written_one(geometry: str, margin: int) -> None:
    """Tokens of a step that were all kept make a page due that it had not reserved; the next one does, and dies."""
    due = 0
    for n in range(250, 420, 3):
        w = Worker(GEOMETRIES[geometry], num_pages=16, margin=margin, max_step_tokens=9)
        slot = opened(w, n)
        w.decode(slot, TOKENS[n : n + 9])
        states = w.table.sequence(slot).groups.values()
        due += any(s.sealed_base(n + 9, 1) > s.base for s in states if s.group.packed)
        (adopted,) = w.die_in_step(slot, TOKENS[n + 9 : n + 10], "reserve").values()
        assert adopted.intact
        goes_on(w, slot, 20)
    assert due > 0


@pytest.mark.parametrize("after", CUTS)
def test_a_death_while_a_page_is_completed_in_place(after: str) -> None:
    """Its first records still stand, whatever was written behind them."""
    w = Worker((FULL,), num_pages=4)
    new = w.open("", TOKENS[:700], 700, reuse=False)
    assert isinstance(new, Admitted)
    finish(w, new.slot)
    assert w.truncate(new.slot, 500) is False
    page = w.table.sequence(new.slot).groups["full"].shadows[3].page
    for n in range(500, 655):
        w.decode(new.slot, TOKENS[n : n + 1])
    (adopted,) = w.die_in_step(new.slot, TOKENS[655:656], after).values()
    assert adopted.intact
    state = w.table.sequence(new.slot).groups["full"]
    assert state.pages[3:] == [page] if after == "commit" else state.shadows[3].reopened
    goes_on(w, new.slot, 40)


@pytest.mark.parametrize("after", CUTS)
@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_a_death_in_a_prefill_chunk(geometry: str, after: str) -> None:
    w = Worker(GEOMETRIES[geometry], num_pages=16)
    tried = 0
    for n in (150, 200, 250, 300):
        for count in (30, 100):
            slot = opened(w, n)
            if w.laps(slot, n + count):
                w.release(slot)
                continue
            tried += 1
            w.expected[slot].append(TOKENS[n : n + count])
            w._log(slot)
            (adopted,) = w.die_in_step(slot, [], after).values()
            assert adopted.intact
            assert (adopted.num_committed, len(adopted.token_ids)) == (n + count * (after == "commit"), n + count)
            if after == "commit":  # rows that went to pages are nowhere else: the seal is finished
                for state in w.table.sequence(slot).groups.values():
                    assert state.group.mode == "dense" or state.base == state.sealed_base(n + count, 1)
            goes_on(w, slot)
    assert tried


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("geometry", [name for name, groups in GEOMETRIES.items() if any(g.has_tail for g in groups)])
def test_a_death_while_a_chunk_overwrites_the_tail(geometry: str, again: bool) -> None:
    w = Worker(GEOMETRIES[geometry], num_pages=16)
    slot = opened(w, 300)
    w.expected[slot].append(TOKENS[300:900])
    assert w.laps(slot, 900)
    adopted = w.die_in_step(slot, [], "saved")
    assert adopted[slot].intact
    if again:
        assert w.worker_dies() == adopted
    w.recover(slot)
    goes_on(w, slot)


def test_a_tail_that_was_saved_where_a_sequence_is_is_refused_by_name() -> None:
    w = Worker((FULL,), num_pages=24)
    slots = [opened(w, 300), opened(w, 300)]
    for spare in (*slots, 3, 1 << 31):
        w.device.control.mark_saved(slots[0], 301, spare)
        with pytest.raises(PreconditionFailed) as caught:
            w.device.adopt(9, living=False)
        assert caught.value.reason == "BAD_CONTROL_BLOCK"
    w.device.control.mark_saved(slots[0], 300, slots[1])  # it came to commit
    assert all(each.intact for each in w.device.adopt(9, living=False))


@pytest.mark.parametrize("geometry", list(GEOMETRIES))
def test_a_death_during_adoption_changes_nothing(geometry: str) -> None:
    w = Worker(GEOMETRIES[geometry], num_pages=16)
    slot = opened(w, 270)
    first = w.die_in_step(slot, TOKENS[270:275], "commit")
    for _ in range(3):
        assert w.worker_dies() == first
    goes_on(w, slot)


def test_what_was_opened_and_not_copied_is_void_where_rows_are_missing() -> None:
    w = Worker((FULL, DENSE), num_pages=40)
    slot = opened(w, 600)
    (new,) = w.device.open([new_sequence(600)])  # the answer is lost: nobody copies, nobody commits
    assert isinstance(new, Admitted)
    assert new.num_cached > 0
    child = w.device.fork(slot, "child", 1400, b"")
    assert isinstance(child, Forked)
    adopted = {each.slot: each for each in w.device.adopt(7, living=False)}
    assert {each: adopted[each].intact for each in adopted} == {slot: True, new.slot: False, child.slot: False}
    assert [adopted[new.slot].num_committed, adopted[child.slot].num_committed] == [0, 0]
    assert w.device.control.epoch == 7
    assert {int(w.device.control.slots["epoch"][each]) for each in adopted} == {7}
    w.device.release([new.slot, child.slot])
    goes_on(w, slot)


def test_a_sequence_without_rows_starts_from_its_first_token() -> None:
    w = Worker((FULL,), num_pages=16)
    (new,) = w.device.open([new_sequence(300, reuse=False)])
    assert isinstance(new, Admitted)
    (adopted,) = w.device.adopt(2, living=False)
    assert (adopted.intact, adopted.num_committed, adopted.token_ids) == (True, 0, TOKENS[:300])
    assert (adopted.request_id, adopted.tenant_salt, adopted.frozen_request) == ("r", "", b"frozen")
    assert (adopted.num_prompt_tokens, adopted.max_tokens) == (300, 1400)


def test_a_truncate_whose_copies_were_not_made_is_void_until_it_is_gone_on_with() -> None:
    w = Worker((FULL, DENSE), num_pages=24)
    slot = opened(w, 700)
    asked = w.device.truncate(slot, 300)
    assert asked.refills
    for epoch in (2, 3):
        assert [each.intact for each in w.device.adopt(epoch, living=False)] == [False]
        w.device.reserve([])  # the next worker's first call makes no copies
    for confirm in ("commit", "call", "word"):
        w = Worker((FULL, DENSE), num_pages=24)
        slot = opened(w, 700)
        w.truncate(slot, 300)
        if confirm == "call":
            w.device.reserve([])
        elif confirm == "word":
            w.device.control.mark_copied(slot)
        else:
            w.device.control.append_tokens(slot, [1])
            w.device.control.commit(slot, 301)
        assert [each.intact for each in w.device.adopt(2, living=False)] == [True], confirm
    assert w.device.truncate(slot, 100).refills  # it is said of one truncate, not of the next
    assert [each.intact for each in w.device.adopt(3, living=False)] == [False]


def test_a_fork_has_the_prompt_of_its_parent() -> None:
    w = Worker((FULL,), num_pages=24)
    slot = opened(w, 200)
    w.decode(slot, TOKENS[200:205])
    child = w.fork(slot, 1400)
    assert isinstance(child, Forked)
    w._log(child.slot)
    adopted = {each.slot: each for each in w.device.adopt(2, living=False)}
    assert adopted[child.slot].num_prompt_tokens == 200
    assert adopted[child.slot].token_ids == TOKENS[:205]


def test_lengths_that_no_worker_writes_are_refused_by_name() -> None:
    w = Worker((FULL,), num_pages=16)
    slot = opened(w, 200)
    before = w.device.control.copy()
    for logged, committed in ((200, 201), (1401, 200), (2**63, 5), (0, 2**63)):
        w.device.control.slots["logged"][slot], w.device.control.slots["committed"][slot] = logged, committed
        with pytest.raises(PreconditionFailed) as caught:
            w.device.adopt(9, living=False)
        assert caught.value.reason == "BAD_CONTROL_BLOCK"
        for call in (lambda: w.device.truncate(slot, 1), lambda: w.device.fork(slot, "f", 9, b"")):
            with pytest.raises(Exception, match="BAD_LENGTHS"):
                call()
        assert w.device.control.epoch == before.epoch


@pytest.mark.parametrize(
    ("words", "base", "void"),
    [
        (LastWords(9, 9, 0, None, False), 0, False),
        (LastWords(9, 0, 0, None, False), 0, False),
        (LastWords(200, 128, 0, None, False), 128, False),
        (LastWords(200, 127, 0, None, False), 128, True),
        (LastWords(9, 9, 0, None, True), 0, True),
    ],
)
def test_why_void(words: LastWords, base: int, void: bool) -> None:
    group = GroupPages(FULL, 16, 10, PendingRings(), base=base)
    assert (why_void(words, [group]) is not None) == void
    demand_possible(0, words, 300, {1})
