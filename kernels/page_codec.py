"""Rows in the planes of a page: one table of codecs, packing and reading of many pages at once.

A page holds a region as two planes a head, codes and scales (`layout`). What the two hold is the codec's choice:

    name     codes of one row                          scales of one row
    tq2..4   the parts' codes, `turboquant`            one f32 a part
    fp8      e4m3 [d]                                  one f32
    v4fp8    448 e4m3 | 64 bf16, d = 512 only          7 bf16 amax of blocks of 64
    dense    the row in the model's dtype              none

A codec reads rows in the *attention domain*: TurboQuant's rotated coordinates as they are (`rotated`), anything else in
the model's own. Reading is a look-up of several codes at once, straight into f32.

Planes in the order of `fragments` (page layout version 2) are read and written through canonical records, on any
device: the reference of the GPU kernels, and the path of what these do not do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import bitpack, fp8, fragments, turboquant
from kernels.errors import ArgumentError, LayoutError, WidthError
from kernels.page_layout import GROUP_ROWS, Fragments, RegionPlanes
from kernels.rotation import padded_width, parts

CODEC_NAMES: tuple[str, ...] = ("tq2", "tq3", "tq4", "fp8", "v4fp8", "dense")


@dataclass(frozen=True)
class Planes:
    """One region of every page of an arena, as views that live as long as the arena does."""

    heads: Tensor  # u8 [pages, heads, head_bytes]: a head's codes, then its scales
    rows: int
    code_bytes: int  # a row, canonical
    scale_bytes: int  # a row
    scales_offset: int  # from a head's start
    fragments: Fragments | None = None  # the order of the rows; None: one after the other, as records

    @property
    def codes(self) -> Tensor:
        """u8 [pages, heads, rows, code_bytes]; for planes of records. Raises LayoutError for others."""
        return self._records(0, self.code_bytes)

    @property
    def scales(self) -> Tensor:
        """u8 [pages, heads, rows, scale_bytes]; for planes of records. Raises LayoutError for others."""
        return self._records(self.scales_offset, self.scale_bytes)

    def groups(self, order: Fragments) -> PackedRows:
        """u8 [pages, heads, groups, bytes of a group's codes] and [..., of its scales]; for planes in that order."""
        codes, scales = order.group_bytes, fragments.SCALE_GROUP_BYTES
        count = self.rows // GROUP_ROWS
        return PackedRows(self._plane(0, count, codes), self._plane(self.scales_offset, count, scales))

    def _records(self, offset: int, size: int) -> Tensor:
        if self.fragments is not None:
            raise LayoutError(
                "these planes hold no records to look at",
                given=str(self.fragments),
                allowed="planes that keep row after row",
                action="use read_records and write_records",
            )
        return self._plane(offset, self.rows, size)

    def _plane(self, offset: int, count: int, size: int) -> Tensor:
        pages, heads, _ = self.heads.shape
        return self.heads[..., offset : offset + count * size].view(pages, heads, count, size)


class PackedRows(NamedTuple):
    """Packed rows with any leading dims: u8 [..., code_bytes] and u8 [..., scale_bytes]."""

    codes: Tensor
    scales: Tensor


@dataclass(frozen=True)
class RowCodec:
    """How rows of width `dim` are packed. `width` is the number of coordinates in the attention domain (`dim`, padded).

    pack: rows f32, f16 or bf16 [..., dim] -> PackedRows; raises what the codec raises (NonFiniteRowError and others).
    unpack: PackedRows, dtype -> rows [..., dim] of dtype in the model's coordinates.
    read: PackedRows, any strides but for the last dim -> values f32 [..., width], and row scales f32 [...] still to be
        multiplied, or None. New tensors.
    """

    name: str
    dim: int
    width: int
    code_bytes: int
    scale_bytes: int
    rotated: bool
    pack: Callable[[Tensor], PackedRows]
    unpack: Callable[[PackedRows, torch.dtype], Tensor]
    read: Callable[[PackedRows], tuple[Tensor, Tensor | None]]


@lru_cache
def row_codec(name: str, dim: int, dtype: torch.dtype = torch.bfloat16) -> RowCodec:
    """The codec of that name for rows of width `dim`; `dtype` is what "dense" stores and means nothing to the others.

    Raises ArgumentError (name, dtype), WidthError (a width that the codec does not take).
    """
    if name in ("tq2", "tq3", "tq4"):
        return _turboquant(name, dim, int(name[2:]))
    if name == "fp8":
        return _fp8(dim)
    if name == "v4fp8":
        return _v4fp8(dim)
    if name == "dense":
        return _dense(dim, dtype)
    raise ArgumentError("unknown codec", given=repr(name), allowed=", ".join(CODEC_NAMES), action="name one of these")


# -- TurboQuant ------------------------------------------------------------------------------------------------------


@lru_cache
def _value_table(width: int, bits: int, device: torch.device) -> Tensor:
    """Values of several codes by one index, as one wide element: i64 for two f32 (4 bits: index of 8, 3 bits: of 6),
    c128 for four (2 bits: index of 8). A look-up in one dimension is an element copy; of rows it is a memcpy each."""
    values = turboquant.code_values(width, bits, device)
    together = 4 if bits == 2 else 2
    index = torch.arange(1 << bits * together, device=device)
    columns = [values[index >> bits * j & (1 << bits) - 1] for j in range(together)]
    return torch.stack(columns, dim=1).view(torch.complex128 if bits == 2 else torch.int64).view(-1)


@lru_cache
def _shifts(device: torch.device) -> Tensor:
    """Where the five pairs of 3-bit codes begin in a u32."""
    return torch.arange(0, 30, 6, dtype=torch.int32, device=device)


def _values(codes: Tensor, width: int, bits: int) -> Tensor:
    """Canonical codes u8 [..., bytes] of one part -> f32 [..., width] (a view of more, where width % 10 at 3 bits)."""
    if bits == 3:
        index = codes.contiguous().view(torch.int32).unsqueeze(-1) >> _shifts(codes.device) & 63
    else:
        index = codes.to(torch.int32, memory_format=torch.contiguous_format)
    table = _value_table(width, bits, codes.device)
    values = table.index_select(0, index.view(-1)).view(torch.float32)
    return values.view(*codes.shape[:-1], -1)[..., :width]


def _turboquant(name: str, dim: int, bits: int) -> RowCodec:
    widths = parts(dim)
    code_bytes = turboquant.code_bytes(dim, bits)

    def pack(rows: Tensor) -> PackedRows:
        packed = turboquant.pack(rows, bits)
        return PackedRows(packed.codes, packed.scales.view(torch.uint8))

    def unpack(packed: PackedRows, dtype: torch.dtype) -> Tensor:
        scales = packed.scales.contiguous().view(torch.float32)
        return turboquant.unpack(turboquant.PackedRows(packed.codes, scales), dim, bits, dtype)

    def read(packed: PackedRows) -> tuple[Tensor, Tensor | None]:
        scales = packed.scales.view(torch.float32)
        if len(widths) == 1:
            return _values(packed.codes, dim, bits), scales.squeeze(-1)
        out, byte = [], 0
        for p, width in enumerate(widths):
            size = bitpack.code_bytes(width, bits)
            out.append(_values(packed.codes[..., byte : byte + size], width, bits) * scales[..., p : p + 1])
            byte += size
        return torch.cat(out, dim=-1), None

    return RowCodec(name, dim, padded_width(dim), code_bytes, 4 * len(widths), True, pack, unpack, read)


# -- fp8 -------------------------------------------------------------------------------------------------------------


@lru_cache
def _e4m3_pairs(device: torch.device) -> Tensor:
    """Two f32 by the bit patterns of two e4m3 codes, as i64 [65536]."""
    codes = torch.arange(1 << 16, dtype=torch.int32, device=device).to(torch.uint16).view(torch.uint8)
    return codes.view(torch.float8_e4m3fn).to(torch.float32).view(torch.int64)


def _fp8(dim: int) -> RowCodec:
    if dim < 2 or dim % 2:
        raise WidthError("fp8 rows are read in pairs", given=str(dim), allowed="even widths", action="use mode dense")

    def pack(rows: Tensor) -> PackedRows:
        packed = fp8.pack(rows)
        return PackedRows(packed.codes, packed.scales.view(torch.uint8))

    def unpack(packed: PackedRows, dtype: torch.dtype) -> Tensor:
        return fp8.unpack(fp8.Fp8Rows(packed.codes, packed.scales.contiguous().view(torch.float32)), dtype)

    def read(packed: PackedRows) -> tuple[Tensor, Tensor | None]:
        pairs = packed.codes.view(torch.uint16).to(torch.int32, memory_format=torch.contiguous_format)
        values = _e4m3_pairs(pairs.device).index_select(0, pairs.view(-1)).view(torch.float32)
        return values.view(packed.codes.shape), packed.scales.view(torch.float32).squeeze(-1)

    return RowCodec("fp8", dim, dim, dim, 4, False, pack, unpack, read)


def _v4fp8(dim: int) -> RowCodec:
    if dim != fp8.V4_WIDTH:
        raise WidthError(
            "V4 raw rows have one width", given=str(dim), allowed=str(fp8.V4_WIDTH), action="use plain fp8"
        )
    scale_bytes = 2 * (fp8.V4_CODES // fp8.V4_BLOCK)
    code_bytes = fp8.V4_RECORD_BYTES - scale_bytes

    def pack(rows: Tensor) -> PackedRows:
        records = fp8.pack_v4(rows)
        return PackedRows(records[..., :code_bytes], records[..., code_bytes:])

    def unpack(packed: PackedRows, dtype: torch.dtype) -> Tensor:
        return fp8.unpack_v4(torch.cat(packed, dim=-1), dtype)

    def read(packed: PackedRows) -> tuple[Tensor, Tensor | None]:
        return unpack(packed, torch.float32), None

    return RowCodec("v4fp8", dim, dim, code_bytes, scale_bytes, False, pack, unpack, read)


def _dense(dim: int, dtype: torch.dtype) -> RowCodec:
    if dtype not in turboquant.ROW_DTYPES or dim < 1:
        raise ArgumentError(
            "dense rows have a model's dtype and a width",
            given=f"{dtype}, width {dim}",
            allowed="float32, float16, bfloat16; 1 or more",
            action="correct the geometry",
        )

    def pack(rows: Tensor) -> PackedRows:
        turboquant.check_row_type(rows)
        if rows.dtype != dtype:  # never convert in silence: a dense page holds the row's own bytes
            raise ArgumentError(
                "rows differ in dtype from the page", given=str(rows.dtype), allowed=str(dtype), action="convert first"
            )
        return PackedRows(rows.contiguous().view(torch.uint8), rows.new_empty((*rows.shape[:-1], 0), dtype=torch.uint8))

    def unpack(packed: PackedRows, out_dtype: torch.dtype) -> Tensor:
        return packed.codes.contiguous().view(dtype).to(out_dtype)

    def read(packed: PackedRows) -> tuple[Tensor, Tensor | None]:
        return packed.codes.view(dtype).to(torch.float32), None

    return RowCodec("dense", dim, dim, dim * dtype.itemsize, 0, False, pack, unpack, read)


# -- pages -----------------------------------------------------------------------------------------------------------


def arena_planes(arena: Tensor, region: RegionPlanes, heads: int, rows: int, codec: RowCodec) -> Planes:
    """Views of one region in every page of `arena` u8 [pages, page_bytes] (rows contiguous, any stride between pages).

    They live as long as the arena does. Raises LayoutError where the region does not fit the page or the codec.
    """
    if arena.dtype != torch.uint8 or arena.dim() != 2 or (arena.shape[1] > 1 and arena.stride(1) != 1):
        raise LayoutError(
            "this is not an arena of pages",
            given=f"{arena.dtype} {tuple(arena.shape)}, strides {arena.stride()}",
            allowed="uint8 [pages, page_bytes], contiguous pages",
            action="map the arena as bytes",
        )
    order = region.fragments
    if order and (codec.name, codec.dim, rows % GROUP_ROWS) != (f"tq{order.bits}", order.dim, 0):
        raise LayoutError(
            f"rows of codec {codec.name} at width {codec.dim} do not lie in this order",
            given=f"{rows} rows in {order}",
            allowed=f"tq{order.bits} at width {order.dim}, a multiple of {GROUP_ROWS} rows",
            action="take the planes with the region's own codec",
        )
    codes_end = rows * (order.row_bytes if order else codec.code_bytes)
    scales_end = region.scales_offset + rows * codec.scale_bytes
    end = region.offset + heads * region.head_bytes
    if codes_end > region.scales_offset or scales_end > region.head_bytes or end > arena.shape[1]:
        raise LayoutError(
            f"rows of codec {codec.name} do not fit the region's planes",
            given=f"{rows} rows of {codec.code_bytes} + {codec.scale_bytes} bytes, {heads} heads; {region}",
            allowed=f"planes that hold them, in a page of {arena.shape[1]} bytes",
            action="compare the geometry digests of both ends",
        )
    span = arena[:, region.offset : end].view(len(arena), heads, region.head_bytes)
    return Planes(span, rows, codec.code_bytes, codec.scale_bytes, region.scales_offset, order)


class RegionRows(NamedTuple):
    """Rows of one region for n pages: `rows` [n, count, heads, dim] go to rows [first_row, first_row + count)."""

    planes: Planes
    codec: RowCodec
    rows: Tensor


@torch.no_grad()
def pack_pages(page_ids: Tensor, regions: Sequence[RegionRows], first_row: int = 0) -> None:
    """Pack rows of any number of regions into the pages `page_ids` int64 [n], in place.

    Regions of one codec and dtype are packed in one pass; a row's record does not depend on what is packed beside it.
    Nothing is written unless every row packs. Raises ArgumentError and LayoutError (shapes), and what packing raises.
    """
    groups: dict[tuple[str, int, torch.dtype], list[RegionRows]] = {}
    for region in regions:
        _check_rows(page_ids, region, first_row)
        groups.setdefault((region.codec.name, region.codec.dim, region.rows.dtype), []).append(region)
    packed: list[tuple[RegionRows, PackedRows]] = []
    for members in groups.values():
        codec = members[0].codec
        rows = [member.rows.reshape(-1, codec.dim) for member in members]
        together = codec.pack(torch.cat(rows) if len(rows) > 1 else rows[0])
        first = 0
        for member, own in zip(members, rows, strict=True):
            packed.append((member, PackedRows(*(plane[first : first + len(own)] for plane in together))))
            first += len(own)
    for region, part in packed:
        n, count, heads, _ = region.rows.shape
        head_major = (plane.view(n, count, heads, plane.shape[-1]).transpose(1, 2) for plane in part)
        write_records(page_ids, region.planes, PackedRows(*head_major), first_row)


@torch.no_grad()
def unpack_pages(
    page_ids: Tensor, planes: Planes, codec: RowCodec, dtype: torch.dtype, first_row: int = 0, count: int | None = None
) -> Tensor:
    """Rows [n, count, heads, dim] of `dtype` from rows [first_row, first_row + count) (by default all) of n pages."""
    check_planes(planes, codec)
    return codec.unpack(read_records(page_ids, planes, first_row, count), dtype).transpose(1, 2)


def copy_records(from_page: int, to_page: int, regions: Sequence[Planes], num_rows: int) -> None:
    """Copy the records of the first `num_rows` rows of a page to another page of the same arena, region by region."""
    for planes in regions:
        if planes.fragments is None:
            for plane in (planes.codes, planes.scales):
                plane[to_page, :, :num_rows] = plane[from_page, :, :num_rows]
        else:
            source, target = torch.tensor([[from_page], [to_page]], device=planes.heads.device)
            write_records(target, planes, read_records(source, planes, 0, num_rows))


def read_records(page_ids: Tensor, planes: Planes, first_row: int = 0, count: int | None = None) -> PackedRows:
    """Records u8 [n, heads, count, bytes] of rows [first_row, first_row + count) (by default all) of n pages, canonical
    whatever the order of the planes; new tensors."""
    end = planes.rows if count is None else first_row + count
    order = planes.fragments
    if order is None:
        return PackedRows(*(plane[:, :, first_row:end][page_ids] for plane in (planes.codes, planes.scales)))
    first = first_row // GROUP_ROWS
    codes, scales = (plane[:, :, first : -(-end // GROUP_ROWS)][page_ids] for plane in planes.groups(order))
    inside = slice(first_row - first * GROUP_ROWS, end - first * GROUP_ROWS)
    return PackedRows(
        fragments.codes_from_groups(codes, order)[:, :, inside], fragments.scales_from_groups(scales)[:, :, inside]
    )


def write_records(page_ids: Tensor, planes: Planes, records: PackedRows, first_row: int = 0) -> None:
    """Write canonical `records` u8 [n, heads, count, bytes] to rows [first_row, first_row + count) of n pages in place.

    Nothing else of the pages changes, also where rows share bytes with others.
    """
    end = first_row + records.codes.shape[2]
    order = planes.fragments
    if order is None:
        for plane, source in zip((planes.codes, planes.scales), records, strict=True):
            plane[page_ids, :, first_row:end] = source
        return
    first, end_group = first_row // GROUP_ROWS, -(-end // GROUP_ROWS)
    begin, num_rows = first * GROUP_ROWS, (end_group - first) * GROUP_ROWS
    if records.codes.shape[2] < num_rows:  # groups of which some rows stay
        whole = read_records(page_ids, planes, begin, num_rows)
        for old, new in zip(whole, records, strict=True):
            old[:, :, first_row - begin : end - begin] = new
        records = whole
    groups = (fragments.codes_to_groups(records.codes, order), fragments.scales_to_groups(records.scales))
    for plane, source in zip(planes.groups(order), groups, strict=True):
        plane[page_ids, :, first:end_group] = source


def read_pages(page_ids: Tensor, planes: Planes, codec: RowCodec) -> tuple[Tensor, Tensor | None]:
    """`RowCodec.read` of whole pages, head-major: f32 [heads, n * rows, width] and [heads, n * rows]; new tensors."""
    if planes.fragments is None:
        local = replace(planes, heads=planes.heads.index_select(0, page_ids))  # one copy a page, of bytes side by side
        records = PackedRows(local.codes, local.scales)
    else:
        records = read_records(page_ids, planes)
    values, scale = codec.read(PackedRows(*(plane.transpose(0, 1) for plane in records)))
    return values.flatten(1, 2), None if scale is None else scale.flatten(1, 2)


def _check_rows(page_ids: Tensor, region: RegionRows, first_row: int) -> None:
    planes, rows, codec = region.planes, region.rows, region.codec
    want = (len(page_ids), planes.heads.shape[1], codec.dim)
    ok = rows.dim() == 4 and (rows.shape[0], *rows.shape[2:]) == want
    if not ok or first_row < 0 or first_row + rows.shape[1] > planes.rows:
        raise LayoutError(
            "rows do not fit the region's pages",
            given=f"rows {tuple(rows.shape)} from row {first_row}",
            allowed=f"[{want[0]}, up to {planes.rows} - first_row, {want[1]}, {want[2]}]",
            action="pass [pages, rows, heads, dim]",
        )
    check_planes(planes, codec)


def check_planes(planes: Planes, codec: RowCodec) -> None:
    """Raise LayoutError unless the planes hold records of `codec`."""
    if (planes.code_bytes, planes.scale_bytes) != (codec.code_bytes, codec.scale_bytes):
        raise LayoutError(
            f"planes do not hold records of codec {codec.name} at width {codec.dim}",
            given=f"{planes.code_bytes} + {planes.scale_bytes} bytes a row",
            allowed=f"{codec.code_bytes} + {codec.scale_bytes} bytes a row",
            action="take the planes with the region's own codec",
        )
