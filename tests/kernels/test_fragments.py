"""Page layout version 2 against its definition, written out lane by lane and nibble by nibble in plain integers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import bitpack, fragments
from kernels.page_layout import FRAGMENT_WIDTHS, Fragments

ORDERS = [Fragments(kind, dim, bits) for kind in "kv" for dim in FRAGMENT_WIDTHS for bits in (2, 3, 4)]


def nibble_words(kind: str, codes: list[list[int]], lane: int) -> list[int]:
    """N[f] of a lane; codes [row][dim] of a group of 32 rows."""
    dim = len(codes[0])
    g, t = lane // 4, lane % 4
    words = [0] * (dim // 8)

    def put(f: int, half: int, j: int, row: int, coordinate: int) -> None:
        words[f] |= codes[row][coordinate] << 4 * (4 * half + j)

    for khalf in (0, 1):
        for half in (0, 1):
            for j in range(4):
                if kind == "k":
                    for m in (0, 1):
                        for s in range(dim // 32):
                            f = (m * (dim // 32) + s) * 2 + khalf
                            put(f, half, j, 16 * m + g + 8 * half, 32 * s + 8 * t + 4 * khalf + j)
                else:
                    for c in range(dim // 32):
                        for e in (0, 1):
                            f = (c * 2 + e) * 2 + khalf
                            row = 16 * khalf + 2 * t + (j >> 1) + 8 * (j & 1)
                            put(f, half, j, row, 32 * c + 4 * g + 2 * e + half)
    return words


def plain_group(order: Fragments, codes: list[list[int]]) -> bytes:
    """Bytes of a group of 32 rows."""
    kind, dim, bits = order
    width = dim // 8
    first: dict[int, int] = {}  # word index in the group -> word
    behind: dict[int, int] = {}
    for lane in range(32):
        whole = nibble_words(kind, codes, lane)
        if bits == 4:
            for f in range(width):
                first[(f // 4 * 32 + lane) * 4 + f % 4] = whole[f]
        else:
            low = [word & 0x33333333 for word in whole]
            for h in range(width // 2):
                first[(h // 4 * 32 + lane) * 4 + h % 4] = low[2 * h] | low[2 * h + 1] << 2
        if bits == 3:
            top = [word >> 2 & 0x11111111 for word in whole]
            together = min(4, width // 4)
            for u in range(width // 4):
                word = top[4 * u] | top[4 * u + 1] << 1 | top[4 * u + 2] << 2 | top[4 * u + 3] << 3
                behind[(u // together * 32 + lane) * together + u % together] = word
    words = [first[i] for i in range(len(first))] + [behind[i] for i in range(len(behind))]
    return b"".join(word.to_bytes(4, "little") for word in words)


def random_codes(order: Fragments, *leading: int, seed: int = 0) -> Tensor:
    """Codes u8 [*leading, dim]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << order.bits, (*leading, order.dim), dtype=torch.uint8, generator=generator)


def canonical(codes: Tensor, order: Fragments) -> Tensor:
    packed = bitpack.pack_codes(codes.reshape(-1, order.dim).t(), order.bits)
    return packed.reshape(*codes.shape[:-1], packed.shape[-1])


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_bytes_are_those_of_the_definition(order: Fragments) -> None:
    codes = random_codes(order, 2, 64, seed=order.dim + order.bits)
    groups = fragments.codes_to_groups(canonical(codes, order), order)
    assert groups.shape == (2, 2, 4 * order.dim * order.bits)
    for head in range(2):
        for group in range(2):
            want = plain_group(order, codes[head, 32 * group : 32 * (group + 1)].tolist())
            assert bytes(groups[head, group].tolist()) == want, (head, group)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_every_bit_of_a_group_is_a_bit_of_one_code(order: Fragments) -> None:
    """So any bytes go to canonical records and back without loss, and no two codes share a bit."""
    generator = torch.Generator().manual_seed(1)
    groups = torch.randint(0, 256, (3, 4, order.group_bytes), dtype=torch.uint8, generator=generator)
    records = fragments.codes_from_groups(groups, order)
    assert records.shape == (3, 128, bitpack.code_bytes(order.dim, order.bits))
    assert torch.equal(fragments.codes_to_groups(records, order), groups)


@settings(max_examples=60, deadline=None)
@given(order=st.sampled_from(ORDERS), heads=st.integers(0, 3), groups=st.integers(0, 4), seed=st.integers(0, 2**31))
def test_converters_are_inverse(order: Fragments, heads: int, groups: int, seed: int) -> None:
    records = canonical(random_codes(order, heads, groups * 32, seed=seed), order)
    back = fragments.codes_from_groups(fragments.codes_to_groups(records, order), order)
    assert torch.equal(back, records)
    strided = torch.cat([records, records], dim=-1)[..., : records.shape[-1]]  # a view into something wider
    assert torch.equal(fragments.codes_to_groups(strided, order), fragments.codes_to_groups(records, order))


def test_scales_are_those_of_the_definition_and_come_back() -> None:
    scales = torch.randn(2, 64, 1, generator=torch.Generator().manual_seed(2))
    groups = fragments.scales_to_groups(scales.view(torch.uint8))
    assert groups.shape == (2, 2, 128)
    values = groups.view(torch.float32)
    for group in range(2):
        for g in range(8):
            for k in range(4):
                assert torch.equal(values[:, group, 4 * g + k], scales[:, 32 * group + g + 8 * k, 0])
    assert torch.equal(fragments.scales_from_groups(groups), scales.view(torch.uint8))
