"""A device that fails under a living engine: nobody is told an error, and the next engine goes on with all sequences
but the one that breaks every device.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protos.errors import PreconditionFailed
from tests.unit.lives import OutlivingAttachment
from tests.unit.tiny import Harness, config_for, request, write_model
from worker import model_runner
from worker.engine import Engine
from worker.scheduler import Work
from worker.sequence import Request, StepResult
from worker.sequence_kv import MAX_FAILURES
from worker.weights import Model, load_model

HANG_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_model(config_for(write_model(tmp_path_factory.mktemp("model"), seed=8)))


class Device:
    """Of all lives: fails in every step that ``breaks`` says, and answers nothing any more in that life."""

    def __init__(self, model: Model, patch: pytest.MonkeyPatch) -> None:
        self.config = replace(config_for(Path("none")), deterministic=True, max_running=4)
        self.model = model
        self.memory = OutlivingAttachment(
            model.geometry, num_pages=64, max_sequences=self.config.num_slots, max_sequence_tokens=1024
        )
        self.said: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.steps: list[list[str]] = []  # of the newest life
        self.pages_of_a_gpu: Any = None  # not None: the store cannot read them
        self._patch = patch

    def breaks(self, work: Sequence[Work]) -> bool:
        return False

    def life(self, *submitted: Request) -> Engine:
        """Until the device has failed, or all is said. ``submitted`` comes besides what is adopted."""
        self.memory.adopt()
        self.steps = []
        ended = threading.Event()
        self._patch.setattr(model_runner, "check_tiles", lambda network: None)
        engine = Engine(self.config, self.model, self.memory, self._take, on_failed=lambda why: ended.set())
        run, failed = engine._runner.run, threading.Event()

        def watched(work: Sequence[Work]) -> Any:
            self.steps.append([w.sequence.request.request_id for w in work])
            if self.breaks(work):
                failed.set()
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return run(work)

        def settle() -> None:
            if failed.is_set():
                raise PreconditionFailed("CUDA's cuCtxSynchronize failed", reason="CUDA_ERROR_ILLEGAL_ADDRESS")

        engine._runner.run = watched  # type: ignore[method-assign]
        engine._held.kv.settle = settle  # type: ignore[method-assign]
        on_gpu, engine._held._on_gpu = engine._held._on_gpu, self.pages_of_a_gpu
        adopted = engine.adopt()
        engine._held._on_gpu = on_gpu
        for sequence in adopted:
            self.said[sequence.request.request_id] = sequence.token_ids[sequence.num_prompt :]
        for each in submitted:
            engine.submit(each)
        asked = {each.request_id for each in (*submitted, *(sequence.request for sequence in adopted))}
        engine.start()
        waited = 0.0
        while not ended.wait(0.01) and not asked <= self.finished and waited < HANG_S:
            waited += 0.01
        engine.stop(HANG_S)
        return engine

    def _take(self, result: StepResult) -> None:
        for output in result.outputs:
            assert output.error is None, output.error
            said = self.said.setdefault(output.request_id, [])
            assert output.token_offset == len(said)
            said += output.token_ids
            if output.finish_reason:
                self.finished.add(output.request_id)


def asks() -> list[Request]:
    rng = random.Random(3)
    return [
        request(f"r{n}", [rng.randrange(3, 97) for _ in range(length)], 30) for n, length in enumerate((5, 130, 40))
    ]


@pytest.fixture(scope="module")
def undisturbed(model: Model) -> dict[str, list[int]]:
    return Harness(model, replace(config_for(Path("none")), deterministic=True, max_running=4)).run(*asks())


def test_sequences_are_left_as_they_are_and_go_on(
    model: Model, undisturbed: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(model, monkeypatch)
    device.breaks = lambda work: len(device.steps) == 12  # type: ignore[method-assign]
    engine = device.life(*asks())
    assert engine.device_failed and engine.failed.is_set()
    assert engine.failure is not None and engine.failure.reason == "DEVICE_FAILED"
    control = device.memory.control
    assert len(control.live_slots()) == 3 and not device.finished, "nobody was told an end"
    assert [control.failures(slot) for slot in control.live_slots()] == [1, 1, 1]
    device.breaks = lambda work: False  # type: ignore[method-assign]
    engine = device.life()
    assert not engine.device_failed
    assert device.said == undisturbed
    assert [len(step) for step in device.steps[:4]] == [1, 1, 1, 3], "each alone first, then all"
    assert {request_id for step in device.steps[:3] for request_id in step} == {"r0", "r1", "r2"}
    assert engine.load().tokens_recomputed_after_adoption == 0
    device.memory.check_empty()


def test_pages_of_a_gpu_are_compared_before_anybody_goes_on_from_them(
    model: Model, undisturbed: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(model, monkeypatch)
    device.breaks = lambda work: len(device.steps) == 12  # type: ignore[method-assign]
    device.life(*asks())
    (name,) = device.memory.arenas
    entries = device.memory.control.pages[name]
    (page,) = (number for number in range(len(entries)) if entries["checksum"][number])  # of the prompt of 130 tokens
    device.memory.arenas[name].page(page)[7] ^= 1
    device.breaks = lambda work: False  # type: ignore[method-assign]
    device.pages_of_a_gpu = object()
    engine = device.life()
    assert device.said == undisturbed
    assert engine.load().tokens_recomputed_after_adoption > 130, "that one alone is computed again"
    assert engine.load().sequences_adopted == 3
    assert engine.load().prompt_tokens == 130
    assert device.memory.verify() == [], "what the index has is right"
    device.memory.check_empty()


@pytest.mark.parametrize("poison", ["r0", "r1", "r2"])
def test_what_breaks_every_device_is_found_out_and_takes_nobody_with_it(
    model: Model, undisturbed: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, poison: str
) -> None:
    device = Device(model, monkeypatch)

    def breaks(work: Sequence[Work]) -> bool:
        return any(w.sequence.request.request_id == poison and w.sequence.num_emitted == 4 for w in work)

    device.breaks = breaks  # type: ignore[method-assign]
    lives = [device.life(*asks())]
    while lives[-1].device_failed and len(lives) < 10:
        before = {each: len(device.said[each]) for each in device.said}
        lives.append(device.life())
        gained = {each for each in device.said if len(device.said[each]) > before[each]}
        if len(lives) > 2:  # in the second, those behind the culprit have not had their turn
            assert gained == {"r0", "r1", "r2"} - {poison}, "the others get on before the next failure"
    assert len(lives) == 1 + MAX_FAILURES
    assert device.finished == {"r0", "r1", "r2"} - {poison}
    assert {each: said for each, said in device.said.items() if each != poison} == {
        each: said for each, said in undisturbed.items() if each != poison
    }
    assert len(device.said[poison]) == 4
    device.memory.check_empty()


def test_a_broken_invariant_on_a_device_that_answers_ends_what_ran(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(model, monkeypatch)
    engine = Engine(device.config, model, device.memory, outputs := _Outputs())

    def run(work: Sequence[Work]) -> Any:
        raise RuntimeError("a bug")

    engine._runner.run = run  # type: ignore[method-assign]
    engine.submit(asks()[0])
    engine.start()
    assert engine.failed.wait(HANG_S)
    engine.stop(HANG_S)
    assert not engine.device_failed and engine.failure is not None and engine.failure.reason == "INTERNAL"
    assert [output.error is not None for output in outputs.all] == [True]
    device.memory.check_empty()


class _Outputs:
    def __init__(self) -> None:
        self.all: list[Any] = []

    def __call__(self, result: StepResult) -> None:
        self.all += result.outputs
