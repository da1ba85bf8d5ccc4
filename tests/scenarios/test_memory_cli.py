"""`tailpack memory` against a real worker and its real store."""

from __future__ import annotations

import asyncio
import json
import platform
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from protos import router_pb2, router_pb2_grpc, rpc, worker_pb2, worker_pb2_grpc
from protos.errors import Unavailable
from tests.scenarios.kvstore_process import StoreProcess
from tests.unit.tiny import config_for, write_model
from worker import ledger, shell
from worker.memory_cli import memory
from worker.memory_meter import HOST
from worker.weights import load_model


@pytest.mark.parametrize("in_store", [False, True])
async def test_every_owner_is_named_and_counted(tmp_path: Path, in_store: bool) -> None:
    with StoreProcess() as store:
        config = replace(
            config_for(write_model(tmp_path), kv_mode="turboquant", max_running=2),
            kv_socket=store.socket,
            arena_bytes=2 << 20,
            weights_arena=in_store,
        )
        weights = load_model(config).info.num_parameters * 4
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(shell.serve(config, "127.0.0.1:0", stop, on_ready=ready.set_result))
        address = (await asyncio.wait_for(ready, 60)).address
        as_json = await asyncio.to_thread(CliRunner().invoke, memory, ["--worker", address, "--json"])
        as_table = await asyncio.to_thread(CliRunner().invoke, memory, ["--worker", address])
        device = store.device()
        stop.set()
        await asyncio.wait_for(serving, 60)
    assert as_json.exit_code == 0, as_json.output
    answer: dict[str, Any] = json.loads(as_json.output)
    assert answer["stores_not_asked_on"] == []
    assert answer["workers_without_answer"] == {}
    (host,) = answer["places"]
    assert (host["host"], host["memory"], host["total_bytes"]) == (platform.node(), "host", None)
    uses = {(use["holder"], use["owner"]): use["num_bytes"] for use in host["uses"]}
    (group,) = device.groups
    assert uses.pop(("w", "interpreter and libraries")) > 10 << 20
    assert uses.pop(("w", "unknown")) < 64 << 20
    for phase in ("loading weights", "kernels and graphs", "first steps"):
        uses.pop(("w", phase), None)
    if in_store:
        assert uses.pop(("tiny", "weights")) >= weights
    else:
        assert uses.pop(("w", "weights")) == weights
        assert uses.pop(("w", "tables of the model")) > 0
    assert uses == {
        ("cpu:0", "pages full"): group.pages_total * group.page_bytes,
        ("cpu:0", "tails full"): group.tail_slots_total * group.tail_slot_bytes,
        ("cpu:0", "control block"): device.control_bytes,
    }
    assert group.arena_bytes == uses["cpu:0", "pages full"] + uses["cpu:0", "tails full"]
    for word in ("weights", "pages full", "tails full", "control block", "unknown", "together", "█"):
        assert word in as_table.output


async def test_memory_that_nobody_owns_is_an_alarm_that_routers_hear_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ledger.LIMITS, HOST, 32 << 20)
    monkeypatch.setattr(shell, "MEMORY_LOOK_S", 0.05)
    with StoreProcess() as store:
        config = replace(config_for(write_model(tmp_path), max_running=2), kv_socket=store.socket, arena_bytes=2 << 20)
        stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(shell.serve(config, "127.0.0.1:0", stop, on_ready=ready.set_result))
        async with rpc.channel((await asyncio.wait_for(ready, 60)).address) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)

            async def grown() -> int:
                return int((await stub.Info(worker_pb2.InfoRequest(), timeout=60)).load.memory_grown_bytes)

            assert not await grown()
            leak = bytearray(b"x") * (96 << 20)
            for _ in range(200):
                await asyncio.sleep(0.05)
                if size := await grown():
                    break
            assert 32 << 20 < size < 200 << 20
            del leak
        stop.set()
        await asyncio.wait_for(serving, 60)


def test_who_does_not_answer_is_named() -> None:
    for what in ("router", "worker"):
        failed = CliRunner().invoke(memory, [f"--{what}", "127.0.0.1:1"])
        assert isinstance(failed.exception, Unavailable)
        assert f"no {what} answers; given: 127.0.0.1:1" in str(failed.exception)


class _TwoGone(router_pb2_grpc.RouterServicer):
    """Knows one worker that it lost, and one that it thinks is ready but that ended since."""

    def ListWorkers(
        self, request: router_pb2.ListWorkersRequest, context: grpc.ServicerContext
    ) -> router_pb2.ListWorkersResponse:
        lost = router_pb2.WorkerStatus(address="10.0.0.9:7", state="lost", why="connection [reset]")
        ended = router_pb2.WorkerStatus(address="127.0.0.1:1", state="ready")
        return router_pb2.ListWorkersResponse(workers=[lost, ended])


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_workers_that_are_gone_are_named_not_left_out(form: list[str]) -> None:
    server = grpc.server(ThreadPoolExecutor(2))
    router_pb2_grpc.add_RouterServicer_to_server(_TwoGone(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        told = CliRunner().invoke(memory, ["--router", f"127.0.0.1:{port}", *form])
    finally:
        server.stop(None)
    assert told.exit_code == 0, told.output
    assert "10.0.0.9:7" in told.output and "lost: connection [reset]" in told.output
    assert "127.0.0.1:1" in told.output and "no worker answers" in told.output
