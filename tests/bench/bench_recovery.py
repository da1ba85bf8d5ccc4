"""From SIGKILL of a worker to the next token of its stream: `python -m tests.bench.bench_recovery --kills 10`.

A whole cluster of one worker (`tailpack up`) on SmolLM2, deterministic. In each round a stream runs, its worker gets
SIGKILL, and the next token that the caller gets from the worker's next life ends the time. Each round's text is
compared with that of a stream that nothing befell. What the time is made of is read off the processes' own logs:

    detection   the router says that its worker is lost
    process     behind it, until a process exists that becomes the worker; 0 where one stood by
    start       that process until its first line: Python, Ray, this actor
    imports     torch, the model families, gRPC servers; 0 where one stood by
    weights     model files and weights, or their arena
    attach      the kvstore's memory
    engine      its tables, and what was adopted
    doors       the server
    first token the router finds it, submits again, first step, and the way to the caller

All processes and this one read one clock. `--device cuda` takes a GPU, where there is one.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import torch

from protos.errors import TailpackError
from router.sync_client import Tailpack
from tests.e2e.cluster import ClusterProcess, running
from tests.scenarios.tiny_tokenizer import write_tokenizer
from tests.unit.tiny import SMOLLM2_135M, write_model
from worker.child import STARTING
from worker.cluster_config import resolve_model

RESULTS = Path(__file__).parent / "results"

PROMPT = "Tell a long story about a lighthouse keeper and the sea."
MAX_TOKENS = 48
KILL_AFTER = 16  # tokens
SETTLE_S = 180.0
PARTS = ("detection", "process", "start", "imports", "weights", "attach", "engine", "doors", "first token")


class Stream(threading.Thread):
    """One caller. ``times``: when each chunk came (clock of the day), with how many tokens there were then."""

    def __init__(self, router: str) -> None:
        super().__init__(daemon=True)
        self.times: list[tuple[float, int]] = []
        self.text = ""
        self.failure: TailpackError | None = None
        self._router = router
        self.start()

    def run(self) -> None:
        try:
            with Tailpack(self._router) as client:
                for chunk in client.generate(PROMPT, max_tokens=MAX_TOKENS, ignore_eos=True, prefix_reuse="none"):
                    count = len(chunk.token_ids) + (self.times[-1][1] if self.times else 0)
                    self.text += chunk.text
                    self.times.append((time.time(), count))
        except TailpackError as failure:
            self.failure = failure

    @property
    def num_tokens(self) -> int:
        return self.times[-1][1] if self.times else 0

    def wait_for(self, num_tokens: int) -> None:
        _until(lambda: self.num_tokens >= num_tokens or self.failure is not None, f"{num_tokens} tokens")
        if self.failure is not None:
            raise self.failure


def _until(true: Any, what: str) -> None:
    deadline = time.monotonic() + SETTLE_S
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.002)


def events(log: Path) -> list[dict[str, Any]]:
    """Records of a process's log, with ``at`` in seconds."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            at = datetime.fromisoformat(record["timestamp"].removesuffix("Z")).replace(tzinfo=UTC)
            found.append({**record, "at": at.timestamp()})
    return found


class WithoutRay:
    """kvstore, router and a worker, two processes of it with ``standby``; whichever dies is started anew at once."""

    def __init__(self, folder: Path, model: Path, device: str, options: Sequence[str], *, standby: bool) -> None:
        self.folder = folder
        (folder / "logs").mkdir()
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._commands: dict[str, list[str]] = {}
        self._over = threading.Event()
        self._start("kvstore", ["kvstore", "serve", "--socket-dir", str(folder / "kv")])
        self._ready("kvstore")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            worker = f"127.0.0.1:{probe.getsockname()[1]}"
        serve = ["worker", "serve", "--standby", "--model", str(model), "--kv-socket", f"{folder}/kv/kvstore.sock"]
        serve += ["--listen", worker, "--device", "cuda:0" if device == "cuda" else "cpu:0", "--deterministic"]
        serve += ["--arena-bytes", "256M", *options]
        self._start("worker-0", serve)
        _until(lambda: any(each["event"] == "worker ready" for each in self.events("worker-0")), "a worker")
        if standby:
            self._start("worker-0 again", serve)
        route = ["router", "serve", "--listen", "127.0.0.1:0", "--http", "none", "--model-dir", str(model)]
        self._start("router", [*route, "--worker", worker])
        self.router = str(self._ready("router")["address"])
        with Tailpack(self.router) as client:
            _until(lambda: any(each.state == "ready" for each in client.list_workers()), "a router with a worker")
        threading.Thread(target=self._watch, daemon=True).start()

    def events(self, name: str) -> list[dict[str, Any]]:
        return events(self.folder / "logs" / f"{name}.log")

    def _start(self, name: str, arguments: list[str]) -> None:
        self._commands[name] = arguments
        with (self.folder / "logs" / f"{name.split()[0]}.log").open("ab") as log:
            command = [sys.executable, "-m", "protos.cli", *arguments, "--log-json"]
            self._processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def _ready(self, name: str) -> dict[str, Any]:
        out = self._processes[name].stdout
        assert out is not None
        told: dict[str, Any] = json.loads(out.readline())
        return told

    def _watch(self) -> None:
        while not self._over.wait(0.005):
            for name, process in list(self._processes.items()):
                if process.poll() is not None:
                    self._start(name, self._commands[name])

    def __enter__(self) -> WithoutRay:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        time.sleep(0.05)
        for process in self._processes.values():
            process.kill()
            process.wait(30)


def one_kill(cluster: ClusterProcess | WithoutRay, expected: str, stand_by: bool) -> dict[str, float]:
    """Milliseconds of each part, and of all."""
    worker_log, router_log = (cluster.folder / "logs" / name for name in ("worker-0.log", "router.log"))
    pid = [each["pid"] for each in events(worker_log) if each["event"] == STARTING][-1]
    if stand_by:
        _until(lambda: _stands_by(worker_log), "a standby")
    stream = Stream(cluster.router)
    stream.wait_for(KILL_AFTER)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    stream.join(SETTLE_S)
    if stream.failure is not None:
        raise stream.failure
    assert stream.text == expected, f"another text after a kill:\n{stream.text}\n{expected}"
    lives = [each for each in events(worker_log) if each["at"] > killed]
    starting = next(each for each in lives if each["event"] == STARTING)
    ready = next(each for each in lives if each["event"] == "worker ready")
    lost = next(each for each in events(router_log) if each["at"] > killed and each.get("state") == "lost")
    # What was on its way from the killed worker comes before the next one is even connected.
    token = next(at for at, _ in stream.times if at > ready["at"] - 0.001)
    times = {"detection": lost["at"] - killed, "process": 0.0, "start": starting["at"] - lost["at"]}
    if (age := starting["process_ms"] / 1e3) < starting["at"] - lost["at"]:
        times |= {"process": starting["at"] - age - lost["at"], "start": age}
    times |= {part: ready.get(f"{part}_ms", 0.0) / 1e3 for part in ("imports", "weights", "attach", "engine", "doors")}
    return {part: round(s * 1e3, 1) for part, s in (times | {"first token": token - ready["at"]}).items()} | {
        "all": round((token - killed) * 1e3, 1)
    }


def _stands_by(log: Path) -> bool:
    """Whether the newest process that waits for its turn has not had it yet."""
    waiting = [each["pid"] for each in events(log) if each["event"] == "worker standing by"]
    return bool(waiting) and waiting[-1] not in [each["pid"] for each in events(log) if each["event"] == STARTING]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@click.command()
@click.option("--kills", default=10, show_default=True)
@click.option("--model", default="smollm2", show_default=True, help="Or `random`: of its shape, made on the spot.")
@click.option("--device", default="cpu", show_default=True)
@click.option("--standby/--no-standby", default=False, show_default=True)
@click.option("--weights-arena/--no-weights-arena", default=True, show_default=True)
@click.option("--ray/--no-ray", default=True, show_default=True, help="Without: processes started by this one.")
@click.option("--commit", default="", help="Where there is no git.")
@click.option("--records", type=click.Path(dir_okay=False, path_type=Path), help="Append the line to this file.")
@click.option("--record", is_flag=True, help="Append it under tests/bench/results.")
def main(
    kills: int,
    model: str,
    device: str,
    standby: bool,
    weights_arena: bool,
    ray: bool,
    commit: str,
    records: Path | None,
    record: bool,
) -> None:
    options = [] if weights_arena else ["--no-weights-arena"]
    flags = [*(["--standby"] if standby else []), *options]
    command = f"python -m tests.bench.bench_recovery --kills {kills} --model {model} --device {device} "
    command += " ".join([*flags, *([] if ray else ["--no-ray"])])
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="tpr") as top, ExitStack() as running_here:
        folder = Path(top)
        source = _random(folder / "m") if model == "random" else model
        cluster: ClusterProcess | WithoutRay
        if ray:
            arguments = ["--deterministic", "--device", device, "--kv-bytes", "256M", *flags]
            cluster = running_here.enter_context(running(folder, source, arguments))
        else:
            cluster = WithoutRay(folder, resolve_model(str(source))[0], device, options, standby=standby)
            running_here.enter_context(cluster)
        calm = Stream(cluster.router)
        calm.wait_for(MAX_TOKENS)
        calm.join(SETTLE_S)
        rounds = []
        for number in range(kills):
            rounds.append(one_kill(cluster, calm.text, standby))
            click.echo(f"kill {number + 1}: {rounds[-1]}", err=True)
    times = [each["all"] for each in rounds]
    case = f"{'standby' if standby else 'restart'}, weights {'mapped' if weights_arena else 'loaded'}"
    line = {
        "bench": "recovery",
        "case": f"{case}, {model}, {device}{'' if ray else ', no Ray'}",
        "value": statistics.median(times),
        "unit": "ms",
        "spread": [min(times), max(times)],
        "repeats": kills,
        "p90": percentile(times, 0.9),
        "split_ms": {part: round(statistics.median(each[part] for each in rounds), 1) for part in PARTS},
        "same_text": True,
        "floor": None,
        "floor_by": None,
        "rival": None,
        "rival_value": None,
        "rival_why": "no other server keeps a stream over its worker's death",
        **_where(command, commit, device, load),
    }
    click.echo(json.dumps(line))
    for file in [*([records] if records else []), *([_results()] if record else [])]:
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")


def _where(command: str, commit: str, device: str, load: float) -> dict[str, Any]:
    machine = f"{os.cpu_count()} cores; load average {load:.1f} before the run"
    if device == "cuda":
        machine = f"{torch.cuda.get_device_name(0)}, {machine}"
    git = ["git", "rev-parse", "HEAD"]
    return {
        "error": None,
        "kind": "measured",
        "machine": machine,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit or subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "command": command,
    }


def _random(folder: Path) -> Path:
    write_model(folder, **SMOLLM2_135M)
    write_tokenizer(folder)
    return folder


def _results() -> Path:
    return RESULTS / f"cpu{os.cpu_count()}-recovery-{datetime.now(UTC):%Y-%m-%d}.jsonl"


if __name__ == "__main__":
    main()
