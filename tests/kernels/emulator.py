"""Builds a kernel for the CPU emulator (tests/kernels/cuda_on_cpu/cta.h) and calls it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.cells import Cell
from kernels.compiler import SOURCE_DIR

HEADER_DIR = Path(__file__).parent / "cuda_on_cpu"
FLAGS = [
    "-std=c++20",
    "-Og",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-gnu-unique",  # two libraries in one process keep their own state
    "-shared",
    "-fPIC",
    *(["-mfma", "-mf16c"] if platform.machine() == "x86_64" else []),
]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

Argument = torch.Tensor | ctypes.Structure | int | float | None


class EmulatorError(RuntimeError):
    """A launch did not end well: a divergence, a deadlock, a bad address. The message says which thread and where."""


class Emulator:
    """A library of launches, each an `extern "C" void` function."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        self._library.cta_error.restype = ctypes.c_char_p

    @classmethod
    def build(cls, source: str, options: Sequence[str] = (), timeout_s: float = 300) -> Emulator:
        """Compile `source`, a name in cuda_on_cpu, with g++ and these further options; once for all tests of a run."""
        if (known := _LOADED.get((source, *options))) is not None:
            return known
        digest = hashlib.blake2b(repr((source, list(options))).encode(), digest_size=16).hexdigest()
        target = _shared_folder() / f"{digest}.so"
        if not target.exists():
            draft = target.with_suffix(f".{os.getpid()}")
            _compile(HEADER_DIR / source, draft, options, timeout_s)
            draft.rename(target)
        emulator = _LOADED[source, *options] = cls(target)
        return emulator

    @classmethod
    def of(cls, cell: Cell, *options: str) -> Emulator:
        """The kernels of a cell."""
        defines = [f"-D{name}={value}" for name, value in cell.defines]
        return cls.build(cell.source.replace(".cu", ".cpp"), [*defines, *options])

    def call(self, name: str, *arguments: Argument, seed: int = 0, time_limit_s: int = 120) -> None:
        """Call a function. A tensor goes as a pointer, an int as 64 bits, a float as f32, a structure by value.

        seed: 0 runs threads in order; others shuffle turns, CTAs and the arrival of copies.
        time_limit_s: of CPU time, for each launch.
        Raises EmulatorError.
        """
        self._library.cta_begin(ctypes.c_ulonglong(seed), ctypes.c_uint(time_limit_s))
        function = getattr(self._library, name)
        function.restype = None
        function(*(_as_c(argument) for argument in arguments))
        message = self._library.cta_error().decode()
        if message:
            raise EmulatorError(f"{name}, seed {seed}: {message}")

    def function(self, name: str) -> ctypes._NamedFuncPointer:
        """A function that launches nothing, to be given its types by the caller."""
        return self._library[name]


_LOADED: dict[tuple[str, ...], Emulator] = {}  # by source and options


def _compile(source: Path, target: Path, options: Sequence[str], timeout_s: float) -> None:
    _run_compiler(
        *options, "-include", str(_parsed_header()), str(source), "-o", str(target), "-lrt", timeout_s=timeout_s
    )


def _run_compiler(*arguments: str, timeout_s: float = 300) -> None:
    command = ["g++", *FLAGS, f"-I{HEADER_DIR}", f"-I{SOURCE_DIR}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise EmulatorError(f"{' '.join(command)}\n{done.stderr[-8000:]}")


@functools.cache
def _parsed_header() -> Path:
    """A header that includes cta.h, with its precompiled form beside it: a third of each build went into reading the
    same C++ headers. Where an option changes what they say, g++ reads the header itself.
    """
    header = _shared_folder() / "parsed.h"
    compiled = header.with_suffix(".h.gch")
    if not compiled.exists():
        draft = header.with_suffix(f".{os.getpid()}.h")
        draft.write_text('#include "cta.h"\n')
        _run_compiler("-x", "c++-header", str(draft), "-o", f"{draft}.gch")
        draft.rename(header)
        Path(f"{draft}.gch").rename(compiled)
    return header


@functools.cache
def _shared_folder() -> Path:
    """Of all processes of a test run; the last one removes it."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", f"{os.getpid()}")
    folder = Path(tempfile.gettempdir()) / f"tp-cta-{os.getuid()}-{run}"
    folder.mkdir(mode=0o700, exist_ok=True)
    users = (folder / "users").open("w")
    fcntl.flock(users, fcntl.LOCK_SH)

    def leave() -> None:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(leave)
    return folder


def _as_c(argument: Argument) -> object:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return argument
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_void_p() if argument is None else ctypes.c_int64(argument)
