"""Where DeepSeek-V4's layers find the rows that sequences hold, and where they leave a step's own."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from worker.batch import Span
from worker.models.deepseek_v4_reads import Reads


class Rows(Protocol):
    """The rows of a step's sequences. ``span`` counts ``Batch.spans``; kinds are ``deepseek_v4_geometry``'s.

    ``first`` and ``end`` count rows of the kind: tokens, or blocks of ``ratio`` tokens from position 0.
    """

    def held(self, span: int, layer: int, kind: str, first: int, end: int) -> torch.Tensor:
        """[end - first, heads, dim]: rows from before this step; not to be written to."""
        ...

    def chosen(self, span: int, layer: int, kind: str, numbers: torch.Tensor) -> torch.Tensor:
        """[M, heads, dim]: rows ``numbers`` [M] int64 of a kind of blocks, those that the span completed included."""
        ...

    def decode(self) -> Reads | None:
        """The step's decode rows (spans of one token) for all to be read at once; None: they are read as others are."""
        ...

    def keep(self, layer: int, kind: str, rows: torch.Tensor) -> None:
        """Takes this step's rows [R, heads, dim] of a kind with a row a token; padding rows belong to no span."""
        ...

    def keep_blocks(self, span: int, layer: int, kind: str, first: int, rows: torch.Tensor) -> None:
        """Takes rows [N, heads, dim] of blocks [first, first + N), which the span completed; N at least 1."""
        ...


class LayerSpan(NamedTuple):
    """One span's rows in one layer."""

    rows: Rows
    number: int
    span: Span
    layer: int

    @property
    def start(self) -> int:
        """Tokens held before this step; the position of the span's first token."""
        return self.span.start

    @property
    def end(self) -> int:
        return self.span.start + self.span.num_rows

    def own(self, rows: torch.Tensor) -> torch.Tensor:
        """The span's part of this step's rows [R, ...], a view."""
        return rows[self.span.first_row : self.span.first_row + self.span.num_rows]

    def held(self, kind: str, first: int, end: int) -> torch.Tensor:
        return self.rows.held(self.number, self.layer, kind, first, end)

    def chosen(self, kind: str, numbers: torch.Tensor) -> torch.Tensor:
        return self.rows.chosen(self.number, self.layer, kind, numbers)

    def keep_blocks(self, kind: str, first: int, rows: torch.Tensor) -> None:
        self.rows.keep_blocks(self.number, self.layer, kind, first, rows)
