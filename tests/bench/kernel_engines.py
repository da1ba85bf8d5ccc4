"""What runs a case: the decode kernels on a GPU, or the PyTorch reference on a CPU."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.attention import PackedRegion, Part, attend_dense, attend_packed, merge
from kernels.decode import Batch, DecodeLayer
from kernels.decode_tiling import packed_long_pages
from kernels.decode_workspace import DecodeLimits, new_workspace, packed_splits
from tests.bench.kernel_cases import PAGE
from tests.bench.kernel_inputs import Inputs, unpacked


class Engine(Protocol):
    """Attends `batch`, sequences of the inputs it was made for, and writes out and lse of that many sequences."""

    def __call__(self, q: Tensor, batch: Batch, out: Tensor, lse: Tensor) -> None: ...


class Gpu:
    """The kernels, with a workspace for this case alone."""

    def __init__(self, inputs: Inputs, *, profile: bool = False) -> None:
        case, table = inputs.case, inputs.batch.page_table
        pages = table.shape[1]
        long_pages = packed_long_pages(case.dim)
        while case.extra_items > (splits := packed_splits(pages, long_pages)) * len(table):
            pages += 16 * max(1, case.extra_items // len(table) - splits)
        self.layer = DecodeLayer(
            keys=inputs.keys,
            values=inputs.values,
            tail=inputs.tail,
            q_heads=case.kv_heads * case.group,
            dtype=inputs.dtype,
            options=inputs.options,
            limits=DecodeLimits(len(table), pages),
            num_queries=case.queries,
            profile=profile,
        )
        self.workspace = new_workspace(self.layer.workspace_bytes, table.device)
        self.workspace.view(-1)[: 1 << 28].fill_(0xFF)  # whatever a call finds there must not matter
        self.layer.use_workspace(self.workspace)
        self.layer.load()

    def __call__(self, q: Tensor, batch: Batch, out: Tensor, lse: Tensor) -> None:
        self.layer(q, batch, out=out, lse=lse)


class Reference:
    """kernels/attention.py, sequence by sequence."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs

    def __call__(self, q: Tensor, batch: Batch, out: Tensor, lse: Tensor) -> None:
        for i in range(len(q)):
            part = self._sequence(q[i], batch, i)
            out[i], lse[i] = part.out.to(out.dtype), part.lse

    def _sequence(self, q: Tensor, batch: Batch, i: int) -> Part:
        inputs, options = self._inputs, self._inputs.options
        length, base = int(batch.num_tokens[i]), int(batch.bases[i])
        if length == 0:
            return Part(q.new_zeros(q.shape), q.new_full(q.shape[:2], -torch.inf))
        position = length - len(q)
        masks = (options.sm_scale, options.window, options.softcap)
        page_ids = batch.page_table[i].long()
        parts = []
        keys, values = inputs.keys, inputs.values
        if isinstance(keys, PackedRegion) and base:
            assert not isinstance(values, Tensor)
            parts.append(_packed(q, keys, values, page_ids, base, position, masks))
        elif isinstance(keys, Tensor) and base:
            ids = page_ids[: -(-base // PAGE)]
            k, v = (unpacked(pages, ids)[:base] for pages in (keys, keys if values is None else values))
            parts.append(_dense(q, k, v, 0, position, masks))
        if inputs.tail is not None and length > base:
            assert batch.tail_slots is not None
            at = torch.arange(base, length) % inputs.tail.keys.shape[1]
            k, v = (side[int(batch.tail_slots[i]), at] for side in inputs.tail)
            parts.append(_dense(q, k, v, base, position, masks))
        lse = torch.stack([part.lse for part in parts]).logsumexp(0)
        return Part(merge(parts, options.sinks), lse)


def _packed(
    q: Tensor,
    keys: PackedRegion,
    values: PackedRegion | None,
    page_ids: Tensor,
    base: int,
    position: int,
    masks: tuple[float, int, float],
) -> Part:
    sm_scale, window, softcap = masks
    return attend_packed(
        q,
        keys,
        values,
        page_ids,
        num_tokens=base,
        first_position=position,
        sm_scale=sm_scale,
        window=window,
        softcap=softcap,
    )


def _dense(q: Tensor, k: Tensor, v: Tensor, first_row: int, position: int, masks: tuple[float, int, float]) -> Part:
    sm_scale, window, softcap = masks
    return attend_dense(
        q, k, v, first_position=position, first_row=first_row, sm_scale=sm_scale, window=window, softcap=softcap
    )


def make_engine(inputs: Inputs) -> Engine:
    return Gpu(inputs) if inputs.q.is_cuda else Reference(inputs)
