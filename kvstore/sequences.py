"""The sequences of one device: what each was promised, which pages it holds, how far they are sealed.

Pure: values in, values out. The token log lives in the control block; its owner passes the tokens in. Every method
checks all it was given before it changes anything, so an error leaves the table as it was.

Mode dense (DESIGN.md 3.1): the newest page is open, private and unhashed; a page is immutable once sealed; a truncate
into a sealed page moves the rows below the cut to a new open page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.pages import PageTable
from protos.errors import InternalError, InvalidRequest, NotFound, PreconditionFailed, TooLarge
from protos.page_hash import PAGE_TOKENS, ROOT, page_hashes


@dataclass(frozen=True)
class Admitted:
    """``slot`` is the sequence's id until it is released."""

    slot: int


@dataclass(frozen=True)
class Refused:
    """No room now. ``short_group`` is the layer group without enough pages; empty: no slot is free.

    ``pages_free`` counts pages that are neither held nor promised. A sequence with ``pages_needed > pages_total`` can
    never be admitted.
    """

    short_group: str
    pages_needed: int
    pages_free: int
    pages_total: int


@dataclass(frozen=True)
class PageCopy:
    """Rows of the first ``num_tokens`` tokens go from ``from_page`` to ``to_page``. The worker copies, before it
    writes.
    """

    group: str
    from_page: int
    to_page: int
    num_tokens: int


@dataclass(frozen=True)
class SealedPage:
    """Page ``index`` of a sequence became immutable; ``pages`` names it in every group."""

    index: int
    hash: bytes
    parent: bytes
    pages: Mapping[str, int]


@dataclass(frozen=True)
class Truncated:
    """``freed`` are pages per group that went back to the arena, sealed ones that were copied included."""

    copies: list[PageCopy]
    freed: Mapping[str, list[int]]


@dataclass
class SequencePages:
    """One sequence. ``pages[group][i]`` holds tokens [128 i, 128 (i + 1)); the first ``len(hashes)`` are sealed."""

    slot: int
    request_id: str
    salt: str
    max_tokens: int
    pages: dict[str, list[int]]
    hashes: list[bytes] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        return len(next(iter(self.pages.values())))

    @property
    def promised_left(self) -> int:
        """Pages, in every group, that are promised and not handed out."""
        return pages_for(self.max_tokens) - self.num_pages


def pages_for(num_tokens: int) -> int:
    """Pages that hold ``num_tokens`` tokens."""
    return -(-num_tokens // PAGE_TOKENS)


class SequenceTable:
    """Sequences of one device, in slots [0, max_sequences).

    Args:
        groups: the page table of each layer group.
        max_sequences: slots.
        max_sequence_tokens: the longest sequence, prompt and output together.
        weights_digest, geometry_digest: part of every page hash.
    """

    def __init__(
        self,
        groups: Sequence[PageTable],
        *,
        max_sequences: int,
        max_sequence_tokens: int,
        weights_digest: bytes,
        geometry_digest: bytes,
    ) -> None:
        self.groups = {table.group: table for table in groups}
        self.max_sequences = max_sequences
        self.max_sequence_tokens = max_sequence_tokens
        self._weights_digest = weights_digest
        self._geometry_digest = geometry_digest
        self._sequences: dict[int, SequencePages] = {}
        self._free_slots = list(range(max_sequences - 1, -1, -1))

    @property
    def slots(self) -> list[int]:
        return list(self._sequences)

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

    def open(self, request_id: str, salt: str, num_prompt_tokens: int, max_tokens: int) -> Admitted | Refused:
        """Promises the pages of ``max_tokens`` tokens in every group, or refuses and promises nothing.

        Raises:
            InvalidRequest: no prompt (EMPTY_PROMPT), or a prompt over max_tokens.
            TooLarge: max_tokens over the longest sequence.
        """
        self.demand_valid(num_prompt_tokens, max_tokens)
        needed = pages_for(max_tokens)
        for table in self.groups.values():
            if needed > table.num_available:
                return Refused(table.group, needed, table.num_available, table.num_pages)
        if not self._free_slots:
            scarcest = min(self.groups.values(), key=lambda table: table.num_available)
            return Refused("", needed, scarcest.num_available, scarcest.num_pages)
        slot = self._free_slots.pop()
        for table in self.groups.values():
            table.promise(needed)
        self._sequences[slot] = SequencePages(slot, request_id, salt, max_tokens, {name: [] for name in self.groups})
        return Admitted(slot)

    def reserve(self, wanted: Sequence[tuple[int, int]]) -> dict[int, dict[str, list[int]]]:
        """Hands out promised pages so that ``num_tokens`` tokens of each (slot, num_tokens) have room.

        Returns:
            slot -> group -> new page ids in token order. Slots that needed none are left out.

        Raises:
            NotFound: UNKNOWN_SLOT. InvalidRequest: a slot is named twice, or num_tokens is over what was promised.
        """
        _demand_distinct([slot for slot, _ in wanted])
        missing = {}
        for slot, num_tokens in wanted:
            sequence = self.sequence(slot)
            if not 0 <= num_tokens <= sequence.max_tokens:
                raise InvalidRequest(
                    f"slot {slot} was promised less",
                    reason="OVER_PROMISE",
                    given=num_tokens,
                    allowed=sequence.max_tokens,
                )
            missing[slot] = pages_for(num_tokens) - sequence.num_pages
        handed: dict[int, dict[str, list[int]]] = {}
        for slot, count in missing.items():
            if count > 0:
                handed[slot] = {name: table.take(slot, count) for name, table in self.groups.items()}
                for name, pages in handed[slot].items():
                    self._sequences[slot].pages[name].extend(pages)
        return handed

    def seal(self, slot: int, num_tokens: int, tokens: Callable[[int, int], Sequence[int]]) -> list[SealedPage]:
        """Seals the whole pages among tokens [0, num_tokens) that are not yet sealed.

        Args:
            tokens: tokens(first, last) are the logged ids of [first, last).

        Raises:
            NotFound: UNKNOWN_SLOT. PreconditionFailed: num_tokens is over the pages that were handed out.
        """
        sequence = self.sequence(slot)
        held = sequence.num_pages * PAGE_TOKENS
        if not 0 <= num_tokens <= held:
            raise PreconditionFailed(
                f"slot {slot} has no pages for these tokens",
                reason="NOT_RESERVED",
                given=num_tokens,
                allowed=f"0 to {held}",
            )
        first, last = len(sequence.hashes), num_tokens // PAGE_TOKENS
        if last <= first:
            return []
        parent = sequence.hashes[-1] if sequence.hashes else ROOT
        hashes = page_hashes(
            tokens(first * PAGE_TOKENS, last * PAGE_TOKENS),
            salt=sequence.salt,
            weights_digest=self._weights_digest,
            geometry_digest=self._geometry_digest,
            parent=parent,
        )
        sealed = []
        for index, digest in zip(range(first, last), hashes, strict=True):
            sealed.append(
                SealedPage(index, digest, parent, {name: sequence.pages[name][index] for name in self.groups})
            )
            parent = digest
        for name, table in self.groups.items():
            table.seal(slot, sequence.pages[name][first:last])
        sequence.hashes.extend(page.hash for page in sealed)
        return sealed

    def truncate(self, slot: int, num_tokens: int, length: int) -> Truncated:
        """Forgets tokens [num_tokens, length). Pages behind the cut go back to the promise of the sequence.

        Args:
            length: the logged length.

        Raises:
            NotFound: UNKNOWN_SLOT. PreconditionFailed: TRUNCATE_EXTENDS, num_tokens is over length.
        """
        sequence = self.sequence(slot)
        if not 0 <= num_tokens <= length:
            raise PreconditionFailed(
                "a truncate never extends a sequence",
                reason="TRUNCATE_EXTENDS",
                given=num_tokens,
                allowed=f"0 to {length}",
            )
        keep, whole = pages_for(num_tokens), num_tokens // PAGE_TOKENS
        copies: list[PageCopy] = []
        freed: dict[str, list[int]] = {}
        for name, table in self.groups.items():
            pages = sequence.pages[name]
            freed[name] = pages[keep:]
            table.free(slot, freed[name], keep_promise=True)
            del pages[keep:]
            if whole < keep and whole < len(sequence.hashes):  # the cut is inside a sealed page
                old, new = pages[whole], table.replace_sealed(slot, pages[whole])
                if new != old:
                    copies.append(PageCopy(name, old, new, num_tokens - whole * PAGE_TOKENS))
                    freed[name].append(old)
                pages[whole] = new
        del sequence.hashes[whole:]
        return Truncated(copies, freed)

    def release(self, slots: Sequence[int]) -> dict[int, dict[str, list[int]]]:
        """Ends sequences; returns slot -> group -> freed pages.

        Raises:
            NotFound: UNKNOWN_SLOT, and nothing was released. InvalidRequest: a slot is named twice.
        """
        _demand_distinct(slots)
        sequences = [self.sequence(slot) for slot in slots]
        freed = {}
        for sequence in sequences:
            for name, table in self.groups.items():
                table.free(sequence.slot, sequence.pages[name])
                table.unpromise(sequence.promised_left)
            freed[sequence.slot] = sequence.pages
            del self._sequences[sequence.slot]
            self._free_slots.append(sequence.slot)
        return freed

    def check(self) -> None:
        """Raises InternalError when sequences and page tables do not agree."""
        for name, table in self.groups.items():
            table.check()
            held = [(page, s.slot) for s in self._sequences.values() for page in s.pages[name]]
            if len(held) != table.num_open + table.num_sealed or any(table.owner(page) != slot for page, slot in held):
                raise InternalError(f"group {name!r}: pages held by sequences differ from those of the table")
            if sum(s.promised_left for s in self._sequences.values()) != table.num_promised:
                raise InternalError(f"group {name!r}: promises of sequences differ from those of the table")
            if sum(len(s.hashes) for s in self._sequences.values()) != table.num_sealed:
                raise InternalError(f"group {name!r}: hashes and sealed pages differ")
        if sorted([*self._free_slots, *self._sequences]) != list(range(self.max_sequences)):
            raise InternalError("a slot is lost or both free and in use")


def _demand_distinct(slots: Sequence[int]) -> None:
    if len(set(slots)) != len(slots):
        raise InvalidRequest("a slot is named twice", reason="DUPLICATE_SLOT", given=sorted(slots))
