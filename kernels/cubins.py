"""The archive of cubins on disk: one file per cell and arch, named by what it was made from.

    <folder>/turboquant-w128-b4-bf16.sm_90a.<key>.cubin

The key covers sources, headers, flags, arch and compiler (kernels/compiler.py), so a file is either right or not found.
It is written beside its final name and renamed; a lock per file lets many processes ask at once and compile once.
"""

from __future__ import annotations

import fcntl
import logging
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernels.cells import Cell, pairs_of
from kernels.compiler import SOURCE_DIR, CompileError, ToolchainError, cell_key, compile_cubin, require_arch

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuildResult:
    """What became of one cell and arch. compiled: False when the file was there already. error: "" when all is well."""

    cell: Cell
    arch: str
    path: Path | None
    compiled: bool
    seconds: float
    error: str = ""


def default_folder() -> Path:
    """$TAILPACK_CACHE/cubins, else $XDG_CACHE_HOME/tailpack/cubins, else ~/.cache/tailpack/cubins."""
    if root := os.environ.get("TAILPACK_CACHE"):
        return Path(root) / "cubins"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailpack" / "cubins"


def shipped_folder() -> Path | None:
    """$TAILPACK_CUBINS: an archive that came with an image. Only read."""
    root = os.environ.get("TAILPACK_CUBINS")
    return Path(root) if root else None


def cubin_path(cell: Cell, arch: str, folder: Path, source_dir: Path = SOURCE_DIR) -> Path:
    """Where the cubin of today's sources and compiler lies, or would lie."""
    return folder / f"{cell.name}.{arch}.{cell_key(cell, arch, source_dir)}.cubin"


def ensure_cubin(
    cell: Cell, arch: str, folder: Path, source_dir: Path = SOURCE_DIR, *, shipped: Path | None = None
) -> BuildResult:
    """Return the cubin's path, compiling it first where it is not there. Safe with many processes at once.

    One that lies in ``shipped`` is taken from there; what has to be compiled goes to ``folder``.

    Raises CompileError or ToolchainError; then nothing is left behind.
    """
    started = time.monotonic()
    if shipped is not None and (path := cubin_path(cell, arch, shipped, source_dir)).exists():
        return BuildResult(cell, arch, path, compiled=False, seconds=time.monotonic() - started)
    path = cubin_path(cell, arch, folder, source_dir)
    if path.exists():
        return BuildResult(cell, arch, path, compiled=False, seconds=time.monotonic() - started)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "locks" / f"{path.name}.lock"):
        compiled = not path.exists()  # another process may have been first
        if compiled:
            _write(path, compile_cubin(cell, arch, source_dir))
    return BuildResult(cell, arch, path, compiled, time.monotonic() - started)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that the kernel drops if this process dies. Lock files stay: removing one would race."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _write(path: Path, content: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp makes it private; a shared cache is read by other users
        Path(temporary).replace(path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def build(
    cells: Iterable[Cell],
    arches: Iterable[str],
    folder: Path,
    *,
    jobs: int | None = None,
    on_result: Callable[[BuildResult], None] = lambda result: None,
) -> list[BuildResult]:
    """Compile every cell for every arch that it is for, each pair once, in `jobs` processes (default: one per CPU).

    A pair that fails to compile is a BuildResult with its error; the others go on. Raises ToolchainError where there is
    no compiler, or none that knows an arch, before any process is started.
    """
    arches = tuple(dict.fromkeys(arches))
    for arch in arches:
        require_arch(arch)
    pairs = pairs_of(cells, arches)
    results = []
    context = multiprocessing.get_context("spawn")  # a forked child would share the compiler's threads and locks
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=context) as pool:
        futures = {pool.submit(_build_one, cell, arch, folder): (cell, arch) for cell, arch in pairs}
        for future in as_completed(futures):
            try:
                result = future.result()
            except BrokenProcessPool as error:
                cell, arch = futures[future]
                result = BuildResult(cell, arch, None, False, 0.0, f"the compiling process died: {error}")
            results.append(result)
            on_result(result)
    return sorted(results, key=lambda result: pairs.index((result.cell, result.arch)))


def _build_one(cell: Cell, arch: str, folder: Path) -> BuildResult:
    try:
        return ensure_cubin(cell, arch, folder)
    except (CompileError, ToolchainError, OSError) as error:
        return BuildResult(cell, arch, None, False, 0.0, f"{type(error).__name__}: {error}")
