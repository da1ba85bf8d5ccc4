"""One trace from the caller to the steps of a real worker, through a real OTLP collector."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protos import tracing
from router.client import build_request
from tests.e2e.cluster import write_tiny_model
from tests.otlp import collector
from tests.scenarios.fake_worker import Script
from tests.scenarios.kvstore_process import StoreProcess
from tests.scenarios.router_harness import cluster
from tests.unit.tiny import config_for
from worker import shell
from worker import tracing as worker_tracing

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_request_is_one_trace_from_the_caller_to_the_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_tracing, "STEP_INTERVAL_NS", 0)  # every step
    folder = write_tiny_model(tmp_path / "tiny")
    with collector() as (kept, url), StoreProcess() as store:
        router_traces, worker_traces = tracing.configure("router", url), tracing.configure("worker", url)
        assert router_traces is not None and worker_traces is not None
        config = replace(config_for(folder), kv_socket=store.socket, arena_bytes=4 << 20)
        stop = asyncio.Event()
        ready: asyncio.Future[shell.Running] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(
            shell.serve(config, "127.0.0.1:0", stop, on_ready=ready.set_result, tracing=worker_traces)
        )
        try:
            address = (await asyncio.wait_for(ready, 60)).address
            async with cluster(folder, Script(), num_workers=0, addresses=[address], tracing=router_traces) as c:
                request = build_request("some text", max_tokens=4, ignore_eos=True)
                async for _ in c.client.stream(request, traceparent=CALLER):
                    pass
                await c.settled()
        finally:
            stop.set()
            await asyncio.wait_for(serving, 60)
        await asyncio.to_thread(router_traces.stop)
        await asyncio.to_thread(worker_traces.stop)
    paths = {path_of(span, [each for _, each in kept.spans]): service for service, span in kept.spans}
    at_router = "caller/request"
    sequence = f"{at_router}/relay/sequence"
    of_router = ["", "/tokenize", "/place", "/relay"]
    of_worker = ["", "/queue", "/prefill", "/decode", "/step", "/step/prefill", "/step/prefill/append"]
    of_worker += ["/step/decode", "/step/decode/append", "/step/sample", "/step/seal"]
    expected = {f"{at_router}{path}": "tailpack-router" for path in of_router}
    expected |= {f"{sequence}{path}": "tailpack-worker" for path in of_worker}
    assert paths == expected
    assert {span.trace_id.hex() for _, span in kept.spans} == {CALLER.split("-")[1]}


def path_of(span: Any, spans: list[Any]) -> str:
    """Names from the caller down to a span."""
    if span.parent_span_id.hex() == CALLER.split("-")[2]:
        return f"caller/{span.name}"
    (parent,) = (each for each in spans if each.span_id == span.parent_span_id)
    return f"{path_of(parent, spans)}/{span.name}"
