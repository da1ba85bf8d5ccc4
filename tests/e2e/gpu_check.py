"""The demo's program and a whole cluster on a machine with a GPU: `python -m tests.e2e.gpu_check --records FILE`.

Needs the demo model, as `make demo` installs it. Serves SmolLM2 with KV mode turboquant through the device arena and
the GPU kernels, reads the seal counters, compares the text with mode dense, kills the worker with SIGKILL, and sees the
next one go on in the same memory. Prints one JSON line a finding; exit status 1 when one of them is not as it must be.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from router.client import Client, as_chat
from tests.e2e.cluster import ClusterProcess, run_cli, running

PROMPT = "Tell a long story about a lighthouse keeper who finds a map. Give every chapter a title."
MAX_TOKENS = 500  # the first page is sealed when a sequence has 272 tokens
COMMON = ["--workers", "1", "--device", "cuda", "--kv-bytes", "1G", "--max-sequence-tokens", "4096"]
RESTART_TIMEOUT_S = 90.0


class Findings:
    """What was found, line by line; ``failed`` counts what is not as it must be."""

    def __init__(self) -> None:
        self.failed = 0
        self.lines: list[dict[str, Any]] = []

    def say(self, case: str, passed: bool, **found: Any) -> None:
        self.failed += not passed
        self.lines.append({"bench": "gpu_cluster", "case": case, "passed": passed, **found})
        print(json.dumps(self.lines[-1]), flush=True)


async def generate(router: str) -> tuple[str, list[int]]:
    """Greedy text and token ids of the one prompt."""
    text, token_ids = "", []
    async with Client(router) as client:
        async for chunk in client.generate(as_chat(PROMPT), max_tokens=MAX_TOKENS):
            text += chunk.text
            token_ids += chunk.token_ids
    return text, token_ids


def demo(findings: Findings, folder: Path) -> None:
    prompts = folder / "prompts.txt"
    prompts.write_text(
        "\n".join([PROMPT, "Explain how a printing press works, step by step.", "What is the capital of France?"])
    )
    options = ["--workers", "1", "--kv-mode", "turboquant", "--prompts", str(prompts), "--max-tokens", str(MAX_TOKENS)]
    run = run_cli("demo", *options, timeout_s=240)
    out = run.stdout.decode(errors="replace")
    passed = run.returncode == 0 and "Paris" in out
    findings.say("demo-turboquant", passed, status=run.returncode, out=out[-3000:], err=run.stderr.decode()[-2000:])


def worker_process(cluster: ClusterProcess) -> psutil.Process:
    """The process that serves the one worker's address."""
    port = int(cluster.workers[0].rsplit(":", 1)[1])
    for process in cluster.descendants():
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return process
    raise LookupError(f"nobody listens on port {port}")


def serve(findings: Findings, folder: Path) -> None:
    texts: dict[str, list[int]] = {}
    for mode in ("dense", "turboquant"):
        place = folder / mode
        place.mkdir()
        with running(place, "smollm2", [*COMMON, "--kv-mode", mode]) as cluster:
            began = time.monotonic()
            text, texts[mode] = asyncio.run(generate(cluster.router))
            took = time.monotonic() - began
            (device,) = cluster.kv_stats().devices
            sealed = {group.group: group.pages_sealed_ever for group in device.groups}
            enough = len(texts[mode]) > 300
            findings.say(
                f"serve-{mode}",
                enough and device.device.startswith("cuda") and (mode == "dense" or min(sealed.values()) > 0),
                device=device.device,
                tokens=len(texts[mode]),
                tokens_per_s=round(len(texts[mode]) / took, 1),
                sealed=sealed,
                text=text[:600],
            )
            memory = run_cli("memory", "--kv-socket", str(cluster.kv_socket))
            findings.say(f"memory-{mode}", memory.returncode == 0, out=memory.stdout.decode()[-1500:])
            if mode == "turboquant":
                killed(findings, cluster, texts[mode])
    same = next(
        (i for i, (a, b) in enumerate(zip(*texts.values(), strict=False)) if a != b), min(map(len, texts.values()))
    )
    findings.say("dense-and-packed-agree", same >= 100, tokens_alike=same)


def killed(findings: Findings, cluster: ClusterProcess, before: list[int]) -> None:
    epoch = cluster.kv_stats().devices[0].epoch
    process = worker_process(cluster)
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + RESTART_TIMEOUT_S
    again: list[int] = []
    while time.monotonic() < deadline and not again:
        time.sleep(1)
        try:
            _, again = asyncio.run(generate(cluster.router))
        except Exception as error:  # noqa: BLE001 -- until the next worker is there, every call is refused by name
            print(json.dumps({"waiting": str(error)[:200]}), flush=True)
    (device,) = cluster.kv_stats().devices
    kept = "memory given up" not in cluster.log
    same = next((i for i, (a, b) in enumerate(zip(before, again, strict=False)) if a != b), len(again))
    passed = device.epoch > epoch and kept and len(again) > 300
    findings.say("killed-worker", passed, epochs=[epoch, device.epoch], memory_kept=kept, tokens=len(again), alike=same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, help="write the findings here too, a JSON object a line")
    parser.add_argument("--commit", default="")
    asked = parser.parse_args()
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        for step in (demo, serve):
            try:
                step(findings, Path(folder))
            except Exception as error:  # noqa: BLE001 -- reported like any other finding
                findings.say(step.__name__, False, error=f"{type(error).__name__}: {error}"[-3000:])
    if asked.records:
        lines = [
            json.dumps({**line, "commit": asked.commit, "date": time.strftime("%Y-%m-%d")}) for line in findings.lines
        ]
        asked.records.write_text("\n".join(lines) + "\n")
    sys.exit(findings.failed > 0)


if __name__ == "__main__":
    main()
