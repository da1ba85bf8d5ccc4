"""One call of the kernels in csrc/decode_mqa.cu on random rows, on any device, and what it should give, in float64.

Whatever no query may see is poison: unused pages and ring rows are NaN, page-table entries below the window lie outside
the pool, outputs and workspaces start as NaN.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels import turboquant, turboquant_cuda
from kernels.decode_args import PAGE_TOKENS, ROW_CHUNK, Counters, DecodeArgs, Item, Plan
from kernels.decode_launch import MQA_THREADS
from kernels.decode_tiling import MERGE_THREADS, MQA_LONG_PAGES
from kernels.decode_workspace import packed_splits
from kernels.page_layout import Region, page_layout
from kernels.rotation import rotate

WIDTH, BITS = 512, 4
CODE_BYTES = WIDTH * BITS // 8
VECTORS = 64  # of a work item
PREPARE_VECTORS = 8  # TAILPACK_VECTORS: of a CTA of prepare
IMAGE_BYTES = 64 * WIDTH * 2 + 64 * 4  # of 64 queries as a tile, and their factors
THREADS = {"prepare": 32 * (PREPARE_VECTORS + 1), "attend": MQA_THREADS, "merge": MERGE_THREADS}
OUTSIDE = 2**30  # a page id that nobody may use
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Case:
    """norm: of a row, times sqrt(width). drift: by how much scores grow along a sequence, so that references move.
    zero_rows: at a sequence's start. uneven: spread of the norms of rows, in powers of two; from 2 on most tiles keep
    the scales of its rows (csrc/mqa_producer.cuh)."""

    lengths: tuple[int, ...] = (300,)
    group: int = 64
    kv_heads: int = 1
    num_queries: int = 1
    window: int = 0
    softcap: float = 0.0
    row_type: str = "bf16"
    norm: float = 1.0
    sm_scale: float = 0.0
    drift: float = 0.0
    zero_rows: int = 0
    uneven: float = 0.0
    tail_tokens: tuple[int, ...] = field(default=())  # that stay in the tail at least; by default about 20 to 120
    ring_rows: int = 300
    sinks: bool = False
    seed: int = 0


def cell_defines(row_type: str = "bf16", softcap: bool = False) -> dict[str, str]:
    """Defines of one cell, with kernels named by their phase."""
    names = {f"TAILPACK_KERNEL_{phase.upper()}": f"mqa_{phase}" for phase in THREADS}
    return names | {
        "TAILPACK_WIDTH": str(WIDTH),
        "TAILPACK_SOURCE": "tq4",
        "TAILPACK_LONG_PAGES": str(MQA_LONG_PAGES),
        "TAILPACK_TYPE": {"bf16": "__nv_bfloat16", "f16": "__half"}[row_type],
        "TAILPACK_VECTORS": str(PREPARE_VECTORS),
        "TAILPACK_SOFTCAP": str(int(softcap)),
        "TAILPACK_PROFILE": "0",
    }


class Call:
    """Memory of one call and its arguments. `grid`: CTAs of prepare and merge; attend takes any number."""

    def __init__(self, case: Case, device: torch.device | str = "cpu") -> None:
        self.case, self.device = case, torch.device(device)
        self.dtype, batch = DTYPES[case.row_type], len(case.lengths)
        self.generator = torch.Generator(self.device).manual_seed(case.seed)
        self.scale = case.sm_scale or WIDTH**-0.5
        self.bases = [self._base(i) for i in range(batch)]
        q = self._normal(batch, case.num_queries, case.kv_heads * case.group, WIDTH + 8).to(self.dtype)
        self.q = q[..., :WIDTH]  # strided
        self._write_pages()
        self._write_tails()
        self.args = self._arguments()

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def _base(self, i: int) -> int:
        n = self.case.lengths[i]
        tail = self.case.tail_tokens[i] if self.case.tail_tokens else min(n, 20 + n % 100)
        return (n - tail) // PAGE_TOKENS * PAGE_TOKENS if tail < n else 0

    def first_seen(self, i: int) -> int:
        n, window = self.case.lengths[i], self.case.window
        return max(0, n - self.case.num_queries - window + 1) if window else 0

    def _rows(self, i: int, first: int, end: int) -> Tensor:
        """Rows [end - first, kv_heads, width] of the model's dtype."""
        case = self.case
        rows = self._normal(end - first, case.kv_heads, WIDTH) * case.norm
        rows *= torch.exp(0.3 * self._normal(end - first, case.kv_heads, 1))
        rows *= torch.exp2(case.uneven * self._normal(end - first, case.kv_heads, 1))
        if case.drift:  # along the queries, more and more
            along = self.q[i, 0, :: case.group].float()
            share = torch.linspace(first, end, end - first, device=self.device) / max(case.lengths)
            rows += case.drift * share[:, None, None] * along
        rows[5::31] = 0
        rows[: max(0, case.zero_rows - first)] = 0
        limit = torch.finfo(self.dtype).max
        return rows.clamp(-limit, limit).to(self.dtype)

    def _write_pages(self) -> None:
        case, batch = self.case, len(self.case.lengths)
        (region,) = page_layout([Region(PAGE_TOKENS, case.kv_heads, CODE_BYTES, 4)], 1).regions
        self.region, pages = region, [base // PAGE_TOKENS for base in self.bases]
        pool = sum(pages) + 3
        page_bytes = case.kv_heads * region.head_bytes
        self.pool = torch.full((pool, page_bytes), 0xFF, dtype=torch.uint8, device=self.device)
        order = torch.randperm(pool, generator=self.generator, device=self.device).to(torch.int32)
        self.table = torch.full((batch, max(pages) + 2), OUTSIDE, dtype=torch.int32, device=self.device)
        pack = turboquant_cuda.pack if self.device.type == "cuda" else turboquant.pack
        heads = self.pool.view(pool, case.kv_heads, region.head_bytes)
        scales_end = region.scales_offset + 4 * PAGE_TOKENS
        used = 0
        for i, count in enumerate(pages):
            if not count:
                continue
            ids = order[used : used + count]
            used += count
            self.table[i, :count] = ids
            rows = self._rows(i, 0, self.bases[i]).view(count, PAGE_TOKENS, case.kv_heads, WIDTH).transpose(1, 2)
            packed = pack(rows.reshape(-1, WIDTH).contiguous(), BITS)
            heads[ids.long(), :, : PAGE_TOKENS * CODE_BYTES] = packed.codes.view(count, case.kv_heads, -1)
            scales = packed.scales.view(count, case.kv_heads, -1).view(torch.uint8)
            heads[ids.long(), :, region.scales_offset : scales_end] = scales
        self.full_table = self.table.clone()
        for i in range(batch):  # pages that lie wholly below the window may be freed
            self.table[i, : self.first_seen(i) // PAGE_TOKENS] = OUTSIDE

    def _write_tails(self) -> None:
        case, batch = self.case, len(self.case.lengths)
        shape = (batch + 1, case.ring_rows, case.kv_heads, WIDTH)
        self.tails = torch.full(shape, float("nan"), dtype=self.dtype, device=self.device)
        self.slots = torch.randperm(batch + 1, generator=self.generator, device=self.device)[:batch].to(torch.int32)
        self.tail_rows = [self._rows(i, self.bases[i], n) for i, n in enumerate(case.lengths)]
        for i, n in enumerate(case.lengths):
            ring = torch.arange(self.bases[i], n, device=self.device) % case.ring_rows
            self.tails[self.slots[i].long(), ring] = self.tail_rows[i]

    def _new(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        fill = float("nan") if dtype.is_floating_point else 0xFF if dtype == torch.uint8 else -1
        return torch.full(shape, fill, dtype=dtype, device=self.device)

    def _arguments(self) -> DecodeArgs:
        case, args, batch = self.case, DecodeArgs(), len(self.case.lengths)
        q_heads, vectors, size = case.kv_heads * case.group, case.num_queries * case.group, self.dtype.itemsize
        args.q = self.q.data_ptr()
        args.q_batch_stride, args.q_token_stride, args.q_head_stride = self.q.stride()[:3]
        self.out = self._new((batch, case.num_queries, q_heads, WIDTH), self.dtype)
        args.out = self.out.data_ptr()
        args.out_batch_stride, args.out_token_stride, args.out_head_stride = self.out.stride()[:3]
        self.lse = self._new((batch, case.num_queries, q_heads))
        args.lse = self.lse.data_ptr()
        self.sinks = self._normal(q_heads)
        args.sinks = self.sinks.data_ptr() if case.sinks else None

        args.k_pages = args.v_pages = self.pool.data_ptr()
        args.page_stride = self.pool.stride(0)
        args.k_head_stride = args.v_head_stride = self.region.head_bytes
        args.k_row_stride = args.v_row_stride = CODE_BYTES
        args.k_scales_offset = args.v_scales_offset = self.region.scales_offset
        args.page_table, args.table_stride = self.table.data_ptr(), self.table.stride(0)
        self.base_tensor = torch.tensor(self.bases, dtype=torch.int32, device=self.device)
        self.length_tensor = torch.tensor(case.lengths, dtype=torch.int32, device=self.device)
        args.bases, args.num_tokens = self.base_tensor.data_ptr(), self.length_tensor.data_ptr()
        args.k_tail = args.v_tail = self.tails.data_ptr()
        args.k_tail_slot_stride = args.v_tail_slot_stride = size * self.tails.stride(0)
        args.tail_row_stride, args.tail_head_stride = size * self.tails.stride(1), size * self.tails.stride(2)
        args.tail_slots, args.ring_rows = self.slots.data_ptr(), case.ring_rows

        packed = sum(packed_splits(base // PAGE_TOKENS, MQA_LONG_PAGES) for base in self.bases)
        rows = batch * -(-case.ring_rows // ROW_CHUNK)
        blocks = -(-vectors // VECTORS)
        self.counters = self._new((ctypes.sizeof(Counters) // 4,), torch.int32)
        self.plans = self._new((batch, ctypes.sizeof(Plan) // 4), torch.int32)
        self.items = self._new((packed + rows, ctypes.sizeof(Item) // 4), torch.int32)
        self.queries = self._new((batch * case.kv_heads * blocks * 2, IMAGE_BYTES), torch.uint8)
        self.partial_out = self._new((packed + rows, case.kv_heads, vectors, WIDTH))
        self.partial_ml = self._new((packed + rows, case.kv_heads, vectors, 2))
        self.dump = self._new((1 << 18,), torch.uint8)
        for name in ("counters", "plans", "items", "queries", "partial_out", "partial_ml"):
            setattr(args, name, getattr(self, name).data_ptr())
        args.profile = self.dump.data_ptr()
        args.max_packed_items, args.max_row_items = packed, rows
        args.num_sequences, args.num_queries, args.kv_heads, args.group = (
            batch,
            case.num_queries,
            case.kv_heads,
            case.group,
        )
        args.window, args.sm_scale, args.softcap, args.minus_one = case.window, self.scale, case.softcap, 2**32 - 1
        return args

    def grid(self, phase: str) -> int:
        case, batch = self.case, len(self.case.lengths)
        vectors = case.num_queries * case.group
        if phase == "prepare":
            return batch * case.kv_heads * -(-vectors // PREPARE_VECTORS)
        return batch * case.kv_heads * vectors

    # -- what it should give

    def decoded(self, i: int, head: int) -> Tensor:
        """f64 [base, width]: the packed rows in the rotated domain; rows of pages below the window are NaN."""
        first, count = self.first_seen(i) // PAGE_TOKENS, self.bases[i] // PAGE_TOKENS
        ids = self.full_table[i, first:count].long()
        head_bytes = self.pool.view(len(self.pool), self.case.kv_heads, -1)[ids, head]
        codes = head_bytes[:, : PAGE_TOKENS * CODE_BYTES].reshape(-1, CODE_BYTES)
        end = self.region.scales_offset + 4 * PAGE_TOKENS
        scales = head_bytes[:, self.region.scales_offset : end].contiguous().view(torch.float32).reshape(-1, 1)
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(-1, WIDTH).long()
        values = turboquant.code_values(WIDTH, BITS, self.device).double()[nibbles] * scales.double()
        hidden = torch.full((first * PAGE_TOKENS, WIDTH), float("nan"), dtype=torch.float64, device=self.device)
        return torch.cat([hidden, values])

    def reference(self, i: int) -> tuple[Tensor, Tensor]:
        """out f64 [T, q_heads, width] and lse f64 [T, q_heads] of a sequence that is no padding."""
        case, n, base = self.case, self.case.lengths[i], self.bases[i]
        outs, logs = [], []
        positions = torch.arange(n - case.num_queries, n, device=self.device)
        rows = torch.arange(n, device=self.device)
        hidden = rows > positions[:, None]
        if case.window:
            hidden |= rows <= positions[:, None] - case.window
        for head in range(case.kv_heads):
            q = self.q[i, :, head * case.group : (head + 1) * case.group].double()
            packed, tail = self.decoded(i, head), self.tail_rows[i][:, head].double()
            seen = self.first_seen(i)
            s = torch.full((*q.shape[:2], n), -torch.inf, dtype=torch.float64, device=self.device)
            s[..., seen:base] = rotate(q) @ packed[seen:].T
            s[..., max(seen, base) :] = q @ tail[max(0, seen - base) :].T
            s *= self.scale
            if case.softcap:
                s = case.softcap * (s / case.softcap).tanh()
            s.masked_fill_(hidden[:, None], -torch.inf)
            lse = s.logsumexp(-1)
            all_lse = lse
            if case.sinks:
                sinks = self.sinks[head * case.group : (head + 1) * case.group].double()
                all_lse = torch.logaddexp(lse, sinks)
            p = (s - all_lse[..., None]).exp()
            out = p[..., max(seen, base) :] @ tail[max(0, seen - base) :]
            if seen < base:
                out += rotate(p[..., seen:base] @ packed[seen:])
            outs.append(out)
            logs.append(lse)
        return torch.cat(outs, dim=1), torch.cat(logs, dim=1)

    def errors(self, i: int) -> tuple[float, float]:
        """Of sequence i: the largest |out - reference| / |reference| of a vector, and the largest difference of lse, as
        a part of lse where that is above 1.

        Where anything is not finite, the first is infinite.
        """
        want, want_lse = self.reference(i)
        out, lse = self.out[i].double(), self.lse[i].double()
        if not bool(out.isfinite().all() and lse.isfinite().all()):
            return float("inf"), float("inf")
        scale = want.norm(dim=-1).clamp(min=1e-3 * self.case.norm * WIDTH**0.5)
        return float(((out - want).norm(dim=-1) / scale).max()), float(
            ((lse - want_lse).abs() / want_lse.abs().clamp(min=1)).max()
        )
