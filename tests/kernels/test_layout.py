"""Where planes lie, that converters are inverse, and that a page's bytes follow from its records alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import bitpack, fp8, turboquant
from kernels.errors import LayoutError
from kernels.layout import Region, page_layout, read_region, region_planes, write_region
from kernels.page_layout import Fragments
from kernels.rotation import parts

ROWS = st.sampled_from([1, 32, 128])
HEADS = st.integers(1, 5)


def coded(kind: str, dim: int, bits: int, rows: int = 128, heads: int = 1) -> Region:
    """Rows of TurboQuant."""
    return Region(rows, heads, turboquant.code_bytes(dim, bits), 4 * len(parts(dim)), kind, dim, bits)


regions = st.lists(
    st.tuples(ROWS, HEADS, st.integers(1, 600), st.integers(0, 16)).map(lambda sizes: Region(*sizes))
    | st.builds(
        coded,
        st.sampled_from(["k", "v", "kv", "raw"]),
        st.sampled_from([64, 96, 128, 192, 256, 512]),
        st.sampled_from([2, 3, 4]),
        ROWS,
        HEADS,
    ),
    min_size=1,
    max_size=5,
)
versions = st.sampled_from([1, 2])


def random_records(region: Region, seed: int = 0) -> Tensor:
    """Any bytes; of 3-bit codes only such as `bitpack` makes: 10 in 30 bits of a word."""
    shape = (region.heads, region.rows, region.code_bytes + region.scale_bytes)
    generator = torch.Generator().manual_seed(seed)
    records = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if region.bits == 3 and region.dim & region.dim - 1 == 0:
        codes = torch.randint(0, 8, (region.dim, region.heads * region.rows), dtype=torch.uint8, generator=generator)
        records[..., : region.code_bytes] = bitpack.pack_codes(codes, 3).view(*shape[:2], -1)
    return records


def test_a_tq4_page_of_one_layer_has_these_offsets() -> None:
    """d=128, K at 4 bits and V at 3 bits, 8 heads, 128 tokens: worked out by hand.

    A K head takes 128 * 64 = 8192 of codes and 512 of scales, a V head 128 * 52 = 6656 and 512.
    """
    page = page_layout([Region(128, 8, 64, 4), Region(128, 8, 52, 4)])
    key, value = page.regions
    assert (key.offset, key.scales_offset, key.head_bytes) == (0, 8192, 8704)
    assert (value.offset, value.scales_offset, value.head_bytes) == (8 * 8704, 6656, 7168)
    assert page.page_bytes == 8 * (8704 + 7168) and page.version == 1


def test_codec_sizes_fit_regions() -> None:
    assert turboquant.record_bytes(512, 4) == 256 + 4 and fp8.V4_RECORD_BYTES == 448 + 142
    raw = page_layout([Region(128, 1, 256, 4)]).regions[0]
    assert raw.head_bytes == 128 * 260


def test_a_page_goes_from_rows_to_rows() -> None:
    """The path that a seal takes: pack, records, page, records, unpack; every region keeps its own rows."""
    keys, values = torch.randn(2, 8, 128, 128)
    spec = [Region(128, 8, turboquant.code_bytes(128, bits), 4) for bits in (4, 3)]
    pages = page_layout(spec)
    page = torch.full((pages.page_bytes,), 0xAB, dtype=torch.uint8)
    for index, (rows, bits) in enumerate(((keys, 4), (values, 3))):
        write_region(pages, page, index, turboquant.to_records(turboquant.pack(rows, bits)))
    for index, (rows, bits) in enumerate(((keys, 4), (values, 3))):
        records = turboquant.from_records(read_region(pages, page, index), 128, bits)
        expected = turboquant.unpack(turboquant.pack(rows, bits), 128, bits)
        assert torch.equal(turboquant.unpack(records, 128, bits), expected)
    codes, scales = region_planes(pages, page, 0)
    assert codes.shape == (8, 128, 64)
    assert torch.equal(scales.contiguous().view(torch.float32), turboquant.pack(keys, 4).scales)


def test_which_regions_version_2_keeps_as_fragments() -> None:
    """Keys and values of single parts, in whole groups; at 3 bits a row takes exactly 3/8 byte a code."""
    for kind in "kv":
        for dim in (64, 128, 256, 512):
            for bits in (2, 3, 4):
                for rows in (32, 128):
                    region = coded(kind, dim, bits, rows, heads=2)
                    (at,) = page_layout([region], 2).regions
                    assert at.fragments == Fragments(kind, dim, bits)
                    assert at.row_bytes == dim * bits // 8
                    assert (at.scales_offset, at.head_bytes) == (rows * dim * bits // 8, rows * (dim * bits // 8 + 4))
                    assert page_layout([region], 1).regions[0].fragments is None
    fp8_rows, dense = Region(128, 2, 128, 4, "k", 128), Region(128, 2, 256, 0, "v", 128)
    others = [coded("kv", 512, 4), coded("k", 96, 4), coded("k", 32, 4), coded("v", 128, 4, rows=1), fp8_rows, dense]
    assert page_layout(others, 2).regions == page_layout(others, 1).regions


@given(regions, versions)
@settings(max_examples=100, deadline=None)
def test_planes_are_aligned_disjoint_and_converters_inverse(spec: list[Region], version: int) -> None:
    pages = page_layout(spec, version)
    owner = torch.zeros(pages.page_bytes, dtype=torch.int32)
    for index, region in enumerate(spec):
        place = pages.regions[index]
        assert place.offset % 128 == place.scales_offset % 128 == place.head_bytes % 128 == 0
        for head in range(region.heads):
            start = place.offset + head * place.head_bytes
            owner[start : start + region.rows * place.row_bytes] += 1
            start += place.scales_offset
            owner[start : start + region.rows * region.scale_bytes] += 1
    assert owner.max() == 1 and pages.page_bytes % 128 == 0

    clean = torch.zeros(pages.page_bytes, dtype=torch.uint8)
    dirty = torch.full((pages.page_bytes,), 0xFF, dtype=torch.uint8)
    for index, region in enumerate(spec):
        for page in (clean, dirty):
            write_region(pages, page, index, random_records(region, index))
    assert torch.equal(clean, dirty), "padding kept old bytes"
    for index, region in enumerate(spec):
        assert torch.equal(read_region(pages, clean, index), random_records(region, index))


def test_another_version_is_another_order_of_the_same_records() -> None:
    for kind, bits in (("k", 4), ("v", 4), ("k", 3), ("v", 2)):
        region = coded(kind, 128, bits, heads=2)
        records = random_records(region)
        data = {}
        for version in (1, 2):
            pages = page_layout([region], version)
            data[version] = torch.zeros(pages.page_bytes, dtype=torch.uint8)
            write_region(pages, data[version], 0, records)
            assert torch.equal(read_region(pages, data[version], 0), records)
        assert not torch.equal(data[1][:4096], data[2][:4096])


def test_refusals_name_what_is_wrong() -> None:
    region = Region(128, 2, 64, 4)
    pages = page_layout([region])
    page = torch.zeros(pages.page_bytes, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="version: given 7; allowed: 1, 2"):
        page_layout([region], 7)
    with pytest.raises(LayoutError, match="unknown page layout version"):
        read_region(pages._replace(version=7), page, 0)
    for bad in (Region(0, 1, 1, 1), Region(1, 0, 1, 1), Region(1, 1, 0, 4), Region(1, 1, 1, -1)):
        with pytest.raises(LayoutError, match="geometry"):
            page_layout([bad])
    for wrong_size in (coded("k", 128, 4)._replace(code_bytes=52), coded("k", 128, 4)._replace(scale_bytes=8)):
        with pytest.raises(LayoutError, match=r"allowed: 64 \+ 4 bytes"):
            page_layout([wrong_size], 2)
    for wrong in (page[:-1], page.float(), torch.zeros(2 * pages.page_bytes, dtype=torch.uint8)[::2]):
        with pytest.raises(LayoutError, match=f"{pages.page_bytes}"):
            read_region(pages, wrong, 0)
    for records in (random_records(region)[:1], random_records(region)[..., :-1], random_records(region).int()):
        with pytest.raises(LayoutError, match=r"\(2, 128, 68\)"):
            write_region(pages, page, 0, records)
