"""A prompt chunk over a packed history: right on its last queries, then timed against one dense call over all rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import prefill
from kernels.attention import PackedRegion
from kernels.prefill import History, KernelRestore, PrefillOptions, Workspace, attend_chunk
from tests.bench.kernel_cases import Case
from tests.bench.kernel_inputs import make, unpacked
from tests.bench.kernel_performance import Machine
from tests.bench.kernel_reference import TOLERANCE, compare

CHECKED = 32  # queries, the first and the last of a chunk


@dataclass(frozen=True)
class PrefillCase:
    """`chunk` queries behind `base` packed tokens and `tail` dense ones."""

    name: str
    base: int
    tail: int
    chunk: int
    mode: str = "tq4"
    dim: int = 128
    kv_heads: int = 8
    group: int = 4
    window: int = 0
    softcap: float = 0.0
    shared: bool = False


def cases() -> list[PrefillCase]:
    plain = PrefillCase("prefill-32k", 32768, 256, 2048)
    return [
        plain,
        replace(plain, name="prefill-4k", base=4096),
        replace(plain, name="prefill-first", base=0, tail=0, chunk=4096),
        replace(plain, name="prefill-window", window=1024, base=8192),
        replace(plain, name="prefill-fp8", mode="fp8", base=8192, chunk=1000),
        replace(plain, name="prefill-d256-softcap", dim=256, group=2, softcap=50.0, base=8192, chunk=512),
        replace(plain, name="prefill-d512-shared", dim=512, kv_heads=1, group=64, shared=True, base=8192, chunk=512),
    ]


def for_cpu(case: PrefillCase) -> PrefillCase:
    return replace(
        case,
        base=min(case.base, 384),
        tail=min(case.tail, 40),
        chunk=min(case.chunk, 48),
        kv_heads=min(case.kv_heads, 2),
        group=min(case.group, 4),
        window=min(case.window, 200),
    )


class Prepared:
    """Inputs of a case on a device, and the call."""

    def __init__(self, case: PrefillCase, device: torch.device) -> None:
        self.case = case
        pages = Case(
            case.name, case.mode, case.dim, (case.base,), case.kv_heads, case.group, shared=case.shared, kept=None
        )
        inputs = make(pages, device)
        self.keys, self.values, self.page_ids = inputs.keys, inputs.values, inputs.page_ids[0]
        dtype = inputs.dtype
        own = (case.tail + case.chunk, case.kv_heads, case.dim)
        self.k = torch.randn(own, device=device).to(dtype)
        self.v = self.k if case.shared else torch.randn(own, device=device).to(dtype)
        self.q = (1.5 * torch.randn((case.chunk, case.kv_heads * case.group, case.dim), device=device)).to(dtype)
        self.options = PrefillOptions(case.dim**-0.5, case.window, case.softcap)
        self.workspace = Workspace(case.kv_heads, case.dim, dtype, device)
        assert isinstance(self.keys, PackedRegion) and not isinstance(self.values, Tensor)
        self.history = History(self.keys, self.values, self.page_ids, case.base) if case.base else None
        self.restore = KernelRestore(self.keys, self.values, self.workspace) if device.type == "cuda" else None

    def __call__(self) -> Tensor:
        return attend_chunk(
            self.q,
            self.k,
            self.v,
            first_position=self.case.base + self.case.tail,
            first_row=self.case.base,
            history=self.history,
            options=self.options,
            workspace=self.workspace,
            restore=self.restore,
        )

    def rows(self) -> tuple[Tensor, Tensor]:
        """All keys and values f32 [base + tail + chunk, kv_heads, dim], from the pages' bytes."""
        sides = []
        for pages, own in ((self.keys, self.k), (self.keys if self.values is None else self.values, self.v)):
            sides.append(torch.cat([unpacked(pages, self.page_ids), own.float()]) if self.case.base else own.float())
        return sides[0], sides[1]


def run(case: PrefillCase, device: torch.device) -> dict[str, Any]:
    """Facts: ok and error of the first and last queries against float64."""
    return _check(Prepared(case, device))


def measure(case: PrefillCase, machine: Machine) -> dict[str, Any]:
    prepared = Prepared(case, machine.device)
    facts = _check(prepared)
    if not facts["ok"]:
        return facts
    times = machine.timer.time(prepared, cold=True, repeats=15)
    visible = sum(min(case.window or 1 << 60, case.base + case.tail + i + 1) for i in range(case.chunk))
    flops = 4.0 * visible * case.kv_heads * case.group * case.dim
    floor, floor_by = machine.floor(0.0, flops)
    rival = _rival(prepared, machine)
    record: dict[str, Any] = {
        "case": case.name,
        "value": round(times.median, 4),
        "unit": "ms",
        "spread": [round(min(times.values), 4), round(max(times.values), 4)],
        "repeats": len(times.values),
        "floor": round(floor, 4),
        "floor_by": floor_by,
        "rival": None if rival is None else "torch's FlashAttention over dense bf16 rows, one call",
        "rival_value": None if rival is None else round(rival, 4),
        **({"rival_why": "torch's FlashAttention takes neither softcap nor rows of 512"} if rival is None else {}),
        "error": facts["error"],
        "shape": f"{case.chunk} queries behind {case.base} packed and {case.tail} dense tokens, "
        f"{case.kv_heads}/{case.kv_heads * case.group} heads, d={case.dim}, {case.mode}, window {case.window}",
    }
    shown = {"ms": times.median, "of_floor": floor / times.median}
    return facts | shown | ({} if rival is None else {"rival": rival}) | {"record": record}


def _rival(prepared: Prepared, machine: Machine) -> float | None:
    if not prefill._has_flash(prepared.q, prepared.options):
        return None
    k, v = (side.to(prepared.q.dtype) for side in prepared.rows())
    window = prepared.case.window
    left = window - 1 if window else None
    call = lambda: prefill._flash_forward(prepared.q, k, v, True, left, prepared.options.sm_scale)
    return machine.timer.time(call, cold=True, repeats=15).median


def _check(prepared: Prepared) -> dict[str, Any]:
    case, q = prepared.case, prepared.q
    out = prepared()
    k, v = prepared.rows()
    chosen = sorted({*range(min(CHECKED, len(q))), *range(max(0, len(q) - CHECKED), len(q))})
    at = torch.tensor(chosen, device=q.device)
    want = _reference(q[at], k, v, case.base + case.tail + at, prepared.options, case.group)
    found = compare(out[at], want)
    ok = found["misplaced"] == 0 and found["error"] <= TOLERANCE and bool(out.isfinite().all())
    return {"ok": ok, "error": found["error"]} | ({} if ok else {"found": found})


def _reference(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, options: PrefillOptions, group: int) -> Tensor:
    """Float64; queries [n, q_heads, dim] at those positions."""
    rows = torch.arange(len(k), device=q.device)
    hidden = rows > positions.view(-1, 1)
    if options.window:
        hidden |= rows <= positions.view(-1, 1) - options.window
    outs = []
    for head in range(k.shape[1]):
        own = q[:, head * group : (head + 1) * group].double()
        s = torch.einsum("tgd,nd->tgn", own, k[:, head].double()) * options.sm_scale
        if options.softcap:
            s = options.softcap * torch.tanh(s / options.softcap)
        p = s.masked_fill_(hidden.unsqueeze(1), -torch.inf).softmax(-1)
        outs.append(torch.einsum("tgn,nd->tgd", p, v[:, head].double()))
    return torch.cat(outs, 1)
