"""The order of page layout version 2: rows in groups of 32, as tensor-core kernels read them. Any device.

In a group, lane = 4 g + t (g 0..7, t 0..3) owns W = d / 8 *nibble words* N[f], f in [0, W). A nibble word is 8 nibbles,
nibble 4 half + j at bits 4 (4 half + j), and a nibble is one code, zero-extended:

    kind "k": f = (m (d / 32) + s) 2 + khalf     nibble (half, j): row 16 m + g + 8 half, dim 32 s + 8 t + 4 khalf + j
    kind "v": f = (c 2 + e) 2 + khalf            nibble (half, j): dim 32 c + 4 g + 2 e + half,
                                                                   row 16 khalf + 2 t + (j >> 1) + 8 (j & 1)
    m, e, khalf, half in {0, 1}; s, c in [0, d / 32); j in 0..3

They are stored as u32 words, little-endian, so that a lane loads n = min(4, words a lane) of them at once:

    4 bits   word f = N[f]                                            order [f / 4][lane][f % 4]
    2 bits   word h = N[2h] | N[2h+1] << 2                            order [h / 4][lane][h % 4]
    3 bits   the words of the codes' low two bits as at 2 bits, behind them those of the top bit:
             word u = B[4u] | B[4u+1] << 1 | B[4u+2] << 2 | B[4u+3] << 3, B[f] = N[f] >> 2 & 0x11111111
                                                                      order [u / n][lane][u % n]

A group's scales are 32 f32: index 4 g + k is that of row g + 8 k.

So a plane of codes is made of *fields* of 4, 2 or 1 bits, of which a byte holds 2, 4 or 8; one index map a field width
says whose code each field holds.
"""

from functools import lru_cache

import torch
from torch import Tensor

from kernels import bitpack
from kernels.page_layout import GROUP_ROWS, Fragments
from kernels.record_sizes import SCALE_BYTES

SCALE_GROUP_BYTES = GROUP_ROWS * SCALE_BYTES
_LANES = 32
_FIELDS = {4: ((4, 0),), 2: ((2, 0),), 3: ((2, 0), (1, 2))}  # by bits: (bits of a field, its shift in a code)


@lru_cache
def _codes_of_fields(kind: str, dim: int, field_bits: int, device: torch.device) -> Tensor:
    """int64 [fields a byte * bytes], field-major: the code (row * dim + dim's index) of each field of a group."""
    merged = 4 // field_bits  # nibble words in a stored word
    words = dim // 8 // merged
    together = min(4, words)
    shape = (words // together, _LANES, together, 4)
    outer, lane, inner, byte = (x.reshape(1, -1) for x in torch.meshgrid(*map(torch.arange, shape), indexing="ij"))
    field = torch.arange(8 // field_bits).view(-1, 1)
    f = merged * (outer * together + inner) + field % merged
    nibble = 2 * byte + field // merged
    g, t, half, j, khalf = lane // 4, lane % 4, nibble // 4, nibble % 4, f % 2
    if kind == "k":
        m, s = f // 2 // (dim // 32), f // 2 % (dim // 32)
        row, coordinate = 16 * m + g + 8 * half, 32 * s + 8 * t + 4 * khalf + j
    else:
        c, e = f // 4, f // 2 % 2
        row, coordinate = 16 * khalf + 2 * t + (j >> 1) + 8 * (j & 1), 32 * c + 4 * g + 2 * e + half
    return (row * dim + coordinate).view(-1).to(device)


@lru_cache
def _fields_of_codes(kind: str, dim: int, field_bits: int, device: torch.device) -> Tensor:
    """Inverse of `_codes_of_fields`."""
    return _codes_of_fields(kind, dim, field_bits, device).argsort()


def codes_to_groups(codes: Tensor, order: Fragments) -> Tensor:
    """Canonical codes u8 [..., rows, code_bytes], whole groups of rows, to u8 [..., rows / 32, group_bytes]."""
    *leading, rows, size = codes.shape
    num_groups = codes.numel() // size // GROUP_ROWS
    unpacked = bitpack.unpack_codes(codes.reshape(num_groups * GROUP_ROWS, size), order.dim, order.bits)
    plain = unpacked.t().reshape(num_groups, GROUP_ROWS * order.dim)
    planes = []
    for field_bits, shift in _FIELDS[order.bits]:
        source = _codes_of_fields(order.kind, order.dim, field_bits, codes.device)
        fields = (plain >> shift & (1 << field_bits) - 1).index_select(1, source)
        columns = fields.view(num_groups, 8 // field_bits, 4 * order.dim * field_bits)
        plane = columns[:, 0].clone()
        for k in range(1, columns.shape[1]):
            plane |= columns[:, k] << field_bits * k
        planes.append(plane)
    return torch.cat(planes, dim=1).view(*leading, rows // GROUP_ROWS, order.group_bytes)


def codes_from_groups(groups: Tensor, order: Fragments) -> Tensor:
    """Inverse of `codes_to_groups`; a new tensor."""
    *leading, in_head, size = groups.shape
    flat = groups.flatten(0, -2)
    num_groups, begin = len(flat), 0
    codes = torch.zeros((num_groups, GROUP_ROWS * order.dim), dtype=torch.uint8, device=groups.device)
    for field_bits, shift in _FIELDS[order.bits]:
        end = begin + 4 * order.dim * field_bits
        plane, mask = flat[:, begin:end], (1 << field_bits) - 1
        fields = torch.cat([plane >> field_bits * k & mask for k in range(8 // field_bits)], dim=1)
        places = _fields_of_codes(order.kind, order.dim, field_bits, groups.device)
        codes |= fields.index_select(1, places) << shift
        begin = end
    assert begin == size, "a plane of another order"
    packed = bitpack.pack_codes(codes.view(num_groups * GROUP_ROWS, order.dim).t(), order.bits)
    code_bytes = bitpack.code_bytes(order.dim, order.bits)
    return packed.reshape(*leading, in_head * GROUP_ROWS, code_bytes)


def scales_to_groups(scales: Tensor) -> Tensor:
    """Scales u8 [..., rows, 4] to u8 [..., rows / 32, 128]."""
    *leading, rows, _ = scales.shape
    by_row = scales.reshape(*leading, rows // GROUP_ROWS, 4, 8, SCALE_BYTES)
    return by_row.transpose(-3, -2).reshape(*leading, rows // GROUP_ROWS, SCALE_GROUP_BYTES)


def scales_from_groups(groups: Tensor) -> Tensor:
    """Inverse of `scales_to_groups`."""
    *leading, in_head, _ = groups.shape
    by_place = groups.reshape(*leading, in_head, 8, 4, SCALE_BYTES)
    return by_place.transpose(-3, -2).reshape(*leading, in_head * GROUP_ROWS, SCALE_BYTES)
