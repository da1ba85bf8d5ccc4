"""Chains of matrix products of one to eight rows on a GPU, at the speed of reading the weights, with what surrounds
them in a decode step: an RMS norm before, SwiGLU, rotary embedding with append or a residual after
(csrc/linear_few.cuh).

A `LinearChain` is made once for its weights. A call sets pointers and launches once on torch's current stream: it
allocates nothing, waits for nothing and may be captured into a CUDA graph. `linear_few` is the reference of one
product, and the path of a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels import loader
from kernels.errors import ArgumentError
from kernels.rope_append import AppendTo, RopeArgs, set_rope
from kernels.step_cells import LinearTiling, linear_cell, linear_shared_bytes, linear_tiling

MAX_ROWS = 8
MAX_PRODUCTS = 4
BLOCK = 128  # of FP8 weights, both ways
ROWS_PER_TILE, GATED_ROWS_PER_TILE = 16, 8
PLAIN, GATED, ROTARY = range(3)  # csrc/linear_few.cuh, LinearKind
MAX_CTAS = 1023  # csrc/linear_few.cuh, kLinearGeneration
MIN_STAGES = 4
X_PADDING = 64  # bytes behind a row of x in shared memory
ROW_TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
SHARED_BYTES = {"sm_80": 163 * 1024, **dict.fromkeys(("sm_90a", "sm_100a", "sm_103a"), 227 * 1024)}  # of a CTA
SMALL_SHARED_BYTES = 99 * 1024  # all other archs
_ALIGNMENT = 16


class ProductArgs(ctypes.Structure):
    """LinearProduct of csrc/linear_few.cuh."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("residual_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("scale_stride", ctypes.c_int64),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class LinearArgs(ctypes.Structure):
    """As csrc/linear_few.cuh has it."""

    _fields_ = (
        ("products", ProductArgs * MAX_PRODUCTS),
        ("rope", RopeArgs),
        ("arrived", ctypes.c_void_p),
        ("num_products", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("stages", ctypes.c_int32),
        ("x_bytes", ctypes.c_int32),
        ("in_flight", ctypes.c_int32),
    )


@dataclass(frozen=True)
class LinearWeight:
    """weight: [N, K] of the rows' dtype, or float8_e4m3fn with scales f32 [ceil(N / 128), K / 128] of `scale_rows`.

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
    """[N, K] of any float dtype, K a multiple of 128, as e4m3 codes and f32 scales of blocks of 128 x 128
    (DeepSeek-V3 report, section 3.3): code = value * 448 / largest of the block. Scales: see LinearWeight."""
    n, k = weight.shape
    rows = -(-n // BLOCK)
    blocks = F.pad(weight.float(), (0, 0, 0, rows * BLOCK - n)).view(rows, BLOCK, k // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448.0
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(-1, k)[:n].contiguous()
    return codes, scale_rows(scales)


def scale_rows(scales: Tensor) -> Tensor:
    """[R, C] f32, its rows a multiple of 16 bytes apart, as copies need it."""
    rows, columns = scales.shape
    apart = scales.new_zeros(rows, -(-columns // 4) * 4)[:, :columns]
    return apart.copy_(scales)


def dequantized(weight: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] that codes and scales stand for; itself where it has none."""
    if scales is None:
        return weight
    wide = scales.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)
    return (weight.float() * wide).to(dtype)


def most_rows(ks: Sequence[int], arch: str, *, fp8: bool) -> int:
    """Rows of a call, so that those of each of these K, normed, fit into shared memory: 0 to 8."""
    for rows in range(MAX_ROWS, 0, -1):
        try:
            shared_plan(rows, [(k, True) for k in ks], arch, linear_tiling(fp8=fp8))
        except ArgumentError:
            continue
        return rows
    return 0


def linear_few(
    x: Tensor,
    linear: LinearWeight,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """The reference: x [rows, K] -> [rows, width], in x's dtype, rounded where the model's own operators round. FP8
    weights are multiplied as float32."""
    if norm is not None:
        wide = x if x.dtype == torch.float64 else x.float()
        x = norm * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    if linear.scales is None:
        y = F.linear(x, linear.weight, linear.bias)
    else:
        bias = None if linear.bias is None else linear.bias.float()
        y = F.linear(x.float(), dequantized(linear.weight, linear.scales, torch.float32), bias).to(x.dtype)
    if linear.gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if residual is None else residual + y


class Link(NamedTuple):
    """A product of a chain. norm: weights [K] of the RMS norm of its x, with eps, or None. rotary: its rows are heads,
    queries, keys and values; it rotates and appends as StepKernels.rope_append does, without norms of heads."""

    linear: LinearWeight
    norm: Tensor | None = None
    eps: float = 0.0
    rotary: bool = False

    @property
    def kind(self) -> int:
        return GATED if self.linear.gated else ROTARY if self.rotary else PLAIN


class Rotary(NamedTuple):
    """tables: cos, sin [positions, dim / 2]; to: where keys and values go; q_heads: the first ones."""

    tables: tuple[Tensor, Tensor]
    to: AppendTo
    q_heads: int


class LinkCall(NamedTuple):
    """x: [rows, K]; out: [rows, width]; residual: as out, and may be out. Rows contiguous. rotary: of a link that is;
    then queries alone are written to out."""

    x: Tensor
    out: Tensor
    residual: Tensor | None = None
    rotary: Rotary | None = None


class SharedPlan(NamedTuple):
    """How a CTA's shared memory is used: stages of the ring, bytes of x, and all of it."""

    stages: int
    x_bytes: int
    total: int


def shared_plan(rows: int, links: Sequence[tuple[int, bool]], arch: str, tiling: LinearTiling) -> SharedPlan:
    """links: K of each product, and whether its x is normed. An x without norm that does not fit is read from memory.

    Raises ArgumentError: rows that are normed do not fit."""
    limit = SHARED_BYTES.get(arch, SMALL_SHARED_BYTES)
    budget = limit - linear_shared_bytes(MIN_STAGES, 0, tiling)
    wanted = [rows * (2 * k + X_PADDING) for k, _ in links]
    if too_long := [k for (k, normed), size in zip(links, wanted, strict=True) if normed and size > budget]:
        raise _error(
            "rows that are normed do not fit into shared memory",
            f"{rows} rows of {max(too_long)} on {arch}",
            f"{budget} bytes of them",
            "take fewer rows, or norm them before",
        )
    x_bytes = max((size for size in wanted if size <= budget), default=0)
    per_stage = linear_shared_bytes(1, 0, tiling) - linear_shared_bytes(0, 0, tiling)
    stages = min(tiling.max_stages, (limit - linear_shared_bytes(0, x_bytes, tiling)) // per_stage)
    return SharedPlan(stages, x_bytes, linear_shared_bytes(stages, x_bytes, tiling))


class LinearChain:
    """Up to four products on a GPU, in one launch. Raises ArgumentError (shapes, dtypes, alignment), MachineError
    (loader).

    All CTAs of a launch wait for each other between products. So two chains must never run at once on one device.
    """

    def __init__(
        self,
        links: Sequence[Link],
        dtype: torch.dtype,
        arrived: Tensor,
        max_rows: int = MAX_ROWS,
        *,
        tiling: LinearTiling | None = None,
        arch: str | None = None,
    ) -> None:
        """dtype: of x and the results, bf16 (or f16 without FP8). arrived: i32 [1], zero before the first call; chains
        whose calls follow each other on one stream may share it. max_rows: of a call, at most 8. tiling: another than
        the kernel's own, to measure it. arch: what shared memory is planned for; by default the device's."""
        fp8 = {link.linear.scales is not None for link in links}
        if not 1 <= len(links) <= MAX_PRODUCTS or len(fp8) != 1:
            raise _error(
                "these products make no chain",
                f"{len(links)} products, with scales: {sorted(fp8)}",
                f"1 to {MAX_PRODUCTS}, all FP8 or none",
                "make several chains",
            )
        for link in links:
            _check_weight(link, dtype, max_rows)
        if sum(link.rotary for link in links) > 1 or any(link.rotary and link.linear.gated for link in links):
            raise _error(
                "a chain rotates one product",
                f"{[link.kind for link in links]}",
                "one, not gated",
                "make several chains",
            )
        self.links, self.dtype, self.max_rows = tuple(links), dtype, max_rows
        self.device = links[0].linear.weight.device
        if arrived.dtype != torch.int32 or arrived.device != self.device or arrived.numel() != 1:
            raise _error(
                "this does not count arrivals", f"{arrived.dtype} on {arrived.device}", "i32 [1]", "make it so"
            )
        self._arrived = arrived  # keeps it alive
        tiling = tiling or linear_tiling(fp8=True in fp8)
        self.tiling, self.arch = tiling, arch or loader.arch_of(self.device)
        self.cell = linear_cell(ROW_TYPES[dtype], fp8=True in fp8, tiling=tiling)
        self.arguments = LinearArgs(arrived=arrived.data_ptr(), num_products=len(links))
        for to, link in zip(self.arguments.products, links, strict=False):
            linear = link.linear
            to.n, to.k, to.kind, to.eps = linear.width, linear.weight.shape[1], link.kind, link.eps
            to.weight = linear.weight.data_ptr()
            to.norm = None if link.norm is None else link.norm.data_ptr()
            to.scale_stride = 0 if linear.scales is None else linear.scales.stride(0)
            for name in ("scales", "bias"):
                value = getattr(linear, name)
                setattr(to, name, None if value is None else value.data_ptr())
        shapes = [(link.linear.weight.shape[1], link.norm is not None) for link in links]
        self.plans = {rows: shared_plan(rows, shapes, self.arch, tiling) for rows in range(1, max_rows + 1)}
        tiles = [-(-x.linear.width // (GATED_ROWS_PER_TILE if x.linear.gated else ROWS_PER_TILE)) for x in links]
        self.ctas = min(max(tiles), _num_sms(self.device), MAX_CTAS)
        self._launches: dict[int, loader.PreparedLaunch] = {}

    def load(self) -> None:
        """Load the kernel, compiling it first where no archive has it; not allowed inside a capture."""
        for rows in self.plans:
            self._prepared(rows)

    def __call__(self, *calls: LinkCall) -> None:
        """One for each product, in order."""
        self.set_call(*calls)
        self._prepared(self.arguments.rows)(loader.current_stream(self.device.index or 0))

    def set_call(self, *calls: LinkCall) -> None:
        """Check a call's tensors and point the arguments at them. Raises ArgumentError."""
        arguments, rows = self.arguments, len(calls[0].x) if calls else 0
        if len(calls) != len(self.links) or not 1 <= rows <= self.max_rows:
            raise _error(
                "the call does not fit the product",
                f"{len(calls)} calls, {rows} rows",
                f"{len(self.links)} calls, 1 to {self.max_rows} rows",
                "use torch for more rows",
            )
        for call, link, to in zip(calls, self.links, arguments.products, strict=False):
            self._set_product(to, call, link, rows)
        arguments.rows = rows
        arguments.stages, arguments.x_bytes, _ = self.plans[rows]
        arguments.in_flight = min(self.tiling.in_flight, arguments.stages)

    def _set_product(self, to: ProductArgs, call: LinkCall, link: Link, rows: int) -> None:
        if call.residual is not None and link.kind != PLAIN:
            raise _error("only a plain product adds a residual", "a residual", "none", "add it to the next product")
        if (call.rotary is not None) != link.rotary:
            raise _error(
                "rotary embedding is of rotary products",
                f"{'none' if call.rotary is None else 'one'} in the call",
                f"rotary {link.rotary}, as the chain was made",
                "pass it so",
            )
        if call.rotary is not None:
            tables, where, q_heads = call.rotary
            if where.keys.shape[3] % ROWS_PER_TILE:
                raise _error(
                    "heads are rotated 16 values at a time", str(where.keys.shape[3]), "a multiple", "use torch"
                )
            set_rope(self.arguments.rope, self.dtype, call.out, tables, (None, None), 0.0, where, q_heads)
        wanted = {"x": (call.x, to.k), "out": (call.out, to.n), "residual": (call.residual, to.n)}
        for name, (tensor, width) in wanted.items():
            if tensor is None:
                to.residual = None
                continue
            fits = tensor.dtype == self.dtype and tensor.device == self.device and tensor.shape == (rows, width)
            if not fits or tensor.stride(1) != 1:
                raise _error(
                    f"{name} does not fit the product",
                    f"{tensor.dtype} {tuple(tensor.shape)}, strides {tensor.stride()}, on {tensor.device}",
                    f"{self.dtype} [{rows}, {width}] on {self.device}, rows contiguous",
                    "pass it so",
                )
            setattr(to, name, tensor.data_ptr())
            setattr(to, f"{name}_stride", tensor.stride(0))
        x = call.x
        if x.data_ptr() % _ALIGNMENT or (x.stride(0) * x.element_size()) % _ALIGNMENT:
            raise _error("x must lie at multiples of 16 bytes", hex(x.data_ptr()), "rows at multiples of 16", "copy it")

    def _prepared(self, rows: int) -> loader.PreparedLaunch:
        launch = self._launches.get(rows)
        if launch is None:
            launch = self._launches[rows] = loader.PreparedLaunch(
                self.cell,
                self.cell.kernels[0],
                self.device.index or 0,
                self.arguments,
                threads=self.tiling.threads,
                shared_bytes=self.plans[rows].total,
                overlap=loader.overlaps_launches(self.arch),
            )
            launch.set_ctas(self.ctas)
        return launch


def _check_weight(link: Link, dtype: torch.dtype, max_rows: int) -> None:
    linear = link.linear
    weight, scales = linear.weight, linear.scales
    n, k = weight.shape
    kinds = (dtype,) if scales is None else (torch.float8_e4m3fn,)
    multiple = 32 if scales is None else BLOCK
    fits = weight.dtype in kinds and dtype in ROW_TYPES and weight.is_contiguous() and k % multiple == 0
    if scales is not None:
        fits = fits and dtype == torch.bfloat16 and scales.dtype == torch.float32 and scales.stride(1) == 1
        fits = fits and scales.stride(0) % 4 == 0 and scales.data_ptr() % _ALIGNMENT == 0
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
    for name, each, size in (("bias", linear.bias, n), ("norm", link.norm, k)):
        if each is None:
            continue
        fits = each.dtype == dtype and each.shape == (size,) and each.is_contiguous()
        if not fits or (name == "norm" and each.data_ptr() % _ALIGNMENT):
            raise _error(
                f"the {name} does not fit the weight",
                f"{each.dtype} {tuple(each.shape)}",
                f"{dtype} [{size}], contiguous, a norm at a multiple of {_ALIGNMENT} bytes",
                "convert it once, when it is loaded",
            )


def _num_sms(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _error(reason: str, given: str, allowed: str, action: str) -> ArgumentError:
    return ArgumentError(reason, given=given, allowed=allowed, action=action)
