"""The screen of `tailpack top` and the tables of `tailpack status`: a View as rich text, cut to width and height."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from protos.errors import printable
from router.cluster_view import GroupRow, History, Quantiles, View, WorkerRow

BARS = " ▁▂▃▄▅▆▇█"
STATE_STYLE = {
    "ready": "green",
    "draining": "yellow",
    "connecting": "yellow",
    "lost": "bold red",
    "refused": "bold red",
}
WIDE = 110  # columns from which on a table has room for what is nice to know
ROOMY = 72  # below it a worker's name needs the room of a column
WIDEST = 140  # a wider table is hard to read along


def screen(view: View, history: History, address: str, width: int, height: int, problem: str = "") -> RenderableType:
    """Everything, in at most ``height`` lines of ``width`` columns. ``problem``: why the numbers are old."""
    parts: list[RenderableType] = [_title(view, address, width, problem), _traffic(view, history, width), Text()]
    left = height - 2 - 1 - 5  # a title and a last line; blank lines; traffic is four lines and the blank one below it
    # Half of what is left for each table, each with its header; one that needs less leaves it to the other.
    want_workers, want_groups = len(view.workers) + 2, len(view.groups) + 3
    for_groups = min(want_groups, max(left // 2, left - want_workers))
    parts.append(workers_table(view.workers, width, max(1, left - for_groups - 2)))
    parts.append(Text())
    parts.append(groups_table(view.groups, width, max(1, for_groups - 3)))
    parts.append(_kv_line(view, width))
    return Group(*parts, _line("q or Ctrl-C ends this", "dim", width))


def workers_table(rows: Sequence[WorkerRow], width: int, most: int = 1 << 30) -> Table:
    """One line a worker, those in trouble first where not all have room."""
    wide = width >= WIDE
    table = _table(width)
    table.add_column("worker", no_wrap=True, ratio=1)
    table.add_column("state", no_wrap=True)
    if wide:
        table.add_column("device", no_wrap=True, max_width=24)
        table.add_column("KV mode", no_wrap=True)
    roomy = width >= ROOMY
    names = ["run", "wait", *(["queued tok"] if roomy else []), "tok/s", *(["prompt tok/s", "step ms"] if wide else [])]
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("KV pages", no_wrap=True, justify="right")
    shown = sorted(rows, key=lambda row: row.state == "ready")[: _room(most, len(rows))] if len(rows) > most else rows
    for row in shown:
        known = row.state in ("ready", "draining")
        cells: list[str | Text] = [
            Text(printable(row.worker_id), overflow="ellipsis"),
            Text(row.state, style=STATE_STYLE.get(row.state, "")),
        ]
        if wide:
            cells += [row.device, row.kv_mode]
        numbers = [str(row.running), str(row.waiting), *([_count(row.queued_tokens)] if roomy else [])]
        numbers.append(_rate(row.tokens_per_s))
        if wide:
            numbers += [_rate(row.prompt_tokens_per_s), "-" if row.step_s is None else f"{row.step_s * 1e3:.1f}"]
        numbers.append(_share(row.pages_used, row.pages_total, 8 if wide else 4))
        cells += numbers if known else ["-"] * len(numbers)
        table.add_row(*cells)
    if len(shown) < len(rows):
        table.add_row(Text(f"... and {len(rows) - len(shown)} more", style="dim"))
    return table


def groups_table(rows: Sequence[GroupRow], width: int, most: int = 1 << 30) -> Table:
    """One line a layer group and mode, all workers together."""
    wide = width >= WIDE
    table = _table(width)
    table.add_column("layer group", no_wrap=True, ratio=1)
    table.add_column("mode", no_wrap=True)
    if wide:
        table.add_column("place", no_wrap=True)
        table.add_column("memory", no_wrap=True, justify="right")
    table.add_column("pages in use", no_wrap=True, justify="right")
    table.add_column("cached", no_wrap=True, justify="right")
    table.add_column("tails", no_wrap=True, justify="right")
    table.add_column("sealed/s", no_wrap=True, justify="right")
    if wide:
        table.add_column("relinked/s", no_wrap=True, justify="right")
    shown = rows[: _room(most, len(rows))]
    for row in shown:
        cells = [printable(row.group), row.mode]
        if wide:
            cells += [row.place, f"{row.num_bytes / (1 << 20):,.0f} MiB"]
        cells += [_share(row.pages_used, row.pages_total, 8 if wide else 4), _count(row.pages_cached)]
        cells += [f"{row.tails_used}/{row.tails_total}" if row.tails_total else "-", _rate(row.sealed_per_s)]
        if wide:
            cells.append(_rate(row.relinked_per_s))
        table.add_row(*cells)
    if len(shown) < len(rows):
        table.add_row(Text(f"... and {len(rows) - len(shown)} more", style="dim"))
    return table


def sparkline(values: Iterable[float], width: int) -> str:
    """The newest ``width`` values as bars, the tallest of them full height; spaces where there are none yet."""
    newest = list(values)[-width:] if width > 0 else []
    top = max(newest, default=0.0)
    bars = (BARS[round(value / top * (len(BARS) - 1))] if top > 0 else BARS[0] for value in newest)
    return "".join(bars).rjust(max(0, width))


def duration(seconds: float | None) -> str:
    """As people say it: 850 us, 12.3 ms, 4.56 s."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _title(view: View, address: str, width: int, problem: str) -> Text:
    states: dict[str, int] = {}
    for row in view.workers:
        states[row.state] = states.get(row.state, 0) + 1
    told = ", ".join(f"{count} {state}" for state, count in states.items()) or "none"
    line = _line(f"tailpack {address}  up {_uptime(view.uptime_s)}  workers: {told}", "bold", width)
    if problem:
        line = _line(f"{printable(problem)}  (the numbers below are old)", "bold red", width)
    return line


def _traffic(view: View, history: History, width: int) -> Table:
    grid = Table.grid(padding=(0, 2), expand=False)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, min_width=34)
    grid.add_column(no_wrap=True)
    curve = max(0, min(width, WIDEST) - 8 - 2 - 34 - 2)
    grid.add_row("requests", f"{view.in_flight} in flight, {_rate(view.requests_per_s)}/s", _totals(view.totals, curve))
    tokens = f"{_rate(view.tokens_per_s)}/s out, {_rate(view.prompt_tokens_per_s)}/s in"
    grid.add_row("tokens", tokens, Text(sparkline(history.tokens_per_s, curve), style="green"))
    grid.add_row("TTFT", _quantiles(view.ttft), Text(sparkline(history.ttft_s, curve), style="cyan"))
    grid.add_row("ITL", _quantiles(view.itl), Text(sparkline(history.itl_s, curve), style="cyan"))
    return grid


def _kv_line(view: View, width: int) -> Text:
    hits = view.prefix_hits
    told = (
        f"prefix hits {_count(hits['exact'])} exact, {_count(hits['inexact'])} inexact, {_count(hits['miss'])} missed"
    )
    told += f"; append {view.append_share:.1%}, seal {view.seal_share:.1%} of the time"
    if view.unknown_kv:
        told += f"; no word of the KV of {', '.join(map(printable, view.unknown_kv))}"
    for worker, size in view.grown_bytes.items():
        told += f"; {printable(worker)} holds {size >> 20} MiB that nobody owns"
    return _line(told, "", width)


def _totals(totals: dict[str, int], width: int) -> Text:
    told = [f"{_count(totals[name])} {name}" for name in ("finished", "cancelled", "failed", "rejected", "resumes")]
    while len(told) > 1 and len("  ".join(told)) > width:
        told.pop()
    return _line("  ".join(told), "dim", width)


def _line(text: str, style: str, width: int) -> Text:
    line = Text(text, style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def _table(width: int) -> Table:
    return Table(box=None, width=min(width, WIDEST), padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def _room(most: int, wanted: int) -> int:
    """Rows to show of those wanted: one line says how many are left out."""
    return wanted if wanted <= most else max(0, most - 1)


def _quantiles(quantiles: Quantiles) -> str:
    return f"p50 {duration(quantiles.p50)}, p99 {duration(quantiles.p99)}"


def _share(used: int, total: int, cells: int) -> str:
    if not total:
        return "-"
    filled = round(cells * used / total)
    return f"{'█' * filled}{'░' * (cells - filled)} {_count(used)}/{_count(total)}"


def _count(value: int) -> str:
    if value < 100_000:
        return str(value)
    return f"{value / 1e3:.0f}k" if value < 10_000_000 else f"{value / 1e6:.0f}M"


def _rate(value: float) -> str:
    if value < 10:
        return f"{value:.1f}"
    return f"{value:.0f}" if value < 100_000 else _count(round(value))


def _uptime(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02}h"
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
