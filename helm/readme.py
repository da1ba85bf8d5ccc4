"""Writes README.md of this chart from the comments of values.yaml: ``python helm/readme.py``.

A comment that begins with ``# --`` describes the key below it; it may go on in further comment lines.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import yaml

FOLDER = Path(__file__).parent

HEAD = """\
# The Tailpack chart

<!-- Made by `python helm/readme.py` from values.yaml. -->

Routers (a Deployment), a Ray head, and groups of worker pods: in each a kvstore as a native sidecar, Ray, and a worker
for each GPU. It needs Kubernetes 1.30 or later and the KubeRay operator (1.6 or later). How to get from nothing to a
first token: [DEPLOY.md](DEPLOY.md). Values to start from: [examples/](examples).

"""


class Value(NamedTuple):
    key: str
    default: Any
    text: str


def values(text: str) -> list[Value]:
    """All described keys of a values.yaml, in its order.

    Raises:
        ValueError: a key has no description, and none below it has one either.
    """
    defaults = yaml.safe_load(text)
    found: list[Value] = []
    path: list[tuple[int, str]] = []
    said: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        if stripped.startswith("# -- "):
            said = [stripped.removeprefix("# -- ")]
        elif stripped.startswith("#") and said:
            said.append(stripped.removeprefix("#").strip())
        elif not stripped or stripped.startswith(("#", "- ")):
            said = [] if not stripped else said
        else:
            name, colon, rest = stripped.partition(":")
            if not colon or (path and path[-1][1] == "workerGroups" and indent > path[-1][0]):
                continue
            while path and path[-1][0] >= indent:
                path.pop()
            path.append((indent, name))
            key = ".".join(part for _, part in path)
            if said:
                default = defaults
                for _, part in path:
                    default = default[part]
                found.append(Value(key, default, " ".join(said)))
            elif rest.strip() and not any(key.startswith(f"{described.key}.") for described in found):
                raise ValueError(f"{key} has no description: a line `# -- ...` above it")
            said = []
    return found


def readme(text: str) -> str:
    lines = ["| value | default | what it is |", "|---|---|---|"]
    for value in values(text):
        described = value.text.replace("|", "\\|")
        lines.append(f"| `{value.key}` | `{json.dumps(value.default)}` | {described} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(readme((FOLDER / "values.yaml").read_text()))
