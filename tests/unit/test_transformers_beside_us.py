"""Hugging Face has a distribution called `kernels`, and so named is a package of ours: the two must not be mixed up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.tiny import write_model

PROGRAM = """
import sys
import kernels                      # ours is the one that is importable
assert hasattr(kernels, "__path__") and not hasattr(kernels, "__version__")
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
out = model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
print("tokens", out[0, 3:].tolist())
"""


def test_transformers_loads_and_runs_a_model_beside_our_kernels(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], cwd=root, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "tokens [" in done.stdout
