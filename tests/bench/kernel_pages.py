"""Sealing and restoring pages on a GPU: equal to the codec bit for bit, then bytes in and out a second."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.attention import PackedRegion
from kernels.page_checksum import page_checksum
from kernels.page_codec import PackedRows, arena_planes, row_codec, write_records
from kernels.page_layout import FRAGMENTS, ROWS, PageLayout, Region, page_layout
from kernels.pages_cuda import (
    NO_BAD_ROW,
    PageGroup,
    PageRows,
    RegionRows,
    page_group,
    page_table,
    restore_pages,
    seal_pages,
)
from kernels.widths import PRESETS
from tests.bench.kernel_cases import PAGE
from tests.bench.kernel_inputs import pack_rows, unpacked
from tests.bench.kernel_performance import Machine
from tests.bench.kernel_timing import Call

CHECKED = 5  # pages
MAX_SCALE_ULPS = 2  # as tests/kernels/device_check.py allows


@dataclass(frozen=True)
class PagesCase:
    """`layers` layers of one group, keys and values of `kv_heads` heads each (or one shared row), `pages` pages."""

    name: str
    mode: str
    dim: int
    kv_heads: int = 8
    layers: int = 4
    pages: int = 256
    shared: bool = False
    required: float | None = None  # TB/s, in and out
    goal: float | None = None


def cases() -> list[PagesCase]:
    """Named for what they seal; each is measured both ways."""
    return [
        PagesCase("d128", "tq4", 128, required=2.0, goal=3.0),
        PagesCase("d64", "tq4", 64, kv_heads=16),
        PagesCase("d256", "tq4", 256, kv_heads=4),
        PagesCase("d512-shared", "tq4", 512, kv_heads=1, layers=16, shared=True),
        PagesCase("d128-tq3v2", "tq3v2", 128),
        PagesCase("d128-fp8", "fp8", 128),
        PagesCase("d128-step", "tq4", 128, layers=32, pages=32),  # what one step of 32 sequences seals at most
    ]


def small_cases() -> list[PagesCase]:
    """Sizes for compute-sanitizer."""
    small = PagesCase("small", "tq4v3", 128, kv_heads=2, layers=1, pages=3)
    return [
        small,
        replace(small, name="small-d64", mode="tq3v2", dim=64),
        replace(small, name="small-d512", dim=512, kv_heads=1, shared=True, mode="tq4"),
        replace(small, name="small-fp8", mode="fp8"),
    ]


@dataclass
class _Group:
    """Rows in a workspace and pages to hold them, scattered over a pool of garbage."""

    case: PagesCase
    layout: PageLayout
    arena: Tensor
    rows: list[Tensor]  # of each region: [pages * 128, heads, dim]
    page_ids: Tensor
    group: PageGroup
    table: Tensor

    @classmethod
    def make(cls, case: PagesCase, device: torch.device) -> _Group:
        kinds = ("kv",) if case.shared else ("k", "v")
        regions = [
            Region(
                PAGE, case.kv_heads, c.code_bytes, c.scale_bytes, kind, case.dim, int(c.name[2:]) if c.rotated else 0
            )
            for _ in range(case.layers)
            for kind, c in ((kind, row_codec(name, case.dim)) for kind, name in zip(kinds, _codecs(case), strict=True))
        ]
        layout = page_layout(regions, FRAGMENTS if case.mode in PRESETS and not case.shared else ROWS)
        arena = torch.full((case.pages + 3, layout.page_bytes), 0xFF, dtype=torch.uint8, device=device)
        rows = []
        for _ in regions:
            own = torch.randn((case.pages * PAGE, case.kv_heads, case.dim), device=device)
            own *= torch.exp(0.3 * torch.randn((*own.shape[:2], 1), device=device))
            own.view(-1, case.dim)[::997] = 0.0
            rows.append(own.to(torch.bfloat16))
        page_ids = torch.randperm(len(arena), device=device)[: case.pages]
        sources = [RegionRows(at, case.dim, workspace=own) for at, own in zip(layout.regions, rows, strict=True)]
        group = page_group(arena, sources)
        entries = [PageRows(page, PAGE * i, workspace_token=PAGE * i) for i, page in enumerate(page_ids.tolist())]
        return cls(case, layout, arena, rows, page_ids, group, page_table(group, entries).to(device))

    def planes(self, region: int, arena: Tensor) -> PackedRegion:
        codec = row_codec(_codecs(self.case)[region % len(_codecs(self.case))], self.case.dim)
        return PackedRegion(arena_planes(arena, self.layout.regions[region], self.case.kv_heads, PAGE, codec), codec)

    @property
    def bytes_moved(self) -> int:
        """Rows on one side, codes and scales on the other."""
        return sum(own.numel() * 2 for own in self.rows) + self.case.pages * self.layout.page_bytes


def _codecs(case: PagesCase) -> tuple[str, ...]:
    preset = PRESETS.get(case.mode)
    names = (f"tq{preset.key_bits}", f"tq{preset.value_bits}") if preset else (case.mode, case.mode)
    return names[:1] if case.shared else names


def measure_seal(case: PagesCase, machine: Machine) -> dict[str, Any]:
    facts, own, call = _seal(case, machine.device)
    return facts | _rate("seal", own, machine, call) if facts["ok"] else facts


def measure_restore(case: PagesCase, machine: Machine) -> dict[str, Any]:
    facts, own, call = _restore(case, machine.device)
    return facts | _rate("restore", own, machine, call) if facts["ok"] else facts


def check_seal(case: PagesCase, device: torch.device) -> dict[str, Any]:
    return _seal(case, device)[0]


def check_restore(case: PagesCase, device: torch.device) -> dict[str, Any]:
    return _restore(case, device)[0]


def _seal(case: PagesCase, device: torch.device) -> tuple[dict[str, Any], _Group, Call]:
    own = _Group.make(case, device)
    checksums = torch.zeros(case.pages, dtype=torch.int64, device=device)
    flag = torch.full((1,), NO_BAD_ROW, dtype=torch.int64, device=device)
    call = partial(seal_pages, own.group, own.table, checksums, flag)
    call()
    return _check_sealed(own, checksums, flag), own, call


def _restore(case: PagesCase, device: torch.device) -> tuple[dict[str, Any], _Group, Call]:
    own = _Group.make(case, device)
    wanted = []
    for region, rows in enumerate(own.rows):
        packed = own.planes(region, own.arena)
        _write(packed, own.page_ids, rows)
        wanted.append(unpacked(packed, own.page_ids[:CHECKED]).to(torch.bfloat16))
        rows.fill_(float("nan"))
    call = partial(restore_pages, own.group, own.table)
    call()
    wrong = 0
    for rows, want in zip(own.rows, wanted, strict=True):
        got = rows[: len(want)]
        wrong += int((got.contiguous().view(torch.int16) != want.contiguous().view(torch.int16)).sum())
        wrong += int((~rows.isfinite()).sum())
    return {"ok": wrong == 0, "values_wrong": wrong, "error": 0.0}, own, call


def _write(region: PackedRegion, page_ids: Tensor, rows: Tensor) -> None:
    by_page = rows.view(len(page_ids), PAGE, *rows.shape[1:]).transpose(1, 2)
    packed = pack_rows(region.codec, by_page.reshape(-1, region.codec.dim))
    shape = (len(page_ids), rows.shape[1], PAGE, -1)
    write_records(page_ids, region.planes, PackedRows(*(plane.view(shape) for plane in packed)))


def _check_sealed(own: _Group, checksums: Tensor, flag: Tensor) -> dict[str, Any]:
    """Pages of the codec's own kernel, byte for byte; where one differs, by how much its rows do. Others untouched."""
    sealed = own.arena[own.page_ids[:CHECKED]]
    expected = torch.zeros_like(sealed)
    places = torch.arange(len(expected), device=expected.device)
    for region, rows in enumerate(own.rows):
        _write(own.planes(region, expected), places, rows[: len(expected) * PAGE])
    differ = int((sealed != expected).sum())
    unused = torch.ones(len(own.arena), dtype=torch.bool, device=own.arena.device)
    unused[own.page_ids] = False
    untouched = bool((own.arena[unused] == 0xFF).all())
    sums = [page_checksum(page.cpu().numpy().tobytes()) for page in sealed]
    same_sums = [int(value) % 2**64 for value in checksums[:CHECKED]] == sums
    # A code may differ where a coordinate lies on a boundary within rounding; the rows then differ by a step.
    share = differ / sealed.numel()
    ok = share <= 1e-5 and untouched and same_sums and int(flag) == NO_BAD_ROW
    return {"ok": ok, "error": share, "bytes_differ": differ, "checksums": same_sums, "others_untouched": untouched}


def _rate(verb: str, own: _Group, machine: Machine, call: Call) -> dict[str, Any]:
    times = machine.timer.time(call, cold=True)
    case, moved = own.case, own.bytes_moved
    rates = [moved / ms / 1e9 for ms in times.values]
    rate = statistics.median(rates)
    record: dict[str, Any] = {
        "case": f"{verb}-{case.name}",
        "value": round(rate, 3),
        "unit": "TB/s in+out",
        "spread": [round(min(rates), 3), round(max(rates), 3)],
        "repeats": len(rates),
        "floor": round(machine.ceilings.copy / 1e12, 3),
        "floor_by": "bytes: torch's device-to-device copy of 1 GiB in the same run",
        "rival": None,
        "rival_why": "no public kernel writes these pages",
        "error": f"bytes of {CHECKED} pages compared with the codec's own kernels",
        "shape": f"{case.pages} pages of {case.layers} layers, {case.kv_heads} heads, d={case.dim}, {case.mode}",
    }
    facts: dict[str, Any] = {"tb_s": rate, "ms": times.median, "of_copy": rate * 1e12 / machine.ceilings.copy}
    if case.required is not None:
        record |= {"required": case.required, "goal": case.goal}
        facts["required"] = f"{case.required} ({'met' if rate >= case.required else 'MISSED'})"
    return facts | {"record": record}
