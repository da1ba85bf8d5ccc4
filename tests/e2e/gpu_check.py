"""The demo's program and a whole cluster on a machine with a GPU: `python -m tests.e2e.gpu_check --records FILE`.

Needs the demo model, as `make demo` installs it. Serves SmolLM2 with KV mode turboquant through the device arena and
the GPU kernels, reads the seal counters, kills the worker with SIGKILL and sees the next one go on in the same memory,
and compares log-probabilities with those of float32 on a CPU in the same KV mode. Prints one JSON line a finding; exit
status 1 when one of them is not as it must be. With `--device cpu` it does the same on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from protos import kvstore_pb2
from protos.errors import TailpackError
from router.client import AsyncTailpack, as_chat
from tests.e2e.cluster import ClusterProcess, run_cli, running

PROMPT = "Tell a long story about a lighthouse keeper who finds a map. Give every chapter a title."
SEALS_FROM = 272  # tokens of a sequence, when its first page is sealed
CUTS = (100, 700, 1400)  # tokens of the prompts whose continuations are compared; from 512 on packed rows are read
NUM_COMPARED = 4  # tokens of each: the first comes from prefill, the others from decode
MOST_APART = {"dense": 0.15, "turboquant": 0.5}  # nats, of a likely token's log-probability from float32 on a CPU
RESTART_TIMEOUT_S = 90.0


@dataclass
class Check:
    """What was asked for, and what was found, line by line; ``failed`` counts what is not as it must be."""

    device: str
    preset: str
    max_tokens: int
    failed: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def say(self, case: str, passed: bool, **found: Any) -> None:
        self.failed += not passed
        self.lines.append({"bench": "gpu_cluster", "case": case, "passed": passed, **found})
        print(json.dumps(self.lines[-1]), flush=True)

    def mode(self, name: str) -> list[str]:
        """Options of KV mode ``name``."""
        return ["--device", self.device, "--kv-mode", name, *(["--kv-preset", self.preset] * (name == "turboquant"))]


async def generate(router: str, max_tokens: int) -> tuple[str, list[int]]:
    """Greedy text and token ids of the one prompt."""
    text, token_ids = "", list[int]()
    async with AsyncTailpack(router) as client:
        async for chunk in client.generate(as_chat(PROMPT), max_tokens=max_tokens):
            text += chunk.text
            token_ids += chunk.token_ids
    return text, token_ids


Positions = list[list[dict[int, float]]]
"""Of each prompt, of each token behind it: log-probabilities of the likeliest tokens, the chosen one first."""


async def likeliest(router: str, token_ids: list[int]) -> Positions:
    """Behind prompts of CUTS tokens, made of ``token_ids`` again and again. Greedy, nothing reused."""
    found: Positions = []
    async with AsyncTailpack(router) as client:
        for cut in CUTS:
            prompt = (token_ids * (1 + cut // len(token_ids)))[:cut]
            positions: list[dict[int, float]] = []
            async for chunk in client.generate(
                prompt, max_tokens=NUM_COMPARED, logprobs=5, ignore_eos=True, prefix_reuse="none"
            ):
                positions += [
                    {token.token_id: token.logprob for token in (each.chosen, *each.top)} for each in chunk.logprobs
                ]
            found.append(positions)
    return found


def apart(one: Positions, two: Positions) -> tuple[int, float]:
    """(positions compared, largest difference of a log-probability that both name). Behind a first difference in the
    chosen token the continuations are of different texts, and not compared."""
    count, most = 0, 0.0
    for a, b in zip(one, two, strict=True):
        for left, right in zip(a, b, strict=True):
            count += 1
            most = max(most, *(abs(left[token] - right[token]) for token in left.keys() & right.keys()), 0.0)
            if next(iter(left)) != next(iter(right)):
                break
    return count, most


def demo(check: Check, folder: Path) -> None:
    prompts = folder / "prompts.txt"
    prompts.write_text(
        "\n".join([PROMPT, "Explain how a printing press works, step by step.", "What is the capital of France?"])
    )
    options = ["--workers", "1", *check.mode("turboquant"), "--prompts", str(prompts)]
    run = run_cli("demo", *options, "--max-tokens", str(check.max_tokens), timeout_s=240)
    out = run.stdout.decode(errors="replace")
    packed = re.search(r"KV: ([1-9]\d*) of \d+ pages", out)  # only what is packed takes pages in this mode
    passed = run.returncode == 0 and "Paris" in out and packed is not None
    check.say("demo-turboquant", passed, status=run.returncode, out=out[-3000:], err=run.stderr.decode()[-2000:])


def serve(check: Check, folder: Path) -> None:
    texts: dict[str, list[int]] = {}
    positions: dict[str, Positions] = {}
    for mode in ("dense", "turboquant"):
        place = folder / mode
        place.mkdir()
        options = ["--workers", "1", *check.mode(mode), "--kv-bytes", "1G", "--max-sequence-tokens", "4096"]
        with running(place, "smollm2", options) as cluster:
            began = time.monotonic()
            text, texts[mode] = asyncio.run(generate(cluster.router, check.max_tokens))
            took = time.monotonic() - began
            device = the_device(cluster)
            sealed = sealed_ever(device)
            check.say(
                f"serve-{mode}",
                len(texts[mode]) >= SEALS_FROM and device.device.startswith(check.device) and sealed > 0,
                device=device.device,
                memory=device.memory,
                tokens=len(texts[mode]),
                tokens_per_s=round(len(texts[mode]) / took, 1),
                sealed=sealed,
                text=text[:600],
            )
            positions[mode] = asyncio.run(likeliest(cluster.router, texts["dense"]))
            memory = run_cli("memory", "--router", cluster.router)
            out = memory.stdout.decode()
            check.say(f"memory-{mode}", memory.returncode == 0 and "weights" in out, out=out[-1500:])
            if mode == "turboquant":
                killed_in_a_stream(check, cluster, texts[mode])
                killed(check, cluster, texts[mode])
    for mode, found in positions.items():
        place = folder / f"{mode}-reference"
        place.mkdir()
        options = ["--workers", "1", "--device", "cpu", "--kv-mode", mode, "--kv-bytes", "1G"]
        options += ["--kv-preset", check.preset] * (mode == "turboquant")
        with running(place, "smollm2", [*options, "--max-sequence-tokens", "4096"]) as cluster:
            reference = asyncio.run(likeliest(cluster.router, texts["dense"]))
        count, most = apart(found, reference)
        check.say(
            f"like-float32-on-a-cpu-{mode}",
            count >= 2 * len(CUTS) and most <= MOST_APART[mode],
            positions=count,
            most_nats_apart=round(most, 4),
            limit=MOST_APART[mode],
        )


async def generate_over(router: str, max_tokens: int, at: int, blow: Callable[[], None]) -> tuple[list[int], float]:
    """Token ids of the one prompt, with a blow when so many are there; and the longest wait for a token, in seconds."""
    token_ids: list[int] = []
    longest, last, struck = 0.0, time.monotonic(), False
    async with AsyncTailpack(router) as client:
        async for chunk in client.generate(as_chat(PROMPT), max_tokens=max_tokens):
            longest, last = max(longest, time.monotonic() - last) if token_ids else 0.0, time.monotonic()
            token_ids += chunk.token_ids
            if not struck and len(token_ids) >= at:
                struck = True
                blow()
    return token_ids, longest


def killed_in_a_stream(check: Check, cluster: ClusterProcess, before: list[int]) -> None:
    """SIGKILL for the worker in the middle of an answer, which goes on where it was in what the next worker adopted."""
    was, process = the_device(cluster), worker_process(cluster)
    try:
        made = generate_over(cluster.router, check.max_tokens, len(before) // 2, process.kill)
        token_ids, longest = asyncio.run(made)
        error = None
    except TailpackError as failure:
        token_ids, longest, error = [], 0.0, str(failure)
    now = the_device(cluster)
    check.say(
        "killed-in-a-stream",
        error is None and len(token_ids) == len(before) and now.epoch > was.epoch,
        error=error,
        tokens=len(token_ids),
        struck_at=len(before) // 2,
        tokens_alike=num_alike(before, token_ids),
        longest_wait_s=round(longest, 2),
        epochs=[was.epoch, now.epoch],
    )


def killed(check: Check, cluster: ClusterProcess, before: list[int]) -> None:
    """SIGKILL for the worker. The next one has the memory of the first: its pages are there, and counted on."""
    was = the_device(cluster)
    process = worker_process(cluster)
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    again: list[int] = []
    refusals: set[str] = set()
    while time.monotonic() < deadline and not again:
        time.sleep(1)
        try:
            _, again = asyncio.run(generate(cluster.router, check.max_tokens))
        except TailpackError as error:  # until the next worker is there, every call is refused by name
            refusals.add(error.reason)
    now = the_device(cluster)
    given_up = "memory given up" in (cluster.folder / "logs" / "kvstore.log").read_text()
    kept = not given_up and sealed_ever(now) > sealed_ever(was)
    check.say(
        "killed-worker",
        now.epoch > was.epoch and kept and len(again) >= SEALS_FROM,
        epochs=[was.epoch, now.epoch],
        sealed=[sealed_ever(was), sealed_ever(now)],
        memory_kept=kept,
        refusals=sorted(refusals),
        tokens=len(again),
        tokens_alike=num_alike(before, again),
    )


def the_device(cluster: ClusterProcess) -> kvstore_pb2.DeviceStats:
    (device,) = cluster.kv_stats().devices
    return device


def sealed_ever(device: kvstore_pb2.DeviceStats) -> int:
    return sum(group.pages_sealed_ever for group in device.groups)


def num_alike(one: list[int], two: list[int]) -> int:
    """How many tokens two answers begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def worker_process(cluster: ClusterProcess) -> psutil.Process:
    """The process that serves the one worker's address."""
    port = int(cluster.workers[0].rsplit(":", 1)[1])
    for process in cluster.descendants():
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return process
    raise LookupError(f"nobody listens on port {port}")


def main() -> None:
    steps: dict[str, Callable[[Check, Path], None]] = {"demo": demo, "serve": serve}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--preset", default="tq4", help="of KV mode turboquant")
    parser.add_argument("--max-tokens", type=int, default=500, help="of an answer; more than when pages are sealed")
    parser.add_argument("--only", choices=list(steps), help="this part alone")
    parser.add_argument("--records", type=Path, help="write the findings here too, a JSON object a line")
    parser.add_argument("--commit", default="")
    asked = parser.parse_args()
    check = Check(asked.device, asked.preset, asked.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        for name, step in steps.items():
            if asked.only in (None, name):
                try:
                    step(check, Path(folder))
                except Exception as error:  # noqa: BLE001 -- reported like any other finding
                    check.say(name, False, error=f"{type(error).__name__}: {error}"[-3000:])
    if asked.records:
        lines = [
            json.dumps({**line, "commit": asked.commit, "date": time.strftime("%Y-%m-%d")}) for line in check.lines
        ]
        asked.records.write_text("\n".join(lines) + "\n")
    sys.exit(check.failed > 0)


if __name__ == "__main__":
    main()
