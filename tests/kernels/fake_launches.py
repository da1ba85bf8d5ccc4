"""Runs PreparedLaunch and a whole decode call on the stand-in for the driver (fake_driver.cpp), in its own process.

python -m tests.kernels.fake_launches prints what a plain launch raised, and the host's microseconds of a decode call.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from types import SimpleNamespace
from typing import Any

import torch

from kernels import decode, loader
from kernels.cells import Cell
from kernels.decode import DecodeLayer
from kernels.decode_args import DecodeArgs
from kernels.decode_workspace import DecodeLimits, new_workspace
from tests.bench.kernel_cases import Case
from tests.bench.kernel_inputs import make

CPU = torch.device("cpu")
CELL = Cell("x.cu", 64, "p", "v", ("prepare", "attend", "bad"), ())
ADDRESSES = {"prepare": 1000, "attend": 2000, "merge": 3000, "bad": 2**64 - 1}
CALLS = 2000


def load(cell: Cell, device_index: int) -> dict[str, Any]:
    """Kernels as CuPy has them, at made-up addresses."""
    kernels = {}
    for name in cell.kernels:
        address = ADDRESSES[name.partition("_")[0]]
        kernels[name] = SimpleNamespace(kernel=SimpleNamespace(ptr=address), max_dynamic_shared_size_bytes=232448)
    return kernels


def plain_launches() -> str:
    """Three launches; returns the message of the one that the driver refuses."""
    arguments = DecodeArgs(q=77)
    attend = loader.PreparedLaunch(CELL, "attend", 0, arguments, threads=320, shared_bytes=90_000, overlap=True)
    attend.set_ctas(264)
    attend(5)
    arguments.q = 78
    attend.set_ctas(3, 2)
    attend(6)
    prepare = loader.PreparedLaunch(CELL, "prepare", 0, arguments, threads=160)
    prepare(0)
    bad = loader.PreparedLaunch(CELL, "bad", 0, arguments, threads=32)
    try:
        bad(0)
    except loader.LaunchError as error:
        return str(error)
    return ""


def call_us() -> float:
    """Host microseconds of one decode call, checks included, the driver's own work not."""
    decode._current_stream = lambda device_index: 7
    inputs = make(Case("case", "tq4", 128, (300, 40)), CPU)
    layer = DecodeLayer(
        keys=inputs.keys,
        values=inputs.values,
        tail=inputs.tail,
        q_heads=8,
        dtype=inputs.dtype,
        options=inputs.options,
        limits=DecodeLimits(2, 8),
        arch="sm_90a",
    )
    layer.use_workspace(new_workspace(layer.workspace_bytes, CPU))
    layer(inputs.q, inputs.batch, out=inputs.out, lse=inputs.lse)
    os.environ.pop("TAILPACK_LAUNCHES")
    ctypes.CDLL(None).unsetenv(b"TAILPACK_LAUNCHES")
    started = time.perf_counter()
    for _ in range(CALLS):
        layer(inputs.q, inputs.batch, out=inputs.out, lse=inputs.lse)
    return (time.perf_counter() - started) / CALLS * 1e6


if __name__ == "__main__":
    loader.load = load  # type: ignore[assignment]
    print(json.dumps({"refused": plain_launches(), "call_us": round(call_us(), 2)}))
