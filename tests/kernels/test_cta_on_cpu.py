"""The CPU emulator (tests/kernels/cuda_on_cpu) computes what a GPU does, and finds the mistakes that it claims to."""

from __future__ import annotations

import ctypes
import re
from typing import TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kernels.compiler import SOURCE_DIR
from tests.kernels.emulator import HEADER_DIR, Emulator, EmulatorError, needs_compiler

Number = TypeVar("Number", np.int32, np.float32, np.float64)

pytestmark = needs_compiler

SEEDS = range(12)
NONE, NO_FULL_WAIT, NO_EMPTY_WAIT, WRONG_PARITY, SHORT_EXPECT, NO_SYNC_AFTER_INIT, EARLY_RELEASE = range(7)
STAGE_BYTES, NUM_STAGES, CTAS = 1024, 11, 5


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator.build("checks.cpp")


@pytest.fixture(scope="module", params=["bulk", "lanes"])
def copies(request: pytest.FixtureRequest, emulator: Emulator) -> Emulator:
    """The same kernels with bulk copies (sm_90 on) and with copies by all lanes."""
    return emulator if request.param == "bulk" else Emulator.build("checks.cpp", ["-DTAILPACK_NO_BULK_COPY"])


def random_generator() -> np.random.Generator:
    seed = int(torch.seed() % 2**31)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


def test_both_headers_have_the_same_functions_and_constants() -> None:
    defined = re.compile(
        r"^(?:template <[^>]*>\s)?(?:__device__ __forceinline__|inline|constexpr) [\w:]+ (\w+)(?=\(| =)", re.M
    )
    gpu, cpu = (set(defined.findall((d / "ptx.cuh").read_text())) for d in (SOURCE_DIR, HEADER_DIR))
    assert len(gpu) > 30
    assert gpu <= cpu, "tests/kernels/cuda_on_cpu/ptx.cuh lacks some"


# ---- collectives and tensor cores


def test_collectives_give_every_lane_its_value(emulator: Emulator) -> None:
    values = random_generator().integers(-(2**31), 2**31, 32).astype(np.int32)
    for seed in SEEDS:
        wide, out = torch.zeros(32, dtype=torch.int64), torch.zeros(32, 12, dtype=torch.int32)
        emulator.call("run_collectives", torch.from_numpy(values), wide, out, seed=seed)
        lanes = np.arange(32)
        negative = sum(1 << i for i in range(32) if values[i] < 0)
        total = int(values.astype(np.int64).sum())
        expected = [
            values[lanes // 8 * 8 + 5],
            values[lanes ^ 3],
            values[np.where(lanes % 16 >= 2, lanes - 2, lanes)],
            values[np.where(lanes + 9 < 32, lanes + 9, lanes)],
            values.max(),
            values.astype(np.uint32).max(),
            1,
            0,
            negative,
            total,
            values.min(),
            2**32 - 1,
        ]
        for column, want in enumerate(expected):
            assert (out[:, column].numpy().view(np.uint32) == np.asarray(want).astype(np.int64) % 2**32).all(), column
        assert (wide.numpy() == values[::-1].astype(np.int64) << 31).all()


def fragments(matrix: NDArray[np.generic], rows: int) -> NDArray[np.uint32]:
    """Registers [32, n] of A [16, k] or B^T [8, k] (PTX ISA, mma.m16n8k16 of .b16 and mma.m16n8k32 of .b8).

    A, 8-bit: row = g for a_i with i in 0-3, 8-11, else g + 8; col = 4 t + (i & 3), + 16 for i >= 8.
    A, 16-bit: row = g for i in 0, 1, 4, 5, else g + 8; col = 2 t + (i & 1), + 8 for i >= 4.
    B: row k = 4 t + (i & 3) + 16 [i >= 4], or 2 t + (i & 1) + 8 [i >= 2]; col = g.
    """
    per_register = 4 // matrix.itemsize
    out = np.zeros((32, 2 * rows // 8, per_register), dtype=matrix.dtype)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        for i in range(out[0].size):
            upper_row = rows == 16 and i // per_register % 2 == 1
            upper_half = i >= out[0].size // 2
            k = per_register * t + i % per_register + (matrix.shape[1] // 2 if upper_half else 0)
            out[lane].reshape(-1)[i] = matrix[g + 8 * upper_row, k]
    return out.reshape(32, -1).view(np.uint32)


def sums(matrix: NDArray[Number]) -> NDArray[Number]:
    """C [16, 8] as registers [32, 4]: row = g for c_0, c_1, else g + 8; col = 2 t + (i & 1)."""
    out = np.zeros((32, 4), dtype=matrix.dtype)
    for lane in range(32):
        for i in range(4):
            out[lane, i] = matrix[lane // 4 + 8 * (i >= 2), 2 * (lane % 4) + (i & 1)]
    return out


@pytest.mark.parametrize(("name", "b_type"), [("run_mma_s8_s8", np.int8), ("run_mma_s8_u8", np.uint8)])
def test_integer_mma_is_a_matrix_product(emulator: Emulator, name: str, b_type: type[np.int8] | type[np.uint8]) -> None:
    generator = random_generator()
    a = generator.integers(-128, 128, (16, 32)).astype(np.int8)
    b = generator.integers(np.iinfo(b_type).min, np.iinfo(b_type).max + 1, (8, 32)).astype(b_type)
    c = generator.integers(-(2**20), 2**20, (16, 8)).astype(np.int32)
    registers = torch.from_numpy(sums(c))
    a_registers, b_registers = (torch.from_numpy(fragments(*x).view(np.int32)) for x in ((a, 16), (b, 8)))
    emulator.call(name, a_registers, b_registers, registers, seed=3)
    assert (registers.numpy() == sums(c + a.astype(np.int32) @ b.astype(np.int32).T)).all()


@pytest.mark.parametrize(("name", "dtype"), [("run_mma_bf16", torch.bfloat16), ("run_mma_f16", torch.float16)])
def test_half_mma_is_a_matrix_product(emulator: Emulator, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(int(random_generator().integers(2**31)))
    a, b = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype)
    c = torch.randn(16, 8)
    registers = torch.from_numpy(sums(c.numpy()))
    halves = [fragments(x.view(torch.int16).numpy(), len(x)).view(np.int32) for x in (a, b)]
    emulator.call(name, torch.from_numpy(halves[0]), torch.from_numpy(halves[1]), registers)
    expected = sums((c.double() + a.double() @ b.double().T).numpy())
    np.testing.assert_allclose(registers.numpy(), expected, rtol=0, atol=2e-5)


def test_transpose_turns_rows_into_columns(emulator: Emulator) -> None:
    matrix = random_generator().integers(0, 2**16, (8, 8)).astype(np.uint16)
    registers = np.ascontiguousarray(matrix).view(np.int32).reshape(32)  # lane (g, t): row g, columns 2t, 2t+1
    out = torch.zeros(32, dtype=torch.int32)
    emulator.call("run_transpose", torch.from_numpy(registers.copy()), out, seed=5)
    assert (out.numpy().view(np.uint16).reshape(8, 8) == matrix.T).all()


def test_scalar_instructions(emulator: Emulator) -> None:
    permute = emulator.function("permute_of")
    permute.restype, permute.argtypes = ctypes.c_uint32, [ctypes.c_uint32] * 3
    assert permute(0x33221100, 0x77665544, 0x7410) == 0x77441100
    assert permute(0x33228100, 0x77F65544, 0xEA98) == 0xFF00FF00  # bit 3: the byte's sign, eight times
    for name, dtype in (("pack_bf16", torch.bfloat16), ("pack_f16", torch.float16)):
        pack = emulator.function(name)
        pack.restype, pack.argtypes = ctypes.c_uint32, [ctypes.c_float] * 2
        for values in [(1.0, -2.5), (1.00390625, 1.01171875), (3.1415927, 65504.0), (1e-6, float("inf"))]:
            bits = torch.tensor(values).to(dtype).view(torch.int16).numpy().view(np.uint32)
            assert pack(*values) == bits[0]
    for name, dtype in (("multiply_bf16", torch.bfloat16), ("multiply_f16", torch.float16)):
        multiply = emulator.function(name)
        multiply.restype, multiply.argtypes = ctypes.c_uint32, [ctypes.c_uint32] * 2
        a, b = torch.randn(2, 64).to(dtype)
        words = [x.view(torch.int16).numpy().view(np.uint32) for x in (a, b, (a.double() * b.double()).to(dtype))]
        assert [multiply(int(x), int(y)) for x, y, _ in zip(*words, strict=True)] == words[2].tolist()
    exp2 = emulator.function("exp2_of")
    exp2.restype, exp2.argtypes = ctypes.c_float, [ctypes.c_float]
    assert [exp2(x) for x in (3.0, -126.0, -126.5, -float("inf"))] == [8.0, 2.0**-126, 0.0, 0.0]
    nearest = emulator.function("round_of")
    nearest.argtypes = [ctypes.c_float]
    assert [nearest(x) for x in (2.5, -3.5, 1e20, -1e20, float("nan"))] == [2, -4, 2**31 - 1, -(2**31), 0]
    assert emulator.function("dp4a_signed")(0x7F80FF01, 0x0203FF80, -5) == 127 * 2 - 128 * 3 + 1 - 128 - 5


# ---- threads, shared memory, copies


def test_every_thread_of_every_block_runs_once(emulator: Emulator) -> None:
    for seed in SEEDS:
        out = torch.zeros(12 * 192, dtype=torch.int32)
        emulator.call("run_places", out, seed=seed)
        assert bool((out == 1).all())


def test_shared_memory_is_fresh_and_poisoned(emulator: Emulator) -> None:
    for seed in SEEDS:
        out = torch.zeros(7 * 128, dtype=torch.float32)
        emulator.call("run_fresh", 7, out, seed=seed)
        assert bool(out.isnan().all())
        assert bool(out.view(torch.bfloat16).isnan().all())
        assert bool(out.view(torch.float16).isnan().all())


def test_atomics_lose_nothing(emulator: Emulator) -> None:
    orders = set()
    for seed in SEEDS:
        integers = torch.tensor([0, -1, 1000, 0], dtype=torch.int32)
        total, order = torch.zeros(1), torch.zeros(1 + 96 * 4, dtype=torch.int32)
        emulator.call("run_atomics", 4, integers, total, order, seed=seed)
        assert integers.tolist() == [384, 95, 0, 768]
        assert float(total) == 192.0
        assert sorted(order[1:].tolist()) == list(range(384))
        orders.add(tuple(order.tolist()))
    assert len(orders) == len(SEEDS), "seeds do not change the order"


def test_ctas_share_a_queue(emulator: Emulator) -> None:
    shared = 0
    for seed in range(1, 9):
        following, taken = torch.zeros(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        emulator.call("run_queue", 3, following, 60, taken, seed=seed)
        assert int(taken.sum()) == 60
        shared += int((taken > 0).sum() > 1)
    assert shared >= 4, "one CTA takes everything"


def test_a_missing_barrier_shows_for_some_seed(emulator: Emulator) -> None:
    wrong = 0
    for seed in SEEDS:
        out = torch.zeros(3, 128, dtype=torch.int32)
        expected = (torch.arange(128, dtype=torch.int32) + 1).remainder(128).expand(3, 128)
        emulator.call("run_neighbours", 3, out, 1, seed=seed)
        assert torch.equal(out, expected)
        emulator.call("run_neighbours", 3, out, 0, seed=seed)
        wrong += not torch.equal(out, expected)
    assert wrong == len(SEEDS)


def test_seeds_change_who_goes_first(emulator: Emulator) -> None:
    def orders(threads: int, seed: int) -> tuple[list[int], list[int]]:
        before, after = torch.zeros(2, threads, dtype=torch.int32)
        emulator.call("run_orders", threads, before, after, seed=seed)
        return before.tolist(), after.tolist()

    assert orders(64, 0) == orders(64, 0), "seed 0 is no fixed order"
    assert orders(64, 7) == orders(64, 7), "a seed is no fixed order"
    warps = {tuple(dict.fromkeys(thread // 32 for thread in orders(128, seed)[0])) for seed in SEEDS}
    assert len(warps) >= 5, "warps take turns in one order"
    last_goes_on = [before[31] == after[0] for before, after in (orders(32, seed) for seed in range(1, 33))]
    assert any(last_goes_on)
    assert not all(last_goes_on), "whoever completes a collective always goes on first"


def run_pipeline(emulator: Emulator, mistake: int, seed: int, same_stages: bool = False) -> bool:
    """Whether the sums are right."""
    data = torch.randint(0, 256, (CTAS, NUM_STAGES, STAGE_BYTES), dtype=torch.uint8)
    if same_stages:
        data[:] = data[0, 0]
    sums = torch.zeros(CTAS, dtype=torch.int32)
    emulator.call("run_pipeline", CTAS, data, NUM_STAGES, sums, mistake, seed=seed)
    words = data.view(torch.int32).reshape(CTAS, -1, 2).to(torch.int64)
    expected = (words[..., 0] ^ words[..., 1]).sum(dim=1)
    return torch.equal(sums.to(torch.int64) % 2**32, expected % 2**32)


def test_a_pipeline_of_copies_brings_every_byte(copies: Emulator) -> None:
    for seed in SEEDS:
        assert run_pipeline(copies, NONE, seed)


@pytest.mark.parametrize("mistake", [NO_FULL_WAIT, NO_EMPTY_WAIT, WRONG_PARITY, NO_SYNC_AFTER_INIT])
def test_a_mistake_in_the_pipeline_shows_for_nearly_every_seed(copies: Emulator, mistake: int) -> None:
    found = 0
    for seed in SEEDS:
        try:
            found += not run_pipeline(copies, mistake, seed)
        except EmulatorError:
            found += 1
    assert found >= 9


def test_a_place_that_is_refilled_too_early_holds_garbage(copies: Emulator) -> None:
    # The new bytes are the old ones, so only what a copy does to its target meanwhile can show.
    assert all(run_pipeline(copies, NONE, seed, same_stages=True) for seed in SEEDS)
    wrong = 0
    for seed in range(1, 41):
        try:
            wrong += not run_pipeline(copies, EARLY_RELEASE, seed, same_stages=True)
        except EmulatorError:  # a phase passed a reader by
            continue
    assert wrong > 0


def test_bytes_that_are_not_expected_never_complete_a_phase(emulator: Emulator) -> None:
    with pytest.raises(EmulatorError, match=r"(?s)deadlock.*mbarrier_wait.*-16 bytes"):
        run_pipeline(emulator, SHORT_EXPECT, 1)


# ---- mistakes

MISUSES = {
    0: r"divergence: (ends while lanes|__syncwarp, but lanes)",
    1: r"divergence: lanes \w+ of the warp are in \w+ at checks.cpp:\d+, this one in \w+ at checks.cpp",
    2: r"(?s)deadlock \(divergence.*lanes 0000ffff: __syncwarp at.*lanes ffff0000: __syncthreads",
    3: r"thread \(7, 0, 0\).*load_shared_16: 16 bytes at shared address .*offset 1024.*1024 dynamic bytes at checks",
    4: r"not a multiple of 16",
    5: r"not into shared memory",
    6: r"no mbarrier was made",
    7: r"was written over",
    8: r"(?s)deadlock.*lanes 00000080: mbarrier_wait at checks.cpp:\d+ for parity 0.*phase 0 and lacks 1 of 1",
    9: r"(?s)deadlock.*mbarrier_test",
    10: r"(?s)deadlock.*__nanosleep",
    11: r"mask 0000ffff",
    12: r"access to byte 1024 of 1024 bytes of dynamic shared memory",
    13: r"access to address",
    14: r"division by zero",
    15: r"still runs after 1 s",
    16: r"divergence: lanes \w+ of the warp are in __shfl_xor_sync",
    18: r"differently often",
    19: r"there is an mbarrier",
    20: r"trap at checks",
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("kind", MISUSES)
def test_misuse_is_named(emulator: Emulator, kind: int, seed: int) -> None:
    with pytest.raises(EmulatorError, match=MISUSES[kind]):
        emulator.call("run_misuse", kind, torch.zeros(1, dtype=torch.int32), seed=seed, time_limit_s=1)


def test_a_launch_after_a_failed_one_is_a_fresh_one(emulator: Emulator) -> None:
    with pytest.raises(EmulatorError):
        emulator.call("run_misuse", 8, torch.zeros(1, dtype=torch.int32))
    emulator.call("run_misuse", 17, torch.zeros(1, dtype=torch.int32))
    assert run_pipeline(emulator, NONE, 1)


def test_other_machines_switch_through_ucontext() -> None:
    emulator = Emulator.build("checks.cpp", ["-DCTA_UCONTEXT"])
    for seed in range(3):
        assert run_pipeline(emulator, NONE, seed)
        test_misuse_is_named(emulator, 13, seed)
    test_atomics_lose_nothing(emulator)


def test_a_long_kernel_runs_in_seconds(emulator: Emulator) -> None:
    for seed in (0, 1):
        out = torch.zeros(4 * 320, dtype=torch.int32)
        emulator.call("run_many", 4, 3000, out, seed=seed, time_limit_s=60)
        assert int(out.sum()) > 0
