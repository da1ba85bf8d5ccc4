"""The workers of a Ray node: how many and where, what they are called, and how their logs are passed on.

What Ray does is run for real in tests/e2e/test_chart_executed.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protos.errors import CapacityError, ConfigError, Unavailable
from protos.metrics import OFF
from worker import node
from worker.gpu import Gpu
from worker.node import LogTail, NodeConfig, devices, port_after

UUIDS = [f"GPU-{index:08x}-0000-0000-0000-000000000000" for index in range(8)]
GPUS = tuple(Gpu(index, uuid, "H200", 1 << 37) for index, uuid in enumerate(UUIDS))


def config(tmp_path: Path, **settings: Any) -> NodeConfig:
    own = {
        "model": tmp_path,
        "name": "m",
        "kv_socket": tmp_path / "kv.sock",
        "dtype": None,
        "max_running": 8,
        "threads": 0,
    }
    return NodeConfig(
        settings={**own, **settings},
        listen="0.0.0.0:7730",
        metrics="0.0.0.0:7750",
        health=OFF,
        device="cpu",
        workers=0,
        node_name="pod-a",
        ray_address="auto",
        log_dir=tmp_path / "logs",
        drain_s=1.0,
    )


def test_a_worker_for_each_gpu() -> None:
    assert devices("cuda", 0, GPUS) == list(GPUS)
    assert devices("cuda", 8, GPUS) == list(GPUS)
    assert devices("cpu", 0, ()) == [None]
    assert devices("cpu", 3, GPUS) == [None, None, None]


def test_what_is_not_there_is_not_made_up() -> None:
    with pytest.raises(ConfigError) as none:
        devices("cuda", 0, ())
    assert none.value.reason == "NO_GPU"
    with pytest.raises(CapacityError) as fewer:
        devices("cuda", 8, GPUS[:7])
    assert fewer.value.reason == "NOT_ENOUGH_GPUS" and "7 GPUs" in str(fewer.value)


def test_workers_differ_in_name_device_and_ports(tmp_path: Path) -> None:
    on_gpu = [config(tmp_path).worker(index, 8, gpu) for index, gpu in enumerate(GPUS)]
    assert [worker.worker_id for worker in on_gpu] == [f"pod-a-{index}" for index in range(8)]
    assert [worker.gpu_uuid for worker in on_gpu] == UUIDS
    assert {worker.dtype for worker in on_gpu} == {"bfloat16"} and {worker.max_running for worker in on_gpu} == {8}
    on_cpu = config(tmp_path).worker(1, 2, None)
    assert (on_cpu.device, on_cpu.dtype) == ("cpu:1", "float32")
    assert config(tmp_path, dtype="float16").worker(0, 1, GPUS[0]).dtype == "float16"
    cores = len(os.sched_getaffinity(0))
    assert config(tmp_path).worker(0, 1, None).threads == cores and on_cpu.threads == max(1, cores // 2)
    assert config(tmp_path, threads=3).worker(0, 8, None).threads == 3
    assert port_after("0.0.0.0:7730", 7) == "0.0.0.0:7737"
    assert port_after("[::]:7730", 1) == "[::]:7731" and port_after(OFF, 3) == OFF


def test_logs_are_passed_on_once_and_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "worker-0.log", io.BytesIO()
    LogTail(path).pass_on(out)  # there is none yet
    path.write_bytes(b"of an earlier one\n")
    tail = LogTail(path)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND), "wb", buffering=0) as writer:
        tail.pass_on(out)
        assert out.getvalue() == b""
        writer.write(b"first ")
        tail.pass_on(out)
        writer.write(b"second\n")
        tail.pass_on(out)
        tail.pass_on(out)
        assert out.getvalue() == b"first second\n"
        monkeypatch.setattr(node, "MAX_LOG_BYTES", 20)  # less than what is there
        writer.write(b"third\n")
        tail.pass_on(out)
        assert path.stat().st_size == 0
        writer.write(b"fourth\n")  # appended: where the file ends now
        tail.pass_on(out)
        assert out.getvalue() == b"first second\nthird\nfourth\n" and path.stat().st_size == 7


LISTENER = """
import socket, sys
with socket.socket(socket.AF_UNIX) as door:
    door.bind(sys.argv[1])
    door.listen()
    print("up", flush=True)
    sys.stdin.read()
"""


def test_the_end_of_who_listens_at_a_socket_is_seen(tmp_path: Path) -> None:
    path = str(tmp_path / "raylet")
    started = [sys.executable, "-c", LISTENER, path]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as listener:
        assert listener.stdout is not None and listener.stdout.readline()
        pidfd = node.server_pidfd(path)
        assert pidfd is not None
        assert not node.has_ended(pidfd)
        listener.kill()
        listener.wait(60)
        assert node.has_ended(pidfd)  # also where another one listens there by now
        os.close(pidfd)
    with pytest.raises(OSError):
        node.server_pidfd(path)


async def test_a_file_asks_for_a_drain(tmp_path: Path) -> None:
    driver = node.Node(dataclasses.replace(config(tmp_path), drain_file=tmp_path / "drain"))
    watched = asyncio.create_task(driver._watch(asyncio.Event()))
    await asyncio.sleep(0)
    assert not watched.done()
    (tmp_path / "drain").touch()
    await asyncio.wait_for(watched, 60)


async def test_workers_are_given_up_when_this_nodes_ray_has_ended(tmp_path: Path) -> None:
    """Ray's driver goes on without its raylet and hears nothing more of it."""
    driver = node.Node(config(tmp_path))
    reader, writer = os.pipe()
    driver._raylet = reader  # as a pidfd: readable when it is over
    watched = asyncio.create_task(driver._watch(asyncio.Event()))
    await asyncio.sleep(0)
    assert not watched.done()
    os.close(writer)
    with pytest.raises(Unavailable) as ended:
        await asyncio.wait_for(watched, 60)
    assert ended.value.reason == "RAY_ENDED"
    os.close(reader)
