"""The page checksum against its formula in plain integers, and what it must tell apart."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.errors import LayoutError
from kernels.page_checksum import _WORDS, page_checksum


def plain(page: bytes) -> int:
    words = [int.from_bytes(page[i : i + 4], "little") for i in range(0, len(page), 4)]
    keyed = [(word + i * 0x9E3779B9 + 0x7F4A7C15) % 2**32 for i, word in enumerate(words)]
    return sum(even * odd for even, odd in zip(keyed[::2], keyed[1::2], strict=True)) % 2**64


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_bytes=st.integers(0, 40).map(lambda n: 128 * n))
def test_it_is_the_formula(seed: int, num_bytes: int) -> None:
    page = random.Random(seed).randbytes(num_bytes)
    assert page_checksum(page) == plain(page)


def test_long_pages_go_on_with_their_keys() -> None:
    for num_bytes in (4 * _WORDS, 4 * _WORDS + 128, 12 * _WORDS + 8):
        page = random.Random(num_bytes).randbytes(num_bytes)
        assert page_checksum(memoryview(page)) == page_checksum(bytearray(page)) == plain(page)


def test_extremes() -> None:
    for fill in (0x00, 0xFF):
        page = bytes([fill]) * 1024
        assert page_checksum(page) == plain(page) != 0
    assert page_checksum(b"") == 0


def test_pinned() -> None:
    """What control blocks, files and transfers hold: a change needs a new version of each."""
    assert page_checksum(bytes(range(128))) == 0x6093670E30B99450


def test_one_bit_two_words_and_two_halves_are_told_apart() -> None:
    page = bytearray(random.Random(5).randbytes(4096))
    whole = page_checksum(page)
    for bit in range(0, 8 * len(page), 37):
        page[bit // 8] ^= 1 << bit % 8
        assert page_checksum(page) != whole, f"bit {bit}"
        page[bit // 8] ^= 1 << bit % 8
    assert page_checksum(page[4:8] + page[:4] + page[8:]) != whole
    assert page_checksum(page[2048:] + page[:2048]) != whole


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(LayoutError, match="132 bytes"):
        page_checksum(bytes(132))
