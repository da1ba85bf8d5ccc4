"""TurboQuant rows: pack, unpack and canonical records. The reference of the CUDA kernels, and the CPU path.

The arithmetic of one part of width w, all in f32, so that another implementation can follow it step by step:
    e     = clamp(exponent of the largest |x_i|, frexp's convention, -100, 124)
    z     = x * 2^-e                          exact; no square below overflows or vanishes
    n     = sqrt(sum z_i^2)                   halves added onto each other: z_i^2 + z_{i+w/2}^2, and so on
    y     = H(D z) * (1 / (n sqrt(w))) * D    unnormalised Hadamard transform
    code  = cell of y_i (`tables.grid_boundaries`; on a boundary the upper cell)
    scale = n / (step / 2 * sqrt(sum (2 T_i - 1)^2)) * 2^e
The stored scale is the row's norm over the norm of its chosen centroids. A part whose norm n 2^e is below 1e-10 stores
scale 0 and codes 0 and comes back as exact zeros. Every row is independent of its neighbours, bit for bit.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import bitpack
from kernels.errors import ArgumentError, LayoutError, NonFiniteRowError, NormTooLargeError, WidthError
from kernels.grid_table import GRIDS
from kernels.record_sizes import check_bits, part_code_bytes, parts
from kernels.record_sizes import code_bytes as code_bytes
from kernels.record_sizes import record_bytes as record_bytes
from kernels.rotation import hadamard_columns, padded_width, sign_column
from kernels.tables import Grid, grid_boundaries

ZERO_NORM = 1e-10
MAX_NORM = 1e37
ROW_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Coordinates done together: a few such buffers stay in the second-level cache, and below 32,768 torch runs an operation
# on the calling thread. Shared among threads, each of a hundred small steps would wait for the slowest core: on a busy
# machine that was seen to cost a factor of twenty. Groups of ten 3-bit codes pad a part by up to a quarter.
_CHUNK = 26_000


class PackedRows(NamedTuple):
    """Packed rows with any leading dims."""

    codes: Tensor  # u8 [..., code_bytes]: the parts' codes one after the other (`bitpack`)
    scales: Tensor  # f32 [..., parts]: one scale a part


class _PartTable(NamedTuple):
    boundaries: list[int]  # positive ones, as the bit patterns of their f32
    values: Tensor  # f32 [2^b], by code
    squares: Tensor  # i32 [2^b], by code: (2 T - 1)^2
    half_step: float


def grid(width: int, bits: int) -> Grid:
    """The stored grid of one part. Raises WidthError, ArgumentError."""
    check_bits(bits)
    if (width, bits) not in GRIDS:
        raise WidthError(
            "grids exist for single parts only",
            given=str(width),
            allowed=", ".join(str(w) for w, b in GRIDS if b == bits),
            action="split the row with parts(d)",
        )
    step, magnitudes = GRIDS[width, bits]
    return Grid(torch.tensor(step, dtype=torch.float32).item(), magnitudes)


@lru_cache
def _table(width: int, bits: int, device: torch.device) -> _PartTable:
    step, magnitudes = grid(width, bits)
    odd = 2 * torch.tensor(magnitudes, device=device) - 1
    values = odd.to(torch.float32) * (step / 2)
    return _PartTable(
        boundaries=torch.tensor(grid_boundaries(Grid(step, magnitudes))).view(torch.int32).tolist(),
        values=torch.cat([values, -values]),
        squares=torch.cat([odd, odd]).square().to(torch.int32),
        half_step=step / 2,
    )


def code_values(width: int, bits: int, device: torch.device | None = None) -> Tensor:
    """Decoded rotated unit coordinate of each code, f32 [2^bits], for one part; code = sign << (bits-1) | magnitude."""
    return _table(width, bits, device or torch.device("cpu")).values.clone()


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as f32, exact, for i32 exponents in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded f32 square root of x >= 0. torch's own may miss by one step on a CPU.

    The root of an f32 is at least 2^-51 of itself away from any midpoint of two f32, so f64 decides although
    x * rsqrt(x) rounds three times. rsqrt, because torch gives sqrt to MKL, which wakes threads of its own.
    """
    wide = x.double()
    return (wide * wide.clamp(min=1e-300).rsqrt()).float()


def nearest_codes(y: Tensor, width: int, bits: int) -> Tensor:
    """Codes u8 of rotated unit coordinates `y` f32 of any shape, for a part of `width`; ties go to the upper cell."""
    table = _table(width, bits, y.device)
    # f32 >= 0 compare like their bit patterns. One step off the pattern of a negative y's |y| turns b <= |y| into
    # b < |y|, the upper cell's rule on that side.
    negative = y < 0
    magnitude = (y.view(torch.int32) & 0x7FFFFFFF).sub_(negative.view(torch.uint8))
    codes = negative.view(torch.uint8) << bits - 1
    above = torch.empty_like(negative)
    for boundary in table.boundaries:
        codes.add_(torch.ge(magnitude, boundary, out=above).view(torch.uint8))
    return codes


def _encode(z: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """One part in columns: f32 [w, n], spent. Returns bytes u8 [n, bytes], scales f32 [n], norms f32 [n]."""
    width, _ = z.shape
    table = _table(width, bits, z.device)
    sign = sign_column(width, z.device)
    exponent = ((z.abs().amax(0).view(torch.int32) >> 23) - 126).clamp_(-100, 124)
    z.mul_(_power_of_two(-exponent))
    squares = z.square()
    while squares.shape[0] > 1:
        half = squares.shape[0] // 2
        squares = squares[:half] + squares[half:]
    short = _sqrt(squares[0])
    norm = short * _power_of_two(exponent)
    zero = norm < ZERO_NORM
    y = hadamard_columns(z.mul_(sign))
    y.mul_(torch.where(zero, 0.0, 1 / (short * math.sqrt(width)))).mul_(sign)

    codes = nearest_codes(y, width, bits)
    squares = table.squares.index_select(0, codes.to(torch.int32).view(-1)).view(y.shape).sum(0)
    chosen = _sqrt(squares.to(torch.float32)) * table.half_step
    scale = torch.where(zero, 0.0, short / chosen * _power_of_two(exponent))
    return bitpack.pack_codes(codes, bits), scale, norm


def _decode(packed: Tensor, scale: Tensor, width: int, bits: int) -> Tensor:
    """One part: bytes u8 [n, bytes] and scales f32 [n] to columns f32 [w, n]."""
    table = _table(width, bits, packed.device)
    sign = sign_column(width, packed.device)
    codes = bitpack.unpack_codes(packed, width, bits)
    values = table.values.index_select(0, codes.to(torch.int32).view(-1)).view(codes.shape)
    x = hadamard_columns(values.mul_(sign))
    # The scale comes last: a norm of 1e37 times a sum of w levels would overflow before the division by sqrt(w).
    x.mul_(sign / math.sqrt(width)).mul_(scale)
    return x.masked_fill_(scale == 0, 0.0)  # +0, never -0


def _name_row(index: int, leading: torch.Size) -> str:
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), leading)) if len(leading) > 1 else ()
    return f"row {index}" + (f" (index {place})" if place else "")


def _rows_at_once(d: int, device: torch.device) -> int:
    return max(1, _CHUNK // d) if device.type == "cpu" else 1 << 20


def check_row_type(rows: Tensor) -> None:
    """Raise ArgumentError unless `rows` is a tensor [..., d] of a dtype that models use."""
    if rows.dtype not in ROW_DTYPES or rows.dim() == 0:
        raise ArgumentError(
            "rows must be a tensor [..., d] of a model's dtype",
            given=f"{rows.dtype} {tuple(rows.shape)}",
            allowed="float32, float16, bfloat16",
            action="convert the rows first",
        )


def check_finite(rows: Tensor) -> None:
    """Raise NonFiniteRowError naming the first of `rows` [..., d] that holds NaN or an infinity."""
    flat = rows.reshape(-1, rows.shape[-1])
    if rows.numel() and not flat.abs().amax().isfinite():
        bad = int((~flat.isfinite()).any(1).nonzero()[0])
        what = "NaN" if flat[bad].isnan().any() else "an infinity"
        raise NonFiniteRowError(
            "a row that is not finite cannot be packed",
            given=f"{what} in {_name_row(bad, rows.shape[:-1])}",
            allowed="finite values",
            action="find what produced it; nothing was packed",
        )


@torch.no_grad()
def pack(rows: Tensor, bits: int) -> PackedRows:
    """Pack `rows` f32, f16 or bf16 [..., d], any strides, 2 to 4 bits a coordinate.

    Returns new tensors: codes u8 [..., code_bytes(d, bits)], scales f32 [..., len(parts(d))].
    Raises ArgumentError (dtype, bits), WidthError (d), NonFiniteRowError, NormTooLargeError (a row's norm above 1e37);
    the last two name the first such row, and nothing is returned.
    """
    check_row_type(rows)
    d = rows.shape[-1]
    widths, total = parts(d), code_bytes(d, bits)
    check_finite(rows)
    flat = rows.reshape(-1, d)
    n = flat.shape[0]
    codes = torch.empty((n, total), dtype=torch.uint8, device=rows.device)
    scales = torch.empty((n, len(widths)), dtype=torch.float32, device=rows.device)
    relative = torch.zeros(n, device=rows.device)  # of a row's squared norm to the largest allowed
    step = _rows_at_once(d, codes.device)
    for first in range(0, n, step):
        chunk = flat[first : first + step]
        begin = byte = 0
        for p, width in enumerate(widths):
            part = chunk[:, begin : begin + width].t()
            columns = torch.zeros((width, chunk.shape[0]), device=rows.device)
            columns[: part.shape[0]] = part
            block, scale, norm = _encode(columns, bits)
            codes[first : first + step, byte : byte + block.shape[1]] = block
            scales[first : first + step, p] = scale
            relative[first : first + step] += (norm / MAX_NORM).square()
            begin, byte = begin + width, byte + block.shape[1]
    if n and relative.max() > 1:
        bad = int((relative > 1).nonzero()[0])
        raise NormTooLargeError(
            "a row's norm is too large to pack",
            given=f"norm {flat[bad].double().norm().item():.4g} in {_name_row(bad, rows.shape[:-1])}",
            allowed=f"norms up to {MAX_NORM:.0e}",
            action="find what produced it; nothing was packed",
        )
    leading = rows.shape[:-1]
    return PackedRows(codes.view(*leading, total), scales.view(*leading, len(widths)))


def _check_packed(packed: PackedRows, d: int, bits: int) -> None:
    codes, scales = packed
    want = (code_bytes(d, bits), len(parts(d)))
    ok = codes.dtype == torch.uint8 and scales.dtype == torch.float32 and codes.shape[:-1] == scales.shape[:-1]
    if not ok or (codes.shape[-1:], scales.shape[-1:]) != (want[:1], want[1:]):
        raise LayoutError(
            f"packed rows do not fit width {d} at {bits} bits",
            given=f"codes {codes.dtype} {tuple(codes.shape)}, scales {scales.dtype} {tuple(scales.shape)}",
            allowed=f"codes uint8 [..., {want[0]}], scales float32 [..., {want[1]}], equal leading dims",
            action="unpack with the width and bits that packed them",
        )


def unpack_codes(packed: PackedRows, d: int, bits: int) -> Tensor:
    """The codes alone, u8 [..., padded_width(d)], in rotated coordinates; `code_values` decodes them part by part."""
    _check_packed(packed, d, bits)
    flat = packed.codes.reshape(-1, packed.codes.shape[-1])
    out, byte = [], 0
    for width in parts(d):
        size = part_code_bytes(width, bits)
        out.append(bitpack.unpack_codes(flat[:, byte : byte + size], width, bits).t())
        byte += size
    return torch.cat(out, dim=1).view(*packed.codes.shape[:-1], padded_width(d))


@torch.no_grad()
def unpack(packed: PackedRows, d: int, bits: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows [..., d] of `dtype` (f32, f16 or bf16) from `pack`; a new contiguous tensor.

    A value beyond the dtype's range (a row near f16's 65,504 may come back slightly longer) becomes its largest finite
    value. Raises ArgumentError (dtype, bits), WidthError, LayoutError (shapes that do not fit d and bits).
    """
    if dtype not in ROW_DTYPES:
        raise ArgumentError(
            "rows unpack to a model's dtype", given=str(dtype), allowed="float32, float16, bfloat16", action="pick one"
        )
    _check_packed(packed, d, bits)
    leading = packed.codes.shape[:-1]
    codes = packed.codes.reshape(-1, packed.codes.shape[-1])
    scales = packed.scales.reshape(codes.shape[0], len(parts(d)))
    rows = torch.empty((codes.shape[0], d), dtype=dtype, device=codes.device)
    largest = torch.finfo(dtype).max
    step = _rows_at_once(d, codes.device)
    for first in range(0, codes.shape[0], step):
        chunk = slice(first, first + step)
        begin = byte = 0
        for p, width in enumerate(parts(d)):
            size = part_code_bytes(width, bits)
            x = _decode(codes[chunk, byte : byte + size], scales[chunk, p], width, bits)
            if dtype == torch.float16:
                x.clamp_(-largest, largest)
            rows[chunk, begin : begin + width] = x[: d - begin].t()
            begin, byte = begin + width, byte + size
    return rows.view(*leading, d)


def to_records(packed: PackedRows) -> Tensor:
    """Canonical records u8 [..., record_bytes]: codes, then the scales as little-endian f32. A new tensor."""
    return torch.cat(
        [packed.codes, packed.scales.clone(memory_format=torch.contiguous_format).view(torch.uint8)], dim=-1
    )


def from_records(records: Tensor, d: int, bits: int) -> PackedRows:
    """Inverse of `to_records`; new tensors. Raises LayoutError where the records have another size."""
    size, split = record_bytes(d, bits), code_bytes(d, bits)
    if records.dtype != torch.uint8 or records.shape[-1] != size:
        raise LayoutError(
            f"records do not fit width {d} at {bits} bits",
            given=f"{records.dtype} {tuple(records.shape)}",
            allowed=f"uint8 [..., {size}]",
            action="read them with the width and bits that wrote them",
        )
    scales = records[..., split:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return PackedRows(records[..., :split].clone(), scales)
