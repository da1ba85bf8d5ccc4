"""The rows that a step's decode rows read, of all of them at once: ``Reads`` says what is asked, ``DecodeReads`` finds
it for a step whose lengths the host knows. Captured steps have ``deepseek_v4_step_rows.StepReads``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch

from worker.batch import Batch
from worker.kv_view import KvView, Places
from worker.models.deepseek_v4_geometry import COMPRESSED, RAW


class Completed(NamedTuple):
    """Blocks whose last token is a decode row.

    Attributes:
        at: which of the B decode rows, [n] int64 or a slice. blocks: [n] int64, their numbers.
        places: of the n. some_first: whether block 0 is among them.
    """

    at: torch.Tensor | slice
    blocks: torch.Tensor
    places: Places
    some_first: bool


class Reads(Protocol):
    """B decode rows of a step: each the newest token of its sequence, or of the guesses behind it.

    ``hidden`` tensors [B, N] are True where a row is not its sequence's to read; such rows hold finite values.

    Attributes:
        rows: their rows in the batch, [B] int64 or a slice.
    """

    @property
    def rows(self) -> torch.Tensor | slice: ...

    def window(self, layer: int, kind: str, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw rows of each one's window, its own included: [B, N, dim], and which are hidden."""
        ...

    def most_blocks(self, ratio: int) -> int:
        """No sequence has more whole blocks."""
        ...

    def num_blocks(self, ratio: int) -> torch.Tensor:
        """[B] int64, whole blocks of each."""
        ...

    def blocks(self, layer: int, kind: str, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of all whole blocks of each: [B, most_blocks, dim], and which are hidden."""
        ...

    def chosen(self, layer: int, kind: str, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the blocks ``numbers`` [B, K] int64, -1: none: [B, K, dim], and which are hidden."""
        ...

    def key_pages(self, layer: int, kind: str, ratio: int, num_rows: int) -> Iterator[torch.Tensor]:
        """Rows of all pages with whole blocks of the longest sequence, [B, about num_rows, dim] at a time. Behind a
        sequence's own blocks they may be anything, NaN included.
        """
        ...

    def completed(self, ratio: int) -> Completed | None:
        """None: no block ends with a decode row."""
        ...

    def pending(self, layer: int, kind: str, done: Completed, num_tokens: int) -> torch.Tensor:
        """Pending rows of the last ``num_tokens`` tokens of each block: [n, num_tokens, 2, width]. Those before a
        sequence's first token are its first's.
        """
        ...

    def keep_blocks(self, layer: int, kind: str, done: Completed, rows: torch.Tensor) -> None:
        """Takes rows [n, 1, dim] of the blocks."""
        ...


class DecodeReads:
    """``Reads`` of an eager step. What layers share (positions, page tables, which rows are hidden) is made once."""

    def __init__(self, kv: KvView, batch: Batch) -> None:
        raw = batch.groups[RAW].decode
        assert raw is not None
        self._kv = kv
        self.rows = raw.rows
        self._device = raw.rows.device
        self._positions = raw.step.num_tokens.long() - 1
        self._lengths = [span.start + 1 for span in batch.spans if span.num_rows == 1]
        self._raw = Places.of(raw)
        compressed = batch.groups[COMPRESSED].decode if COMPRESSED in batch.groups else None
        self._compressed = None if compressed is None else Places.of(compressed)
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_blocks: dict[int, torch.Tensor] = {}
        self._completed: dict[int, Completed | None] = {}
        self._pending: dict[tuple[int, int], torch.Tensor] = {}

    def window(self, layer: int, kind: str, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        if window not in self._windows:
            num_rows = min(window, max(self._lengths))
            numbers = self._positions.unsqueeze(1) - torch.arange(num_rows - 1, -1, -1, device=self._device)
            # Before a sequence's first token its own newest is read, which is there.
            hidden = numbers < 0
            self._windows[window] = torch.where(hidden, self._positions.unsqueeze(1), numbers), hidden
        numbers, hidden = self._windows[window]
        return self._kv.gather(self._kv.view(layer, kind), self._raw, numbers).squeeze(2), hidden

    def most_blocks(self, ratio: int) -> int:
        """Whole blocks of the longest sequence."""
        return max(self._lengths) // ratio

    def num_blocks(self, ratio: int) -> torch.Tensor:
        if ratio not in self._num_blocks:
            self._num_blocks[ratio] = (self._positions + 1) // ratio
        return self._num_blocks[ratio]

    def blocks(self, layer: int, kind: str, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        view, most = self._kv.view(layer, kind), self.most_blocks(ratio)
        rows = self._kv.gather_pages(view, self._places, 0, -(-most // view.region.rows_per_page))[:, :most].squeeze(2)
        hidden = torch.arange(most, device=self._device) >= self.num_blocks(ratio).unsqueeze(1)
        if min(self._lengths) // ratio < most:  # of others, or never written
            rows = rows.masked_fill_(hidden.unsqueeze(2), 0)
        return rows, hidden

    def chosen(self, layer: int, kind: str, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view, hidden = self._kv.view(layer, kind), numbers < 0
        rows = self._kv.gather(view, Places(self._places.table, None), numbers.clamp(min=0)).squeeze(2)
        if min(self._lengths) < view.region.ratio:  # a sequence has no row at all, not even number 0
            rows = rows.masked_fill_(hidden.unsqueeze(2), 0)
        return rows, hidden

    def key_pages(self, layer: int, kind: str, ratio: int, num_rows: int) -> Iterator[torch.Tensor]:
        view = self._kv.view(layer, kind)
        per_page = view.region.rows_per_page
        num_pages, step = -(-self.most_blocks(ratio) // per_page), max(1, num_rows // per_page)
        for first in range(0, num_pages, step):
            yield self._kv.gather_pages(view, self._places, first, min(num_pages, first + step)).squeeze(2)

    def completed(self, ratio: int) -> Completed | None:
        if ratio not in self._completed:
            found = [(at, length // ratio - 1) for at, length in enumerate(self._lengths) if length % ratio == 0]
            done = None
            if found:
                at, blocks = torch.tensor(found, dtype=torch.int64).to(self._device).unbind(1)
                table, slots = self._places
                assert slots is not None  # pending rows lie in tails in every mode
                done = Completed(at, blocks, Places(table[at], slots[at]), any(block == 0 for _, block in found))
            self._completed[ratio] = done
        return self._completed[ratio]

    def pending(self, layer: int, kind: str, done: Completed, num_tokens: int) -> torch.Tensor:
        view = self._kv.view(layer, kind)
        key = view.region.block, num_tokens
        if key not in self._pending:
            ends = self._positions[done.at].unsqueeze(1)
            back = torch.arange(num_tokens - 1, -1, -1, device=self._device)
            self._pending[key] = (ends - back).clamp(min=0)
        return self._kv.gather(view, done.places, self._pending[key])

    def keep_blocks(self, layer: int, kind: str, done: Completed, rows: torch.Tensor) -> None:
        self._kv.put(self._kv.view(layer, kind), done.places, done.blocks, rows)

    @property
    def _places(self) -> Places:
        assert self._compressed is not None
        return self._compressed
