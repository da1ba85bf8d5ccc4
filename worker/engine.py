"""The engine: one thread that owns the compute and every sequence. ``Engine.step`` is the table of contents.

Other threads only leave things in the inbox: submissions, aborts, the news that the kvstore is gone. What they are told
comes back through ``emit``, once a step.

Errors: a bad request is answered and hurts nobody else. A broken invariant, an exception of the model included, stops
the engine: every sequence ends with the error, ``failed`` is set, and the process is expected to go. A device that
fails ends the process as a signal would: nobody is told anything, and the next worker goes on with all sequences.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace

import structlog
import torch

from kvstore.client import Truncated
from protos import types_pb2
from protos.errors import (
    AlreadyExists,
    CapacityError,
    InternalError,
    InvalidRequest,
    KvStoreLost,
    PreconditionFailed,
    TailpackError,
    WorkerLost,
)
from protos.page_hash import PAGE_TOKENS
from worker.adoption import plan_adoption
from worker.config import CAPTURED_CHUNK_TOKENS, WorkerConfig
from worker.decode_rows import CHECKED_ROWS
from worker.ended import Ended
from worker.gpu_kernels import naming_kernels
from worker.gpu_pages import GpuPages
from worker.kv_view import KvView
from worker.lasting import KvMemory
from worker.model_runner import ModelRunner, Slices, Step
from worker.models.deepseek_v4 import DeepseekV4
from worker.outputs import output_of, refusal_of
from worker.pace import Pace
from worker.sampler import Draw, Drawn, sample
from worker.scheduler import TimeBudget, Work, decodes, schedule
from worker.sequence import (
    Load,
    Output,
    Request,
    Sampling,
    Sequence,
    StepResult,
    StopConditions,
    finish_reason,
    validate,
)
from worker.sequence_kv import Behind, Kept, NewPages, SequenceKv
from worker.speculation import Drafter, accepted
from worker.tracing import NoSpans, NoStep, TracedStep
from worker.trials import Trials
from worker.waiting import Waiting
from worker.weights import Model

log = structlog.get_logger("engine")

IDLE_REPORT_S = 1.0
GROWTH_TOKENS = 256
"""In admission "recompute" a sequence is promised this much more than it has, again and again."""
WARM_UP = "warm-up"  # id of the first sequence of all


@dataclass
class _Flight:
    """A step that was begun: ``begun`` is the number of a captured one, which may still run, or all of any other.

    ``behind``: what was begun behind it. ``captured_s``: what its captured rows took, once it has landed.
    """

    work: list[Work]
    new_pages: NewPages
    traced: NoStep | TracedStep
    begun: int | Step
    behind: Behind | None = None
    captured_s: float = 0.0


@dataclass
class _Chunk:
    """Prompt tokens that are computed layer by layer, beside others' decode steps."""

    work: list[Work]
    new_pages: NewPages
    slices: Slices


class Engine:
    """Continuous batching over one model and one attachment.

    Args:
        config: limits and mode.
        model: loaded weights; its geometry is the attachment's.
        attachment: the KV memory. The engine uses it until ``stop`` returns and does not close it.
        emit: called from the engine thread after each step, and once a second while idle.
        on_failed: called once, from the engine thread, with the error that stopped the engine.
        spans: told of steps and of sequences' ends, for traces.

    Raises:
        PreconditionFailed: deterministic mode does not hold on this machine (NOT_DETERMINISTIC); or a GPU's kernels
            cannot be loaded (GPU_KERNELS_NOT_READY).
        ConfigError: the arenas do not fit the model's geometry; or a GPU has no kernels for the model (NO_GPU_KERNEL).
    """

    def __init__(
        self,
        config: WorkerConfig,
        model: Model,
        attachment: KvMemory,
        emit: Callable[[StepResult], None],
        on_failed: Callable[[TailpackError], None] | None = None,
        spans: NoSpans | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._attachment = attachment
        self._emit = emit
        self._on_failed = on_failed
        self._spans = spans or NoSpans()
        torch.set_num_threads(config.num_threads)
        with torch.inference_mode(), naming_kernels(f"model {model.info.name}"):
            kv = KvView(model.geometry, attachment.arenas, attachment.tails)
            on_gpu = GpuPages(kv) if config.on_gpu else None
            self._runner = ModelRunner(
                model.network,
                kv,
                on_gpu,
                deterministic=config.deterministic,
                tiles_checked=model.tiles_checked,
                max_sequences=config.max_running,
                max_sequence_tokens=model.info.max_sequence_tokens,
                decode_graphs=config.decode_graphs,
                eos_token_ids=model.eos_token_ids,
            )
            self._held = SequenceKv(attachment, kv, on_gpu)
            self.packing = on_gpu
            self._drafter = _drafter(config, model, kv)
        self.failed = threading.Event()
        self.failure: TailpackError | None = None
        self.device_failed = False
        """It stopped for that, and sequences are where they were: who holds the attachment abandons it."""
        self.memory_grown_bytes = 0
        """What the memory ledger's alarm says; set by who watches it."""
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)

        # Shared with other threads, under the lock.
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._stop_error: TailpackError | None = None
        self._inbox: list[Sequence] = []
        self._known: dict[str, Sequence] = {}  # every sequence that has not finished, by request id
        self._to_abort: list[Sequence] = []
        self._to_let_go: list[str] = []  # owners
        self._refusals: list[Output] = []
        self._num_unsaid = 0  # sequences that have finished and whose last output is not emitted yet
        self._load = Load()

        # The engine thread's own.
        self._waiting = Waiting()
        self._running: list[Sequence] = []  # oldest first
        self._ended = Ended(self._held)
        self._flight: _Flight | None = None  # launched, and its tokens not read
        self._chunk: _Chunk | None = None
        self._pace = self._new_pace()
        self._outputs: list[Output] = []
        self._admission_blocked = False  # the oldest waiting sequence was refused, and nothing has changed since
        self._in_step: list[Work] = []
        self._trials = Trials()
        self._counters = Load()

    # --- any thread ---

    @property
    def runner(self) -> ModelRunner:
        """For the memory ledger: what it holds is made once, with the engine."""
        return self._runner

    def warm_up(self) -> None:
        """Generates a token, before ``start``: kernels are loaded, memory is touched, and the path is proved whole.

        With captured steps a second token comes from one; in deterministic mode they are checked first, over a prompt
        with a row for each that a step may have. No output of it reaches ``emit``; it is in no count of steps,
        sequences or tokens.

        Raises:
            InternalError: WARM_UP_FAILED, no token came. TailpackError: what would have stopped the engine;
            PreconditionFailed, NOT_DETERMINISTIC (``ModelRunner.check_rows``).
        """
        captured = self._config.decode_graphs
        to_check = captured and self._config.deterministic
        num_rows = min(CHECKED_ROWS, self._config.max_running, self._model.info.max_sequence_tokens - 2)
        said: list[StepResult] = []
        emit, self._emit = self._emit, said.append
        spans, self._spans = self._spans, NoSpans()
        try:
            with torch.inference_mode():
                self.submit(
                    Request(
                        request_id=WARM_UP,
                        tenant=WARM_UP,  # so that nobody's prompt goes on from what it leaves
                        prompt=(0,) * num_rows if to_check else (0,),
                        sampling=Sampling(),
                        stop=StopConditions(max_tokens=2 if captured else 1, ignore_eos=True),
                        reuse=types_pb2.PREFIX_REUSE_NONE,
                    )
                )
                while self._has_work():
                    self.step()
                    if to_check and self._running and self._running[0].num_emitted:
                        self._runner.check_rows(self._running[0])
                        to_check = False
        finally:
            self._emit, self._spans = emit, spans
            self._counters = Load()
            self._pace = self._new_pace()  # first steps take longer
            self._publish_load()
        outputs = [output for result in said for output in result.outputs if output.request_id == WARM_UP]
        if not any(output.token_ids for output in outputs):
            why = next((str(output.error) for output in outputs if output.error is not None), None)
            raise InternalError("the worker could not generate its first token", reason="WARM_UP_FAILED", given=why)

    def adopt(self) -> list[Sequence]:
        """Takes over what the attachment found of an earlier worker, before ``start`` and after ``warm_up``.

        What they emitted before is not emitted again; what has all it asked for ends with the first step.

        Returns:
            All of them, for who answers their callers. They are the engine thread's: to be looked at before ``start``.
        """
        found = self._held.not_deadly(self._attachment.adopted)
        with torch.inference_mode():
            found = self._held.undamaged(found)
            self._held.recover(held.slot for held in found)
        adoption = plan_adoption(
            found,
            self._model.info,
            now_ns=time.monotonic_ns(),
            not_of=WARM_UP,
            most=self._config.max_running,
        )
        with torch.inference_mode():
            self._held.adopt(adoption)
        failures = self._attachment.control.failures
        self._trials = Trials((each, num) for each, held in adoption.going_on if (num := failures(held.slot)))
        self._running += [sequence for sequence, _ in adoption.going_on]
        self._waiting += adoption.again
        self._known |= {sequence.request.request_id: sequence for sequence in adoption.sequences}
        self._counters.sequences_adopted += len(adoption.sequences)
        self._counters.tokens_recomputed_after_adoption += adoption.num_lost_tokens
        with torch.inference_mode():  # what ends leaves its tails behind
            for sequence in adoption.sequences:
                self._end_if_whole(sequence)
        self._publish_load()
        self._wake.set()
        return adoption.sequences

    def start(self) -> None:
        self._publish_load()
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread after the step it is in; sequences that still run end with WORKER_LOST.

        Raises:
            InternalError: the thread did not end in time.
        """
        with self._lock:
            self._stopping = True
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise InternalError("the engine did not stop in time", given=f"{timeout_s} s")

    def submit(self, request: Request) -> None:
        """Enqueues. A request that is refused is answered by an Output with FINISH_REASON_ERROR.

        Raises:
            WorkerLost: the engine has stopped; nobody would answer.
        """
        refusal: TailpackError | None = None
        try:
            validate(request, self._model.info)
        except InvalidRequest as error:
            refusal = error
        if refusal is None and request.sampling.seed is None and not request.sampling.greedy:
            request = request.with_seed(secrets.randbits(64))
        # Made before the lock is taken, which the engine's every step takes: a long prompt is copied here.
        sequence = Sequence(request, self._max_total_tokens(request), time.monotonic_ns())
        with self._lock:
            if self._stopping or self.failed.is_set():
                raise WorkerLost("the engine has stopped", hint=str(self.failure) if self.failure else None)
            refusal = refusal or self._refusal(request)
            if refusal is None:
                self._known[request.request_id] = sequence
                self._inbox.append(sequence)
            else:
                self._refusals.append(refusal_of(request, refusal))
        self._wake.set()

    def abort(self, request_id: str, *, tenant: str | None = None, owner: str | None = None) -> bool:
        """Ends a sequence before the next step.

        False when no such sequence runs or waits here, or it is another tenant's or another owner's where one is named.
        """
        with self._lock:
            sequence = self._known.get(request_id)
            if sequence is None or tenant not in (None, sequence.request.tenant):
                return False
            if owner not in (None, sequence.request.owner):
                return False
            self._to_abort.append(sequence)
        self._wake.set()
        return True

    def abort_owner(self, owner: str) -> None:
        """Ends all sequences that this router session submitted."""
        with self._lock:
            self._to_abort += [s for s in self._known.values() if s.request.owner == owner]
        self._wake.set()

    def let_go(self, owner: str) -> None:
        """The caller of this owner's resumable sequence has all of it, or waits no more."""
        with self._lock:
            self._to_let_go.append(owner)
        self._wake.set()

    def stop_because(self, error: TailpackError) -> None:
        """Ends all sequences with ``error`` and stops the engine: for what only others notice, as the kvstore's end."""
        with self._lock:
            self._stop_error = self._stop_error or error
        self._wake.set()

    def load(self) -> Load:
        """A copy of the newest state. No sequence counts in it if and only if all there was to say has been emitted."""
        with self._lock:
            return self._load_now(self._num_unsaid)

    def oldest_age_s(self) -> float:
        """Since the submission of the sequence that is longest here and has not finished, in seconds; 0: none is."""
        with self._lock:
            oldest = next(iter(self._known.values()), None)
            return (time.monotonic_ns() - oldest.submitted_ns) / 1e9 if oldest is not None else 0.0

    def _load_now(self, num_unsaid: int) -> Load:
        """Under the lock. What ran at the last look and is still known counts as running, all else known as waiting."""
        load = Load()
        load.CopyFrom(self._load)
        load.num_running = min(load.num_running, len(self._known)) + num_unsaid
        load.num_waiting = len(self._known) + num_unsaid - load.num_running
        load.queued_tokens += sum(s.num_uncomputed for s in self._inbox)
        load.without_store = self._attachment.is_away
        load.memory_grown_bytes = self.memory_grown_bytes
        return load

    def _refusal(self, request: Request) -> TailpackError | None:
        known = self._known.get(request.request_id)
        ending = known is not None and known.request.owner != request.owner and known in self._to_abort
        if known is not None and not ending:
            return _duplicate(request.request_id)
        limit = self._config.max_running + self._config.max_waiting
        if len(self._known) >= limit:
            return CapacityError(
                "the worker's queue is full",
                reason="QUEUE_FULL",
                given=f"{len(self._known)} sequences",
                allowed=limit,
                retry_after_ms=1000,
            )
        return None

    def _max_total_tokens(self, request: Request) -> int:
        return min(len(request.prompt) + request.stop.max_tokens, self._model.info.max_sequence_tokens)

    # --- the engine thread ---

    def _run_thread(self) -> None:
        torch.set_num_threads(self._config.num_threads)
        error: TailpackError = WorkerLost("the worker is stopping", hint="send the request to another worker")
        failed = True  # also when it breaks while it is being stopped
        try:
            with torch.inference_mode():
                while not self._stopping:
                    if not self._has_work():
                        self._wait()
                    self.step()
            failed = False
        except KvStoreLost as lost:
            error = lost
        except TailpackError as known:
            log.error("engine stopped", exc_info=True)
            error = known if isinstance(known, InternalError | WorkerLost) else _internal(known)
        except BaseException as broken:  # whatever it is, every sequence must hear of it
            log.error("engine stopped by a broken invariant", exc_info=True)
            error = _internal(broken)
        try:
            self._held.kv.settle()  # what a broken step began may still be written to; the memory is another's soon
        except TailpackError as broken_gpu:  # nothing runs on it any more, and nothing will in this process
            log.error("the device failed", why=str(broken_gpu))
            if failed and not isinstance(error, KvStoreLost):
                self._leave_all(broken_gpu)
                return
        self._end_all(error, failed=failed)

    def _has_work(self) -> bool:
        with self._lock:
            inbox = bool(self._inbox or self._to_abort or self._to_let_go or self._refusals or self._stop_error)
        return inbox or bool(self._running or self._waiting)

    def _wait(self) -> None:
        self._wake.wait(IDLE_REPORT_S)

    def step(self) -> None:
        """One step of the engine. Called by the engine thread; tests call it instead of ``start``.

        While nothing but captured decode steps is to be done, the next one is launched before the tokens of this one
        are read: the host works a step behind the GPU.
        """
        began_ns = time.monotonic_ns()
        self._attachment.look_after()
        if self._attachment.void:
            self._drop_void()
        flight, self._flight = self._flight, None
        if flight is None:
            if self._chunk is not None and self._chunk.slices.done:
                self._land_chunk()
            self._take_inbox()
            self._admit()
            self._publish_load()
            work = self._in_step = self._schedule()
            work, chunk = self._apart(work)
            flight = self._launch(work) if work else None
            self._begin_chunk(chunk)
        if flight is not None:
            self._in_step = [*flight.work, *(self._chunk.work if self._chunk is not None else ())]
            ahead = self._launch_ahead(flight)
            self._advance_chunk()
            self._land(flight)
            if ahead is not None and not all(w.sequence.finished for w in ahead.work):
                self._flight = ahead
                if self._chunk is not None and self._chunk.slices.is_computed:
                    self._publish()  # what this step drew does not wait for what follows
                    self._land_chunk()
            self._counters.num_steps += 1
            self._counters.last_step_ns = time.monotonic_ns() - began_ns
            self._pace.learn(flight.work, flight.captured_s, (time.monotonic_ns() - began_ns) / 1e9)
        elif self._chunk is not None:  # nobody decodes any more
            self._land_chunk()
            self._counters.num_steps += 1
        self._in_step = []
        self._publish()

    def _new_pace(self) -> Pace:
        return Pace(self._config.step_time_budget_ms, decode_graphs=self._config.decode_graphs)

    @property
    def _by_layers(self) -> bool:
        """Whether prompts beside captured decode rows run a few layers a step: larger chunks, and yet short steps."""
        return self._runner.has_layers and self._config.decode_graphs and self._config.step_time_budget_ms != 0

    def _schedule(self) -> list[Work]:
        running, budget = self._trials.of(self._running), self._config.chunk_tokens
        if self._chunk is not None and len(running) < len(self._running):  # a trial's step holds nothing else
            self._land_chunk()
        decoding = [s for s in running if decodes(s, self._config.deterministic)]
        asked = self._config.step_time_budget_ms
        timed = not self._by_layers and (asked > 0 or (asked < 0 and self._config.decode_graphs))
        if self._chunk is not None:
            in_chunk = {w.sequence for w in self._chunk.work}
            running = [s for s in decoding if s not in in_chunk]
        elif decoding and self._by_layers:
            budget = min(budget, CAPTURED_CHUNK_TOKENS)
        work = schedule(
            running,
            prefill_budget=budget,
            deterministic=self._config.deterministic,
            one_span=self._config.deterministic and (self._held.has_tails or self._drafter is not None),
            time_budget=TimeBudget(self._pace.budget_s(), self._pace.prefill_time) if timed else None,
        )
        if self._chunk is not None and any(w.end > w.sequence.num_promised for w in work):
            self._land_chunk()  # what grows may drop others
        return self._grow(work) if self._config.admission == "recompute" else work

    def _apart(self, work: list[Work]) -> tuple[list[Work], list[Work]]:
        """A step, and the prompts' part of it that runs layer by layer beside this and further steps."""
        chunk = [w for w in work if not self._runner.captures(w)]
        if not self._by_layers or self._chunk is not None or len(chunk) == len(work):
            return work, []
        return [w for w in work if self._runner.captures(w)], chunk

    def _begin_chunk(self, chunk: list[Work]) -> None:
        """Behind the launch of its step's decode rows: the GPU has them to do while the host prepares this."""
        if chunk:
            new_pages = self._held.reserve(chunk)
            self._mark_first_run(chunk)
            self._chunk = _Chunk(chunk, new_pages, self._runner.by_layers(chunk))

    def _advance_chunk(self) -> None:
        """Launches as many layers as fit a step's time, behind its decode rows."""
        if self._chunk is None or self._chunk.slices.done:
            return
        slices, tokens = self._chunk.slices, sum(w.count for w in self._chunk.work)
        # Till its own layers have been timed it goes by the chunk before, with care.
        layer_s = slices.layer_s or self._pace.layer_token_s * tokens
        most = int(self._pace.budget_s() / layer_s) if layer_s else 1
        slices.advance(max(1, most if slices.layer_s else min(2, most)))
        if slices.layer_s:
            self._pace.layer_token_s = slices.layer_s / tokens

    def _land_chunk(self) -> None:
        """Launches what is left of a chunk, waits for it and keeps it."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            in_step = self._in_step
            if self._flight is None:
                self._in_step = chunk.work  # whom a failure is laid on
            step = chunk.slices.step()
            self._keep(chunk.work, step, chunk.new_pages, None, self._spans.step(chunk.work, self._held.kv.counters))
            self._in_step = in_step

    def _launch(self, work: list[Work]) -> _Flight:
        """Begins a step: its pages are there, and its rows are being computed, or are computed already."""
        new_pages = self._held.reserve(work)
        self._mark_first_run(work)
        traced = self._spans.step(work, self._held.kv.counters)
        begun = self._runner.launch(work) if self._runner.launches(work) else self._runner.run(work)
        return _Flight(work, new_pages, traced, begun)

    def _launch_ahead(self, flight: _Flight) -> _Flight | None:
        """Begins the step after one that is not read yet; None where something else is to be done before.

        What ends with a token that nobody has seen is computed once too often: that row is dropped.
        """
        if isinstance(flight.begun, Step) or self._has_news() or self._may_admit():
            return None
        flying = [w for w in flight.work if not w.sequence.finished]
        if self._chunk is None and len(flying) < len(self._running):
            return None
        flight.behind = self._held.seal_behind(flying, flight.new_pages)
        work = [Work(w.sequence, w.end, 1) for w in flying if w.end + 1 < w.sequence.max_total_tokens]
        grows = self._config.admission == "recompute" and any(w.end > w.sequence.num_promised for w in work)
        if flight.behind is None or not work or grows or self._runner.spreads(len(work)):
            return None
        return self._launch(work) if self._held.can_go_on(work, flight.behind) else None

    def _has_news(self) -> bool:
        with self._lock:
            return bool(
                self._inbox or self._to_abort or self._to_let_go or self._refusals or self._stop_error or self._stopping
            )

    def _may_admit(self) -> bool:
        return bool(self._waiting) and len(self._running) < self._config.max_running and not self._admission_blocked

    def _land(self, flight: _Flight) -> None:
        """Ends a step: rows are kept, tokens are logged, lengths committed, pages published, and then all is said."""
        begun, traced = flight.begun, flight.traced
        step = begun if isinstance(begun, Step) else self._runner.drawn(flight.work, begun)
        flight.captured_s = step.captured_s
        traced.mark("forward")
        work = [w for w in flight.work if not w.sequence.finished]
        if len(work) < len(flight.work):  # some ended with the step before, captured rows all
            step = replace(step, workspace_rows=(-1,) * len(work))
        behind = flight.behind
        if behind is None and not isinstance(begun, Step):
            behind = self._held.seal_behind(work, flight.new_pages)
        self._keep(work, step, flight.new_pages, behind, traced)

    def _keep(
        self, work: list[Work], step: Step, new_pages: NewPages, behind: Behind | None, traced: NoStep | TracedStep
    ) -> None:
        said = self._sample(work, step)
        traced.mark("sample")
        if self._drafter is not None:
            self._drafter.follow(work, step, said)
            traced.mark("draft")
        if behind is None:
            kept = self._held.keep_rows(work, step, new_pages)
        else:
            kept = self._held.keep_behind(work, step, behind)
        traced.mark("seal")
        ends = self._commit(work, said, kept)
        self._held.publish(work, kept)
        traced.end()
        self._say(ends)
        if self._drafter is not None:
            self._drafter.propose()

    def _land_early(self) -> None:
        """Before a sequence is cut or forked, which a step may still compute."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)
        self._land_chunk()

    def _take_inbox(self) -> None:
        self._wake.clear()
        with self._lock:
            if self._stop_error is not None:
                raise self._stop_error
            arrived, self._inbox = self._inbox, []
            self._waiting += arrived
            to_abort = list(self._to_abort)
            to_let_go, self._to_let_go = self._to_let_go, []
            self._outputs += self._refusals
            self._counters.sequences_failed += len(self._refusals)
            self._refusals.clear()
        for sequence in to_abort:
            if self._chunk is not None and any(w.sequence is sequence for w in self._chunk.work):
                self._land_chunk()  # its rows go where others' may be soon
            if not sequence.finished:
                self._finish(sequence, types_pb2.FINISH_REASON_ABORTED)
        if to_abort:
            with self._lock:  # only now: till then another may be submitted under the same id
                self._to_abort = [sequence for sequence in self._to_abort if not sequence.finished]
        for owner in to_let_go:
            self._ended.let_go(owner)
        for sequence in arrived:
            if not sequence.finished:
                self._end_if_whole(sequence)

    def _end_if_whole(self, sequence: Sequence) -> None:
        """Ends a sequence that has emitted all its tokens, in another life or elsewhere, and only has to say so."""
        if sequence.num_emitted and (reason := finish_reason(sequence, self._model.eos_token_ids)):
            self._finish(sequence, reason)

    def _admit(self) -> None:
        """Oldest first, and nobody overtakes: else a large sequence would wait for ever behind small ones."""
        while self._waiting and len(self._running) < self._config.max_running and not self._admission_blocked:
            sequence = self._waiting[0]
            self._make_slot()
            reuse, exact_only = self._reuse(sequence)
            try:
                refused = self._held.open(sequence, self._first_promise(sequence), reuse=reuse, exact_only=exact_only)
            except InvalidRequest as malformed:
                self._finish(sequence, types_pb2.FINISH_REASON_ERROR, malformed)
                continue
            if refused is None:
                self._waiting.popleft()
                self._running.append(sequence)
                if not sequence.num_dropped:
                    self._counters.prompt_tokens_cached += min(sequence.num_cached, sequence.num_prompt)
            elif refused.short_group and refused.pages_needed > refused.pages_total:
                error = CapacityError(
                    "the sequence is larger than all KV memory of this worker",
                    reason="SEQUENCE_TOO_LARGE",
                    given=f"{refused.pages_needed} pages of group {refused.short_group!r} at worst",
                    allowed=f"at most {refused.pages_total} pages, {refused.pages_total * PAGE_TOKENS} tokens",
                    hint="ask for fewer max_tokens, or give the worker more memory: --kv-bytes",
                )
                self._finish(sequence, types_pb2.FINISH_REASON_ERROR, error)
            elif self._ended.make_room():
                continue
            elif not self._running:
                # The memory is this attachment's alone, and what a sequence held is released before its last word.
                raise InternalError(
                    "the kvstore has no room though nothing runs", given=f"{sequence.max_total_tokens} tokens at most"
                )
            else:
                self._admission_blocked = True

    def _make_slot(self) -> None:
        """For one more to run; a slot beside all those stays free."""
        while len(self._running) + len(self._ended) >= self._config.max_running and self._ended.make_room():
            pass

    def _first_promise(self, sequence: Sequence) -> int:
        """Tokens that pages are promised for at the start. What was dropped once comes back with its worst case."""
        most = sequence.max_total_tokens
        if self._config.admission == "worst_case" or sequence.num_dropped or self._held.too_large(most):
            return most
        return min(most, len(sequence.token_ids) + GROWTH_TOKENS)

    def _reuse(self, sequence: Sequence) -> tuple[bool, bool]:
        """(whether cached prefixes may be used, only exact ones)."""
        asked = sequence.request.reuse
        if asked == types_pb2.PREFIX_REUSE_DEFAULT and self._config.deterministic:
            asked = types_pb2.PREFIX_REUSE_NONE
        exact_only = asked == types_pb2.PREFIX_REUSE_EXACT or (sequence.num_dropped > 0 and sequence.prefix_exact)
        return asked != types_pb2.PREFIX_REUSE_NONE, exact_only

    def _grow(self, work: list[Work]) -> list[Work]:
        """Admission "recompute": promises more to those that outgrow what they have, the oldest first. For want of
        pages the youngest is dropped. Returns the work that is left.
        """
        for w in work:
            while w.sequence in self._running and w.end > w.sequence.num_promised:
                most = min(w.sequence.max_total_tokens, w.end + GROWTH_TOKENS)
                if not self._held.grow(w.sequence, most) and not self._ended.make_room():
                    self._drop(self._running[-1])
        return [w for w in work if w.sequence in self._running]

    def _drop_void(self) -> None:
        """Drops those of which a new store found a page damaged."""
        if any(sequence.slot in self._attachment.void for sequence in self._running):
            self._land_early()
        for sequence in reversed(self._running.copy()):
            if sequence.slot in self._attachment.void:
                self._drop(sequence, "for damaged KV pages")

    def _drop(self, sequence: Sequence, why: str = "for want of KV pages") -> None:
        """Gives up what a running sequence holds; it waits before all others, and is computed again."""
        self._running.remove(sequence)
        self._held.release(sequence, keep=False)
        sequence.slot, sequence.num_computed, sequence.num_dropped = -1, 0, sequence.num_dropped + 1
        sequence.drafts = []
        self._waiting.appendleft(sequence)
        self._admission_blocked = False
        self._counters.sequences_recomputed += 1
        log.info(f"dropped {why}, to be computed again", request_id=sequence.request.request_id)

    def _mark_first_run(self, work: list[Work]) -> None:
        now_ns = time.monotonic_ns()
        for w in work:
            w.sequence.first_run_ns = w.sequence.first_run_ns or now_ns

    def _sample(self, work: list[Work], step: Step) -> list[list[Drawn]]:
        """What each work says: nothing before its newest token, one token behind it, one more a guess that holds."""
        on_device = step.drawn
        wanted = [w for w in work if w.wants_logits and w.sequence not in on_device]
        fresh = iter(sample(step.logits, [_draw(w.sequence) for w in wanted for _ in range(1 + w.num_drafts)]))
        said: list[list[Drawn]] = []
        for w in work:
            if not w.wants_logits:
                said.append([])
            elif w.sequence in on_device:
                said.append([on_device[w.sequence]])
            else:
                drawn = [next(fresh) for _ in range(1 + w.num_drafts)]
                said.append(accepted(w.sequence.drafts[: w.num_drafts], drawn))
        return said

    def _commit(self, work: list[Work], said: list[list[Drawn]], kept: Kept) -> list[tuple[Sequence, list[Drawn]]]:
        """Rows are kept; now the token log and the commit word. Returns who got tokens."""
        control = self._attachment.control
        ends: list[tuple[Sequence, list[Drawn]]] = []
        for w, drawn in zip(work, said, strict=True):
            sequence, end = w.sequence, w.certain_end
            self._counters.prompt_tokens += max(0, min(end, sequence.num_prompt) - sequence.num_computed)
            self._counters.tokens_drafted += w.num_drafts
            self._counters.tokens_accepted += max(0, len(drawn) - 1)
            new = self._append(sequence, drawn)
            sequence.num_computed, sequence.drafts = end + max(0, len(new) - 1), []
            if new:
                control.append_tokens(sequence.slot, [each.token_id for each in new])
                ends.append((sequence, new))
            self._held.commit(sequence, kept)
        return ends

    def _append(self, sequence: Sequence, drawn: list[Drawn]) -> list[Drawn]:
        """Appends what was drawn, up to where the sequence ends; returns that."""
        for count, new in enumerate(drawn, 1):
            sequence.token_ids.append(new.token_id)
            if finish_reason(sequence, self._model.eos_token_ids) != types_pb2.FINISH_REASON_UNSPECIFIED:
                return drawn[:count]
        return drawn

    def _say(self, ends: list[tuple[Sequence, list[Drawn]]]) -> None:
        """What goes out: tokens that are logged, over rows that are committed."""
        now_ns = time.monotonic_ns()
        for sequence, new in ends:
            sequence.first_token_ns = sequence.first_token_ns or now_ns
            sequence.last_token_ns = now_ns
            self._counters.tokens_emitted += len(new)
            reason = finish_reason(sequence, self._model.eos_token_ids)
            if reason == types_pb2.FINISH_REASON_UNSPECIFIED:
                self._outputs.append(output_of(sequence, new))
            else:
                self._finish(sequence, reason, new=new)

    def truncate(self, sequence: Sequence, num_tokens: int, next_token: int | None = None) -> Truncated:
        """Takes a running sequence back to ``num_tokens`` computed tokens (``SequenceKv.truncate``), between steps, on
        the engine thread. What was emitted stays emitted: whoever calls it answers for the tokens behind the cut.

        Raises:
            PreconditionFailed: TRUNCATES_PROMPT, the request's own prompt would not stay whole; or what
            ``SequenceKv.truncate`` raises.
        """
        least = sequence.num_prompt - (next_token is None)  # one token to compute stays behind the cut
        if num_tokens < least:
            raise PreconditionFailed(
                "a truncate never cuts into the prompt of its request",
                reason="TRUNCATES_PROMPT",
                given=num_tokens,
                allowed=f"{least} or more",
                hint="submit the shorter prompt as a request of its own; what is cached of it is reused",
            )
        self._land_early()
        self._demand_running(sequence)
        return self._held.truncate(sequence, num_tokens, next_token)

    def fork(self, sequence: Sequence, request_id: str) -> Sequence | None:
        """A second running sequence that stands where ``sequence`` stands; None: no room. As ``truncate``.

        Raises:
            AlreadyExists: DUPLICATE_REQUEST, ``request_id`` runs or waits here.
        """
        with self._lock:
            if request_id in self._known:
                raise _duplicate(request_id)
        self._land_early()
        self._demand_running(sequence)
        if len(self._running) >= self._config.max_running:
            return None
        self._make_slot()
        child = self._held.fork(sequence, request_id)
        if child is not None:
            child.submitted_ns, child.num_dropped = time.monotonic_ns(), 0
            child.first_run_ns = child.first_token_ns = child.last_token_ns = 0
            with self._lock:
                self._known[request_id] = child
            self._running.append(child)
        return child

    def _demand_running(self, sequence: Sequence) -> None:
        if sequence.finished:
            raise PreconditionFailed(
                "the sequence has ended",
                reason="SEQUENCE_ENDED",
                given=sequence.request.request_id,
                allowed="one that runs",
            )

    def _finish(
        self,
        sequence: Sequence,
        reason: types_pb2.FinishReason.ValueType,
        error: TailpackError | None = None,
        new: Seq[Drawn] = (),
    ) -> None:
        """The only place where a sequence ends: takes it out of every list, frees what it holds, says the last word."""
        assert not sequence.finished
        sequence.finished = True
        with self._lock:
            if self._known.get(sequence.request.request_id) is sequence:  # not yet another's, behind an abort
                del self._known[sequence.request.request_id]
            self._num_unsaid += 1
            if sequence in self._inbox:
                self._inbox.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._admission_blocked = False  # what waits behind it may be smaller
        try:
            if sequence in self._running:
                self._running.remove(sequence)
                self._admission_blocked = False
                whole = error is None and reason != types_pb2.FINISH_REASON_ABORTED
                if whole and sequence.request.resumable is not None:
                    self._ended.add(sequence)
                else:
                    self._held.release(sequence, keep=error is None)
        finally:
            if reason == types_pb2.FINISH_REASON_ABORTED:
                self._counters.sequences_aborted += 1
            elif reason == types_pb2.FINISH_REASON_ERROR:
                self._counters.sequences_failed += 1
            else:
                self._counters.sequences_finished += 1
            self._outputs.append(output_of(sequence, new, reason, error))
            self._spans.ended(sequence, reason, error)

    def _leave_all(self, failure: TailpackError) -> None:
        """The device's end, which is this process's: all sequences are left as they are, to the next worker."""
        in_step = [w.sequence for w in self._in_step] or self._trials.of(self._running)
        for sequence in in_step:
            if sequence in self._running:
                self._attachment.control.count_failure(sequence.slot)
        with self._lock:
            self.failure = WorkerLost("the worker's device failed", reason="DEVICE_FAILED", given=str(failure))
            self.device_failed = self._stopping = True
            self.failed.set()
        if self._on_failed is not None:
            self._on_failed(self.failure)

    def _end_all(self, error: TailpackError, *, failed: bool) -> None:
        """The engine's end: every sequence hears of it, whatever state it is in."""
        with self._lock:
            self.failure = error if failed else None
            if failed:
                self.failed.set()
            self._stopping = True  # from here on submit raises
            self._outputs += self._refusals
            self._refusals.clear()
            left = list(dict.fromkeys([*self._known.values(), *self._to_abort, *self._running]))
            self._to_abort.clear()
        # What has not run did not break the engine: another worker may have it. What ran may have, and must not go on
        # to break the next.
        ran = list(self._running)
        bystander = WorkerLost("the worker's engine failed before this request ran", retry_after_ms=1000)
        for sequence in (each for each in left if not each.finished):
            innocent = isinstance(error, InternalError) and sequence not in ran
            try:
                self._finish(sequence, types_pb2.FINISH_REASON_ERROR, bystander if innocent else error)
            except TailpackError as lost:  # the store frees it with the attachment
                log.warning("not released", request_id=sequence.request.request_id, why=str(lost))
        with suppress(TailpackError):
            while self._ended.make_room():
                pass
        self._waiting.clear()
        self._publish()
        if failed and self._on_failed is not None:
            self._on_failed(error)

    def _publish(self) -> None:
        self._publish_load()
        outputs, self._outputs = tuple(self._outputs), []
        with self._lock:
            load = self._load_now(0)
        self._emit(StepResult(outputs, load))
        with self._lock:
            self._num_unsaid = 0

    def _publish_load(self) -> None:
        load = Load()
        load.CopyFrom(self._counters)
        load.num_running = len(self._running)
        load.queued_tokens = self._waiting.num_tokens
        load.queued_tokens += sum(max(0, s.num_prompt - s.num_computed) for s in self._running)
        self._held.report(load, self._running)
        with self._lock:
            self._load = load


def _drafter(config: WorkerConfig, model: Model, kv: KvView) -> Drafter | None:
    if not config.drafts:
        return None
    assert isinstance(model.network, DeepseekV4)  # other families are refused before they are loaded
    return Drafter(model.network, kv, config.drafts)


def _draw(sequence: Sequence) -> Draw:
    return Draw(sequence.request.sampling, sequence.token_ids, sequence.seen)


def _duplicate(request_id: str) -> AlreadyExists:
    return AlreadyExists("this request_id runs here", reason="DUPLICATE_REQUEST", given=request_id)


def _internal(error: BaseException) -> InternalError:
    return InternalError("the engine met a broken invariant", given=f"{type(error).__name__}: {error}")
