"""What a router counts of its requests, for Stats, its log and Prometheus; and the collector that reads it all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from protos import router_pb2
from protos.histogram import LATENCY_BOUNDS_S, STEP_BOUNDS_S, Histogram
from protos.metrics import BoundedCounter, LazyCollector, histogram_family

if TYPE_CHECKING:
    from router.auth import Authenticator
    from router.requests import Requests

WORKER_STATES = ("connecting", "ready", "draining", "lost", "refused")
_LIVE = ("ready", "draining")


class TokenPace:
    """When the tokens of one answer came from its worker. The gaps between them are counted in ``itl`` as they come.

    Attributes:
        first_ns, last_ns: of the first and the newest tokens, time.monotonic_ns; None before the first.
        longest_gap_ns: between two consecutive outputs.
    """

    __slots__ = ("_itl", "first_ns", "last_ns", "longest_gap_ns")

    def __init__(self, itl: Histogram) -> None:
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.longest_gap_ns = 0
        self._itl = itl

    def came(self, num_tokens: int) -> None:
        """``num_tokens`` came at once, now: the gap before them is shared among them."""
        now_ns = time.monotonic_ns()
        if self.last_ns is None:
            self.first_ns = now_ns
        else:
            gap_ns = now_ns - self.last_ns
            self._itl.observe(gap_ns / (1e9 * num_tokens), num_tokens)
            if gap_ns > self.longest_gap_ns:
                self.longest_gap_ns = gap_ns
        self.last_ns = now_ns

    def mean_gap_ns(self, num_tokens: int) -> int | None:
        """Between tokens, of an answer of ``num_tokens``; None below two."""
        if self.first_ns is None or self.last_ns is None or num_tokens < 2:
            return None
        return (self.last_ns - self.first_ns) // (num_tokens - 1)


class RequestMetrics:
    """Of one router's requests since it started."""

    def __init__(self) -> None:
        self.ttft = Histogram(LATENCY_BOUNDS_S)
        self.itl = Histogram(STEP_BOUNDS_S)
        self.tokenize = Histogram(LATENCY_BOUNDS_S)
        self.duration = Histogram(LATENCY_BOUNDS_S)
        self.ended = BoundedCounter()
        """(door, outcome, finish or error reason) -> how many."""
        self.prefix: Counter[str] = Counter()
        """Of answers with usage: what they reused, "exact", "inexact" or "none"."""
        self.cached_prompt_tokens = 0

    def end(self, door: str, outcome: str, reason: str) -> None:
        self.ended.add(door, outcome, reason)

    def reused(self, cached_prompt_tokens: int, exact: bool) -> None:
        """What a finished answer's usage says about its prefix."""
        self.cached_prompt_tokens += cached_prompt_tokens
        self.prefix[("exact" if exact else "inexact") if cached_prompt_tokens else "none"] += 1


def histogram_message(histogram: Histogram) -> router_pb2.Histogram:
    return router_pb2.Histogram(upper_bounds_s=histogram.bounds, counts=histogram.counts, sum_s=histogram.sum_s)


class RouterCollector(LazyCollector):
    """Reads a router's counters; on its event loop, or while that stands still.

    Args:
        authenticator: whose tenants are told apart. Where callers name themselves, names are endless.
    """

    def __init__(self, requests: Requests, authenticator: Authenticator) -> None:
        self._requests = requests
        self._authenticator = authenticator

    def collect(self) -> Iterable[Metric]:
        yield from self._traffic()
        yield from self._latency()
        yield from self._workers()
        yield from self._of_tenants()

    def _traffic(self) -> Iterable[Metric]:
        requests = self._requests
        counters, measured, admission = requests.counters, requests.metrics, requests.admission
        ended = CounterMetricFamily(
            "tailpack_router_requests",
            "Requests that ended, by door, outcome and reason (of the finish or of the error).",
            labels=["door", "outcome", "reason"],
        )
        for labels, count in measured.ended.items():
            ended.add_metric(labels, count)
        yield ended
        tokens = CounterMetricFamily(
            "tailpack_router_tokens", "Of requests that ended and had a worker.", labels=["kind"]
        )
        tokens.add_metric(["prompt"], counters.prompt_tokens)
        tokens.add_metric(["prompt_cached"], measured.cached_prompt_tokens)
        tokens.add_metric(["output"], counters.output_tokens)
        yield tokens
        prefix = CounterMetricFamily(
            "tailpack_router_prefix", "Answers by what of their prompt was there already.", labels=["result"]
        )
        for result in ("exact", "inexact", "none"):
            prefix.add_metric([result], measured.prefix[result])
        yield prefix
        yield CounterMetricFamily(
            "tailpack_router_received", "Requests that came, refused ones included.", value=counters.requests
        )
        yield CounterMetricFamily(
            "tailpack_router_retries", "Requests placed again before anything was emitted.", value=counters.retries
        )
        recoveries = CounterMetricFamily(
            "tailpack_router_recoveries",
            "Streams that lost their worker behind the first token, by what became of them.",
            labels=["outcome"],
        )
        for outcome in ("joined", "recomputed", "lost"):
            recoveries.add_metric([outcome], getattr(counters, f"recovered_{outcome}"))
        yield recoveries
        yield GaugeMetricFamily(
            "tailpack_router_logged_tokens",
            "Of live streams, kept so that another worker can go on with them.",
            value=requests.token_logs.num_tokens,
        )
        yield CounterMetricFamily(
            "tailpack_router_logs_dropped",
            "Streams whose tokens are no longer kept, for want of room.",
            value=requests.token_logs.num_dropped,
        )
        yield CounterMetricFamily(
            "tailpack_router_resumes", "Calls that went on with an answer, or joined it.", value=counters.resumes
        )
        yield GaugeMetricFamily(
            "tailpack_router_streams",
            "Calls that are open: a resumable request may have none, or several.",
            value=admission.num_in_flight,
        )
        yield GaugeMetricFamily(
            "tailpack_router_sessions", "Streams of many calls that are open.", value=len(requests.sessions)
        )
        yield GaugeMetricFamily("tailpack_router_in_flight", "Requests in flight.", value=requests.num_in_flight)
        yield GaugeMetricFamily(
            "tailpack_router_oldest_request_age_seconds",
            "Age of the request that is longest in flight; 0: none is.",
            value=admission.oldest_age_s,
        )
        yield GaugeMetricFamily(
            "tailpack_router_held_request_bytes", "Of the requests in flight, as received.", value=admission.held_bytes
        )
        yield GaugeMetricFamily(
            "tailpack_router_unread_bytes",
            "Of answers, gathered for callers who have yet to read them.",
            value=requests.unread.num_bytes,
        )
        yield GaugeMetricFamily(
            "tailpack_router_draining", "1: new requests are refused.", value=float(admission.draining)
        )

    def _latency(self) -> Iterable[Metric]:
        measured = self._requests.metrics
        for name, text, histogram in (
            ("ttft", "From a request's arrival to its first token.", measured.ttft),
            ("itl", "Between consecutive tokens of an answer, as they came from the worker.", measured.itl),
            ("tokenize", "From a request's arrival to its token ids.", measured.tokenize),
            ("request", "From a request's arrival to its end.", measured.duration),
        ):
            yield histogram_family(f"tailpack_router_{name}_seconds", text, [({}, histogram)])

    def _workers(self) -> Iterable[Metric]:
        """What a lost worker last said of itself is not shown: it is not so any more.

        A worker that moved has its name twice, at its old address as well: without that series would be there twice.
        """
        state = GaugeMetricFamily(
            "tailpack_router_worker_state",
            "1: how this router sees a worker; 0: how it does not.",
            labels=["worker", "address", "state"],
        )
        in_flight = GaugeMetricFamily(
            "tailpack_router_worker_in_flight", "Requests this router has there.", labels=["worker", "address"]
        )
        stray = CounterMetricFamily(
            "tailpack_router_stray_outputs",
            "About sequences that nobody here knows; stays 0.",
            labels=["worker", "address"],
        )
        for link in list(self._requests.registry.links.values()):
            for each in WORKER_STATES:
                state.add_metric([link.worker_id, link.address, each], float(each == link.state))
            stray.add_metric([link.worker_id, link.address], link.num_stray_outputs)
            if link.state in _LIVE:
                in_flight.add_metric([link.worker_id, link.address], link.own.num_sequences)
        return state, in_flight, stray

    def _of_tenants(self) -> Iterable[Metric]:
        in_flight = GaugeMetricFamily(
            "tailpack_router_tenant_in_flight", "Calls of a configured tenant that are open.", labels=["tenant"]
        )
        left = GaugeMetricFamily(
            "tailpack_router_tenant_tokens_left",
            "What a tenant with a limit may spend now; below 0: in debt.",
            labels=["tenant"],
        )
        in_use, configured = self._requests.tenants.in_use(), self._authenticator.tenants
        for tenant, use in sorted(in_use.items()):
            if tenant in configured:
                in_flight.add_metric([tenant], use.num_requests)
                if use.tokens_left is not None:
                    left.add_metric([tenant], use.tokens_left)
        refused = CounterMetricFamily(
            "tailpack_router_unauthenticated", "Calls that were not let in, by reason.", labels=["reason"]
        )
        for reason, count in sorted(self._authenticator.num_refused.items()):
            refused.add_metric([reason], count)
        return in_flight, left, refused
