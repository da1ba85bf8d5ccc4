"""Checksums of pages by PyTorch against those by numpy."""

from __future__ import annotations

import pytest
import torch

from kernels.errors import LayoutError
from kernels.page_checksum import page_checksum
from kernels.page_sums import checksum_keys, page_sums


@pytest.mark.parametrize("page_bytes", [8, 8 * 40961])
def test_sums_are_the_checksums(page_bytes: int) -> None:
    generator = torch.Generator().manual_seed(1)
    arena = torch.randint(0, 256, (3, page_bytes), dtype=torch.uint8, generator=generator)
    sums = page_sums(arena, [2, 0], checksum_keys(page_bytes, arena.device)).tolist()
    assert [each % 2**64 for each in sums] == [page_checksum(arena[page].numpy().data) for page in (2, 0)]


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(LayoutError, match="whole pairs"):
        checksum_keys(12, torch.device("cpu"))
