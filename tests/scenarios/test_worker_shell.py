"""The worker's shell around a real store: what it leaves behind when something does not stop."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from protos.errors import InternalError, PreconditionFailed
from tests.scenarios.kvstore_process import StoreProcess
from tests.unit.tiny import config_for, write_model
from worker import shell
from worker.engine import Engine


async def test_an_engine_that_does_not_stop_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right, engines = Engine.stop, []

    def stuck(engine: Engine, timeout_s: float) -> None:
        engines.append(engine)
        raise InternalError("the engine did not stop in time")

    monkeypatch.setattr(Engine, "stop", stuck)
    with StoreProcess() as store:
        config = replace(config_for(write_model(tmp_path)), kv_socket=store.socket, arena_bytes=1 << 20)
        stop = asyncio.Event()
        stop.set()
        with pytest.raises(InternalError, match="did not stop"):
            await asyncio.wait_for(shell.serve(config, "127.0.0.1:0", stop, on_ready=lambda running: None), 60)
        with pytest.raises(PreconditionFailed, match="still maps the memory") as refused:
            store.attach(device=config.device)
        assert refused.value.reason == "DEVICE_BUSY"
        right(engines[0], 10)
