"""Decode attention over packed pages (csrc/decode_packed.cu), run on a CPU lane by lane, against float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.cells import ROW_TYPES
from kernels.decode_tiling import packed_long_pages, tiling_defines
from kernels.decode_workspace import packed_splits
from kernels.widths import COMPILED_WIDTHS, PRESETS
from tests.kernels.emulator import Emulator, needs_compiler
from tests.kernels.packed_call import PAGE, ROW_CHUNK, Call, Case

pytestmark = [needs_compiler, pytest.mark.slow]  # g++ takes some seconds for each cell

ERRORS = {"f16": 6e-4, "bf16": 4e-3}  # of a vector, relative: two roundings to the dtype
CellOf = Callable[..., Emulator]


@pytest.fixture(scope="session")
def cell_of() -> CellOf:
    def build(case: Case, *options: str) -> Emulator:
        preset = PRESETS[case.preset]
        bits = (preset.key_bits, preset.value_bits)
        defines = {
            "TAILPACK_KERNEL_PREPARE": "prepare_kernel",
            "TAILPACK_KERNEL_ATTEND": "attend_kernel",
            "TAILPACK_KERNEL_MERGE": "merge_kernel",
            "TAILPACK_WIDTH": str(case.width),
            "TAILPACK_KEY_BITS": str(bits[0]),
            "TAILPACK_VALUE_BITS": str(bits[1]),
            "TAILPACK_VECTORS": str(case.vectors),
            "TAILPACK_TYPE": ROW_TYPES[case.row_type],
            "TAILPACK_SOFTCAP": str(int(case.softcap > 0)),
            "TAILPACK_PROFILE": "0",
            **tiling_defines(case.width, *bits, case.vectors),
        }
        flags = [f"-D{name}={value}" for name, value in defines.items()]
        return Emulator.build("decode_packed.cpp", [*flags, *options])

    return build


def run(library: Emulator, case: Case, *, seed: int = 0, ctas: int = 3) -> Call:
    call = Call(case)
    args, batch = call.arguments(), len(case.lengths)
    library.call("prepare", batch * case.kv_heads * call.passes, args, seed=seed)
    library.call("attend", ctas, args, seed=seed)
    library.call("merge", batch * case.num_queries * case.q_heads, args, seed=seed)
    return call


def check(call: Call) -> None:
    case = call.case
    for i, n in enumerate(case.lengths):
        out, lse = call.out[i].double(), call.lse[i].double()
        if n == 0:
            assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
            continue
        want, want_lse = call.reference(i)
        assert bool(out.isfinite().all()), f"sequence {i} of {n} tokens: {(~out.isfinite()).nonzero()[0].tolist()}"
        error = (out - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-3 * case.norm)
        print(f"{n} tokens: error {error.max():.2e}, lse {(lse - want_lse).abs().max():.2e}")
        assert float(error.max()) <= ERRORS[case.row_type], f"sequence {i} of {n} tokens: {error.argmax().item()}"
        assert torch.allclose(lse, want_lse, atol=1e-4 * max(1.0, case.spread), rtol=1e-5)  # q has 16 bits


def seeded(case: Case) -> Case:
    case = replace(case, seed=int(torch.seed() % 2**31))
    print(case)
    return case


CELLS = [(64, "tq4"), (64, "tq4v3"), (64, "tq3v2"), *((128, name) for name in PRESETS)]
CELLS += [(256, "tq4"), (256, "tq3"), (512, "tq4"), (512, "tq4v3"), (512, "tq3v2")]


@pytest.mark.parametrize(("width", "preset"), CELLS)
def test_widths_and_presets(cell_of: CellOf, width: int, preset: str) -> None:
    case = seeded(Case(width, preset, lengths=(1, 130, 0, 700)))
    check(run(cell_of(case), case))


@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_eight_vectors_share_decoded_rows(cell_of: CellOf, width: int) -> None:
    for case in (
        Case(width, row_type="bf16", group=8, lengths=(5, 300, 0, 900), vectors=8),
        Case(
            width, row_type="bf16", group=7, kv_heads=1, num_queries=3, window=200, lengths=(5, 300, 0, 900), vectors=8
        ),
    ):
        check(run(cell_of(case), seeded(case)))


def bits_of(x: Tensor) -> Tensor:
    """What was never written is NaN, which no value equals."""
    return x.contiguous().view(torch.int16)


INFINITY = float("inf")


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize(
    ("group", "num_queries", "window", "sinks"),
    [
        (1, 1, 1, ()),
        (1, 3, 0, (1.0, -2.0)),
        (2, 2, 150, (300.0, 0.5)),
        (4, 3, 300, ()),
        (7, 1, 0, (INFINITY, -INFINITY, 0.5)),
        (8, 1, 128, (0.0,)),
    ],
)
def test_ratios_queries_windows_and_sinks(
    cell_of: CellOf, width: int, group: int, num_queries: int, window: int, sinks: tuple[float, ...]
) -> None:
    lengths = (3, 17, 127, 128, 129, 640, 1500)
    case = seeded(Case(width, lengths=lengths, group=group, num_queries=num_queries, window=window, sinks=sinks))
    check(run(cell_of(case), case))


def test_queries_may_stand_inside_packed_pages(cell_of: CellOf) -> None:
    """No tail at all, and queries that do not see the newest packed rows."""
    case = seeded(Case(lengths=(128, 640, 2432), tails=(0, 0, 0), num_queries=4, group=2))
    check(run(cell_of(case), case))


def test_softcap(cell_of: CellOf) -> None:
    for cap, spread, vectors in ((20.0, 10.0, 4), (5.0, 30.0, 8)):
        case = seeded(Case(softcap=cap, spread=spread, lengths=(3, 129, 900), vectors=vectors, group=vectors))
        check(run(cell_of(case), case))


def test_large_norms_stay_finite(cell_of: CellOf) -> None:
    for norm, spread in ((1e6 / 128**0.5, 8.0), (1e6 / 128**0.5, 2e4), (1e-6, 1.0)):
        case = seeded(Case(row_type="bf16", norm=norm, spread=spread, lengths=(3, 129, 900)))
        call = run(cell_of(case), case)
        if spread < 1e3:
            check(call)
        assert bool(call.out[call.out.isnan()].numel() == 0) and bool(call.out.isfinite().all())


def test_zero_rows_score_zero_and_add_nothing(cell_of: CellOf) -> None:
    case = Case(lengths=(900,), tails=(0,))
    call = Call(case)
    call.rows[0][0][:] = 0  # keys
    call.pages[:] = 0
    call.table[:] = torch.arange(call.table.shape[1])
    call.tails[:] = 0
    args, library = call.arguments(), cell_of(case)
    for name, ctas in (("prepare", 2), ("attend", 3), ("merge", 8)):
        library.call(name, ctas, args)
    assert bool((call.out == 0).all())
    assert torch.allclose(call.lse, torch.tensor(900.0).log().expand_as(call.lse), atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [64, 128])
def test_a_result_does_not_depend_on_batch_mates_or_timing(cell_of: CellOf, width: int) -> None:
    """The same bits alone and in a batch, on few and many CTAs, whatever the order of threads and copies."""
    case = seeded(Case(width, lengths=(5000, 1300), tails=(0, 40), kv_heads=1))
    library = cell_of(case)
    first = run(library, case, ctas=1)
    check(first)
    for seed, ctas in ((0, 4), (1, 2), (2, 7), (3, 3)):
        again = run(library, case, seed=seed, ctas=ctas)
        # The partial results too: an output's own rounding would hide another order of additions.
        for name in ("out", "lse", "partial_out", "partial_ml"):
            assert torch.equal(bits_of(getattr(first, name)), bits_of(getattr(again, name))), (name, seed, ctas)

    alone = Call(replace(case, lengths=(1300,), tails=(40,)))
    batch = Call(case)
    for name in ("q", "slots", "table"):
        setattr(alone, name, getattr(batch, name)[1:])
    alone.pages, alone.tails = batch.pages, batch.tails
    args = alone.arguments()
    for name, ctas in (("prepare", 1), ("attend", 2), ("merge", 4)):
        library.call(name, ctas, args)
    assert torch.equal(alone.out[0], first.out[1]) and torch.equal(alone.lse[0], first.lse[1])


@pytest.mark.parametrize(("width", "vectors"), [(64, 4), (128, 8), (256, 4), (512, 8)])
def test_older_archs_copy_by_lanes_and_have_less_shared_memory(cell_of: CellOf, width: int, vectors: int) -> None:
    case = seeded(Case(width, lengths=(700, 0, 2900), tails=(5, 0, 10), vectors=vectors, kv_heads=1))
    check(run(cell_of(case, "-DTAILPACK_NO_BULK_COPY", "-DTAILPACK_SMALL"), case, seed=7))


def test_large_batches_read_the_plan_that_prepare_writes(cell_of: CellOf) -> None:
    lengths = tuple((37 * i) % 300 for i in range(140))
    case = seeded(Case(64, lengths=lengths, group=1, kv_heads=1))
    check(run(cell_of(case), case, ctas=5))


@pytest.mark.parametrize("width", [64, 128])
def test_items_cover_what_is_seen_once(cell_of: CellOf, width: int) -> None:
    """Long splits of up to 16 pages, or 32 at width 64, come first, then the last 16 pages in splits of up to 4."""
    long_pages = packed_long_pages(width)
    assert long_pages == {64: 32, 128: 16}[width]
    lengths, tails = (7000, 0, 100, 2200, 4500), (300, 0, 100, 300, 20)
    for window in (0, 1000, 50):
        case = seeded(Case(width, lengths=lengths, tails=tails, ring_rows=512, group=1, kv_heads=1, window=window))
        call = run(cell_of(case), case)
        expected: list[tuple[int, int, int]] = []
        for region in ("long", "short"):
            for i, end in enumerate(call.pages_of):
                n = case.lengths[i]
                begin = min(max(0, n - window) // PAGE if window else 0, end)
                short = max(begin, end - 16)
                first, last, step = (begin, short, long_pages) if region == "long" else (short, end, 4)
                expected += [(i, page, min(step, last - page)) for page in range(first, last, step)]
        listed = [(item.sequence, item.first, item.count) for item in call.items[: call.counters.num_packed]]
        assert listed == expected
        assert len(expected) <= sum(packed_splits(pages, long_pages) for pages in call.pages_of)
        for i, n in enumerate(case.lengths):
            seen = max(call.bases[i], n - window if window else 0)
            assert call.plans[i].num_rows == -(-(n - seen) // ROW_CHUNK)


def test_lse_and_sinks_may_be_absent(cell_of: CellOf) -> None:
    case = Case(lengths=(300,))
    library, call = cell_of(case), Call(case)
    args = call.arguments()
    args.lse = None
    for name, ctas in (("prepare", 2), ("attend", 3), ("merge", 8)):
        library.call(name, ctas, args)
    want, _ = call.reference(0)
    assert relative_error(call.out[0], want) < ERRORS["f16"]
    assert bool(call.lse.isnan().all())


def relative_error(out: Tensor, want: Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())
