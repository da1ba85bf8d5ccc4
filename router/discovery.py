"""Which addresses workers have, where a DNS name tells: that of a headless Service, one address a pod.

A name that cannot be looked up changes nothing: streams go on while DNS is down.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from protos.errors import ConfigError

log = structlog.get_logger("router")

LOOK_UP_S = 3.0
FORGET_AFTER = 3
"""Look-ups in a row that a worker must be missing from. One answer of an overloaded resolver is no proof."""
MAX_PORTS = 64

Resolve = Callable[[str], Awaitable[Collection[str]]]
"""From a host name to its addresses. Raises OSError."""

_NAME = re.compile(r"(?P<host>[A-Za-z0-9._-]+):(?P<first>[0-9]+)(?:-(?P<last>[0-9]+))?\Z")


@dataclass(frozen=True)
class WorkerDns:
    """Workers behind a name: each of its addresses has one at each port, first_port to last_port."""

    host: str
    first_port: int
    last_port: int

    @staticmethod
    def parse(text: str) -> WorkerDns:
        """Reads HOST:PORT or HOST:FIRST-LAST. Raises ConfigError (BAD_ADDRESS)."""
        match = _NAME.match(text)
        if match is not None:
            first = int(match["first"])
            last = int(match["last"] or first)
            if 0 < first <= last <= 65535 and last - first < MAX_PORTS:
                return WorkerDns(match["host"], first, last)
        raise ConfigError(
            "this does not say where workers are",
            reason="BAD_ADDRESS",
            given=text,
            allowed=f"HOST:PORT, or HOST:FIRST-LAST with at most {MAX_PORTS} ports",
        )

    def addresses(self, hosts: Iterable[str]) -> set[str]:
        ports = range(self.first_port, self.last_port + 1)
        return {f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts for port in ports}


@dataclass
class View:
    """What look-ups have told so far. Pure: values in, what to add and what to forget out."""

    known: set[str] = field(default_factory=set)
    _missing: Counter[str] = field(default_factory=Counter)

    def update(self, found: set[str], connected: Collection[str]) -> tuple[set[str], set[str]]:
        """After a look-up that succeeded.

        Args:
            found: all addresses that there are now.
            connected: addresses of workers with an open session; these are never forgotten.

        Returns:
            (addresses that are new, addresses to forget).
        """
        new = found - self.known
        self._missing = Counter({address: self._missing[address] + 1 for address in self.known - found})
        gone = {a for a, times in self._missing.items() if times >= FORGET_AFTER and a not in connected}
        for address in gone:
            del self._missing[address]
        self.known = (self.known | new) - gone
        return new, gone


async def resolve(host: str) -> Collection[str]:
    """All addresses of a name, by the system's resolver."""
    loop = asyncio.get_running_loop()
    answers = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_, address in answers}


async def follow(
    names: Collection[WorkerDns],
    *,
    add: Callable[[str], None],
    forget: Callable[[str], None],
    states: Callable[[], Mapping[str, str]],
    keep: Collection[str] = (),
    resolve: Resolve = resolve,
    interval_s: float = LOOK_UP_S,
) -> None:
    """Looks the names up again and again, until cancelled, and adds and forgets workers.

    Args:
        states: of the workers that there are, by address, as WorkerLink.state.
        keep: addresses that are known besides, and not to be forgotten.
    """
    views = {name: View() for name in names}
    failed: set[WorkerDns] = set()
    while True:
        for name, view in views.items():
            try:
                found = name.addresses(await resolve(name.host))
            except OSError as failure:
                if name not in failed:
                    log.warning("workers cannot be looked up", host=name.host, error=str(failure))
                failed.add(name)
                continue
            failed.discard(name)
            connected = [address for address, state in states().items() if state in ("ready", "draining")]
            new, gone = view.update(found, connected)
            for address in sorted(new):
                log.info("worker found", address=address, host=name.host)
                add(address)
            for address in sorted(gone):
                if address in keep or any(address in other.known for other in views.values()):
                    continue  # it is there by another way too
                log.info("worker gone", address=address, host=name.host)
                forget(address)
        await asyncio.sleep(interval_s)
