"""Where planes lie, that converters are inverse, and that a page's bytes follow from its records alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import fp8, layout, turboquant
from kernels.errors import LayoutError
from kernels.layout import Order, Region, page_layout, read_region, region_planes, write_region

regions = st.lists(
    st.builds(Region, st.sampled_from([1, 32, 128]), st.integers(1, 5), st.integers(1, 600), st.integers(0, 16)),
    min_size=1,
    max_size=5,
)


def random_records(region: Region, seed: int = 0) -> Tensor:
    shape = (region.heads, region.rows, region.code_bytes + region.scale_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


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


@given(regions)
@settings(max_examples=60, deadline=None)
def test_planes_are_aligned_disjoint_and_converters_inverse(spec: list[Region]) -> None:
    pages = page_layout(spec)
    owner = torch.zeros(pages.page_bytes, dtype=torch.int32)
    for index, region in enumerate(spec):
        place = pages.regions[index]
        assert place.offset % 128 == place.scales_offset % 128 == place.head_bytes % 128 == 0
        for head in range(region.heads):
            start = place.offset + head * place.head_bytes
            owner[start : start + region.rows * region.code_bytes] += 1
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


def test_another_order_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version changes the order of codes inside its planes and nothing else; readers get canonical records."""
    swap = Order(lambda codes, region: codes.flip(1), lambda codes, region: codes.flip(1))
    monkeypatch.setitem(layout.ORDERS, 2, swap)
    monkeypatch.setattr("kernels.page_layout.VERSIONS", (1, 2))
    region = Region(128, 2, 64, 4)
    records = random_records(region)
    pages = {version: page_layout([region], version) for version in (1, 2)}
    data = {v: torch.zeros(p.page_bytes, dtype=torch.uint8) for v, p in pages.items()}
    for version, page in data.items():
        write_region(pages[version], page, 0, records)
        assert torch.equal(read_region(pages[version], page, 0), records)
    assert pages[1].regions == pages[2].regions and not torch.equal(data[1], data[2])
    assert torch.equal(region_planes(pages[1], data[1], 0)[1], region_planes(pages[2], data[2], 0)[1])


def test_refusals_name_what_is_wrong() -> None:
    region = Region(128, 2, 64, 4)
    pages = page_layout([region])
    page = torch.zeros(pages.page_bytes, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="version: given 7; allowed: 1"):
        page_layout([region], 7)
    with pytest.raises(LayoutError, match="unknown page layout version"):
        read_region(pages._replace(version=7), page, 0)
    for bad in (Region(0, 1, 1, 1), Region(1, 0, 1, 1), Region(1, 1, 0, 4), Region(1, 1, 1, -1)):
        with pytest.raises(LayoutError, match="geometry"):
            page_layout([bad])
    for wrong in (page[:-1], page.float(), torch.zeros(2 * pages.page_bytes, dtype=torch.uint8)[::2]):
        with pytest.raises(LayoutError, match=f"{pages.page_bytes}"):
            read_region(pages, wrong, 0)
    for records in (random_records(region)[:1], random_records(region)[..., :-1], random_records(region).int()):
        with pytest.raises(LayoutError, match=r"\(2, 128, 68\)"):
            write_region(pages, page, 0, records)
