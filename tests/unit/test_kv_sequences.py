"""The sequence table: scenarios told one by one. Any order of them: test_kv_state_machine."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvstore.answers import Admitted, Forked, PageCopy, Refused, Relinked, Split
from kvstore.geometry import LayerGroup
from kvstore.retention import dense_base, is_dense_again
from protos.errors import (
    CapacityError,
    InternalError,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
    TailpackError,
    TooLarge,
)
from protos.page_hash import PAGE_TOKENS, page_hashes
from tests.unit.kv_oracle import (
    COMPRESSED,
    DENSE,
    DENSE_PENDING,
    FULL,
    RING,
    ROW,
    SHORT,
    SLIDING,
    WEIGHTS,
    Worker,
)

TOKENS = list(range(5000))


def admitted(result: Admitted | Refused) -> int:
    assert isinstance(result, Admitted)
    return result.slot


def opened(worker: Worker, num_tokens: int, max_tokens: int = 1200, *, salt: str = "", chunk: int = 5000) -> int:
    """A sequence of TOKENS[:num_tokens], prefilled without reuse."""
    slot = admitted(worker.open(salt, TOKENS[:num_tokens], max_tokens, reuse=False))
    while worker.expected[slot].num_rows < num_tokens:
        worker.prefill(slot, chunk)
    return slot


def step_to(worker: Worker, slot: int, length: int, *, step: int = 1) -> None:
    while (n := worker.expected[slot].num_rows) < length:
        worker.decode(slot, TOKENS[n : min(n + step, length)])
        worker.check()


# --- promises ---


def test_open_promises_the_worst_case_and_release_gives_it_back() -> None:
    w = Worker((DENSE, FULL), num_pages=8)
    slot = opened(w, 1, 600)
    dense, packed = w.table.groups["edges"], w.table.groups["full"]
    assert (dense.num_promised, dense.num_open) == (4, 1)
    assert packed.num_promised == dense_base(600, 128, 16) // 128 == 3
    w.release(slot)
    for table in (dense, packed):
        assert (table.num_free, table.num_promised) == (8, 0)


def test_a_full_arena_refuses_with_numbers_and_promises_nothing() -> None:
    w = Worker((DENSE,), num_pages=3)
    opened(w, 1, 256)
    assert w.open("", [1], 256) == Refused("edges", 2, 1, 3)
    assert w.table.groups["edges"].num_promised == 1
    assert w.open("", [1], 1024) == Refused("edges", 8, 1, 3)  # can never fit: needed > total


def test_out_of_slots_names_no_group() -> None:
    w = Worker((DENSE,), num_pages=8, max_sequences=1)
    opened(w, 1, 1)
    assert w.open("", [1], 1) == Refused("", 1, 7, 8)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "kind"),
    [(0, 1, InvalidRequest), (1, 0, InvalidRequest), (2, 1, InvalidRequest), (1, 1401, TooLarge)],
)
def test_malformed_opens(prompt: int, max_tokens: int, kind: type[TailpackError]) -> None:
    w = Worker((DENSE,), num_pages=8)
    with pytest.raises(kind):
        w.table.open("r", "", TOKENS[:prompt], max_tokens)
    assert len(w.table) == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.reserve([(0, 1, 1), (2, 1, 1)]),
        lambda t: t.seal(2, 0, 1, lambda a, b: TOKENS[a:b]),
        lambda t: t.truncate(2, 0, 0, lambda a, b: TOKENS[a:b]),
        lambda t: t.fork(2, "f", 10, 1),
        lambda t: t.checkpoint(2, 1, "turn_end", lambda a, b: TOKENS[a:b]),
        lambda t: t.release([0, 2]),
        lambda t: t.sequence(2),
    ],
)
def test_unknown_slots_are_named_and_nothing_is_done(call: object) -> None:
    w = Worker((FULL, DENSE), num_pages=8)
    assert opened(w, 1, 1) == 0
    with pytest.raises(NotFound) as caught:
        call(w.table)  # type: ignore[operator]
    assert (caught.value.reason, caught.value.given) == ("UNKNOWN_SLOT", "2")
    w.check()


def test_batches_and_numbers_that_make_no_sense_reserve_nothing() -> None:
    w = Worker((FULL,), num_pages=8)
    slot = opened(w, 100, 600)
    for wanted, reason in (
        ([(slot, 500, 1), (slot, 500, 1)], "DUPLICATE_SLOT"),
        ([(slot, 601, 1)], "OVER_PROMISE"),
        ([(slot, 500, 0)], "INVALID_REQUEST"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            w.table.reserve(wanted)
        assert caught.value.reason == reason
    assert w.table.groups["full"].num_open == 0
    with pytest.raises(PreconditionFailed) as refused:
        w.table.seal(slot, 500, 1, lambda a, b: TOKENS[a:b])
    assert refused.value.reason == "NOT_RESERVED"
    with pytest.raises(InvalidRequest, match="named twice"):
        w.table.release([slot, slot])


# --- sealing ---


def test_pages_chain_their_hashes_and_only_whole_pages_below_the_floor_are_sealed() -> None:
    w = Worker((FULL, DENSE), num_pages=16)
    slot = opened(w, 500)
    sequence = w.table.sequence(slot)
    assert sequence.bases == {"full": 256, "edges": 384}
    digest = w.geometry.digest()
    assert sequence.hashes == list(page_hashes(TOKENS[:400], salt="", weights_digest=WEIGHTS, geometry_digest=digest))
    index = w.table.index
    assert [index.page("full", h) for h in sequence.hashes] == [*sequence.pages["full"], None]
    assert [index.page("edges", h) for h in sequence.hashes] == sequence.pages["edges"][:3]


@pytest.mark.parametrize("groups", [(FULL,), (SHORT,), (SLIDING, FULL), (RING,), (COMPRESSED,), (DENSE, FULL)])
@pytest.mark.parametrize("span", [(120, 140), (250, 300)])
@pytest.mark.parametrize("margin", [0, 16])
def test_every_length_is_stepped_across_the_boundary(
    groups: tuple[object, ...], span: tuple[int, int], margin: int
) -> None:
    w = Worker(groups, num_pages=16, margin=margin)  # type: ignore[arg-type]
    slot = opened(w, span[0] - 1)
    step_to(w, slot, span[1])  # checks all that attention may read at every length
    for back in range(1, margin + 1):
        n = w.expected[slot].num_rows
        assert w.truncate(slot, n - back) is True
        w.check()
        step_to(w, slot, n)
    assert w.rows_read_packed == 0


def test_sliding_window_over_a_prefill_and_400_steps_with_rollbacks_inside_the_margin() -> None:
    w = Worker((SHORT,), num_pages=16)
    slot = opened(w, 333, chunk=111)
    for number in range(400):
        n = w.expected[slot].num_rows
        w.decode(slot, TOKENS[n : n + 1 + number % 3])
        if number % 7 == 0:
            assert w.truncate(slot, w.expected[slot].num_rows - 1 - number % 16) is True
        w.check()
    assert w.rows_read_packed == 0
    assert w.table.counters["pages_relinked", "short"] == 0


def test_pages_behind_a_large_model_window_are_freed_and_cannot_be_gone_back_to() -> None:
    w = Worker((SLIDING,), num_pages=16)
    slot = opened(w, 1100, chunk=200)
    state = w.table.sequence(slot).groups["sliding"]
    assert state.first_page == (1100 - 384 - 16) // 128 == 5
    assert state.pages[:5] == [-1] * 5
    assert w.table.counters["pages_freed_behind_window", "sliding"] == 5
    with pytest.raises(PreconditionFailed) as caught:
        w.table.truncate(slot, 700, 1100, lambda a, b: TOKENS[a:b])
    assert caught.value.reason == "TRUNCATE_TOO_DEEP"
    assert "has freed its pages before token 640" in str(caught.value)
    assert w.truncate(slot, 1030) is not None
    w.check()
    step_to(w, slot, 1100, step=9)


# --- truncate ---


@pytest.mark.parametrize("groups", [(FULL,), (DENSE,), (RING,), (COMPRESSED,)])
def test_truncate_never_extends(groups: tuple[object, ...]) -> None:
    w = Worker(groups, num_pages=16)  # type: ignore[arg-type]
    slot = opened(w, 300)
    with pytest.raises(PreconditionFailed) as caught:
        w.table.truncate(slot, 301, 300, lambda a, b: TOKENS[a:b])
    assert caught.value.reason == "TRUNCATE_EXTENDS"


@pytest.mark.parametrize("cut", [*range(120, 140), *range(250, 300), 0, 1, 400, 500, 511, 512, 640, 700])
def test_deep_rollback_then_300_more_steps(cut: int) -> None:
    w = Worker((FULL, DENSE), num_pages=24)
    slot = opened(w, 700)
    base = w.table.sequence(slot).groups["full"].base
    assert base == 512
    exact = w.truncate(slot, cut)
    assert exact == (is_dense_again(cut, base, 128) or cut == 0)
    w.check()
    if cut == 0:
        w.expected[slot].append([7])
        w.prefill(slot, 1)
    packed = w.packed
    step_to(w, slot, cut + 300, step=3)
    assert w.rows_read_packed == 0
    resealed = w.table.sequence(slot).groups["full"].base
    # Records below the cut are linked or copied, never packed again.
    assert w.packed - packed == max(0, resealed - min(cut, base))


def test_sealing_again_links_whole_pages_and_splits_the_one_that_was_cut() -> None:
    w = Worker((FULL,), num_pages=24)
    slot = opened(w, 700)
    pages = list(w.table.sequence(slot).pages["full"])
    assert w.truncate(slot, 300) is False
    state = w.table.sequence(slot).groups["full"]
    assert (state.base, state.pages) == (128, pages[:1])
    assert {i: (s.page, s.num_tokens) for i, s in state.shadows.items()} == {1: (pages[1], 128), 2: (pages[2], 44)}
    new = w.table.reserve([(slot, 600, 1)])[slot]["full"]
    assert [page.source for page in new] == [Relinked(), Split(pages[2], 44)]
    assert new[0].page_id == pages[1]
    assert new[1].page_id not in pages[:3]
    assert w.truncate(slot, 280) is True  # takes the reservation back
    w.check()
    step_to(w, slot, 600, step=9)
    assert w.table.counters["pages_relinked", "full"] == 1
    assert w.table.counters["pages_split", "full"] == 1


def test_the_answer_says_what_to_refill() -> None:
    w = Worker((FULL,), num_pages=24)
    slot = opened(w, 700)
    pages = list(w.table.sequence(slot).pages["full"])
    w.table.confirm()
    answer = w.table.truncate(slot, 300, 700, lambda a, b: TOKENS[a:b])
    (refill,) = answer.refills
    assert (refill.group, refill.tail_slot, refill.first_token, refill.num_tokens) == ("full", slot, 128, 172)
    assert refill.page_ids == pages[1:3]
    assert (answer.exact, answer.bases, answer.num_tokens) == (False, {"full": 128}, 300)


def test_a_split_without_a_page_to_spare_is_completed_in_place() -> None:
    w = Worker((FULL,), num_pages=4)
    slot = opened(w, 700, 700)
    assert (w.table.groups["full"].num_free, w.table.groups["full"].num_promised) == (0, 0)
    assert w.truncate(slot, 500) is False
    page = w.table.sequence(slot).groups["full"].shadows[3].page
    w.check()
    assert isinstance(w.fork(slot, 700), Refused)
    step_to(w, slot, 700)
    assert w.table.sequence(slot).pages["full"][3] == page
    assert w.table.counters["pages_split", "full"] == 1


def test_mode_window_has_no_pages_and_refuses_to_go_back_behind_its_tail() -> None:
    w = Worker((RING,), num_pages=0)
    slot = opened(w, 1000)
    base = w.table.sequence(slot).groups["ring"].base
    with pytest.raises(PreconditionFailed) as caught:
        w.table.truncate(slot, base + 90, 1000, lambda a, b: TOKENS[a:b])
    assert caught.value.reason == "TRUNCATE_TOO_DEEP"
    assert "keeps nothing behind its window" in str(caught.value)
    assert w.truncate(slot, base + 95) is True
    w.check()


def test_truncate_into_a_sealed_dense_page_copies_its_rows() -> None:
    w = Worker((DENSE,), num_pages=8)
    slot = opened(w, 400, 1000)
    w.table.confirm()
    answer = w.table.truncate(slot, 200, 400, lambda a, b: TOKENS[a:b])
    new = w.table.sequence(slot).pages["edges"][1]
    assert answer.copies == [PageCopy("edges", 1, new, 72)]
    assert new not in (0, 1)
    assert (answer.exact, answer.refills, answer.bases) == (True, [], {"edges": 128})


@pytest.mark.parametrize("num_tokens", [0, 128, 256, 384, 399, 400])
def test_truncate_at_a_border_or_in_the_open_page_copies_nothing(num_tokens: int) -> None:
    w = Worker((DENSE,), num_pages=8)
    slot = opened(w, 400, 1000)
    assert w.table.truncate(slot, num_tokens, 400, lambda a, b: TOKENS[a:b]).copies == []


def test_a_truncate_of_shared_pages_without_replacement_is_refused_and_changes_nothing() -> None:
    w = Worker((DENSE,), num_pages=5)
    slot = opened(w, 400, 512)
    child = w.fork(slot, 402)
    assert isinstance(child, Forked)
    with pytest.raises(CapacityError) as caught:
        w.table.truncate(child.slot, 100, 400, lambda a, b: TOKENS[a:b])
    assert (caught.value.reason, caught.value.given, caught.value.allowed) == ("ARENA_FULL", "4 pages", "1 of 5 pages")
    assert "release or drop another sequence" in (caught.value.hint or "")
    w.check()
    w.release(slot)
    assert w.truncate(child.slot, 100) is True
    w.check()


def test_pending_rows_go_back_to_the_last_kept_boundary_or_not_at_all() -> None:
    for groups in ((COMPRESSED,), (DENSE_PENDING,)):
        w = Worker(groups, num_pages=16)
        slot = opened(w, 300)
        assert w.checkpoint(slot)
        step_to(w, slot, 1000, step=9)
        with pytest.raises(PreconditionFailed) as caught:
            w.table.truncate(slot, 299, 1000, lambda a, b: TOKENS[a:b])
        assert caught.value.reason == "TRUNCATE_TOO_DEEP"
        assert w.truncate(slot, 350) is not None
        e = w.expected[slot]
        assert (e.num_rows, len(e.tokens)) == (300, 350)  # the 50 in between are computed again
        w.check()
        w.prefill(slot, 50)
        step_to(w, slot, 700, step=5)
        assert w.truncate(slot, 690) is True


@pytest.mark.parametrize("inexact", [False, True])
def test_a_truncate_to_a_kept_boundary_is_as_exact_as_the_boundary(inexact: bool) -> None:
    w = Worker((RING, FULL), num_pages=24)
    slot = opened(w, 700, 1400)
    if inexact:
        assert w.truncate(slot, 610) is False
    step_to(w, slot, 1000, step=9)
    assert w.checkpoint(slot)
    step_to(w, slot, 1300, step=9)
    assert w.truncate(slot, 1001) is not inexact
    assert w.expected[slot].num_rows == 1000


def test_a_refused_truncate_changes_nothing_of_what_the_rings_hold() -> None:
    w = Worker((DENSE_PENDING,), num_pages=16)
    slot = opened(w, 1000)
    state = w.table.sequence(slot).groups["dense_csa"]
    before = state.rings
    with pytest.raises(PreconditionFailed):
        w.table.truncate(slot, 10, 1300, lambda a, b: TOKENS[a:b])
    assert state.rings == before == replace(before, first=0, written=1000)


def test_a_checkpoint_before_any_seal_knows_what_its_ring_holds() -> None:
    w = Worker((DENSE_PENDING,), num_pages=16)
    slot = admitted(w.open("", TOKENS[:100], 100))
    w._reserve(slot, 100, 1)
    assert w.table.checkpoint(slot, 100, "turn_end", lambda a, b: TOKENS[a:b]).tail_copies
    (checkpoint,) = w.table.checkpoints.checkpoints
    assert w.table._kept.tails(checkpoint).rings["dense_csa"].written == 100


# --- fork ---


def test_a_fork_shares_sealed_pages_and_copies_what_is_open() -> None:
    w = Worker((FULL, DENSE), num_pages=24)
    slot = opened(w, 700)
    fork = w.fork(slot, 1200)
    assert isinstance(fork, Forked)
    parent, child = w.table.sequence(slot), w.table.sequence(fork.slot)
    assert child.pages["full"] == parent.pages["full"]
    assert child.pages["edges"][:5] == parent.pages["edges"][:5]
    assert [(c.from_page, c.num_tokens) for c in fork.copies] == [(parent.pages["edges"][5], 60)]
    assert [(c.from_slot, c.to_slot) for c in fork.tail_copies] == [(slot, fork.slot)]
    assert w.table.groups["full"].refs(parent.pages["full"][0]) == 2
    for both in (slot, fork.slot):
        n = w.expected[both].num_rows
        w.decode(both, [both + 1])
        assert w.expected[both].num_rows == n + 1
    w.check()
    w.release(slot)
    step_to(w, fork.slot, 1000, step=9)


@pytest.mark.parametrize("evicted", [False, True])
def test_a_fork_that_outgrows_a_resumed_parent_publishes_no_row_that_was_packed_twice_as_exact(evicted: bool) -> None:
    w = Worker((FULL,), num_pages=8)
    w.release(opened(w, 700, 700))
    parent = admitted(w.open("", TOKENS[:520], 522))  # 512 cached; its rows from 256 on are dequantised, and stay
    w.prefill(parent, 8)
    if evicted:
        w.release(opened(w, 1020, 1020, salt="other"))
    child = w.fork(parent, 900)
    assert isinstance(child, Forked)
    step_to(w, child.slot, 800, step=9)
    table = w.table
    twice = table.counters["pages_packed_twice", "full"]
    assert twice * PAGE_TOKENS == w.packed_twice
    assert (twice > 0) == evicted
    assert (table.counters["pages_relinked", "full"] > 0) == (not evicted)
    hashes = table.sequence(child.slot).hashes
    found = [table.index.pages("full", [h]) for h in hashes[:4]]
    assert [bool(f and f.exact) for f in found] == [True, True, not evicted, not evicted]
    w.verify()


# --- prefix reuse ---


def test_a_page_match_is_inexact_where_the_window_must_be_refilled_and_exact_in_mode_dense() -> None:
    for groups, exact in (((FULL,), False), ((DENSE,), True), ((FULL, DENSE), False)):
        w = Worker(groups, num_pages=24)
        w.release(opened(w, 700))
        answer = w.open("", [*TOKENS[:600], 9], 1200)
        assert isinstance(answer, Admitted)
        packed = groups[0] is FULL
        assert (answer.num_cached, answer.prefix_exact) == (512, exact)
        w.check()
        while w.expected[answer.slot].num_rows < 601:
            w.prefill(answer.slot, 40)
        w.check()
        refused = w.open("", [*TOKENS[:600], 9], 1200, exact_only=True)
        assert isinstance(refused, Admitted)
        assert refused.num_cached == (0 if packed else 512)


def test_an_exact_page_takes_the_place_of_an_idle_inexact_one_in_the_control_block_too() -> None:
    w = Worker((FULL,), num_pages=24)
    w.release(opened(w, 700))
    inexact = admitted(w.open("", TOKENS[:1000], 1200))
    w.prefill(inexact, 1000)
    w.release(inexact)
    free = w.table.groups["full"].num_free
    slot = opened(w, 1000)
    w.verify()
    w.release(slot)
    w.verify()
    assert w.table.groups["full"].num_free == free
    again = w.open("", TOKENS[:1000], 1200, exact_only=True)
    assert isinstance(again, Admitted)


def test_a_checkpoint_match_that_needs_no_page_keeps_the_places_of_those_it_left_behind() -> None:
    w = Worker((LayerGroup("wide", (ROW,), "turboquant", "tq4", window=300, dense_window=250),), num_pages=24)
    slot = opened(w, 770)
    base = w.table.sequence(slot).bases["wide"]
    assert w.checkpoint(slot)
    w.release(slot)
    answer = w.open("", TOKENS[:800], 1200)
    assert isinstance(answer, Admitted)
    assert (answer.num_cached, answer.prefix_exact) == (770, True)
    assert len(answer.pages["wide"]) * PAGE_TOKENS == answer.bases["wide"] == base == 384
    w.prefill(answer.slot, 30)
    step_to(w, answer.slot, 1200, step=9)
    w.verify()


def test_a_match_leaves_a_token_to_compute_and_never_crosses_salts() -> None:
    w = Worker((DENSE,), num_pages=24)
    w.release(opened(w, 256, salt="a"))
    for salt, num_prompt, cached in (("a", 256, 128), ("a", 257, 256), ("b", 257, 0), ("", 257, 0)):
        answer = w.open(salt, TOKENS[:num_prompt], 300)
        assert isinstance(answer, Admitted)
        assert (answer.num_cached, answer.prefix_exact) == (cached, True)
        w.check()
        w.release(answer.slot)


@pytest.mark.parametrize("groups", [(FULL,), (RING,), (COMPRESSED,), (FULL, DENSE), (SLIDING, FULL)])
def test_a_checkpoint_resumes_exactly(groups: tuple[object, ...]) -> None:
    w = Worker(groups, num_pages=32)  # type: ignore[arg-type]
    slot = opened(w, 700)
    assert w.checkpoint(slot, "prompt_end")
    assert w.checkpoint(slot, "prompt_end") == []  # it is there
    w.release(slot)
    answer = w.open("", TOKENS[:900], 1000, exact_only=True)
    assert isinstance(answer, Admitted)
    assert (answer.num_cached, answer.prefix_exact) == (700, True)
    w.check()
    assert answer.tail_copies
    assert not answer.refills
    again = w.open("", TOKENS[:700], 1000)  # the same prompt: all but its last token
    assert isinstance(again, Admitted)
    assert (again.num_cached, again.prefix_exact) == (699, True)
    w.check()
    for admitted_slot in (answer.slot, again.slot):
        w.prefill(admitted_slot, 500)
        w.check()
        assert all(w.expected[admitted_slot].pure)


def test_inexactness_is_inherited_by_pages_and_checkpoints() -> None:
    w = Worker((FULL,), num_pages=32)
    w.release(opened(w, 400))
    first = admitted(w.open("", TOKENS[:1000], 1100))
    assert w.table.sequence(first).inexact_from == 256
    w.prefill(first, 1000)
    w.checkpoint(first)
    w.check()
    hashes = w.table.sequence(first).hashes
    assert [found.exact for h in hashes[:6] if (found := w.table.index.pages("full", [h]))] == [True] * 2 + [False] * 4
    w.release(first)
    answer = w.open("", TOKENS[:1001], 1100)
    assert isinstance(answer, Admitted)
    assert (answer.num_cached, answer.prefix_exact) == (1000, False)


def test_an_exact_page_takes_the_place_of_an_inexact_one() -> None:
    w = Worker((FULL,), num_pages=32)
    w.release(opened(w, 400))
    slot = admitted(w.open("", TOKENS[:1000], 1100))
    w.prefill(slot, 872)
    w.release(slot)
    w.release(opened(w, 1000))
    digests = page_hashes(TOKENS[:768], salt="", weights_digest=WEIGHTS, geometry_digest=w.geometry.digest())
    found = w.table.index.pages("full", list(digests))
    assert found
    assert found.exact
    w.check()


def test_a_copy_that_the_worker_never_made_is_no_checkpoint() -> None:
    for goodbye, cached in ((True, 300), (False, 128)):
        w = Worker((FULL,), num_pages=32)
        slot = opened(w, 300)
        w.table.confirm()
        copies = w.table.checkpoint(slot, 300, "turn_end", lambda a, b: TOKENS[a:b])
        if goodbye:
            w._move(copies.copies, copies.tail_copies, [])
        w.detach(goodbye=goodbye)
        answer = w.open("", TOKENS[:400], 500)
        assert isinstance(answer, Admitted)
        assert answer.num_cached == cached
        w.check()


def test_checkpoints_that_cannot_be_are_named() -> None:
    w = Worker((FULL,), num_pages=32)
    slot = opened(w, 700)
    e = w.expected[slot]

    def tokens(first: int, last: int) -> list[int]:
        return e.tokens[first:last]

    with pytest.raises(InvalidRequest) as unknown:
        w.table.checkpoint(slot, 700, "whenever", tokens)
    assert unknown.value.reason == "UNKNOWN_CHECKPOINT_KIND"
    with pytest.raises(PreconditionFailed) as sparse:
        w.table.checkpoint(slot, 600, "turn_end", tokens)
    assert sparse.value.reason == "CHECKPOINT_NOT_DENSE"
    none = Worker((FULL,), num_pages=32, checkpoint_slots=0)
    assert none.checkpoint(opened(none, 700)) == []


def test_pins_return_with_the_attachment_and_cached_pages_are_evicted_when_promises_need_room() -> None:
    w = Worker((DENSE,), num_pages=6)
    slot = opened(w, 512, 512)
    w.detach(goodbye=False)
    table = w.table.groups["edges"]
    assert (table.num_cached, table.num_free, table.num_promised, table.num_available) == (4, 2, 0, 6)
    answer = w.open("", TOKENS[:513], 640)
    assert isinstance(answer, Admitted)
    assert answer.num_cached == 512
    assert w.open("", [1], 128 * 2) == Refused("edges", 2, 1, 6)  # pinned pages are not room
    w.detach(goodbye=True)
    slot = opened(w, 700, 768, salt="other")
    assert w.table.counters["pages_evicted", "edges"] == 4
    w.check()
    w.release(slot)


def test_cached_pages_that_a_match_would_pin_are_not_counted_as_room_for_others() -> None:
    w = Worker((DENSE,), num_pages=6)
    w.release(opened(w, 512, 512))
    other = opened(w, 1, 256, salt="other")
    assert w.table.groups["edges"].num_available == 4
    assert w.open("", TOKENS[:513], 640) == Refused("edges", 5, 4, 6)
    w.check()
    w.release(other)
    admitted(w.open("", TOKENS[:513], 640))


def test_no_checkpoint_is_kept_of_a_tail_that_was_refilled() -> None:
    w = Worker((FULL,), num_pages=24)
    slot = opened(w, 700)
    assert w.truncate(slot, 300) is False
    assert w.checkpoint(slot) == []
    step_to(w, slot, 600, step=9)  # the refilled rows have left the tail
    assert w.checkpoint(slot)


def test_eviction_takes_the_end_of_a_chain_first() -> None:
    w = Worker((DENSE,), num_pages=6)
    w.release(opened(w, 512, 512))
    w.release(opened(w, 1, 4 * 128, salt="other"))
    w.release(opened(w, 3 * 128, 3 * 128, salt="other"))
    answer = w.open("", TOKENS[:600], 640)
    assert isinstance(answer, Admitted)
    assert answer.num_cached == 3 * 128
    w.check()


def test_check_finds_a_holder_too_many() -> None:
    w = Worker((FULL,), num_pages=16)
    slot = opened(w, 700)
    w.table.groups["full"].share([w.table.sequence(slot).pages["full"][0]])
    with pytest.raises(InternalError, match="holders of page"):
        w.table.check()


def test_10000_sequences_leave_nothing_behind() -> None:
    rng = random.Random(7)
    w = Worker((FULL, DENSE), num_pages=12)
    for number in range(10_000):
        answer = w.table.open("r", str(number % 5), [rng.randrange(3)] * rng.randrange(1, 40), rng.randrange(40, 600))
        w.table.release([admitted(answer)])
    w.table.check()
    assert all(table.num_free == 12 and not table.num_promised for table in w.table.groups.values())
    assert PAGE_TOKENS == 128
