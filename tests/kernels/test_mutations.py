"""The list of mutations fits the code as it is; running them is `python -m tests.mutations`."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

mutations = pytest.importorskip("tests.mutations", reason="a mutated copy does not hold tests/mutations.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.name)
def test_every_edit_fits_and_every_named_test_exists(mutation: Any) -> None:
    for file, old, new in mutation.edits:
        assert (ROOT / file).read_text().count(old) == 1, f"{old!r} in {file}"
        assert old != new
    for test in mutation.tests:
        file, function = test.split("::")
        nodes = ast.parse((ROOT / file).read_text()).body
        assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert f"| {mutation.name} |" in mutations.DOCUMENT.read_text(), "run python -m tests.mutations --write"
