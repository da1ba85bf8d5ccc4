"""Long sequences in a real engine without computing their prompts: their rows are noise, and all else is as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from worker.batch import SpanWork, build_batch
from worker.bench_engine import BenchEngine
from worker.kv_view import Workspace
from worker.model_runner import Step
from worker.scheduler import Work

NO_BYTES = memoryview(b"")  # dense pages have no checksum: it would bring each page to the host


class Noise:
    """While it is entered, steps with prompt rows compute nothing: K and V rows come from one buffer of noise, are
    sealed and kept as any others, and the token behind a prompt is drawn from even logits. Rows of dense pages are
    noise from before. Decode steps are the engine's own.
    """

    def __init__(self, bench: BenchEngine) -> None:
        self._bench = bench
        engine: Any = bench.engine
        self._runner, self._kv = engine._runner, engine._held.kv
        self._run, self._page_memory = self._runner.run, self._kv.page_memory
        self._rows: dict[tuple[int, int], torch.Tensor] = {}

    def __enter__(self) -> Noise:
        for view in self._kv.regions.values():
            if view.pages is not None:
                view.pages.normal_()
        self._runner.run = self._noise
        self._kv.page_memory = lambda group, page: NO_BYTES
        return self

    def __exit__(self, *_: object) -> None:
        del self._runner.run, self._kv.page_memory  # the classes' own again
        self._rows.clear()

    def _noise(self, work: Sequence[Work]) -> Step:
        if all(w.sequence.num_computed >= w.sequence.num_prompt for w in work):
            step: Step = self._run(work)
            return step
        spans = [
            SpanWork(
                token_ids=w.token_ids,
                start=w.sequence.num_computed,
                pages=w.sequence.pages,
                is_prompt=w.sequence.num_computed < w.sequence.num_prompt,
                wants_logits=w.wants_logits,
                bases=w.sequence.bases,
                tail_slots=w.sequence.tail_slots,
            )
            for w in work
        ]
        batch = build_batch(spans, self._kv.geometry, deterministic=False).to(self._bench.device)
        workspace = Workspace(batch)
        for view in self._kv.regions.values():
            if view.tail is not None:
                rows = self._noise_rows(len(batch.workspace_rows), view.region.heads, view.region.dim, view.dtype)
                workspace._rows[view.region.layer, view.region.kind] = rows
        logits = torch.zeros(batch.num_logits, self._bench.model.info.vocab_size)
        return Step(logits, workspace, batch.workspace_of_work, batch)

    def _noise_rows(self, count: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
        """The same for all regions: what is measured does not depend on values."""
        rows = self._rows.get((heads, dim))
        if rows is None or len(rows) < count:
            rows = torch.randn(count, heads, dim, device=self._bench.device).to(dtype)
            self._rows[heads, dim] = rows
        return rows[:count]


def fill(bench: BenchEngine, num_sequences: int, num_prompt: int, max_tokens: int) -> None:
    """``num_sequences`` greedy sequences, each with its prompt's rows there and a token drawn.

    Raises RuntimeError: the engine does not take all of them at once.
    """
    vocabulary = bench.model.info.vocab_size
    with torch.inference_mode(), Noise(bench):
        for number in range(num_sequences):
            ids = torch.randint(0, vocabulary, (num_prompt,)).tolist()
            bench.submit(f"r{number}", ids, max_tokens)
        limit = num_sequences * num_prompt
        steps = 0
        while bench.load().queued_tokens or steps == 0:
            bench.step()
            steps += 1
            if steps > limit:
                raise RuntimeError("the prompts come to no end")
    load = bench.load()
    if (load.num_running, load.num_waiting) != (num_sequences, 0):
        raise RuntimeError(f"{load.num_running} of {num_sequences} sequences run, {load.num_waiting} wait")
