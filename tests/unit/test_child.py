"""Children of a process that uses gRPC."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

STARTS = """
import functools, os, subprocess, sys
import protos.cli  # as every process of ours begins
import grpc
from concurrent import futures
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from worker.child import die_with_parent

server = grpc.server(futures.ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    children = [
        subprocess.Popen(["true"], preexec_fn=functools.partial(die_with_parent, os.getpid())) for _ in range(300)
    ]
    print({child.wait() for child in children}, flush=True)
os._exit(0)
"""


def test_a_child_is_started_while_grpc_is_in_use() -> None:
    """With gRPC's own handlers of forks, up to one in ten was ended by SIGABRT before it began."""
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run(
        [sys.executable, "-c", STARTS],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.stdout == "{0}\n", ended.stderr[-2000:]
