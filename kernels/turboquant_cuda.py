"""TurboQuant rows on a GPU: the functions of kernels/turboquant.py at the compiled widths, bit for bit.

Nothing here waits for the device, except `pack(..., checked=True)`. Everything about the arguments is checked before
anything runs, and every byte of the outputs is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import bitpack
from kernels.cells import ROW_TYPES, Cell, codec_cell
from kernels.errors import ArgumentError, LayoutError, NonFiniteRowError, NormTooLargeError
from kernels.loader import launch
from kernels.turboquant import MAX_NORM, PackedRows, code_bytes
from kernels.widths import require_compiled

NO_BAD_ROW = 2**63 - 1  # value of a first_bad_row flag while no bad row was met
_ROW_TYPES = dict(zip((torch.bfloat16, torch.float16, torch.float32), ROW_TYPES, strict=True))
_ROW_ALIGNMENT = 16  # bytes: rows move 16 at a time
_CODE_ALIGNMENT = 4  # bytes: codes move as u32
_THREADS = 256
_CTAS_PER_SM = 16  # more rows than this many CTAs hold are looped over


def new_bad_row_flag(device: torch.device) -> Tensor:
    """A flag for `pack`: i64 [1], NO_BAD_ROW. Kernels only ever lower it, so one flag may watch many launches."""
    return torch.full((1,), NO_BAD_ROW, dtype=torch.int64, device=device)


def pack(
    rows: Tensor,
    bits: int,
    *,
    out: PackedRows | None = None,
    first_bad_row: Tensor | None = None,
    checked: bool = False,
) -> PackedRows:
    """Pack CUDA `rows` bf16, f16 or f32 [n, d] with any row stride of 16-byte multiples; d a compiled width.

    out: codes u8 [n, code_bytes(d, bits)] with any row stride of 4-byte multiples (a view into records will do), scales
    f32 [n, 1] with any row stride; new tensors where it is left out.
    A row with NaN, an infinity or a norm above 1e37 gets codes 0 and scale NaN, and its index lowers `first_bad_row`
    (i64 [1] on the device, from `new_bad_row_flag`). By default nobody waits for that: the caller reads the flag where
    it synchronises anyway and passes it to `raise_bad_row`. With checked=True this call waits and raises itself.
    Raises, before anything runs: ArgumentError, UncompiledWidthError, LayoutError (out); MachineError (loader).
    Raises with checked=True: NonFiniteRowError, NormTooLargeError; the outputs are then not to be used.
    """
    n, d = _check_rows(rows, "rows")
    bitpack.check_bits(bits)
    size = code_bytes(d, bits)
    if out is None:
        codes = torch.empty((n, size), dtype=torch.uint8, device=rows.device)
        out = PackedRows(codes, torch.empty((n, 1), dtype=torch.float32, device=rows.device))
    _check_packed(out, n, size, rows.device, written=True)
    if checked and torch.cuda.is_current_stream_capturing():
        raise ArgumentError(
            "a checked pack waits for the device",
            given="a stream that captures a graph",
            allowed="checked=False inside a capture",
            action="pass first_bad_row and read it after the replay",
        )
    if first_bad_row is None:
        first_bad_row = new_bad_row_flag(rows.device)
    elif (first_bad_row.dtype, first_bad_row.shape, first_bad_row.device) != (torch.int64, (1,), rows.device):
        raise ArgumentError(
            "first_bad_row does not fit",
            given=f"{first_bad_row.dtype} {tuple(first_bad_row.shape)} on {first_bad_row.device}",
            allowed=f"int64 (1,) on {rows.device}",
            action="make it with new_bad_row_flag",
        )
    cell = _cell(d, bits, rows.dtype)
    strides = (out.codes, out.codes.stride(0), out.scales, out.scales.stride(0))
    _launch(cell, cell.kernels[0], rows, n, (rows, rows.stride(0), *strides, first_bad_row, n))
    if checked:
        raise_bad_row(first_bad_row, rows)
    return out


def raise_bad_row(first_bad_row: Tensor, rows: Tensor) -> None:
    """Wait for the device and raise NonFiniteRowError or NormTooLargeError if the flag names a row of `rows`."""
    index = int(first_bad_row)
    if index == NO_BAD_ROW:
        return
    row = rows[index].double()
    if bool(row.isfinite().all()):
        raise NormTooLargeError(
            "a row's norm is too large to pack",
            given=f"norm {row.norm().item():.4g} in row {index}",
            allowed=f"norms up to {MAX_NORM:.0e}",
            action="find what produced it; the outputs are not to be used",
        )
    what = "NaN" if bool(row.isnan().any()) else "an infinity"
    raise NonFiniteRowError(
        "a row that is not finite cannot be packed",
        given=f"{what} in row {index}",
        allowed="finite values",
        action="find what produced it; the outputs are not to be used",
    )


def unpack(
    packed: PackedRows, d: int, bits: int, dtype: torch.dtype = torch.bfloat16, *, out: Tensor | None = None
) -> Tensor:
    """Rows [n, d] of `dtype` from CUDA codes u8 [n, code_bytes(d, bits)] and scales f32 [n, 1]; d a compiled width.

    out: rows with any row stride of 16-byte multiples; a new tensor where it is left out. f16 rows saturate at 65504.
    Raises, before anything runs: ArgumentError, UncompiledWidthError, LayoutError; MachineError (loader).
    """
    bitpack.check_bits(bits)
    require_compiled(d, "row")
    n = packed.codes.shape[0] if packed.codes.dim() else 0
    _check_packed(packed, n, code_bytes(d, bits), packed.codes.device, written=False)
    if out is None:
        if dtype not in _ROW_TYPES:
            raise _row_type_error(dtype, "dtype")
        out = torch.empty((n, d), dtype=dtype, device=packed.codes.device)
    if _check_rows(out, "out", written=True) != (n, d) or out.dtype != dtype or out.device != packed.codes.device:
        raise ArgumentError(
            "out does not fit the packed rows",
            given=f"{out.dtype} {tuple(out.shape)} on {out.device}",
            allowed=f"{dtype} {(n, d)} on {packed.codes.device}",
            action="pass rows of that shape, or leave out away",
        )
    cell = _cell(d, bits, dtype)
    strides = (packed.codes, packed.codes.stride(0), packed.scales, packed.scales.stride(0))
    _launch(cell, cell.kernels[1], out, n, (*strides, out, out.stride(0), n))
    return out


def _cell(d: int, bits: int, dtype: torch.dtype) -> Cell:
    return codec_cell(d, bits, _ROW_TYPES[dtype])


def _launch(cell: Cell, kernel: str, rows: Tensor, n: int, arguments: tuple[Tensor | int, ...]) -> None:
    if n == 0:
        return
    rows_per_cta = _THREADS // 32 * max(1, 256 // cell.width)  # as in csrc/turboquant.cuh: 8 values a lane
    sms = torch.cuda.get_device_properties(rows.device).multi_processor_count
    ctas = min(-(-n // rows_per_cta), sms * _CTAS_PER_SM)
    launch(cell, kernel, rows.device, ctas=ctas, threads=_THREADS, arguments=arguments)


def _row_type_error(dtype: torch.dtype, name: str) -> ArgumentError:
    allowed = ", ".join(str(t).removeprefix("torch.") for t in _ROW_TYPES)
    return ArgumentError(
        f"{name} is no dtype of rows", given=str(dtype), allowed=allowed, action="convert the rows first"
    )


def _check_rows(rows: Tensor, name: str, *, written: bool = False) -> tuple[int, int]:
    """Shape [n, d] of rows that a kernel may read (or write). Raises ArgumentError, UncompiledWidthError."""
    if rows.dtype not in _ROW_TYPES:
        raise _row_type_error(rows.dtype, name)
    if rows.dim() != 2:
        raise ArgumentError(
            f"{name} must have two dims", given=str(tuple(rows.shape)), allowed="[n, d]", action="use rows.view(-1, d)"
        )
    n, d = rows.shape
    require_compiled(d, "row")
    if not rows.is_cuda:
        raise ArgumentError(
            f"{name} must lie on a GPU",
            given=str(rows.device),
            allowed="cuda",
            action="use kernels.turboquant on a CPU",
        )
    row_bytes = rows.stride(0) * rows.element_size()
    if rows.stride(1) != 1 or (written and n > 1 and rows.stride(0) < d):
        raise ArgumentError(
            f"{name} must hold each row in one piece" + (", apart from the others" if written else ""),
            given=f"strides {rows.stride()}",
            allowed=f"(any, 1){f', at least {d} apart' if written else ''}",
            action="pass rows.contiguous()",
        )
    if rows.data_ptr() % _ROW_ALIGNMENT or (n > 1 and row_bytes % _ROW_ALIGNMENT):
        raise ArgumentError(
            f"{name} must begin each row at a multiple of {_ROW_ALIGNMENT} bytes",
            given=f"address {rows.data_ptr():#x}, row stride {row_bytes} bytes",
            allowed=f"multiples of {_ROW_ALIGNMENT}",
            action="pass rows.clone()",
        )
    return n, d


def _check_packed(packed: PackedRows, n: int, size: int, device: torch.device, *, written: bool) -> None:
    """Raise LayoutError unless codes u8 [n, size] and scales f32 [n, 1] lie on `device` as the kernels need them."""
    codes, scales = packed
    shapes_fit = (codes.shape, scales.shape) == ((n, size), (n, 1))
    types_fit = (codes.dtype, scales.dtype) == (torch.uint8, torch.float32)
    if not (shapes_fit and types_fit and device.type == "cuda" and codes.device == scales.device == device):
        where = device if device.type == "cuda" else "one GPU"
        raise LayoutError(
            "packed rows do not fit",
            given=f"codes {codes.dtype} {tuple(codes.shape)} on {codes.device}, "
            f"scales {scales.dtype} {tuple(scales.shape)} on {scales.device}",
            allowed=f"codes uint8 {(n, size)}, scales float32 {(n, 1)}, on {where}",
            action="use the width and bits they belong to, on the device of the rows",
        )
    overlap = written and n > 1 and (codes.stride(0) < size or scales.stride(0) < 1)
    aligned = codes.data_ptr() % _CODE_ALIGNMENT == 0 and (n <= 1 or codes.stride(0) % _CODE_ALIGNMENT == 0)
    if codes.stride(1) != 1 or not aligned or overlap:
        raise LayoutError(
            f"codes must lie row by row in one piece, each at a multiple of {_CODE_ALIGNMENT} bytes",
            given=f"codes at {codes.data_ptr():#x}, strides {codes.stride()}; scales with strides {scales.stride()}",
            allowed=f"codes strides (a multiple of {_CODE_ALIGNMENT}, 1); rows of an output apart from each other",
            action="pass contiguous tensors or views into records",
        )
