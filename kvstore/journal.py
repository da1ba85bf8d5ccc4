"""Writes of the store that go into the control block together or not at all, whenever the process is killed.

A section of the block takes the writes of one call before they are made where they belong:

    length   u64   bytes of writes that follow; 0: none. Set last, zeroed once all are made
    crc      u32   zlib.crc32 of them
    writes         each: offset in the block (u64), bytes (u32), the bytes; all little-endian

A store that finds a length there makes those writes again, which changes nothing where they were made. A killed process
leaves either no length or a whole journal, because it wrote in this order; a journal that is damaged otherwise is
refused.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from protos.errors import InternalError, PreconditionFailed

_HEAD = struct.Struct("<QI")
_WRITE = struct.Struct("<QI")
_LENGTH = struct.Struct("<Q")


class Journal:
    """Writes to ``memory``, the whole block. Outside of ``together`` each is made at once."""

    def __init__(self, memory: memoryview, at: int, num_bytes: int) -> None:
        self._memory = memory
        self._at = at
        self._num_bytes = num_bytes
        self._pending: dict[int, bytes] | None = None

    def write(self, at: int, data: bytes) -> None:
        """Inside of ``together``: at its end; a later write of the same place counts, what is there is left out."""
        if self._pending is None:
            self._memory[at : at + len(data)] = data
            return
        known = self._pending.pop(at, None)
        if known is not None or self._memory[at : at + len(data)] != data:
            self._pending[at] = data

    @contextmanager
    def together(self) -> Iterator[None]:
        """Makes the writes of the block at its end, all or none; none when the block raises. Not to be nested."""
        if self._pending is not None:
            raise InternalError("a call of the store began inside of another")
        self._pending = {}
        try:
            yield
            pending = self._pending
        finally:
            self._pending = None
        if pending:
            self._commit(pending)

    def _commit(self, pending: dict[int, bytes]) -> None:
        text = b"".join(part for at, data in pending.items() for part in (_WRITE.pack(at, len(data)), data))
        if _HEAD.size + len(text) > self._num_bytes:
            raise InternalError("the control block's journal is too short", given=len(text), allowed=self._num_bytes)
        start = self._at + _HEAD.size
        self._memory[start : start + len(text)] = text
        self._memory[self._at : self._at + _HEAD.size] = _HEAD.pack(0, zlib.crc32(text))
        self._memory[self._at : self._at + _LENGTH.size] = _LENGTH.pack(len(text))
        for at, data in pending.items():
            self._memory[at : at + len(data)] = data
        self._memory[self._at : self._at + _LENGTH.size] = _LENGTH.pack(0)

    def replay(self, allowed: range) -> int:
        """Makes the writes of a call that was cut off; returns how many.

        Args:
            allowed: where in the block writes may go.

        Raises:
            PreconditionFailed: BAD_CONTROL_BLOCK; nothing was written.
        """
        length, crc = _HEAD.unpack_from(self._memory, self._at)
        if not length:
            return 0
        if length > self._num_bytes - _HEAD.size:
            raise _bad(f"{length} bytes", f"up to {self._num_bytes - _HEAD.size}")
        text = bytes(self._memory[self._at + _HEAD.size : self._at + _HEAD.size + length])
        if zlib.crc32(text) != crc:
            raise _bad(f"crc {zlib.crc32(text):08x}", f"{crc:08x}")
        writes = list(_parsed(text, allowed))
        for at, data in writes:
            self._memory[at : at + len(data)] = data
        self._memory[self._at : self._at + _LENGTH.size] = _LENGTH.pack(0)
        return len(writes)


def _parsed(text: bytes, allowed: range) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(text):
        if len(text) - position < _WRITE.size:
            raise _bad("a write that is cut short", "whole writes")
        at, count = _WRITE.unpack_from(text, position)
        position += _WRITE.size
        if count > len(text) - position or at < allowed.start or at + count > allowed.stop:
            raise _bad(f"{count} bytes at {at}", f"inside of {allowed.start} to {allowed.stop}")
        yield at, text[position : position + count]
        position += count


def _bad(given: str, allowed: str) -> PreconditionFailed:
    return PreconditionFailed(
        "the journal of this control block is damaged",
        reason="BAD_CONTROL_BLOCK",
        given=given,
        allowed=allowed,
        hint="the memory was overwritten: start anew, sequences are computed again from their token logs",
    )
