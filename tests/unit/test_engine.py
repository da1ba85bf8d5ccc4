"""The engine over a fake attachment: what it emits, what it leaves behind, and what it does when something breaks."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from kvstore.client import OpenRequest
from protos import types_pb2 as pb
from protos.errors import InternalError, KvStoreLost, TailpackError, WorkerLost
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker.engine import Engine
from worker.waiting import Waiting
from worker.weights import Model, load_model

VOCAB = TINY["vocab_size"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(config_for(folder))


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def error_of(harness: Harness, request_id: str) -> TailpackError:
    last = harness.outputs[request_id][-1]
    assert last.finish_reason == pb.FINISH_REASON_ERROR and last.error is not None
    return last.error


# --- before it starts ---


def test_warming_up_generates_a_token_and_leaves_no_trace(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    before = harness.engine.load()
    with patch.object(harness.engine._runner, "run", wraps=harness.engine._runner.run) as run:
        harness.engine.warm_up()
    assert run.call_count == 1
    after = harness.engine.load()
    after.ClearField("append_ns")  # time spent on its rows was spent
    after.ClearField("seal_ns")
    before.pages_free, before.pages_total = after.pages_total, after.pages_total
    assert not harness.results and after == before
    harness.attachment.check_empty()
    harness.run(request("first", prompt(1, 20), 4))
    assert len(harness.tokens("first")) == 4


def test_a_worker_that_cannot_generate_a_token_does_not_start(folder: Path, model: Model) -> None:
    config = replace(config_for(folder), max_running=1, max_waiting=0)
    harness = Harness(model, config)
    harness.engine.submit(request("in the way", prompt(1, 20), 4))  # so that the first token is refused
    with pytest.raises(InternalError) as failed:
        harness.engine.warm_up()
    assert failed.value.reason == "WARM_UP_FAILED" and "QUEUE_FULL" in str(failed.value)


# --- what goes out ---


def test_stops(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    (tokens,) = harness.run(request("free", prompt(1, 20), 30)).values()
    third = tokens[2]
    at = tokens.index(third)
    harness.run(request("stop", prompt(1, 20), 30, stop_token_ids=[third]))
    assert harness.tokens("stop") == tokens[: at + 1] and harness.reason("stop") == pb.FINISH_REASON_STOP_TOKEN
    harness.run(request("length", prompt(1, 20), 4))
    assert harness.tokens("length") == tokens[:4] and harness.reason("length") == pb.FINISH_REASON_LENGTH
    usage = harness.outputs["length"][-1].usage
    assert usage is not None and (usage.prompt_tokens, usage.output_tokens) == (20, 4)
    timings = harness.outputs["length"][-1].timings
    assert timings is not None and timings.prefill_ns > 0 and timings.decode_ns > 0
    full = TINY["max_position_embeddings"]
    harness.run(request("full", prompt(1, full - 3), 100))
    assert len(harness.tokens("full")) == 3 and harness.reason("full") == pb.FINISH_REASON_LENGTH


def test_every_eos_id_ends_a_sequence_unless_ignored(folder: Path, model: Model) -> None:
    config = config_for(folder)
    (tokens,) = Harness(model, config).run(request("r", prompt(1, 20), 12)).values()
    for eos in (tokens[3], tokens[5]):
        with_eos = replace(model, eos_token_ids=(VOCAB - 1, eos))
        harness = Harness(with_eos, config)
        harness.run(request("r", prompt(1, 20), 12, ignore_eos=False))
        assert harness.tokens("r") == tokens[: tokens.index(eos) + 1] and harness.reason("r") == pb.FINISH_REASON_EOS
        assert Harness(with_eos, config).run(request("r", prompt(1, 20), 12))["r"] == tokens


def test_a_token_is_logged_and_its_past_committed_before_it_is_emitted(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder, prefill_chunk=100))
    control = harness.attachment.control
    ids = prompt(2, 150)
    harness.engine.submit(request("r", ids, 5))
    emitted: list[int] = []
    for _ in range(5):
        harness.step()
        if emitted != (emitted := harness.tokens("r") if "r" in harness.outputs else []):
            (slot,) = control.live_slots()
            assert control.token_log(slot) == ids + emitted
            assert control.committed(slot) == len(ids) + len(emitted) - 1
            assert len(harness.attachment.table.sequence(slot).hashes) == control.committed(slot) // 128
    assert len(emitted) == 4


def test_logprobs_are_of_the_models_own_distribution(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    harness.run(request("greedy", prompt(1, 9), 3, logprobs=2))
    harness.run(request("hot", prompt(1, 9), 3, logprobs=2, temperature=50.0, seed=4))
    greedy, hot = harness.outputs["greedy"][0].logprobs[0], harness.outputs["hot"][0].logprobs[0]
    assert greedy.chosen == greedy.top[0] and greedy.top == hot.top
    assert harness.outputs["hot"][0].seed == 4 and harness.outputs["hot"][1].seed is None


def test_a_seed_is_drawn_and_reported_and_reproduces(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    first = harness.run(request("a", prompt(1, 9), 12, temperature=3.0))["a"]
    seed = harness.outputs["a"][0].seed
    assert seed is not None
    others = [request(f"o{i}", prompt(i, 5 + i), 12, temperature=3.0) for i in range(4)]
    assert harness.run(*others, request("b", prompt(1, 9), 12, temperature=3.0, seed=seed))["b"] == first
    assert harness.run(request("c", prompt(1, 9), 12, temperature=3.0, seed=seed + 1))["c"] != first
    resumed = request("d", prompt(1, 9), 12, temperature=3.0, seed=seed, emitted=first[:5])
    assert harness.run(resumed)["d"] == first[5:]
    assert harness.outputs["d"][0].token_offset == 5


def test_chunked_prefill_does_not_hold_up_running_sequences(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder, prefill_chunk=32))
    harness.engine.submit(request("short", prompt(1, 5), 50))
    harness.step(3)
    harness.engine.submit(request("long", prompt(2, 320), 2))
    before = len(harness.tokens("short"))
    harness.step(10)
    assert len(harness.tokens("short")) == before + 10
    assert len(harness.tokens("long")) == 1
    harness.run()


def test_most_steps_call_the_store_not_at_all(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    harness.run(*(request(f"r{i}", prompt(i, 20), 60) for i in range(8)))
    assert harness.attachment.calls == {"open": 8, "reserve": 8 * 20 // 64 + 1, "release": 8}


# --- admission ---


def test_nobody_overtakes_a_large_sequence(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder), num_pages=4)
    harness.engine.submit(request("first", prompt(1, 10), 300))  # 3 pages of 4
    harness.step()
    harness.engine.submit(request("large", prompt(2, 10), 400))  # 4 pages
    harness.engine.submit(request("small", prompt(3, 10), 20))  # 1 page: there is room for it
    harness.step(5)
    load = harness.engine.load()
    assert (load.num_running, load.num_waiting, load.pages_free, load.pages_total) == (1, 2, 1, 4)
    assert harness.attachment.calls["open"] == 2, "asking again is no use before something is released"
    harness.run()
    assert harness.attachment.opened == ["first", "large", "small"]


def test_what_can_never_fit_is_refused_and_the_next_goes_on(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder), num_pages=2)
    harness.run(request("never", prompt(1, 200), 100), request("fits", prompt(2, 10), 5))
    error = error_of(harness, "never")
    assert error.reason == "SEQUENCE_TOO_LARGE" and "3 pages" in str(error) and "2 pages" in str(error)
    assert len(harness.tokens("fits")) == 5


def test_a_refusal_though_nothing_runs_is_a_bug(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder, max_running=2), num_pages=4)
    stray = OpenRequest("stray", "", [1], 300)
    harness.attachment.open([stray])  # pages that no sequence of the engine holds: somebody did not release them
    harness.engine.submit(request("could fit", prompt(1, 10), 300))
    with pytest.raises(InternalError, match="nothing runs"):
        harness.step()


def test_waiting_sequences_are_admitted_at_once_when_nothing_runs(
    folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.engine.IDLE_REPORT_S", 3600.0)
    live = Live(model, folder, max_running=1)
    for i in range(3):  # each waits for the end of the one before, which leaves nothing running
        live.engine.submit(request(f"r{i}", prompt(i, 10), 1))
    live.engine.start()
    for i in range(3):
        live.wait_for(f"r{i}")
    live.engine.stop(10)


def test_what_waits_is_counted_without_going_through_it(
    folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def walked(_: object) -> None:
        raise AssertionError("the queue was gone through")

    monkeypatch.setattr(Waiting, "__iter__", walked)
    harness = Harness(model, config_for(folder, max_running=1))
    for i in range(5):
        harness.engine.submit(request(f"r{i}", prompt(i, 10 + i), 3))
    harness.step()
    assert harness.engine.load().queued_tokens == 11 + 12 + 13 + 14
    harness.engine.abort("r3")
    harness.step()
    assert harness.engine.load().queued_tokens == 11 + 12 + 14
    harness.run()
    assert harness.engine.load().queued_tokens == 0


def test_a_full_queue_refuses_and_says_when_to_come_back(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder, max_running=2, max_waiting=3))
    for i in range(7):
        harness.engine.submit(request(f"r{i}", prompt(i, 10), 5))
    harness.run()
    for i in (5, 6):
        assert error_of(harness, f"r{i}").reason == "QUEUE_FULL" and error_of(harness, f"r{i}").retry_after_ms
    assert all(len(harness.tokens(f"r{i}")) == 5 for i in range(5))


def test_a_second_use_of_a_running_id_is_refused_and_a_later_one_is_fine(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    harness.engine.submit(request("r", prompt(1, 10), 5, owner="a"))
    harness.engine.submit(request("r", prompt(1, 10), 5, owner="b"))
    harness.step()
    (refused,) = [o for o in harness.outputs["r"] if o.owner == "b"]
    assert refused.error is not None and refused.error.reason == "DUPLICATE_REQUEST"
    harness.outputs["r"].clear()
    harness.run()
    harness.outputs["r"].clear()
    assert len(harness.run(request("r", prompt(1, 10), 5))["r"]) > 0


def test_bad_requests_hurt_nobody(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder))
    alone = harness.run(request("ok", prompt(1, 10), 6))["ok"]
    bad = {
        "EMPTY_PROMPT": request("b0", []),
        "PROMPT_TOO_LONG": request("b1", prompt(1, TINY["max_position_embeddings"])),
        "BAD_TOKEN_ID": request("b2", [5, VOCAB]),
        "BAD_MAX_TOKENS": request("b3", [5], -1),
        "BAD_TEMPERATURE": request("b4", [5], temperature=float("nan")),
        "BAD_TOP_P": request("b5", [5], top_p=0.0),
        "BAD_LOGPROBS": request("b6", [5], logprobs=21),
        "BAD_REPETITION_PENALTY": request("b8", [5], repetition_penalty=1e-40),
        "ALREADY_FINISHED": request("b7", [5], 2, emitted=[1, 2, 3]),
    }
    result = harness.run(*bad.values(), request("good", prompt(1, 10), 6))
    for reason, r in bad.items():
        assert error_of(harness, r.request_id).reason == reason
    assert result["good"] == alone and harness.engine.load().sequences_failed == len(bad)


def test_what_was_emitted_to_its_end_has_only_to_end(folder: Path, model: Model) -> None:
    """All tokens went out, and the word that it ended did not."""
    harness = Harness(model, config_for(folder))
    harness.engine.submit(request("full", [5], 2, emitted=[1, 2]))
    harness.engine.submit(request("stopped", [5], 9, emitted=[1, 7], stop_token_ids=[7]))
    harness.engine.submit(request("goes on behind its stop", [5], 9, emitted=[7, 1], stop_token_ids=[7]))
    harness.step()
    assert (
        harness.reason("full") == pb.FINISH_REASON_LENGTH and harness.reason("stopped") == pb.FINISH_REASON_STOP_TOKEN
    )
    for name in ("full", "stopped"):
        (output,) = harness.outputs[name]
        assert (output.token_offset, output.token_ids) == (2, ())
        assert output.usage is not None and output.usage.output_tokens == 2
    assert error_of(harness, "goes on behind its stop").reason == "ALREADY_FINISHED"
    assert harness.attachment.calls == {} and harness.engine.load().num_steps == 0


# --- aborts, and what is left over ---


def test_an_abort_ends_a_sequence_wherever_it_is(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder, max_running=1))
    harness.engine.submit(request("running", prompt(1, 100), 50, tenant="t"))
    harness.engine.submit(request("waiting", prompt(2, 10), 5))
    harness.step()
    harness.engine.submit(request("inbox", prompt(2, 10), 5))
    assert not harness.engine.abort("nobody") and not harness.engine.abort("running", tenant="another tenant")
    assert not harness.engine.abort("running", owner="another router's session")
    for name in ("running", "waiting", "inbox"):
        assert harness.engine.abort(name)
    assert harness.engine.abort("inbox"), "known until the next step"
    harness.step()
    assert all(harness.reason(name) == pb.FINISH_REASON_ABORTED for name in ("running", "waiting", "inbox"))
    assert not harness.engine.abort("running")
    harness.attachment.check_empty()
    load = harness.engine.load()
    assert (load.sequences_aborted, load.num_running, load.num_waiting, load.queued_tokens) == (3, 0, 0, 0)
    assert load.pages_free == load.pages_total


def test_an_owner_takes_its_own_sequences_along(folder: Path, model: Model) -> None:
    harness = Harness(model, config_for(folder, max_running=2))
    for i in range(6):
        harness.engine.submit(request(f"r{i}", prompt(i, 10), 5, owner="ab"[i % 2]))
    harness.step()
    harness.engine.abort_owner("a")
    harness.run()
    assert [harness.reason(f"r{i}") for i in range(6)] == [pb.FINISH_REASON_ABORTED, pb.FINISH_REASON_LENGTH] * 3


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_left_after_a_storm(folder: Path, model: Model, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    harness = Harness(model, config_for(folder, max_waiting=50), num_pages=12, seed=seed)
    count = 0
    for _ in range(150):
        for _ in range(rng.randrange(3)):
            temperature = rng.choice([0.0, 1.0])
            ids = prompt(count, rng.choice([1, 3, 100, 128, 200]))
            harness.engine.submit(request(f"r{count}", ids, rng.randrange(1, 30), temperature=temperature))
            count += 1
        harness.step(rng.randrange(3))
        if count and rng.random() < 0.6:
            harness.engine.abort(f"r{rng.randrange(max(0, count - 20), count)}")
        harness.attachment.table.check()
    harness.run(request("probe", prompt(1, 10), 5))
    assert len(harness.tokens("probe")) == 5
    load = harness.engine.load()
    assert load.sequences_aborted > 10 and load.sequences_finished > 10
    assert load.sequences_aborted + load.sequences_finished + load.sequences_failed == count + 1
    assert not harness.engine._known and not harness.engine._running and not harness.engine._waiting


# --- what breaks ---


class Live:
    """An engine on its own thread; ``wait_for`` waits for a condition on what it said."""

    def __init__(self, model: Model, folder: Path, **changes: int) -> None:
        self.harness = Harness(model, config_for(folder, **changes))
        self.failures: list[TailpackError] = []
        self.changed = threading.Condition()
        take = self.harness._take

        def emit(result: object) -> None:
            with self.changed:
                take(result)  # type: ignore[arg-type]
                self.changed.notify_all()

        self.engine = Engine(
            self.harness.engine._config,
            model,
            self.harness.attachment,
            emit,
            self.failures.append,
        )
        self.harness.engine = self.engine

    def wait_for(self, request_id: str, ended: bool = True) -> None:
        def there() -> bool:
            outputs = self.harness.outputs.get(request_id, [])
            return bool(outputs) and (not ended or outputs[-1].finish_reason != pb.FINISH_REASON_UNSPECIFIED)

        with self.changed:
            assert self.changed.wait_for(there, 20), f"no word of {request_id}"


def test_the_thread_serves_aborts_while_idle_and_stops(folder: Path, model: Model) -> None:
    live = Live(model, folder, max_running=4)
    live.engine.start()
    live.engine.submit(request("a", prompt(1, 10), 5))
    live.wait_for("a")
    live.engine.submit(request("b", prompt(1, 10), 900))
    live.wait_for("b", ended=False)
    assert live.engine.abort("b")
    live.wait_for("b")
    assert live.harness.reason("b") == pb.FINISH_REASON_ABORTED
    live.engine.submit(request("c", prompt(1, 10), 900))
    live.wait_for("c", ended=False)
    live.engine.stop(10)
    live.wait_for("c")
    assert isinstance(error_of(live.harness, "c"), WorkerLost)
    assert not live.engine.failed.is_set() and not live.failures
    live.harness.attachment.check_empty()
    with pytest.raises(WorkerLost):
        live.engine.submit(request("d", prompt(1, 10), 5))


def test_an_idle_engine_reports_its_load(folder: Path, model: Model) -> None:
    live = Live(model, folder)
    live.engine.start()
    with live.changed:
        assert live.changed.wait_for(lambda: len(live.harness.results) >= 1, 20)
    live.engine.stop(10)


def test_an_exception_of_the_model_stops_the_engine_loudly(
    folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(model, folder, max_running=1)

    def broken(work: object) -> torch.Tensor:
        raise RuntimeError("the sums came out wrong")

    live.engine.submit(request("running", prompt(1, 10), 500))
    live.engine.submit(request("waiting", prompt(1, 10), 5))
    live.engine.start()
    live.wait_for("running", ended=False)
    monkeypatch.setattr(live.engine._runner, "run", broken)
    for name in ("running", "waiting"):
        live.wait_for(name)
    error = error_of(live.harness, "running")
    assert isinstance(error, InternalError) and "the sums came out wrong" in str(error)
    error = error_of(live.harness, "waiting")  # it broke nothing
    assert isinstance(error, WorkerLost) and error.retry_after_ms
    assert live.engine.failed.wait(60)
    live.engine.stop(10)
    assert live.failures == [live.engine.failure]
    live.harness.attachment.check_empty()


def test_an_engine_that_breaks_while_it_stops_has_failed(
    folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(model, folder)
    in_step, stopping = threading.Event(), threading.Event()

    def broken(work: object) -> torch.Tensor:
        in_step.set()
        assert stopping.wait(60)
        raise RuntimeError("the sums came out wrong")

    monkeypatch.setattr(live.engine._runner, "run", broken)
    live.engine.submit(request("r", prompt(1, 10), 5))
    live.engine.start()
    assert in_step.wait(60)
    stop = threading.Thread(target=live.engine.stop, args=(20,))
    stop.start()
    while not live.engine._stopping:
        time.sleep(0.001)
    stopping.set()
    stop.join()
    assert isinstance(error_of(live.harness, "r"), InternalError)
    assert live.engine.failed.is_set() and live.failures == [live.engine.failure]


def test_logits_that_are_not_finite_are_never_a_token(
    folder: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = Live(model, folder)
    monkeypatch.setattr(model.network, "forward", lambda batch, kv, workspace: torch.full((1, VOCAB), float("nan")))
    live.engine.start()
    live.engine.submit(request("r", prompt(1, 10), 5))
    live.wait_for("r")
    assert isinstance(error_of(live.harness, "r"), InternalError) and not live.harness.tokens("r")
    live.engine.stop(10)


@pytest.mark.parametrize("how", ["told", "found"])
def test_without_the_kvstore_every_sequence_ends_by_name(folder: Path, model: Model, how: str) -> None:
    live = Live(model, folder, max_running=2)
    live.engine.start()
    for i in range(4):
        live.engine.submit(request(f"r{i}", prompt(i, 10), 900))
    live.wait_for("r0", ended=False)
    lost = KvStoreLost("the kvstore is gone")
    if how == "told":
        live.engine.stop_because(lost)
    else:
        live.harness.attachment.fail_next["release"] = lost
        live.engine.abort("r0")
    for i in range(1, 4):
        live.wait_for(f"r{i}")
        assert error_of(live.harness, f"r{i}").reason == "KVSTORE_LOST"
    assert live.engine.failed.wait(60) and live.failures[0].reason == "KVSTORE_LOST"
    live.engine.stop(10)


def test_submissions_from_many_threads(folder: Path, model: Model) -> None:
    live = Live(model, folder)
    live.engine.start()

    def submit(first: int) -> None:
        for i in range(first, first + 25):
            live.engine.submit(request(f"r{i}", prompt(i, 5), 3))
            if i % 3 == 0:
                live.engine.abort(f"r{i}")

    threads = [threading.Thread(target=submit, args=(100 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 30
    while (load := live.engine.load()).num_running + load.num_waiting and time.monotonic() < deadline:
        time.sleep(0.01)
    live.engine.stop(10)
    load = live.engine.load()
    assert load.sequences_finished + load.sequences_aborted == 100 and load.sequences_failed == 0
    live.harness.attachment.check_empty()
