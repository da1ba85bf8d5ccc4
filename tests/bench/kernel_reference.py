"""Attention in float64 over the rows as they are kept, and the comparison with it: NaN and infinities first."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.bench.kernel_inputs import Inputs

TOLERANCE = 1e-2  # of ||out - reference|| / ||reference||, a sequence
LSE_TOLERANCE = 2e-2  # absolute: a logit's error


def reference(inputs: Inputs, sequence: int) -> tuple[Tensor, Tensor]:
    """out [T, q_heads, dim] and lse [T, q_heads], float64. Padding, and a query before token 0: zeros and -inf."""
    case, options = inputs.case, inputs.options
    q = inputs.q[sequence].double()
    length = int(inputs.batch.num_tokens[sequence])
    if length == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:2], -torch.inf)
    k, v = inputs.rows(sequence)
    positions = torch.arange(length - case.queries, length, device=q.device).view(-1, 1)
    rows = torch.arange(length, device=q.device)
    hidden = rows > positions
    if case.window:
        hidden |= rows <= positions - case.window
    outs, lses = [], []
    for head in range(case.kv_heads):  # one at a time: float64 rows are large
        own = q[:, head * case.group : (head + 1) * case.group]
        s = torch.einsum("tgd,nd->tgn", own, k[:, head].double()) * options.sm_scale
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        s = s.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        lse = s.logsumexp(-1)
        total = lse
        if options.sinks is not None:
            sinks = options.sinks[head * case.group : (head + 1) * case.group].double()
            total = torch.logaddexp(lse, sinks.expand_as(lse))
        weights = s.sub_(total.unsqueeze(-1)).exp_().masked_fill_(lse.isneginf().unsqueeze(-1), 0.0)
        outs.append(torch.einsum("tgn,nd->tgd", weights, v[:, head].double()))
        lses.append(lse)
    return torch.cat(outs, 1), torch.cat(lses, 1)


def compare(got: Tensor, want: Tensor) -> dict[str, Any]:
    """Where NaN and infinities are, then the relative error of the rest, then the worst element.

    Returns: misplaced (elements whose NaN, +inf or -inf is not the other's), error (||got - want|| / ||want||; 0 where
    both are zero), max_abs, worst (index), values there (got, want).
    """
    got, want = got.double(), want.double()
    misplaced = torch.zeros(got.shape, dtype=torch.bool, device=got.device)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        misplaced |= kind(got) != kind(want)
    finite = got.isfinite() & want.isfinite()
    difference = torch.where(finite, got - want, 0.0)
    size = torch.where(finite, want, 0.0).norm()
    weight = difference.abs().masked_fill_(misplaced, torch.inf).flatten()
    worst = int(weight.argmax()) if weight.numel() else 0
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), got.shape)] if weight.numel() else []
    norm = float(difference.norm())
    return {
        "misplaced": int(misplaced.sum()),
        "error": 0.0 if norm == 0.0 else norm / max(float(size), 1e-300),
        "max_abs": float(difference.abs().max()) if weight.numel() else 0.0,
        "worst": index,
        "values": [float(got.flatten()[worst]), float(want.flatten()[worst])] if weight.numel() else [],
    }


def check(inputs: Inputs, sequences: list[int]) -> dict[str, Any]:
    """The call's results against the reference: ok, error and lse_error (the largest over `sequences`), and the first
    finding where it is not ok."""
    case = inputs.case
    facts: dict[str, Any] = {"ok": True, "error": 0.0, "lse_error": 0.0}
    for sequence in sequences:
        if case.rows == "huge":  # scores in the millions: which row wins is decided by less than a query's own rounding
            out = inputs.out[sequence]
            found: dict[str, Any] = {"misplaced": int((~out.isfinite()).sum()), "error": 0.0}
            lse_found: dict[str, Any] = {"misplaced": int((~inputs.lse[sequence].isfinite()).sum()), "max_abs": 0.0}
        else:
            out, lse = reference(inputs, sequence)
            found, lse_found = compare(inputs.out[sequence], out), compare(inputs.lse[sequence], lse)
            if case.rows == "zero":  # exactly
                found["misplaced"] += int((inputs.out[sequence] != 0).sum())
        facts["error"] = max(facts["error"], found["error"])
        facts["lse_error"] = max(facts["lse_error"], lse_found["max_abs"])
        near = found["error"] <= TOLERANCE and lse_found["max_abs"] <= LSE_TOLERANCE
        if facts["ok"] and not (near and found["misplaced"] == lse_found["misplaced"] == 0):
            facts |= {"ok": False, "sequence": sequence, "out": found, "lse": lse_found}
    if case.strided and inputs.out._base is not None:
        outside = inputs.out._base.numel() - inputs.out.numel()
        untouched = int(inputs.out._base.isnan().sum()) - int(inputs.out.isnan().sum())
        if untouched != outside:
            facts |= {"ok": False, "written_outside": outside - untouched}
    return facts
