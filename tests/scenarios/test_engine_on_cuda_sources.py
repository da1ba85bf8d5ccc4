"""The engine over the CUDA sources themselves, which the emulator runs on a CPU: decode, seal and restore as on a GPU.

Beside it goes the CPU's way, in PyTorch. What the two differ by is rounding: a wrong row, scale or mask is far more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from kernels.cells import Cell
from kernels.decode_args import DecodeArgs
from kernels.pages_cuda import PageGroup
from tests.kernels.emulator import Emulator, needs_compiler
from tests.unit.fake_gpu_kernels import FakeGpuKernels
from tests.unit.gpu_pair import MODES, SHAPE, Pair, attend_rows, prompt, running
from tests.unit.tiny import Harness, request, write_model

pytestmark = [needs_compiler, pytest.mark.slow]  # g++ takes some seconds for each cell

PAGE_CTAS, PAGE_WARPS = 2, 3  # any grid does
TOLERANCE = 0.01  # of float16: roundings to the dtype, and the codes of rows that come out rounded otherwise


class EmulatedKernels(FakeGpuKernels):
    """Runs what is launched, with the arguments and the grid that it is launched with."""

    def run_decode(self, cell: Cell, phase: str, ctas: int, arguments: DecodeArgs) -> None:
        Emulator.of(cell).call(phase, ctas, arguments)

    def run_pages(self, group: PageGroup, kernel: int, pages: Tensor, results: tuple[Tensor, ...]) -> None:
        warps = (PAGE_WARPS,) if group.cell.source == "seal.cu" else ()
        tables = (pages, group.regions, group.units, len(pages), len(group.units), group.arena, group.arena.stride(0))
        Emulator.of(group.cell).call(("seal", "restore")[kernel], PAGE_CTAS, *warps, *tables, *results)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> EmulatedKernels:
    return EmulatedKernels(monkeypatch)


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, kernels: EmulatedKernels, tmp_path: Path) -> Callable[..., Pair]:
    def make(model: dict[str, Any] | None = None, **settings: Any) -> Pair:
        folder = write_model(tmp_path / "model", seed=3, **{**SHAPE, **(model or {})})
        return Pair(monkeypatch, kernels, folder, **settings)

    return make


@pytest.mark.parametrize("mode", MODES)
def test_prompts_in_chunks_and_some_steps(pair: Callable[..., Pair], kernels: EmulatedKernels, mode: str) -> None:
    two = pair(prefill_chunk=128, **MODES[mode])
    two.cpu.engine._runner._attend = attend_rows
    two.run(*(request(f"r{i}", prompt(i, length), 12) for i, length in enumerate((400, 262, 3))))
    two.check(TOLERANCE)
    if mode != "dense":
        assert kernels.num_launches("seal") > 0 and kernels.num_launches("restore") > 0


@pytest.mark.parametrize("mode", ["window", "turboquant", "fp8"])
def test_a_window(pair: Callable[..., Pair], mode: str) -> None:
    """Of 300 tokens where packed rows are read: behind it pages are freed, and the page tables say -1."""
    window = 100 if mode == "window" else 300
    two = pair({"model_type": "mistral", "sliding_window": window}, kv_mode=mode, prefill_chunk=256)
    two.run(*(request(f"r{i}", prompt(i, length), 12) for i, length in enumerate((590, 90))))
    two.check(TOLERANCE)


@pytest.mark.parametrize("mode", ["tq3", "fp8"])
def test_a_rollback_refills_tails_and_completes_a_page_that_it_cut(pair: Callable[..., Pair], mode: str) -> None:
    two = pair({"num_hidden_layers": 1}, prefill_chunk=512, **MODES[mode])
    two.cpu.engine._emit = two.gpu.engine._emit = lambda result: None  # offsets go back with a rollback
    ids = prompt(1, 405)

    def roll_back(harness: Harness) -> bool:
        harness.engine.submit(request("r", ids[:1], 999, emitted=ids[1:]))
        harness.step(2)
        sequence = running(harness, "r")
        assert sequence.bases["full"] == 256
        exact = harness.engine.truncate(sequence, 250, next_token=7).exact
        harness.step(152)
        assert sequence.bases["full"] == 256, "its second page was cut at 250, and completed"
        return exact

    assert two.both(roll_back) == (False, False)
    two.check(TOLERANCE)
