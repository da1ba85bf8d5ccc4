"""Decode attention on a GPU: the newest tokens of many sequences over their pages and tails, in three launches.

One interface for every kind of page (TurboQuant presets, fp8, dense; keys and values apart or shared) and every head
ratio. A `DecodeLayer` is made once for each layer and number of query tokens; it checks what does not change, picks and
loads the cell, and holds the kernels' arguments. A call checks the rest, sets pointers and launches on torch's current
stream: it allocates nothing, waits for nothing and may be captured into a CUDA graph. Lengths and page tables are read
on the device, so a captured call serves any lengths that the workspace was made for. The reference, and the path of a
CPU, is kernels/attention.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernels import loader
from kernels.cells import PHASES
from kernels.decode_args import DecodeArgs
from kernels.decode_batch import Batch
from kernels.decode_cells import DecodeShape, decode_cell
from kernels.decode_launch import decode_launch
from kernels.decode_memory import ALIGNMENT, ROW_TYPES, Pages, RegionFacts, Tail, region_facts, set_pages, set_tail
from kernels.decode_tiling import PROFILE_SLOTS
from kernels.decode_workspace import DecodeLimits, WorkspaceLayout, set_workspace
from kernels.errors import ArgumentError

__all__ = ["Batch", "DecodeLayer", "DecodeOptions"]

MAX_WINDOW = 1 << 30  # the kernels add it to token positions in 32 bits


class DecodeOptions(NamedTuple):
    """Of a layer. sm_scale: of the scores, before softcap; above 0. window: tokens that a query sees, itself included;
    0 = all. softcap: 0 = none. sinks: f32 [q_heads], one more logit a head in the denominator only, or None."""

    sm_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None


class DecodeLayer:
    """Decode attention of one layer, for `num_queries` tokens a sequence.

    Attributes: shape, cell, limits, arguments (what the kernels are given; of the last call).
    """

    def __init__(
        self,
        *,
        keys: Pages,
        values: Pages | None,
        tail: Tail | None,
        q_heads: int,
        dtype: torch.dtype,
        options: DecodeOptions,
        limits: DecodeLimits,
        num_queries: int = 1,
        arch: str | None = None,
        profile: bool = False,
    ) -> None:
        """
        Args:
            keys, values: the layer's pages (`decode_memory`); values None: the keys are the values too.
            tail: the layer's rings; None where every row is in pages.
            dtype: bf16 or f16, of queries, outputs, tails and dense pages.
            limits: the largest call.
            arch: what the cell is chosen for; by default the device's.
            profile: take the cell that times its phases.

        Raises ArgumentError, LayoutError, UncompiledWidthError; UnsupportedDeviceError.
        """
        k = region_facts(keys, "kv" if values is None else "k")
        v = k if values is None else region_facts(values, "v")
        if dtype not in ROW_TYPES or (isinstance(keys, Tensor) and keys.dtype != dtype):
            raise _error(
                "this is not the dtype of a layer's rows",
                given=f"{dtype}, pages {keys.dtype if isinstance(keys, Tensor) else k.codec}",
                allowed=f"{', '.join(map(str, ROW_TYPES))}; dense pages of the same",
                action="convert the queries to the model's dtype",
            )
        value_codec = None if values is None else v.codec
        row_type, capped = ROW_TYPES[dtype], options.softcap > 0
        self.shape = DecodeShape(k.dim, q_heads, k.kv_heads, k.codec, value_codec, row_type, num_queries, capped)
        self.device, self.dtype, self.limits = k.device, dtype, limits
        if k.device.type != "cuda" and arch is None:
            raise _error(
                "pages must lie on a GPU", given=str(k.device), allowed="cuda", action="use kernels.attention on a CPU"
            )
        self._arch = arch or loader.arch_of(k.device)
        self.cell = decode_cell(self.shape, self._arch, profile=profile)
        self.launch = decode_launch(self.cell, self.shape, self._arch)
        self.arguments = DecodeArgs()
        self._set_layer(k, v, tail, options)
        self._kept_alive = (keys, values, tail, options.sinks)  # the kernels have their addresses only
        self.workspace_layout = WorkspaceLayout.of(
            self.shape,
            limits,
            ring_rows=self.arguments.ring_rows,
            launch=self.launch,
            profile_bytes=8 * len(PROFILE_SLOTS) * self.launch.attend.ctas(limits.sequences, self._num_sms())
            if profile
            else 0,
        )
        self._signature: tuple[object, ...] | None = None
        self._launches: tuple[loader.PreparedLaunch, ...] = ()
        self._has_tail = tail is not None
        self._sized_for = 0
        self._index = k.device.index or 0

    @property
    def workspace_bytes(self) -> int:
        """What `use_workspace` needs, for the memory ledger."""
        return self.workspace_layout.num_bytes

    def use_workspace(self, workspace: Tensor) -> None:
        """Keep the calls' intermediate results in `workspace` (`decode_workspace.new_workspace`), shared by all layers
        whose calls follow each other on one stream. Raises ArgumentError."""
        set_workspace(self.arguments, workspace, self.workspace_layout, self.device)
        self._workspace = workspace  # keeps it alive
        if self.cell.variant.endswith("profile"):
            self.arguments.profile = workspace.data_ptr() + self.workspace_layout.profile

    def load(self) -> None:
        """Load the kernels, compiling them first where no archive has them: seconds, and not allowed inside a capture.

        The first call does it otherwise. Raises what `loader.load` raises.
        """
        if self._launches:
            return
        overlap = loader.overlaps_launches(self._arch)
        self._launches = tuple(
            loader.PreparedLaunch(
                self.cell,
                kernel,
                self._index,
                self.arguments,
                threads=getattr(self.launch, phase).threads,
                shared_bytes=getattr(self.launch, phase).shared_bytes,
                overlap=overlap and phase != "prepare",  # prepare waits for what wrote its inputs
            )
            for phase, kernel in zip(PHASES, self.cell.kernels, strict=True)
        )

    def __call__(self, q: Tensor, batch: Batch, *, out: Tensor, lse: Tensor | None = None) -> Tensor:
        """Attend; returns `out`.

        Args:
            q: [B, T, q_heads, dim], last dim contiguous, other strides multiples of 16 bytes; query t of a sequence
                stands at position num_tokens - T + t.
            out: as q. Every element is written.
            lse: f32 [B, T, q_heads] contiguous, natural log-sum-exp of the scores, sinks not counted; -inf where
                nothing is visible.

        Raises ArgumentError before anything runs; what `load` raises; LaunchError.
        """
        self.set_call(q, batch, out, lse)
        if self._sized_for != self.arguments.num_sequences:
            self._size_grids(self.arguments.num_sequences)
        stream = _current_stream(self._index)
        for launch in self._launches:
            launch(stream)
        return out

    def set_call(self, q: Tensor, batch: Batch, out: Tensor, lse: Tensor | None) -> None:
        """Check a call's tensors and point the arguments at them. Raises ArgumentError."""
        signature = (q.shape, q.stride(), q.dtype, q.device, out.shape, out.stride(), out.dtype, out.device)
        if signature != self._signature:
            self._check_call(q, out)
            self._signature = signature
        arguments = self.arguments
        num_sequences = q.shape[0]
        where = batch.check(num_sequences, self.limits.pages, self.device, self._has_tail)
        q_pointer, out_pointer, lse_pointer = q.data_ptr(), out.data_ptr(), None
        if (q_pointer | out_pointer) % ALIGNMENT:
            raise _error(
                "queries and outputs must begin at multiples of 16 bytes",
                given=f"{q_pointer:#x}, {out_pointer:#x}",
                allowed=f"multiples of {ALIGNMENT}",
                action="pass q.contiguous()",
            )
        if lse is not None:
            self._check_lse(lse, num_sequences)
            lse_pointer = lse.data_ptr()
        arguments.q, arguments.out, arguments.lse = q_pointer, out_pointer, lse_pointer
        arguments.page_table, arguments.table_stride, arguments.bases, arguments.num_tokens, arguments.tail_slots = (
            where
        )

    def _size_grids(self, num_sequences: int) -> None:
        self.load()
        for phase, launch in zip(PHASES, self._launches, strict=True):
            launch.set_ctas(getattr(self.launch, phase).ctas(num_sequences, self._num_sms()))
        self._sized_for = num_sequences

    def _num_sms(self) -> int:
        if self.device.type != "cuda":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _set_layer(self, k: RegionFacts, v: RegionFacts, tail: Tail | None, options: DecodeOptions) -> None:
        arguments, sinks = self.arguments, options.sinks
        set_pages(arguments, k, v)
        if tail is not None:
            set_tail(arguments, tail, k, self.dtype)
        if not 0 < options.sm_scale < math.inf:  # hidden scores, -inf, are multiplied with it, too
            raise _error(
                "a layer's scores are scaled by a positive number",
                given=f"sm_scale {options.sm_scale}",
                allowed="finite, above 0",
                action="pass the layer's own, mostly width ** -0.5; negate the queries where it is negative",
            )
        if not 0 <= options.window <= MAX_WINDOW or options.softcap < 0:
            raise _error(
                "windows and softcaps count from 0",
                given=f"window {options.window}, softcap {options.softcap}",
                allowed=f"windows of up to {MAX_WINDOW} tokens, softcaps of 0 (none) or more",
                action="pass the layer's own; 0 where a query sees all",
            )
        if sinks is not None:
            want = (torch.float32, (self.shape.q_heads,), self.device)
            if (sinks.dtype, sinks.shape, sinks.device) != want or not sinks.is_contiguous():
                raise _error(
                    "sinks are one logit a query head",
                    given=f"{sinks.dtype} {tuple(sinks.shape)} on {sinks.device}",
                    allowed=f"contiguous float32 [{self.shape.q_heads}] on {self.device}",
                    action="convert the layer's sinks once, when it is loaded",
                )
            arguments.sinks = sinks.data_ptr()
        arguments.kv_heads, arguments.group = self.shape.kv_heads, self.shape.group
        arguments.num_queries, arguments.window = self.shape.num_queries, options.window
        arguments.sm_scale, arguments.softcap, arguments.minus_one = options.sm_scale, options.softcap, 0xFFFFFFFF

    def _check_call(self, q: Tensor, out: Tensor) -> None:
        """Everything about queries and outputs but addresses; sets their strides."""
        shape, arguments, device = self.shape, self.arguments, self.device
        num_sequences = q.shape[0] if q.dim() else 0
        want = (num_sequences, shape.num_queries, shape.q_heads, shape.dim)
        for name, x in (("q", q), ("out", out)):
            # A stride over one element only is never used.
            steps = [stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False) if size > 1]
            aligned = all(step * x.element_size() % ALIGNMENT == 0 for step in steps)
            if x.shape != want or (x.dtype, x.device) != (self.dtype, device) or x.stride(3) != 1 or not aligned:
                raise _error(
                    f"{name} does not fit the layer",
                    given=f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}, on {x.device}",
                    allowed=f"{self.dtype} [B, {', '.join(map(str, want[1:]))}] on {device}, last dim contiguous, "
                    f"other strides multiples of {ALIGNMENT} bytes",
                    action="pass the layer's own queries, and an output like them",
                )
        if not 1 <= num_sequences <= self.limits.sequences or arguments.counters is None:
            raise _error(
                "the workspace does not serve this batch",
                given=f"{num_sequences} sequences" + (", no workspace" if arguments.counters is None else ""),
                allowed=f"1 to {self.limits.sequences} sequences, after use_workspace",
                action="make the layer with larger limits, or split the batch",
            )
        arguments.num_sequences = num_sequences
        arguments.q_batch_stride, arguments.q_token_stride, arguments.q_head_stride, _ = q.stride()
        arguments.out_batch_stride, arguments.out_token_stride, arguments.out_head_stride, _ = out.stride()

    def _check_lse(self, lse: Tensor, num_sequences: int) -> None:
        want = (num_sequences, self.shape.num_queries, self.shape.q_heads)
        fits = lse.shape == want and lse.dtype == torch.float32 and lse.device == self.device
        if not fits or not lse.is_contiguous():
            raise _error(
                "lse does not fit the queries",
                given=f"{lse.dtype} {tuple(lse.shape)}, strides {lse.stride()}, on {lse.device}",
                allowed=f"contiguous float32 {want} on {self.device}",
                action="leave it out, or allocate it so",
            )


def _current_stream(device_index: int) -> int:
    """torch's current stream, as the driver's handle: what torch.cuda.current_stream says, without its object."""
    return int(torch._C._cuda_getCurrentRawStream(device_index))


def _error(reason: str, *, given: str, allowed: str, action: str) -> ArgumentError:
    return ArgumentError(reason, given=given, allowed=allowed, action=action)
