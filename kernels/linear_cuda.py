"""Matrix products of one to eight rows on a GPU, at the speed of reading the weights, with what surrounds them in a
decode step: SwiGLU or a residual after (csrc/linear_few.cuh).

A `FewLinear` is made once for each weight. A call sets pointers and launches on torch's current stream: it allocates
nothing, waits for nothing and may be captured into a CUDA graph. `linear_few` is the reference, and the path of a CPU.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import loader
from kernels.errors import ArgumentError
from kernels.step_cells import LinearTiling, linear_cell, linear_tiling

MAX_ROWS = 8
BLOCK = 128  # of FP8 weights, both ways
THREADS, ROWS_PER_TILE = 256, 16
ROW_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
_ALIGNMENT = 16


class LinearArgs(ctypes.Structure):
    """As csrc/linear_few.cuh has it."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("prefetch", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("prefetch_bytes", ctypes.c_int64),
        ("prefetch_limit", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
    )


@dataclass(frozen=True)
class LinearWeight:
    """weight: [N, K] of the rows' dtype, or float8_e4m3fn with scales f32 [ceil(N / 128), K / 128].

    gated: weight holds gate and up, N / 2 rows each, and the result is silu(gate) * up, [rows, N / 2].
    bias: [N] or None.
    """

    weight: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    gated: bool = False

    @property
    def num_bytes(self) -> int:
        """What a product reads of it."""
        return sum(x.numel() * x.element_size() for x in (self.weight, self.scales) if x is not None)

    @property
    def width(self) -> int:
        """Of the result."""
        return self.weight.shape[0] // (2 if self.gated else 1)


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] of any float dtype, both multiples of 128, as e4m3 codes and f32 scales of blocks of 128 x 128
    (DeepSeek-V3 report, section 3.3): code = value * 448 / largest of the block."""
    n, k = weight.shape
    blocks = weight.float().view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448.0
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(n, k)
    return codes, scales


def dequantized(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] that codes and scales stand for; itself where it has none."""
    if scales is None:
        return weight
    wide = scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)
    return (weight.float() * wide).to(dtype)


def linear_few(x: Tensor, linear: LinearWeight, residual: Tensor | None = None) -> Tensor:
    """The reference: x [rows, K] -> [rows, width], in x's dtype, rounded where the model's own operators round. FP8
    weights are multiplied as float32."""
    if linear.scales is None:
        y = F.linear(x, linear.weight, linear.bias)
    else:
        bias = None if linear.bias is None else linear.bias.float()
        y = F.linear(x.float(), dequantized(linear.weight, linear.scales, torch.float32), bias).to(x.dtype)
    if linear.gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


class FewLinear:
    """One weight's product on a GPU. Raises ArgumentError (shapes, dtypes, alignment), MachineError (loader)."""

    def __init__(
        self, linear: LinearWeight, dtype: torch.dtype, max_rows: int = MAX_ROWS, tiling: LinearTiling | None = None
    ) -> None:
        """dtype: of x and the result, bf16 (or f16 without FP8). max_rows: of a call, at most 8. tiling: another than
        the kernel's own, to measure it."""
        weight, fp8 = linear.weight, linear.scales is not None
        k = weight.shape[1]
        self._check_weight(linear, dtype, max_rows)
        self.linear, self.dtype, self.device, self.max_rows = linear, dtype, weight.device, max_rows
        self.cell = linear_cell(ROW_TYPES[dtype], fp8=fp8, gated=linear.gated, tiling=tiling)
        self.arguments = LinearArgs(n=linear.width, k=k, weight=weight.data_ptr())
        for name in ("scales", "bias"):
            value = getattr(linear, name)
            if value is not None:
                setattr(self.arguments, name, value.data_ptr())
        per_sm = (tiling or linear_tiling(gated=linear.gated)).ctas - 1
        self.ctas = min(-(-linear.width // ROWS_PER_TILE), per_sm * _num_sms(self.device))
        self._launch: loader.PreparedLaunch | None = None

    def prefetch(self, weight: Tensor, num_tokens: Tensor, limit: int) -> None:
        """Ask for `weight`, whose product comes next but for attention, to be in the second-level cache by then.

        num_tokens: i32, of each row of a call; not asked for where they are together more than `limit`.
        """
        arguments, num_bytes = self.arguments, weight.numel() * weight.element_size()
        if weight.data_ptr() % _ALIGNMENT or num_bytes % _ALIGNMENT or num_tokens.dtype != torch.int32:
            raise _error(
                "what is asked for must lie at multiples of 16 bytes",
                f"{num_bytes} bytes at {weight.data_ptr():#x}, lengths {num_tokens.dtype}",
                "multiples of 16 bytes, int32 lengths",
                "leave it out",
            )
        arguments.prefetch, arguments.prefetch_bytes = weight.data_ptr(), num_bytes
        arguments.num_tokens, arguments.prefetch_limit = num_tokens.data_ptr(), limit

    def load(self) -> None:
        """Load the kernel, compiling it first where no archive has it; not allowed inside a capture."""
        self._prepared()

    def __call__(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [rows, K]; out: [rows, width]; residual: as out, and may be out. Rows contiguous. Returns `out`."""
        self.set_call(x, out, residual)
        self._prepared()(loader.current_stream(self.device.index or 0))
        return out

    def set_call(self, x: Tensor, out: Tensor, residual: Tensor | None) -> None:
        """Check a call's tensors and point the arguments at them. Raises ArgumentError."""
        arguments, rows = self.arguments, len(x)
        if residual is not None and self.linear.gated:
            raise _error("a gated product adds no residual", "a residual", "none", "add it to the next product")
        wanted = {"x": (x, arguments.k), "out": (out, arguments.n), "residual": (residual, arguments.n)}
        for name, (tensor, width) in wanted.items():
            if tensor is None:
                arguments.residual = None
                continue
            fits = tensor.dtype == self.dtype and tensor.device == self.device and tensor.shape == (rows, width)
            if not fits or tensor.stride(1) != 1 or not 1 <= rows <= self.max_rows:
                raise _error(
                    f"{name} does not fit the product",
                    f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}",
                    f"{self.dtype} [1 to {self.max_rows}, {width}] on {self.device}, rows contiguous",
                    "use torch for more rows",
                )
            setattr(arguments, name, tensor.data_ptr())
            setattr(arguments, f"{name}_stride", tensor.stride(0))
        if x.data_ptr() % _ALIGNMENT or (x.stride(0) * x.element_size()) % _ALIGNMENT:
            raise _error("x must lie at multiples of 16 bytes", hex(x.data_ptr()), "rows at multiples of 16", "copy it")
        arguments.rows = rows

    def _prepared(self) -> loader.PreparedLaunch:
        if self._launch is None:
            self._launch = loader.PreparedLaunch(
                self.cell,
                self.cell.kernels[0],
                self.device.index or 0,
                self.arguments,
                threads=THREADS,
                overlap=loader.overlaps_launches(loader.arch_of(self.device)),
            )
            self._launch.set_ctas(self.ctas)
        return self._launch

    @staticmethod
    def _check_weight(linear: LinearWeight, dtype: torch.dtype, max_rows: int) -> None:
        weight, scales = linear.weight, linear.scales
        n, k = weight.shape
        kinds = (dtype,) if scales is None else (torch.float8_e4m3fn,)
        multiple = 32 if scales is None else BLOCK
        fits = weight.dtype in kinds and dtype in ROW_TYPES and weight.is_contiguous() and k % multiple == 0
        if scales is not None:
            fits = fits and dtype == torch.bfloat16 and scales.dtype == torch.float32 and scales.is_contiguous()
            fits = fits and scales.shape == (-(-n // BLOCK), k // BLOCK) and (not linear.gated or n // 2 % BLOCK == 0)
        if not fits or weight.data_ptr() % _ALIGNMENT or not 1 <= max_rows <= MAX_ROWS:
            raise _error(
                "this weight does not fit the kernel",
                f"{weight.dtype} {tuple(weight.shape)}, scales {None if scales is None else tuple(scales.shape)}, "
                f"rows of {dtype}, {max_rows} at most",
                f"contiguous [N, K] of the rows' dtype, K a multiple of 32; or e4m3 with f32 scales of blocks of 128, "
                f"K a multiple of 128; up to {MAX_ROWS} rows",
                "use torch's own products for it",
            )
        bias = linear.bias
        if bias is not None and (bias.dtype != dtype or bias.shape != (n,) or not bias.is_contiguous()):
            raise _error(
                "the bias does not fit the weight",
                f"{bias.dtype} {tuple(bias.shape)}",
                f"{dtype} [{n}]",
                "convert it once, when it is loaded",
            )


def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _error(reason: str, given: str, allowed: str, action: str) -> ArgumentError:
    return ArgumentError(reason, given=given, allowed=allowed, action=action)
