"""A store that dies around any call, and the next one that rebuilds its tables from the control block: the worker goes
on with the same tokens, whether its call was done or not.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.answers import NewPage
from kvstore.device import Device
from protos.errors import KvStoreLost
from tests.unit.fake_kv import FakeAttachment
from tests.unit.test_adoption import MODES, SETTINGS, SLIDING, prompt, requests
from tests.unit.tiny import Harness, config_for, request, write_model
from worker import lasting
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.lasting import MAX_LOSSES, LastingAttachment
from worker.sequence import Output, Request, StepResult
from worker.weights import Model, load_model

CALLS = ("open", "reserve", "seal", "fork", "checkpoint", "release")


class LosingAttachment(FakeAttachment):
    """An attachment whose store dies before a call or behind it, as ``loses`` says, and whose next store takes the
    memory over from its descriptors, with nothing but the control block to go by.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loses: Callable[[str], bool] = lambda point: False
        self.lost: str | None = None
        self.num_stores = 1
        self.refuses = False
        self._repeated: set[int] = set()
        for name in CALLS:
            setattr(self, name, self._losing(name, getattr(self, name)))

    def _losing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def losing(*args: Any, **kwargs: Any) -> Any:
            self._look(f"before {name}")
            answer = call(*args, **kwargs)
            self._look(f"after {name}")
            return answer

        return losing

    def _look(self, point: str) -> None:
        if self.lost is None and self.loses(point):
            self.lost = point
        if self.lost is not None:
            raise KvStoreLost(f"no kvstore: {self.lost}")

    def reserve(self, wanted: Seq[tuple[int, int, int]]) -> dict[int, dict[str, list[NewPage]]]:
        handed: dict[int, dict[str, list[NewPage]]] = {}
        for repeat in (False, True):
            some = [w for w in wanted if (w[0] in self._repeated) == repeat]
            handed |= self.device.reserve(some, repeat=repeat) if some else {}
        self._repeated.difference_update(slot for slot, *_ in wanted)
        return handed

    def reattach(self, timeout_s: float) -> None:
        if self.refuses or timeout_s <= 0:
            raise KvStoreLost("no other one came")
        _, fds = self.device.manifest()
        before, self.device = self.device, Device.take_over(self.device.spec, [os.dup(fd) for fd in fds])
        self._dead = before  # its mappings are ours
        self.table = self.device.table
        self.epoch += 1
        self.adopted = tuple(self.device.adopt(self.epoch, living=True))
        self._repeated = {held.slot for held in self.adopted}
        self.num_stores += 1
        self.lost = None


class Scene:
    def __init__(self, model: Model, config: WorkerConfig, *, num_pages: int = 64, socket: Path = Path("none")) -> None:
        self.attachment = LosingAttachment(
            model.geometry,
            num_pages=num_pages,
            max_sequences=config.num_slots,
            max_sequence_tokens=model.info.max_sequence_tokens,
            checkpoint_slots=config.num_checkpoints if model.geometry.tail_bytes else 0,
        )
        self.told: list[bool] = []
        self.lasting = LastingAttachment(self.attachment, socket, 60.0, self.told.append)  # type: ignore[arg-type]
        self.outputs: dict[str, list[Output]] = {}
        self.engine = Engine(config, model, self.lasting, self._take)

    def _take(self, result: StepResult) -> None:
        for output in result.outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def step(self) -> None:
        with torch.inference_mode():
            self.engine.step()

    def run(self, *asked: Request) -> dict[str, list[int]]:
        for r in asked:
            self.engine.submit(r)
        while self.engine.load().num_running + self.engine.load().num_waiting:
            self.step()
        self.attachment.check_empty()
        assert self.attachment.verify() == []
        return {name: [t for o in outputs for t in o.token_ids] for name, outputs in self.outputs.items()}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Model, WorkerConfig]]:
    def make(mode: str, **changes: Any) -> tuple[Model, WorkerConfig]:
        folder = tmp_path_factory.mktemp("model")
        write_model(folder, seed=8, **(SLIDING if mode == "window" else {}))
        return load_model(config_for(folder, **MODES[mode])), config_for(
            folder, **{**SETTINGS, **MODES[mode], **changes}
        )

    return make


@pytest.mark.parametrize("mode", [mode for mode in MODES if not mode.startswith("v4")])
def test_stores_that_die_around_calls_change_no_token(
    served: Callable[..., tuple[Model, WorkerConfig]], mode: str
) -> None:
    model, config = served(mode)
    expected = Harness(model, config).run(*requests())
    for seed in range(3):
        scene, rng = Scene(model, config), random.Random(seed)
        scene.attachment.loses = lambda point, rng=rng: rng.random() < 0.15  # type: ignore[misc]
        assert scene.run(*requests()) == expected, f"seed {seed}"
        assert scene.attachment.num_stores > 2
        assert scene.told == [True, False] * (len(scene.told) // 2) and not scene.engine.load().without_store


def test_a_store_that_dies_while_sequences_grow(served: Callable[..., tuple[Model, WorkerConfig]]) -> None:
    model, config = served("turboquant", admission="recompute")
    asked = [request(f"r{n}", prompt(n, 120), 290) for n in range(2)]
    expected = Harness(model, config, num_pages=6).run(*asked)
    scene, rng = Scene(model, config, num_pages=6), random.Random(1)
    scene.attachment.loses = lambda point: rng.random() < (0.2 if "fork" in point else 0.05)
    assert scene.run(*asked) == expected


def test_steps_go_on_without_a_store_and_take_the_next_one_as_it_comes(
    served: Callable[..., tuple[Model, WorkerConfig]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting, "LOOK_S", 0.0)
    model, config = served("dense")
    path = tmp_path / "s"
    scene = Scene(model, config, socket=path)
    scene.engine.submit(request("r", [5, 6], 40))
    scene.step()
    scene.attachment.lost = "it died"
    for _ in range(10):
        scene.step()
    assert len(scene.outputs["r"]) >= 10 and scene.engine.load().without_store and scene.told == [True]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        scene.step()
    assert scene.attachment.num_stores == 2 and not scene.engine.load().without_store and scene.told == [True, False]


def test_patience_ends(served: Callable[..., tuple[Model, WorkerConfig]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lasting, "LOOK_S", 0.0)
    model, config = served("dense")
    scene = Scene(model, config)
    now = 0.0
    monkeypatch.setattr("worker.lasting.time.monotonic", lambda: now)
    scene.attachment.lost = "it died"
    scene.lasting.look_after()
    now = 61.0
    with pytest.raises(KvStoreLost, match="no other one came"):
        scene.lasting.look_after()


def test_a_call_that_ends_every_store_is_given_up(served: Callable[..., tuple[Model, WorkerConfig]]) -> None:
    model, config = served("dense")
    scene = Scene(model, config)
    scene.attachment.loses = lambda point: point == "before open"
    scene.engine.submit(request("r", [5, 6], 4))
    with pytest.raises(KvStoreLost, match="one kvstore after the other"):
        scene.step()
    assert scene.attachment.num_stores == 1 + MAX_LOSSES


@pytest.mark.parametrize("point", ["between steps", "before seal"])
def test_what_a_new_store_finds_damaged_is_computed_again(
    served: Callable[..., tuple[Model, WorkerConfig]], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lasting, "LOOK_S", 0.0)
    monkeypatch.setattr(lasting, "_listens", lambda path: True)
    model, config = served("dense")
    asked = [request(f"r{n}", prompt(n, 200), 120) for n in range(2)]
    expected = Harness(model, config).run(*asked)
    scene = Scene(model, config)
    for each in asked:
        scene.engine.submit(each)
    while len(scene.outputs.get("r1", ())) < 5:
        scene.step()
    slot = scene.engine._running[0].slot
    (group,) = scene.attachment.arenas
    page = scene.attachment.control.sequence_pages(slot, group)[0]
    scene.attachment.arenas[group].page(page)[3] ^= 1
    if point == "between steps":
        scene.attachment.lost = "it died"
    else:
        scene.attachment.loses = lambda now: now == point and scene.attachment.num_stores == 1
    assert scene.run() == expected
    assert scene.attachment.num_stores == 2 and not scene.lasting.void
    assert scene.engine._counters.sequences_recomputed == 1
