"""How many bytes a packed row takes. Pure arithmetic, no torch: the KV store sizes its memory with it.

A row of width d is packed as independent parts, descending powers of two; each part has its own scale, signs and grid
(specs: section 1 of the codec's design).
"""

from functools import lru_cache

from kernels.errors import ArgumentError, WidthError
from kernels.widths import PACKED_BITS

MIN_WIDTH = 8
MAX_WIDTH = 2047
SCALE_BYTES = 4  # f32, one a part
V4_WIDTH = 512
V4_FP8_CODE_BYTES = 448 + 2 * 64  # e4m3 codes, then the RoPE coordinates as bf16
V4_FP8_SCALE_BYTES = 2 * 7  # bf16 amax of each block of 64


@lru_cache
def parts(d: int) -> tuple[int, ...]:
    """Widths of the independently packed parts of a row of width d: descending powers of two; their sum is at least d.

    96 is (64, 32), 100 is (64, 32, 8): a rest below 8 becomes one zero-padded part of 8. Raises WidthError.
    """
    if not MIN_WIDTH <= d <= MAX_WIDTH:
        raise WidthError(
            "no codec for this row width",
            given=str(d),
            allowed=f"{MIN_WIDTH} to {MAX_WIDTH}",
            action="use mode dense for these rows",
        )
    out = [1 << bit for bit in range(d.bit_length() - 1, 2, -1) if d >> bit & 1]
    return tuple(out) + ((MIN_WIDTH,) if d % MIN_WIDTH else ())


def check_bits(bits: int) -> None:
    """Raise ArgumentError unless records of `bits` a coordinate exist."""
    if bits not in PACKED_BITS:
        raise ArgumentError(
            "records hold 2, 3 or 4 bits a coordinate", given=str(bits), allowed="2, 3, 4", action="choose one of these"
        )


def part_code_bytes(width: int, bits: int) -> int:
    """Bytes of the codes of one part; `width` is a multiple of 8. Raises ArgumentError."""
    check_bits(bits)
    return -(-width // 10) * 4 if bits == 3 else width * bits // 8


def code_bytes(d: int, bits: int) -> int:
    """Bytes of the codes of a row of width d. Raises WidthError, ArgumentError."""
    return sum(part_code_bytes(width, bits) for width in parts(d))


def record_bytes(d: int, bits: int) -> int:
    """Bytes of one canonical record: codes, then an f32 scale a part. 260 at d=512 and 4 bits."""
    return code_bytes(d, bits) + SCALE_BYTES * len(parts(d))
