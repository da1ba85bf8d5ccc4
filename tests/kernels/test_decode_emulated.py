"""The typed call and the kernels together: what DecodeLayer gives them leads the CUDA sources, run on a CPU lane by
lane, to the float64 answer. Cases and checks are the benchmark's own, at tiny sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cells import PHASES
from kernels.decode import Batch, DecodeLayer
from kernels.decode_workspace import DecodeLimits, new_workspace
from tests.bench import kernel_checks
from tests.bench.kernel_cases import Case
from tests.bench.kernel_inputs import Inputs, make
from tests.kernels.emulator import Emulator, needs_compiler

pytestmark = needs_compiler

CPU = torch.device("cpu")
SMS = 2
TQ4 = Case("tq4", "tq4", 64, (300, 0, 130), kv_heads=1, group=3)
CASES = {
    "packed": TQ4,
    "packed, eight vectors in two passes, strided": replace(TQ4, group=7, queries=2, strided=True, lengths=(300, 1)),
    "packed, window, no tail": replace(TQ4, window=150, kept=None, lengths=(384, 128)),
    "packed, sinks, mates": replace(TQ4, sinks="inf", lengths=(290, 5), checks=("mates",)),
    "packed, softcap": replace(TQ4, softcap=3.0, lengths=(290,)),
    "dense": replace(TQ4, mode="dense", kept=None, lengths=(150, 0, 9)),
    "dense, tail, window": replace(TQ4, mode="dense", window=160, queries=3, lengths=(300, 2)),
    "fp8": replace(TQ4, mode="fp8", dtype="f16", lengths=(290, 9)),
    "shared, many heads": replace(TQ4, dim=512, shared=True, group=17, lengths=(140, 1)),
    "shared rows": replace(TQ4, mode="tq3", dim=128, shared=True, group=5, lengths=(290, 3)),
}


class Emulated:
    """The engine of kernel_checks: a layer's three launches on the emulator."""

    def __init__(self, inputs: Inputs) -> None:
        case = inputs.case
        self.layer = DecodeLayer(
            keys=inputs.keys,
            values=inputs.values,
            tail=inputs.tail,
            q_heads=case.kv_heads * case.group,
            dtype=inputs.dtype,
            options=inputs.options,
            limits=DecodeLimits(len(case.lengths), inputs.batch.page_table.shape[1]),
            num_queries=case.queries,
            arch="sm_90a",
        )
        self.workspace = new_workspace(self.layer.workspace_bytes, CPU)
        self.workspace.fill_(0xFF)
        self.layer.use_workspace(self.workspace)
        self.emulator = Emulator.of(self.layer.cell)

    def __call__(self, q: Tensor, batch: Batch, out: Tensor, lse: Tensor) -> None:
        self.layer.set_call(q, batch, out, lse)
        for phase in PHASES:
            ctas = getattr(self.layer.launch, phase).ctas(len(q), SMS)
            self.emulator.call(phase, ctas, self.layer.arguments, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_call_gives_the_float64_answer(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = int(torch.seed() % 2**31)
    torch.manual_seed(seed)
    monkeypatch.setattr(kernel_checks, "make_engine", Emulated)
    facts: dict[str, Any] = kernel_checks.run_case(case, CPU)
    assert facts["ok"], (seed, facts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", "dense"])
def test_nan_is_told_where_it_is_and_nowhere_else(name: str) -> None:
    """A query that is not finite must not come out as an attended, or an empty, row."""
    inputs = make(CASES[name], CPU)
    engine = Emulated(inputs)
    engine(inputs.q, inputs.batch, inputs.out, inputs.lse)
    before = inputs.out.clone(), inputs.lse.clone()
    inputs.q[0, 0, 1, 3] = float("nan")
    inputs.poison()
    engine(inputs.q, inputs.batch, inputs.out, inputs.lse)
    hit = torch.zeros_like(inputs.lse, dtype=torch.bool)
    hit[0, 0, 1] = True
    for got, was in zip((inputs.out, inputs.lse), before, strict=True):
        assert bool(got[hit].isnan().all())
        assert torch.equal(got[~hit], was[~hit])
