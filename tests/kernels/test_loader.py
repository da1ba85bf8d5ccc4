"""Compiler, cache and device lookup; needs no GPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import compiler, cubins, loader
from kernels.cells import ARCHES, Cell, codec_cell
from kernels.compiler import SOURCE_DIR, CompileError, ToolchainError, cell_key
from kernels.cubins import build, cubin_path, default_folder, ensure_cubin
from tests.kernels.emulator import needs_compiler

CELL = codec_cell(64, 2, "bf16")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of csrc that a test may change."""
    return Path(shutil.copytree(SOURCE_DIR, tmp_path / "csrc"))


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((8, 0), "sm_80"),
        ((8, 6), "sm_80"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90a"),
        ((10, 0), "sm_100a"),
        ((10, 3), "sm_103a"),
        ((12, 0), "sm_120a"),
    ],
)
def test_a_device_gets_the_cubin_that_runs_on_it(capability: tuple[int, int], arch: str) -> None:
    assert loader.arch_for(*capability) == arch


@pytest.mark.parametrize("capability", [(7, 5), (9, 1), (12, 1), (13, 0)])
def test_a_device_without_a_cubin_is_refused_by_name(capability: tuple[int, int]) -> None:
    with pytest.raises(loader.UnsupportedDeviceError, match=r"capability \d+\.\d.*sm_90a.*cells\.py"):
        loader.arch_for(*capability)


def test_a_new_arch_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(loader, "ARCHES", (*ARCHES, "sm_121a"))
    assert loader.arch_for(12, 1) == "sm_121a"
    (result,) = build([CELL], ["sm_121a"], tmp_path, jobs=1)
    assert result.compiled
    assert not result.error


def test_the_cache_compiles_once_and_then_reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first = ensure_cubin(CELL, "sm_90a", tmp_path)
    assert first.compiled
    assert first.path == cubin_path(CELL, "sm_90a", tmp_path)
    assert first.path.read_bytes()[:4] == b"\x7fELF"

    def compile_again(*_: object) -> bytes:
        raise AssertionError("compiled twice")

    monkeypatch.setattr(cubins, "compile_cubin", compile_again)
    again = ensure_cubin(CELL, "sm_90a", tmp_path)
    assert not again.compiled
    assert again.path == first.path


def test_an_archive_that_came_with_the_image_is_read_and_never_written(tmp_path: Path) -> None:
    cache, image = tmp_path / "cache", tmp_path / "image"
    image.mkdir(mode=0o555)
    made = ensure_cubin(CELL, "sm_90a", cache, shipped=image)
    assert made.compiled and made.path is not None and made.path.parent == cache
    image.chmod(0o755)
    shutil.copy(made.path, image)
    made.path.unlink()
    shipped = ensure_cubin(CELL, "sm_90a", cache, shipped=image)
    assert not shipped.compiled and shipped.path == image / made.path.name


def test_many_processes_at_once_compile_once(tmp_path: Path) -> None:
    with ProcessPoolExecutor(4, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(ensure_cubin, CELL, "sm_90a", tmp_path) for _ in range(12)]
        results = [future.result(timeout=120) for future in futures]
    assert sum(result.compiled for result in results) == 1
    assert len({result.path for result in results}) == 1
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [cubin_path(CELL, "sm_90a", tmp_path).name]


def test_a_build_compiles_each_pair_once(tmp_path: Path) -> None:
    first = build([CELL, CELL], ["sm_90a", "sm_90a"], tmp_path, jobs=2)
    assert [result.compiled for result in first] == [True]
    assert [result.compiled for result in build([CELL], ["sm_90a"], tmp_path, jobs=2)] == [False]


def test_the_key_covers_source_headers_flags_arch_and_compiler(monkeypatch: pytest.MonkeyPatch, sources: Path) -> None:
    keys = {"start": cell_key(CELL, "sm_90a", sources)}
    assert keys["start"] == cell_key(CELL, "sm_90a", SOURCE_DIR)  # the folder is not in it
    keys["arch"] = cell_key(CELL, "sm_100a", sources)
    keys["define"] = cell_key(replace(CELL, defines=(*CELL.defines, ("X", "1"))), "sm_90a", sources)
    for name in ("turboquant.cu", "turboquant.cuh", "codec.cuh", "tables.cuh"):  # each but the first by way of another
        (sources / name).write_text((sources / name).read_text() + "\n// changed\n")
        keys[name] = cell_key(CELL, "sm_90a", sources)
    older = replace(compiler.toolchain(), identity="an older compiler")
    monkeypatch.setattr(compiler, "toolchain", lambda: older)
    keys["compiler"] = cell_key(CELL, "sm_90a", sources)
    assert len(set(keys.values())) == len(keys)
    before = keys["compiler"]
    (sources / "unrelated.cuh").write_text("// not included\n")
    assert cell_key(CELL, "sm_90a", sources) == before


def test_a_missing_header_is_named(sources: Path, tmp_path: Path) -> None:
    (sources / "codec.cuh").unlink()
    with pytest.raises(CompileError, match=r"turboquant\.cu needs codec\.cuh"):
        ensure_cubin(CELL, "sm_90a", tmp_path / "cache", sources)


def test_a_source_that_does_not_compile_gives_the_log_and_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "turboquant.cu").write_text("extern no_such_type f();\n")
    with pytest.raises(CompileError, match="no_such_type"):
        ensure_cubin(CELL, "sm_90a", tmp_path / "cache", sources)
    assert not list((tmp_path / "cache").glob("*.*"))


def test_a_cell_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = Cell("turboquant.cu", 64, "b2", "broken", ("k",), (("TAILPACK_ROW", "no_such_type"),))
    bad, good = build([broken, CELL], ["sm_90a"], tmp_path, jobs=2)
    assert "no_such_type" in bad.error
    assert bad.path is None
    assert good.compiled


def test_nothing_is_loaded_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(loader, "arch_of", lambda device: pytest.fail("the device was asked"))
    with pytest.raises(loader.LoadError, match=rf"while a CUDA graph.*{CELL.name}.*before the capture"):
        loader.load(CELL, 0)


@needs_compiler
def test_a_prepared_launch_asks_the_driver_for_what_it_was_given(tmp_path: Path) -> None:
    source = Path(__file__).parent / "fake_driver.cpp"
    subprocess.run(["g++", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", source], check=True, timeout=60)
    log = tmp_path / "launches.jsonl"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "TAILPACK_LAUNCHES": str(log)}
    command = [sys.executable, "-m", "tests.kernels.fake_launches"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "refuses to launch bad" in told["refused"] and "INVALID_CONTEXT" in told["refused"]
    assert told["call_us"] > 0
    wide, narrow, prepare, *call = map(json.loads, log.read_text().splitlines())
    overlap = [[6, 1]]  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    shape = {"function": 2000, "threads": 320, "shared": 90_000, "attributes": overlap, "extra": 0}
    assert wide == {**shape, "grid": [264, 1, 1], "stream": 5, "first": 77}
    assert narrow == {**shape, "grid": [3, 2, 1], "stream": 6, "first": 78}  # arguments are read at the launch
    assert (prepare["function"], prepare["grid"], prepare["attributes"], prepare["shared"]) == (1000, [1, 1, 1], [], 0)
    assert [entry["function"] for entry in call] == [1000, 2000, 3000]
    assert [entry["attributes"] for entry in call] == [[], overlap, overlap]
    assert {entry["stream"] for entry in call} == {7}


def test_missing_headers_say_where_was_looked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiler, "_include_candidates", lambda: iter([tmp_path]))
    compiler.toolchain.cache_clear()
    try:
        with pytest.raises(ToolchainError, match=rf"cuda_bf16\.h.*{tmp_path}.*CUDA_HOME"):
            compiler.toolchain()
    finally:
        compiler.toolchain.cache_clear()


def test_an_arch_the_compiler_does_not_know_is_the_environments_fault(tmp_path: Path) -> None:
    with pytest.raises(ToolchainError, match=r"sm_999.*sm_90"):
        build([CELL], ["sm_999"], tmp_path)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TAILPACK_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_folder() == tmp_path / "xdg" / "tailpack" / "cubins"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert default_folder() == Path.home() / ".cache" / "tailpack" / "cubins"
    monkeypatch.setenv("TAILPACK_CACHE", str(tmp_path / "own"))
    assert default_folder() == tmp_path / "own" / "cubins"


def test_the_command_line_imports_neither_torch_nor_cupy() -> None:
    code = (
        "import sys, kernels.cli; print([m for m in ('torch', 'cupy', 'cuda.core', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
