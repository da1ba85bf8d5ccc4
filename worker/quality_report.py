"""What ``tailpack quality`` found, as records, and those as a table and as a plot."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
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


Record = Mapping[str, Any]


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
            "mode": result.case.mode,
            "edges": list(result.case.edges),
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


def table(lines: Sequence[Record], title: str) -> Table:
    """A row a record; narrow enough for 80 columns."""
    caption = (
        "packed: K and V rows read that were records. KL(dense || mode): nats a token, mean and worst text. "
        "bytes: KV pages a token, as run and with dense rows as bf16."
    )
    made = Table(
        title=title, caption=caption, caption_justify="left", box=None, padding=(0, 1, 0, 0), header_style="dim"
    )
    for head in ("mode", "edges"):
        made.add_column(head, no_wrap=True)
    for head in ("bytes", "bf16", "packed", "top-1", "mean KL", "worst KL", "perplexity"):
        made.add_column(head, justify="right", no_wrap=True)
    for line in lines:
        made.add_row(
            line["mode"],
            "{}+{}".format(*line["edges"]) if any(line["edges"]) else "-",
            f"{line['bytes_per_token']:,.0f}",
            f"{line['bytes_per_token_bf16']:,.0f}",
            f"{line['rows_read_packed_share']:.1%}",
            f"{line['top1_agreement']:.2%}",
            f"{line['value']:.5f}",
            f"{line['spread'][1]:.5f}",
            f"{line['perplexity']:.3f}",
        )
    return made


def plot(lines: Sequence[Record], title: str, files: Sequence[Path]) -> None:
    """Draws into ``files``; the format follows from each name. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    figure.suptitle(title)
    modes = [*dict.fromkeys(line["mode"] for line in lines)]
    for panel, key in zip(axes, ("value", "perplexity"), strict=True):
        for index, mode in enumerate(modes):
            # A divergence of 0 has no place on a log scale.
            mine = [line for line in lines if line["mode"] == mode and (key != "value" or line[key] > 0)]
            for line in mine:
                face = "white" if any(line["edges"]) else f"C{index}"
                panel.plot(line["bytes_per_token_bf16"], line[key], "o", ms=8, color=f"C{index}", mfc=face, zorder=3)
            if mine:
                places = [(line["bytes_per_token_bf16"], line[key]) for line in mine]
                panel.plot(*zip(*places, strict=True), color=f"C{index}", lw=1)
                panel.annotate(
                    mode, places[0], (-4, 9), textcoords="offset points", ha="right", color=f"C{index}", fontsize=9
                )
        ticks = [line["bytes_per_token_bf16"] for line in lines if not any(line["edges"])]
        panel.set(xscale="log", xlabel="KV bytes a token (dense rows as bf16)")
        panel.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks], rotation=60, fontsize=8)
        panel.xaxis.minorticks_off()
        panel.margins(0.15)
        panel.grid(alpha=0.3)
    left, right = axes
    left.set(ylabel="mean KL(dense || mode), nats", yscale="log")
    right.set(ylabel="perplexity")
    for line in lines:
        if line["mode"] == "dense":
            right.axhline(line["perplexity"], color="0.5", ls="--", lw=1, zorder=0)
    left.plot([], [], "o", color="k", label="all layers packed")
    left.plot([], [], "o", color="k", mfc="white", label="first and last layers dense")
    left.legend(fontsize=8)
    for file in files:
        figure.savefig(file, dpi=150)
    pyplot.close(figure)


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
