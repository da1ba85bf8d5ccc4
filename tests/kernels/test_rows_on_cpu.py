"""The reader of 16-bit rows (csrc/rows.cuh, decode_rows.cu), run on a CPU lane by lane, against kernels/attention.py.

Whatever no query may see is poison: unused pages and ring rows hold NaN, page-table entries below the window lie far
outside the pool, and outputs start as NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.attention import PackedRegion, Part, attend_dense, attend_packed, merge
from kernels.cells import AttentionVariant, rows_cell
from kernels.decode_args import Counters, DecodeArgs, Item, Plan
from kernels.decode_workspace import page_row_chunks
from kernels.page_codec import RegionRows, arena_planes, pack_pages, row_codec
from kernels.page_layout import Region, page_layout
from tests.kernels.emulator import Emulator, needs_compiler

pytestmark = needs_compiler

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
PAGE, RING = 128, 208  # tokens; the ring wraps within a tail
OUTSIDE = 2**30  # a page id that nobody may use
RING_ROWS = 2  # kind of an item
WIDTHS = (64, 128, 256, 512)
ERROR = 1e-2


@dataclass(frozen=True)
class Case:
    source: str = "dense"
    width: int = 128
    row_type: str = "bf16"
    lengths: tuple[int, ...] = (1, 17, 127, 128, 129, 300, 0, 2500)
    tail_tokens: tuple[int, ...] = ()  # tokens that stay in the tail, a sequence, where the mode has tails
    kv_heads: int = 2
    group: int = 4
    num_queries: int = 1
    window: int = 0
    softcap: float = 0.0
    norm: float = 1.0  # of keys and values, times sqrt(width)
    sm_scale: float = 0.0
    columns: int = 8
    seed: int = 0
    no_tail: bool = False  # the last page may be partly filled

    @property
    def shared(self) -> bool:
        return self.source.startswith("tq")

    @property
    def has_tail(self) -> bool:
        return self.source != "dense" and not self.no_tail


Build = Callable[[Case], Emulator]


@pytest.fixture(scope="session")
def cell_of() -> Build:
    def build(case: Case) -> Emulator:
        variant = AttentionVariant(case.row_type, case.columns, case.softcap > 0)
        return Emulator.of(rows_cell(case.width, case.source, variant))

    return build


class Memory:
    """Pages, tails, queries and workspace of one call; `rows` are what was written, for the reference."""

    def __init__(self, case: Case) -> None:
        self.case = case
        dtype, heads, width = DTYPES[case.row_type], case.kv_heads, case.width
        generator = torch.Generator().manual_seed(case.seed)
        batch, q_heads = len(case.lengths), heads * case.group
        longest = max(case.lengths)
        self.keys = [self._rows(n, generator) for n in case.lengths]
        self.values = self.keys if case.shared else [self._rows(n, generator) for n in case.lengths]
        wide = torch.randn(batch, case.num_queries, q_heads, width + 8, generator=generator).to(dtype)
        self.q = wide[..., :width]  # strided
        self.scale = case.sm_scale or width**-0.5
        self.bases = [self._base(i) for i in range(batch)]

        pages = [-(-base // PAGE) for base in self.bases]
        pool = sum(pages) + 3
        order = torch.randperm(pool, generator=generator).tolist()
        self.table = torch.full((batch, max(1, -(-longest // PAGE)) + 1), OUTSIDE, dtype=torch.int32)
        for i, count in enumerate(pages):
            ids = [order.pop() for _ in range(count)]
            self.table[i, :count] = torch.tensor(ids, dtype=torch.int32)
        self._write_pages(pool, dtype)
        for i in range(batch):  # pages that lie wholly below the window may be freed
            self.table[i, : self._first_seen(i) // PAGE] = OUTSIDE

        self.tails = torch.full((2, batch + 1, RING, heads, width), float("nan"), dtype=dtype)
        self.slots = torch.randperm(batch + 1, generator=generator)[:batch].to(torch.int32)
        for i, n in enumerate(case.lengths):
            for token in range(self.bases[i], n):
                self.tails[0, self.slots[i], token % RING] = self.keys[i][token]
                self.tails[1, self.slots[i], token % RING] = self.values[i][token]

    def _rows(self, n: int, generator: torch.Generator) -> Tensor:
        rows = torch.randn(n, self.case.kv_heads, self.case.width, generator=generator) * self.case.norm
        rows *= torch.exp(0.3 * torch.randn(n, self.case.kv_heads, 1, generator=generator))
        rows[5::31] = 0
        dtype = DTYPES[self.case.row_type]
        return rows.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)

    def _base(self, i: int) -> int:
        n = self.case.lengths[i]
        if not self.case.has_tail:
            return n
        tail = self.case.tail_tokens[i] if self.case.tail_tokens else min(n, 20 + n % 100)
        return (n - tail) // PAGE * PAGE if tail < n else 0

    def _first_seen(self, i: int) -> int:
        n, window = self.case.lengths[i], self.case.window
        return max(0, n - self.case.num_queries - window + 1) if window else 0

    def _write_pages(self, pool: int, dtype: torch.dtype) -> None:
        case = self.case
        if case.source == "dense":
            self.pages = torch.full((pool, 2, PAGE, case.kv_heads, case.width), float("nan"), dtype=dtype)
            for i, base in enumerate(self.bases):
                for token in range(base):
                    page = self.table[i, token // PAGE]
                    self.pages[page, 0, token % PAGE] = self.keys[i][token]
                    self.pages[page, 1, token % PAGE] = self.values[i][token]
            return
        codec = row_codec(case.source, case.width)
        region = Region(PAGE, case.kv_heads, codec.code_bytes, codec.scale_bytes)
        layout = page_layout([region] * (1 if case.shared else 2), 1)
        self.pages = torch.full((pool, layout.page_bytes), 0xFF, dtype=torch.uint8)
        planes = [
            arena_planes(self.pages, layout.regions[k], case.kv_heads, PAGE, codec) for k in range(len(layout.regions))
        ]
        self.regions = [PackedRegion(p, codec) for p in planes]
        self.planes = layout.regions
        for i, base in enumerate(self.bases):
            sides = (self.keys, self.values)[: len(planes)]
            for first in range(0, base, PAGE):
                ids, rows = self.table[i, first // PAGE].long().view(1), slice(first, min(first + PAGE, base))
                pack_pages(
                    ids, [RegionRows(p, codec, side[i][rows][None]) for p, side in zip(planes, sides, strict=True)]
                )

    def arguments(self) -> DecodeArgs:
        case, args = self.case, DecodeArgs()
        batch, vectors = len(case.lengths), case.num_queries * case.group
        size = self.q.element_size()
        keep: list[Tensor] = []

        def new(*shape: int, dtype: torch.dtype = torch.float32, fill: float = float("nan")) -> Tensor:
            keep.append(torch.full(shape, fill, dtype=dtype))
            return keep[-1]

        args.q = self.q.data_ptr()
        args.q_batch_stride, args.q_token_stride, args.q_head_stride = self.q.stride()[:3]
        self.out = new(batch, case.num_queries, case.kv_heads * case.group, case.width).to(self.q.dtype)
        args.out = self.out.data_ptr()
        args.out_batch_stride, args.out_token_stride, args.out_head_stride = self.out.stride()[:3]
        self.lse = new(batch, case.num_queries, case.kv_heads * case.group)
        args.lse = self.lse.data_ptr()
        if case.source == "dense":
            args.k_pages, args.v_pages = (self.pages[:, side].data_ptr() for side in (0, 1))
            args.page_stride = size * self.pages.stride(0)
            args.k_head_stride = args.v_head_stride = size * self.pages.stride(3)
            args.k_row_stride = args.v_row_stride = size * self.pages.stride(2)
        else:
            k, v = self.planes[0], self.planes[-1]
            args.k_pages, args.v_pages = (self.pages.data_ptr() + plane.offset for plane in (k, v))
            args.page_stride = self.pages.stride(0)
            args.k_head_stride, args.v_head_stride = k.head_bytes, v.head_bytes
            args.k_scales_offset, args.v_scales_offset = k.scales_offset, v.scales_offset
        if case.has_tail:
            args.k_tail, args.v_tail = self.tails[0].data_ptr(), self.tails[1].data_ptr()
            args.k_tail_slot_stride = args.v_tail_slot_stride = size * self.tails.stride(1)
            args.tail_row_stride, args.tail_head_stride = size * self.tails.stride(2), size * self.tails.stride(3)
            args.tail_slots, args.ring_rows = self.slots.data_ptr(), RING
        self.base_tensor = torch.tensor(self.bases, dtype=torch.int32)
        self.length_tensor = torch.tensor(case.lengths, dtype=torch.int32)
        args.page_table, args.table_stride = self.table.data_ptr(), self.table.stride(0)
        args.bases, args.num_tokens = self.base_tensor.data_ptr(), self.length_tensor.data_ptr()

        rows = sum(page_row_chunks(-(-n // PAGE), 512) + 1 for n in case.lengths)  # and one of the tail
        self.max_row_items = rows
        self.counters, self.plans, self.items = Counters(), (Plan * batch)(), (Item * rows)()
        self.counters.next_packed = 12345
        for name in ("counters", "plans", "items"):
            setattr(args, name, ctypes.addressof(getattr(self, name)))
        self.prepared = new(batch * case.kv_heads * vectors, case.width)
        args.queries = self.prepared.data_ptr()
        self.partial_out = new(rows, case.kv_heads, vectors, case.width)
        self.partial_ml = new(rows, case.kv_heads, vectors, 2)
        args.partial_out, args.partial_ml = self.partial_out.data_ptr(), self.partial_ml.data_ptr()
        args.max_packed_items, args.max_row_items = 0, rows
        args.num_sequences, args.num_queries, args.kv_heads, args.group = (
            batch,
            case.num_queries,
            case.kv_heads,
            case.group,
        )
        args.window, args.sm_scale, args.softcap, args.minus_one = case.window, self.scale, case.softcap, 2**32 - 1
        self.keep = keep
        return args

    def reference(self, i: int) -> tuple[Tensor, Tensor]:
        """out [T, q_heads, width], lse [T, q_heads]."""
        case, n, base = self.case, self.case.lengths[i], self.bases[i]
        first = n - case.num_queries
        options: dict[str, Any] = {"sm_scale": self.scale, "window": case.window, "softcap": case.softcap}
        found: list[Part] = []
        q = self.q[i].float()
        if case.source == "dense":
            found.append(attend_dense(q, self.keys[i], self.values[i], first_position=first, first_row=0, **options))
        else:
            values = None if case.shared else self.regions[1]
            found.append(
                attend_packed(
                    q, self.regions[0], values, self.table[i].long(), num_tokens=base, first_position=first, **options
                )
            )
            k, v = self.keys[i][base:], self.values[i][base:]
        if case.has_tail:
            found.append(attend_dense(q, k, v, first_position=first, first_row=base, **options))
        return merge(found), torch.stack([part.lse for part in found]).logsumexp(0)


def run(library: Emulator, case: Case, *, seed: int = 0, ctas: int = 5) -> Memory:
    memory = Memory(case)
    args = memory.arguments()
    batch, vectors = len(case.lengths), case.num_queries * case.group
    library.call("prepare", batch * case.kv_heads * -(-vectors // case.columns), args, seed=seed)
    library.call("attend", ctas, args, seed=seed)
    library.call("merge", batch * case.kv_heads * vectors, args, seed=seed)
    return memory


def check(build: Callable[[Case], Emulator], case: Case, *, seed: int = 0, error: float = ERROR) -> Memory:
    print(f"{case}, seed of the emulator {seed}")
    memory = run(build(case), case, seed=seed)
    for i, n in enumerate(case.lengths):
        out, lse = memory.out[i].double(), memory.lse[i]
        assert bool(out.isfinite().all()), f"sequence {i} of {n} tokens: {(~out.isfinite()).nonzero()[0].tolist()}"
        if n == 0:
            assert not out.any()
            assert bool((lse == -torch.inf).all())
            continue
        want, want_lse = memory.reference(i)
        errors = (out - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-3 * case.norm)
        print(f"{n} tokens: error {errors.max():.2e}, lse {(lse - want_lse).abs().max():.2e}")
        assert float(errors.max()) <= error, f"sequence {i} of {n} tokens: vector {errors.argmax().item()}"
        assert torch.allclose(lse, want_lse, atol=1e-4, rtol=1e-5)
    return memory


def new_seed() -> int:
    return int(torch.seed() % 2**31)


# Of the three packed kinds one has every width; the others differ in how a row is unpacked, not in how it is read.
CELLS = [(source, width) for source in ("dense", "fp8", "tq4") for width in WIDTHS]
CELLS += [(source, width) for source in ("tq3", "tq2") for width in (128, 512)]


@pytest.mark.parametrize(("source", "width"), CELLS)
def test_every_source_and_width(cell_of: Build, source: str, width: int) -> None:
    check(cell_of, Case(source, width, seed=new_seed()))


@pytest.mark.parametrize("source", ["dense", "fp8", "tq4"])
@pytest.mark.parametrize(("num_queries", "group"), [(1, 1), (1, 7), (2, 1), (3, 2), (8, 1), (2, 5), (8, 8), (1, 64)])
def test_any_number_of_vectors(cell_of: Build, source: str, num_queries: int, group: int) -> None:
    lengths = (8, 17, 130, 390)  # the 8 queries of 8 tokens: the first sees one token
    check(cell_of, Case(source, lengths=lengths, num_queries=num_queries, group=group, window=0, seed=new_seed()))


@pytest.mark.parametrize("source", ["dense", "fp8", "tq3"])
@pytest.mark.parametrize("window", [1, 16, 50, 128, 200, 513])
def test_windows(cell_of: Build, source: str, window: int) -> None:
    lengths = (3, 40, 200, 257, 700)
    check(
        cell_of,
        Case(source, lengths=lengths, num_queries=3 if window > 1 else 1, group=2, window=window, seed=new_seed()),
    )


@pytest.mark.parametrize("source", ["dense", "fp8", "tq2"])
@pytest.mark.parametrize("softcap", [1.5, 50.0])
def test_softcap(cell_of: Build, source: str, softcap: float) -> None:
    check(cell_of, Case(source, lengths=(1, 129, 300), softcap=softcap, sm_scale=1.0, seed=new_seed()))


@pytest.mark.parametrize(
    ("source", "columns"), [("dense", 4), ("dense", 8), ("fp8", 8), ("tq4", 8), ("tq3", 4), ("tq2", 4)]
)
def test_f16_and_four_columns(cell_of: Build, source: str, columns: int) -> None:
    check(cell_of, Case(source, 64, "f16", (2, 129, 300), num_queries=2, group=5, columns=columns, seed=new_seed()))


@pytest.mark.parametrize("row_type", DTYPES)
@pytest.mark.parametrize("source", ["dense", "fp8", "tq4"])
def test_rows_of_norm_1e6(cell_of: Build, source: str, row_type: str) -> None:
    width, norm = (128, 1e6 / 128**0.5) if row_type == "bf16" else (64, 2e4)  # f16 ends at 65504 a value
    check(cell_of, Case(source, width, row_type, (1, 129, 300), norm=norm, sm_scale=1e-6, seed=new_seed()))
    # Scores of 1e6 leave the softmax one row, or two, where their difference is below what f32 resolves.
    case = Case(source, width, row_type, (1, 129, 300), norm=norm, seed=new_seed())
    memory = run(cell_of(case), case)
    assert bool(memory.out.isfinite().all())
    for i in range(3):
        assert torch.allclose(memory.lse[i], memory.reference(i)[1], rtol=1e-4)


@pytest.mark.parametrize("tail", [1, 15, 16, 17, 127, 128, 129, 207, 208])
def test_tails_of_any_length_wrap(cell_of: Build, tail: int) -> None:
    lengths = tuple(base + tail for base in (0, 128, 256, 384))  # one ring holds 208 tokens
    check(
        cell_of,
        Case("fp8", 64, lengths=lengths, tail_tokens=(tail,) * 4, num_queries=1 + tail % 3 % tail, seed=new_seed()),
    )


@pytest.mark.parametrize("source", ["dense", "fp8"])
def test_16385_tokens(cell_of: Build, source: str) -> None:
    check(cell_of, Case(source, 64, lengths=(16385, 5), kv_heads=1, seed=new_seed()))


@pytest.mark.parametrize("row_type", DTYPES)
def test_a_large_score_does_not_erase_the_rest(cell_of: Build, row_type: str) -> None:
    """Token 0 takes nearly all of its warp's softmax, but its values are 0: there remain 15 rows of p near 2^-21."""
    case = Case("dense", 128, row_type, (16,), kv_heads=1, group=1, seed=new_seed())
    memory = Memory(case)
    direction = memory.q[0, 0, 0].float() / memory.q[0, 0, 0].float().norm()
    for i in range(16):
        page, row = memory.table[0, i // PAGE], i % PAGE
        logit = 14.5 if i == 0 else 0.1 * (i % 3)
        key = direction * (logit / memory.scale / memory.q[0, 0, 0].float().norm())
        memory.keys[0][i, 0] = memory.pages[page, 0, row, 0] = key.to(memory.keys[0].dtype)
        value = torch.zeros(128) if i == 0 else 1.0 + 0.1 * torch.randn(128)
        memory.values[0][i, 0] = memory.pages[page, 1, row, 0] = value.to(memory.keys[0].dtype)
    library = cell_of(case)
    args = memory.arguments()
    for phase, ctas in (("prepare", 1), ("attend", 3), ("merge", 1)):
        library.call(phase, ctas, args)
    want, _ = memory.reference(0)
    error = (memory.out[0].double() - want).norm() / want.norm()
    print(f"seed {case.seed}: error {error:.2e}")
    assert float(error) <= ERROR


@pytest.mark.parametrize("source", ["dense", "fp8", "tq4"])
def test_a_result_does_not_depend_on_batch_mates_or_turns(cell_of: Build, source: str) -> None:
    case = Case(source, 64, lengths=(300, 700, 17), num_queries=2, seed=new_seed())
    together = run(cell_of(case), case)
    for emulator_seed in (1, 2, 3):
        again = run(cell_of(case), case, seed=emulator_seed, ctas=2 + emulator_seed)
        assert torch.equal(again.out, together.out)
        assert torch.equal(again.lse, together.lse)
    alone = Memory(case)
    args = alone.arguments()
    library = cell_of(case)
    args.num_sequences = 1
    for phase, ctas in (("prepare", 2), ("attend", 1), ("merge", 16)):
        library.call(phase, ctas, args)
    assert torch.equal(alone.out[0], together.out[0])


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("num_warps", "one_round"), [(8, 1), (8, 0), (3, 0), (1, 0)])
def test_the_reader_alone_leaves_a_result_a_warp(cell_of: Build, width: int, num_warps: int, one_round: int) -> None:
    case = Case(
        "fp8", width, lengths=(200, 33, 2), tail_tokens=(200, 33, 2), num_queries=2, group=3, columns=4, seed=new_seed()
    )
    print(case)
    memory, library = Memory(case), cell_of(case)
    args = memory.arguments()
    for i, first, count in ((0, 0, 200), (0, 71, 100), (1, 0, 33), (1, 32, 1), (2, 0, 2)):
        n = case.lengths[i]
        rows = slice(first, first + count)
        want = attend_dense(
            memory.q[i],
            memory.keys[i][rows],
            memory.values[i][rows],
            first_position=n - 2,
            first_row=first,
            sm_scale=memory.scale,
        )
        for kv_head, first_vector in ((0, 0), (1, 4)):
            outs = torch.full((num_warps, 4, width + 1), float("nan"))
            mls = torch.full((num_warps, 4, 2), float("nan"))
            item = Item(i, first, count, RING_ROWS)
            library.call("tail", num_warps, args, item, kv_head, first_vector, one_round, outs, width + 1, mls)
            assert bool(outs[..., width:].isnan().all()), "wrote between the columns"
            m, out = mls[..., 0], outs[..., :width]
            weight = (m - m.amax(0).clamp(min=-1e30)).exp2()
            total, out = (mls[..., 1] * weight).sum(0), (out * weight[..., None]).sum(0)
            for column, vector in enumerate(range(first_vector, first_vector + 4)):
                if vector >= 6 or n - 2 + vector // 3 < first:  # no vector, or its position lies before the rows
                    assert total[column] == 0
                    assert bool((m[:, column] == -torch.inf).all())
                    assert not out[column].any()
                    continue
                expected = want.out[vector // 3, 3 * kv_head + vector % 3]
                error = (out[column] / total[column] - expected).norm() / expected.norm().clamp(min=1e-3)
                assert float(error) <= ERROR, (i, first, kv_head, vector)


@pytest.mark.parametrize(("source", "lengths"), [("dense", (1, 300, 0, 40)), ("fp8", (290, 17)), ("dense", (5,) * 40)])
def test_a_call_with_few_units_needs_nothing_of_prepare(cell_of: Build, source: str, lengths: tuple[int, ...]) -> None:
    case = Case(source, 64, lengths=lengths, kv_heads=1, group=9, seed=new_seed())
    expected, memory, library = run(cell_of(case), case), Memory(case), cell_of(case)
    args = memory.arguments()
    library.call("attend", 100, args)
    assert memory.counters.next_packed == 12345
    library.call("prepare", 2 * len(lengths), args)
    library.call("merge", 9 * len(lengths), args)
    assert torch.equal(memory.out, expected.out)
    assert torch.equal(memory.lse, expected.lse)


@pytest.mark.parametrize("source", ["fp8", "tq4"])
@pytest.mark.parametrize("window", [0, 40])
def test_a_last_page_that_is_partly_filled(cell_of: Build, source: str, window: int) -> None:
    """Its other rows are bytes of ones: codes of NaN, scales of NaN."""
    lengths = (1, 15, 16, 127, 129, 300)
    check(cell_of, Case(source, 64, lengths=lengths, window=window, no_tail=True, seed=new_seed()))
