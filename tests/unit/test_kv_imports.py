"""The store starts on machines without a GPU, fast: neither torch nor a GPU library is loaded, nor by its client."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "cupy", "cuda", "ray", "transformers")


@pytest.mark.parametrize("module", ["kvstore.attachments", "kvstore.service", "kvstore.cli", "kvstore.client"])
def test_nothing_heavy_is_imported(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
