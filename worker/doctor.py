"""What `tailpack doctor` looks at. Each check takes what was seen and says what it means; none raises for a bad state.

A check that could not be made is UNKNOWN, never OK: what was not seen is not known to be well.
"""

from __future__ import annotations

import os
import re
import socket
import ssl
import stat
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protos import kvstore_pb2, types_pb2
from protos.errors import ConfigError
from protos.tls import EXPIRES_SOON_S, ClientTls, client_context

OK, WARN, FAIL, UNKNOWN, SKIPPED = "ok", "warn", "FAIL", "unknown", "skipped"
CONNECT_S = 3.0
RAY_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes of /dev/shm
ROOM_LEFT = 0.9  # of a memory limit; arenas that take more leave a store too little for itself


@dataclass(frozen=True)
class Finding:
    """What one check saw. ``do``: what to do about it; empty where nothing is to be done."""

    check: str
    status: str
    what: str
    do: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """0 all is well, 1 something is wrong, 2 something could not be looked at."""
    seen = {finding.status for finding in findings}
    return 1 if FAIL in seen else 2 if UNKNOWN in seen else 0


# --- names, ports, certificates ---


def host_and_port(address: str) -> tuple[str, int]:
    """Raises ConfigError (BAD_ADDRESS)."""
    match = re.fullmatch(r"([^/\s]+):([0-9]{1,5})", address)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ConfigError(
            "an address is malformed", reason="BAD_ADDRESS", given=repr(address), allowed="host:port, port 1 to 65535"
        )
    return match[1].strip("[]"), int(match[2])


def resolves(name: str, check: str = "dns") -> Finding:
    """Whether a name has addresses."""
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as failure:
        return Finding(
            check,
            FAIL,
            f"{name} has no address: {failure.strerror or failure}",
            "is it spelt as the Service is, are its pods ready, may this pod ask the cluster's DNS (NetworkPolicy)?",
        )
    return Finding(check, OK, f"{name} is {', '.join(found[:4])}{' ...' if len(found) > 4 else ''}")


def reachable(address: str, check: str) -> Finding:
    """Whether a port takes connections."""
    try:
        socket.create_connection(host_and_port(address), timeout=CONNECT_S).close()
    except OSError as failure:
        return Finding(
            check,
            FAIL,
            f"{address} takes no connection: {failure.strerror or failure}",
            "does the process run, does the address say its port, does a NetworkPolicy let this pod in?",
        )
    return Finding(check, OK, f"{address} takes connections")


def certificate(address: str, tls: ClientTls, check: str, *, now_unix_s: float | None = None) -> Finding:
    """The chain, the name and the time of what a port presents, as a client of ours verifies them."""
    host, port = host_and_port(address)
    wanted = tls.server_name or host
    context = client_context(tls)
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=CONNECT_S) as connection,
            context.wrap_socket(connection, server_hostname=wanted) as secured,
        ):
            shown = secured.getpeercert() or {}
    except ssl.SSLCertVerificationError as failure:
        return Finding(
            check, FAIL, f"{address}: {failure.verify_message}", _CERTIFICATE_HINTS.get(failure.verify_code, "")
        )
    except ssl.SSLError as failure:
        hint = "does this port serve TLS? does it demand a client certificate (--tls-client-cert)?"
        return Finding(check, FAIL, f"{address}: no TLS handshake: {failure.reason or failure}", hint)
    except OSError as failure:
        return Finding(check, UNKNOWN, f"{address}: {failure.strerror or failure}", "see whether it is reachable")
    until = ssl.cert_time_to_seconds(str(shown["notAfter"]))
    left_s = until - (time.time() if now_unix_s is None else now_unix_s)
    days = f"{address}: for {wanted}, {left_s / 86400:.0f} more days"
    if left_s < EXPIRES_SOON_S:
        return Finding(check, WARN, days, "renew it: servers read the new files by themselves")
    return Finding(check, OK, days)


_CERTIFICATE_HINTS = {
    9: "it is not valid yet: compare the clocks",
    10: "it has expired: renew it; servers read the new files by themselves",
    18: "it is self-signed: give its authority with --tls-ca, or have the authority of --tls-ca issue it",
    19: "its authority is not the one of --tls-ca",
    20: "its authority is not the one of --tls-ca, or the server leaves a certificate between them out of its chain",
    62: "it has other names: issue it for the Service's name, or say which it has with --tls-server-name",
    64: "it has other addresses: issue it for this one, or say a name that it has with --tls-server-name",
}
"""By OpenSSL's number of what it found (X509_V_ERR_*)."""


# --- files ---


def tokens_file(path: Path) -> Finding:
    """Whether a router that runs as this user can read its tokens. What it says is the router's to check."""
    check = "tokens"
    try:
        tenants = tomllib.loads(path.read_text()).get("tenants")
    except OSError as failure:
        do = "mount the secret, readable for this user (fsGroup, defaultMode)"
        return Finding(check, FAIL, f"{path} cannot be read: {failure.strerror}", do)
    except (ValueError, UnicodeDecodeError) as failure:
        return Finding(check, FAIL, f"{path} is no TOML: {failure}", "see `tailpack router token --help`")
    if not isinstance(tenants, dict) or not tenants:
        return Finding(check, FAIL, f"{path} names no tenant: nobody is let in", "see `tailpack router token --help`")
    return Finding(check, OK, f"{path} names {len(tenants)} tenants")


def socket_folder(folder: Path, names: Sequence[str]) -> list[Finding]:
    """Whether descriptors can pass: sockets of this user, in a folder of this user's alone. The first one must answer;
    at the others, where descriptors pass, a caller without a ticket would only be logged.
    """
    check = "kvstore sockets"
    try:
        found = folder.stat()
    except OSError as failure:
        do = "mount the store's folder (an emptyDir that store and workers share) into this container"
        return [Finding(check, FAIL, f"{folder}: {failure.strerror}", do)]
    findings = []
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        do = "run workers and store as one user: memory is handed over to that user only"
        findings.append(Finding(check, FAIL, f"{folder} is of user {found.st_uid}, this is {os.geteuid()}", do))
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = oct(stat.S_IMODE(found.st_mode))
        do = f"chmod 0700 {folder}: whoever connects there gets the KV memory of all tenants"
        findings.append(Finding(check, WARN, f"{folder} is open to other users ({mode})", do))
    for index, name in enumerate(names):
        try:
            if not stat.S_ISSOCK((folder / name).stat().st_mode):
                raise OSError(0, "it is no socket")
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(CONNECT_S)
                if index == 0:
                    probe.connect(str(folder / name))
        except OSError as failure:
            do = "does the kvstore run, and in this folder (--socket-dir)?"
            findings.append(Finding(check, FAIL, f"{folder / name}: {failure.strerror or failure}", do))
    return findings or [Finding(check, OK, f"{folder}: {', '.join(names)} are there")]


# --- workers, as the router and they themselves tell ---


def workers_ready(workers: Sequence[tuple[str, str, str]]) -> list[Finding]:
    """(address, state, why) of each worker that the router knows."""
    check = "workers"
    if not workers:
        do = "does its --worker or --worker-dns name the workers?"
        return [Finding(check, FAIL, "the router knows of no worker", do)]
    findings = []
    for address, state, why in workers:
        told = f"{address} is {state}{f': {why}' if why else ''}"
        if state == "draining":
            findings.append(Finding(check, WARN, told, "nothing, if it is being replaced"))
        elif state != "ready":
            do = "see `tailpack features` and the worker's log" if state == "refused" else "does it run? see its log"
            findings.append(Finding(check, FAIL, told, do))
    return findings or [Finding(check, OK, f"{len(workers)} ready")]


_DIGESTS: dict[str, tuple[Callable[[types_pb2.WorkerInfo], str], str]] = {
    "weights": (lambda info: info.model.weights_digest.hex(), "load the same files everywhere"),
    "tokenizer": (lambda info: info.model.tokenizer_digest.hex(), "load the same files everywhere"),
    "KV geometry": (
        lambda info: info.geometry_digest.hex(),
        "give all workers of a model the same --kv-mode, --kv-preset, --dtype and --dense-layers, on the same device",
    ),
    "longest sequence": (
        lambda info: str(info.model.max_sequence_tokens),
        "give all the same --max-sequence-tokens, and arenas that hold one (`tailpack size`)",
    ),
}


def workers_agree(infos: Sequence[types_pb2.WorkerInfo]) -> list[Finding]:
    """Whether all workers of a model have the same weights, tokenizer, KV geometry and longest sequence."""
    check, findings = "workers agree", []
    for model in sorted({info.model.name for info in infos}):
        of_model = [info for info in infos if info.model.name == model]
        for what, (digest_of, do) in _DIGESTS.items():
            holders: dict[str, list[str]] = {}
            for info in of_model:
                holders.setdefault(digest_of(info), []).append(info.worker_id)
            if len(holders) > 1:
                sides = "; ".join(f"{digest[:16] or 'none'}: {', '.join(ids)}" for digest, ids in holders.items())
                findings.append(Finding(check, FAIL, f"{what} of {model} differ: {sides}", do))
    models = len({info.model.name for info in infos})
    return findings or [Finding(check, OK, f"{len(infos)} workers of {models} model{'s' if models != 1 else ''}")]


def versions(of: Mapping[str, str]) -> Finding:
    """``of``: release by who told it; empty where an older release tells none."""
    holders: dict[str, list[str]] = {}
    for who, version in of.items():
        holders.setdefault(version or "older, unnamed", []).append(who)
    sides = "; ".join(f"{version}: {', '.join(who)}" for version, who in holders.items())
    if len(holders) > 1:
        return Finding("versions", WARN, sides, "nothing while an upgrade runs; else finish or undo it")
    return Finding("versions", OK, sides)


# --- memory ---


def arenas(
    stats: kvstore_pb2.KvStatsResponse, mapped_by: Mapping[str, bool | None], wanted: Mapping[str, str]
) -> list[Finding]:
    """Whether the workers of this machine hold the memory that the store has for them.

    Args:
        mapped_by: by worker id, whether its process maps the store's memory; None: it cannot be seen from here.
        wanted: device of each worker of this machine, by worker id.
    """
    check = "arenas"
    findings = []
    devices = {device.device: device for device in stats.devices}
    for worker, device in wanted.items():
        told = devices.get(device)
        if told is None or told.worker_id != worker:
            held = f"held by {told.worker_id or 'nobody'}" if told else "not known to this store"
            do = "does the worker use this store (--kv-socket)? its log says why it is not attached"
            findings.append(Finding(check, FAIL, f"{device} of {worker} is {held}", do))
        elif mapped_by.get(worker) is False:
            do = "the worker lost its memory without noticing: restart it, and keep both logs"
            findings.append(Finding(check, FAIL, f"{worker} maps nothing of {device}", do))
        elif mapped_by.get(worker) is None and told.memory != "device":
            do = "share the process namespace (shareProcessNamespace), and run this as the worker's user"
            findings.append(Finding(check, UNKNOWN, f"the process of {worker} cannot be seen from here", do))
    attached = sum(bool(device.worker_id) for device in stats.devices)
    size = sum(group.arena_bytes for device in stats.devices for group in device.groups)
    seen = f"{attached} of {len(stats.devices)} devices attached, {size >> 20} MiB"
    return findings or [Finding(check, OK, seen)]


def integrity(problems: Sequence[str]) -> Finding:
    """What the store's own Verify found."""
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        return Finding("integrity", FAIL, problems[0] + more, "keep the store's log, report it, restart the store")
    return Finding("integrity", OK, "tables, hashes and checksums are consistent")


def memory_limit(host_bytes: int, limit: int | None) -> Finding:
    """``host_bytes``: what the store's arenas and control blocks take of host memory; ``limit``: the cgroup's."""
    check, told = "memory limit", f"{host_bytes >> 20} MiB of KV memory"
    if limit is None:
        return Finding(check, OK, f"{told}; no limit is set here")
    told += f", limit {limit >> 20} MiB"
    do = "raise the kvstore container's memory limit, or ask for smaller arenas: the kernel charges them to the store"
    if host_bytes >= limit:
        return Finding(check, FAIL, f"{told}: the store will be killed", do)
    if host_bytes > ROOM_LEFT * limit:
        return Finding(check, WARN, told, do)
    return Finding(check, OK, told)


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Ray's object store lives there; our arenas do not (they are memfds, which no mount limits)."""
    check = "/dev/shm"
    try:
        found = os.statvfs(folder)
    except OSError as failure:
        return Finding(check, UNKNOWN, f"{folder}: {failure.strerror}", "mount an emptyDir of medium Memory there")
    total = found.f_blocks * found.f_frsize
    if total < RAY_OBJECT_STORE_BYTES:
        do = (
            f"mount an emptyDir of medium Memory with at least {RAY_OBJECT_STORE_BYTES >> 20} MiB there: Ray's own need"
        )
        return Finding(check, WARN, f"{total >> 20} MiB", do)
    return Finding(check, OK, f"{total >> 20} MiB")


def gpus(expected: int | None, used: Sequence[str], visible: Sequence[str], problem: str = "") -> Finding:
    """``expected``: what was asked for; None: as many as ``used``, the devices of this machine's workers on GPUs.
    ``problem``: why none is seen.
    """
    check = "GPUs"
    wanted = len(used) if expected is None else expected
    if not wanted:
        return Finding(check, OK, f"none is needed here; {len(visible)} visible")
    if expected is None and not visible and not problem:  # as in a kvstore's container, which is given none
        what = f"this container has none; the workers beside it answer, on {', '.join(used)}"
        return Finding(check, SKIPPED, what, "to see them, run this in the container that has them")
    if len(visible) < wanted:
        do = "ask for nvidia.com/gpu in this container's limits; does the node have its driver and device plugin?"
        what = f"{wanted} expected, {len(visible)} visible{f': {problem}' if problem else ''}"
        return Finding(check, FAIL, what, do)
    return Finding(check, OK, ", ".join(visible))
