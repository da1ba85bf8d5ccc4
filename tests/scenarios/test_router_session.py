"""Sessions of many calls with a router, on the wire: begun together, left, failed, slow, too many, at the router's end.

That each call means what a call of Generate or Resume means is what the other scenarios of the router look at: their
client uses sessions.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from protos import errors, router_pb2, router_pb2_grpc, rpc, worker_pb2
from protos.errors import TailpackError
from router import client_session, generation, relay, requests, session
from router.async_session import AsyncSession
from router.auth import TokensFile
from router.client import AsyncTailpack, RetryPolicy, Tailpack, build_request
from tests.scenarios.fake_worker import Script, worker_info
from tests.scenarios.router_harness import ONCE, Answer, Harness, answer, cluster, until
from tests.scenarios.test_router_service import SMALL_WINDOW
from tests.scenarios.test_router_tenants import TOKENS, tokens_file
from tests.scenarios.tiny_tokenizer import EOS

HANG_S = 60.0
HELD = Script([5, 6, 7, EOS], hold_at=1)
"""Goes on behind its first token when the worker's gate opens."""


class Wire:
    """One session as a client of another make might lead it."""

    def __init__(self, stub: router_pb2_grpc.RouterAsyncStub, metadata: Any = ()) -> None:
        self.stream: Any = stub.Session(metadata=metadata)
        self.heard: dict[int, list[router_pb2.SessionAnswer]] = defaultdict(list)
        self.goodbye = False

    async def say(self, **said: Any) -> None:
        await self.stream.write(router_pb2.SessionRequest(**said))

    async def begin(self, *numbers: int, **parameters: Any) -> None:
        """One message with a call for each number, which has the id "call-N"."""
        await self.say(calls=[call(number, **parameters) for number in numbers])

    async def hear(self) -> bool:
        """One message. False: there are no more. Raises grpc.RpcError."""
        async with asyncio.timeout(HANG_S):
            message = await self.stream.read()
        if not isinstance(message, router_pb2.SessionResponse):
            return False
        self.goodbye |= message.goodbye
        for said in message.answers:
            self.heard[said.number].append(said)
        return True

    def chunks(self, number: int) -> list[router_pb2.GenerateResponse]:
        return [said.chunk for said in self.heard[number] if said.HasField("chunk")]

    def error(self, number: int) -> TailpackError | None:
        last = self.heard[number][-1] if self.heard[number] else router_pb2.SessionAnswer()
        return rpc.from_detail(last.error) if last.HasField("error") else None

    def ended(self, number: int) -> bool:
        return bool(self.error(number) or (self.chunks(number) and self.chunks(number)[-1].finish_reason))

    async def until_ended(self, *numbers: int) -> None:
        while not all(self.ended(number) for number in numbers):
            assert await self.hear(), "the session ended"

    async def answer(self, number: int) -> Answer:
        await self.until_ended(number)
        return Answer(self.chunks(number)).check()

    async def fails(self) -> TailpackError:
        """How the whole session ends."""
        with pytest.raises(grpc.RpcError) as failed:
            while await self.hear():
                pass
        return rpc.error_from(failed.value)


def call(number: int, timeout_s: float = 0.0, request_id: str | None = None, **parameters: Any) -> Any:
    return router_pb2.SessionCall(
        number=number,
        generate=build_request(parameters.pop("prompt", "hello"), **parameters),
        request_id=f"call-{number}" if request_id is None else request_id,
        timeout_ms=int(1e3 * timeout_s),
    )


@asynccontextmanager
async def wire(it: Harness, metadata: Any = ()) -> AsyncIterator[Wire]:
    others = set(it.requests.sessions)
    async with rpc.channel(it.address) as channel:
        one = Wire(router_pb2_grpc.RouterStub(channel), metadata)
        first = await one.stream.read()
        assert first.welcome.max_calls == session.MAX_CALLS
        assert first.welcome.window_bytes == session.WINDOW_BYTES
        yield one
        one.stream.cancel()
    await until(lambda: it.requests.sessions <= others)
    if not others:
        await it.settled()


# --- many at once ---


async def test_calls_that_begin_together_are_submitted_together_and_answered_whole(folder: Path) -> None:
    async with cluster(folder, Script([5, 6, EOS])) as it, wire(it) as one:
        (worker,) = it.workers
        before = worker.num_messages
        numbers = range(1, 101)
        await one.begin(*numbers)
        await one.until_ended(*numbers)
        assert {tuple((await one.answer(number)).token_ids) for number in numbers} == {(5, 6, EOS)}
        assert {one.chunks(number)[0].request_id for number in numbers} == {f"call-{number}" for number in numbers}
        assert worker.num_messages - before == 1 and len(worker.submits) == 100


async def test_the_end_of_what_is_asked_ends_the_session_behind_its_last_answer(folder: Path) -> None:
    async with cluster(folder, HELD) as it, wire(it) as one:
        await one.begin(1, 2)
        await one.stream.done_writing()
        await until(lambda: it.requests.num_in_flight == 2)
        it.workers[0].gate.set()
        while await one.hear():
            pass
        assert one.ended(1) and one.ended(2)
        assert await one.stream.code() is grpc.StatusCode.OK


async def test_a_call_tells_an_id_that_the_router_made(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS])) as it, wire(it) as one:
        await one.say(calls=[call(7, request_id=""), call(8, resumable=True), call(9)])
        await one.until_ended(7, 8, 9)
        told = {number: one.heard[number][0].request_id for number in (7, 8, 9)}
        assert told[7].startswith("req-") and told[7] == one.chunks(7)[0].request_id
        assert (told[8], told[9]) == ("call-8", "")


# --- one of them ---


async def test_what_one_left_ends_is_its_own_call_and_frees_its_id(folder: Path) -> None:
    async with cluster(folder, HELD) as it, wire(it) as one:
        with capture_logs() as log:
            await one.begin(1, 2)
            while not (one.chunks(1) and one.chunks(2)):
                await one.hear()
            await one.say(left=[1], calls=[call(3, request_id="call-1")])
            await until(lambda: it.workers[0].aborts == ["call-1"])
            it.workers[0].gate.set()
            await one.until_ended(2, 3)
            await it.settled()
        assert not one.ended(1)
        assert not one.error(2) and not one.error(3)
        lines = [(line["request_id"], line["reason"], line["door"]) for line in log if line["event"] == "request"]
        assert lines[0] == ("call-1", "CLIENT_GONE", "session")
        assert sorted(lines[1:]) == [("call-1", "EOS", "session"), ("call-2", "EOS", "session")]
        await one.say(left=[1, 2, 99])  # it crossed their ends
        await one.begin(4)
        await one.answer(4)


async def test_a_call_that_is_left_before_it_runs_leaves_nothing(folder: Path) -> None:
    async with cluster(folder, HELD) as it, wire(it) as one:
        it.workers[0].gate.set()
        for number in range(1, 50):
            await one.begin(number)
            await one.say(left=[number])
        await one.begin(50)
        await one.answer(50)
        (served,) = it.requests.sessions
        await until(lambda: not served._calls)


async def test_errors_are_of_their_call_and_of_the_tree(folder: Path) -> None:
    def script(submit: worker_pb2.Submit) -> Script:
        failing = submit.request_id == "call-5"
        return Script([5, 6], error=errors.InternalError("boom", reason="BROKEN")) if failing else HELD

    async with cluster(folder, script) as it, wire(it) as one:
        await one.begin(1)
        nothing = router_pb2.SessionCall(number=2)
        gone = router_pb2.SessionCall(number=6, resume=router_pb2.ResumeRequest(request_id="never", token_offset=1))
        bad = call(7)
        bad.generate.sampling.temperature = -1
        await one.say(
            calls=[
                nothing,
                call(3, model="none such"),
                call(4, request_id="no/such/id"),
                call(5),
                gone,
                bad,
                call(8, request_id="call-1"),
            ]
        )
        await one.until_ended(2, 3, 4, 5, 6, 7, 8)
        got = {number: one.error(number) for number in range(2, 9)}
        assert {number: error.reason for number, error in got.items() if error} == {
            2: "EMPTY_CALL",
            3: "UNKNOWN_MODEL",
            4: "INVALID_REQUEST",
            5: "BROKEN",
            6: "UNKNOWN_REQUEST",
            7: "BAD_TEMPERATURE",
            8: "DUPLICATE_REQUEST",
        }
        assert isinstance(got[3], errors.NotFound) and got[3].allowed == "tiny"
        assert [token for chunk in one.chunks(5) for token in chunk.token_ids] == [5, 6]  # ahead of its error
        it.workers[0].gate.set()
        await one.answer(1)


async def test_a_bug_in_one_call_is_told_as_such_and_the_others_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(folder, Script([5, EOS])) as it, wire(it) as one:
        answered = it.requests.answer

        def broken(request: Any, its: Any) -> Any:
            if its.request_id == "call-2":
                raise KeyError("a bug")
            return answered(request, its)

        monkeypatch.setattr(it.requests, "answer", broken)
        await one.begin(1, 2, 3)
        await one.until_ended(1, 2, 3)
        error = one.error(2)
        assert isinstance(error, errors.InternalError) and error.hint == "KeyError; see its log"
        assert not one.error(1) and not one.error(3)


async def test_an_answer_without_its_last_chunk_is_told_as_such(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = generation.Answer.__anext__

    async def stops(its: generation.Answer) -> router_pb2.GenerateResponse:
        chunk = await goes_on(its)
        if chunk.finish_reason and its.call.request_id == "call-1":
            raise StopAsyncIteration
        return chunk

    monkeypatch.setattr(generation.Answer, "__anext__", stops)
    async with cluster(folder, HELD) as it, wire(it) as one:
        await one.begin(1, 2)
        while not (one.chunks(1) and one.chunks(2)):
            await one.hear()
        it.workers[0].gate.set()
        await one.until_ended(1, 2)
        error = one.error(1)
        assert isinstance(error, errors.InternalError) and error.reason == "TOKEN_GAP"
        await one.answer(2)


async def test_a_deadline_beyond_any_is_the_longest_there_is(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS])) as it, wire(it) as one:
        longest = call(1)
        longest.timeout_ms = (1 << 64) - 1
        await one.say(calls=[longest])
        await one.answer(1)


async def test_a_deadline_ends_its_call_by_name(folder: Path) -> None:
    async with cluster(folder, HELD) as it, wire(it) as one:
        with capture_logs() as log:
            await one.begin(1)
            await one.begin(2, timeout_s=0.5)
            await one.until_ended(2)
        assert isinstance(one.error(2), errors.DeadlineExceeded)
        assert [line["reason"] for line in log if line["event"] == "request"] == ["DEADLINE_EXCEEDED"]
        await until(lambda: it.workers[0].aborts == ["call-2"])
        it.workers[0].gate.set()
        await one.answer(1)


# --- who does not read ---


LONG = Script([5, 6, 7, 8], endless=True, per_step=200)


def long_or_short(submit: worker_pb2.Submit) -> Script:
    return LONG if submit.stop.max_tokens > 10 else Script([5, EOS])


async def test_what_is_not_taken_holds_up_no_other_call_and_comes_later(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WINDOW_BYTES", 4096)
    infos = [worker_info(max_sequence_tokens=1 << 20)]
    async with cluster(folder, long_or_short, infos=infos) as it, wire(it) as one:
        await one.begin(1, max_tokens=100_000)
        (link,) = it.requests.registry.links.values()
        await until(lambda: it.workers[0].submits)
        (entry,) = link._entries.values()
        await until(lambda: entry.relay is not None and entry.relay.ended, HANG_S)  # the router has all of it
        for number in range(2, 20):
            await one.begin(number, max_tokens=2)
            await one.answer(number)
        sent = sum(chunk.ByteSize() for chunk in one.chunks(1)[:-1])
        assert sent < 4096 and not one.ended(1)
        while not one.ended(1):  # now it is read
            await one.say(taken=[{"number": 1, "num_bytes": sum(chunk.ByteSize() for chunk in one.chunks(1))}])
            await one.hear()
        got = await one.answer(1)
        assert len(got.token_ids) == 100_000
        assert len(got.chunks) < 100, "the router kept every step's chunk"


@pytest.mark.parametrize("by", ["size", "time"])
async def test_a_call_that_is_never_taken_is_ended_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    monkeypatch.setattr(session, "WINDOW_BYTES", 4096)
    if by == "size":
        monkeypatch.setattr(relay, "MAX_PENDING_BYTES", 100_000)
    else:
        monkeypatch.setattr(session, "STALLED_S", 0.2)
    infos = [worker_info(max_sequence_tokens=1 << 24)]
    async with cluster(folder, long_or_short, infos=infos) as it, wire(it) as one:
        await one.begin(1, max_tokens=50_000 if by == "time" else 4_000_000)
        if by == "size":
            await until(lambda: it.workers[0].aborts == ["call-1"], HANG_S)
            while not one.ended(1):
                await one.hear()
                await one.say(taken=[{"number": 1, "num_bytes": sum(chunk.ByteSize() for chunk in one.chunks(1))}])
        else:
            await one.until_ended(1)
        error = one.error(1)
        assert isinstance(error, errors.CapacityError) and error.reason == "SLOW_READER"
        await one.begin(2, max_tokens=2)
        await one.answer(2)


async def test_the_client_says_what_it_took_and_its_slow_reader_holds_up_nobody(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "WINDOW_BYTES", 2048)
    infos = [worker_info(max_sequence_tokens=1 << 20)]
    async with cluster(folder, long_or_short, infos=infos) as it:
        slow = it.client.generate("x", max_tokens=50_000)
        got = [await anext(slow)]
        for _ in range(20):
            await answer(it.client, "x", max_tokens=2)
        assert sum(chunk.ByteSize() for chunk in got) < 10_000
        got += [chunk async for chunk in slow]
        assert len(Answer(got).check().token_ids) == 50_000
        assert len(it.requests.sessions) == 1

        def read() -> list[Any]:
            with Tailpack(it.address) as blocking:
                return list(blocking.generate("x", max_tokens=50_000))

        assert len(Answer(await asyncio.to_thread(read)).check().token_ids) == 50_000
        await it.settled()


async def test_calls_that_are_left_unread_do_not_gather_in_the_router(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FULL_MESSAGE_BYTES", 512)
    async with cluster(folder, Script([5] * 200 + [EOS], hold_at=200, per_step=200)) as it:
        async with grpc.aio.insecure_channel(it.address, options=SMALL_WINDOW) as channel:
            one = Wire(router_pb2_grpc.RouterStub(channel))
            for number in range(1, 401):
                await one.say(left=[number - 1], calls=[call(number, max_tokens=300)])
                await asyncio.sleep(0.01)
            (served,) = it.requests.sessions
            assert len(it.workers[0].submits) < 400
            assert len(served._outbox) <= session.MAX_UNWRITTEN + 3
            while not one.chunks(400):
                assert await one.hear()
            one.stream.cancel()
        await it.settled()


# --- limits, and what no client should say ---


async def test_calls_above_the_limit_are_refused_and_those_below_go_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_CALLS", 3)
    async with cluster(folder, HELD) as it, wire(it) as one:
        await one.begin(*range(1, 101))
        await one.until_ended(*range(4, 101))
        refused = {error.reason for number in range(4, 101) if (error := one.error(number))}
        assert refused == {"TOO_MANY_CALLS"}
        it.workers[0].gate.set()
        for number in (1, 2, 3):
            await one.answer(number)
        await one.begin(101)
        await one.answer(101)


@pytest.mark.parametrize(
    "said",
    [
        {"calls": [call(1)]},
        {"calls": [call(3), call(3)]},
        {"taken": [{"number": 2, "num_bytes": 1 << 30}]},
    ],
    ids=["an old number", "a number twice", "more than was sent"],
)
async def test_what_breaks_the_protocol_ends_the_session_by_name(folder: Path, said: dict[str, Any]) -> None:
    async with cluster(folder, HELD) as it, wire(it) as one:
        await one.begin(1, 2)
        await until(lambda: it.requests.num_in_flight == 2)
        await one.say(**said)
        error = await one.fails()
        assert isinstance(error, errors.InvalidRequest) and error.reason == "BROKEN_SESSION"
        await it.settled()


async def test_losing_the_stream_ends_its_calls_but_not_resumable_ones(folder: Path) -> None:
    async with cluster(folder, HELD) as it:
        async with rpc.channel(it.address) as channel:
            one = Wire(router_pb2_grpc.RouterStub(channel))
            await one.begin(1)
            await one.begin(2, resumable=True)
            while not (one.chunks(1) and one.chunks(2)):
                await one.hear()
        await until(lambda: it.workers[0].aborts == ["call-1"])
        await until(lambda: it.requests.num_in_flight == 0 and not it.requests.sessions)
        assert list(it.workers[0].active) == ["call-2"]
        it.workers[0].gate.set()
        async with wire(it) as again:
            resume = router_pb2.ResumeRequest(
                request_id="call-2", token_offset=1, text_offset=len(one.chunks(2)[0].text)
            )
            await again.say(calls=[router_pb2.SessionCall(number=1, resume=resume)])
            await again.until_ended(1)
            assert [token for chunk in again.chunks(1) for token in chunk.token_ids] == [6, 7, EOS]
            assert again.heard[1][0].request_id == "call-2"


# --- the router's end ---


async def test_a_router_that_leaves_says_goodbye_ends_what_runs_and_takes_no_more(folder: Path) -> None:
    async with cluster(folder, HELD) as it, wire(it) as one:
        await one.begin(1)
        while not one.chunks(1):
            await one.hear()
        draining = asyncio.create_task(it.requests.drain(HANG_S))
        while not one.goodbye:
            await one.hear()
        await one.begin(2)
        await one.until_ended(2)
        refused = one.error(2)
        assert isinstance(refused, errors.Unavailable) and refused.reason == "DRAINING" and refused.retry_after_ms
        async with rpc.channel(it.address) as channel:
            assert (await Wire(router_pb2_grpc.RouterStub(channel)).fails()).reason == "DRAINING"
        assert not draining.done()
        it.workers[0].gate.set()
        await one.answer(1)
        await one.stream.done_writing()
        assert await draining
        assert not it.requests.sessions
        assert not await one.hear()  # nothing is left to be said
        assert await one.stream.code() is grpc.StatusCode.OK


async def test_a_router_waits_for_what_it_has_not_written_yet(folder: Path) -> None:
    infos = [worker_info(max_sequence_tokens=1 << 20)]
    async with cluster(folder, long_or_short, infos=infos) as it:
        async with grpc.aio.insecure_channel(it.address, options=SMALL_WINDOW) as channel:
            one = Wire(router_pb2_grpc.RouterStub(channel))
            numbers = range(1, 9)
            await one.begin(*numbers, max_tokens=20_000)  # more than the connection takes unread
            (link,) = it.requests.registry.links.values()
            await until(lambda: len(it.workers[0].submits) == 8 and not link.num_known, HANG_S)
            await one.begin(9, max_tokens=2)
            await until(lambda: len(it.workers[0].submits) == 9 and not link.num_known, HANG_S)
            draining = asyncio.create_task(it.requests.drain(HANG_S))
            await asyncio.sleep(0.05)
            assert it.requests.num_in_flight == 9 and not draining.done()
            while await one.hear():
                taken = [
                    {"number": number, "num_bytes": sum(chunk.ByteSize() for chunk in one.chunks(number))}
                    for number in numbers
                    if not one.ended(number)
                ]
                await one.say(taken=taken)
                if all(one.ended(number) for number in (*numbers, 9)):
                    await one.stream.done_writing()
            assert await draining
            for number in (*numbers, 9):
                await one.answer(number)
        await it.settled()


@pytest.mark.parametrize("flavour", [AsyncTailpack, Tailpack])
async def test_a_client_ends_its_session_when_its_router_leaves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flavour: type[AsyncTailpack] | type[Tailpack]
) -> None:
    monkeypatch.setattr(requests, "GOODBYE_S", HANG_S)
    async with cluster(folder, Script([5, EOS])) as it:
        if flavour is Tailpack:
            client = Tailpack(it.address)
            await asyncio.to_thread(client.complete, "x")
        else:
            await answer(it.client, "x")
        (served,) = it.requests.sessions
        assert await it.requests.drain(HANG_S)
        assert not it.requests.sessions and served._is_read
        if flavour is Tailpack:
            await asyncio.to_thread(client.close)


async def test_a_router_does_not_wait_long_for_who_hears_no_goodbye(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "GOODBYE_S", 0.05)
    async with cluster(folder, HELD) as it, wire(it):
        assert await it.requests.drain(HANG_S)
        assert it.requests.sessions


async def test_the_client_goes_on_at_another_router_when_one_says_goodbye(folder: Path) -> None:
    async with (
        cluster(folder, Script([5, EOS])) as it,
        cluster(folder, HELD) as leaving,
        AsyncTailpack(f"{leaving.address},{it.address}") as client,
    ):
        running = client.generate("x")
        first = await anext(running)
        draining = asyncio.create_task(leaving.requests.drain(HANG_S))
        await until(lambda: leaving.requests.admission.draining)
        for _ in range(3):
            assert (await answer(client, "x")).token_ids == [5, EOS]
        assert leaving.requests.counters.requests == 1, "a call began behind the goodbye"
        leaving.workers[0].gate.set()
        assert Answer([first, *[chunk async for chunk in running]]).check().token_ids == [5, 6, 7, EOS]
        assert await draining


async def test_a_client_says_no_more_at_once_than_a_message_may_hold() -> None:
    calls, heard = client_session.Calls(), list[Any]()
    request = build_request("x" * 62_000)
    numbers = [
        calls.begin(request, heard.append, request_id=f"{index}", traceparent="", timeout_s=None)
        for index in range(1100)
    ]
    sent = [calls.outgoing()]
    for number in (numbers[0], numbers[500], numbers[-1]):  # one that was sent, one between, one of the last message
        calls.leave(number)
    while (message := calls.outgoing()) is not None:
        sent.append(message)
    messages = [message for message in sent if message is not None]
    assert max(message.ByteSize() for message in messages) < client_session.FULL_MESSAGE_BYTES + (64 << 10)
    said = [call.number for message in messages for call in message.calls]
    assert said == [number for number in numbers if number not in (numbers[500], numbers[-1])]
    assert [number for message in messages for number in message.left] == [numbers[0]]
    assert not heard


async def test_the_end_of_a_blocking_clients_reader_ends_its_calls(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, message: Any) -> None:
        if message.answers:
            raise KeyError("a bug")

    monkeypatch.setattr(client_session.Calls, "take", broken)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    async with cluster(folder, Script([5, EOS])) as it:
        client = Tailpack(it.address, retry=RetryPolicy(max_retries=0))
        with pytest.raises(errors.Unavailable):
            await asyncio.wait_for(asyncio.to_thread(client.complete, "x"), HANG_S)
        await asyncio.to_thread(client.close)


# --- sessions that nobody uses, and too many of them ---


@pytest.mark.parametrize("flavour", [AsyncTailpack, Tailpack])
async def test_a_session_without_calls_is_ended_and_the_next_call_opens_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flavour: type[AsyncTailpack] | type[Tailpack]
) -> None:
    monkeypatch.setattr(session, "UNHEARD_S", HANG_S)  # its client ends it
    async with cluster(folder, Script([5, EOS]), session_idle_s=0.05) as it:
        client = it.client if flavour is AsyncTailpack else Tailpack(it.address, retry=ONCE)
        served = set()
        with capture_logs() as log:
            for _ in range(3):
                if isinstance(client, Tailpack):
                    await asyncio.to_thread(client.complete, "x")
                else:
                    await answer(client, "x")
                served |= it.requests.sessions
                await until(lambda: not it.requests.sessions)
            await it.settled()
        assert len(served) == 3 and all(each._is_read for each in served)
        assert {line["door"] for line in log if line["event"] == "request"} == {"session"}
        if isinstance(client, Tailpack):
            await asyncio.to_thread(client.close)


async def test_a_session_is_not_without_calls_while_one_runs_or_one_crosses_the_goodbye(folder: Path) -> None:
    async with cluster(folder, HELD, session_idle_s=0.1) as it, wire(it) as one:
        await one.begin(1)
        while not one.chunks(1):
            await one.hear()
        await asyncio.sleep(0.3)
        (served,) = it.requests.sessions
        assert not served._said_goodbye
        it.workers[0].gate.set()
        await one.answer(1)
        while not one.goodbye:
            assert await one.hear()
        await one.begin(2)
        await one.answer(2)
        await one.stream.done_writing()
        assert not await one.hear() and await one.stream.code() is grpc.StatusCode.OK


async def test_who_hears_no_goodbye_finds_the_stream_ended_as_usual(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "UNHEARD_S", 0.05)
    async with cluster(folder, HELD, session_idle_s=0.05) as it, wire(it) as one:
        while await one.hear():
            pass
        assert one.goodbye and await one.stream.code() is grpc.StatusCode.OK
        await until(lambda: not it.requests.sessions)


async def test_who_reads_nothing_is_ended_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "UNHEARD_S", 0.05)

    async def silent() -> AsyncIterator[router_pb2.SessionRequest]:
        await asyncio.Event().wait()
        yield router_pb2.SessionRequest()

    async with cluster(folder, HELD, session_idle_s=0.05) as it:

        async def handler() -> None:
            async with aclosing(session.Session(it.requests, str).serve(silent())) as messages:
                async for _ in messages:
                    await asyncio.Event().wait()  # its window is full

        serving = asyncio.create_task(handler())
        await asyncio.wait({serving}, timeout=HANG_S)
        assert serving.cancelled() and not it.requests.sessions


@pytest.mark.parametrize("flavour", [AsyncTailpack, Tailpack])
async def test_a_goodbye_between_a_clients_look_and_its_call_is_no_failure(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flavour: type[AsyncTailpack] | type[Tailpack]
) -> None:
    def looks_just_before(self: client_session.Calls) -> bool:
        self.take(router_pb2.SessionResponse(goodbye=True))
        return True

    monkeypatch.setattr(client_session.Calls, "has_room", property(looks_just_before))
    async with cluster(folder, Script([5, EOS])) as it:
        with capture_logs() as log:
            if flavour is Tailpack:
                with Tailpack(it.address, retry=ONCE) as client:
                    await asyncio.to_thread(client.complete, "x")
            else:
                await answer(it.client, "x")
            await it.settled()
        assert [line["door"] for line in log if line["event"] == "request"] == ["grpc"]


@pytest.mark.parametrize("flavour", [AsyncTailpack, Tailpack])
async def test_a_client_that_is_closed_between_a_goodbye_and_a_call_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flavour: type[AsyncTailpack] | type[Tailpack]
) -> None:
    async with cluster(folder, Script([5, EOS])) as it:
        client: Any = it.client if flavour is AsyncTailpack else Tailpack(it.address, retry=ONCE)

        def looks_just_before(self: client_session.Calls) -> bool:
            self.take(router_pb2.SessionResponse(goodbye=True))
            client._closed = True
            return True

        monkeypatch.setattr(client_session.Calls, "has_room", property(looks_just_before))
        with pytest.raises(errors.RequestCancelled, match="the client was closed"):
            if flavour is Tailpack:
                await asyncio.to_thread(client.complete, "x")
            else:
                await answer(client, "x")
        client._closed = False
        if flavour is Tailpack:
            await asyncio.to_thread(client.close)


async def test_sessions_above_the_limit_are_refused_and_their_callers_have_streams_of_their_own(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS]), max_sessions=1) as it, wire(it) as one:
        async with rpc.channel(it.address) as channel:
            error = await Wire(router_pb2_grpc.RouterStub(channel)).fails()
            assert isinstance(error, errors.CapacityError) and error.reason == "TOO_MANY_SESSIONS"
            assert error.allowed == "1" and error.retry_after_ms
        with capture_logs() as log:
            await answer(it.client, "x")
            with Tailpack(it.address, retry=ONCE) as client:
                await asyncio.to_thread(client.complete, "x")
            await one.begin(1)
            await one.answer(1)
            await it.settled()
        assert [line["door"] for line in log if line["event"] == "request"] == ["grpc", "grpc", "session"]


# --- who calls ---


async def test_each_call_is_the_tenants_that_the_token_proves_then(folder: Path, tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path)
    async with cluster(folder, HELD, tokens=tokens) as it:
        async with rpc.channel(it.address) as channel:
            nobody = Wire(router_pb2_grpc.RouterStub(channel))
            assert (await nobody.fails()).reason == "TOKEN_MISSING"
        async with wire(it, rpc.metadata(token=TOKENS["a"])) as one:
            await one.begin(1)
            while not one.chunks(1):
                await one.hear()
            assert it.workers[0].submits[0].tenant == "a"
            tokens._file = TokensFile((), tokens._file.limits)  # all are withdrawn
            await one.begin(2)
            await one.until_ended(2)
            error = one.error(2)
            assert isinstance(error, errors.Unauthenticated) and error.reason == "TOKEN_UNKNOWN"
            it.workers[0].gate.set()
            await one.answer(1)  # what ran goes on


async def test_tenants_in_sessions_do_not_see_each_others_requests(folder: Path, tmp_path: Path) -> None:
    async with (
        cluster(folder, HELD, tokens=tokens_file(tmp_path)) as it,
        wire(it, rpc.metadata(token=TOKENS["a"])) as a,
        wire(it, rpc.metadata(token=TOKENS["b"])) as b,
    ):
        await a.begin(1, resumable=True)
        await b.begin(1)  # the same id, another tenant's
        for each in (a, b):
            while not each.chunks(1):
                await each.hear()
        resume = router_pb2.ResumeRequest(request_id="call-1")
        await b.say(calls=[router_pb2.SessionCall(number=2, resume=resume)])
        await b.until_ended(2)
        error = b.error(2)
        assert error is not None and error.reason == "UNKNOWN_REQUEST"
        it.workers[0].gate.set()
        assert (await a.answer(1)).token_ids == (await b.answer(1)).token_ids


# --- when the client has a stream of its own for a call ---


async def test_large_requests_and_those_without_room_have_streams_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MAX_CALLS", 1)
    infos = [worker_info(max_sequence_tokens=1 << 20)]
    async with cluster(folder, HELD, infos=infos) as it:
        with capture_logs() as log:
            first = it.client.generate("x", request_id="first")
            await anext(first)
            second = it.client.generate("x", request_id="second")
            await anext(second)
            await first.aclose()
            await second.aclose()
            it.workers[0].gate.set()
            await answer(it.client, [5] * client_session.MAX_REQUEST_BYTES, request_id="large")
            await answer(it.client, "x", request_id="small")
            async with AsyncTailpack(it.address, session=False) as alone:
                await answer(alone, "x", request_id="alone")
            await it.settled()
        doors = {line["request_id"]: line["door"] for line in log if line["event"] == "request"}
        assert doors == {"first": "session", "second": "grpc", "large": "grpc", "small": "session", "alone": "grpc"}


async def test_a_client_of_a_router_that_is_replaced_opens_a_new_session(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS])) as it:
        await answer(it.client, "x")
        (served,) = it.requests.sessions
        served._failure = errors.Unavailable("cut by the test")
        served._wake.set()
        (opening,) = it.client._sessions.values()
        opened = opening.result()
        assert isinstance(opened, AsyncSession)
        await until(lambda: opened.is_over and not it.requests.sessions)
        await answer(it.client, "x")
        assert len(it.requests.sessions) == 1
