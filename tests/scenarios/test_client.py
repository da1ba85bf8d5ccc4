"""The Python client against a fake router: calls cut at every token, wrong offsets, leaving early. Both flavours.

The sync flavour runs on a thread: the router of these tests lives on the test's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import errors, router_pb2
from protos.errors import TailpackError
from protos.tls import ServerTls
from protos.token_option import read_token
from router import client, sync_client
from router.answer_output import explained
from router.client import Answer, AsyncTailpack, Chunk, ClientTls, RetryPolicy, Tailpack
from tests.certificates import Authority
from tests.scenarios import fake_router
from tests.scenarios.fake_router import TEXTS, Call, FakeRouter, Plan, fake_routers
from tests.scenarios.router_harness import until

TEXT = "".join(TEXTS)
QUICK = RetryPolicy(first_delay_s=0.001, max_delay_s=0.01)
WHOLE = Plan()
LOST = Plan(at=0)  # before the first token
GRACE_MS = 300  # as short as a busy machine allows: tests that wait for its end take that long


class Blocking:
    """Drives the sync client from the test's loop; as AsyncTailpack as far as these tests use it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.client = Tailpack(*arguments, **options)

    async def collect(self, take: int | None = None, **options: Any) -> list[Chunk]:
        def read() -> list[Chunk]:
            got = []
            for chunk in self.client.generate("x", **options):
                got.append(chunk)
                if len(got) == take:
                    break
            return got

        return await asyncio.to_thread(read)

    async def resume(self, request_id: str, **offsets: int) -> list[Chunk]:
        return await asyncio.to_thread(lambda: list(self.client.resume(request_id, **offsets)))

    async def call(self, what: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.to_thread(getattr(self.client, what), *arguments, **options)


class OnLoop:
    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.client = AsyncTailpack(*arguments, **options)

    async def collect(self, take: int | None = None, **options: Any) -> list[Chunk]:
        got = []
        async for chunk in self.client.generate("x", **options):
            got.append(chunk)
            if len(got) == take:
                break
        return got

    async def resume(self, request_id: str, **offsets: int) -> list[Chunk]:
        return [chunk async for chunk in self.client.resume(request_id, **offsets)]

    async def call(self, what: str, *arguments: Any, **options: Any) -> Any:
        return await getattr(self.client, what)(*arguments, **options)


Flavour = type[Blocking] | type[OnLoop]


@pytest.fixture(params=[OnLoop, Blocking], ids=["async", "sync"])
def flavour(request: pytest.FixtureRequest, sessions: bool) -> Flavour:
    kind: Flavour = request.param
    return kind


@pytest.fixture(params=[False, True], ids=["stream", "session"])
def sessions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether routers have sessions, so that calls come in these."""
    has: bool = request.param
    monkeypatch.setattr(fake_router, "SESSIONS", has)
    return has


def first_call(plan: Plan, then: Plan = WHOLE) -> Callable[[Call], Plan]:
    return lambda call: plan if call.number == 0 else then


def check_whole(chunks: list[Chunk]) -> None:
    answer = Answer.of(chunks)
    assert (answer.text, answer.token_ids) == (TEXT, tuple(range(len(TEXTS))))
    assert answer.finish_reason == "eos"


async def fails(running: Any) -> TailpackError:
    with pytest.raises(TailpackError) as caught:
        await running
    return caught.value


# --- cut and resumed ---


async def test_cut_at_every_token_a_resumable_answer_is_whole(flavour: Flavour) -> None:
    async with fake_routers(lambda call: WHOLE) as (router,):
        client = flavour(router.address, retry=QUICK)
        for cut in range(len(TEXTS) + 1):
            begin = len(router.calls)
            router.plan = lambda call, begin=begin, cut=cut: Plan(at=cut) if call.number == begin else Plan()  # type: ignore[misc]
            check_whole(await client.collect(resumable=True, request_id=f"cut-{cut}"))
            first, second = router.calls[begin:]
            assert {call.metadata["x-request-id"] for call in (first, second)} == {f"cut-{cut}"}
            if cut == 0:
                assert second.method == "Generate"  # joins, or begins
            else:
                assert isinstance(second.request, router_pb2.ResumeRequest)
                assert second.request.token_offset == cut
                assert second.request.text_offset == len("".join(TEXTS[:cut]).encode())
        await client.call("close")
        assert router.cancels == []


async def test_cut_again_and_again_it_goes_on_at_another_router(flavour: Flavour) -> None:
    async with fake_routers(lambda call: Plan(at=1), lambda call: Plan(at=1)) as (one, two):
        two.kept = one.kept  # routers of the same workers
        client = flavour(f"{one.address}, {two.address}", retry=RetryPolicy(1, 0.001, 0.001))
        check_whole(await client.collect(resumable=True))
        await client.call("close")
        assert len(one.calls) + len(two.calls) == len(TEXTS) + 1
        assert abs(len(one.calls) - len(two.calls)) <= 1
        assert {call.method for call in two.calls} == {"Resume"}


async def test_a_router_that_stops_cuts_its_calls(flavour: Flavour) -> None:
    async with fake_routers(lambda call: Plan(at=3, hang=True), lambda call: WHOLE) as (one, two):
        two.kept = one.kept
        client = flavour(f"{one.address},{two.address}", retry=QUICK)
        reading = asyncio.create_task(client.collect(resumable=True))
        await until(lambda: one.num_running)
        await one.stop()
        check_whole(await reading)
        assert [call.method for call in two.calls] == ["Resume"]
        await client.call("close")


async def test_an_answer_that_nobody_keeps_any_more_is_lost_by_name(flavour: Flavour) -> None:
    async with fake_routers(first_call(Plan(at=3))) as (router,):
        router.kept = _Forgetful()
        client = flavour(router.address, retry=QUICK)
        error = await fails(client.collect(resumable=True))
        assert error.reason == "ANSWER_LOST"
        assert "after 3 tokens" in error.message
        await client.call("close")


class _Forgetful(set[str]):
    def __contains__(self, item: object) -> bool:
        return False


async def test_what_is_kept_is_asked_for_until_the_grace_is_over(flavour: Flavour, sessions: bool) -> None:
    grace_ms = GRACE_MS * (3 if sessions else 1)  # each try opens a session first
    async with fake_routers(lambda call: Plan(at=2) if call.number == 0 else Plan(at=0)) as (router,):
        client = flavour(router.address, retry=RetryPolicy(1, 0.001, 0.02))
        started = time.monotonic()
        error = await fails(client.collect(resumable=True, resume_grace_ms=grace_ms))
        assert isinstance(error, errors.Unavailable)
        assert time.monotonic() - started >= grace_ms / 1e3 - 0.02
        assert len(router.calls) > 4
        await client.call("close")


async def test_an_accepted_request_without_a_token_yet_is_kept_too(flavour: Flavour) -> None:
    """A long prompt is computed for minutes: a lost connection must not lose that."""
    async with fake_routers(lambda call: LOST if call.number < 6 else WHOLE) as (router,):
        client = flavour(router.address, retry=RetryPolicy(1, 0.001, 0.001))
        check_whole(await client.collect(resumable=True))
        assert [call.method for call in router.calls] == ["Generate"] * 7
        assert len({call.metadata["x-request-id"] for call in router.calls}) == 1
        await client.call("close")


async def test_another_process_resumes_by_the_id(flavour: Flavour) -> None:
    async with fake_routers(lambda call: WHOLE) as (router,):
        router.kept.add("known")
        client = flavour(router.address, retry=QUICK)
        offsets = {"token_offset": 4, "text_offset": len("".join(TEXTS[:4]).encode())}
        got = await client.resume("known", **offsets)
        assert [token for chunk in got for token in chunk.token_ids] == list(range(4, len(TEXTS)))
        error = await fails(client.resume("unknown", **offsets))
        assert error.reason == "UNKNOWN_REQUEST"
        await client.call("close")


# --- tried again ---


@pytest.mark.parametrize(
    "plan",
    [
        LOST,
        Plan(at=0, silent=True),
        Plan(at=0, error=errors.Unavailable("no worker is ready", reason="NO_WORKER", retry_after_ms=1)),
        Plan(at=0, error=errors.CapacityError("full", retry_after_ms=1)),
        Plan(at=0, error=errors.WorkerLost("gone")),
    ],
    ids=["cut", "cut before the first metadata", "unavailable", "full", "worker lost"],
)
async def test_before_the_first_token_it_is_tried_again_under_the_same_id(flavour: Flavour, plan: Plan) -> None:
    async with fake_routers(first_call(plan)) as (router,):
        told: list[tuple[str, float]] = []
        client = flavour(router.address, retry=QUICK, on_retry=lambda error, s: told.append((error.reason, s)))
        check_whole(await client.collect())
        assert [call.method for call in router.calls] == ["Generate", "Generate"]
        assert len({call.metadata["x-request-id"] for call in router.calls}) == 1
        assert len(told) == 1 and 0 < told[0][1] < 1
        await client.call("close")


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("wrong"),
        errors.NotFound("no such model", reason="UNKNOWN_MODEL"),
        errors.Unauthenticated("who?"),
        errors.CapacityError("it will never fit"),
        errors.InternalError("bug"),
        errors.RequestCancelled("cancelled before it ran"),
        errors.AlreadyExists("runs", reason="DUPLICATE_REQUEST"),
        errors.Unavailable("in an hour", retry_after_ms=3_600_000),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_will_not_pass_is_not_tried_again(flavour: Flavour, error: TailpackError) -> None:
    async with fake_routers(lambda call: Plan(at=0, error=error)) as (router,):
        client = flavour(router.address, retry=QUICK)
        got = await fails(client.collect())
        assert (got.reason, got.message) == (error.reason, error.message)
        assert len(router.calls) == 1
        await client.call("close")


async def test_tries_are_bounded_and_may_be_forbidden(flavour: Flavour) -> None:
    async with fake_routers(lambda call: LOST) as (router,):
        client = flavour(router.address, retry=RetryPolicy(3, 0.001, 0.001))
        assert isinstance(await fails(client.collect()), errors.Unavailable)
        assert len(router.calls) == 4
        once = flavour(router.address, retry=RetryPolicy(0))
        assert isinstance(await fails(once.collect(resumable=True)), errors.Unavailable)
        assert len(router.calls) == 5
        await client.call("close")
        await once.call("close")


async def test_after_a_token_only_a_resumable_answer_goes_on(flavour: Flavour) -> None:
    async with fake_routers(first_call(Plan(at=1))) as (router,):
        client = flavour(router.address, retry=QUICK)
        assert isinstance(await fails(client.collect()), errors.Unavailable)
        assert len(router.calls) == 1
        await client.call("close")


async def test_the_next_address_is_tried_at_once_and_remembered(flavour: Flavour) -> None:
    async with fake_routers(lambda call: LOST, lambda call: WHOLE) as (down, up):
        client = flavour(f"{down.address},{up.address}", retry=RetryPolicy(1, first_delay_s=3600.0))
        check_whole(await client.collect())
        check_whole(await client.collect())
        assert (len(down.calls), len(up.calls)) == (1, 2)
        assert (await client.call("stats")).router_id == up.address
        await client.call("close")


async def test_a_router_that_is_gone_is_passed_over(flavour: Flavour) -> None:
    async with fake_routers(lambda call: WHOLE) as (router,):
        client = flavour(f"127.0.0.1:1,{router.address}", retry=RetryPolicy(1, first_delay_s=3600.0))
        assert (await client.call("stats")).router_id == router.address
        check_whole(await client.collect())
        await client.call("close")


# --- wrong offsets ---


def _edit_at(token: int, change: Callable[[Chunk], list[Chunk]]) -> Plan:
    return Plan(edit=lambda chunk: change(chunk) if chunk.token_offset == token else [chunk])


def _moved(**fields: Any) -> Callable[[Chunk], list[Chunk]]:
    def change(chunk: Chunk) -> list[Chunk]:
        other = Chunk()
        other.CopyFrom(chunk)
        for name, value in fields.items():
            setattr(other, name, value)
        return [other]

    return change


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (_edit_at(3, lambda chunk: []), "a gap in the tokens"),
        (_edit_at(3, lambda chunk: [chunk, chunk]), "a repeat in the tokens"),
        (_edit_at(1, _moved(text="")), "a gap in the text"),
        (_edit_at(1, _moved(text=" estx")), "a repeat in the text"),
        (_edit_at(0, _moved(request_id="other")), "another request"),
        (_edit_at(len(TEXTS), lambda chunk: []), "without its last chunk"),
        (_edit_at(len(TEXTS), lambda chunk: [chunk, chunk]), "behind the last one"),
        (_edit_at(len(TEXTS) - 1, lambda chunk: []), "a gap in the tokens"),
    ],
    ids=["gap", "repeat", "text gap", "text repeat", "other request", "no end", "after the end", "last token"],
)
@pytest.mark.parametrize("resumable", [False, True])
async def test_wrong_offsets_are_an_error(
    flavour: Flavour, sessions: bool, plan: Plan, says: str, resumable: bool
) -> None:
    if sessions and says in ("without its last chunk", "behind the last one"):
        pytest.skip("in a session the last chunk is what ends a call: nothing tells that it is missing, or hears more")
    async with fake_routers(lambda call: plan) as (router,):
        client = flavour(router.address, retry=QUICK)
        error = await fails(client.collect(request_id="r", resumable=resumable))
        assert error.reason == "TOKEN_GAP" and says in error.message
        assert len(router.calls) == 1
        # What runs on for us though we no longer read is told; an answer that was whole needs nothing.
        assert router.cancels == (["r"] if resumable and "behind" not in says else [])
        await client.call("close")


# --- leaving ---


@pytest.mark.parametrize("resumable", [False, True])
async def test_leaving_the_loop_ends_the_work_behind_it(flavour: Flavour, resumable: bool) -> None:
    async with fake_routers(lambda call: Plan(at=4, hang=True)) as (router,):
        client = flavour(router.address, retry=QUICK)
        got = await client.collect(take=2, request_id="r", resumable=resumable)
        assert len(got) == 2
        await until(lambda: router.num_running == 0)
        await until(lambda: router.cancels == (["r"] if resumable else []))
        await client.call("close")


async def test_a_cancelled_task_ends_the_work_behind_it(sessions: bool) -> None:
    async with fake_routers(lambda call: Plan(at=1, hang=True)) as (router,):
        client = OnLoop(router.address, retry=QUICK)
        task = asyncio.create_task(client.collect(request_id="r", resumable=True))
        await until(lambda: router.num_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert router.cancels == ["r"]
        await until(lambda: router.num_running == 0)
        await client.call("close")


@pytest.mark.parametrize("resumable", [False, True])
async def test_closing_the_client_ends_what_runs(flavour: Flavour, resumable: bool) -> None:
    async with fake_routers(lambda call: Plan(at=1, hang=True)) as (router,):
        client = flavour(router.address, retry=QUICK)
        reading = asyncio.create_task(client.collect(request_id="r", resumable=resumable))
        await until(lambda: router.num_running)
        await client.call("close")
        assert isinstance(await fails(reading), errors.RequestCancelled)
        assert router.cancels == (["r"] if resumable else [])
        await until(lambda: router.num_running == 0)


async def test_closing_ends_several_answers_side_by_side(monkeypatch: pytest.MonkeyPatch, sessions: bool) -> None:
    """One after the other, a router that does not answer would hold up each of them."""
    asked, all_asked = 0, asyncio.Event()

    async def cancel(self: FakeRouter, request: Any, context: Any) -> router_pb2.CancelResponse:
        nonlocal asked
        asked += 1
        try:
            if asked == 3:
                all_asked.set()
            await all_asked.wait()
            return router_pb2.CancelResponse(found=True)
        finally:
            asked -= 1

    monkeypatch.setattr(FakeRouter, "Cancel", cancel)
    async with fake_routers(lambda call: Plan(at=1, hang=True)) as (router,):
        client = OnLoop(router.address, retry=QUICK)
        reading = [asyncio.create_task(client.collect(request_id=f"r{i}", resumable=True)) for i in range(3)]
        await until(lambda: router.num_running == 3)
        await client.call("close")
        assert all_asked.is_set()
        for one in reading:
            assert isinstance(await fails(one), errors.RequestCancelled)


# --- where there is no session ---


@pytest.mark.parametrize("kind", [OnLoop, Blocking], ids=["async", "sync"])
@pytest.mark.parametrize("how", ["refused", "silent"])
async def test_where_no_session_can_be_opened_requests_have_their_own_streams(
    kind: Flavour, how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = 0

    async def session(router: FakeRouter, requests: Any, context: Any) -> Any:
        nonlocal asked
        asked += 1
        if how == "silent":
            await asyncio.Event().wait()
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield

    monkeypatch.setattr(fake_router, "SESSIONS", True)
    monkeypatch.setattr(FakeRouter, "Session", session)
    if how == "silent":
        monkeypatch.setattr(client if kind is OnLoop else sync_client, "UNARY_TIMEOUT_S", 0.5)
    async with fake_routers(lambda call: WHOLE) as (router,):
        caller = kind(router.address, retry=QUICK)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                check_whole(await caller.collect())
        assert asked == 1
        assert [record.getMessage() for record in caplog.records if "opens no session" in record.getMessage()]
        await caller.call("close")


async def test_what_keeps_a_session_from_being_opened_may_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_router, "SESSIONS", True)
    async with fake_routers(lambda call: WHOLE) as (router,):
        caller = OnLoop(router.address, retry=QUICK)
        stub = caller.client._stub

        def renewed(address: int) -> Any:
            raise errors.ConfigError("the key does not fit the certificate")

        monkeypatch.setattr(caller.client, "_stub", renewed)
        assert isinstance(await fails(caller.collect()), errors.ConfigError)
        monkeypatch.setattr(caller.client, "_stub", stub)
        check_whole(await caller.collect())
        assert router.num_sessions == 1
        await caller.call("close")
        other = OnLoop(router.address, retry=QUICK)
        monkeypatch.setattr(other.client, "_stub", renewed)
        assert isinstance(await fails(other.collect()), errors.ConfigError)
        await other.call("close")


# --- deadlines, and who calls ---


async def test_the_deadline_covers_all_tries(flavour: Flavour) -> None:
    async with fake_routers(first_call(LOST, Plan(at=2, hang=True))) as (router,):
        client = flavour(router.address, retry=RetryPolicy(first_delay_s=0.2))  # 0.1 s at least
        error = await fails(client.collect(timeout_s=0.5, request_id="r", resumable=True))
        assert isinstance(error, errors.DeadlineExceeded)
        first, second = (call.timeout_s for call in router.calls)
        assert first is not None and second is not None and second < first - 0.05
        assert router.cancels == ["r"]
        await client.call("close")


async def test_no_wait_goes_past_the_deadline(flavour: Flavour) -> None:
    refused = errors.Unavailable("later", retry_after_ms=30_000)
    async with fake_routers(lambda call: Plan(at=0, error=refused)) as (router,):
        client = flavour(router.address, retry=QUICK)
        assert (await fails(client.collect(timeout_s=5.0))).message == "later"
        assert len(router.calls) == 1
        await client.call("close")


async def test_every_call_says_who_calls(flavour: Flavour) -> None:
    async with fake_routers(first_call(Plan(at=1))) as (router,):
        client = flavour(router.address, retry=QUICK, tenant="acme", token="s3cret")
        check_whole(await client.collect(resumable=True))
        for call in router.calls:
            assert call.metadata["x-tenant"] == "acme"
            assert call.metadata["authorization"] == "Bearer s3cret"
            assert call.metadata["x-request-id"].startswith("req-")
        assert "s3cret" not in repr(client.client._settings)
        error = await fails(_built(flavour, token="nø"))
        assert error.reason == "BAD_TOKEN" and "ø" not in str(error)
        await client.call("close")


async def test_the_callers_trace_goes_on(flavour: Flavour) -> None:
    trace = pytest.importorskip("opentelemetry.trace")
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1)))
    given = "00-" + "1" * 32 + "-" + "2" * 16 + "-00"
    async with fake_routers(lambda call: WHOLE) as (router,):
        client = flavour(router.address)
        await client.collect()
        with trace.use_span(span):
            await client.collect()
            await client.collect(traceparent=given)
        await client.call("close")
        seen = [call.metadata.get("traceparent") for call in router.calls]
        assert seen == [None, f"00-{0xABC:032x}-{0xDEF:016x}-01", given]


async def test_tls_is_used_and_a_stranger_is_refused_at_once(flavour: Flavour, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    issued = authority.issue("router")
    router = FakeRouter(tls=ServerTls(issued.cert, issued.key))
    await router.start()
    try:
        client = flavour(router.address, tls=ClientTls(authority.cert))
        check_whole(await client.collect())
        told: list[TailpackError] = []
        slow = RetryPolicy(first_delay_s=3600.0)
        other = flavour(
            router.address, tls=ClientTls(stranger.cert), retry=slow, on_retry=lambda error, _: told.append(error)
        )
        error = await fails(other.collect())
        assert (error.reason, told) == ("SERVER_CERTIFICATE_REFUSED", [])
        assert explained(error, router.address, 0, None) is error
        await other.call("close")
        await client.call("close")
        assert len(router.calls) == 1
    finally:
        await router.stop()


async def _built(flavour: Flavour, **options: Any) -> None:
    flavour("127.0.0.1:1", **options)


@pytest.mark.parametrize("address", ["", ",", "a:1,,b:2", "a:1, a:1"])
async def test_addresses_that_are_none_are_refused(flavour: Flavour, address: str) -> None:
    with pytest.raises(errors.ConfigError):
        flavour(address)


async def test_complete_returns_the_whole_answer(flavour: Flavour) -> None:
    async with fake_routers(lambda call: WHOLE) as (router,):
        client = flavour(router.address)
        answer = await client.call("complete", "x", request_id="r")
        assert (answer.text, answer.request_id, answer.worker_id) == (TEXT, "r", "w")
        assert answer.usage.prompt_tokens == 3
        assert await client.call("cancel", "r") is False
        await client.call("close")


# --- tailpack generate ---


def _generate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "protos.cli", "generate", *arguments, "x"]
    environment = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)


async def test_generate_resumes_at_another_router_with_its_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    async with fake_routers(first_call(Plan(at=2)), lambda call: WHOLE) as (one, two):
        two.kept = one.kept
        routers = f"127.0.0.1:1,{one.address},{two.address}"
        done = await asyncio.to_thread(
            _generate,
            "--router",
            routers,
            "--resumable",
            "--token-file",
            str(tmp_path / "token"),
            TAILPACK_TOKEN="other",
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, TEXT + "\n", "")
        calls = [*one.calls, *two.calls]
        assert [call.method for call in calls] == ["Generate", "Resume"]
        assert {call.metadata["authorization"] for call in calls} == {"Bearer s3cret"}


@pytest.mark.parametrize("content", [b"", b"\n", b"caf\xc3\xa9", b"two\nlines", b"x" * 5000, None])
def test_a_file_without_a_token_is_refused_and_not_shown(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(errors.ConfigError) as caught:
        read_token(file)
    assert caught.value.reason == "TOKEN_UNREADABLE"
    assert "caf" not in str(caught.value) and "xxx" not in str(caught.value)


def test_the_environment_may_hold_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILPACK_TOKEN", "s3cret")
    assert read_token(None) == "s3cret"
    monkeypatch.setenv("TAILPACK_TOKEN", "")
    assert read_token(None) is None


def test_importing_the_client_is_cheap() -> None:
    heavy = {"torch", "uvloop", "numpy", "ray", "tokenizers", "matplotlib"}
    code = f"import sys, router.client; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
