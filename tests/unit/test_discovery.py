"""Workers behind a DNS name: how the name is read, what comes and goes, and what an outage of DNS changes (nothing)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ConfigError
from router.discovery import FORGET_AFTER, View, WorkerDns, follow, resolve


def test_names() -> None:
    assert WorkerDns.parse("workers.ns.svc:7730") == WorkerDns("workers.ns.svc", 7730, 7730)
    eight = WorkerDns.parse("workers:7730-7737")
    assert eight.addresses(["10.0.0.1"]) == {f"10.0.0.1:{port}" for port in range(7730, 7738)}
    assert WorkerDns.parse("w:1").addresses(["fd00::1"]) == {"[fd00::1]:1"}


@pytest.mark.parametrize(
    "text", ["workers", "workers:", "workers:0", "workers:9-8", "workers:1-65", "w:1-70000", "a b:1"]
)
def test_names_that_say_nothing(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WorkerDns.parse(text)
    assert refused.value.reason == "BAD_ADDRESS"


def test_a_worker_is_forgotten_when_it_stays_away_and_has_no_session() -> None:
    view = View()
    assert view.update({"a", "b"}, ()) == ({"a", "b"}, set())
    for _ in range(FORGET_AFTER - 1):
        assert view.update({"a"}, ()) == (set(), set())
    assert view.update({"a", "b"}, ()) == (set(), set())  # it was there again: the count begins anew
    for _ in range(FORGET_AFTER - 1):
        assert view.update({"a"}, ()) == (set(), set())
    assert view.update({"a"}, ()) == (set(), {"b"})
    assert view.update({"a", "b"}, ()) == ({"b"}, set())


def test_a_worker_with_a_session_is_never_forgotten() -> None:
    view = View()
    view.update({"a"}, ())
    for _ in range(3 * FORGET_AFTER):
        assert view.update(set(), {"a"}) == (set(), set())
    assert view.update(set(), ()) == (set(), {"a"})


@given(st.lists(st.tuples(st.sets(st.sampled_from("abcd")), st.sets(st.sampled_from("abcd"))), max_size=30))
def test_what_is_told_adds_up(answers: list[tuple[set[str], set[str]]]) -> None:
    view, links = View(), set[str]()
    for found, connected in answers:
        new, gone = view.update(found, connected)
        assert not new & links and gone <= links
        assert not gone & (found | connected)
        links = (links | new) - gone
        assert found <= links == view.known


async def test_following_a_name_through_an_outage() -> None:
    answers: list[Collection[str] | OSError] = [
        OSError("no such name"),
        ["10.0.0.1"],
        OSError("timed out"),
        *([["10.0.0.2"]] * (FORGET_AFTER + 1)),
    ]
    told: list[tuple[str, str]] = []
    states: dict[str, str] = {}
    through = asyncio.Event()

    async def answer(host: str) -> Collection[str]:
        if not answers:
            through.set()
            await asyncio.Event().wait()
        if isinstance(said := answers.pop(0), OSError):
            raise said
        return said

    def add(address: str) -> None:
        told.append(("add", address))
        states[address] = "connecting"

    def forget(address: str) -> None:
        told.append(("forget", address))
        del states[address]

    names = [WorkerDns.parse("workers:7-8")]
    task = asyncio.create_task(
        follow(names, add=add, forget=forget, states=lambda: states, resolve=answer, interval_s=0.0)
    )
    waiting = asyncio.create_task(through.wait())
    await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
    assert waiting.done(), task  # an outage ends it not
    task.cancel()
    assert told == [
        ("add", "10.0.0.1:7"),
        ("add", "10.0.0.1:8"),
        ("add", "10.0.0.2:7"),
        ("add", "10.0.0.2:8"),
        ("forget", "10.0.0.1:7"),
        ("forget", "10.0.0.1:8"),
    ]


async def test_a_worker_that_two_names_have_is_forgotten_with_the_last() -> None:
    here: dict[str, list[str]] = {"one": ["10.0.0.1", "10.0.0.9"], "two": ["10.0.0.1"]}
    told: list[str] = []
    rounds = 0

    async def answer(host: str) -> Collection[str]:
        nonlocal rounds
        rounds += 1
        await asyncio.sleep(0)
        return here[host]

    async def after(num_rounds: int) -> None:
        ends = rounds + num_rounds
        while rounds < ends:
            await asyncio.sleep(0)

    names = [WorkerDns.parse("one:7"), WorkerDns.parse("two:7")]
    task = asyncio.create_task(
        follow(
            names,
            add=lambda address: told.append(f"add {address}"),
            forget=lambda address: told.append(f"forget {address}"),
            states=dict,
            keep=["10.0.0.9:7"],
            resolve=answer,
            interval_s=0.0,
        )
    )
    await after(4)
    here["one"] = []
    await after(4 * FORGET_AFTER)
    assert not any("forget" in each for each in told)
    here["two"] = []
    await after(4 * FORGET_AFTER)
    task.cancel()
    assert [each for each in told if "forget" in each] == ["forget 10.0.0.1:7"]


async def test_the_systems_resolver() -> None:
    assert await resolve("127.0.0.1") == {"127.0.0.1"}
    assert {"127.0.0.1", "::1"} & set(await resolve("localhost"))
