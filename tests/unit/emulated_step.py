"""The kernels of a decode step, run on a CPU lane by lane by the emulator, where a worker launches them."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest

from kernels import loader
from kernels.cells import Cell
from tests.kernels.emulator import Emulator
from tests.unit.fake_gpu_kernels import ARCH, FakeGpuKernels

SOURCES = ("linear_few.cu", "decode_step.cu", "sample.cu")


class EmulatedStep(FakeGpuKernels):
    """``FakeGpuKernels`` that also knows the cells of SOURCES."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        attention = loader.PreparedLaunch
        monkeypatch.setattr(loader, "PreparedLaunch", partial(self._prepared, attention))
        monkeypatch.setattr(loader, "arch_of", lambda device: ARCH)
        monkeypatch.setattr(loader, "current_stream", lambda index: 0)

    def _prepared(self, attention: Any, cell: Cell, kernel: str, index: int, arguments: Any, **options: Any) -> Any:
        if cell.source not in SOURCES:
            return attention(cell, kernel, index, arguments, **options)
        self._load(cell, index)
        return _Launch(self, cell, kernel, arguments, options.get("shared_bytes", 0))


class _Launch:
    def __init__(
        self, kernels: EmulatedStep, cell: Cell, kernel: str, arguments: ctypes.Structure, shared_bytes: int
    ) -> None:
        self._kernels, self._cell, self._kernel, self._arguments = kernels, cell, kernel, arguments
        self._shared_bytes = shared_bytes
        self._grid = (1, 1)
        self._library = Emulator.of(cell)

    def set_ctas(self, x: int, y: int = 1) -> None:
        self._grid = (x, y)

    def __call__(self, stream: int) -> None:
        self._kernels.count(self._cell, self._kernel)
        library, (x, y) = self._library, self._grid
        arguments = type(self._arguments).from_buffer_copy(self._arguments)
        if self._cell.source == "linear_few.cu":
            library.call("linear", x, self._shared_bytes, arguments)
        elif self._cell.source == "sample.cu":
            library.call("sample", x, arguments)
        else:
            name = self._kernel.split("_")[0]
            library.call("swiglu_rows" if name == "swiglu" else name, x, y, arguments)
