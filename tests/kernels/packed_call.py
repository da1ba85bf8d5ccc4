"""One decode call over packed pages for the CPU emulator: its memory, its arguments, and a float64 reference.

Pages are laid out here by a slow converter of its own, written from the text of page layout version 2, so that two
readings of it meet. Whatever no query may see is poison: unused pages and ring rows hold NaN, page-table entries below
the window lie far outside the pool, outputs and the workspace start as NaN.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import turboquant
from kernels.decode_args import Counters, DecodeArgs, Item, Plan
from kernels.decode_tiling import packed_long_pages, query_bytes
from kernels.decode_workspace import packed_splits
from kernels.widths import PRESETS

PAGE, GROUP_ROWS, ROW_CHUNK = 128, 32, 256
OUTSIDE = 2**30  # a page id that nobody may use
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Case:
    width: int = 128
    preset: str = "tq4"
    row_type: str = "f16"
    lengths: tuple[int, ...] = (1, 129, 0, 700)
    tails: tuple[int, ...] = ()  # tokens that stay in the tail at least, a sequence; by default a few
    ring_rows: int = 320
    kv_heads: int = 2
    group: int = 4
    num_queries: int = 1
    window: int = 0
    softcap: float = 0.0
    sinks: tuple[float, ...] = ()  # repeated over the query heads
    spread: float = 1.0  # of the scores
    norm: float = 1.0  # of keys and values, a coordinate
    vectors: int = 4
    seed: int = 0

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def num_vectors(self) -> int:
        return self.num_queries * self.group


# ---- page layout version 2, nibble by nibble


@lru_cache
def _places(kind: str, dim: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and dim of each nibble: [nibble word f][lane][nibble n]."""
    rows = np.zeros((dim // 8, 32, 8), np.int64)
    dims = np.zeros_like(rows)
    for g, t, khalf, half, j in itertools.product(range(8), range(4), range(2), range(2), range(4)):
        lane, n = 4 * g + t, 4 * half + j
        for a, b in itertools.product(range(dim // 32), range(2)):
            if kind == "k":
                s, m = a, b
                f = (m * (dim // 32) + s) * 2 + khalf
                place = (16 * m + g + 8 * half, 32 * s + 8 * t + 4 * khalf + j)
            else:
                c, e = a, b
                f = (c * 2 + e) * 2 + khalf
                place = (16 * khalf + 2 * t + (j >> 1) + 8 * (j & 1), 32 * c + 4 * g + 2 * e + half)
            rows[f, lane, n], dims[f, lane, n] = place
    return rows, dims


def _ordered(words: NDArray[np.uint32], together: int) -> NDArray[np.uint32]:
    """[word][lane] to the order [word / together][lane][word % together], flat."""
    count = words.shape[0]
    return words.reshape(count // together, together, 32).transpose(0, 2, 1).reshape(-1)


def fragment_codes(codes: NDArray[np.uint8], kind: str, bits: int) -> NDArray[np.uint8]:
    """Codes [rows, dim], one a byte, to the bytes of the plane; rows a multiple of 32."""
    dim = codes.shape[1]
    rows, dims = _places(kind, dim)
    out = []
    for first in range(0, len(codes), GROUP_ROWS):
        nibbles = codes[first : first + GROUP_ROWS][rows, dims].astype(np.uint32)
        words = (nibbles << (4 * np.arange(8, dtype=np.uint32))).sum(-1, dtype=np.uint32)  # N[f][lane]
        if bits == 4:
            out.append(_ordered(words, 4))
            continue
        low = words & 0x33333333
        out.append(_ordered(low[0::2] | low[1::2] << 2, 4))
        if bits == 3:
            top = words >> 2 & 0x11111111
            out.append(_ordered(top[0::4] | top[1::4] << 1 | top[2::4] << 2 | top[3::4] << 3, min(4, dim // 32)))
    return np.concatenate(out).view(np.uint8)


def fragment_scales(scales: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Scales [rows] to bytes: index 32 group + 4 g + k is row 32 group + g + 8 k."""
    return np.ascontiguousarray(scales.reshape(-1, 4, 8).transpose(0, 2, 1)).view(np.uint8).reshape(-1)


# ---- a call


class Call:
    """Rows as they were written, and the memory that the kernels read and write."""

    def __init__(self, case: Case) -> None:
        self.case = case
        preset = PRESETS[case.preset]
        self.bits = (preset.key_bits, preset.value_bits)
        self.dtype = DTYPES[case.row_type]
        generator = torch.Generator().manual_seed(case.seed)
        batch, width = len(case.lengths), case.width
        self.scale = width**-0.5
        tails = case.tails or tuple(min(n, 20 + n % 150) for n in case.lengths)
        self.bases = [max(0, n - tail) // PAGE * PAGE for n, tail in zip(case.lengths, tails, strict=True)]
        self.rows = [[self._rows(n, generator) for n in case.lengths] for _ in range(2)]
        q = torch.randn(batch, case.num_queries, case.q_heads, width + 8, generator=generator) * (
            case.spread / case.norm
        )
        self.q = q.to(self.dtype)[..., :width]  # strided

        self.pages_of = [base // PAGE for base in self.bases]
        pool = sum(self.pages_of) + 2
        order = torch.randperm(pool, generator=generator).tolist()
        self.table = torch.full((batch, max(*self.pages_of, 1) + 1), OUTSIDE, dtype=torch.int32)
        for i, count in enumerate(self.pages_of):
            for page in range(self._first_seen(i) // PAGE, count):
                self.table[i, page] = order.pop()
        self._write_pages(pool)
        self._write_tails(generator)

    def _rows(self, n: int, generator: torch.Generator) -> Tensor:
        rows = torch.randn(n, self.case.kv_heads, self.case.width, generator=generator) * self.case.norm
        rows *= torch.exp(0.3 * torch.randn(n, self.case.kv_heads, 1, generator=generator))
        rows[5::31] = 0
        return rows.to(self.dtype)

    def _first_seen(self, i: int) -> int:
        n, window = self.case.lengths[i], self.case.window
        return max(0, n - self.case.num_queries - window + 1) if window else 0

    def _write_pages(self, pool: int) -> None:
        case = self.case
        self.code_bytes = [PAGE * case.width * bits // 8 for bits in self.bits]
        head_bytes = [size + 4 * PAGE for size in self.code_bytes]
        self.page_bytes = 256 + case.kv_heads * sum(head_bytes)  # something else lies in front
        self.region_at = (256, 256 + case.kv_heads * head_bytes[0])
        self.head_bytes = head_bytes
        self.pages = np.full((pool, self.page_bytes), 0xFF, np.uint8)  # scales of NaN
        self.seen: list[list[Tensor]] = [[], []]  # rows as attention sees them, f64 [n, kv_heads, width]
        for side, kind in enumerate("kv"):
            for i, base in enumerate(self.bases):
                rows = self.rows[side][i]
                packed = turboquant.pack(rows[:base], self.bits[side])
                plain = turboquant.unpack(packed, case.width, self.bits[side])
                self.seen[side].append(torch.cat([plain.double(), rows[base:].double()]))
                codes = turboquant.unpack_codes(packed, case.width, self.bits[side]).numpy()
                scales = packed.scales[..., 0].numpy()
                for page in range(self._first_seen(i) // PAGE, self.pages_of[i]):
                    inside = slice(page * PAGE, (page + 1) * PAGE)
                    for head in range(case.kv_heads):
                        at = self.region_at[side] + head * head_bytes[side]
                        plane = self.pages[int(self.table[i, page]), at : at + head_bytes[side]]
                        plane[: self.code_bytes[side]] = fragment_codes(codes[inside, head], kind, self.bits[side])
                        plane[self.code_bytes[side] :] = fragment_scales(scales[inside, head])

    def _write_tails(self, generator: torch.Generator) -> None:
        case, batch = self.case, len(self.case.lengths)
        self.tails = torch.full(
            (2, batch + 1, case.ring_rows, case.kv_heads, case.width), float("nan"), dtype=self.dtype
        )
        self.slots = torch.randperm(batch + 1, generator=generator)[:batch].to(torch.int32)
        for i, n in enumerate(case.lengths):
            assert n - self.bases[i] <= case.ring_rows
            for token in range(self.bases[i], n):
                for side in range(2):
                    self.tails[side, self.slots[i], token % case.ring_rows] = self.rows[side][i][token]

    def arguments(self) -> DecodeArgs:
        case, args = self.case, DecodeArgs()
        batch, size = len(case.lengths), self.q.element_size()
        args.q, args.num_sequences, args.num_queries = self.q.data_ptr(), batch, case.num_queries
        args.q_batch_stride, args.q_token_stride, args.q_head_stride = self.q.stride()[:3]
        wide = torch.full((batch, case.num_queries, case.q_heads, case.width + 3), float("nan"), dtype=self.dtype)
        self.out = wide[..., : case.width]
        self.lse = torch.full((batch, case.num_queries, case.q_heads), float("nan"))
        args.out, args.lse = self.out.data_ptr(), self.lse.data_ptr()
        args.out_batch_stride, args.out_token_stride, args.out_head_stride = self.out.stride()[:3]
        sinks = (case.sinks * case.q_heads)[: case.q_heads]
        self.sinks = torch.tensor(sinks) if sinks else None
        args.sinks = self.sinks.data_ptr() if self.sinks is not None else None

        base = self.pages.ctypes.data
        args.k_pages, args.v_pages = base + self.region_at[0], base + self.region_at[1]
        args.page_stride = self.page_bytes
        args.k_head_stride, args.v_head_stride = self.head_bytes
        args.k_scales_offset, args.v_scales_offset = self.code_bytes
        self.base_tensor = torch.tensor(self.bases, dtype=torch.int32)
        self.length_tensor = torch.tensor(case.lengths, dtype=torch.int32)
        args.page_table, args.table_stride = self.table.data_ptr(), self.table.stride(0)
        args.bases, args.num_tokens = self.base_tensor.data_ptr(), self.length_tensor.data_ptr()
        args.k_tail, args.v_tail = self.tails[0].data_ptr(), self.tails[1].data_ptr()
        args.k_tail_slot_stride = args.v_tail_slot_stride = size * self.tails.stride(1)
        args.tail_row_stride, args.tail_head_stride = size * self.tails.stride(2), size * self.tails.stride(3)
        args.tail_slots, args.ring_rows = self.slots.data_ptr(), case.ring_rows

        long_pages = packed_long_pages(case.width)
        args.max_packed_items = sum(packed_splits(pages, long_pages) for pages in self.pages_of)
        args.max_row_items = batch * -(-case.ring_rows // ROW_CHUNK)
        items = args.max_packed_items + args.max_row_items
        self.counters, self.plans, self.items = Counters(), (Plan * batch)(), (Item * items)()
        ctypes.memset(ctypes.addressof(self.counters), 0x7F, ctypes.sizeof(self.counters))
        for name in ("counters", "plans", "items"):
            setattr(args, name, ctypes.addressof(getattr(self, name)))
        self.passes = -(-case.num_vectors // case.vectors)
        blocks = batch * case.kv_heads * self.passes
        self.queries = np.full(blocks * query_bytes(case.width, case.vectors) + 128, 0xFF, np.uint8)
        args.queries = (self.queries.ctypes.data + 127) // 128 * 128
        self.partial_out = torch.full((items, case.kv_heads, case.num_vectors, case.width), float("nan"))
        self.partial_ml = torch.full((items, case.kv_heads, case.num_vectors, 2), float("nan"))
        args.partial_out, args.partial_ml = self.partial_out.data_ptr(), self.partial_ml.data_ptr()
        args.kv_heads, args.group = case.kv_heads, case.group
        args.window, args.sm_scale, args.softcap, args.minus_one = case.window, self.scale, case.softcap, 2**32 - 1
        return args

    def reference(self, i: int) -> tuple[Tensor, Tensor]:
        """Output f64 [T, q_heads, width] and lse f64 [T, q_heads] of sequence i."""
        case, n = self.case, self.case.lengths[i]
        positions = torch.arange(n - case.num_queries, n).view(-1, 1)
        rows = torch.arange(n)
        hidden = rows > positions
        if case.window:
            hidden |= rows <= positions - case.window
        k, v = (seen[i].repeat_interleave(case.group, dim=1) for seen in (self.seen[0], self.seen[1]))
        scores = torch.einsum("thd,nhd->thn", self.q[i].double(), k) * self.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(-1)
        total = lse if self.sinks is None else torch.logaddexp(lse, self.sinks.double().expand_as(lse))
        weights = (scores - total.unsqueeze(-1)).exp()
        return torch.einsum("thn,nhd->thd", weights, v), lse
