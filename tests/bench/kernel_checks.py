"""One case's results against the reference, and what must not change them: batch mates, order, replays."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.decode import Batch
from tests.bench.kernel_cases import PAGE, Case
from tests.bench.kernel_engines import Engine, make_engine
from tests.bench.kernel_inputs import Inputs, make
from tests.bench.kernel_reference import check


def run_case(case: Case, device: torch.device, sequences: list[int] | None = None) -> dict[str, Any]:
    """Facts of a case: ok, error, and what is wrong where it is not. Checks all sequences, or those given."""
    inputs = make(case, device)
    engine = make_engine(inputs)
    facts = checked(inputs, engine, sequences)
    if facts["ok"] and "mates" in case.checks:
        facts |= _mates(inputs, engine)
    if facts["ok"] and "graph" in case.checks and device.type == "cuda":
        facts |= _graph(inputs, engine)
    return facts


def checked(inputs: Inputs, engine: Engine, sequences: list[int] | None = None) -> dict[str, Any]:
    """Poisoned outputs written by the engine, twice with the same bits, and compared with the reference."""
    inputs.poison()
    engine(inputs.q, inputs.batch, inputs.out, inputs.lse)
    facts = check(inputs, list(range(len(inputs.q))) if sequences is None else sequences)
    first = inputs.out.clone(), inputs.lse.clone()
    inputs.poison()
    engine(inputs.q, inputs.batch, inputs.out, inputs.lse)
    same = all(_same_bits(a, b) for a, b in zip(first, (inputs.out, inputs.lse), strict=True))
    return facts if same else facts | {"ok": False, "again": "a second run of the same call gave other bits"}


def _mates(inputs: Inputs, engine: Engine) -> dict[str, Any]:
    """A sequence alone, and behind others in another order, has the bits that it has in the batch."""
    count = len(inputs.q)
    orders = [[i] for i in range(count)] + [list(reversed(range(count))), [(i + 2) % count for i in range(count)]]
    for order in orders:
        at = torch.tensor(order, device=inputs.q.device)
        batch = Batch(*(None if x is None else x[at] for x in inputs.batch.tensors))  # type: ignore[arg-type]
        out = torch.full_like(inputs.out[at], float("nan"))
        lse = torch.full_like(inputs.lse[at], float("nan"))
        engine(inputs.q[at], batch, out, lse)
        for place, sequence in enumerate(order):
            if not _same_bits(out[place], inputs.out[sequence]) or not _same_bits(lse[place], inputs.lse[sequence]):
                return {"ok": False, "mates": f"sequence {sequence} differs as number {place} of {order}"}
    return {}


def _graph(inputs: Inputs, engine: Engine) -> dict[str, Any]:
    """Captured at length 1, replayed at the case's lengths and at others: each as a plain call has it."""
    batch, lengths, bases = inputs.batch, inputs.batch.num_tokens.clone(), inputs.batch.bases.clone()
    batch.num_tokens.fill_(1)
    batch.bases.fill_(1 if inputs.tail is None else 0)
    if inputs.tail is None and inputs.case.packed:
        return {"ok": False, "graph": "a packed case needs a tail for a length of 1"}
    engine(inputs.q, batch, inputs.out, inputs.lse)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engine(inputs.q, batch, inputs.out, inputs.lse)
    halves = lengths // 2 // PAGE * PAGE  # whole pages, so that every row is where it was
    short = torch.where(halves > 0, halves, lengths)
    for what, num_tokens, base in (
        ("the case's lengths", lengths, bases),
        ("half of them", short, torch.where(halves > 0, halves, bases)),
        ("the case's lengths again", lengths, bases),
    ):
        batch.num_tokens.copy_(num_tokens)
        batch.bases.copy_(base)
        inputs.poison()
        graph.replay()
        replayed = inputs.out.clone(), inputs.lse.clone()
        facts = check(inputs, list(range(len(inputs.q))))
        if not facts["ok"]:
            return facts | {"graph": f"replayed at {what}"}
        inputs.poison()
        engine(inputs.q, batch, inputs.out, inputs.lse)
        if not all(_same_bits(a, b) for a, b in zip(replayed, (inputs.out, inputs.lse), strict=True)):
            return {"ok": False, "graph": f"a replay at {what} gives other bits than a call"}
    return {}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
