"""How the three launches of a decode cell are sized. Pure: no torch, no device.

The constants are those of the CUDA sources; tests/kernels/test_decode_launch.py compiles the headers and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernels.cells import Cell
from kernels.decode_args import ROW_CHUNK
from kernels.decode_cells import DecodeShape
from kernels.decode_tiling import MERGE_THREADS, packed_tiling, query_bytes, shared_bytes
from kernels.widths import PRESETS

ROW_WARPS, ROW_CTAS_PER_SM, ROW_PAGE_CHUNK = 4, 4, 512  # csrc/attend_rows.cuh

MQA_THREADS, MQA_VECTORS = 512, 64  # csrc/mqa.cuh
MQA_IMAGE_BYTES = 64 * 512 * 2 + 64 * 4
MQA_SHARED_BYTES = 216_272


class Phase(NamedTuple):
    """One launch. ctas: from the number of sequences and of multiprocessors."""

    threads: int
    shared_bytes: int
    ctas: Callable[[int, int], int]


class DecodeLaunch(NamedTuple):
    """query_bytes: what `prepare` writes for one sequence. long_pages: of a long split (PLAN_PACKED in csrc/plan.cuh);
    0: items are chunks of `page_chunk` tokens."""

    prepare: Phase
    attend: Phase
    merge: Phase
    query_bytes: int
    long_pages: int
    page_chunk: int = ROW_CHUNK


def rows_shared_bytes(width: int, columns: int) -> int:
    """row_shared_bytes of csrc/attend_rows.cuh."""
    return 4 * ROW_WARPS * columns * (width + 1 + 2) + 16


def decode_launch(cell: Cell, shape: DecodeShape, arch: str) -> DecodeLaunch:
    """How to launch a cell that `decode_cells.decode_cell` gave for that shape and arch."""
    defines = dict(cell.defines)
    vectors, long_pages = int(defines["TAILPACK_VECTORS"]), int(defines.get("TAILPACK_LONG_PAGES", 0))
    passes = -(-shape.num_vectors // vectors)
    prepare = Phase(32 * (vectors + 1), 0, lambda batch, sms: batch * shape.kv_heads * passes)
    merge = Phase(MERGE_THREADS, 0, lambda batch, sms: batch * shape.num_queries * shape.q_heads)
    if cell.source == "decode_packed.cu":
        bits = PRESETS[cell.preset]
        tiling = packed_tiling(cell.width, vectors, arch)
        size = shared_bytes(cell.width, bits.key_bits, bits.value_bits, vectors, tiling)
        attend = Phase(tiling.threads, size, lambda batch, sms: tiling.ctas * sms)
        queries = shape.kv_heads * passes * query_bytes(cell.width, vectors)
        return DecodeLaunch(prepare, attend, merge, queries, long_pages)
    if cell.source == "decode_mqa.cu":
        attend = Phase(MQA_THREADS, MQA_SHARED_BYTES, lambda batch, sms: sms)
        images = 2 * shape.kv_heads * -(-shape.num_vectors // MQA_VECTORS)
        return DecodeLaunch(prepare, attend, merge, images * MQA_IMAGE_BYTES, long_pages)
    attend = Phase(32 * ROW_WARPS, rows_shared_bytes(cell.width, vectors), lambda batch, sms: ROW_CTAS_PER_SM * sms)
    rotated = cell.preset.startswith("tq")  # only these queries are made anew, as f32
    row_bytes = 4 * shape.kv_heads * shape.num_vectors * cell.width if rotated else 0
    return DecodeLaunch(prepare, attend, merge, row_bytes, 0, ROW_PAGE_CHUNK)
