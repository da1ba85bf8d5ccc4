"""What a worker will take of its GPU, by owner, before anything is made: it must fit, or the worker does not start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.decode_cells import DecodeShape, decode_cell
from kernels.decode_launch import decode_launch
from kernels.decode_memory import ROW_TYPES
from kernels.decode_workspace import DecodeLimits, WorkspaceLayout
from kernels.prefill import Workspace
from kvstore.geometry import ITEM_BYTES, CacheGeometry
from protos import kvstore_pb2
from protos.errors import CapacityError
from protos.page_hash import PAGE_TOKENS
from worker.decode_graphs import BUCKETS
from worker.decode_state import STOPS
from worker.families import LlamaArchitecture
from worker.gpu_kernels import attention_kernels
from worker.kv_view import TORCH_DTYPES
from worker.memory_plan import (
    ACTIVATIONS,
    BUFFERS,
    GRAPH_POOLS,
    LIBRARIES,
    STATE,
    WORKSPACES,
    Use,
    demand_fit,
    table,
    total,
)
from worker.models.llama import LlamaConfig
from worker.sizing import spec_of
from worker.weights import Plan

ARENAS, RESERVE = "KV arenas", "context, kernels, libraries"
RESERVE_BYTES = 1 << 30
GRAPH_BYTES = 8 << 20  # of one graph: what captured library calls keep
PRODUCT_BYTES = (
    32 << 20
)  # of cuBLAS on Hopper: a workspace for each stream that it was called on, a graph's capture too
ACTIVATIONS_UNKNOWN = 1 << 30  # where no formula is known: DeepSeek-V4
SLACK = 1.5  # of activations: torch's allocator rounds, and keeps blocks of several sizes


@dataclass(frozen=True)
class Budget:
    """``room``: bytes of the GPU that are free, or that the kvstore holds for this worker already."""

    uses: tuple[Use, ...]
    room: int

    def __str__(self) -> str:
        return f"{table(self.uses)}; there are {self.room >> 20} MiB"

    def demand(self) -> None:
        """Raises CapacityError (MEMORY_BUDGET), with the table, where it does not add up."""
        if total(self.uses) > self.room:
            raise _over(table(self.uses), f"{self.room >> 20} MiB", "its start-up budget")

    def demand_measured(self, free: int, kept: int, measured: Sequence[tuple[str, int]]) -> None:
        """After the first step: what is left must do for the activations of the largest step.

        Args:
            free: bytes of the GPU. kept: by torch's allocator for activations already.
            measured: bytes by owner, for the message.

        Raises:
            CapacityError: MEMORY_BUDGET, with planned and measured bytes.
        """
        wanted = sum(use.num_bytes for use in self.uses if use.owner == ACTIVATIONS)
        if free + kept < wanted:
            found = ", ".join(f"{owner} {size >> 20} MiB" for owner, size in measured)
            given = f"planned: {table(self.uses)}; measured: {found}"
            raise _over(
                given, f"{wanted >> 20} MiB left for activations, {(free + kept) >> 20} MiB are", "what it took"
            )


def planned(plan: Plan, free: int, arch: str, stored: kvstore_pb2.KvStatsResponse | None, device: str) -> Budget:
    """Of a worker on a GPU.

    Args:
        free: bytes of the GPU.
        arch: of the GPU, "sm_90a".
        stored: what the kvstore says of what it holds; None: it did not answer.
        device: the GPU's name there.

    Raises:
        CapacityError: MODEL_TOO_LARGE, the weights alone do not fit.
    """
    config, geometry = plan.config, plan.geometry
    spec = spec_of(config, geometry, plan.max_sequence_tokens, config.arena_bytes)
    room = free + _held(stored, device)
    demand_fit(plan.uses, room, f"free on {device}, or held for it")
    *weights, reading = plan.uses
    uses = [*weights, Use(ARENAS, spec.device_bytes)]
    activations = ACTIVATIONS_UNKNOWN
    if isinstance(plan.shapes, LlamaArchitecture):
        shapes = plan.shapes.shapes
        item, rows = ITEM_BYTES[plan.dtype], config.max_running
        anew = int(SLACK * item * _largest_product(shapes)) if plan.form.held and plan.form.stored else 0
        activations = anew + _activations(shapes, item, config.chunk_tokens + rows, rows)
        if config.decode_graphs:
            uses += _decode(shapes, geometry, item, rows, plan.max_sequence_tokens, anew)
    if attention_kernels(geometry) and isinstance(plan.shapes, LlamaArchitecture):
        q_heads = plan.shapes.shapes.q_heads
        limits = DecodeLimits(config.max_running, -(-plan.max_sequence_tokens // PAGE_TOKENS))
        uses.append(Use(WORKSPACES, _workspaces(geometry, q_heads, limits, plan.dtype, arch)))
    streams = 1 + (num_graphs(config.max_running) if config.decode_graphs else 0)
    uses.append(Use(LIBRARIES, streams * PRODUCT_BYTES))
    uses.append(Use(ACTIVATIONS, max(activations, reading.num_bytes)))
    uses.append(Use(RESERVE, RESERVE_BYTES))
    return Budget(tuple(uses), room)


def _held(stored: kvstore_pb2.KvStatsResponse | None, device: str) -> int:
    """What is on the GPU for this worker already, in the kvstore's hands."""
    if stored is None:
        return 0
    arenas = sum(group.arena_bytes for each in stored.devices if each.device == device for group in each.groups)
    return arenas + sum(weights.num_bytes for weights in stored.weights if weights.memory == device)


def _decode(shapes: LlamaConfig, geometry: CacheGeometry, item: int, rows: int, tokens: int, anew: int) -> list[Use]:
    """As worker/decode_state.py and worker/decode_layers.py make it, and the graphs over it. ``anew``: bytes of the
    largest weight that a product of many rows makes anew out of FP8 blocks, in the graphs' pool.
    """
    pages = -(-tokens // PAGE_TOKENS)
    words = 1 + rows * (10 + STOPS + len(geometry.groups) * (2 + pages) + -(-shapes.vocab_size // 32))
    heads = shapes.q_heads + 2 * shapes.kv_heads
    values = 3 * shapes.hidden + (heads + shapes.q_heads) * shapes.head_dim + 3 * shapes.intermediate
    tables = 2 * tokens * shapes.head_dim
    graphs = num_graphs(rows)
    return [
        Use(STATE, 4 * words),
        Use(BUFFERS, item * (rows * (values + shapes.vocab_size) + tables)),
        Use(GRAPH_POOLS, graphs * GRAPH_BYTES + anew),
    ]


def _largest_product(shapes: LlamaConfig) -> int:
    """Values of a layer's largest weight."""
    heads = (shapes.q_heads + 2 * shapes.kv_heads) * shapes.head_dim
    return shapes.hidden * max(heads, 2 * shapes.intermediate)


def num_graphs(rows: int) -> int:
    """Of so many sequences (``DecodeGraphs.buckets``)."""
    return len({*(bucket for bucket in BUCKETS if bucket < rows), rows})


def _workspaces(geometry: CacheGeometry, q_heads: int, limits: DecodeLimits, dtype: str, arch: str) -> int:
    """Of decode attention, which all layers share, and of prompt chunks over packed pages."""
    largest = 0
    for group in geometry.groups:
        by_kind = {region.kind: region for region in group.paged_regions}
        k, v = by_kind["k"], by_kind["v"]
        row_type = ROW_TYPES[TORCH_DTYPES[k.dtype]]
        shape = DecodeShape(k.dim, q_heads, k.heads, group.codec(k), group.codec(v), row_type)
        launch = decode_launch(decode_cell(shape, arch), shape, arch)
        ring_rows = geometry.ring_rows(group, k) if group.has_tail else 0
        layout = WorkspaceLayout.of(shape, limits, ring_rows=ring_rows, launch=launch)
        largest = max(largest, layout.num_bytes + 2 * Workspace.values(k.heads, k.dim) * ITEM_BYTES[k.dtype])
    return largest


def _activations(shapes: LlamaConfig, item: int, rows: int, logit_rows: int) -> int:
    """The most tensors that a step of ``rows`` rows has at once, with the KV rows that it keeps until they are sealed,
    and logits as computed and in 32 bits.
    """
    heads = (2 * shapes.q_heads + 4 * shapes.kv_heads) * shapes.head_dim
    layer = 4 * shapes.hidden + 2 * heads + 4 * shapes.intermediate
    kept = 2 * shapes.num_layers * shapes.kv_heads * shapes.head_dim
    return int(SLACK * (rows * item * (layer + kept) + logit_rows * shapes.vocab_size * (item + 4)))


def _over(given: str, allowed: str, what: str) -> CapacityError:
    return CapacityError(
        f"the worker does not fit its GPU by {what}",
        reason="MEMORY_BUDGET",
        given=given,
        allowed=allowed,
        hint="a smaller --kv-bytes, fewer --max-running, a smaller --prefill-chunk, or another GPU",
    )
