"""Processes of an older commit beside this one's: every mix of kvstore, worker and router serves, or refuses by name.

    python -m tests.e2e.side_by_side --old COMMIT

Unpacks COMMIT with git, generates its gRPC code, and runs each of the eight mixes on a tiny model. One JSON line a mix;
exit status 1 where a mix does neither.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.e2e.cluster import write_tiny_model

ROOT = Path(__file__).parents[2]
START_S = 120.0
PROMPT = "The sky is"


def unpack(commit: str, folder: Path) -> Path:
    """The tree of a commit, with its generated code."""
    folder.mkdir()
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "setup.py", "-q", "build_protos", "--inplace"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, env={**os.environ, "PATH": path})
    return folder


class Refused(Exception):
    """A process ended before it was ready; the reason that it named, or what it said."""


@contextmanager
def process(tree: Path, *arguments: str) -> Iterator[dict[str, Any]]:
    """``tailpack ARGUMENTS`` of a tree; yields what it says when it is ready."""
    command = [sys.executable, "-m", "protos.cli", *arguments]
    with tempfile.TemporaryFile("w+") as log:
        started = subprocess.Popen(command, cwd=tree, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert started.stdout is not None
            line = started.stdout.readline()
            if not line:
                started.wait(START_S)
                log.seek(0)
                said = log.read()
                reasons = re.findall(r"\[([A-Z_]+)\]", said)
                raise Refused(reasons[-1] if reasons else said[-400:])
            yield json.loads(line)
        finally:
            started.terminate()
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()
            if started.stdout is not None:
                started.stdout.close()


def outcome(trees: dict[str, Path], model: Path) -> dict[str, Any]:
    """What becomes of a request. ``trees``: by kvstore, worker, router."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="s"))
        try:
            store = stack.enter_context(process(trees["kvstore"], "kvstore", "serve", "--socket-dir", folder))
            socket = str(store["socket"]).removeprefix("unix:")
            told = f"--model {model} --kv-socket {socket} --arena-bytes 8M --threads 1 --deterministic"
            worker = stack.enter_context(process(trees["worker"], "worker", "serve", *told.split()))
            told = f"--listen 127.0.0.1:0 --worker {worker['address']} --model-dir {model}"
            if '"--http"' in (trees["router"] / "router" / "cli.py").read_text():  # older ones have no such door
                told += " --http none"
            router = stack.enter_context(process(trees["router"], "router", "serve", *told.split()))
        except Refused as refused:
            return {"refused": str(refused)}
        command = [sys.executable, "-m", "protos.cli", "generate", "--router", router["address"], "--raw", PROMPT]
        command += ["--max-tokens", "32", "--ignore-eos", "--resumable"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
        if done.returncode == 0:
            return {"served": done.stdout}
        reasons = re.findall(r"\[([A-Z_]+)\]", done.stderr)
        return {"refused": reasons[-1]} if reasons else {"failed": done.stderr[-400:]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--old", required=True, metavar="COMMIT")
    options = parser.parse_args(arguments)
    wrong, texts = 0, set[str]()
    commits = [
        subprocess.run(["git", "rev-parse", "--short", each], cwd=ROOT, check=True, capture_output=True, text=True)
        for each in (options.old, "HEAD")
    ]
    old, new = (done.stdout.strip() for done in commits)
    run = {
        "bench": "side_by_side",
        "kind": "measured",
        "old": old,
        "commit": new,
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": f"python -m tests.e2e.side_by_side --old {old}",
    }
    with tempfile.TemporaryDirectory(prefix="side") as made:
        folder = Path(made)
        model = write_tiny_model(folder / "tiny")
        trees = {"old": unpack(options.old, folder / "old"), "new": ROOT}
        for mix in itertools.product(("new", "old"), repeat=3):
            parts = dict(zip(("kvstore", "worker", "router"), mix, strict=True))
            began = time.monotonic()
            what = outcome({part: trees[age] for part, age in parts.items()}, model)
            texts |= {what["served"]} if "served" in what else set()
            named = "served" in what or re.fullmatch(r"[A-Z_]+", what.get("refused", "")) is not None
            wrong += not named
            told = {"served": True} if "served" in what else what
            case = "-".join(f"{part}_{age}" for part, age in parts.items())
            seconds = round(time.monotonic() - began, 1)
            print(json.dumps({"case": case, **told, "seconds": seconds, **run}), flush=True)
    if len(texts) > 1:
        print("the mixes say different things", file=sys.stderr)
    return 1 if wrong or len(texts) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
