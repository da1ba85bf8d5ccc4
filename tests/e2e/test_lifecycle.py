"""``tailpack up`` from start to end: what cannot start says why, and what ends leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from protos import types_pb2
from protos.cli import main
from router.client import AsyncTailpack
from tests.e2e.cluster import (
    START_TIMEOUT_S,
    STOP_TIMEOUT_S,
    ClusterProcess,
    left_in_shared_memory,
    run_cli,
    running,
    shared_memory_files,
    wait_gone,
    write_tiny_model,
)

pytestmark = pytest.mark.slow

ONE_WORKER = ["--kv-bytes", "8M", "--threads", "1"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


# --- what cannot start ---


@pytest.fixture
def refused_up(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What `up ARGUMENTS` says to standard error; in this process, for it is refused before anything starts."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["up", *arguments])
        said = capsys.readouterr().err
        assert end.value.code in (1, 2) and "Traceback" not in said, (end.value.code, said)
        return said

    return run


def test_a_port_in_use_is_named_before_anything_heavy_starts(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        run = run_cli("up", "--model", str(tiny), "--listen", address)
    assert run.returncode == 1
    assert "PORT_IN_USE" in run.stderr.decode() and address in run.stderr.decode()
    assert b"starting" not in run.stdout


def test_bad_settings_are_named(refused_up: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    listen = ("--listen", "127.0.0.1:0")
    assert "no such model" in refused_up(*listen, "--model", "gpt-17")
    assert "not a model folder" in refused_up(*listen, "--model", str(tmp_path))
    assert "BAD_ADDRESS" in refused_up("--model", str(tiny), "--listen", "localhost")
    assert "no size" in refused_up(*listen, "--model", str(tiny), "--kv-bytes", "much")
    assert "NOT_ENOUGH_MEMORY" in refused_up(*listen, "--model", str(tiny), "--kv-bytes", "100T")
    assert "dtype" in refused_up(*listen, "--model", str(tiny), "--dtype", "int3")
    assert "kv_mode" in refused_up(*listen, "--model", str(tiny), "--kv-mode", "zip")
    assert "NO_MODEL_WINDOW" in refused_up(*listen, "--model", str(tiny), "--kv-mode", "window")


def test_unreadable_weights_are_named_through_ray(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    run = run_cli("up", "--listen", "127.0.0.1:0", "--model", str(model), *ONE_WORKER)
    stderr = run.stderr.decode()
    assert run.returncode == 1 and "Traceback" not in stderr
    assert "UNREADABLE_WEIGHTS" in stderr and str(weights) in stderr


def test_a_worker_without_a_kvstore_says_so(tiny: Path, tmp_path: Path) -> None:
    run = run_cli("worker", "serve", "--model", str(tiny), "--kv-socket", str(tmp_path / "none.sock"))
    assert run.returncode == 1
    assert "KVSTORE_NOT_THERE" in run.stderr.decode() and b"Traceback" not in run.stderr


# --- what ends ---


class Ended:
    """A cluster and what there was before it, to see what is left after it."""

    def __init__(self, cluster: ClusterProcess, before: set[str]) -> None:
        self.cluster = cluster
        self._before = before
        self._processes = cluster.descendants()
        names = {process.name() for process in self._processes}
        assert {"raylet", "gcs_server"} <= names, names

    def check(self) -> None:
        assert wait_gone(self._processes) == []
        assert left_in_shared_memory(self._before) == set()
        with pytest.raises(OSError), socket.create_connection(_host_port(self.cluster.router), timeout=1):
            pass


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


@pytest.fixture
def started(tiny: Path, tmp_path: Path) -> Iterator[Ended]:
    before = shared_memory_files()
    # A drain that has to be waited for outlasts every wait here.
    with running(tmp_path, tiny, [*ONE_WORKER, "--drain-s", "600"]) as cluster:
        yield Ended(cluster, before)


async def test_ctrl_c_lets_answers_end_and_leaves_nothing(started: Ended) -> None:
    cluster = started.cluster
    async with AsyncTailpack(cluster.router) as client:
        tokens, finish = 0, types_pb2.FINISH_REASON_UNSPECIFIED
        async for chunk in client.generate([5], max_tokens=400, ignore_eos=True, timeout_s=60.0):
            if tokens == 0:
                os.killpg(cluster.process.pid, signal.SIGINT)  # as a terminal does
            tokens += len(chunk.token_ids)
            finish = chunk.finish_reason or finish
        assert (tokens, finish) == (400, types_pb2.FINISH_REASON_LENGTH)
    assert await asyncio.to_thread(cluster.process.wait, STOP_TIMEOUT_S) == 0, cluster.log
    started.check()
    assert not cluster.folder.exists()
    assert "stopped" in cluster.log


async def test_a_second_ctrl_c_ends_everything_at_once(started: Ended) -> None:
    cluster = started.cluster
    async with AsyncTailpack(cluster.router) as client:
        # The worker below cannot end its answer, and the drain outlasts the test: only the second signal can end it.
        chunks = client.generate([5], max_tokens=1000, ignore_eos=True, timeout_s=60.0)
        await anext(chunks)
        for worker in [p for p in cluster.descendants() if p.name().startswith("ray::WorkerActor")]:
            worker.suspend()  # now it cannot drain
        cluster.process.send_signal(signal.SIGINT)
        await asyncio.sleep(1.0)
        assert cluster.process.poll() is None
        cluster.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(cluster.process.wait, STOP_TIMEOUT_S) == 130, cluster.log
        await chunks.aclose()
    started.check()
    assert not cluster.folder.exists()


def test_a_dead_kvstore_is_named_and_stops_everything_where_nothing_is_restarted(tiny: Path, tmp_path: Path) -> None:
    before = shared_memory_files()
    with running(tmp_path, tiny, [*ONE_WORKER, "--no-restart"]) as cluster:
        started = Ended(cluster, before)
        os.kill(cluster.pids["kvstore"], signal.SIGKILL)
        assert cluster.process.wait(STOP_TIMEOUT_S) == 1
        assert "kvstore ended with SIGKILL" in cluster.log and "CHILD_DIED" in cluster.log
        started.check()
        assert cluster.folder.exists() and "logs are kept" in cluster.log
        shutil.rmtree(cluster.folder)


async def test_what_dies_is_started_again_where_it_was(tiny: Path, tmp_path: Path) -> None:
    """kvstore, router and worker, one after the other; answers are what they were. The worker has a warm standby."""
    with running(tmp_path, tiny, [*ONE_WORKER, "--deterministic", "--standby", "--recover-wait", "20"]) as cluster:

        async def answer() -> list[int]:
            async with AsyncTailpack(cluster.router) as client:
                asked = client.generate([5], max_tokens=20, ignore_eos=True, timeout_s=60.0)
                return [token for chunk in [chunk async for chunk in asked] for token in chunk.token_ids]

        async def standby() -> int:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not (lines := [x for x in worker_log.read_text().splitlines() if "worker standing by" in x]):
                assert time.monotonic() < deadline, cluster.log
                await asyncio.sleep(0.1)
            return int(json.loads(lines[-1])["pid"])

        said, pids, worker_log = await answer(), cluster.pids, cluster.folder / "logs" / "worker-0.log"
        warm = await standby()
        for name in ("kvstore", "router", "workers"):
            victim = pids[name][0] if name == "workers" else pids[name]
            os.kill(victim, signal.SIGKILL)
            deadline = time.monotonic() + START_TIMEOUT_S
            while victim in (now := json.loads((tmp_path / "ready.json").read_text())["pids"])["workers"] + [now[name]]:
                assert cluster.process.poll() is None and time.monotonic() < deadline, cluster.log
                await asyncio.sleep(0.1)
            assert {key for key in pids if pids[key] != now[key]} == {name}, cluster.log
            pids = now
            assert await answer() == said
        assert pids["workers"] == [warm] and "worker-0's standby took over" in cluster.log, (pids, cluster.log)
        (weights,) = cluster.kv_stats().weights  # brought back to the second store
        assert weights.users in (1, 2) and weights.num_bytes > 0
        assert "kvstore ended with SIGKILL" in cluster.log and "router ended with SIGKILL" in cluster.log
        assert cluster.stop() == 0, cluster.log


def test_a_killed_supervisor_takes_its_children_along(started: Ended) -> None:
    cluster = started.cluster
    # Ray's two agents look for their parent now and then, and hold nothing of ours.
    ours = [process for process in cluster.descendants() if not process.name().endswith("Agent")]
    assert len(ours) > 4
    cluster.process.kill()
    cluster.process.wait()
    assert wait_gone(ours, timeout_s=30.0) == []
    shutil.rmtree(cluster.folder)  # nobody was left to do it


def test_ctrl_c_ends_the_demo_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.txt", tmp_path / "output.txt"
    prompts.write_text("Hello\n" * 100, encoding="utf-8")
    before = shared_memory_files()
    command = [sys.executable, "-m", "protos.cli", "demo", "--model", str(tiny), "--prompts", str(prompts)]
    command += ["--workers", "1", "--max-tokens", "900", "--kv-bytes", "8M"]
    with output.open("wb") as file:
        demo = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "router  " not in output.read_text(encoding="utf-8"):
            assert demo.poll() is None and time.monotonic() < deadline, output.read_text(encoding="utf-8")
            time.sleep(0.1)
        time.sleep(1.0)  # into its event loop
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(STOP_TIMEOUT_S) == 130, output.read_text(encoding="utf-8")
        assert wait_gone(children) == []
        assert left_in_shared_memory(before) == set()
    finally:
        demo.kill()
        demo.wait()


def test_the_demo_runs_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n\nWhat is a fox?\n", encoding="utf-8")
    before = shared_memory_files()
    run = run_cli(
        *("demo", "--model", str(tiny), "--prompts", str(prompts), "--max-tokens", "9", "--kv-bytes", "8M"),
        timeout_s=120.0,
    )
    out = run.stdout.decode()
    assert run.returncode == 0, (out, run.stderr)
    assert "What is a fox?" in out and "tokens/s" in out and "pages" in out
    assert left_in_shared_memory(before) == set()
