"""`tailpack features`: what a running cluster was asked for, what of it is engaged, and what speaks for it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # see router/cli.py

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from protos import types_pb2
from protos.cli_options import HelpAllCommand
from router.connection_options import Connection, connection_options

OFF = ("", "off")


@dataclass(frozen=True)
class Feature:
    """One switch of one or more processes that agree about it. ``state``: "engaged", "off" or "not engaged"."""

    processes: tuple[str, ...]
    name: str
    configured: str
    engaged: str
    evidence: str

    @property
    def state(self) -> str:
        if self.engaged:
            return "engaged"
        return "off" if self.configured in OFF else "not engaged"


@click.command(cls=HelpAllCommand)
@connection_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object a switch instead of a table.")
def features(connection: Connection, as_json: bool) -> None:
    """Show what router and workers were asked for, what of it is engaged, and which recorded run speaks for it.

    Something that was asked for and does not run is marked "not engaged". Evidence is a file under tests/bench/results:
    "none" means that no run of it on this hardware is on record. `tailpack kernels verify` shows what archives hold.
    """
    with connection.blocking_client() as client:
        stats, workers = client.stats(), client.list_workers()
    told = [(stats.router_id, stats.switches)]
    told += [(worker.info.worker_id, worker.info.switches) for worker in workers if worker.HasField("info")]
    found = gathered(told)
    if as_json:
        for feature in found:
            click.echo(json.dumps({**asdict(feature), "state": feature.state}))
        return
    console = Console()
    console.print(_table(found))
    for worker in workers:
        if worker.state != "ready":
            console.print(
                f"worker {worker.info.worker_id or worker.address} is {worker.state}: {worker.why}", markup=False
            )


def gathered(told: Iterable[tuple[str, Sequence[types_pb2.Switch]]]) -> list[Feature]:
    """Switches of all processes, alike ones of several put together, in the order they were first told."""
    found: dict[tuple[str, str, str, str], list[str]] = {}
    for process, switches in told:
        for one in switches:
            found.setdefault((one.name, one.configured, one.engaged, one.evidence), []).append(process)
    return [Feature(tuple(processes), *key) for key, processes in found.items()]


def _table(found: Sequence[Feature]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("feature", "of", "asked for", "state", "what runs", "evidence"):
        table.add_column(name, overflow="fold", no_wrap=name in ("feature", "of"))
    style = {"engaged": "green", "off": "dim", "not engaged": "bold red"}
    for feature in found:
        table.add_row(
            feature.name,
            ", ".join(feature.processes),
            feature.configured or "-",
            Text(feature.state, style=style[feature.state]),
            feature.engaged or "-",
            feature.evidence or ("-" if feature.state == "off" else "none"),
        )
    return table
