"""Checksum of a page's bytes, computed by whoever wrote the page and compared where it lands or is verified."""

from __future__ import annotations

import zlib

NO_CHECKSUM = 0
_PRESENT = 1 << 32


def page_checksum(page: bytes | bytearray | memoryview) -> int:
    """CRC-32 of the page, with bit 32 set so that it is never NO_CHECKSUM."""
    return zlib.crc32(page) | _PRESENT
