"""The shell of a worker: what it leaves behind when it cannot end cleanly."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.scenarios.kvstore_process import StoreProcess, worker_process


def test_an_engine_that_does_not_stop_keeps_its_memory_until_its_process_is_ended(tmp_path: Path) -> None:
    """Its thread may still write: so nobody else is given the memory before the store has killed the process."""
    code = (
        "import asyncio; from dataclasses import replace\n"
        "from protos.errors import InternalError; from tests.unit.tiny import config_for, write_model\n"
        "from worker import shell; from worker.engine import Engine\n"
        "def stuck(engine, timeout_s): raise InternalError('the engine did not stop in time')\n"
        "Engine.stop = stuck\n"
        f"config = config_for(write_model(Path({str(tmp_path)!r})))\n"
        "config = replace(config, kv_socket=store_socket, arena_bytes=1 << 20)\n"
        "async def main():\n"
        "    stop = asyncio.Event(); stop.set()\n"
        "    await shell.serve(config, '127.0.0.1:0', stop, on_ready=lambda running: say('serves', config.device))\n"
        "asyncio.run(main())\n"
        "say('ended')\n"
    )
    with StoreProcess() as store, worker_process(store, code) as worker:
        assert worker.wait(100) == -signal.SIGKILL
        assert worker.stdout
        assert worker.stdout.read().endswith("serves cpu:0\n")
        store.attach(device="cpu:0").close()
        assert any(line["event"].startswith("suspect killed") for line in store.log())
