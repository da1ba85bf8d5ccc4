"""Placement: pure values in, a choice out."""

from __future__ import annotations

import itertools
import runpy
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import page_hash
from router import policy
from router.policy import SEQUENCE_COST_TOKENS, Candidate, OwnLoad, Placement, candidate, choose

SMALL = Placement(prompt_tokens=100, max_tokens=100)


def idle(name: str, *, sequences: int = 0, queued: int = 0, free: int = 1000, total: int = 1000) -> Candidate:
    return Candidate(name, sequences, queued, free, total)


def burst(loads: dict[str, OwnLoad], prompts: Sequence[int], *, free: int = 10_000) -> dict[str, list[int]]:
    """Places prompts one after the other while no worker reports anything."""
    placed: dict[str, list[int]] = {name: [] for name in loads}
    for number, prompt_tokens in enumerate(prompts):
        placement = Placement(prompt_tokens, 100)
        candidates = [
            candidate(
                name,
                reported_sequences=0,
                reported_queued_tokens=0,
                pages_free=free,
                pages_total=free,
                own=own,
                own_at_report=OwnLoad(),
            )
            for name, own in loads.items()
        ]
        chosen = choose(candidates, placement, f"r-{number}")
        assert chosen is not None
        placed[chosen].append(prompt_tokens)
        own = loads[chosen]
        own.num_sequences += 1
        own.queued_tokens += prompt_tokens
        own.num_pages += placement.num_pages
    return placed


def test_a_burst_of_64_spreads_evenly_before_any_report() -> None:
    placed = burst({f"w{number}": OwnLoad() for number in range(8)}, [5000] * 64)
    assert {len(prompts) for prompts in placed.values()} == {8}


def test_long_prompts_weigh_more_than_short_ones() -> None:
    placed = burst({"a": OwnLoad(), "b": OwnLoad()}, [100_000, *[100] * 20])
    (long_one,) = (name for name, prompts in placed.items() if 100_000 in prompts)
    assert placed[long_one] == [100_000]


def test_least_work_wins() -> None:
    assert choose([idle("a", sequences=3), idle("b", sequences=2), idle("c", sequences=4)], SMALL, "r") == "b"
    assert choose([idle("a", queued=500), idle("b", queued=100)], SMALL, "r") == "b"
    mixed = [idle("a", queued=SEQUENCE_COST_TOKENS * 2 + 1), idle("b", sequences=2)]
    assert choose(mixed, SMALL, "r") == "b"


def test_room_for_the_pages_comes_before_load() -> None:
    crowded, busy = idle("a", free=1), idle("b", sequences=50)
    assert choose([crowded, busy], SMALL, "r") == "b"
    assert choose([crowded], SMALL, "r") == "a"  # with no room anywhere it waits at the least loaded
    assert choose([idle("a", free=0, total=0), busy], SMALL, "r") == "a"  # no pages reported: no reason to shun it


def test_num_pages_rounds_up() -> None:
    assert [Placement(n, 1).num_pages for n in (1, 126, 127, 128)] == [1, 1, 1, 2]


def test_pages_are_as_long_as_the_hash_chain_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_hash, "PAGE_TOKENS", 64)
    afresh = runpy.run_path(policy.__file__)
    assert afresh["Placement"](100, 28).num_pages == 2


def test_tried_workers_are_left_out() -> None:
    candidates = [idle("a"), idle("b", sequences=9)]
    assert choose(candidates, SMALL, "r", tried=["a"]) == "b"
    assert choose(candidates, SMALL, "r", tried=["a", "b"]) is None
    assert choose([], SMALL, "r") is None


@given(st.permutations([idle(name) for name in "abcde"]), st.text(max_size=8))
def test_a_tie_is_broken_the_same_way_in_any_order(candidates: list[Candidate], request_id: str) -> None:
    assert choose(candidates, SMALL, request_id) == choose(
        sorted(candidates, key=lambda c: c.worker), SMALL, request_id
    )


def test_ties_of_many_routers_spread() -> None:
    """Routers that know nothing of each other must not all pick the same idle worker."""
    chosen = Counter(choose([idle(name) for name in "abcd"], SMALL, f"request-{number}") for number in range(4000))
    assert set(chosen) == set("abcd")
    assert all(800 < count < 1200 for count in chosen.values())


def test_own_sequences_are_not_counted_twice() -> None:
    # 5 reported, 3 of them ours at that moment: 2 of others. Since then we placed one more.
    now = candidate(
        "a",
        reported_sequences=5,
        reported_queued_tokens=900,
        pages_free=50,
        pages_total=60,
        own=OwnLoad(num_sequences=4, queued_tokens=500, num_pages=13),
        own_at_report=OwnLoad(num_sequences=3, queued_tokens=400, num_pages=10),
    )
    assert now == Candidate("a", num_sequences=6, queued_tokens=1000, pages_free=47, pages_total=60)


def test_ended_sequences_give_no_pages_before_the_worker_says_so() -> None:
    now = candidate(
        "a",
        reported_sequences=1,
        reported_queued_tokens=0,
        pages_free=5,
        pages_total=10,
        own=OwnLoad(),
        own_at_report=OwnLoad(num_sequences=1, num_pages=5),
    )
    assert (now.num_sequences, now.pages_free) == (0, 5)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=60), st.integers(1, 6))
def test_no_worker_gets_more_than_the_largest_prompt_above_another(prompts: list[int], num_workers: int) -> None:
    """Greedy placement on the least loaded: the classic bound of list scheduling."""
    placed = burst({f"w{number}": OwnLoad() for number in range(num_workers)}, prompts)
    work = [sum(prompt + SEQUENCE_COST_TOKENS for prompt in prompts) for prompts in placed.values()]
    largest = max(prompts) + SEQUENCE_COST_TOKENS
    assert all(abs(a - b) <= largest for a, b in itertools.combinations(work, 2))
