"""A worker in plain Python over a store's device, tables and control block, beside an oracle that keeps everything.

A row's value is opaque: ``Row(content, lossy, pure)``. ``content`` names salt and all tokens up to the row's own, so
two rows are equal exactly when their histories are; ``lossy`` marks rows that were dequantised; ``pure`` says that the
row was computed as in a sequence that was never interrupted (its window had no lossy row, and all before it were pure).
A packed page holds the rows that were packed; dequantising one gives a lossy row.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvstore.answers import Admitted, Adopted, Forked, NewPage, PageCopy, Refill, Refused, Relinked, Split, TailCopy
from kvstore.arena import bytes_for_pages
from kvstore.device import Device, DeviceSpec, NewSequence
from kvstore.geometry import CacheGeometry, LayerGroup, Region
from kvstore.group_pages import NO_PAGE
from kvstore.pages import PageState
from kvstore.retention import is_dense_again
from protos.errors import CapacityError, PreconditionFailed
from protos.page_hash import PAGE_TOKENS, page_hashes

WEIGHTS = b"w" * 16
ROW = Region(0, "k", 1, 16, "float32")
RATIO_4 = Region(1, "csa", 1, 16, "float32", ratio=4)
PENDING = Region(1, "csa_pending", 1, 16, "float32", block=4, carry=4)

FULL = LayerGroup("full", (ROW,), "turboquant", "tq4")
DENSE = LayerGroup("edges", (ROW,))
RING = LayerGroup("ring", (ROW,), "window", window=96)
SLIDING = LayerGroup("sliding", (ROW,), "fp8", window=384)  # larger than the dense window: pages behind it are freed
SHORT = LayerGroup("short", (ROW,), "turboquant", "tq3", window=200)
COMPRESSED = LayerGroup("csa", (RATIO_4, PENDING), "turboquant", "tq4", window=64)
DENSE_PENDING = LayerGroup("dense_csa", (RATIO_4, PENDING))
RATIO_128 = Region(2, "hca", 1, 16, "float32", ratio=128)
LONG_PENDING = Region(2, "hca_pending", 1, 16, "float32", block=128)
V4_RAW = LayerGroup("raw", (ROW,), "turboquant", "tq4", window=128)
V4_COMPRESSED = LayerGroup("compressed", (RATIO_4, PENDING, RATIO_128, LONG_PENDING))

GEOMETRIES: dict[str, tuple[LayerGroup, ...]] = {
    "packed": (FULL,),
    "dense": (DENSE, replace(DENSE, name="other")),
    "packed and dense edges": (FULL, DENSE),
    "sliding": (SLIDING, FULL),
    "short window": (SHORT,),
    "window": (RING,),
    "window and packed": (RING, FULL),
    "pending": (COMPRESSED, FULL),
    "dense pending": (DENSE_PENDING, DENSE),
    "v4": (V4_RAW, V4_COMPRESSED),
    "v4 checkpoints": (replace(V4_RAW, keep_every=4), V4_COMPRESSED),
    "v4 window": (replace(V4_RAW, mode="window", preset=""), V4_COMPRESSED),
    "v4 dense": (replace(V4_RAW, mode="dense", preset=""), V4_COMPRESSED),
    "v4 packed": (replace(V4_RAW, keep_every=2), replace(V4_COMPRESSED, mode="turboquant", preset="tq4")),
}


class Row(NamedTuple):
    content: int
    lossy: bool = False
    pure: bool = True


@dataclass
class Expected:
    """What the oracle knows of a sequence: everything."""

    salt: str
    max_tokens: int
    tokens: list[int]
    contents: list[int] = field(default_factory=list)  # of each token in ``tokens``
    num_rows: int = 0  # tokens whose rows stand
    pure: list[bool] = field(default_factory=list)  # of each row, as it was computed
    forked: bool = False  # with a larger promise it may pack rows that its parent would have left in the tail

    def append(self, tokens: list[int]) -> None:
        for token in tokens:
            before = self.contents[-1] if self.contents else hash(self.salt)
            self.contents.append(hash((before, token)))
            self.tokens.append(token)


class Worker:
    """Everything that touches memory. ``rows_read_packed`` counts dequantised rows inside a window: always 0."""

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        *,
        num_pages: int,
        margin: int = 16,
        max_step_tokens: int = 9,
        max_sequences: int = 3,
        max_tokens: int = 1400,
        checkpoint_slots: int = 2,
    ) -> None:
        self.geometry = CacheGeometry(groups, margin=margin, max_step_tokens=max_step_tokens)
        slots = max_sequences + checkpoint_slots
        arena_bytes = bytes_for_pages(self.geometry, num_pages, slots, checkpoint_slots)
        self.device = Device.allocate(
            DeviceSpec("cpu:0", self.geometry, arena_bytes, max_sequences, max_tokens, WEIGHTS, checkpoint_slots)
        )
        self._end = weakref.finalize(self, self.device.close)
        self.device.control.epoch = 1
        self.table = self.device.table
        self.pages: dict[tuple[str, int], dict[tuple[str, int], Row]] = {}  # (region kind, row in page) -> Row
        self.tails: dict[tuple[str, int], dict[tuple[str, int], tuple[int, Row]]] = {}  # (kind, ring row) -> (row, Row)
        self.sealed: dict[tuple[str, int], tuple[int, dict[tuple[str, int], Row]]] = {}
        self.expected: dict[int, Expected] = {}
        self.rows_read_packed = 0
        self.packed = 0
        self.packed_twice = 0  # rows
        self.digest = self.geometry.digest()
        self.tail_regions = {group.name: group.tail_regions for group in groups}
        self.rings = {
            (group.name, region.kind): self.geometry.ring_rows(group, region)
            for group in groups
            for region in group.tail_regions
        }

    # --- calls ---

    def open(
        self, salt: str, prompt: list[int], max_tokens: int, *, reuse: bool = True, exact_only: bool = False
    ) -> Admitted | Refused:
        (result,) = self.device.open([NewSequence("r", salt, prompt, max_tokens, b"", reuse, exact_only)])
        if isinstance(result, Refused):
            return result
        e = self.expected[result.slot] = Expected(salt, max_tokens, [])
        e.append(prompt)
        assert 0 <= result.num_cached < len(prompt)
        self._wipe(result.slot)
        self._move(result.copies, result.tail_copies, result.refills)
        e.num_rows = result.num_cached
        e.pure = [self._was_pure(result.slot, t) for t in range(result.num_cached)]
        if exact_only:
            assert result.prefix_exact
        if result.prefix_exact:
            assert all(e.pure), "a prefix that is said to be exact has rows that are not"
            for group in self.geometry.groups:
                for region in group.regions:
                    n = e.num_rows
                    first = max(0, n - group.effective_window + 1) if region == ROW else region.first_pending(n)
                    for t in range(first, n):
                        assert not self._dense_row(result.slot, group, region, t).lossy
        return result

    def prefill(self, slot: int, count: int) -> None:
        """Rows of ``count`` tokens from a workspace; then sealed with t = 1."""
        e = self.expected[slot]
        first, end = e.num_rows, min(e.num_rows + count, len(e.tokens))
        if end == first:
            return
        handed = self._reserve(slot, end, 1)
        self._compute(slot, first, end)
        workspace = {t: Row(e.contents[t], pure=e.pure[t]) for t in range(first, end)}
        self._write_dense(slot, first, end)
        e.num_rows = end
        self._pack_and_seal(slot, end, 1, handed, workspace)
        for group in self.geometry.groups:
            if group.has_tail:
                base = self.table.sequence(slot).groups[group.name].base
                for t in range(first, end):  # what is behind the base was packed; writing it would wrap the ring
                    self._write_tail(slot, group, t, workspace[t], base=base, end=end)

    def decode(self, slot: int, tokens: list[int]) -> None:
        """One step that puts its tokens into the tail."""
        e = self.expected[slot]
        assert e.num_rows == len(e.tokens)
        e.append(tokens)
        first, end = e.num_rows, len(e.tokens)
        handed = self._reserve(slot, end, len(tokens))
        self._compute(slot, first, end)
        self._write_dense(slot, first, end)
        for group in self.geometry.groups:
            if group.has_tail:
                for t in range(first, end):
                    self._write_tail(slot, group, t, Row(e.contents[t], pure=e.pure[t]))
        e.num_rows = end
        self._pack_and_seal(slot, end, len(tokens), handed, {})

    def truncate(self, slot: int, num_tokens: int) -> bool | None:
        """Whether it was exact; None: it was refused by name."""
        e = self.expected[slot]
        self._log(slot)
        before = {name: (list(s.pages), s.base) for name, s in self.table.sequence(slot).groups.items()}
        try:
            result = self.device.truncate(slot, num_tokens)
        except (PreconditionFailed, CapacityError) as refused:
            assert refused.reason in ("TRUNCATE_TOO_DEEP", "ARENA_FULL")
            if refused.reason == "TRUNCATE_TOO_DEEP":
                groups = self.geometry.groups
                assert any(g.retention != "all" or g.has_pending or g.retained_window for g in groups)
            after = {name: (list(s.pages), s.base) for name, s in self.table.sequence(slot).groups.items()}
            assert before == after
            return None
        assert result.num_tokens <= num_tokens
        self._move(result.copies, result.tail_copies, result.refills)
        del e.tokens[num_tokens:], e.contents[num_tokens:], e.pure[result.num_tokens :]
        e.num_rows = min(e.num_rows, result.num_tokens)
        if result.num_tokens < num_tokens:
            assert result.tail_copies
        return result.exact

    def fork(self, slot: int, max_tokens: int) -> Forked | Refused:
        e = self.expected[slot]
        self._log(slot)
        result = self.device.fork(slot, "f", max_tokens, b"")
        if isinstance(result, Forked):
            self._wipe(result.slot)
            self._move(result.copies, result.tail_copies, [])
            n = e.num_rows
            self.expected[result.slot] = Expected(
                e.salt, max_tokens, e.tokens[:n], e.contents[:n], n, list(e.pure[:n]), forked=True
            )
        return result

    def checkpoint(self, slot: int, kind: str = "turn_end") -> list[TailCopy]:
        self._log(slot)
        kept = self.device.checkpoint(slot, self.expected[slot].num_rows, kind)
        self._move(kept.copies, kept.tail_copies, [])
        return kept.tail_copies

    def release(self, slot: int) -> None:
        self.device.release([slot])
        del self.expected[slot]

    def detach(self, *, goodbye: bool) -> None:
        self.device.release_all(goodbye=goodbye)
        self.expected.clear()
        self.tails = {key: tail for key, tail in self.tails.items() if key[1] >= self.table.max_sequences}

    # --- deaths ---

    def store_dies(self) -> None:
        """Another store takes the memory over from this worker, which goes on."""
        before = {slot: self._describe(slot) for slot in self.expected}
        kept = {name: set(hashes) for name, hashes in self.table.index.contents().items()}
        fds = [os.dup(fd) for fd in self.device.manifest()[1]]
        self.device = Device.take_over(self.device.spec, fds)
        self._end()
        self._end = weakref.finalize(self, self.device.close)
        self.table = self.device.table
        adopted = self.device.adopt(self.device.control.epoch + 1, living=True)
        assert sorted(each.slot for each in adopted) == sorted(self.expected)
        assert {slot: self._describe(slot) for slot in self.expected} == before
        assert {name: set(hashes) for name, hashes in self.table.index.contents().items()} == kept
        self.tails = {key: tail for key, tail in self.tails.items() if key[1] < self.table.max_sequences}

    def _describe(self, slot: int) -> object:
        sequence = self.table.sequence(slot)
        inexact = sequence.inexact_from
        return {name: replace(state) for name, state in sequence.groups.items()}, sequence.salt, inexact

    def worker_dies(self) -> dict[int, Adopted]:
        """Another worker adopts what this one left; what was committed stands, of all that are intact."""
        sealed = {slot: dict(self.table.sequence(slot).bases) for slot in self.expected}
        adopted = {each.slot: each for each in self.device.adopt(self.device.control.epoch + 1, living=False)}
        assert sorted(adopted) == sorted(self.expected)
        for slot, each in adopted.items():
            e = self.expected[slot]
            assert (each.token_ids, each.num_committed, each.tenant_salt) == (e.tokens, e.num_rows, e.salt)
            assert not any(state.handed for state in self.table.sequence(slot).groups.values())
            for name, state in self.table.sequence(slot).groups.items():
                for page in state.pages[sealed[slot][name] // PAGE_TOKENS : state.num_sealed]:
                    if page != NO_PAGE:
                        self.sealed[name, page] = (
                            self.table.groups[name].generation(page),
                            dict(self.pages[name, page]),
                        )
        return adopted

    def die_in_step(self, slot: int, tokens: list[int], after: str) -> dict[int, Adopted]:
        """The worker dies in a step of these tokens; without any, in a prefill chunk of what has no rows yet.

        Args:
            after: what it had done last: "reserve", "rows", "packed", "log", "commit"; "saved": in a chunk whose rows
                go over others of the tail, which it saved before.
        """
        for each in self.expected:
            self._log(each)
        e, control = self.expected[slot], self.device.control
        first, prefill, known = e.num_rows, not tokens, len(e.tokens)
        e.append(tokens)
        end = len(e.tokens)
        handed = self._reserve(slot, end, max(1, len(tokens)))
        for name, new in handed.items():
            for page in new:
                self.sealed.pop((name, page.page_id), None)  # completed in place
        if after != "reserve":
            if after == "saved":
                self._save(slot, end)
            self._rows_of_step(slot, first, handed, prefill=prefill)
        if after in ("packed", "log", "commit"):
            control.mark_packed(slot, end)
        if after in ("log", "commit"):
            control.append_tokens(slot, e.tokens[control.logged(slot) :])
        else:
            del e.tokens[known:], e.contents[known:]
        if after == "commit":
            control.commit(slot, end)
            e.num_rows = end
        del e.pure[e.num_rows :]
        return self.worker_dies()

    def _save(self, slot: int, end: int) -> None:
        spare = min(self.device.control.free_slots())
        for group in self.geometry.groups:
            if (group.name, slot) in self.tails:
                self.tails[group.name, spare] = dict(self.tails[group.name, slot])
        self.device.control.mark_saved(slot, end, spare)

    def recover(self, slot: int) -> None:
        """Brings back what was saved."""
        spare = self.device.control.saved_in(slot)
        if spare is not None:
            for group in self.geometry.groups:
                if (group.name, spare) in self.tails:
                    self.tails[group.name, slot] = self.tails.pop((group.name, spare))
            self.device.control.clear_saved(slot)

    def _rows_of_step(self, slot: int, first: int, handed: dict[str, list[NewPage]], *, prefill: bool) -> None:
        e = self.expected[slot]
        end = len(e.tokens)
        self._compute(slot, first, end)
        self._write_dense(slot, first, end)
        workspace = {t: Row(e.contents[t], pure=e.pure[t]) for t in range(first, end)}
        if not prefill:
            for group in self.geometry.groups:
                for t in range(first, end) if group.has_tail else ():
                    self._write_tail(slot, group, t, workspace[t])
        for group in self.geometry.groups:
            for new in handed.get(group.name, []) if group.packed else ():
                self._pack(slot, group, new, workspace if prefill else {})
        for group in self.geometry.groups:
            if prefill and group.has_tail:
                state = self.table.sequence(slot).groups[group.name]
                base = state.sealed_base(end, 1)  # rows below are in pages, and nowhere else
                for t in range(first, end):
                    self._write_tail(slot, group, t, workspace[t], base=base, end=end)

    def laps(self, slot: int, end: int) -> bool:
        """Whether a chunk up to ``end`` goes over rows that the sequence may still read."""
        e, bases = self.expected[slot], self.table.sequence(slot).bases
        return any(self.geometry.laps(g, bases[g.name], e.num_rows, end) for g in self.geometry.groups if g.has_tail)

    # --- memory ---

    def _log(self, slot: int) -> None:
        """Writes tokens to the log and says which rows stand, as a worker does before it seals."""
        e, control = self.expected[slot], self.device.control
        control.append_tokens(slot, e.tokens[control.logged(slot) :])
        control.commit(slot, e.num_rows)

    def _reserve(self, slot: int, end: int, step: int) -> dict[str, list[NewPage]]:
        handed = self.device.reserve([(slot, end, step)]).get(slot, {})
        assert self.device.reserve([(slot, end, step)]) == {}
        for name, new in handed.items():
            for page in new:
                if page.source is None:
                    self.pages[name, page.page_id] = {}
        return handed

    def _compute(self, slot: int, first: int, end: int) -> None:
        """Appends purity of rows [first, end): what their window is made of decides."""
        e = self.expected[slot]
        reach = -1  # the first token that no lossy row's window reaches
        for group in self.geometry.groups:
            region = next((r for r in self.tail_regions[group.name] if r == ROW), None)
            if region is not None:
                window = group.effective_window
                lossy = [
                    s for s in range(max(0, first - window + 1), first) if self._dense_row(slot, group, region, s).lossy
                ]
                reach = max([reach, *(s + window for s in lossy[-1:])])
        for t in range(first, end):
            e.pure.append((not e.pure or e.pure[-1]) and t >= reach)

    def _dense_row(self, slot: int, group: LayerGroup, region: Region, t: int) -> Row:
        """The row of token t as attention reads it densely; a row that must be there."""
        state = self.table.sequence(slot).groups[group.name]
        if region not in self.tail_regions[group.name]:
            return self.pages[group.name, state.pages[t // PAGE_TOKENS]][region.kind, t % PAGE_TOKENS]
        if t < state.base and not region.tail_only:
            self.rows_read_packed += 1
            return self.pages[group.name, state.pages[t // PAGE_TOKENS]][region.kind, t % PAGE_TOKENS]
        ring = self.rings[group.name, region.kind]
        at, row = self.tails[group.name, slot][region.kind, t // region.ratio % ring]
        assert at == t // region.ratio, f"ring row of token {t} was overwritten by {at * region.ratio}"
        return row

    def _write_dense(self, slot: int, first: int, end: int) -> None:
        e = self.expected[slot]
        for group in self.geometry.groups:
            if group.mode != "dense":
                continue
            pages = self.table.sequence(slot).pages[group.name]
            for t in range(first, end):
                page = pages[t // PAGE_TOKENS]
                assert self.table.groups[group.name].state(page) == PageState.OPEN
                for region in group.paged_regions:
                    if (t + 1) % region.ratio == 0:
                        row = Row(e.contents[t], pure=e.pure[t])
                        self.pages[group.name, page][region.kind, t % PAGE_TOKENS // region.ratio] = row

    def _write_tail(self, slot: int, group: LayerGroup, t: int, row: Row, *, base: int = 0, end: int = 0) -> None:
        """Row of token t; of a chunk up to ``end`` what its rings keep, and of rows that go to pages from base on."""
        tail = self.tails.setdefault((group.name, slot), {})
        for region in self.tail_regions[group.name]:
            ring = self.rings[group.name, region.kind]
            kept = t // region.ratio >= end // region.ratio - ring and (region.tail_only or t >= base)
            if (t + 1) % region.ratio == 0 and kept:
                tail[region.kind, t // region.ratio % ring] = (t // region.ratio, row)

    def _pack_and_seal(
        self, slot: int, end: int, step: int, handed: dict[str, list[NewPage]], workspace: dict[int, Row]
    ) -> None:
        groups = self.table.sequence(slot).groups
        for group in self.geometry.groups:
            if group.packed:
                for new in handed.get(group.name, []):
                    self._pack(slot, group, new, workspace)
        first = {name: state.num_sealed for name, state in groups.items()}
        self.device.control.mark_packed(slot, end)
        self._log(slot)
        self.device.seal([(slot, end, step)])
        for name, state in groups.items():
            for page in state.pages[first[name] : state.num_sealed]:
                if page != NO_PAGE:
                    self.sealed[name, page] = (self.table.groups[name].generation(page), dict(self.pages[name, page]))

    def _pack(self, slot: int, group: LayerGroup, new: NewPage, workspace: dict[int, Row]) -> None:
        e = self.expected[slot]
        done = 0
        if isinstance(new.source, Relinked):
            done = PAGE_TOKENS
        elif isinstance(new.source, Split):
            done = new.source.num_tokens
            cells = self.pages[group.name, new.source.from_page]
            ratios = {region.kind: region.ratio for region in group.paged_regions}
            self.pages[group.name, new.page_id] = {
                key: row for key, row in cells.items() if key[1] < done // ratios[key[0]]
            }
        for region in group.paged_regions:
            for index in range(done // region.ratio, region.rows_per_page):
                t = new.index * PAGE_TOKENS + (index + 1) * region.ratio - 1
                row = workspace[t] if t in workspace else self._dense_row(slot, group, region, t)
                if row.lossy:
                    assert e.forked, f"token {t} is packed a second time"
                    e.pure[t] = False
                    row = Row(row.content, pure=False)
                    self.packed_twice += 1
                assert row.content == e.contents[t]
                self.pages[group.name, new.page_id][region.kind, index] = row
                self.packed += 1

    def _move(self, copies: list[PageCopy], tail_copies: list[TailCopy], refills: list[Refill]) -> None:
        for copy in copies:
            assert copy.from_page != copy.to_page
            ratios = {region.kind: region.ratio for region in self.geometry.group(copy.group).paged_regions}
            self.pages[copy.group, copy.to_page] = {
                key: row
                for key, row in self.pages[copy.group, copy.from_page].items()
                if key[1] < copy.num_tokens // ratios[key[0]]
            }
        for tail in tail_copies:
            self.tails[tail.group, tail.to_slot] = dict(self.tails[tail.group, tail.from_slot])
        for refill in refills:
            group = self.geometry.group(refill.group)
            cells = self.tails.setdefault((refill.group, refill.tail_slot), {})
            for region in group.paged_regions:
                ring = self.rings[group.name, region.kind]
                last = (refill.first_token + refill.num_tokens) // region.ratio
                for index in range(refill.first_token // region.ratio, last):
                    page = refill.page_ids[(index - refill.first_token // region.ratio) // region.rows_per_page]
                    row = self.pages[refill.group, page][region.kind, index % region.rows_per_page]
                    cells[region.kind, index % ring] = (index, row._replace(lossy=True))

    def _wipe(self, slot: int) -> None:
        for key in [key for key in self.tails if key[1] == slot]:
            del self.tails[key]

    def _was_pure(self, slot: int, t: int) -> bool:
        """Whether the cached row of token t was, in every group that still has it."""
        pure = True
        for group in self.geometry.groups:
            state = self.table.sequence(slot).groups[group.name]
            for region in group.regions:
                if region.tail_only or (t + 1) % region.ratio:
                    continue
                if t >= state.base and region in self.tail_regions[group.name]:
                    pure = pure and self._dense_row(slot, group, region, t).pure
                elif group.has_pages and state.first_page <= t // PAGE_TOKENS < len(state.pages):
                    page = state.pages[t // PAGE_TOKENS]
                    if page == NO_PAGE:
                        continue
                    pure = pure and self.pages[group.name, page][region.kind, t % PAGE_TOKENS // region.ratio].pure
        return pure

    # --- what must hold ---

    def verify(self) -> None:
        """The control block says what the tables do."""
        assert self.device.verifier.tables() == []

    def check(self) -> None:
        self.table.check()
        assert sorted(self.table.slots) == sorted(self.expected)
        for slot in self.expected:
            self.check_sequence(slot)
        for (name, page), (generation, cells) in list(self.sealed.items()):
            table = self.table.groups[name]
            if table.generation(page) == generation and table.state(page) in (PageState.SEALED, PageState.CACHED):
                assert self.pages[name, page] == cells, f"sealed page {page} of {name} changed"
        for name, table in self.table.groups.items():
            for page in range(table.num_pages):
                digest = self.table.index.hash_of(name, page)
                if digest is None:
                    continue
                found = self.table.index.pages(name, [digest])
                assert found
                if found.exact and found.pages == [page]:
                    assert all(row.pure for row in self.pages[name, page].values()), "an inexact page has no mark"

    def check_sequence(self, slot: int) -> None:
        """Everything that attention may read next is there, and is this sequence's."""
        e, sequence = self.expected[slot], self.table.sequence(slot)
        n = e.num_rows
        assert sequence.hashes == list(
            page_hashes(
                e.tokens[: len(sequence.hashes) * PAGE_TOKENS],
                salt=e.salt,
                weights_digest=WEIGHTS,
                geometry_digest=self.digest,
            )
        )
        for group in self.geometry.groups:
            state = sequence.groups[group.name]
            assert state.base % PAGE_TOKENS == 0
            assert state.base <= n
            for region in group.regions:
                if region.tail_only:
                    for t in range(region.first_pending(n), n):
                        row = self._dense_row(slot, group, region, t)
                        assert (row.content, row.lossy) == (e.contents[t], False), f"pending row of token {t}"
                    continue
                first = max(0, n - group.window + 1) if group.window and group.mode != "dense" else 0
                for t in range(first, n):
                    if (t + 1) % region.ratio:
                        continue
                    if group.mode != "dense" and t >= state.base:
                        row = self._dense_row(slot, group, region, t)
                        assert row.lossy <= (t < state.lossy_end)
                    else:
                        page = state.pages[t // PAGE_TOKENS]
                        row = self.pages[group.name, page][region.kind, t % PAGE_TOKENS // region.ratio]
                        assert not row.lossy
                    assert row.content == e.contents[t], f"{group.name}.{region.kind}: token {t} of {n} is another's"
                    assert row.pure or not e.pure[t], "a row is less pure than it was computed"
            if group.mode != "dense":
                assert is_dense_again(n, state.base, state.window), "the next window reaches into pages"
        assert self.rows_read_packed == 0
