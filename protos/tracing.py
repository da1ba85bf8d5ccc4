"""Traces over OTLP (OpenTelemetry), off unless an endpoint is configured: client -> router -> worker -> step.

What is off costs nothing but the carrying of the caller's ``traceparent``. What is on is bounded: spans are exported
from a thread of their own out of a queue of a fixed size; where the collector does not keep up or cannot be reached,
spans are dropped. OpenTelemetry's own variables hold: OTEL_EXPORTER_OTLP_TIMEOUT, OTEL_TRACES_SAMPLER, OTEL_BSP_*.

The library is imported only where traces are asked for: the extra "trace".
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from protos.errors import ConfigError, TailpackError
from protos.metrics import build_version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as OtelSpan

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
STOP_TIMEOUT_S = 2.0
COMPLAIN_EVERY_S = 60.0
_MONOTONIC_TO_UNIX_NS = time.time_ns() - time.monotonic_ns()


def endpoint_of(given: str | None, environ: Mapping[str, str] = os.environ) -> str | None:
    """The collector's URL: what was given, else what the environment says; None: no traces.

    Raises:
        ConfigError: BAD_OTLP_ENDPOINT; OTLP_PROTOCOL_NOT_BUILT, the environment asks for OTLP over HTTP.
    """
    if given == "none" or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    endpoint = given or next((environ[name] for name in ENDPOINT_VARIABLES if environ.get(name)), None)
    if endpoint is None:
        return None
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            "the OTLP endpoint is malformed",
            reason="BAD_OTLP_ENDPOINT",
            given=endpoint,
            allowed="http://host:4317, or https for TLS",
        )
    for name in PROTOCOL_VARIABLES:
        if environ.get(name, "grpc") != "grpc":
            raise ConfigError(
                "traces are exported over OTLP's gRPC form only",
                reason="OTLP_PROTOCOL_NOT_BUILT",
                given=f"{name}={environ[name]}",
                allowed="grpc",
                hint="name the collector's gRPC port, 4317 by custom",
            )
    return endpoint


def configure(component: str, endpoint: str | None) -> Tracing | None:
    """The tracing of this process; None where there is no endpoint.

    Args:
        component: "router" or "worker"; spans' resource has it as service.name "tailpack-<component>".
        endpoint: what ``endpoint_of`` returned.

    Raises:
        ConfigError: TRACING_NOT_INSTALLED.
    """
    if endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as missing:
        raise ConfigError(
            "traces were asked for, and OpenTelemetry is not installed",
            reason="TRACING_NOT_INSTALLED",
            given=endpoint,
            hint="pip install 'tailpack[trace]', or leave the OTLP endpoint out",
        ) from missing
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    for name in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"):
        logging.getLogger(name).addFilter(_Seldom())  # they complain at every export of a collector that is gone
    tracing = Tracing(component)
    tracing.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return tracing


class _Seldom(logging.Filter):
    """Lets one record a minute through."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created < self._next_s:
            return False
        self._next_s = record.created + COMPLAIN_EVERY_S
        return True


class Tracing:
    """Makes spans. ``provider`` is OpenTelemetry's; who makes one by hand adds a processor (tests: one in memory)."""

    def __init__(self, component: str, exporter: SpanExporter | None = None) -> None:
        """exporter: gets every span at once when it ends; None: ``provider`` is given a processor later."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self.provider: TracerProvider = TracerProvider(
            resource=Resource.create({"service.name": f"tailpack-{component}", "service.version": build_version()}),
            shutdown_on_exit=False,
        )
        if exporter is not None:
            self.provider.add_span_processor(SimpleSpanProcessor(exporter))
        self._tracer = self.provider.get_tracer("tailpack", build_version())
        self._propagator = TraceContextTextMapPropagator()

    def span(
        self,
        name: str,
        traceparent: str = "",
        *,
        server: bool = False,
        start_ns: int | None = None,
        links: tuple[str, ...] = (),
        **attributes: Any,
    ) -> Span:
        """Begins a span below the one that ``traceparent`` names; without it, one that begins a trace.

        Args:
            server: it answers a call of another process.
            start_ns: time.monotonic_ns(); None: now.
            links: traceparents of other spans that it has to do with.
        """
        from opentelemetry import trace

        parent = self._propagator.extract({"traceparent": traceparent}) if traceparent else None
        linked = [
            trace.Link(trace.get_current_span(self._propagator.extract({"traceparent": each})).get_span_context())
            for each in links
        ]
        begun = self._tracer.start_span(
            name,
            context=parent,
            kind=trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL,
            start_time=None if start_ns is None else start_ns + _MONOTONIC_TO_UNIX_NS,
            attributes=_known(attributes),
            links=linked,
        )
        return Span(self, begun)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Exports what is there, for at most ``timeout_s`` seconds: a collector that is gone must not hold us up."""
        stopping = threading.Thread(target=self.provider.shutdown, name="tracing-stop", daemon=True)
        stopping.start()
        stopping.join(timeout_s)


class Span:
    """A span that has begun. Whoever began it ends it."""

    def __init__(self, tracing: Tracing, span: OtelSpan) -> None:
        self._tracing = tracing
        self._span = span

    @property
    def traceparent(self) -> str:
        """This span, for others to be below it (W3C trace context)."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def begin(self, name: str, *, start_ns: int | None = None, **attributes: Any) -> Span:
        """A span below this one."""
        return self._tracing.span(name, self.traceparent, start_ns=start_ns, **attributes)

    def add(self, name: str, start_ns: int, end_ns: int, **attributes: Any) -> None:
        """A span below this one that is over already; times as time.monotonic_ns()."""
        self.begin(name, start_ns=start_ns, **attributes).end(end_ns=end_ns)

    @contextmanager
    def phase(self, name: str, **attributes: Any) -> Iterator[None]:
        """A span below this one for what is done inside; what is raised there is its error."""
        span = self.begin(name, **attributes)
        try:
            yield
        except BaseException as error:
            span.end(error=error_name(error))
            raise
        span.end()

    def event(self, name: str, at_ns: int) -> None:
        """Something that happened at one moment, time.monotonic_ns()."""
        self._span.add_event(name, timestamp=at_ns + _MONOTONIC_TO_UNIX_NS)

    def set(self, **attributes: Any) -> None:
        self._span.set_attributes(_known(attributes))

    def end(self, *, error: str | None = None, end_ns: int | None = None) -> None:
        """Ends it now, or at ``end_ns`` (time.monotonic_ns()). error: its name, where it ended in one."""
        if error is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, error)
            self._span.set_attribute("error.type", error)
        self._span.end(end_time=None if end_ns is None else end_ns + _MONOTONIC_TO_UNIX_NS)


_NOTHING = nullcontext()


class NoSpan:
    """Stands for a span where there are no traces: what came in as ``traceparent`` goes on as it is."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def begin(self, name: str, *, start_ns: int | None = None, **attributes: Any) -> NoSpan:
        return self

    def phase(self, name: str, **attributes: Any) -> AbstractContextManager[None]:
        return _NOTHING

    def event(self, name: str, at_ns: int) -> None:
        pass

    def set(self, **attributes: Any) -> None:
        pass

    def end(self, *, error: str | None = None, end_ns: int | None = None) -> None:
        pass


def request_span(tracing: Tracing | None, traceparent: str, **attributes: Any) -> Span | NoSpan:
    """The span of a request that a caller sent, or what stands for it."""
    if tracing is None:
        return NoSpan(traceparent)
    return tracing.span("request", traceparent, server=True, **attributes)


def is_sampled(traceparent: str) -> bool:
    """Whether a W3C traceparent names a span that is recorded. Malformed: no."""
    flags = traceparent.rpartition("-")[2]
    try:
        return bool(int(flags, 16) & 1) and traceparent.count("-") == 3
    except ValueError:
        return False


def error_name(error: BaseException) -> str:
    """Short and of few kinds; a message may hold what a caller sent."""
    return error.reason if isinstance(error, TailpackError) else type(error).__name__


def _known(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None, under our own names."""
    return {f"tailpack.{name}": value for name, value in attributes.items() if value is not None}
