"""Pack and unpack on a GPU equal the reference (tests/kernels/device_check.py), and what they refuse anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kernels import turboquant, turboquant_cuda
from kernels.cells import ROW_TYPES
from kernels.errors import ArgumentError, UncompiledWidthError
from kernels.turboquant import PackedRows
from kernels.widths import COMPILED_WIDTHS, PACKED_BITS
from tests.kernels import device_check
from tests.kernels.device_check import Report

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    for mark in on_a_gpu:
        test = mark(test)
    return test


@pytest.fixture
def report() -> Report:
    return Report()


@gpu
@pytest.mark.parametrize("name", ROW_TYPES)
@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_pack_and_unpack_equal_the_reference(report: Report, width: int, bits: int, name: str) -> None:
    seed = int(torch.seed() % 2**31)
    for n in device_check.ROW_COUNTS:
        device_check.check_equal(report, width, bits, name, n, seed)
    assert not report.failed


@gpu
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_bad_rows_are_refused_by_name_or_flagged(report: Report, width: int) -> None:
    device_check.check_bad_rows(report, width)
    assert not report.failed


@gpu
def test_refusals_come_before_anything_runs(report: Report) -> None:
    device_check.check_refusals(report)
    assert not report.failed


@gpu
@pytest.mark.parametrize("bits", PACKED_BITS)
@pytest.mark.parametrize("width", COMPILED_WIDTHS)
def test_both_kernels_are_captured_in_a_graph(report: Report, width: int, bits: int) -> None:
    device_check.check_graph(report, width, bits)
    assert not report.failed


@gpu
@pytest.mark.parametrize("check", [device_check.check_stream, device_check.check_large_offsets])
def test_streams_and_offsets(report: Report, check: Callable[[Report], None]) -> None:
    check(report)
    assert not report.failed


def test_a_tensor_on_the_cpu_is_refused_without_a_gpu_library() -> None:
    rows = torch.randn(4, 128)
    with pytest.raises(ArgumentError, match=r"rows must lie on a GPU.*cpu.*kernels\.turboquant"):
        turboquant_cuda.pack(rows, 4)
    packed = PackedRows(torch.zeros(4, 64, dtype=torch.uint8), torch.zeros(4, 1))
    with pytest.raises(ArgumentError, match="on one GPU"):
        turboquant_cuda.unpack(packed, 128, 4)


@pytest.mark.parametrize("width", [8, 80, 96, 112, 192, 1024])
def test_a_width_without_a_kernel_is_refused(width: int) -> None:
    with pytest.raises(UncompiledWidthError, match="64, 128, 256, 512"):
        turboquant_cuda.pack(torch.randn(4, width), 4)
    packed = PackedRows(torch.zeros(4, width // 2, dtype=torch.uint8), torch.zeros(4, 1))
    with pytest.raises(UncompiledWidthError):
        turboquant_cuda.unpack(packed, width, 4)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        (torch.zeros(4, 128, dtype=torch.float64), "float64"),
        (torch.zeros(128), r"\(128,\)"),
        (torch.zeros(2, 4, 128), r"\(2, 4, 128\)"),
    ],
)
def test_other_shapes_and_dtypes_are_refused(rows: torch.Tensor, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        turboquant_cuda.pack(rows, 4)


def test_the_device_check_weighs_differences() -> None:
    """Its comparison forgives a code at a tie and nothing else."""
    rows = torch.randn(6, 64)
    expected = turboquant.pack(rows, 4)
    assert device_check.compare_packed(rows, expected, expected, 4) == {
        "codes_differ": 0,
        "codes_wrong": 0,
        "scale_ulps": 0,
    }
    codes, scales = expected.codes.clone(), expected.scales.clone()
    codes[3, 7] ^= 0x10
    facts = device_check.compare_packed(rows, PackedRows(codes, scales), expected, 4)
    assert (facts["codes_differ"], facts["codes_wrong"]) == (1, 1)
    assert facts["scale_ulps"] > device_check.MAX_SCALE_ULPS
    scales[2] = torch.nextafter(scales[2], torch.tensor(float("inf")))
    facts = device_check.compare_packed(rows, PackedRows(expected.codes, scales), expected, 4)
    assert (facts["codes_wrong"], facts["scale_ulps"]) == (0, 1)
