"""Workers that die under streams: they come back with the sequences, without, late, or never; they go on wrongly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from protos import errors, router_pb2, types_pb2, worker_pb2
from protos.errors import TailpackError
from router import recovery, registry
from router.client import AsyncTailpack, RetryPolicy, build_request
from router.token_log import TokenLogs
from tests.scenarios.cable import Cable
from tests.scenarios.fake_worker import FakeWorker, Script, worker_info
from tests.scenarios.router_harness import Answer, Harness, cluster, until
from tests.scenarios.test_router_resume import ask, behind, read, refusal, scene, whole
from tests.scenarios.tiny_tokenizer import EOS

TEXT = "Où est 日本語? 👩‍👩‍👧 äöü. STOP and more"
FEATURES = ("resume", "emitted_token_ids", "adopt")
LONG_S = 120.0  # a wait that never ends here


def adopting(**fields: Any) -> types_pb2.WorkerInfo:
    return worker_info(features=FEATURES, **fields)


async def dies(it: Harness, index: int = 0, *, adopts: bool = True) -> FakeWorker:
    """A worker; returns what comes after it, which the test starts at its address."""
    successor = it.workers[index] = await it.workers[index].successor(adopts=adopts)
    return successor


async def gathered(chunks: AsyncIterator[router_pb2.GenerateResponse], into: list[router_pb2.GenerateResponse]) -> None:
    async for chunk in chunks:
        into += [chunk]


def held(script: Script, submit: worker_pb2.Submit) -> Script:
    return script


async def reaches(chunks: list[router_pb2.GenerateResponse], count: int) -> None:
    """Waits for so many tokens."""
    await until(lambda: num_tokens(chunks) == count)


def num_tokens(chunks: list[router_pb2.GenerateResponse]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)


def lost(it: Harness, index: int = 0) -> Callable[[], bool]:
    link = it.requests.registry.links[it.workers[index].address]
    return lambda: link.state == "lost"


# --- the worker comes back ---


@pytest.mark.parametrize("adopts", [True, False], ids=["with-it", "without-it"])
@pytest.mark.parametrize("stops", [[], ["TOP and"]], ids=["to-eos", "to-a-stop-string"])
async def test_killed_at_every_token_the_answer_is_the_same(
    folder: Path, text_ids: list[int], stops: list[str], adopts: bool
) -> None:
    script = Script([*text_ids, EOS], every_s=0.001, seed=9, cached=1)
    async with cluster(folder, script, infos=[adopting()], recover_wait_s=LONG_S) as it:
        request = build_request("hello", stop_strings=stops, temperature=1.0)
        golden = Answer([chunk async for chunk in it.client.stream(request)]).check()
        assert (golden.text == TEXT) == (not stops)
        for cut in range(1, len(golden.token_ids)):
            it.workers[0].script = partial(held, Script([*text_ids, EOS], hold_at=cut, seed=9, cached=1))
            chunks: list[router_pb2.GenerateResponse] = []
            reading = asyncio.create_task(gathered(it.client.stream(request), chunks))
            await reaches(chunks, cut)
            back = await dies(it, adopts=adopts)
            back.script = partial(held, script)
            await back.start(back.address)
            await asyncio.wait_for(reading, LONG_S)
            got = Answer(chunks).check()
            assert (got.text, got.token_ids) == (golden.text, golden.token_ids), cut
            for name in ("finish_reason", "stop_string", "usage"):
                assert getattr(got.last, name) == getattr(golden.last, name)
            (again,) = back.submits
            assert (got.chunks[0].seed, again.sampling.seed) == (9, 9)
            assert list(again.emitted_token_ids) == golden.token_ids[:cut]
            assert again.prompt_token_ids and back.answers.num_joined == adopts
            await it.settled()
        stats = await it.client.stats()
        num_cuts = len(golden.token_ids) - 1
        assert (stats.recovered_joined, stats.recovered_recomputed) == ((num_cuts, 0) if adopts else (0, num_cuts))
        assert (stats.finished, stats.retries, stats.recovered_lost) == (1 + num_cuts, 0, 0)
        assert it.requests.token_logs.num_tokens == 0


async def test_it_goes_on_twice_and_the_log_says_so(folder: Path, text_ids: list[int]) -> None:
    script = Script([*text_ids, EOS], hold_at=3)
    async with cluster(folder, script, infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        with capture_logs() as lines:
            reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
            await reaches(chunks, 3)
            second = await dies(it)
            second.script = lambda submit: Script([*text_ids, EOS], hold_at=5)
            await second.start(second.address)
            await reaches(chunks, 5)
            third = await dies(it, adopts=False)
            third.script = lambda submit: Script([*text_ids, EOS])
            await third.start(third.address)
            await asyncio.wait_for(reading, LONG_S)
        assert Answer(chunks).check().text == TEXT
        assert [chunk.worker_id != "" for chunk in chunks].count(True) == 3  # each life of it says itself once
        (line,) = (line for line in lines if line["event"] == "request")
        assert (line["recovered"], line["outcome"], line["retries"]) == ("joined,recomputed", "finished", 0)


async def test_a_worker_that_comes_back_elsewhere_is_known_by_its_name(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 3)
        back = await dies(it)
        back.script = lambda submit: Script([*text_ids, EOS])
        it.requests.registry.add(await back.start("127.0.0.1:0"))
        await asyncio.wait_for(reading, LONG_S)
        assert Answer(chunks).check().text == TEXT
        assert back.answers.num_joined == 1


async def test_many_streams_of_a_dead_worker_wait_for_it_though_another_is_idle(
    folder: Path, text_ids: list[int]
) -> None:
    def script(submit: worker_pb2.Submit) -> Script:
        return Script([*text_ids, EOS], hold_at=3)

    infos = [adopting(), adopting()]
    async with cluster(folder, script, infos=infos, recover_wait_s=LONG_S) as it:
        answers: list[list[router_pb2.GenerateResponse]] = [[] for _ in range(16)]
        reading = [asyncio.create_task(gathered(it.client.generate("hello"), each)) for each in answers]
        await until(lambda: all(num_tokens(each) == 3 for each in answers))
        hit = len(it.workers[0].active)
        assert 0 < hit < 16
        back = await dies(it)
        await until(lost(it))
        it.workers[1].gate.set()
        await until(lambda: sum(task.done() for task in reading) == 16 - hit)
        await asyncio.sleep(0.1)
        assert len(it.workers[1].submits) == 16 - hit
        back.script = lambda submit: Script([*text_ids, EOS])
        await back.start(back.address)
        await asyncio.wait_for(asyncio.gather(*reading), LONG_S)
        assert back.answers.num_joined == hit == (await it.client.stats()).recovered_joined
        assert {Answer(each).check().text for each in answers} == {TEXT}
        await it.settled()


async def test_log_probabilities_go_on_behind_the_death(folder: Path, text_ids: list[int]) -> None:
    """The predecessor emitted two that its caller never got: their log-probabilities are computed again."""
    script = Script([*text_ids, EOS], logprobs=True, hold_at=3)
    async with cluster(folder, script, infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello", logprobs=0), chunks))
        await reaches(chunks, 3)
        it.workers[0].num_emitted[it.workers[0].submits[0].request_id] += 2
        back = await dies(it)
        back.script = lambda submit: Script([*text_ids, EOS], logprobs=True)
        await back.start(back.address)
        await asyncio.wait_for(reading, LONG_S)
        got = Answer(chunks).check()
        assert got.text == TEXT and back.answers.num_joined == 0
        chosen = [position.chosen.token_id for chunk in chunks for position in chunk.logprobs]
        assert chosen == got.token_ids


async def test_what_the_worker_had_emitted_and_not_sent_comes_with_the_join(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 3)
        it.workers[0].num_emitted[it.workers[0].submits[0].request_id] += 4
        back = await dies(it)
        back.script = lambda submit: Script([*text_ids, EOS], hold_at=8)
        await back.start(back.address)
        await reaches(chunks, 8)
        back.gate.set()
        await asyncio.wait_for(reading, LONG_S)
        assert Answer(chunks).check().text == TEXT
        assert back.answers.num_joined == 1


# --- it does not ---


@pytest.mark.parametrize("how", ["never", "other weights", "refuses"])
async def test_elsewhere_when_it_does_not_go_on(folder: Path, text_ids: list[int], how: str) -> None:
    infos = [adopting(), adopting()]
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=infos, recover_wait_s=0.5) as it:
        busy = types_pb2.WorkerLoad(num_running=50, pages_free=99, pages_total=99)
        it.workers[1].report(busy)
        await until(lambda: it.requests.registry.links[it.workers[1].address].load.num_running == 50)
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 3)
        it.workers[1].script = lambda submit: Script([*text_ids, EOS])
        back = await dies(it, adopts=False)
        if how == "other weights":
            back.info.model.weights_digest = b"other"
            await back.start(back.address)
        elif how == "refuses":
            back.refuse_new = errors.CapacityError("the queue is full", retry_after_ms=100)
            await back.start(back.address)
        await asyncio.wait_for(reading, LONG_S)
        assert Answer(chunks).check().text == TEXT
        (elsewhere,) = it.workers[1].submits
        assert list(elsewhere.emitted_token_ids) == text_ids[:3]
        assert len(back.submits) == (how == "refuses")
        assert (await it.client.stats()).recovered_recomputed == 1
        await it.settled()


async def test_a_worker_that_cannot_adopt_is_not_waited_for(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), num_workers=2, recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 3)
        dies = 0 if it.workers[0].active else 1
        it.workers[1 - dies].script = lambda submit: Script([*text_ids, EOS])
        await it.workers[dies].stop()
        await asyncio.wait_for(reading, LONG_S / 2)
        assert Answer(chunks).check().text == TEXT


@pytest.mark.parametrize("features", [("resume",), FEATURES], ids=["old", "new"])
async def test_nobody_takes_it_over(folder: Path, text_ids: list[int], features: tuple[str, ...]) -> None:
    """A worker that knows no emitted tokens would begin again: it is not asked."""
    old = worker_info(features=("resume",))
    infos = [worker_info(features=features), old] if features == FEATURES else [worker_info(features=features)]
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=infos) as it:
        if len(infos) > 1:
            it.workers[1].report(types_pb2.WorkerLoad(num_running=50, pages_free=99, pages_total=99))
            await until(lambda: it.requests.registry.links[it.workers[1].address].load.num_running == 50)
        chunks: list[router_pb2.GenerateResponse] = []
        with capture_logs() as lines:
            reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
            await reaches(chunks, 3)
            await it.workers[0].stop()
            with pytest.raises(errors.WorkerLost) as caught:
                await asyncio.wait_for(reading, LONG_S)
            await it.settled()
        assert caught.value.reason == "WORKER_LOST" and caught.value.retry_after_ms
        assert not it.workers[-1].submits or len(it.workers) == 1
        stats = await it.client.stats()
        assert (stats.recovered_lost, stats.failed) == (1, 1)
        (line,) = (line for line in lines if line["event"] == "request")
        assert (line["recovered"], line["reason"]) == ("lost", "WORKER_LOST")
        assert it.requests.token_logs.num_tokens == 0


@pytest.mark.parametrize("off_by", [1, -1], ids=["gap", "repeat"])
async def test_one_that_goes_on_at_another_place_is_never_passed_on(
    folder: Path, text_ids: list[int], off_by: int
) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 3)
        back = await dies(it, adopts=False)
        back.script = lambda submit: Script([*text_ids, EOS], begin_off_by=off_by)
        await back.start(back.address)
        with pytest.raises(errors.InternalError) as caught:
            await asyncio.wait_for(reading, LONG_S)
        assert caught.value.reason == "TOKEN_GAP" and num_tokens(chunks) == 3
        await it.settled()


async def test_a_request_that_takes_every_worker_down_is_given_up(folder: Path) -> None:
    """One token from each life would do it no good: it is the row of deaths without a token that counts."""
    async with cluster(folder, Script([5, 6, 7, EOS], hold_at=1), infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 1)
        for _ in range(recovery.MAX_FAILURES - 1):
            back = it.workers[0] = await it.workers[0].successor(adopts=False)
            await back.start(back.address)
            await until(lambda back=back: back.active)  # type: ignore[misc]
            assert not reading.done()
        await back.stop()
        with pytest.raises(errors.WorkerLost, match="so were those"):
            await asyncio.wait_for(reading, LONG_S / 2)


async def test_more_tokens_than_are_kept_are_not_computed_again(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=5), infos=[adopting()], recover_wait_s=LONG_S) as it:
        it.requests.token_logs = TokenLogs(max_tokens=4)
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 5)
        assert (it.requests.token_logs.num_tokens, it.requests.token_logs.num_dropped) == (0, 1)
        back = await dies(it)
        await back.start(back.address)
        with pytest.raises(errors.WorkerLost, match="TOKEN_LOG_FULL"):
            await asyncio.wait_for(reading, LONG_S)
        assert not back.submits


async def test_a_worker_that_stops_says_so_and_its_streams_go_on_at_another_at_once(
    folder: Path, text_ids: list[int]
) -> None:
    stops = errors.WorkerLost("the worker is stopping")
    infos = [adopting(), adopting()]
    async with cluster(folder, Script(text_ids[:3], error=stops), infos=infos, recover_wait_s=LONG_S) as it:
        it.workers[1].report(types_pb2.WorkerLoad(num_running=50, pages_free=99, pages_total=99))
        await until(lambda: it.requests.registry.links[it.workers[1].address].load.num_running == 50)
        it.workers[1].script = lambda submit: Script([*text_ids, EOS])
        got = Answer([chunk async for chunk in it.client.generate("hello")]).check()
        assert got.text == TEXT and len(it.workers[1].submits) == 1
        await it.settled()


# --- while nobody has it ---


async def test_cancel_while_its_worker_is_away_ends_it(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello", request_id="r"), chunks))
        await reaches(chunks, 3)
        gone = lost(it)
        await it.workers[0].stop()
        await until(gone)
        assert await it.client.cancel("r")
        await asyncio.wait_for(reading, LONG_S)
        got = Answer(chunks).check()
        assert (got.last.finish_reason, len(got.token_ids)) == (types_pb2.FINISH_REASON_ABORTED, 3)
        it.workers[0].active.clear()
        await it.settled()


async def test_a_caller_that_leaves_meanwhile_leaves_nothing(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 3)
        gone = lost(it)
        await it.workers[0].stop()
        await until(gone)
        assert it.requests.token_logs.num_tokens == 3
        reading.cancel()
        it.workers[0].active.clear()
        await it.settled()
        assert it.requests.token_logs.num_tokens == 0
        assert not it.requests.registry._watchers


async def test_before_the_first_token_it_waits_for_a_place(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=0), infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await until(lambda: it.workers[0].active)
        gone = lost(it)
        back = await dies(it)
        await until(gone)
        await asyncio.sleep(0.05)
        assert not reading.done()
        back.script = lambda submit: Script([*text_ids, EOS])
        await back.start(back.address)
        await asyncio.wait_for(reading, LONG_S)
        assert Answer(chunks).check().text == TEXT
        assert back.answers.num_joined == 1  # its prompt was not computed again
        stats = await it.client.stats()
        assert (stats.retries, stats.recovered_joined) == (1, 0)


async def test_a_silent_worker_is_lost(folder: Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "SILENT_S", 1.0)
    infos = [adopting(), adopting()]
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=infos, recover_wait_s=0.5) as it:
        it.workers[1].report(types_pb2.WorkerLoad(num_running=50, pages_free=99, pages_total=99))
        await until(lambda: it.requests.registry.links[it.workers[1].address].load.num_running == 50)
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 3)
        link = it.requests.registry.links[it.workers[0].address]
        await asyncio.sleep(1.5)
        assert link.state == "ready"  # it computes, and reports
        it.workers[1].script = lambda submit: Script([*text_ids, EOS])
        it.workers[0].silent, it.workers[0].welcome_s = True, 60.0
        await asyncio.wait_for(reading, LONG_S)
        assert "not a word" in link.why or link.state == "lost"
        assert Answer(chunks).check().text == TEXT
        await it.workers[0].stop()


# --- resumable ones ---


async def test_a_resumable_answer_goes_on_for_all_that_read_it(folder: Path, text_ids: list[int]) -> None:
    script = Script([*text_ids, EOS], hold_at=3)
    async with scene(folder, script, infos=[adopting()], recover_wait_s=LONG_S) as s:
        first = s.here.generate(ask(stop_strings=["TOP and"]), "r")
        head = [await first.read()]
        others = [door.resume("r") for door in (s.here, s.there)]
        heads = [[await call.read()] for call in others]
        back = await dies(s.it)
        back.script = lambda submit: Script([*text_ids, EOS], every_s=0.001)
        await back.start(back.address)
        rests = await asyncio.gather(*(asyncio.wait_for(read(call), LONG_S) for call in (first, *others)))
        texts = {whole(a + b).text for a, b in zip([head, *heads], rests, strict=True)}
        assert texts == {TEXT[: TEXT.index("TOP and")]}
        assert len(back.submits) == 1 and back.answers.num_joined == 1
        await s.settled()


async def test_a_cut_connection_costs_a_resumable_answer_nothing(folder: Path, text_ids: list[int]) -> None:
    """The worker lives on, and with it the sequence: what it submits again joins it, from the first token or behind."""
    worker = FakeWorker(lambda submit: Script([*text_ids, EOS], hold_at=3), adopting())
    cable = Cable(await worker.start())
    async with (
        cable.plugged() as address,
        cluster(folder, Script(), infos=[], addresses=[address], recover_wait_s=LONG_S) as it,
    ):
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello", resumable=True), chunks))
        await reaches(chunks, 3)
        cable.cut()
        await until(lambda: len(worker.submits) == 2)
        worker.gate.set()
        await asyncio.wait_for(reading, LONG_S)
        assert Answer(chunks).check().text == TEXT
        assert (await it.client.stats()).recovered_joined == 1
    await worker.stop()


async def test_resume_waits_for_a_worker_that_is_away(folder: Path, text_ids: list[int]) -> None:
    """Through the other router, whose caller's first one died with the worker."""
    async with scene(folder, Script([*text_ids, EOS], hold_at=3), infos=[adopting()], recover_wait_s=LONG_S) as s:
        head = await read(s.here.generate(ask(), "r"), 3)
        await s.left("r")
        back = await dies(s.it)
        link = s.there.requests.registry.links[back.address]
        await until(lambda: link.state == "lost")
        resumed = asyncio.create_task(read(s.there.resume("r", *behind(head))))
        cancelled = asyncio.create_task(s.there.cancel("nothing"))
        await asyncio.sleep(0.1)
        assert not resumed.done() and not cancelled.done()
        back.script = lambda submit: Script([*text_ids, EOS])
        await back.start(back.address)
        assert whole(head + await asyncio.wait_for(resumed, LONG_S)).text == TEXT
        assert not await asyncio.wait_for(cancelled, LONG_S)
        await s.settled()


async def test_an_address_where_nobody_ever_was_is_no_worker_that_may_have_it(folder: Path) -> None:
    with_nobody = ["127.0.0.1:1"]
    async with cluster(folder, Script([EOS]), addresses=with_nobody, wait=False, recover_wait_s=0.5) as it:
        await until(lambda: it.requests.registry.ready())
        it.requests.registry.links[with_nobody[0]].away_since_s = time.monotonic()  # as if it had been named just now
        with pytest.raises(errors.Unavailable, match=r"127\.0\.0\.1:1 is connecting"):  # it may come any moment
            await it.client.cancel("nothing")
        assert not await it.client.cancel("nothing")
        with pytest.raises(errors.NotFound):
            async for _ in it.client.resume("nothing", token_offset=0, text_offset=0):
                pass


async def test_a_worker_that_was_lost_is_named_as_long_as_answers_are_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(folder, Script([EOS]), num_workers=2) as s:
        gone = lost(s.it)
        await s.worker.stop()
        await until(gone)
        for _ in range(2):
            error = await refusal(s.here.resume("nothing"))
            assert error.reason == "WORKER_NOT_ASKED" and s.worker.address in str(error.given)
        monkeypatch.setattr(registry, "MAX_RESUME_GRACE_MS", 300)
        assert (await refusal(s.here.resume("nothing"))).reason == "UNKNOWN_REQUEST"


async def test_a_client_outlives_router_and_worker_that_die_together(folder: Path, text_ids: list[int]) -> None:
    script = Script([*text_ids, EOS], hold_at=3)
    quick = RetryPolicy(first_delay_s=0.001, max_delay_s=0.05)
    async with scene(folder, script, infos=[adopting()], recover_wait_s=LONG_S) as s:
        cable = Cable(s.it.address)
        async with (
            cable.plugged() as one,
            cluster(folder, Script(), infos=[], addresses=[s.worker.address], recover_wait_s=LONG_S) as other,
        ):
            chunks: list[router_pb2.GenerateResponse] = []
            async with AsyncTailpack(f"{one},{other.address}", retry=quick) as client:
                reading = asyncio.create_task(gathered(client.generate("hello", resumable=True, timeout_s=30), chunks))
                await reaches(chunks, 3)
                back = await dies(s.it)
                cable.cut()
                back.script = lambda submit: Script([*text_ids, EOS])
                await asyncio.sleep(0.1)
                assert not reading.done()
                await back.start(back.address)
                await asyncio.wait_for(reading, LONG_S)
                assert Answer(chunks).check().text == TEXT
                assert (await other.client.stats()).resumes == 1


async def test_closing_the_router_ends_what_waits(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], hold_at=3), infos=[adopting()], recover_wait_s=LONG_S) as it:
        chunks: list[router_pb2.GenerateResponse] = []
        reading = asyncio.create_task(gathered(it.client.generate("hello"), chunks))
        await reaches(chunks, 3)
        gone = lost(it)
        await it.workers[0].stop()
        await until(gone)
        await it.requests.registry.close()
        with pytest.raises(TailpackError):
            await asyncio.wait_for(reading, LONG_S / 2)
