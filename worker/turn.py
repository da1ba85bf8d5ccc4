"""Which of several processes is the worker: who holds the lock of a file. The others stand by, and one of them takes
over as soon as the kernel has taken the lock from a process that ended, however it ended.

So there is nobody who would have to notice the death, choose, or tell: no supervisor, no message.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import threading
from pathlib import Path


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
            loop.call_soon_threadsafe(event.set)

        threading.Thread(target=block, name="turn", daemon=True).start()
        return event
