"""The router in front of fake workers: answers, refusals, placement, cancellation, slow readers."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, MutableMapping
from pathlib import Path
from typing import Any

import grpc
import pytest
from structlog.testing import capture_logs

from protos import errors, router_pb2, router_pb2_grpc, rpc, types_pb2, worker_pb2
from protos.errors import TailpackError
from router import account, admission, generation, registry, relay
from router.client import PREFIX_REUSE, AsyncTailpack, build_request
from router.service import SERVICE_NAME, RouterService
from router.tokenizer import Tokenizer
from tests.scenarios.fake_worker import FakeWorker, Script, worker_info
from tests.scenarios.router_harness import Answer, answer, cluster, until
from tests.scenarios.tiny_tokenizer import EOS

HANG_S = 60.0
"""A bound on what would otherwise hang, on a busy machine too; nothing is measured by it."""

TEXT = "The capital of France is Paris. 日本語 👩‍👩‍👧‍👦 äöü 🎉 done"


async def refused(chunks: AsyncIterator[router_pb2.GenerateResponse]) -> TailpackError:
    with pytest.raises(TailpackError) as caught:
        async for _ in chunks:
            pass
    return caught.value


def canonical(lines: list[MutableMapping[str, Any]]) -> MutableMapping[str, Any]:
    """The one line that a request leaves in the log."""
    (line,) = (line for line in lines if line["event"] == "request")
    return line


# --- answers ---


@pytest.mark.parametrize("per_step", [1, 2, 3, 1000])
async def test_an_answer_has_text_offsets_usage_and_a_reason(folder: Path, text_ids: list[int], per_step: int) -> None:
    async with cluster(folder, Script([*text_ids, EOS], per_step=per_step, seed=7)) as it:
        got = await answer(it.client, "hello", request_id="r-1")
        assert got.text == TEXT
        assert got.token_ids == [*text_ids, EOS]
        assert got.last.finish_reason == types_pb2.FINISH_REASON_EOS
        assert got.last.timings.prefill_ns == 1000
        assert got.chunks[0].worker_id == it.workers[0].info.worker_id
        assert got.chunks[0].seed == 7
        assert got.chunks[0].request_id == "r-1"
        assert got.last.usage.prompt_tokens == len(it.workers[0].submits[0].prompt_token_ids)
        await it.settled()


@pytest.mark.parametrize("exact", [True, False])
async def test_what_of_a_prompt_was_reused_and_may_be(folder: Path, text_ids: list[int], exact: bool) -> None:
    async with cluster(folder, Script([*text_ids, EOS], cached=3, prefix_exact=exact)) as it:
        for asked in ("default", "any", "exact", "none"):
            got = await answer(it.client, "hello", prefix_reuse=asked)
            assert (got.last.usage.cached_prompt_tokens, got.last.usage.prefix_exact) == (3, exact)
            assert it.workers[0].submits[-1].prefix_reuse == PREFIX_REUSE[asked]
        with pytest.raises(TailpackError, match="BAD_PREFIX_REUSE"):
            build_request("hello", prefix_reuse="some")
        request = router_pb2.GenerateRequest(text="hello", prefix_reuse=9)  # type: ignore[arg-type]
        assert (await refused(it.client.stream(request))).reason == "BAD_PREFIX_REUSE"


async def test_chat_goes_through_the_template_and_text_does_not(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([5, EOS])) as it:
        await answer(it.client, [("system", "Be brief."), ("user", "hi")])
        await answer(it.client, "hi", chat=False)
        await answer(it.client, [5, 6, 7])
        chat, text, ids = (list(submit.prompt_token_ids) for submit in it.workers[0].submits)
        start, end = "<|im_start|>", "<|im_end|>"
        rendered = f"{start}system\nBe brief.{end}\n{start}user\nhi{end}\n{start}assistant\n"
        assert chat == it.tokenizer.encode(rendered)
        assert text == it.tokenizer.encode("hi")
        assert ids == [5, 6, 7]


async def test_stop_string_across_steps_ends_the_text_before_it(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], every_s=0.001)) as it:
        got = await answer(it.client, "hello", stop_strings=["never", "e is Par"])
        assert got.text == "The capital of Franc"
        assert got.last.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
        assert got.last.stop_string == "e is Par"
        assert got.token_ids == text_ids[: len(got.token_ids)]
        assert "e is Par" in it.tokenizer._tokenizer.decode(got.token_ids)
        assert it.workers[0].aborts
        await it.settled()


async def test_stop_string_in_the_worker_s_last_step_is_still_a_stop(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], per_step=1000)) as it:
        got = await answer(it.client, "hello", stop_strings=["Paris"])
        assert got.text == "The capital of France is "
        assert got.last.finish_reason == types_pb2.FINISH_REASON_STOP_STRING
        await it.settled()


async def test_stop_string_ends_even_if_the_worker_never_answers_the_abort(
    folder: Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "SETTLE_S", 0.05)
    async with cluster(folder, Script(text_ids, endless=True, deaf=True, every_s=0.05)) as it:
        got = await answer(it.client, "hello", stop_strings=["The"])
        assert (got.text, got.last.stop_string) == ("", "The")


async def test_a_held_back_start_of_a_stop_string_comes_out_at_the_end(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS])) as it:
        got = await answer(it.client, "hello", stop_strings=["done and more"])
        assert got.text == TEXT
        assert got.last.finish_reason == types_pb2.FINISH_REASON_EOS


async def test_an_incomplete_character_at_the_end_is_one_replacement(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode("a\U0001f680")[:-1]  # the rocket is not in the corpus: single bytes
    async with cluster(folder, Script(ids)) as it:
        got = await answer(it.client, "hello")
        assert got.text == "a\ufffd" == tokenizer._tokenizer.decode(ids)
    tokenizer.close()


async def test_a_stop_token_is_counted_but_not_shown(folder: Path, text_ids: list[int]) -> None:
    script = Script(text_ids[:4], finish=types_pb2.FINISH_REASON_STOP_TOKEN)
    async with cluster(folder, script) as it:
        got = await answer(it.client, "hello", stop_token_ids=[text_ids[3]])
        assert got.token_ids == text_ids[:4]
        assert got.text == it.tokenizer._tokenizer.decode(text_ids[:3])
        assert got.last.finish_reason == types_pb2.FINISH_REASON_STOP_TOKEN


async def test_max_tokens_defaults_to_the_room_and_at_most_1024(folder: Path) -> None:
    infos = [worker_info(max_sequence_tokens=20)]
    async with cluster(folder, Script([5], endless=True, per_step=1000), infos=infos) as it:
        got = await answer(it.client, [5] * 12)
        assert got.last.finish_reason == types_pb2.FINISH_REASON_LENGTH
        assert got.last.usage.output_tokens == 8
    async with cluster(folder, Script([5], endless=True, per_step=5000)) as it:
        assert (await answer(it.client, [5] * 12)).last.usage.output_tokens == 1024
        assert (await answer(it.client, [5] * 12, max_tokens=3)).last.usage.output_tokens == 3


async def test_logprobs_come_one_per_token(folder: Path, text_ids: list[int]) -> None:
    async with cluster(folder, Script([*text_ids, EOS], logprobs=True, per_step=2)) as it:
        got = await answer(it.client, "hello", logprobs=0, stop_strings=["Paris"])
        chosen = [position.chosen.token_id for chunk in got.chunks for position in chunk.logprobs]
        assert chosen == got.token_ids


@pytest.mark.parametrize(("given", "resumable"), [(None, False), (None, True), ("mine-1", True), ("mine-1", False)])
async def test_the_request_id_is_in_the_initial_metadata(folder: Path, given: str | None, resumable: bool) -> None:
    """But of a caller that chose it, for a request that ends with its call: the chunks have it soon enough."""
    async with cluster(folder, Script([5, EOS])) as it, rpc.channel(it.address) as channel:
        request = build_request("hi", resumable=resumable)
        call = router_pb2_grpc.RouterStub(channel).Generate(request, metadata=rpc.metadata(given))
        sent = dict(await call.initial_metadata()).get("x-request-id")
        (request_id,) = {chunk.request_id async for chunk in call}
        assert request_id == given or given is None
        assert sent == (request_id if resumable or given is None else None)


# --- refusals ---

BAD_REQUESTS = {
    "EMPTY_PROMPT": [
        router_pb2.GenerateRequest(),
        router_pb2.GenerateRequest(text=""),
        router_pb2.GenerateRequest(chat=router_pb2.Chat()),
        router_pb2.GenerateRequest(chat=router_pb2.Chat(messages=[router_pb2.ChatMessage(role="user")])),
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds()),
    ],
    "PROMPT_TOO_LARGE": [
        router_pb2.GenerateRequest(text="x" * (50 << 20)),
        router_pb2.GenerateRequest(text="é" * (5 << 20)),
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[5] * (3 << 20))),
    ],
    "PROMPT_TOO_LONG": [router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[5] * 4096))],
    "UNKNOWN_MODEL": [router_pb2.GenerateRequest(text="x", model="gpt-9")],
    "BAD_ROLE": [
        router_pb2.GenerateRequest(chat=router_pb2.Chat(messages=[router_pb2.ChatMessage(role="root", content="x")]))
    ],
    "CHAT_TEMPLATE": [
        router_pb2.GenerateRequest(
            chat=router_pb2.Chat(
                messages=[
                    router_pb2.ChatMessage(role="user", content="x"),
                    router_pb2.ChatMessage(role="system", content="y"),
                ]
            )
        )
    ],
    "BAD_TOKEN_ID": [
        router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=[5, 600])),
        router_pb2.GenerateRequest(text="x", stop=types_pb2.StopConditions(stop_token_ids=[600])),
    ],
    "BAD_TEMPERATURE": [
        router_pb2.GenerateRequest(text="x", sampling=types_pb2.Sampling(temperature=value))
        for value in (float("nan"), float("inf"), -0.1, 100.1)
    ],
    "BAD_TOP_P": [
        router_pb2.GenerateRequest(text="x", sampling=types_pb2.Sampling(top_p=value))
        for value in (float("nan"), 0.0, -0.1, 1.1)
    ],
    "BAD_MIN_P": [
        router_pb2.GenerateRequest(text="x", sampling=types_pb2.Sampling(min_p=value))
        for value in (float("nan"), -0.1, 1.1)
    ],
    "BAD_REPETITION_PENALTY": [
        router_pb2.GenerateRequest(text="x", sampling=types_pb2.Sampling(repetition_penalty=value))
        for value in (float("nan"), 0.0, -1.0, float("inf"))
    ],
    "BAD_LOGPROBS": [router_pb2.GenerateRequest(text="x", sampling=types_pb2.Sampling(logprobs=21))],
    "BAD_STOP_STRINGS": [
        router_pb2.GenerateRequest(text="x", stop_strings=["s"] * 17),
        router_pb2.GenerateRequest(text="x", stop_strings=[""]),
        router_pb2.GenerateRequest(text="x", stop_strings=["é" * 129]),
    ],
    "BAD_STOP_TOKENS": [router_pb2.GenerateRequest(text="x", stop=types_pb2.StopConditions(stop_token_ids=[5] * 65))],
    "FEATURE_NOT_BUILT": [
        router_pb2.GenerateRequest(text="x", tools_json="[]"),
        router_pb2.GenerateRequest(text="x", json_schema="{}"),
        router_pb2.GenerateRequest(text="x", lora_adapter="a"),
    ],
}


async def test_bad_input_is_refused_by_name_and_hurts_nothing_else(folder: Path) -> None:
    async with cluster(folder, Script([5, 6, EOS], every_s=0.05)) as it:
        good = asyncio.create_task(answer(it.client, "hello"))
        num_bad = 0
        for reason, requests in BAD_REQUESTS.items():
            for request in requests:
                error = await refused(it.client.stream(request))
                assert error.reason == reason, error
                num_bad += 1
        assert (await good).token_ids == [5, 6, EOS]
        assert len(it.workers[0].submits) == 1  # no worker saw any of it
        stats = await it.client.stats()
        assert (stats.rejected, stats.finished, stats.in_flight) == (num_bad, 1, 0)
        await it.settled()


@pytest.mark.parametrize("chat", [True, False])
async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, chat: bool
) -> None:
    async with cluster(folder, Script([5, EOS])) as it:
        monkeypatch.setattr(it.tokenizer, "_encode", lambda *arguments: pytest.fail("tokenised"))
        error = await refused(it.client.generate("x " * 200_000, chat=chat))
        assert error.reason == "PROMPT_TOO_LONG"
        assert "4095 tokens" in (error.allowed or "")
        await it.settled()


async def test_bad_metadata_is_refused(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS])) as it:
        error = await refused(it.client.generate("x", request_id="no spaces"))
        assert isinstance(error, errors.InvalidRequest)


async def test_a_request_id_in_use_is_refused(folder: Path) -> None:
    async with cluster(folder, Script([5], endless=True, every_s=0.01)) as it:
        first = it.client.generate("x", request_id="same")
        await anext(first)
        error = await refused(it.client.generate("x", request_id="same"))
        assert error.reason == "DUPLICATE_REQUEST"
        await first.aclose()
        await it.settled()


async def test_one_s_own_request_id_can_be_used_again_right_after_leaving(folder: Path) -> None:
    async with cluster(folder, Script([5], endless=True, every_s=0.01)) as it:
        for _ in range(30):
            chunks = it.client.generate("x", request_id="same", max_tokens=4000)
            await anext(chunks)
            await chunks.aclose()
        assert len(it.workers[0].submits) == 30
        await it.settled()


async def test_a_request_id_whose_end_no_worker_confirms_is_refused_in_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "ID_FREE_S", 0.05)
    async with cluster(folder, Script([5], endless=True, every_s=0.01, deaf=True)) as it:
        first = it.client.generate("x", request_id="same", max_tokens=4000)
        await anext(first)
        await first.aclose()
        assert (await refused(it.client.generate("x", request_id="same"))).reason == "DUPLICATE_REQUEST"
        assert len(it.workers[0].submits) == 1


async def test_a_request_id_is_its_tenant_s_own(folder: Path) -> None:
    script = Script([5, 6, 7, 8], endless=True, every_s=0.01)
    async with cluster(folder, script) as it:
        async with AsyncTailpack(it.address, tenant="a") as a, AsyncTailpack(it.address, tenant="b") as b:
            running = [asyncio.create_task(answer(who, "x", request_id="same", max_tokens=4000)) for who in (a, b)]
            await until(lambda: len(it.workers[0].active) == 2)
            # Nobody learns of another's request by its id, and a second use of one's own is refused as before.
            assert not await it.client.cancel("same")
            assert (await answer(it.client, "x", request_id="same", max_tokens=3)).token_ids == [5, 6, 7]
            assert (await refused(a.generate("x", request_id="same"))).reason == "DUPLICATE_REQUEST"
            assert await a.cancel("same")
            got = await running[0]
            assert got.last.finish_reason == types_pb2.FINISH_REASON_ABORTED
            assert {chunk.request_id for chunk in got.chunks} == {"same"}
            await until(lambda: len(it.workers[0].active) == 1)
            assert not running[1].done()
            assert await b.cancel("same")
            assert (await running[1]).last.finish_reason == types_pb2.FINISH_REASON_ABORTED
        await it.settled()


async def test_a_tenant_and_an_id_that_no_worker_could_hold_together_are_refused(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS])) as it, AsyncTailpack(it.address, tenant="t" * 128) as client:
        await answer(client, "x", request_id="r" * 127)
        assert (await refused(client.generate("x", request_id="r" * 128))).reason == "BAD_REQUEST_ID"


async def test_requests_over_the_bound_are_refused_with_a_retry_hint(folder: Path) -> None:
    async with cluster(folder, Script([5], endless=True, every_s=0.01), max_in_flight=2) as it:
        streams = [it.client.generate("x") for _ in range(2)]
        for stream in streams:
            await anext(stream)
        error = await refused(it.client.generate("x"))
        assert error.reason == "TOO_MANY_REQUESTS"
        assert isinstance(error, errors.CapacityError)
        assert error.retry_after_ms
        for stream in streams:
            await stream.aclose()
        await it.settled()


async def test_requests_too_large_together_are_refused_with_a_retry_hint(folder: Path) -> None:
    script = Script([5], endless=True, every_s=0.01)
    async with cluster(folder, script, max_request_bytes=2500) as it:
        first, second = (it.client.generate([5] * 1000) for _ in range(2))
        for stream in (first, second):
            await anext(stream)
        error = await refused(it.client.generate([5] * 1000))
        assert isinstance(error, errors.CapacityError)
        assert error.reason == "TOO_MANY_REQUEST_BYTES"
        assert error.retry_after_ms
        await anext(it.client.generate([5] * 10))  # a small one still fits
        await first.aclose()
        await until(lambda: len(it.workers[0].active) == 1)
        await anext(it.client.generate([5] * 1000))  # what has ended does not count
        await second.aclose()
        await it.settled()
        assert it.requests.admission.held_bytes == 0
        assert len(it.workers[0].submits) == 4


async def test_a_submission_is_dropped_at_the_first_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = generation.Answer._submission

    def keeping(*arguments: Any) -> Any:
        made.append(original(*arguments))
        return made[-1]

    monkeypatch.setattr(generation.Answer, "_submission", keeping)
    async with cluster(folder, Script([5], endless=True, hold_at=0, every_s=0.01)) as it:
        stream = it.client.generate("x", max_tokens=4000)
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: it.workers[0].active)
        while_waiting = sys.getrefcount(made[0])
        it.workers[0].gate.set()
        await first
        afterwards, alone = sys.getrefcount(made[0]), [object()]
        ours = sys.getrefcount(alone[0])
        assert while_waiting > afterwards
        assert afterwards == ours  # only the test's own list holds it
        await stream.aclose()
        await it.settled()


async def test_no_worker_is_said_with_a_retry_hint(folder: Path) -> None:
    async with cluster(folder, Script(), num_workers=1, addresses=["127.0.0.1:1"], wait=False) as it:
        await it.workers[0].stop()
        error = await refused(it.client.generate("x"))
        assert error.reason == "NO_WORKER"
        assert error.retry_after_ms
        states = {worker.state for worker in await it.client.list_workers()}
        assert "ready" not in states


@pytest.mark.parametrize(
    "info",
    [
        worker_info(tokenizer_digest=b"another one     "),
        worker_info(vocab_size=100),
        worker_info(eos_token_ids=[599, 600], vocab_size=700),
    ],
    ids=["digest", "vocabulary", "eos"],
)
async def test_a_worker_that_does_not_fit_the_tokenizer_is_refused_by_name(
    folder: Path, info: types_pb2.WorkerInfo
) -> None:
    async with cluster(folder, Script([5, EOS]), infos=[info], wait=False) as it:
        await until(lambda: next(iter(it.requests.registry.links.values())).state == "refused")
        (worker,) = await it.client.list_workers()
        assert "TOKENIZER_MISMATCH" in worker.why
        error = await refused(it.client.generate("x"))
        assert error.reason == "NO_WORKER"
        assert "TOKENIZER_MISMATCH" in (error.given or "")


async def test_one_worker_under_two_addresses_counts_once(folder: Path) -> None:
    info = worker_info()
    async with cluster(folder, Script([5, EOS]), infos=[info, info], wait=False) as it:
        links = list(it.requests.registry.links.values())
        await until(lambda: sorted(link.state for link in links) == ["ready", "refused"])
        assert any("DUPLICATE_WORKER" in link.why for link in links)


async def test_several_models_must_be_named(folder: Path) -> None:
    infos = [worker_info(model="a"), worker_info(model="b")]
    async with cluster(folder, Script([5, EOS]), infos=infos) as it:
        error = await refused(it.client.generate("x"))
        assert error.reason == "MODEL_NOT_NAMED"
        for _ in range(5):
            await answer(it.client, "x", model="b")
        assert [len(worker.submits) for worker in it.workers] == [0, 5]


# --- placement ---


async def test_a_burst_spreads_evenly(folder: Path) -> None:
    """sglang's router once updated loads after the first response only: all of a burst went to one worker."""
    async with cluster(folder, Script([5, EOS], hold_at=0), num_workers=4) as it:
        burst = [asyncio.create_task(answer(it.client, [5] * 100)) for _ in range(64)]
        await until(lambda: sum(len(worker.submits) for worker in it.workers) == 64)
        for worker in it.workers:
            worker.gate.set()
        await asyncio.gather(*burst)
        assert [len(worker.submits) for worker in it.workers] == [16, 16, 16, 16]
        await it.settled()


async def test_load_of_others_counts(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS], first_s=0.1), num_workers=2) as it:
        it.workers[0].report(types_pb2.WorkerLoad(num_running=8, pages_free=100, pages_total=100))
        links = it.requests.registry.links
        await until(lambda: links[it.workers[0].address].load.num_running == 8)
        await asyncio.gather(*(answer(it.client, "x") for _ in range(4)))
        assert [len(worker.submits) for worker in it.workers] == [0, 4]


# --- cancellation ---


NEVER_S = 3600.0
"""Until the next token. What a test waits for must come without it. How fast it comes: tests/bench/bench_cancel.py."""


async def test_cancel_after_three_tokens_reaches_the_worker_before_the_fourth(folder: Path) -> None:
    async with cluster(folder, Script([5, 6, 7, 8], endless=True, per_step=3, every_s=NEVER_S)) as it:
        async for chunk in it.client.generate("x", request_id="left", max_tokens=1000):
            assert list(chunk.token_ids) == [5, 6, 7]
            break
        await until(lambda: it.workers[0].aborts == ["left"], HANG_S)
        assert it.workers[0].num_emitted["left"] == 3
        await it.settled()
        assert (await it.client.stats()).cancelled == 1


async def test_cancel_in_prefill_reaches_the_worker_before_the_first_token(folder: Path) -> None:
    async with cluster(folder, Script([5], first_s=NEVER_S)) as it:
        task = asyncio.create_task(answer(it.client, "x", request_id="left"))
        await until(lambda: it.workers[0].active)
        task.cancel()
        await until(lambda: it.workers[0].aborts == ["left"], HANG_S)
        assert it.workers[0].num_emitted["left"] == 0
        await it.settled()


async def test_a_cancelled_sequence_is_not_counted_while_the_worker_is_slow_to_say_so(folder: Path) -> None:
    async with cluster(folder, Script([5], first_s=60.0, deaf=True)) as it:
        (link,) = it.requests.registry.links.values()
        task = asyncio.create_task(answer(it.client, "x", request_id="slow"))
        await until(lambda: it.workers[0].active)
        task.cancel()
        await until(lambda: it.workers[0].aborts)
        assert (link.own.num_sequences, link.own.queued_tokens, link.own.num_pages) == (0, 0, 0)
        assert link.num_known == 1
        # Its id stays taken: the worker's late words about it must not reach another request.
        assert (await refused(it.client.generate("x", request_id="slow"))).reason == "DUPLICATE_REQUEST"


async def test_a_caller_who_lives_and_does_not_read_gives_its_place_back(folder: Path) -> None:
    """What is unread is too little for the relay to mind."""
    small_window = [("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0)]
    script = Script([70, 71, 72], endless=True, per_step=50, logprobs=True)
    async with cluster(folder, script, infos=[worker_info(max_sequence_tokens=30_000)]) as it:
        server = rpc.RpcServer("impatient", stalled_s=0.2)
        server.add(router_pb2_grpc.add_RouterServicer_to_server, RouterService(it.requests), SERVICE_NAME)
        address = await server.start("127.0.0.1:0")
        try:
            async with grpc.aio.insecure_channel(address, options=small_window) as channel:
                with capture_logs() as lines:
                    call = router_pb2_grpc.RouterStub(channel).Generate(build_request([5], max_tokens=20_000))
                    await call.read()
                    await it.settled(HANG_S)  # nothing was read, cancelled or cut
                with pytest.raises(grpc.RpcError) as ended:
                    while isinstance(await call.read(), router_pb2.GenerateResponse):
                        pass
        finally:
            await server.stop(0)
        assert rpc.error_from(ended.value).reason == "SLOW_READER"
        line = canonical(lines)
        assert (line["outcome"], line["reason"]) == ("failed", "SLOW_READER")
        assert it.requests.admission.held_bytes == 0


async def test_the_deadline_of_the_call_ends_the_sequence(folder: Path) -> None:
    async with cluster(folder, Script([5], first_s=60.0)) as it:
        began_ns = time.time_ns()
        error = await refused(it.client.generate("x", timeout_s=0.5))
        assert isinstance(error, errors.DeadlineExceeded)
        await until(lambda: it.workers[0].aborts, HANG_S)
        assert began_ns < it.workers[0].submits[0].deadline_unix_ns < time.time_ns()
        await it.settled()


@pytest.mark.parametrize(("timeout_s", "reason"), [(1.0, "DEADLINE_EXCEEDED"), (60.0, "CLIENT_GONE")])
async def test_the_log_tells_a_deadline_from_a_client_that_left(folder: Path, timeout_s: float, reason: str) -> None:
    async with cluster(folder, Script([5], first_s=60.0)) as it:
        with capture_logs() as lines:
            task = asyncio.create_task(answer(it.client, "x", timeout_s=timeout_s))
            await until(lambda: it.workers[0].active)
            if reason == "CLIENT_GONE":
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await it.settled()
        line = canonical(lines)
        assert (line["outcome"], line["reason"]) == ("cancelled", reason)


@pytest.mark.parametrize(
    ("deadline_s", "remaining_s", "ran_out"),
    [
        (None, None, False),
        (60.0, 0.0, True),  # gRPC never says less than 0
        (60.0, 0.5, True),
        (60.0, 1.0, False),
        (0.2, 0.1, False),
        (0.2, 0.03, True),
        (1001.0, 9.0, True),  # sent as 1,010 s
    ],
)
def test_a_deadline_counts_as_met_within_the_way_and_the_rounding(
    deadline_s: float | None, remaining_s: float | None, ran_out: bool
) -> None:
    assert account.ran_out(deadline_s, remaining_s) is ran_out


async def test_cancel_rpc_ends_own_requests_of_the_same_tenant_only(folder: Path) -> None:
    async with cluster(folder, Script([5], endless=True, every_s=0.01)) as it:
        async with AsyncTailpack(it.address, tenant="a") as a, AsyncTailpack(it.address, tenant="b") as b:
            running = asyncio.create_task(answer(a, "x", request_id="r-9", max_tokens=4000))
            await until(lambda: it.workers[0].active)
            assert not await b.cancel("r-9")
            assert not await a.cancel("r-0")
            assert await a.cancel("r-9")
            got = await running
            assert got.last.finish_reason == types_pb2.FINISH_REASON_ABORTED
            assert not await a.cancel("r-9")
        await it.settled()
        assert (await it.client.stats()).cancelled == 1


async def test_cancel_rpc_works_from_any_router(folder: Path) -> None:
    async with (
        cluster(folder, Script([5], endless=True, every_s=0.01), num_workers=2) as one,
        cluster(folder, Script(), infos=[], addresses=[worker.address for worker in one.workers]) as two,
    ):
        async with AsyncTailpack(one.address, tenant="a") as a, AsyncTailpack(two.address, tenant="a") as other:
            running = asyncio.create_task(answer(a, "x", request_id="far-1", max_tokens=4000))
            await until(lambda: any(worker.active for worker in one.workers))
            async with AsyncTailpack(two.address, tenant="b") as stranger:
                assert not await stranger.cancel("far-1")
            assert await other.cancel("far-1")
            assert (await running).last.finish_reason == types_pb2.FINISH_REASON_ABORTED
        await one.settled()


@pytest.mark.slow
async def test_two_thousand_random_cancels_leave_nothing(folder: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    random_ = random.Random(seed)

    async def once(client: AsyncTailpack, number: int) -> None:
        task = asyncio.create_task(answer(client, "hello", request_id=f"storm-{number}", max_tokens=200))
        await asyncio.sleep(random_.uniform(0, 0.05))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    script = Script([5, 6, 7], endless=True, first_s=0.01, every_s=0.001)
    async with cluster(folder, script, num_workers=3) as it:
        start = 0
        # Some are cancelled before this busy process has sent them: 2,000 that the router saw.
        while it.requests.counters.cancelled < 2000 and start < 20_000:
            await asyncio.gather(*(once(it.client, number) for number in range(start, start + 20)))
            start += 20
        await it.settled()
        stats = await it.client.stats()
        assert stats.in_flight == 0
        assert stats.requests == stats.finished + stats.cancelled + stats.failed + stats.rejected
        assert (stats.failed, stats.rejected) == (0, 0)
        assert stats.cancelled >= 2000
        assert (await answer(it.client, "probe", max_tokens=5)).token_ids == [5, 6, 7, 5, 6]
        # No worker is preferred or shunned afterwards (counters that leak send new requests to the restarted worker).
        before = [len(worker.submits) for worker in it.workers]
        for worker in it.workers:
            worker.script = lambda submit: Script([5], hold_at=0)  # none ends before all are placed
        last = [asyncio.create_task(answer(it.client, [5] * 10, max_tokens=5)) for _ in range(30)]
        await until(lambda: sum(len(worker.submits) for worker in it.workers) == sum(before) + 30)
        for worker in it.workers:
            worker.gate.set()
        await asyncio.gather(*last)
        assert [len(w.submits) - b for w, b in zip(it.workers, before, strict=True)] == [10, 10, 10]


# --- broken workers ---


@pytest.mark.parametrize(
    "script",
    [
        Script([5, 6, 7, 8, EOS], skip_at=2, every_s=0.002),
        Script([5, 6, 7, 8, EOS], repeat_at=2, every_s=0.002),
        Script([5, 6, 7, 8, EOS], usage_off_by=1),
    ],
    ids=["gap", "repeat", "usage"],
)
async def test_a_gap_or_repeat_is_an_internal_error_never_hidden(folder: Path, script: Script) -> None:
    async with cluster(folder, script) as it:
        tokens: list[int] = []
        with pytest.raises(errors.InternalError) as caught:
            async for chunk in it.client.generate("x"):
                tokens.extend(chunk.token_ids)
                assert not chunk.finish_reason
        assert caught.value.reason == "TOKEN_GAP"
        assert tokens == [5, 6, 7, 8, EOS][: len(tokens)]  # what came before is right
        assert (await it.client.stats()).failed == 1


async def test_an_error_of_the_worker_arrives_as_itself_behind_the_text(folder: Path) -> None:
    error = errors.InternalError("a broken invariant", given="page 7", hint="see its log")
    async with cluster(folder, Script([5, 6], error=error), num_workers=2) as it:
        tokens: list[int] = []
        with pytest.raises(errors.InternalError) as caught:
            async for chunk in it.client.generate("x"):
                tokens.extend(chunk.token_ids)
        assert tokens == [5, 6]
        assert caught.value.given == "page 7"
        assert sum(len(worker.submits) for worker in it.workers) == 1


async def test_a_full_worker_is_passed_over_and_the_retry_counted(folder: Path) -> None:
    async with cluster(folder, Script([5, EOS]), num_workers=2) as it:
        it.workers[0].refuse_new = errors.CapacityError("queue is full", retry_after_ms=200)
        for _ in range(20):  # each goes to either first: none to the full one once in a million runs
            await answer(it.client, "x")
        stats = await it.client.stats()
        assert stats.retries == len(it.workers[0].submits) > 0
        it.workers[1].refuse_new = it.workers[0].refuse_new
        error = await refused(it.client.generate("x"))
        assert isinstance(error, errors.CapacityError)
        assert error.retry_after_ms == 200
        await it.settled()


@pytest.mark.parametrize("num_workers", [1, 2])
async def test_a_request_that_finds_no_second_worker_was_not_retried(folder: Path, num_workers: int) -> None:
    async with cluster(folder, Script([5, EOS]), num_workers=num_workers) as it:
        for worker in it.workers:
            worker.refuse_new = errors.CapacityError("queue is full", retry_after_ms=200)
        with capture_logs() as lines:
            await refused(it.client.generate("x"))
            await it.settled()
        assert (await it.client.stats()).retries == num_workers - 1
        assert canonical(lines)["retries"] == num_workers - 1


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has(folder: Path) -> None:
    async with cluster(folder, Script([5, 6, EOS], hold_at=1), num_workers=2) as it:
        running = [asyncio.create_task(answer(it.client, "x")) for _ in range(4)]
        await until(lambda: sum(len(worker.active) for worker in it.workers) == 4)
        it.workers[0].goodbye("rolling update")
        await until(lambda: len(it.requests.registry.ready()) == 1)
        before = len(it.workers[0].submits)
        it.workers[1].gate.set()
        await asyncio.gather(*(answer(it.client, "x") for _ in range(4)))
        assert len(it.workers[0].submits) == before
        it.workers[0].gate.set()
        assert [got.token_ids for got in await asyncio.gather(*running)] == [[5, 6, EOS]] * 4
        states = {worker.state: worker.why for worker in await it.client.list_workers()}
        assert states == {"draining": "rolling update", "ready": ""}


async def test_workers_come_and_go(folder: Path) -> None:
    late = FakeWorker(lambda submit: Script([5, 6, EOS]), worker_info())
    address = await late.start()
    async with cluster(folder, Script([5, 6, 7, 8, EOS], hold_at=2)) as it:
        known = it.requests.registry
        known.add(address)
        link = known.links[address]
        known.add(address)
        assert known.links[address] is link
        await until(lambda: len(known.ready()) == 2)
        assert known.states() == {it.workers[0].address: "ready", address: "ready"}
        running = [asyncio.create_task(answer(it.client, "x")) for _ in range(8)]
        await until(lambda: it.workers[0].active and late.submits)
        known.forget(it.workers[0].address)
        known.forget(it.workers[0].address)
        ends = await asyncio.gather(*running, return_exceptions=True)
        lost = [end for end in ends if isinstance(end, BaseException)]
        assert all(isinstance(end, TailpackError) and end.reason == "WORKER_LOST" for end in lost), lost
        assert [end.token_ids for end in ends if isinstance(end, Answer)] == [[5, 6, EOS]] * (8 - len(lost))
        assert (await answer(it.client, "x")).token_ids == [5, 6, EOS]
        await until(lambda: not it.workers[0].active)
        known.forget(address)
        assert not known.links
        with pytest.raises(TailpackError) as nobody:
            await answer(it.client, "x")
        assert nobody.value.reason == "NO_WORKER"
    await late.stop()


async def test_a_worker_that_never_says_welcome_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "WELCOME_TIMEOUT_S", 0.1)
    silent = FakeWorker(lambda submit: Script(), worker_info(), welcome_s=60)
    address = await silent.start()
    async with cluster(folder, Script([5, EOS]), addresses=[address], wait=False) as it:
        link = it.requests.registry.links[address]
        await until(lambda: "no welcome" in link.why)
        await until(lambda: silent.num_sessions >= 2)  # it is tried again
        await until(lambda: len(it.requests.registry.ready()) == 1)
        await answer(it.client, "x")
        assert link.state == "connecting"
        assert not silent.submits
    await silent.stop()


# --- slow readers ---

# A client whose flow-control window stays at 64 KiB; by default it grows to several megabytes.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536)]


async def test_a_slow_reader_gets_fewer_larger_chunks_and_the_same_text(folder: Path, text_ids: list[int]) -> None:
    repeats, per_step = 6000, 20
    tokens = text_ids * repeats
    infos = [worker_info(max_sequence_tokens=1 << 20)]
    script = Script(tokens, per_step=per_step)
    async with cluster(folder, script, infos=infos) as it:
        async with grpc.aio.insecure_channel(it.address, options=SMALL_WINDOW) as channel:
            call = router_pb2_grpc.RouterStub(channel).Generate(build_request("x", max_tokens=len(tokens)))
            await until(lambda: it.workers[0].submits)
            (link,) = it.requests.registry.links.values()
            (entry,) = link._entries.values()
            await until(lambda: entry.relay is not None and entry.relay.ended, 30.0)  # the router has it all
            chunks = [chunk async for chunk in call]
        got = Answer(chunks).check()
        assert got.text == TEXT * repeats
        assert got.token_ids == tokens
        assert len(chunks) < len(tokens) / per_step / 2, "the router kept every step's message"
        await it.settled()


async def test_a_reader_that_stops_reading_is_ended_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_PENDING_BYTES", 100_000)
    infos = [worker_info(max_sequence_tokens=1 << 24)]
    script = Script([5, 6, 7, 8], endless=True, per_step=100)
    async with cluster(folder, script, infos=infos) as it:
        async with grpc.aio.insecure_channel(it.address, options=SMALL_WINDOW) as channel:
            request = build_request("x", max_tokens=4_000_000)
            call = router_pb2_grpc.RouterStub(channel).Generate(request)
            await call.read()
            await until(lambda: it.workers[0].aborts)
            with pytest.raises(grpc.RpcError) as caught:
                while await call.read():
                    pass
            assert rpc.error_from(caught.value).reason == "SLOW_READER"
        await it.settled()


async def test_counts_by_worker_are_listed(folder: Path) -> None:
    async with cluster(folder, Script([5], endless=True, every_s=0.02), num_workers=2) as it:
        streams = [it.client.generate("x") for _ in range(6)]
        for stream in streams:
            await anext(stream)
        listed = Counter({worker.address: worker.in_flight for worker in await it.client.list_workers()})
        assert sum(listed.values()) == 6
        for stream in streams:
            await stream.aclose()
        await it.settled()


# --- several messages to a worker in one ---


@pytest.mark.parametrize("features", [("batch",), ()])
async def test_what_waits_for_a_worker_goes_there_in_one_message_where_it_takes_several(
    folder: Path, features: tuple[str, ...]
) -> None:
    infos = [worker_info(features=features)]
    async with cluster(folder, Script([5, EOS]), infos=infos) as it:
        (worker,) = it.workers
        link = it.requests.registry.links[worker.address]
        before = worker.num_messages
        # What one turn of the loop has to say; the last one is too large to be copied.
        prompts = [[5, 6], [7] * 10, [8] * (1 + registry.MAX_BATCH_BYTES), [9]]
        submits = [worker_pb2.Submit(request_id=f"b{i}", prompt_token_ids=prompt) for i, prompt in enumerate(prompts)]
        for submit in submits:
            submit.stop.max_tokens = 1
            link._send(worker_pb2.RouterMessage(submit=submit))
        await until(lambda: len(worker.submits) == len(submits))
        assert worker.submits == submits
        assert worker.num_messages - before == (3 if features else 4)
