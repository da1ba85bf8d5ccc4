"""Checksum of a page's bytes, the same on a CPU and on a GPU. numpy alone: the KV store computes it as well.

NH of UMAC (Black et al. 1999, section 4.1) over the page's u32 little-endian words w_i, with keys from a Weyl sequence:

    key(i)   = (i * 0x9E3779B9 + 0x7F4A7C15) mod 2^32
    checksum = sum over even i of ((w_i + key(i)) mod 2^32) * ((w_{i+1} + key(i+1)) mod 2^32)   mod 2^64

A sum, so any number of CTAs add their shares in any order. It finds accidents; it is no defence against an adversary.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kernels.errors import LayoutError

KEY_STEP = 0x9E3779B9
KEY_START = 0x7F4A7C15

_WORDS = 1 << 15  # done together: keys and sums stay in the second-level cache
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@lru_cache(maxsize=1)
def _keys() -> npt.NDArray[np.uint32]:
    return (np.arange(_WORDS, dtype=np.uint64) * KEY_STEP + KEY_START).astype(np.uint32)


def page_checksum(page: bytes | bytearray | memoryview) -> int:
    """The checksum of a page's bytes, in [0, 2^64). Raises LayoutError where they are not whole pairs of words."""
    num_bytes = memoryview(page).nbytes
    if num_bytes % 8:
        raise LayoutError(
            "a page is whole pairs of u32 words",
            given=f"{num_bytes} bytes",
            allowed="a multiple of 8",
            action="pass all bytes of the page",
        )
    words = np.frombuffer(page, dtype="<u4")
    keys, total = _keys(), 0
    sums = np.empty(min(_WORDS, len(words)), dtype=np.uint32)
    for first in range(0, len(words), _WORDS):
        part = words[first : first + _WORDS]
        keyed = np.add(part, keys[: len(part)], out=sums[: len(part)])
        if first:
            keyed += np.uint32(first * KEY_STEP % 2**32)
        pairs = keyed.view("<u8")
        odd = pairs >> _HALF
        pairs &= _LOW
        pairs *= odd
        total += int(pairs.sum())
    return total % 2**64
