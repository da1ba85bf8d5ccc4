"""The small kernels of a decode step (csrc/decode_step.cuh) on a CPU, lane by lane, beside the model's operators."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernels.decode_step_cuda import NormArgs, StepArgs
from kernels.errors import ArgumentError
from kernels.rope_append import AppendTo, RopeArgs, set_rope
from kernels.step_cells import step_cell
from tests.kernels.emulator import Emulator, EmulatorError, needs_compiler
from worker.models.layers import rms_norm, rope_tables, rotate

DTYPE = torch.bfloat16


@pytest.fixture(scope="module")
def library() -> Emulator:
    return Emulator.of(step_cell("bf16"))


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(DTYPE)


@needs_compiler
def test_a_step_begins_with_its_own_patches(library: Emulator) -> None:
    state, step = torch.arange(600, dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    ring = torch.full((3, 1 + 2 * 300), -9, dtype=torch.int32)
    ring[7 % 3, 0] = 290
    ring[7 % 3, 1 : 1 + 2 * 290 : 2] = torch.arange(10, 300)
    ring[7 % 3, 2 : 2 + 2 * 290 : 2] = 5000 + torch.arange(10, 300)
    arguments = StepArgs(
        state=state.data_ptr(), step=step.data_ptr(), ring=ring.data_ptr(), num_states=600, slots=3, max_patches=300
    )
    library.call("begin", 1, 1, arguments, seed=2)
    want = torch.arange(600, dtype=torch.int32)
    want[10:300] += 5000
    assert torch.equal(state, want) and step.item() == 7
    ring[8 % 3, 0] = 301
    with pytest.raises(EmulatorError, match="trap"):
        library.call("begin", 1, 1, arguments)


@needs_compiler
def test_rows_of_the_embedding(library: Emulator) -> None:
    embed, out, tokens = rows(50, 2304), rows(3, 2304), torch.tensor([49, 0, 7], dtype=torch.int32)
    arguments = StepArgs(
        tokens=tokens.data_ptr(), embed=embed.data_ptr(), out=out.data_ptr(), row_bytes=4608, vocabulary=50
    )
    library.call("embed", 3, 1, arguments)
    assert torch.equal(out, embed[tokens.long()])
    tokens[1] = 50
    with pytest.raises(EmulatorError, match="trap"):
        library.call("embed", 3, 1, arguments)


@needs_compiler
@pytest.mark.parametrize("width", [64, 514, 2048])
@pytest.mark.parametrize("add", [False, True])
def test_norms_round_as_the_models_do(library: Emulator, width: int, add: bool) -> None:
    x, delta, weight, out = rows(3, width), rows(3, width), rows(width), rows(3, width)
    want_x = x + delta if add else x.clone()
    want = rms_norm(want_x, weight, 1e-5)
    arguments = NormArgs(x=x.data_ptr(), weight=weight.data_ptr(), out=out.data_ptr(), width=width, eps=1e-5)
    arguments.delta = delta.data_ptr() if add else None
    library.call("norm", 3, 1, arguments, seed=4)
    assert torch.equal(x, want_x)
    differ = (out != want).float().mean()  # where the order of the sum of squares decides about a rounding
    assert differ < 0.01 and torch.allclose(out.float(), want.float(), rtol=2**-7)


@needs_compiler
def test_swiglu_rounds_as_the_models_do(library: Emulator) -> None:
    gate_up, out = 3 * rows(3, 2 * 1300), rows(3, 1300)
    want = F.silu(gate_up[:, :1300]) * gate_up[:, 1300:]
    arguments = NormArgs(x=gate_up.data_ptr(), out=out.data_ptr(), width=1300)
    library.call("swiglu_rows", 2, 3, arguments)
    assert (out != want).float().mean() < 0.01 and torch.allclose(out.float(), want.float(), rtol=2**-7)


@needs_compiler
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 128), (2, 2, 40)])
def test_queries_and_keys_are_rotated_and_go_where_they_belong(
    library: Emulator, q_heads: int, kv_heads: int, dim: int, normed: bool, paged: bool
) -> None:
    torch.manual_seed(dim)
    heads, num = q_heads + 2 * kv_heads, 5
    qkv = rows(num, heads * dim + 16)[:, : heads * dim]
    cos, sin = (table.to(DTYPE) for table in rope_tables({"rope_theta": 10000.0}, dim, 600))
    norms = (rows(dim), rows(dim)) if normed else (None, None)
    num_tokens = torch.tensor([1, 0, 300, 513, 140], dtype=torch.int32)
    memory = [rows(7, 128 if paged else 48, kv_heads, dim) for _ in range(2)]
    before = [x.clone() for x in memory]
    table = torch.tensor([[3, -1, -1], [0, 0, 0], [-1, -1, 6], [1, 1, 1], [2, -1, -1]], dtype=torch.int32)
    slots = torch.tensor([6, 0, 2, 1, -1], dtype=torch.int32)
    to = AppendTo(memory[0], memory[1], table if paged else slots, num_tokens)
    # Row 1 is padding; row 3 lies behind its table; row 4 has no page there, no slot.
    places = [(0, 3, 0), (2, 6, 299 % 128)] if paged else [(0, 6, 0), (2, 2, 299 % 48), (3, 1, 512 % 48)]

    at = (num_tokens.long() - 1).clamp(min=0)
    parts = qkv.clone().view(num, heads, dim).split((q_heads, kv_heads, kv_heads), dim=1)  # type: ignore[no-untyped-call]
    q, k = (
        rotate(x if norm is None else rms_norm(x, norm, 1e-6), cos[at].unsqueeze(1), sin[at].unsqueeze(1))
        for x, norm in zip(parts[:2], norms, strict=True)
    )
    original = qkv.clone()
    arguments = RopeArgs()
    set_rope(arguments, DTYPE, qkv, (cos, sin), norms, 1e-6, to, q_heads)
    library.call("rope", -(-heads // 8), num, arguments, seed=dim)
    got = qkv.as_strided((num, heads, dim), (qkv.stride(0), dim, 1))
    assert (
        torch.equal(got[:, :q_heads], q)
        if not normed
        else torch.allclose(got[:, :q_heads].float(), q.float(), atol=0.06)
    )
    assert torch.equal(got[:, q_heads:], original.view(num, heads, dim)[:, q_heads:])
    for row, place, ring_row in places:
        before[0][place, ring_row] = k[row]
        before[1][place, ring_row] = parts[2][row]
    if normed:
        assert torch.allclose(memory[0].float(), before[0].float(), atol=0.06)
    else:
        assert torch.equal(memory[0], before[0])
    assert torch.equal(memory[1], before[1])


@needs_compiler
def test_a_place_or_position_that_does_not_exist_ends_the_kernel(library: Emulator) -> None:
    memory, qkv = rows(2, 16, 1, 64), rows(1, 192)  # held: the arguments have addresses alone
    cos, sin = (table.to(DTYPE) for table in rope_tables({}, 64, 8))
    for slot, tokens in ((2, 1), (0, 9)):
        ints = [torch.tensor([value], dtype=torch.int32) for value in (slot, tokens)]
        arguments = RopeArgs()
        set_rope(arguments, DTYPE, qkv, (cos, sin), (None, None), 0, AppendTo(memory, memory, *ints), 1)
        with pytest.raises(EmulatorError, match="trap"):
            library.call("rope", 1, 1, arguments)


def test_calls_that_do_not_fit_are_refused() -> None:
    memory, ints = rows(2, 16, 1, 64), torch.zeros(1, dtype=torch.int32)
    cos, sin = (table.to(DTYPE) for table in rope_tables({}, 64, 8))
    good = AppendTo(memory, memory, ints, ints)
    for qkv, to in (
        (rows(1, 191), good),
        (rows(1, 192).float(), good),
        (rows(1, 192), good._replace(values=rows(2, 17, 1, 64))),
        (rows(1, 192), good._replace(places=ints.long())),
        (rows(2, 192), good),
    ):
        with pytest.raises(ArgumentError, match="does not fit the decode step"):
            set_rope(RopeArgs(), DTYPE, qkv, (cos, sin), (None, None), 0, to, 1)
