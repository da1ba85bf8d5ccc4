"""A worker that is killed at any point of a step, and the one after it: the same tokens, and nothing computed twice.

``Lives`` checks that no committed token is computed again, that outputs leave no gap and repeat nothing, and that
nothing is held at the end. What is compared is the tokens of a run that nobody disturbed, in deterministic mode.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.answers import Adopted
from protos import types_pb2 as pb
from protos import worker_pb2
from tests.unit.deepseek_v4_engine import Reference
from tests.unit.deepseek_v4_tiny import tiny_config
from tests.unit.lives import Lives
from tests.unit.tiny import Harness, config_for, request, write_model
from worker.adoption import plan_adoption
from worker.sequence import Request
from worker.sequence_kv import MAX_ADOPTIONS
from worker.weights import Model, load_model

MODES: dict[str, dict[str, Any]] = {
    "dense": {},
    "turboquant": {"kv_mode": "turboquant"},
    "turboquant with dense edges": {"kv_mode": "turboquant", "dense_layers": (1, 0)},
    "fp8": {"kv_mode": "fp8"},
    "window": {"kv_mode": "window"},
    "v4 dense": {},
    "v4 turboquant, drafts": {"kv_mode": "turboquant", "kv_preset": "tq4", "drafts": 2},
    "v4 window": {"kv_mode": "window"},
    "v4 fp8, drafts": {"kv_mode": "fp8", "drafts": 2},
}
SLIDING = {"model_type": "mistral", "sliding_window": 64}
V4 = {
    "num_hidden_layers": 3,
    "compress_ratios": [4, 128, 4, 0],
    "num_hash_layers": 1,
    "num_nextn_predict_layers": 1,
    "hc_sinkhorn_iters": 2,
    "rope_scaling": None,
}
SETTINGS: dict[str, Any] = {"deterministic": True, "max_running": 4}
VOCAB = 97  # the smaller model's


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def requests() -> list[Request]:
    """One queues behind four. Prompts of several chunks, and of one; lengths that seal while they decode."""
    return [
        request("long", prompt(1, 402), 9),
        request("border", prompt(2, 270), 12),
        request("short", prompt(3, 5), 30),
        request("sampled", prompt(4, 130), 20, temperature=1.0, seed=7, repetition_penalty=1.2),
        request("queued", prompt(5, 300), 6),
    ]


class Served:
    """A model, its worker's settings, and what it says undisturbed."""

    def __init__(self, mode: str, folder: Path) -> None:
        changes = MODES[mode]
        if mode.startswith("v4"):
            kv = changes.get("kv_mode", "dense"), changes.get("kv_preset", "")
            self.model = Reference(tiny_config(hca_ratio=16, **V4), 2).model(*kv, drafts=changes.get("drafts", 0) > 0)
        else:
            write_model(folder, seed=8, **(SLIDING if mode == "window" else {}))
            self.model = load_model(config_for(folder, **changes))
        self.config = config_for(folder, **{**SETTINGS, **changes})
        self.undisturbed = Harness(self.model, self.config).run(*requests())

    def lives(self, patch: pytest.MonkeyPatch, **changes: Any) -> Lives:
        num_pages = changes.pop("num_pages", 64)
        return Lives(self.model, replace(self.config, **changes), patch, num_pages=num_pages)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    made: dict[str, Served] = {}

    def get(mode: str) -> Served:
        if mode not in made:
            made[mode] = Served(mode, tmp_path_factory.mktemp("model"))
        return made[mode]

    return get


# --- anywhere in a step ---


@pytest.mark.parametrize(
    ("mode", "seed"), [(mode, seed) for mode in MODES for seed in range(2 if mode == "turboquant" else 1)]
)
def test_many_deaths_change_no_token(
    served: Callable[[str], Served], mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, rng = served(mode), random.Random(seed)
    lives = s.lives(monkeypatch)
    lives.points.kill = lambda number, name: rng.random() < 0.02
    tokens = lives.run(*requests())
    assert lives.num_lives > 5
    assert tokens == s.undisturbed, f"seed {seed}, killed at {lives.killed_at}"
    assert lives.num_lost_tokens == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_death_at_every_kind_of_point(
    served: Callable[[str], Served], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each once, at its n-th time. The points' names are those that an undisturbed run passes."""
    s = served(mode)
    with pytest.MonkeyPatch.context() as patch:
        quiet = s.lives(patch)
        assert quiet.run(*requests()) == s.undisturbed
    times = Counter(quiet.points.passed)
    rng = random.Random(len(times))
    left = {name: rng.randrange(1, 1 + min(count, 40)) for name, count in times.items()}
    lives = s.lives(monkeypatch)

    def kill(number: int, name: str) -> bool:
        left[name] = left.get(name, 0) - 1
        return left[name] == 0

    lives.points.kill = kill
    tokens = lives.run(*requests())
    assert tokens == s.undisturbed, f"killed at {lives.killed_at}"
    never = [name for name, count in left.items() if count > 0]
    assert len(lives.killed_at) > 20 and len(never) < 5, never


def test_a_death_before_anything_and_at_once_again(
    served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is committed, and the next worker dies while it adopts."""
    s = served("turboquant")
    lives = s.lives(monkeypatch)
    lives.points.kill = lambda number, name: name in ("after open", "before release") and number < 8
    assert lives.run(*requests()) == s.undisturbed
    assert lives.killed_at[:1] == ["after open"]


# --- what a sequence can be in the middle of ---


@pytest.mark.parametrize(
    ("mode", "seed"), [("dense", 0), ("turboquant", 0), ("turboquant", 1), ("window", 1), ("v4 turboquant, drafts", 1)]
)
def test_forks_and_truncates_cut_in_the_middle(
    served: Callable[[str], Served], mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child says what its parent says; what a truncate takes back is said again."""
    s, rng = served(mode), random.Random(seed)
    lives = s.lives(monkeypatch)
    lives.submit(*[r for r in requests() if r.request_id in ("short", "border")])
    inside = False
    lives.points.kill = lambda number, name: rng.random() < (0.15 if inside else 0.01)
    num_children = 0
    while len(lives.ends) < 2 + num_children:
        lives.step()
        inside = True
        parent = lives.running("short")
        if num_children < 2 and parent is not None and parent.num_emitted > 3 + 9 * num_children:
            num_children += lives.fork("short", f"child{num_children}")
        cut = lives.running("border")
        if cut is not None and cut.num_emitted > 4 and not cut.num_uncomputed > 1 and rng.random() < 0.3:
            lives.truncate("border", len(cut.token_ids) - rng.randrange(2, 4))
        inside = False
    for name, tokens in lives.said.items():
        expected = s.undisturbed["short" if name.startswith("child") else name]
        assert tokens == expected, f"{name}, seed {seed}, killed at {lives.killed_at}"
    lives.attachment.check_empty()


@pytest.mark.parametrize(("mode", "seed"), [("dense", 0), ("turboquant", 0), ("turboquant", 1), ("v4 window", 1)])
def test_prefix_hits_cut_in_the_middle(
    served: Callable[[str], Served], mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, rng = served(mode), random.Random(seed)
    first = [request("turn", prompt(1, 300), 5, reuse=pb.PREFIX_REUSE_EXACT)]
    said = Harness(s.model, s.config).run(*first)["turn"]
    more = [
        request(f"next{n}", [*first[0].prompt, *said[:-1], *prompt(n, 40)], 6, reuse=pb.PREFIX_REUSE_EXACT)
        for n in range(3)
    ]
    quiet = Harness(s.model, s.config)
    quiet.run(*first)
    expected = quiet.run(*more)
    cached = quiet.outputs["next0"][-1].usage
    assert cached is not None and cached.cached_prompt_tokens >= 256
    lives = s.lives(monkeypatch)
    lives.run(*first)
    lives.points.kill = lambda number, name: rng.random() < 0.05
    lives.run(*more)
    for name, tokens in expected.items():
        assert lives.said[name] == tokens, f"{name}, seed {seed}, killed at {lives.killed_at}"


@pytest.mark.parametrize(("mode", "seed"), [("dense", 0), ("turboquant", 1)])
def test_growing_and_dropping_cut_in_the_middle(
    served: Callable[[str], Served], mode: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission "recompute": a sequence moves from slot to slot as it grows, and is dropped for want of pages."""
    s, rng = served(mode), random.Random(seed)
    asked = [request(f"r{n}", prompt(n, 120), 290) for n in range(2)]
    quiet = Harness(s.model, replace(s.config, admission="recompute"), num_pages=6)
    expected = quiet.run(*asked)
    assert quiet.engine.load().sequences_recomputed or mode != "dense"
    lives = s.lives(monkeypatch, admission="recompute", num_pages=6)
    lives.points.kill = lambda number, name: rng.random() < (0.2 if "fork" in name or "copy" in name else 0.004)
    assert lives.run(*asked) == expected, f"seed {seed}, killed at {lives.killed_at}"


@pytest.mark.parametrize("mode", ["v4 dense", "v4 window"])
@pytest.mark.parametrize("nth", [1, 4])
def test_a_tail_that_was_being_overwritten_is_brought_back(
    served: Callable[[str], Served], mode: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk laps the rings of pending rows, and its worker dies in the middle of that."""
    s = served(mode)
    lives = s.lives(monkeypatch)
    times = Counter[str]()

    def kill(number: int, name: str) -> bool:
        # Not in a first chunk: there is nothing before it that could be lost.
        saved = name == "after mark_saved" and max(map(lives.attachment.control.committed, range(4))) > 0
        times[name] += saved or times["after mark_saved"] > 0
        return name == "after _to_ring" and times[name] == nth

    lives.points.kill = kill
    asked = requests()[:2]
    assert lives.run(*asked) == {r.request_id: s.undisturbed[r.request_id] for r in asked}
    assert lives.killed_at == ["after _to_ring"] and lives.num_lost_tokens == 0


# --- what has ended ---


LASTING = worker_pb2.Resumable(grace_ms=60_000, request_digest=b"d")


def test_an_answer_that_its_caller_lacks_outlives_its_worker(
    served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    s = served("turboquant")
    lives = s.lives(monkeypatch)
    lives.submit(replace(request("r", prompt(1, 200), 4), resumable=LASTING))
    last = 2 + MAX_ADOPTIONS  # however many take it over: what only waits ends no worker
    for life in range(1 + last):
        while "r" not in lives.ends:
            lives.step()
        end = lives.ends.pop("r")
        assert (end.finish_reason, len(lives.said["r"])) == (pb.FINISH_REASON_LENGTH, 4)
        assert lives.attachment.control.live_slots() != []
        if life < last:
            lives._next_life()
    lives.engine.let_go("somebody else")
    lives.engine.let_go(end.owner)
    lives.step()
    lives.attachment.check_empty()


def test_what_has_ended_makes_room_for_what_runs(served: Callable[[str], Served]) -> None:
    """Slots, and pages, of answers that nobody has fetched: the oldest goes first."""
    s = served("turboquant")
    asked = [replace(request(f"r{n}", prompt(n, 700), 4), resumable=LASTING, owner=f"o{n}") for n in range(4)]
    few_slots = Harness(s.model, replace(s.config, max_running=2))
    few_pages = Harness(s.model, s.config, num_pages=9)  # for two
    for harness in (few_slots, few_pages):
        for r in asked:
            harness.engine.submit(r)
        while harness.engine.load().num_running + harness.engine.load().num_waiting:
            harness.step()
        control = harness.attachment.control
        left = {control.request_id(slot) for slot in control.live_slots()}
        assert "r3" in left and "r0" not in left and 1 <= len(left) <= 2
        for r in asked:
            harness.engine.let_go(r.owner)
        harness.step()
        harness.attachment.check_empty()


# --- what is not gone on with ---


def held(model: Model, **changes: Any) -> Adopted:
    asked = request("r", [5, 6, 7], 9)
    made = Adopted(
        slot=3,
        request_id="r",
        tenant_salt="",
        num_prompt_tokens=3,
        token_ids=[5, 6, 7, 8],
        num_committed=3,
        max_tokens=12,
        frozen_request=asked.frozen(),
        pages={},
        bases={},
        tail_slots={},
        prefix_exact=True,
        num_cached=0,
        intact=True,
    )
    return replace(made, **changes)


def test_slots_that_nobody_can_go_on_with_are_given_back(served: Callable[[str], Served]) -> None:
    model = served("dense").model
    asked = request("r", [5, 6, 7], 9)
    for changes in (
        {"frozen_request": b""},
        {"frozen_request": b"\xff\xff\xff"},
        {"frozen_request": asked.to_proto().SerializeToString()},  # as an earlier version froze it
        {"frozen_request": replace(asked, request_id="s").frozen()},
        {"tenant_salt": "another"},
        {"token_ids": [5, 6], "num_committed": 1},
        {"token_ids": [5, model.info.vocab_size, 7, 8]},
    ):
        adoption = plan_adoption([held(model, **changes)], model.info, now_ns=1, not_of="warm", most=4)
        assert (adoption.sequences, adoption.released, adoption.num_lost_tokens) == ([], [3], 0), changes
    warm = plan_adoption([held(model)], model.info, now_ns=1, not_of="r", most=4)
    assert (warm.sequences, warm.released) == ([], [3])


def test_of_two_slots_of_one_request_the_further_one_goes_on(served: Callable[[str], Served]) -> None:
    model = served("dense").model
    slots = [held(model), held(model, slot=4, num_committed=0, max_tokens=99, bases={"full": 128}, intact=False)]
    for found in (slots, slots[::-1]):
        adoption = plan_adoption(found, model.info, now_ns=1, not_of="", most=4)
        ((sequence, kept),) = adoption.going_on
        assert (kept.slot, sequence.num_computed, sequence.num_emitted, adoption.released) == (3, 3, 1, [4])
    void = plan_adoption([slots[1]], model.info, now_ns=1, not_of="", most=4)
    assert [s.token_ids for s in void.again] == [[5, 6, 7, 8]] and void.num_lost_tokens == 0
    void = plan_adoption([held(model, intact=False)], model.info, now_ns=1, not_of="", most=4)
    assert void.num_lost_tokens == 3 and void.again[0].num_dropped == 1


def test_what_no_worker_survives_is_given_up(served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch) -> None:
    s = served("dense")
    lives = s.lives(monkeypatch)
    lives.points.kill = lambda number, name: name == "after run"
    lives.submit(request("deadly", prompt(1, 20), 5))
    for _ in range(1 + MAX_ADOPTIONS):
        assert not lives.step()
    assert lives.attachment.control.live_slots() == [], "submitted again by its router, it waits"
    lives.points.kill = lambda number, name: False
    assert len(lives.run()["deadly"]) == 5


def test_more_sequences_than_a_step_holds_wait(served: Callable[[str], Served]) -> None:
    model = served("dense").model
    found = [
        held(model, slot=n, request_id=f"r{n}", num_committed=n, frozen_request=request(f"r{n}", [5, 6, 7], 9).frozen())
        for n in (1, 2, 3)
    ]
    adoption = plan_adoption(found, model.info, now_ns=1, not_of="", most=2)
    assert [kept.slot for _, kept in adoption.going_on] == [3, 2]
    assert adoption.released == [1] and adoption.num_lost_tokens == 1
