"""Plain e4m3 rows, and V4's 590-byte record against a decoder in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import fp8
from kernels.errors import ArgumentError, LayoutError, NonFiniteRowError, WidthError
from tests.kernels import plain_decoder

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_every_e4m3_byte_decodes_as_the_format_says() -> None:
    """Also the plain decoder's own check: all 256 bytes against the machine's conversion."""
    ours = fp8.unpack(fp8.Fp8Rows(torch.arange(256, dtype=torch.uint8), torch.ones(1)))
    for byte in range(256):
        expected = plain_decoder.decode_e4m3(byte)
        assert math.isnan(expected) == math.isnan(ours[byte]) and (math.isnan(expected) or ours[byte] == expected)


@given(st.sampled_from([8, 64, 100, 128, 512]), st.sampled_from(DTYPES), st.integers(-8, 35), seeds)
@settings(max_examples=60, deadline=None)
def test_plain_rows_round_to_nearest(d: int, dtype: torch.dtype, exponent: int, seed: int) -> None:
    """Within half a step of e4m3: 2^-4 of the value, or 2^-10 of the scale where values are subnormal."""
    x = (normal(seed, 3, 2, d).double() * 10.0 ** min(exponent, 3 if dtype == torch.float16 else exponent)).to(dtype)
    packed = fp8.pack(x)
    assert packed.codes.shape == x.shape and packed.scales.shape == (3, 2, 1)
    back = fp8.unpack(packed).double()
    bound = torch.maximum(x.double().abs() * 2.0**-4, packed.scales.double() * 2.0**-10) * (1 + 1e-6)
    stored = packed.scales > 0
    assert ((back - x.double()).abs() <= bound)[stored.expand_as(bound)].all()
    assert not back[~stored.expand_as(back)].any() and back.isfinite().all()
    assert fp8.unpack(packed, dtype).isfinite().all()


def test_the_largest_element_keeps_its_value() -> None:
    """amax / 448 maps it to the largest code; a cast without a clamp could round it to NaN."""
    x = normal(5, 4096, 64) * torch.logspace(-9, 36, 4096)[:, None]
    back = fp8.unpack(fp8.pack(x))
    torch.testing.assert_close(back.abs().amax(1), x.abs().amax(1), rtol=3e-7, atol=0)


def test_zero_rows_are_exact() -> None:
    x = torch.stack([torch.zeros(64), torch.full((64,), 0.9e-10), torch.full((64,), 1.1e-10)])
    packed = fp8.pack(x)
    assert packed.scales.flatten().tolist()[:2] == [0, 0] and packed.scales[2] > 0
    assert not fp8.unpack(packed)[:2].any() and fp8.unpack(packed)[2].all()


def test_v4_records_equal_a_plain_decoder_byte_by_byte() -> None:
    rows = normal(1, 6, 512) * torch.tensor([1.0, 1e-6, 300.0, 1e-3, 0.0, 5e4])[:, None]
    records = fp8.pack_v4(rows)
    assert records.shape == (6, 590)
    back = fp8.unpack_v4(records, torch.float32)
    for row, record, mine in zip(rows, records, back, strict=True):
        data = bytes(record.tolist())
        assert mine.tolist() == plain_decoder.decode_v4(data)  # exactly: every factor is a power of two
        rounded = row.bfloat16()
        assert plain_decoder.decode_bf16(data[448:576]) == rounded[448:].tolist()
        blocks = rounded[:448].float().view(7, 64)
        amax = plain_decoder.decode_bf16(data[576:])
        assert amax == blocks.abs().amax(1).tolist()
        scales = torch.tensor([2.0 ** math.ceil(math.log2(max(a, 1e-4) / 448)) for a in amax])[:, None]
        values = torch.tensor(sorted({plain_decoder.decode_e4m3(b) for b in range(256) if b % 128 != 127}))
        nearest = (blocks[..., None] / scales[..., None] - values).abs().amin(-1)
        chosen = (blocks / scales - mine[:448].view(7, 64) / scales).abs()
        assert torch.equal(chosen, nearest)


def test_v4_scale_is_exact_at_every_bf16() -> None:
    """The exponent comes from bits, not from a rounded logarithm: checked at all finite bf16 from 0 up."""
    amax = (torch.arange(0x7F80, dtype=torch.int32) << 16).view(torch.float32)
    scale = fp8.v4_scale(amax)
    kept = amax.clamp(min=1e-4).double()
    assert (448 * scale.double() >= kept).all() and (448 * scale.double() / 2 < kept).all()
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()


def test_v4_records_hold_what_the_public_584_bytes_do() -> None:
    """Their 7 exponents follow from our 7 amax, and every other byte is the same: both decode to the same values."""
    rows = normal(2, 64, 512) * torch.logspace(-6, 4, 64)[:, None]
    records = fp8.pack_v4(rows)
    amax = records[:, 576:].clone().view(torch.bfloat16)
    assert torch.equal(amax, rows[:, :448].bfloat16().view(64, 7, 64).abs().amax(-1))
    exponents = (fp8.v4_scale(amax).view(torch.int32) >> 23).to(torch.uint8)  # + 127, as e8m0
    public = torch.cat([records[:, :576], exponents, torch.zeros(64, 1, dtype=torch.uint8)], dim=1)
    assert public.shape == (64, 584)
    scales = torch.exp2(public[:, 576:583].double() - 127)
    codes = public[:, :448].clone().view(torch.float8_e4m3fn).double().view(64, 7, 64)
    values = torch.cat(
        [(codes * scales[..., None]).flatten(1), public[:, 448:576].clone().view(torch.bfloat16).double()], 1
    )
    assert torch.equal(values, fp8.unpack_v4(records, torch.float32).double())


def test_v4_error_is_that_of_e4m3_under_a_power_of_two() -> None:
    """At most 1/16 of a value, or half of the least step of its block; RoPE coordinates are bf16's rounding."""
    rows = normal(3, 256, 512)
    blocks = rows[:, :448].bfloat16().float().view(256, 7, 64)
    back = fp8.unpack_v4(fp8.pack_v4(rows), torch.float32)
    scales = fp8.v4_scale(blocks.abs().amax(-1))[..., None]
    error = (back[:, :448].view(256, 7, 64) - blocks).abs()
    assert (error <= torch.maximum(blocks.abs() / 16, scales * 2.0**-10)).all()
    relative = (error**2).sum() / (blocks**2).sum()
    assert 2**-8 / 12 < relative < 2**-6 / 12  # steps of 2^-3 in [1, 2), evenly rounded, over squares of 1 to 4
    assert torch.equal(back[:, 448:], rows[:, 448:].bfloat16().float())


@given(st.sampled_from(DTYPES), seeds)
@settings(max_examples=20, deadline=None)
def test_v4_is_the_round_trip_of_the_rounded_row(dtype: torch.dtype, seed: int) -> None:
    """Packing what came back changes nothing, and views equal contiguous rows."""
    base = normal(seed, 3, 4, 1030).to(dtype)
    rows = base[:, :, 1:1025:2]
    records = fp8.pack_v4(rows)
    assert torch.equal(records, fp8.pack_v4(rows.contiguous()))
    back = fp8.unpack_v4(records)
    assert back.dtype == torch.bfloat16 and torch.equal(back[..., 448:], rows[..., 448:].bfloat16())
    assert torch.equal(fp8.unpack_v4(fp8.pack_v4(back)), back)
    holder = torch.zeros(3, 4, 593, dtype=torch.uint8)
    holder[..., 3:] = records
    assert torch.equal(fp8.unpack_v4(holder[..., 3:]), back)


def test_refusals_name_what_is_wrong() -> None:
    rows = normal(1, 4, 512)
    rows[2, 7] = math.nan
    for pack in (fp8.pack, fp8.pack_v4):
        with pytest.raises(NonFiniteRowError, match="NaN in row 2"):
            pack(rows)
        with pytest.raises(ArgumentError, match="float64"):
            pack(rows.double())
    rows[2, 7] = 3.4e38  # finite in f32, infinite in bf16
    with pytest.raises(NonFiniteRowError, match="infinity in row 2"):
        fp8.pack_v4(rows)
    with pytest.raises(WidthError, match="128"):
        fp8.pack_v4(normal(1, 2, 128))
    with pytest.raises(LayoutError, match="590"):
        fp8.unpack_v4(torch.zeros(2, 584, dtype=torch.uint8))
    with pytest.raises(LayoutError, match="fp8 rows"):
        fp8.unpack(fp8.Fp8Rows(torch.zeros(2, 8, dtype=torch.uint8), torch.zeros(2)))


def test_the_largest_f16_row_stays_finite() -> None:
    x = torch.full((1, 512), 65504.0, dtype=torch.float16)
    assert fp8.unpack(fp8.pack(x), torch.float16).isfinite().all()
    assert fp8.unpack_v4(fp8.pack_v4(x), torch.float16).isfinite().all()
