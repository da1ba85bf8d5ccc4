"""Spans of what a worker does: each traced sequence with its phases, and some of the steps that it was in.

A sequence is traced where its ``traceparent`` is of a span that is recorded. Its phases come from the times that it
holds anyway. Of steps with traced sequences, at most one every STEP_INTERVAL_NS becomes a span: below the oldest such
sequence, with links to the others. So the cost is bounded per sequence and per second, whatever a step takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from protos import types_pb2
from protos.errors import TailpackError
from protos.tracing import Span, Tracing, is_sampled
from worker.kv_view import KvCounters
from worker.scheduler import Work
from worker.sequence import Sequence

STEP_INTERVAL_NS = 100_000_000
MAX_LINKS = 8


class NoStep:
    """A step that is not traced."""

    def mark(self, phase: str) -> None:
        pass

    def end(self) -> None:
        pass


NO_STEP = NoStep()


class NoSpans:
    """A worker without traces."""

    def step(self, work: Seq[Work], counters: KvCounters) -> NoStep | TracedStep:
        return NO_STEP

    def ended(self, sequence: Sequence, reason: types_pb2.FinishReason.ValueType, error: TailpackError | None) -> None:
        pass


class TracedStep:
    """One step as a span, its phases below it. ``mark`` ends the phase that runs."""

    def __init__(self, span: Span, work: Seq[Work], counters: KvCounters) -> None:
        self._span = span
        self._counters = counters
        self._began_ns = time.monotonic_ns()
        self._append_ns, self._packed = counters.append_ns, counters.pages_packed
        prefill = sum(w.count for w in work if w.start < w.sequence.num_prompt)
        self._forward = "prefill" if prefill else "decode"
        span.set(num_sequences=len(work), num_tokens=sum(w.count for w in work), num_prefill_tokens=prefill)

    def mark(self, phase: str) -> None:
        """``phase``: "forward", "sample", "seal"."""
        began_ns, self._began_ns = self._began_ns, time.monotonic_ns()
        counters = self._counters
        if phase == "forward":
            forward = self._span.begin(self._forward, start_ns=began_ns)
            # Rows are appended layer by layer; the span shows the sum of it.
            appended_ns = counters.append_ns - self._append_ns
            forward.add("append", began_ns, began_ns + appended_ns, summed_over_layers=True)
            forward.end(end_ns=self._began_ns)
        elif phase == "seal":
            packed = counters.pages_packed - self._packed
            self._span.add("seal", began_ns, self._began_ns, pages_packed=packed)
        else:
            self._span.add(phase, began_ns, self._began_ns)

    def end(self) -> None:
        self._span.end()


class SequenceSpans(NoSpans):
    """Engine thread only."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._begun: dict[str, Span] = {}  # by request id, of traced sequences that a traced step had to do with
        self._next_step_ns = 0

    def step(self, work: Seq[Work], counters: KvCounters) -> NoStep | TracedStep:
        """At the beginning of a step; the caller marks its phases and ends it."""
        now_ns = time.monotonic_ns()
        if now_ns < self._next_step_ns:
            return NO_STEP
        traced = [w.sequence for w in work if is_sampled(w.sequence.request.traceparent)]
        if not traced:
            return NO_STEP
        self._next_step_ns = now_ns + STEP_INTERVAL_NS
        spans = [self._span(sequence) for sequence in traced[: 1 + MAX_LINKS]]
        span = self._tracing.span("step", spans[0].traceparent, links=tuple(s.traceparent for s in spans[1:]))
        return TracedStep(span, work, counters)

    def ended(self, sequence: Sequence, reason: types_pb2.FinishReason.ValueType, error: TailpackError | None) -> None:
        """A sequence's last word was said."""
        if not is_sampled(sequence.request.traceparent):
            return
        now_ns = time.monotonic_ns()
        span = self._span(sequence)
        del self._begun[sequence.request.request_id]
        first_run_ns = sequence.first_run_ns or now_ns
        span.add("queue", sequence.submitted_ns, first_run_ns)
        if sequence.first_run_ns:
            prefilled_ns = sequence.first_token_ns or now_ns
            span.add("prefill", first_run_ns, prefilled_ns, cached_tokens=sequence.num_cached)
            if sequence.first_token_ns:
                span.add("decode", prefilled_ns, sequence.last_token_ns, tokens=sequence.num_emitted)
        span.set(
            reason=types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_"),
            prompt_tokens=sequence.num_prompt,
            output_tokens=sequence.num_emitted,
            recomputed=sequence.num_dropped,
        )
        span.end(error=error.reason if error is not None else None)

    def _span(self, sequence: Sequence) -> Span:
        request = sequence.request
        span = self._begun.get(request.request_id)
        if span is None:
            span = self._begun[request.request_id] = self._tracing.span(
                "sequence",
                request.traceparent,
                server=True,
                start_ns=sequence.submitted_ns,
                request_id=request.request_id.rpartition("/")[2],
            )
        return span
