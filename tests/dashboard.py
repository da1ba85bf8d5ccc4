"""Reads the Grafana dashboard: its panels, its expressions, and which metrics and labels those name."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[1] / "helm" / "dashboards" / "tailpack.json"
GIVEN_BY_PROMETHEUS = {"instance", "job", "namespace", "pod"}

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_SELECTOR = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^}]*)\})?")
_KEYWORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


def load() -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(PATH.read_text())
    return dashboard


@dataclass(frozen=True)
class Named:
    """What one expression names. selectors: (metric, labels that its matchers name)."""

    expression: str
    selectors: tuple[tuple[str, frozenset[str]], ...]
    grouping: frozenset[str]

    @staticmethod
    def of(expression: str) -> Named:
        bare = _STRING.sub('""', expression)
        grouping = {
            label.strip() for _, labels in _GROUPING.findall(bare) for label in labels.split(",") if label.strip()
        }
        bare = re.sub(r"\[[^\]]*\]", "", _GROUPING.sub(" ", bare))
        selectors = []
        for match in _SELECTOR.finditer(bare):
            name, matchers = match[1], match[2]
            is_function = bare[match.end() :].lstrip().startswith("(") and matchers is None
            in_number = match.start() > 0 and bare[match.start() - 1] in "0123456789."  # 2e3
            if not is_function and name not in _KEYWORDS and not in_number:
                labels = frozenset(re.findall(r"([a-zA-Z_][a-zA-Z0-9_]*)\s*[=!]", matchers or ""))
                selectors.append((name, labels))
        return Named(expression, tuple(selectors), frozenset(grouping))


def expressions() -> list[Named]:
    """Of all panels, and of the variables that a person chooses from."""
    dashboard = load()
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            found.append(f"count by ({label}) ({metric})")
    return [Named.of(expression) for expression in found]
