"""Processes of ours in a hundredth of a second: forked from one that has imported everything and done nothing yet.

A run with hundreds of deaths would else spend its time importing torch. What is forked is a process like any other:
it has its own pid, sockets and signals, and runs the command line. It ends when the zygote ends, and the zygote when
the test does.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.chaos.dying_worker import Death
from worker.child import die_with_parent

ROOT = Path(__file__).parents[2]
MAX_MESSAGE_BYTES = 1 << 16
START_TIMEOUT_S = 60.0
MAX_FILE_BYTES = 1 << 29
"""Of each file that a server writes: a log that grows without end would else fill the disk, or whoever reads it."""
# The router's first: it sets what grpc reads when it is imported.
PRELOADED = (
    "router.cli",
    "router.server",
    "kvstore.cli",
    "kvstore.server",
    "worker.cli",
    "worker.shell",
    "worker.tiny_v4",
)


class Forked:
    """A running ``tailpack ARGUMENTS``, forked from the zygote."""

    def __init__(self, zygote: Zygote, pid: int, out: Path) -> None:
        self.pid = pid
        self.out = out
        self.status: int | None = None  # as subprocess has it: negative after a signal
        self._zygote = zygote
        self.pidfd = os.pidfd_open(pid)  # a zombie at the worst: nobody else waits for it

    def ready(self) -> dict[str, Any] | None:
        """What it printed when it was ready; None: it is not yet."""
        text = self.out.read_text()
        return json.loads(text) if text.endswith("\n") else None

    def ended(self) -> bool:
        return self.status is not None or bool(select.select([self.pidfd], [], [], 0)[0])

    def send(self, signum: int) -> None:
        """Sends a signal, where it has not ended."""
        if self.status is None:
            try:
                signal.pidfd_send_signal(self.pidfd, signum)
            except ProcessLookupError:
                return

    def reap(self) -> int:
        """Of one that has ended."""
        if self.status is None:
            self.status = self._zygote.status_of(self.pid)
            os.close(self.pidfd)
        return self.status


class Zygote:
    """The process that is forked from. Used by one thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.zygote", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the test's
            )
        self.pid = self._process.pid
        self._socket = ours
        ours.settimeout(START_TIMEOUT_S)
        self._ask({})

    def fork(self, arguments: list[str], *, log: Path, out: Path, death: Death | None = None) -> Forked:
        """Starts one. ``log`` is appended to; ``out`` gets its standard output, from the beginning."""
        out.write_text("")
        asked = {"argv": arguments, "log": str(log), "out": str(out), "death": str(death or "")}
        return Forked(self, self._ask(asked)["pid"], out)

    def status_of(self, pid: int) -> int:
        return int(self._ask({"wait": pid})["status"])

    def _ask(self, question: dict[str, Any]) -> Any:
        self._socket.send(json.dumps(question).encode())
        answer = self._socket.recv(MAX_MESSAGE_BYTES)
        assert answer, f"the zygote ended with {self._process.wait(60)}"
        return json.loads(answer)

    def close(self) -> None:
        """Ends it, and all that it forked."""
        self._socket.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _serve(channel: socket.socket) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # pages that are never written stay shared
    while question := channel.recv(MAX_MESSAGE_BYTES):
        asked = json.loads(question)
        if "wait" in asked:
            _, status = os.waitpid(asked["wait"], 0)
            answer = {"status": os.waitstatus_to_exitcode(status)}
        elif "argv" in asked:
            pid = os.fork()
            if pid == 0:
                _become(channel, asked)
            answer = {"pid": pid}
        else:
            answer = {}
        channel.send(json.dumps(answer).encode())


def _become(channel: socket.socket, asked: dict[str, Any]) -> None:
    """In the child: never returns."""
    code = 70
    try:
        die_with_parent(os.getppid())
        resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
        channel.close()
        for path, number in ((asked["out"], 1), (asked["log"], 2)):
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.dup2(descriptor, number)
            os.close(descriptor)
        if asked["death"]:
            Death.parse(asked["death"]).arm()
        from protos.cli import main

        sys.argv = ["tailpack", *asked["argv"]]
        main(asked["argv"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - nothing of the zygote's may run on in the child
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        _serve(channel)
