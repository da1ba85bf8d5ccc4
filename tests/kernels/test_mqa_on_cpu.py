"""The warpgroup kernels of csrc/decode_mqa.cu, run on a CPU lane by lane, against float64."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.grid_table import GRIDS
from tests.kernels.emulator import Emulator, needs_compiler
from tests.kernels.mqa_call import BITS, WIDTH, Call, Case, cell_defines
from tests.kernels.mqa_stages import stages

pytestmark = needs_compiler

ERROR = 5e-3  # of the output: bf16 rounds it to 2e-3 at most; of 37 seeds a case the worst had 4.3e-3

Build = Callable[..., Emulator]


@pytest.fixture(scope="session")
def library() -> Build:
    def build(case: Case, *extra: str) -> Emulator:
        options = [f"-D{k}={v}" for k, v in cell_defines(case.row_type, case.softcap > 0).items()]
        options += [f"-D{name}" for name in extra]
        return Emulator.build("decode_mqa.cpp", options)

    return build


def run(library: Emulator, case: Case, *, seed: int = 0, ctas: int = 3) -> Call:
    call = Call(case)
    library.call("prepare", call.grid("prepare"), call.args, seed=seed)
    library.call("attend", ctas, call.args, seed=seed)
    library.call("merge", call.grid("merge"), call.args, seed=seed)
    return call


def check(call: Call, error: float = ERROR) -> None:
    for i, n in enumerate(call.case.lengths):
        if n == 0:
            assert bool((call.out[i] == 0).all()) and bool((call.lse[i] == -torch.inf).all())
            continue
        out_error, lse_error = call.errors(i)
        print(f"{n} tokens: error {out_error:.1e}, lse {lse_error:.1e}")
        assert out_error <= error and lse_error <= 1e-2, f"sequence {i} of {n} tokens"


CASES = {
    "lengths": Case(lengths=(1, 17, 127, 128, 129, 300, 0, 700)),
    "no tails": Case(lengths=(128, 640), tail_tokens=(0, 0)),
    "ratio 16, 3 queries": Case(lengths=(900, 2500), group=16, num_queries=3),
    "ratio 7, 8 queries, window, sinks": Case(lengths=(900, 700), group=7, num_queries=8, window=300, sinks=True),
    "two heads, two blocks, window": Case(lengths=(900, 700), group=32, num_queries=3, kv_heads=2, window=200),
    "references that move": Case(lengths=(900, 1200), drift=20.0),
    "zero rows first": Case(lengths=(400, 900), zero_rows=200),
    "softcap": Case(lengths=(900, 1200), softcap=5.0, drift=1.0),
    "uneven rows": Case(lengths=(900, 1200, 700), uneven=6.0, sm_scale=1e-9),
    "some tiles uneven": Case(lengths=(900, 1200), uneven=1.3, sm_scale=1e-3),
    "uneven rows, window": Case(lengths=(900, 700), uneven=6.0, sm_scale=1e-9, window=300, num_queries=3, group=16),
    "uneven rows, softcap": Case(lengths=(900, 1200), uneven=3.0, sm_scale=1e-5, softcap=5.0),
    "tiny rows": Case(lengths=(900, 400), norm=1e-8, sm_scale=1e6),
    "f16": Case(lengths=(900, 700), row_type="f16", drift=1.0),
    "f16 of few rows that count": Case(lengths=(900, 400), row_type="f16", drift=8.0, window=150, num_queries=2),
    "norms of 1e6": Case(lengths=(900, 400), norm=1e6, sm_scale=4e-8),
    "norms of 1e12": Case(lengths=(900, 400), norm=1e12, sm_scale=4e-14),  # too far from 1 for even tiles
    "a ring that wraps": Case(lengths=(1000, 1279), tail_tokens=(200, 255), ring_rows=384),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_lse(library: Build, name: str) -> None:
    seed = int(torch.seed() % 2**31)
    print(f"seed {seed}")
    case = replace(CASES[name], seed=seed)
    check(run(library(case), case, seed=seed))


def test_each_stage_of_the_attend_kernel(library: Build) -> None:
    for case in (
        Case(lengths=(900,)),
        Case(lengths=(900,), group=16, num_queries=3, softcap=5.0),
        Case(lengths=(900,), uneven=6.0, sm_scale=1e-9),
    ):
        call = run(library(case, "TAILPACK_MQA_DUMP"), case)
        for stage in stages(call):
            print(stage)
            assert stage.passed, stage


def test_zero_rows_score_exactly_zero(library: Build) -> None:
    case = Case(lengths=(640,), tail_tokens=(0,), norm=0.0)
    call = run(library(case), case)
    assert bool((call.out == 0).all())
    assert torch.allclose(call.lse, torch.tensor(640.0).log(), atol=1e-5)


def test_a_result_depends_on_its_sequence_alone(library: Build) -> None:
    case = Case(lengths=(900, 300, 700), drift=2.0, seed=5)
    emulator = library(case)
    together = run(emulator, case, ctas=2)
    for seed, ctas in ((3, 1), (4, 7)):
        again = run(emulator, case, seed=seed, ctas=ctas)
        assert torch.equal(again.out, together.out) and torch.equal(again.lse, together.lse)
    alone = Call(case)  # the same memory, but a call for the last sequence only
    alone.args.num_sequences = 1
    for name, tensor in (("q", alone.q), ("page_table", alone.table), ("out", alone.out), ("lse", alone.lse)):
        setattr(alone.args, name, tensor[2:].data_ptr())
    for name, tensor in (
        ("bases", alone.base_tensor),
        ("num_tokens", alone.length_tensor),
        ("tail_slots", alone.slots),
    ):
        setattr(alone.args, name, tensor[2:].data_ptr())
    for phase, ctas in (("prepare", 8), ("attend", 2), ("merge", 64)):
        emulator.call(phase, ctas, alone.args)
    assert torch.equal(alone.out[2], together.out[2]) and torch.equal(alone.lse[2], together.lse[2])


def test_codes_decode_to_the_table(library: Build) -> None:
    decode = library(Case()).function("decode")
    decode.restype = None
    _, magnitudes = GRIDS[WIDTH, BITS]
    generator = torch.Generator().manual_seed(1)
    for codes in torch.randint(16, (200, 8), generator=generator).tolist():
        out = torch.zeros(8, dtype=torch.float16)
        word = sum(code << 4 * j for j, code in enumerate(codes))
        decode(ctypes.c_uint(word), ctypes.c_void_p(out.data_ptr()))
        want = [(2 * magnitudes[code & 7] - 1) * (-1 if code & 8 else 1) for code in codes]
        assert out.tolist() == want
