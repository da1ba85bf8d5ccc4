"""What the processes of a real cluster export and log."""

from __future__ import annotations

import json
import urllib.request
from collections import defaultdict

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protos.errors import TailpackError
from router.client import AsyncTailpack
from tests.dashboard import GIVEN_BY_PROMETHEUS, expressions
from tests.e2e.cluster import ClusterProcess
from tests.e2e.probe import answer

MARKER = "xyzzy-secret-plugh"


async def send_some(cluster: ClusterProcess) -> None:
    """Requests that are answered and refused; their prompts have the marker."""
    async with AsyncTailpack(cluster.router) as client:
        for number in range(4):  # over both workers
            await answer(client, f"{MARKER} {number}", max_tokens=4)
        for wrong in ({"model": "none such"}, {"temperature": 99999.0}):
            with pytest.raises(TailpackError):
                await answer(client, MARKER, max_tokens=4, **wrong)
        with pytest.raises(TailpackError):
            await answer(client, MARKER * 2000, max_tokens=4)


def pages(cluster: ClusterProcess) -> dict[str, str]:
    found = {}
    for url in cluster.metrics:
        with urllib.request.urlopen(url, timeout=10) as page:
            found[url] = page.read().decode()
    return found


async def test_the_dashboard_names_what_the_processes_export(cluster: ClusterProcess) -> None:
    await send_some(cluster)
    exported: dict[str, set[str]] = defaultdict(set)  # name of a sample -> names of its labels
    components = []
    for page in pages(cluster).values():
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                exported[sample.name] |= set(sample.labels)
                if sample.name == "tailpack_build_info":
                    components.append(sample.labels["component"])
    assert sorted(components) == ["kvstore", "router", "worker", "worker"]
    for named in expressions():
        of_all = GIVEN_BY_PROMETHEUS.union(*(exported[name] for name, _ in named.selectors))
        assert named.grouping <= of_all, named.expression
        for name, labels in named.selectors:
            assert exported[name] or name in exported, f"{name} is not exported: {named.expression}"
            assert labels <= exported[name] | GIVEN_BY_PROMETHEUS, named.expression


async def test_routers_and_workers_log_each_request_and_nobody_its_prompt(cluster: ClusterProcess) -> None:
    await send_some(cluster)
    logs = {path.name: path.read_text() for path in (cluster.folder / "logs").iterdir()}
    assert {"kvstore.log", "router.log", "worker-0.log", "worker-1.log"} <= set(logs)
    assert all(MARKER not in text for text in logs.values())
    assert MARKER not in cluster.log

    def requests(name: str, event: str) -> dict[str, dict[str, object]]:
        lines = [json.loads(line) for line in logs[name].splitlines() if line.startswith("{")]
        return {line["request_id"]: line for line in lines if line["event"] == event}

    at_router = requests("router.log", "request")
    at_workers = requests("worker-0.log", "sequence") | requests("worker-1.log", "sequence")
    placed = {request_id: line for request_id, line in at_router.items() if line["worker"] is not None}
    assert set(placed) == set(at_workers) and len(placed) >= 4
    for request_id, line in placed.items():
        for key in ("prompt_tokens", "cached_tokens", "output_tokens", "queue_ms", "prefill_ms", "decode_ms"):
            assert line["outcome"] != "finished" or line[key] == at_workers[request_id][key], (request_id, key)


def test_metrics_are_on_this_machine_only(cluster: ClusterProcess) -> None:
    assert len(cluster.metrics) == 4
    assert all(url.startswith("http://127.0.0.1:") and url.endswith("/metrics") for url in cluster.metrics)
