"""What attention over packed pages costs on a CPU, against dense pages of the same length.

    python -m tests.bench.bench_attention_cpu [--threads 2] [--repeats 9] [--clock wall|cpu]
        [--out FILE.jsonl]

One decode token of one sequence through all layers of SmolLM2-135M's shapes (30 layers, 9 query heads on 3 kv heads,
width 64) over 4,096 cached tokens, or a prompt chunk of 128 through them; and sealing one page of all layers. The rival
is the fused attention kernel of torch over dense f32 pages, batched by page. The floor reads the cached bytes once, at
the rate at which this machine copies (counted as read plus write) with as many threads. On a machine that others use,
one thread and --clock cpu say more than the wall clock.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch

from kernels.attention import PackedRegion, attend_dense, attend_packed
from kernels.page_codec import Planes, RegionRows, arena_planes, pack_pages, row_codec, unpack_pages
from kernels.page_layout import Region, page_layout
from kernels.widths import PRESETS

ROOT = Path(__file__).resolve().parents[2]
PAGE = 128


@dataclass(frozen=True)
class Shape:
    layers: int = 30
    kv_heads: int = 3
    group: int = 3
    dim: int = 64
    tokens: int = 4096

    @property
    def sm_scale(self) -> float:
        return float(self.dim**-0.5)


SMOLLM2_135M = Shape()
MODES = {name: (f"tq{preset.key_bits}", f"tq{preset.value_bits}") for name, preset in PRESETS.items()} | {
    "fp8": ("fp8", "fp8")
}


@dataclass
class Cache:
    """The same sequence packed and, dequantised, dense: pages [P, 128, kv_heads, dim] a layer."""

    packed: list[tuple[PackedRegion, PackedRegion]]
    dense: list[tuple[torch.Tensor, torch.Tensor]]
    page_ids: torch.Tensor
    packed_bytes: int

    @classmethod
    def fill(cls, mode: str, shape: Shape) -> Cache:
        key, value = (row_codec(name, shape.dim) for name in MODES[mode])
        pair = [Region(PAGE, shape.kv_heads, codec.code_bytes, codec.scale_bytes) for codec in (key, value)]
        layout = page_layout(pair * shape.layers)
        pages = shape.tokens // PAGE
        arena = torch.zeros((2 * pages, layout.page_bytes), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(1)
        page_ids = torch.randperm(2 * pages, generator=generator)[:pages]  # a used arena: no run of pages
        packed, dense = [], []
        for layer in range(shape.layers):
            regions: list[PackedRegion] = []
            for i, codec in enumerate((key, value)):
                planes: Planes = arena_planes(arena, layout.regions[2 * layer + i], shape.kv_heads, PAGE, codec)
                rows = torch.randn(pages, PAGE, shape.kv_heads, shape.dim, generator=generator)
                pack_pages(page_ids, [RegionRows(planes, codec, rows)])
                regions.append(PackedRegion(planes, codec))
            k, v = (unpack_pages(page_ids, planes, codec, torch.float32).contiguous() for planes, codec in regions)
            packed.append((regions[0], regions[1]))
            dense.append((k, v))
        return cls(packed, dense, page_ids, pages * layout.page_bytes)


def attend_all_layers(cache: Cache, shape: Shape, q: torch.Tensor) -> torch.Tensor:
    for keys, values in cache.packed:
        part = attend_packed(
            q,
            keys,
            values,
            cache.page_ids,
            num_tokens=shape.tokens,
            first_position=shape.tokens,
            sm_scale=shape.sm_scale,
        )
    return part.out


def attend_all_layers_dense(cache: Cache, shape: Shape, q: torch.Tensor) -> torch.Tensor:
    """One row: pages are the batch, so nothing is copied. A chunk: all rows at once."""
    for k, v in cache.dense:
        if q.shape[0] == 1:
            pages = q.view(1, shape.kv_heads, shape.group, shape.dim).expand(len(k), -1, -1, -1)
            outs, lses = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                pages, k.transpose(1, 2), v.transpose(1, 2)
            )
            out: torch.Tensor = (outs * lses.softmax(0).unsqueeze(-1)).sum(0).view(q.shape)
        else:
            out = attend_dense(
                q, k.flatten(0, 1), v.flatten(0, 1), first_position=shape.tokens, first_row=0, sm_scale=shape.sm_scale
            ).out
    return out


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}  # cpu: of all threads


def seconds_of(call: Callable[[], object], repeats: int, clock: str) -> list[float]:
    now = CLOCKS[clock]
    call()
    times = []
    for _ in range(repeats):
        start = now()
        call()
        times.append(now() - start)
    return times


def copy_bytes_per_s(clock: str) -> float:
    """Read plus write, of buffers far beyond the caches."""
    source, target = torch.empty(1 << 26), torch.empty(1 << 26)
    return 2 * source.numel() * 4 / min(seconds_of(lambda: target.copy_(source), 5, clock))


@dataclass
class Measured:
    case: str
    values_ms: list[float]
    rivals_ms: list[float] | None
    floor_ms: float | None
    error: float | None


def measure(mode: str, shape: Shape, repeats: int, chunk: int, clock: str = "wall") -> list[Measured]:
    """Decode, a prompt chunk and a seal of one mode; error: relative to the rival over the same dequantised rows."""
    cache = Cache.fill(mode, shape)
    floor_ms = 1e3 * cache.packed_bytes / copy_bytes_per_s(clock)
    out = []
    for name, rows in (("decode", 1), (f"chunk-{chunk}", chunk)):
        q = torch.randn(rows, shape.kv_heads * shape.group, shape.dim, generator=torch.Generator().manual_seed(2))
        got, want = attend_all_layers(cache, shape, q), attend_all_layers_dense(cache, shape, q)
        error = float((got - want).norm() / want.norm())
        mine = seconds_of(lambda q=q: attend_all_layers(cache, shape, q), repeats, clock)  # type: ignore[misc]
        rival = seconds_of(lambda q=q: attend_all_layers_dense(cache, shape, q), repeats, clock)  # type: ignore[misc]
        case = f"{name}-{mode}-{shape.layers}x{shape.kv_heads}x{shape.dim}-{shape.tokens}"
        out.append(Measured(case, [1e3 * t for t in mine], [1e3 * t for t in rival], floor_ms, error))
    pages = [
        RegionRows(region.planes, region.codec, rows[:1])
        for pair, dense in zip(cache.packed, cache.dense, strict=True)
        for region, rows in zip(pair, dense, strict=True)
    ]
    seal = seconds_of(lambda: pack_pages(cache.page_ids[:1], pages), repeats, clock)
    case = f"seal-{mode}-{shape.layers}x{shape.kv_heads}x{shape.dim}"
    out.append(Measured(case, [1e3 * t for t in seal], None, None, None))
    return out


def record(measured: Measured, command: str, clock: str = "wall") -> dict[str, Any]:
    """One line as the records of this project have it."""
    values = measured.values_ms
    return {
        "bench": "attention_cpu",
        "case": measured.case,
        "value": round(statistics.median(values), 2),
        "unit": "ms" if clock == "wall" else "ms of CPU",
        "spread": [round(min(values), 2), round(max(values), 2)],
        "repeats": len(values),
        "floor": None if measured.floor_ms is None else round(measured.floor_ms, 2),
        "floor_by": None if measured.floor_ms is None else "bytes: packed pages read once at this machine's copy rate",
        "rival": "torch fused attention over dense f32 rows" if measured.rivals_ms else None,
        "rival_value": round(statistics.median(measured.rivals_ms), 2) if measured.rivals_ms else None,
        "rival_why": None if measured.rivals_ms else "dense pages need no sealing",
        "error": measured.error,
        "machine": f"{platform.machine()}, {psutil.cpu_count()} CPUs, {_cpu_model()}",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip(),
        "command": command,
        "kind": "measured",
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    command = f"python -m tests.bench.bench_attention_cpu --threads {options.threads} --repeats {options.repeats}"
    command += f" --clock {options.clock}"
    records = []
    for mode in MODES:
        for measured in measure(mode, SMOLLM2_135M, options.repeats, PAGE, options.clock):
            line = record(measured, command, options.clock)
            records.append(line)
            print(
                f"{line['case']:32} {line['value']:>8.2f} {line['unit']}  rival {line['rival_value']}"
                f"  floor {line['floor']}"
            )
    if options.out:
        options.out.write_text("".join(json.dumps(line) + "\n" for line in records))


if __name__ == "__main__":
    main()
