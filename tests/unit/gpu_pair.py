"""An engine on the CPU's path and one on the GPU's, stepped side by side over the same requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from tests.unit.fake_gpu_kernels import FakeGpuKernels
from tests.unit.tiny import TINY, Harness
from worker import engine
from worker.batch import Batch
from worker.models import attention
from worker.sampler import Draw, Drawn
from worker.sequence import Sequence

TQ4: dict[str, Any] = {"kv_mode": "turboquant"}
MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    **{preset: {**TQ4, "kv_preset": preset} for preset in ("tq4", "tq4v3", "tq3", "tq3v2")},
    "fp8": {"kv_mode": "fp8"},
    "dense edges": {**TQ4, "dense_layers": (1, 0)},
}
SHAPE = {"head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3, "num_hidden_layers": 2}  # SmolLM2's heads
T = TypeVar("T")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY["vocab_size"]) for _ in range(length)]


def running(harness: Harness, request_id: str) -> Sequence:
    return next(s for s in harness.engine._running if s.request.request_id == request_id)


def attend_rows(q: Any, k: Any, v: Any, k_view: Any, v_view: Any, kv: Any, batch: Batch) -> torch.Tensor:
    """``attention.attend`` without its flash path: dense groups are read as all others are, in 32 bits."""
    out: torch.Tensor = q.new_zeros(q.shape)
    for span, place in zip(batch.spans, batch.groups[k_view.group.name].places, strict=True):
        rows = slice(span.first_row, span.first_row + span.num_rows)
        out[rows] = attention._attend_rows(q[rows], k[rows], v[rows], k_view, v_view, kv, span, place)
    return out


class Pair:
    """Two engines that are stepped side by side, on the CPU's path and on the GPU's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kernels: FakeGpuKernels, folder: Path, **settings: Any) -> None:
        kernels.serving = False
        settings = {"dtype": "float16", **settings}
        self.cpu, self.gpu = (Harness.load(folder, device=device, **settings) for device in ("cpu:0", "cuda:0"))
        kernels.serving = True
        self._logits: dict[Harness, list[torch.Tensor]] = {self.cpu: [], self.gpu: []}
        self._stepped = self.cpu
        monkeypatch.setattr(engine, "sample", self._sample)

    def _sample(self, logits: torch.Tensor, draws: list[Draw]) -> list[Drawn]:
        self._logits[self._stepped].append(logits.clone())
        scripted = [7 * len(draw.token_ids) ** 2 + 13 * draw.token_ids[0] for draw in draws]
        return [Drawn(token % TINY["vocab_size"], None) for token in scripted]

    def both(self, do: Callable[[Harness], T]) -> tuple[T, T]:
        return self._one(self.cpu, do), self._one(self.gpu, do)

    def _one(self, harness: Harness, do: Callable[[Harness], T]) -> T:
        self._stepped = harness
        with torch.inference_mode():
            return do(harness)

    def run(self, *requests: Any, limit: int = 5000) -> None:
        tokens = self.both(lambda harness: harness.run(*requests, limit=limit))
        assert tokens[0] == tokens[1]

    def check(self, tolerance: float = 0.0) -> None:
        """Compares all logits so far, by ||difference|| / ||logits|| of a step, and what is counted; verifies pages.

        Both ways come to the same bits, but where a CPU reads dense pages by its flash path, in 16 bits.
        """
        steps = list(zip(self._logits[self.cpu], self._logits[self.gpu], strict=True))
        assert steps and all(a.shape == b.shape for a, b in steps)
        errors = torch.stack([((a - b).norm() / a.norm()) for a, b in steps if len(a)])
        assert errors.isfinite().all(), f"step {int((~errors.isfinite()).nonzero()[0])}"
        print(f"logits differ by up to {float(errors.max()):.1e}")
        too_much = errors > tolerance
        first = int(too_much.int().argmax())
        assert not too_much.any(), f"{float(errors.max())}, from step {first} of {len(errors)} on"
        loads = [harness.engine.load() for harness in (self.cpu, self.gpu)]
        for name in ("pages_packed", "pages_relinked", "rows_dequantised_rollback", "rows_dequantised_resume"):
            assert getattr(loads[0], name) == getattr(loads[1], name), name
        assert self.cpu.attachment.verify() == self.gpu.attachment.verify() == []
