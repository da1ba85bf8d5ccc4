"""Traces: when they are on, who is below whom, and that a collector that is gone costs nothing but its spans."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from protos import tracing
from protos.errors import ConfigError, InvalidRequest
from protos.tracing import NoSpan, Tracing, endpoint_of, is_sampled, request_span
from tests.otlp import collector

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-1] + "0"


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_traces_are_off_unless_somebody_asks_for_them() -> None:
    assert endpoint_of(None, {}) is None
    assert endpoint_of(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) is None
    assert endpoint_of("none", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}) is None
    assert endpoint_of("http://b:2", {"OTEL_SDK_DISABLED": "true"}) is None
    assert tracing.configure("router", None) is None


def test_a_router_without_traces_does_not_even_import_the_library() -> None:
    code = "import sys, router.server, router.cli; assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=60)


def test_an_endpoint_comes_from_the_flag_or_the_environment() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    assert endpoint_of(None, environ) == "http://a:1"
    assert endpoint_of("https://b:2", environ) == "https://b:2"
    assert endpoint_of(None, {**environ, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:3"}) == "http://c:3"


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://a:1", "http://", "4317"])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        endpoint_of(endpoint, {})
    assert refused.value.reason == "BAD_OTLP_ENDPOINT"


def test_a_protocol_that_is_not_spoken_is_refused_and_not_ignored() -> None:
    with pytest.raises(ConfigError) as refused:
        endpoint_of("http://a:4318", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    assert refused.value.reason == "OTLP_PROTOCOL_NOT_BUILT"


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tailpack\[trace\]") as refused:
        tracing.configure("router", "http://a:1")
    assert refused.value.reason == "TRACING_NOT_INSTALLED"


def test_spans_are_below_the_callers_and_each_other() -> None:
    exporter = InMemorySpanExporter()
    span = request_span(Tracing("router", exporter), CALLER, request_id="r-1", nothing=None)
    with span.phase("tokenize"):
        pass
    relay = span.begin("relay", worker="w")
    assert relay.traceparent.startswith("00-0af7651916cd43dd8448eb211c80319c-")
    relay.end()
    with pytest.raises(InvalidRequest), span.phase("place"):
        raise InvalidRequest("with text of the caller", reason="WRONG")
    span.end(error="WRONG")
    spans = by_name(exporter)
    assert set(spans) == {"request", "tokenize", "relay", "place"}
    request = spans["request"]
    assert request.parent is not None and f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert dict(request.attributes or {}) == {"tailpack.request_id": "r-1", "error.type": "WRONG"}
    for name in ("tokenize", "relay", "place"):
        parent = spans[name].parent
        assert parent is not None and request.context is not None and parent.span_id == request.context.span_id
    assert relay.traceparent.split("-")[2] == f"{spans['relay'].context.span_id:016x}"
    assert spans["place"].status.description == "WRONG"  # the reason, and nothing of what the caller sent
    assert all("text of the caller" not in each.to_json() for each in exporter.get_finished_spans())


def test_a_caller_that_does_not_record_is_not_recorded() -> None:
    exporter = InMemorySpanExporter()
    span = request_span(Tracing("router", exporter), UNSAMPLED)
    assert not is_sampled(span.traceparent)  # and so nobody behind us records
    span.end()
    assert not exporter.get_finished_spans()


def test_without_traces_the_callers_header_goes_on_as_it_is() -> None:
    span = request_span(None, CALLER, request_id="r")
    assert isinstance(span, NoSpan)
    with span.phase("tokenize"):
        span.event("x", 1)
    assert span.begin("relay").traceparent == CALLER
    span.end(error="X")


@pytest.mark.parametrize("given", ["", "00", "00-a-b-", "00-a-b-xx", UNSAMPLED, "1", "01"])
def test_what_names_no_recorded_span(given: str) -> None:
    assert not is_sampled(given)


def test_spans_reach_a_collector() -> None:
    with collector() as (kept, url):
        traces = tracing.configure("router", url)
        assert traces is not None
        span = request_span(traces, CALLER)
        begun = time.monotonic_ns()
        span.begin("relay", start_ns=begun - 5_000_000).end(end_ns=begun)
        span.end()
        traces.stop()
        assert [(service, span.name) for service, span in kept.spans] == [
            ("tailpack-router", "relay"),
            ("tailpack-router", "request"),
        ]
        relay = kept.spans[0][1]
        assert relay.end_time_unix_nano - relay.start_time_unix_nano == 5_000_000
        assert abs(relay.end_time_unix_nano - time.time_ns()) < 60e9  # on the wall clock


def test_a_collector_that_is_gone_holds_nobody_up_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queues: list[BatchSpanProcessor] = []
    right = BatchSpanProcessor.__init__

    def remembered(self: BatchSpanProcessor, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs)
        queues.append(self)

    monkeypatch.setattr(BatchSpanProcessor, "__init__", remembered)
    traces = tracing.configure("router", "http://127.0.0.1:1")  # nobody listens there
    assert traces is not None
    for _ in range(5000):
        request_span(traces, CALLER).end()
    (queue,) = queues
    assert len(queue._batch_processor._queue) <= queue._batch_processor._max_queue_size <= 2048
    stopped = threading.Thread(target=traces.stop, args=(0.1,))
    stopped.start()
    stopped.join(60)
    assert not stopped.is_alive()
