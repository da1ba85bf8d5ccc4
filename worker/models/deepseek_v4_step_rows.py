"""The rows of a captured decode step: of B sequences, each its newest token's, found on the device.

Nothing here depends on lengths that the host knows, but on one bound (``reach``) that all of them keep. So a step is
the same row of launches for all sequences that are no longer: what ends on a step is told by the device, and rows of
padding write nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.append_cuda import AppendSide, append
from kernels.v4_step_cuda import V4Step
from protos.page_hash import PAGE_TOKENS
from worker.decode_state import DecodeState
from worker.kv_view import KvView, Places, RegionView
from worker.models.deepseek_v4_compressor import CompressorWeights
from worker.models.deepseek_v4_geometry import COMPRESSED, RAW
from worker.models.deepseek_v4_reads import Completed


class StepReads:
    """As ``deepseek_v4_reads.Reads`` says, of rows [0, num_rows) of a decode state. Rows of padding (0 tokens) read
    anything.

    Args:
        reach: the most tokens of any of them, a multiple of a page's.
    """

    def __init__(self, kv: KvView, state: DecodeState, num_rows: int, reach: int) -> None:
        self.rows = slice(0, num_rows)
        self._kv, self._reach = kv, reach
        device = state.words.device
        self._num_tokens = state.row_words("num_tokens", num_rows).long()
        self._live = self._num_tokens > 0
        self.positions = (self._num_tokens - 1).clamp(min=0)
        pages = min(reach // PAGE_TOKENS, state.pages)
        self._places = {
            group.name: Places(
                state.table(group.name, num_rows)[:, :pages].long().clamp(min=0),
                state.row_words(f"slot {group.name}", num_rows).long().clamp(min=0) if group.has_tail else None,
            )
            for group in kv.geometry.groups
        }
        self._device = device
        self._windows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_blocks: dict[int, torch.Tensor] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._pending: dict[int, torch.Tensor] = {}
        self._writes: dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def window(self, layer: int, kind: str, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        if window not in self._windows:
            numbers = self.positions.unsqueeze(1) - torch.arange(window - 1, -1, -1, device=self._device)
            hidden = numbers < 0
            self._windows[window] = torch.where(hidden, self.positions.unsqueeze(1), numbers), hidden
        numbers, hidden = self._windows[window]
        return self._kv.gather(self._kv.view(layer, kind), self._places[RAW], numbers).squeeze(2), hidden

    def most_blocks(self, ratio: int) -> int:
        """Whole blocks of the longest sequence that there may be."""
        return self._reach // ratio

    def num_blocks(self, ratio: int) -> torch.Tensor:
        if ratio not in self._num_blocks:
            self._num_blocks[ratio] = self._num_tokens // ratio
        return self._num_blocks[ratio]

    def blocks(self, layer: int, kind: str, ratio: int) -> tuple[torch.Tensor, torch.Tensor]:
        view, most = self._kv.view(layer, kind), self.most_blocks(ratio)
        if ratio not in self._hidden:
            self._hidden[ratio] = torch.arange(most, device=self._device) >= self.num_blocks(ratio).unsqueeze(1)
        hidden = self._hidden[ratio]
        rows = self._kv.gather_pages(view, self._places[COMPRESSED], 0, most // view.region.rows_per_page).squeeze(2)
        return rows.masked_fill_(hidden.unsqueeze(2), 0), hidden

    def chosen(self, layer: int, kind: str, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        view, hidden = self._kv.view(layer, kind), numbers < 0
        where = Places(self._places[COMPRESSED].table, None)
        rows = self._kv.gather(view, where, numbers.clamp(min=0)).squeeze(2)
        return rows.masked_fill_(hidden.unsqueeze(2), 0), hidden

    def key_pages(self, layer: int, kind: str, ratio: int, num_rows: int) -> Iterator[torch.Tensor]:
        view = self._kv.view(layer, kind)
        per_page = view.region.rows_per_page
        num_pages, step = self.most_blocks(ratio) // per_page, max(1, num_rows // per_page)
        for first in range(0, num_pages, step):
            end = min(num_pages, first + step)
            yield self._kv.gather_pages(view, self._places[COMPRESSED], first, end).squeeze(2)

    def completed(self, ratio: int) -> Completed | None:
        """All rows; ``keep_blocks`` keeps what a block ends with."""
        blocks = (self.num_blocks(ratio) - 1).clamp(min=0)
        return Completed(self.rows, blocks, self._places[COMPRESSED], some_first=True)

    def pending(self, layer: int, kind: str, done: Completed, num_tokens: int) -> torch.Tensor:
        if num_tokens not in self._pending:
            back = torch.arange(num_tokens - 1, -1, -1, device=self._device)
            self._pending[num_tokens] = (self.positions.unsqueeze(1) - back).clamp(min=0)
        return self._kv.gather(self._kv.view(layer, kind), done.places, self._pending[num_tokens])

    def complete(
        self,
        layer: int,
        kind: str,
        pending_kind: str,
        weights: CompressorWeights,
        inverse_frequencies: torch.Tensor,
        eps: float,
        kernels: V4Step,
    ) -> None:
        """What ``completed``, ``pending`` and ``keep_blocks`` are for, in one launch."""
        view, pending, where = self._kv.view(layer, kind), self._kv.view(layer, pending_kind), self._places[COMPRESSED]
        assert view.pages is not None and pending.tail is not None and where.slots is not None
        at = (where.slots, self._num_tokens, view.pages.squeeze(2), where.table)
        kernels.complete(pending.tail, *at, weights.norm, inverse_frequencies, ratio=weights.ratio, eps=eps)

    def keep_blocks(self, layer: int, kind: str, done: Completed, rows: torch.Tensor) -> None:
        view = self._kv.view(layer, kind)
        assert view.pages is not None
        _put(view.pages, rows, *self._at(view, view.region.rows_per_page))

    def keep(self, layer: int, kind: str, rows: torch.Tensor) -> None:
        """Takes the step's rows [B, heads, dim] of a kind with a row a token."""
        view = self._kv.view(layer, kind)
        memory = view.tail if view.tail is not None else view.pages
        assert memory is not None
        _put(memory, rows, *self._at(view, memory.shape[1]))

    def _at(self, view: RegionView, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the newest token's row goes, or its block's, in rings or pages of ``size`` rows: places, -1 where there
        is none, and rows of them, [B] int64 each."""
        ratio = view.region.ratio
        key = view.group.name if view.tail is None else f"{view.group.name} ring", ratio, size
        if key not in self._writes:
            ends, where = self._live, self._places[view.group.name]
            if ratio > 1:
                ends = ends & (self._num_tokens % ratio == 0)
            if view.tail is not None:
                assert where.slots is not None
                places = where.slots
            else:
                places = where.table.gather(1, self.positions.unsqueeze(1) // PAGE_TOKENS).squeeze(1)
            self._writes[key] = places.masked_fill(~ends, -1), self.positions // ratio % size
        return self._writes[key]


def _put(memory: torch.Tensor, rows: torch.Tensor, places: torch.Tensor, at: torch.Tensor) -> None:
    """Rows [B, heads, dim] go to rows ``at`` [B] of ``places`` [B] in memory [places, rows, heads, dim]; those of a
    negative place go nowhere."""
    if memory.is_cuda:
        append(AppendSide(rows, memory), None, places, at)
    else:
        live = places >= 0
        memory[places[live], at[live]] = rows[live]
