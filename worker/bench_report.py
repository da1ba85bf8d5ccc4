"""What ``tailpack bench engine`` shows and writes: a table of both sides, the verdict with its spread, records."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table

from kernels.loader import arch_of
from protos.version import release
from worker.bench_run import LEAST_TOKENS, Measured, Side, floor_tokens_per_s, ratios

SEAL_KERNELS, APPEND_KERNELS = ("seal",), ("rope_append", "append")


def verdict(first: Side, second: Side) -> str:
    """One sentence. A difference within the spread is none."""
    found = ratios(first, second)
    middle, low, high = statistics.median(found), min(found), max(found)
    spread = f"{middle:.2f} times the tokens/s ({low:.2f} to {high:.2f} in {len(found)} pairs of windows)"
    if low > 1:
        return f"{second.name} is faster than {first.name}: {spread}"
    if high < 1:
        return f"{second.name} is slower than {first.name}: {spread}"
    return f"No difference beyond the spread between {first.name} and {second.name}: {spread}"


def rows_of(side: Side, measured: Measured) -> dict[str, str]:
    """The lines of the table, by what they are."""
    load, windows, seen = measured.load, side.windows, side.profile
    floor = floor_tokens_per_s(side, load, measured.read_bytes_s)
    rates = [window.tokens_per_s for window in windows]
    steps = [window.step_ms for window in windows]
    tokens = load.rows  # of a step
    found = {
        "tokens/s": f"{side.tokens_per_s:,.1f} ({min(rates):,.1f} to {max(rates):,.1f})",
        "tokens/s of each user": f"{side.tokens_per_s / load.rows:,.2f}",
        "of the floor": f"{side.tokens_per_s / floor:.1%} of {floor:,.1f}",
        "step": f"{side.step_ms:.3f} ms ({min(steps):.3f} to {max(steps):.3f})",
    }
    for phase in windows[0].phase_ms:
        found[f"  host: {phase}"] = _ms(windows, lambda window, phase=phase: window.phase_ms.get(phase, 0.0))
    found["  host: append, all layers"] = _ms(windows, lambda window: window.append_ms)
    found["  host: seal"] = _ms(windows, lambda window: window.seal_ms)
    if seen is not None and seen.kernels:
        found |= {
            "  GPU busy": f"{seen.busy_us / 1e3:.3f} ms of {seen.wall_us / 1e3:.3f} ({seen.busy_share:.1%})",
            "  GPU gaps": f"{(seen.wall_us - seen.busy_us) / 1e3:.3f} ms",
            "  GPU: seal": f"{seen.us_of(*SEAL_KERNELS) / 1e3:.3f} ms",
            "  GPU: append": f"{seen.us_of(*APPEND_KERNELS) / 1e3:.3f} ms",
            "launch calls a token": f"{seen.launches / tokens:.2f} ({seen.launches:.1f} a step)",
            "kernels a step": f"{seen.kernels:.1f}",
            "blocking round trips a token": f"{seen.waits / tokens:.2f} ({seen.waits:.1f} a step)",
            "waits for the step before": f"{seen.event_waits:.1f} a step",
            "allocations a step": f"{windows[-1].allocations or 0:.2f}, from the driver {seen.allocations:.2f}",
        }
    elif seen is not None:
        found |= {
            "operators a token": f"{seen.operators / tokens:.1f} ({seen.operators:.1f} a step)",
            "allocations a token": f"{seen.allocations / tokens:.1f} ({seen.allocations:.1f} a step)",
        }
    start, end = (size / 2**20 for size in side.in_use)
    found |= {
        "KV in use, start and end": f"{start:,.1f} and {end:,.1f} MiB",
        "KV memory held": f"{sum(side.held.values()) / 2**20:,.1f} MiB",
        "pages packed": f"{side.pages_packed}",
    }
    return found


def show(measured: Measured, console: Console) -> None:
    load, sides = measured.load, measured.sides
    table = Table("", *(side.name for side in sides), box=None, title_justify="left")
    table.title = (
        f"{load.rows} sequences, prompts of {load.prompt:,} tokens; "
        f"{load.repeats} windows of {load.tokens} tokens each, behind {load.warm_up}"
    )
    found = [rows_of(side, measured) for side in sides]
    for name in dict.fromkeys(name for each in found for name in each):
        table.add_row(name, *(each.get(name, "-") for each in found))
    console.print(table)
    console.print()
    console.print(_memory(measured))
    if len(sides) == 2:
        console.print(f"\n{verdict(*sides)}", style="bold", highlight=False)
    if load.tokens < LEAST_TOKENS:
        console.print(f"A try: windows of fewer than {LEAST_TOKENS} tokens say little.", highlight=False)


def _memory(measured: Measured) -> Table:
    """This process, all sides together; KV memory is above."""
    table = Table("memory besides KV", "owner", box=None)
    for name in ("MiB, start", "MiB, end"):
        table.add_column(name, justify="right")
    after = {(each.memory, each.owner): each.num_bytes for each in measured.after.owned}
    before = {(each.memory, each.owner): each.num_bytes for each in measured.before.owned}
    for key in dict.fromkeys([*before, *after]):
        start, end = (f"{books.get(key, 0) / 2**20:,.1f}" for books in (before, after))
        table.add_row(*key, start, end)
    return table


def _ms(windows: Sequence[Any], of: Any) -> str:
    return f"{statistics.median(of(window) for window in windows):.3f} ms"


def records(measured: Measured, command: str, commit: str, random_weights: bool) -> list[dict[str, Any]]:
    """As docs have records of measurements: one a side, and their ratio."""
    load, sides = measured.load, measured.sides
    device = sides[0].bench.device
    on_gpu = device.type == "cuda"
    common = {
        "bench": "engine",
        "machine": torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "tailpack": release(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "arch": arch_of(device) if on_gpu else "",
        },
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "command": command,
        "kind": "measured",
        "error": None,
    }
    case = f"b{load.rows}-{load.prompt}"
    lines = []
    for side in sides:
        rates = [round(window.tokens_per_s, 2) for window in side.windows]
        lines.append(
            common
            | {
                "case": f"{side.name}-{case}",
                "value": round(side.tokens_per_s, 2),
                "unit": "tokens/s",
                "spread": [min(rates), max(rates)],
                "repeats": len(rates),
                "floor": round(floor_tokens_per_s(side, load, measured.read_bytes_s), 2),
                "floor_by": f"bytes: weights and KV once a step at {measured.read_bytes_s / 1e9:.1f} GB/s, "
                "as a sum reads in this run",
                "rival": None,
                "rival_value": None,
                "rival_why": "configurations of the engine are compared with each other",
                "facts": _facts(side, measured, random_weights),
            }
        )
    if len(sides) == 2:
        found = [round(ratio, 4) for ratio in ratios(*sides)]
        lines.append(
            common
            | {
                "case": f"{sides[1].name}-over-{sides[0].name}-{case}",
                "value": statistics.median(found),
                "unit": "ratio of tokens/s",
                "spread": [min(found), max(found)],
                "repeats": len(found),
                "floor": None,
                "floor_by": "each side has its own",
                "rival": sides[0].name,
                "rival_value": round(sides[0].tokens_per_s, 2),
                "facts": {"verdict": verdict(*sides), "random_weights": random_weights},
            }
        )
    return lines


def _facts(side: Side, measured: Measured, random_weights: bool) -> dict[str, Any]:
    load, seen = measured.load, side.profile
    memory = {
        "start": {f"{each.memory} {each.owner}": each.num_bytes for each in measured.before.owned},
        "end": {f"{each.memory} {each.owner}": each.num_bytes for each in measured.after.owned},
        "grown": measured.after.grown,
    }
    return {
        "random_weights": random_weights,
        "enough_tokens": load.tokens >= LEAST_TOKENS,
        "tokens_per_s_of_each": round(side.tokens_per_s / load.rows, 3),
        "step_ms": round(side.step_ms, 4),
        "host_ms": {name: round(ms, 4) for name, ms in side.windows[-1].phase_ms.items()},
        "append_ms": round(side.windows[-1].append_ms, 4),
        "seal_ms": round(side.windows[-1].seal_ms, 4),
        "allocations_a_step": side.windows[-1].allocations,
        "profile": None if seen is None else vars(seen),
        "kv_bytes_held": side.held,
        "kv_bytes_in_use": side.in_use,
        "pages_packed": side.pages_packed,
        "memory": memory,
        "rss_bytes": psutil.Process().memory_info().rss,
        "settings": side.config.to_dict(),
    }
