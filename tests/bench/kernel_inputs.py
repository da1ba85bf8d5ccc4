"""Fresh random inputs of a case, on a GPU or the CPU, and what a float64 reference needs of them.

Rows are Gaussian with log-normal norms, one channel with an offset and every 997th row zero. Pages are scattered over a
pool that is garbage elsewhere (0xff: NaN as floats and scales). Packing and unpacking go through the codec's own
kernels (`turboquant_cuda`, checked apart) or the PyTorch reference, never through what is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from kernels import turboquant, turboquant_cuda
from kernels.attention import PackedRegion
from kernels.decode import Batch, DecodeOptions
from kernels.decode_memory import Pages, Tail
from kernels.page_codec import PackedRows, RowCodec, arena_planes, read_records, row_codec, write_records
from kernels.page_layout import FRAGMENTS, ROWS, Region, page_layout
from tests.bench.kernel_cases import PAGE, RING, Case

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
GARBAGE = 0xFF
_ROWS_AT_ONCE = 1 << 20


@dataclass
class Inputs:
    """One layer's memory and one call's tensors."""

    case: Case
    keys: Pages
    values: Pages | None
    tail: Tail | None
    batch: Batch
    q: Tensor
    out: Tensor
    lse: Tensor
    options: DecodeOptions
    page_ids: list[Tensor]  # int64 of each sequence
    bytes_read: int  # what a call must read of pages and tails, windows honoured

    @property
    def dtype(self) -> torch.dtype:
        return self.q.dtype

    def poison(self) -> None:
        """Fill the outputs, and what lies between them, with NaN."""
        base = self.out._base if self.out._base is not None else self.out
        base.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def rows(self, sequence: int) -> Iterator[Tensor]:
        """Keys, then values, of a sequence: f32 [num_tokens, kv_heads, dim] as the pages and the tail have them."""
        length = int(self.batch.num_tokens[sequence])
        base = int(self.batch.bases[sequence])
        num_pages = -(-base // PAGE)
        for side, pages in enumerate((self.keys, self.values if self.values is not None else self.keys)):
            parts = [unpacked(pages, self.page_ids[sequence][:num_pages])[:base]]
            if self.tail is not None and length > base:
                assert self.batch.tail_slots is not None
                ring = self.tail[side][int(self.batch.tail_slots[sequence])]
                at = torch.arange(base, length, device=ring.device) % ring.shape[0]
                parts.append(ring[at].float())
            yield torch.cat(parts)


def unpacked(pages: Pages, page_ids: Tensor) -> Tensor:
    """f32 [n * 128, kv_heads, dim], read back from the pages' bytes."""
    if isinstance(pages, Tensor):
        return pages[page_ids].flatten(0, 1).float()
    planes, codec = pages
    records = read_records(page_ids, planes)
    rows = _unpack(codec, PackedRows(*(plane.flatten(0, 2) for plane in records)))
    heads = planes.heads.shape[1]
    return rows.view(len(page_ids), heads, planes.rows, codec.dim).transpose(1, 2).flatten(0, 1)


def pack_rows(codec: RowCodec, rows: Tensor) -> PackedRows:
    """Records of rows [n, dim]."""
    if rows.is_cuda and codec.rotated:
        packed = turboquant_cuda.pack(rows, int(codec.name[2:]), checked=True)
        return PackedRows(packed.codes, packed.scales.view(torch.uint8))
    return codec.pack(rows)


def _unpack(codec: RowCodec, records: PackedRows) -> Tensor:
    if records.codes.is_cuda and codec.rotated:
        scales = records.scales.contiguous().view(torch.float32)
        packed = turboquant.PackedRows(records.codes.contiguous(), scales)
        return turboquant_cuda.unpack(packed, codec.dim, int(codec.name[2:]), torch.float32)
    return codec.unpack(records, torch.float32)


def random_rows(case: Case, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[count, kv_heads, dim]."""
    shape = (count, case.kv_heads, case.dim)
    if case.rows == "zero":
        return torch.zeros(shape, dtype=dtype, device=device)
    rows = torch.randn(shape, device=device) * torch.exp(0.3 * torch.randn((*shape[:2], 1), device=device))
    rows[..., case.dim // 3] += 2.0
    if case.rows == "huge":
        limit = 1e6 if dtype == torch.bfloat16 else 1e4
        rows *= limit / math.sqrt(case.dim)
    rows.view(-1, case.dim)[::997] = 0.0
    return rows.to(dtype)


def make(case: Case, device: torch.device) -> Inputs:
    """Inputs of a case, drawn from torch's generators."""
    dtype = DTYPES[case.dtype]
    bases = [case.base(n) for n in case.lengths]
    counts = [-(-base // PAGE) for base in bases]
    keys, values, num_pool = _empty_pages(case, sum(counts), device, dtype)
    scattered = torch.randperm(max(sum(counts), 1), device=device) + num_pool - max(sum(counts), 1)
    page_ids = [scattered[end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
    step = max(1, _ROWS_AT_ONCE // (PAGE * case.kv_heads))
    for first in range(0, sum(counts), step):
        some = scattered[: sum(counts)][first : first + step]
        for pages in (keys, values):
            if pages is not None:
                _write(pages, some, random_rows(case, len(some) * PAGE, device, dtype))
    tail, slots = _tails(case, device, dtype)
    if tail is not None:
        _fill_tails(case, tail, slots, bases)
    table = torch.full((len(counts), max(1, *counts)), -1, dtype=torch.int32, device=device)
    for row, ids in zip(table, page_ids, strict=True):
        row[: len(ids)] = ids
    numbers = torch.tensor([bases, case.lengths], dtype=torch.int32, device=device)
    batch = Batch(table, numbers[0], numbers[1], None if tail is None else slots)
    return Inputs(
        case,
        keys,
        values,
        tail,
        batch,
        *_call_tensors(case, device, dtype),
        _options(case, device),
        page_ids,
        _bytes_read(case, keys, values, dtype),
    )


def _empty_pages(case: Case, used: int, device: torch.device, dtype: torch.dtype) -> tuple[Pages, Pages | None, int]:
    """Pages full of garbage, and how many: one that nobody uses at least."""
    if case.mode == "dense":
        head = case.dim * dtype.itemsize * case.kv_heads * PAGE
        num = max(used + 1, -(-case.pool_bytes // (2 * head)))
        sides = 1 if case.shared else 2
        raw = torch.full((num, sides * head), GARBAGE, dtype=torch.uint8, device=device).view(dtype)
        planes = raw.view(num, sides, PAGE, case.kv_heads, case.dim)
        return planes[:, 0], None if case.shared else planes[:, 1], num
    codecs = [row_codec(name, case.dim) for name in case.codecs]
    kinds = ("kv",) if case.shared else ("k", "v")
    regions = [
        Region(
            PAGE,
            case.kv_heads,
            codec.code_bytes,
            codec.scale_bytes,
            kind,
            case.dim,
            int(codec.name[2:]) if codec.rotated else 0,
        )
        for codec, kind in zip(codecs, kinds, strict=True)
    ]
    layout = page_layout(regions, FRAGMENTS if case.packed else ROWS)
    num = max(used + 1, -(-case.pool_bytes // layout.page_bytes))
    arena = torch.full((num, layout.page_bytes), GARBAGE, dtype=torch.uint8, device=device)
    packed = [
        PackedRegion(arena_planes(arena, at, case.kv_heads, PAGE, codec), codec)
        for codec, at in zip(codecs, layout.regions, strict=True)
    ]
    return packed[0], None if case.shared else packed[1], num


def _write(pages: Pages, page_ids: Tensor, rows: Tensor) -> None:
    """Rows [n * 128, kv_heads, dim] to n pages."""
    by_page = rows.view(len(page_ids), PAGE, *rows.shape[1:])
    if isinstance(pages, Tensor):
        pages[page_ids] = by_page
        return
    planes, codec = pages
    head_major = by_page.transpose(1, 2).reshape(-1, codec.dim)
    shape = (len(page_ids), rows.shape[1], PAGE, -1)
    write_records(page_ids, planes, PackedRows(*(plane.view(shape) for plane in pack_rows(codec, head_major))))


def _tails(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tail | None, Tensor]:
    """Rings full of garbage; one slot more than sequences, in which K and V lie side by side."""
    num = len(case.lengths)
    slots = (torch.randperm(num + 1, device=device)[:num]).to(torch.int32)
    if case.kept is None:
        return None, slots
    ring = max(RING, *(n - case.base(n) for n in case.lengths))
    sides = 1 if case.shared else 2
    raw = torch.full((num + 1, sides, ring, case.kv_heads, case.dim), float("nan"), dtype=dtype, device=device)
    return Tail(raw[:, 0], raw[:, sides - 1]), slots


def _fill_tails(case: Case, tail: Tail, slots: Tensor, bases: list[int]) -> None:
    for sequence, (length, base) in enumerate(zip(case.lengths, bases, strict=True)):
        at = torch.arange(base, length, device=slots.device) % tail.keys.shape[1]
        for side in tail[: 1 if case.shared else 2]:
            side[int(slots[sequence]), at] = random_rows(case, length - base, slots.device, side.dtype)


def _call_tensors(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads = len(case.lengths), case.kv_heads * case.group
    shape = (batch, case.queries, heads, case.dim)
    if case.strided:  # queries inside a fused projection, outputs inside wider rows
        fused = torch.randn((batch, case.queries, heads + 2 * case.kv_heads, case.dim + 8), device=device).to(dtype)
        wide = torch.empty((batch, case.queries + 1, heads, case.dim + 16), dtype=dtype, device=device)
        q, out = fused[:, :, :heads, : case.dim], wide[:, 1:, :, 8 : 8 + case.dim]
        q.mul_(1.5)
    else:
        q, out = (1.5 * torch.randn(shape, device=device)).to(dtype), torch.empty(shape, dtype=dtype, device=device)
    return q, out, torch.empty(shape[:3], device=device)


def _options(case: Case, device: torch.device) -> DecodeOptions:
    heads = case.kv_heads * case.group
    sinks = None
    if case.sinks:
        sinks = torch.randn(heads, device=device)
        if case.sinks != "random":
            sinks[::2] = float(case.sinks)
    return DecodeOptions(case.dim**-0.5, case.window, case.softcap, sinks)


def _bytes_read(case: Case, keys: Pages, values: Pages | None, dtype: torch.dtype) -> int:
    """Rows that some query sees, in the bytes of where they lie, and queries and outputs."""
    row_bytes = 0
    for pages in (keys, values):
        if isinstance(pages, PackedRegion):
            planes = pages.planes
            row_bytes += planes.scale_bytes + (planes.fragments.row_bytes if planes.fragments else planes.code_bytes)
        elif pages is not None:
            row_bytes += case.dim * dtype.itemsize
    dense = case.dim * dtype.itemsize * (1 if case.shared else 2)
    total = 0
    for length in case.lengths:
        seen = max(0, length - case.queries - case.window + 1) if case.window else 0
        base = case.base(length)
        total += max(0, base - seen) * row_bytes + (length - max(base, min(seen, length))) * dense
    own = 2 * len(case.lengths) * case.queries * case.kv_heads * case.group * case.dim * dtype.itemsize
    return total * case.kv_heads + own
