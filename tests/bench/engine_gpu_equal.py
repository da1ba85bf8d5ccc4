"""The captured decode step beside the eager one, on the same small random model and the same KV, on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.pages_cuda import PageRows
from protos.page_hash import PAGE_TOKENS
from tests.bench.engine_gpu_model import SMALL, Cache, random_llama
from worker.batch import SpanWork, build_batch
from worker.decode_graphs import DecodeGraphs
from worker.decode_state import RowStart
from worker.gpu_pages import GpuPages
from worker.kv_view import Workspace
from worker.models.gpu_attention import GpuAttention
from worker.models.llama import Llama
from worker.sequence import Sampling

NUM_COMPARED = 48
LENGTHS = (280, 40, 300, 7)  # tokens before the comparison; from 272 on a page is sealed


@dataclass
class Eager:
    """Decode steps as ``ModelRunner`` makes them, greedy."""

    network: Llama
    cache: Cache
    attention: GpuAttention
    pages: GpuPages
    token_ids: list[list[int]]
    bases: list[dict[str, int]]
    seals: bool = True

    @classmethod
    def make(cls, network: Llama, cache: Cache) -> Eager:
        attention = GpuAttention(
            cache.kv,
            q_heads=network.config.q_heads,
            max_sequences=cache.rows,
            max_sequence_tokens=cache.max_tokens,
        )
        attention.load()
        pages = GpuPages(cache.kv)
        pages.load()
        bases = [{group.name: 0 for group in cache.geometry.groups} for _ in range(cache.rows)]
        return cls(network, cache, attention, pages, [[3 + 7 * row] for row in range(cache.rows)], bases)

    def step(self, rows: list[int]) -> torch.Tensor:
        """One token of each of these rows; logits [len(rows), vocabulary]."""
        spans = []
        for row in rows:
            ids = self.token_ids[row]
            pages = {}
            for group in self.cache.geometry.groups:
                table = self.cache.tables[group.name][row]
                base = self.bases[row][group.name]
                pages[group.name] = table if group.mode == "dense" else table[: base // PAGE_TOKENS]
            spans.append(
                SpanWork(
                    token_ids=ids[-1:],
                    start=len(ids) - 1,
                    pages=pages,
                    is_prompt=False,
                    wants_logits=True,
                    bases=self.bases[row],
                    tail_slots=self.cache.slots(row),
                )
            )
        batch = build_batch(spans, self.cache.geometry, deterministic=False).to(self.network.device)
        workspace = Workspace(batch)
        logits = self.network.forward(batch, self.cache.kv, workspace, self.attention)
        for row, token in zip(rows, logits.argmax(-1).tolist(), strict=True):
            self.token_ids[row].append(token)
        if self.seals:
            self._seal(rows, workspace)
        return logits

    def _seal(self, rows: list[int], workspace: Workspace) -> None:
        for row in rows:
            wanted = self.cache.bases(len(self.token_ids[row]) - 1)
            for group in self.cache.geometry.groups:
                base = self.bases[row][group.name]
                if group.mode == "dense" or wanted[group.name] <= base:
                    continue
                page = self.cache.tables[group.name][row][base // PAGE_TOKENS]
                rows_of_page = PageRows(page, base, self.cache.slots(row)[group.name], PAGE_TOKENS)
                self.pages.start_seal(group.name, [rows_of_page], workspace).checksums()
                self.bases[row][group.name] = base + PAGE_TOKENS


def compare(
    mode: str,
    device: torch.device,
    *,
    few_rows: int,
    raw: dict[str, Any] = SMALL,
    lengths: tuple[int, ...] = LENGTHS,
    num_compared: int = NUM_COMPARED,
) -> dict[str, Any]:
    """Greedy tokens of both from one state on. A first difference is a fault unless the eager step's two likeliest
    tokens lie within what bf16 rounds of a logit (2^-7 of the largest) there."""
    torch.manual_seed(11)
    max_tokens = max(lengths) + num_compared + 8
    network = random_llama(raw, device, max_tokens, spread=1.4)
    cache = Cache.make(network.config, mode, len(lengths), max_tokens, device)
    with torch.inference_mode():
        eager = Eager.make(network, cache)
        for count in range(1, max(lengths)):
            eager.step([row for row, length in enumerate(lengths) if count < length])
        graphs = DecodeGraphs(
            network,
            cache.kv,
            eager.attention,
            max_sequences=len(lengths),
            max_sequence_tokens=max_tokens,
            buckets=(),
            few_rows=few_rows,
        )
        capture_s = graphs.capture()
        for row, ids in enumerate(eager.token_ids):
            pages = {}
            for group in cache.geometry.groups:
                table = cache.tables[group.name][row]
                dense = group.mode == "dense"
                pages[group.name] = table if dense else table[: eager.bases[row][group.name] // PAGE_TOKENS]
            start = RowStart(ids[-1], len(ids), 1 << 20, Sampling(), pages, eager.bases[row], cache.slots(row))
            graphs.enter(row, start)
        before = _memory(cache)
        ours: list[list[int]] = []
        for count in range(num_compared):
            step = graphs.launch(len(lengths))
            if count:
                ours.append(graphs.tokens(step - 1))
            else:
                graphs.tokens(step)
                first_logits = graphs.layers.logits[: len(lengths)].float().clone()
        ours.append(graphs.tokens(step))
        _restore(cache, before)
        eager.seals = False  # as the graphs, whose bases nobody moves here
        firsts: list[int] = []
        margins: list[float] = []
        error = 0.0
        for count in range(num_compared):
            logits = eager.step(list(range(len(lengths))))
            if count == 0:
                error = ((logits - first_logits).norm(dim=-1) / logits.norm(dim=-1)).max().item()
            for row in range(len(lengths)):
                if row in firsts or ours[count][row] == eager.token_ids[row][-1]:
                    continue
                top = logits[row].topk(2).values.tolist()
                firsts.append(row)
                margins.append((top[0] - top[1]) / max(abs(top[0]), 1e-6))
    told = len(lengths) * num_compared
    return {
        "ok": error < 2e-2 and all(margin <= 2**-7 for margin in margins),
        "first_logits_error": error,
        "rows_that_differ": firsts,
        "margins": margins,
        "tokens": told,
        "distinct_tokens": len({token for step_tokens in ours for token in step_tokens}),
        "capture_s": round(capture_s, 2),
    }


def _memory(cache: Cache) -> list[torch.Tensor]:
    found = [cache.kv.page_bytes(group.name).clone() for group in cache.geometry.groups]
    return found + [view.tail.clone() for view in cache.kv.regions.values() if view.tail is not None]


def _restore(cache: Cache, before: list[torch.Tensor]) -> None:
    for group in cache.geometry.groups:
        cache.kv.page_bytes(group.name).copy_(before.pop(0))
    for view in cache.kv.regions.values():
        if view.tail is not None:
            view.tail.copy_(before.pop(0))
