"""A load test's outcome as a picture: distributions of the latencies, and what happened second by second."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from protos.errors import ConfigError
from router.bench_load import Run
from router.bench_report import name
from router.bench_statistics import Durations


def check_can_plot(file: Path) -> None:
    """Before a load test that takes minutes. Raises ConfigError: NOT_INSTALLED, BAD_PLOT (a name without a form)."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs matplotlib", reason="NOT_INSTALLED", hint="install it with `pip install 'tailpack[plots]'`"
        )
    from matplotlib.backend_bases import FigureCanvasBase

    if file.suffix[1:].lower() not in FigureCanvasBase.filetypes:
        raise ConfigError(
            "the plot cannot be written", reason="BAD_PLOT", given=file, allowed="a name that ends with .png or .svg"
        )


def plot(run: Run, file: Path, title: str | None) -> None:
    """Writes the picture; its form follows from the file's name, which check_can_plot has seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    measured, load = run.measured, run.load
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    loop = f"closed loop of {load.concurrency}" if load.concurrency else f"open loop at {load.rate:g} requests/s"
    cut = ", interrupted" if run.interrupted else ""
    figure.suptitle(
        f"{title or name(run)}: {run.model.name}, {loop}{cut}\n"
        f"tokens of prompts {load.prompt_tokens}, of answers {load.max_tokens}",
        fontsize=11,
    )
    first, second = axes[0]
    _distribution(
        first, {"first token (TTFT)": measured.ttft, "whole answer": measured.e2e}, "Latency (dots: p50, p90, p99)"
    )
    _distribution(
        second, {"between chunks (ITL)": measured.itl, "per token (TPOT)": measured.tpot}, "Pace (dots: p50, p90, p99)"
    )
    _by_second(run, *axes[1])
    try:
        figure.savefig(file, dpi=110)
    finally:
        pyplot.close(figure)


def _distribution(axis: Any, curves: dict[str, Durations], title: str) -> None:
    """Share of requests, or of chunks, that took at most so long."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for label, durations in curves.items():
        if not durations.count:
            continue
        points = list(durations.cumulated())
        xs = [durations.min_s * 1e3, *(duration_s * 1e3 for duration_s, _ in points)]
        ys = [0.0, *(seen / durations.count for _, seen in points)]
        (line,) = axis.step(xs, ys, where="post", label=label)
        marks = [durations.percentile(q) * 1e3 for q in (50, 90, 99)]
        axis.plot(marks, [0.5, 0.9, 0.99], "o", color=line.get_color(), markersize=4)
    axis.set(title=title, xlabel="milliseconds", ylabel="share at most as long", ylim=(0, 1.02))
    if axis.lines:
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda ms, _: f"{ms:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.legend(loc="lower right", fontsize=9)
    else:
        axis.text(0.5, 0.5, "nothing measured", ha="center", transform=axis.transAxes)
    axis.grid(True, which="both", alpha=0.25)


def _by_second(run: Run, tokens: Any, requests: Any) -> None:
    measured = run.measured
    counted = (
        measured.tokens_by_second,
        measured.ended_by_second,
        measured.errors_by_second,
        measured.in_flight_by_second,
    )
    last = max((second for counts in counted for second in counts), default=0)
    seconds = range(last + 1)
    middles = [second + 0.5 for second in seconds]
    tokens.bar(middles, [measured.tokens_by_second[second] for second in seconds], width=0.9)
    tokens.set(title="Output tokens each second", xlabel="seconds", ylabel="tokens")
    requests.bar(middles, [measured.ended_by_second[second] for second in seconds], width=0.9, label="answered")
    errors = [measured.errors_by_second[second] for second in seconds]
    if any(errors):
        below = [measured.ended_by_second[second] for second in seconds]
        requests.bar(middles, errors, width=0.9, bottom=below, color="tab:red", label="not answered")
    held = [measured.in_flight_by_second.get(second) for second in seconds]
    points = [(middle, count) for middle, count in zip(middles, held, strict=True) if count is not None]
    if points:
        requests.plot(*zip(*points, strict=True), color="black", linewidth=1, label="in flight, most")
    requests.set(title="Requests each second", xlabel="seconds", ylabel="requests")
    requests.yaxis.get_major_locator().set_params(integer=True)
    for axis in (tokens, requests):
        axis.axvspan(0, measured.begin_s, color="grey", alpha=0.2, label="not measured")
        if measured.end_s is not None and measured.end_s < last + 1:
            axis.axvspan(measured.end_s, last + 1, color="grey", alpha=0.2)
        axis.set_xlim(0, last + 1)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=9)
        axis.grid(True, axis="y", alpha=0.25)
