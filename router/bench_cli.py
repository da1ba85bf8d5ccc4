"""`tailpack bench`: a running cluster under load."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

# gRPC's core writes lines of its own to stderr when a connection ends; read once, when grpc is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import click
from rich.console import Console
from rich.live import Live

from protos import rpc
from protos.cli_options import EXIT_INTERRUPTED, FiniteRange, advanced_option
from protos.errors import ConfigError, TailpackError
from router.answer_output import explained
from router.bench_load import Load, Run, run_load
from router.bench_plot import check_can_plot, plot
from router.bench_report import records, show
from router.bench_statistics import Mix
from router.client import PREFIX_REUSE, RetryPolicy
from router.connection_options import Connection, connection_options

SHOW_EVERY_S = 0.25
SAY_EVERY_S = 10.0


def mix(text: str) -> Mix:
    """click's type of a mix."""
    try:
        return Mix.parse(text)
    except TailpackError as error:
        raise click.BadParameter(str(error)) from None


_OUT = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.group(name="bench", invoke_without_command=True)
@click.option("--concurrency", type=click.IntRange(1, 4096), metavar="N", help="Closed loop: N callers. [default: 8]")
@click.option("--rate", type=FiniteRange(0, 1e5, min_open=True), metavar="R", help="Open loop: R requests/s.")
@click.option("--prompt-tokens", type=mix, default="128", show_default=True, metavar="MIX", help="Length of prompts.")
@click.option("--max-tokens", type=mix, default="64", show_default=True, metavar="MIX", help="Length of answers.")
@click.option(
    "--seconds",
    type=FiniteRange(0, 86400, min_open=True),
    metavar="S",
    help="Measure for so long. [default: 10]",
)
@click.option("--requests", type=click.IntRange(1, 10_000_000), metavar="N", help="Measure so many instead.")
@click.option(
    "--warmup-s",
    type=FiniteRange(0, 3600),
    default=2.0,
    show_default=True,
    help="Under load before, not measured.",
)
@click.option("--json", "json_file", type=_OUT, metavar="FILE", help="Write records, one JSON object a line.")
@click.option("--plot", "plot_file", type=_OUT, metavar="FILE", help="Write a picture (.png or .svg).")
@connection_options
@advanced_option("--seed", type=int, default=0, show_default=True, help="Of lengths, prompts and arrival times.")
@advanced_option("--model", default="", help="Which model, where several are served.")
@advanced_option("--label", metavar="NAME", help="Of the case in the records (default: from loop and lengths).")
@advanced_option(
    "--prefix-reuse",
    type=click.Choice(list(PREFIX_REUSE)),
    default="none",
    show_default=True,
    help="With others than none a second run with the same seed finds its prompts cached.",
)
@advanced_option(
    "--own-streams",
    is_flag=True,
    help="A stream for each request (Generate), not all in one session where the router has these.",
)
@advanced_option(
    "--drain-s",
    type=FiniteRange(0, 3600),
    default=30.0,
    show_default=True,
    help="Wait so long at the end for what runs; the rest is ended, as UNFINISHED.",
)
@advanced_option(
    "--timeout-s",
    type=FiniteRange(0, 86400, min_open=True),
    default=300.0,
    show_default=True,
    help="Deadline of each request.",
)
@click.pass_context
def bench_group(
    ctx: click.Context,
    /,
    connection: Connection,
    concurrency: int | None,
    rate: float | None,
    seconds: float | None,
    requests: int | None,
    json_file: Path | None,
    plot_file: Path | None,
    label: str | None,
    **options: Any,
) -> None:
    """Measure a running cluster under load.

    \b
    tailpack bench                                        8 callers, 10 seconds
    tailpack bench --rate 5 --seconds 60 --plot load.png
    tailpack bench --concurrency 32 --prompt-tokens 128:0.7,2048:0.3 --max-tokens 16:1,256:1

    In a closed loop (--concurrency) each caller sends its next request when the last is answered: it shows the most
    that a cluster does, but a slow cluster slows the callers too. In an open loop (--rate) requests arrive at random
    (Poisson) whatever the cluster does, as those of many people do: it shows what they wait. There a latency counts
    from when the request was due, also where it was sent late. Errors are not tried again, but counted by reason.

    A MIX is a number of tokens, or several with weights: 128:0.7,2048:0.3. Prompts are random token ids, so lengths
    are exact, and no two begin alike; answers go on to their full length.

    TTFT: from due to the first token. ITL: between the chunks of an answer, which hold a token or more. TPOT: from an
    answer's first token to its last, by token. Percentiles are within 0.25%. Ctrl-C ends it and prints what there is.

    Exit status: 0 measured, 1 error or not one answer, 2 wrong usage, 130 interrupted.
    """
    if ctx.invoked_subcommand is not None:
        return
    if concurrency and rate:
        raise click.UsageError("--concurrency is a closed loop, --rate an open one: give one of them")
    if seconds and requests:
        raise click.UsageError("--seconds or --requests bound the run: give one of them")
    if plot_file is not None:
        if json_file is not None and json_file.absolute() == plot_file.absolute():
            raise click.UsageError("--json and --plot name the same file: give each its own")
        check_can_plot(plot_file)
    for file in (json_file, plot_file):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError("its folder is not there", reason="BAD_PATH", given=file, hint="make it first")
    load = Load(
        concurrency=None if rate else concurrency or 8,
        rate=rate,
        seconds=None if requests else seconds or 10.0,
        requests=requests,
        **options,
    )
    try:
        run = rpc.run(_run(connection, load))
    except TailpackError as error:
        raise explained(error, connection.address, 0, None) from None
    show(run, Console(highlight=False))
    if json_file is not None:
        json_file.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in records(run, label)))
    if plot_file is not None:
        plot(run, plot_file, label)
    if run.interrupted:
        sys.exit(EXIT_INTERRUPTED)
    if not run.measured.num_answered:
        sys.exit(1)


async def _run(connection: Connection, load: Load) -> Run:
    """The load, with its progress on stderr, until it is through or Ctrl-C."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)  # a second Ctrl-C ends the process

    loop.add_signal_handler(signal.SIGINT, interrupt)
    seen: list[Run] = []
    once = RetryPolicy(max_retries=0)
    async with connection.client(once, session=not load.own_streams) as client, _progress(seen):
        return await run_load(client, load, stop, seen.append)


@contextlib.asynccontextmanager
async def _progress(seen: list[Run]) -> AsyncIterator[None]:
    """A line that changes at a terminal; elsewhere a line every ten seconds."""
    console = Console(stderr=True, highlight=False)
    live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None

    async def tell() -> None:
        tokens_before, before_s = 0, 0.0
        while True:
            await asyncio.sleep(SHOW_EVERY_S if live else SAY_EVERY_S)
            if not seen:
                continue
            run = seen[0]
            now_s, tokens = run.now_s(), run.measured.tokens_by_second.total()
            line = _line(run, (tokens - tokens_before) / (now_s - before_s))
            if now_s - before_s >= 1.0:
                tokens_before, before_s = tokens, now_s
            if live:
                live.update(line, refresh=True)
            else:
                console.print(line)

    task = asyncio.create_task(tell())
    with live or contextlib.nullcontext():
        try:
            yield
        finally:
            task.cancel()


def _line(run: Run, tokens_per_s: float) -> str:
    load, measured = run.load, run.measured
    now_s = run.now_s()
    if now_s < measured.begin_s:
        phase = f"warming up {now_s:.0f}/{measured.begin_s:g} s"
    elif measured.end_s is not None or (load.seconds is not None and now_s > measured.begin_s + load.seconds):
        phase = "waiting for the last answers"
    elif load.seconds is not None:
        phase = f"measuring {now_s - measured.begin_s:.0f}/{load.seconds:g} s"
    else:
        phase = f"measuring {measured.num_answered + measured.errors.total()}/{load.requests} requests"
    errors = f", {measured.errors.total()} errors" if measured.errors else ""
    ttft = f", TTFT p50 {measured.ttft.percentile(50) * 1e3:.0f} ms" if measured.ttft.count else ""
    return (
        f"{phase}: {run.num_in_flight} in flight, {measured.num_answered} answered{errors}, "
        f"{tokens_per_s:.0f} tokens/s{ttft}"
    )
