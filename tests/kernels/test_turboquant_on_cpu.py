"""The CUDA sources of the codec, run on a CPU lane by lane, equal the PyTorch reference bit for bit.

Same cases as tests/kernels/device_check.py runs on a GPU; here they need only g++ (tests/kernels/cuda_on_cpu).
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from kernels import turboquant
from kernels.cells import MAX_NORM, ZERO_NORM
from kernels.tables import grid_boundaries
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS
from tests.kernels.emulator import Emulator, needs_compiler

NO_BAD_ROW = 2**63 - 1
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def library() -> Emulator:
    limits = [f"-DTAILPACK_ZERO_NORM={ZERO_NORM}", f"-DTAILPACK_MAX_NORM={MAX_NORM}"]
    return Emulator.build("turboquant.cpp", limits)


def pack(library: Emulator, rows: torch.Tensor, bits: int, name: str) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Pack rows [n, d] into poisoned canonical records; returns codes, scales and the first bad row."""
    n, d = rows.shape
    size = turboquant.code_bytes(d, bits)
    records = torch.full((n, size + 4), 0xA5, dtype=torch.uint8)
    words = records.view(torch.float32)
    bad = torch.tensor([NO_BAD_ROW])
    library.call(
        f"pack_w{d}_b{bits}_{name}",
        3,
        rows,
        rows.stride(0),
        records,
        size + 4,
        words[:, size // 4 :],
        size // 4 + 1,
        bad,
        n,
    )
    return records[:, :size].contiguous(), words[:, size // 4 :].contiguous(), int(bad)


def unpack(library: Emulator, packed: turboquant.PackedRows, d: int, bits: int, name: str) -> torch.Tensor:
    """Unpack into poisoned rows that lie in a wider tensor."""
    n = packed.codes.shape[0]
    wide = torch.full((n, d + 8), float("nan"), dtype=DTYPES[name])
    rows = wide[:, 8:]
    codes, scales = packed.codes, packed.scales
    library.call(f"unpack_w{d}_b{bits}_{name}", 2, codes, codes.stride(0), scales, 1, rows, rows.stride(0), n)
    assert bool(wide[:, :8].isnan().all()), "wrote in front of the rows"
    return rows


def cases(n: int, d: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Gaussian rows of many norms, and where they fit zero, one-hot, constant, tiny and huge ones."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(n, d, generator=generator) * torch.exp(2 * torch.randn(n, 1, generator=generator))
    special = [
        torch.zeros(d),
        torch.eye(d)[d // 3],
        torch.full((d,), -0.75),
        torch.full((d,), 1e-12),
        torch.full((d,), -0.0),
    ]
    special.append(torch.eye(d)[1] - torch.eye(d)[d - 1])  # half of its rotated coordinates are zeros of both signs
    if dtype == torch.float16:
        special += [torch.full((d,), 65000.0)]  # comes back longer than f16 holds, so it saturates
        rows.clamp_(-65000, 65000)
    else:
        special += [torch.randn(d, generator=generator) * 1e30, torch.randn(d, generator=generator) * 1e-30]
    for i, row in enumerate(special[: n - 1]):
        rows[i + 1] = row
    return rows.to(dtype)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_pack_and_unpack_equal_the_reference_bit_for_bit(library: Emulator, width: int, bits: int, name: str) -> None:
    seed = int(torch.seed() % 2**31)
    print(f"seed {seed}")
    for n in (1, 17, 129):
        wide = cases(n, width + 16, DTYPES[name], seed)
        for rows in (wide[:, :width].contiguous(), wide[:, 8 : 8 + width]):
            expected = turboquant.pack(rows, bits)
            codes, scales, bad = pack(library, rows, bits, name)
            assert torch.equal(codes, expected.codes)
            assert torch.equal(scales.view(torch.int32), expected.scales.view(torch.int32))
            assert bad == NO_BAD_ROW
            got = unpack(library, expected, width, bits, name)
            integers = torch.int32 if name == "f32" else torch.int16
            want = turboquant.unpack(expected, width, bits, DTYPES[name])
            assert torch.equal(got.contiguous().view(integers), want.view(integers))


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_a_coordinate_on_a_boundary_goes_to_the_upper_cell(library: Emulator, width: int, bits: int) -> None:
    quantise = library.function(f"quantise_w{width}_b{bits}")
    quantise.restype, quantise.argtypes = ctypes.c_uint, [ctypes.c_float]
    half = 1 << (bits - 1)
    positive = list(grid_boundaries(turboquant.grid(width, bits)))
    boundaries = torch.tensor([*(-b for b in reversed(positive)), 0.0, *positive])
    for y in [*boundaries, *torch.nextafter(boundaries, boundaries - 1), *torch.nextafter(boundaries, boundaries + 1)]:
        cell = int((y >= boundaries).sum())
        assert quantise(float(y)) == (cell - half if cell >= half else 2 * half - 1 - cell), float(y)
    assert quantise(-0.0) == 0


@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_a_bad_row_is_flagged_and_stores_nothing_that_looks_like_a_row(library: Emulator, width: int) -> None:
    for poison in (float("nan"), float("inf"), -float("inf"), 3e37):
        rows = torch.randn(40, width)
        rows[29, width - 1] = rows[11, width // 2] = poison
        codes, scales, bad = pack(library, rows, 4, "f32")
        assert bad == 11
        assert scales.isnan().squeeze(1).nonzero().squeeze(1).tolist() == [11, 29]
        assert not codes[[11, 29]].any()
        good = [i for i in range(40) if i not in (11, 29)]
        assert torch.equal(codes[good], turboquant.pack(rows[good], 4).codes)


def test_a_norm_at_the_limit_is_packed(library: Emulator) -> None:
    rows = torch.randn(8, 512)
    rows *= (0.999e37 / rows.double().norm(dim=1, keepdim=True)).float()
    expected = turboquant.pack(rows, 4)
    codes, scales, bad = pack(library, rows, 4, "f32")
    assert bad == NO_BAD_ROW
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scales, expected.scales)
    assert bool(unpack(library, expected, 512, 4, "f32").isfinite().all())
