"""What the processes of a real cluster export and log."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
import uuid
from collections import defaultdict
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos import router_pb2, types_pb2
from protos.errors import TailpackError
from router.client import AsyncTailpack
from tests.chart import example, promql, render
from tests.dashboard import GIVEN_BY_PROMETHEUS, expressions
from tests.e2e.cluster import ClusterProcess

MARKER = "xyzzy-secret-plugh"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum"), "info": ("_info",)}
"""Of the samples of a family, by its type."""


def refused_ones() -> list[router_pb2.GenerateRequest]:
    """As no client of ours would send them."""
    stop = types_pb2.StopConditions(max_tokens=4)
    return [
        router_pb2.GenerateRequest(text=MARKER, model=f"none such {MARKER}"),
        router_pb2.GenerateRequest(text=MARKER, sampling=types_pb2.Sampling(temperature=-1), stop=stop),
        router_pb2.GenerateRequest(text=MARKER * 2000, stop=stop),
        router_pb2.GenerateRequest(text=MARKER, stop_strings=[MARKER * 100], stop=stop),
    ]


async def send_some(cluster: ClusterProcess) -> list[str]:
    """Requests that are answered and refused, through gRPC and HTTP; their prompts have the marker.

    Returns:
        Ids of answered ones.
    """
    answered = [f"answered-{uuid.uuid4()}" for _ in range(4)]  # over both workers
    async with AsyncTailpack(cluster.router) as client:
        for request_id in answered:
            async for _ in client.generate(f"{MARKER} {request_id}", max_tokens=4, request_id=request_id):
                pass
        for request in refused_ones():
            with pytest.raises(TailpackError):
                async for _ in client.stream(request):
                    pass
    chat = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": MARKER}]}
    statuses = [
        await asyncio.to_thread(post, cluster, body)
        for body in (
            json.dumps(chat),
            json.dumps({**chat, "model": MARKER}),
            json.dumps({**chat, "messages": [{"role": MARKER, "content": MARKER}]}),
            f'{{"model": "{MARKER}',
        )
    ]
    assert statuses[0] == 200 and all(400 <= status < 500 for status in statuses[1:])
    return answered


def post(cluster: ClusterProcess, body: str) -> int:
    request = urllib.request.Request(
        f"{cluster.http}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def pages(cluster: ClusterProcess) -> dict[str, str]:
    found = {}
    for url in cluster.metrics:
        with urllib.request.urlopen(url, timeout=60) as page:
            found[url] = page.read().decode()
    return found


ONLY_UNDER_TLS = "tailpack_tls_certificate_expires_in_seconds"


async def test_dashboard_alerts_and_scaling_name_what_the_processes_export(cluster: ClusterProcess) -> None:
    await send_some(cluster)
    exported: dict[str, set[str]] = defaultdict(set)  # name of a sample -> names of its labels
    components, owners = [], set()
    for page in pages(cluster).values():
        for family in text_string_to_metric_families(page):
            for suffix in SUFFIXES.get(family.type, ("",)):
                exported[family.name + suffix]  # families of what did not happen have no samples, and no labels yet
            for sample in family.samples:
                exported[sample.name] |= set(sample.labels)
                if sample.name == "tailpack_build_info":
                    components.append(sample.labels["component"])
                owners.add(sample.labels.get("owner"))
    assert sorted(components) == ["kvstore", "router", "worker", "worker"]
    assert "unknown" in owners  # an alert watches it
    exported[ONLY_UNDER_TLS]  # its test: tests/scenarios/test_router_guarded.py
    of_the_chart = promql(render(example("eight-gpu-nodes"))) + promql(render(example("multi-tenant-mtls")))
    assert len(of_the_chart) > 20
    for named in (*expressions(), *of_the_chart):
        for name, _ in named.selectors:
            assert name in exported, f"{name} is not exported: {named.expression}"
        of_all = [exported[name] for name, _ in named.selectors]
        assert not all(of_all) or named.grouping <= GIVEN_BY_PROMETHEUS.union(*of_all), named.expression
        for name, labels in named.selectors:
            assert not exported[name] or labels <= exported[name] | GIVEN_BY_PROMETHEUS, named.expression


def lines_of(cluster: ClusterProcess, name: str, event: str) -> dict[str, dict[str, Any]]:
    """By request id."""
    text = (cluster.folder / "logs" / name).read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    return {line["request_id"]: line for line in lines if line["event"] == event}


async def test_routers_and_workers_log_each_request_and_nobody_its_prompt(cluster: ClusterProcess) -> None:
    answered = await send_some(cluster)
    at_workers: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(60):  # what is logged comes after what is answered
        while not set(answered) <= set(at_workers):
            await asyncio.sleep(0.01)
            at_workers = lines_of(cluster, "worker-0.log", "sequence") | lines_of(cluster, "worker-1.log", "sequence")
    at_router = lines_of(cluster, "router.log", "request")
    for request_id in answered:
        line, at_worker = at_router[request_id], at_workers[request_id]
        assert line["outcome"] == "finished"
        for key in ("prompt_tokens", "cached_tokens", "output_tokens", "queue_ms", "prefill_ms", "decode_ms"):
            assert line[key] == at_worker[key], (request_id, key)
    reasons = {line["reason"] for line in at_router.values()}
    assert {"UNKNOWN_MODEL", "PROMPT_TOO_LONG", "LENGTH"} <= reasons  # what was refused is there, too
    logs = {path.name: path.read_text() for path in (cluster.folder / "logs").iterdir()}
    assert {"kvstore.log", "router.log", "worker-0.log", "worker-1.log"} <= set(logs)
    assert all(MARKER not in text for text in (*logs.values(), cluster.log))


def test_metrics_are_on_this_machine_only(cluster: ClusterProcess) -> None:
    assert len(cluster.metrics) == 4
    assert all(url.startswith("http://127.0.0.1:") and url.endswith("/metrics") for url in cluster.metrics)
