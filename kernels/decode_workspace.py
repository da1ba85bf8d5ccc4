"""What a decode call keeps between its three launches: sizes, and where each part lies in one buffer.

All layers of a model, and all their decode calls on one stream, share one workspace.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.decode_args import PAGE_TOKENS, ROW_CHUNK, Counters, DecodeArgs, Item, Plan
from kernels.decode_cells import DecodeShape
from kernels.decode_launch import DecodeLaunch
from kernels.errors import ArgumentError

ALIGNMENT = 128
SHORT_SPLIT, SHORT_REGION, SHORT_SHARE = 4, 16, 16  # pages, as csrc/plan.cuh cuts
SHORT_CHUNK = 128  # tokens


class DecodeLimits(NamedTuple):
    """The largest call: sequences in a batch, and pages of a sequence (the width of the page table)."""

    sequences: int
    pages: int


def packed_splits(pages: int, long_pages: int) -> int:
    """Items that so many packed pages of one sequence make at most, with long splits of `long_pages`."""
    short = _short_pages(pages)
    return -(-short // SHORT_SPLIT) + -(-(pages - short) // long_pages)


def page_row_chunks(pages: int, page_chunk: int) -> int:
    """Items that so many pages of one sequence make at most where they are read as rows."""
    short = _short_pages(pages)
    return -(-short * PAGE_TOKENS // SHORT_CHUNK) + -(-(pages - short) * PAGE_TOKENS // page_chunk)


def _short_pages(pages: int) -> int:
    return min(pages, max(SHORT_REGION, pages // SHORT_SHARE))


class WorkspaceLayout(NamedTuple):
    """Byte offsets of the parts; `num_bytes` of all. max_packed_items, max_row_items: as in DecodeArgs."""

    plans: int
    items: int
    queries: int
    partial_out: int
    partial_ml: int
    profile: int
    num_bytes: int
    max_packed_items: int
    max_row_items: int

    @classmethod
    def of(
        cls,
        shape: DecodeShape,
        limits: DecodeLimits,
        *,
        ring_rows: int,
        launch: DecodeLaunch,
        profile_bytes: int = 0,
    ) -> WorkspaceLayout:
        """For calls up to `limits` of a layer whose tails have `ring_rows` rows (0: no tail)."""
        ring_items = -(-ring_rows // ROW_CHUNK)
        packed = packed_splits(limits.pages, launch.long_pages) if launch.long_pages else 0
        page_items = 0 if launch.long_pages else page_row_chunks(limits.pages, launch.page_chunk)
        max_packed, max_rows = limits.sequences * packed, limits.sequences * (page_items + ring_items)
        vectors = (max_packed + max_rows) * shape.kv_heads * shape.num_vectors
        sizes = (
            ctypes.sizeof(Counters),
            limits.sequences * ctypes.sizeof(Plan),
            (max_packed + max_rows) * ctypes.sizeof(Item),
            limits.sequences * launch.query_bytes,
            vectors * shape.dim * 4,
            vectors * 2 * 4,
            profile_bytes,
        )
        offsets = [0]
        for size in sizes:
            offsets.append(offsets[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        _, plans, items, queries, partial_out, partial_ml, profile, end = offsets
        return cls(plans, items, queries, partial_out, partial_ml, profile, end, max_packed, max_rows)


def new_workspace(num_bytes: int, device: torch.device) -> Tensor:
    """u8 [num_bytes] at a multiple of 128; its contents do not matter."""
    room = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8, device=device)  # a CPU's allocator aligns to 64
    return room[-room.data_ptr() % ALIGNMENT :][:num_bytes]


def set_workspace(arguments: DecodeArgs, workspace: Tensor, layout: WorkspaceLayout, device: torch.device) -> None:
    """Raises ArgumentError where `workspace` is too small or not one contiguous aligned buffer on `device`."""
    fits = workspace.dtype == torch.uint8 and workspace.is_contiguous() and workspace.device == device
    if not fits or workspace.numel() < layout.num_bytes or workspace.data_ptr() % ALIGNMENT:
        raise ArgumentError(
            "the workspace does not serve this layer",
            given=f"{workspace.dtype} of {workspace.numel()} bytes at {workspace.data_ptr():#x} on {workspace.device}",
            allowed=f"uint8, contiguous, {layout.num_bytes} bytes or more at a multiple of {ALIGNMENT}, on {device}",
            action="make it by new_workspace for the largest workspace_bytes of the model's layers",
        )
    start = workspace.data_ptr()
    arguments.counters = start
    arguments.plans, arguments.items = start + layout.plans, start + layout.items
    arguments.queries = start + layout.queries
    arguments.partial_out, arguments.partial_ml = start + layout.partial_out, start + layout.partial_ml
    arguments.max_packed_items, arguments.max_row_items = layout.max_packed_items, layout.max_row_items
