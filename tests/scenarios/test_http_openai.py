"""OpenAI's API over HTTP: the official client, and every corner that it would hide."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from structlog.testing import capture_logs

from protos import errors, worker_pb2
from router import http_body, http_server, openai_endpoint, relay
from router.http_body import MAX_BODY_BYTES
from router.tokenizer import Tokenizer
from tests.scenarios.fake_worker import Script
from tests.scenarios.http_harness import (
    HANG_S,
    Door,
    events_of,
    http_door,
    read_chunk,
    read_head,
    read_reply,
    request_bytes,
)
from tests.scenarios.router_harness import cluster, until
from tests.scenarios.tiny_tokenizer import EOS

TEXT = "The capital of France is Paris. 日本語 👩‍👩‍👧‍👦 äöü 🎉 done"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
ENDLESS = Script([70, 71, 72], endless=True, every_s=0.005)


@pytest.fixture
async def door(folder: Path, text_ids: list[int]) -> AsyncIterator[Door]:
    """Answers TEXT to everything."""
    async with http_door(folder, Script([*text_ids, EOS], logprobs=True)) as it:
        yield it


@pytest.fixture
async def endless(folder: Path) -> AsyncIterator[Door]:
    """Answers up to max_tokens, slowly."""
    async with http_door(folder, ENDLESS) as it:
        yield it


def num_running(door: Door) -> int:
    return len(door.harness.workers[0].active)


# --- the official client ---


async def test_the_official_client_chats(door: Door, text_ids: list[int]) -> None:
    async with door.openai() as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], logprobs=True, seed=3
        )
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (TEXT, "assistant", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content).decode() == TEXT
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(text_ids) + 1
    submit = door.harness.workers[0].submits[0]
    assert answer.usage.prompt_tokens == len(submit.prompt_token_ids)
    assert (submit.sampling.seed, submit.sampling.temperature) == (3, 1.0)


async def test_the_official_client_streams(door: Door, text_ids: list[int]) -> None:
    async with door.openai() as client:
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        ]
    *shown, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in shown) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in shown][-1] == "stop"
    assert last.usage is not None
    assert (last.choices, last.usage.completion_tokens) == ([], len(text_ids) + 1)
    assert all(chunk.usage is None for chunk in shown)


async def test_the_official_client_completes_several_prompts_in_several_choices(door: Door) -> None:
    async with door.openai() as client:
        answer = await client.completions.create(model="tiny", prompt=["one", "two"], n=2, max_tokens=500, seed=9)
        stream = await client.completions.create(model="tiny", prompt=[5, 6], n=3, max_tokens=500, stream=True)
        texts = dict.fromkeys(range(3), "")
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    assert [choice.text for choice in answer.choices] == [TEXT] * 4
    assert texts == dict.fromkeys(range(3), TEXT)
    submits = door.harness.workers[0].submits
    assert len({submit.request_id for submit in submits}) == 7
    assert len({submit.sampling.seed for submit in submits[:4]}) == 2
    assert list(submits[-1].prompt_token_ids) == [5, 6]


async def test_the_official_client_sees_stop_strings_and_lengths(door: Door) -> None:
    async with door.openai() as client:
        for stop in ("日", ["nowhere", "Paris", "capital of Italy", "x", "y"]):
            answer = await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], stop=stop
            )
            first = TEXT.index("日" if stop == "日" else "Paris")
            assert answer.choices[0].message.content == TEXT[:first]
            assert answer.choices[0].finish_reason == "stop"
        short = await client.completions.create(model="tiny", prompt="hello")
        assert short.choices[0].finish_reason == "length"
        assert short.usage is not None
        assert short.usage.completion_tokens == 16


async def test_the_official_client_understands_errors(door: Door) -> None:
    async with door.openai(max_retries=2) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hello"}])
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as tools:
            await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hello"}],
                tools=[{"type": "function", "function": {"name": "f"}}],
            )
        assert (tools.value.code, tools.value.param) == ("FEATURE_NOT_BUILT", "tools")
        with pytest.raises(openai.BadRequestError) as hot:
            await client.completions.create(model="tiny", prompt="x", temperature=101)
        assert (hot.value.code, hot.value.param) == ("BAD_TEMPERATURE", "temperature")
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model="tiny", prompt=[5] * 5000)
        assert long.value.code == "context_length_exceeded"
    assert not door.harness.workers[0].submits


async def test_the_official_client_sends_again_what_may_be_and_only_that(folder: Path, text_ids: list[int]) -> None:
    async with http_door(folder, Script([*text_ids, EOS])) as door, door.openai(max_retries=1) as client:
        (worker,) = door.harness.workers
        for error, tries in (
            (errors.CapacityError("full", reason="NO_PAGES", retry_after_ms=1), 2),
            (errors.CapacityError("full for good", reason="NO_PAGES"), 1),
        ):
            worker.refuse_new, before = error, len(worker.submits)
            with pytest.raises(openai.RateLimitError):
                await client.completions.create(model="tiny", prompt="x")
            assert len(worker.submits) - before == tries


async def test_the_official_client_sees_an_error_in_a_stream(folder: Path) -> None:
    script = Script([70, 71, 72], error=errors.KvLost("its pages are gone"))
    async with http_door(folder, script) as door, door.openai() as client:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
        texts = []
        with pytest.raises(openai.APIError) as lost:
            async for chunk in stream:
                texts.append(chunk.choices[0].text)  # noqa: PERF401 - it ends in an error
        assert len(texts) == 3
        assert lost.value.code == "KV_LOST"


async def test_models_are_listed(door: Door) -> None:
    async with door.openai() as client:
        (model,) = [model async for model in client.models.list()]
        assert (model.id, model.owned_by) == ("tiny", "tailpack")
        assert (await client.models.retrieve("tiny")).id == "tiny"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("nope/x")


# --- framing ---


@pytest.mark.parametrize("per_step", [1, 3])
async def test_events_are_lines_of_json_and_done(folder: Path, text_ids: list[int], per_step: int) -> None:
    """Also where tokens are parts of characters: each event alone is valid UTF-8, and no character is lost."""
    async with http_door(folder, Script([*text_ids, EOS], per_step=per_step)) as door:
        reply = await door.post(CHAT, {**HELLO, "stream": True})
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    *events, done = reply.events
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == TEXT
    assert "\ufffd" not in reply.body.decode()


async def test_line_ends_in_the_text_do_not_break_the_frames(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    text = 'a\n\ndata: [DONE]\n\nb\r\n\u2028: "c"'
    ids = tokenizer.encode(text)
    tokenizer.close()
    async with http_door(folder, Script([*ids, EOS], per_step=100)) as door:
        *events, done = (await door.post(COMPLETIONS, {"prompt": "x", "max_tokens": 90, "stream": True})).events
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == text


async def test_an_answer_without_text_is_an_answer(folder: Path) -> None:
    async with http_door(folder, Script([EOS])) as door:
        whole = (await door.post(CHAT, HELLO)).json
        assert (whole["choices"][0]["message"]["content"], whole["usage"]["completion_tokens"]) == ("", 1)
        role, end, done = (await door.post(CHAT, {**HELLO, "stream": True})).events
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert (end["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


async def test_a_silent_stream_says_that_it_lives(
    folder: Path, text_ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_endpoint, "SILENT_S", 0.02)
    async with http_door(folder, Script([*text_ids, EOS], first_s=0.2)) as door:
        reply = await door.post(COMPLETIONS, {"prompt": "x", "max_tokens": 90, "stream": True})
        assert reply.body.startswith(b": waiting\n\n")
        assert "".join(event["choices"][0]["text"] for event in reply.events[:-1]) == TEXT
        async with door.openai() as client:  # which must not mind them
            stream = await client.completions.create(model="tiny", prompt="x", max_tokens=90, stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_an_error_in_a_stream_is_an_event_and_the_end(folder: Path) -> None:
    async with http_door(folder, Script([70, 71], error=errors.KvLost("its pages are gone"))) as door:
        reply = await door.post(COMPLETIONS, {"prompt": "x", "stream": True})
        assert reply.status == 200
        *texts, error = reply.events
        assert len(texts) == 2
        assert error["error"]["code"] == "KV_LOST"
        assert b"[DONE]" not in reply.body
        whole = await door.post(COMPLETIONS, {"prompt": "x"})
        assert (whole.status, whole.error["code"]) == (500, "KV_LOST")


async def test_an_error_before_the_first_token_has_its_status(folder: Path) -> None:
    async with http_door(folder, ENDLESS) as door:
        door.harness.workers[0].refuse_new = errors.CapacityError("full", reason="NO_PAGES", retry_after_ms=1500)
        reply = await door.post(COMPLETIONS, {"prompt": "x", "stream": True})
        assert (reply.status, reply.error["type"]) == (429, "rate_limit_error")
        assert (reply.headers["retry-after"], reply.headers["retry-after-ms"]) == ("2", "1500")
        assert reply.headers["x-should-retry"] == "true"


async def test_one_choice_that_fails_ends_all(folder: Path) -> None:
    def script(submit: worker_pb2.Submit) -> Script:
        if submit.request_id.endswith("~2"):
            return Script([70], first_s=0.05, error=errors.KvLost("its pages are gone"))
        return ENDLESS

    async with http_door(folder, script) as door:
        body = {"prompt": "x", "n": 4, "max_tokens": 4000, "stream": True}
        reply = await door.post(COMPLETIONS, body)
        assert reply.events[-1]["error"]["code"] == "KV_LOST"
        assert (await door.post(COMPLETIONS, {**body, "stream": False})).error["code"] == "KV_LOST"
        await door.harness.settled()


async def test_a_cancelled_answer_is_no_normal_stop(endless: Door) -> None:
    async def cancel() -> None:
        await until(lambda: num_running(endless) == 2)
        await endless.harness.requests.cancel("r-1", "")

    cancelling = asyncio.create_task(cancel())
    body = {"prompt": "x", "n": 2, "max_tokens": 4000, "stream": True}
    reply = await endless.post(COMPLETIONS, body, {"x-request-id": "r-1"})
    await cancelling
    streamed = reply.body.startswith(b"data:")  # not where no token was there yet
    assert (reply.events[-1]["error"] if streamed else reply.error)["code"] == "CANCELLED"


# --- callers who leave ---


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 3])
async def test_leaving_frees_all_sequences_at_once(endless: Door, stream: bool, n: int) -> None:
    async with endless.connection() as (reader, writer):
        writer.write(request_bytes("POST", COMPLETIONS, {"prompt": "x", "n": n, "max_tokens": 4000, "stream": stream}))
        await until(lambda: num_running(endless) == n)
        if stream:
            await read_head(reader)
            await read_chunk(reader)
    await until(lambda: not num_running(endless))
    await endless.harness.settled()
    assert endless.harness.requests.counters.cancelled == n


async def test_leaving_during_a_long_prefill_is_noticed(folder: Path) -> None:
    async with http_door(folder, Script([70], first_s=60.0)) as door:
        async with door.connection() as (_, writer):
            writer.write(request_bytes("POST", CHAT, {**HELLO, "stream": True}))
            await until(lambda: num_running(door))
        await until(lambda: not num_running(door))


async def test_a_reset_connection_is_a_caller_who_left(endless: Door) -> None:
    async with endless.connection() as (reader, writer):
        writer.write(request_bytes("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 4000, "stream": True}))
        await read_head(reader)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    await endless.harness.settled()


async def test_leaving_in_the_middle_of_a_body_leaves_nothing(endless: Door) -> None:
    async with endless.connection() as (_, writer):
        writer.write(request_bytes("POST", COMPLETIONS, b'{"prompt": "' + b"x" * 1000)[:-500])
        await writer.drain()
    reply = await endless.post(COMPLETIONS, {"prompt": "x", "max_tokens": 1})
    assert reply.status == 200
    assert endless.harness.requests.counters.requests == 1


# --- bodies ---


async def test_a_body_of_50_mb_is_refused_by_its_length_alone(door: Door) -> None:
    async with door.connection() as (reader, writer):
        head, _, _ = request_bytes("POST", CHAT, b"").partition(b"content-length: 0")
        writer.write(
            head + b"content-length: 50000000\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n\r\n"
        )
        reply = await read_reply(reader)
    assert (reply.status, reply.error["code"]) == (413, "BODY_TOO_LARGE")


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_of_50_mb_that_comes_all_the_same_is_not_kept(door: Door, chunked: bool) -> None:
    """Its sender still reads the answer, and the connection goes on: it is refused, not cut off."""
    piece = b" " * 1_000_000
    async with door.connection() as (reader, writer):
        length = {"content-length": "", "transfer-encoding": "chunked"} if chunked else {"content-length": "50000000"}
        writer.write(request_bytes("POST", CHAT, None, length))
        for _ in range(50):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n" if chunked else b"")
        reply = await read_reply(reader)
        assert (reply.status, reply.error["code"]) == (413, "BODY_TOO_LARGE")
        writer.write(request_bytes("GET", "/health/live"))
        assert (await read_reply(reader)).status == 200


async def test_the_largest_body_passes(door: Door) -> None:
    body = json.dumps({"prompt": "x" * (8 << 20), "max_tokens": 1}).encode()
    reply = await door.post(COMPLETIONS, body + b" " * (MAX_BODY_BYTES - len(body)))
    assert (reply.status, reply.error["code"]) == (400, "context_length_exceeded")  # as far as the model


async def test_bodies_that_arrive_together_are_bounded(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "MAX_READING_BYTES", 1000)
    body = request_bytes("POST", COMPLETIONS, {"prompt": "x" * 700, "max_tokens": 1})
    async with door.connection() as (reader, writer), door.connection() as (other_reader, other):
        writer.write(body[:-100])
        await until(lambda: door.bodies.num_bytes > 600)
        other.write(body)
        reply = await read_reply(other_reader)
        assert (reply.status, reply.error["code"]) == (429, "TOO_MANY_REQUEST_BYTES")
        writer.write(body[-100:])
        assert (await read_reply(reader)).status == 200
    assert door.bodies.num_bytes == 0


async def test_a_body_that_does_not_arrive_is_given_up(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "BODY_TIMEOUT_S", 0.05)
    async with door.connection() as (reader, writer):
        writer.write(request_bytes("POST", CHAT, HELLO)[:-5])
        reply = await read_reply(reader)
    assert (reply.status, reply.error["code"]) == (408, "BODY_TIMEOUT")


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-a"])
async def test_half_open_connections_are_closed(door: Door, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.05)
    async with door.connection() as (reader, writer):
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""


async def test_a_slow_answer_is_no_slow_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.4)
    async with http_door(folder, Script([70, EOS], first_s=0.6)) as door:
        assert (await door.post(COMPLETIONS, {"prompt": "x"})).status == 200


async def test_a_slow_body_is_no_slow_head(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    body = request_bytes("POST", COMPLETIONS, {"prompt": "x"})
    async with door.connection() as (reader, writer):
        writer.write(body)
        assert (await read_reply(reader)).status == 200
        monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.4)
        writer.write(body[:-10])
        for at in range(-10, -2, 2):
            writer.write(body[at : at + 2])
            await asyncio.sleep(0.15)
        writer.write(body[-2:])
        assert (await read_reply(reader)).status == 200


async def test_a_connection_above_the_limit_is_refused_by_name(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 1)
    async with door.connection() as (reader, writer):
        writer.write(request_bytes("GET", "/health/live"))
        assert (await read_reply(reader)).status == 200
        reply = await door.send("GET", "/health/live")
        assert (reply.status, reply.error["code"], reply.headers["retry-after"]) == (503, "TOO_MANY_CONNECTIONS", "1")
        assert reply.headers["connection"] == "close"
    await until(lambda: not door.server._server.server_state.connections)
    assert (await door.send("GET", "/health/live")).status == 200


async def test_a_head_without_end_is_refused(door: Door) -> None:
    async with door.connection() as (reader, writer):
        writer.write(b"GET /health/live HTTP/1.1\r\nx-a: " + b"a" * http_server.MAX_HEAD_BYTES)
        status, _ = await read_head(reader)
        assert status in (400, 431)


@pytest.mark.parametrize(
    "garbage",
    [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\0" * 100 + b"\r\n\r\n"],
)
async def test_what_is_not_http_is_refused(door: Door, garbage: bytes) -> None:
    async with door.connection() as (reader, writer):
        writer.write(garbage + b"\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            reply = await reader.read()
            assert reply.startswith(b"HTTP/1.1 400")
            head, _, body = reply.partition(b"\r\n\r\n")
            assert b"content-type: application/json" in head.lower()
            error = json.loads(body)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "NOT_HTTP")
    assert (await door.send("GET", "/health/live")).status == 200


@pytest.mark.parametrize(
    ("body", "headers", "status", "code"),
    [
        (b"{", {}, 400, "BAD_JSON"),
        (b"[" * 100_000, {}, 400, "BAD_FIELD"),
        (b'{"user": ' + b"[" * 100_000, {}, 400, "BAD_JSON"),
        (b"{}", {}, 400, "BAD_FIELD"),
        (b'{"messages": []}', {}, 400, "EMPTY_PROMPT"),
        (b'{"messages": [{"role": "user", "content": ""}]}', {}, 400, "EMPTY_PROMPT"),
        (b'{"messages": [{"role": "king", "content": "x"}]}', {}, 400, "BAD_ROLE"),
        (b"{}", {"content-type": ""}, 400, "UNSUPPORTED_MEDIA_TYPE"),
        (b"{}", {"content-type": "text/plain"}, 400, "UNSUPPORTED_MEDIA_TYPE"),
        (b"{}", {"x-request-id": "a b"}, 400, "INVALID_REQUEST"),
        (b"{}", {"x-tenant": "a/b"}, 400, "INVALID_REQUEST"),
    ],
)
async def test_refusals(door: Door, body: bytes, headers: dict[str, str], status: int, code: str) -> None:
    if code == "UNSUPPORTED_MEDIA_TYPE":
        status = 415
    with capture_logs():
        reply = await door.post(CHAT, body, headers)
    assert (reply.status, reply.error["code"]) == (status, code)
    assert reply.headers["x-should-retry"] == "false"
    assert not door.harness.workers[0].submits


@pytest.mark.parametrize("n", [65, 10**9, 10**30, -1])
async def test_a_huge_n_is_refused(door: Door, n: int) -> None:
    reply = await door.post(CHAT, {**HELLO, "n": n})
    assert (reply.status, reply.error["param"]) == (400, "n")


# --- the door itself ---


async def test_ids_go_in_and_come_out(door: Door) -> None:
    reply = await door.post(COMPLETIONS, {"prompt": "x"}, {"x-request-id": "mine-1", "x-tenant": "search"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.json["id"] == "cmpl-mine-1"
    assert door.harness.workers[0].submits[0].request_id == "search/mine-1"
    ids = [(await door.post(path, {})).headers["x-request-id"] for path in (CHAT, COMPLETIONS, "/nowhere")]
    assert len(set(ids)) == 3


async def test_an_id_that_is_in_use_is_refused(endless: Door) -> None:
    body = {"prompt": "x", "max_tokens": 4000}
    async with endless.connection() as (_, writer):
        writer.write(request_bytes("POST", COMPLETIONS, body, {"x-request-id": "r-1"}))
        await until(lambda: num_running(endless))
        reply = await endless.post(COMPLETIONS, body, {"x-request-id": "r-1"})
        assert (reply.status, reply.error["code"]) == (409, "DUPLICATE_REQUEST")


async def test_connections_are_kept_and_requests_may_queue_on_one(door: Door) -> None:
    async with door.connection() as (reader, writer):
        for _ in range(3):
            writer.write(request_bytes("POST", COMPLETIONS, {"prompt": "x"}))
            assert (await read_reply(reader)).status == 200
        writer.write(request_bytes("POST", COMPLETIONS, {"prompt": "x", "stream": True}) * 2)
        for _ in range(2):
            assert (await read_reply(reader)).events[-1] == "[DONE]"
        writer.write(request_bytes("POST", COMPLETIONS, b"{"))
        assert (await read_reply(reader)).status == 400
        writer.write(request_bytes("GET", "/v1/models"))
        assert (await read_reply(reader)).status == 200


async def test_tokens_name_tenants_before_a_body_is_read(folder: Path) -> None:
    def tenant_of(authorization: str | None, x_tenant: str) -> str:
        if authorization != "Bearer secret":
            raise errors.Unauthenticated("no", reason="TOKEN_UNKNOWN")
        return "search"

    async with http_door(folder, Script([70, EOS]), tenant_of=tenant_of) as door:
        refused = [
            await door.send(method, path, headers={**headers, "expect": "100-continue"})
            for headers in ({}, {"authorization": "Bearer wrong"})
            for method, path in (("POST", CHAT), ("POST", COMPLETIONS), ("GET", "/v1/models"), ("GET", "/other"))
        ]
        assert {(reply.status, reply.error["code"]) for reply in refused} == {(401, "TOKEN_UNKNOWN")}
        assert {reply.headers["www-authenticate"] for reply in refused} == {"Bearer"}
        for path in ("/health/live", "/health/ready"):
            assert (await door.send("GET", path)).status == 200
        for headers in ({}, {"authorization": "Bearer secret"}):  # it would name the tenants
            elsewhere = await door.send("GET", "/metrics", headers=headers)
            assert (elsewhere.status, elsewhere.error["code"]) == (404, "METRICS_ELSEWHERE")
            assert "--metrics HOST:PORT" in elsewhere.error["message"]
        async with door.openai(api_key="secret") as client:
            await client.completions.create(model="tiny", prompt="x")
        assert door.harness.workers[0].submits[0].tenant == "search"


async def test_health_tells_alive_from_ready(door: Door) -> None:
    assert [(await door.send("GET", f"/health/{what}")).status for what in ("live", "ready")] == [200, 200]
    door.harness.requests.admission.draining = True
    assert [(await door.send("GET", f"/health/{what}")).status for what in ("live", "ready")] == [200, 503]
    reply = await door.post(CHAT, HELLO)
    assert (reply.status, reply.error["code"]) == (503, "DRAINING")


async def test_a_stop_tells_every_caller(folder: Path) -> None:
    async with http_door(folder, ENDLESS) as door:
        body = {"prompt": "x", "max_tokens": 4000}
        async with door.connection() as (reader, writer), door.connection() as (whole_reader, whole):
            writer.write(request_bytes("POST", COMPLETIONS, {**body, "stream": True}))
            whole.write(request_bytes("POST", COMPLETIONS, body))
            await read_head(reader)
            await until(lambda: num_running(door) == 2)
            await door.server.stop()
            events = b""
            while piece := await read_chunk(reader):
                events += piece
            assert events_of(events)[-1]["error"]["code"] == "DRAINING"
            reply = await read_reply(whole_reader)
            assert (reply.status, reply.error["code"]) == (503, "DRAINING")


async def test_a_bug_is_an_internal_error_and_logged(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("secret prompt")

    monkeypatch.setattr(door.harness.requests, "answer", broken)
    with capture_logs() as lines:
        reply = await door.post(CHAT, HELLO)
    assert (reply.status, reply.error["code"]) == (500, "INTERNAL")
    assert b"secret" not in reply.body
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["bug in a handler"]


async def test_paths_and_methods(door: Door) -> None:
    for method, path, status in (
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
        ("DELETE", COMPLETIONS, 405),
    ):
        reply = await door.send(method, path)
        assert (reply.status, reply.error["type"]) == (status, "invalid_request_error"), path
    metrics = await door.send("GET", "/metrics")
    assert (metrics.status, metrics.headers["content-type"][:10]) == (200, "text/plain")


@pytest.mark.parametrize("where", ["here", "there"])
async def test_cancel_ends_all_choices_also_behind_the_first_and_no_others(folder: Path, where: str) -> None:
    """ "there": through another router of the same workers."""

    def script(submit: worker_pb2.Submit) -> Script:
        return Script([70, EOS]) if submit.request_id == "r" else Script([70], endless=True, every_s=0.01)

    async with contextlib.AsyncExitStack() as stack:
        door = await stack.enter_async_context(http_door(folder, script))
        (worker,) = door.harness.workers
        other = cluster(folder, Script(), infos=[], addresses=[worker.address])
        there = (await stack.enter_async_context(other)).requests
        body = {"prompt": "x", "n": 3, "max_tokens": 4000}
        asked = asyncio.create_task(door.post(COMPLETIONS, body, {"x-request-id": "r"}))
        # An id as choices once had them: it is a caller's own.
        own = asyncio.create_task(door.post(COMPLETIONS, {**body, "n": 1}, {"x-request-id": "r.1"}))
        await until(lambda: sorted(worker.active) == ["r.1", "r~1", "r~2"])  # the first choice has ended
        assert await (door.harness.requests if where == "here" else there).cancel("r", "")
        reply = await asyncio.wait_for(asked, HANG_S)
        assert reply.error["code"] == errors.RequestCancelled.default_reason
        await until(lambda: list(worker.active) == ["r.1"])
        assert not await there.cancel("r", "")
        assert await there.cancel("r.1", "")
        await asyncio.wait_for(own, HANG_S)
    async with http_door(folder, Script([70, EOS])) as door:
        refused = await door.post(COMPLETIONS, body, {"x-request-id": "r~1"})
        assert refused.status == 400


async def test_a_request_leaves_one_line_in_the_log_and_no_text(door: Door) -> None:
    with capture_logs() as lines:
        await door.post(CHAT, {"messages": [{"role": "user", "content": "SECRET"}]}, {"x-request-id": "r-1"})
        await door.post(CHAT, {"messages": [{"role": "user", "content": "SECRET"}], "n": "SECRET"})
    assert "SECRET" not in str(lines)
    ours = [line for line in lines if line["event"] in ("request", "refused")]
    assert [(line["event"], line["reason"]) for line in ours] == [("request", "EOS"), ("refused", "BAD_FIELD")]
    assert (ours[0]["door"], ours[0]["request_id"]) == ("http", "r-1")


async def test_a_reader_who_stalls_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_PENDING_BYTES", 20_000)
    script = Script([70], endless=True, per_step=50, every_s=0.001, logprobs=True)
    body = {"prompt": "x", "n": 4, "max_tokens": 4000, "stream": True, "logprobs": 0}  # 400 kB of events
    small = (socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the kernel would hold megabytes of them
    monkeypatch.setattr(http_server, "_notice_dead_peers", lambda connection: connection.setsockopt(*small))
    async with http_door(folder, script) as door, door.connection(receive_bytes=4096) as (reader, writer):
        writer.write(request_bytes("POST", COMPLETIONS, body))
        await until(lambda: door.harness.workers[0].aborts, HANG_S)
        await read_head(reader)
        events = b""
        while piece := await read_chunk(reader):
            events += piece
        assert events_of(events)[-1]["error"]["code"] == "SLOW_READER"
