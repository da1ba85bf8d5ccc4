"""The numbers that Python sizes launches and workspaces with are those of the CUDA sources."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from kernels import decode_launch, decode_workspace
from kernels.cells import AttentionVariant, mqa_cell, packed_cell, rows_cell
from kernels.compiler import SOURCE_DIR
from kernels.decode_cells import DecodeShape
from kernels.decode_launch import decode_launch as launch_of
from kernels.decode_tiling import MERGE_THREADS, PROFILE_SLOTS
from kernels.phase_profile import SLOTS
from kernels.widths import COMPILED_WIDTHS
from tests.kernels.emulator import HEADER_DIR, needs_compiler

pytestmark = needs_compiler

ROWS = {
    "kRowWarps": decode_launch.ROW_WARPS,
    "kRowCtasPerSm": decode_launch.ROW_CTAS_PER_SM,
    "kPageChunk": decode_launch.ROW_PAGE_CHUNK,
    "kMergeThreads": MERGE_THREADS,
    "kRowProfileSlots": len(SLOTS["decode_rows.cu"]),
    "kShortPages": decode_workspace.SHORT_SPLIT,
    "kShortRegion": decode_workspace.SHORT_REGION,
    "kShortShare": decode_workspace.SHORT_SHARE,
    "kShortChunk": decode_workspace.SHORT_CHUNK,
    **{
        f"row_shared_bytes({width}, {columns})": decode_launch.rows_shared_bytes(width, columns)
        for width in COMPILED_WIDTHS
        for columns in (4, 8)
    },
}
MQA = {
    "kMqaThreads": decode_launch.MQA_THREADS,
    "kMqaVectors": decode_launch.MQA_VECTORS,
    "kMqaProfileSlots": len(SLOTS["decode_mqa.cu"]),
    "kMqaSharedBytes": decode_launch.MQA_SHARED_BYTES,
    "kQueryImageBytes": decode_launch.MQA_IMAGE_BYTES,
}
PACKED = {
    "kProfileSlots": len(SLOTS["decode_packed.cu"]),
    **{f"QueryBlock<{w}, {c}>::kBytes": w * 2 * c + 8 * c for w in COMPILED_WIDTHS for c in (4, 8)},
}


@pytest.mark.parametrize(
    ("headers", "constants"),
    [(("attend_rows.cuh", "merge.cuh"), ROWS), (("mqa.cuh",), MQA), (("packed.cuh",), PACKED)],
    ids=["rows", "mqa", "packed"],
)
def test_constants_are_those_of_the_sources(
    tmp_path: Path, headers: tuple[str, ...], constants: dict[str, int]
) -> None:
    lines = "".join(f'std::printf("[\\"{name}\\", %lld]\\n", (long long)({name}));\n' for name in constants)
    includes = "".join(f'#include "{header}"\n' for header in ("cta.h", *headers))
    program = tmp_path / "constants.cpp"
    program.write_text(f"#include <cstdio>\n{includes}using namespace tailpack;\nint main() {{\n{lines}}}\n")
    options = ["-std=c++20", "-O0", "-DTAILPACK_PROFILE=1", f"-I{HEADER_DIR}", f"-I{SOURCE_DIR}"]
    subprocess.run(["g++", *options, str(program), "-o", str(tmp_path / "constants")], check=True, timeout=200)
    out = subprocess.run([tmp_path / "constants"], capture_output=True, text=True, check=True, timeout=30).stdout
    assert dict(map(json.loads, out.splitlines())) == constants


def test_long_splits_are_those_that_the_cell_is_compiled_with() -> None:
    for cell, codecs, pages in (
        (packed_cell(64, "tq4", AttentionVariant()), ("tq4", "tq4"), 32),
        (packed_cell(128, "tq4", AttentionVariant()), ("tq4", "tq4"), 16),
        (mqa_cell(512, "tq4", AttentionVariant(vectors=8)), ("tq4", None), 30),
        (rows_cell(64, "fp8", AttentionVariant(vectors=8)), ("fp8", "fp8"), 0),
    ):
        assert launch_of(cell, DecodeShape(cell.width, 32, 1, *codecs), "sm_90a").long_pages == pages
        assert int(dict(cell.defines).get("TAILPACK_LONG_PAGES", 0)) == pages


def test_a_ctas_slots_have_room_in_the_workspace() -> None:
    assert {len(slots) for slots in SLOTS.values()} == {len(PROFILE_SLOTS)}


def test_every_shared_memory_fits_an_sm_of_its_arch() -> None:
    for arch, limit in (("sm_90a", 227), ("sm_100a", 227), ("sm_120a", 99), ("sm_89", 99), ("sm_80", 163)):
        for width in COMPILED_WIDTHS:
            cells = [
                (packed_cell(width, preset, AttentionVariant(vectors=vectors)), ("tq4", "tq4"))
                for preset in ("tq4", "tq3v2")
                for vectors in (4, 8)
            ]
            cells.append((rows_cell(width, "dense", AttentionVariant(vectors=8)), ("dense", "dense")))
            if arch == "sm_90a" and width == 512:
                cells.append((mqa_cell(width, "tq4", AttentionVariant(vectors=8)), ("tq4", "tq4")))
            for cell, codecs in cells:
                launch = launch_of(cell, DecodeShape(width, 32, 8, *codecs), arch)
                assert launch.attend.shared_bytes <= limit * 1024, (cell.name, arch)
                for phase in (launch.prepare, launch.attend, launch.merge):
                    assert phase.threads % 32 == 0 and 32 <= phase.threads <= 1024


def test_prepared_queries_have_room_for_every_pass() -> None:
    packed = packed_cell(128, "tq4", AttentionVariant(vectors=8))
    few, many = (DecodeShape(128, 8 * group, 8, "tq4", "tq4") for group in (8, 9))
    one, two = (launch_of(packed, shape, "sm_90a").query_bytes for shape in (few, many))
    assert (one, two) == (8 * (128 * 16 + 64), 2 * one)
    rows = rows_cell(64, "fp8", AttentionVariant(vectors=8))
    assert launch_of(rows, DecodeShape(64, 21, 3, "fp8", "fp8"), "sm_90a").query_bytes == 0  # read as they come
    rotated = rows_cell(512, "tq3", AttentionVariant(vectors=8))
    assert launch_of(rotated, DecodeShape(512, 8, 1, "tq3", None), "sm_90a").query_bytes == 8 * 512 * 4
    mqa = mqa_cell(512, "tq4", AttentionVariant(vectors=8))
    for group, queries, images in ((64, 1, 2), (64, 2, 4), (16, 1, 2), (64, 8, 16)):
        shape = DecodeShape(512, group, 1, "tq4", None, num_queries=queries)
        assert launch_of(mqa, shape, "sm_90a").query_bytes == images * decode_launch.MQA_IMAGE_BYTES
