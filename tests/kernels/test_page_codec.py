"""Rows in the planes of pages: records against the codecs, bytes, partial writes, refusals, and reading by look-up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels import bitpack, fp8, record_sizes, turboquant
from kernels.errors import ArgumentError, KernelError, LayoutError, NonFiniteRowError, WidthError
from kernels.layout import read_region
from kernels.page_codec import (
    CODEC_NAMES,
    PackedRows,
    Planes,
    RegionRows,
    RowCodec,
    arena_planes,
    copy_records,
    pack_pages,
    read_pages,
    read_records,
    row_codec,
    unpack_pages,
    write_records,
)
from kernels.page_layout import Region, RegionPlanes, page_layout
from kernels.rotation import padded_width, parts, rotate


def codecs(dim: int) -> list[RowCodec]:
    names = [name for name in CODEC_NAMES if name != "v4fp8" or dim == fp8.V4_WIDTH]
    return [row_codec(name, dim, torch.float32) for name in names]


def region_of(codec: RowCodec, heads: int, rows: int, kind: str = "") -> Region:
    bits = int(codec.name[2:]) if codec.rotated else 0
    return Region(rows, heads, codec.code_bytes, codec.scale_bytes, kind, codec.dim, bits)


def arena_of(
    regions: list[tuple[RowCodec, int, int]], pages: int, fill: int = 0, kind: str = "", version: int = 1
) -> tuple[torch.Tensor, list[Planes]]:
    """An arena of `pages` pages of [(codec, heads, rows)], every byte `fill`, and the planes of its regions."""
    layout = page_layout([region_of(*region, kind) for region in regions], version)
    arena = torch.full((pages, layout.page_bytes), fill, dtype=torch.uint8)
    return arena, [
        arena_planes(arena, layout.regions[i], heads, rows, codec) for i, (codec, heads, rows) in enumerate(regions)
    ]


def rows_of(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(*shape, generator=generator) * torch.exp(2 * torch.randn(*shape[:-1], 1, generator=generator))
    rows.view(-1, shape[-1])[0] = 0
    return rows


def test_bytes_of_one_row() -> None:
    def total(codec: RowCodec) -> int:
        return codec.code_bytes + codec.scale_bytes

    # V4-Flash raw row: 1,024 dense, 590 fp8, 260 tq4. llama d=128: 136 for K and V at tq4, so 68 each; 3 bits: 13 u32.
    assert total(row_codec("dense", 512)) == 1024
    assert total(row_codec("v4fp8", 512)) == 590
    assert total(row_codec("tq4", 512)) == 260
    assert 2 * total(row_codec("tq4", 128)) == 136
    assert total(row_codec("tq3", 128)) == 13 * 4 + 4
    assert total(row_codec("tq2", 128)) == 36
    assert total(row_codec("fp8", 128)) == 132
    assert total(row_codec("dense", 64, torch.float32)) == 256
    assert total(row_codec("tq4", 96)) == 48 + 2 * 4


def test_the_sizes_known_without_torch_are_the_codecs_sizes() -> None:
    """The KV store sizes pages by `record_sizes`; a byte of difference would garble every page."""
    for dim in range(record_sizes.MIN_WIDTH, 600):
        for bits in (2, 3, 4):
            codec = row_codec(f"tq{bits}", dim)
            assert codec.code_bytes == record_sizes.code_bytes(dim, bits)
            assert codec.scale_bytes == record_sizes.SCALE_BYTES * len(record_sizes.parts(dim))
    v4 = row_codec("v4fp8", record_sizes.V4_WIDTH)
    assert (v4.code_bytes, v4.scale_bytes) == (record_sizes.V4_FP8_CODE_BYTES, record_sizes.V4_FP8_SCALE_BYTES)


@pytest.mark.parametrize("dim", [64, 96, 100, 128, 256, 512])
def test_records_are_those_of_the_codec(dim: int) -> None:
    page_ids = torch.tensor([2, 0])
    for codec in codecs(dim):
        layout = page_layout([Region(128, 2, codec.code_bytes, codec.scale_bytes)])
        arena, (planes,) = arena_of([(codec, 2, 128)], 3)
        rows = rows_of(1, 2, 128, 2, dim)
        pack_pages(page_ids, [RegionRows(planes, codec, rows)])
        for i, page in enumerate(page_ids.tolist()):
            mine = rows[i].transpose(0, 1)
            match codec.name:
                case "fp8":
                    packed = fp8.pack(mine)
                    want = torch.cat([packed.codes, packed.scales.view(torch.uint8)], dim=-1)
                case "v4fp8":
                    want = fp8.pack_v4(mine)
                case "dense":
                    want = mine.contiguous().view(torch.uint8)
                case _:
                    want = turboquant.to_records(turboquant.pack(mine, int(codec.name[2:])))
            assert torch.equal(read_region(layout, arena[page], 0), want), codec.name
        assert not arena[1].any(), "wrote a page that was not named"


@pytest.mark.parametrize("dim", [64, 96, 100, 128, 256, 512])
def test_rows_come_back_as_the_codec_gives_them(dim: int) -> None:
    page_ids = torch.tensor([1, 3])
    for codec in codecs(dim):
        _, (planes,) = arena_of([(codec, 3, 32)], 4, fill=0xFF)
        rows = rows_of(2, 2, 32, 3, dim)
        pack_pages(page_ids, [RegionRows(planes, codec, rows)])
        want = codec.unpack(codec.pack(rows), torch.float32)
        got = unpack_pages(page_ids, planes, codec, torch.float32)
        assert torch.equal(got, want), codec.name
        assert torch.equal(unpack_pages(page_ids, planes, codec, torch.float32, 5, 7), want[:, 5:12])
        assert not got[0, 0, 0].any(), "a zero row is exact zeros"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    name=st.sampled_from(CODEC_NAMES),
    dim=st.sampled_from([8, 10, 40, 64, 96, 100, 112, 128, 192, 256, 512]),
    heads=st.integers(1, 3),
    rows=st.sampled_from([1, 2, 32, 128]),
    pages=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_reading_equals_the_rotated_rows(name: str, dim: int, heads: int, rows: int, pages: int, seed: int) -> None:
    """What attention reads, un-rotated in float64, is what `unpack` returns."""
    codec = row_codec(name, 512 if name == "v4fp8" else dim, torch.float16)
    dim = codec.dim
    arena, (planes,) = arena_of([(codec, heads, rows)], 5, fill=0xFF)
    page_ids = torch.randperm(5, generator=torch.Generator().manual_seed(seed))[:pages]
    pack_pages(page_ids, [RegionRows(planes, codec, rows_of(seed, pages, rows, heads, dim).to(torch.float16))])
    before = arena.clone()
    values, scale = read_pages(page_ids, planes, codec)
    assert torch.equal(arena, before), "reading writes nothing"
    assert values.shape == (heads, pages * rows, codec.width)
    assert codec.width == (padded_width(dim) if codec.rotated else dim)
    model = values.double() if scale is None else values.double() * scale.double().unsqueeze(-1)
    if codec.rotated:
        model = rotate(model, parts(dim))[..., :dim]
    want = unpack_pages(page_ids, planes, codec, torch.float32).permute(2, 0, 1, 3).reshape(heads, -1, dim).double()
    error = (model - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-10)
    assert error.max() < 1e-6, f"row {int(error.argmax())}: {float(error.max())}"


def test_regions_packed_together_equal_regions_packed_alone() -> None:
    """One call for all layers and sequences that are due: a record does not depend on its neighbours."""
    kinds = [("tq4", 64, 3, 128), ("tq3", 64, 3, 128), ("tq4", 64, 1, 32), ("tq4", 128, 2, 128), ("fp8", 64, 3, 128)]
    regions = [(row_codec(name, dim), heads, rows) for name, dim, heads, rows in kinds]
    together, planes = arena_of(regions, 4)
    alone, own_planes = arena_of(regions, 4)
    rows = [rows_of(i, 2, n, heads, codec.dim) for i, (codec, heads, n) in enumerate(regions)]
    page_ids = torch.tensor([3, 1])
    pack_pages(page_ids, [RegionRows(p, c, r) for p, (c, _, _), r in zip(planes, regions, rows, strict=True)])
    for p, (codec, _, _), r in zip(own_planes, regions, rows, strict=True):
        for i in range(2):
            pack_pages(page_ids[i : i + 1], [RegionRows(p, codec, r[i : i + 1])])
    assert torch.equal(together, alone)
    assert together[page_ids].any(dim=1).all()


def test_a_split_page_keeps_the_records_below_the_cut_and_packs_the_rest() -> None:
    for codec in codecs(64):
        arena, (planes,) = arena_of([(codec, 2, 128)], 3, fill=0xAA)
        rows = rows_of(7, 1, 128, 2, 64)
        pack_pages(torch.tensor([0]), [RegionRows(planes, codec, rows)])
        copy_records(0, 2, [planes], 50)
        pack_pages(torch.tensor([2]), [RegionRows(planes, codec, rows[:, 50:])], first_row=50)
        assert torch.equal(arena[2], arena[0]), codec.name
        copy_records(0, 1, [planes], 50)
        assert (planes.codes[1, :, 50:] == 0xAA).all()


# -- planes in the order of fragments: the same records through the same calls

FRAGMENTS = [(f"tq{bits}", dim, kind) for bits in (2, 3, 4) for dim in (64, 128, 256, 512) for kind in "kv"]


def both_orders(
    name: str, dim: int, kind: str, heads: int, rows: int, fill: int = 0
) -> tuple[RowCodec, list[tuple[torch.Tensor, Planes]]]:
    """The codec, and an arena of 4 pages with its planes in version 1 and in version 2."""
    codec = row_codec(name, dim)
    arenas = [arena_of([(codec, heads, rows)], 4, fill, kind, version) for version in (1, 2)]
    assert [planes.fragments is None for _, (planes,) in arenas] == [True, False]
    return codec, [(arena, planes) for arena, (planes,) in arenas]


@pytest.mark.parametrize(("name", "dim", "kind"), FRAGMENTS)
def test_pages_of_fragments_hold_and_give_the_same_rows(name: str, dim: int, kind: str) -> None:
    codec, arenas = both_orders(name, dim, kind, heads=2, rows=128, fill=0xFF)
    page_ids = torch.tensor([3, 1])
    rows = rows_of(3, 2, 128, 2, dim)
    layout = page_layout([region_of(codec, 2, 128, kind)], 2)
    got = []
    for arena, planes in arenas:
        pack_pages(page_ids, [RegionRows(planes, codec, rows)])
        assert (arena[[0, 2]] == 0xFF).all(), "wrote a page that was not named"
        got.append((read_pages(page_ids, planes, codec), unpack_pages(page_ids, planes, codec, torch.float32, 5, 70)))
    for one, two in zip(*got, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    records = turboquant.to_records(turboquant.pack(rows.transpose(1, 2), int(name[2:])))
    (arena, _) = arenas[1]
    for i, page in enumerate(page_ids.tolist()):
        assert torch.equal(read_region(layout, arena[page], 0), records[i])


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=st.sampled_from([*FRAGMENTS[:12], ("tq3", 512, "v")]),
    rows=st.sampled_from([32, 64, 128]),
    heads=st.integers(1, 3),
    cut=st.integers(0, 128),
    count=st.integers(0, 128),
    seed=st.integers(0, 2**31),
)
def test_parts_of_pages_of_fragments_are_copied_and_written_row_by_row(
    case: tuple[str, int, str], rows: int, heads: int, cut: int, count: int, seed: int
) -> None:
    """A copy of the first rows, and rows packed behind a cut, touch no other row, wherever rows share bytes."""
    codec, arenas = both_orders(*case, heads=heads, rows=rows)
    generator = torch.Generator().manual_seed(seed)
    first, count = min(cut, rows), min(count, rows - min(cut, rows))
    fresh = rows_of(seed, 2, rows, heads, codec.dim)
    before = PackedRows(
        *(
            torch.randint(0, 256, (4, heads, rows, size), dtype=torch.uint8, generator=generator)
            for size in (codec.code_bytes, codec.scale_bytes)
        )
    )
    if codec.name == "tq3":  # bits 30 and 31 of a word are no code's, nor is a place behind the last code
        codes = turboquant.unpack_codes(
            turboquant.PackedRows(before.codes, torch.zeros(4, heads, rows, 1)), codec.dim, 3
        )
        before.codes.copy_(bitpack.pack_codes(codes.view(-1, codec.dim).t(), 3).view(before.codes.shape))
    everything = torch.arange(4)
    for _, planes in arenas:
        write_records(everything, planes, before)
        copy_records(1, 3, [planes], first)
        pack_pages(torch.tensor([3, 0]), [RegionRows(planes, codec, fresh[:, first : first + count])], first)
    rows_in, fragments_in = (read_records(everything, planes) for _, planes in arenas)
    for one, two, old in zip(rows_in, fragments_in, before, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(two[1:3], old[1:3])
        assert torch.equal(two[3, :, :first], old[1, :, :first])
        assert torch.equal(two[3, :, first + count :], old[3, :, first + count :])
        assert torch.equal(two[0, :, :first], old[0, :, :first])
    part = read_records(torch.tensor([3]), arenas[1][1], first, count)
    assert all(torch.equal(p, whole[3:, :, first : first + count]) for p, whole in zip(part, fragments_in, strict=True))


def test_planes_of_fragments_have_no_records_to_look_at() -> None:
    codec, (_, (arena, planes)) = both_orders("tq3", 128, "v", heads=2, rows=128)
    for plane in ("codes", "scales"):
        with pytest.raises(LayoutError, match=r"no records to look at: given .*'v'.*use read_records"):
            getattr(planes, plane)
    (region,) = page_layout([region_of(codec, 2, 128, "v")], 2).regions
    for wrong, rows in ((row_codec("tq3", 64), 128), (row_codec("tq2", 128), 128), (row_codec("fp8", 128), 128)):
        with pytest.raises(LayoutError, match=r"do not lie in this order: .*allowed: tq3 at width 128"):
            arena_planes(arena, region, 2, rows, wrong)
    with pytest.raises(LayoutError, match="a multiple of 32 rows"):
        arena_planes(arena, region, 2, 100, codec)


def test_a_row_that_cannot_be_packed_leaves_every_page_as_it_was() -> None:
    codec = row_codec("tq4", 64)
    arena, (k, v) = arena_of([(codec, 2, 128), (row_codec("fp8", 64), 2, 128)], 2, fill=3)
    bad = rows_of(1, 1, 128, 2, 64)
    bad[0, 77, 1, 5] = float("nan")
    good = rows_of(2, 1, 128, 2, 64)
    for rows in ((bad, good), (good, bad)):
        pairs = [RegionRows(k, codec, rows[0]), RegionRows(v, row_codec("fp8", 64), rows[1])]
        with pytest.raises(NonFiniteRowError):
            pack_pages(torch.tensor([1]), pairs)
        assert (arena == 3).all()


def test_refusals_name_what_is_wrong() -> None:
    codec = row_codec("tq4", 64)
    arena, (planes,) = arena_of([(codec, 2, 128)], 2)
    one = torch.tensor([0])

    def pack(rows: torch.Tensor, first_row: int = 0, with_codec: RowCodec = codec) -> None:
        pack_pages(one, [RegionRows(planes, with_codec, rows)], first_row)

    cases: list[tuple[type[KernelError], str, Callable[[], object]]] = [
        (ArgumentError, "unknown codec", lambda: row_codec("tq5", 64)),
        (WidthError, "V4 raw rows", lambda: row_codec("v4fp8", 128)),
        (WidthError, "no codec for this row width", lambda: row_codec("tq4", 4)),
        (WidthError, "read in pairs", lambda: row_codec("fp8", 65)),
        (ArgumentError, "model's dtype", lambda: row_codec("dense", 64, torch.float64)),
        (LayoutError, "rows do not fit", lambda: pack(torch.zeros(1, 128, 3, 64))),
        (LayoutError, "rows do not fit", lambda: pack(torch.zeros(2, 128, 2, 64))),
        (LayoutError, "rows do not fit", lambda: pack(torch.zeros(1, 128, 2, 64), first_row=1)),
        (LayoutError, "rows do not fit", lambda: pack(torch.zeros(1, 128, 2, 128))),
        (LayoutError, "codec tq3", lambda: pack(torch.zeros(1, 128, 2, 64), with_codec=row_codec("tq3", 64))),
        (LayoutError, "codec tq3", lambda: unpack_pages(one, planes, row_codec("tq3", 64), torch.float32)),
        (LayoutError, "not an arena", lambda: arena_planes(arena[0], layout_region(codec), 2, 128, codec)),
        (LayoutError, "do not fit the region", lambda: arena_planes(arena, layout_region(codec), 3, 128, codec)),
        (LayoutError, "do not fit the region", lambda: arena_planes(arena, layout_region(codec), 2, 256, codec)),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
    assert not arena.any()
    dense, (plane,) = arena_of([(row_codec("dense", 64), 2, 128)], 1)
    with pytest.raises(ArgumentError, match="differ in dtype"):  # a bf16 page never takes f32 rows in silence
        pack_pages(one, [RegionRows(plane, row_codec("dense", 64), torch.ones(1, 128, 2, 64))])
    assert not dense.any()


def layout_region(codec: RowCodec) -> RegionPlanes:
    return page_layout([Region(128, 2, codec.code_bytes, codec.scale_bytes)]).regions[0]
