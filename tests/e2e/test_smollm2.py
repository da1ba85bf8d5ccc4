"""The demo model through the whole path: real weights, real tokenizer, a sensible answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.errors import ModelError
from router.client import AsyncTailpack
from tests.e2e.cluster import run_cli, running
from worker import gguf_model


@pytest.mark.slow
async def test_smollm2_answers_sensibly(tmp_path: Path) -> None:
    try:
        gguf_model.demo_gguf()
    except ModelError as missing:
        pytest.skip(str(missing))
    with running(tmp_path, "smollm2", ["--kv-bytes", "256M"]) as cluster:
        run = run_cli("generate", "--router", cluster.router, "--stats", "What is the capital of France?")
        assert run.returncode == 0, run.stderr
        assert "Paris" in run.stdout.decode()
        assert "finish eos" in run.stderr.decode()  # it knows the end of its turn
        async with AsyncTailpack(cluster.router) as client:
            (worker,) = await client.list_workers()
        assert worker.info.model.name == "smollm2" and worker.info.model.eos_token_ids == [2]
