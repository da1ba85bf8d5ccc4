"""Canonical records decoded and encoded in plain Python: no tensor, no table and no rule of the package is used.

Slow and obvious on purpose. The grids are literals, so a change of the stored tables is a change of this file too.
"""

from __future__ import annotations

import math
import struct

GRIDS = {
    (64, 2): (0.00179422251, (32, 105)),
    (64, 3): (0.00226420932, (14, 42, 74, 117)),
    (128, 3): (0.00160418707, (14, 42, 74, 118)),
    (128, 4): (0.00209445041, (6, 17, 28, 40, 53, 68, 87, 114)),
    (512, 4): (0.00105243188, (6, 17, 28, 40, 53, 68, 87, 115)),
}


def signs(d: int) -> list[int]:
    state = 42 ^ (d * 0x9E3779B97F4A7C15 % 2**64)
    out = []
    for _ in range(d):
        state ^= state * 2**13 % 2**64
        state ^= state // 2**7
        state ^= state * 2**17 % 2**64
        out.append(1 if state % 2 == 0 else -1)
    return out


def rotate(x: list[float]) -> list[float]:
    """D H D / sqrt(d): entry (i, j) of H is -1 to the number of bits that i and j share."""
    d = len(x)
    sign = signs(d)
    return [
        sum((-1) ** bin(i & j).count("1") * sign[j] * x[j] for j in range(d)) * sign[i] / math.sqrt(d) for i in range(d)
    ]


def codes_of(record: bytes, d: int, bits: int) -> list[int]:
    if bits == 4:
        return [record[i // 2] >> 4 * (i % 2) & 15 for i in range(d)]
    if bits == 2:
        return [record[i // 4] >> 2 * (i % 4) & 3 for i in range(d)]
    words = struct.unpack(f"<{math.ceil(d / 10)}I", record[: 4 * math.ceil(d / 10)])
    return [words[i // 10] >> 3 * (i % 10) & 7 for i in range(d)]


def value_of(code: int, d: int, bits: int) -> float:
    step, magnitudes = GRIDS[d, bits]
    sign, magnitude = code >> (bits - 1), code & 2 ** (bits - 1) - 1
    value: float = step * (magnitudes[magnitude] - 0.5)
    return -value if sign else value


def decode(record: bytes, d: int, bits: int) -> list[float]:
    (scale,) = struct.unpack("<f", record[-4:])
    return rotate([scale * value_of(code, d, bits) for code in codes_of(record, d, bits)])


def encode(row: list[float], d: int, bits: int) -> bytes:
    """The nearest of all values for each coordinate; of two that are equally near, the larger value."""
    norm = math.sqrt(math.fsum(v * v for v in row))
    values = {code: value_of(code, d, bits) for code in range(2**bits)}
    codes = [min(values, key=lambda c: (abs(values[c] - y), -values[c])) for y in rotate([v / norm for v in row])]
    scale = norm / math.sqrt(math.fsum(values[c] ** 2 for c in codes))
    if bits == 4:
        packed = bytes(codes[i] + 16 * codes[i + 1] for i in range(0, d, 2))
    elif bits == 2:
        packed = bytes(sum(codes[i + j] * 4**j for j in range(4)) for i in range(0, d, 4))
    else:
        groups = [codes[i : i + 10] for i in range(0, d, 10)]
        packed = b"".join(struct.pack("<I", sum(c * 8**j for j, c in enumerate(group))) for group in groups)
    return packed + struct.pack("<f", scale)


def decode_e4m3(byte: int) -> float:
    """1 sign, 4 exponent bits (bias 7), 3 mantissa bits; no infinity, 0x7f and 0xff are NaN."""
    sign, exponent, mantissa = (-1 if byte >> 7 else 1), byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decode_bf16(data: bytes) -> list[float]:
    return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]


def decode_v4(record: bytes) -> list[float]:
    """448 e4m3 | 64 bf16 | 7 bf16 amax."""
    amax = decode_bf16(record[576:590])
    scales = [2.0 ** math.ceil(math.log2(max(a, 1e-4) / 448)) for a in amax]
    return [decode_e4m3(record[i]) * scales[i // 64] for i in range(448)] + decode_bf16(record[448:576])
