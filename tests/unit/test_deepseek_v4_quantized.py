"""FP8 and FP4 weights of the official checkpoint, against values written out by hand."""

from __future__ import annotations

import pytest
import torch

from protos.errors import ModelError
from worker.models.deepseek_v4_quantized import dequantized, dequantized_fp4, dequantized_fp8

POWERS = torch.tensor([[120, 127, 130], [127, 97, 160]], dtype=torch.uint8)  # 2^-7, 1, 8; 1, 2^-30, 2^33


@pytest.mark.parametrize("scale", [POWERS, POWERS.view(torch.float8_e8m0fnu), POWERS.view(torch.int8)])
def test_fp8_by_blocks_that_do_not_fill_the_last_row_and_column(scale: torch.Tensor) -> None:
    weight = torch.randn(7, 10, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    read = dequantized_fp8(weight, scale, (4, 4))
    for i in range(7):
        for j in range(10):
            exponent = int(POWERS[i // 4, j // 4]) - 127
            assert float(read[i, j]) == float(weight[i, j]) * 2.0**exponent


def test_fp8_with_float32_scales() -> None:
    weight = torch.tensor([[1.0, -2.0], [0.5, 448.0]]).to(torch.float8_e4m3fn)
    read = dequantized_fp8(weight, torch.tensor([[0.3]]), (128, 128))
    assert torch.equal(read, torch.tensor([[1.0, -2.0], [0.5, 448.0]]) * torch.tensor(0.3))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_fp4_every_code_low_half_first(dtype: torch.dtype) -> None:
    codes = torch.arange(16).repeat(2, 4)  # [2, 64]
    codes[1] = codes[1].flip(0)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(dtype)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    table = torch.tensor(values + [-value for value in values])
    scale = torch.tensor([[126, 127], [128, 100]], dtype=torch.uint8)
    expected = table[codes].view(2, 2, 32) * torch.tensor([[0.5, 1.0], [2.0, 2.0**-27]]).unsqueeze(-1)
    assert torch.equal(dequantized_fp4(packed, scale), expected.view(2, 64))


def test_a_weight_is_read_by_its_own_dtype_and_its_sibling() -> None:
    weights = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.scale": torch.full((1, 1), 3.0),
        "b.weight": torch.full((2, 16), 0x22, dtype=torch.uint8),
        "b.scale": torch.full((2, 1), 128, dtype=torch.uint8),
        "c.weight": torch.ones(4, 4),
        "c.scale": torch.ones(1, 1),
        "d.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "d.scale": torch.ones(2, 1),
    }
    assert torch.equal(dequantized(weights, "a.weight", (128, 128)), torch.full((4, 4), 3.0))
    assert torch.equal(dequantized(weights, "b.weight", (128, 128)), torch.full((2, 32), 2.0))
    for name in ("c", "d"):
        with pytest.raises(ModelError) as caught:
            dequantized(weights, f"{name}.weight", (128, 128))
        assert caught.value.reason == "BAD_TENSOR"
