"""The worker's gRPC face over a scripted engine: what routers see, step by step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from protos import rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.errors import CapacityError, InternalError, InvalidRequest
from worker import sessions as sessions_module
from worker.resumable import Answers
from worker.sequence import Load, Output, Request, StepResult
from worker.service import SERVICE, WorkerService
from worker.sessions import RouterSession, Sessions

TIMEOUT_S = 60.0


@dataclass
class ScriptedEngine:
    """Takes the place of Engine: remembers what it is told; tests say what comes out."""

    emit: Callable[[StepResult], None] = lambda result: None
    submitted: list[Request] = field(default_factory=list)
    aborted: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    owners_aborted: list[str] = field(default_factory=list)
    let_go_of: list[str] = field(default_factory=list)

    def submit(self, request: Request) -> None:
        self.submitted.append(request)

    def abort(self, request_id: str, *, tenant: str | None = None, owner: str | None = None) -> bool:
        self.aborted.append((request_id, tenant, owner))
        return any(r.request_id == request_id and tenant in (None, r.tenant) for r in self.submitted)

    def abort_owner(self, owner: str) -> None:
        self.owners_aborted.append(owner)

    def let_go(self, owner: str) -> None:
        self.let_go_of.append(owner)

    def load(self) -> Load:
        return Load(num_running=len(self.submitted), pages_total=7)

    def step(self, *outputs: Output) -> None:
        """One step's result, from a thread as the engine's."""
        thread = threading.Thread(target=self.emit, args=(StepResult(outputs, self.load()),))
        thread.start()
        thread.join()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                await asyncio.sleep(0.005)


@dataclass
class Scene:
    engine: ScriptedEngine
    service: WorkerService
    stub: worker_pb2_grpc.WorkerAsyncStub
    calls: list[Any] = field(default_factory=list)

    async def router(self, name: str = "router-a") -> Any:
        """A session that was welcomed."""
        call = self.stub.Session()
        self.calls.append(call)
        await call.write(hello(name))
        first = await read(call)
        assert first.welcome.info.worker_id == "w"
        return call


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    sessions = Sessions(asyncio.get_running_loop())
    engine = ScriptedEngine(sessions.emit)
    info = types_pb2.WorkerInfo(worker_id="w", incarnation="i")
    service = WorkerService(engine, sessions, info, worker_pb2.WorkerMemory)  # type: ignore[arg-type]
    server = rpc.RpcServer("worker")
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service, SERVICE)
    address = await server.start("127.0.0.1:0")
    async with rpc.channel(address) as channel:
        made = Scene(engine, service, worker_pb2_grpc.WorkerStub(channel))
        try:
            yield made
        finally:
            for call in made.calls:
                call.cancel()
    await server.stop(0.5)


def hello(name: str = "router-a") -> worker_pb2.RouterMessage:
    return worker_pb2.RouterMessage(hello=worker_pb2.Hello(router_id=name, incarnation="1"))


def submit(request_id: str) -> worker_pb2.RouterMessage:
    return worker_pb2.RouterMessage(
        submit=worker_pb2.Submit(
            request_id=request_id, prompt_token_ids=[1, 2], stop=types_pb2.StopConditions(max_tokens=9)
        )
    )


def tokens(request: Request, offset: int, *token_ids: int, finish: int = 0) -> Output:
    return Output(request.request_id, request.owner, offset, token_ids, finish_reason=finish)  # type: ignore[arg-type]


async def read(call: Any) -> worker_pb2.WorkerMessage:
    message = await asyncio.wait_for(call.read(), TIMEOUT_S)
    assert isinstance(message, worker_pb2.WorkerMessage), f"the stream ended: {message}"
    return message


async def read_step(call: Any) -> worker_pb2.StepOutput:
    """The next message with sequences; reports of the load alone are passed over."""
    while not (message := await read(call)).step.sequences:
        assert message.WhichOneof("message") == "step"
    return message.step


async def test_one_message_a_step_carries_all_sequences_of_the_session_and_no_others() -> None:
    async with scene() as s:
        a, b = await s.router("router-a"), await s.router("router-b")
        for call, ids in ((a, ("a1", "a2")), (b, ("b1",))):
            for request_id in ids:
                await call.write(submit(request_id))
        await s.engine.until(lambda: len(s.engine.submitted) == 3)
        by_id = {request.request_id: request for request in s.engine.submitted}
        assert by_id["a1"].owner == by_id["a2"].owner != by_id["b1"].owner
        assert by_id["a1"].prompt == (1, 2) and by_id["a1"].stop.max_tokens == 9

        s.engine.step(tokens(by_id["a1"], 0, 11), tokens(by_id["b1"], 0, 31), tokens(by_id["a2"], 0, 21, 22))
        step = await read_step(a)
        assert [(o.request_id, list(o.token_ids)) for o in step.sequences] == [("a1", [11]), ("a2", [21, 22])]
        assert step.load.num_running == 3 and step.load.pages_total == 7
        assert [o.request_id for o in (await read_step(b)).sequences] == ["b1"]


async def test_an_idle_worker_reports_its_load_again_and_again() -> None:
    assert sessions_module.LOAD_INTERVAL_S < 1.0  # the protocol promises once a second; the rest is for the way there
    async with scene() as s:
        call = await s.router()
        for _ in range(3):
            message = await read(call)
            assert message.WhichOneof("message") == "step" and not message.step.sequences
            assert message.step.load.pages_total == 7


async def test_the_end_of_a_session_aborts_what_it_submitted_however_it_ends() -> None:
    async with scene() as s:
        polite, rude = await s.router("polite"), await s.router("rude")
        await polite.write(submit("p"))
        await rude.write(submit("r"))
        await s.engine.until(lambda: len(s.engine.submitted) == 2)
        owners = {request.request_id: request.owner for request in s.engine.submitted}

        await polite.done_writing()
        await s.engine.until(lambda: owners["p"] in s.engine.owners_aborted)
        assert owners["r"] not in s.engine.owners_aborted
        rude.cancel()
        await s.engine.until(lambda: owners["r"] in s.engine.owners_aborted)
        # The router is back: a late end of its first session must not hurt the second.
        again = await s.router("polite")
        await again.write(submit("p"))
        await s.engine.until(lambda: len(s.engine.submitted) == 3)
        assert s.engine.submitted[-1].owner not in owners.values()


@pytest.mark.parametrize("first", [submit("x"), worker_pb2.RouterMessage(), hello("")])
async def test_a_session_without_hello_is_refused_by_name(first: worker_pb2.RouterMessage) -> None:
    async with scene() as s:
        call = s.stub.Session()
        await call.write(first)
        with pytest.raises(grpc.RpcError) as failure:
            await asyncio.wait_for(call.read(), TIMEOUT_S)
        error = rpc.error_from(failure.value)
        assert isinstance(error, InvalidRequest) and error.reason == "HELLO_FIRST"
        assert s.engine.submitted == []


async def test_a_second_hello_ends_the_session_by_name() -> None:
    async with scene() as s:
        call = await s.router()
        await call.write(hello())
        with pytest.raises(grpc.RpcError) as failure:
            while True:
                await read(call)
        assert rpc.error_from(failure.value).reason == "HELLO_TWICE"


async def test_aborts_reach_the_engine_and_foreign_ones_are_not_found() -> None:
    async with scene() as s:
        call = await s.router()
        await call.write(submit("x"))
        await call.write(worker_pb2.RouterMessage(abort=worker_pb2.Abort(request_id="x")))
        await s.engine.until(lambda: len(s.engine.aborted) == 1)
        assert s.engine.aborted == [("x", None, s.engine.submitted[0].owner)]
        assert (await s.stub.Abort(worker_pb2.AbortRequest(request_id="x"))).found
        assert not (await s.stub.Abort(worker_pb2.AbortRequest(request_id="x", tenant="other"))).found
        assert not (await s.stub.Abort(worker_pb2.AbortRequest(request_id="y"))).found


async def test_a_batch_counts_as_its_messages_one_by_one() -> None:
    async with scene() as it:
        call = await it.router()
        abort = worker_pb2.RouterMessage(abort=worker_pb2.Abort(request_id="a"))
        await call.write(worker_pb2.RouterMessage(batch=worker_pb2.Batch(messages=[submit("a"), abort, submit("b")])))
        await it.engine.until(lambda: len(it.engine.submitted) == 2)
        assert [request.request_id for request in it.engine.submitted] == ["a", "b"]
        assert [aborted[0] for aborted in it.engine.aborted] == ["a"]


@pytest.mark.parametrize("inner", [hello(), worker_pb2.RouterMessage(batch=worker_pb2.Batch(messages=[submit("a")]))])
async def test_no_hello_and_no_batch_comes_in_a_batch(inner: worker_pb2.RouterMessage) -> None:
    async with scene() as it:
        call = await it.router()
        await call.write(worker_pb2.RouterMessage(batch=worker_pb2.Batch(messages=[inner])))
        with pytest.raises(grpc.RpcError) as failed:
            while True:
                await read(call)
        assert isinstance(rpc.error_from(failed.value), InvalidRequest)
        assert not it.engine.submitted


async def test_a_large_prompt_is_read_off_the_loop_and_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    large, may_read = [7] * 300_000, threading.Event()
    readers: dict[str, int] = {}
    right = Request.from_proto

    def watched(message: worker_pb2.Submit, owner: str) -> Request:
        readers[message.request_id] = threading.get_ident()
        if message.request_id == "large":
            assert may_read.wait(TIMEOUT_S)
        return right(message, owner)

    monkeypatch.setattr(Request, "from_proto", staticmethod(watched))
    async with scene() as s:
        call, other = await s.router(), await s.router("router-b")
        big = submit("large")
        big.submit.prompt_token_ids[:] = large
        await call.write(big)
        await call.write(worker_pb2.RouterMessage(abort=worker_pb2.Abort(request_id="large")))
        await call.write(submit("next"))
        await other.write(submit("other"))  # it need not wait: the loop is free
        await s.engine.until(lambda: [r.request_id for r in s.engine.submitted] == ["other"])
        assert not s.engine.aborted
        may_read.set()
        await s.engine.until(lambda: len(s.engine.submitted) == 3)
        assert [r.request_id for r in s.engine.submitted] == ["other", "large", "next"]
        assert [request_id for request_id, *_ in s.engine.aborted] == ["large"]
        assert s.engine.submitted[1].prompt == tuple(large)
        assert readers["large"] != threading.get_ident() == readers["other"] == readers["next"]


async def test_a_session_that_ends_while_its_prompt_is_read_submits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, may_read = threading.Event(), threading.Event()
    right = Request.from_proto

    def slow(message: worker_pb2.Submit, owner: str) -> Request:
        reading.set()
        assert may_read.wait(TIMEOUT_S)
        return right(message, owner)

    monkeypatch.setattr(Request, "from_proto", staticmethod(slow))
    async with scene() as s:
        call = await s.router()
        big = submit("large")
        big.submit.prompt_token_ids[:] = [7] * 50_000
        await call.write(big)
        await s.engine.until(reading.is_set)
        call.cancel()
        await s.engine.until(lambda: bool(s.engine.owners_aborted))
        may_read.set()
        await asyncio.sleep(0.2)
        assert not s.engine.submitted


async def test_a_draining_worker_says_so_refuses_and_goes_on() -> None:
    async with scene() as s:
        call = await s.router()
        await call.write(submit("old"))
        await s.engine.until(lambda: len(s.engine.submitted) == 1)
        s.service.drain("maintenance")
        while (message := await read(call)).WhichOneof("message") != "goodbye":
            pass
        assert message.goodbye.why == "maintenance"
        await call.write(submit("new"))
        refused = (await read_step(call)).sequences[0]
        assert (refused.request_id, refused.error.reason) == ("new", "DRAINING")
        assert refused.finish_reason == types_pb2.FINISH_REASON_ERROR
        s.engine.step(tokens(s.engine.submitted[0], 0, 5, finish=types_pb2.FINISH_REASON_EOS))
        assert (await read_step(call)).sequences[0].request_id == "old"
        assert len(s.engine.submitted) == 1
        late = await s.router("late")  # one that connects now hears it too
        assert (await read(late)).goodbye.why == "maintenance"


async def test_a_submit_that_cannot_be_read_is_refused_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    read_as_is = Request.from_proto

    def fails(message: worker_pb2.Submit, owner: str) -> Request:
        if message.request_id == "bad":
            raise ValueError("no such thing")
        return read_as_is(message, owner)

    monkeypatch.setattr(Request, "from_proto", fails)
    async with scene() as s:
        call = await s.router()
        for request_id in ("good", "bad", "next"):
            await call.write(submit(request_id))
        refused = (await read_step(call)).sequences[0]
        assert (refused.request_id, refused.error.reason) == ("bad", InternalError.default_reason)
        assert refused.finish_reason == types_pb2.FINISH_REASON_ERROR
        await s.engine.until(lambda: len(s.engine.submitted) == 2)
        s.engine.step(*(tokens(request, 0, 5) for request in s.engine.submitted))
        assert [each.request_id for each in (await read_step(call)).sequences] == ["good", "next"]


async def test_errors_travel_inside_the_stream() -> None:
    async with scene() as s:
        call = await s.router()
        await call.write(submit("x"))
        await s.engine.until(lambda: len(s.engine.submitted) == 1)
        error = CapacityError("no room", reason="QUEUE_FULL", given=3, allowed=2, retry_after_ms=40)
        owner = s.engine.submitted[0].owner
        s.engine.step(Output("x", owner, 0, finish_reason=types_pb2.FINISH_REASON_ERROR, error=error))
        back = rpc.from_detail((await read_step(call)).sequences[0].error)
        assert isinstance(back, CapacityError)
        assert (back.reason, back.given, back.allowed, back.retry_after_ms) == ("QUEUE_FULL", "3", "2", 40)


# --- what waits for a router that reads slowly ---


def output(request_id: str, offset: int, *token_ids: int, finish: int = 0) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(
        request_id=request_id,
        token_offset=offset,
        token_ids=token_ids,
        finish_reason=finish,  # type: ignore[arg-type]
    )


async def test_steps_that_wait_are_merged_without_gap_or_overlap() -> None:
    session = RouterSession("o", ScriptedEngine(), Answers(lambda: 0.0))  # type: ignore[arg-type]
    for i in range(100):
        session.add([output("x", i, 1000 + i), output("y", 2 * i, i, i)])
    session.add([output("x", 100, 7, finish=types_pb2.FINISH_REASON_EOS)])
    session.add([output("x", 0, 5)])  # the same id again: another sequence
    message = await session.next()
    assert message is not None
    x, y, again = message.step.sequences
    assert (x.token_offset, len(x.token_ids), x.finish_reason) == (0, 101, types_pb2.FINISH_REASON_EOS)
    assert list(x.token_ids) == [*range(1000, 1100), 7]
    assert (y.token_offset, len(y.token_ids)) == (0, 200)
    assert (again.token_offset, list(again.token_ids), again.finish_reason) == (0, [5], 0)
    session.add([output("y", 200, 3)])
    following = await session.next()
    assert following is not None and following.step.sequences[0].token_offset == 200


async def test_a_router_that_never_reads_is_ended_at_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "MAX_PENDING_TOKENS", 2000)
    engine = ScriptedEngine()
    session = RouterSession("o", engine, Answers(lambda: 0.0))  # type: ignore[arg-type]
    for i in range(900):
        session.add([output("x", i, i)])
    assert await session.next() is not None  # read in time: all is well
    for i in range(5000):
        session.add([output(f"r{i}", 0, 1, finish=types_pb2.FINISH_REASON_EOS)])
    assert len(session._pending) == 0 and engine.owners_aborted == ["o"]
    with pytest.raises(CapacityError) as failure:
        await session.next()
    assert failure.value.reason == "SLOW_ROUTER"


async def test_a_router_that_does_not_read_over_the_wire_loses_its_session_and_its_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_module, "MAX_PENDING_TOKENS", 1 << 20)
    async with scene() as s:
        call = await s.router()
        await call.write(submit("x"))
        await s.engine.until(lambda: len(s.engine.submitted) == 1)
        request = s.engine.submitted[0]
        offset, flood = 0, tuple(range(50_000))
        # Unread messages fill gRPC's window first, then the session's pending output, then it ends.
        while request.owner not in s.engine.owners_aborted and offset < 100_000_000:
            s.engine.step(tokens(request, offset, *flood))
            offset += len(flood)
            await asyncio.sleep(0.001)
        assert request.owner in s.engine.owners_aborted
        with pytest.raises(grpc.RpcError) as failure:
            while True:
                await read(call)
        assert rpc.error_from(failure.value).reason == "SLOW_ROUTER"
