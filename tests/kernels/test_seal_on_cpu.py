"""The CUDA sources that seal and restore pages, run on a CPU lane by lane, equal the PyTorch reference bit for bit.

What a page must hold is written here once more, code by code, from the text of kernels/fragments.py and
kernels/page_checksum.py, so that a mistake in one of the two does not hide in the other.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import fp8, turboquant
from kernels.page_cells import fp8_cell, page_grid, seal_cell, shared_bytes
from kernels.page_layout import FRAGMENTS, ROWS, PageLayout, Region, page_layout
from kernels.pages_cuda import (
    NO_BAD_ROW,
    BadRow,
    PageGroup,
    PageRows,
    RegionRows,
    bad_row,
    page_group,
    page_table,
)
from kernels.record_sizes import code_bytes
from kernels.tables import grid_boundaries
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS
from tests.kernels.emulator import Emulator, needs_compiler

pytestmark = needs_compiler

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
RING_ROWS = 160


EmulatorOf = Callable[..., Emulator]  # cell, compiler options


@pytest.fixture
def emulator_of() -> EmulatorOf:
    return Emulator.of


# ---- what a page must hold


def expected_codes(codes: np.ndarray, kind: str, dim: int, bits: int) -> bytes:
    """A head's plane of codes in layout version 2, from codes [rows, dim], one field after the other."""
    out = b""
    for first in range(0, len(codes), 32):
        words = np.zeros((32, dim // 8), dtype=np.uint64)
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for f in range(dim // 8):
                for half in range(2):
                    for j in range(4):
                        if kind == "k":
                            m, s, khalf = f // 2 // (dim // 32), f // 2 % (dim // 32), f % 2
                            row, at = 16 * m + g + 8 * half, 32 * s + 8 * t + 4 * khalf + j
                        else:
                            c, e, khalf = f // 4, f // 2 % 2, f % 2
                            row, at = 16 * khalf + 2 * t + (j >> 1) + 8 * (j & 1), 32 * c + 4 * g + 2 * e + half
                        words[lane, f] |= np.uint64(int(codes[first + row, at]) << 4 * (4 * half + j))
        n = [[int(w) for w in row] for row in words]
        if bits == 4:
            stored = [(n, 4)]
        else:
            low = [[(w[2 * h] & 0x33333333) | (w[2 * h + 1] & 0x33333333) << 2 for h in range(dim // 16)] for w in n]
            top = [[sum((w[4 * u + i] >> 2 & 0x11111111) << i for i in range(4)) for u in range(dim // 32)] for w in n]
            stored = [(low, 4), (top, min(4, dim // 32))] if bits == 3 else [(low, 4)]
        for lanes, together in stored:
            for outer in range(len(lanes[0]) // together):
                for lane in range(32):
                    for inner in range(together):
                        out += lanes[lane][outer * together + inner].to_bytes(4, "little")
    return out


def expected_page(layout: PageLayout, rows: list[Tensor]) -> tuple[bytes, int]:
    """Bytes and checksum of a page whose regions hold `rows` [rows, heads, dim] each."""
    page = bytearray(layout.page_bytes)
    for at, dense in zip(layout.regions, rows, strict=True):
        heads, dim, bits = dense.shape[1], dense.shape[2], at.region.bits
        for head in range(heads):
            start = at.offset + head * at.head_bytes
            if not bits:
                plain = fp8.pack(dense[:, head])
                codes, scales = plain.codes.numpy().tobytes(), plain.scales.flatten().numpy()
            else:
                packed = turboquant.pack(dense[:, head], bits)
                scales = packed.scales.flatten().numpy()
                codes = packed.codes.numpy().tobytes()
                if at.fragments:
                    plain_codes = turboquant.unpack_codes(packed, dim, bits).numpy()
                    codes = expected_codes(plain_codes, at.fragments.kind, dim, bits)
            if at.fragments:
                order = [
                    32 * group + g + 8 * k for group in range(len(scales) // 32) for g in range(8) for k in range(4)
                ]
                scales = scales[order]
            page[start : start + len(codes)] = codes
            place = start + at.scales_offset
            page[place : place + 4 * len(scales)] = scales.tobytes()
    words = np.frombuffer(bytes(page), dtype="<u4")
    total = 0
    for i in range(0, len(words), 2):
        pair = [(int(words[i + k]) + (i + k) * 0x9E3779B9 + 0x7F4A7C15) % 2**32 for k in range(2)]
        total += pair[0] * pair[1]
    return bytes(page), total % 2**64


# ---- a small layer group


@dataclasses.dataclass
class Case:
    group: PageGroup
    layout: PageLayout
    dim: int


def make_case(
    dim: int,
    kinds: str,
    bits: tuple[int, ...],
    dtype: torch.dtype,
    heads: int = 2,
    ratio: int = 1,
    rows: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None,
) -> Case:
    """Regions of `kinds` ("k", "v" in layout version 2, "r" rows of version 1), random tails and a workspace."""
    version = ROWS if kinds == "r" else FRAGMENTS
    shapes = [
        Region(128 // ratio, heads, code_bytes(dim, b) if b else dim, 4, "" if kind == "r" else kind, dim, b)
        for kind, b in zip(kinds, bits, strict=True)
    ]
    layout = page_layout(shapes, version)
    arena = torch.full((5, layout.page_bytes), 0xA5, dtype=torch.uint8)
    regions = []
    for at in layout.regions:
        # rows apart from each other, as in a slot that holds all layers
        tail = torch.full((3, RING_ROWS, heads + 1, dim), float("nan"), dtype=dtype)[:, :, :heads]
        tail.copy_((rows or random_rows)((3, RING_ROWS, heads, dim), dtype))
        workspace = torch.full((300, heads, dim + 16), float("nan"), dtype=dtype)[..., :dim]
        workspace.copy_((rows or random_rows)((300, heads, dim), dtype))
        regions.append(RegionRows(at, dim, ratio, tail, workspace))
    return Case(page_group(arena, regions), layout, dim)


def new_seed() -> int:
    """Of torch's generator and of the emulator, printed."""
    seed = int(torch.seed() % 2**31)
    torch.manual_seed(seed)
    print(f"seed {seed}")
    return seed


def random_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Gaussian rows of many norms, and among them zero, one-hot, constant, tiny and huge ones."""
    rows = torch.randn(shape) * torch.exp(2 * torch.randn(*shape[:-1], 1))
    flat, d = rows.view(-1, shape[-1]), shape[-1]
    special = [
        torch.zeros(d),
        torch.full((d,), -0.0),
        torch.eye(d)[d // 3],
        torch.eye(d)[1] - torch.eye(d)[d - 1],  # half of its rotated coordinates are zeros of both signs
        torch.full((d,), -0.75),
        torch.full((d,), 1e-12),
        torch.full((d,), 65000.0),  # comes back longer than f16 holds, so it saturates
    ]
    if dtype == torch.float16:
        flat.clamp_(-65000, 65000)
    else:
        uneven = torch.randn(d) * torch.exp(20 * torch.randn(d))
        special += [torch.randn(d) * 1e30, torch.randn(d) * 1e-30, uneven.clamp(-1e34, 1e34)]
    for i in range(len(flat) // 11):
        flat[11 * i + 3] = special[i % len(special)]
    return rows.to(dtype)


def ordinary_rows(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows that need no scaling (largest value in [2^-32, 2^32), or 0), to the ends of that; with values so small that
    they, their squares or both underflow, alone in half of the transform's sums.
    """
    rows = torch.randn(shape)
    flat, d = rows.view(-1, shape[-1]), shape[-1]
    flat /= flat.abs().amax(-1, keepdim=True)
    for i, row in enumerate(flat):
        match i % 8:
            case 1:
                row[:] = 0
            case 2:  # the sums in which the two ones cancel hold the small ones alone
                row *= 2.0**-100
                row[0], row[1] = 1, 1
            case 3:
                row *= torch.exp2(-torch.randint(0, 110, (d,)).float())
                row[d // 2] = 1.5
            case 4:
                row *= 2.0**-125  # subnormal in the end
                row[d - 1] = -1.999
    exponents = torch.randint(-32, 32, (len(flat), 1)).float()
    exponents[::16], exponents[1::16] = -32, 31
    flat.copy_(torch.where(flat.abs().amax(-1, keepdim=True) > 0, flat * torch.exp2(exponents), flat))
    largest = flat.to(dtype).float().abs().amax(-1)
    grow = torch.where((largest > 0) & (largest < 2.0**-32), 2.0, 1.0)
    shrink = torch.where(largest >= 2.0**32, 0.5, 1.0)
    return (rows * (grow * shrink).view(*shape[:-1], 1)).to(dtype)


def rows_of(region: RegionRows, page: PageRows) -> Tensor:
    """The dense rows [rows, heads, dim] that a page's entry names."""
    assert region.tail is not None and region.workspace is not None
    rows = []
    for row in range(128 // region.ratio):
        token = row * region.ratio
        if token < page.ring_tokens:
            rows.append(region.tail[page.tail_slot, (page.first_token // region.ratio + row) % RING_ROWS])
        else:
            rows.append(region.workspace[(page.workspace_token + token - page.ring_tokens) // region.ratio])
    return torch.stack(rows)


def warps_of(group: PageGroup) -> tuple[int, ...]:
    """Warps of a CTA, an argument of the kernels for TurboQuant."""
    return (3,) if group.cell.source == "seal.cu" else ()


def seal(
    emulator: Emulator, case: Case, pages: list[PageRows], ctas: int = 2, seed: int = 0
) -> tuple[list[int], BadRow | None]:
    """Checksums and the first bad row."""
    group = case.group
    checksums, flag = torch.zeros(len(pages), dtype=torch.int64), torch.tensor([NO_BAD_ROW])
    table = page_table(group, pages, seal=True)
    sizes = (len(table), len(group.units))
    tables = (table, group.regions, group.units, *sizes, group.arena, group.arena.stride(0))
    emulator.call("seal", ctas, *warps_of(group), *tables, checksums, flag, seed=seed)
    return [int(c) % 2**64 for c in checksums], bad_row(int(flag))


def restore(emulator: Emulator, case: Case, pages: list[PageRows], ctas: int = 2, seed: int = 0) -> None:
    group, table = case.group, page_table(case.group, pages)
    sizes = (len(table), len(group.units))
    emulator.call(
        "restore",
        ctas,
        *warps_of(group),
        table,
        group.regions,
        group.units,
        *sizes,
        group.arena,
        group.arena.stride(0),
        seed=seed,
    )


def check_page(case: Case, page: PageRows, checksum: int) -> None:
    want, want_checksum = expected_page(case.layout, [rows_of(region, page) for region in case.group.sources])
    got = case.group.arena[page.page].numpy()
    differ = np.nonzero(got != np.frombuffer(want, dtype=np.uint8))[0]
    assert len(differ) == 0, f"{len(differ)} bytes differ, first at {differ[:4]}"
    assert checksum == want_checksum


def bits_of(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.int32 if rows.dtype == torch.float32 else torch.int16)


PAGES = [
    PageRows(3, first_token=256, tail_slot=1, ring_tokens=128),  # its ring rows wrap: 256 % 160 + 128 > 160
    PageRows(-1),
    PageRows(0, first_token=128, tail_slot=2, ring_tokens=32, workspace_token=44),
    PageRows(4, first_token=0, workspace_token=172),
]


def seal_and_restore(emulator: Emulator, case: Case, seed: int) -> None:
    """Seal PAGES, compare every page, restore them into poisoned rows, compare those."""
    checksums, bad = seal(emulator, case, PAGES, seed=seed)
    assert bad is None
    assert checksums[1] == 0
    for page, checksum in zip(PAGES, checksums, strict=True):
        if page.page >= 0:
            check_page(case, page, checksum)
    assert bool((case.group.arena[[1, 2]] == 0xA5).all()), "wrote into another page"
    sealed = case.group.arena.clone()
    wanted = []
    for region in case.group.sources:
        at, kept = region.planes.region, []
        for page in PAGES:
            if page.page >= 0:
                rows = rows_of(region, page)
                dtype = rows.dtype
                packed = turboquant.pack(rows, at.bits) if at.bits else None
                if packed is not None:
                    kept.append(turboquant.unpack(packed, case.dim, at.bits, dtype))
                else:
                    kept.append(fp8.unpack(fp8.pack(rows), dtype))
        wanted.append(kept)
    for region in case.group.sources:
        assert region.tail is not None and region.workspace is not None
        region.tail.fill_(float("nan"))
        region.workspace.fill_(float("nan"))
    begin = 64
    restore(emulator, case, [page._replace(begin=begin) for page in PAGES], seed=seed)
    assert torch.equal(case.group.arena, sealed), "restore wrote into a page"
    for region, kept in zip(case.group.sources, wanted, strict=True):
        assert region.tail is not None and region.workspace is not None
        written = 0
        for page, want in zip([page for page in PAGES if page.page >= 0], kept, strict=True):
            got = rows_of(region, page)
            first = begin // region.ratio
            assert torch.equal(bits_of(got[first:]), bits_of(want[first:]))
            assert bool(got[:first].isnan().all()), "wrote rows that were not wanted"
            written += len(want) - first
        finite = sum(int(rows.isfinite().all(-1).all(-1).sum()) for rows in (region.tail, region.workspace))
        assert finite == written, "wrote rows that belong to no page"


@pytest.mark.parametrize("width", COMPILED_WIDTHS)
@pytest.mark.parametrize(("kinds", "bits"), [("kv", (4, 4)), ("vk", (3, 2)), ("kv", (3, 2)), ("rrr", (2, 3, 4))])
def test_pages_of_bf16_rows(emulator_of: EmulatorOf, width: int, kinds: str, bits: tuple[int, ...]) -> None:
    seed = new_seed()
    case = make_case(width, kinds, bits, torch.bfloat16, heads=1 if width == 512 else 2)
    seal_and_restore(emulator_of(seal_cell(width, "bf16")), case, seed)


@pytest.mark.parametrize("name", ["bf16", "f32"])
@pytest.mark.parametrize("width", [64, 128])
def test_pages_of_rows_that_need_no_scaling(emulator_of: EmulatorOf, width: int, name: str) -> None:
    seed = new_seed()
    case = make_case(width, "kv", (4, 3), DTYPES[name], rows=ordinary_rows)
    tail = case.group.sources[0].tail
    assert tail is not None
    largest = tail.float().abs().amax(-1)
    assert bool(((largest == 0) | (largest >= 2.0**-32) & (largest < 2.0**32)).all())
    seal_and_restore(emulator_of(seal_cell(width, name)), case, seed)


@pytest.mark.parametrize("name", ["f16", "f32"])
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_pages_of_other_rows(emulator_of: EmulatorOf, width: int, name: str) -> None:
    seed = new_seed()
    case = make_case(width, "kvr", (4, 3, 2), DTYPES[name], heads=1)
    seal_and_restore(emulator_of(seal_cell(width, name)), case, seed)


@pytest.mark.parametrize("lanes", [2, 4])
def test_pages_where_more_lanes_share_a_row(emulator_of: EmulatorOf, lanes: int) -> None:
    seed = new_seed()
    case = make_case(128, "kv", (4, 3), torch.bfloat16, heads=1)
    seal_and_restore(emulator_of(seal_cell(128, "bf16"), f"-DTAILPACK_ROW_LANES={lanes}"), case, seed)


@pytest.mark.parametrize("bits", [*PACKED_BITS, 0])
@pytest.mark.parametrize("ratio", [4, 32, 128])
def test_regions_whose_rows_cover_several_tokens(emulator_of: EmulatorOf, ratio: int, bits: int) -> None:
    seed = new_seed()
    width = 512 if ratio == 128 else 128
    case = make_case(
        width, "kv" if ratio == 4 else "r", (bits, bits)[: 2 if ratio == 4 else 1], torch.bfloat16, ratio=ratio
    )
    pages = [page._replace(ring_tokens=page.ring_tokens // 128 * 128, workspace_token=128) for page in PAGES]
    if ratio == 128:
        pages = [page._replace(begin=0) for page in pages]
    emulator = emulator_of(seal_cell(width, "bf16") if bits else fp8_cell("bf16"))
    checksums, bad = seal(emulator, case, pages, seed=seed)
    assert bad is None
    for page, checksum in zip(pages, checksums, strict=True):
        if page.page >= 0:
            check_page(case, page, checksum)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("dim", [8, 80, 128, 576])
def test_pages_of_fp8_rows(emulator_of: EmulatorOf, dim: int, name: str) -> None:
    seed = new_seed()
    seal_and_restore(emulator_of(fp8_cell(name)), make_case(dim, "rr", (0, 0), DTYPES[name]), seed)


@pytest.mark.parametrize(
    ("width", "begin"), [(64, 45), (512, 45), (128, 0), (128, 1), (128, 32), (128, 45), (128, 127), (128, 128)]
)
@pytest.mark.parametrize(
    ("kinds", "bits"), [("kv", (4, 4)), ("kv", (3, 2)), ("vk", (3, 2)), ("rrr", (2, 3, 4)), ("rr", (0, 0))]
)
def test_rows_below_begin_stay(
    emulator_of: EmulatorOf, width: int, kinds: str, bits: tuple[int, ...], begin: int
) -> None:
    seed = new_seed()
    emulator = emulator_of(seal_cell(width, "bf16") if bits[0] else fp8_cell("bf16"))
    case = make_case(width, kinds, bits, torch.bfloat16, heads=1)
    first, second = PageRows(2, workspace_token=0), PageRows(2, workspace_token=160, begin=begin)
    old = [rows_of(region, first) for region in case.group.sources]
    seal(emulator, case, [first])
    checksums, bad = seal(emulator, case, [second], seed=seed)
    assert bad is None
    mixed = [torch.cat([a[:begin], rows_of(r, second)[begin:]]) for a, r in zip(old, case.group.sources, strict=True)]
    want, checksum = expected_page(case.layout, mixed)
    assert bytes(case.group.arena[2].numpy()) == want
    assert checksums == [checksum]


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_a_coordinate_on_a_boundary_goes_to_the_upper_cell(emulator_of: EmulatorOf, width: int, bits: int) -> None:
    half = 1 << (bits - 1)
    positive = list(grid_boundaries(turboquant.grid(width, bits)))
    boundaries = torch.tensor([*(-b for b in reversed(positive)), 0.0, *positive])
    near = [boundaries]
    for step in (-3, -2, -1, 1, 2, 3):  # neighbours: one step of a float, and some
        moved = boundaries
        for _ in range(abs(step)):
            moved = torch.nextafter(moved, torch.tensor(step * float("inf")))
        near.append(moved)
    fine = torch.linspace(-1.01, 1.01, 4096)  # a candidate that is off by two would show somewhere
    y = torch.cat([*near, fine, boundaries * 0.5, torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.0, -3.0, 1e38, -1e38])])
    y = torch.cat([y, torch.zeros(-len(y) % 256)])
    cells = (y[:, None] >= boundaries).sum(1)
    want = torch.where(cells >= half, cells - half, 2 * half - 1 - cells)
    emulator = emulator_of(seal_cell(width, "bf16"))
    for chunk, expected in zip(y.view(-1, 32, 8), want.view(-1, 32, 8), strict=True):
        words = torch.zeros(32, dtype=torch.int32)
        emulator.call("quantise", bits, chunk.contiguous(), words)
        codes = torch.stack([words >> 4 * j & 0xF for j in range(8)], dim=1)
        assert torch.equal(codes, expected.to(torch.int32)), (chunk[codes != expected], expected[codes != expected])


@pytest.mark.parametrize("bits", [4, 0])
def test_a_bad_row_is_named_and_stores_nothing_that_looks_like_a_row(emulator_of: EmulatorOf, bits: int) -> None:
    emulator = emulator_of(seal_cell(128, "bf16") if bits else fp8_cell("bf16"))
    for poison in (float("nan"), float("inf"), -float("inf"), *([3e37] if bits else [])):
        case = make_case(128, "kv", (bits, bits), torch.bfloat16)
        workspace = case.group.sources[1].workspace
        assert workspace is not None
        workspace[172 + 77, 1, 127] = poison
        workspace[172 + 77, 0, 0] = poison
        workspace[172 + 121, 0, 64] = poison
        _, bad = seal(emulator, case, PAGES)
        assert bad == BadRow(entry=3, region=1, head=0, row=77)
        at = case.layout.regions[1]
        for head in range(2):
            start = at.offset + head * at.head_bytes + at.scales_offset
            scales = case.group.arena[4, start : start + 512].clone().view(torch.float32)
            if at.fragments:
                scales = scales.view(4, 8, 4).transpose(1, 2).flatten()
            assert scales.isnan().nonzero().flatten().tolist() == ([77, 121] if head == 0 else [77])


def test_e4m3_of_every_value_near_a_code(emulator_of: EmulatorOf) -> None:
    emulator = emulator_of(fp8_cell("bf16"))
    to, value = emulator.function("e4m3"), emulator.function("e4m3_value")
    to.restype, to.argtypes = ctypes.c_uint, [ctypes.c_float]
    value.restype, value.argtypes = ctypes.c_float, [ctypes.c_uint]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    exact = codes.view(torch.float8_e4m3fn).to(torch.float32)
    for code, x in enumerate(exact.tolist()):
        got = value(code)
        assert got == x or (got != got and x != x)
    finite = exact[exact.isfinite()].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    probes = torch.cat([finite, middle, *(torch.nextafter(m, m + s) for m in (finite, middle) for s in (-1, 1))])
    probes = torch.cat([probes, torch.tensor([1e-45, -1e-45, 0.0, -0.0])]).clamp(-448, 448)
    want = probes.to(torch.float8_e4m3fn).view(torch.uint8).tolist()
    assert [to(x) for x in probes.tolist()] == want


@pytest.mark.parametrize("kilobytes", [100, 164, 228])  # of an SM: sm_89 and sm_120a, sm_80, sm_90a and sm_100a
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_as_many_warps_work_as_shared_memory_holds(width: int, name: str, kilobytes: int) -> None:
    cell, sms, bytes_of_sm = seal_cell(width, name), 3, 1024 * kilobytes
    limit = int(dict(cell.defines)["TAILPACK_ROW_WARPS"])
    grid = page_grid(cell, 10**6, sms, bytes_of_sm)
    per_sm, rest = divmod(grid.ctas, sms)
    assert rest == 0
    assert per_sm * (grid.shared_bytes + 1024) <= bytes_of_sm
    at_work = per_sm * grid.warps
    assert at_work <= limit
    assert at_work == limit or shared_bytes(cell, at_work + 1) + 1024 > bytes_of_sm
    for num_units in (1, 2, sms, sms + 1, sms * at_work, sms * at_work + 1):
        grid = page_grid(cell, num_units, sms, bytes_of_sm)
        assert grid.shared_bytes == shared_bytes(cell, grid.warps)
        assert grid.ctas * grid.warps >= min(num_units, sms * at_work)
        assert grid.ctas == min(num_units, sms * per_sm) or grid.warps > 1


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_shared_memory_is_what_the_source_says(emulator_of: EmulatorOf, width: int, name: str) -> None:
    cell = seal_cell(width, name)
    for warps in (1, 4, 11):
        assert emulator_of(cell).function("shared_bytes")(ctypes.c_int64(warps)) == shared_bytes(cell, warps)
