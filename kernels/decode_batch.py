"""A step's sequences in one layer group, as all decode layers of the group read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.errors import ArgumentError


class BatchPointers(NamedTuple):
    """What the kernels are given of a batch. table_stride: elements."""

    page_table: int
    table_stride: int
    bases: int
    num_tokens: int
    tail_slots: int | None


@dataclass(frozen=True, eq=False)
class Batch:
    """Tensors on the GPU, int32, read when the kernels run; they stay where they are while the batch is used.

    Checked once, however many layers it serves: `check` remembers what it was asked.

    page_table: [B, pages], from token 0 on, rows any stride apart; entries wholly below the window, or behind the base,
        are not read.
    bases: [B], tokens that lie in pages; multiples of 128 where there is a tail.
    num_tokens: [B], the query tokens included; 0: padding, whose output is zeros, as is that of a query before token 0.
    tail_slots: [B]; None where there is no tail.
    """

    page_table: Tensor
    bases: Tensor
    num_tokens: Tensor
    tail_slots: Tensor | None
    _checked: tuple[int, int, torch.device, bool] | None = field(init=False, default=None, repr=False)
    _pointers: BatchPointers | None = field(init=False, default=None, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        return (self.page_table, self.bases, self.num_tokens, self.tail_slots)

    def check(self, num_sequences: int, max_pages: int, device: torch.device, has_tail: bool) -> BatchPointers:
        """Raises ArgumentError unless this is a batch of so many sequences for layers of that kind."""
        asked = (num_sequences, max_pages, device, has_tail)
        if self._pointers is None or self._checked != asked:
            self._check(*asked)
            table, bases, num_tokens, slots = self.tensors
            pointers = BatchPointers(
                table.data_ptr(),
                table.stride(0),
                bases.data_ptr(),
                num_tokens.data_ptr(),
                None if slots is None else slots.data_ptr(),
            )
            object.__setattr__(self, "_pointers", pointers)
            object.__setattr__(self, "_checked", asked)
            return pointers
        return self._pointers

    def _check(self, num_sequences: int, max_pages: int, device: torch.device, has_tail: bool) -> None:
        table, bases, num_tokens, slots = self.tensors
        fits = table.dim() == 2 and table.shape[0] == num_sequences and 1 <= table.shape[1] <= max_pages
        if not fits or (table.dtype, table.device) != (torch.int32, device) or table.stride(1) != 1:
            raise ArgumentError(
                "the page table does not fit the batch",
                given=f"{table.dtype} {tuple(table.shape)}, strides {table.stride()}, on {table.device}",
                allowed=f"int32 [{num_sequences}, 1 to {max_pages}] on {device}, rows contiguous",
                action="pass one row a sequence; make the layer with larger limits for longer ones",
            )
        if (slots is not None) != has_tail:
            raise ArgumentError(
                "tail slots and tails go together",
                given=f"{'no ' if slots is None else ''}tail slots",
                allowed="tail slots where the layer was made with a tail, and only there",
                action="pass the group's own batch",
            )
        for name, x in (("bases", bases), ("num_tokens", num_tokens), ("tail_slots", slots)):
            want = (torch.int32, (num_sequences,), device)
            if x is not None and ((x.dtype, x.shape, x.device) != want or not x.is_contiguous()):
                raise ArgumentError(
                    f"{name} does not fit the batch",
                    given=f"{x.dtype} {tuple(x.shape)}, strides {x.stride()}, on {x.device}",
                    allowed=f"contiguous int32 [{num_sequences}] on {device}",
                    action="pass one number a sequence",
                )
