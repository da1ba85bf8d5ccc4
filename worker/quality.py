"""What packed KV does to a model's predictions: teacher-forced, in chunks, against mode dense. The measuring core.

Every case computes the same tokens through the worker's own path (reserve, batch, model, pack, publish), each over a
store of its own in this process. All cases go through a chunk before the next one starts, so the dense logits of one
chunk are all that is kept. Row i of a text predicts token i + 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import cast

import torch

from kernels.widths import PRESETS
from kvstore.client import Attachment
from kvstore.geometry import CacheGeometry, apply_mode
from kvstore.local import LocalAttachment
from kvstore.retention import pages_for
from protos.errors import ConfigError, InternalError, InvalidRequest
from worker.batch import SpanWork, build_batch
from worker.kv_view import KvView, Workspace
from worker.model_runner import Step
from worker.models.llama import Llama
from worker.scheduler import Work
from worker.sequence import Request, Sampling, StopConditions
from worker.sequence import Sequence as Seq
from worker.sequence_kv import SequenceKv

MODES = ("dense", "fp8", *PRESETS)
"""A preset stands for mode turboquant with it."""


@dataclass(frozen=True)
class Case:
    """One way to keep KV: a name of ``MODES``, and how many of the first and last layers stay dense."""

    mode: str
    edges: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError("no such mode to measure", given=self.mode, allowed=", ".join(MODES))

    @property
    def name(self) -> str:
        return self.mode + (f"-edges-{self.edges[0]}-{self.edges[1]}" if any(self.edges) else "")

    def geometry(self, dense: CacheGeometry) -> CacheGeometry:
        """Raises ConfigError, as ``apply_mode`` does."""
        if self.mode in PRESETS:
            return apply_mode(dense, "turboquant", self.mode, self.edges)
        return apply_mode(dense, self.mode, "", self.edges)


@dataclass
class Tally:
    """Sums over predictions.

    Attributes:
        predictions: rows whose next token is known.
        agreed: of those, whose most likely token is also dense's.
        kl: sum of KL(dense || case), nats.
        nll: sum of -log p(next token), nats.
        rows_read, rows_read_packed: K and V rows that attention read, a row counting once a layer and chunk; and those
            of them that were records in pages.
    """

    predictions: int = 0
    agreed: int = 0
    kl: float = 0.0
    nll: float = 0.0
    rows_read: int = 0
    rows_read_packed: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Tally)))

    @property
    def agreement(self) -> float:
        return self.agreed / self.predictions if self.predictions else math.nan

    @property
    def mean_kl(self) -> float:
        return self.kl / self.predictions if self.predictions else math.nan

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll / self.predictions) if self.predictions else math.nan

    @property
    def packed_share(self) -> float:
        return self.rows_read_packed / self.rows_read if self.rows_read else math.nan


@dataclass
class CaseResult:
    """A case's tallies, one a text; the last one may be of a part of its text."""

    case: Case
    geometry: CacheGeometry
    texts: list[Tally] = field(default_factory=list)

    @property
    def total(self) -> Tally:
        return sum(self.texts, Tally())


def measure(
    network: Llama,
    dense: CacheGeometry,
    cases: Sequence[Case],
    texts: Sequence[Sequence[int]],
    *,
    chunk: int = 128,
    results: list[CaseResult] | None = None,
    on_forward: Callable[[int], None] = lambda count: None,
) -> list[CaseResult]:
    """Runs every case over every text. ``torch.inference_mode`` is the caller's.

    Args:
        dense: the model's geometry in mode dense; the baseline runs in it, and every case's follows from it.
        texts: token ids.
        chunk: tokens of a step. Dense rows beside the packed ones are those of the chunk and the tail.
        results: filled as chunks end, so that a caller who is interrupted has what was measured until then.
        on_forward: called after each forward pass with its tokens.

    Raises:
        ConfigError: a mode does not go with the model.
        CapacityError: NOT_ENOUGH_MEMORY.
        InvalidRequest: a text is shorter than two tokens or longer than the model's positions.
    """
    longest, limit = max(map(len, texts), default=0), len(network.cos)
    if not texts or min(map(len, texts)) < 2 or longest > limit:
        raise InvalidRequest("a text does not fit", given=[*map(len, texts)], allowed=f"2 to {limit} tokens each")
    results = [] if results is None else results
    results += [CaseResult(case, case.geometry(dense)) for case in cases]
    baseline = CaseRun(network, dense, longest)
    runs = [CaseRun(network, result.geometry, longest) for result in results]
    for token_ids in texts:
        for run, result in zip(runs, results, strict=True):
            run.begin(token_ids)
            result.texts.append(Tally())
        baseline.begin(token_ids)
        for first in range(0, len(token_ids), chunk):
            count = min(chunk, len(token_ids) - first)
            targets = torch.tensor(token_ids[first + 1 : first + 1 + count])
            reference = log_probabilities(baseline.forward(count)[: len(targets)])
            on_forward(count)
            done = []
            for run in runs:
                got = log_probabilities(run.forward(count)[: len(targets)])
                done.append(compare(reference, got, targets) + run.rows_read())
                on_forward(count)
            for result, tally in zip(results, done, strict=True):  # a chunk counts for all cases or for none
                result.texts[-1] += tally
        for run in (baseline, *runs):
            run.end()
    return results


def log_probabilities(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab_size] -> float64: a divergence of 1e-6 is a difference of numbers near 10."""
    return logits.double().log_softmax(dim=-1)


def compare(reference: torch.Tensor, got: torch.Tensor, targets: torch.Tensor) -> Tally:
    """Both [rows, vocab_size] log-probabilities; targets: [rows] the tokens that followed."""
    return Tally(
        predictions=len(targets),
        agreed=int((reference.argmax(-1) == got.argmax(-1)).sum()),
        kl=float((reference.exp() * (reference - got)).sum()),
        nll=float(-got.gather(-1, targets.unsqueeze(-1)).sum()),
    )


class CaseRun:
    """One case's store and the text that runs through it: what the engine does in a step, without a scheduler."""

    def __init__(self, network: Llama, geometry: CacheGeometry, max_tokens: int) -> None:
        self._network = network
        self._geometry = geometry
        store = LocalAttachment(
            geometry, num_pages=pages_for(max_tokens), max_sequences=1, max_sequence_tokens=max_tokens
        )
        self._control = store.control
        self._kv = KvView(geometry, store.arenas, store.tails)
        self._held = SequenceKv(cast(Attachment, store), self._kv)  # the same calls
        self._sequence: Seq | None = None
        self._tally = Tally()

    def begin(self, token_ids: Sequence[int]) -> None:
        request = Request("quality", "", tuple(token_ids), Sampling(), StopConditions(max_tokens=1))
        self._sequence = Seq(request, len(token_ids), 0)
        refused = self._held.open(self._sequence, len(token_ids), reuse=False, exact_only=False)
        if refused is not None:
            raise InternalError("a store of its own refused the text", given=refused)

    def forward(self, count: int) -> torch.Tensor:
        """Computes the next ``count`` tokens, keeps and seals their rows; logits [count, vocab_size] of all of them."""
        sequence = self._sequence
        assert sequence is not None
        start = sequence.num_computed
        work = [Work(sequence, start, count)]
        new_pages = self._held.reserve(work)
        span = SpanWork(
            token_ids=sequence.token_ids[start : start + count],
            start=start,
            pages=sequence.pages,
            is_prompt=True,
            wants_logits=True,
            bases=sequence.bases,
            tail_slots=sequence.tail_slots,
        )
        batch = build_batch([span], self._geometry, deterministic=False)
        rows = len(batch.token_ids)
        batch = replace(batch, logit_rows=torch.arange(rows), logit_tiles=((0, rows),), num_logits=count)
        self._count_rows(start, count)
        packed_before = self._kv.counters.rows_dequantised["attention"]
        workspace = Workspace(batch)
        logits = self._network.forward(batch, self._kv, workspace)
        self._tally.rows_read_packed += self._kv.counters.rows_dequantised["attention"] - packed_before
        kept = self._held.keep_rows(work, Step(logits, workspace, batch.workspace_of_work, batch), new_pages)
        sequence.num_computed += count
        self._control.commit(sequence.slot, sequence.num_computed)
        self._held.publish(work, kept)
        return logits

    def rows_read(self) -> Tally:
        """Rows read since the last call."""
        tally, self._tally = self._tally, Tally()
        return tally

    def end(self) -> None:
        assert self._sequence is not None
        self._held.release(self._sequence, keep=False)
        self._sequence = None

    def _count_rows(self, start: int, count: int) -> None:
        for group in self._geometry.groups:
            first = max(0, start - group.window + 1) if group.window else 0
            self._tally.rows_read += len(group.paged_regions) * (start + count - first)


def all_cases(modes: Sequence[str], edges: tuple[int, int]) -> Iterator[Case]:
    """Each mode with every layer in it, then with dense edge layers where it has any use for them."""
    for mode in modes:
        yield Case(mode)
        if mode != "dense" and any(edges):
            yield Case(mode, edges)
