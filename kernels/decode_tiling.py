"""How the packed attention kernel is cut over warps and shared memory: numbers that CUDA and Python share. Pure.

The kernel's source (csrc/packed.cuh) has no numbers of its own: `tiling_defines` passes these, and it checks that it
lays shared memory out as `shared_bytes` says.
"""

from __future__ import annotations

from typing import NamedTuple

from kernels.errors import ArgumentError
from kernels.widths import require_compiled

PAGE_TOKENS = 128
VECTORS = (4, 8)  # query vectors that one pass over the rows takes
PROFILE_SLOTS = ("start", "dependencies", "first_page", "tail", "producer", "consumer", "epilogue", "items")
MERGE_THREADS = 128
MQA_LONG_PAGES = 30  # csrc/decode_mqa.cu. An H200 took .364 ms with 30, .40 with 24, .387 with 16 (B=32, 32,768 rows)

# Shared memory of an SM that CTAs may take, with the 1 KiB that each of them costs beside its own.
_LARGE_SHARED, _SMALL_SHARED, _RESERVED = 228 * 1024, 100 * 1024, 1024
_LARGE_ARCHES = frozenset({"sm_90a", "sm_100a", "sm_103a"})


class Tiling(NamedTuple):
    """groups: of consumer warps; each takes every groups-th stage. warps: of a group, which share a stage's rows.
    stages: of the ring, a multiple of groups. ctas: on an SM."""

    groups: int
    warps: int
    stages: int
    ctas: int

    @property
    def threads(self) -> int:
        """Of a CTA: the consumers, a producer and an epilogue warp."""
        return 32 * (self.groups * self.warps + 2)


# (width, vectors): on SMs with 228 KiB of shared memory, and on all others.
_LARGE = {
    (64, 4): Tiling(4, 2, 8, 2),
    (128, 4): Tiling(2, 4, 4, 2),
    (256, 4): Tiling(4, 2, 4, 2),
    (512, 4): Tiling(4, 1, 4, 2),
    (64, 8): Tiling(4, 2, 8, 2),
    (128, 8): Tiling(3, 4, 6, 1),
    (256, 8): Tiling(4, 2, 8, 1),
    (512, 8): Tiling(4, 1, 8, 1),
}
_SMALL = {
    (64, 4): Tiling(4, 2, 8, 1),
    (128, 4): Tiling(2, 4, 4, 1),
    (256, 4): Tiling(2, 2, 4, 1),
    (512, 4): Tiling(3, 1, 3, 1),
    (64, 8): Tiling(4, 2, 8, 1),
    (128, 8): Tiling(1, 4, 4, 1),
    (256, 8): Tiling(1, 2, 4, 1),
    (512, 8): Tiling(1, 1, 3, 1),
}


def packed_tiling(width: int, vectors: int, arch: str) -> Tiling:
    """Raises UncompiledWidthError, ArgumentError."""
    require_compiled(width, "key")
    if vectors not in VECTORS:
        raise ArgumentError(
            "a pass takes a fixed number of query vectors",
            given=str(vectors),
            allowed=", ".join(map(str, VECTORS)),
            action="take the next larger one; further vectors are further passes",
        )
    return (_LARGE if arch in _LARGE_ARCHES else _SMALL)[width, vectors]


def packed_long_pages(width: int) -> int:
    """Pages of a long split of csrc/decode_packed.cu. On an H200, width 64 took .162 ms with 32 and .169 ms with 16."""
    return 32 if width == 64 else 16


def query_bytes(width: int, vectors: int) -> int:
    """Of one pass of one kv head of a sequence, as prepare leaves the queries (QueryBlock in csrc/prepare.cuh)."""
    return width * 2 * vectors + 8 * vectors


def shared_bytes(width: int, key_bits: int, value_bits: int, vectors: int, tiling: Tiling) -> int:
    """Dynamic shared memory of a CTA: the ring of stages, two query slots, what the warps leave, barriers."""
    stage_tokens = min(PAGE_TOKENS, PAGE_TOKENS * 128 // width)
    stage = stage_tokens * (width * (key_bits + value_bits) // 8 + 8)
    warps = tiling.groups * tiling.warps
    left = warps * vectors * ((width + 8) * 4 + 8)
    return tiling.stages * stage + 2 * (query_bytes(width, vectors) + 32) + left + 16 * tiling.stages + 48


def tiling_defines(width: int, key_bits: int, value_bits: int, vectors: int) -> dict[str, str]:
    """Defines for csrc/decode_packed.cu: pages of a long split, and for either kind of SM groups, warps, stages, CTAs
    an SM and shared bytes."""
    defines = {"TAILPACK_LONG_PAGES": str(packed_long_pages(width))}
    for name, arch, budget in (("LARGE", "sm_90a", _LARGE_SHARED), ("SMALL", "sm_80", _SMALL_SHARED)):
        tiling = packed_tiling(width, vectors, arch)
        size = shared_bytes(width, key_bits, value_bits, vectors, tiling)
        assert tiling.ctas * (size + _RESERVED) <= budget, (width, vectors, name, size)
        defines[f"TAILPACK_{name}_TILING"] = ", ".join(map(str, (*tiling, size)))
    return defines
