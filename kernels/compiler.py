"""NVRTC through cuda.core: one cell (kernels/cells.py) and one arch in, one cubin out. Needs no GPU and no driver.

Nothing here touches the disk cache (kernels/cubins.py) or a device (kernels/loader.py). CuPy's own NVRTC wrapper is not
used: it drops the last byte of a cubin, and its JIT knows sm_90 but never sm_90a.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import json
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kernels.cells import Cell
from kernels.errors import MachineError

logger = logging.getLogger(__name__)

INSTALL = 'install it with: pip install "tailpack[archs]"'
SOURCE_DIR = Path(__file__).parent / "csrc"
STANDARD = "c++17"
# One header of each folder that our sources need. NVRTC brings none of its own: no <cuda.h>, no <stdint.h>.
_RUNTIME_HEADER = "cuda_bf16.h"
_CCCL_HEADER = "cuda/std/cstdint"
_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cuda-nvcc", "nvidia-cuda-crt")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


class ToolchainError(MachineError):
    """This environment cannot compile or inspect: a compiler, header or tool is missing. The code is not at fault."""


class CompileError(MachineError):
    """A source of ours does not compile. The message holds the compiler's log."""


@dataclass(frozen=True)
class Toolchain:
    """The compiler and the headers found here.

    identity: versions of compiler and headers, part of every cache key.
    include_dirs: NVIDIA's header folders, in search order.
    sm_numbers: archs the compiler knows, as numbers without their suffix (90 for sm_90a).
    """

    identity: str
    include_dirs: tuple[Path, ...]
    sm_numbers: frozenset[int]


@functools.cache
def toolchain() -> Toolchain:
    """Find NVRTC and NVIDIA's headers, once a process. Raises ToolchainError naming what is missing, what was tried."""
    try:
        importlib.import_module("cuda.core")
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
        _, numbers = nvrtc.nvrtcGetSupportedArchs()
    except (ImportError, RuntimeError, OSError) as error:
        raise ToolchainError(
            "no CUDA compiler",
            given=f"{type(error).__name__}: {error}",
            allowed="NVRTC through cuda.core",
            action=INSTALL,
        ) from error
    if int(status) != 0:
        raise ToolchainError("the CUDA compiler does not answer", given=repr(status), allowed="success", action=INSTALL)
    runtime, cccl = _find_header(_RUNTIME_HEADER), _find_header(_CCCL_HEADER)
    versions = {
        "nvrtc": f"{major}.{minor}",
        "package": _package_version("nvidia-cuda-nvrtc"),
        "runtime": _macro(runtime / "cuda_runtime_api.h", "CUDART_VERSION"),
        "cccl": _macro(cccl / "cuda/std/__cccl/version.h", "CCCL_VERSION"),
    }
    return Toolchain(json.dumps(versions), tuple(dict.fromkeys((runtime, cccl))), frozenset(int(n) for n in numbers))


def _find_header(header: str) -> Path:
    tried = list(dict.fromkeys(_include_candidates()))
    for folder in tried:
        if (folder / header).is_file():
            return folder
    places = ", ".join(str(folder) for folder in tried) or "no folder at all"
    raise ToolchainError(
        f"no CUDA header <{header}>",
        given=f"these folders, none of which holds it: {places}",
        allowed="a pip package or a toolkit with this header",
        action=f"{INSTALL}, or set CUDA_HOME to a toolkit",
    )


def _include_candidates() -> Iterator[Path]:
    """Where pip packages (any layout) and toolkits keep headers; packages first, for they match the pip NVRTC."""
    for package in _PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for file in files:
            for header in (_RUNTIME_HEADER, _CCCL_HEADER):
                if file.as_posix().endswith("/" + header):
                    yield Path(str(file.locate())).resolve().parents[header.count("/")]
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for include in sorted(Path(root).glob("*/include")):
            yield include
            yield include / "cccl"
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    for home in homes:
        if home:
            for include in (Path(home) / "include", Path(home) / "targets/x86_64-linux/include"):
                yield include
                yield include / "cccl"


def _package_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _macro(header: Path, name: str) -> str:
    text = header.read_text(errors="replace") if header.is_file() else ""
    found = re.search(rf"#\s*define\s+{name}\s+(\S+)", text)
    return found[1] if found else ""


def sources_of(source: str, source_dir: Path = SOURCE_DIR) -> dict[str, bytes]:
    """The source and every header of ours that it includes, transitively: name -> content.

    Raises CompileError where an included file does not exist.
    """
    found: dict[str, bytes] = {}
    pending = [source]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        try:
            found[name] = (source_dir / name).read_bytes()
        except FileNotFoundError as error:
            raise CompileError(
                f"{source} needs {name}, which does not exist",
                given=str(source_dir / name),
                allowed=", ".join(sorted(path.name for path in source_dir.glob("*.cu*"))) or "nothing there",
                action="add the file or fix the name",
            ) from error
        pending += _INCLUDE.findall(found[name].decode())
    return found


def cell_key(cell: Cell, arch: str, source_dir: Path = SOURCE_DIR) -> str:
    """Digest of everything that decides the bytes of a cubin: sources, headers, defines, flags, arch and compiler."""
    contents = {name: hashlib.sha256(text).hexdigest() for name, text in sources_of(cell.source, source_dir).items()}
    parts = [cell.source, sorted(contents.items()), cell.defines, arch, STANDARD, toolchain().identity]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def require_arch(arch: str) -> None:
    """Raise ToolchainError unless the compiler here knows `arch`."""
    known = toolchain().sm_numbers
    if int(re.sub(r"\D", "", arch)) not in known:
        names = ", ".join(f"sm_{number}" for number in sorted(known))
        raise ToolchainError("this compiler does not know the arch", given=arch, allowed=names, action=INSTALL)


def compile_cubin(cell: Cell, arch: str, source_dir: Path = SOURCE_DIR) -> bytes:
    """Compile one cell for one arch. Raises CompileError with the compiler's log, or ToolchainError."""
    require_arch(arch)
    tools = toolchain()
    from cuda.core import Program, ProgramOptions

    sources_of(cell.source, source_dir)  # names a missing header better than NVRTC does
    options = ProgramOptions(
        name=cell.source,
        arch=arch,
        std=STANDARD,
        define_macro=list(cell.defines),
        include_path=[str(folder) for folder in (source_dir, *tools.include_dirs)],
    )
    log = io.StringIO()
    try:
        code = Program((source_dir / cell.source).read_text(), "c++", options).compile("cubin", logs=log).code
    except Exception as error:
        if not type(error).__module__.startswith("cuda."):  # only the compiler's own refusal is translated
            raise
        raise CompileError(
            f"{cell.name} does not compile for {arch}",
            given=str(error),
            allowed="sources without errors",
            action=f"fix {source_dir / cell.source} or what it includes",
        ) from error
    if log.getvalue().strip():
        logger.warning("compiler log of %s for %s: %s", cell.name, arch, log.getvalue().strip())
    return bytes(code)
