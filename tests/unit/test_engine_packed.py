"""The engine over packed KV: prefix reuse and what it says about it, deep rollback, forks, admission, refusals."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from kvstore.group_pages import worst_pages
from protos import types_pb2 as pb
from protos.errors import AlreadyExists, ConfigError, PreconditionFailed
from tests.unit.tiny import TINY, Harness, config_for, request, write_model
from worker import sequence_kv
from worker.kv_view import place_of
from worker.models import attention
from worker.sequence import Sequence, StepResult
from worker.weights import Model, load_model

VOCAB = TINY["vocab_size"]
TQ4: dict[str, Any] = {"kv_mode": "turboquant"}
EXACT, ANY, NONE = pb.PREFIX_REUSE_EXACT, pb.PREFIX_REUSE_ANY, pb.PREFIX_REUSE_NONE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), seed=3, head_dim=16)


@pytest.fixture(scope="module")
def load(folder: Path) -> Callable[..., Harness]:
    models: dict[str, Model] = {}

    def make(**changes: Any) -> Harness:
        num_pages, seed = changes.pop("num_pages", 64), changes.pop("seed", 0)
        config = config_for(folder, **changes)
        key = f"{config.kv_mode} {config.preset} {config.dense_layers}"
        if key not in models:
            models[key] = load_model(config)
        return Harness(models[key], config, num_pages=num_pages, seed=seed)

    return make


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


def usage(harness: Harness, request_id: str) -> tuple[int, bool]:
    last = harness.outputs[request_id][-1].usage
    assert last is not None
    return last.cached_prompt_tokens, last.prefix_exact


def running(harness: Harness, request_id: str) -> Sequence:
    return next(s for s in harness.engine._running if s.request.request_id == request_id)


def logprobs(harness: Harness, request_id: str) -> list[list[tuple[int, float]]]:
    return [[(t.token_id, t.logprob) for t in p.top] for o in harness.outputs[request_id] for p in o.logprobs]


def _quiet(result: StepResult) -> None:
    """An emit that hears nothing."""


# --- prefix reuse ---


@pytest.mark.parametrize("settings", [TQ4, {"kv_mode": "fp8"}, {**TQ4, "kv_preset": "tq3v2"}])
@pytest.mark.parametrize(("first", "turn"), [(300, 60), (270, 200), (131, 20), (256, 128), (40, 7)])
def test_a_next_turn_is_as_if_the_sequence_had_never_been_released(
    load: Callable[..., Harness], settings: dict[str, Any], first: int, turn: int
) -> None:
    """Same tokens, same bits of logprobs, against a sequence that stayed and was told the next turn."""
    more = prompt(9, turn)
    released = load(deterministic=True, **settings)
    answer = released.run(request("one", prompt(1, first), 50))["one"]
    history = prompt(1, first) + answer + more
    released.run(request("two", history, 60, logprobs=5, reuse=EXACT))
    assert usage(released, "two") == (first + 49, True), "all but the newest token was computed"

    kept = load(deterministic=True, **settings)
    kept.engine.submit(request("one", prompt(1, first), 51))
    while len(kept.tokens("one") if "one" in kept.outputs else []) < 50:
        kept.step()
    sequence = running(kept, "one")
    go_on(kept, sequence, history, request("two", history, 60, logprobs=5))
    kept.run()
    assert kept.tokens("two") == released.tokens("two")
    assert logprobs(kept, "two") == logprobs(released, "two")
    assert released.attachment.verify() == []


def go_on(harness: Harness, sequence: Sequence, history: list[int], as_request: Any) -> None:
    """Makes a running sequence the continuation of another request, as a worker that never released it would."""
    harness.outputs.pop(as_request.request_id, None)
    harness.engine._known[as_request.request_id] = harness.engine._known.pop(sequence.request.request_id)
    slot = sequence.slot
    table = harness.attachment.table
    table.sequence(slot).max_tokens = len(history) + 60  # the store promises at open; this one got longer
    for name, state in table.sequence(slot).groups.items():
        state.worst = worst_pages(state.group, state.margin, len(history) + 60)
        table._settle(name, state)
    harness.attachment.control.append_tokens(slot, history[len(sequence.token_ids) :])
    sequence.token_ids[:] = history
    sequence.request = as_request
    sequence.max_total_tokens = sequence.num_promised = len(history) + 60


def test_the_same_prompt_again_computes_one_token(load: Callable[..., Harness]) -> None:
    harness = load(**TQ4)
    tokens = {name: harness.run(request(name, prompt(1, 300), 20))[name] for name in "abc"}
    assert [usage(harness, name) for name in "abc"] == [(0, True), (299, True), (299, True)]
    assert tokens["b"] == tokens["c"]
    load_now = harness.engine.load()
    assert load_now.prompt_tokens_cached == 2 * 299 and load_now.prompt_tokens == 302
    assert load_now.rows_dequantised_resume == 0


def test_an_abort_between_a_resume_and_its_first_step_hurts_nobody(load: Callable[..., Harness]) -> None:
    """The budget of the step goes to an older prompt, so the resumed one holds rows and has computed none."""
    harness = load(prefill_chunk=16, checkpoints=4, **TQ4)
    history = prompt(1, 300)
    history += harness.run(request("one", history, 5))["one"]
    harness.engine.submit(request("older", prompt(2, 100), 5))
    harness.engine.submit(request("two", [*history, *prompt(3, 20)], 5, reuse=EXACT))
    harness.step()
    assert running(harness, "two").num_computed == 304 and running(harness, "older").num_computed == 16
    assert harness.attachment.verify() == []
    assert harness.engine.abort("two")
    answer = harness.run(request("three", [*history, 7], 5, reuse=EXACT))["three"]
    assert len(answer) == len(harness.tokens("older")) == 5
    assert usage(harness, "three") == (304, True)


def test_without_a_checkpoint_a_hit_says_that_it_is_inexact(load: Callable[..., Harness]) -> None:
    harness = load(checkpoints=0, deterministic=True, **TQ4)
    ids = prompt(1, 700)
    harness.run(request("a", ids, 20))
    harness.run(request("b", ids[:600] + prompt(2, 50), 20, reuse=ANY))
    cached, exact = usage(harness, "b")
    assert cached >= 256 and cached % 128 == 0 and not exact
    assert harness.engine.load().rows_dequantised_resume > 0
    harness.run(request("c", ids, 20, reuse=EXACT), request("d", ids, 20, reuse=NONE))
    assert usage(harness, "c") == (0, True) and usage(harness, "d") == (0, True)
    assert harness.tokens("c") == harness.tokens("d") == harness.tokens("a")


def test_inexactness_is_inherited(load: Callable[..., Harness]) -> None:
    harness = load(checkpoints=4, **TQ4)
    ids = prompt(1, 700)
    harness.run(request("a", ids, 2))
    other = ids[:600] + prompt(2, 300)
    harness.run(request("b", other, 20))
    assert not usage(harness, "b")[1], "no checkpoint at the junction"
    harness.run(request("c", other, 20))
    assert usage(harness, "c") == (899, False), "a checkpoint of an inexact sequence"
    harness.run(request("d", other, 20, reuse=EXACT))
    assert usage(harness, "d") == (0, True)


def test_a_junction_seen_twice_gets_a_checkpoint(load: Callable[..., Harness]) -> None:
    """Prompts that share their first 300 tokens: from the fourth on they resume exactly where they part."""
    harness = load(**TQ4)
    for i in range(5):
        harness.run(request(f"r{i}", prompt(1, 300) + prompt(10 + i, 400), 2, reuse=EXACT))
    assert [usage(harness, f"r{i}") for i in range(5)] == [(0, True)] * 3 + [(256, True)] * 2


def test_hits_never_cross_tenants(load: Callable[..., Harness]) -> None:
    harness = load(**TQ4)
    harness.run(request("a", prompt(1, 300), 5, tenant="x"))
    harness.run(request("b", prompt(1, 300), 5, tenant="y"), request("c", prompt(1, 300), 5, tenant="x"))
    assert usage(harness, "b") == (0, True) and usage(harness, "c")[0] == 299


def test_a_deterministic_worker_reuses_only_what_is_asked_for(load: Callable[..., Harness]) -> None:
    harness = load(deterministic=True, **TQ4)
    for name in ("a", "b"):
        harness.run(request(name, prompt(1, 300), 30, logprobs=3))
    assert usage(harness, "b") == (0, True) and logprobs(harness, "a") == logprobs(harness, "b")


@pytest.mark.parametrize("length", [257, 300, 500])
def test_page_boundaries_are_exact_in_mode_dense(load: Callable[..., Harness], length: int) -> None:
    harness = load(deterministic=True)
    ids = prompt(1, length)
    harness.run(request("a", ids, 30, logprobs=3))
    harness.run(request("b", ids, 30, logprobs=3, reuse=EXACT))
    assert usage(harness, "b") == ((length - 1) // 128 * 128, True)
    assert logprobs(harness, "a") == logprobs(harness, "b")


def test_dense_edges_resume_at_any_length(load: Callable[..., Harness]) -> None:
    harness = load(dense_layers=(1, 1), **TQ4)
    ids = prompt(1, 700)
    harness.run(request("a", ids, 5))
    harness.run(request("b", ids + prompt(3, 40), 20, reuse=EXACT))
    assert usage(harness, "b") == (700, True)


# --- going back ---


class Rows:
    """An oracle of every row as it was computed, by (layer, kind, position); watches ``attention.dense_rows``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, harness: Harness) -> None:
        self.rows: dict[tuple[int, str], torch.Tensor] = {}
        self.lossy = torch.zeros(1024, dtype=torch.bool)  # positions whose rows were restored from packed ones
        self.num_lossy = 0
        real = attention.dense_rows

        def watching(kv: Any, view: Any, place: Any, first: int, own: Any, span: Any) -> Any:
            rows = real(kv, view, place, first, own, span)
            key = (view.region.layer, view.region.kind)
            computed = self.rows.setdefault(key, own.new_empty((1024, *own.shape[1:])))
            computed[span.start : span.start + len(own)] = own
            self.lossy[span.start : span.start + len(own)] = False
            expected, lossy = computed[first : first + len(rows)], self.lossy[first : first + len(rows)]
            assert torch.equal(rows[~lossy], expected[~lossy]), f"{key} at {span.start}"
            if bool(lossy.any()):
                self.num_lossy += int(lossy.sum())
                assert torch.nn.functional.cosine_similarity(rows[lossy], expected[lossy], dim=-1).min() > 0.95
            return rows

        monkeypatch.setattr(attention, "dense_rows", watching)
        harness.engine._emit = _quiet  # offsets go back with a rollback


@pytest.mark.parametrize("back_to", [1, 100, 128, 150, 256, 300, 383])
def test_a_deep_rollback_then_300_steps(
    load: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, back_to: int
) -> None:
    harness = load(**TQ4)
    oracle = Rows(monkeypatch, harness)
    ids = prompt(1, 400)
    harness.engine.submit(request("r", ids[:1], 999, emitted=ids[1:]))
    harness.step(110)
    sequence = running(harness, "r")
    base = sequence.bases["full"]
    assert base == 256 and sequence.num_computed > 500
    with torch.inference_mode():
        truncated = harness.engine.truncate(sequence, back_to, next_token=7)
    assert truncated.exact == (back_to - 127 >= base)
    for refill in truncated.refills:
        oracle.lossy[refill.first_token : refill.first_token + refill.num_tokens] = True
    assert bool(oracle.lossy.any()) != truncated.exact
    harness.step(300)
    assert sequence.num_computed == back_to + 300
    load_now = harness.engine.load()
    assert (load_now.rows_dequantised_rollback > 0) != truncated.exact
    assert bool(oracle.num_lossy) != truncated.exact
    assert sequence.bases["full"] == max(0, back_to + 300 - 144) // 128 * 128
    assert harness.attachment.verify() == []
    kv = harness.engine._held.kv
    place = place_of(sequence.pages["full"], sequence.bases["full"], sequence.tail_slots["full"])
    for key, computed in oracle.rows.items():
        rows = kv.span(kv.view(*key), place, 0, sequence.num_computed, "attention")
        similar = torch.nn.functional.cosine_similarity(rows, computed[: len(rows)], dim=-1)
        assert similar.min() > 0.95, (
            f"{key}: a page holds other rows, from token {int(similar.min(-1).values.argmin())}"
        )
    if back_to in (150, 300):
        assert load_now.pages_relinked > 0, "pages below the cut are linked again, not packed twice"


def test_window_mode_refuses_a_deep_rollback_and_goes_on(tmp_path: Path) -> None:
    folder = write_model(tmp_path, model_type="mistral", sliding_window=100)
    config = config_for(folder, kv_mode="window")
    harness = Harness(load_model(config), config)
    ids = prompt(1, 500)
    harness.engine.submit(request("r", ids[:10], 540, emitted=ids[10:]))
    harness.step(20)
    with pytest.raises(PreconditionFailed) as refused, torch.inference_mode():
        harness.engine.truncate(running(harness, "r"), 200)
    assert refused.value.reason == "TRUNCATE_TOO_DEEP"
    harness.run()
    assert len(harness.tokens("r")) == 50


@pytest.mark.parametrize(("cut", "next_token"), [(0, None), (288, None), (289, 5)])
def test_a_truncate_into_the_prompt_is_refused_and_changes_nothing(
    load: Callable[..., Harness], cut: int, next_token: int | None
) -> None:
    expected = load(deterministic=True, **TQ4).run(request("r", prompt(1, 290), 30))["r"]
    harness = load(deterministic=True, **TQ4)
    harness.engine.submit(request("r", prompt(1, 290), 30))
    harness.step(12)
    sequence = running(harness, "r")
    with pytest.raises(PreconditionFailed) as refused, torch.inference_mode():
        harness.engine.truncate(sequence, cut, next_token)
    assert refused.value.reason == "TRUNCATES_PROMPT" and refused.value.allowed == f"{cut + 1 if cut else 289} or more"
    harness.run()
    assert harness.tokens("r") == expected


def test_a_truncate_to_the_prompt_draws_its_first_token_again(load: Callable[..., Harness]) -> None:
    harness = load(deterministic=True, **TQ4)
    harness.engine._emit = _quiet  # offsets go back with a rollback
    harness.engine.submit(request("r", prompt(1, 290), 30))
    harness.step(12)
    sequence = running(harness, "r")
    before = list(sequence.token_ids)
    with torch.inference_mode():
        harness.engine.truncate(sequence, 289)
    assert (sequence.num_emitted, sequence.num_computed) == (0, 289)
    harness.step(len(before) - 290)
    assert sequence.token_ids == before and len(before) > 292


@pytest.mark.parametrize("settings", [{}, TQ4, {**TQ4, "dense_layers": (1, 0)}])
def test_a_fork_and_its_parent_do_not_touch_each_other(load: Callable[..., Harness], settings: dict[str, Any]) -> None:
    alone = load(deterministic=True, **settings)
    expected = alone.run(request("r", prompt(1, 290), 80))["r"]
    harness = load(deterministic=True, max_running=4, **settings)
    harness.engine.submit(request("r", prompt(1, 290), 80))
    harness.step(10)
    parent = running(harness, "r")
    with torch.inference_mode():
        child = harness.engine.fork(parent, "child")
        assert child is not None and child.slot != parent.slot
        sibling = harness.engine.fork(parent, "sibling")
        assert sibling is not None
        harness.engine.truncate(sibling, sibling.num_computed - 3, next_token=5)
    emitted = len(harness.tokens("r"))
    harness.engine._emit = _quiet  # a child's first output does not start at 0
    while harness.engine._running:
        harness.step()
    assert emitted < 80
    assert parent.token_ids[290:] == expected and child.token_ids[290:] == expected
    assert sibling.token_ids != parent.token_ids and len(sibling.token_ids) == 370
    harness.attachment.check_empty()


def test_a_fork_is_a_request_of_its_own(load: Callable[..., Harness]) -> None:
    harness = load(max_running=2, admission="recompute", **TQ4)  # the store has a slot more
    harness.engine.submit(request("r", prompt(1, 290), 20, temperature=1.0, repetition_penalty=1.1, seed=7))
    harness.step(8)
    parent = running(harness, "r")
    parent.junction = 384
    with torch.inference_mode():
        with pytest.raises(AlreadyExists) as refused:
            harness.engine.fork(parent, "r")
        assert refused.value.reason == "DUPLICATE_REQUEST"
        child = harness.engine.fork(parent, "child")
        assert child is not None and harness.engine.fork(parent, "third") is None, "max_running"
    assert parent.first_token_ns and (child.first_run_ns, child.first_token_ns, child.last_token_ns) == (0, 0, 0)
    assert child.submitted_ns > parent.last_token_ns and child.junction == 0 and child.seen is not parent.seen
    harness.run()
    assert harness.outputs["child"][0].seed == 7
    assert child.token_ids == parent.token_ids


# --- admission ---


def test_two_prompts_of_more_than_half_the_memory_take_turns(load: Callable[..., Harness]) -> None:
    for settings in ({}, TQ4):
        for admission in ("worst_case", "recompute"):
            harness = load(num_pages=6, admission=admission, **settings)
            tokens = harness.run(*(request(f"r{i}", prompt(i, 600), 60) for i in range(3)), limit=800)
            assert all(len(t) == 60 for t in tokens.values())


def test_what_waits_behind_a_large_request_starts_when_that_is_aborted(load: Callable[..., Harness]) -> None:
    harness = load(num_pages=3, **TQ4)
    harness.engine.submit(request("runs", prompt(1, 300), 200))
    harness.step(3)
    harness.engine.submit(request("large", prompt(2, 500), 20))
    harness.engine.submit(request("small", prompt(3, 20), 5))
    harness.step(2)
    assert harness.engine.load().num_running == 1, "nobody overtakes"
    harness.engine.abort("large")
    harness.step(7)
    assert len(harness.tokens("small")) == 5 and running(harness, "runs")
    harness.run()


def test_recompute_starts_sooner_and_drops_the_youngest(load: Callable[..., Harness]) -> None:
    """Short prompts with long answers: worst cases do not fit beside each other, what they start with does."""
    requests = [request(f"r{i}", prompt(i, 40), 400) for i in range(3)]
    alone = load(deterministic=True)
    expected = {r.request_id: alone.run(r)[r.request_id] for r in requests}
    careful = load(deterministic=True, num_pages=9)
    careful_tokens = careful.run(*requests)
    daring = load(deterministic=True, num_pages=9, admission="recompute")
    for r in requests:
        daring.engine.submit(r)
    daring.step(3)
    assert daring.engine.load().num_running == 3
    with capture_logs() as logs:
        daring.run()
    dropped = [line["request_id"] for line in logs if line["event"].startswith("dropped")]
    assert dropped[0] == "r2" and "r0" not in dropped, "the youngest goes, the oldest never"
    tokens = {r.request_id: daring.tokens(r.request_id) for r in requests}
    assert tokens == careful_tokens == expected
    assert daring.engine.load().sequences_recomputed > 0 and careful.engine.load().sequences_recomputed == 0


@pytest.mark.parametrize("steps", [1, 12])
@pytest.mark.parametrize("evicted", [True, False])
def test_what_was_said_of_a_prefix_holds_when_it_is_dropped_and_computed_again(
    load: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, steps: int, evicted: bool
) -> None:
    harness = load(checkpoints=0, admission="recompute", **TQ4)
    ids = prompt(1, 700)
    harness.run(request("a", ids, 2))
    harness.engine.submit(request("b", ids[:600] + prompt(2, 200), 20, reuse=ANY))
    harness.step(steps)
    sequence = running(harness, "b")
    cached = sequence.num_cached
    assert cached >= 256 and not sequence.prefix_exact and bool(sequence.num_emitted) == (steps > 1)
    if evicted:
        opens = harness.attachment.open
        monkeypatch.setattr(harness.attachment, "open", lambda asked: opens([replace(asked[0], reuse=False)]))
    with torch.inference_mode():
        harness.engine._drop(sequence)
    harness.run()
    assert usage(harness, "b") == (0 if evicted else cached, evicted and steps == 1)
    assert harness.engine.load().prompt_tokens_cached == cached, "counted once"


def test_what_a_dropped_sequence_finds_of_itself_is_not_prefix_reuse(load: Callable[..., Harness]) -> None:
    harness = load(admission="recompute", **TQ4)
    harness.engine.submit(request("a", prompt(1, 300), 20, reuse=ANY))
    harness.step(12)
    sequence = running(harness, "a")
    with torch.inference_mode():
        harness.engine._drop(sequence)
    harness.step()
    assert sequence.num_computed >= 300, "the checkpoint at its prompt's end"
    harness.run()
    assert usage(harness, "a") == (0, True) and harness.engine.load().prompt_tokens_cached == 0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("admission", ["worst_case", "recompute"])
def test_nothing_is_left_after_a_storm(load: Callable[..., Harness], seed: int, admission: str) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    harness = load(max_waiting=50, num_pages=7, checkpoints=2, admission=admission, seed=seed, **TQ4)
    count = 0
    for _ in range(60):
        for _ in range(rng.randrange(3)):
            ids = prompt(rng.randrange(6), rng.choice([1, 3, 100, 128, 300, 420]))
            harness.engine.submit(request(f"r{count}", ids, rng.choice([1, 20, 300])))
            count += 1
        harness.step(rng.randrange(12))
        if count and rng.random() < 0.5:
            harness.engine.abort(f"r{rng.randrange(max(0, count - 20), count)}")
        harness.attachment.table.check()
    for i in range(count - 5):
        harness.engine.abort(f"r{i}")
    harness.run(request("probe", prompt(50, 10), 5))
    assert len(harness.tokens("probe")) == 5
    assert harness.attachment.verify() == []


# --- what is said, and what is refused ---


def test_the_first_seal_says_one_line(load: Callable[..., Harness]) -> None:
    with capture_logs() as logs:
        harness = load(**TQ4)
        harness.run(request("a", prompt(1, 400), 5), request("b", prompt(2, 400), 5))
    lines = [line for line in logs if "pack" in line["event"] or "sealed" in line["event"]]
    assert len(lines) == 1 and lines[0]["modes"] == "full turboquant tq4" and lines[0]["dense_windows"] == {"full": 128}
    assert lines[0]["bytes_per_token"] == harness.attachment.geometry.bytes_per_token
    now = harness.engine.load()
    assert now.pages_packed == 2 * 2 and now.seal_ns > 0 and now.append_ns > 0


def test_a_mode_that_does_not_engage_is_warned_about(
    load: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequence_kv, "seals", lambda *_: False)
    monkeypatch.setattr(sequence_kv, "needs_pages", lambda *_: False)
    with capture_logs() as logs:
        harness = load(prefill_chunk=64, checkpoints=0, **TQ4)
        harness.run(request("a", prompt(1, 200), 90), request("b", prompt(1, 200), 90))
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == [
        "the KV mode does not engage: a sequence was long enough to be packed, and was not"
    ]


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        ({}, {"kv_mode": "window"}, "NO_MODEL_WINDOW"),
        ({"head_dim": 4}, {"kv_mode": "turboquant"}, "NO_CODEC_FOR_WIDTH"),
        ({}, {"kv_mode": "turboquant", "dense_layers": (2, 1)}, "MODE_NOT_ENGAGED"),
        ({}, {"dense_layers": (1, 0)}, None),
    ],
)
def test_modes_that_cannot_be_are_refused_by_name(
    tmp_path: Path, model: dict[str, Any], settings: dict[str, Any], reason: str | None
) -> None:
    folder = write_model(tmp_path, **model)
    with pytest.raises(ConfigError) as refused:
        load_model(config_for(folder, **settings))
    assert reason is None or refused.value.reason == reason


def test_pages_behind_a_large_window_are_freed_and_not_missed(tmp_path: Path) -> None:
    """A window of 300 tokens: the newest 128 are dense, the rest of it is read packed, what lies behind is let go."""
    folder = write_model(tmp_path, model_type="mistral", sliding_window=300, head_dim=16)
    config = config_for(folder, **TQ4)
    harness = Harness(load_model(config), config)
    ids = prompt(1, 500)
    harness.engine.submit(request("r", ids[:10], 890, emitted=ids[10:]))
    harness.step(8 + 300)
    sequence = running(harness, "r")
    freed = sequence.pages["window"].count(-1)
    assert freed == (sequence.num_computed - 300 - 16) // 128 and sequence.bases["window"] == 640
    kv = harness.engine._held.kv
    place = place_of(sequence.pages["window"], 640, sequence.tail_slots["window"])
    with pytest.raises(PreconditionFailed) as gone:
        kv.span(kv.view(0, "k"), place, 100, 50, "attention")
    assert gone.value.reason == "ROWS_FREED"
    with pytest.raises(PreconditionFailed) as refused, torch.inference_mode():
        harness.engine.truncate(sequence, 400)
    assert refused.value.reason == "TRUNCATE_TOO_DEEP"
    harness.run()
    assert len(harness.tokens("r")) == 400 and harness.attachment.verify() == []
