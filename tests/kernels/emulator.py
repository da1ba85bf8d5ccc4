"""Builds a kernel for the CPU emulator (tests/kernels/cuda_on_cpu/cta.h) and calls it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

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
    def build(cls, source: str | Path, folder: Path, options: Sequence[str] = (), timeout_s: float = 300) -> Emulator:
        """Compile `source` (a name in cuda_on_cpu, or a path) with g++ and these further options into `folder`."""
        path = HEADER_DIR / source  # an absolute path stays itself
        number = len(list(folder.glob("*.so")))
        target = folder / f"{path.stem}-{number}.so"
        _compile(*options, "-include", str(_parsed_header()), str(path), "-o", str(target), "-lrt", timeout_s=timeout_s)
        return cls(target)

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


def _compile(*arguments: str, timeout_s: float = 300) -> None:
    command = ["g++", *FLAGS, f"-I{HEADER_DIR}", f"-I{SOURCE_DIR}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise EmulatorError(f"{' '.join(command)}\n{done.stderr[-8000:]}")


@functools.cache
def _parsed_header() -> Path:
    """A header that includes cta.h, with its precompiled form beside it: a third of each build went into reading the
    same C++ headers. Where an option changes what they say, g++ reads the header itself.
    """
    folder = Path(tempfile.mkdtemp(prefix="tp-cta-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    header = folder / "parsed.h"
    header.write_text('#include "cta.h"\n')
    _compile("-x", "c++-header", str(header), "-o", f"{header}.gch")
    return header


def _as_c(argument: Argument) -> object:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, ctypes.Structure):
        return argument
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_void_p() if argument is None else ctypes.c_int64(argument)
