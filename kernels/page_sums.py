"""`page_checksum` of pages where they lie, by PyTorch: for pages that no kernel of ours writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.errors import LayoutError
from kernels.page_checksum import KEY_START, KEY_STEP

_LOW = 0xFFFFFFFF


def checksum_keys(page_bytes: int, device: torch.device) -> Tensor:
    """i32 [page_bytes / 4], for `page_sums`. Raises LayoutError where a page is not whole pairs of words."""
    if page_bytes % 8:
        raise LayoutError(
            "a page is whole pairs of u32 words",
            given=f"{page_bytes} bytes",
            allowed="a multiple of 8",
            action="pass all bytes of the page",
        )
    keys = torch.arange(page_bytes // 4, dtype=torch.int64, device=device).mul_(KEY_STEP).add_(KEY_START)
    return keys.bitwise_and_(_LOW).view(torch.int32)[::2].contiguous()  # the low words: little-endian


def page_sums(arena: Tensor, pages: Sequence[int], keys: Tensor) -> Tensor:
    """i64 [n] on the arena's device: the checksums of these pages, as signed words. Waits for nothing.

    arena: u8 [num_pages, page_bytes]. keys: `checksum_keys` of a page.
    """
    sums = torch.empty(len(pages), dtype=torch.int64, device=arena.device)
    for at, page in enumerate(pages):
        pairs = (arena[page].view(torch.int32) + keys).view(torch.int64)  # sums wrap, as they shall
        low = pairs & _LOW
        torch.sum(low.mul_(pairs.bitwise_right_shift_(32).bitwise_and_(_LOW)), 0, out=sums[at])
    return sums
