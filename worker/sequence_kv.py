"""What the running sequences hold in the kvstore, and the order in which it changes. Used by the engine thread only.

A step goes: ``reserve`` before the rows are computed; ``keep_rows`` after; then the engine logs tokens and calls
``commit``; then ``publish``. A reader after a crash thus never finds a length ahead of its rows. A GPU does what it is
asked later; so whatever changes rows waits for it (``KvView.settle``) before anybody is told: the copies behind an
answer, too, which the next call says are made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import structlog

from kernels.page_sums import checksum_keys, page_sums
from kvstore.client import Admitted, Adopted, Forked, NewPage, OpenRequest, Refused, Truncated, page_checksum
from kvstore.geometry import LayerGroup
from kvstore.retention import pages_for
from protos.errors import InternalError
from protos.page_hash import PAGE_TOKENS
from worker import kv_moves
from worker.adoption import Adoption
from worker.due import base_after, needs_pages, seals, worst_pages
from worker.gpu_pages import GpuPages
from worker.kv_moves import Packing, SealJob, SpanRows
from worker.kv_view import KvView
from worker.lasting import KvCalls
from worker.model_runner import Step
from worker.scheduler import Work
from worker.seen import Seen
from worker.sequence import Load
from worker.sequence import Sequence as Seq

log = structlog.get_logger("engine")

MAX_ADOPTIONS = 8
"""Of a sequence, without a committed token in between."""
MAX_FAILURES = 3
"""Of the device, in steps of a sequence, likewise: the second time it ran alone (worker/trials.py)."""

NewPages = Mapping[int, Mapping[str, Sequence[NewPage]]]
"""By slot and group."""


@dataclass(frozen=True)
class Kept:
    """What ``keep_rows`` leaves: checksums of pages written, tails to fill with the commit of their slot, and the
    tokens of each work's sequence that are there whatever becomes of guesses.
    """

    checksums: dict[tuple[str, int], int]
    certain: list[int]
    late: dict[int, list[tuple[SpanRows, int]]]  # by slot
    step: Step
    moved: Set[Seq] = frozenset()  # what ``seal_behind`` told the bases of


@dataclass(frozen=True)
class Behind:
    """What is done behind a captured step, on its stream: pages that are packed (by slot: of tokens below which) and
    dense ones that are summed up.
    """

    packing: Packing
    packed: dict[int, int]
    moved: Set[Seq]


class SequenceKv:
    """One attachment and the view of its memory. ``kv.counters`` count what happened to rows.

    ``on_gpu``: what packs and unpacks where packed pages lie on a GPU.
    """

    def __init__(self, attachment: KvCalls, kv: KvView, on_gpu: GpuPages | None = None) -> None:
        self.kv = kv
        self._attachment = attachment
        self._geometry = kv.geometry
        self._tailed = [group for group in kv.geometry.groups if group.has_tail]
        self._packed = [group for group in kv.geometry.groups if group.packed]
        self._mode_missed = False
        self._damaged: dict[str, list[int]] = {}  # pages by group, of what was found at the start
        self._on_gpu = on_gpu

    @property
    def has_tails(self) -> bool:
        """Whether any group keeps its newest rows in a ring, which takes one span of a sequence and step."""
        return bool(self._tailed)

    # --- the ends of a sequence ---

    def open(self, opened: Seq, promised: int, *, reuse: bool, exact_only: bool) -> Refused | None:
        """Admits a sequence and takes over what is cached of its tokens; the rest is computed from there.

        Args:
            promised: tokens that pages are promised for.

        Raises:
            InvalidRequest, TooLarge: the store does not take it.
        """
        request = OpenRequest(
            request_id=opened.request.request_id,
            tenant_salt=opened.request.tenant,
            prompt_token_ids=opened.token_ids,
            max_tokens=promised,
            frozen_request=opened.request.frozen(),
            reuse=reuse,
            exact_only=exact_only,
        )
        (answer,) = self._attachment.open([request])
        if isinstance(answer, Refused):
            return answer
        self._take(opened, answer, promised)
        opened.num_computed, opened.junction = answer.num_cached, answer.junction
        again = opened.num_dropped > 0  # what it finds now may be its own: that is no prompt saved
        opened.num_cached = min(opened.num_cached, answer.num_cached) if again else answer.num_cached
        # Tokens that went out stay as exact as what they were computed over.
        opened.prefix_exact = answer.prefix_exact and (opened.prefix_exact or not opened.num_emitted)
        if not answer.prefix_exact:
            log.info(
                "resumed from packed rows, which is lossy",
                request_id=opened.request.request_id,
                num_cached=answer.num_cached,
            )
        kv_moves.copy_pages(self.kv, answer.copies)
        kv_moves.copy_tails(self.kv, answer.tail_copies)
        kv_moves.refill_tails(self.kv, answer.refills, "resume", self._on_gpu)
        if answer.copies or answer.tail_copies or answer.refills:
            self.kv.settle()
        self._attachment.control.commit(opened.slot, answer.num_cached)
        return None

    def not_deadly(self, found: Iterable[Adopted]) -> list[Adopted]:
        """Gives up what no worker survives: MAX_ADOPTIONS in a row took it over and got no further, or MAX_FAILURES of
        the device ended its steps. It may be what ends them; its router, if it is still there, is refused nothing and
        decides anew.
        """
        control, kept = self._attachment.control, []
        for held in found:
            count, failures = control.count_adoption(held.slot), control.failures(held.slot)
            if count <= MAX_ADOPTIONS and failures < MAX_FAILURES:
                kept.append(held)
                continue
            log.error(
                "given up: no worker gets any further with it",
                request_id=held.request_id,
                workers=count - 1,
                failures=failures,
            )
            self._attachment.release([held.slot])
        return kept

    def undamaged(self, found: Iterable[Adopted]) -> list[Adopted]:
        """With those marked as not intact of which a sealed page is not what it was. On a GPU; the pages of host memory
        the store has compared.
        """
        if self._on_gpu is None:
            return list(found)
        return [replace(held, intact=False) if self._find_damage(held) else held for held in found]

    def _find_damage(self, held: Adopted) -> bool:
        any_damaged = False
        for name, page_ids in held.pages.items():
            entries, arena = self._attachment.control.pages[name], self.kv.page_bytes(name)
            known = [page for page in page_ids if page >= 0 and entries["checksum"][page]]  # of sealed pages alone
            keys = checksum_keys(arena.shape[1], arena.device)
            sums = page_sums(arena, known, keys).tolist()
            for page, found in zip(known, sums, strict=True):
                if found % (1 << 64) != int(entries["checksum"][page]):
                    log.error("a page is damaged: nobody goes on from it", group=name, page=page, slot=held.slot)
                    self._damaged.setdefault(name, []).append(page)
                    any_damaged = True
        return any_damaged

    def recover(self, slots: Iterable[int]) -> None:
        """Brings tails back that a worker was overwriting when it was killed (``commit``). Before anything is opened.

        Raises:
            InternalError: a tail is not where it should have been saved.
        """
        control = self._attachment.control
        for slot in slots:
            spare = control.saved_in(slot)
            if spare is None:
                continue
            if not 0 <= spare < control.shape.max_sequences or control.is_live(spare):
                raise InternalError("a tail was saved in a slot that is not free", given=spare)
            for group in self._tailed:
                self.kv.copy_tail(group.name, spare, slot)
            self.kv.settle()
            control.clear_saved(slot)

    def adopt(self, adoption: Adoption) -> None:
        """Takes over the sequences that go on, and gives up what is not wanted. What their worker had packed and not
        sealed, the store has sealed.
        """
        if adoption.released:
            self._attachment.release(adoption.released, self._damaged)
        self._damaged = {}
        for adopted, held in adoption.going_on:
            self._take(adopted, held, held.max_tokens)
            if self._tailed and adopted.num_computed == adopted.num_prompt:
                self._keep_tails(adopted, "prompt_end")  # the step that came here did not, perhaps
            if not adopted.num_uncomputed:  # cut off in a truncate or a fork: nothing to draw the next token from
                self.truncate(adopted, adopted.num_computed - 1)

    def release(self, ended: Seq, *, keep: bool) -> None:
        """Gives up what a sequence holds. ``keep``: its tails are kept first, for a next turn to go on exactly."""
        if keep:
            self.keep_turn(ended)
        self._attachment.release([ended.slot])

    def keep_turn(self, ended: Seq) -> None:
        """Keeps what a next turn goes on from."""
        self._look_at_mode(ended)
        if ended.num_computed:
            self._keep_tails(ended, "turn_end")

    def count_anew(self, ended: Seq) -> None:
        """It runs no more, so it ends no worker, however many take it over while it waits for its caller."""
        self._attachment.control.clear_ends(ended.slot)

    def too_large(self, num_tokens: int) -> LayerGroup | None:
        """The group whose arena a sequence of so many tokens outgrows."""
        for group in self._geometry.groups:
            if group.has_pages and worst_pages(self._geometry, group, num_tokens) > self._num_pages(group):
                return group
        return None

    # --- a step ---

    def reserve(self, work: Sequence[Work]) -> NewPages:
        """Pages for every token of the step, in one call, and none for most steps.

        Returns:
            The new pages; those of dense groups are in the page tables already.
        """
        wanted = []
        for w in work:
            # Guesses may all be taken back, and a rollback may follow: only what both leave dense behind is sealed.
            step_tokens = self._geometry.margin + 1 + w.num_drafts if w.num_drafts else 1
            if needs_pages(self._geometry, w.sequence, w.end, step_tokens):
                wanted.append((w.sequence.slot, w.end, step_tokens))
        if not wanted:
            return {}
        new_pages = self._attachment.reserve(wanted)
        for w in work:
            for name, pages in new_pages.get(w.sequence.slot, {}).items():
                if not self._geometry.group(name).packed:
                    w.sequence.pages[name] += [page.page_id for page in pages]
            for group in self._geometry.groups:
                if group.mode == "dense" and len(w.sequence.pages[group.name]) < pages_for(w.end):
                    self._read_pages(w.sequence, [group])  # given already, in an answer that was lost with its store
                if group.mode == "dense" and len(w.sequence.pages[group.name]) < pages_for(w.end):
                    given = len(w.sequence.pages[group.name])
                    raise InternalError("the kvstore reserved too little", given=given, allowed=pages_for(w.end))
        return new_pages

    def keep_rows(self, work: Sequence[Work], step: Step, new_pages: NewPages) -> Kept:
        """Packs what is due, then moves prefill rows from the workspace into the tails.

        A chunk that laps a ring overwrites rows that the committed length still needs: it waits for ``commit``.
        """
        control = self._attachment.control
        jobs: list[SealJob] = []
        packed: dict[int, int] = {}  # by slot
        soon: list[tuple[SpanRows, int]] = []
        late: dict[int, list[tuple[SpanRows, int]]] = {}
        for w, workspace_row in zip(work, step.workspace_rows, strict=True):
            for group in self._tailed:
                slot, base = w.sequence.tail_slots[group.name], w.sequence.bases[group.name]
                rows = SpanRows(group.name, slot, w.start, w.count, workspace_row)
                pages = new_pages.get(w.sequence.slot, {}).get(group.name)
                if pages and group.packed:
                    jobs.append(SealJob(rows, pages))
                    packed[w.sequence.slot] = w.end
                if workspace_row >= 0:
                    laps = self._geometry.laps(group, base, w.start, w.end)
                    (late.setdefault(w.sequence.slot, []) if laps else soon).append(
                        (rows, base_after(self._geometry, group, base, w.end, 1))
                    )
        packing = kv_moves.pack(self.kv, jobs, step.workspace, self._on_gpu)
        kv_moves.fill_tails(self.kv, soon, step.workspace)
        checksums = packing.checksums()
        self.kv.settle()
        for slot, num_tokens in packed.items():
            control.mark_packed(slot, num_tokens)
        return Kept(checksums, [w.certain_end for w in work], late, step)

    def seal_behind(self, work: Sequence[Work], new_pages: NewPages) -> Behind | None:
        """Begins what is due once a captured step is done, which was launched and may still run: packs pages out of
        tails, and sums up dense pages that are whole. Moves the sequences' bases and page tables, so that the next step
        reads what is packed; the store is told by ``publish``, once ``keep_behind`` has seen it done.

        Returns:
            None, and begins nothing, where PyTorch packs a page that is due: that would wait for the step.
        """
        jobs: list[SealJob] = []
        packed: dict[int, int] = {}
        whole: dict[str, list[int]] = {}
        due: list[tuple[Seq, LayerGroup, int]] = []
        for w in work:
            for group in self._geometry.groups:
                base = w.sequence.bases[group.name]
                after = base_after(self._geometry, group, base, w.end, 1)
                if after == base:
                    continue
                if group.packed:
                    if self._on_gpu is None or not self._on_gpu.packs(group.name):
                        return None
                    due.append((w.sequence, group, after))
                    if pages := new_pages.get(w.sequence.slot, {}).get(group.name):
                        rows = SpanRows(group.name, w.sequence.tail_slots[group.name], w.start, w.count, -1)
                        jobs.append(SealJob(rows, pages))
                        packed[w.sequence.slot] = w.end
                elif group.mode == "dense":
                    pages_of = w.sequence.pages[group.name]
                    whole.setdefault(group.name, []).extend(pages_of[base // PAGE_TOKENS : after // PAGE_TOKENS])
        packing = kv_moves.pack(self.kv, jobs, None, self._on_gpu)
        for name, pages_whole in whole.items():
            if self._on_gpu is not None:
                packing.sum_pages(self._on_gpu, name, pages_whole)
        for sequence, group, after in due:
            new = {page.index: page.page_id for page in new_pages.get(sequence.slot, {}).get(group.name, ())}
            first = sequence.bases[group.name] // PAGE_TOKENS
            sequence.pages[group.name] += [new.get(index, -1) for index in range(first, after // PAGE_TOKENS)]
            sequence.bases[group.name] = after
        return Behind(packing, packed, {sequence for sequence, *_ in due})

    def keep_behind(self, work: Sequence[Work], step: Step, behind: Behind) -> Kept:
        """As ``keep_rows``, of a captured step that is done. Waits for what was begun behind it, no longer."""
        checksums = behind.packing.checksums()
        for slot, num_tokens in behind.packed.items():
            self._attachment.control.mark_packed(slot, num_tokens)
        return Kept(checksums, [w.certain_end for w in work], {}, step, behind.moved)

    def can_go_on(self, work: Sequence[Work], behind: Behind) -> bool:
        """Whether ``reserve`` may be asked for the step after ``behind``, before the store is told of it."""
        return not any(needs_pages(self._geometry, w.sequence, w.end, 1) for w in work if w.sequence in behind.moved)

    def commit(self, committed: Seq, kept: Kept) -> None:
        """Declares that the rows of a sequence's computed tokens are written, and writes those that had to wait.

        They go over rows that the length before needs. So that a worker that is killed in between loses neither, the
        tails are saved in those of a slot that nobody has, where the next worker finds them.
        """
        control = self._attachment.control
        slot, length = committed.slot, committed.num_computed
        late = kept.late.get(slot)
        if late is not None:
            spare = next(each for each in range(control.shape.max_sequences) if not control.is_live(each))
            for group in self._tailed:
                self.kv.copy_tail(group.name, slot, spare)
            self.kv.settle()
            control.mark_saved(slot, length, spare)
            kv_moves.fill_tails(self.kv, late, kept.step.workspace)
            self.kv.settle()
        control.commit(slot, length)
        if late is not None:
            control.clear_saved(slot)

    def publish(self, work: Sequence[Work], kept: Kept) -> None:
        """After the commit: moves bases over what is packed or whole, one call, and none for most steps."""
        due = [
            (w.sequence, num_tokens)
            for w, num_tokens in zip(work, kept.certain, strict=True)
            if w.sequence in kept.moved or seals(self._geometry, w.sequence, num_tokens, 1)
        ]
        self._seal(due, kept.checksums)
        for w in work if self._tailed else ():
            if w.sequence.num_computed == w.sequence.num_prompt:
                self._keep_tails(w.sequence, "prompt_end")
            elif w.sequence.num_computed == w.sequence.junction:
                self._keep_tails(w.sequence, "junction")

    def _seal(self, due: Sequence[tuple[Seq, int]], checksums: dict[tuple[str, int], int]) -> None:
        """``due``: a sequence and the tokens that it may be sealed at."""
        if not due:
            return
        for group in self._geometry.groups:
            if group.mode == "dense":
                pages = [
                    page
                    for each, num_tokens in due
                    for page in each.pages[group.name][
                        each.bases[group.name] // PAGE_TOKENS : num_tokens // PAGE_TOKENS
                    ]
                    if (group.name, page) not in checksums
                ]
                checksums |= self._sums(group.name, pages)
        result = self._attachment.seal([(each.slot, num_tokens, 1) for each, num_tokens in due], checksums)
        for each, _ in due:
            each.bases.update(result.bases[each.slot])
            self._read_pages(each, self._packed)

    def _sums(self, group: str, pages: Sequence[int]) -> dict[tuple[str, int], int]:
        """Checksums of dense pages. Waits for the GPU."""
        if self._on_gpu is None:
            return {(group, page): page_checksum(self.kv.page_memory(group, page)) for page in pages}
        if not pages:
            return {}
        sums = self._on_gpu.start_sums(group, pages).checksums()
        return {(group, page): checksum for page, checksum in zip(pages, sums, strict=True)}

    def _keep_tails(self, kept: Seq, kind: str) -> None:
        """Asks for a checkpoint of what is computed: copies of its tails, and of open pages beside them."""
        if not self._tailed:
            return
        checkpoint = self._attachment.checkpoint(kept.slot, kept.num_computed, kind)
        kv_moves.copy_pages(self.kv, checkpoint.copies)
        kv_moves.copy_tails(self.kv, checkpoint.tail_copies)
        self.kv.settle()

    # --- going back, and going on twice ---

    def truncate(self, cut: Seq, num_tokens: int, next_token: int | None = None) -> Truncated:
        """Takes a sequence back to ``num_tokens`` computed tokens. Behind them stays one token to compute: the one that
        stood there, or ``next_token``.

        Raises:
            PreconditionFailed, CapacityError: what ``Attachment.truncate`` raises. Nothing was changed then.
        """
        truncated = self._attachment.truncate(cut.slot, num_tokens)
        kv_moves.copy_pages(self.kv, truncated.copies)
        kv_moves.copy_tails(self.kv, truncated.tail_copies)
        kv_moves.refill_tails(self.kv, truncated.refills, "rollback", self._on_gpu)
        self.kv.settle()
        self._attachment.control.mark_copied(cut.slot)
        cut.num_computed = min(cut.num_computed, truncated.num_tokens)
        cut.drafts = []
        del cut.token_ids[num_tokens + 1 :]
        if next_token is not None:
            cut.token_ids[num_tokens:] = [next_token]
        cut.bases.update(truncated.bases)
        self._read_pages(cut, self._geometry.groups)
        self._log_tokens(cut)
        if not truncated.exact:
            cut.prefix_exact = False
            log.warning(
                "rolled back to packed rows, which is lossy",
                request_id=cut.request.request_id,
                num_tokens=num_tokens,
                refilled={refill.group: refill.num_tokens for refill in truncated.refills},
            )
        return truncated

    def fork(self, parent: Seq, request_id: str) -> Seq | None:
        """A second sequence that stands where ``parent`` stands, with its worst case promised; None: no room."""
        promised = parent.max_total_tokens
        request = replace(parent.request, request_id=request_id)
        forked = self._attachment.fork(parent.slot, request_id, promised, request.frozen())
        if isinstance(forked, Refused):
            return None
        child = replace(parent, request=request, token_ids=list(parent.token_ids), seen=Seen(), seed_reported=False)
        child.drafts = list(parent.drafts)
        child.junction = 0  # the parent's checkpoint there serves both
        self._take(child, forked, promised)
        self._fill_fork(child, forked)
        return child

    def grow(self, grown: Seq, promised: int) -> bool:
        """Promises more to a running sequence; False where there is no room.

        It becomes a fork of itself with a larger promise: sealed pages are shared for that moment, open ones and tails
        are copied.
        """
        old = grown.slot
        forked = self._attachment.fork(old, grown.request.request_id, promised, grown.request.frozen())
        if isinstance(forked, Refused):
            return False
        self._take(grown, forked, promised)
        self._fill_fork(grown, forked)
        self._attachment.release([old])
        return True

    def _take(self, taken: Seq, held: Admitted | Forked | Adopted, promised: int) -> None:
        taken.slot, taken.num_promised = held.slot, promised
        taken.pages = {g.name: list(held.pages.get(g.name, ())) for g in self._geometry.groups}
        taken.bases = {g.name: held.bases.get(g.name, 0) for g in self._geometry.groups}
        taken.tail_slots = dict(held.tail_slots)

    def _fill_fork(self, child: Seq, forked: Forked) -> None:
        kv_moves.copy_pages(self.kv, forked.copies)
        kv_moves.copy_tails(self.kv, forked.tail_copies)
        self.kv.settle()
        self._log_tokens(child)
        self._attachment.control.commit(child.slot, child.num_computed)

    def _log_tokens(self, logged: Seq) -> None:
        """Logs what is known of a sequence and not in its log."""
        control = self._attachment.control
        control.append_tokens(logged.slot, logged.token_ids[control.logged(logged.slot) :])

    def _read_pages(self, read: Seq, groups: Sequence[LayerGroup]) -> None:
        """Takes page tables from the control block, where the store wrote them before it answered."""
        for group in groups:
            if not group.has_pages:
                continue
            pages = read.pages[group.name] = self._attachment.control.sequence_pages(read.slot, group.name)
            if group.packed and len(pages) * PAGE_TOKENS != read.bases[group.name]:
                raise InternalError(
                    f"pages and base of layer group {group.name!r} differ",
                    given=f"{len(pages)} pages",
                    allowed=f"base {read.bases[group.name]}",
                )

    # --- what is said about it ---

    def report(self, load: Load, running: Sequence[Seq]) -> None:
        """Fills in the KV fields of a load."""
        load.pages_total, load.pages_free = self._pages(running)
        counters = self.kv.counters
        load.pages_packed, load.pages_relinked = counters.pages_packed, counters.pages_relinked
        load.rows_dequantised_attention = counters.rows_dequantised["attention"]
        load.rows_dequantised_rollback = counters.rows_dequantised["rollback"]
        load.rows_dequantised_resume = counters.rows_dequantised["resume"]
        load.append_ns, load.seal_ns = counters.append_ns, counters.seal_ns

    def _pages(self, running: Sequence[Seq]) -> tuple[int, int]:
        """(pages, pages not promised to those that run) of the scarcest group; zeros where no group has pages."""
        scarcest = (0, 0)
        for group in self._geometry.groups:
            if group.has_pages:
                total = self._num_pages(group)
                free = max(0, total - sum(worst_pages(self._geometry, group, s.num_promised) for s in running))
                if not scarcest[0] or free < scarcest[1]:
                    scarcest = (total, free)
        return scarcest

    def _num_pages(self, group: LayerGroup) -> int:
        """Pages for sequences; the arena may have others behind them, for checkpoints."""
        return len(self._attachment.control.pages[group.name])

    def _look_at_mode(self, ended: Seq) -> None:
        """Says once when a packed mode was asked for and does not pack."""
        for group in self._packed:
            expected = base_after(self._geometry, group, 0, ended.num_computed, 1)
            if expected and not ended.bases[group.name] and not self._mode_missed:
                self._mode_missed = True
                log.warning(
                    "the KV mode does not engage: a sequence was long enough to be packed, and was not",
                    modes=self._geometry.modes,
                    group=group.name,
                    num_tokens=ended.num_computed,
                )
