"""The TurboQuant codec: rotation, nearest codes, records, and the kinds of rows that models produce."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import turboquant as tq
from kernels.errors import ArgumentError, LayoutError, NonFiniteRowError, NormTooLargeError, WidthError
from kernels.rotation import hadamard_columns, padded_width, parts, rotate
from kernels.tables import codebook, grid_boundaries, signs
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS, PRESETS
from tests.kernels import plain_decoder

SPLIT_WIDTHS = {
    12: (8, 8),
    40: (32, 8),
    80: (64, 16),
    96: (64, 32),
    100: (64, 32, 8),
    112: (64, 32, 16),
    192: (128, 64),
}
WIDTHS = (*COMPILED_WIDTHS, *SPLIT_WIDTHS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PAPER_FACTOR = math.sqrt(3) * math.pi / 2

widths = st.sampled_from(WIDTHS)
bit_counts = st.sampled_from(PACKED_BITS)
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def relative_error(x: Tensor, back: Tensor) -> Tensor:
    """||x - back||^2 / ||x||^2 a row, in float64."""
    x, back = x.double(), back.double()
    return (x - back).square().sum(-1) / x.square().sum(-1)


def same(one: tq.PackedRows, other: tq.PackedRows) -> bool:
    return torch.equal(one.codes, other.codes) and torch.equal(one.scales, other.scales)


# --- rotation ---


@pytest.mark.parametrize("d", WIDTHS)
def test_rotation_is_symmetric_orthogonal_and_its_own_inverse(d: int) -> None:
    eye = torch.eye(padded_width(d), dtype=torch.float64)
    matrix = rotate(eye, parts(d))
    torch.testing.assert_close(matrix, matrix.t(), rtol=0, atol=1e-14)
    torch.testing.assert_close(matrix @ matrix.t(), eye, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotate(matrix, parts(d)), eye, rtol=0, atol=1e-13)


@pytest.mark.parametrize("d", [8, 64, 128, 512])
def test_rotation_is_d_h_d(d: int) -> None:
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < d:
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    diagonal = torch.diag(torch.from_numpy(signs(d)).double())
    expected = diagonal @ hadamard @ diagonal / math.sqrt(d)
    torch.testing.assert_close(rotate(torch.eye(d, dtype=torch.float64)), expected, rtol=0, atol=1e-15)


@given(widths, seeds)
@settings(max_examples=40, deadline=None)
def test_rotation_keeps_norms_and_inverts_in_float32(d: int, seed: int) -> None:
    x = normal(seed, 3, padded_width(d))
    turned = rotate(x, parts(d))
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1), rtol=1e-6, atol=0)
    torch.testing.assert_close(rotate(turned, parts(d)), x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("d", "expected"), SPLIT_WIDTHS.items())
def test_split_widths(d: int, expected: tuple[int, ...]) -> None:
    assert parts(d) == expected and padded_width(d) - d in range(8)


def test_rotation_refuses_by_name() -> None:
    with pytest.raises(WidthError, match=r"parts \(64, 32, 8\).*rows of 104"):
        rotate(torch.zeros(2, 100), parts(100))
    with pytest.raises(ArgumentError, match="bfloat16"):
        rotate(torch.zeros(2, 64, dtype=torch.bfloat16))


# --- codes ---


@given(widths, bit_counts, seeds)
@settings(max_examples=60, deadline=None)
def test_codes_are_the_nearest_values(d: int, bits: int, seed: int) -> None:
    x = normal(seed, 5, d)
    codes = tq.unpack_codes(tq.pack(x, bits), d, bits)
    padded = torch.nn.functional.pad(x, (0, padded_width(d) - d)).double()
    begin = 0
    for width in parts(d):
        part = padded[:, begin : begin + width]
        y = rotate(part / part.norm(dim=1, keepdim=True))
        values = tq.code_values(width, bits).double()
        distance = (y[..., None] - values).abs()
        chosen = distance.gather(-1, codes[:, begin : begin + width, None].long())[..., 0]
        assert (chosen <= distance.amin(-1) + 2e-6).all()  # 2e-6: rounding of y in f32
        begin += width


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("d", COMPILED_WIDTHS)
def test_ties_go_to_the_upper_cell(d: int, bits: int) -> None:
    """On a boundary the larger value wins: 0 and -0 are positive, and -b keeps the smaller magnitude."""
    values = tq.code_values(d, bits)
    ordered = values.sort().values
    positive = torch.tensor(grid_boundaries(tq.grid(d, bits)))
    edges = torch.cat([-positive.flip(0), torch.zeros(1), positive])
    torch.testing.assert_close(edges, (ordered[1:] + ordered[:-1]) / 2, rtol=3e-7, atol=0)
    for y, expected in (
        (edges, ordered[1:]),
        (-edges.flip(0), ordered[1:]),
        (-torch.zeros(1), ordered[[len(edges) // 2 + 1]]),
    ):
        assert torch.equal(values[tq.nearest_codes(y, d, bits).long()], expected)
    below = torch.nextafter(edges, torch.tensor(-1.0))
    assert torch.equal(values[tq.nearest_codes(below, d, bits).long()], ordered[:-1])


@pytest.mark.parametrize("bits", PACKED_BITS)
def test_codes_are_sign_and_magnitude(bits: int) -> None:
    half = 1 << (bits - 1)
    values = tq.code_values(128, bits)
    assert (values[:half] > 0).all() and torch.equal(values[half:], -values[:half])
    assert (values[:half].diff() > 0).all()
    step, magnitudes = tq.grid(128, bits)
    assert values[half - 1].item() == pytest.approx(step * (magnitudes[-1] - 0.5), rel=1e-7)


def test_a_rotated_unit_vector_hits_zero_exactly_and_codes_it_positive() -> None:
    """D H D of this row is one coordinate of 1 and exact zeros, half of them -0: the tie at 0 in the whole pipeline."""
    row = rotate(torch.eye(64)[:1])
    codes = tq.unpack_codes(tq.pack(row.sign(), 4), 64, 4)
    assert codes[0].tolist() == [7] + [0] * 63


# --- records ---


@pytest.mark.parametrize(
    ("d", "bits", "size"),
    [
        *((64, 4, 36), (128, 4, 68), (256, 4, 132), (512, 4, 260)),
        *((64, 3, 32), (128, 3, 56), (256, 3, 108), (512, 3, 212)),
        *((64, 2, 20), (128, 2, 36), (256, 2, 68), (512, 2, 132)),
        *((80, 4, 48), (96, 4, 56), (100, 4, 64), (192, 4, 104)),
    ],
)
def test_record_sizes(d: int, bits: int, size: int) -> None:
    assert tq.record_bytes(d, bits) == size
    packed = tq.pack(normal(d, 2, 3, d), bits)
    assert tq.to_records(packed).shape == (2, 3, size)
    assert same(tq.from_records(tq.to_records(packed), d, bits), packed)


@pytest.mark.parametrize(("d", "bits"), plain_decoder.GRIDS)
def test_records_equal_a_plain_decoder_byte_by_byte(d: int, bits: int) -> None:
    """Encodes and decodes in pure Python, float64. Equal bytes but for the scale's last bits."""
    rows = normal(d + bits, 4, d) * torch.tensor([1.0, 50.0, 1e-3, 7000.0])[:, None]
    records = tq.to_records(tq.pack(rows, bits))
    back = tq.unpack(tq.from_records(records, d, bits), d, bits)
    for row, record, mine in zip(rows.tolist(), records, back, strict=True):
        data = bytes(record.tolist())
        expected = plain_decoder.encode(row, d, bits)
        assert len(data) == len(expected) and data[:-4] == expected[:-4]
        assert struct.unpack("<f", data[-4:])[0] == pytest.approx(struct.unpack("<f", expected[-4:])[0], rel=3e-7)
        decoded = torch.tensor(plain_decoder.decode(data, d, bits))
        torch.testing.assert_close(mine, decoded, rtol=0, atol=2e-6 * decoded.abs().max().item())


def test_nibbles_and_groups_lie_where_the_format_says() -> None:
    """The bytes of one row spelled out from its codes, for all three widths of a code; unused bits are zero."""
    row = normal(22, 64)
    for bits in PACKED_BITS:
        packed = tq.pack(row, bits)
        codes = tq.unpack_codes(packed, 64, bits).tolist()
        assert len(set(codes)) == 2**bits, "a row that uses every code"
        data = packed.codes.tolist()
        if bits == 4:
            assert data == [codes[2 * i] | codes[2 * i + 1] << 4 for i in range(32)]
        elif bits == 2:
            assert data == [sum(codes[4 * i + j] << 2 * j for j in range(4)) for i in range(16)]
        else:
            words = [sum(c << 3 * j for j, c in enumerate(codes[i : i + 10])) for i in range(0, 64, 10)]
            assert bytes(data) == b"".join(word.to_bytes(4, "little") for word in words) and len(data) == 28


# --- distortion ---


@given(st.sampled_from(sorted(PRESETS)), st.sampled_from(COMPILED_WIDTHS), st.sampled_from(DTYPES), seeds)
@settings(max_examples=40, deadline=None)
def test_presets_stay_within_the_papers_bound(preset: str, d: int, dtype: torch.dtype, seed: int) -> None:
    for bits in (PRESETS[preset].key_bits, PRESETS[preset].value_bits):
        x = (normal(seed, 96, d) * 3).to(dtype)
        back = tq.unpack(tq.pack(x, bits), d, bits, dtype)
        assert back.dtype == dtype and back.shape == x.shape
        assert relative_error(x, back).mean().item() < PAPER_FACTOR * 4.0**-bits


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("d", WIDTHS)
def test_every_width_and_bit_count_has_its_own_distortion(d: int, bits: int) -> None:
    """Each part errs like a codebook of its own width; a codec that took other bits than asked would be far off."""
    x = normal(7, 8192, d)
    packed = tq.pack(x, bits)
    codes = tq.unpack_codes(packed, d, bits)
    begin = 0
    for width in parts(d):
        part = torch.nn.functional.pad(x[:, begin : begin + width], (0, max(0, begin + width - d)))
        values = tq.code_values(width, bits)[codes[:, begin : begin + width].int()]
        y = rotate(torch.nn.functional.normalize(part, dim=1))
        if begin + width <= d:  # a padded part is not uniform on its sphere
            assert (y - values).square().sum(1).mean().item() == pytest.approx(
                width * codebook(width, bits).mse, rel=0.02
            )
        begin += width
    assert relative_error(x, tq.unpack(packed, d, bits)).mean().item() < PAPER_FACTOR * 4.0**-bits


def test_the_corrected_scale_is_stored() -> None:
    """d=128: the errors of the stored scale, not of n, and the norm of what comes back is the norm of the row."""
    x = normal(11, 16384, 128)
    for bits, error, cosine in ((2, 0.1188, 0.9406), (3, 0.0338, 0.9831), (4, 0.0092, 0.9954)):
        back = tq.unpack(tq.pack(x, bits), 128, bits)
        assert relative_error(x, back).mean().item() == pytest.approx(error, abs=6e-5 + error * 2e-3)
        assert torch.cosine_similarity(x, back).mean().item() == pytest.approx(cosine, abs=2e-4)
        torch.testing.assert_close(back.norm(dim=1), x.norm(dim=1), rtol=2e-6, atol=0)


# --- rows that models produce ---


def test_constant_rows_need_the_signs() -> None:
    x = torch.ones(1, 128)
    for bits, floor, unsigned in ((4, 0.995, 0.88), (3, 0.985, 0.61), (2, 0.945, 0.28)):
        back = tq.unpack(tq.pack(x, bits), 128, bits)
        assert torch.cosine_similarity(x, back).item() > floor
        turned = hadamard_columns(x.t().clone()).t() / 128
        plain = tq.code_values(128, bits)[tq.nearest_codes(turned, 128, bits).int()]
        assert torch.cosine_similarity(turned, plain).item() == pytest.approx(unsigned, abs=0.005)


@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("kind", ["constant", "8-sparse", "one-hot", "alternating", "one channel x 1000"])
def test_structured_rows_keep_their_direction(kind: str, bits: int) -> None:
    x = {
        "constant": torch.ones(1, 128),
        "8-sparse": torch.zeros(64, 128).scatter(1, torch.rand(64, 128).argsort(1)[:, :8], 1.0),
        "one-hot": torch.eye(128),
        "alternating": torch.tensor([1.0, -1.0]).repeat(64)[None],
        "one channel x 1000": normal(5, 64, 128) * torch.where(torch.arange(128) == 17, 1000.0, 1.0),
    }[kind]
    cosine = torch.cosine_similarity(x, tq.unpack(tq.pack(x, bits), 128, bits))
    assert cosine.mean().item() > {2: 0.92, 3: 0.975, 4: 0.993}[bits]


@pytest.mark.parametrize("d", WIDTHS)
@pytest.mark.parametrize("bits", PACKED_BITS)
def test_zero_rows_are_exact(d: int, bits: int) -> None:
    """Rows of norm 0 and below 1e-10 store zeros and come back as +0, between rows that do not."""
    rows = normal(1, 5, d)
    rows[1] = 0
    rows[3] = torch.nn.functional.normalize(rows[3], dim=0) * 0.9e-10
    packed = tq.pack(rows, bits)
    for i in (1, 3):
        assert not packed.scales[i].any() and not packed.codes[i].any()
        back = tq.unpack(packed, d, bits)[i]
        assert not back.any() and not back.signbit().any()
    assert packed.scales[[0, 2, 4]].all()


def test_the_zero_threshold_is_a_norm_of_1e_10() -> None:
    unit = torch.nn.functional.normalize(normal(2, 1, 128), dim=1)
    assert not tq.pack(unit * 0.999e-10, 4).scales.any()
    just_above = tq.pack(unit * 1.001e-10, 4)
    assert relative_error(unit * 1.001e-10, tq.unpack(just_above, 128, 4)).item() < 0.02


@given(widths, bit_counts, st.sampled_from(DTYPES), st.floats(-12, 37), st.booleans(), seeds)
@settings(max_examples=120, deadline=None)
def test_every_finite_row_up_to_1e37_comes_back_finite(
    d: int, bits: int, dtype: torch.dtype, exponent: float, constant: bool, seed: int
) -> None:
    direction = torch.ones(2, d) if constant else normal(seed, 2, d)
    target = min(10.0**exponent, 0.99e37, 60000.0 if dtype == torch.float16 else math.inf)
    x = (torch.nn.functional.normalize(direction.double(), dim=1) * target).to(dtype)
    packed = tq.pack(x, bits)
    back = tq.unpack(packed, d, bits, dtype)
    assert packed.scales.isfinite().all() and back.isfinite().all()
    if target > 1e-9 and dtype != torch.float16:
        assert (torch.cosine_similarity(x.double(), back.double(), eps=0) > 0.8).all()


@pytest.mark.parametrize("d", COMPILED_WIDTHS)
@pytest.mark.parametrize("bits", PACKED_BITS)
def test_the_largest_f16_row_comes_back_finite(d: int, bits: int) -> None:
    x = torch.full((1, d), 65504.0, dtype=torch.float16)
    back = tq.unpack(tq.pack(x, bits), d, bits, torch.float16)
    assert back.isfinite().all() and torch.cosine_similarity(x.float(), back.float()).item() > 0.9


def test_large_keys_and_values_as_models_have_them() -> None:
    """Key norms far above f16's 65,504, and one V entry of -7e4: f16 metadata turns both into NaN or infinity."""
    keys = (normal(1, 64, 128) * 7000).bfloat16()
    assert relative_error(keys, tq.unpack(tq.pack(keys, 4), 128, 4)).max().item() < 0.02
    values = normal(2, 64, 128).bfloat16()
    values[5, 9] = -7e4
    back = tq.unpack(tq.pack(values, 4), 128, 4, torch.bfloat16)
    assert back.isfinite().all() and back[5, 9].item() == pytest.approx(-7e4, rel=0.05)


@given(widths, bit_counts, seeds, st.integers(-20, 60))
@settings(max_examples=40, deadline=None)
def test_codes_do_not_depend_on_the_norm(d: int, bits: int, seed: int, exponent: int) -> None:
    """A power of two is exact in f32, so it must change the scale only, and exactly."""
    x = normal(seed, 3, d)
    one, other = tq.pack(x, bits), tq.pack(x * 2.0**exponent, bits)
    assert torch.equal(one.codes, other.codes) and torch.equal(one.scales * 2.0**exponent, other.scales)


# --- refusals ---


@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "infinity")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_are_not_finite_are_named(value: float, word: str, dtype: torch.dtype) -> None:
    rows = normal(1, 4, 6, 128).to(dtype)
    rows[2, 3, 100] = value
    with pytest.raises(NonFiniteRowError, match=rf"{word} in row 15 \(index \(2, 3\)\)"):
        tq.pack(rows, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("d", [128, 96])
def test_rows_beyond_1e37_are_named(dtype: torch.dtype, d: int) -> None:
    """The whole row's norm counts, also where each part of a split width would pass alone; 3e38 overflows any sum."""
    unit = torch.full((d,), d**-0.5)
    for norm in (1.02e37, 3e38):
        rows = normal(1, 5000, d).to(dtype)
        rows[4321] = (unit * norm).to(dtype)
        with pytest.raises(NormTooLargeError, match=r"row 4321.*1e\+37"):
            tq.pack(rows, 4)
    assert tq.pack((unit * 0.99e37).to(dtype), 4).scales.isfinite().all()


@pytest.mark.parametrize("d", [0, 1, 7, 2048])
def test_widths_outside_the_tables_are_refused(d: int) -> None:
    with pytest.raises(WidthError, match=f"given {d}; allowed: 8 to 2047"):
        tq.pack(torch.zeros(2, d), 4)


def test_other_arguments_are_refused_by_name() -> None:
    rows: Any
    for bits in (1, 5, 8):
        with pytest.raises(ArgumentError, match=f"given {bits}; allowed: 2, 3, 4"):
            tq.pack(torch.ones(2, 64), bits)
    for rows in (torch.ones(2, 64, dtype=torch.float64), torch.ones(2, 64, dtype=torch.int32), torch.tensor(1.0)):
        with pytest.raises(ArgumentError, match=str(rows.dtype)):
            tq.pack(rows, 4)
    packed = tq.pack(torch.ones(2, 64), 4)
    with pytest.raises(ArgumentError, match="float64"):
        tq.unpack(packed, 64, 4, torch.float64)
    with pytest.raises(WidthError, match="96"):
        tq.code_values(96, 4)


def test_packed_rows_of_another_width_or_bits_are_refused() -> None:
    packed = tq.pack(torch.ones(2, 64), 4)
    for d, bits in ((128, 4), (64, 3), (64, 2), (96, 4)):
        with pytest.raises(LayoutError, match=f"width {d} at {bits} bits"):
            tq.unpack(packed, d, bits)
        with pytest.raises(LayoutError, match=f"width {d} at {bits} bits"):
            tq.from_records(tq.to_records(packed), d, bits)
    with pytest.raises(LayoutError):
        tq.unpack(tq.PackedRows(packed.codes, packed.scales[:1]), 64, 4)


# --- shapes, strides, batches ---


@given(widths, bit_counts, st.sampled_from(DTYPES), seeds)
@settings(max_examples=40, deadline=None)
def test_strided_and_offset_views_equal_contiguous_ones(d: int, bits: int, dtype: torch.dtype, seed: int) -> None:
    base = normal(seed, 4, 3, 2 * d + 5).to(dtype)
    views = {
        "offset": base[:, :, 5 : 5 + d],
        "every second": base[:, :, 1 : 2 * d : 2],
        "transposed rows": base[:, :, :d].transpose(0, 1),
        "column major": base[0, :, :d].t().contiguous().t(),
        "expanded": base[:1, :1, :d].expand(3, 2, d),
        "every second row": base[::2, :, :d],
    }
    for name, view in views.items():
        packed = tq.pack(view, bits)
        assert same(packed, tq.pack(view.contiguous(), bits)), name
        holder = torch.zeros(*packed.codes.shape[:-1], packed.codes.shape[-1] + 3, dtype=torch.uint8)
        holder[..., 3:] = packed.codes
        doubled = packed.scales.repeat_interleave(2, dim=-1)[..., ::2]
        inside = tq.PackedRows(holder[..., 3:], doubled)
        assert torch.equal(tq.unpack(inside, d, bits, dtype), tq.unpack(packed, d, bits, dtype)), name


@given(widths, bit_counts, st.integers(1, 3000), seeds)
@settings(max_examples=25, deadline=None)
def test_a_row_does_not_depend_on_its_neighbours(d: int, bits: int, count: int, seed: int) -> None:
    """Any batch size and any number of threads give the same bytes: pages are compared by checksum."""
    x = normal(seed, count, d)
    whole = tq.pack(x, bits)
    for i in {0, count // 2, count - 1}:
        alone = tq.pack(x[i], bits)
        assert same(alone, tq.PackedRows(whole.codes[i], whole.scales[i]))
        assert torch.equal(tq.unpack(alone, d, bits), tq.unpack(whole, d, bits)[i])


def test_the_number_of_threads_changes_nothing() -> None:
    x = normal(4, 4096, 128)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(tq.pack(x, 4))
    finally:
        torch.set_num_threads(before)
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_empty_and_single_rows() -> None:
    for shape in ((0, 64), (3, 0, 64), (64,), (1, 1, 64)):
        packed = tq.pack(torch.ones(shape), 3)
        assert packed.codes.shape == (*shape[:-1], 28) and packed.scales.shape == (*shape[:-1], 1)
        assert tq.unpack(packed, 64, 3).shape == shape


def test_no_gradient_is_kept() -> None:
    x = torch.ones(2, 64, requires_grad=True)
    packed = tq.pack(x, 4)
    assert not packed.scales.requires_grad and not tq.unpack(packed, 64, 4).requires_grad
