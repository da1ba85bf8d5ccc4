"""The page of metrics and its server: what it answers, and what it does with callers who mean ill or are gone."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from protos import metrics, small_http
from protos.errors import ConfigError
from protos.histogram import STEP_BOUNDS_S, Histogram
from protos.metrics import (
    OTHER,
    BoundedCounter,
    EventLoopProbe,
    MetricsServer,
    Page,
    ProcessMetrics,
    exported,
    histogram_family,
    metrics_page,
    serving_metrics,
)
from protos.tls import ServerCertificate, ServerTls
from router.metrics import TokenPace
from tests.certificates import Authority


@contextmanager
def served(page: Page, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, int]]:
    server = MetricsServer(page, tls=tls)
    url = server.start("127.0.0.1:0")
    host, port = url.removeprefix("http://").removeprefix("https://").removesuffix("/metrics").split(":")
    try:
        yield host, int(port)
    finally:
        server.stop()


def ask(at: tuple[str, int], method: str = "GET", path: str = "/metrics", **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection(*at, timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("Content-Type") or "", answer.read().decode()
    finally:
        connection.close()


def plain(accept: str) -> tuple[bytes, str]:
    return f"accept: {accept}\n".encode(), "text/x"


def test_it_answers_what_prometheus_asks() -> None:
    with served(plain) as at:
        assert ask(at, Accept="a, b;q=0.5") == (200, "text/x", "accept: a, b;q=0.5\n")
        assert ask(at, path="/metrics?name[]=x")[0] == 200
        assert ask(at, method="HEAD") == (200, "text/x", "")
        assert ask(at, method="POST")[0] == 405
        assert ask(at, path="/")[0] == 404
        assert ask(at)[0] == 200  # still, after all that


def test_a_page_that_cannot_be_made_is_an_error_and_not_the_end() -> None:
    pages = [RuntimeError("secret of a collector")]

    def page(accept: str) -> tuple[bytes, str]:
        if pages:
            raise pages.pop()
        return b"fine\n", "text/x"

    with served(page) as at:
        status, _, body = ask(at)
        assert (status, body) == (500, "RuntimeError; see the process's log\n")
        assert ask(at)[0] == 200


def test_who_says_nothing_or_too_much_is_put_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_http, "CONNECTION_TIMEOUT_S", 0.2)
    with served(plain) as at:
        silent = socket.create_connection(at, timeout=60)
        slow = socket.create_connection(at, timeout=60)
        slow.sendall(b"GET /metrics HTTP/1.1\r\n")
        long = socket.create_connection(at, timeout=60)
        with long:
            try:
                long.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (small_http.MAX_HEAD_BYTES + 1) + b"\r\n\r\n")
                assert long.recv(1) == b""
            except ConnectionError:
                pass
        for idle in (silent, slow):
            with idle:
                assert ended(idle)
        monkeypatch.setattr(small_http, "CONNECTION_TIMEOUT_S", 60.0)
        assert ask(at)[0] == 200


def test_a_crowd_is_turned_away_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_http, "CONNECTION_TIMEOUT_S", 60.0)  # that does not end the late one
    with served(plain) as at:
        crowd = [socket.create_connection(at, timeout=60) for _ in range(small_http.MAX_CONNECTIONS)]
        late = socket.create_connection(at, timeout=60)
        with late:
            assert ended(late)  # at once, whatever the others do
        for connection in crowd:
            connection.close()
        deadline = time.monotonic() + 60
        while True:
            try:
                assert ask(at)[0] == 200
                break
            except (ConnectionError, http.client.BadStatusLine):
                assert time.monotonic() < deadline
                time.sleep(0.01)


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_a_stopped_server_frees_its_port_and_ends_open_connections() -> None:
    with served(plain) as at:
        open_one = socket.create_connection(at, timeout=60)
        assert ask(at)[0] == 200
    with open_one:
        assert ended(open_one)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(at, timeout=60)
    again = MetricsServer(plain)
    assert again.start(f"{at[0]}:{at[1]}") == f"http://{at[0]}:{at[1]}/metrics"
    try:
        with pytest.raises(ConfigError) as taken:
            MetricsServer(plain).start(f"{at[0]}:{at[1]}")
        assert taken.value.reason == "PORT_IN_USE"
    finally:
        again.stop()


def test_a_server_that_never_started_stops() -> None:
    MetricsServer(plain).stop()


def test_it_speaks_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("server")
    with served(plain, tls=ServerCertificate(ServerTls(issued.cert, issued.key)).ssl_context()) as (host, port):
        trusting = ssl.create_default_context(cafile=str(authority.cert))
        connection = http.client.HTTPSConnection(host, port, timeout=10, context=trusting)
        connection.request("GET", "/metrics")
        assert connection.getresponse().read() == b"accept: \n"
        connection.close()
        with socket.create_connection((host, port), timeout=60) as in_plain_text:
            in_plain_text.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            assert ended(in_plain_text)


async def test_a_process_serves_its_page_for_as_long_as_it_runs() -> None:
    async with serving_metrics("worker", metrics.OFF) as url:
        assert url is None
    async with serving_metrics("worker", "127.0.0.1:0") as url:
        assert url is not None
        host, port = url.removeprefix("http://").removesuffix("/metrics").split(":")
        _, kind, text = await asyncio.to_thread(ask, (host, int(port)))
        assert kind.startswith("text/plain")
        names = {family.name for family in text_string_to_metric_families(text)}
        assert {"tailpack_build_info", "tailpack_event_loop_lag_seconds", "process_resident_memory_bytes"} <= names
        _, kind, text = await asyncio.to_thread(ask, (host, int(port)), Accept="application/openmetrics-text")
        assert kind.startswith("application/openmetrics-text")
        assert text.endswith("# EOF\n")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=60)


async def test_the_probe_sees_a_loop_that_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "PROBE_INTERVAL_S", 0.001)
    probe = EventLoopProbe()
    task = asyncio.create_task(probe.run())
    await asyncio.sleep(0.01)
    assert probe.lag.total > 0
    time.sleep(0.06)  # holds the loop up, as the test wants it
    assert probe.silent_s >= 0.05
    await asyncio.sleep(0.01)
    late = sum(count for bound, count in zip((*probe.lag.bounds, 1e9), probe.lag.counts, strict=True) if bound > 0.05)
    assert late >= 1
    task.cancel()


def test_collectors_are_on_the_page_only_while_exported() -> None:
    registry = CollectorRegistry(auto_describe=False)
    page = partial(metrics_page, registry=registry)
    with exported(ProcessMetrics("router", EventLoopProbe()), registry=registry):
        assert b'tailpack_build_info{component="router"' in page("")[0]
    assert b"tailpack" not in page("")[0]


def test_a_histogram_is_exported_as_prometheus_counts() -> None:
    histogram = Histogram((0.5, 1.0))
    for seconds in (0.1, 0.5, 0.7, 9.0):
        histogram.observe(seconds)
    family = histogram_family("x_seconds", "text", [({"who": "me"}, histogram)])
    buckets = {sample.labels["le"]: sample.value for sample in family.samples if sample.name == "x_seconds_bucket"}
    assert buckets == {"0.5": 2, "1.0": 3, "+Inf": 4}
    assert {s.name: s.value for s in family.samples if "le" not in s.labels} == {
        "x_seconds_count": 4,
        "x_seconds_sum": pytest.approx(10.3),
    }


def test_reasons_that_nobody_knew_are_bounded() -> None:
    counter = BoundedCounter(most=4)
    for number in range(100):
        counter.add("failed", f"REASON_{number}")
    counter.add("failed", "REASON_1")
    counts = dict(counter.items())
    assert len(counts) == 5
    assert counts["failed", OTHER] == 96
    assert counts["failed", "REASON_1"] == 2


def test_gaps_between_tokens_are_shared_among_tokens_that_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1_000_000_000]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    itl = Histogram(STEP_BOUNDS_S)
    pace = TokenPace(itl)
    for gap_ms, tokens in ((0, 3), (10, 1), (30, 3), (2, 1)):
        now[0] += gap_ms * 1_000_000
        pace.came(tokens)
    assert itl.total == 5  # the first ones have no gap before them
    assert itl.sum_s == pytest.approx(0.042)
    assert pace.longest_gap_ns == 30_000_000
    assert pace.mean_gap_ns(8) == 42_000_000 // 7
    assert pace.mean_gap_ns(1) is None
