"""Attention of a step on a GPU: all decode rows of a layer in one call of the kernels, prompt chunks one by one.

`worker.models.attention` does the same on a CPU. Both leave out, [R, q_heads, dim], for the same batch and views.
"""

from __future__ import annotations

import torch

from kernels.decode import DecodeLayer, DecodeOptions
from kernels.decode_memory import Pages, Tail
from kernels.decode_workspace import DecodeLimits, new_workspace
from kernels.prefill import (
    DenseHistory,
    GatherRestore,
    History,
    KernelRestore,
    PrefillOptions,
    Restore,
    Workspace,
    attend_chunk,
)
from protos.page_hash import PAGE_TOKENS
from worker.batch import Batch, Place, Span
from worker.kv_view import KvView, RegionView, demand_held
from worker.models.attention import dense_rows


class GpuAttention:
    """The kernels of every layer of a model over one attachment's memory, and the workspaces that they share.

    Args:
        kv: its arenas lie on a GPU; regions "k" and "v" of each layer.
        q_heads: of every layer.
        max_sequences, max_sequence_tokens: the largest step: its decode rows, and the longest sequence.

    Raises what DecodeLayer and KernelRestore raise: a width, dtype or head count without a kernel, by name.
    """

    def __init__(self, kv: KvView, *, q_heads: int, max_sequences: int, max_sequence_tokens: int) -> None:
        self._limits = DecodeLimits(max_sequences, -(-max_sequence_tokens // PAGE_TOKENS))
        self._q_heads = q_heads
        views = {layer: (view, kv.view(layer, "v")) for (layer, kind), view in kv.regions.items() if kind == "k"}
        self._layers = {layer: self._layer(k, v) for layer, (k, v) in views.items()}
        device = next(iter(self._layers.values())).device
        workspace = new_workspace(max(layer.workspace_bytes for layer in self._layers.values()), device)
        for decode in self._layers.values():
            decode.use_workspace(workspace)
        widest = max((k for k, _ in views.values()), key=lambda view: view.region.heads * view.region.dim)
        self._prefill_workspace = Workspace(widest.region.heads, widest.region.dim, widest.dtype, device)
        self._restores = {layer: self._restore(k, v) for layer, (k, v) in views.items()}

    def load(self) -> None:
        """Loads every kernel, compiling what no archive has: seconds, before the worker reports ready."""
        for layer in self._layers.values():
            layer.load()

    def decode_layer(self, layer: int) -> DecodeLayer:
        """The decode kernels of a layer, for whoever launches them without a ``Batch``; on the same stream."""
        return self._layers[layer]

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_view: RegionView,
        v_view: RegionView,
        kv: KvView,
        batch: Batch,
    ) -> torch.Tensor:
        """As ``worker.models.attention.attend``."""
        out = q.new_zeros(q.shape) if batch.padded else torch.empty_like(q, memory_format=torch.contiguous_format)
        where = batch.groups[k_view.group.name]
        for span, place in zip(batch.spans, where.places, strict=True):
            if span.num_rows > 1:
                rows = slice(span.first_row, span.first_row + span.num_rows)
                out[rows] = self._chunk(q[rows], k[rows], v[rows], k_view, v_view, kv, span, place)
        decode = where.decode
        if decode is not None:
            rows_q = q[decode.rows].unsqueeze(1)
            attended = self._layers[k_view.region.layer](rows_q, decode.step, out=torch.empty_like(rows_q))
            out[decode.rows] = attended.squeeze(1)
        return out

    def _layer(self, k_view: RegionView, v_view: RegionView) -> DecodeLayer:
        tail = None
        if k_view.tail is not None and v_view.tail is not None:
            tail = Tail(k_view.tail, v_view.tail)
        return DecodeLayer(
            keys=_pages(k_view),
            values=_pages(v_view),
            tail=tail,
            q_heads=self._q_heads,
            dtype=k_view.dtype,
            options=DecodeOptions(k_view.region.dim**-0.5, k_view.group.window),
            limits=self._limits,
        )

    def _chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_view: RegionView,
        v_view: RegionView,
        kv: KvView,
        span: Span,
        place: Place,
    ) -> torch.Tensor:
        """q [T, q_heads, dim] of a prompt chunk over whole pages [seen, base), dense rows and its own."""
        window = k_view.group.window
        first = max(0, span.start - window + 1) if window else 0
        history: History | DenseHistory | None = None
        base = place.base if k_view.pages is None else span.start // PAGE_TOKENS * PAGE_TOKENS
        restore = self._restores[k_view.region.layer]
        if restore is not None and base > first:
            page_ids = place.page_ids if place.on_device is None else place.on_device
            if k_view.packed is not None and v_view.packed is not None:
                history = History(k_view.packed, v_view.packed, page_ids, base)
                kv.counters.rows_dequantised["attention"] += 2 * (base - first)
            else:
                history = DenseHistory(page_ids, base)
                demand_held(k_view, place.page_ids[first // PAGE_TOKENS : base // PAGE_TOKENS], first // PAGE_TOKENS)
            first = base
        k_rows, v_rows = (dense_rows(kv, view, place, first, own, span) for view, own in ((k_view, k), (v_view, v)))
        return attend_chunk(
            q,
            k_rows,
            v_rows,
            first_position=span.start,
            first_row=first,
            history=history,
            options=PrefillOptions(q.shape[-1] ** -0.5, window),
            workspace=self._prefill_workspace,
            restore=restore,
        )

    def _restore(self, k_view: RegionView, v_view: RegionView) -> Restore | None:
        """What brings a layer's whole pages together; None where there are none."""
        if k_view.packed is not None and v_view.packed is not None:
            return KernelRestore(k_view.packed, v_view.packed, self._prefill_workspace)
        if k_view.pages is not None and v_view.pages is not None:
            return GatherRestore(k_view.pages, v_view.pages, self._prefill_workspace)
        return None


def _pages(view: RegionView) -> Pages:
    """Where the layer's pages are; of a group without pages, one that is never read."""
    if view.packed is not None:
        return view.packed
    if view.pages is not None:
        return view.pages
    assert view.tail is not None
    return view.tail.new_empty((1, PAGE_TOKENS, view.region.heads, view.region.dim))
