"""Limits of tenants: pure, under a clock of the test's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import CapacityError
from router.tenants import NO_LIMITS, TenantLimits, Tenants, TenantUse


class Clock:
    def __init__(self) -> None:
        self.s = 1000.0

    def __call__(self) -> float:
        return self.s


def tenants(**limits: TenantLimits) -> tuple[Tenants, Clock]:
    clock = Clock()
    return Tenants(lambda tenant: limits.get(tenant, NO_LIMITS), clock), clock


def refused(action: object, *arguments: object) -> CapacityError:
    assert callable(action)
    with pytest.raises(CapacityError) as caught:
        action(*arguments)
    return caught.value


def test_requests_are_counted_per_tenant() -> None:
    it, _ = tenants(a=TenantLimits(max_requests=2))
    for _ in range(2):
        it.enter("a")
        it.enter("b")
    error = refused(it.enter, "a")
    assert (error.reason, error.given, error.allowed) == ("TENANT_LIMIT_REQUESTS", "2 in flight", "2")
    assert error.retry_after_ms
    it.enter("b")  # another's crowd is no concern of b
    it.leave("a")
    it.enter("a")
    assert it.in_use() == {"a": TenantUse(2, 0, None), "b": TenantUse(3, 0, None)}


def test_bytes_are_counted_per_tenant_and_given_back() -> None:
    it, _ = tenants(a=TenantLimits(max_request_bytes=100))
    it.enter("a")
    it.enter("b")
    it.hold("a", 60)
    it.hold("b", 1000)
    assert it.in_use() == {"a": TenantUse(1, 60, None), "b": TenantUse(1, 1000, None)}
    it.enter("a")
    for num_bytes, comes_again in ((41, True), (101, False)):
        error = refused(it.hold, "a", num_bytes)
        assert error.reason == "TENANT_LIMIT_BYTES"
        assert bool(error.retry_after_ms) == comes_again  # waiting is no use for what never fits
    it.hold("a", 40)
    assert it.in_use()["a"] == TenantUse(2, 100, None)
    it.leave("a", 60)
    assert it.in_use()["a"] == TenantUse(1, 40, None)
    it.leave("a", 40)
    it.leave("b", 1000)
    assert it.in_use() == {}


def test_nothing_is_remembered_of_tenants_that_left() -> None:
    it, clock = tenants(a=TenantLimits(tokens_per_minute=60))
    for number in range(1000):  # names that callers make up
        it.enter(f"t{number}")
        it.leave(f"t{number}")
    assert not it.in_use() and not it._uses
    it.enter("a")
    it.admit_prompt("a", 30)
    it.leave("a")
    assert it.in_use() == {"a": TenantUse(0, 0, 30)}  # its debt is remembered
    clock.s += 30
    it.in_use()
    assert not it._uses


def test_a_bucket_refills_and_debt_is_paid_first() -> None:
    it, clock = tenants(a=TenantLimits(tokens_per_minute=600))  # 10 a second
    it.enter("a")
    it.admit_prompt("a", 600)
    error = refused(it.enter, "a")
    assert (error.reason, error.retry_after_ms) == ("TENANT_LIMIT_TOKENS", 100)
    clock.s += 0.1
    it.enter("a")
    error = refused(it.admit_prompt, "a", 51)
    assert (error.retry_after_ms, error.given) == (5000, "51 more tokens with 1 left")
    it.charge("a", 101)  # a running answer is not cut off
    assert it.in_use()["a"].tokens_left == pytest.approx(-100)
    assert refused(it.enter, "a").retry_after_ms == pytest.approx(10_100, abs=1)
    clock.s += 1e6
    it.charge("a", 100)
    assert it.in_use()["a"].tokens_left == pytest.approx(500)  # no more than a minute's worth was saved up


def test_a_prompt_above_a_minute_s_worth_needs_a_full_bucket() -> None:
    it, clock = tenants(a=TenantLimits(tokens_per_minute=600))
    it.enter("a")
    it.admit_prompt("a", 1)
    assert refused(it.admit_prompt, "a", 6000).retry_after_ms == 100
    clock.s += 0.1
    it.admit_prompt("a", 6000)
    assert it.in_use()["a"].tokens_left == pytest.approx(-5400)
    it.charge("a", -6000)  # no worker took it
    assert it.in_use()["a"].tokens_left == pytest.approx(600)


def test_limits_may_change_under_way() -> None:
    limits = {"a": TenantLimits(max_requests=1)}
    it = Tenants(lambda tenant: limits.get(tenant, NO_LIMITS), Clock())
    it.enter("a")
    refused(it.enter, "a")
    limits["a"] = TenantLimits(max_requests=2, tokens_per_minute=60)
    it.enter("a")
    it.charge("a", 10)
    del limits["a"]
    it.enter("a")
    for _ in range(3):
        it.leave("a")
    assert not it._uses


@given(
    rate=st.integers(1, 10**7),
    used=st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 100)), max_size=20),
    wanted=st.integers(1, 10**7),
)
def test_the_retry_hint_is_right_to_the_millisecond(rate: int, used: list[tuple[int, float]], wanted: int) -> None:
    it, clock = tenants(a=TenantLimits(tokens_per_minute=rate))
    it._uses["a"] = it._use("a")  # as if entered: debt must not keep the test out
    for tokens, pause_s in used:
        it.charge("a", tokens)
        clock.s += pause_s
    try:
        it.admit_prompt("a", wanted)
    except CapacityError as error:
        hint_ms = error.retry_after_ms
        assert hint_ms is not None and hint_ms > 0
        if hint_ms > 2:
            clock.s += (hint_ms - 2) / 1000
            refused(it.admit_prompt, "a", wanted)
            clock.s += 2 / 1000
        else:
            clock.s += hint_ms / 1000
        clock.s += 1e-6  # floats
        it.admit_prompt("a", wanted)


@given(steps=st.lists(st.tuples(st.integers(0, 500), st.floats(0, 5)), min_size=1, max_size=50))
def test_no_tenant_gets_more_than_its_rate(steps: list[tuple[int, float]]) -> None:
    """What is admitted in a time is at most a minute's worth and what refills, and one prompt's overdraft is none."""
    rate = 600
    it, clock = tenants(a=TenantLimits(tokens_per_minute=rate))
    it._uses["a"] = it._use("a")
    began, admitted = clock.s, 0
    for tokens, pause_s in steps:
        try:
            it.admit_prompt("a", tokens)
            admitted += tokens
        except CapacityError:
            pass
        assert admitted <= rate + (clock.s - began) * rate / 60 + 1e-6
        clock.s += pause_s
