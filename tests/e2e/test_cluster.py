"""Requests through the whole path, client to model and back, on a random tiny llama."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import psutil
import pytest

from protos import router_pb2, types_pb2
from protos.errors import TailpackError
from router.client import AsyncTailpack, build_request
from tests.e2e.cluster import ClusterProcess, run_cli
from tests.e2e.probe import answer, assert_nothing_left_over, assert_works

PROMPTS = [
    "The capital of France is",
    "日本語の文章。",
    "Emoji: 😀 👩‍👩‍👧‍👦",
    "one two three " * 20,
    "Stop here.",
    "x",
    "Ein Text mit Umlauten: äöü",
    "seven eight nine ten " * 40,
]


def test_the_command_line_streams_an_answer(cluster: ClusterProcess) -> None:
    run = run_cli("generate", "--router", cluster.router, "--max-tokens", "12", "--ignore-eos", "--json", "Hello")
    assert run.returncode == 0, run.stderr
    chunks = [json.loads(line) for line in run.stdout.splitlines()]
    assert sum(len(chunk.get("token_ids", [])) for chunk in chunks) == 12
    assert chunks[-1]["finish_reason"] == "FINISH_REASON_LENGTH"
    assert chunks[-1]["usage"]["output_tokens"] == 12
    plain = run_cli("generate", "--router", cluster.router, "--max-tokens", "12", "--ignore-eos", "Hello")
    assert plain.stdout.decode() == "".join(chunk.get("text", "") for chunk in chunks) + "\n"


async def test_a_load_test_measures_the_cluster(cluster: ClusterProcess) -> None:
    arguments = [
        "--requests",
        "6",
        "--concurrency",
        "3",
        "--warmup-s",
        "0",
        "--prompt-tokens",
        "5,200",
        "--max-tokens",
        "9",
    ]
    run = await asyncio.to_thread(run_cli, "bench", "--router", cluster.router, *arguments)
    assert run.returncode == 0, run.stderr
    assert b"6 answers" in run.stdout and b"no errors" in run.stdout
    await assert_nothing_left_over(cluster)


async def test_a_resumable_answer_is_that_of_any_other_request(cluster: ClusterProcess) -> None:
    prompt = "The quick brown fox"
    async with AsyncTailpack(cluster.router) as client:
        plain = await client.complete(prompt, max_tokens=24, ignore_eos=True)
        assert (await client.complete(prompt, max_tokens=24, ignore_eos=True, resumable=True)).text == plain.text
        async for _ in client.generate(prompt, max_tokens=900, ignore_eos=True, resumable=True):
            break  # the work behind it must not go on for its grace time
        await assert_nothing_left_over(cluster)


async def test_a_prompt_may_come_on_standard_input(cluster: ClusterProcess) -> None:
    async with AsyncTailpack(cluster.router) as client:
        expected, _, _ = await answer(client, "Où est la bibliothèque? 😀", max_tokens=10)
    run = await asyncio.to_thread(
        run_cli,
        *("generate", "--router", cluster.router, "--max-tokens", "10", "--ignore-eos", "-"),
        input="Où est la bibliothèque? 😀".encode(),
    )
    assert run.stdout.decode() == expected + "\n"


async def test_greedy_text_is_the_same_alone_in_a_batch_and_on_either_worker(cluster: ClusterProcess) -> None:
    async with AsyncTailpack(cluster.router) as client:
        alone = [await answer(client, prompt, max_tokens=40) for prompt in PROMPTS]
        workers = set()
        for _ in range(3):
            together = await asyncio.gather(*(answer(client, prompt, max_tokens=40) for prompt in PROMPTS))
            for prompt, (text, token_ids, _), (text_again, ids_again, _) in zip(PROMPTS, alone, together, strict=True):
                assert (text_again, ids_again) == (text, token_ids), prompt
        for _ in range(12):  # the same prompt on both workers: least load alternates under load
            many = await asyncio.gather(*(_first_worker(client, PROMPTS[3]) for _ in range(4)))
            workers |= {worker for worker, _ in many}
            assert {tuple(ids) for _, ids in many} == {tuple(alone[3][1])}
            if len(workers) == 2:
                break
        assert workers == {"worker-0", "worker-1"}
    await assert_nothing_left_over(cluster)


async def _first_worker(client: AsyncTailpack, prompt: str) -> tuple[str, list[int]]:
    worker = ""
    ids: list[int] = []
    async for chunk in client.generate(prompt, max_tokens=40, ignore_eos=True, timeout_s=60.0):
        worker = worker or chunk.worker_id
        ids += chunk.token_ids
    return worker, ids


async def test_a_seed_repeats_a_sampled_answer(cluster: ClusterProcess) -> None:
    async def sampled(client: AsyncTailpack, seed: int | None) -> tuple[str, int]:
        text, used = "", 0
        async for chunk in client.generate("Numbers:", max_tokens=24, temperature=1.3, seed=seed, ignore_eos=True):
            text += chunk.text
            used = used or chunk.seed
        return text, used

    async with AsyncTailpack(cluster.router) as client:
        text, seed = await sampled(client, None)
        assert seed != 0
        assert await sampled(client, seed) == (text, seed)
        others = {(await sampled(client, other))[0] for other in (1, 2, 3)}
        assert len(others | {text}) > 1


def test_only_this_user_reads_sockets_and_logs(cluster: ClusterProcess) -> None:
    folder = cluster.kv_socket.parent
    assert folder.stat().st_mode & 0o777 == 0o700  # also once Ray has opened its own to everybody
    assert not list((folder / "ray").glob("*.sock")) and (folder / "ray" / "session_latest").is_dir()


async def test_both_workers_are_listed_with_what_they_are(cluster: ClusterProcess) -> None:
    async with AsyncTailpack(cluster.router) as client:
        workers = await client.list_workers()
    assert {worker.address for worker in workers} == set(cluster.workers)
    assert all(worker.state == "ready" and worker.info.deterministic for worker in workers)
    assert {worker.info.model.name for worker in workers} == {"tiny"}


async def test_cancel_by_id_ends_a_request_at_once(cluster: ClusterProcess) -> None:
    request = build_request([5, 6, 7], max_tokens=900, ignore_eos=True)
    async with AsyncTailpack(cluster.router) as client:
        last: router_pb2.GenerateResponse | None = None
        async for chunk in client.stream(request, request_id="to-cancel"):
            if last is None:
                assert await client.cancel("to-cancel")
            last = chunk
        assert last is not None and last.finish_reason == types_pb2.FINISH_REASON_ABORTED
        assert last.usage.output_tokens < 900
        assert not await client.cancel("to-cancel")
    await assert_nothing_left_over(cluster)


@pytest.mark.slow
async def test_a_killed_worker_comes_back_and_its_requests_go_on(cluster: ClusterProcess) -> None:
    """SIGKILL for one worker while requests run on both: all of them come to their ends."""
    async with AsyncTailpack(cluster.router) as client:
        before = {worker.info.worker_id: worker.info.incarnation for worker in await client.list_workers()}

        started: dict[int, str] = {}

        async def run(number: int) -> str:
            tokens = 0
            async for chunk in client.generate([7 + number], max_tokens=900, ignore_eos=True, timeout_s=60.0):
                started.setdefault(number, chunk.worker_id)
                tokens += len(chunk.token_ids)
            return f"{tokens} tokens"

        tasks = [asyncio.create_task(run(number)) for number in range(4)]
        while len(started) < 4:
            await asyncio.sleep(0.01)
        assert set(started.values()) == {"worker-0", "worker-1"}
        os.kill(cluster.pids["workers"][0], signal.SIGKILL)
        ends = await asyncio.gather(*tasks)
        assert ends == ["900 tokens"] * 4, (started, ends)

        await assert_works(cluster)  # the other worker, or the new one
        deadline = time.monotonic() + 60
        while True:
            workers = await client.list_workers()
            after = {worker.info.worker_id: worker.info.incarnation for worker in workers}
            if all(worker.state == "ready" for worker in workers) and after["worker-0"] != before["worker-0"]:
                break
            assert time.monotonic() < deadline, workers
            await asyncio.sleep(0.1)
        assert after["worker-1"] == before["worker-1"]
        expected = {(await _first_worker(client, PROMPTS[0]))[0] for _ in range(20)}
        expected |= {worker for worker, _ in await asyncio.gather(*(_first_worker(client, "x") for _ in range(8)))}
        assert expected == {"worker-0", "worker-1"}  # the new one takes requests
    await assert_nothing_left_over(cluster)
    # Ray made the new process; the test above must not depend on its pid any more.
    cluster.pids["workers"] = [
        process.pid for process in cluster.descendants() if process.name().startswith("ray::WorkerActor")
    ]
    assert len(cluster.pids["workers"]) == 2
    assert all(psutil.pid_exists(pid) for pid in cluster.pids["workers"])


async def test_a_deadline_ends_a_request_by_name(cluster: ClusterProcess) -> None:
    async with AsyncTailpack(cluster.router) as client:
        with pytest.raises(TailpackError) as failure:
            async for _ in client.generate([9], max_tokens=1000, ignore_eos=True, timeout_s=0.3):
                pass
    assert failure.value.reason == "DEADLINE_EXCEEDED"
    await assert_nothing_left_over(cluster)
