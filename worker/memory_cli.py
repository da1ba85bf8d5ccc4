"""``tailpack memory``: what takes memory, by owner, as the workers and their kvstores tell it."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import grpc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvstore import client
from protos import kvstore_pb2, router_pb2, router_pb2_grpc, rpc, worker_pb2, worker_pb2_grpc
from protos.cli_options import HelpAllCommand
from protos.errors import DeadlineExceeded, Unavailable
from protos.tls import ClientTls
from protos.tls_options import client_tls, client_tls_options
from protos.token_option import read_token, token_option
from worker.memory_plan import UNKNOWN

TIMEOUT_S = 5.0
HOST = "host"
COLOURS = ("blue", "cyan", "green", "magenta", "yellow", "bright_blue", "bright_cyan", "bright_green", "bright_magenta")
UNKNOWN_COLOUR, OTHER_COLOUR, FREE_COLOUR = "bright_red", "white", "bright_black"
SHARE_CELLS = 24


@dataclass(frozen=True)
class Use:
    """``holder``: the worker; or, of what its store holds, the device of KV memory, the model of weights."""

    holder: str
    owner: str
    num_bytes: int
    planned_bytes: int = 0


@dataclass
class Place:
    """One memory of one machine. Of a GPU all is known: ``total_bytes`` = uses + ``other_bytes`` + ``free_bytes``."""

    host: str
    memory: str
    uses: list[Use] = field(default_factory=list)
    total_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def known_bytes(self) -> int:
        return sum(use.num_bytes for use in self.uses)

    @property
    def other_bytes(self) -> int | None:
        """Told by nobody: other programs, and kvstores that were not asked."""
        if self.total_bytes is None or self.free_bytes is None:
            return None
        return max(0, self.total_bytes - self.free_bytes - self.known_bytes)


@click.command(cls=HelpAllCommand)
@click.option(
    "--router", default="127.0.0.1:7700", show_default=True, metavar="HOST:PORT", help="Whose workers to ask."
)
@click.option("--worker", "workers", multiple=True, metavar="HOST:PORT", help="Ask this one instead; repeatable.")
@token_option
@client_tls_options
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def memory(
    router: str,
    workers: tuple[str, ...],
    token_file: Path | None,
    tls_ca: Path | None,
    tls_client_cert: Path | None,
    tls_client_key: Path | None,
    tls_server_name: str | None,
    as_json: bool,
) -> None:
    """Show what takes memory, by owner: weights, workspaces, KV pages and tails, on hosts and GPUs.

    "unknown" is what a worker holds beside all of its owners, grown since it was ready: 0 on a GPU, and little on a
    host. "planned" is what the start-up budget has for an owner at most. A kvstore is asked through its socket, so only
    those on this machine are in the answer.
    """
    silent: dict[str, str] = {}
    tls = client_tls(tls_ca, tls_client_cert, tls_client_key, tls_server_name)
    if workers:
        infos = [_info(address, tls) for address in workers]
    else:
        infos, silent = _infos_of(router, read_token(token_file), tls)
    here = platform.node()
    sockets = dict.fromkeys(info.memory.kv_socket for info in infos if info.memory.host == here)
    places = gathered(infos, {here: [client.stats(Path(socket)) for socket in sockets if socket]})
    missing = sorted({info.memory.host for info in infos} - {here})
    if as_json:
        answer = {"places": [_as_json(place) for place in places], "stores_not_asked_on": missing}
        click.echo(json.dumps({**answer, "workers_without_answer": silent}))
        return
    console = Console()
    for place in places:
        console.print(_table(place))
        console.print(_picture(place, min(console.width, 100)))
        console.print()
    if missing:
        console.print(f"The kvstores of {', '.join(missing)} are not on this machine and were not asked.")
    for address, why in silent.items():
        console.print(f"Not in the answer: worker {address}, {why}", markup=False)


def gathered(
    workers: Iterable[worker_pb2.InfoResponse], stores: dict[str, Sequence[kvstore_pb2.KvStatsResponse]]
) -> list[Place]:
    """All uses by the memory they are of, hosts first. ``stores``: by the name of their machine."""
    places: dict[tuple[str, str], Place] = {}

    def add(host: str, memory: str, use: Use) -> Place:
        place = places.setdefault((host, memory), Place(host, memory))
        place.uses.append(use)
        return place

    for answer in workers:
        told = answer.memory
        for use in told.uses:
            one = Use(answer.info.worker_id, use.owner, use.num_bytes, use.planned_bytes)
            place = add(told.host, use.memory, one)
            if use.memory != HOST:
                place.total_bytes, place.free_bytes = told.gpu_total_bytes, told.gpu_free_bytes
    for host, answers in stores.items():
        for weights in (weights for answer in answers for weights in answer.weights):
            memory = HOST if weights.memory.startswith(HOST) else weights.memory
            add(host, memory, Use(weights.model, weights.form or "weights", weights.num_bytes))
        for device in (device for answer in answers for device in answer.devices):
            arenas = device.device if device.memory == "device" else HOST
            for group in device.groups:
                pages, tails = group.pages_total * group.page_bytes, group.tail_slots_total * group.tail_slot_bytes
                for owner, size in (
                    (f"pages {group.group}", pages),
                    (f"tails {group.group}", tails),
                    (f"rounding {group.group}", group.arena_bytes - pages - tails),
                ):
                    if size:
                        add(host, arenas, Use(device.device, owner, size))
            add(host, HOST, Use(device.device, "control block", device.control_bytes))
    return sorted(places.values(), key=lambda place: (place.host, place.memory != HOST, place.memory))


def _infos_of(
    router: str, token: str | None, tls: ClientTls | None
) -> tuple[list[worker_pb2.InfoResponse], dict[str, str]]:
    """The answers of ``router``'s workers, and why each of the others gave none, by address."""
    with _asking("router", router, tls) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        request, metadata = router_pb2.ListWorkersRequest(), rpc.metadata(token=token)
        known = stub.ListWorkers(request, timeout=TIMEOUT_S, metadata=metadata).workers
    infos: list[worker_pb2.InfoResponse] = []
    silent: dict[str, str] = {}
    for worker in known:
        if worker.state not in ("ready", "draining"):
            silent[worker.address] = f"{worker.state}: {worker.why}" if worker.why else worker.state
            continue
        try:
            infos.append(_info(worker.address, tls))
        except Unavailable as error:  # it ended a moment ago; the others are still worth showing
            silent[worker.address] = str(error)
    return infos, silent


def _info(address: str, tls: ClientTls | None) -> worker_pb2.InfoResponse:
    with _asking("worker", address, tls) as channel:
        return worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest(with_memory=True), timeout=TIMEOUT_S)


@contextmanager
def _asking(what: str, address: str, tls: ClientTls | None) -> Iterator[grpc.Channel]:
    """Raises Unavailable with the address, or whatever else the call came to."""
    with rpc.sync_channel(address, tls=tls) as channel:
        try:
            yield channel
        except grpc.RpcError as failure:
            error = rpc.error_from(failure)
            if isinstance(error, Unavailable | DeadlineExceeded):
                hint = f"{error.message}; name another with --{what}"
                raise Unavailable(f"no {what} answers", given=address, hint=hint) from failure
            raise error from failure


def _as_json(place: Place) -> dict[str, Any]:
    return {**asdict(place), "known_bytes": place.known_bytes, "other_bytes": place.other_bytes}


def _parts(place: Place) -> list[tuple[Use, str]]:
    """Every part of a place and its colour; those that nobody of ours has, last."""
    colours = itertools.cycle(COLOURS)
    parts = [(use, UNKNOWN_COLOUR if use.owner == UNKNOWN else next(colours)) for use in place.uses]
    if place.total_bytes is not None:
        parts.append((Use("", "other programs, stores not asked", place.other_bytes or 0), OTHER_COLOUR))
        parts.append((Use("", "free", place.free_bytes or 0), FREE_COLOUR))
    return parts


def _picture(place: Place, width: int) -> Text:
    """One bar of all that there is; a part that is there has at least half a cell."""
    parts = [(use.num_bytes, colour) for use, colour in _parts(place) if use.num_bytes]
    total = sum(size for size, _ in parts)
    bar, seen = Text(), 0
    halves: list[str] = []
    for size, colour in parts:
        seen += size
        until = max(len(halves) + 1, round(2 * width * seen / total))
        halves += [colour] * (until - len(halves))
    for left, right in zip(halves[::2], halves[1::2] or [""], strict=False):
        bar.append("▌" if left != right else "█", style=f"{left} on {right}" if left != right and right else left)
    return bar


def _table(place: Place) -> Table:
    planned = any(use.planned_bytes for use in place.uses)
    table = Table("", "of", "owner", box=None, title=f"{place.memory} of {place.host}", title_justify="left")
    table.add_column("MiB", justify="right")
    table.add_column("share", min_width=SHARE_CELLS)
    if planned:
        table.add_column("planned MiB", justify="right")
    total = sum(use.num_bytes for use, _ in _parts(place)) or 1
    for use, colour in _parts(place):
        share = Text(_bar(use.num_bytes / total), style=colour)
        plan = [_mib(use.planned_bytes) if use.planned_bytes else ""] if planned else []
        table.add_row(Text("■", style=colour), use.holder, use.owner, _mib(use.num_bytes), share, *plan)
    table.add_row("", "", "together", _mib(total))
    return table


def _bar(share: float) -> str:
    cells, eighths = divmod(round(8 * SHARE_CELLS * share), 8)
    return "█" * cells + "▏▎▍▌▋▊▉"[eighths - 1 : eighths or None] * (eighths > 0)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f}"
