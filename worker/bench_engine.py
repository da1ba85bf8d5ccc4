"""An engine over KV memory of its process alone, stepped by hand and watched, for ``tailpack bench engine``."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from types import TracebackType

import torch

from kvstore.local import LocalAttachment
from protos import types_pb2
from protos.errors import InternalError, TailpackError
from worker.config import WorkerConfig
from worker.device_memory import DeviceMemory
from worker.due import worst_pages
from worker.engine import Engine
from worker.gpu import memory_of, store_name, torch_device
from worker.kv_view import KvCounters
from worker.scheduler import Work
from worker.sequence import Load, Request, Sampling, StepResult, StopConditions
from worker.tracing import NoSpans, NoStep
from worker.weights import Model

MAX_IDLE_STEPS = 1000
"""Steps in a row without a token: a prompt's chunks are fewer, so the engine stands still."""


class Phases(NoSpans):
    """Nanoseconds of the engine's steps by phase, as it marks them."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = defaultdict(int)
        self.num_steps = 0

    def step(self, work: Seq[Work], counters: KvCounters) -> NoStep:
        self.num_steps += 1
        return _Phase(self.ns)


class _Phase(NoStep):
    def __init__(self, ns: dict[str, int]) -> None:
        self._ns, self._began_ns = ns, time.perf_counter_ns()

    def mark(self, phase: str) -> None:
        now_ns = time.perf_counter_ns()
        self._ns[phase] += now_ns - self._began_ns
        self._began_ns = now_ns

    def end(self) -> None:
        self.mark("commit")


class BenchEngine:
    """One engine and its memory. A context manager.

    Args:
        model: its network may be shared with other engines; its geometry is this config's.
        num_tokens: of the longest sequence, prompt and output together.

    Raises what ``Engine`` and ``LocalAttachment`` raise.
    """

    def __init__(self, config: WorkerConfig, model: Model, num_tokens: int) -> None:
        self.config, self.model = config, model
        self.device = torch_device(config.device)
        name = store_name(config.device)
        worst = max(worst_pages(model.geometry, group, num_tokens) for group in model.geometry.groups)
        self.attachment = LocalAttachment(
            model.geometry,
            num_pages=max(1, config.max_running * worst),
            max_sequences=config.num_slots,
            max_sequence_tokens=model.info.max_sequence_tokens,
            checkpoint_slots=config.num_checkpoints if model.geometry.tail_bytes else 0,
            device=name,
            device_memory=DeviceMemory(memory_of(name)) if config.on_gpu else None,
        )
        self.phases = Phases()
        self.num_emitted = self.num_ended = 0
        self._live: set[str] = set()
        self.failures: list[TailpackError] = []
        began = time.perf_counter()
        try:
            self.engine = Engine(config, model, self.attachment, self._take, spans=self.phases)
        except BaseException:
            self.attachment.close()
            raise
        self.start_s = time.perf_counter() - began

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.attachment.close()

    def _take(self, result: StepResult) -> None:
        for output in result.outputs:
            self.num_emitted += len(output.token_ids)
            if output.finish_reason:
                self.num_ended += 1
                self._live.discard(output.request_id)
            if output.error is not None:
                self.failures.append(output.error)

    def submit(self, request_id: str, prompt: Seq[int], max_tokens: int, sampling: Sampling | None = None) -> None:
        """No prefix is reused, and no token ends a sequence before its length does."""
        stop = StopConditions(max_tokens, ignore_eos=True)
        request = Request(
            request_id, "", tuple(prompt), sampling or Sampling(), stop, reuse=types_pb2.PREFIX_REUSE_NONE
        )
        self._live.add(request_id)
        self.engine.submit(request)

    def end(self) -> None:
        """Ends all sequences."""
        for request_id in sorted(self._live):
            self.engine.abort(request_id)
        self.run_out()

    def step(self) -> None:
        """Raises what the engine raises, or what became of a sequence."""
        with torch.inference_mode():
            self.engine.step()
        if self.failures:
            raise self.failures[0]

    def run_until(self, num_emitted: int) -> None:
        """Steps until so many tokens have been emitted in all.

        Raises:
            InternalError: the engine emits no more.
        """
        idle, before = 0, self.num_emitted
        while self.num_emitted < num_emitted:
            self.step()
            idle = idle + 1 if self.num_emitted == before else 0
            before = self.num_emitted
            if idle > MAX_IDLE_STEPS:
                raise InternalError("the engine stands still", given=f"{before} tokens", allowed=num_emitted)

    def run_out(self) -> None:
        """Steps until nothing runs or waits."""
        while (load := self.load()).num_running or load.num_waiting:
            self.step()

    def load(self) -> Load:
        return self.engine.load()

    def synchronize(self) -> None:
        if self.config.on_gpu:
            torch.cuda.synchronize(self.device)
