"""Page accounting of one group: what is counted, and that misuse is a bug with a name."""

from __future__ import annotations

import pytest

from kvstore.pages import NOBODY, PageState, PageTable
from protos.errors import InternalError


def table(num_pages: int = 4, promised: int = 0) -> PageTable:
    pages = PageTable("full", num_pages)
    pages.promise(promised)
    return pages


def counts(pages: PageTable) -> tuple[int, int, int, int]:
    pages.check()
    return pages.num_free, pages.num_promised, pages.num_open, pages.num_sealed


def test_life_of_a_page() -> None:
    pages = table(promised=3)
    assert counts(pages) == (4, 3, 0, 0)
    assert pages.num_available == 1
    assert pages.take(7, 2) == [0, 1]
    assert counts(pages) == (2, 1, 2, 0)
    pages.seal(7, [0])
    assert counts(pages) == (2, 1, 1, 1)
    assert (pages.state(0), pages.owner(0)) == (PageState.SEALED, 7)
    pages.free(7, [0, 1])
    pages.unpromise(1)
    assert counts(pages) == (4, 0, 0, 0)
    assert (pages.owner(0), pages.generation(0), pages.generation(2)) == (NOBODY, 1, 0)
    assert pages.num_sealed_ever == 1


def test_freed_pages_are_taken_again_first_and_in_order() -> None:
    pages = table(8, promised=8)
    taken = pages.take(0, 5)
    pages.free(0, taken[1:4], keep_promise=True)
    assert pages.take(1, 3) == taken[1:4]


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda p: p.promise(5), "promise beyond the free pages"),
        (lambda p: p.promise(-1), "promise beyond the free pages"),
        (lambda p: p.unpromise(3), "more promises given up than made"),
        (lambda p: p.take(0, 3), "more pages taken than promised"),
        (lambda p: p.take(0, -1), "more pages taken than promised"),
        (lambda p: p.free(0, [3]), "page 3 is FREE"),
        (lambda p: p.free(0, [0, 0]), "named twice"),
        (lambda p: p.free(1, [0]), "held by another sequence"),
        (lambda p: p.free(0, [4]), "out of range"),
        (lambda p: p.free(0, [-1]), "out of range"),
        (lambda p: p.seal(0, [1]), "page 1 is SEALED"),
        (lambda p: p.seal(1, [0]), "held by another sequence"),
        (lambda p: p.replace_sealed(0, 0), "page 0 is OPEN"),
        (lambda p: p.replace_sealed(1, 1), "held by another sequence"),
    ],
)
def test_misuse_is_a_bug_and_changes_nothing(misuse: object, words: str) -> None:
    pages = table(4, promised=4)
    pages.take(0, 2)
    pages.seal(0, [1])
    before = counts(pages)
    with pytest.raises(InternalError, match=words):
        misuse(pages)  # type: ignore[operator]
    assert counts(pages) == before


def test_double_free_is_a_bug() -> None:
    pages = table(promised=1)
    taken = pages.take(0, 1)
    pages.free(0, taken)
    with pytest.raises(InternalError, match="is FREE"):
        pages.free(0, taken)


def test_replacing_takes_another_page_where_one_is_free() -> None:
    pages = table(2, promised=1)
    (old,) = pages.take(0, 1)
    pages.seal(0, [old])
    new = pages.replace_sealed(0, old)
    assert new != old
    assert (pages.state(old), pages.state(new)) == (PageState.FREE, PageState.OPEN)
    assert counts(pages) == (1, 0, 1, 0)


def test_replacing_uses_a_page_promised_to_another_and_gives_one_back() -> None:
    pages = table(2, promised=2)
    (old,) = pages.take(0, 1)
    pages.seal(0, [old])
    assert pages.replace_sealed(0, old) != old
    assert counts(pages) == (1, 1, 1, 0)


def test_replacing_in_a_full_arena_reopens_the_page() -> None:
    pages = table(1, promised=1)
    (old,) = pages.take(0, 1)
    pages.seal(0, [old])
    assert pages.replace_sealed(0, old) == old
    assert counts(pages) == (0, 0, 1, 0)
    assert pages.generation(old) == 1


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda p: p._free.append(p._free[0]),
        lambda p: p._free.pop(),
        lambda p: setattr(p, "num_promised", 3),
        lambda p: setattr(p, "num_open", 0),
        lambda p: p._owner.__setitem__(0, NOBODY),
        lambda p: p._owner.__setitem__(3, 5),
    ],
)
def test_check_finds_corruption(corrupt: object) -> None:
    pages = table(4, promised=2)
    pages.take(0, 2)
    pages.check()
    corrupt(pages)  # type: ignore[operator]
    with pytest.raises(InternalError):
        pages.check()
