"""What a worker counts, logs and traces of its steps and sequences, over an engine that is stepped by hand."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.metrics_core import Metric
from structlog.testing import capture_logs

from protos import types_pb2, worker_pb2
from protos.errors import CapacityError
from protos.tracing import Tracing
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker import tracing
from worker.metrics import StepObserver, WorkerCollector
from worker.resumable import Answers
from worker.sequence import Output, StepResult
from worker.tracing import SequenceSpans
from worker.weights import Model, load_model

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(config_for(folder))


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(TINY["vocab_size"]) for _ in range(length)]


def observed(results: Iterable[StepResult]) -> StepObserver:
    observer = StepObserver(lambda result: None)
    for result in results:
        observer.emit(result)
    return observer


def samples(families: Iterable[Metric]) -> dict[tuple[str, str], float]:
    """(name, the labels besides the worker's) -> value."""
    found = {}
    for family in families:
        for sample in family.samples:
            assert sample.labels["worker"] == "w"
            rest = ",".join(value for name, value in sample.labels.items() if name != "worker")
            found[sample.name, rest] = float(sample.value)
    return found


def test_steps_and_sequences_are_counted_and_each_sequence_leaves_a_line(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    with capture_logs() as lines:
        harness.run(request("a/r-1", prompt(1, 20), 6), request("r-2", prompt(2, 30), 3))
        observer = observed(harness.results)
    load = harness.engine.load()
    assert observer.step.total == load.num_steps >= 6
    assert observer.queue.total == observer.prefill.total == 2
    assert dict(observer.ended.items()) == {("finished", "LENGTH"): 2}
    said = {line["request_id"]: line for line in lines if line["event"] == "sequence"}
    assert set(said) == {"r-1", "r-2"}
    first = said["r-1"]
    assert (first["tenant"], first["outcome"], first["reason"], first["error"]) == ("a", "finished", "LENGTH", None)
    assert (first["prompt_tokens"], first["output_tokens"], first["cached_tokens"]) == (20, 6, 0)
    assert first["prefill_ms"] > 0 and first["decode_ms"] > 0 and said["r-2"]["tenant"] == ""
    collector = WorkerCollector(
        harness.engine,
        observer,
        types_pb2.WorkerInfo(worker_id="w", max_running=4, kv_mode="dense", device="cpu:0"),
        lambda: worker_pb2.WorkerMemory(uses=[worker_pb2.MemoryUse(memory="host", owner="weights", num_bytes=7)]),
        Answers(lambda: 0.0),
    )
    page = samples(collector.collect())
    assert page["tailpack_worker_steps_total", ""] == load.num_steps == page["tailpack_worker_step_seconds_count", ""]
    assert page["tailpack_worker_tokens_total", "prompt_computed"] == 50
    assert page["tailpack_worker_tokens_total", "output"] == 9
    assert page["tailpack_worker_sequences_total", "finished,LENGTH"] == 2
    assert page["tailpack_worker_memory_bytes", "host,weights"] == 7
    assert page["tailpack_worker_running", ""] == page["tailpack_worker_oldest_sequence_age_seconds", ""] == 0
    assert page["tailpack_worker_kept_answers", ""] == page["tailpack_worker_drafts_total", "accepted"] == 0
    assert page["tailpack_worker_append_seconds_total", ""] > 0
    assert page["tailpack_worker_max_running", ""] == 4


def test_the_oldest_sequence_has_an_age_until_it_ends(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    assert harness.engine.oldest_age_s() == 0
    harness.engine.submit(request("old", prompt(1, 20), 2))
    first = harness.engine.oldest_age_s()
    harness.engine.submit(request("new", prompt(1, 20), 30))
    assert harness.engine.oldest_age_s() >= first > 0
    harness.run()
    assert harness.engine.oldest_age_s() == 0


def test_what_is_aborted_or_refused_is_told_by_its_reason() -> None:
    ended = StepResult(
        (
            Output("waiting", "o", 0, finish_reason=types_pb2.FINISH_REASON_ABORTED),
            Output(
                "refused",
                "o",
                0,
                finish_reason=types_pb2.FINISH_REASON_ERROR,
                error=CapacityError("full", reason="QUEUE_FULL"),
            ),
            Output("on", "o", 0, (5,)),
        ),
        types_pb2.WorkerLoad(),
    )
    with capture_logs() as lines:
        observer = observed([ended])
    assert dict(observer.ended.items()) == {("aborted", "ABORTED"): 1, ("failed", "QUEUE_FULL"): 1}
    assert observer.queue.total == observer.step.total == 0  # neither ran, and there was no step
    assert [line["request_id"] for line in lines] == ["waiting", "refused"]


# --- traces ---


def traced(exporter: InMemorySpanExporter) -> dict[str, list[ReadableSpan]]:
    spans: dict[str, list[ReadableSpan]] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans


def is_below(span: ReadableSpan, other: ReadableSpan) -> bool:
    assert span.parent is not None and other.context is not None
    return bool(span.parent.span_id == other.context.span_id)


def test_a_traced_sequence_has_its_phases_and_its_steps(
    folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "STEP_INTERVAL_NS", 0)  # every step
    exporter = InMemorySpanExporter()
    config = config_for(folder, prefill_chunk=100)
    harness = Harness(model, config, spans=SequenceSpans(Tracing("worker", exporter)))
    harness.run(
        request("r-1", prompt(1, 20), 4, traceparent=CALLER),
        request("r-2", prompt(2, 20), 4, traceparent=CALLER.replace("b7", "c7")),
        request("untraced", prompt(3, 20), 6),
        request("unsampled", prompt(3, 20), 6, traceparent=CALLER[:-1] + "0"),
    )
    spans = traced(exporter)
    assert {name: len(found) for name, found in spans.items()} == {
        # Below sequences one "prefill" and one "decode" each; below steps one of either each, with the append inside.
        "sequence": 2,
        "queue": 2,
        "step": 4,
        "prefill": 2 + 1,
        "decode": 2 + 3,
        "append": 4,
        "sample": 4,
        "seal": 4,
    }
    sequences = {(s.attributes or {})["tailpack.request_id"]: s for s in spans["sequence"]}
    first = sequences["r-1"]
    assert first.parent is not None and f"{first.parent.span_id:016x}" == "b7ad6b7169203331"
    assert first.context is not None and f"{first.context.trace_id:032x}" == CALLER.split("-")[1]
    assert dict(first.attributes or {}) == {
        "tailpack.request_id": "r-1",
        "tailpack.reason": "LENGTH",
        "tailpack.prompt_tokens": 20,
        "tailpack.output_tokens": 4,
        "tailpack.recomputed": 0,
    }
    for step in spans["step"]:
        assert step.parent is not None and step.parent.span_id == first.context.span_id
        assert [link.context.span_id for link in step.links] == [sequences["r-2"].context.span_id]
        assert (step.attributes or {})["tailpack.num_sequences"] == 4
    phases = [s for name in ("queue", "prefill", "decode") for s in spans[name] if is_below(s, first)]
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    for one, next_one in itertools.pairwise(phases):
        assert one.end_time == next_one.start_time  # no gap, no overlap
    assert phases[0].start_time == first.start_time


def test_steps_become_spans_at_a_bounded_rate(folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "STEP_INTERVAL_NS", 10**15)
    exporter = InMemorySpanExporter()
    harness = Harness(model, config_for(folder), spans=SequenceSpans(Tracing("worker", exporter)))
    for number in range(3):
        harness.run(request(f"r-{number}", prompt(1, 20), 4, traceparent=CALLER))
    spans = traced(exporter)
    assert (len(spans["sequence"]), len(spans["step"])) == (3, 1)


def test_a_sequence_that_never_ran_has_no_phase_but_its_queue(folder: Path, model: Model) -> None:
    exporter = InMemorySpanExporter()
    spans = SequenceSpans(Tracing("worker", exporter))
    harness = Harness(model, config_for(folder, max_running=1), spans=spans)
    harness.engine.submit(request("runs", prompt(1, 20), 8, traceparent=CALLER))
    harness.engine.submit(request("waits", prompt(1, 20), 8, traceparent=CALLER))
    harness.step()
    assert harness.engine.abort("waits")
    harness.run()
    found = traced(exporter)
    waits = next(s for s in found["sequence"] if (s.attributes or {})["tailpack.request_id"] == "waits")
    below = [s.name for each in found.values() for s in each if is_below(s, waits)]
    assert below == ["queue"]
    assert (waits.attributes or {})["tailpack.reason"] == "ABORTED"
    assert not spans._begun  # nothing is kept of what has ended
