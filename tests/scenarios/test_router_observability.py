"""What a router says of its requests: metrics, the log line, traces; and that no log holds what callers wrote."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from protos import errors, logs, router_pb2, router_pb2_grpc, rpc, types_pb2
from protos.errors import TailpackError
from protos.metrics import exported, metrics_page
from protos.tracing import Tracing
from router.auth import Authenticator, file_lines, new_token
from router.client import AsyncTailpack, build_request
from router.metrics import RouterCollector
from router.tokenizer import Tokenizer
from tests.scenarios.fake_worker import Script
from tests.scenarios.router_harness import Harness, Process, answer, cluster, fake_worker_process, until

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
MARKER = "xyzzy-secret-plugh"


@contextmanager
def page_of(harness: Harness, authenticator: Authenticator | None = None) -> Iterator[Any]:
    """A function that gives the page's samples: (name, labels in order of their names) -> value."""
    registry = CollectorRegistry(auto_describe=False)

    def samples() -> dict[tuple[str, ...], float]:
        text = metrics_page("", registry)[0].decode()
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    with exported(RouterCollector(harness.requests, authenticator or Authenticator(None)), registry=registry):
        yield samples


async def test_the_page_the_stats_and_the_log_line_agree(folder: Path) -> None:
    async with cluster(folder, Script([300] * 10, cached=3, prefix_exact=True)) as c:
        with page_of(c) as samples:
            before = samples()
            assert before["tailpack_router_in_flight",] == 0
            with captured_logs("info") as log:
                for _ in range(3):
                    await answer(c.client, [5, 6, 7, 8], max_tokens=10)
                with pytest.raises(TailpackError):
                    await answer(c.client, [5], model="none such")
                await c.settled()
            page, stats = samples(), await c.client.stats()
            assert page["tailpack_router_requests_total", "session", "finished", "LENGTH"] == stats.finished == 3
            assert page["tailpack_router_requests_total", "session", "rejected", "UNKNOWN_MODEL"] == stats.rejected == 1
            assert page["tailpack_router_received_total",] == stats.requests == 4
            assert page["tailpack_router_tokens_total", "output"] == stats.output_tokens == 30
            assert page["tailpack_router_tokens_total", "prompt"] == stats.prompt_tokens == 12
            assert page["tailpack_router_tokens_total", "prompt_cached"] == 9
            assert page["tailpack_router_prefix_total", "exact"] == 3
            assert page["tailpack_router_ttft_seconds_count",] == sum(stats.ttft.counts) == 3
            assert page["tailpack_router_itl_seconds_count",] == sum(stats.itl.counts) == 27
            assert page["tailpack_router_itl_seconds_sum",] == pytest.approx(stats.itl.sum_s)
            assert len(stats.ttft.counts) == len(stats.ttft.upper_bounds_s) + 1
            assert page["tailpack_router_request_seconds_count",] == 4
            lines = [json.loads(line) for line in log.getvalue().splitlines()]
            said = [line for line in lines if line["event"] == "request"]
            assert (
                len(said) == 4 and len({tuple(line) for line in said}) == 1
            )  # always the same keys, in the same order
            assert list(said[0])[:4] == ["timestamp", "level", "component", "event"]
            assert (said[0]["cached_tokens"], said[0]["prefix_exact"], said[0]["door"]) == (3, True, "session")
            assert said[0]["itl_max_ms"] >= said[0]["itl_mean_ms"] >= 0 and said[0]["ttft_ms"] > 0
            assert said[3]["ttft_ms"] is said[3]["itl_max_ms"] is said[3]["cached_tokens"] is None
            assert "prompt" not in said[0]


async def test_what_is_in_flight_has_an_age(folder: Path) -> None:
    async with cluster(folder, Script([300], endless=True, every_s=0.01)) as c:
        with page_of(c) as samples:
            stream = c.client.stream(build_request([5, 6], max_tokens=1000), request_id="r")
            async for _ in stream:
                page = samples()
                break
            assert page["tailpack_router_in_flight",] == 1
            assert page["tailpack_router_oldest_request_age_seconds",] > 0
            assert [value for key, value in page.items() if key[0] == "tailpack_router_worker_in_flight"] == [1]
            await stream.aclose()
            await c.settled()
            page = samples()
            assert page["tailpack_router_in_flight",] == page["tailpack_router_oldest_request_age_seconds",] == 0


async def test_a_worker_that_was_killed_does_not_linger_as_live(folder: Path) -> None:
    worker: Process = fake_worker_process("--token-ids", "300")
    try:
        address = worker.address()
        async with cluster(folder, Script([300]), addresses=[address]) as c:
            with page_of(c) as samples:
                (killed,) = (link.worker_id for link in c.requests.registry.links.values() if link.address == address)
                assert ("tailpack_router_worker_in_flight", address, killed) in samples()
                worker.end()
                await until(lambda: c.requests.registry.links[address].state == "lost")
                page = samples()
                states = {
                    key[2]: value for key, value in page.items() if key[:2] == ("tailpack_router_worker_state", address)
                }
                assert states == {"connecting": 0, "ready": 0, "draining": 0, "lost": 1, "refused": 0}
                assert ("tailpack_router_worker_in_flight", address, killed) not in page
    finally:
        worker.end()


async def test_a_worker_that_moved_has_no_series_twice(folder: Path) -> None:
    async with cluster(folder, Script([300]), num_workers=2) as c:
        for link in c.requests.registry.links.values():
            assert link.info is not None
            link.info.worker_id = "w-1"
        registry = CollectorRegistry(auto_describe=False)
        with exported(RouterCollector(c.requests, Authenticator(None)), registry=registry):
            text = metrics_page("", registry)[0].decode()
        series = [line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")]
        assert len(series) == len(set(series))
        assert sum('worker="w-1"' in each and "stray" in each for each in series) == 2


async def test_only_configured_tenants_are_told_apart(folder: Path, tmp_path: Path) -> None:
    token, file = new_token(), tmp_path / "tokens.toml"
    file.write_text(file_lines("a", token) + "\ntokens_per_minute = 60\n")
    authenticator = Authenticator(file)
    script = Script([300], endless=True, every_s=0.01)
    async with cluster(folder, script, tokens=authenticator) as c:
        with page_of(c, authenticator) as samples:
            async with AsyncTailpack(c.address, token=token) as caller:
                stream = caller.stream(build_request([5, 6], max_tokens=1000))
                async for _ in stream:
                    page = samples()
                    break
                await stream.aclose()
            with pytest.raises(errors.Unauthenticated):
                await answer(c.client, [5, 6])
            assert page["tailpack_router_tenant_in_flight", "a"] == 1
            assert page["tailpack_router_tenant_tokens_left", "a"] < 60
            assert samples()["tailpack_router_unauthenticated_total", "TOKEN_MISSING"] == 1
            await c.settled()
    async with cluster(folder, script) as c:
        with page_of(c) as samples:
            async with AsyncTailpack(c.address, tenant="who-I-like") as caller:
                stream = caller.stream(build_request([5, 6], max_tokens=1000))
                async for _ in stream:
                    assert not any("who-I-like" in key for key in samples())
                    break
                await stream.aclose()
            await c.settled()


# --- traces ---


async def test_a_request_is_traced_from_the_caller_to_the_worker(folder: Path) -> None:
    exporter = InMemorySpanExporter()
    async with cluster(folder, Script([300] * 3), tracing=Tracing("router", exporter)) as c:
        request = build_request("some text", max_tokens=3)
        async for _ in c.client.stream(request, request_id="r-1", traceparent=CALLER):
            pass
        await c.settled()
        (submit,) = c.workers[0].submits
    spans: dict[str, ReadableSpan] = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"request", "tokenize", "place", "relay"}
    request_span = spans["request"]
    assert request_span.parent is not None and f"{request_span.parent.span_id:016x}" == CALLER.split("-")[2]
    assert submit.traceparent == f"00-{CALLER.split('-')[1]}-{spans['relay'].context.span_id:016x}-01"
    assert [event.name for event in spans["relay"].events] == ["first token"]
    assert (request_span.attributes or {})["tailpack.reason"] == "LENGTH"
    assert all("some text" not in span.to_json() for span in spans.values())


async def test_each_placement_is_a_span_and_failed_ones_say_why(folder: Path) -> None:
    exporter = InMemorySpanExporter()
    full = errors.CapacityError("full", reason="QUEUE_FULL")
    failures = [Script(error=full)]
    script = lambda submit: failures.pop() if failures else Script([300])
    async with cluster(folder, script, num_workers=2, tracing=Tracing("router", exporter)) as c:
        await answer(c.client, [5, 6], max_tokens=1)
        await c.settled()
    relays = [span for span in exporter.get_finished_spans() if span.name == "relay"]
    assert [span.status.description for span in relays] == ["QUEUE_FULL", None]


async def test_without_traces_the_worker_gets_the_callers_header(folder: Path) -> None:
    async with cluster(folder, Script([300])) as c:
        async for _ in c.client.stream(build_request([5, 6], max_tokens=1), traceparent=CALLER):
            pass
        assert c.workers[0].submits[0].traceparent == CALLER


# --- prompts ---


@contextmanager
def captured_logs(level: str) -> Iterator[io.StringIO]:
    """All that this process logs, of every library too, as the file that it would be in."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.configure("router", json=True, level=level)
    written = io.StringIO()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(written)
    if level == "debug":
        root.setLevel(logging.DEBUG)
    try:
        yield written
    finally:
        logs.configure("test", json=True)
        root.handlers[:], root.level = before


def lines_of(log: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def request_of(prompt: str | router_pb2.Chat, **fields: Any) -> router_pb2.GenerateRequest:
    """As it is, unchecked by any client."""
    stop = types_pb2.StopConditions(max_tokens=2)
    if isinstance(prompt, str):
        return router_pb2.GenerateRequest(**{"text": prompt, "stop": stop, **fields})
    return router_pb2.GenerateRequest(**{"chat": prompt, "stop": stop, **fields})


async def send_marked(c: Harness) -> None:
    """Prompts with the marker that are answered, refused in every way that there is, and cut off."""
    said = router_pb2.ChatMessage(role="user", content=f"chat {MARKER}")
    marked: list[router_pb2.GenerateRequest] = [
        request_of(f"text {MARKER}"),
        request_of(router_pb2.Chat(messages=[said])),
        request_of(router_pb2.Chat(messages=[router_pb2.ChatMessage(role=MARKER, content=MARKER)])),
        request_of(MARKER * 3000),  # too long
        request_of(MARKER, model=f"none such {MARKER}"),
        request_of(MARKER, sampling=types_pb2.Sampling(temperature=-1.0)),
        request_of(MARKER, stop_strings=[MARKER * 100]),
        request_of(MARKER, stop_strings=[MARKER] * 99),
        request_of(MARKER, stop_strings=[MARKER]),
        request_of(MARKER, tools_json=MARKER),
        request_of(MARKER, json_schema=MARKER),
        request_of(MARKER, lora_adapter=MARKER),
        request_of(MARKER, prefix_reuse=99),
    ]
    async with rpc.channel(c.address) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        for request in marked:
            with suppress(grpc.RpcError):
                async for _ in stub.Generate(request):
                    pass
        endless = request_of(MARKER, stop=types_pb2.StopConditions(max_tokens=1000))
        with suppress(grpc.RpcError):
            async for _ in stub.Generate(endless, timeout=0.3):  # long enough to be taken
                pass
        for metadata in (("x-request-id", MARKER + " bad"), ("x-tenant", MARKER + "/bad")):
            with suppress(grpc.RpcError):
                async for _ in stub.Generate(request_of("x"), metadata=(metadata,)):
                    pass
        raw: Any = channel.unary_stream("/tailpack.v1.Router/Generate", request_serializer=str.encode)
        with suppress(grpc.RpcError):
            async for _ in raw(MARKER):
                pass


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_no_log_holds_what_callers_wrote(folder: Path, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: Tokenizer, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug in the tokenizer", len(prompt))

    with captured_logs(level) as log:
        async with cluster(folder, Script([300], endless=True, every_s=0.001)) as c:
            await send_marked(c)
            with monkeypatch.context() as patched:
                patched.setattr(Tokenizer, "encode_text", broken)
                patched.setattr(Tokenizer, "encode_chat", broken)
                await send_marked(c)
            await c.settled()
    assert "a bug in the tokenizer" in log.getvalue()  # tracebacks are there, without the values of variables
    reasons = {line.get("reason") for line in lines_of(log)}
    assert {"LENGTH", "UNKNOWN_MODEL", "PROMPT_TOO_LONG", "RuntimeError", "DEADLINE_EXCEEDED"} <= reasons
    assert MARKER not in log.getvalue()


async def test_prompts_are_logged_where_the_router_was_told_to(folder: Path) -> None:
    with captured_logs("info") as log:
        async with cluster(folder, Script([300]), log_prompts=True) as c:
            await answer(c.client, f"text {MARKER}", max_tokens=1, chat=False)
            await answer(c.client, f"chat {MARKER}", max_tokens=1)
            await answer(c.client, [5, 6, 7], max_tokens=1)
            with pytest.raises(TailpackError, match="PROMPT_TOO_LONG"):
                await answer(c.client, "a" * 5000, max_tokens=1, chat=False)
            await c.settled()
    prompts = [line.get("prompt") for line in lines_of(log) if line["event"] == "request"]
    assert prompts[:3] == [f"text {MARKER}", f"user: chat {MARKER}", "5 6 7"]
    assert prompts[3] == "a" * 4096 + "... (5000 characters)"
