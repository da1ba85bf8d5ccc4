"""Which requests may be in flight at one time: ids, counts, bytes, and the end of them all when the router leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from protos import rpc
from protos.errors import AlreadyExists, CapacityError, InvalidRequest, Unavailable
from router.tenants import Tenants

DEFAULT_MAX_IN_FLIGHT = 4096
DEFAULT_MAX_REQUEST_BYTES = 512 << 20
"""Of all requests in flight, as received. gRPC holds each one besides as parsed, and the router as token ids until the
first token."""
MAX_SEQUENCE_ID_BYTES = 256  # as workers and stores have it
ID_FREE_S = 1.0
"""How long a request waits for a worker to confirm that an earlier one with its id, whose caller left, has ended."""
ID_POLL_S = 0.005


def sequence_id(tenant: str, request_id: str) -> str:
    """What workers know a request by. All routers agree on it, so that any of them can cancel it.

    A request id is its tenant's own: another's use of the same one must neither collide with it nor tell that it runs.

    Raises:
        InvalidRequest: BAD_REQUEST_ID: it could be taken for another tenant's, or is too long to be one.
    """
    if "/" in request_id or len(request_id) > MAX_SEQUENCE_ID_BYTES:  # of one in a message; metadata is checked before
        raise InvalidRequest(
            "request_id is malformed",
            reason="BAD_REQUEST_ID",
            given=repr(request_id[:64]),
            allowed=rpc.ID_ALLOWED,
        )
    return f"{tenant}/{request_id}" if tenant else request_id


def _no_deadline() -> float | None:
    return None


@dataclass(frozen=True)
class Call:
    """What a caller says about a request besides the request, whichever door it came through.

    remaining_s: seconds until the caller's deadline, None without one. door: "grpc", "session", "http" or "kserve".
    own_id: its caller chose the request id, and may send it again.
    """

    request_id: str
    tenant: str = ""
    traceparent: str = ""
    remaining_s: Callable[[], float | None] = field(default=_no_deadline)
    door: str = "grpc"
    own_id: bool = True

    @cached_property
    def sequence_id(self) -> str:
        return sequence_id(self.tenant, self.request_id)


@dataclass(slots=True)
class _Entry:
    cancel: Callable[[], None]
    entered_ns: int
    num_bytes: int = 0  # what it holds


class Admission:
    """The requests of one router, by sequence id.

    Args:
        max_in_flight, max_request_bytes: of all together; more are refused with a retry hint.
        runs_elsewhere: whether a worker has yet to confirm the end of a sequence of this id.
        tenants: whose limits hold besides.
    """

    def __init__(
        self,
        max_in_flight: int,
        max_request_bytes: int,
        runs_elsewhere: Callable[[str], bool],
        tenants: Tenants,
    ) -> None:
        self.draining = False
        self.held_bytes = 0
        self._max_in_flight = max_in_flight
        self._max_request_bytes = max_request_bytes
        self._runs_elsewhere = runs_elsewhere
        self._tenants = tenants
        self._entries: dict[str, _Entry] = {}  # the oldest first
        self._num_waiting = 0  # for their ids to be free; not in _entries yet
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        """Requests, and further streams of some."""
        return len(self._entries)

    @property
    def oldest_age_s(self) -> float:
        """Of the request that is longest in flight, in seconds; 0 where none is."""
        oldest = next(iter(self._entries.values()), None)
        return 0.0 if oldest is None else (time.monotonic_ns() - oldest.entered_ns) / 1e9

    async def enter(self, call: Call, cancel: Callable[[], None], *, key: str | None = None) -> None:
        """Takes a request in, until leave(). Waits, at most ID_FREE_S, for an aborted one of its id to be gone.

        Args:
            cancel: ends the request; what cancel() here calls.
            key: of a further stream of a request, instead of its sequence id.

        Raises:
            Unavailable: DRAINING. CapacityError: TOO_MANY_REQUESTS, TENANT_LIMIT_REQUESTS, TENANT_LIMIT_TOKENS.
            InvalidRequest: BAD_REQUEST_ID. AlreadyExists: DUPLICATE_REQUEST.
        """
        wanted = key or call.sequence_id
        taken = wanted in self._entries or self._runs_elsewhere(wanted)
        if taken:
            await self._id_free(wanted)
        self.check_open()
        if len(self._entries) >= self._max_in_flight:
            raise CapacityError(
                "this router is full",
                reason="TOO_MANY_REQUESTS",
                given=f"{len(self._entries)} requests in flight",
                allowed=f"{self._max_in_flight}",
                retry_after_ms=1000,
            )
        if len(call.sequence_id) > MAX_SEQUENCE_ID_BYTES:
            raise InvalidRequest(
                "tenant and request id are too long together",
                reason="BAD_REQUEST_ID",
                given=f"{len(call.tenant)} and {len(call.request_id)} characters",
                allowed=f"{MAX_SEQUENCE_ID_BYTES - 1} together",
            )
        if taken and (wanted in self._entries or self._runs_elsewhere(wanted)):
            raise AlreadyExists("a request with this id is running", reason="DUPLICATE_REQUEST", given=call.request_id)
        self._tenants.enter(call.tenant)
        self._entries[wanted] = _Entry(cancel, time.monotonic_ns())
        self._idle.clear()

    def check_open(self) -> None:
        """Raises Unavailable (DRAINING)."""
        if self.draining:
            raise Unavailable(
                "this router is shutting down", reason="DRAINING", hint="use another", retry_after_ms=1000
            )

    def leave(self, call: Call, *, key: str | None = None) -> None:
        """The request, or the stream of this key, has ended."""
        entry = self._entries.pop(key or call.sequence_id)
        self.held_bytes -= entry.num_bytes
        self._tenants.leave(call.tenant, entry.num_bytes)
        if not self._entries:
            self._idle.set()

    def hold(self, call: Call, num_bytes: int, *, key: str | None = None) -> None:
        """Counts the bytes of a request that has entered, until it leaves: gRPC keeps it, as received and parsed. Once.

        Raises:
            CapacityError: TOO_MANY_REQUEST_BYTES, TENANT_LIMIT_BYTES.
        """
        if self.held_bytes + num_bytes > self._max_request_bytes:
            raise CapacityError(
                "the requests in flight are too large together",
                reason="TOO_MANY_REQUEST_BYTES",
                given=f"{num_bytes} bytes beside {self.held_bytes} in flight",
                allowed=f"{self._max_request_bytes} bytes",
                retry_after_ms=1000,
            )
        self._tenants.hold(call.tenant, num_bytes)
        self._entries[key or call.sequence_id].num_bytes = num_bytes
        self.held_bytes += num_bytes

    def cancel(self, wanted: str) -> bool:
        """Ends a request of this router. False: it has none of this sequence id."""
        entry = self._entries.get(wanted)
        if entry is not None:
            entry.cancel()
        return entry is not None

    async def drain(self, grace_s: float) -> bool:
        """Refuses new requests; waits for the running ones. False when some were left after grace_s."""
        self.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _id_free(self, wanted: str) -> None:
        """A caller that left may use its id again at once, though its worker has yet to confirm the abort. Bounded."""
        if wanted in self._entries or not self._runs_elsewhere(wanted):
            return
        if len(self._entries) + self._num_waiting >= self._max_in_flight:
            return  # those that wait hold their requests too
        self._num_waiting += 1
        try:
            ends = time.monotonic() + ID_FREE_S
            while self._runs_elsewhere(wanted) and time.monotonic() < ends:
                await asyncio.sleep(ID_POLL_S)
        finally:
            self._num_waiting -= 1
