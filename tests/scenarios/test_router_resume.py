"""Resumable answers: cut anywhere, gone on with through any router, joined, cancelled, forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from protos import errors, router_pb2, router_pb2_grpc, rpc, types_pb2, worker_pb2
from protos.errors import TailpackError
from router import find, relay
from router.admission import Call
from router.requests import Requests
from router.service import SERVICE_NAME, RouterService
from router.tokenizer import Tokenizer
from tests.scenarios.cable import Cable
from tests.scenarios.fake_worker import FakeWorker, Script, worker_info
from tests.scenarios.router_harness import RECOVER_WAIT_S, Answer, Harness, cluster, until
from tests.scenarios.tiny_tokenizer import EOS
from worker import resumable
from worker.resumable import Limits

TEXT = "Où est 日本語? 👩‍👩‍👧 äöü. STOP and more"
STEP_S = 0.002
Generate = router_pb2.GenerateRequest


@dataclass
class Door:
    """One router, called as it is: no client that would try again."""

    stub: router_pb2_grpc.RouterAsyncStub
    requests: Requests

    def generate(self, request: Generate, request_id: str | None = None, tenant: str | None = None) -> Any:
        return self.stub.Generate(request, metadata=rpc.metadata(request_id, tenant), timeout=20)

    def resume(self, request_id: str, tokens: int = 0, text: int = 0, tenant: str | None = None) -> Any:
        request = router_pb2.ResumeRequest(request_id=request_id, token_offset=tokens, text_offset=text)
        return self.stub.Resume(request, metadata=rpc.metadata(None, tenant), timeout=20)

    async def cancel(self, request_id: str, tenant: str | None = None) -> bool:
        request = router_pb2.CancelRequest(request_id=request_id)
        return bool((await self.stub.Cancel(request, metadata=rpc.metadata(None, tenant), timeout=20)).found)

    async def stats(self) -> router_pb2.StatsResponse:
        return await self.stub.Stats(router_pb2.StatsRequest())


@dataclass
class Scene:
    it: Harness
    here: Door
    there: Door  # another router, of the same workers

    @property
    def worker(self) -> FakeWorker:
        return self.it.workers[0]

    async def left(self, request_id: str) -> None:
        """Nobody is subscribed to it."""
        await until(lambda: not self.worker.answers._by_id[request_id].subscriptions)

    async def settled(self) -> None:
        """No call, sequence or subscription is left; answers may be kept."""
        await self.it.settled()
        links = self.there.requests.registry.links.values()
        await until(lambda: not any(link.num_known or link.num_stray_outputs for link in links))
        for door in (self.here, self.there):
            stats = await door.stats()
            assert (stats.in_flight, stats.streams) == (0, 0)
            assert stats.requests == stats.finished + stats.cancelled + stats.failed + stats.rejected
        for worker in self.it.workers:
            assert not any(answer.subscriptions for answer in worker.answers._by_id.values())


@asynccontextmanager
async def scene(folder: Path, script: Any, **options: Any) -> AsyncIterator[Scene]:
    async with cluster(folder, script, **options) as it:
        wait_s = options.get("recover_wait_s", RECOVER_WAIT_S)
        there = Requests(it.tokenizer, [worker.address for worker in it.workers], recover_wait_s=wait_s)
        server = rpc.RpcServer("router")
        server.add(router_pb2_grpc.add_RouterServicer_to_server, RouterService(there), SERVICE_NAME)
        address = await server.start("127.0.0.1:0")
        there.start()
        try:
            async with rpc.channel(it.address) as one, rpc.channel(address) as two:
                await until(lambda: len(there.registry.ready()) == len(it.workers))
                doors = [Door(router_pb2_grpc.RouterStub(c), r) for c, r in ((one, it.requests), (two, there))]
                yield Scene(it, *doors)
        finally:
            await server.stop(0)
            await there.registry.close()


def ask(**fields: Any) -> Generate:
    request = Generate(text="hello", stop=types_pb2.StopConditions(max_tokens=500), resumable=True)
    request.MergeFrom(Generate(**{name: value for name, value in fields.items() if name != "resumable"}))
    request.resumable = fields.get("resumable", True)
    return request


async def read(call: Any, tokens: int | None = None) -> list[router_pb2.GenerateResponse]:
    """Chunks until there are so many tokens; then the call is cut. None: all of them."""
    chunks, count = [], 0
    try:
        while tokens is None or count < tokens:
            chunk = await call.read()
            if not isinstance(chunk, router_pb2.GenerateResponse):
                break
            chunks.append(chunk)
            count += len(chunk.token_ids)
    except grpc.RpcError as failure:
        raise rpc.error_from(failure) from None
    finally:
        call.cancel()
    return chunks


async def refusal(call: Any) -> TailpackError:
    with pytest.raises(TailpackError) as caught:
        await read(call)
    return caught.value


def behind(chunks: list[router_pb2.GenerateResponse]) -> tuple[int, int]:
    """Where to go on."""
    return sum(len(c.token_ids) for c in chunks), sum(len(c.text.encode()) for c in chunks)


def whole(chunks: list[router_pb2.GenerateResponse]) -> Answer:
    return Answer(chunks).check()


# --- cut and resumed ---


@pytest.mark.parametrize("per_step", [1, 3])
@pytest.mark.parametrize("stops", [(), ("never", "TOP and")], ids=["to-eos", "to-a-stop-string"])
async def test_cut_at_every_token_it_is_the_same_through_either_router(
    folder: Path, text_ids: list[int], stops: tuple[str, ...], per_step: int
) -> None:
    script = Script([*text_ids, EOS], every_s=STEP_S, per_step=per_step, logprobs=True, seed=7, cached=1)
    request = ask(stop_strings=stops, sampling=types_pb2.Sampling(logprobs=0, temperature=1.0, seed=7))
    async with scene(folder, script) as s:
        golden = whole(await read(s.here.generate(request)))
        assert (golden.text == TEXT) == (not stops)

        async def one(cut: int, door: Door) -> None:
            request_id = f"cut-{cut}-{door is s.here}"
            first = await read(s.here.generate(request, request_id), cut)
            place = behind(first)
            rest = await read(door.resume(request_id, *place))
            assert (rest[0].token_offset, rest[0].text_offset) == place
            assert rest[0].worker_id and rest[0].request_id == request_id and rest[0].seed == 7
            if first[-1].finish_reason:  # it has all but does not know it: the last chunk comes again, and nothing else
                first[-1].ClearField("finish_reason")
            got = whole([*first, *rest])
            assert (got.text, got.token_ids) == (golden.text, golden.token_ids)
            assert (got.last.finish_reason, got.last.stop_string) == (
                golden.last.finish_reason,
                golden.last.stop_string,
            )
            assert got.last.usage == golden.last.usage
            assert [p for c in got.chunks for p in c.logprobs] == [p for c in golden.chunks for p in c.logprobs]

        cuts = range(1, len(golden.token_ids) + 1)
        await asyncio.gather(*(one(cut, door) for cut in cuts for door in (s.here, s.there)))
        assert (await s.here.stats()).resumes + (await s.there.stats()).resumes == 2 * len(cuts)
        assert len(s.worker.submits) == 1 + 2 * len(cuts)  # nothing was computed twice
        await s.settled()


async def test_an_answer_that_ended_is_read_again_from_every_place(folder: Path, text_ids: list[int]) -> None:
    """Text lags behind tokens; a caller may have any tokens and any characters of what was sent."""
    async with scene(folder, Script([*text_ids, EOS])) as s:
        golden = whole(await read(s.here.generate(ask(), "r")))
        characters = [len(TEXT[:end].encode()) for end in range(len(TEXT) + 1)]
        for tokens in range(len(golden.token_ids) + 1):
            text = characters[tokens * 7 % len(characters)]
            rest = await read(s.there.resume("r", tokens, text))
            assert (rest[0].token_offset, rest[0].text_offset) == (tokens, text)
            assert "".join(c.text for c in rest).encode() == TEXT.encode()[text:]
            assert [t for c in rest for t in c.token_ids] == golden.token_ids[tokens:]
            assert rest[-1].usage == golden.last.usage
        for text in set(range(len(TEXT.encode()))) - set(characters):
            assert (await refusal(s.there.resume("r", 0, text))).reason == "BAD_OFFSET"
        await s.settled()


async def test_what_its_first_router_ended_at_a_stop_string_ends_there_again(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script(text_ids, endless=True, every_s=STEP_S)) as s:
        golden = whole(await read(s.here.generate(ask(stop_strings=["STOP"]), "r")))
        await s.settled()
        assert s.worker.aborts == ["r"] and not s.worker.active
        for cut in range(len(golden.token_ids) + 1):
            (rest,) = await read(s.there.resume("r", cut, 0))
            assert (rest.text, list(rest.token_ids)) == (golden.text, golden.token_ids[cut:])
            assert (rest.finish_reason, rest.stop_string) == (types_pb2.FINISH_REASON_STOP_STRING, "STOP")
            assert (rest.usage, rest.timings) == (golden.last.usage, golden.last.timings)
        await s.settled()


async def test_places_ahead_of_the_answer_are_refused(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script(text_ids, every_s=60, per_step=4)) as s:
        first = await read(s.here.generate(ask(), "r"), 4)
        tokens, text = behind(first)
        assert (await refusal(s.here.resume("r", tokens + 1, text))).reason == "BAD_OFFSET"
        assert (await refusal(s.there.resume("r", tokens, text + 1))).reason == "BAD_OFFSET"
        assert (await s.there.stats()).streams == 0
        assert list(s.worker.active) == ["r"]  # it was not hurt
        assert await s.there.cancel("r")
        await s.settled()


async def test_a_place_behind_the_stop_string_is_refused(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], per_step=1000)) as s:
        golden = whole(await read(s.here.generate(ask(stop_strings=["STOP"]), "r")))
        tokens, text = behind(golden.chunks)
        assert tokens < len(text_ids)
        rest = await read(s.there.resume("r", tokens, text))
        assert [(c.text, list(c.token_ids), c.stop_string) for c in rest] == [("", [], "STOP")]
        assert (await refusal(s.there.resume("r", tokens + 1, text))).reason == "BAD_OFFSET"
        assert (await refusal(s.there.resume("r", tokens, text + 1))).reason == "BAD_OFFSET"


async def test_several_read_one_answer_at_once(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], hold_at=3)) as s:
        first = s.here.generate(ask(), "r")
        head = [await first.read()]
        others = [door.resume("r") for door in (s.here, s.there, s.there)]
        heads = [[await call.read()] for call in others]
        assert (await s.there.stats()).streams == 2
        s.worker.gate.set()
        rests = await asyncio.gather(*(read(call) for call in (first, *others)))
        for got in (a + b for a, b in zip([head, *heads], rests, strict=True)):
            assert whole(got).text == TEXT
        assert len(s.worker.submits) == 1
        await s.settled()
        here, there = await s.here.stats(), await s.there.stats()
        assert (here.requests, here.finished, here.resumes, there.requests, there.resumes) == (1, 1, 1, 0, 2)


async def test_a_long_replay_comes_in_pieces_and_waits_for_a_slow_reader(
    folder: Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resumable, "MAX_PIECE_WEIGHT", 32)
    monkeypatch.setattr(relay, "MAX_PENDING_BYTES", 2000)

    def script(submit: Any) -> Script:
        return Script(text_ids, endless=True, per_step=10, hold_at=0 if submit.request_id == "stopped" else None)

    async with scene(folder, script) as s:
        request = ask(stop=types_pb2.StopConditions(max_tokens=3000))
        await read(s.here.generate(request, "r"), 1)
        await until(lambda: s.worker.num_emitted["r"] == 3000)
        call = s.there.resume("r")
        head = [await call.read()]
        await asyncio.sleep(0.2)  # it could have all of it by now
        got = whole(head + await read(call))
        assert len(got.token_ids) == 3000
        # Behind a stop string the rest is passed over, piece by piece, for the worker's last word.
        request.stop_strings.append("日本")
        lost = s.here.generate(request, "stopped")
        await until(lambda: "stopped" in s.worker.active)
        lost.cancel()
        await s.left("stopped")
        s.worker.gate.set()  # no router sees the stop string
        await until(lambda: s.worker.num_emitted["stopped"] == 3000)
        got = whole(await read(s.there.resume("stopped")))
        assert (got.text, got.last.stop_string) == ("Où est ", "日本")
        assert got.last.timings.prefill_ns
        await s.settled()


async def test_a_reader_that_is_too_slow_loses_its_stream_and_not_the_answer(
    folder: Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "MAX_PENDING_BYTES", 200)
    async with scene(folder, Script([*text_ids, EOS], per_step=1000)) as s:
        assert (await refusal(s.here.generate(ask(), "r"))).reason == "SLOW_READER"
        monkeypatch.setattr(relay, "MAX_PENDING_BYTES", 4 << 20)
        assert whole(await read(s.there.resume("r"))).text == TEXT
        await s.settled()


# --- lost callers ---


async def test_only_a_resumable_request_outlives_its_call(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], hold_at=3)) as s:
        await read(s.here.generate(ask(resumable=False), "plain"), 3)
        await until(lambda: s.worker.aborts == ["plain"])
        assert (await refusal(s.there.resume("plain"))).reason == "UNKNOWN_REQUEST"
        assert not s.worker.finds[:-1]  # only the one just now
        with capture_logs() as lines:
            await read(s.here.generate(ask(), "kept"), 3)
            await until(lambda: [line["reason"] for line in lines if line["event"] == "request"] == ["DETACHED"])
        s.worker.gate.set()
        await until(lambda: s.worker.answers.num_kept)
        assert s.worker.aborts == ["plain"]
        assert whole(await read(s.there.resume("kept"))).text == TEXT
        await s.settled()


async def test_a_deadline_ends_the_call_and_not_the_request(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], hold_at=0)) as s:
        call = s.here.stub.Generate(ask(), metadata=rpc.metadata("r"), timeout=0.7)
        with pytest.raises(errors.DeadlineExceeded):
            await read(call)
        assert s.worker.submits[0].deadline_unix_ns == 0
        s.worker.gate.set()
        assert whole(await read(s.here.resume("r"))).text == TEXT
        await s.settled()


async def test_a_router_that_dies_takes_no_resumable_answer_along(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], every_s=STEP_S)) as s:
        first = await read(s.here.generate(ask(), "r"), 2)
        await s.here.requests.registry.close()  # its sessions end with it
        rest = await read(s.there.resume("r", *behind(first)))
        assert whole([*first, *rest]).text == TEXT


async def test_after_its_grace_time_nobody_finds_it(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS])) as s:
        await read(s.here.generate(ask(resume_grace_ms=3000), "short"))
        await read(s.here.generate(ask(), "long"))
        await s.settled()
        s.worker.now_s += 5.1
        s.worker.answers.expire()
        assert (await refusal(s.here.resume("short"))).reason == "UNKNOWN_REQUEST"
        assert whole(await read(s.there.resume("long"))).text == TEXT
        await s.settled()
        s.worker.now_s += 29.9  # from when its last stream ended
        s.worker.answers.expire()
        assert whole(await read(s.there.resume("long"))).text == TEXT


# --- the same id again ---


@pytest.mark.parametrize("left", [False, True], ids=["running", "left"])
async def test_the_same_request_joins_through_either_router(folder: Path, text_ids: list[int], left: bool) -> None:
    async with scene(folder, Script([*text_ids, EOS], every_s=STEP_S)) as s:
        call = s.here.generate(ask(), "r")
        head = [await call.read()]
        if left:
            call.cancel()
        joined = await asyncio.gather(*(read(door.generate(ask(), "r")) for door in (s.here, s.there, s.here)))
        for got in joined:
            assert whole(got).text == TEXT
        if not left:
            assert whole(head + await read(call)).text == TEXT
        assert len(s.worker.submits) == 1
        await s.settled()
        here, there = await s.here.stats(), await s.there.stats()
        assert (here.requests, here.resumes, there.requests, there.resumes) == (3, 2, 1, 1)
        assert here.prompt_tokens and not there.prompt_tokens


async def test_many_at_once_run_once(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], every_s=STEP_S), num_workers=2) as s:
        all_of_them = await asyncio.gather(*(read(s.here.generate(ask(), "r")) for _ in range(20)))
        assert {whole(got).text for got in all_of_them} == {TEXT}
        assert sum(len(worker.submits) for worker in s.it.workers) == 1
        await s.settled()


async def test_another_request_with_the_id_is_a_duplicate(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], every_s=STEP_S)) as s:
        await read(s.here.generate(ask(), "r"), 1)
        for other in (ask(text="hello!"), ask(stop_strings=["x"]), ask(resume_grace_ms=1), ask(resumable=False)):
            for door in (s.here, s.there):
                assert (await refusal(door.generate(other, "r"))).reason == "DUPLICATE_REQUEST"
        await read(s.here.resume("r"))
        assert (await refusal(s.there.generate(ask(text="hello!"), "r"))).reason == "DUPLICATE_REQUEST"  # kept
        await s.settled()


async def test_an_id_that_its_caller_did_not_choose_is_not_looked_for(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS])) as s:
        call = s.here.generate(ask())
        chunks = await read(call)
        assert not s.worker.finds
        whole(await read(s.there.resume(chunks[0].request_id)))


# --- cancel, tenants ---


@pytest.mark.parametrize("where", ["here", "there"])
async def test_cancel_ends_it_for_all_that_read_it(folder: Path, text_ids: list[int], where: str) -> None:
    async with scene(folder, Script(text_ids, hold_at=3)) as s:
        calls = [s.here.generate(ask(), "r"), s.here, s.there]
        await calls[0].read()
        calls[1:] = [door.resume("r") for door in calls[1:]]
        for call in calls[1:]:
            await call.read()
        assert await getattr(s, where).cancel("r")
        for call in calls:
            assert (await read(call))[-1].finish_reason == types_pb2.FINISH_REASON_ABORTED
        assert (await refusal(s.there.resume("r"))).reason == "UNKNOWN_REQUEST"
        assert not await s.there.cancel("r")
        await s.settled()


async def test_what_nobody_reads_is_cancelled_and_what_is_kept_forgotten(folder: Path, text_ids: list[int]) -> None:
    def script(submit: Any) -> Script:
        return Script([*text_ids, EOS], hold_at=3 if submit.request_id == "runs" else None)

    async with scene(folder, script) as s:
        await read(s.here.generate(ask(), "runs"), 1)
        await read(s.here.generate(ask(), "ended"))
        for request_id in ("runs", "ended"):
            assert await s.there.cancel(request_id)
            assert (await refusal(s.there.resume(request_id))).reason == "UNKNOWN_REQUEST"
        assert not s.worker.active
        await s.settled()


async def test_cancel_forgets_an_answer_whose_first_call_is_still_open(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], per_step=1000)) as s:
        async with s.here.requests.answer(
            ask(), Call("r")
        ) as answer:  # its caller has yet to take the chunk that is here
            await until(lambda: s.worker.answers.num_kept)
            assert await s.here.cancel("r")
            assert [chunk.finish_reason async for chunk in answer] == [types_pb2.FINISH_REASON_EOS]
        assert (await refusal(s.there.resume("r"))).reason == "UNKNOWN_REQUEST"
        await s.settled()


async def test_a_tenant_cannot_tell_another_s_request_from_none(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS], every_s=STEP_S)) as s:
        await read(s.here.generate(ask(), "r", "acme"), 1)
        for tenant in (None, "other"):
            for door in (s.here, s.there):
                for request_id in ("r", "nothing", "n" * 129):
                    error = await refusal(door.resume(request_id, tenant=tenant))
                    assert (error.reason, error.given) == ("UNKNOWN_REQUEST", request_id[:128])
                for request_id in ("r", "nothing"):
                    assert not await door.cancel(request_id, tenant)
                assert (await refusal(door.resume("acme/r", tenant=tenant))).reason == "BAD_REQUEST_ID"
        assert whole(await read(s.there.generate(ask(), "r", "other"))).text == TEXT  # an id of its own
        assert len(s.worker.submits) == 2
        assert whole(await read(s.there.resume("r", tenant="acme"))).text == TEXT
        await s.settled()


async def test_an_id_that_is_none_is_cut_short_in_the_log(folder: Path) -> None:
    async with scene(folder, Script([EOS])) as s:
        with capture_logs() as lines:
            assert (await refusal(s.here.resume("\x1b[2J"))).reason == "UNKNOWN_REQUEST"
            assert (await refusal(s.here.resume("n" * 1_000_000))).reason == "BAD_REQUEST_ID"
            with pytest.raises(grpc.RpcError) as caught:
                await s.here.cancel("n" * 1_000_000)
        assert rpc.error_from(caught.value).reason == "BAD_REQUEST_ID"
        assert [line["request_id"] for line in lines] == ["\\x1b[2J", "n" * 128]
        await s.settled()


# --- workers that are away, old, full or leaving ---


async def test_where_a_worker_cannot_be_asked_not_found_would_be_a_guess(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS]), num_workers=2) as s:
        one, two = s.it.workers
        await read(s.here.generate(ask(), "r"))
        has_it, other = (one, two) if one.submits else (two, one)
        other.cannot_find = errors.Unavailable("busy")
        error = await refusal(s.there.resume("nothing"))
        assert isinstance(error, errors.Unavailable) and error.reason == "WORKER_NOT_ASKED" and error.retry_after_ms
        assert whole(await read(s.there.resume("r"))).text == TEXT  # who has it answers
        await other.stop()
        link = s.there.requests.registry.links[other.address]
        await until(lambda: link.state == "lost")
        assert (await refusal(s.there.resume("nothing"))).reason == "WORKER_NOT_ASKED"
        with pytest.raises(grpc.RpcError) as caught:
            await s.there.cancel("nothing")
        error = rpc.error_from(caught.value)
        assert isinstance(error, errors.Unavailable) and error.reason == "WORKER_NOT_ASKED"
        assert other.address in str(error.given)
        assert await s.there.cancel("r")  # who has it is there
        # A new request is not held up by a dead worker.
        assert whole(await read(s.there.generate(ask(), "new"))).text == TEXT
        assert has_it.finds


async def test_a_worker_that_never_answers_holds_up_a_resume_for_a_bounded_time(
    folder: Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "FIND_TIMEOUT_S", 0.2)

    async def never(self: FakeWorker, request: Any, context: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(FakeWorker, "Find", never)
    async with scene(folder, Script([*text_ids, EOS])) as s:
        assert (await refusal(s.there.resume("r"))).reason == "WORKER_NOT_ASKED"
        assert (await refusal(s.there.generate(ask(), "r"))).reason == "WORKER_NOT_ASKED"
        assert (await s.there.stats()).rejected == 1


async def test_a_worker_without_the_feature_is_never_asked(folder: Path, text_ids: list[int]) -> None:
    tokenizer = Tokenizer(folder)
    facts = {"tokenizer_digest": tokenizer.digest, "vocab_size": tokenizer.vocab_size}
    tokenizer.close()
    old, new = worker_info(features=(), **facts), worker_info(**facts)  # type: ignore[arg-type]
    async with scene(folder, Script([*text_ids, EOS]), infos=[old]) as s:
        assert (await refusal(s.here.generate(ask(), "r"))).reason == "RESUME_NOT_SUPPORTED"
        assert (await refusal(s.here.resume("r"))).reason == "UNKNOWN_REQUEST"
        whole(await read(s.here.generate(ask(resumable=False), "r")))
        assert not s.worker.finds
        await s.settled()
    async with scene(folder, Script([*text_ids, EOS]), infos=[old, new]) as s:
        await asyncio.gather(*(read(s.here.generate(ask(), f"r-{n}")) for n in range(6)))
        assert [len(worker.submits) for worker in s.it.workers] == [0, 6]
        assert not s.it.workers[0].finds


async def test_a_worker_with_no_room_for_the_log_is_passed_over(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script([*text_ids, EOS]), num_workers=2) as s:
        for worker in s.it.workers:
            worker.answers._limits = Limits(max_bytes=1)
        assert (await refusal(s.here.generate(ask(), "r"))).reason == "RESUME_LOG_FULL"
        s.it.workers[1].answers._limits = Limits()
        assert whole(await read(s.here.generate(ask(), "r"))).text == TEXT
        await s.settled()


async def test_a_lost_worker_ends_a_stream_by_name(folder: Path, text_ids: list[int]) -> None:
    async with scene(folder, Script(text_ids, hold_at=3)) as s:
        call = s.here.generate(ask(), "r")
        await call.read()
        resumed = s.there.resume("r")
        await resumed.read()
        await s.worker.stop()
        for cut in (call, resumed):
            assert (await refusal(cut)).reason == "WORKER_LOST"


async def test_placed_twice_the_later_placement_counts(folder: Path, text_ids: list[int]) -> None:
    """A router that loses a worker before the first token places the request elsewhere. The worker may live on."""

    def script(submit: Any) -> Script:
        return Script([*text_ids, EOS], first_s=60 if submit.resumable.attempt == 1 else 0)

    tokenizer = Tokenizer(folder)
    infos = [worker_info(tokenizer_digest=tokenizer.digest, vocab_size=tokenizer.vocab_size) for _ in range(2)]
    tokenizer.close()
    behind_cable = FakeWorker(script, infos[0])
    cable = Cable(await behind_cable.start())
    async with cable.plugged() as address, scene(folder, script, infos=infos[1:], addresses=[address]) as s:
        s.worker.report(types_pb2.WorkerLoad(num_running=50, pages_free=99, pages_total=99))
        link = s.here.requests.registry.links[address]
        await until(lambda: s.here.requests.registry.links[s.worker.address].load.num_running == 50)
        reading = asyncio.ensure_future(read(s.here.generate(ask(), "r")))
        await until(lambda: behind_cable.submits)
        cable.cut()
        assert whole(await reading).text == TEXT
        await until(lambda: link.state == "ready")
        assert "r" in behind_cable.active and len(s.worker.submits) == 1
        assert whole(await read(s.here.resume("r"))).text == TEXT
        assert await s.here.cancel("r")  # both
        assert not behind_cable.active
    await behind_cable.stop()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"resume_grace_ms": 600_001}, "BAD_RESUME_GRACE"),
        ({"resume_grace_ms": 1, "resumable": False}, "BAD_RESUME_GRACE"),
    ],
)
async def test_bad_grace_times_are_refused(folder: Path, fields: dict[str, Any], reason: str) -> None:
    async with scene(folder, Script([EOS])) as s:
        assert (await refusal(s.here.generate(ask(**fields), "r"))).reason == reason
        assert (await refusal(s.here.resume(""))).reason == "EMPTY_REQUEST_ID"
        assert not s.worker.submits
        await s.settled()


@dataclass
class Hush:
    """Workers that say nothing to Find until they may."""

    asked: int = 0
    may: asyncio.Event = field(default_factory=asyncio.Event)


@pytest.fixture
def hush(monkeypatch: pytest.MonkeyPatch) -> Hush:
    hush, answer = Hush(), FakeWorker.Find

    async def find_later(self: FakeWorker, request: worker_pb2.FindRequest, context: Any) -> worker_pb2.FindResponse:
        hush.asked += 1
        await hush.may.wait()
        return await answer(self, request, context)

    monkeypatch.setattr(FakeWorker, "Find", find_later)
    monkeypatch.setattr(find, "FIND_TIMEOUT_S", 20.0)
    return hush


async def test_looking_for_an_answer_is_admitted_like_a_request(folder: Path, hush: Hush) -> None:
    """It holds its caller's message and asks every worker, so neither is to be had without limit."""
    async with scene(folder, Script([65, EOS]), max_in_flight=2) as s:
        first = asyncio.create_task(read(s.here.generate(ask(), "first")))
        second = asyncio.create_task(refusal(s.here.resume("second")))
        await until(lambda: hush.asked == 2)
        assert s.it.requests.admission.held_bytes > 0
        stats = await s.here.stats()
        assert (stats.requests, stats.in_flight, stats.streams) == (0, 0, 2)
        for call in (s.here.generate(ask(), "third"), s.here.resume("third")):
            assert (await refusal(call)).reason == "TOO_MANY_REQUESTS"
        assert hush.asked == 2
        hush.may.set()
        assert (await first)[-1].finish_reason == types_pb2.FINISH_REASON_EOS
        assert (await second).reason == "UNKNOWN_REQUEST"
        await s.settled()
        assert s.it.requests.admission.held_bytes == 0


async def test_a_session_that_ends_while_its_worker_is_asked_is_not_the_callers_cancel(
    folder: Path, hush: Hush
) -> None:
    async with scene(folder, Script([65, EOS])) as s:
        asking = asyncio.create_task(refusal(s.here.resume("r-1")))
        await until(lambda: hush.asked == 1)
        s.worker.welcome_s = 60  # and it does not come back
        for outbox in s.worker.outboxes:  # a second welcome: the router ends the session, and closes its channel
            outbox.put_nowait(worker_pb2.WorkerMessage(welcome=worker_pb2.Welcome()))
        error = await asking
        assert (type(error), error.reason) == (errors.Unavailable, "WORKER_NOT_ASKED")
        assert f"{s.worker.address} is lost" in str(error.given)
        hush.may.set()
        await s.settled()
