"""Which of several processes is the worker: who holds the lock of a file. The others stand by, and one of them takes
over as soon as the kernel has taken the lock from a process that ended, however it ended.

So there is nobody who would have to notice the death, choose, or tell: no supervisor, no message. A process that is
stopped (SIGSTOP) before it has attached is nobody's suspect yet, and would keep its turn for ever: who stands by ends
it (``end_stopped``).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from kvstore.suspects import Holder

log = structlog.get_logger("worker")

LOCKS = Path("/proc/locks")
LOOK_S = 0.5
STOPPED_S = 5.0
"""After so long a process that is stopped loses its turn. The kvstore ends one that has attached after a second."""


class Turn:
    """A process's place in the queue for one worker's id. Held until the process ends: to give back a turn that came
    would leave a doubt, as memory and ports go with the process.
    """

    def __init__(self, path: Path) -> None:
        """``path``: the file; it is made, and stays."""
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @staticmethod
    def path(kv_socket: Path, worker_id: str) -> Path:
        """Beside the kvstore's sockets: a folder of one node and one user."""
        return kv_socket.parent / f"{worker_id}.turn"

    def take(self) -> bool:
        """Whether it is this process's turn now, without waiting."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def give_back(self) -> None:
        """Leaves the queue, by a process that has begun nothing as the worker; also one whose turn just comes."""
        os.close(self._fd)

    def wait(self) -> asyncio.Event:
        """Set on the running loop when it is this process's turn. The kernel cannot be told to stop waiting, so the
        wait has a thread that ends with the process.
        """
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def block() -> None:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            with contextlib.suppress(RuntimeError):  # the loop is closed: this process is about to end
                loop.call_soon_threadsafe(event.set)

        threading.Thread(target=block, name="turn", daemon=True).start()
        return event

    async def end_stopped(self) -> None:
        """Kills whoever has the turn and is stopped for STOPPED_S; until cancelled. One that a debugger holds is not
        stopped.
        """
        if not LOCKS.exists():
            log.warning("who has the turn cannot be seen from here, nor whether it is stopped", missing=str(LOCKS))
            return
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._end_if_stopped()
            except (OSError, ValueError, IndexError) as unclear:
                log.warning("who has the turn could not be seen", error=repr(unclear))

    async def _end_if_stopped(self) -> None:
        if (pid := self._holder()) is None:
            return
        holder = Holder(pid)
        try:
            # Looked at twice: the descriptor may be of a process that got the pid of the one that ended between.
            if self._holder() == pid and await _stays_stopped(holder) and self._holder() == pid and holder.kill():
                log.warning("the process whose turn it is was stopped, and is ended", pid=pid)
        finally:
            holder.close()

    def _holder(self) -> int | None:
        """The pid of who has the lock; None: nobody, or somebody who cannot be seen from here."""
        return next(_pids(os.fstat(self._fd), waiting=False), None)

    @staticmethod
    def is_awaited(path: Path) -> bool:
        """Whether somebody stands by, as far as can be seen from here."""
        try:
            return any(_pids(path.stat(), waiting=True))
        except OSError:
            return False


def _pids(file: os.stat_result, *, waiting: bool) -> Iterator[int]:
    """Of who has a file's lock, or waits for it."""
    for line in LOCKS.read_text().splitlines():
        # "7: FLOCK  ADVISORY  WRITE 1234 fe:00:5678 0 EOF"; of who waits: "7: -> FLOCK ..."
        _, *words = line.split()
        if waiting == (words[0] == "->"):
            kind, _, _, pid, inode, *_ = words[waiting:]
            if kind == "FLOCK" and int(inode.rpartition(":")[2]) == file.st_ino and _has_open(pid, file):
                yield int(pid)


def _has_open(pid: str, file: os.stat_result) -> bool:
    """An inode's number is one file's of each file system; /proc/locks and stat may call the same one differently."""
    try:
        return any(os.path.samestat(link.stat(), file) for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended, or is another user's
        return False


async def _stays_stopped(holder: Holder) -> bool:
    """Also not let go in between, as by who holds it to a share of a CPU."""
    since, used = time.monotonic(), holder.cpu_ticks()
    while holder.is_stopped() and holder.cpu_ticks() == used:
        if time.monotonic() - since >= STOPPED_S:
            return True
        await asyncio.sleep(min(LOOK_S, STOPPED_S))
    return False
