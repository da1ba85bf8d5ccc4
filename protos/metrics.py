"""What every process exports to Prometheus: the page, what all processes have in common, and a small server for it.

Nothing is counted twice and nothing is kept for Prometheus alone where a counter exists: collectors read what is there
when somebody asks. Names begin with ``tailpack_``. Values of labels come from short lists (layer groups, error reasons,
workers); never from requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from protos.histogram import LAG_BOUNDS_S, Histogram
from protos.small_http import Answer, SmallHttpServer

log = structlog.get_logger("metrics")

PATH = "/metrics"
OFF = "none"
"""In place of an address: no server."""
OTHER = "OTHER"
PROBE_INTERVAL_S = 0.25

Page = Callable[[str], tuple[bytes, str]]
"""From the caller's Accept header to (page, content type)."""


def metrics_page(accept_header: str = "", registry: CollectorRegistry = REGISTRY) -> tuple[bytes, str]:
    """The page of this process, in OpenMetrics where the caller takes it, else in Prometheus' text form.

    Any thread. What collectors raise comes out.

    Returns:
        (page, content type).
    """
    encode, content_type = choose_encoder(accept_header)
    return encode(registry), content_type


@contextmanager
def exported(*collectors: Collector, registry: CollectorRegistry = REGISTRY) -> Iterator[None]:
    """These are part of the process's page inside."""
    with contextlib.ExitStack() as undo:
        for collector in collectors:
            registry.register(collector)
            undo.callback(registry.unregister, collector)
        yield


class LazyCollector(Collector):
    """One that is not read when it is registered, but when somebody asks for the page."""

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        raise NotImplementedError


class BoundedCounter:
    """Counts by labels. Reasons of errors come from other processes too: of more than ``most`` different labels, the
    last one is counted as OTHER. One thread counts, any thread reads.
    """

    def __init__(self, most: int = 128) -> None:
        self._most = most
        self._counts: dict[tuple[str, ...], int] = {}

    def add(self, *labels: str) -> None:
        if labels not in self._counts and len(self._counts) >= self._most:
            labels = (*labels[:-1], OTHER)
        self._counts[labels] = self._counts.get(labels, 0) + 1

    def items(self) -> list[tuple[tuple[str, ...], int]]:
        return list(self._counts.items())


def histogram_family(
    name: str, help_text: str, histograms: Iterable[tuple[Mapping[str, str], Histogram]]
) -> HistogramMetricFamily:
    """Histograms under one name, each with its labels; all with the same label names."""
    family: HistogramMetricFamily | None = None
    for labels, histogram in histograms:
        family = family or HistogramMetricFamily(name, help_text, labels=list(labels))
        buckets, below = [], 0
        for bound, count in zip((*map(repr, histogram.bounds), "+Inf"), list(histogram.counts), strict=True):
            below += count
            buckets.append((bound, below))
        family.add_metric(list(labels.values()), buckets, histogram.sum_s)
    return family or HistogramMetricFamily(name, help_text)


class EventLoopProbe:
    """How late an event loop runs what is due. ``run`` is a task of that loop; reading is for any thread."""

    def __init__(self) -> None:
        self.lag = Histogram(LAG_BOUNDS_S)
        self._ticked_ns = time.monotonic_ns()

    async def run(self) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + PROBE_INTERVAL_S
            await asyncio.sleep(PROBE_INTERVAL_S)
            self.lag.observe(max(0.0, loop.time() - due))
            self._ticked_ns = time.monotonic_ns()

    @property
    def silent_s(self) -> float:
        """Since the loop last ran the probe. Far above the probe's interval: the loop is stuck."""
        return (time.monotonic_ns() - self._ticked_ns) / 1e9


class ProcessMetrics(LazyCollector):
    """What all of our processes have: which build this is, and whether its event loop keeps up.

    Args:
        component: "router", "worker" or "kvstore".
    """

    def __init__(self, component: str, probe: EventLoopProbe) -> None:
        self._component = component
        self._probe = probe

    def collect(self) -> Iterable[Metric]:
        build = InfoMetricFamily("tailpack_build", "What runs here.")
        build.add_metric(
            [], {"component": self._component, "version": build_version(), "python": platform.python_version()}
        )
        yield build
        labels = {"component": self._component}
        yield histogram_family(
            "tailpack_event_loop_lag_seconds", "How late the event loop ran a timer.", [(labels, self._probe.lag)]
        )
        silent = GaugeMetricFamily(
            "tailpack_event_loop_silent_seconds",
            f"Since the event loop last ran a timer of {PROBE_INTERVAL_S:g} s; far more: it is stuck.",
            labels=list(labels),
        )
        silent.add_metric(list(labels.values()), self._probe.silent_s)
        yield silent


def build_version() -> str:
    """Of the installed distribution; "unknown" in a tree that is not installed."""
    try:
        return version("tailpack")
    except PackageNotFoundError:
        return "unknown"


class MetricsServer(SmallHttpServer):
    """``GET /metrics`` over HTTP.

    Args:
        page: makes the page; what it raises is answered with status 500 and logged.
        tls: as for SmallHttpServer.
    """

    def __init__(self, page: Page = metrics_page, *, tls: ssl.SSLContext | None = None) -> None:
        super().__init__("metrics", tls=tls)
        self._page = page

    def start(self, address: str) -> str:
        """As SmallHttpServer.start. Returns the page's URL."""
        return super().start(address) + PATH

    def answer(self, path: str, headers: Mapping[str, str]) -> Answer | None:
        if path != PATH:
            return None
        try:
            return Answer("200 OK", *self._page(headers.get("accept", "")))
        except Exception as failure:
            log.error("no metrics", exc_info=failure)
            body = f"{type(failure).__name__}; see the process's log\n".encode()
            return Answer("500 Internal Server Error", body)


@asynccontextmanager
async def serving_metrics(
    component: str, address: str, *collectors: Collector, tls: ssl.SSLContext | None = None
) -> AsyncIterator[str | None]:
    """Serves a process's metrics inside, for processes that have no other HTTP door.

    Args:
        component: "worker" or "kvstore".
        address: host:port, or OFF.
        collectors: beside what all processes have.

    Yields:
        The page's URL; None: it is off.

    Raises:
        ConfigError: what MetricsServer.start raises.
    """
    if address == OFF:
        yield None
        return
    registry = CollectorRegistry(auto_describe=False)
    for standard in (ProcessCollector, PlatformCollector, GCCollector):
        standard(registry=registry)
    probe = EventLoopProbe()
    server = MetricsServer(partial(metrics_page, registry=registry), tls=tls)
    with exported(ProcessMetrics(component, probe), *collectors, registry=registry):
        probing = asyncio.create_task(probe.run())
        try:
            yield server.start(address)
        finally:
            probing.cancel()
            await asyncio.to_thread(server.stop)
