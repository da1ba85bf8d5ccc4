"""The sequences of one device: what each was promised, which pages it holds, how far they are sealed.

Pure: values in, values out. The token log lives in the control block; its owner passes the tokens in. Every method
checks all it was given before it changes anything, so an error leaves the table as it was.

What a group's mode means for its pages stands in ``group_pages``, which prompts can be resumed where in
``prefix_match``, how sequences are taken back in ``rollback``, what is kept of them in ``kept_boundaries``; here pages
are counted, promised, shared, evicted and let go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kvstore.answers import (
    Admitted,
    Checkpointed,
    Forked,
    NewPage,
    PageCopy,
    Refill,
    Refused,
    Relinked,
    Split,
    TailCopy,
    Truncated,
)
from kvstore.checkpoints import Checkpoint, CheckpointCache, JunctionNotes
from kvstore.events import EventLog
from kvstore.geometry import CacheGeometry
from kvstore.group_pages import NO_PAGE, GroupPages, Shadow, unhanded, worst_pages
from kvstore.kept_boundaries import KeptBoundaries
from kvstore.pages import PageState, PageTable
from kvstore.prefix_index import PrefixIndex
from kvstore.prefix_match import GroupMatch, Match, find_match
from kvstore.rollback import Rollback, after_cut, demand_affordable, plan_rollback
from kvstore.sequence_pages import KnownPage, SealedPage, SequencePages, Tokens
from kvstore.table_check import check_sequences
from protos.errors import InternalError, InvalidRequest, NotFound, PreconditionFailed, TooLarge
from protos.page_hash import PAGE_TOKENS, ROOT, page_hashes

JUNCTIONS_REMEMBERED = 4096


class SequenceTable:
    """Sequences of one device, in slots [0, max_sequences).

    A sequence's slot is also its tail slot in every group that has tails; tail slots from max_sequences on belong to
    checkpoints.

    Args:
        geometry: groups and modes.
        num_pages: pages of each group.
        max_sequences: slots.
        max_sequence_tokens: the longest sequence, prompt and output together.
        weights_digest: part of every page hash, beside the geometry's.
        checkpoint_slots: tail slots for checkpoints.
        events: told of every hash that becomes reusable or stops being so.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        num_pages: Mapping[str, int],
        *,
        max_sequences: int,
        max_sequence_tokens: int,
        weights_digest: bytes,
        checkpoint_slots: int = 0,
        events: EventLog | None = None,
    ) -> None:
        self.geometry = geometry
        self.groups = {g.name: PageTable(g.name, num_pages[g.name]) for g in geometry.groups if g.has_pages}
        self.max_sequences = max_sequences
        self.max_sequence_tokens = max_sequence_tokens
        self.index = PrefixIndex(
            list(self.groups),
            windowed=[g.name for g in geometry.groups if g.retained_window or g.keep_every > 1],
            events=events,
        )
        self._tailed = [group.name for group in geometry.groups if group.has_tail]
        self._kept = KeptBoundaries(geometry, num_pages, range(max_sequences, max_sequences + checkpoint_slots))
        self.counters: Counter[tuple[str, str]] = Counter()
        """(what, group) -> how often, ever; group is empty for what concerns all of them."""
        self._junctions = JunctionNotes(JUNCTIONS_REMEMBERED)
        self._digests = {"weights_digest": weights_digest, "geometry_digest": geometry.digest()}
        self._sequences: dict[int, SequencePages] = {}
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    @property
    def slots(self) -> list[int]:
        return list(self._sequences)

    @property
    def checkpoints(self) -> CheckpointCache:
        return self._kept.cache

    def __len__(self) -> int:
        return len(self._sequences)

    def sequence(self, slot: int) -> SequencePages:
        """Raises NotFound (UNKNOWN_SLOT) when no sequence has that slot."""
        try:
            return self._sequences[slot]
        except KeyError:
            raise NotFound(
                "no such sequence", reason="UNKNOWN_SLOT", given=slot, hint="it was released, or never opened"
            ) from None

    def confirm(self) -> None:
        """The worker has made the copies that the last answer asked for: it calls again, or said goodbye."""
        self._kept.confirm()

    def end_attachment(self, *, confirmed: bool) -> None:
        """Nobody is attached any more: pins end with their sequences, which the caller releases."""
        self._kept.end_attachment(confirmed=confirmed)

    # --- open ---

    def demand_valid(self, num_prompt_tokens: int, max_tokens: int) -> None:
        """Raises what ``open`` raises for these lengths, so that a batch can be checked before any of it is opened."""
        if num_prompt_tokens < 1:
            raise InvalidRequest(
                "a sequence needs a prompt", reason="EMPTY_PROMPT", given=0, allowed="at least 1 token"
            )
        if max_tokens > self.max_sequence_tokens:
            raise TooLarge("sequence is longer than a slot", given=max_tokens, allowed=self.max_sequence_tokens)
        if num_prompt_tokens > max_tokens:
            raise InvalidRequest("prompt is over max_tokens", given=num_prompt_tokens, allowed=max_tokens)

    def open(
        self,
        request_id: str,
        salt: str,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        reuse: bool = True,
        exact_only: bool = False,
    ) -> Admitted | Refused:
        """Pins what is cached of the prompt and promises the pages of the rest of ``max_tokens`` tokens in every group,
        or refuses and changes nothing.

        Raises:
            InvalidRequest: no prompt (EMPTY_PROMPT), or a prompt over max_tokens.
            TooLarge: max_tokens over the longest sequence.
        """
        self.demand_valid(len(prompt), max_tokens)
        hashes = list(page_hashes(prompt, salt=salt, **self._digests)) if reuse else []
        match = self._match(salt, hashes, prompt, max_tokens, exact_only) if reuse else None
        states = {g.name: GroupPages.empty(g, self.geometry, len(prompt), max_tokens) for g in self.geometry.groups}
        if match:
            for name, found in match.groups.items():
                _adopt(states[name], found)
        refused = self._refusal(states)
        if refused:
            return refused
        slot = self._free_slots.pop()
        sequence = SequencePages(slot, request_id, salt, max_tokens, states)
        self._sequences[slot] = sequence
        self._hold(states)
        if reuse:
            self._count_match(match)
        refills: list[Refill] = []
        tail_copies: list[TailCopy] = []
        copies: list[PageCopy] = []
        if match:
            sequence.hashes = hashes[: match.num_tokens // PAGE_TOKENS]
            sequence.inexact_from = match.inexact_from
            refills = [Refill(name, slot, *found.refill) for name, found in match.groups.items() if found.refill]
            copies = self._open_pages(states, match)
            tail_copies = self._kept.restore(match.checkpoint, slot) if match.checkpoint else []
        return Admitted(
            slot,
            self._tail_slots(slot),
            num_cached=match.num_tokens if match else 0,
            prefix_exact=match is None or match.exact,
            pages=_copied(sequence.pages),
            bases=sequence.bases,
            refills=refills,
            tail_copies=tail_copies,
            copies=copies,
            junction=self._junction(hashes, len(prompt), match),
        )

    def _match(
        self, salt: str, hashes: Sequence[bytes], prompt: Sequence[int], max_tokens: int, exact_only: bool
    ) -> Match | None:
        return find_match(
            self.geometry,
            self.index,
            self._kept,
            salt=salt,
            hashes=hashes,
            tokens=prompt,
            max_tokens=max_tokens,
            exact_only=exact_only,
        )

    def _open_pages(self, states: Mapping[str, GroupPages], match: Match) -> list[PageCopy]:
        """Open pages of a new sequence whose match ends inside of a page, with copies of what was kept of it."""
        copies = []
        for name, found in match.groups.items():
            if found.copied is not None:
                new = self._take(name, states[name])
                states[name].pages.append(new)
                if new != found.copied:  # the source was evicted for it: the rows are there
                    copies.append(PageCopy(name, found.copied, new, match.num_tokens % PAGE_TOKENS))
        return copies

    def _junction(self, hashes: Sequence[bytes], num_prompt_tokens: int, match: Match | None) -> int:
        """A length behind the match at which prompts were seen to part, this one for at least the second time."""
        done = match.num_tokens if match else 0
        none_needed = {g.name: lambda end: end for g in self.geometry.groups if g.keep_every > 1}
        most = (num_prompt_tokens - 1) // PAGE_TOKENS
        shared = self.index.longest(hashes[:most], none_needed) if hashes and self._tailed else 0
        if shared * PAGE_TOKENS <= done or not self.checkpoints.budget:
            return 0
        parted = any(self.index.continues(name, hashes[shared - 1]) for name in self.groups)
        return shared * PAGE_TOKENS if parted and self._junctions.seen_before(hashes[shared - 1]) else 0

    def _count_match(self, match: Match | None) -> None:
        if match is None:
            self.counters["prefix_misses", ""] += 1
            return
        self.counters["prefix_hits_exact" if match.exact else "prefix_hits_inexact", ""] += 1
        self.counters["prefix_tokens_reused", ""] += match.num_tokens
        for name, found in match.groups.items():
            self.counters["pages_reused", name] += sum(page != NO_PAGE for page in found.pages) + len(found.shadows)

    def _refusal(self, states: Mapping[str, GroupPages]) -> Refused | None:
        """Whether there is room for new states, whose sealed pages would be shared and the rest promised."""
        for name, table in self.groups.items():
            state = states[name]
            cached = sum(table.state(page) == PageState.CACHED for page in state.held())
            if cached + state.still_promised() > table.num_available:
                return Refused(name, state.num_worst, table.num_available, table.num_pages)
        if not self._free_slots:
            if not self.groups:
                return Refused("", 0, 0, 0)
            scarcest = min(self.groups.values(), key=lambda table: table.num_available)
            return Refused("", states[scarcest.group].num_worst, scarcest.num_available, scarcest.num_pages)
        return None

    def _hold(self, states: Mapping[str, GroupPages]) -> None:
        """Shares the pages of new states and promises what they may need yet."""
        for name, table in self.groups.items():
            pages = states[name].held()
            self.index.pin(name, [page for page in pages if table.state(page) == PageState.CACHED])
            table.share(pages)
            self._settle(name, states[name])

    def _tail_slots(self, slot: int) -> dict[str, int]:
        return dict.fromkeys(self._tailed, slot)

    # --- reserve and seal ---

    def reserve(
        self, wanted: Sequence[tuple[int, int, int]], *, repeat: bool = False
    ) -> dict[int, dict[str, list[NewPage]]]:
        """Hands out promised pages for each (slot, num_tokens, step_tokens): see ``Attachment.reserve``.

        Args:
            repeat: hand out again what packed groups have reserved and not sealed.

        Returns:
            slot -> group -> new pages in token order. Slots that needed none are left out.

        Raises:
            NotFound: UNKNOWN_SLOT. InvalidRequest: a slot is named twice, num_tokens is over what was promised, or
            step_tokens is below 1.
        """
        _demand_distinct([slot for slot, *_ in wanted])
        for slot, num_tokens, step_tokens in wanted:
            sequence = self.sequence(slot)
            if not 0 <= num_tokens <= sequence.max_tokens:
                raise InvalidRequest(
                    f"slot {slot} was promised less",
                    reason="OVER_PROMISE",
                    given=num_tokens,
                    allowed=sequence.max_tokens,
                )
            _demand_step(step_tokens)
        handed: dict[int, dict[str, list[NewPage]]] = {}
        for slot, num_tokens, step_tokens in wanted:
            for name, state in self._sequences[slot].groups.items():
                known = list(state.handed.values()) if repeat else []
                new = known + [self._hand_out(name, state, index) for index in state.missing(num_tokens, step_tokens)]
                if new:
                    handed.setdefault(slot, {})[name] = new
        return handed

    def _hand_out(self, name: str, state: GroupPages, index: int) -> NewPage:
        if not state.group.packed:
            new = NewPage(index, self._take(name, state))
            state.pages.append(new.page_id)
            return new
        shadow = state.shadows.get(index)
        if shadow is None:
            new = NewPage(index, self._take(name, state))
        elif shadow.whole:
            new = NewPage(index, shadow.page, Relinked())
        elif shadow.reopened:
            self.groups[name].reopen(shadow.page)
            new = NewPage(index, shadow.page, Split(shadow.page, shadow.num_tokens))
            del state.shadows[index]
        else:
            new = NewPage(index, self._take(name, state), Split(shadow.page, shadow.num_tokens))
        state.handed[index] = new
        return new

    def demand_reserved(self, slot: int, num_tokens: int, step_tokens: int) -> None:
        """Raises what ``seal`` raises, so that a batch can be checked before any of it is sealed."""
        sequence = self.sequence(slot)
        _demand_step(step_tokens)
        for name, state in sequence.groups.items():
            if num_tokens < 0 or num_tokens > sequence.max_tokens or state.missing(num_tokens, step_tokens):
                raise PreconditionFailed(
                    f"slot {slot} has no pages for these tokens in group {name!r}",
                    reason="NOT_RESERVED",
                    given=f"{num_tokens} tokens, {step_tokens} of this step",
                    allowed="what was reserved",
                    hint="reserve the same numbers first",
                )

    def seal(self, slot: int, num_tokens: int, step_tokens: int, tokens: Tokens) -> list[SealedPage]:
        """Moves every group's base as far as (num_tokens, step_tokens) allows, and publishes the pages below.

        Args:
            tokens: the sequence's.

        Raises:
            NotFound: UNKNOWN_SLOT. PreconditionFailed: NOT_RESERVED.
        """
        self.demand_reserved(slot, num_tokens, step_tokens)
        sequence = self.sequence(slot)
        bases = {name: state.sealed_base(num_tokens, step_tokens) for name, state in sequence.groups.items()}
        return self._move_bases(sequence, bases, num_tokens, step_tokens, tokens)

    def settle_reserved(self, slot: int, num_committed: int, num_packed: int, tokens: Tokens) -> list[SealedPage]:
        """What a worker that is gone had reserved and not sealed: pages that it wrote are sealed, as far as it had
        committed what is in them; the others go back to the sequence's promise.

        Args:
            num_packed: reserved pages of tokens below are written.
        """
        sequence = self.sequence(slot)
        bases = {name: state.written_base(num_committed, num_packed) for name, state in sequence.groups.items()}
        sealed = self._move_bases(sequence, bases, num_committed, 1, tokens)
        for name, state in sequence.groups.items():
            if not state.handed:
                continue
            dropped, shadows = unhanded(state)
            in_place = [new.page_id for new in state.handed.values() if _is_in_place(new)]
            self.groups[name].seal(in_place)
            state.handed, state.shadows = {}, shadows
            self._drop(name, dropped)
            self._settle(name, state)
        return sealed

    def _move_bases(
        self, sequence: SequencePages, bases: Mapping[str, int], num_tokens: int, step_tokens: int, tokens: Tokens
    ) -> list[SealedPage]:
        self._extend_hashes(sequence, max(bases.values()) // PAGE_TOKENS, tokens)
        sealed: list[SealedPage] = []
        for name, state in sequence.groups.items():
            first, last = state.num_sealed, bases[name] // PAGE_TOKENS
            state.base = bases[name]
            if state.group.has_pages:
                for index in range(first, last):
                    if state.keeps(index):
                        sealed.append(self._seal_page(sequence, name, state, index))
                    else:
                        state.pages.append(NO_PAGE)
                        self.counters["pages_left_out", name] += 1
                self._free_behind_window(name, state, num_tokens, step_tokens)
                self._settle(name, state)
            if state.lossy_end <= state.base:
                state.lossy_end = 0
            state.wrote(num_tokens)
        return sealed

    def _seal_page(self, sequence: SequencePages, name: str, state: GroupPages, index: int) -> SealedPage:
        table = self.groups[name]
        digest = sequence.hashes[index]
        parent = sequence.hashes[index - 1] if index else ROOT
        relinked, replaced, packed_twice = False, None, False
        if state.group.packed:
            new = state.handed.pop(index)
            page, relinked = new.page_id, isinstance(new.source, Relinked)
            state.pages.append(page)
            shadow = state.shadows.pop(index, None)
            packed_twice = new.source is None and index * PAGE_TOKENS < state.lossy_end
            self.counters["pages_packed_twice", name] += packed_twice
            if relinked:
                self.counters["pages_relinked", name] += 1
            else:
                table.seal([page])
                self.counters["pages_sealed", name] += 1
            if isinstance(new.source, Split):
                self.counters["pages_split", name] += 1
                if shadow:
                    self._drop(name, [shadow.page])
        else:
            page = state.pages[index]
            table.seal([page])
            self.counters["pages_sealed", name] += 1
        if not relinked:
            end = (index + 1) * PAGE_TOKENS
            exact = not packed_twice and (sequence.inexact_from is None or end <= sequence.inexact_from)
            added = self.index.add(name, digest, page, parent=parent, exact=exact)
            replaced = added.replaced
            if added.free is not None:
                table.uncache([added.free])
        return SealedPage(name, index, page, digest, parent, relinked, replaced)

    def _free_behind_window(self, name: str, state: GroupPages, num_tokens: int, step_tokens: int) -> None:
        behind = state.behind_window(num_tokens, step_tokens)
        if behind:
            self._drop(name, [state.pages[index] for index in behind])
            state.pages[behind.start : behind.stop] = [NO_PAGE] * len(behind)
            state.first_page = behind.stop
            self.counters["pages_freed_behind_window", name] += len(behind)

    def _extend_hashes(self, sequence: SequencePages, num_pages: int, tokens: Tokens) -> None:
        known = len(sequence.hashes)
        if num_pages > known:
            sequence.hashes += page_hashes(
                tokens(known * PAGE_TOKENS, num_pages * PAGE_TOKENS),
                salt=sequence.salt,
                parent=sequence.hashes[-1] if known else ROOT,
                **self._digests,
            )

    # --- truncate ---

    def truncate(self, slot: int, num_tokens: int, length: int, tokens: Tokens) -> Truncated:
        """Forgets tokens [num_tokens, length). Pages behind the cut go back to the promise of the sequence.

        Args:
            length: the logged length.
            tokens: the sequence's, as long as they are.

        Raises:
            NotFound: UNKNOWN_SLOT. PreconditionFailed: TRUNCATE_EXTENDS, TRUNCATE_TOO_DEEP. CapacityError: ARENA_FULL,
            pages that others share cannot be replaced now.
        """
        sequence = self.sequence(slot)
        if not 0 <= num_tokens <= length:
            raise PreconditionFailed(
                "a truncate never extends a sequence",
                reason="TRUNCATE_EXTENDS",
                given=num_tokens,
                allowed=f"0 to {length}",
            )
        plan = plan_rollback(
            sequence, num_tokens, length, tokens(0, num_tokens), self._kept, self._chain(sequence.salt)
        )
        demand_affordable(sequence, plan.cuts, self.groups)
        for state in sequence.groups.values():
            state.wrote(length)
        self._apply(sequence, plan)
        num_tokens, cuts, checkpoint = plan.num_tokens, plan.cuts, plan.checkpoint
        copies: list[PageCopy] = []
        for name, cut in cuts.items():
            if cut.copied is not None:
                state = sequence.groups[name]
                new = self._take(name, state)
                state.pages.append(new)
                if new != cut.copied:
                    copies.append(PageCopy(name, cut.copied, new, num_tokens % PAGE_TOKENS))
        del sequence.hashes[num_tokens // PAGE_TOKENS :]
        tail_copies = self._restore_tails(sequence, checkpoint) if checkpoint else []
        kept_from = self._kept.tails(checkpoint).inexact_from if checkpoint else None
        exact = kept_from is None or kept_from >= num_tokens if checkpoint else not plan.refills
        sequence.mark_inexact(num_tokens)
        self.counters["truncates_exact" if exact and not checkpoint else "truncates_deep", ""] += 1
        refills = [Refill(name, slot, *cut.refill) for name, cut in cuts.items() if cut.refill]
        return Truncated(num_tokens, copies, refills, exact, sequence.bases, tail_copies)

    def _chain(self, salt: str) -> Callable[[Sequence[int]], list[bytes]]:
        return lambda tokens: list(page_hashes(tokens, salt=salt, **self._digests))

    def _apply(self, sequence: SequencePages, plan: Rollback) -> None:
        for name, cut in plan.cuts.items():
            old = sequence.groups[name]
            state = sequence.groups[name] = after_cut(old, cut)
            if cut.refill:
                state.lossy_end = max(state.lossy_end, cut.refill[0] + cut.refill[1])
            state.lossy_end = min(state.lossy_end, plan.num_tokens)
            state.rings = state.rings.cut(plan.num_tokens)
            if state.lossy_end <= state.base:
                state.lossy_end = 0
            if not state.group.has_pages:
                continue
            table = self.groups[name]
            for new in old.handed.values():  # completed in place, and not published: sealed as it was
                if _is_in_place(new):
                    table.seal([new.page_id])
            self._drop(name, cut.dropped)
            for shadow in cut.shadows.values():
                if shadow.reopened and self.index.hash_of(name, shadow.page) is not None:
                    self.index.remove(name, shadow.page)
            self._settle(name, state)

    def _restore_tails(self, sequence: SequencePages, checkpoint: Checkpoint) -> list[TailCopy]:
        kept = self._kept.tails(checkpoint)
        for name in checkpoint.slots:
            state = sequence.groups[name]
            state.rings, state.lossy_end = kept.rings[name], 0
        if kept.inexact_from is not None:
            sequence.inexact_since(kept.inexact_from)
        return self._kept.restore(checkpoint, sequence.slot)

    # --- fork, checkpoint, release ---

    def fork(self, slot: int, request_id: str, max_tokens: int, length: int) -> Forked | Refused:
        """A new sequence of the first ``length`` tokens of another: shares sealed pages, copies open ones and tails.

        Args:
            length: the committed length of the parent.
            max_tokens: worst case of the new sequence.

        Raises:
            NotFound: UNKNOWN_SLOT. InvalidRequest, TooLarge: max_tokens.
        """
        parent = self.sequence(slot)
        self.demand_valid(length, max_tokens)
        states = {name: self._forked(parent, state, max_tokens) for name, state in parent.groups.items()}
        refused = self._refusal(states) or self._reopened(parent)
        if refused:
            return refused
        child = SequencePages(
            self._free_slots.pop(),
            request_id,
            parent.salt,
            max_tokens,
            states,
            parent.hashes[: length // PAGE_TOKENS],
            parent.inexact_from,
        )
        self._sequences[child.slot] = child
        self._hold(states)
        copies: list[PageCopy] = []
        for name, state in states.items():
            if state.group.mode != "dense":
                continue
            for index in state.missing(length, 1):
                new = self._hand_out(name, state, index)
                first = new.index * PAGE_TOKENS
                copies.append(
                    PageCopy(name, parent.pages[name][new.index], new.page_id, min(PAGE_TOKENS, length - first))
                )
        self.counters["forks", ""] += 1
        return Forked(
            child.slot,
            _copied(child.pages),
            child.bases,
            copies,
            [TailCopy(name, slot, child.slot) for name in self._tailed],
            self._tail_slots(child.slot),
        )

    def _reopened(self, parent: SequencePages) -> Refused | None:
        """A page that is completed in place cannot be shared; there was no other, so there is no room for a fork."""
        for name, state in parent.groups.items():
            if any(shadow.reopened for shadow in unhanded(state)[1].values()):
                table = self.groups[name]
                return Refused(name, state.num_worst, table.num_available, table.num_pages)
        return None

    def _forked(self, parent: SequencePages, state: GroupPages, max_tokens: int) -> GroupPages:
        _, shadows = unhanded(state)
        worst = max(worst_pages(state.group, state.margin, max_tokens), state.num_sealed)
        # Rows that were dequantised and that the parent would never have packed: their pages, if they are still there.
        # Where one is gone, the rows are packed a second time, and that page is not exact.
        for index in range(state.num_sealed, min(worst, state.lossy_end // PAGE_TOKENS)):
            page = self.index.page(state.group.name, parent.hashes[index])
            if index not in shadows and page is not None:
                shadows[index] = Shadow(page, PAGE_TOKENS)
        return replace(
            state,
            worst=worst,
            pages=state.pages[: state.num_sealed] if state.group.has_pages else [],
            shadows={
                index: Shadow(shadow.page, shadow.num_tokens) for index, shadow in shadows.items() if index < worst
            },
            handed={},
            promised=0,
        )

    def checkpoint(self, slot: int, num_tokens: int, kind: str, tokens: Tokens) -> Checkpointed:
        """Keeps what a resume of a sequence's first ``num_tokens`` tokens needs: its tails, and copies of open pages.
        No copies: no budget, an equal one is kept, or tails have dequantised rows (resuming from pages gives as much).

        Raises:
            NotFound: UNKNOWN_SLOT. InvalidRequest: UNKNOWN_CHECKPOINT_KIND, or no tokens. PreconditionFailed:
            CHECKPOINT_NOT_DENSE, a tail no longer holds what ``num_tokens`` needs.
        """
        sequence = self.sequence(slot)
        if not self._kept.can_keep(sequence, num_tokens, kind):
            return Checkpointed()
        log = list(tokens(0, num_tokens))
        return self._kept.keep(sequence, num_tokens, kind, log, self._chain(sequence.salt)(log))

    def release(self, slots: Sequence[int]) -> dict[int, dict[str, list[int]]]:
        """Ends sequences; returns slot -> group -> pages that nobody holds now. Those with a hash stay cached.

        Raises:
            NotFound: UNKNOWN_SLOT, and nothing was released. InvalidRequest: a slot is named twice.
        """
        _demand_distinct(slots)
        sequences = [self.sequence(slot) for slot in slots]
        let_go: dict[int, dict[str, list[int]]] = {}
        for sequence in sequences:
            let_go[sequence.slot] = {}
            for name, table in self.groups.items():
                state = sequence.groups[name]
                table.unpromise(state.promised)
                let_go[sequence.slot][name] = self._drop(name, state.held())
            del self._sequences[sequence.slot]
            self._free_slots.append(sequence.slot)
        return let_go

    # --- pages ---

    def _take(self, name: str, state: GroupPages) -> int:
        """A promised page; a cached one is evicted when none is free."""
        table = self.groups[name]
        if not table.num_free:
            for evicted in self.index.evict(name, 1):
                table.uncache([evicted.page])
                self.counters["pages_evicted", name] += 1
        state.promised -= 1
        return table.take(1)[0]

    def _drop(self, name: str, pages: Sequence[int]) -> list[int]:
        """One holder fewer of each page, given in token order; returns those that nobody holds now."""
        let_go = self.groups[name].drop(pages, lambda page: self.index.hash_of(name, page) is not None)
        self.index.unpin(name, let_go)
        return let_go

    def condemn(self, name: str, page: int) -> None:
        """Nobody goes on from a page any more; who holds it keeps it."""
        if self.index.hash_of(name, page) is not None and self.index.remove(name, page):
            self.groups[name].uncache([page])

    def _settle(self, name: str, state: GroupPages) -> None:
        """Makes the pages set aside for a sequence what it may need yet."""
        target = state.still_promised()
        if target > state.promised:
            self.groups[name].promise(target - state.promised)
        else:
            self.groups[name].unpromise(state.promised - target)
        state.promised = target

    # --- after a store's death ---

    def restore(self, sequences: Iterable[SequencePages], pages: Mapping[str, Sequence[KnownPage]]) -> None:
        """Makes an empty table what another store's was. Promises follow from the sequences.

        Args:
            pages: all pages of each group.

        Raises:
            InternalError: they contradict each other; the table is of no use then.
        """
        for name, table in self.groups.items():
            table.restore([(page.state, page.refs, page.generation) for page in pages[name]])
            for number, page in enumerate(pages[name]):
                if page.exact is not None:
                    pinned = page.state == PageState.SEALED
                    self.index.add(name, page.hash, number, parent=page.parent, exact=page.exact, pinned=pinned)
        for sequence in sequences:
            self._free_slots.remove(sequence.slot)
            self._sequences[sequence.slot] = sequence
            for name in self.groups:
                self._settle(name, sequence.groups[name])
        self.check()

    # --- checks ---

    def hashes(self, tokens: Sequence[int], salt: str) -> list[bytes]:
        """The chain of the whole pages of these tokens."""
        return self._chain(salt)(tokens)

    def check(self) -> None:
        """Raises InternalError when sequences, page tables, index and checkpoints do not agree."""
        check_sequences(self.groups, self.index, self.checkpoints, list(self._sequences.values()))
        if sorted([*self._free_slots, *self._sequences]) != list(range(self.max_sequences)):
            raise InternalError("a slot is lost or both free and in use")


def _is_in_place(new: NewPage) -> bool:
    """Whether the page was sealed before and is completed where it is."""
    return isinstance(new.source, Split) and new.source.from_page == new.page_id


def _adopt(state: GroupPages, found: GroupMatch) -> None:
    """Makes the state of a new sequence what was matched; its pages are not counted yet."""
    state.pages = list(found.pages)
    state.base = found.base
    state.first_page = found.first_page
    state.shadows = {index: Shadow(page, PAGE_TOKENS) for index, page in found.shadows.items()}
    state.lossy_end = found.lossy_end if found.lossy_end > found.base else 0
    if found.rings is not None:
        state.rings = found.rings


def _copied(pages: Mapping[str, Iterable[int]]) -> dict[str, list[int]]:
    return {name: list(ids) for name, ids in pages.items()}


def _demand_step(step_tokens: int) -> None:
    if step_tokens < 1:
        raise InvalidRequest("a step has at least one token", given=step_tokens, allowed="1 or more")


def _demand_distinct(slots: Sequence[int]) -> None:
    if len(set(slots)) != len(slots):
        raise InvalidRequest("a slot is named twice", reason="DUPLICATE_SLOT", given=sorted(slots))
