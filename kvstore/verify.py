"""Integrity of a device: tables against each other and the control block, hashes, checksums of pages.

A table that contradicts itself is a bug of this process: InternalError, the store stops. A checksum or hash in memory
that differs is reported by name: memory is written by others too. Pages in device memory are out of the store's reach:
their checksums are not compared here, and counted as such. Behind a death pages are compared before anybody goes on
from them (``Device.compare_pages``); else while the store is idle, and when it is asked to.
"""

from __future__ import annotations

import mmap

import numpy as np

from kvstore.arena import Arenas
from kvstore.checksum import NO_CHECKSUM, page_checksum
from kvstore.control import ControlBlock
from kvstore.control_layout import page_flags
from kvstore.group_record import record_of
from kvstore.pages import PageState
from kvstore.sequences import SequenceTable
from protos.errors import InternalError
from protos.page_hash import PAGE_TOKENS


class Verifier:
    """Checks one device. Maps those of its page arenas that it can read when it is first used."""

    def __init__(self, table: SequenceTable, control: ControlBlock, arenas: Arenas) -> None:
        self._table = table
        self._control = control
        self._arenas = arenas
        self._maps: dict[str, mmap.mmap] = {}
        self._next: dict[str, int] = {}  # where the idle check goes on

    def tables(self) -> list[str]:
        """Problems of the control block against the tables. Raises InternalError when the tables are at odds."""
        self._table.check()
        control, problems = self._control, []
        if sorted(control.live_slots()) != sorted(self._table.slots):
            raise InternalError("the control block has other sequences than the table", given=control.live_slots())
        for name, table in self._table.groups.items():
            entries = control.pages[name]
            for field, expected in (
                ("state", [table.state(page) for page in range(table.num_pages)]),
                ("refs", [table.refs(page) for page in range(table.num_pages)]),
                ("generation", [table.generation(page) for page in range(table.num_pages)]),
            ):
                wrong = np.flatnonzero(entries[field] != np.asarray(expected, dtype=entries[field].dtype))
                if len(wrong):
                    page = int(wrong[0])
                    raise InternalError(
                        f"group {name!r}: {field} of page {page} differs in the control block",
                        given=int(entries[field][page]),
                        allowed=expected[page],
                    )
            flags = [page_flags(self._table.index.is_exact(name, page)) for page in range(table.num_pages)]
            if not np.array_equal(entries["flags"], np.asarray(flags, dtype=np.uint32)):
                raise InternalError(f"group {name!r}: pages of the prefix index differ in the control block")
            for page in range(table.num_pages):
                known = self._table.index.hash_of(name, page)
                if known is not None and bytes(entries["hash"][page]) != known:
                    problems.append(f"group {name!r}: the hash of page {page} differs from the index's")
        for slot in self._table.slots:
            sequence = self._table.sequence(slot)
            for name, state in sequence.groups.items():
                written, held = control.group_record(slot, name), record_of(state, slot)
                if written != held:
                    raise InternalError(
                        f"slot {slot}, group {name!r}: what it holds differs in the control block",
                        given=written,
                        allowed=held,
                    )
                if not state.rings.after(control.committed(slot)).hold(control.committed(slot)):
                    raise InternalError(
                        f"slot {slot}, group {name!r}: rows that wait for the rest of their block are gone",
                        given=f"{control.committed(slot)} tokens, rings written up to {state.rings.written}",
                    )
            log = control.tokens(slot, 0, len(sequence.hashes) * PAGE_TOKENS)
            if self._table.hashes(log, sequence.salt) != sequence.hashes:
                problems.append(f"slot {slot}: page hashes differ from those of its token log")
        return problems

    @property
    def num_pages(self) -> int:
        """Pages of the largest group."""
        return max((table.num_pages for table in self._table.groups.values()), default=0)

    @property
    def num_unreadable(self) -> int:
        """Pages whose checksum is known and not compared, because the store cannot read their memory."""
        return sum(
            self._stored(name, page) != NO_CHECKSUM
            for name, table in self._table.groups.items()
            if table.num_pages and not self._readable(name)
            for page in range(table.num_pages)
        )

    def checksums(self, pages: range | None = None) -> tuple[list[str], int]:
        """Compares pages (of every group; None: all) with the checksums they were sealed with: (problems, compared).

        Pages that the store cannot read are left out; ``num_unreadable`` counts them.
        """
        problems: list[str] = []
        compared = 0
        for name, table in self._table.groups.items():
            for page in range(table.num_pages)[slice(pages.start, pages.stop) if pages is not None else slice(None)]:
                found = self._compare(name, page)
                compared += found is not None
                problems += found or []
        return problems, compared

    def damaged(self, most_bytes: int) -> tuple[list[tuple[str, int]], int]:
        """Pages (group, page) that differ from their checksums, and how many were compared: those that sequences hold
        first, and no more than so many bytes.
        """
        found: list[tuple[str, int]] = []
        compared = 0
        for held in (True, False):
            for name, table in self._table.groups.items():
                size = self._arenas.pages[name].page_bytes
                for page in range(table.num_pages):
                    if bool(table.refs(page)) != held or size > most_bytes:
                        continue
                    if (problems := self._compare(name, page)) is None:
                        continue
                    most_bytes, compared = most_bytes - size, compared + 1
                    found += [(name, page)] if problems else []
        return found, compared

    def next_checksums(self, most: int) -> list[str]:
        """Problems of up to ``most`` pages of each group; goes on from there the next time."""
        problems: list[str] = []
        for name, table in self._table.groups.items():
            count, first = min(most, table.num_pages), self._next.get(name, 0)
            for step in range(count):
                problems += self._compare(name, (first + step) % table.num_pages) or []
            self._next[name] = (first + count) % table.num_pages
        return problems

    def _compare(self, name: str, page: int) -> list[str] | None:
        """What is wrong with the bytes of one page; None where no checksum is known, or the bytes cannot be read."""
        stored = self._stored(name, page)
        if stored == NO_CHECKSUM or not self._readable(name):
            return None
        if self._checksum(name, page) == stored:
            return []
        digest = bytes(self._control.pages[name]["hash"][page]).hex()
        return [f"group {name!r}: the checksum of page {page} (hash {digest}) is wrong"]

    def _stored(self, name: str, page: int) -> int:
        """The checksum that a page was sealed with, or NO_CHECKSUM."""
        if self._table.groups[name].state(page) not in (PageState.SEALED, PageState.CACHED):
            return NO_CHECKSUM
        return int(self._control.pages[name]["checksum"][page])

    def _readable(self, name: str) -> bool:
        return self._arenas.pages[name].memory.readable

    def _checksum(self, group: str, page: int) -> int:
        arena = self._arenas.pages[group]
        if group not in self._maps:
            self._maps[group] = mmap.mmap(arena.memory.fd, arena.memory.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        with memoryview(self._maps[group]) as buffer:
            return page_checksum(buffer[page * arena.page_bytes : (page + 1) * arena.page_bytes])

    def close(self) -> None:
        """Gives up its mappings, and the control block's."""
        for mapping in self._maps.values():
            mapping.close()
        self._maps.clear()
        del self._control
