"""The device arena on a real GPU: a store, workers that die, bytes that stay. One script, no test framework:

    python3 tests/kernels/device_arena_check.py               20 GiB of pages, under two minutes
    python3 tests/kernels/device_arena_check.py --gib 2

A worker makes the memory at the store's request and fills it; it is killed with SIGKILL; the next one maps it and
compares every byte. Then: CuPy and torch over the same memory, another size, more than the GPU has, a store that is
killed under a worker, and whether all memory comes back in the end.

Every finding is one JSON line on standard output and in --out FILE, or else in $OUT/device_arena_check.jsonl.
Exit status: 0 all passed, 1 a check failed, 2 this machine cannot run it (no GPU).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kvstore import client
from kvstore.geometry import CacheGeometry, LayerGroup, Region, apply_mode
from kvstore.server import SOCKET_NAME
from protos.errors import TailpackError
from worker.device_memory import DeviceArena, DeviceMemory
from worker.gpu import Gpu, find_gpu, free_bytes, memory_of, visible_gpus
from worker.kv_view import KvView

ROOT = Path(__file__).resolve().parents[2]
ANSWER_TIMEOUT_S = 120.0
PIECE_BYTES = 256 << 20  # filled and compared at once
SLACK_BYTES = 64 << 20  # of free memory, for what the driver keeps for itself
WHAT_FREES_LATE_S = 10.0
GEOMETRY = apply_mode(
    CacheGeometry(
        (LayerGroup("full", tuple(Region(layer, k, 8, 128, "bfloat16") for layer in range(32) for k in "kv")),)
    ),
    "turboquant",
    "tq4",
)


class Findings:
    """What was found, a line each; ``failed`` counts what is not as it must be."""

    def __init__(self, out: TextIO | None) -> None:
        self.failed = 0
        self._out = out

    def say(self, check: str, passed: bool, **found: Any) -> None:
        self.failed += not passed
        line = json.dumps({"check": check, "passed": passed, **found})
        for file in (sys.stdout, self._out):
            if file is not None:
                print(line, file=file, flush=True)


class Process:
    """A process that says lines of JSON: this script as a worker, which answers each line; or the product's kvstore."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], ANSWER_TIMEOUT_S)[0]:
            raise TimeoutError(f"no answer from {self.process.args!r}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args!r} ended with {self.process.wait(10)}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, what: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(what, file=self.process.stdin, flush=True)
        return self.answer()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


# --- the roles ---


class Memory(DeviceMemory):
    """Counts and times what the store asks for."""

    created_bytes = 0
    num_chunks = 0
    create_s = 0.0

    def create(self, chunk_bytes: Any) -> list[int]:
        began = time.perf_counter()
        fds = super().create(chunk_bytes)
        self.create_s += time.perf_counter() - began
        self.created_bytes += sum(chunk_bytes)
        self.num_chunks += len(chunk_bytes)
        return fds


def worker(folder: str, device: str, arena_bytes: int) -> None:
    """Attaches, then does what the lines on stdin say."""
    gpu = find_gpu(device)
    driver = memory_of(gpu.device)
    memory = Memory(driver)
    began = time.perf_counter()
    try:
        attachment = client.attach(
            Path(folder) / SOCKET_NAME,
            worker_id=f"check-{os.getpid()}",
            device=gpu.device,
            device_memory=memory,
            geometry=GEOMETRY,
            arena_bytes=arena_bytes,
            max_sequences=4,
            max_sequence_tokens=4096,
            weights_digest=b"w" * 16,
        )
    except TailpackError as refused:
        _say(refused=refused.reason, message=str(refused))
        return
    attach_s = time.perf_counter() - began
    began = time.perf_counter()
    arena = DeviceArena.of(driver, attachment.arenas["full"])
    pages = arena.tensor()
    _say(
        attach_s=attach_s,
        map_s=time.perf_counter() - began,
        create_s=memory.create_s,
        created_bytes=memory.created_bytes,
        num_chunks=memory.num_chunks,
        num_bytes=pages.numel(),
        torch_device=str(pages.device),
        epoch=attachment.epoch,
    )
    for line in sys.stdin:
        match line.split():
            case ["zero"]:
                _say(zero=not any(bool(piece.any()) for piece in _pieces(pages)))
            case ["fill", seed]:
                for index, piece in enumerate(_pieces(pages)):
                    piece.copy_(_random(len(piece), int(seed) + index, pages.device))
                torch.cuda.synchronize()
                _say(filled=pages.numel())
            case ["compare", seed]:
                wrong = sum(
                    int((piece != _random(len(piece), int(seed) + index, pages.device)).sum())
                    for index, piece in enumerate(_pieces(pages))
                )
                _say(wrong_bytes=wrong, compared=pages.numel())
            case ["cupy"]:
                _say(**_through_cupy(pages))
            case ["view"]:
                _say(**_through_view(attachment))
            case ["close"]:
                del pages
                arena.close()
                attachment.close()
                _say(closed=True)
                return


def _through_cupy(pages: torch.Tensor) -> dict[str, Any]:
    """CuPy over the last bytes, which lie in the last chunk, and over the first chunk's border."""
    import cupy

    same = cupy.asarray(pages)
    before = pages[-16:].tolist()
    same[-16:] = cupy.arange(16, dtype=cupy.uint8)
    cupy.cuda.runtime.deviceSynchronize()
    found = pages[-16:].tolist()
    pages[-16:] = torch.tensor(before, dtype=torch.uint8, device=pages.device)
    torch.cuda.synchronize()
    return {
        "same_address": same.data.ptr == pages.data_ptr(),
        "torch_sees_cupys_bytes": found == list(range(16)),
        "cupy_sees_torchs_bytes": same[-16:].tolist() == before,
        "cupy": cupy.__version__,
    }


def _through_view(attachment: client.Attachment) -> dict[str, Any]:
    """The product's own view: a row in a tail, a tail copied to another, a page's bytes."""
    view = KvView(GEOMETRY, attachment.arenas, attachment.tails)
    tail = view.view(31, "v").tail
    assert tail is not None
    tail[2] = 1.5
    view.copy_tail("full", 2, 3)
    page = bytes(view.page_memory("full", 1))
    return {
        "tail_device": str(tail.device),
        "tail_copied": bool((tail[3] == 1.5).all()),
        "page_bytes_right": len(page) == GEOMETRY.groups[0].page_bytes,
    }


def _pieces(pages: torch.Tensor) -> Iterator[torch.Tensor]:
    for first in range(0, len(pages), PIECE_BYTES):
        yield pages[first : first + PIECE_BYTES]


def _random(num_bytes: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=device, generator=generator)


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


# --- the checks ---


def check(gpu: Gpu, num_bytes: int, findings: Findings) -> None:
    at_start = free_bytes(gpu)
    with tempfile.TemporaryDirectory(prefix="kv") as folder:
        with Process("-m", "protos.cli", "kvstore", "serve", "--socket-dir", folder) as running:
            running.answer()
            _lives(gpu, folder, num_bytes, at_start, running.process.pid, findings)
            _store_killed(gpu, folder, num_bytes, running, findings)
        back = _settled(gpu, at_start)
        findings.say(
            "all-memory-comes-back", abs(at_start - back) <= SLACK_BYTES, free_at_start=at_start, free_at_end=back
        )
    findings.say("nvidia-smi", True, says=_nvidia_smi())


def _cuda_libraries(maps: str) -> set[str]:
    """Libraries with "cuda" in their names among a process's mappings."""
    files = (line.split()[-1] for line in maps.splitlines() if "/" in line)
    return {Path(file).name for file in files if "cuda" in Path(file).name}


def _bare_interpreters_libraries() -> set[str]:
    """Those that this machine puts into every Python, before a line of ours runs."""
    code = "print(open('/proc/self/maps').read())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return _cuda_libraries(run.stdout)


def _lives(gpu: Gpu, folder: str, num_bytes: int, at_start: int, store_pid: int, findings: Findings) -> None:
    """Workers one after the other, in one store."""
    seed = int(time.time())
    print(f"seed {seed}", file=sys.stderr)
    with _worker(gpu, folder, num_bytes) as first:
        made = first.answer()
        findings.say("created", made.get("created_bytes", 0) >= made.get("num_bytes", 1) > 0, **made)
        findings.say("new-memory-is-zero", first.ask("zero")["zero"])
        first.ask(f"fill {seed}")
        seen = first.ask("view")
        findings.say("view", _all(seen), **seen)
        first.kill()
    loaded, bare = _cuda_libraries(Path(f"/proc/{store_pid}/maps").read_text()), _bare_interpreters_libraries()
    findings.say("the-store-loads-no-cuda", loaded <= bare, loaded=sorted(loaded), bare_interpreter=sorted(bare))
    held = _settled(gpu, at_start - made["created_bytes"])
    findings.say(
        "the-store-alone-keeps-the-memory",
        abs(at_start - made["created_bytes"] - held) <= SLACK_BYTES,
        free=held,
        held_bytes=at_start - held,
    )
    with _worker(gpu, folder, num_bytes) as second:
        mapped = second.answer()
        findings.say("mapped-by-the-next", mapped.get("created_bytes") == 0, **mapped)
        compared = second.ask(f"compare {seed}")
        findings.say("bytes-survive-a-kill", compared["wrong_bytes"] == 0, seed=seed, **compared)
        seen = second.ask("cupy")
        findings.say("cupy", _all(seen), **seen)
        second.ask("close")
        second.process.wait(30)
    with _worker(gpu, folder, num_bytes // 2) as smaller:
        made = smaller.answer()
        free = _settled(gpu, at_start - made["created_bytes"], context=True)
        findings.say(
            "another-size-frees-the-old-memory",
            made["created_bytes"] > 0 and at_start - free < num_bytes,
            free=free,
            **made,
        )
        smaller.ask("close")
        smaller.process.wait(30)
    with _worker(gpu, folder, gpu.total_bytes) as greedy:
        refused = greedy.answer()
        findings.say("out-of-memory-is-named", refused.get("refused") == "NOT_ENOUGH_MEMORY", **refused)
        greedy.process.wait(30)
    free = _settled(gpu, at_start)
    findings.say("out-of-memory-leaves-nothing", abs(at_start - free) <= SLACK_BYTES, free=free)


def _store_killed(gpu: Gpu, folder: str, num_bytes: int, running: Process, findings: Findings) -> None:
    with _worker(gpu, folder, num_bytes) as last:
        last.answer()
        last.ask("fill 7")
        running.kill()
        compared = last.ask("compare 7")
        findings.say("a-worker-outlives-its-store", compared["wrong_bytes"] == 0, **compared)
        last.kill()


@contextmanager
def _worker(gpu: Gpu, folder: str, num_bytes: int) -> Iterator[Process]:
    with Process(str(Path(__file__).resolve()), "--as-worker", folder, gpu.device, str(num_bytes)) as process:
        yield process


def _settled(gpu: Gpu, expected: int, *, context: bool = False) -> int:
    """Free memory, once it is about what is expected, or after a while. ``context``: a worker is alive."""
    slack = SLACK_BYTES + (1 << 30 if context else 0)
    end = time.monotonic() + WHAT_FREES_LATE_S
    while abs((free := free_bytes(gpu)) - expected) > slack and time.monotonic() < end:
        time.sleep(0.1)
    return free


def _all(answer: dict[str, Any]) -> bool:
    return all(value for value in answer.values() if isinstance(value, bool))


def _nvidia_smi() -> str:
    try:
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.used,memory.total", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except OSError as missing:
        return str(missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=20.0, help="of pages")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--as-worker", nargs=3, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_worker:
        folder, device, arena_bytes = asked.as_worker
        worker(folder, device, int(arena_bytes))
        return 0
    if not visible_gpus():
        print("this machine has no GPU that CUDA can use", file=sys.stderr)
        return 2
    out = asked.out or (Path(os.environ["OUT"]) / "device_arena_check.jsonl" if "OUT" in os.environ else None)
    file = out.open("w") if out else None
    findings = Findings(file)
    gpu = find_gpu(asked.device)
    findings.say("machine", True, gpu=gpu.name, torch=torch.__version__, cuda=torch.version.cuda, python=sys.version)
    try:
        check(gpu, int(asked.gib * (1 << 30)), findings)
    except Exception as failure:  # noqa: BLE001 -- the script's boundary: it is a finding
        findings.say("ran-to-the-end", False, error=f"{type(failure).__name__}: {failure}")
    finally:
        if file:
            file.close()
    return 1 if findings.failed else 0


if __name__ == "__main__":
    sys.exit(main())
