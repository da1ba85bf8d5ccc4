"""Page accounting of one group: what is counted, and that misuse is a bug with a name."""

from __future__ import annotations

import pytest

from kvstore.pages import PageState, PageTable
from protos.errors import InternalError


def table(num_pages: int = 4, promised: int = 0) -> PageTable:
    pages = PageTable("full", num_pages)
    pages.promise(promised)
    return pages


def counts(pages: PageTable) -> tuple[int, int, int, int, int]:
    pages.check()
    return pages.num_free, pages.num_promised, pages.num_open, pages.num_sealed, pages.num_cached


def known(page: int) -> bool:
    return True


def test_life_of_a_page() -> None:
    pages = table(promised=3)
    assert counts(pages) == (4, 3, 0, 0, 0)
    assert pages.num_available == 1
    assert pages.take(2) == [0, 1]
    assert counts(pages) == (2, 1, 2, 0, 0)
    pages.seal([0])
    assert counts(pages) == (2, 1, 1, 1, 0)
    assert (pages.state(0), pages.refs(0)) == (PageState.SEALED, 1)
    assert pages.drop([0, 1]) == [0, 1]
    pages.unpromise(1)
    assert counts(pages) == (4, 0, 0, 0, 0)
    assert (pages.refs(0), pages.generation(0), pages.generation(2)) == (0, 1, 0)


def test_a_page_that_the_index_knows_is_cached_and_still_available() -> None:
    pages = table(promised=2)
    pages.take(2)
    pages.seal([0, 1])
    assert pages.drop([0, 1], lambda page: page == 1) == [0, 1]
    assert counts(pages) == (3, 0, 0, 0, 1)
    assert (pages.num_available, pages.generation(1)) == (4, 0)
    pages.share([1])
    assert counts(pages) == (3, 0, 0, 1, 0)
    pages.drop([1], known)
    pages.uncache([1])
    assert (counts(pages), pages.generation(1)) == ((4, 0, 0, 0, 0), 1)


def test_shared_pages_go_with_their_last_holder() -> None:
    pages = table(promised=1)
    pages.take(1)
    pages.seal([0])
    pages.share([0])
    assert pages.drop([0], known) == []
    assert (counts(pages), pages.refs(0)) == ((3, 0, 0, 1, 0), 1)
    assert pages.drop([0], known) == [0]
    assert pages.num_cached == 1


def test_freed_pages_are_taken_again_first_and_in_order() -> None:
    pages = table(8, promised=8)
    taken = pages.take(5)
    pages.drop(taken[1:4])
    pages.promise(3)
    assert pages.take(3) == taken[1:4]


def test_a_page_of_one_holder_is_written_again() -> None:
    pages = table(promised=1)
    pages.take(1)
    pages.seal([0])
    pages.reopen(0)
    assert counts(pages) == (3, 0, 1, 0, 0)


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda p: p.promise(4), "promise beyond the available pages"),
        (lambda p: p.promise(-1), "promise beyond the available pages"),
        (lambda p: p.unpromise(3), "more promises given up than made"),
        (lambda p: p.take(3), "more pages taken than promised"),
        (lambda p: p.take(-1), "more pages taken than promised"),
        (lambda p: p.seal([1]), "page 1 is FREE"),
        (lambda p: p.seal([0, 0]), "named twice"),
        (lambda p: p.seal([9]), "out of range"),
        (lambda p: p.seal([-1]), "out of range"),
        (lambda p: p.drop([3]), "page 3 is FREE"),
        (lambda p: p.share([0]), "page 0 is OPEN"),
        (lambda p: p.uncache([0]), "page 0 is OPEN"),
        (lambda p: p.reopen(0), "page 0 is OPEN"),
    ],
)
def test_misuse_is_a_bug_with_a_name_and_changes_nothing(misuse: object, words: str) -> None:
    pages = table(promised=3)
    pages.take(1)
    before = counts(pages)
    with pytest.raises(InternalError, match=words):
        misuse(pages)  # type: ignore[operator]
    assert counts(pages) == before


def test_cached_pages_that_back_promises_are_not_shared() -> None:
    pages = table(2, promised=2)
    pages.take(1)
    pages.seal([0])
    pages.drop([0], known)
    pages.promise(1)
    with pytest.raises(InternalError, match="back promises"):
        pages.share([0])


def test_a_page_with_two_holders_is_not_reopened() -> None:
    pages = table(promised=1)
    pages.take(1)
    pages.seal([0])
    pages.share([0])
    with pytest.raises(InternalError, match="seen by others"):
        pages.reopen(0)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p._free.append(0), "counters differ"),
        (lambda p: p._free.__setitem__(0, p._free[1]), "holds a page twice"),
        (lambda p: setattr(p, "num_promised", 9), "promises without pages"),
        (lambda p: setattr(p, "num_sealed", 7), "counters differ"),
        (lambda p: p._refs.__setitem__(0, 2), "is OPEN with 2 holders"),
        (lambda p: p._refs.__setitem__(3, 1), "is FREE with 1 holders"),
    ],
)
def test_check_finds_what_is_broken(spoil: object, words: str) -> None:
    pages = table(promised=2)
    pages.take(1)
    spoil(pages)  # type: ignore[operator]
    with pytest.raises(InternalError, match=words):
        pages.check()
