"""``tailpack up --model tiny-v4``: DeepSeek-V4 through every process, on any machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.client import AsyncTailpack, as_chat
from tests.e2e.cluster import run_cli, running

QUESTION = "What is the capital of France? " * 12  # behind two pages of 128 bytes
OPTIONS = ["--kv-bytes", "64M", "--threads", "1", "--kv-mode", "turboquant"]


async def test_tiny_v4_answers_from_packed_pages_and_thinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILPACK_CACHE", str(tmp_path / "cache"))
    with running(tmp_path, "tiny-v4", OPTIONS) as cluster:
        assert "weights dequantised from FP4" in cluster.log and cluster.model == Path("tiny-v4")
        async with AsyncTailpack(cluster.router) as client:
            (worker,) = await client.list_workers()
            assert (worker.info.model.name, worker.info.model.architecture) == ("tiny-v4", "deepseek_v4")
            answers = []
            for thinking in (False, False, True):
                chunks = [
                    chunk
                    async for chunk in client.generate(
                        as_chat(QUESTION, "Be brief."), max_tokens=40, ignore_eos=True, thinking=thinking
                    )
                ]
                answers.append(([token for chunk in chunks for token in chunk.token_ids], chunks[-1].usage))
        (first, usage), (again, usage_again), (thought, usage_thought) = answers
        assert len(first) == 40 and again == first != thought
        assert usage.prompt_tokens == len("Be brief." + QUESTION) + 4 == usage_thought.prompt_tokens
        assert usage.cached_prompt_tokens == 0 < 256 <= usage_again.cached_prompt_tokens
        (device,) = cluster.kv_stats().devices
        assert {group.group: group.mode.split()[0] for group in device.groups} == {
            "raw": "turboquant",
            "compressed": "dense",
        }
        spoken = run_cli("generate", "--router", cluster.router, "--thinking", "--max-tokens", "5", "--stats", "Hi")
        assert spoken.returncode == 0 and b"prompt" in spoken.stderr, spoken.stderr
        memory = run_cli("memory", "--router", cluster.router)
        lines = [line.split() for line in memory.stdout.decode().splitlines()]
        assert ["tiny-v4", "weights"] in [words[1:3] for words in lines], memory.stdout  # the store holds them
