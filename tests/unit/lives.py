"""One memory and one engine after the other over it: an engine is dropped in the middle of a step, as if its process
had been killed there, and the next one adopts what it left.

A kill is an exception at a *point*: before or after a call to the store, a write to the control block, a move of rows,
a forward pass, an output. What the dying engine held in its own memory is gone; the store's tables stay.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.unit.fake_kv import FakeAttachment
from worker import kv_moves, model_runner
from worker.config import WorkerConfig
from worker.engine import Engine
from worker.scheduler import Work
from worker.sequence import Output, Request, Sequence, StepResult
from worker.weights import Model

CALLS = ("open", "reserve", "seal", "truncate", "fork", "checkpoint", "release")
WRITES = ("append_tokens", "commit", "mark_packed", "mark_saved", "clear_saved", "mark_copied")
MOVES = ("pack", "fill_tails", "copy_pages", "copy_tails", "refill_tails", "_to_ring")


class Killed(BaseException):
    """The process ended here."""


class Points:
    """Counts the points that are passed; kills at those asked for."""

    def __init__(self) -> None:
        self.passed: list[str] = []  # names, in order
        self.kill: Callable[[int, str], bool] = lambda number, name: False
        self.armed = True

    def at(self, name: str) -> None:
        if not self.armed:
            return
        self.passed.append(name)
        if self.kill(len(self.passed) - 1, name):
            raise Killed(name)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.at(f"before {name}")
            result = call(*args, **kwargs)
            self.at(f"after {name}")
            return result

        return watched


class OutlivingAttachment(FakeAttachment):
    """A store that keeps what a dead worker left, and hands it to the next."""

    def adopt(self) -> None:
        """The next worker attaches."""
        self.epoch += 1
        self.adopted = tuple(self.device.adopt(self.epoch, living=False))


class Lives:
    """Engines over one memory, and what their callers have been told.

    Sequences that a life did not get to, and those that the next did not find, are submitted again with the tokens that
    were said, as a router does.
    """

    def __init__(
        self, model: Model, config: WorkerConfig, patch: pytest.MonkeyPatch, *, num_pages: int = 64, seed: int = 0
    ) -> None:
        self.points = Points()
        self.said: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self.num_lives = 0
        self.num_lost_tokens = 0  # committed, and computed again
        self.killed_at: list[str] = []
        self._requests: dict[str, Request] = {}
        self._cut: set[str] = set()  # those that were ever truncated
        self._committed: dict[str, int] = {}  # of those adopted: nothing below is computed again
        self._model, self._config = model, config
        self.attachment = OutlivingAttachment(
            model.geometry,
            num_pages=num_pages,
            max_sequences=config.num_slots,
            max_sequence_tokens=model.info.max_sequence_tokens,
            checkpoint_slots=config.num_checkpoints if model.geometry.tail_bytes else 0,
            seed=seed,
        )
        for name in CALLS:
            patch.setattr(self.attachment, name, self.points.around(name, getattr(self.attachment, name)))
        for name in WRITES:
            patch.setattr(
                self.attachment.control, name, self.points.around(name, getattr(self.attachment.control, name))
            )
        for name in MOVES:
            patch.setattr(kv_moves, name, self.points.around(name, getattr(kv_moves, name)))
        self.engine = self._born()

    def _born(self) -> Engine:
        self.num_lives += 1
        self.points.armed = False
        with pytest.MonkeyPatch.context() as patch:
            if self.num_lives > 1:  # proved once
                patch.setattr(model_runner, "check_tiles", lambda network: None)
            engine = Engine(self._config, self._model, self.attachment, self._take)
        self.points.armed = True
        run = engine._runner.run

        def watched(work: Seq[Work]) -> Any:
            for w in work:
                least = self._committed.get(w.sequence.request.request_id, 0)
                assert w.sequence.num_computed >= least, f"tokens from {w.sequence.num_computed} on, {least} were done"
            step = run(work)
            self.points.at("after run")
            return step

        engine._runner.run = watched  # type: ignore[method-assign]
        return engine

    def _take(self, result: StepResult) -> None:
        self.points.at("before emit")
        for output in result.outputs:
            said = self.said.setdefault(output.request_id, [])
            assert output.error is None, output.error
            assert output.token_offset == len(said), f"offset {output.token_offset} behind {len(said)} tokens"
            said += output.token_ids
            if output.finish_reason:
                assert output.request_id not in self.ends
                self.ends[output.request_id] = output
        if result.outputs:
            self.points.at("after emit")

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self._requests[request.request_id] = request
            self.said.setdefault(request.request_id, [])
            self.engine.submit(request)

    def step(self) -> bool:
        """Whether the engine lived through it; else the next one has taken over."""
        try:
            with torch.inference_mode():
                self.engine.step()
            return True
        except Killed as killed:
            self.killed_at.append(str(killed))
            self._next_life()
            return False

    def _next_life(self) -> None:
        """Dying while it adopts is dying, too."""
        while True:
            assert self.attachment.verify() == []  # tables and control block agree, between any two calls
            self.attachment.adopt()
            self.engine = self._born()
            try:
                with torch.inference_mode():
                    adopted = self.engine.adopt()
                break
            except Killed as killed:
                self.killed_at.append(f"{killed} while adopting")
        self._committed = {}
        self.num_lost_tokens += self.engine.load().tokens_recomputed_after_adoption
        for sequence in adopted:
            request_id = sequence.request.request_id
            emitted = sequence.token_ids[sequence.num_prompt :]
            said = self.said[request_id]
            if request_id in self._cut:  # a truncate cut off twice: its last token is logged only behind it
                said = said[: len(emitted)]
            assert emitted[: len(said)] == said, "said and not logged, or logged otherwise"
            assert sequence.request == replace(
                self._requests[request_id], emitted=(), owner=sequence.request.owner, prompt=sequence.request.prompt
            )
            assert sequence.request.prompt == self._requests[request_id].prompt
            self.said[request_id] = list(emitted)
            self._committed[request_id] = min(sequence.num_computed, len(sequence.token_ids) - 1)
        left = [r for r in self._requests.values() if r.request_id not in self.ends]
        found = {sequence.request.request_id for sequence in adopted}
        for request in left:
            if request.request_id not in found:
                self.engine.submit(replace(request, emitted=tuple(self.said[request.request_id])))

    def running(self, request_id: str) -> Sequence | None:
        running = self.engine._running
        return next((sequence for sequence in running if sequence.request.request_id == request_id), None)

    def fork(self, parent_id: str, child_id: str) -> bool:
        """Whether there is a child now. One that a dying engine left half made is adopted, or asked for again."""
        parent = self.running(parent_id)
        assert parent is not None
        child = replace(self._requests[parent_id], request_id=child_id)
        emitted = self.said[parent_id]
        self._requests[child_id], self.said[child_id] = child, list(emitted)
        try:
            with torch.inference_mode():
                if self.engine.fork(parent, child_id) is not None:
                    return True
        except Killed as killed:
            self.killed_at.append(f"{killed} in a fork")
            control = self.attachment.control
            for slot in control.live_slots():
                if control.request_id(slot) == child_id:  # its caller has not heard of it: what is logged counts
                    self.said[child_id] = control.token_log(slot)[parent.num_prompt :]
            self._next_life()
            return True
        del self._requests[child_id], self.said[child_id]
        return False

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Takes a sequence back to so many tokens, which it then says again; its caller forgets them."""
        cut = self.running(request_id)
        assert cut is not None
        self._committed.pop(request_id, None)
        self._cut.add(request_id)
        num_said = num_tokens + 1 - cut.num_prompt
        self.said[request_id], before = self.said[request_id][:num_said], self.said[request_id]
        try:
            with torch.inference_mode():
                self.engine.truncate(cut, num_tokens)
        except Killed as killed:
            self.killed_at.append(f"{killed} in a truncate")
            logged = len(self.attachment.control.token_log(cut.slot)) - cut.num_prompt
            self.said[request_id] = before if logged > num_said else self.said[request_id][:logged]
            self._next_life()

    def run(self, *requests: Request, limit: int = 3000) -> dict[str, list[int]]:
        """Until all have ended. Nothing is held then."""
        self.submit(*requests)
        for _ in range(limit):
            self.step()
            if len(self.ends) == len(self._requests):
                self.attachment.check_empty()
                assert self.attachment.verify() == []
                return self.said
        raise AssertionError(f"no end: {set(self._requests) - set(self.ends)}")
