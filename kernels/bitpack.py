"""Codes of 2, 3 or 4 bits as bytes, in canonical order.

4 bits: byte i = code[2i] | code[2i+1] << 4. 2 bits: 4 codes a byte, the first lowest. 3 bits: 10 codes in a
little-endian u32, code j at bits 3j..3j+2, bits 30 and 31 zero; a last group that is not full still takes its whole
4 bytes, zero where no code is. So a part of 64 codes takes 32, 28 or 16 bytes at 4, 3 or 2 bits.
"""

import sys

import torch
from torch import Tensor

from kernels.record_sizes import check_bits
from kernels.record_sizes import part_code_bytes as code_bytes

__all__ = ["check_bits", "code_bytes", "pack_codes", "unpack_codes"]

assert sys.byteorder == "little"  # u32 groups are written by reinterpreting memory


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes u8 [width, n], each below 2^bits, to canonical bytes u8 [n, code_bytes(width, bits)]."""
    width, n = codes.shape
    if bits == 4:
        return (codes[0::2] | codes[1::2] << 4).t()
    if bits == 2:
        return (codes[0::4] | codes[1::4] << 2 | codes[2::4] << 4 | codes[3::4] << 6).t()
    check_bits(bits)
    groups = -(-width // 10)
    padded = torch.zeros((groups * 10, n), dtype=torch.int32, device=codes.device)
    padded[:width] = codes
    words = torch.zeros((groups, n), dtype=torch.int32, device=codes.device)
    for j in range(10):
        words |= padded[j::10] << 3 * j
    return words.t().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def unpack_codes(packed: Tensor, width: int, bits: int) -> Tensor:
    """Inverse of `pack_codes`: bytes u8 [n, code_bytes(width, bits)] to codes u8 [width, n], contiguous."""
    columns = packed.t()
    n = columns.shape[1]
    codes = torch.empty((width, n), dtype=torch.uint8, device=packed.device)
    if bits in (2, 4):
        a_byte = 8 // bits
        for j in range(a_byte):
            codes[j::a_byte] = columns >> bits * j & (1 << bits) - 1
        return codes
    check_bits(bits)
    # A copy, because a slice may start at any byte and reinterpreting needs alignment.
    words = packed.clone(memory_format=torch.contiguous_format).view(torch.int32).t()
    for j in range(10):
        slots = codes[j::10]
        slots.copy_(words[: slots.shape[0]] >> 3 * j & 7)
    return codes
