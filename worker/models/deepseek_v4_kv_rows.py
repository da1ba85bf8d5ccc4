"""DeepSeek-V4's rows in the KV service's memory: pages, tails and a step's workspace."""

from __future__ import annotations

import torch

from worker.batch import Batch, Place
from worker.kv_view import KvView, RegionView, Workspace
from worker.models.deepseek_v4_geometry import COMPRESSED, RAW
from worker.models.deepseek_v4_reads import DecodeReads


class KvRows:
    """The rows of one step's sequences, as ``deepseek_v4_rows.Rows`` says.

    Raw rows go to dense pages, or to tail rings and workspace; pending rows to rings and workspace; blocks to dense
    pages, where the next to read them finds them, or, packed, to rings and workspace. On a step that decodes only,
    nothing that is packed is read but compressed rows, where those are packed.
    """

    def __init__(self, kv: KvView, workspace: Workspace, batch: Batch) -> None:
        self._kv = kv
        self._workspace = workspace
        self._batch = batch
        self._decode = _decode_reads(kv, batch)

    def decode(self) -> DecodeReads | None:
        return self._decode

    def held(self, span: int, layer: int, kind: str, first: int, end: int) -> torch.Tensor:
        view, place = self._of(span, layer, kind)
        ratio = view.region.ratio
        return self._kv.span(view, place, first * ratio, (end - first) * ratio, "attention")

    def chosen(self, span: int, layer: int, kind: str, numbers: torch.Tensor) -> torch.Tensor:
        view, place = self._of(span, layer, kind)
        if view.pages is not None:
            return self._kv.rows_at(view, place, numbers)
        at, ratio = self._batch.spans[span], view.region.ratio
        in_tail = place.base // ratio
        packed = numbers < in_tail
        rows = self._dense_blocks(span, layer, kind, in_tail, (at.start + at.num_rows) // ratio)
        out = rows.new_empty((len(numbers), *rows.shape[1:]))
        out[packed] = self._kv.packed_rows_at(view, place, numbers[packed], "attention")
        out[~packed] = rows[numbers[~packed] - in_tail]
        return out

    def _dense_blocks(self, span: int, layer: int, kind: str, first: int, end: int) -> torch.Tensor:
        """Rows [first, end) of a packed group's blocks, none of which is packed."""
        view, _ = self._of(span, layer, kind)
        at = self._batch.spans[span]
        begin = end if at.num_rows == 1 else at.start // view.region.ratio  # what a single row completed is in the ring
        rows = self.held(span, layer, kind, first, begin)
        if begin == end:
            return rows
        return torch.cat((rows, self._workspace.rows(view, at.workspace_row, at.start, begin, end)))

    def keep(self, layer: int, kind: str, rows: torch.Tensor) -> None:
        view = self._kv.view(layer, kind)
        self._kv.append(view, rows, self._batch.groups[view.group.name])
        self._workspace.keep(view, rows)

    def keep_blocks(self, span: int, layer: int, kind: str, first: int, rows: torch.Tensor) -> None:
        view, place = self._of(span, layer, kind)
        workspace_row = self._batch.spans[span].workspace_row
        if view.tail is not None and workspace_row >= 0:
            self._workspace.keep_blocks(view, workspace_row, first, rows)
        else:
            self._kv.append_blocks(view, place, first, rows)

    def _of(self, span: int, layer: int, kind: str) -> tuple[RegionView, Place]:
        view = self._kv.view(layer, kind)
        return view, self._batch.groups[view.group.name].places[span]


def _decode_reads(kv: KvView, batch: Batch) -> DecodeReads | None:
    """On a GPU, but not where compressed rows are packed; nor in deterministic mode, where a row's products must not
    have shapes that other sequences decide on."""
    packed = any(group.name == COMPRESSED and group.packed for group in kv.geometry.groups)
    if packed or batch.deterministic or batch.groups[RAW].decode is None:
        return None
    return DecodeReads(kv, batch)
