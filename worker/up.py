"""``tailpack up``: a cluster in the foreground, until Ctrl-C or until something it needs dies."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.text import Text

from protos.cli_options import EXIT_INTERRUPTED, program_name
from protos.errors import ConfigError, TailpackError
from worker.child import kill_descendants
from worker.cluster import Cluster, Interrupted
from worker.cluster_config import ClusterConfig

LOOK_S = 0.5
SAME_WISH_S = 0.5  # `timeout` signals the process, then its group, which is one wish; a person's second Ctrl-C is later
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def interruptible(cluster: Cluster, ready_file: Path | None = None) -> Iterator[None]:
    """First SIGINT, SIGTERM or SIGHUP: raises Interrupted in the main thread. Any later one: ends everything at once.

    A SIGHUP that the caller ignores, as under nohup, stays ignored. The later ones are seen by a thread of their own,
    for the main thread may be waiting deep inside a library.
    """
    read, write = socket.socketpair()
    write.setblocking(False)

    def first(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _leave_terminal()
        if not cluster.stopping:
            cluster.stopping = True
            raise Interrupted

    def watch() -> None:
        with read:
            began: float | None = None
            while signals := read.recv(16):
                if not set(signals) & set(_ENDING):
                    continue
                if began is None:
                    began = time.monotonic()
                elif time.monotonic() - began > SAME_WISH_S:
                    cluster.console.print("ending everything at once", highlight=False)
                    kill_descendants()
                    shutil.rmtree(cluster.folder, ignore_errors=True)
                    if ready_file is not None:
                        ready_file.unlink(missing_ok=True)
                    os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=watch, name="signals", daemon=True).start()
    wanted = [number for number in _ENDING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    old = {number: signal.signal(number, first) for number in wanted}
    old_fd = signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old.items():
            signal.signal(number, handler)
        write.close()  # ends the thread, which closes its own end: it may be about to read


def run(config: ClusterConfig, ready_file: Path | None) -> int:
    """Runs a cluster until Ctrl-C or SIGTERM, or until something it needs dies.

    Returns:
        The exit status: 0 ended by a signal, 130 by one that came before the cluster was ready, 1 an error.
    """
    console = Console(highlight=False)
    cluster = Cluster(config, console)
    was_ready = False
    with interruptible(cluster, ready_file):
        try:
            with cluster:
                _greet(cluster, console)
                if ready_file is not None:
                    _write_atomically(ready_file, json.dumps(cluster.describe()))
                was_ready = True
                while True:
                    if cluster.check() and ready_file is not None:
                        _write_atomically(ready_file, json.dumps(cluster.describe()))
                    time.sleep(LOOK_S)
        except Interrupted:
            console.print("stopped")
            return 0 if was_ready else EXIT_INTERRUPTED
        except TailpackError as failure:
            Console(stderr=True, highlight=False).print(f"Error: {failure}", markup=False, soft_wrap=True)
            return 1
        finally:
            if ready_file is not None:
                ready_file.unlink(missing_ok=True)


def _greet(cluster: Cluster, console: Console) -> None:
    program = program_name()
    console.print(f"logs     {cluster.logs}\n", soft_wrap=True)
    router = "" if cluster.router_address == "127.0.0.1:7700" else f" --router {cluster.router_address}"
    memory = router
    if cluster.config.tokens or cluster.config.tls:
        memory = f" --router unix:{cluster.router_socket}"
        router += (" --token-file FILE" if cluster.config.tokens else "") + (
            " --tls-ca FILE" if cluster.config.tls else ""
        )
    curl = "curl" + (" --cacert FILE" if cluster.config.tls else "")
    curl += " -H 'authorization: Bearer TOKEN'" if cluster.config.tokens else ""
    web = [("Web:", f"{curl} {cluster.http_url}/v1/models")] if cluster.http_url else []
    for what, command in (
        ("Try:", f"{program} generate{router} 'What is the capital of France?'"),
        *web,
        ("Mem:", f"{program} memory{memory}"),
        ("KV: ", f"{program} kvstore stats --kv-socket {shlex.quote(str(cluster.kv_socket))}"),
    ):
        console.print(Text.assemble(f"{what}  ", (command, "bold")), soft_wrap=True)
    console.print("Ctrl-C stops the cluster.\n")


def _leave_terminal() -> None:
    """What is printed to a terminal that is gone raises, and would cut the orderly end short."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        if stat.S_ISCHR(os.fstat(descriptor).st_mode):
            os.dup2(nowhere, descriptor)
    os.close(nowhere)


def check_ready_file(path: Path) -> None:
    """Raises ConfigError: the file could not be written when the cluster is up."""
    try:
        _draft(path).touch()
        _draft(path).unlink()
    except OSError as failure:
        raise ConfigError(
            f"cannot write the ready file: {failure.strerror}", given=path, allowed="a file in a folder that is there"
        ) from failure


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _write_atomically(path: Path, text: str) -> None:
    _draft(path).write_text(text)
    _draft(path).rename(path)
