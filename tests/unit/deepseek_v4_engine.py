"""DeepSeek-V4 in the engine, over the KV service's own memory: every row's logits, beside transformers' own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.geometry import CacheGeometry
from protos import types_pb2
from tests.unit.deepseek_v4_tiny import random_weights, reference_logits, reference_model
from tests.unit.tiny import Harness, config_for
from worker import model_runner
from worker.batch import DECODE_TILE, Batch, build_batch
from worker.models.deepseek_v4 import DeepseekV4
from worker.models.deepseek_v4_config import DeepseekV4Config
from worker.models.deepseek_v4_geometry import cache_geometry, with_raw_mode
from worker.scheduler import Work
from worker.weights import Model

TOLERANCE = 2e-5


class Reference:
    """A random tiny model, and transformers' with the same weights."""

    def __init__(self, config: DeepseekV4Config, seed: int) -> None:
        self.config = config
        weights = random_weights(config, seed)
        self.network = DeepseekV4(config, dict(weights))
        self._theirs = reference_model(config, weights)
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = reference_logits(self._theirs, tokens)
        return self._logits[key]

    def model(self, mode: str = "dense", preset: str = "", *, drafts: bool = False, **changes: Any) -> Model:
        geometry = with_raw_mode(cache_geometry(self.config, "float32", drafts=drafts), mode, preset, **changes)
        return engine_model(self.network, geometry)


def engine_model(network: DeepseekV4, geometry: CacheGeometry) -> Model:
    info = types_pb2.ModelInfo(
        name="tiny",
        architecture="deepseek_v4",
        vocab_size=network.config.vocab_size,
        max_sequence_tokens=1024,
        weights_digest=b"tiny",
    )
    return Model(
        network=network,
        info=info,
        geometry=geometry,
        eos_token_ids=(),
        uses=(),
    )


class V4Harness(Harness):
    """A harness that keeps the logits of every row: ``logits[request id][position]``, the newest there.

    ``dequantised``: packed rows that attention read.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        mode: tuple[str, str] = ("dense", ""),
        num_pages: int = 64,
        geometry: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.reference = reference
        self.logits: dict[str, dict[int, torch.Tensor]] = {}
        model = reference.model(*mode, drafts=changes.get("drafts", 0) > 0, **(geometry or {}))
        super().__init__(model, config_for(Path("none"), kv_mode=mode[0], **changes), num_pages=num_pages)
        run = self.engine._runner.run

        def recording(work: Sequence[Work]) -> model_runner.Step:
            batches: list[Batch] = []

            def every_row(*args: Any, **kwargs: Any) -> Batch:
                batches.append(wanting_every_row(build_batch(*args, **kwargs)))
                return batches[-1]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(model_runner, "build_batch", every_row)
                step = run(work)
            return replace(step, logits=self._record(work, batches[0], step.logits))

        self.engine._runner.run = recording  # type: ignore[method-assign]

    def _record(self, work: Sequence[Work], batch: Batch, logits: torch.Tensor) -> torch.Tensor:
        by_slot = {w.sequence.slot: w for w in work}
        wanted: dict[int, list[torch.Tensor]] = {}
        at = 0
        for span, place in zip(batch.spans, batch.groups["compressed"].places, strict=True):
            w = by_slot[place.tail_slot]
            kept = self.logits.setdefault(w.sequence.request.request_id, {})
            for row in range(span.num_rows):
                kept[span.start + row] = logits[at + row]
            if w.wants_logits and (w.num_drafts or span.start + span.num_rows == w.end):
                wanted.setdefault(w.sequence.slot, []).append(logits[at + span.num_rows - 1])
            at += span.num_rows
        rows = [row for w in work for row in wanted.get(w.sequence.slot, [])]
        return torch.stack(rows) if rows else logits[:0]

    def check(self, request_id: str, tokens: Sequence[int], first: int = 0) -> None:
        """Every row's logits from position ``first`` on are the reference's."""
        theirs, ours = self.reference.logits(tokens), self.logits[request_id]
        assert set(range(first, len(tokens))) <= set(ours), f"positions of {request_id} were not computed"
        for position in range(first, len(tokens)):
            difference = float((ours[position] - theirs[position]).abs().max())
            assert difference <= TOLERANCE, f"{request_id}: logits behind token {position} differ by {difference:.3g}"

    @property
    def dequantised(self) -> int:
        return self.engine._held.kv.counters.rows_dequantised["attention"]


def wanting_every_row(batch: Batch) -> Batch:
    rows = [span.first_row + row for span in batch.spans for row in range(span.num_rows)]
    num_logits = len(rows)
    if batch.deterministic:
        rows += [0] * (-num_logits % DECODE_TILE)
        tiles = tuple((a, a + DECODE_TILE) for a in range(0, len(rows), DECODE_TILE))
    else:
        tiles = ((0, num_logits),)
    return replace(batch, logit_rows=torch.tensor(rows), logit_tiles=tiles, num_logits=num_logits)
