"""The sequence table against a simple oracle: a memory of tokens that a model worker writes and reads."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvstore.pages import PageTable
from kvstore.sequences import Admitted, PageCopy, Refused, SequenceTable, pages_for
from protos.errors import InvalidRequest, NotFound, PreconditionFailed, TailpackError, TooLarge
from protos.page_hash import PAGE_TOKENS, page_hashes

MAX_TOKENS = 6 * PAGE_TOKENS


def table(full: int = 8, window: int | None = None, max_sequences: int = 4) -> SequenceTable:
    groups = [PageTable("full", full)] + ([PageTable("window", window)] if window is not None else [])
    return SequenceTable(
        groups,
        max_sequences=max_sequences,
        max_sequence_tokens=MAX_TOKENS,
        weights_digest=b"w" * 16,
        geometry_digest=b"g" * 16,
    )


def admitted(result: Admitted | Refused) -> int:
    assert isinstance(result, Admitted)
    return result.slot


def ids(first: int, last: int) -> list[int]:
    return list(range(first, last))


# --- scenarios ---


def test_pages_for() -> None:
    assert [pages_for(n) for n in (0, 1, 127, 128, 129, 256)] == [0, 1, 1, 1, 2, 2]


def test_open_promises_the_worst_case_and_release_gives_it_back() -> None:
    t = table(8)
    slot = admitted(t.open("r", "", 1, 300))
    assert t.groups["full"].num_promised == 3
    assert t.reserve([(slot, 1)]) == {slot: {"full": [0]}}
    assert t.reserve([(slot, 128)]) == {}
    assert t.reserve([(slot, 129)]) == {slot: {"full": [1]}}
    assert t.groups["full"].num_promised == 1
    assert t.release([slot]) == {slot: {"full": [0, 1]}}
    assert (t.groups["full"].num_free, t.groups["full"].num_promised, len(t)) == (8, 0, 0)
    t.check()


def test_a_full_arena_refuses_with_numbers_and_promises_nothing() -> None:
    t = table(8, window=3)
    admitted(t.open("a", "", 1, 2 * PAGE_TOKENS))
    assert t.open("b", "", 1, 2 * PAGE_TOKENS) == Refused("window", 2, 1, 3)
    assert (t.groups["full"].num_promised, t.groups["window"].num_promised) == (2, 2)
    t.check()


def test_out_of_slots_names_no_group() -> None:
    t = table(8, max_sequences=1)
    slot = admitted(t.open("a", "", 1, 1))
    assert t.open("b", "", 1, 1) == Refused("", 1, 7, 8)
    t.release([slot])
    assert admitted(t.open("b", "", 1, 1)) == slot


def test_more_than_the_arena_holds_is_refused_with_the_total() -> None:
    assert table(2).open("a", "", 1, 3 * PAGE_TOKENS) == Refused("full", 3, 2, 2)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "kind"),
    [(0, 1, InvalidRequest), (1, 0, InvalidRequest), (2, 1, InvalidRequest), (1, MAX_TOKENS + 1, TooLarge)],
)
def test_malformed_opens(prompt: int, max_tokens: int, kind: type[TailpackError]) -> None:
    t = table()
    with pytest.raises(kind):
        t.open("r", "", prompt, max_tokens)
    assert len(t) == 0


def test_seal_makes_whole_pages_immutable_and_chains_their_hashes() -> None:
    t = table()
    slot = admitted(t.open("r", "salt", 1, 400))
    t.reserve([(slot, 400)])
    one = t.seal(slot, 200, ids)
    two = t.seal(slot, 400, ids)
    again = t.seal(slot, 399, ids)
    expected = list(page_hashes(ids(0, 400), salt="salt", weights_digest=b"w" * 16, geometry_digest=b"g" * 16))
    assert [page.hash for page in one + two] == expected
    assert [page.parent for page in one + two] == [bytes(16), *expected[:-1]]
    assert ([page.index for page in one], [page.index for page in two], again) == ([0], [1, 2], [])
    assert t.groups["full"].num_sealed == 3
    t.check()


def test_seal_of_pages_that_were_not_handed_out() -> None:
    t = table()
    slot = admitted(t.open("r", "", 1, 400))
    t.reserve([(slot, 100)])
    with pytest.raises(PreconditionFailed, match="has no pages") as caught:
        t.seal(slot, 129, ids)
    assert caught.value.reason == "NOT_RESERVED"


def test_truncate_into_a_sealed_page_copies_its_rows() -> None:
    t = table(8, window=8)
    slot = admitted(t.open("r", "", 1, 400))
    t.reserve([(slot, 400)])
    t.seal(slot, 400, ids)
    cut = t.truncate(slot, 200, 400)
    new = t.sequence(slot).pages["full"][1]
    assert new not in (0, 1)
    assert PageCopy("full", 1, new, 72) in cut.copies
    assert {copy.group for copy in cut.copies} == {"full", "window"}
    assert cut.freed["full"] == [2, 3, 1]
    assert len(t.sequence(slot).hashes) == 1
    t.check()


@pytest.mark.parametrize("num_tokens", [0, 128, 256, 384, 399, 400])
def test_truncate_at_a_border_or_in_the_open_page_copies_nothing(num_tokens: int) -> None:
    t = table()
    slot = admitted(t.open("r", "", 1, 400))
    t.reserve([(slot, 400)])
    t.seal(slot, 400, ids)
    assert t.truncate(slot, num_tokens, 400).copies == []
    assert t.sequence(slot).num_pages == pages_for(num_tokens)
    t.check()


def test_truncate_keeps_the_promise() -> None:
    t = table(4)
    slot = admitted(t.open("r", "", 1, 4 * PAGE_TOKENS))
    t.reserve([(slot, 512)])
    t.truncate(slot, 1, 512)
    assert t.open("other", "", 1, 1) == Refused("full", 1, 0, 4)
    assert len(t.reserve([(slot, 512)])[slot]["full"]) == 3
    t.check()


def test_truncate_never_extends_and_never_fails_for_want_of_pages() -> None:
    t = table(2)
    slot = admitted(t.open("r", "", 1, 256))
    t.reserve([(slot, 256)])
    t.seal(slot, 256, ids)
    with pytest.raises(PreconditionFailed, match="never extends"):
        t.truncate(slot, 257, 256)
    cut = t.truncate(slot, 200, 256)  # no page is free: the sealed one, seen by nobody else, is opened again
    assert cut.copies == []
    assert (t.groups["full"].num_open, t.groups["full"].num_sealed) == (1, 1)
    t.check()


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.reserve([(0, 1), (3, 1)]),
        lambda t: t.seal(3, 0, ids),
        lambda t: t.truncate(3, 0, 0),
        lambda t: t.release([0, 3]),
        lambda t: t.sequence(3),
    ],
)
def test_unknown_slots_are_named_and_nothing_is_done(call: object) -> None:
    t = table()
    assert admitted(t.open("r", "", 1, 1)) == 0
    with pytest.raises(NotFound) as caught:
        call(t)  # type: ignore[operator]
    assert (caught.value.reason, caught.value.given) == ("UNKNOWN_SLOT", "3")
    assert (len(t), t.groups["full"].num_free) == (1, 8)


def test_a_double_release_is_an_error() -> None:
    t = table()
    slot = admitted(t.open("r", "", 1, 1))
    with pytest.raises(InvalidRequest, match="named twice"):
        t.release([slot, slot])
    t.release([slot])
    with pytest.raises(NotFound):
        t.release([slot])
    t.check()


def test_a_batch_with_one_bad_entry_reserves_nothing() -> None:
    t = table()
    slot = admitted(t.open("r", "", 1, 100))
    with pytest.raises(InvalidRequest) as caught:
        t.reserve([(slot, 100), (slot, 100)])
    assert caught.value.reason == "DUPLICATE_SLOT"
    other = admitted(t.open("s", "", 1, 100))
    with pytest.raises(InvalidRequest) as caught:
        t.reserve([(slot, 100), (other, 101)])
    assert caught.value.reason == "OVER_PROMISE"
    assert t.groups["full"].num_open == 0


# --- the oracle ---


@dataclass
class Expected:
    salt: str
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    num_pages: int = 0
    num_sealed: int = 0


class SequencesMatchAnOracle(RuleBasedStateMachine):
    """A worker that writes each token into its row. What a sequence reads back is always its own token log."""

    slots = Bundle("slots")

    @initialize(full=st.integers(1, 12), window=st.integers(1, 12), seed=st.integers(0, 2**32 - 1))
    def start(self, full: int, window: int, seed: int) -> None:
        self.sizes = {"full": full, "window": window}
        self.table = table(full, window, max_sequences=3)
        self.memory: dict[tuple[str, int], dict[int, int]] = {}
        self.sealed: dict[tuple[str, int], tuple[int, dict[int, int]]] = {}
        self.expected: dict[int, Expected] = {}
        self.random = random.Random(seed)

    @rule(target=slots, max_tokens=st.integers(1, MAX_TOKENS), salt=st.sampled_from(["", "a"]), share=st.floats(0, 1))
    def open(self, max_tokens: int, salt: str, share: float) -> object:
        prompt = max(1, int(max_tokens * share))
        promised = sum(pages_for(e.max_tokens) for e in self.expected.values())
        fits = pages_for(max_tokens) <= min(self.sizes.values()) - promised and len(self.expected) < 3
        result = self.table.open("r", salt, prompt, max_tokens)
        assert isinstance(result, Admitted) == fits
        if isinstance(result, Refused):
            assert result.pages_needed == pages_for(max_tokens)
            return multiple()
        assert result.slot not in self.expected
        self.expected[result.slot] = Expected(salt, max_tokens)
        self._write(result.slot, prompt)
        return result.slot

    @rule(slot=slots, count=st.integers(1, 2 * PAGE_TOKENS))
    def append(self, slot: int, count: int) -> None:
        if slot in self.expected:
            room = self.expected[slot].max_tokens - len(self.expected[slot].tokens)
            self._write(slot, min(count, room))

    @rule(slot=slots, share=st.floats(0, 1))
    def reserve_ahead(self, slot: int, share: float) -> None:
        if slot in self.expected:
            self._reserve(slot, int(self.expected[slot].max_tokens * share))

    @rule(slot=slots, share=st.sampled_from([0.3, 0.9, 1.0]))
    def seal(self, slot: int, share: float) -> None:
        if slot not in self.expected:
            return
        e = self.expected[slot]
        num_tokens = int(len(e.tokens) * share)
        pages = self.table.seal(slot, num_tokens, lambda first, last: e.tokens[first:last])
        assert [page.index for page in pages] == list(range(e.num_sealed, num_tokens // PAGE_TOKENS))
        e.num_sealed = max(e.num_sealed, num_tokens // PAGE_TOKENS)
        for page in pages:
            for name, page_id in page.pages.items():
                generation = self.table.groups[name].generation(page_id)
                self.sealed[name, page_id] = (generation, dict(self.memory[name, page_id]))

    @rule(slot=slots, share=st.floats(0, 1), back=st.integers(0, 20))
    def truncate(self, slot: int, share: float, back: int) -> None:
        if slot not in self.expected:
            return
        e = self.expected[slot]
        keep = max(0, int(len(e.tokens) * share) - back) if back < 10 else max(0, len(e.tokens) - back)
        cut = self.table.truncate(slot, keep, len(e.tokens))
        for copy in cut.copies:
            assert copy.from_page != copy.to_page
            assert copy.num_tokens == keep % PAGE_TOKENS
            rows = self.memory[copy.group, copy.from_page]
            self.memory[copy.group, copy.to_page] = {row: rows[row] for row in range(copy.num_tokens)}
        del e.tokens[keep:]
        e.num_pages, e.num_sealed = pages_for(keep), min(e.num_sealed, keep // PAGE_TOKENS)

    @rule(slot=consumes(slots))
    def release(self, slot: int) -> None:
        if slot in self.expected:
            freed = self.table.release([slot])
            assert {name: len(pages) for name, pages in freed[slot].items()} == dict.fromkeys(
                self.sizes, self.expected.pop(slot).num_pages
            )
        else:
            with pytest.raises(NotFound):
                self.table.release([slot])

    @rule()
    def detach(self) -> None:
        self.table.release(self.table.slots)
        self.expected.clear()

    def _reserve(self, slot: int, num_tokens: int) -> None:
        e = self.expected[slot]
        new = max(0, pages_for(num_tokens) - e.num_pages)
        handed = self.table.reserve([(slot, num_tokens)])
        assert {name: len(pages) for name, pages in handed.get(slot, {}).items()} == (
            dict.fromkeys(self.sizes, new) if new else {}
        )
        e.num_pages += new

    def _write(self, slot: int, count: int) -> None:
        e = self.expected[slot]
        self._reserve(slot, len(e.tokens) + count)
        for _ in range(count):
            token = self.random.randrange(50_000)
            index, row = divmod(len(e.tokens), PAGE_TOKENS)
            for name in self.sizes:
                page = self.table.sequence(slot).pages[name][index]
                self.memory.setdefault((name, page), {})[row] = token
            e.tokens.append(token)

    @invariant()
    def counters_agree(self) -> None:
        if not hasattr(self, "table"):
            return
        self.table.check()
        assert sorted(self.table.slots) == sorted(self.expected)
        held = sum(e.num_pages for e in self.expected.values())
        sealed = sum(e.num_sealed for e in self.expected.values())
        promised = sum(pages_for(e.max_tokens) - e.num_pages for e in self.expected.values())
        for name, size in self.sizes.items():
            t = self.table.groups[name]
            assert (t.num_free, t.num_promised, t.num_open, t.num_sealed) == (
                size - held,
                promised,
                held - sealed,
                sealed,
            )

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        for slot, e in getattr(self, "expected", {}).items():
            sequence = self.table.sequence(slot)
            hashes = page_hashes(
                e.tokens[: e.num_sealed * PAGE_TOKENS],
                salt=e.salt,
                weights_digest=b"w" * 16,
                geometry_digest=b"g" * 16,
            )
            assert sequence.hashes == list(hashes)
            for name in self.sizes:
                read = [
                    self.memory[name, sequence.pages[name][position // PAGE_TOKENS]][position % PAGE_TOKENS]
                    for position in range(len(e.tokens))
                ]
                assert read == e.tokens

    @invariant()
    def sealed_pages_never_change(self) -> None:
        for (name, page), (generation, rows) in getattr(self, "sealed", {}).items():
            if self.table.groups[name].generation(page) == generation:
                assert self.memory[name, page] == rows


TestSequencesMatchAnOracle = SequencesMatchAnOracle.TestCase
TestSequencesMatchAnOracle.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
