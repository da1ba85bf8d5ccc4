"""Resumable sequences at the worker's door: over a scripted engine, and over the real one behind a router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protos import router_pb2, router_pb2_grpc, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.errors import TailpackError
from tests.scenarios.router_harness import Answer, Harness, cluster, until
from tests.scenarios.test_worker_service import Scene, output, read_step, scene, submit, tokens
from tests.scenarios.tiny_tokenizer import EOS, write_tokenizer
from tests.unit.fake_kv import FakeAttachment
from tests.unit.tiny import config_for, write_model
from worker.engine import Engine
from worker.resumable import Answers
from worker.service import SERVICE, WorkerService
from worker.sessions import RouterSession, Sessions
from worker.shell import _drained
from worker.weights import load_model

NUM_TOKENS = 24


def resumable(request_id: str, tenant: str = "", grace_ms: int = 1000) -> worker_pb2.RouterMessage:
    message = submit(request_id)
    message.submit.tenant = tenant
    message.submit.resumable.CopyFrom(
        worker_pb2.Resumable(grace_ms=grace_ms, request_digest=b"digest", caller_request=b"opaque", attempt=2)
    )
    return message


def resume(request_id: str, name: str, tenant: str = "") -> worker_pb2.RouterMessage:
    return worker_pb2.RouterMessage(
        resume=worker_pb2.Resume(request_id=request_id, tenant=tenant, subscription_id=name)
    )


def leave(name: str, *, delivered: bool = False) -> worker_pb2.RouterMessage:
    return worker_pb2.RouterMessage(leave=worker_pb2.Leave(subscription_id=name, delivered=delivered))


async def submitted(s: Scene, number: int) -> Any:
    await s.engine.until(lambda: len(s.engine.submitted) > number)
    return s.engine.submitted[number]


async def outputs(call: Any, last: int) -> list[int]:
    """Tokens of one subscription, until it has so many."""
    token_ids: list[int] = []
    while len(token_ids) < last:
        (output,) = (await read_step(call)).sequences
        assert output.token_offset == len(token_ids)
        token_ids += output.token_ids
    return token_ids


# --- over a scripted engine ---


async def test_a_session_that_ends_leaves_its_resumable_sequences_alone() -> None:
    async with scene() as s:
        first, second = await s.router("a"), await s.router("b")
        await first.write(resumable("r"))
        await first.write(submit("plain"))
        request, plain = await submitted(s, 0), await submitted(s, 1)
        s.engine.step(tokens(request, 0, 5))
        assert await outputs(first, 1) == [5]
        first.cancel()
        await s.engine.until(lambda: plain.owner in s.engine.owners_aborted)
        assert request.owner not in s.engine.owners_aborted and not s.engine.aborted
        s.engine.step(tokens(request, 1, 6))
        await second.write(resume("r", "r#1"))
        assert await outputs(second, 2) == [5, 6]
        s.engine.step(tokens(request, 2, 7, finish=types_pb2.FINISH_REASON_EOS))
        (end,) = (await read_step(second)).sequences
        assert (end.request_id, end.token_offset, list(end.token_ids)) == ("r#1", 2, [7])
        assert end.finish_reason == types_pb2.FINISH_REASON_EOS


async def test_a_left_subscription_says_so_once_and_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene() as s:
        call = await s.router()
        await call.write(resumable("r"))
        request = await submitted(s, 0)
        await call.write(leave("r"))
        (left,) = (await read_step(call)).sequences
        assert (left.request_id, left.left, left.finish_reason) == ("r", True, 0)
        s.engine.step(tokens(request, 0, 5, finish=types_pb2.FINISH_REASON_EOS))
        await call.write(resume("r", "r#1"))
        (all_of_it,) = (await read_step(call)).sequences
        assert (all_of_it.request_id, list(all_of_it.token_ids)) == ("r#1", [5])
        await call.write(leave("r#1", delivered=True))  # behind its end: nothing to say
        await call.write(leave("unknown"))
        await call.write(submit("next"))
        s.engine.step(tokens(await submitted(s, 1), 0, 9))
        assert [o.request_id for o in (await read_step(call)).sequences] == ["next"]
        assert s.service._answers.num_owed == 0 and not s.engine.aborted
        assert s.engine.let_go_of == [], "it may still be on its way"
        monkeypatch.setattr("worker.resumable.DELIVERED_LASTS_S", 0.0)
        s.service._answers.expire()
        assert s.engine.let_go_of == [request.owner], "its caller has all of it"


async def test_find_tells_routers_what_they_need_and_foreign_tenants_nothing() -> None:
    async with scene() as s:
        call = await s.router()
        await call.write(resumable("acme/r", "acme"))
        s.engine.step(tokens(await submitted(s, 0), 0, 5, 6))
        assert await outputs(call, 2) == [5, 6]
        found = await s.stub.Find(worker_pb2.FindRequest(request_id="acme/r", tenant="acme"))
        assert (found.found, found.request_digest, found.caller_request) == (True, b"digest", b"opaque")
        assert (found.prompt_tokens, found.output_tokens, found.ended, found.attempt) == (2, 2, False, 2)
        for request_id, tenant in (("acme/r", "other"), ("acme/r", ""), ("nothing", "acme")):
            answer = await s.stub.Find(worker_pb2.FindRequest(request_id=request_id, tenant=tenant))
            assert answer == worker_pb2.FindResponse()
            await call.write(resume(request_id, f"{request_id}-{tenant}", tenant))
            (output,) = (await read_step(call)).sequences
            assert rpc.from_detail(output.error).reason == "UNKNOWN_REQUEST"
            assert not (await s.stub.Abort(worker_pb2.AbortRequest(request_id=request_id, tenant=tenant))).found
        assert not [a for a in s.engine.aborted if a[2] is not None]  # those of other tenants reach no sequence


@pytest.mark.parametrize("complete", [True, False])
async def test_an_abort_by_a_subscriber_ends_it_for_all(complete: bool) -> None:
    async with scene() as s:
        one, two = await s.router("a"), await s.router("b")
        await one.write(resumable("r"))
        request = await submitted(s, 0)
        await two.write(resume("r", "r#1"))
        s.engine.step(tokens(request, 0, 5))
        for call in (one, two):
            assert await outputs(call, 1) == [5]
        await two.write(worker_pb2.RouterMessage(abort=worker_pb2.Abort(request_id="r#1", complete=complete)))
        await s.engine.until(lambda: s.engine.aborted == [("r", None, request.owner)])
        s.engine.step(tokens(request, 1, finish=types_pb2.FINISH_REASON_ABORTED))
        for call in (one, two):
            (end,) = (await read_step(call)).sequences
            assert end.finish_reason == types_pb2.FINISH_REASON_ABORTED
        found = await s.stub.Find(worker_pb2.FindRequest(request_id="r"))
        assert (found.found, found.ended) == (complete, complete)


async def test_an_id_that_is_kept_is_in_use_for_others() -> None:
    async with scene() as s:
        call = await s.router()
        await call.write(resumable("r"))
        s.engine.step(tokens(await submitted(s, 0), 0, 5, finish=types_pb2.FINISH_REASON_EOS))
        assert await outputs(call, 1) == [5]
        await call.write(submit("r"))
        (refused,) = (await read_step(call)).sequences
        assert rpc.from_detail(refused.error).reason == "DUPLICATE_REQUEST"
        assert len(s.engine.submitted) == 1
        await call.write(resumable("r"))  # the subscription of its first submission is still open in this session
        (refused,) = (await read_step(call)).sequences
        assert rpc.from_detail(refused.error).reason == "SUBSCRIPTION_IN_USE"
        await call.write(leave("r"))
        await call.write(resumable("r"))
        assert await outputs(call, 1) == [5]
        assert len(s.engine.submitted) == 1


async def test_a_draining_worker_refuses_new_ones_and_goes_on_with_those_it_has() -> None:
    async with scene() as s:
        call = await s.router()
        await call.write(resumable("r"))
        request = await submitted(s, 0)
        s.service.drain("maintenance")
        await call.write(resumable("new"))
        refused = (await read_step_of(call, "new")).error
        assert rpc.from_detail(refused).reason == "DRAINING"
        await call.write(leave("r"))
        assert (await read_step_of(call, "r")).left
        s.engine.step(tokens(request, 0, 5, finish=types_pb2.FINISH_REASON_EOS))
        await s.engine.until(lambda: s.service._answers.num_kept == 1)
        assert s.service._answers.num_owed == 1  # the worker waits for whoever comes
        await call.write(resume("r", "r#1"))
        assert list((await read_step_of(call, "r#1")).token_ids) == [5]
        await call.write(leave("r#1", delivered=True))
        await s.engine.until(lambda: s.service._answers.num_owed == 0)


async def read_step_of(call: Any, name: str) -> worker_pb2.SequenceOutput:
    while True:
        message = await asyncio.wait_for(call.read(), 60)
        for piece in message.step.sequences:
            if piece.request_id == name:
                return piece  # type: ignore[no-any-return]


async def test_a_drain_waits_for_who_is_owed_an_answer() -> None:
    loop = asyncio.get_running_loop()
    sessions = Sessions(loop)
    answers = sessions.answers

    class Idle:
        def load(self) -> types_pb2.WorkerLoad:
            return types_pb2.WorkerLoad()

    session = RouterSession("o", Idle(), answers)  # type: ignore[arg-type]
    subscription = answers.open(resumable("r").submit, "owner", lambda: None, session)
    answers.take("owner", [output("r", 0, 5, finish=types_pb2.FINISH_REASON_EOS)])
    assert subscription.take() is not None
    draining = asyncio.create_task(_drained(Idle(), sessions, loop.create_future(), 30.0))  # type: ignore[arg-type]
    answers.leave(subscription)  # its caller is lost
    await asyncio.sleep(0.15)
    assert not draining.done()
    again = answers.resume("r", "", "r#1", session)
    assert again.take() is not None
    answers.leave(again, delivered=True)
    await asyncio.wait_for(draining, 60)


async def test_a_long_replay_shares_its_session_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.resumable.MAX_PIECE_WEIGHT", 100)
    async with scene() as s:
        call = await s.router()
        await call.write(resumable("r"))
        request = await submitted(s, 0)
        await call.write(leave("r"))
        assert (await read_step_of(call, "r")).left
        s.engine.step(tokens(request, 0, *range(1000)))
        await call.write(resume("r", "r#1"))
        piece = await read_step_of(call, "r#1")
        assert (len(piece.token_ids), piece.more) == (100, True)
        await call.write(submit("live"))
        live = await submitted(s, 1)
        s.engine.step(tokens(request, 1000, *range(1000, 1050)))  # news, but it has not asked for more
        s.engine.step(tokens(live, 0, 7))
        assert [(o.request_id, list(o.token_ids)) for o in (await read_step(call)).sequences] == [("live", [7])]
        for number in range(1, 10):
            await call.write(worker_pb2.RouterMessage(more=worker_pb2.More(subscription_id="r#1")))
            piece = await read_step_of(call, "r#1")
            assert list(piece.token_ids) == list(range(100 * number, 100 * number + 100)) and piece.more
        await call.write(worker_pb2.RouterMessage(more=worker_pb2.More(subscription_id="r#1")))
        piece = await read_step_of(call, "r#1")
        assert (len(piece.token_ids), piece.more) == (50, False)


# --- over the real engine ---


@dataclass
class Real:
    """A router before a worker with a random tiny model."""

    it: Harness
    engine: Engine
    attachment: FakeAttachment
    answers: Answers
    clock: list[float]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(
        write_tokenizer(tmp_path_factory.mktemp("model")), seed=5, vocab_size=600, eos_token_id=EOS, bos_token_id=0
    )


@asynccontextmanager
async def real(folder: Path) -> AsyncIterator[Real]:
    config = config_for(folder, deterministic=True)
    model = load_model(config)
    attachment = FakeAttachment(
        model.geometry,
        num_pages=256,
        max_sequences=config.num_slots,
        max_sequence_tokens=model.info.max_sequence_tokens,
    )
    clock = [0.0]
    sessions = Sessions(asyncio.get_running_loop(), lambda: clock[0])
    engine = Engine(config, model, attachment, sessions.emit)
    info = types_pb2.WorkerInfo(worker_id="w", incarnation="1", model=model.info, max_running=8, features=["resume"])
    server = rpc.RpcServer("worker")
    service = WorkerService(engine, sessions, info, worker_pb2.WorkerMemory)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, service, SERVICE)
    address = await server.start("127.0.0.1:0")
    engine.start()
    expiry = asyncio.create_task(sessions.expire_forever())
    try:
        async with cluster(folder, lambda submit: pytest.fail("no fake"), infos=[], addresses=[address]) as it:
            yield Real(it, engine, attachment, sessions.answers, clock)
    finally:
        expiry.cancel()
        await server.stop(0)
        await asyncio.to_thread(engine.stop, 10.0)


def ask(**fields: Any) -> router_pb2.GenerateRequest:
    stop = types_pb2.StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True)
    sampling = types_pb2.Sampling(temperature=1.0, seed=3, logprobs=1)
    return router_pb2.GenerateRequest(text="hello", stop=stop, sampling=sampling, resumable=True, **fields)


async def cut_after(call: Any, num_tokens: int) -> list[router_pb2.GenerateResponse]:
    """What came until there were so many tokens; then the call is lost, not cancelled."""
    chunks: list[router_pb2.GenerateResponse] = []
    while sum(len(c.token_ids) for c in chunks) < num_tokens:
        chunk = await call.read()
        if not isinstance(chunk, router_pb2.GenerateResponse):
            break
        chunks.append(chunk)
    call.cancel()
    return chunks


async def test_the_real_engine_s_answer_is_the_same_wherever_it_was_cut(folder: Path) -> None:
    async with real(folder) as r, rpc.channel(r.it.address) as channel:
        door = router_pb2_grpc.RouterStub(channel)
        golden = Answer([c async for c in door.Generate(ask(), timeout=30)]).check()
        logprobs = [p for c in golden.chunks for p in c.logprobs]
        assert len(logprobs) == NUM_TOKENS
        stop = golden.text[len(golden.text) // 2 :][:3]

        async def one(cut: int, stops: list[str]) -> Answer:
            request_id = f"{cut}-{len(stops)}"
            metadata = rpc.metadata(request_id)
            first = await cut_after(door.Generate(ask(stop_strings=stops), metadata=metadata, timeout=30), cut)
            place = router_pb2.ResumeRequest(
                request_id=request_id,
                token_offset=sum(len(c.token_ids) for c in first),
                text_offset=sum(len(c.text.encode()) for c in first),
            )
            first[-1].ClearField("finish_reason")  # it may have had all, without knowing
            return Answer([*first, *[c async for c in door.Resume(place, timeout=30)]]).check()

        for stops in ([], [stop]):
            for got in await asyncio.gather(*(one(cut, stops) for cut in range(1, NUM_TOKENS + 1))):
                assert got.token_ids == golden.token_ids[: len(got.token_ids)]
                assert got.text == (golden.text.partition(stop)[0] if stops else golden.text)
                assert [p for c in got.chunks for p in c.logprobs] == logprobs[: len(got.token_ids)]
                assert got.last.timings.prefill_ns
        assert (await r.it.client.stats()).resumes == 2 * NUM_TOKENS


async def test_the_real_engine_frees_what_nobody_resumes_and_what_is_cancelled(folder: Path) -> None:
    async with real(folder) as r, rpc.channel(r.it.address) as channel:
        door = router_pb2_grpc.RouterStub(channel)
        request = ask()
        request.stop.max_tokens = 900

        def is_left(request_id: str) -> bool:  # its grace time begins when the worker hears of it
            answer = r.answers.find(request_id, "")
            return answer is not None and answer.idle_since is not None

        def num_aborted_is(number: int) -> bool:
            return r.engine.load().sequences_aborted == number

        for number, request_id in enumerate(("left", "cancelled"), start=1):
            await cut_after(door.Generate(request, metadata=rpc.metadata(request_id), timeout=30), 3)
            await until(partial(is_left, request_id))
            assert r.engine.load().num_running == 1
            if request_id == "left":
                r.clock[0] += 30.1
            else:
                assert await r.it.client.cancel(request_id)
            await until(partial(num_aborted_is, number))
        await until(lambda: not r.engine.load().num_running)
        r.attachment.check_empty()
        with pytest.raises(TailpackError, match="UNKNOWN_REQUEST"):
            await anext(r.it.client.resume("left", token_offset=0, text_offset=0))
