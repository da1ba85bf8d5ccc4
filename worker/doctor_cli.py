"""``tailpack doctor``: looks at a running deployment, from a router's pod, a worker's pod or the machine of `up`."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # see router/cli.py

import click
import grpc

from kvstore import client
from kvstore.memory_limit import cgroup_limit
from protos import kvstore_pb2, router_pb2, router_pb2_grpc, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.cli_options import HelpAllCommand, advanced_option
from protos.errors import TailpackError, Unauthenticated
from protos.tls import EXPIRES_SOON_S, ClientTls, ServerCertificate, ServerTls
from protos.tls_options import client_tls, client_tls_options, server_tls, server_tls_options
from protos.token_option import read_token, token_option
from protos.version import release
from worker import doctor as checks
from worker.doctor import FAIL, OK, SKIPPED, UNKNOWN, WARN, Finding

TIMEOUT_S = 5.0
SOCKETS = ("kvstore.sock", "kvstore-fds.sock")
_COLOURS = {OK: "green", WARN: "yellow", FAIL: "red", UNKNOWN: "magenta", SKIPPED: "bright_black"}


@dataclasses.dataclass(frozen=True)
class Local:
    """What of a deployment is on this machine (in this pod): workers' infos, and the store's socket."""

    infos: tuple[types_pb2.WorkerInfo, ...]
    kv_socket: Path | None


@click.command(cls=HelpAllCommand)
@click.option(
    "--router",
    default="127.0.0.1:7700",
    show_default=True,
    metavar="HOST:PORT",
    help="Or unix:PATH, the local socket of `tailpack up`.",
)
@click.option(
    "--worker",
    "asked_workers",
    multiple=True,
    metavar="HOST:PORT",
    help="Ask this one, and no router; repeatable. For workers' pods, which may not call routers.",
)
@token_option
@client_tls_options
@advanced_option("--worker-server-name", help="The name in workers' certificates, if not their address's host.")
@click.option("--kv-socket", type=click.Path(path_type=Path), help="The kvstore's.  [default: as workers here tell it]")
@click.option("--gpus", type=click.IntRange(min=0), help="How many must be here.  [default: as workers here use]")
@click.option("--tokens", type=click.Path(path_type=Path), metavar="FILE", help="Look at a router's tokens file.")
@server_tls_options
@click.option("--resolve", multiple=True, metavar="NAME", help="A name that must have an address; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def doctor(
    router: str,
    asked_workers: tuple[str, ...],
    token_file: Path | None,
    tls_ca: Path | None,
    tls_client_cert: Path | None,
    tls_client_key: Path | None,
    tls_server_name: str | None,
    worker_server_name: str | None,
    kv_socket: Path | None,
    gpus: int | None,
    tokens: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    resolve: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check a running deployment, and say what to do about what is wrong.

    Router, workers, digests and versions are looked at from a router's pod or a caller's; store, memory and GPUs where
    they are: run it in a worker's pod too (--worker), in its kvstore container, whose memory limit is what counts.

    Exit status: 0 nothing is wrong, 1 something is, 2 nothing is known to be, but something could not be looked at.
    """
    for address in asked_workers or (router,):
        if not address.startswith("unix:"):
            checks.host_and_port(address)  # raises ConfigError
    findings: list[Finding] = []
    try:
        tls = client_tls(tls_ca, tls_client_cert, tls_client_key, tls_server_name)
    except TailpackError as broken:
        tls = None
        findings.append(Finding("client certificate", FAIL, str(broken), "see the options --tls-*"))
    findings += names("" if asked_workers else router, resolve)
    of_workers = dataclasses.replace(tls, server_name=worker_server_name or tls.server_name) if tls else None
    local, told_versions = Local((), kv_socket), dict[str, str]()
    if asked_workers:
        local, told_versions, found = workers_alone(asked_workers, of_workers, kv_socket)
        findings += found
    else:
        findings += door(router, tls)
        known, told_versions, found = cluster(router, read_token(token_file), tls)
        findings += found
        if known is not None:
            local, found = here(known, of_workers, kv_socket)
            findings += found
    findings += store(local, told_versions)
    if told_versions:
        findings.append(checks.versions({"this command": release(), **told_versions}))
    findings += machine(local, gpus)
    findings += files(server_tls(tls_cert, tls_key, tls_client_ca), tokens)
    show(findings, as_json)
    sys.exit(checks.exit_status(findings))


def names(router: str, others: tuple[str, ...]) -> Iterator[Finding]:
    """Of every name that is not an address already."""
    hosts = [] if not router or router.startswith("unix:") else [checks.host_and_port(router)[0]]
    for name in dict.fromkeys([*hosts, *others]):
        try:
            ipaddress.ip_address(name)
        except ValueError:
            yield checks.resolves(name)


def door(router: str, tls: ClientTls | None) -> Iterator[Finding]:
    if router.startswith("unix:"):
        return
    yield checks.reachable(router, "router's port")
    if tls is not None:
        yield checks.certificate(router, tls, "router's certificate")


def cluster(
    router: str, token: str | None, tls: ClientTls | None
) -> tuple[list[router_pb2.WorkerStatus] | None, dict[str, str], list[Finding]]:
    """The router's workers (None: it does not say), releases by who told them, and what is wrong."""
    tls = None if router.startswith("unix:") else tls
    metadata = rpc.metadata(token=token)
    try:
        with rpc.sync_channel(router, tls=tls) as channel:
            stub = router_pb2_grpc.RouterStub(channel)
            stats = stub.Stats(router_pb2.StatsRequest(), timeout=TIMEOUT_S, metadata=metadata)
            request = router_pb2.ListWorkersRequest()
            workers = list(stub.ListWorkers(request, timeout=TIMEOUT_S, metadata=metadata).workers)
    except grpc.RpcError as failure:
        error = rpc.error_from(failure)
        do = "give a token: --token-file" if isinstance(error, Unauthenticated) else "does it run? see its log"
        return None, {}, [Finding("router", FAIL, f"{router}: {error}", do)]
    infos = [worker.info for worker in workers if worker.HasField("info")]
    versions = {f"router {stats.router_id}": stats.version, **{info.worker_id: info.version for info in infos}}
    up_s = stats.uptime_ns / 1e9
    findings = [Finding("router", OK, f"{stats.router_id}, up {up_s:.0f} s, {stats.in_flight} requests in flight")]
    findings += checks.workers_ready([(worker.address, worker.state, worker.why) for worker in workers])
    findings += checks.workers_agree(infos)
    return workers, versions, findings


def here(
    workers: list[router_pb2.WorkerStatus], tls: ClientTls | None, kv_socket: Path | None
) -> tuple[Local, list[Finding]]:
    """Asks each worker which machine it is on; looks at its certificate."""
    answers, findings = [], []
    for worker in workers:
        if worker.state in ("ready", "draining"):
            answer, found = worker_at(worker.address, tls, silent=SKIPPED)
            answers += [answer] if answer else []
            findings += found
    return _local(answers, kv_socket), findings


def workers_alone(
    addresses: tuple[str, ...], tls: ClientTls | None, kv_socket: Path | None
) -> tuple[Local, dict[str, str], list[Finding]]:
    """What workers tell of themselves, without a router; as ``here``, and their releases."""
    answers, findings = [], []
    for address in addresses:
        answer, found = worker_at(address, tls, silent=FAIL)
        answers += [answer] if answer else []
        findings += found
    infos = [answer.info for answer in answers]
    if infos:
        findings += [Finding("workers", OK, f"{', '.join(info.worker_id for info in infos)} answer")]
        findings += checks.workers_agree(infos)
    return _local(answers, kv_socket), {info.worker_id: info.version for info in infos}, findings


def worker_at(
    address: str, tls: ClientTls | None, *, silent: str
) -> tuple[worker_pb2.InfoResponse | None, list[Finding]]:
    """What a worker answers. ``silent``: status where it does not: a NetworkPolicy that lets in routers alone, where a
    router tells that it is ready, is as it should be.
    """
    findings = [checks.certificate(address, tls, "worker's certificate")] if tls is not None else []
    try:
        with rpc.sync_channel(address, tls=tls) as channel:
            request = worker_pb2.InfoRequest(with_memory=True)
            return worker_pb2_grpc.WorkerStub(channel).Info(request, timeout=TIMEOUT_S), findings
    except grpc.RpcError as failure:
        why = f"{address} does not answer here: {rpc.error_from(failure).message}"
        do = "does it run, and has this the certificate that it demands? see its log"
        if silent == SKIPPED:
            findings = []
        return None, [*findings, Finding("worker's port", silent, why, do)]


def _local(answers: list[worker_pb2.InfoResponse], kv_socket: Path | None) -> Local:
    ours = [answer for answer in answers if answer.memory.host == platform.node()]
    if kv_socket is None and ours:
        kv_socket = Path(ours[0].memory.kv_socket)
    return Local(tuple(answer.info for answer in ours), kv_socket)


def store(local: Local, versions: dict[str, str]) -> Iterator[Finding]:
    """The kvstore of this machine, where there is one; its release goes into ``versions``."""
    if local.kv_socket is None:
        yield Finding("kvstore", SKIPPED, "no worker is on this machine: run this in a worker's pod as well")
        return
    socket = client_socket(local.kv_socket)
    yield from checks.socket_folder(socket.parent, SOCKETS)
    try:
        stats = client.stats(socket, timeout_s=TIMEOUT_S)
        yield checks.integrity(client.verify(socket))
    except TailpackError as error:
        yield Finding("kvstore", FAIL, str(error), "does it run? see its log")
        return
    versions[f"kvstore of {platform.node()}"] = stats.version
    yield Finding("kvstore", OK, f"{stats.store_incarnation}, up {stats.uptime_ns / 1e9:.0f} s")
    wanted = {info.worker_id: info.device for info in local.infos}
    yield from checks.arenas(stats, {worker: mapped(device) for worker, device in wanted.items()}, wanted)
    yield checks.memory_limit(host_bytes(stats), limit())


def client_socket(path: Path) -> Path:
    path = Path(str(path).removeprefix("unix:")).absolute()
    return path / SOCKETS[0] if path.is_dir() else path


def mapped(device: str, processes: Path = Path("/proc")) -> bool | None:
    """Whether another process than the store maps the device's control block; None: not even the store's is seen."""
    count = 0
    for maps in processes.glob("[0-9]*/maps"):
        try:
            count += f"memfd:tailpack-{device}-control" in maps.read_text(errors="replace")
        except OSError:  # another user's, or it has just ended
            continue
    return None if count == 0 else count > 1


def host_bytes(stats: kvstore_pb2.KvStatsResponse) -> int:
    """What arenas and control blocks take of host memory."""
    arenas = sum(g.arena_bytes for device in stats.devices if device.memory != "device" for g in device.groups)
    return arenas + sum(device.control_bytes for device in stats.devices)


def limit() -> int | None:
    try:
        return cgroup_limit(Path("/proc/self/cgroup").read_text(), Path("/sys/fs/cgroup"))
    except OSError:
        return None


def machine(local: Local, expected: int | None) -> Iterator[Finding]:
    """GPUs and shared memory; only where workers are, or are expected to be."""
    if not local.infos and expected is None:
        return
    used = [info.device for info in local.infos if info.device.startswith("cuda:")]
    visible, problem = visible_gpu_names() if used or expected else ([], "")
    yield checks.gpus(expected, used, visible, problem)
    yield checks.shared_memory()


def visible_gpu_names() -> tuple[list[str], str]:
    from worker.gpu import visible_gpus  # imports torch

    try:
        return [f"{gpu.name} {gpu.uuid}" for gpu in visible_gpus()], ""
    except TailpackError as error:
        return [], str(error)


def files(tls: ServerTls | None, tokens: Path | None) -> Iterator[Finding]:
    """Files of a server that runs as this user."""
    if tls is not None:
        try:
            left_s = ServerCertificate(tls).expires_in_s()
        except TailpackError as broken:
            yield Finding("certificate files", FAIL, str(broken), "mount a secret with the right pair")
        else:
            do = "renew it: servers read the new files by themselves" if left_s < EXPIRES_SOON_S else ""
            days = f"{tls.cert}: {left_s / 86400:.0f} more days"
            yield Finding("certificate files", WARN if do else OK, days, do)
    if tokens is not None:
        yield checks.tokens_file(tokens)


def show(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        answer = {"status": checks.exit_status(findings), "findings": [dataclasses.asdict(f) for f in findings]}
        click.echo(json.dumps(answer))
        return
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        status = click.style(f"{finding.status:<7}", fg=_COLOURS[finding.status])
        click.echo(f"{status} {finding.check:<{width}}  {finding.what}")
        if finding.do and finding.status != OK:
            click.echo(f"{'':7} {'':<{width}}  -> {finding.do}")
