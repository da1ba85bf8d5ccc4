"""What a worker counts of its steps and sequences, its one log line per sequence, and the collector for Prometheus.

Everything here is read off what the engine says anyway: a step's outputs and load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from protos import types_pb2, worker_pb2
from protos.histogram import LATENCY_BOUNDS_S, STEP_BOUNDS_S, Histogram
from protos.metrics import BoundedCounter, LazyCollector, histogram_family
from worker.engine import Engine
from worker.resumable import Answers
from worker.sequence import Output, StepResult

log = structlog.get_logger("worker")


class StepObserver:
    """Stands between the engine and whom it tells: hands on a step's result, then counts and logs. Engine thread."""

    def __init__(self, emit: Callable[[StepResult], None]) -> None:
        self.step = Histogram(STEP_BOUNDS_S)
        self.queue = Histogram(LATENCY_BOUNDS_S)
        self.prefill = Histogram(LATENCY_BOUNDS_S)
        self.ended = BoundedCounter()
        """(outcome, finish or error reason) -> sequences."""
        self._emit = emit
        self._num_steps = 0

    def emit(self, result: StepResult) -> None:
        self._emit(result)  # first: somebody waits for these tokens
        if result.load.num_steps != self._num_steps:
            self._num_steps = result.load.num_steps
            self.step.observe(result.load.last_step_ns / 1e9)
        for output in result.outputs:
            if output.finish_reason:
                self._sequence_ended(output)

    def _sequence_ended(self, output: Output) -> None:
        reason = types_pb2.FinishReason.Name(output.finish_reason).removeprefix("FINISH_REASON_")
        outcome = {"ABORTED": "aborted", "ERROR": "failed"}.get(reason, "finished")
        if output.error is not None:
            reason = output.error.reason
        self.ended.add(outcome, reason)
        usage = output.usage or types_pb2.Usage()
        timings = output.timings or types_pb2.Timings()
        if timings.prefill_ns:  # it ran
            self.queue.observe(timings.queue_ns / 1e9)
            if usage.output_tokens:
                self.prefill.observe(timings.prefill_ns / 1e9)
        tenant, _, request_id = output.request_id.rpartition("/")
        log.info(
            "sequence",
            request_id=request_id,
            tenant=tenant,
            outcome=outcome,
            reason=reason,
            error=str(output.error) if output.error is not None else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            prefix_exact=usage.prefix_exact,
            output_tokens=usage.output_tokens,
            queue_ms=_ms(timings.queue_ns),
            prefill_ms=_ms(timings.prefill_ns),
            decode_ms=_ms(timings.decode_ns),
            router=output.owner,
        )


class WorkerCollector(LazyCollector):
    """Any thread. Every family has the worker's id as a label, for pages of several may be read together.

    Args:
        memory: what the worker takes (``worker.ledger``).
        answers: of resumable requests, that run or are kept.
    """

    def __init__(
        self,
        engine: Engine,
        observer: StepObserver,
        info: types_pb2.WorkerInfo,
        memory: Callable[[], worker_pb2.WorkerMemory],
        answers: Answers,
    ) -> None:
        self._answers = answers
        self._engine = engine
        self._observer = observer
        self._info = info
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        yield self._about()
        yield from self._load(self._engine.load())
        worker, observer = {"worker": self._info.worker_id}, self._observer
        for name, text, histogram in (
            ("step", "One step of the engine, all sequences together.", observer.step),
            ("queue", "From a sequence's submission to the step that first ran it.", observer.queue),
            ("prefill", "From the step that first ran a sequence to its first token.", observer.prefill),
        ):
            yield histogram_family(f"tailpack_worker_{name}_seconds", text, [(worker, histogram)])
        ended = CounterMetricFamily(
            "tailpack_worker_sequences",
            "Sequences that ended, by outcome and reason (of the finish or of the error).",
            labels=["worker", "outcome", "reason"],
        )
        for labels, count in observer.ended.items():
            ended.add_metric([self._info.worker_id, *labels], count)
        yield ended
        memory = GaugeMetricFamily(
            "tailpack_worker_memory_bytes",
            'What the worker takes, by owner; "unknown" has none. Arenas are the kvstore\'s to tell.',
            labels=["worker", "memory", "owner"],
        )
        for use in self._memory().uses:
            memory.add_metric([self._info.worker_id, use.memory, use.owner], use.num_bytes)
        yield memory

    def _about(self) -> Metric:
        info = self._info
        about = InfoMetricFamily("tailpack_worker", "What this worker serves, and how.", labels=["worker"])
        about.add_metric(
            [info.worker_id],
            {
                "model": info.model.name,
                "kv_mode": info.kv_mode,
                "device": info.device,
                "deterministic": str(info.deterministic).lower(),
            },
        )
        return about

    def _load(self, load: types_pb2.WorkerLoad) -> Iterable[Metric]:
        worker = [self._info.worker_id]

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(f"tailpack_worker_{name}", text, labels=["worker"])
            family.add_metric(worker, value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(f"tailpack_worker_{name}", text, labels=["worker"])
            family.add_metric(worker, value)
            return family

        yield gauge("running", "Sequences that steps compute.", load.num_running)
        yield gauge("waiting", "Sequences that wait to run.", load.num_waiting)
        yield gauge("max_running", "Sequences that a step can hold.", self._info.max_running)
        yield gauge("queued_tokens", "Prompt tokens not yet computed.", load.queued_tokens)
        yield gauge(
            "oldest_sequence_age_seconds",
            "Since the submission of the sequence that is longest here; 0: none is.",
            self._engine.oldest_age_s(),
        )
        yield gauge("pages_free", "Neither held nor promised, of the scarcest layer group.", load.pages_free)
        yield gauge("pages", "Of the scarcest layer group.", load.pages_total)
        yield counter("steps", "Steps of the engine.", load.num_steps)
        tokens = CounterMetricFamily("tailpack_worker_tokens", "Tokens by what was done.", labels=["worker", "kind"])
        tokens.add_metric([*worker, "prompt_computed"], load.prompt_tokens)
        tokens.add_metric([*worker, "prompt_cached"], load.prompt_tokens_cached)
        tokens.add_metric([*worker, "output"], load.tokens_emitted)
        yield tokens
        yield counter(
            "recomputed", "Sequences dropped for want of pages, to be computed again.", load.sequences_recomputed
        )
        yield counter(
            "adopted",
            "Sequences taken over from the worker that had this device's memory before.",
            load.sequences_adopted,
        )
        yield counter("joined", "Submissions that went on with an adopted sequence.", self._answers.num_joined)
        yield counter(
            "tokens_recomputed_after_adoption",
            "Tokens of adopted sequences whose rows had been written, and were lost; 0 but by a fault.",
            load.tokens_recomputed_after_adoption,
        )
        yield gauge(
            "memory_grown_bytes",
            "Memory without an owner that came since the worker was ready, once it is beyond what is allowed; else 0.",
            load.memory_grown_bytes,
        )
        yield gauge("without_store", "1 while the kvstore is away.", float(load.without_store))
        drafts = CounterMetricFamily(
            "tailpack_worker_drafts",
            "Guessed tokens that steps checked, by what came of them.",
            labels=["worker", "result"],
        )
        drafts.add_metric([*worker, "accepted"], load.tokens_accepted)
        drafts.add_metric([*worker, "rejected"], load.tokens_drafted - load.tokens_accepted)
        yield drafts
        yield gauge("kept_answers", "Ended answers to resumable requests, kept for Resume.", self._answers.num_kept)
        yield gauge(
            "answer_log_bytes",
            "Logs of resumable answers: what kept ones take, and running ones may come to.",
            self._answers.num_bytes,
        )
        yield counter("pages_packed", "Pages sealed by packing their rows.", load.pages_packed)
        yield counter("pages_relinked", "Pages sealed without packing: the very rows were there.", load.pages_relinked)
        yield counter("append_seconds", "Writing rows as computed.", load.append_ns / 1e9)
        yield counter("seal_seconds", "Packing pages.", load.seal_ns / 1e9)
        rows = CounterMetricFamily(
            "tailpack_worker_rows_dequantised",
            "Packed rows read back: by attention, to refill a tail after a rollback, or on a resume.",
            labels=["worker", "reason"],
        )
        rows.add_metric([*worker, "attention"], load.rows_dequantised_attention)
        rows.add_metric([*worker, "rollback"], load.rows_dequantised_rollback)
        rows.add_metric([*worker, "resume"], load.rows_dequantised_resume)
        yield rows


def _ms(ns: int) -> float:
    return round(ns / 1e6, 2)
