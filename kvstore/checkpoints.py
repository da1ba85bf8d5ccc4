"""Where a sequence can be resumed exactly: copies of dense tails, as a budgeted LRU (DESIGN.md 3.4).

Pure: values in, values out; the worker copies the bytes. A checkpoint at n tokens is filed under (salt, hash of the
last whole page, the n % 128 tokens after it). The salt is named besides the hash, because in front of the first page
every tenant's hash is ROOT.

A checkpoint holds the tail only. Whether the pages in front of it are still there is the caller's question to
``PrefixIndex``: ``matches`` yields candidates longest first, the caller takes the first whose pages are all there and
may ``remove`` the others, whose tail slots are of use elsewhere. Nothing is removed when a page is evicted: the page
may come back (the next such prompt computes it again), and the LRU bounds what waits for that.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from protos.errors import InternalError
from protos.page_hash import PAGE_TOKENS, ROOT

CheckpointKind = Literal["prompt_end", "turn_end", "junction"]


@dataclass(eq=False)
class Checkpoint:
    """The dense tail after ``num_tokens`` tokens of a chain, in one tail slot of each group that has tails.

    ``ready``: the worker has copied the tail; until then nobody is given it. ``pins``: copies from it under way.
    """

    salt: str
    page_hash: bytes
    tokens: tuple[int, ...]
    num_tokens: int
    slots: Mapping[str, int]
    exact: bool
    kind: CheckpointKind
    ready: bool = False
    pins: int = 0


class CheckpointCache:
    """Checkpoints of one device and one model, at most one for each set of tail slots.

    Args:
        slots: for each group with tails, the tail slots set aside for checkpoints, equally many in every group. Without
            any nothing is ever kept.
    """

    def __init__(self, slots: Mapping[str, Sequence[int]]) -> None:
        counts = {len(ids) for ids in slots.values()}
        if len(counts) > 1:
            raise ValueError(f"groups have different numbers of checkpoint slots: {sorted(counts)}")
        self.budget = counts.pop() if counts else 0
        self.num_evicted = 0
        self._free: list[Mapping[str, int]] = [
            {group: ids[index] for group, ids in slots.items()} for index in reversed(range(self.budget))
        ]
        self._lru: OrderedDict[tuple[str, bytes, tuple[int, ...]], Checkpoint] = OrderedDict()  # oldest first
        self._by_page: dict[tuple[str, bytes], _AtPage] = {}

    def __len__(self) -> int:
        return len(self._lru)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """All, the one used least recently first."""
        return list(self._lru.values())

    def put(
        self, salt: str, hashes: Sequence[bytes], tokens: Sequence[int], *, exact: bool, kind: CheckpointKind
    ) -> Checkpoint | None:
        """Makes room for the tail of a sequence of these tokens, and forgets the least recently used one if it must.

        Args:
            hashes: the chain of the whole pages of ``tokens``: len(tokens) // 128.
            tokens: all tokens of the sequence that the tail is to stand for, at least one.
            exact: False when the sequence was resumed inexactly.

        Returns:
            The checkpoint to copy the tail to (``slots``); the caller calls ``commit`` once the bytes are there. None
            when there is nothing to copy: an equal one is there and is as good, or no slot can be had.
        """
        _demand_chain(hashes, tokens)
        if not tokens:
            raise InternalError("a checkpoint of no tokens")
        rest = tuple(tokens[len(hashes) * PAGE_TOKENS :])
        key = (salt, hashes[-1] if hashes else ROOT, rest)
        known = self._lru.get(key)
        if known is not None:
            self._lru.move_to_end(key)
            if known.exact or not exact or known.pins or not known.ready:
                return None
            self._drop(key)
        if not self._free and not self._evict_oldest():
            return None
        checkpoint = Checkpoint(*key, len(tokens), self._free.pop(), exact, kind)
        self._lru[key] = checkpoint
        self._by_page.setdefault(key[:2], _AtPage()).add(checkpoint)
        return checkpoint

    def commit(self, checkpoint: Checkpoint) -> None:
        """The tail has been copied: it may be matched."""
        self._demand_held(checkpoint)
        checkpoint.ready = True

    def matches(
        self, salt: str, hashes: Sequence[bytes], tokens: Sequence[int], *, most: int | None = None
    ) -> Iterator[Checkpoint]:
        """The ready checkpoints whose tokens are a prefix of ``tokens``, longest first. The caller may ``remove`` what
        it was given, and go on.

        Args:
            hashes: the chain of the whole pages of ``tokens``.
            most: of that many tokens at most. By default one is left to compute; a caller who takes tokens of a
                checkpoint back passes len(tokens).
        """
        _demand_chain(hashes, tokens)
        most = len(tokens) - 1 if most is None else min(most, len(tokens))
        if not self._by_page:
            return
        for num_pages in range(most // PAGE_TOKENS, -1, -1):
            at_page = self._by_page.get((salt, hashes[num_pages - 1] if num_pages else ROOT))
            if at_page is not None:
                start = num_pages * PAGE_TOKENS
                yield from at_page.prefixes_of(tuple(tokens[start : min(start + PAGE_TOKENS - 1, most)]))

    def pin(self, checkpoint: Checkpoint) -> None:
        """A copy from it begins: its slots stay until ``unpin``. It becomes the most recently used."""
        self._demand_held(checkpoint)
        checkpoint.pins += 1
        self._lru.move_to_end(_key(checkpoint))

    def unpin(self, checkpoint: Checkpoint) -> None:
        """The copy has been made."""
        self._demand_held(checkpoint)
        if checkpoint.pins < 1:
            raise InternalError("a checkpoint is unpinned more often than pinned", given=_name(checkpoint))
        checkpoint.pins -= 1

    def remove(self, checkpoint: Checkpoint) -> bool:
        """Forgets it (its copy failed, its pages are gone), unless a copy from it is under way; says whether it did."""
        self._demand_held(checkpoint)
        if checkpoint.pins:
            return False
        self._drop(_key(checkpoint))
        return True

    def end_attachment(self) -> None:
        """The worker is gone: pins end, and checkpoints that it had not copied are forgotten."""
        for checkpoint in self.checkpoints:
            checkpoint.pins = 0
            if not checkpoint.ready:
                self._drop(_key(checkpoint))

    def clear(self) -> None:
        """Forgets all that no copy is under way from or to."""
        for checkpoint in self.checkpoints:
            if checkpoint.ready and not checkpoint.pins:
                self._drop(_key(checkpoint))

    def check(self) -> None:
        """Raises InternalError when slots are lost or shared, or the index differs from the LRU."""
        if len(self._free) + len(self._lru) != self.budget:
            raise InternalError(
                "checkpoint slots are lost", given=len(self._free) + len(self._lru), allowed=self.budget
            )
        used = [item for c in [*self._free, *(c.slots for c in self._lru.values())] for item in c.items()]
        if len(set(used)) != len(used):
            raise InternalError("two checkpoints share a tail slot")
        filed = [c for at_page in self._by_page.values() for c in at_page.by_tokens.values()]
        if {id(c) for c in filed} != {id(c) for c in self._lru.values()} or len(filed) != len(self._lru):
            raise InternalError("checkpoints by page differ from the LRU")
        if any(at_page.lengths != Counter(map(len, at_page.by_tokens)) for at_page in self._by_page.values()):
            raise InternalError("lengths of checkpoints are miscounted")
        if any(_key(c) != key for key, c in self._lru.items()):
            raise InternalError("a checkpoint is filed under another key")

    def _evict_oldest(self) -> bool:
        for key, checkpoint in self._lru.items():
            if checkpoint.ready and not checkpoint.pins:
                self._drop(key)
                self.num_evicted += 1
                return True
        return False

    def _drop(self, key: tuple[str, bytes, tuple[int, ...]]) -> None:
        checkpoint = self._lru.pop(key)
        at_page = self._by_page[key[:2]]
        at_page.discard(checkpoint)
        if not at_page.by_tokens:
            del self._by_page[key[:2]]
        self._free.append(checkpoint.slots)

    def _demand_held(self, checkpoint: Checkpoint) -> None:
        if self._lru.get(_key(checkpoint)) is not checkpoint:
            raise InternalError("no such checkpoint", given=_name(checkpoint))


@dataclass
class _AtPage:
    """Checkpoints behind one page. A look-up tries each length that occurs, at most 128, whatever their number."""

    by_tokens: dict[tuple[int, ...], Checkpoint] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)  # length -> checkpoints of it

    def add(self, checkpoint: Checkpoint) -> None:
        length = len(checkpoint.tokens)
        self.by_tokens[checkpoint.tokens] = checkpoint
        self.lengths[length] = self.lengths.get(length, 0) + 1

    def discard(self, checkpoint: Checkpoint) -> None:
        length = len(checkpoint.tokens)
        del self.by_tokens[checkpoint.tokens]
        self.lengths[length] -= 1
        if not self.lengths[length]:
            del self.lengths[length]

    def prefixes_of(self, rest: tuple[int, ...]) -> Iterator[Checkpoint]:
        for length in sorted(self.lengths, reverse=True):
            checkpoint = self.by_tokens.get(rest[:length]) if length <= len(rest) else None
            if checkpoint is not None and checkpoint.ready:
                yield checkpoint


class JunctionNotes:
    """Remembers the page boundaries at which prompts split, and says when one is seen again (then a checkpoint there is
    worth its slot).

    A prompt splits at page hash h when its match ends at h, it goes on for at least a page, and
    ``PrefixIndex.continues(group, h)``: others went on differently. The hash is salted, so tenants share no junctions.

    Args:
        capacity: boundaries remembered; the one seen least recently is forgotten first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def seen_before(self, page_hash: bytes) -> bool:
        """Notes a split at this boundary; True from its second time on."""
        if page_hash in self._seen:
            self._seen.move_to_end(page_hash)
            return True
        self._seen[page_hash] = None
        if len(self._seen) > self.capacity:
            self._seen.popitem(last=False)
        return False


def _key(checkpoint: Checkpoint) -> tuple[str, bytes, tuple[int, ...]]:
    return checkpoint.salt, checkpoint.page_hash, checkpoint.tokens


def _name(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.kind} at {checkpoint.num_tokens} tokens"


def _demand_chain(hashes: Sequence[bytes], tokens: Sequence[int]) -> None:
    if len(hashes) != len(tokens) // PAGE_TOKENS:
        raise InternalError(
            "hashes are not those of the tokens' whole pages", given=len(hashes), allowed=len(tokens) // PAGE_TOKENS
        )
