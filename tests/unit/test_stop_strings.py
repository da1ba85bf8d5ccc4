"""Stop strings against an oracle that sees the whole text at once, over arbitrary chunkings."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from router.stop_strings import StopStringFilter

# Few letters, so that matches, overlaps and false starts are common; some of more than one UTF-16 or UTF-8 unit.
LETTERS = st.sampled_from("aab\n😀é")
TEXTS = st.text(LETTERS, max_size=60)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), max_size=4)


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The match that is complete first; of those that end together, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def chunked(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


@settings(max_examples=1000)
@given(TEXTS, STOPS, st.lists(st.integers(0, 100), max_size=20))
def test_any_chunking_equals_the_oracle(text: str, stops: list[str], cuts: list[int]) -> None:
    filtered = StopStringFilter(stops)
    shown = "".join(filtered.push(chunk) for chunk in chunked(text, cuts))
    if filtered.matched is None:
        shown += filtered.flush()
    assert (shown, filtered.matched) == oracle(text, stops)


@settings(max_examples=500)
@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_may_start_a_stop_string(text: str, stops: list[str]) -> None:
    filtered = StopStringFilter(stops)
    shown = ""
    for position, character in enumerate(text):
        shown += filtered.push(character)
        if filtered.matched is not None:
            return
        seen = text[: position + 1]
        held = max(
            (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])),
            default=0,
        )
        assert shown == seen[: len(seen) - held]


def test_nothing_is_shown_after_a_match() -> None:
    filtered = StopStringFilter(["\n\n"])
    assert filtered.push("one\n") == "one"
    assert filtered.push("\ntwo") == ""
    assert filtered.matched == "\n\n"
    assert filtered.push("three") == ""
    assert filtered.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    filtered = StopStringFilter([])
    assert filtered.push("abc") == "abc"
    assert filtered.flush() == ""
