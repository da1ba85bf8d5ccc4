"""Captured decode steps by PyTorch on a CPU, quickly: all of our own Python around them runs as it does on a GPU.

Each row is computed in a tile of deterministic mode, so its bits depend on nothing but the row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kernels import loader
from tests.unit.fake_gpu_kernels import ARCH, FakeGpuKernels
from worker import decode_graphs, model_runner
from worker.batch import Batch, SpanWork, build_batch
from worker.decode_state import SLOTS, DecodeState
from worker.kv_view import KvView, Workspace
from worker.models.attention import Attend
from worker.models.gpu_attention import GpuAttention
from worker.models.llama import Llama
from worker.sampler import Draw, sample
from worker.sequence import Sampling


class TorchLayers:
    """In place of ``worker.decode_layers.DecodeLayers``."""

    buffer_bytes = 0

    def __init__(self, network: Llama, kv: KvView, state: DecodeState, attention: GpuAttention, **options: Any) -> None:
        self._network, self._kv, self._state, self._attend = network, kv, state, attention
        self.reaches = (state.max_tokens,)
        self.logits = torch.zeros(state.max_rows, network.config.vocab_size)
        self.num_computed = 0
        """Rows with tokens, of all steps."""

    def load(self) -> None:
        """There is nothing to load."""

    def run(self, rows: int, reach: int) -> None:
        state = self._state
        state.step += 1
        slot = int(state.step) % SLOTS
        count = int(state.patches[slot, 0])
        for at, value in state.patches[slot, 1 : 1 + 2 * count].view(-1, 2).tolist():
            state.words[at] = value
        tokens, lengths = (state.row_words(name, rows).tolist() for name in ("tokens", "num_tokens"))
        live = [row for row in range(rows) if lengths[row] > 0]
        state.drawn[slot, :rows] = -1
        if not live:
            return
        self.num_computed += len(live)
        geometry = self._kv.geometry
        spans = []
        for row in live:
            bases = {g.name: int(state.row_words(f"base {g.name}", rows)[row]) for g in geometry.groups}
            tables = {g.name: state.table(g.name, rows)[row].tolist() for g in geometry.groups}
            for group in geometry.groups:
                held = bases[group.name] if group.packed else lengths[row]
                tables[group.name] = tables[group.name][: -(-held // 128)]
            slots = {g.name: int(state.row_words(f"slot {g.name}", rows)[row]) for g in geometry.groups if g.has_tail}
            spans.append(SpanWork([tokens[row]], lengths[row] - 1, tables, False, True, bases, slots))
        batch = build_batch(spans, geometry, deterministic=True).to(self._network.device)
        logits = self._network.forward(batch, self._kv, Workspace(batch), self._attend)
        drawn = sample(logits, [Draw(self._sampling(row), [0] * lengths[row]) for row in live])
        for row, each, of_row in zip(live, drawn, logits, strict=True):
            self.logits[row] = of_row
            state.drawn[slot, row] = each.token_id
            state.row_words("tokens", rows)[row] = each.token_id
            ends = lengths[row] >= int(state.row_words("limit", rows)[row])
            ends |= each.token_id in state.sampling(rows).stops[row].tolist()
            state.row_words("num_tokens", rows)[row] = 0 if ends else lengths[row] + 1

    def _sampling(self, row: int) -> Sampling:
        """Without a repetition penalty."""
        drawn = self._state.sampling(self._state.max_rows)
        low, high = drawn.seed[row].tolist()
        return Sampling(
            temperature=float(drawn.temperature[row]),
            top_k=int(drawn.top_k[row]),
            top_p=float(drawn.top_p[row]),
            min_p=float(drawn.min_p[row]),
            seed=(low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32,
        )


class TorchFused:
    """In place of ``worker.models.llama_fused.FusedLlama``."""

    def __init__(self, network: Llama) -> None:
        self._network = network
        self.forward = network.forward

    def by_layers(
        self, batch: Batch, kv: KvView, workspace: Workspace, attend: Attend
    ) -> Iterator[torch.Tensor | None]:
        network = self._network
        cos, sin = network.cos[batch.positions], network.sin[batch.positions]
        x = F.embedding(batch.token_ids, network.embed)
        for index, layer in enumerate(network.layers):
            q, k, v = network.project(layer, x, cos, sin, batch)
            k_view, v_view = kv.view(index, "k"), kv.view(index, "v")
            for view, rows in ((k_view, k), (v_view, v)):
                kv.append(view, rows, batch.groups[view.group.name])
                workspace.keep(view, rows)
            x = network.feed_forward(layer, x, attend(q, k, v, k_view, v_view, kv, batch), batch)
            yield None
        yield network.logits(x[batch.logit_rows], batch)[: batch.num_logits]


class TorchStep(FakeGpuKernels):
    """``FakeGpuKernels`` with ``TorchLayers``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        monkeypatch.setattr(decode_graphs, "DecodeLayers", TorchLayers)
        monkeypatch.setattr(model_runner, "fused", TorchFused)
        monkeypatch.setattr(loader, "arch_of", lambda device: ARCH)
