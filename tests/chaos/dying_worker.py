"""A worker, or any other process of ours, that kills itself at a named place: for tests of deaths in each phase.

``python -m tests.chaos.dying_worker WHERE ARGUMENTS...`` runs ``tailpack ARGUMENTS`` with one function wrapped, so that
the process sends itself SIGKILL before or after one of its calls. WHERE is "before:MODULE:FUNCTION:N" or
"after:MODULE:FUNCTION:N", as "before:worker.sequence_kv:SequenceKv.publish:3"; N counts from 1. With "fail" instead of
them the call raises, as one does whose GPU has failed, and so does from then on all that waits for the GPU. Behind
"rollback:N+" a worker also takes what runs back by some tokens behind its N-th commit, which nothing in the product
asks for by itself.
Nothing in the product knows of any of it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

ROLLBACK_TOKENS = 3


@dataclass(frozen=True)
class Death:
    """At which call of which function a process dies. ``signum`` SIGSTOP: it stands still instead."""

    when: str  # "before", "after", "fail"
    module: str
    function: str  # "Class.method" or "function"
    call: int
    signum: int = signal.SIGKILL
    rollback: int = 0  # at which commit; 0: never

    @staticmethod
    def parse(text: str) -> Death:
        first, _, rest = text.partition("+")
        if rest:
            return replace(Death.parse(rest), rollback=int(first.removeprefix("rollback:")))
        when, module, function, call, *stop = text.split(":")
        if when not in ("before", "after", "fail") or int(call) < 1 or stop not in ([], ["stop"]):
            raise ValueError(f"not before|after|fail:MODULE:FUNCTION:N[:stop]: {text!r}")
        return Death(when, module, function, int(call), signal.SIGSTOP if stop else signal.SIGKILL)

    def __str__(self) -> str:
        stop = ":stop" if self.signum == signal.SIGSTOP else ""
        rollback = f"rollback:{self.rollback}+" if self.rollback else ""
        return f"{rollback}{self.when}:{self.module}:{self.function}:{self.call}{stop}"

    def arm(self) -> None:
        """Wraps the function in this process. Raises AttributeError where there is none: a renamed one must not pass
        for one that is never reached.
        """
        owner: Any = importlib.import_module(self.module)
        *outer, name = self.function.split(".")
        for each in outer:
            owner = getattr(owner, each)
        original = inspect.getattr_static(owner, name)
        if isinstance(original, staticmethod | classmethod | property):
            raise AttributeError(f"{self.function} is a {type(original).__name__}")
        setattr(owner, name, self._wrapped(original))
        if self.rollback:
            _arm_rollback(self.rollback, min(self.call, 3))

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        calls = 0

        def die() -> None:
            os.kill(os.getpid(), self.signum)

        @functools.wraps(original)
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            mine = calls == self.call
            if mine and self.when == "before":
                die()
            if mine and self.when == "fail":
                _fail_device()
            result = original(*arguments, **named)
            if mine and self.when == "after":
                die()
            return result

        @functools.wraps(original)
        async def awaited(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            mine = calls == self.call
            if mine and self.when == "before":
                die()
            result = await original(*arguments, **named)
            if mine and self.when == "after":
                die()
            return result

        return awaited if inspect.iscoroutinefunction(original) else wrapped


def _fail_device() -> None:
    """On a GPU an assertion of a kernel, behind which CUDA answers nothing any more; elsewhere what comes of that."""
    import torch

    from protos.errors import PreconditionFailed
    from worker.kv_view import KvView

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.zeros(1, device="cuda")[torch.full((1,), 1 << 30, device="cuda")]
        return  # whoever waits for it hears of it

    def settle(view: KvView) -> None:
        raise PreconditionFailed("CUDA's cuCtxSynchronize failed", reason="CUDA_ERROR_ILLEGAL_ADDRESS")

    setattr(KvView, "settle", settle)  # noqa: B010 - not a method's type
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _arm_rollback(at: int, least: int) -> None:
    """All that has said ``ROLLBACK_TOKENS`` and more goes back by so many, once, behind the ``at``-th commit or a later
    one that finds ``least`` of them: the process dies in the last one's, before any says its tokens again.
    """
    from worker.engine import Engine

    commit: Any = Engine._commit
    commits, done = 0, False

    @functools.wraps(commit)
    def wrapped(engine: Any, *arguments: Any) -> Any:
        nonlocal commits, done
        result = commit(engine, *arguments)
        commits += 1
        back = [sequence for sequence in engine._running if sequence.num_emitted > ROLLBACK_TOKENS]
        if not done and commits >= at and len(back) >= least:
            done = True
            for sequence in back:
                engine.truncate(sequence, sequence.num_computed - ROLLBACK_TOKENS)
        return result

    setattr(Engine, "_commit", wrapped)  # noqa: B010 - not a method's type


if __name__ == "__main__":
    from protos.cli import main

    Death.parse(sys.argv[1]).arm()
    main(sys.argv[2:])
