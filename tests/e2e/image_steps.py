"""Runs the Dockerfile's RUN steps without a container engine: in folders of their own, on this machine's Python.

    python -m tests.e2e.image_steps --target cpu --work /tmp/image [--skip TEXT]...

It cannot show the base image, users (steps that need root are told as not run), layers and the final COPY. It prints
one JSON line a step, and ends with the first that fails. Paths of the image are mapped into --work.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.unit.test_image import ROOT, lineage, stages

NEEDS_ROOT = ("groupadd", "useradd")
MAPPED = ("/opt/tailpack", "/wheels", "/src", "/models", "/tmp/constraints.txt")


def stages_of(target: str) -> list[str]:
    """The stages that a target copies from or is made of, in the Dockerfile's order."""
    all_stages = stages((ROOT / "Dockerfile").read_text())
    wanted, queue = set(), [target]
    while queue:
        name = queue.pop()
        if name in all_stages and name not in wanted:
            wanted.add(name)
            for keyword, rest in all_stages[name]:
                if keyword == "FROM":
                    queue.append(rest.split()[0])
                if keyword == "COPY" and rest.startswith("--from="):
                    queue.append(rest.split()[0].removeprefix("--from="))
    return [name for name in all_stages if name in wanted]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="cpu", choices=("cpu", "cuda13"))
    parser.add_argument("--work", type=Path, required=True, help="An empty or new folder.")
    parser.add_argument("--skip", action="append", default=[], help="Leave out steps that hold this text.")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="Instead of an ARG's.")
    options = parser.parse_args()
    given = dict(each.split("=", 1) for each in options.build_arg)
    work = options.work.absolute()
    source = work / "src"
    source.mkdir(parents=True)
    all_stages = stages((ROOT / "Dockerfile").read_text())
    for name in stages_of(options.target):
        variables = {
            rest.split("=", 1)[0]: rest.split("=", 1)[1].strip('"')
            for keyword, rest in all_stages[name]
            if keyword == "ARG" and "=" in rest
        }
        variables |= {key: value for key, value in given.items() if key in variables}
        for keyword, rest in lineage(all_stages, name)[-len(all_stages[name]) + 1 :]:
            if keyword == "COPY" and not rest.startswith("--from"):
                *files, to = rest.split()
                target = source / to if not to.startswith("/") else mapped_path(to, work)
                for file in files:
                    copy(ROOT / file, target / file if to == "./" else target)
            if keyword == "RUN" and not step(name, rest, work, variables, options.skip):
                return 1
    return 0


def copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*_pb2*.py*", "*.pyc")
        shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
    else:
        shutil.copy(source, target)


def mapped_path(path: str, work: Path) -> Path:
    return work / path.strip("/").replace("/", "-") if path in MAPPED and path != "/src" else work / "src"


def step(stage: str, text: str, work: Path, variables: dict[str, str], skip: list[str]) -> bool:
    why = next((what for what in (*NEEDS_ROOT, *skip) if what in text), None)
    if why:
        print(json.dumps({"stage": stage, "ran": False, "why": f"has {why}", "step": text[:100]}), flush=True)
        return True
    for path in MAPPED:
        text = text.replace(path, str(mapped_path(path, work)))
    environment = {
        "PATH": f"{work / 'opt-tailpack' / 'bin'}:{Path(sys.executable).resolve().parent}:/usr/bin:/bin",
        "HOME": str(work),
        **{name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))},
        **variables,
    }
    began = time.monotonic()
    done = subprocess.run(
        ["/bin/sh", "-c", text],
        cwd=work / "src" if stage == "wheel" else work,
        env=environment,
        capture_output=True,
        text=True,
    )
    told = {"stage": stage, "ran": True, "status": done.returncode, "seconds": round(time.monotonic() - began, 1)}
    print(json.dumps({**told, "step": " ".join(text.split())[:160]}), flush=True)
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], sep="\n", file=sys.stderr)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
