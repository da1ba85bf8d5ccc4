"""Device work in flight is over when its process is gone: `python -m tests.e2e.gpu_in_flight --records FILE`.

A writer maps memory that another process holds as descriptors, as a worker maps the kvstore's, and keeps the device
writing to it: by one kernel of seconds, by small ones that follow each other, or by graph replays of which many are
queued. It is killed with SIGKILL. From the moment its pidfd is readable, which is what the store waits for before it
gives the memory to the next worker, no word may change any more, which another process watches through its own mapping.
How many samples differed between the kill and that moment is told as well: waiting is not for nothing.

Prints one JSON line a case; exit status 1 when a word changed, 2 without a GPU. `--device cpu` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parents[2]
NUM_WORDS = 264 * 64  # u64; every SM of an H200 writes some
LONG_KERNEL_NS = 20_000_000_000  # ends by itself, should nobody end it
STEPS_IN_GRAPH = 64
STEP_NS = 20_000
MOVING_TIMEOUT_S = 60.0
GONE_TIMEOUT_S = 30.0
WRITER_S = 180.0  # a bound on one that nobody ends
LEAST_CHANGES_SEEN = 1  # words that changed while the writer lived: else the watcher is blind
DEADLY = signal.SIGKILL
CASES = ("kernel", "launches", "graph")

SOURCE = r"""
__device__ __forceinline__ unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Every thread counts in its own word until `ns` are over.
extern "C" __global__ void count(volatile unsigned long long* words, unsigned long long ns) {
  const unsigned long long end = now() + ns;
  volatile unsigned long long* mine = words + (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
  unsigned long long value = *mine;
  do {
    *mine = ++value;
  } while (now() < end);
}
"""


class Gpu:
    """The board of words in device memory, by the worker's own calls."""

    def __init__(self, device: str) -> None:
        import torch

        from worker.device_memory import DeviceMemory
        from worker.gpu import find_gpu, memory_of

        self._torch = torch
        self._gpu = find_gpu(device)
        self._driver = memory_of(self._gpu.device)
        self._memory = DeviceMemory(self._driver)
        granularity = self._driver.granularity
        self._chunks = [-(-NUM_WORDS * 8 // granularity) * granularity]

    def create(self) -> list[int]:
        return self._memory.create(self._chunks)

    def map(self, fds: list[int]) -> None:
        from worker.device_memory import DeviceArena

        self._arena = DeviceArena(self._driver, fds, self._chunks, NUM_WORDS * 8)
        self._words = self._arena.tensor().view(self._torch.int64)
        self._torch.cuda.synchronize()

    def read(self) -> npt.NDArray[np.int64]:
        copied: npt.NDArray[np.int64] = self._words.cpu().numpy()
        return copied

    def prepare(self) -> None:
        """Of the writer: what takes long and needs no memory."""
        import cupy

        with cupy.cuda.Device(self._gpu.index):
            self._kernel = cupy.RawKernel(SOURCE, "count")
            self._kernel.compile()

    def writing(self, case: str) -> Callable[[], None]:
        """What writes on and on, ready to begin: everything that may fail has been done once."""
        import cupy

        cupy.cuda.Device(self._gpu.index).use()
        stream = cupy.cuda.Stream(non_blocking=True)
        words = np.uint64(self._words.data_ptr())

        def launch(ns: int) -> None:
            self._kernel((NUM_WORDS // 64,), (64,), (words, np.uint64(ns)), stream=stream)

        launch(1000)
        stream.synchronize()
        if case == "kernel":
            return lambda: _forever(lambda: launch(LONG_KERNEL_NS))
        if case == "launches":
            return lambda: _forever(lambda: launch(STEP_NS))
        with stream:
            stream.begin_capture()
            for _ in range(STEPS_IN_GRAPH):
                launch(STEP_NS)
            graph = stream.end_capture()
        return lambda: _forever(lambda: graph.launch(stream))


class Cpu:
    """The same in host memory, written to by a loop."""

    def __init__(self, device: str) -> None:
        self._device = device

    def create(self) -> list[int]:
        fd = os.memfd_create("in-flight")
        os.ftruncate(fd, NUM_WORDS * 8)
        return [fd]

    def map(self, fds: list[int]) -> None:
        self._words = np.frombuffer(mmap.mmap(fds[0], NUM_WORDS * 8), dtype=np.int64)

    def read(self) -> npt.NDArray[np.int64]:
        return self._words.copy()

    def prepare(self) -> None: ...

    def writing(self, case: str) -> Callable[[], None]:
        def add() -> None:
            np.add(self._words, 1, out=self._words)

        return lambda: _forever(add)


def _forever(do: Callable[[], object]) -> None:
    """Asks for more than is done: launches queue up until the driver makes them wait."""
    end = time.monotonic() + WRITER_S
    while time.monotonic() < end:
        do()


def board(device: str) -> Gpu | Cpu:
    return Gpu(device) if device.startswith("cuda") else Cpu(device)


def writer(device: str, case: str, fds: list[int]) -> None:
    """The process that is killed. Imports and context first; maps the memory when it is told to go."""
    mine = board(device)
    mine.prepare()
    print(json.dumps({"ready": os.getpid()}), flush=True)
    sys.stdin.readline()
    mine.map(fds)
    begin = mine.writing(case)
    print(json.dumps({"writing": True}), flush=True)
    begin()


class Writer:
    def __init__(self, device: str, case: str, fds: list[int]) -> None:
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``close``
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.gpu_in_flight", "--device", device, "--as-writer", case, *map(str, fds)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            pass_fds=fds,
            text=True,
        )
        self.pidfd = os.pidfd_open(self.process.pid)

    def answer(self, timeout_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError(f"the writer says nothing; {self.told()}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the writer ended with {self.process.wait(10)}; {self.told()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def go(self) -> None:
        assert self.process.stdin is not None
        print("go", file=self.process.stdin, flush=True)

    def is_gone(self) -> bool:
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def told(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-2000:]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(GONE_TIMEOUT_S)
        os.close(self.pidfd)
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                stream.close()


def one_death(mine: Gpu | Cpu, doomed: Writer, rng: random.Random, watch_s: float) -> dict[str, Any]:
    """Kills a writer and watches the words; times in milliseconds."""
    doomed.answer(MOVING_TIMEOUT_S)  # ready
    doomed.go()
    doomed.answer(MOVING_TIMEOUT_S)  # writing
    before = mine.read()
    deadline = time.monotonic() + MOVING_TIMEOUT_S
    while not (moving := int((mine.read() != before).sum())):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no word changes; {doomed.told()}")
    time.sleep(rng.uniform(0.02, 0.3))
    last = mine.read()
    killed = time.monotonic()
    doomed.process.send_signal(DEADLY)
    dying = differed = 0
    last_change = killed
    while not doomed.is_gone():
        if time.monotonic() - killed > GONE_TIMEOUT_S:
            raise TimeoutError("the killed process does not end")
        current = mine.read()
        dying += 1
        if not np.array_equal(current, last):
            differed, last_change, last = differed + 1, time.monotonic(), current
    gone = time.monotonic()
    first = mine.read()
    first_read = time.monotonic()
    samples = changed = 0
    while time.monotonic() - gone < watch_s:
        current = mine.read()
        samples += 1
        if not np.array_equal(current, first):
            changed += 1
        time.sleep(0.002)
    return {
        "kill_to_pidfd_ms": round((gone - killed) * 1e3, 3),
        "kill_to_last_change_seen_ms": round((last_change - killed) * 1e3, 3),
        "pidfd_to_first_sample_ms": round((first_read - gone) * 1e3, 3),
        "words_moving_before": moving,
        "samples_while_dying": dying,
        "samples_that_differed_while_dying": differed,
        "samples_after": samples,
        "samples_that_differed_after": changed,
    }


def used_mib() -> int | None:
    """Of the first GPU's memory, by the card's own word."""
    try:
        asked = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def run_case(device: str, case: str, repeats: int, watch_s: float, deadline: float, seed: int) -> dict[str, Any]:
    mine = board(device)
    fds = mine.create()
    mine.map(fds)
    rng = random.Random(f"{case} {seed}")
    writers = [Writer(device, case, fds) for _ in range(repeats)]  # they import at the same time
    deaths: list[dict[str, Any]] = []
    error = ""
    try:
        for doomed in writers:
            if time.monotonic() > deadline:
                break
            deaths.append(one_death(mine, doomed, rng, watch_s))
    except Exception:  # noqa: BLE001 - told with what was found
        error = traceback.format_exc()[-3000:]
    finally:
        for each in writers:
            each.close()
        for fd in fds:
            os.close(fd)
    times = [death["kill_to_pidfd_ms"] for death in deaths]
    seen = all(death["words_moving_before"] >= LEAST_CHANGES_SEEN for death in deaths)
    still = all(death["samples_that_differed_after"] == 0 and death["samples_after"] > 0 for death in deaths)
    return {
        "bench": "gpu_in_flight",
        "case": case,
        "passed": not error and bool(deaths) and seen and still,
        "value": round(statistics.median(times), 3) if times else None,
        "unit": "ms from SIGKILL to a readable pidfd",
        "spread": [min(times), max(times)] if times else None,
        "repeats": len(deaths),
        "asked_repeats": repeats,
        "watched_s": watch_s,
        "seed": seed,
        "deaths": deaths,
        **({"error": error} if error else {}),
    }


def facts(device: str) -> dict[str, Any]:
    versions: dict[str, Any] = {"python": platform.python_version(), "kernel": platform.release()}
    machine = platform.machine()
    if device.startswith("cuda"):
        import cupy
        import torch

        versions |= {"torch": torch.__version__, "cuda": torch.version.cuda, "cupy": cupy.__version__}
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        versions["driver"] = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        machine = torch.cuda.get_device_name(0)
    return {"machine": machine, "versions": versions, "kind": "measured", "date": time.strftime("%Y-%m-%d")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--repeats", type=int, default=10, help="deaths of each case")
    parser.add_argument("--watch-s", type=float, default=1.0, help="how long words are watched after each")
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=120.0, help="no death begins later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--as-writer", nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.as_writer:
        case, *fds = asked.as_writer
        writer(asked.device, case, [int(fd) for fd in fds])
        return 0
    if asked.device.startswith("cuda"):
        from worker.gpu import visible_gpus

        if not visible_gpus():
            print("this machine has no GPU that CUDA can use", file=sys.stderr)
            return 2
    deadline = time.monotonic() + asked.seconds
    told = facts(asked.device) | {
        "commit": asked.commit,
        "command": "python -m " + " ".join(["tests.e2e.gpu_in_flight", *sys.argv[1:]]),
    }
    before = used_mib()
    lines = []
    for case in asked.only.split(","):
        lines.append(run_case(asked.device, case, asked.repeats, asked.watch_s, deadline, asked.seed) | told)
        print(json.dumps(lines[-1]), flush=True)
    print(json.dumps({"used_mib_at_start": before, "used_mib_at_end": used_mib()}), flush=True)
    if asked.records:
        asked.records.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return int(any(not line["passed"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
