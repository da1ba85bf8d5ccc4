"""Rows of regions with different ratios through packing, reading, and going back: the view and the moves, no model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvstore.client import OpenRequest
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from kvstore.local import LocalAttachment
from protos.errors import PreconditionFailed
from protos.page_hash import PAGE_TOKENS
from worker import kv_moves
from worker.batch import GroupBatch
from worker.kv_moves import SealJob, SpanRows
from worker.kv_view import KvView, place_of

REGIONS = (Region(0, "k", 2, 16, "float32"), Region(1, "csa", 1, 16, "float32", ratio=4))
RATIOS = {(0, "k"): 1, (1, "csa"): 4}
LENGTH = 700
NO_WORKSPACE: Any = None  # every row is in a ring


class Store:
    """One sequence in one group, whose rows are random and kept here as they were written."""

    def __init__(self, mode: str, preset: str = "", regions: tuple[Region, ...] = REGIONS, version: int = 1) -> None:
        geometry = CacheGeometry((LayerGroup("g", regions, mode, preset, page_layout_version=version),))
        self.attachment = LocalAttachment(geometry, num_pages=16, max_sequences=2, max_sequence_tokens=1024)
        (self.group,) = geometry.groups
        self.kv = KvView(geometry, self.attachment.arenas, self.attachment.tails)
        (answer,) = self.attachment.open([OpenRequest("r", "", range(LENGTH), 1024)])
        self.slot: int = answer.slot  # type: ignore[union-attr]
        generator = torch.Generator().manual_seed(5)
        self.rows = {
            (r.layer, r.kind): torch.randn(1024 // r.ratio, r.heads, r.dim, generator=generator) for r in regions
        }
        self.base, self.pages = 0, list[int]()
        for end in range(100, LENGTH + 1, 100):
            self.append(end - 100, end)

    def append(self, first: int, end: int) -> None:
        control = self.attachment.control
        new = self.attachment.reserve([(self.slot, end, 1)]).get(self.slot, {}).get("g", [])
        dense = self.kv.geometry.groups[0].mode == "dense"
        self.pages += [page.page_id for page in new] if dense else []
        for key, rows in self.rows.items():
            view, ratio = self.kv.view(*key), RATIOS[key]
            for row in range(first // ratio, end // ratio):
                if dense:
                    per_page = PAGE_TOKENS // ratio
                    assert view.pages is not None
                    view.pages[self.pages[row // per_page], row % per_page] = rows[row]
                else:
                    view.ring(self.slot, row, 1)[0][0] = rows[row]
        control.commit(self.slot, end)
        job = SealJob(SpanRows("g", self.slot, first, end - first, -1), new)
        checksums = {} if dense else kv_moves.pack(self.kv, [job], NO_WORKSPACE)
        self.take(self.attachment.seal([(self.slot, end, 1)], checksums).bases[self.slot])

    def truncate(self, num_tokens: int) -> None:
        truncated = self.attachment.truncate(self.slot, num_tokens)
        kv_moves.copy_pages(self.kv, truncated.copies)
        kv_moves.refill_tails(self.kv, truncated.refills, "rollback")
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
    tail = LENGTH % PAGE_TOKENS if mode[0] == "dense" else LENGTH % store.kv.geometry.tail_tokens(store.group)
    to = store.pages[LENGTH // PAGE_TOKENS] if mode[0] == "dense" else store.slot
    where = GroupBatch((), None, torch.tensor([to]), torch.tensor([tail]))
    with pytest.raises(PreconditionFailed) as caught:
        store.kv.append(store.kv.view(0, "k"), torch.ones(shape), where)
    assert (caught.value.reason, caught.value.allowed) == ("GEOMETRY_MISMATCH", "2 x 16")
    assert torch.equal(store.span((0, "k"), 0, LENGTH), before)
    store.kv.append(store.kv.view(0, "k"), torch.ones(1, 2, 16), where)
    assert bool((store.span((0, "k"), LENGTH, 1) == 1).all())
