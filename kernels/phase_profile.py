"""Where the time goes inside the attend kernel: the phase-timing variant on random pages, summed up over its CTAs.

Each CTA writes a row of numbers (slots) into the workspace: marks of the global timer, sums of nanoseconds, counts. The
random pages are bytes that no row was packed into: their values mean nothing, reading them costs the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.attention import PackedRegion
from kernels.cells import Cell
from kernels.decode import Batch, DecodeLayer, DecodeOptions
from kernels.decode_args import PAGE_TOKENS
from kernels.decode_memory import Pages
from kernels.decode_tiling import PROFILE_SLOTS
from kernels.decode_workspace import DecodeLimits, new_workspace
from kernels.errors import ArgumentError
from kernels.page_codec import arena_planes, row_codec
from kernels.page_layout import FRAGMENTS, ROWS, Region, page_layout
from kernels.widths import PRESETS

# By source: the slots in order, and what each is. A mark is a time; a sum and a count are of the whole launch.
_ROW_SLOTS = ("start", "dependencies", "first_unit", "attend", "combine", "end", "units", "")
_MQA_SLOTS = ("start", "tile_wait", "row_wait", "score_wait", "weight_wait", "out_wait", "end", "items")
SLOTS: dict[str, tuple[str, ...]] = {
    "decode_packed.cu": PROFILE_SLOTS,
    "decode_rows.cu": _ROW_SLOTS,
    "decode_mqa.cu": _MQA_SLOTS,
}
SUMS = frozenset({"attend", "combine", "tile_wait", "row_wait", "score_wait", "weight_wait", "out_wait"})
COUNTS = frozenset({"items", "units"})
WARM_UPS = 5


@dataclass(frozen=True)
class ProfileShape:
    """One layer's decode call: `batch` sequences of `tokens`, all in pages."""

    mode: str = "tq4"
    width: int = 128
    kv_heads: int = 8
    group: int = 4
    batch: int = 32
    tokens: int = 32768
    queries: int = 1
    softcap: float = 0.0
    shared: bool = False


@dataclass(frozen=True)
class Phase:
    """Over all CTAs that did something. marks: microseconds since the first CTA began; sums: microseconds; counts."""

    name: str
    kind: str
    median: float
    least: float
    most: float


def profile(shape: ProfileShape, device: torch.device) -> dict[str, Any]:
    """Runs the variant and returns JSON: cell, arch, shape, ctas, ms (of the whole call), phases.

    Raises ArgumentError (shape, mode), MachineError (loader).
    """
    layer, batch = _layer(shape, device)
    heads = shape.kv_heads * shape.group
    q = torch.randn((shape.batch, shape.queries, heads, shape.width), device=device).to(layer.dtype)
    out = torch.empty_like(q)
    workspace = new_workspace(layer.workspace_bytes, device)
    layer.use_workspace(workspace)
    layout = layer.workspace_layout
    table = workspace[layout.profile : layout.num_bytes].view(torch.int64)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for turn in range(WARM_UPS + 1):
        if turn == WARM_UPS:
            table.zero_()
            begin.record()
        layer(q, batch, out=out)
    end.record()
    end.synchronize()
    num_slots = len(SLOTS[layer.cell.source])
    rows = table[: len(table) // num_slots * num_slots].view(-1, num_slots).tolist()
    phases = summarise(layer.cell, rows)
    return {
        "cell": layer.cell.name,
        "device": torch.cuda.get_device_name(device),
        "shape": asdict(shape),
        "ctas": sum(any(row) for row in rows),
        "ms": round(float(begin.elapsed_time(end)), 5),
        "phases": [asdict(phase) for phase in phases],
    }


def summarise(cell: Cell, rows: Sequence[Sequence[int]]) -> list[Phase]:
    """Phases of a cell from its CTAs' slots; a CTA that never ran left zeros, a mark that never came is left out."""
    slots = SLOTS[cell.source]
    ran = [row for row in rows if row[0]]
    if not ran:
        return []
    first = min(row[0] for row in ran)
    phases = []
    for i, name in enumerate(slots):
        if name in COUNTS:
            kind, values = "count", [float(row[i]) for row in ran]
        elif name in SUMS:
            kind, values = "sum", [row[i] / 1e3 for row in ran]
        else:
            kind, values = "mark", [(row[i] - first) / 1e3 for row in ran if row[i]]
        if name and values:
            phases.append(Phase(name, kind, statistics.median(values), min(values), max(values)))
    return phases


def _layer(shape: ProfileShape, device: torch.device) -> tuple[DecodeLayer, Batch]:
    pages = -(-shape.tokens // PAGE_TOKENS)
    num_pages = pages * shape.batch
    keys, values = _pages(shape, num_pages, device)
    layer = DecodeLayer(
        keys=keys,
        values=values,
        tail=None,
        q_heads=shape.kv_heads * shape.group,
        dtype=torch.bfloat16,
        options=DecodeOptions(shape.width**-0.5, softcap=shape.softcap),
        limits=DecodeLimits(shape.batch, pages),
        num_queries=shape.queries,
        profile=True,
    )
    table = torch.randperm(num_pages, device=device).to(torch.int32).view(shape.batch, pages)
    tokens = torch.full((shape.batch,), pages * PAGE_TOKENS, dtype=torch.int32, device=device)
    return layer, Batch(table, tokens, tokens.clone(), None)


def _pages(shape: ProfileShape, num_pages: int, device: torch.device) -> tuple[Pages, Pages | None]:
    """Pages of random codes and log-normal scales."""
    sides = 1 if shape.shared else 2
    if shape.mode == "dense":
        size = (num_pages, sides, PAGE_TOKENS, shape.kv_heads, shape.width)
        rows = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
        return rows[:, 0], None if shape.shared else rows[:, 1]
    if shape.mode not in (*PRESETS, "fp8"):
        raise ArgumentError(
            "unknown mode", given=shape.mode, allowed=", ".join((*PRESETS, "fp8", "dense")), action="name one of these"
        )
    preset = PRESETS.get(shape.mode)
    names = (f"tq{preset.key_bits}", f"tq{preset.value_bits}") if preset else ("fp8", "fp8")
    codecs = [row_codec(name, shape.width) for name in names[:sides]]
    kinds = ("kv",) if shape.shared else ("k", "v")
    regions = [
        Region(
            PAGE_TOKENS,
            shape.kv_heads,
            codec.code_bytes,
            codec.scale_bytes,
            kind,
            shape.width,
            int(codec.name[2:]) if codec.rotated else 0,
        )
        for codec, kind in zip(codecs, kinds, strict=True)
    ]
    layout = page_layout(regions, FRAGMENTS if preset and not shape.shared else ROWS)
    arena = torch.randint(0, 120, (num_pages, layout.page_bytes), dtype=torch.uint8, device=device)  # no NaN of e4m3
    packed = []
    for codec, at in zip(codecs, layout.regions, strict=True):
        planes = arena_planes(arena, at, shape.kv_heads, PAGE_TOKENS, codec)
        scales = planes.heads[..., planes.scales_offset : planes.scales_offset + PAGE_TOKENS * codec.scale_bytes]
        scales.copy_(_log_normal(scales.shape, device))
        packed.append(PackedRegion(planes, codec))
    return packed[0], None if shape.shared else packed[1]


def _log_normal(shape: Sequence[int], device: torch.device) -> Tensor:
    """f32 as bytes u8 `shape`."""
    floats = torch.empty((*shape[:-1], shape[-1] // 4), device=device).normal_().mul_(0.3).exp_()
    return floats.view(torch.uint8)
