"""What a step computes: pure decisions on tiny numbers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tiny import request
from worker.scheduler import Work, schedule
from worker.sequence import Sequence


def sequence(num_prompt: int, num_computed: int, num_emitted: int = 0) -> Sequence:
    made = Sequence(request("r", [1] * num_prompt, 1000, emitted=[2] * num_emitted), 5000, 0)
    made.num_computed = num_computed
    return made


def counts(running: list[Sequence], budget: int, deterministic: bool = False) -> dict[int, int]:
    work = schedule(running, prefill_budget=budget, deterministic=deterministic)
    return {running.index(w.sequence): w.count for w in work}


def test_decode_rows_are_outside_the_budget() -> None:
    assert counts([sequence(5, 5, 1), sequence(9, 0), sequence(5, 5, 1)], 4) == {0: 1, 1: 4, 2: 1}


def test_the_oldest_prompt_is_served_first_and_the_rest_of_the_budget_goes_on() -> None:
    running = [sequence(30, 20), sequence(30, 0), sequence(30, 0)]
    assert counts(running, 25) == {0: 10, 1: 15}
    assert counts(running, 50) == {0: 10, 1: 30, 2: 10}


def test_deterministic_chunks_end_on_the_grid() -> None:
    assert counts([sequence(300, 0)], 200, True) == {0: 128}
    assert counts([sequence(300, 0)], 256, True) == {0: 256}
    assert counts([sequence(300, 256)], 50, True) == {0: 44}
    assert counts([sequence(300, 0)], 1, True) == {0: 128}, "one span at least, or nothing would ever run"
    assert counts([sequence(40, 0), sequence(300, 0)], 130, True) == {0: 40}
    assert counts([sequence(40, 0), sequence(300, 0)], 256, True) == {0: 40, 1: 128}


def test_a_resumed_prompt_goes_on_to_the_grid_first() -> None:
    assert counts([sequence(500, 300)], 1000, True) == {0: 200}, "cut on the grid when it is laid out"
    assert counts([sequence(500, 300)], 100, True) == {0: 84}
    assert counts([sequence(500, 300)], 10, True) == {0: 84}, "one span at least"


def test_one_span_a_step_where_what_is_read_packed_follows_from_its_start() -> None:
    def counted(start: int, num_prompt: int = 500) -> list[int]:
        running = [sequence(num_prompt, start), sequence(9, 0)]
        work = schedule(running, prefill_budget=1000, deterministic=True, one_span=True)
        return [w.count for w in work]

    assert counted(0) == [128, 9] and counted(300) == [84, 9] and counted(384) == [116, 9]


def test_a_chunk_ends_at_a_junction() -> None:
    for deterministic in (False, True):
        long = sequence(500, 0)
        long.junction = 256
        assert counts([long], 1000, deterministic) == {0: 256}
        long.num_computed = 256
        assert counts([long], 1000, deterministic) == {0: 244}


def test_emitted_tokens_run_again_as_they_did_at_first() -> None:
    assert counts([sequence(10, 0, 5)], 100, True) == {0: 10}
    assert counts([sequence(10, 10, 5)], 100, True) == {0: 1}
    assert counts([sequence(10, 0, 5)], 100) == {0: 15}


def test_logits_are_wanted_at_the_newest_token_only() -> None:
    assert Work(sequence(10, 0, 5), 0, 15).wants_logits
    assert not Work(sequence(10, 0, 5), 0, 10).wants_logits


@given(
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 20)), min_size=1, max_size=10),
    st.integers(1, 300),
    st.booleans(),
)
def test_everyone_comes_to_an_end(shapes: list[tuple[int, int]], budget: int, deterministic: bool) -> None:
    running = [sequence(num_prompt, 0, num_emitted) for num_prompt, num_emitted in shapes]
    for _ in range(sum(n + m for n, m in shapes)):
        work = schedule(running, prefill_budget=budget, deterministic=deterministic)
        assert work and all(w.count >= 1 and w.end <= len(w.sequence.token_ids) for w in work)
        assert len({id(w.sequence) for w in work}) == len(work)
        prefill = [w for w in work if w.count > 1]
        most = max(budget, 128) if deterministic else budget
        assert sum(w.count for w in prefill) <= most
        for w in work:
            w.sequence.num_computed = w.end
        if not (running := [s for s in running if s.num_uncomputed]):
            return
    raise AssertionError("someone starved")
