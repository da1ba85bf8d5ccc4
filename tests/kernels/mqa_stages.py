"""What the variant TAILPACK_MQA_DUMP of csrc/mqa.cuh leaves behind, stage by stage against float64.

Each stage is checked against what the one before it really left, so that the first bad one is where the error is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernels import turboquant
from kernels.decode_args import PAGE_TOKENS
from kernels.rotation import rotate
from tests.kernels.mqa_call import BITS, CODE_BYTES, VECTORS, WIDTH, Call

# Offsets of the dump, csrc/mqa.cuh.
TILE, QUERIES, FACTORS, SCALES, SCORES, WEIGHTS, REFERENCES, EXPONENT = (
    *(0, 65536, 131072, 131328, 131840, 148224, 156416),
    156672,
)
ROWS = 64  # of a tile


class Stage(NamedTuple):
    """error: relative, except where `what` says otherwise. limit: what rounding explains."""

    name: str
    what: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.error <= self.limit


def from_slabs(raw: Tensor, columns: int) -> Tensor:
    """fp16 [64, columns] f64 from swizzled slabs of 64 rows x 64 values (csrc/wgmma.cuh)."""
    halves = raw.view(torch.float16).view(columns // 64, 64, 8, 8).double()  # slab, row, chunk, value
    row = torch.arange(64, device=raw.device) % 8
    chunk = torch.arange(8, device=raw.device)[None, :] ^ row[:, None]
    return halves.gather(2, chunk[None, :, :, None].expand_as(halves)).permute(1, 0, 2, 3).reshape(64, columns)


def stages(call: Call) -> list[Stage]:
    """Of a call whose first packed item begins where its first query sees all rows, run on the dumping variant."""
    case, dump, device = call.case, call.dump, call.device
    vectors = case.num_queries * case.group
    item = call.items[0].tolist()
    sequence, first_page, num_pages, kind = item
    assert kind == 0, f"the first item is not of packed pages: {item}"
    found = []

    page = call.pool[int(call.full_table[sequence, first_page])].view(case.kv_heads, -1)[0]
    codes = page[: PAGE_TOKENS * CODE_BYTES].view(PAGE_TOKENS, CODE_BYTES)[:ROWS]
    scale_end = call.region.scales_offset + 4 * PAGE_TOKENS
    scales = page[call.region.scales_offset : scale_end].clone().view(torch.float32)[:ROWS].double()
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(ROWS, WIDTH).long()
    values = turboquant.code_values(WIDTH, BITS, device).double()
    half_step = turboquant.grid(WIDTH, BITS).step / 2
    tile = from_slabs(dump[TILE : TILE + 65536], WIDTH)
    want = (values / half_step).round()[nibbles]
    exponent = float(dump[EXPONENT : EXPONENT + 4].view(torch.float32))
    if exponent == exponent:
        largest = float((scales * half_step).max().log2().floor())
        found.append(Stage("exponent", "of the largest scale, absolute", abs(exponent - largest), 0))
        want *= (scales * half_step * 2.0**-exponent)[:, None]
        found.append(Stage("tile", "decoded values", float(((tile - want) / want).nan_to_num().abs().max()), 1e-3))
        own = torch.tensor([2.0**exponent, exponent], device=device).double().expand(ROWS, 2)
    else:
        found.append(Stage("tile", "decoded values that differ", float((tile != want).sum()), 0))
        own = dump[SCALES : SCALES + 512].view(torch.float32).view(ROWS, 2).double()
        found.append(Stage("scales", "scale * step / 2", _relative(own[:, 0], scales * half_step), 1e-6))
        logs = (scales * half_step).clamp(min=2.0**-60).log2()
        found.append(Stage("log scales", "absolute", float((own[:, 1] - logs).abs().max()), 1e-4))

    image = from_slabs(dump[QUERIES : QUERIES + 65536], WIDTH)
    factors = dump[FACTORS : FACTORS + 4 * VECTORS].view(torch.float32).double()
    q = call.q[sequence, :, : case.group].reshape(vectors, WIDTH).double()[:VECTORS]
    per_score = 2.0 / case.softcap if case.softcap else 1.0
    ready = image * factors[:, None]
    wanted = rotate(q) * (call.scale * per_score * 1.4426950408889634)
    found.append(Stage("queries", "rotated, times their factors", _relative(ready[: len(q)], wanted), 1e-3))
    found.append(Stage("zero queries", "largest behind the last", float(image[len(q) :].abs().sum()), 0))

    scores = dump[SCORES : SCORES + 16384].view(torch.float32).view(VECTORS, ROWS).double()
    found.append(Stage("scores", "products of image and tile", _relative(scores, image @ tile.T), 1e-4))

    x = scores * own[:, 0] * factors[:, None]
    if case.softcap:
        x = case.softcap * 1.4426950408889634 * (1 - 2 / (1 + x.exp2()))
    references = dump[REFERENCES : REFERENCES + 4 * VECTORS].view(torch.float32).double()
    tops = (x + own[:, 1]).amax(1)
    found.append(Stage("references", "absolute", float((references - tops).abs().max()), 1e-3))
    weights = from_slabs(dump[WEIGHTS : WEIGHTS + 8192], ROWS)
    found.append(Stage("weights", "p * scale", _relative(weights, (x - references[:, None]).exp2() * own[:, 0]), 2e-3))

    rows = call.decoded(sequence, 0)[first_page * PAGE_TOKENS : (first_page + num_pages) * PAGE_TOKENS]
    s = rotate(q) @ rows.T * call.scale
    if case.softcap:
        s = case.softcap * (s / case.softcap).tanh()
    m, sums = call.partial_ml[0, 0, : len(q)].double().unbind(-1)
    p = (s * 1.4426950408889634 - m[:, None]).exp2()
    found.append(Stage("sums", "of the first item", _relative(sums, p.sum(1)), 5e-3))
    found.append(
        Stage(
            "partial", "output of the first item", _relative(call.partial_out[0, 0, : len(q)].double(), p @ rows), 5e-3
        )
    )
    return found


def _relative(got: Tensor, want: Tensor) -> float:
    error = float((got - want).norm() / want.norm().clamp(min=1e-30))
    return error if error == error else float("inf")
