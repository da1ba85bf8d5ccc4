"""``tailpack kvstore``: run a store, look into one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from kvstore import client
from kvstore.attachments import DEFAULT_HEARTBEAT_TIMEOUT_S, DEFAULT_ORPHAN_TIMEOUT_S
from kvstore.server import SOCKET_NAME, serve
from kvstore.weights import DEFAULT_GRACE_S
from protos import kvstore_pb2, logs, rpc
from protos.cli_options import HelpAllCommand, advanced_option
from protos.health import health_option
from protos.metrics import OFF
from protos.tls_options import server_tls, server_tls_options


@click.group("kvstore")
def kvstore_group() -> None:
    """The KV store: owns the cache memory of this machine's workers."""


@kvstore_group.command("serve", cls=HelpAllCommand)
@click.option(
    "--socket-dir",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder of the store's sockets.",
)
@click.option(
    "--memory-limit", type=click.IntRange(min=1), metavar="BYTES", help="Most memory for all arenas together."
)
@advanced_option(
    "--metrics", default=OFF, show_default=True, metavar="HOST:PORT", help="Where Prometheus finds /metrics, or none."
)
@health_option
@advanced_option(
    "--heartbeat-timeout",
    type=click.FloatRange(min=1.0),
    default=DEFAULT_HEARTBEAT_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="A worker that is silent for so long is killed: it may hang, and maps the memory.",
)
@advanced_option(
    "--orphan-timeout",
    type=click.FloatRange(min=0.0),
    default=DEFAULT_ORPHAN_TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="Sequences of a worker that died wait so long for the next one.",
)
@advanced_option(
    "--weights-grace",
    type=click.FloatRange(min=0.0),
    default=DEFAULT_GRACE_S,
    show_default=True,
    metavar="SECONDS",
    help="A model's weights that no worker uses are kept so long for the next one.",
)
@server_tls_options
@advanced_option("--log-json/--log-text", default=None, help="Form of the log; default: text at a terminal, else JSON.")
def serve_command(
    socket_dir: Path,
    memory_limit: int | None,
    metrics: str,
    health: str,
    heartbeat_timeout: float,
    orphan_timeout: float,
    weights_grace: float,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    log_json: bool | None,
) -> None:
    """Run a store until SIGTERM or Ctrl-C. TLS is of its metrics: all else is on unix sockets of its user.

    Prints one JSON line on stdout when it is ready.
    """
    logs.configure("kvstore", log_json)

    def ready(address: str, metrics_url: str | None) -> None:
        print(json.dumps({"ready": True, "socket": address, "metrics": metrics_url}), flush=True)

    tls = server_tls(tls_cert, tls_key, tls_client_ca)
    rpc.run(
        serve(
            socket_dir,
            memory_limit=memory_limit,
            on_ready=ready,
            metrics=metrics,
            metrics_tls=tls,
            health=health,
            heartbeat_timeout_s=heartbeat_timeout,
            orphan_timeout_s=orphan_timeout,
            weights_grace_s=weights_grace,
        )
    )


@kvstore_group.command("stats", cls=HelpAllCommand)
@click.option(
    "--kv-socket",
    "--socket-dir",
    "store",
    required=True,
    metavar="PATH",
    help="The store's socket, also as unix:PATH, or its folder.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def stats_command(store: str, as_json: bool) -> None:
    """Show who is attached and where the pages are."""
    response = client.stats(socket_of(store))
    if as_json:
        click.echo(json.dumps(_as_json(response)))
    else:
        _print_tables(response)


def socket_of(store: str) -> Path:
    """The store's socket, of its path, ``unix:PATH`` or the folder it is in."""
    path = Path(store.removeprefix("unix:")).absolute()
    return path / SOCKET_NAME if path.is_dir() else path


def _print_tables(response: kvstore_pb2.KvStatsResponse) -> None:
    console = Console()
    console.print(f"kvstore {response.store_incarnation}, up {response.uptime_ns / 1e9:.0f} s")
    for weights in response.weights:
        console.print(
            f"weights of {weights.model}: {weights.num_bytes >> 20:,} MiB in {weights.memory}, used by {weights.users}"
        )
    if not response.devices:
        console.print("no worker has attached yet: no memory is taken for KV")
    for device in response.devices:
        console.print(
            f"\n{device.device}: {device.memory} memory, {device.worker_id or 'nobody'} attached, "
            f"epoch {device.epoch}, {device.sequences} of {device.max_sequences} sequences, "
            f"{device.orphans} of them without a worker, "
            f"geometry {device.geometry_digest.hex()}"
        )
        table = Table("group", "mode", box=None)
        for column in ("B/token", "pages", "free", "promised", "open", "sealed", "cached", "tails", "MiB"):
            table.add_column(column, justify="right")
        for g in device.groups:
            counts = (g.pages_total, g.pages_free, g.pages_promised, g.pages_open, g.pages_sealed, g.pages_cached)
            numbers = [f"{count:,}" for count in (*counts, g.tail_slots_used, g.arena_bytes >> 20)]
            kept = "" if g.retention == "all" else f"keeps {g.retention}"
            mode = " ".join(filter(None, (g.mode, g.preset, kept)))
            table.add_row(g.group, mode, f"{g.bytes_per_token:,.0f}", *numbers)
        console.print(table)
        sealed_ever = sum(group.pages_sealed_ever for group in device.groups)
        console.print(
            f"pages sealed ever {sealed_ever:,}; prefix reuse: {device.prefix_hits_exact:,} exact, "
            f"{device.prefix_hits_inexact:,} inexact, {device.prefix_misses:,} missed, "
            f"{device.prefix_tokens_reused:,} tokens; checkpoints {device.checkpoints} of {device.checkpoint_slots}; "
            f"truncates {device.truncates_exact:,} exact, {device.truncates_deep:,} deep; forks {device.forks:,}; "
            f"sequences adopted {device.sequences_adopted:,}, given up {device.orphans_released:,}; "
            f"suspects killed {device.suspects_killed:,}"
        )


def _as_json(message: Message) -> dict[str, object]:
    """The message's fields by their own names, 64-bit integers as numbers and digests in hex (as the logs print
    them).
    """
    fields: dict[str, object] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None:
            fields[field.name] = [_as_json(item) for item in value]  # every message field of the stats is repeated
        else:
            fields[field.name] = value.hex() if isinstance(value, bytes) else value
    return fields


if __name__ == "__main__":
    from protos.cli import main

    main(["kvstore", *sys.argv[1:]])
