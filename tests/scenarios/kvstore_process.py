"""A real kvstore process for scenario tests, and the attachments made to it."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from kvstore import client
from kvstore.client import Attachment
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from protos import kvstore_pb2

ROOT = Path(__file__).parents[2]


def geometry(num_layers: int = 2, dim: int = 16) -> CacheGeometry:
    """Two groups with pages of 32 and 16 KiB (2 layers, dim 16)."""
    full = tuple(Region(layer, kind, 1, dim, "float32") for layer in range(num_layers) for kind in "kv")
    return CacheGeometry((LayerGroup("full", full), LayerGroup("window", full[: len(full) // 2], window=256)))


GEOMETRY = geometry()
PAGE_BYTES = sum(group.page_bytes for group in GEOMETRY.groups)  # one page in every group


class StoreProcess:
    """A store in a fresh folder of its own; short, because socket paths are."""

    def __init__(self, *arguments: str, folder: Path | None = None) -> None:
        self._made = None if folder else tempfile.TemporaryDirectory(prefix="kv")
        self.folder = folder or Path(self._made.name)  # type: ignore[union-attr]
        self.log_path = self.folder.with_name(f"{self.folder.name}.log")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli", "serve", "--socket-dir", str(self.folder), *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(60)
            raise AssertionError(f"the store did not start: {self.log_path.read_text()}")
        self.ready: dict[str, Any] = json.loads(line)
        self.socket = self.folder / "kvstore.sock"

    def attach(self, *, pages: int = 8, **changes: Any) -> Attachment:
        asked: dict[str, Any] = {
            "worker_id": "w0",
            "device": "cpu:0",
            "geometry": GEOMETRY,
            "arena_bytes": pages * PAGE_BYTES,
            "max_sequences": 4,
            "max_sequence_tokens": 1024,
            "weights_digest": b"w" * 16,
            **changes,
        }
        return client.attach(self.socket, **asked)

    def stats(self) -> kvstore_pb2.KvStatsResponse:
        return client.stats(self.socket)

    def device(self) -> kvstore_pb2.DeviceStats:
        """Of the only device."""
        (device,) = self.stats().devices
        return device

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_path.read_text().splitlines()]

    def stop(self, signum: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signum)
        code = self.process.wait(60)
        if self.process.stdout:
            self.process.stdout.close()
        return code

    def __enter__(self) -> StoreProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.stop(signal.SIGKILL if error else signal.SIGTERM)
        finally:
            self.log_path.unlink(missing_ok=True)
            if self._made:
                self._made.cleanup()


@contextmanager
def worker_process(store: StoreProcess, code: str) -> Iterator[subprocess.Popen[str]]:
    """A process that runs ``code`` with ``store_socket`` and the names of this module defined; killed at the end."""
    prelude = (
        "import sys; from pathlib import Path\n"
        "from kvstore import client, mapping; from kvstore.client import OpenRequest\n"
        "from tests.scenarios.kvstore_process import GEOMETRY, PAGE_BYTES\n"
        f"store_socket = Path({str(store.socket)!r})\n"
        "def attach(pages=8, device='cpu:0'):\n"
        "    return client.attach(store_socket, worker_id='other', device=device, geometry=GEOMETRY,\n"
        "        arena_bytes=pages * PAGE_BYTES, max_sequences=4, max_sequence_tokens=1024, weights_digest=b'w' * 16)\n"
        "def say(*what): print(*what, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", prelude + code], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(60)
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


@contextmanager
def unheard(attachment: Attachment) -> Iterator[None]:
    """Inside, nothing that the attachment says on its stream reaches the store, its end least of all: the store would
    kill this process for that.
    """
    session = attachment._session
    heard, session._outgoing = session._outgoing, queue.SimpleQueue()
    try:
        yield
    finally:
        session._outgoing = heard


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Waits for a condition that another process brings about; fails by name when it does not."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.01)
