"""A subprocess of the supervisor: one of our own servers, ended by its pid and never outliving us."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from protos.errors import TailpackError, Unavailable, printable

STARTING = "worker starting"
"""The event that begins every life of a worker in its log; the supervisor counts them."""

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded here: nothing may be loaded between fork and exec


class ChildDied(Unavailable):
    """A process that the cluster needs has ended by itself."""

    default_reason = "CHILD_DIED"


class Child:
    """A running ``tailpack ...``. Its stderr goes to ``log_file``; its first line on stdout says that it is ready."""

    def __init__(self, name: str, arguments: Sequence[str], log_file: Path) -> None:
        self.name = name
        self.log_file = log_file
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "protos.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # A session of its own: Ctrl-C at the terminal reaches the supervisor, which stops things in order.
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        self.pid = self._process.pid

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """The JSON object that the child prints when it is ready.

        Raises:
            ChildDied: it ended first; the message has the last error of its log.
            Unavailable: it is not ready in time.
        """
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while (left_s := deadline - time.monotonic()) > 0:
                if not selector.select(min(left_s, 0.1)):
                    continue
                line = self._process.stdout.readline()
                if not line:
                    self._process.wait(5.0)
                    raise self.died()
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise Unavailable(f"{self.name} is not ready after {timeout_s:g} s", reason="START_TIMEOUT", hint=self._log())

    def died(self) -> TailpackError:
        """The error for a child that has ended."""
        code = self._process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return ChildDied(f"{self.name} ended with {how}", given=self.last_words(), hint=self._log())

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def last_words(self) -> str | None:
        """The last error or warning in its log; None when it has none."""
        return last_problem(self.log_file.read_text(errors="replace"))

    def stop(self, timeout_s: float) -> None:
        """SIGTERM, and SIGKILL when that is not enough within ``timeout_s``. Waits for the end."""
        if self.running:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _log(self) -> str:
        return f"its log: {self.log_file}"


def last_problem(text: str) -> str | None:
    """The last error or warning in a process's log, in one line; None when there is none.

    Records of ours are JSON objects with a level; whatever else stands there is the end of a traceback, a click error
    or a library's complaint.
    """
    for line in reversed(text.splitlines()):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict):
            if line.strip() and not _LIBRARY_NEWS.match(line):
                return printable(line.strip()[:500])
        elif record.get("level") in ("warning", "error", "critical"):
            exception = str(record.get("exception") or "").strip().splitlines()[-1:]
            details = [str(record[key]) for key in ("error", "why") if record.get(key)] or exception
            return printable(": ".join([str(record.get("event")), *details])[:500])
    return None


_LIBRARY_NEWS = re.compile(r"I\d{4} |WARNING: All log messages before absl")  # absl: "I0102 12:34:56.789 ..."


def kill_descendants() -> None:
    """SIGKILL for every process below this one, deepest last to know; by pid, so nobody else's is touched."""
    for process in psutil.Process().children(recursive=True):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def die_with_parent(parent: int, signum: int = signal.SIGKILL) -> None:
    """Runs between fork and exec: when the parent is killed there is nobody left to end the child."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signum)
    if os.getppid() != parent:  # it died before the call
        os._exit(1)
