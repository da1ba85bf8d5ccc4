"""A real cluster for tests: ``tailpack up`` as a process of its own, on a random tiny llama or on SmolLM2."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from kvstore.client import stats
from protos import kvstore_pb2
from tests.scenarios.tiny_tokenizer import EOS, write_tokenizer
from tests.unit.tiny import write_model
from worker.child import die_with_parent

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
MAX_SEQUENCE_TOKENS = 1024


class ClusterProcess:
    """A running ``tailpack up``. ``log`` is what it printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], log_file: Path, ready: dict[str, Any], model: Path) -> None:
        self.process = process
        self.log_file = log_file
        self.model = model
        self.router: str = ready["router"]
        self.http: str = ready["http"]
        self.workers: list[str] = ready["workers"]
        self.metrics: list[str] = ready["metrics"]
        self.kv_socket = Path(ready["kvstore"])
        self.folder = Path(ready["logs"]).parent
        self.pids: dict[str, Any] = ready["pids"]

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kv_stats(self) -> kvstore_pb2.KvStatsResponse:
        return stats(self.kv_socket)

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        """One signal, and its end. Returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(STOP_TIMEOUT_S)


def run_cli(*arguments: str, input: bytes | None = None, timeout_s: float = 60.0) -> subprocess.CompletedProcess[bytes]:
    """``tailpack ARGUMENTS`` to its end."""
    command = [sys.executable, "-m", "protos.cli", *arguments]
    return subprocess.run(command, input=input, capture_output=True, timeout=timeout_s, check=False)


@contextmanager
def running(folder: Path, model: str | Path, arguments: Sequence[str] = ()) -> Iterator[ClusterProcess]:
    """``tailpack up --model MODEL ARGUMENTS`` on free ports, ready. Ends everything, whatever the test did."""
    ready_file, log_file = folder / "ready.json", folder / "up.log"
    command = [sys.executable, "-m", "protos.cli", "up", "--model", str(model), "--listen", "127.0.0.1:0"]
    command += ["--ready-file", str(ready_file), "--drain-s", "2", *arguments]
    with log_file.open("wb") as log:
        # A test run that is killed does not come to the end below; `up` then stops all that it started.
        with_us = partial(die_with_parent, os.getpid(), signal.SIGTERM)
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, preexec_fn=with_us)
    descendants: list[psutil.Process] = []
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not ready_file.exists():
            assert process.poll() is None, f"`up` ended with {process.returncode}:\n{log_file.read_text()}"
            assert time.monotonic() < deadline, f"`up` is not ready:\n{log_file.read_text()}"
            time.sleep(0.1)
        descendants = psutil.Process(process.pid).children(recursive=True)
        yield ClusterProcess(process, log_file, json.loads(ready_file.read_text()), Path(model))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for descendant in descendants:
            if descendant.is_running():  # compares start times: a pid that was used again is not ours
                descendant.kill()


def write_tiny_model(folder: Path) -> Path:
    """A random llama with a tokenizer of its own."""
    write_tokenizer(folder)
    return write_model(
        folder, vocab_size=600, eos_token_id=EOS, bos_token_id=0, max_position_embeddings=MAX_SEQUENCE_TOKENS
    )


@contextmanager
def tiny_cluster(folder: Path) -> Iterator[ClusterProcess]:
    """Two deterministic workers on the tiny model, with little memory so that limits are within reach."""
    model = write_tiny_model(folder / "tiny")
    arguments = ["--workers", "2", "--deterministic", "--kv-bytes", "8M", "--max-running", "16", "--threads", "1"]
    with running(folder, model, arguments) as cluster:
        yield cluster


def wait_gone(processes: Sequence[psutil.Process], timeout_s: float = 60.0) -> list[str]:
    """Waits for processes to end; returns those that have not, in words."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_s)
    return [f"{p.pid} {' '.join(p.cmdline())[:80]}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def shared_memory_files() -> set[str]:
    # Python's own semaphores (a build with several processes beside this test makes some) are not the cluster's.
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.mp-")}


def left_in_shared_memory(before: set[str], timeout_s: float = 60.0) -> set[str]:
    """New files there that nobody has mapped: another cluster, which runs beside this one, has its own mapped."""
    deadline = time.monotonic() + timeout_s
    while left := shared_memory_files() - before:
        maps = "".join(_text(path) for path in Path("/proc").glob("[0-9]*/maps"))
        left = {name for name in left if f"/dev/shm/{name}" not in maps}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return set()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended, or is somebody else's
        return ""
