"""What a client decides when calls end early, with no router at all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import router_pb2
from protos.errors import CapacityError, DeadlineExceeded, RequestCancelled, TailpackError, Unavailable
from router.answer_state import AnswerState, Failure, RetryPolicy
from router.client_request import build_request

LOST = Failure(Unavailable("Socket closed"), spoken=False, accepted=False)


@given(st.integers(1, 100), st.floats(0, 100), st.floats(0, 1, exclude_max=True))
def test_waits_grow_to_a_bound_and_never_undercut_a_hint(num_rounds: int, hint_s: float, jitter: float) -> None:
    policy = RetryPolicy(first_delay_s=0.1, max_delay_s=2.0)
    delay_s = policy.delay_s(num_rounds, hint_s, jitter)
    backoff_s = min(2.0, 0.1 * 2 ** (num_rounds - 1))
    assert hint_s + backoff_s / 2 - 1e-9 <= delay_s <= hint_s + backoff_s + 1e-9


@given(st.integers(1, 4), st.integers(0, 6))
def test_each_round_asks_every_address_once_and_waits_after_it(num_addresses: int, max_retries: int) -> None:
    state = AnswerState("r", build_request("x"), RetryPolicy(max_retries), num_addresses=num_addresses, first_address=0)
    asked, waits = [], []
    with pytest.raises(Unavailable):
        while True:
            state.message()
            asked.append(state.address)
            waits.append(state.failed(LOST, now_s=0.0, jitter=0.0))
    if max_retries == 0:
        assert asked == [0]
    else:
        assert asked == list(range(num_addresses)) * (max_retries + 1)
        assert all((wait > 0) == (number % num_addresses == 0) for number, wait in enumerate(waits, start=1))


def test_the_longest_hint_of_a_round_is_waited_for() -> None:
    state = AnswerState("r", build_request("x"), RetryPolicy(), num_addresses=2)
    full = Failure(CapacityError("full", retry_after_ms=5000), spoken=True, accepted=True)
    assert state.failed(full, now_s=0.0, jitter=0.0) == 0.0  # the other one may have room
    assert state.failed(LOST, now_s=0.0, jitter=0.0) >= 5.0
    assert state.failed(LOST, now_s=6.0, jitter=0.0) == 0.0
    assert state.failed(LOST, now_s=6.0, jitter=0.0) < 5.0


@pytest.mark.parametrize("spoken", [False, True])
def test_a_cancel_that_no_router_speaks_of_is_a_lost_connection(spoken: bool) -> None:
    """Some servers cancel their calls when they stop."""
    state = AnswerState("r", build_request("x"), RetryPolicy())
    failure = Failure(RequestCancelled("cancelled"), spoken=spoken, accepted=True)
    if spoken:
        with pytest.raises(RequestCancelled):
            state.failed(failure, now_s=0.0, jitter=0.0)
    else:
        assert state.failed(failure, now_s=0.0, jitter=0.0) > 0


def test_a_deadline_is_not_waited_past() -> None:
    state = AnswerState("r", build_request("x"), RetryPolicy(), deadline_s=10.0)
    assert state.remaining_s(4.0) == 6.0
    with pytest.raises(DeadlineExceeded):
        state.remaining_s(10.0)
    with pytest.raises(Unavailable):
        state.failed(LOST, now_s=9.99, jitter=0.0)


@pytest.mark.parametrize("spoken", [False, True])
def test_only_what_a_router_may_keep_is_tried_for_the_grace_time(spoken: bool) -> None:
    """Without a token yet: lost connections leave a request running, refusals do not."""
    state = AnswerState("r", build_request("x", resumable=True, resume_grace_ms=5000), RetryPolicy(max_retries=2))
    now_s, tries = 0.0, 0
    with pytest.raises(Unavailable):
        while True:
            tries += 1
            now_s += state.failed(Failure(LOST.error, spoken=spoken, accepted=True), now_s=now_s, jitter=0.0)
    assert tries == 3 if spoken else now_s > 4.0


def test_chunks_without_news_are_no_progress() -> None:
    """A router that says something empty each time before it is lost is not asked for ever."""
    state = AnswerState("r", build_request("x"), RetryPolicy(max_retries=2))
    with pytest.raises(Unavailable):
        for _ in range(10):
            state.take(router_pb2.GenerateResponse(request_id="r"))
            state.failed(LOST, now_s=0.0, jitter=0.0)


@pytest.mark.parametrize(("error", "told"), [(LOST.error, False), (DeadlineExceeded("late"), True)])
def test_who_must_be_told_that_nobody_reads(error: TailpackError, told: bool) -> None:
    """Past the deadline a resumable request must not run on; one that is out of reach is left to its grace time."""
    state = AnswerState("r", build_request("x", resumable=True), RetryPolicy(max_retries=0))
    assert not state.abandoned  # nothing was sent
    state.message()
    assert state.abandoned
    with pytest.raises(type(error)):
        state.failed(Failure(error, spoken=False, accepted=True), now_s=0.0, jitter=0.0)
    assert state.abandoned == told
