"""Several answers side by side: what comes ahead of an error, and what is left when one ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from protos import errors, router_pb2, types_pb2
from router.admission import Call
from router.choices import Choices
from router.requests import Requests


class FakeRequests:
    """answers: of each choice, its chunks' texts; an exception among them is raised there; None waits for ever."""

    def __init__(self, *answers: list[str | Exception | None]) -> None:
        self.answers = list(answers)
        self.call_ids: list[str] = []
        self.num_open = 0

    @asynccontextmanager
    async def answer(self, request: router_pb2.GenerateRequest, call: Call) -> AsyncIterator[Any]:
        self.call_ids.append(call.request_id)
        self.num_open += 1
        try:
            yield self._chunks(self.answers[len(self.call_ids) - 1])
        finally:
            self.num_open -= 1

    async def _chunks(self, answer: list[str | Exception | None]) -> AsyncIterator[router_pb2.GenerateResponse]:
        for part in answer:
            if isinstance(part, Exception):
                raise part
            if part is None:
                await asyncio.Event().wait()
            yield router_pb2.GenerateResponse(text=part or "")


def choices(requests: FakeRequests) -> Choices:
    asked = [router_pb2.GenerateRequest() for _ in requests.answers]
    return Choices(cast(Requests, requests), asked, Call("r"))


async def taken(it: Choices) -> list[tuple[int, str]]:
    return [(index, chunk.text) for index, chunk in await it.take()]


async def test_all_chunks_of_all_choices_are_taken() -> None:
    requests = FakeRequests(["a", "b", "c"], ["x"], [])
    async with choices(requests) as it:
        found: list[tuple[int, str]] = []
        while chunks := await taken(it):
            found += chunks
        assert await taken(it) == []
    assert [text for index, text in found if index == 0] == ["a", "b", "c"]
    assert [text for index, text in found if index == 1] == ["x"]
    assert requests.call_ids == ["r", "r~1", "r~2"]


async def test_what_came_before_an_error_is_taken_before_it_is_raised() -> None:
    requests = FakeRequests(["a"], [errors.KvLost("gone")], [None])
    async with choices(requests) as it:
        await asyncio.sleep(0)  # both are in the queue now
        assert await taken(it) == [(0, "a")]
        for _ in range(2):
            with pytest.raises(errors.KvLost):
                await it.take()
    assert requests.num_open == 0


async def test_leaving_ends_all() -> None:
    requests = FakeRequests([None], ["a"] * 100, [None])
    async with choices(requests) as it:
        await it.take()
        assert requests.num_open == 3
    assert requests.num_open == 0


async def test_a_take_that_is_given_up_loses_nothing() -> None:
    requests = FakeRequests([None], ["a", "b"])
    async with choices(requests) as it:
        found = await taken(it)
        while len(found) < 2:
            found += await taken(it)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await it.take()
    assert found == [(1, "a"), (1, "b")]


async def test_an_abort_is_an_error_behind_its_text() -> None:
    requests = FakeRequests(["a"])
    aborted = router_pb2.GenerateResponse(text="b", finish_reason=types_pb2.FINISH_REASON_ABORTED)

    async def chunks(answer: object) -> AsyncIterator[router_pb2.GenerateResponse]:
        yield aborted

    requests._chunks = chunks  # type: ignore[method-assign]
    async with choices(requests) as it:
        ((_, chunk),) = await it.take()
        assert (chunk.text, chunk.finish_reason) == ("b", types_pb2.FINISH_REASON_UNSPECIFIED)
        with pytest.raises(errors.RequestCancelled):
            await it.take()
