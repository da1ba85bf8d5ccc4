"""The launches of the GPU kernels by PyTorch on a CPU: all of our own Python above them runs as it does on a GPU.

What a kernel would be given is read here as a kernel reads it: addresses, strides, tables and structs, no tensor of the
caller. So a table that is wrong, a stride that is not the row's, or memory that was let go shows in the results.

Results are those of ``kernels.attention``, bit for bit, as a worker on a CPU has them: what rounding does to the codes
of a row, and so to all that follows, hides no mistake.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import decode, loader, pages_cuda
from kernels.attention import PackedRegion, attend_dense, attend_packed, merge
from kernels.cells import PHASES, Cell
from kernels.decode import DecodeLayer
from kernels.decode_args import DecodeArgs
from kernels.page_checksum import page_checksum
from kernels.page_codec import PackedRows, Planes, arena_planes, read_records, row_codec, write_records
from kernels.page_layout import Fragments, Region, RegionPlanes
from kernels.pages_cuda import PAGE_TOKENS, PageGroup, PageRows
from kernels.prefill import DenseHistory, History, attend_chunk
from kernels.record_sizes import SCALE_BYTES, code_bytes
from kernels.widths import PRESETS
from worker import model_runner, weights
from worker.models import gpu_attention

ARCH = "sm_90a"
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
KIND_OF_ORDER = {0: "", 1: "k", 2: "v"}


class FakeGpuKernels:
    """Counts launches by kernel name. A cell must have been loaded before one of its kernels is launched.

    ``serving``: set once a worker is ready, after which nothing may be loaded.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: dict[str, int] = {}
        self.serving = False
        self._loaded: set[Cell] = set()
        monkeypatch.setattr(weights, "torch_device", lambda device: torch.device("cpu"))
        monkeypatch.setattr(gpu_attention, "DecodeLayer", partial(DecodeLayer, arch=ARCH))
        monkeypatch.setattr(gpu_attention, "attend_chunk", _attend_chunk)
        monkeypatch.setattr(decode, "_current_stream", lambda index: 0)
        monkeypatch.setattr(loader, "load", self._load)
        monkeypatch.setattr(model_runner, "fused", lambda network: None)  # a CPU's own operators, to its own bits
        monkeypatch.setattr(loader, "PreparedLaunch", partial(_DecodeLaunch, self))
        monkeypatch.setattr(pages_cuda, "_launch", self._launch_pages)

    def _load(self, cell: Cell, device_index: int) -> dict[str, Any]:
        assert not self.serving or cell in self._loaded, f"{cell.name} is loaded while requests wait for it"
        self._loaded.add(cell)
        return {}

    def count(self, cell: Cell, kernel: str) -> None:
        assert cell in self._loaded, f"{cell.name} was not loaded"
        self.launches[kernel] = self.launches.get(kernel, 0) + 1

    def num_launches(self, part: str) -> int:
        """Of kernels whose name begins so."""
        return sum(count for name, count in self.launches.items() if name.startswith(part))

    def _launch_pages(self, group: PageGroup, kernel: int, pages: Tensor, results: tuple[Tensor, ...]) -> None:
        if len(pages):
            self.count(group.cell, group.cell.kernels[kernel])
            self.run_pages(group, kernel, pages, results)

    def run_pages(self, group: PageGroup, kernel: int, pages: Tensor, results: tuple[Tensor, ...]) -> None:
        """What ``pages_cuda._launch`` launches: kernel 0 seals, 1 restores."""
        if kernel == 0:
            _seal(group, pages, *results)
        else:
            _restore(group, pages)

    def run_decode(self, cell: Cell, phase: str, ctas: int, arguments: DecodeArgs) -> None:
        """One of a decode call's three launches. Here the last does the work of all."""
        assert ctas > 0
        if phase == "merge":
            _decode(cell, arguments)


def memory(address: int, shape: Sequence[int], byte_strides: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The memory at an address, as a view."""
    size = dtype.itemsize
    assert address and not any(stride % size for stride in byte_strides)
    num_bytes = size + sum((count - 1) * stride for count, stride in zip(shape, byte_strides, strict=True))
    flat = torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8).view(dtype)
    return flat.as_strided(tuple(shape), tuple(stride // size for stride in byte_strides))


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    """Runs ``kernels.prefill.attend_chunk``, compares it with the same by ``kernels.attention``, and returns that."""
    first_position, first_row, options = call["first_position"], call["first_row"], call["options"]
    history: History | DenseHistory | None = call["history"]
    got = attend_chunk(q, k, v, **call)
    masks = {"first_position": first_position, "sm_scale": options.sm_scale, "window": options.window}
    if isinstance(history, DenseHistory):  # on a CPU one call has all of their rows
        seen = max(0, first_position - options.window + 1) if options.window else 0
        pages = call["restore"](history.page_ids[seen // PAGE_TOKENS : history.base // PAGE_TOKENS])
        k, v = (torch.cat((x[seen % PAGE_TOKENS :], own)) for x, own in zip(pages, (k, v), strict=True))
        first_row, history = seen, None
    parts = [attend_dense(q, k, v, first_row=first_row, **masks)]
    if history is not None:
        keys, values, page_ids, base = history
        parts.insert(0, attend_packed(q, keys, values, page_ids, num_tokens=base, **masks))
    want = merge(parts)
    assert (got - want).norm() <= 2e-2 * want.norm()
    return want.to(q.dtype)


# --- decode ---


class _DecodeLaunch:
    """``kernels.loader.PreparedLaunch`` of one of a decode cell's three kernels."""

    def __init__(
        self,
        kernels: FakeGpuKernels,
        cell: Cell,
        kernel: str,
        device_index: int,
        arguments: DecodeArgs,
        *,
        threads: int,
        shared_bytes: int = 0,
        overlap: bool = False,
    ) -> None:
        kernels._load(cell, device_index)
        self._kernels, self._cell, self._kernel, self._arguments = kernels, cell, kernel, arguments
        self._ctas = 0

    def set_ctas(self, x: int, y: int = 1) -> None:
        self._ctas = x * y

    def __call__(self, stream: int) -> None:
        self._kernels.count(self._cell, self._kernel)
        phase = PHASES[self._cell.kernels.index(self._kernel)]
        self._kernels.run_decode(self._cell, phase, self._ctas, DecodeArgs.from_buffer_copy(self._arguments))


def _decode(cell: Cell, args: DecodeArgs) -> None:
    dtype = DTYPES[cell.variant.split("-")[0]]
    heads, dim, queries = args.kv_heads * args.group, cell.width, args.num_queries
    q, out = (
        memory(
            getattr(args, name),
            (args.num_sequences, queries, heads, dim),
            [2 * getattr(args, f"{name}_{axis}_stride") for axis in ("batch", "token", "head")] + [2],
            dtype,
        )
        for name in ("q", "out")
    )
    bases, num_tokens = (
        memory(pointer, (args.num_sequences,), (4,), torch.int32).tolist() for pointer in (args.bases, args.num_tokens)
    )
    assert args.lse is None and args.sinks is None and args.softcap == 0
    for b in range(args.num_sequences):
        length, base = num_tokens[b], min(bases[b], num_tokens[b])
        first_query = length - queries
        seen = min(max(0, first_query - args.window + 1), length) if args.window else 0
        masks = {"first_position": first_query, "sm_scale": args.sm_scale, "window": args.window}
        parts = []
        if seen < base:
            table = memory(args.page_table + 4 * b * args.table_stride, (-(-base // PAGE_TOKENS),), (4,), torch.int32)
            page_ids = table.long()
            visible = page_ids[seen // PAGE_TOKENS :]
            assert visible.min() >= 0, f"a kernel would read page {int(visible.min())}"
            num_pages = int(visible.max()) + 1
            if cell.preset == "dense":
                inside = slice(seen % PAGE_TOKENS, base - seen // PAGE_TOKENS * PAGE_TOKENS)
                k, v = (_dense_rows(args, side, visible, num_pages, dim, dtype)[inside] for side in "kv")
                parts.append(attend_dense(q[b], k, v, first_row=seen, **masks))
            else:
                regions = [_packed(cell, args, side, num_pages, dim) for side in "kv"]
                parts.append(attend_packed(q[b], regions[0], regions[1], page_ids, num_tokens=base, **masks))
        first = max(seen, base)
        if first < length:
            (slot,) = memory(args.tail_slots + 4 * b, (1,), (4,), torch.int32).tolist()
            assert slot >= 0 and length - first <= args.ring_rows
            rows = torch.arange(first, length) % args.ring_rows
            k, v = (
                memory(
                    getattr(args, f"{side}_tail") + slot * getattr(args, f"{side}_tail_slot_stride"),
                    (args.ring_rows, args.kv_heads, dim),
                    (args.tail_row_stride, args.tail_head_stride, 2),
                    dtype,
                )[rows]
                for side in "kv"
            )
            parts.append(attend_dense(q[b], k, v, first_row=first, **masks))
        out[b] = merge(parts).to(dtype) if parts else 0


def _dense_rows(args: DecodeArgs, side: str, page_ids: Tensor, num_pages: int, dim: int, dtype: torch.dtype) -> Tensor:
    strides = (args.page_stride, *(getattr(args, f"{side}_{axis}_stride") for axis in ("row", "head")), 2)
    pages = memory(getattr(args, f"{side}_pages"), (num_pages, PAGE_TOKENS, args.kv_heads, dim), strides, dtype)
    return pages[page_ids].flatten(0, 1)


def _packed(cell: Cell, args: DecodeArgs, side: str, num_pages: int, dim: int) -> PackedRegion:
    order = None
    if cell.preset == "fp8":
        codec = row_codec("fp8", dim)
        assert getattr(args, f"{side}_row_stride") == codec.code_bytes
    else:
        preset = PRESETS[cell.preset]
        bits = preset.key_bits if side == "k" else preset.value_bits
        codec, order = row_codec(f"tq{bits}", dim), Fragments(side, dim, bits)
    scales_offset: int = getattr(args, f"{side}_scales_offset")
    heads = memory(
        getattr(args, f"{side}_pages"),
        (num_pages, args.kv_heads, scales_offset + PAGE_TOKENS * codec.scale_bytes),
        (args.page_stride, getattr(args, f"{side}_head_stride"), 1),
        torch.uint8,
    )
    planes = Planes(heads, PAGE_TOKENS, codec.code_bytes, codec.scale_bytes, scales_offset, order)
    return PackedRegion(planes, codec)


# --- pages ---


class _Region:
    """A row of the table of regions, as csrc/page_rows.cuh has it."""

    def __init__(self, group: PageGroup, index: int) -> None:
        fields = group.regions[index].tolist()
        self.tail, self.slot_stride, self.tail_row_stride, self.tail_head_stride, self.ring_rows = fields[:5]
        self.workspace, self.workspace_row_stride, self.workspace_head_stride = fields[5:8]
        offset, head_bytes, scales_offset, self.rows, self.ratio, order, bits, self.dim = fields[8:]
        units = [tuple(unit[1:3]) for unit in group.units.tolist() if unit[0] == index]
        self.heads = 1 + max(head for head, _ in units)
        assert sorted(units) == [(head, row) for head in range(self.heads) for row in range(0, self.rows, 32)]
        self.codec = row_codec(f"tq{bits}" if bits else "fp8", self.dim)
        kind = KIND_OF_ORDER[order]
        size = code_bytes(self.dim, bits) if bits else self.dim
        place = Region(self.rows, self.heads, size, SCALE_BYTES, kind, self.dim, bits)
        fragments = Fragments(kind, self.dim, bits) if kind else None
        at = RegionPlanes(place, offset, scales_offset, head_bytes, fragments)
        self.planes = arena_planes(group.arena, at, self.heads, self.rows, self.codec)
        self.codes_end, self.scales_end = self.rows * at.row_bytes, scales_offset + self.rows * SCALE_BYTES

    def outside(self, page: PageRows, first: int, end: int, dtype: torch.dtype) -> list[Tensor]:
        """Rows [first, end) of a page where they lie outside it, each [heads, dim], views."""
        in_ring, rows = page.ring_tokens // self.ratio, []
        for row in range(first, end):
            if row < in_ring:
                ring_row = (page.first_token // self.ratio + row) % self.ring_rows
                address = self.tail + page.tail_slot * self.slot_stride + ring_row * self.tail_row_stride
                stride = self.tail_head_stride
            else:
                at = page.workspace_token // self.ratio + row - in_ring
                address, stride = self.workspace + at * self.workspace_row_stride, self.workspace_head_stride
            rows.append(memory(address, (self.heads, self.dim), (stride, dtype.itemsize), dtype))
        return rows


def _entries(group: PageGroup, pages: Tensor) -> tuple[list[PageRows], list[_Region], torch.dtype]:
    regions = [_Region(group, index) for index in range(len(group.regions))]
    return [PageRows(*row[:7]) for row in pages.tolist()], regions, DTYPES[group.cell.variant]


def _seal(group: PageGroup, pages: Tensor, checksums: Tensor, first_bad_row: Tensor) -> None:
    entries, regions, dtype = _entries(group, pages)
    for entry, page in enumerate(entries):
        if page.page < 0:
            continue
        for index, region in enumerate(regions):
            kept = page.begin // region.ratio
            heads = region.planes.heads[page.page]
            heads[:, region.codes_end : region.planes.scales_offset] = 0
            heads[:, region.scales_end :] = 0
            if kept == region.rows:
                continue
            rows = torch.stack(region.outside(page, kept, region.rows, dtype)).transpose(0, 1)
            bad = ~rows.isfinite().all(-1)
            for head, row in bad.nonzero().tolist():
                flag = entry << 32 | index << 20 | head << 8 | (kept + row)
                first_bad_row[0] = min(int(first_bad_row[0]), flag)
            packed = region.codec.pack(rows.masked_fill(bad.unsqueeze(-1), 0))
            scales = packed.scales.view(torch.float32).masked_fill(bad.unsqueeze(-1), torch.nan)
            records = PackedRows(packed.codes.unsqueeze(0), scales.view(torch.uint8).unsqueeze(0))
            write_records(torch.tensor([page.page]), region.planes, records, kept)
        total = page_checksum(group.arena[page.page].numpy().data) + int(checksums[entry])
        checksums[entry] = (total + 2**63) % 2**64 - 2**63


def _restore(group: PageGroup, pages: Tensor) -> None:
    entries, regions, dtype = _entries(group, pages)
    for page in entries:
        if page.page < 0:
            continue
        for region in regions:
            begin, end = page.begin // region.ratio, page.end // region.ratio
            records = read_records(torch.tensor([page.page]), region.planes, begin, end - begin)
            rows = region.codec.unpack(records, dtype)[0].transpose(0, 1)
            for place, row in zip(region.outside(page, begin, end, dtype), rows, strict=True):
                place.copy_(row)
