"""The engine: one thread that owns the compute and every sequence. ``Engine.step`` is the table of contents.

Other threads only leave things in the inbox: submissions, aborts, the news that the kvstore is gone. What they are told
comes back through ``emit``, once a step.

Errors: a bad request is answered and hurts nobody else. A broken invariant, an exception of the model included, stops
the engine: every sequence ends with the error, ``failed`` is set, and the process is expected to go.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

import structlog
import torch

from kvstore.client import Admitted, Attachment, Forked, NewPage, OpenRequest, Refused, Truncated, page_checksum
from kvstore.geometry import LayerGroup
from kvstore.retention import pages_for
from protos import types_pb2
from protos.errors import (
    AlreadyExists,
    CapacityError,
    InternalError,
    InvalidRequest,
    KvStoreLost,
    TailpackError,
    WorkerLost,
)
from protos.page_hash import PAGE_TOKENS
from worker import kv_moves
from worker.config import WorkerConfig
from worker.due import base_after, needs_pages, seals, worst_pages
from worker.kv_moves import SealJob, SpanRows
from worker.kv_view import KvView
from worker.model_runner import ModelRunner, Step
from worker.sampler import Draw, Drawn, sample
from worker.scheduler import Work, schedule
from worker.sequence import Load, Output, Request, Sequence, StepResult, finish_reason, validate
from worker.weights import Model

log = structlog.get_logger("engine")

IDLE_REPORT_S = 1.0
GROWTH_TOKENS = 256
"""In admission "recompute" a sequence is promised this much more than it has, again and again."""

ADMISSION_RETRY_S = 0.05  # waiting sequences, nothing running: somebody else holds what they need


class Engine:
    """Continuous batching over one model and one attachment.

    Args:
        config: limits and mode.
        model: loaded weights; its geometry is the attachment's.
        attachment: the KV memory. The engine uses it until ``stop`` returns and does not close it.
        emit: called from the engine thread after each step, and once a second while idle.
        on_failed: called once, from the engine thread, with the error that stopped the engine.

    Raises:
        PreconditionFailed: deterministic mode does not hold on this machine (NOT_DETERMINISTIC).
        ConfigError: the arenas do not fit the model's geometry.
    """

    def __init__(
        self,
        config: WorkerConfig,
        model: Model,
        attachment: Attachment,
        emit: Callable[[StepResult], None],
        on_failed: Callable[[TailpackError], None] | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._attachment = attachment
        self._emit = emit
        self._on_failed = on_failed
        torch.set_num_threads(config.num_threads)
        with torch.inference_mode():
            kv = KvView(model.geometry, attachment.arenas, attachment.tails)
            self._kv = kv
            self._runner = ModelRunner(model.network, kv, deterministic=config.deterministic)
        self.failed = threading.Event()
        self.failure: TailpackError | None = None
        self._thread = threading.Thread(target=self._run_thread, name="engine", daemon=True)

        # Shared with other threads, under the lock.
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._stop_error: TailpackError | None = None
        self._inbox: list[Sequence] = []
        self._known: dict[str, Sequence] = {}  # every sequence that has not finished, by request id
        self._to_abort: list[Sequence] = []
        self._refusals: list[Output] = []
        self._num_unsaid = 0  # sequences that have finished and whose last output is not emitted yet
        self._load = Load()

        # The engine thread's own.
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []  # oldest first
        self._outputs: list[Output] = []
        self._admission_blocked = False  # the oldest waiting sequence was refused, and nothing was released since
        self._counters = Load()
        self._geometry = model.geometry
        self._tailed = [group for group in model.geometry.groups if group.has_tail]
        self._packed = [group for group in model.geometry.groups if group.packed]
        self._mode_engaged = False
        self._mode_missed = False

    # --- any thread ---

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
        with self._lock:
            if self._stopping or self.failed.is_set():
                raise WorkerLost("the engine has stopped", hint=str(self.failure) if self.failure else None)
            refusal = refusal or self._refusal(request)
            if refusal is None:
                sequence = Sequence(request, self._max_total_tokens(request), time.monotonic_ns())
                self._known[request.request_id] = sequence
                self._inbox.append(sequence)
            else:
                self._refusals.append(_refused(request, refusal))
        self._wake.set()

    def abort(self, request_id: str, tenant: str | None = None) -> bool:
        """Ends a sequence before the next step. False when no such sequence runs or waits here (for that tenant)."""
        with self._lock:
            sequence = self._known.get(request_id)
            if sequence is None or (tenant is not None and tenant != sequence.request.tenant):
                return False
            self._to_abort.append(sequence)
        self._wake.set()
        return True

    def abort_owner(self, owner: str) -> None:
        """Ends all sequences that this router session submitted."""
        with self._lock:
            self._to_abort += [s for s in self._known.values() if s.request.owner == owner]
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

    def _load_now(self, num_unsaid: int) -> Load:
        """Under the lock. What ran at the last look and is still known counts as running, all else known as waiting."""
        load = Load()
        load.CopyFrom(self._load)
        load.num_running = min(load.num_running, len(self._known)) + num_unsaid
        load.num_waiting = len(self._known) + num_unsaid - load.num_running
        load.queued_tokens += sum(s.num_uncomputed for s in self._inbox)
        return load

    def _refusal(self, request: Request) -> TailpackError | None:
        if request.request_id in self._known:
            return AlreadyExists("this request_id runs here", reason="DUPLICATE_REQUEST", given=request.request_id)
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
        try:
            with torch.inference_mode():
                while not self._stopping:
                    if not self._has_work():
                        self._wait()
                    self.step()
        except KvStoreLost as lost:
            error = lost
        except TailpackError as known:
            log.error("engine stopped", exc_info=True)
            error = known if isinstance(known, InternalError | WorkerLost) else _internal(known)
        except BaseException as broken:  # whatever it is, every sequence must hear of it
            log.error("engine stopped by a broken invariant", exc_info=True)
            error = _internal(broken)
        self._end_all(error, failed=not self._stopping)

    def _has_work(self) -> bool:
        with self._lock:
            inbox = bool(self._inbox or self._to_abort or self._refusals or self._stop_error)
        return inbox or bool(self._running)

    def _wait(self) -> None:
        self._wake.wait(ADMISSION_RETRY_S if self._waiting else IDLE_REPORT_S)
        self._admission_blocked = False

    def step(self) -> None:
        """One step of the engine. Called by the engine thread; tests call it instead of ``start``."""
        began_ns = time.monotonic_ns()
        self._take_inbox()
        self._admit()
        self._publish_load()
        work = schedule(
            self._running,
            prefill_budget=self._config.prefill_chunk,
            deterministic=self._config.deterministic,
            one_span=self._config.deterministic and bool(self._packed),
        )
        work, new_pages = self._reserve(work)
        if work:
            self._mark_first_run(work)
            step = self._runner.run(work)
            drawn = sample(step.logits, [_draw(w.sequence) for w in work if w.wants_logits])
            self._commit(work, step, new_pages, drawn)
            self._counters.num_steps += 1
            self._counters.last_step_ns = time.monotonic_ns() - began_ns
        self._publish()

    def _take_inbox(self) -> None:
        self._wake.clear()
        with self._lock:
            if self._stop_error is not None:
                raise self._stop_error
            self._waiting += self._inbox
            self._inbox.clear()
            to_abort, self._to_abort = self._to_abort, []
            self._outputs += self._refusals
            self._counters.sequences_failed += len(self._refusals)
            self._refusals.clear()
        for sequence in to_abort:
            if not sequence.finished:
                self._finish(sequence, types_pb2.FINISH_REASON_ABORTED)

    def _admit(self) -> None:
        """Oldest first, and nobody overtakes: else a large sequence would wait for ever behind small ones."""
        while self._waiting and len(self._running) < self._config.max_running and not self._admission_blocked:
            sequence = self._waiting[0]
            promised = self._first_promise(sequence)
            reuse, exact_only = self._reuse(sequence)
            try:
                (answer,) = self._attachment.open(
                    [
                        OpenRequest(
                            request_id=sequence.request.request_id,
                            tenant_salt=sequence.request.tenant,
                            prompt_token_ids=sequence.token_ids,
                            max_tokens=promised,
                            frozen_request=sequence.request.frozen(),
                            reuse=reuse,
                            exact_only=exact_only,
                        )
                    ]
                )
            except InvalidRequest as malformed:
                self._finish(sequence, types_pb2.FINISH_REASON_ERROR, malformed)
                continue
            if isinstance(answer, Admitted):
                self._waiting.popleft()
                self._running.append(sequence)
                self._start(sequence, answer, promised)
            elif (group := self._too_large(sequence)) is not None:
                pages, total = worst_pages(self._geometry, group, sequence.max_total_tokens), answer.pages_total
                error = CapacityError(
                    "the sequence is larger than all KV memory of this worker",
                    reason="SEQUENCE_TOO_LARGE",
                    given=f"{pages} pages of group {group.name!r} at worst",
                    allowed=f"at most {total} pages, {total * PAGE_TOKENS} tokens",
                    hint="ask for fewer max_tokens, or give the worker more arena_bytes",
                )
                self._finish(sequence, types_pb2.FINISH_REASON_ERROR, error)
            else:
                self._admission_blocked = True

    def _first_promise(self, sequence: Sequence) -> int:
        """Tokens that pages are promised for at the start. What was dropped once comes back with its worst case."""
        if self._config.admission == "worst_case" or sequence.num_recomputed or self._too_large(sequence):
            return sequence.max_total_tokens
        return min(sequence.max_total_tokens, len(sequence.token_ids) + GROWTH_TOKENS)

    def _reuse(self, sequence: Sequence) -> tuple[bool, bool]:
        """(whether cached prefixes may be used, only exact ones)."""
        asked = sequence.request.reuse
        if asked == types_pb2.PREFIX_REUSE_DEFAULT and self._config.deterministic:
            asked = types_pb2.PREFIX_REUSE_NONE
        exact_only = asked == types_pb2.PREFIX_REUSE_EXACT or (sequence.num_recomputed > 0 and sequence.prefix_exact)
        return asked != types_pb2.PREFIX_REUSE_NONE, exact_only

    def _too_large(self, sequence: Sequence) -> LayerGroup | None:
        """The group whose arena the sequence's worst case outgrows."""
        for group in self._geometry.groups:
            pages = worst_pages(self._geometry, group, sequence.max_total_tokens)
            if group.has_pages and pages > self._attachment.arenas[group.name].num_pages:
                return group
        return None

    def _start(self, sequence: Sequence, admitted: Admitted, promised: int) -> None:
        """Takes over what is cached of the prompt; the rest is computed from there."""
        sequence.slot = admitted.slot
        sequence.num_promised = promised
        sequence.tail_slots = dict(admitted.tail_slots)
        sequence.pages = {g.name: list(admitted.pages.get(g.name, ())) for g in self._geometry.groups}
        sequence.bases = {g.name: admitted.bases.get(g.name, 0) for g in self._geometry.groups}
        sequence.num_computed = sequence.num_cached = admitted.num_cached
        sequence.prefix_exact = admitted.prefix_exact
        sequence.junction = admitted.junction
        self._counters.prompt_tokens_cached += min(admitted.num_cached, sequence.num_prompt)
        kv_moves.copy_tails(self._kv, admitted.tail_copies)
        kv_moves.refill_tails(self._kv, admitted.refills, "resume")
        self._attachment.control.commit(sequence.slot, sequence.num_computed)

    def _reserve(self, work: list[Work]) -> tuple[list[Work], dict[int, dict[str, list[NewPage]]]]:
        """Pages for every token of the step, in one call, and none for most steps.

        Returns:
            The work that can run, and the new pages by slot and group. Those of dense groups are in the page tables.
        """
        if self._config.admission == "recompute":
            work = self._grow(work)
        wanted = [(w.sequence.slot, w.end, 1) for w in work if needs_pages(self._geometry, w.sequence, w.end, 1)]
        if not wanted:
            return work, {}
        new_pages = self._attachment.reserve(wanted)
        for w in work:
            for name, pages in new_pages.get(w.sequence.slot, {}).items():
                if not self._geometry.group(name).packed:
                    w.sequence.pages[name] += [page.page_id for page in pages]
            for group in self._geometry.groups:
                if group.mode == "dense" and len(w.sequence.pages[group.name]) < pages_for(w.end):
                    given = len(w.sequence.pages[group.name])
                    raise InternalError("the kvstore reserved too little", given=given, allowed=pages_for(w.end))
        return work, new_pages

    def _grow(self, work: list[Work]) -> list[Work]:
        """Promises more to those that outgrow what they have, the oldest first; the youngest is dropped for want of it.

        A sequence grows as a fork of itself with a larger promise: sealed pages are shared for that moment.
        """
        for w in work:
            sequence = w.sequence
            while sequence in self._running and w.end > sequence.num_promised:
                promised = min(sequence.max_total_tokens, w.end + GROWTH_TOKENS)
                if not self._regrown(sequence, promised):
                    self._drop(self._running[-1])
        return [w for w in work if w.sequence in self._running]

    def _regrown(self, sequence: Sequence, promised: int) -> bool:
        grown = self._attachment.fork(
            sequence.slot, sequence.request.request_id, promised, sequence.request.frozen()
        )
        if isinstance(grown, Refused):
            return False
        self._moved(sequence, grown, promised)
        return True

    def _moved(self, sequence: Sequence, forked: Forked, promised: int) -> None:
        """Goes on in the slot of a fork, and lets the old one go."""
        old = sequence.slot
        self._adopt_fork(sequence, forked, promised)
        self._attachment.release([old])

    def _adopt_fork(self, sequence: Sequence, forked: Forked, promised: int) -> None:
        sequence.slot, sequence.num_promised = forked.slot, promised
        sequence.pages = {g.name: list(forked.pages.get(g.name, ())) for g in self._geometry.groups}
        sequence.bases = {g.name: forked.bases.get(g.name, 0) for g in self._geometry.groups}
        sequence.tail_slots = dict(forked.tail_slots)
        kv_moves.copy_pages(self._kv, forked.copies)
        kv_moves.copy_tails(self._kv, forked.tail_copies)
        control = self._attachment.control
        control.append_tokens(sequence.slot, sequence.token_ids[control.logged(sequence.slot) :])
        control.commit(sequence.slot, sequence.num_computed)

    def _drop(self, sequence: Sequence) -> None:
        """Gives up what a running sequence holds; it waits before all others and is computed again."""
        self._running.remove(sequence)
        self._attachment.release([sequence.slot])
        sequence.slot, sequence.num_computed, sequence.num_recomputed = -1, 0, sequence.num_recomputed + 1
        self._waiting.appendleft(sequence)
        self._admission_blocked = False
        self._counters.sequences_recomputed += 1
        log.info("sequence dropped, to be computed again", request_id=sequence.request.request_id)

    def _mark_first_run(self, work: list[Work]) -> None:
        now_ns = time.monotonic_ns()
        for w in work:
            w.sequence.first_run_ns = w.sequence.first_run_ns or now_ns

    def _commit(
        self, work: list[Work], step: Step, new_pages: dict[int, dict[str, list[NewPage]]], drawn: list[Drawn]
    ) -> None:
        """Rows are computed; now what is packed, the token log, the commit word, whole pages, and what goes out, in this
        order.
        """
        control = self._attachment.control
        now_ns = time.monotonic_ns()
        checksums, late = self._keep_rows(work, step, new_pages)
        fresh = iter(drawn)
        ends: list[tuple[Sequence, Drawn]] = []
        for w in work:
            sequence = w.sequence
            new = next(fresh) if w.wants_logits else None
            self._counters.prompt_tokens += max(0, min(w.end, sequence.num_prompt) - sequence.num_computed)
            sequence.num_computed = w.end
            if new is not None:
                sequence.token_ids.append(new.token_id)
                control.append_tokens(sequence.slot, [new.token_id])
                ends.append((sequence, new))
            control.commit(sequence.slot, sequence.num_computed)
        kv_moves.fill_tails(self._kv, late, step.workspace)
        self._seal(work, checksums)
        self._checkpoint(work)
        for sequence, new in ends:
            sequence.first_token_ns = sequence.first_token_ns or now_ns
            sequence.last_token_ns = now_ns
            self._counters.tokens_emitted += 1
            reason = finish_reason(sequence, self._model.eos_token_ids)
            if reason == types_pb2.FINISH_REASON_UNSPECIFIED:
                self._outputs.append(_output(sequence, new))
            else:
                self._finish(sequence, reason, new=new)

    def _keep_rows(
        self, work: list[Work], step: Step, new_pages: dict[int, dict[str, list[NewPage]]]
    ) -> tuple[dict[tuple[str, int], int], list[tuple[SpanRows, int]]]:
        """Packs what is due, then moves prefill rows from the workspace into the tails.

        Returns:
            Checksums of the pages written, and the tails to fill after the commit: those of a chunk that laps its ring,
            over rows that the base does not free yet. A slot that was committed further than its ring reaches from its
            base was cut off just there, so its tail is void.
        """
        jobs: list[SealJob] = []
        soon: list[tuple[SpanRows, int]] = []
        late: list[tuple[SpanRows, int]] = []
        for w, workspace_row in zip(work, step.workspace_rows, strict=True):
            sequence = w.sequence
            for group in self._tailed:
                slot = sequence.tail_slots[group.name]
                rows = SpanRows(group.name, slot, sequence.num_computed, w.count, workspace_row)
                if pages := new_pages.get(sequence.slot, {}).get(group.name):
                    jobs.append(SealJob(rows, pages))
                if workspace_row >= 0:
                    base = sequence.bases[group.name]
                    laps = w.end - base > self._geometry.tail_tokens(group)
                    kept_from = base_after(self._geometry, group, base, w.end, 1)
                    (late if laps else soon).append((rows, kept_from))
        checksums = kv_moves.pack(self._kv, jobs, step.workspace)
        kv_moves.fill_tails(self._kv, soon, step.workspace)
        return checksums, late

    def _seal(self, work: list[Work], checksums: dict[tuple[str, int], int]) -> None:
        """Publishes the pages below the bases that move; one call, and none for most steps."""
        due = [w.sequence for w in work if seals(self._geometry, w.sequence, w.sequence.num_computed, 1)]
        if not due:
            return
        for sequence in due:
            for group in self._geometry.groups:
                if group.mode == "dense":
                    first = sequence.bases[group.name] // PAGE_TOKENS
                    for page in sequence.pages[group.name][first : sequence.num_computed // PAGE_TOKENS]:
                        checksums[group.name, page] = page_checksum(self._kv.page_memory(group.name, page))
        result = self._attachment.seal([(s.slot, s.num_computed, 1) for s in due], checksums)
        for sequence in due:
            self._take_bases(sequence, result.bases[sequence.slot], result.first_pages.get(sequence.slot, {}))
        if self._kv.counters.pages_packed and not self._mode_engaged:
            self._mode_engaged = True
            log.info(
                "KV packing engaged",
                modes=self._geometry.modes,
                bytes_per_token=self._geometry.bytes_per_token,
                dense_window={group.name: group.effective_window for group in self._packed},
                margin=self._geometry.margin,
            )

    def _take_bases(self, sequence: Sequence, bases: Mapping[str, int], first_pages: Mapping[str, int]) -> None:
        """Where the store says that a sequence stands; pages of packed groups follow from the control block."""
        sequence.bases.update(bases)
        for group in self._packed:
            sequence.pages[group.name] = self._attachment.control.sequence_pages(sequence.slot, group.name)
            num_pages = len(sequence.pages[group.name])
            if num_pages * PAGE_TOKENS != sequence.bases[group.name]:
                raise InternalError(
                    f"pages and base of group {group.name!r} differ",
                    given=f"{num_pages} pages",
                    allowed=f"base {sequence.bases[group.name]}",
                )
        for name, first in first_pages.items():
            sequence.pages[name][:first] = [-1] * min(first, len(sequence.pages[name]))

    def _checkpoint(self, work: list[Work]) -> None:
        """Keeps tails at the ends of prompts and at junctions, where others may resume."""
        for w in work if self._tailed else ():
            sequence = w.sequence
            if sequence.num_computed == sequence.num_prompt:
                self._keep_tails(sequence, "prompt_end")
            elif sequence.num_computed == sequence.junction:
                self._keep_tails(sequence, "junction")

    def _keep_tails(self, sequence: Sequence, kind: str) -> None:
        """Asks for a checkpoint of what is computed. Beside dense groups it counts only at a page boundary: the rows
        behind that are in an open page, which is private.
        """
        num_tokens = sequence.num_computed
        if len(self._tailed) < len(self._geometry.groups):
            num_tokens -= num_tokens % PAGE_TOKENS
        if num_tokens:
            kv_moves.copy_tails(self._kv, self._attachment.checkpoint(sequence.slot, num_tokens, kind))

    def truncate(self, sequence: Sequence, num_tokens: int) -> Truncated:
        """Takes a running sequence back to ``num_tokens`` computed tokens; the next one, known already, is computed
        again. Between steps, on the engine thread; what was emitted stays emitted, so callers draw no tokens twice.

        Raises:
            PreconditionFailed: what ``Attachment.truncate`` raises. Nothing was changed then.
        """
        truncated = self._attachment.truncate(sequence.slot, num_tokens)
        kv_moves.copy_pages(self._kv, truncated.copies)
        kv_moves.copy_tails(self._kv, truncated.tail_copies)
        kv_moves.refill_tails(self._kv, truncated.refills, "rollback")
        sequence.num_computed = min(sequence.num_computed, truncated.num_tokens)
        del sequence.token_ids[num_tokens + 1 :]
        sequence.bases.update(truncated.bases)
        control = self._attachment.control
        for group in self._geometry.groups:
            sequence.pages[group.name] = control.sequence_pages(sequence.slot, group.name) if group.has_pages else []
        control.append_tokens(sequence.slot, sequence.token_ids[control.logged(sequence.slot) :])
        return truncated

    def fork(self, sequence: Sequence, request_id: str) -> Sequence | None:
        """A second running sequence that stands where ``sequence`` stands; None where there is no room. As
        ``truncate``.
        """
        request = replace(sequence.request, request_id=request_id)
        forked = self._attachment.fork(sequence.slot, request_id, sequence.max_total_tokens, request.frozen())
        if isinstance(forked, Refused):
            return None
        child = replace(sequence, request=request, token_ids=list(sequence.token_ids))
        self._adopt_fork(child, forked, sequence.max_total_tokens)
        with self._lock:
            self._known[request_id] = child
        self._running.append(child)
        return child

    def _finish(
        self,
        sequence: Sequence,
        reason: types_pb2.FinishReason.ValueType,
        error: TailpackError | None = None,
        new: Drawn | None = None,
    ) -> None:
        """The only place where a sequence ends: takes it out of every list, frees what it holds, says the last word."""
        assert not sequence.finished
        sequence.finished = True
        with self._lock:
            del self._known[sequence.request.request_id]
            self._num_unsaid += 1
            if sequence in self._inbox:
                self._inbox.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        try:
            if sequence in self._running:
                self._running.remove(sequence)
                self._look_at_mode(sequence)
                if error is None and sequence.num_computed and self._tailed:
                    self._keep_tails(sequence, "turn_end")
                self._attachment.release([sequence.slot])
                self._admission_blocked = False
        finally:
            if reason == types_pb2.FINISH_REASON_ABORTED:
                self._counters.sequences_aborted += 1
            elif reason == types_pb2.FINISH_REASON_ERROR:
                self._counters.sequences_failed += 1
            else:
                self._counters.sequences_finished += 1
            self._outputs.append(_output(sequence, new, reason, error))

    def _look_at_mode(self, sequence: Sequence) -> None:
        """Says once when a packed mode was asked for and does not pack."""
        for group in self._packed:
            expected = base_after(self._geometry, group, 0, sequence.num_computed, 1)
            if sequence.bases[group.name] < min(expected, PAGE_TOKENS) and not self._mode_missed:
                self._mode_missed = True
                log.warning(
                    "the KV mode does not engage: a sequence was long enough to be packed, and was not",
                    modes=self._geometry.modes,
                    group=group.name,
                    tokens=sequence.num_computed,
                    base=sequence.bases[group.name],
                )

    def _end_all(self, error: TailpackError, *, failed: bool) -> None:
        """The engine's end: every sequence hears of it, whatever state it is in."""
        with self._lock:
            self.failure = error if failed else None
            if failed:
                self.failed.set()
            self._stopping = True  # from here on submit raises
            self._outputs += self._refusals
            self._refusals.clear()
            left = list(self._known.values())
        for sequence in left:
            try:
                self._finish(sequence, types_pb2.FINISH_REASON_ERROR, error)
            except TailpackError as lost:  # the store frees it with the attachment
                log.warning("not released", request_id=sequence.request.request_id, why=str(lost))
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
        load.queued_tokens = sum(
            max(0, s.num_prompt - s.num_computed) for sequences in (self._running, self._waiting) for s in sequences
        )
        load.pages_total, load.pages_free = self._pages()
        kv = self._kv.counters
        load.pages_packed, load.pages_relinked = kv.pages_packed, kv.pages_relinked
        load.rows_dequantised_attention = kv.rows_dequantised["attention"]
        load.rows_dequantised_rollback = kv.rows_dequantised["rollback"]
        load.rows_dequantised_resume = kv.rows_dequantised["resume"]
        load.append_ns, load.seal_ns = kv.append_ns, kv.seal_ns
        with self._lock:
            self._load = load


    def _pages(self) -> tuple[int, int]:
        """(pages, pages neither held nor promised) of the scarcest group; zeros where no group has pages."""
        scarcest = (0, 0)
        for group in self._geometry.groups:
            if group.has_pages:
                total = self._attachment.arenas[group.name].num_pages
                promised = sum(worst_pages(self._geometry, group, s.num_promised) for s in self._running)
                free = max(0, total - promised)
                if not scarcest[0] or free < scarcest[1]:
                    scarcest = (total, free)
        return scarcest


def _draw(sequence: Sequence) -> Draw:
    return Draw(sequence.request.sampling, sequence.token_ids)


def _output(
    sequence: Sequence,
    new: Drawn | None,
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED,
    error: TailpackError | None = None,
) -> Output:
    last = reason != types_pb2.FINISH_REASON_UNSPECIFIED
    sampled = not sequence.request.sampling.greedy
    seed = sequence.request.sampling.seed if sampled and not sequence.seed_reported else None
    sequence.seed_reported = True
    return Output(
        request_id=sequence.request.request_id,
        owner=sequence.request.owner,
        token_offset=sequence.num_emitted - (new is not None),
        token_ids=(new.token_id,) if new is not None else (),
        logprobs=(new.logprobs,) if new is not None and new.logprobs is not None else (),
        finish_reason=reason,
        error=error,
        usage=sequence.usage() if last else None,
        timings=sequence.timings(time.monotonic_ns()) if last else None,
        seed=seed,
    )


def _refused(request: Request, error: TailpackError) -> Output:
    return Output(
        request_id=request.request_id,
        owner=request.owner,
        token_offset=len(request.emitted),
        finish_reason=types_pb2.FINISH_REASON_ERROR,
        error=error,
        usage=types_pb2.Usage(prompt_tokens=len(request.prompt), output_tokens=len(request.emitted)),
        timings=types_pb2.Timings(),
    )


def _internal(error: BaseException) -> InternalError:
    return InternalError("the engine met a broken invariant", given=f"{type(error).__name__}: {error}")
