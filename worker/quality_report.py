"""What ``tailpack quality`` found, as a table, as a plot and as records."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.table import Table

from kvstore.geometry import CacheGeometry
from worker.quality import CaseResult
from worker.quality_texts import Text

ROOT = Path(__file__).resolve().parent.parent


def table(results: Sequence[CaseResult], title: str) -> Table:
    made = Table(title=title)
    for head in ("mode", "edges"):
        made.add_column(head)
    for head in ("bytes/token", "if bf16", "read packed", "top-1", "mean KL", "of the texts", "perplexity"):
        made.add_column(head, justify="right")
    for result in results:
        total, kls = result.total, _kls(result)
        made.add_row(
            result.case.mode,
            "{}+{} dense".format(*result.case.edges) if any(result.case.edges) else "-",
            f"{result.geometry.bytes_per_token:,.0f}",
            f"{bf16_bytes_per_token(result.geometry):,.0f}",
            f"{total.packed_share:.1%}",
            f"{total.agreement:.2%}",
            f"{total.mean_kl:.5f}",
            f"{min(kls):.5f} to {max(kls):.5f}" if kls else "-",
            f"{total.perplexity:.3f}",
        )
    return made


def plot(results: Sequence[CaseResult], title: str, files: Sequence[Path]) -> None:
    """Draws into ``files``; the format follows from each name. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    figure.suptitle(title)
    colours = {mode: f"C{i}" for i, mode in enumerate(dict.fromkeys(r.case.mode for r in results))}
    points: dict[str, list[tuple[float, float, float]]] = {}
    for result in results:
        total, edges = result.total, any(result.case.edges)
        at = bf16_bytes_per_token(result.geometry)
        points.setdefault(result.case.mode, []).append((at, total.mean_kl, total.perplexity))
        for axes, value in ((left, total.mean_kl), (right, total.perplexity)):
            if axes is right or value > 0:  # KL is drawn on a log scale
                colour = colours[result.case.mode]
                face = "white" if edges else colour
                axes.plot(at, value, marker="o", ls="none", ms=8, color=colour, mfc=face, zorder=3)
    for mode, pair in points.items():
        for axes, index in ((left, 1), (right, 2)):
            shown = [(p[0], p[index]) for p in pair if axes is right or p[index] > 0]
            if shown:
                axes.plot(*zip(*shown, strict=True), color=colours[mode], lw=1)
                axes.annotate(mode, shown[0], (0, 9), textcoords="offset points", ha="center", color=colours[mode])
    dense = [r.total.perplexity for r in results if r.case.mode == "dense"]
    if dense:
        right.axhline(dense[0], color="0.5", ls="--", lw=1, zorder=0)
    left.plot([], [], "o", color="k", label="all layers packed")
    left.plot([], [], "o", color="k", mfc="white", label="first and last layers dense")
    left.set(xlabel="KV bytes a token (dense rows as bf16)", ylabel="mean KL(dense || mode), nats", yscale="log")
    right.set(xlabel="KV bytes a token (dense rows as bf16)", ylabel="perplexity")
    for axes in (left, right):
        axes.set_xscale("log")
        ticks = [p[0] for pair in points.values() for p in pair[:1]]
        axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks], rotation=45, fontsize=8)
        axes.minorticks_off() if axes is right else axes.xaxis.minorticks_off()
        axes.margins(0.12)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    for file in files:
        figure.savefig(file, dpi=150)
    pyplot.close(figure)


def records(
    results: Sequence[CaseResult], texts: Sequence[Text], *, model: str, chunk: int, command: str
) -> list[dict[str, Any]]:
    """One a case. ``value`` is the mean KL, ``spread`` that of the texts."""
    found = {result.case.name: result.total for result in results}
    fp8, dense = found.get("fp8"), found.get("dense")
    return [
        {
            "bench": "quality",
            "case": f"{model}-{result.case.name}",
            "value": total.mean_kl,
            "unit": "nats/token, KL(dense || mode)",
            "spread": [min(kls), max(kls)],
            "repeats": len(kls),
            "floor": 0.0,
            "floor_by": "a cache that loses nothing",
            "rival": "fp8 rows" if fp8 and result.case.mode.startswith("tq") else None,
            "rival_value": fp8.mean_kl if fp8 and result.case.mode.startswith("tq") else None,
            "rival_why": None if fp8 and result.case.mode.startswith("tq") else "none measured in this run",
            "error": None,
            "machine": f"{platform.machine()}, {psutil.cpu_count()} CPUs",
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": _commit(),
            "command": command,
            "kind": "measured",
            "top1_agreement": total.agreement,
            "perplexity": total.perplexity,
            "perplexity_dense": dense.perplexity if dense else None,
            "rows_read_packed_share": total.packed_share,
            "bytes_per_token": result.geometry.bytes_per_token,
            "bytes_per_token_bf16": bf16_bytes_per_token(result.geometry),
            "tail_bytes_per_sequence": result.geometry.tail_bytes,
            "predictions": total.predictions,
            "chunk": chunk,
            "texts": [text.name for text in texts],
            "threads": torch.get_num_threads(),
        }
        for result in results
        for total, kls in ((result.total, _kls(result)),)
    ]


def bf16_bytes_per_token(geometry: CacheGeometry) -> float:
    """Page bytes of a token when rows that stay dense are kept as bf16, as a GPU does it."""
    groups = (replace(g, regions=tuple(replace(r, dtype="bfloat16") for r in g.regions)) for g in geometry.groups)
    return replace(geometry, groups=tuple(groups)).bytes_per_token


def _kls(result: CaseResult) -> list[float]:
    return [tally.mean_kl for tally in result.texts if tally.predictions]


def _commit() -> str | None:
    """Of the source tree that runs; None for an installed package."""
    if not (ROOT / ".git").exists():
        return None
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or None
