"""`tailpack status` and `tailpack top`: what a cluster does, once or live."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # see router/cli.py

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from protos.cli_options import FiniteRange, HelpAllCommand
from protos.errors import ConfigError, TailpackError, Unavailable
from router.client import Tailpack
from router.cluster_view import History, Look, View, view
from router.connection_options import Connection, connection_options
from router.top_screen import duration, groups_table, screen, workers_table

RATES_S = 0.5  # between the two looks that a status takes its rates from
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@click.command(cls=HelpAllCommand)
@connection_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
def status(connection: Connection, as_json: bool) -> None:
    """Show once what a cluster does: workers, queues, KV pages and tails, rates now, latencies since the start.

    Exit status: 0 a worker is ready, 1 none is or the router does not answer.
    """
    with connection.blocking_client() as client:
        first = _look(client)
        time.sleep(RATES_S)
        second = _look(client)
    ever = view(second)
    shown = dataclasses.replace(view(second, first), ttft=ever.ttft, itl=ever.itl)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(shown)))
    else:
        _print(shown, connection.address)
    if not any(row.state == "ready" for row in shown.workers):
        sys.exit(1)


@click.command(cls=HelpAllCommand)
@connection_options
@click.option(
    "--interval", default=1.0, show_default=True, type=FiniteRange(0.2, 60), help="Seconds between two looks."
)
@click.option("--looks", type=click.IntRange(min=1), metavar="N", help="End after so many looks.")
def top(connection: Connection, interval: float, looks: int | None) -> None:
    """Watch a cluster: workers, sequences, queues, KV pages and tails, seal rates, prefix hits, tokens/s, TTFT and ITL.

    q or Ctrl-C ends it. A router that does not answer is asked again; the old numbers stay, and say so.
    """
    console = Console()
    if not console.is_terminal or not sys.stdin.isatty():
        raise ConfigError(
            "tailpack top needs a terminal", reason="NO_TERMINAL", hint="`tailpack status` prints the numbers once"
        )
    history, shown, problem = History(), None, ""
    with (
        connection.blocking_client() as client,
        _signals_end_it(),
        _keys() as ended,
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            began = time.monotonic()
            try:
                shown, problem = history.add(_look(client)), ""
            except TailpackError as error:
                if not isinstance(error, Unavailable):
                    raise
                problem = f"no answer from {connection.address}: {error.message}"
            looks = looks - 1 if looks is not None else None
            while True:  # a terminal that was resized is drawn anew before the next look
                live.update(_drawn(shown, history, connection.address, console, problem), refresh=True)
                left_s = began + interval - time.monotonic()
                if ended(max(0.0, min(left_s, 0.25))):
                    return
                if left_s <= 0.25:
                    break
            if looks == 0:
                return


def _look(client: Tailpack) -> Look:
    stats = client.stats()
    return Look(time.monotonic(), stats, client.list_workers(with_kv=True))


def _drawn(shown: View | None, history: History, address: str, console: Console, problem: str) -> Any:
    if shown is None:
        return Text(problem or "asking ...", style="bold red")
    return screen(shown, history, address, console.width, console.height, problem)


class _Ended(Exception):
    """A signal came. Raised where the main thread is; nothing it interrupts holds a lock of ours."""


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """Any of SIGNALS leaves the block in order, so that the terminal is as it was."""

    def end(number: int, frame: FrameType | None) -> None:
        raise _Ended

    before = {number: signal.signal(number, end) for number in SIGNALS}
    try:
        yield
    except _Ended:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _keys() -> Iterator[Any]:
    """Keys come one by one and unseen; yields a function that waits so many seconds and tells whether q was one."""
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def ended(seconds: float) -> bool:
        readable, _, _ = select.select([keyboard], [], [], seconds)
        if not readable:
            return False
        typed = os.read(keyboard, 64)
        return not typed or b"q" in typed.lower()

    try:
        tty.setcbreak(keyboard)
        yield ended
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _print(shown: View, address: str) -> None:
    console = Console()
    width = max(console.width, 80)
    totals = ", ".join(f"{count} {name}" for name, count in shown.totals.items())
    console.print(f"router {shown.router_id} at {address}, up {shown.uptime_s:.0f} s", highlight=False)
    console.print(
        f"  {shown.in_flight} in flight on {shown.streams} streams; since its start {totals}", highlight=False
    )
    console.print(
        f"  TTFT p50 {duration(shown.ttft.p50)}, p99 {duration(shown.ttft.p99)}; "
        f"ITL p50 {duration(shown.itl.p50)}, p99 {duration(shown.itl.p99)}",
        highlight=False,
    )
    hits = ", ".join(f"{count} {name}" for name, count in shown.prefix_hits.items())
    console.print(f"  prefix hits: {hits}\n", highlight=False)
    console.print(workers_table(shown.workers, width), width=width)
    for row in shown.workers:
        if row.why:
            console.print(f"  {row.worker_id} is {row.state}: {row.why}", markup=False, highlight=False)
    if shown.groups:
        console.print()
        console.print(groups_table(shown.groups, width), width=width)
    for worker, size in shown.grown_bytes.items():
        told = (
            f"{worker} holds {size >> 20} MiB that nobody in it owns, grown since it was ready; see `tailpack memory`"
        )
        console.print(told, style="bold red", markup=False, highlight=False)
    if shown.unknown_kv:
        console.print(f"No word of the KV of {', '.join(shown.unknown_kv)}", markup=False)
