"""Times on a GPU: graph replays between events, what the machine can do at most, and what a user would use instead."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernels import loader
from kernels.cells import Cell
from kernels.cubins import default_folder, ensure_cubin

REPEATS = 30
WARM_UPS = 5
FLUSH_BYTES = 1 << 28  # four times the second-level cache of an H200
MATRIX = 8192

Call = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Milliseconds of single replays; `steady` of one in a row of many, None where it was not measured."""

    values: list[float]
    steady: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.values)


class Timer:
    """Captures calls and times their replays."""

    def __init__(self, device: torch.device) -> None:
        self._flush = torch.empty((2, FLUSH_BYTES), dtype=torch.uint8, device=device)
        self._sum = torch.empty((), dtype=torch.int64, device=device)

    def time(self, call: Call, *, cold: bool, repeats: int = REPEATS) -> Times:
        """cold: what the call reads is not in the second-level cache; the flush is not counted."""
        graph = capture(call)
        for _ in range(WARM_UPS):
            graph.replay()
        steady = self._row(graph, repeats)
        return Times(self._single(graph, cold, repeats), steady)

    def _row(self, graph: torch.cuda.CUDAGraph, repeats: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / repeats

    def _single(self, graph: torch.cuda.CUDAGraph, cold: bool, repeats: int) -> list[float]:
        pairs = []
        for _ in range(repeats):
            if cold:  # first dirty lines, then clean ones of another buffer: nothing is written back during the call
                self._flush[0].zero_()
                torch.sum(self._flush[1].view(torch.int64), dim=0, out=self._sum)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [float(begin.elapsed_time(end)) for begin, end in pairs]


def capture(call: Call) -> torch.cuda.CUDAGraph:
    """The call, after three warm-ups on a side stream, as a graph."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def latency_us(call: Call, repeats: int = 200) -> list[float]:
    """Host microseconds from a plain call to its result, one at a time."""
    out = []
    for turn in range(repeats + 20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if turn >= 20:
            out.append((time.perf_counter() - start) * 1e6)
    return out


def host_us(call: Call, repeats: int = 200) -> float:
    """Host microseconds that a plain call takes to return, many in a row while the device works."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    queued = time.perf_counter() - start
    torch.cuda.synchronize()
    return queued / repeats * 1e6


# -- ceilings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ceilings:
    """What this machine did in this run, a second: bytes read by a kernel that does nothing else, bytes moved by a copy
    (read plus write), bf16 operations of a square matrix product."""

    read: float
    copy: float
    flops: float


def ceilings(timer: Timer, device: torch.device) -> Ceilings:
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    read = source.numel() / timer.time(_stream_call(source), cold=True).median * 1e3
    copy = 2 * source.numel() / timer.time(lambda: target.copy_(source), cold=True).median * 1e3
    a, b = (torch.randn(MATRIX, MATRIX, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    flops = 2 * MATRIX**3 / timer.time(lambda: torch.mm(a, b, out=out), cold=False).median * 1e3
    return Ceilings(read, copy, flops)


def _stream_call(source: Tensor) -> Call:
    import cupy

    cell = Cell("stream.cu", 0, "read", "16", ("read_stream",), (("TAILPACK_STREAM", "1"),))
    arch = loader.arch_of(source.device)
    built = ensure_cubin(cell, arch, default_folder(), Path(__file__).parent)
    kernel = cupy.RawModule(path=str(built.path)).get_function("read_stream")
    never = torch.zeros(1, dtype=torch.int32, device=source.device)
    ctas = 4 * torch.cuda.get_device_properties(source.device).multi_processor_count
    arguments = (cupy.int64(source.data_ptr()), cupy.int64(source.numel() // 16), cupy.int64(never.data_ptr()))

    def call() -> None:
        stream = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
        with stream:
            kernel((ctas,), (512,), arguments)

    return call


# -- rivals ----------------------------------------------------------------------------------------------------------


def rivals(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool = False) -> dict[str, Call]:
    """Calls of torch's attention over q [B, q_heads, T, dim] and dense k, v [B, kv_heads, N, dim], by name; those that
    do not take the shape are left out. For rows wider than its kernels take: two matrix products and a softmax."""

    def run(backend: SDPBackend) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(
                q, k, v, scale=scale, is_causal=is_causal, enable_gqa=q.shape[1] > k.shape[1]
            )

    calls: dict[str, Call] = {
        "cuDNN SDPA": lambda: run(SDPBackend.CUDNN_ATTENTION),
        "FlashAttention SDPA": lambda: run(SDPBackend.FLASH_ATTENTION),
    }
    if q.shape[3] > 256 and k.shape[1] == 1 and not is_causal:
        calls["two matrix products and a softmax"] = lambda: (
            torch.baddbmm(
                q.new_zeros(()).expand(q.shape[0], q.shape[1] * q.shape[2], k.shape[2]),
                q.flatten(1, 2),
                k[:, 0].transpose(1, 2),
                beta=0,
                alpha=scale,
            ).softmax(-1)
            @ v[:, 0]
        )
    usable = {}
    for name, call in calls.items():
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError:  # the backend says that it does not take this shape
            continue
        usable[name] = call
    return usable
