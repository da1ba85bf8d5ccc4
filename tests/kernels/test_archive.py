"""What `tailpack kernels verify` answers: 0 pass, 1 the archive is at fault, 2 the environment could not answer.

The archive under test is real: every declared cell of the codec for sm_90a and one Blackwell arch, and a few of
attention for all archs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kernels import archive, cli
from kernels.archive import Status, exit_code, find_inspector, parse_listing, verify
from kernels.cells import (
    ARCHES as ALL_ARCHES,
)
from kernels.cells import (
    AttentionVariant,
    Cell,
    mqa_cell,
    packed_cell,
    pairs_of,
    rows_cell,
)
from kernels.compiler import ToolchainError
from kernels.cubins import build, cubin_path
from kernels.declared import DECLARED

ARCHES = ("sm_90a", "sm_100a")
CODEC = tuple(cell for cell in DECLARED if cell.source == "turboquant.cu")
FEW = CODEC[:3]
CELL = FEW[0]
# One cell of each attention source, the packed one for every arch, the others for one of each family; all of them take
# ten minutes.
FAMILIES = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
ATTENTION = (
    packed_cell(64, "tq4", AttentionVariant(vectors=8)),
    replace(packed_cell(128, "tq3v2", AttentionVariant(vectors=4)), arches=("sm_80", "sm_90a")),
    replace(rows_cell(64, "fp8", AttentionVariant(vectors=8)), arches=FAMILIES),
    mqa_cell(512, "tq4", AttentionVariant(vectors=8)),
)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.kernels_group, [str(argument) for argument in arguments])


def verify_command(folder: Path, *arguments: str | Path) -> Result:
    return run("verify", "--dir", folder, *[text for arch in ARCHES for text in ("--arch", arch)], *arguments)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every codec cell for ARCHES, built by the command. Read-only: tests change copies."""
    folder = tmp_path_factory.mktemp("archive")
    result = run("build", "--dir", folder, *[text for arch in ARCHES for text in ("--arch", arch)])
    assert result.exit_code == 0, result.output
    assert f"{len(CODEC) * len(ARCHES)} compiled" in result.output
    return folder


@pytest.fixture(scope="module", autouse=True)
def codec_alone() -> Iterator[None]:
    """The commands know the codec's cells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "DECLARED", CODEC)
        yield


@pytest.fixture
def folder(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of three cells that the test may damage; the commands then know these alone."""
    monkeypatch.setattr(cli, "DECLARED", FEW)
    target = tmp_path / "archive"
    target.mkdir()
    for cell in FEW:
        for arch in ARCHES:
            shutil.copy(cubin_path(cell, arch, built), target)
    return target


def fake_inspector(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_the_whole_archive_passes_and_is_described(built: Path) -> None:
    result = verify_command(built, "--json")
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in result.output.splitlines() if line.startswith("{")]
    assert len(lines) == len(ARCHES) * 2 * len(CODEC)
    assert {line["name"] for line in lines} == {kernel for cell in CODEC for kernel in cell.kernels}
    assert {line["arch"] for line in lines} == set(ARCHES)
    for line in lines:
        assert 16 <= line["registers"] <= 128, line
        assert line["spills"] == line["stack_bytes"] == line["local_bytes"] == 0, line
        if line["name"].startswith("pack"):  # bf16 rows are read 16 bytes at a time
            assert set(line["loads"]) == {"LDG.128"}, line


def test_the_tables_show_each_arch_and_kernel(folder: Path) -> None:
    result = verify_command(folder, "--detail")
    assert result.exit_code == 0, result.output
    for arch in ARCHES:
        assert f"{arch}: 3/3 cells, 6 kernels; registers up to" in result.output
    assert all(kernel in result.output for cell in FEW for kernel in cell.kernels)


def test_building_again_compiles_nothing(built: Path) -> None:
    result = run("build", "--dir", built, "--arch", "sm_90a")
    assert result.exit_code == 0
    assert f"0 compiled, {len(CODEC)} there already" in result.output
    assert (
        result.output.count("there already") == 1 and len(result.output.splitlines()) == 3 and "{" not in result.output
    )


def test_an_arch_is_told_before_the_next_is_inspected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    inspect, first = archive._inspect, cli._arches(ARCHES)[0]
    waited: list[bool] = []

    def inspect_later(cell: Cell, arch: str, *rest: Path) -> archive.Finding:
        if arch != first:
            waited.append(told.wait(60))
        return inspect(cell, arch, *rest)

    monkeypatch.setattr(archive, "_inspect", inspect_later)
    monkeypatch.setattr(cli, "_print_arch", lambda *_: told.set())
    assert verify_command(folder).exit_code == 0
    assert waited == [True] * len(FEW)


def test_an_arch_left_out_is_a_failure(folder: Path) -> None:
    for path in folder.glob("*.sm_100a.*"):
        path.unlink()
    result = verify_command(folder)
    assert result.exit_code == 1
    assert "sm_90a: 3/3 cells" in result.output
    assert "sm_100a: 0/3 cells" in result.output
    assert run("verify", "--dir", folder, "--arch", "sm_90a").exit_code == 0  # what was not asked for is not missed


def test_one_cell_left_out_is_a_failure(folder: Path) -> None:
    cubin_path(CELL, "sm_100a", folder).unlink()
    result = verify_command(folder)
    assert result.exit_code == 1
    assert f"missing: {CELL.name} sm_100a" in result.output


def test_a_file_name_is_not_believed(folder: Path) -> None:
    shutil.copy(cubin_path(CELL, "sm_90a", folder), cubin_path(CELL, "sm_100a", folder))
    shutil.copy(cubin_path(FEW[1], "sm_90a", folder), cubin_path(FEW[2], "sm_90a", folder))
    result = verify_command(folder)
    assert result.exit_code == 1
    assert f"wrong: {CELL.name} sm_100a: holds sm_90a instead" in result.output
    assert f"wrong: {FEW[2].name} sm_90a: lacks {', '.join(sorted(FEW[2].kernels))}" in result.output


@pytest.mark.parametrize("damage", ["empty", "text", "truncated", "garbled"])
def test_a_corrupt_cubin_is_a_failure(folder: Path, damage: str) -> None:
    path = cubin_path(CELL, "sm_90a", folder)
    content = path.read_bytes()
    path.write_bytes(
        {
            "empty": b"",
            "text": b"not a cubin\n" * 100,
            "truncated": content[: len(content) // 2],
            "garbled": content[:64] + bytes(byte ^ 0x5A for byte in content[64:]),
        }[damage]
    )
    result = verify_command(folder)
    assert result.exit_code == 1
    assert f"wrong: {CELL.name} sm_90a" in result.output
    assert "remove what is wrong, then run `tailpack kernels build`" in result.output


def test_an_empty_listing_is_no_answer(built: Path, tmp_path: Path) -> None:
    result = verify_command(built, "--inspector", fake_inspector(tmp_path / "cuobjdump", "exit 0"))
    assert result.exit_code == 2
    assert "printed no kernel" in result.output


def test_a_listing_without_machine_code_is_no_answer(folder: Path, tmp_path: Path) -> None:
    real = find_inspector()
    script = f'{real} -res-usage "$3"; echo "code for sm_90a"'
    result = verify_command(folder, "--inspector", fake_inspector(tmp_path / "cuobjdump", script))
    assert result.exit_code == 2


def test_an_inspector_that_always_fails_is_no_answer(built: Path, tmp_path: Path) -> None:
    inspector = fake_inspector(tmp_path / "cuobjdump", "echo 'nvdisasm not found' >&2; exit 1")
    result = verify_command(built, "--inspector", inspector)
    assert result.exit_code == 2
    assert "nvdisasm not found" in result.output


def test_no_inspector_is_no_answer(built: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "_binary_folders", lambda package: iter([tmp_path]))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=f"no cuobjdump.*{tmp_path}.*PATH"):
        find_inspector()
    result = verify_command(built)
    assert result.exit_code == 2
    assert "no cuobjdump" in result.output
    assert verify_command(built, "--inspector", tmp_path / "not there").exit_code == 2


@pytest.mark.parametrize("command", ["build", "verify"])
def test_no_compiler_is_no_answer(command: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cuda.core'] = None; from kernels.cli import kernels_group; "
        f"kernels_group([{command!r}, '--dir', {str(tmp_path)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert "no CUDA compiler" in done.stderr


def test_a_cell_that_does_not_compile_fails_the_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = Cell("turboquant.cu", 64, "b2", "broken", ("k",), (("TAILPACK_ROW", "no_such_type"),))
    monkeypatch.setattr(cli, "DECLARED", (broken,))
    result = run("build", "--dir", tmp_path, "--arch", "sm_90a", "--jobs", "1")
    assert result.exit_code == 1
    assert "no_such_type" in result.output
    result = run("verify", "--dir", tmp_path, "--arch", "sm_90a")
    assert result.exit_code == 1


def test_nothing_asked_is_nothing_answered(tmp_path: Path) -> None:
    assert exit_code([]) == 2
    assert exit_code(verify([], ARCHES, tmp_path)) == 2
    missing = verify([CELL], ["sm_90a"], tmp_path)
    assert [finding.status for finding in missing] == [Status.MISSING]
    assert exit_code(missing) == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_attention_runs_on_the_tensor_cores_of_every_arch(tmp_path: Path) -> None:
    results = build(ATTENTION, ALL_ARCHES, tmp_path)
    assert [result.error for result in results if result.error] == []
    findings = verify(ATTENTION, ALL_ARCHES, tmp_path)
    assert len(findings) == len(pairs_of(ATTENTION, ALL_ARCHES)) == len(ALL_ARCHES) + 2 + len(FAMILIES) + 1
    assert [finding.reason for finding in findings if finding.status is not Status.OBSERVED] == []
    for finding in findings:
        attend = next(facts for facts in finding.kernels if facts.name in finding.cell.tensor_kernels)
        wanted = {"decode_packed.cu": "IMMA", "decode_rows.cu": "HMMA", "decode_mqa.cu": "HGMMA"}[finding.cell.source]
        assert attend.tensor[wanted] > 0, attend
        assert attend.spills <= 20, attend  # most at an item's ends; in the loops a load a round, and one a page


def test_a_cell_is_built_for_its_own_archs_alone() -> None:
    only = replace(CELL, arches=("sm_90a",))
    assert pairs_of([only, FEW[1], only], ["sm_90a", "sm_100a", "sm_90a"]) == [
        (only, "sm_90a"),
        (FEW[1], "sm_90a"),
        (FEW[1], "sm_100a"),
    ]


@pytest.mark.parametrize(
    ("opcodes", "reason"),
    [
        (["IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4", "LDG.E.128 R4, [R4.64]"], ""),
        (["HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24", "UBLKCP.S.G [UR8], [UR4], UR6"], ""),
        (["IMAD R4, R8, R12, R4", "LDG.E.128 R4, [R4.64]"], "attend has no tensor-core instruction"),
        (["HMMA.16816.F32.BF16 R4, R8, R12, R4", "LDG.E.64 R4, [R4.64]"], "attend loads less than 16 bytes at a time"),
    ],
)
def test_an_attend_kernel_must_show_tensor_cores_and_wide_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opcodes: list[str], reason: str
) -> None:
    cell = replace(CELL, kernels=("attend",), tensor_kernels=("attend",))
    code = "\n".join(f"        /*{16 * i:04x}*/      {text} ;" for i, text in enumerate(opcodes))
    usage = " Function attend:\n  REG:40 STACK:0 SHARED:0 LOCAL:0\n"
    listing = f"{usage}\tcode for sm_90a\n\t\tFunction : attend\n{code}\n"
    monkeypatch.setattr(archive, "list_cubin", lambda *_: listing)
    cubin_path(cell, "sm_90a", tmp_path).write_bytes(b"a listing stands for it")
    (finding,) = verify([cell], ["sm_90a"], tmp_path, inspector=tmp_path)
    assert (finding.status, finding.reason) == (Status.WRONG if reason else Status.OBSERVED, reason)


def test_the_census_counts_tensor_cores_loads_and_spills() -> None:
    opcodes = [
        "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24",
        "@P0 IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4",
        "@!UP1 UTCQMMA gdesc[UR4]",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4",
        "IMAD.WIDE.U32 R4, R0, 0x10, R4",
        "LDG.E.128.CONSTANT R4, desc[UR4][R4.64]",
        "LDG.E.U8 R4, desc[UR4][R4.64]",
        "@!P2 LDG.E R4, desc[UR4][R4.64]",
        "LDGSTS.E.BYPASS.128 [R4], desc[UR4][R4.64]",
        "UBLKCP.S.G [UR8], [UR4], UR6",
        "STL.64 [R1], R4",
        "LDL R4, [R1]",
    ]
    listing = "\n".join(
        [
            "Resource usage:",
            " Common:",
            "  GLOBAL:0",
            " Function kernel_1:",
            "  REG:40 STACK:16 SHARED:2048 LOCAL:8 CONSTANT[0]:552 TEXTURE:0 SURFACE:0 SAMPLER:0",
            "\tcode for sm_90a",
            "\t\tFunction : kernel_1",
            '\t.headerflags\t@"EF_CUDA_ACCELERATORS EF_CUDA_SM90"',
            *(f"        /*{16 * i:04x}*/      {text} ;    /* 0x0000 */" for i, text in enumerate(opcodes)),
        ]
    )
    (facts,) = parse_listing(listing)
    assert (facts.name, facts.arch, facts.instructions) == ("kernel_1", "sm_90a", len(opcodes))
    assert (facts.registers, facts.stack_bytes, facts.shared_bytes, facts.local_bytes) == (40, 16, 2048, 8)
    assert facts.spills == 2
    assert facts.tensor == {"HGMMA": 1, "IMMA": 1, "UTCQMMA": 1, "HMMA": 1}
    assert facts.loads == {"LDG.128": 1, "LDG.8": 1, "LDG.32": 1, "LDGSTS.128": 1, "UBLKCP": 1}
    assert parse_listing("") == parse_listing(listing.split("code for")[0]) == ()


def test_an_inspector_on_the_path_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(archive, "_binary_folders", lambda package: iter(()))
    inspector = fake_inspector(tmp_path / "cuobjdump", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert find_inspector() == inspector
