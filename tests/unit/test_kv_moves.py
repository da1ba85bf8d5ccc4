"""Rows of regions with different ratios through packing, reading, and going back: the view and the moves, no model."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.errors import RowError
from kernels.pages_cuda import PageRows
from kvstore.client import NewPage, OpenRequest, Refill
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from kvstore.local import LocalAttachment
from protos.errors import InternalError, PreconditionFailed
from protos.page_hash import PAGE_TOKENS
from tests.unit.fake_gpu_kernels import FakeGpuKernels
from worker import kv_moves
from worker.batch import GroupBatch, PageWrites, Place, Span, TailWrites, _decode_rows
from worker.gpu_pages import GpuPages
from worker.kv_moves import SealJob, SpanRows
from worker.kv_view import KvView, Workspace, place_of

REGIONS = (Region(0, "k", 2, 16, "float32"), Region(1, "csa", 1, 16, "float32", ratio=4))
RATIOS = {(0, "k"): 1, (1, "csa"): 4}
LENGTH = 700
NO_WORKSPACE = Workspace(SimpleNamespace(workspace_rows=torch.zeros(0)))  # type: ignore[arg-type]
"""Every row is in a ring."""


class Store:
    """One sequence in one group, whose rows are random and kept here as they were written."""

    def __init__(
        self,
        mode: str,
        preset: str = "",
        regions: tuple[Region, ...] = REGIONS,
        version: int = 1,
        *,
        on_gpu: bool = False,
    ) -> None:
        geometry = CacheGeometry((LayerGroup("g", regions, mode, preset, page_layout_version=version),))
        self.attachment = LocalAttachment(geometry, num_pages=16, max_sequences=2, max_sequence_tokens=1024)
        (self.group,) = geometry.groups
        self.kv = KvView(geometry, self.attachment.arenas, self.attachment.tails)
        self.on_gpu = GpuPages(self.kv) if on_gpu else None
        if self.on_gpu is not None:
            self.on_gpu.load()
        (answer,) = self.attachment.open([OpenRequest("r", "", range(LENGTH), 1024)])
        self.slot: int = answer.slot  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(5)
        self.rows = {
            (r.layer, r.kind): torch.randn(1024 // r.ratio, r.heads, r.dim, generator=generator) for r in regions
        }
        self.base, self.pages = 0, list[int]()
        self.checksums: dict[tuple[str, int], int] = {}
        for end in range(100, LENGTH + 1, 100):
            self.append(end - 100, end)

    def append(self, first: int, end: int) -> None:
        control = self.attachment.control
        new = self.attachment.reserve([(self.slot, end, 1)]).get(self.slot, {}).get("g", [])
        dense = self.kv.geometry.groups[0].mode == "dense"
        self.pages += [page.page_id for page in new] if dense else []
        for key, rows in self.rows.items():
            view = self.kv.view(*key)
            ratio = view.region.ratio
            for row in range(first // ratio, end // ratio):
                if dense:
                    per_page = PAGE_TOKENS // ratio
                    assert view.pages is not None
                    view.pages[self.pages[row // per_page], row % per_page] = rows[row]
                else:
                    view.ring(self.slot, row, 1)[0][0] = rows[row]
        control.commit(self.slot, end)
        job = SealJob(SpanRows("g", self.slot, first, end - first, -1), new)
        checksums = {} if dense else kv_moves.pack(self.kv, [job], NO_WORKSPACE, self.on_gpu).checksums()
        self.checksums |= checksums
        self.take(self.attachment.seal([(self.slot, end, 1)], checksums).bases[self.slot])

    def truncate(self, num_tokens: int) -> None:
        truncated = self.attachment.truncate(self.slot, num_tokens)
        kv_moves.copy_pages(self.kv, truncated.copies)
        kv_moves.refill_tails(self.kv, truncated.refills, "rollback", self.on_gpu)
        self.take(truncated.bases)

    def take(self, bases: Any) -> None:
        self.base = bases["g"]
        self.pages = self.attachment.control.sequence_pages(self.slot, "g")

    def span(self, key: tuple[int, str], first: int, length: int) -> torch.Tensor:
        place = place_of(self.pages, self.base, self.slot)
        return self.kv.span(self.kv.view(*key), place, first, length, "attention")


def similar(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    assert ours.shape == theirs.shape
    return bool(torch.nn.functional.cosine_similarity(ours, theirs, dim=-1).min() > 0.95)


@pytest.mark.parametrize("key", list(RATIOS))
def test_a_span_is_dequantised_below_the_base_and_a_view_of_the_tail_above(key: tuple[int, str]) -> None:
    store = Store("turboquant", "tq4")
    rows, ratio = store.rows[key], RATIOS[key]
    assert store.base == 512
    for first in (512, 516, 600, 696):
        assert torch.equal(store.span(key, first, LENGTH - first), rows[first // ratio : LENGTH // ratio])
    assert store.kv.counters.rows_dequantised["attention"] == 0
    straddling = store.span(key, 400, 300)
    assert torch.equal(straddling[112 // ratio :], rows[512 // ratio : LENGTH // ratio])
    assert similar(straddling, rows[400 // ratio : LENGTH // ratio])
    assert store.kv.counters.rows_dequantised["attention"] == 112 // ratio


@pytest.mark.parametrize("num_tokens", [300, 384, 500, 612])
def test_a_truncate_restores_the_rows_of_every_ratio(num_tokens: int) -> None:
    """Every region's tail holds its rows again, and what is appended and sealed next is read as it was written."""
    store = Store("turboquant", "tq4")
    store.truncate(num_tokens)
    assert store.base == max(0, num_tokens - 144) // 128 * 128
    for key, rows in store.rows.items():
        ratio = RATIOS[key]
        assert similar(store.span(key, 0, num_tokens), rows[: num_tokens // ratio]), f"{key} after the truncate"
    store.attachment.control.append_tokens(store.slot, range(num_tokens, 1000))
    for end in range(num_tokens + 100, 1000, 100):
        store.append(end - 100, end)
    for key, rows in store.rows.items():
        assert similar(store.span(key, 0, end), rows[: end // RATIOS[key]]), f"{key} after 300 more tokens"
    assert store.attachment.verify() == []


@pytest.mark.parametrize("num_tokens", [300, 384, 500, 612])
@pytest.mark.parametrize("preset", ["tq4", "tq3"])
def test_the_order_of_pages_changes_no_row(preset: str, num_tokens: int) -> None:
    """Sealed, cut inside a group of rows that share bytes, refilled and sealed again: fragments read as rows do."""
    regions = (replace(REGIONS[0], dim=64), REGIONS[1])
    stores = [Store("turboquant", preset, regions, version) for version in (1, 2)]
    for store, fragments in zip(stores, (False, True), strict=True):
        orders = [view.packed.planes.fragments for view in store.kv.regions.values() if view.packed]
        assert [order is not None for order in orders] == [fragments, False]
        store.truncate(num_tokens)
        store.attachment.control.append_tokens(store.slot, range(num_tokens, 1000))
        for end in range(num_tokens + 100, 1000, 100):
            store.append(end - 100, end)
        assert store.attachment.verify() == []
    assert stores[0].base == stores[1].base > num_tokens - 144
    for key in RATIOS:
        assert torch.equal(stores[0].span(key, 0, end), stores[1].span(key, 0, end))


@pytest.mark.parametrize("num_tokens", [200, 500, 640])
def test_a_truncate_into_a_sealed_dense_page_keeps_the_rows_of_every_ratio(num_tokens: int) -> None:
    store = Store("dense")
    store.attachment.fork(store.slot, "child", 1024)  # holds the sealed pages, so that the cut one is copied
    before = list(store.pages)
    store.truncate(num_tokens)
    assert (store.pages[num_tokens // 128 :] != before[num_tokens // 128 : -(-num_tokens // 128)]) == bool(
        num_tokens % 128
    )
    for key, rows in store.rows.items():
        ratio = RATIOS[key]
        assert torch.equal(store.span(key, 0, num_tokens), rows[: num_tokens // ratio]), f"{key}"


@pytest.mark.parametrize("mode", [("dense", ""), ("turboquant", "tq4")])
@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 4, 16), (1, 2, 8)])
def test_rows_of_other_heads_or_width_are_refused_in_the_middle_of_a_sequence(
    mode: tuple[str, str], shape: tuple[int, ...]
) -> None:
    store = Store(*mode)
    before = store.span((0, "k"), 0, LENGTH).clone()
    page, slot, at, first = (
        torch.tensor([value])
        for value in (store.pages[LENGTH // PAGE_TOKENS] if mode[0] == "dense" else -1, store.slot, LENGTH, 0)
    )
    where = GroupBatch((), PageWrites(None, page, at % PAGE_TOKENS), TailWrites(first, slot, at))
    with pytest.raises(PreconditionFailed) as caught:
        store.kv.append(store.kv.view(0, "k"), torch.ones(shape), where)
    assert (caught.value.reason, caught.value.allowed) == ("GEOMETRY_MISMATCH", "2 x 16")
    assert torch.equal(store.span((0, "k"), 0, LENGTH), before)
    store.kv.append(store.kv.view(0, "k"), torch.ones(1, 2, 16), where)
    assert bool((store.span((0, "k"), LENGTH, 1) == 1).all())


# --- on a GPU ---

GPU_REGIONS = (
    Region(0, "k", 2, 64, "bfloat16"),
    Region(0, "v", 2, 64, "bfloat16"),
    Region(1, "csa", 1, 64, "bfloat16", 4),
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> FakeGpuKernels:
    return FakeGpuKernels(monkeypatch)


@pytest.mark.parametrize("num_tokens", [300, 384, 500, 612])
@pytest.mark.parametrize("mode", [("turboquant", "tq4"), ("turboquant", "tq3v2"), ("fp8", "")])
def test_pages_and_tails_are_those_of_a_cpu(kernels: FakeGpuKernels, mode: tuple[str, str], num_tokens: int) -> None:
    """Rows of several ratios are sealed, cut, refilled, completed and sealed again: byte for byte, checksums too."""
    cpu, gpu = (Store(*mode, GPU_REGIONS, 2, on_gpu=on_gpu) for on_gpu in (False, True))
    for store in (cpu, gpu):
        store.truncate(num_tokens)
        store.attachment.control.append_tokens(store.slot, range(num_tokens, 1000))
        for end in range(num_tokens + 100, 1000, 100):
            store.append(end - 100, end)
        assert store.attachment.verify() == []
    assert cpu.pages == gpu.pages and cpu.base == gpu.base and cpu.checksums == gpu.checksums
    assert torch.equal(cpu.kv.page_bytes("g")[cpu.pages], gpu.kv.page_bytes("g")[gpu.pages])
    assert torch.equal(cpu.kv._tail_slots["g"], gpu.kv._tail_slots["g"])
    assert vars(cpu.kv.counters) | {"seal_ns": 0} == vars(gpu.kv.counters) | {"seal_ns": 0}
    assert kernels.num_launches("seal") > 0 and kernels.num_launches("restore") > 0


def test_a_row_that_does_not_pack_is_named(kernels: FakeGpuKernels) -> None:
    store = Store("turboquant", "tq4", GPU_REGIONS, 2, on_gpu=True)
    store.attachment.control.append_tokens(store.slot, range(LENGTH, 800))
    store.kv.view(0, "v").ring(store.slot, 570, 1)[0][0, 1, 7] = torch.nan
    with pytest.raises(RowError, match=r"row 58 of page \d+, region 1, head 1"):
        store.append(LENGTH, 800)


def test_a_page_that_is_not_held_is_refused(kernels: FakeGpuKernels) -> None:
    """The kernels skip such an entry: the rows would be whatever lay there before."""
    store = Store("turboquant", "tq4", GPU_REGIONS, 2, on_gpu=True)
    refill = Refill("g", store.slot, 256, 200, [store.pages[2], -1])
    with pytest.raises(InternalError, match="not held"):
        kv_moves.refill_tails(store.kv, [refill], "resume", store.on_gpu)


# --- tables ---


@pytest.mark.parametrize("seed", range(3))
def test_every_row_of_a_page_is_where_the_kernel_is_told(seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(300):
        start, count = rng.randrange(600), rng.randrange(1, 300)
        workspace_row = rng.choice([-1, 0, 37])
        span = SpanRows("g", 3, start, count, workspace_row)
        index = rng.randrange(max(1, (start + count) // PAGE_TOKENS))
        kept = rng.choice([0, 0, 5])
        rows = kv_moves._page_rows_of(span, NewPage(index, 9), kept)
        assert (rows.page, rows.tail_slot, rows.begin, rows.end) == (9, 3, kept, PAGE_TOKENS)
        for row in range(PAGE_TOKENS):
            token = index * PAGE_TOKENS + row
            in_ring = workspace_row < 0 or token < start
            told = ("ring", rows.first_token + row)
            if row >= rows.ring_tokens:
                told = ("workspace", rows.workspace_token + row - rows.ring_tokens)
            assert told == (("ring", token) if in_ring else ("workspace", workspace_row + token - start))


@pytest.mark.parametrize("first_page", [0, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 128, 129, 300, 384])
def test_a_refill_reads_each_token_from_its_page(first_page: int, num_tokens: int) -> None:
    page_ids = [40 + i for i in range(-(-num_tokens // PAGE_TOKENS))]
    first = first_page * PAGE_TOKENS
    read = [
        (rows.page, row, rows.first_token + row)
        for rows in kv_moves._refilled(Refill("g", 2, first, num_tokens, page_ids))
        for row in range(rows.begin, rows.end)
    ]
    assert read == [(40 + i // PAGE_TOKENS, i % PAGE_TOKENS, first + i) for i in range(num_tokens)]
    assert all(
        rows[2:5] == PageRows(0, 0, 2, PAGE_TOKENS, 0)[2:5]
        for rows in kv_moves._refilled(Refill("g", 2, first, num_tokens, page_ids))
    ), "all of it goes into the ring of slot 2"


def test_decode_rows_are_those_of_one_token() -> None:
    spans = [Span(0, 1, 300), Span(1, 64, 100, 0), Span(65, 1, 7), Span(66, 1, 255)]
    ids = [torch.tensor(each, dtype=torch.int64) for each in ([5, 9], [1], [], [3])]
    places = [Place(ids[0], 256, 2), Place(ids[1], 0, 1), Place(ids[2], 0, 0), Place(ids[3], 128, 3)]
    rows = _decode_rows(spans, places, torch.device("cpu"))
    assert rows is not None
    assert rows.rows.tolist() == [0, 65, 66] and rows.rows.dtype == torch.int64
    table, bases, num_tokens, tail_slots = rows.step.tensors
    assert tail_slots is not None
    assert table.tolist() == [[5, 9], [-1, -1], [3, -1]]
    assert (bases.tolist(), num_tokens.tolist(), tail_slots.tolist()) == ([256, 0, 128], [301, 8, 256], [2, 0, 3])
    for tensor in (table, bases, num_tokens, tail_slots):
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
    dense = [Place(torch.tensor([7, 8, 9]), full_pages=torch.tensor([7, 8]), last_page=9, last_rows=45) for _ in spans]
    rows = _decode_rows(spans, dense, torch.device("cpu"))
    assert rows is not None
    table, bases, num_tokens, tail_slots = rows.step.tensors
    assert bases.tolist() == num_tokens.tolist() == [301, 8, 256], "its own row is in its page"
    assert tail_slots is None and table.tolist() == [[7, 8, 9]] * 3
    assert _decode_rows(spans[1:2], places[1:2], torch.device("cpu")) is None
