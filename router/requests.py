"""All requests of a router, whichever door they came through. The life of one: router/generation.py.

async with requests.answer(request, call) as answer:
    async for chunk in answer:
        ...
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from protos import router_pb2, rpc, types_pb2
from protos.errors import CapacityError, InvalidRequest, NotFound, TailpackError, Unavailable
from protos.limits import choice_ids
from protos.tls import ClientTls
from protos.tracing import Tracing
from protos.version import release
from router.admission import DEFAULT_MAX_IN_FLIGHT, DEFAULT_MAX_REQUEST_BYTES, Admission, Call, sequence_id
from router.find import ask_until_back
from router.generation import Answer
from router.metrics import RequestMetrics, histogram_message
from router.recovery import DEFAULT_RECOVER_WAIT_S, Outcome
from router.registry import Registry, TokenizerFacts
from router.resume import Resumables
from router.tenants import NO_LIMITS, TenantLimits, Tenants
from router.token_log import TokenLogs
from router.tokenizer import Tokenizer
from router.unread import DEFAULT_MAX_UNREAD_BYTES, Unread

if TYPE_CHECKING:
    from router.session import Session

CANCEL_TIMEOUT_S = 2.0

GOODBYE_S = 1.0
"""For callers whose sessions have no calls any more to have read the last answers, when the router leaves."""

DEFAULT_SESSION_IDLE_S = 600.0

DEFAULT_MAX_SESSIONS = rpc.MAX_CONNECTIONS
"""A caller needs one, whose connection is let in."""

FEATURES = ("session",)
"""What callers may use of this router: clients ask for them (Stats) before they do."""


@dataclass
class Counters:
    """Of one router, since it started. requests = finished + cancelled + failed + rejected + in flight.

    A call of Generate counts as a request, also one that joins an answer; a call of Resume does not. A resumable
    request whose call is lost ends here as cancelled (its log line says DETACHED), though it runs on: whoever goes on
    with it counts in resumes. output_tokens are those that callers were sent: two that read one answer count twice.
    prompt_tokens are of requests that were placed, once each. recovered_*: see StatsResponse.
    """

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    retries: int = 0
    resumes: int = 0
    recovered_joined: int = 0
    recovered_recomputed: int = 0
    recovered_lost: int = 0


class Requests:
    """All requests of one router over one registry of workers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        addresses: list[str],
        *,
        router_id: str | None = None,
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
        max_unread_bytes: int = DEFAULT_MAX_UNREAD_BYTES,
        recover_wait_s: float = DEFAULT_RECOVER_WAIT_S,
        session_idle_s: float = DEFAULT_SESSION_IDLE_S,
        max_sessions: int = DEFAULT_MAX_SESSIONS,
        log_prompts: bool = False,
        tracing: Tracing | None = None,
        limits_of: Callable[[str], TenantLimits] = lambda tenant: NO_LIMITS,
        worker_tls: ClientTls | None = None,
        switches: Sequence[types_pb2.Switch] = (),
        on_ready: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        """Starts nothing yet.

        Args:
            addresses: of the workers.
            max_in_flight, max_request_bytes: of all requests in flight; more are refused with a retry hint.
            max_unread_bytes: of all answers, gathered for callers who do not read; above, the largest of them ends.
            recover_wait_s: for how long a stream that lost its worker waits for a place, and Resume for workers.
            session_idle_s: for how long a session may be without calls; then its caller is asked to end it.
            max_sessions: open at one time; more are refused with a retry hint.
            log_prompts: a request's line in the log has its prompt.
            tracing: where spans go; None: nowhere.
            limits_of: each tenant's limits; asked anew for each request.
            worker_tls: how to reach the workers; None: in plain text.
            switches: what this router was asked for and what came of it, for Stats.
            on_ready: told whenever a worker comes or goes, whether any is ready.
        """
        incarnation = rpc.new_request_id().removeprefix("req-")
        self.router_id = router_id or f"router-{incarnation[:8]}"
        self.tokenizer = tokenizer
        self.counters = Counters()
        self.metrics = RequestMetrics()
        self.recover_wait_s = recover_wait_s
        self.session_idle_s = session_idle_s
        self._max_sessions = max_sessions
        self.log_prompts = log_prompts
        self.tracing = tracing
        self._switches = switches
        self._on_ready = on_ready
        self._started_ns = time.monotonic_ns()
        facts = TokenizerFacts(tokenizer.digest, tokenizer.vocab_size)
        self.registry = Registry(addresses, self.router_id, incarnation, facts, self._workers_changed, tls=worker_tls)
        self.unread = Unread(max_unread_bytes)
        self.token_logs = TokenLogs()
        self.tenants = Tenants(limits_of, time.monotonic)
        self.admission = Admission(max_in_flight, max_request_bytes, self.registry.knows, self.tenants)
        self.resumables = Resumables(self)
        self.sessions: set[Session] = set()

    def start(self) -> None:
        self.registry.start()

    async def close(self) -> None:
        await self.registry.close()
        self.tokenizer.close()

    async def drain(self, grace_s: float) -> bool:
        """Refuses new requests; waits for the running ones, and then a little for callers to end their sessions. False
        when requests were left after grace_s.
        """
        self.admission.draining = True
        self._workers_changed()
        for session in self.sessions:
            session.say_goodbye()
        drained = await self.admission.drain(grace_s)
        ends = time.monotonic() + GOODBYE_S
        while drained and self.sessions and time.monotonic() < ends:
            await asyncio.sleep(0.01)
        return drained

    def check_room_for_a_session(self) -> None:
        """Raises CapacityError: TOO_MANY_SESSIONS."""
        if len(self.sessions) >= self._max_sessions:
            raise CapacityError(
                "too many sessions are open",
                reason="TOO_MANY_SESSIONS",
                allowed=f"{self._max_sessions}",
                hint="requests in streams of their own are taken as before; clients share one session for all theirs",
                retry_after_ms=1000,
            )

    @property
    def num_in_flight(self) -> int:
        """Requests whose calls are open."""
        return self.admission.num_in_flight - self.resumables.num_resumed - self.resumables.num_looking

    def recovered(self, outcome: Outcome) -> None:
        """Counts a stream whose worker was lost, by what became of it."""
        name = f"recovered_{outcome}"
        setattr(self.counters, name, getattr(self.counters, name) + 1)

    # --- what the doors ask for ---

    def answer(self, request: router_pb2.GenerateRequest, call: Call) -> AbstractAsyncContextManager[Answer]:
        """The answer to a request: enter it, iterate over it. Leaving it ends what is not resumable."""
        if request.resumable:
            return self.resumables.generate(request, call)
        return Answer(self, request, call)

    def resume(self, request: router_pb2.ResumeRequest, call: Call) -> AbstractAsyncContextManager[Answer]:
        """The answer to a resumable request behind what the caller has. ``call``: its own, under that request's id.

        Raises:
            InvalidRequest: EMPTY_REQUEST_ID.
        """
        if not request.request_id:
            raise InvalidRequest("request_id is empty", reason="EMPTY_REQUEST_ID")
        return self.resumables.resume(request, call)

    async def cancel(self, request_id: str, tenant: str, remaining_s: float | None = None) -> bool:
        """Ends a request of this tenant and all its choices, also one that another router serves. False: there is none.

        remaining_s: until the caller's deadline; it is told before that.

        Raises:
            Unavailable: WORKER_NOT_ASKED: a worker cannot be asked, so that "none" would be a guess.
        """
        wanted = sequence_id(tenant, request_id)
        own = sum(self.admission.cancel(each) for each in choice_ids(wanted)) > 0
        if own and wanted not in self.resumables.firsts:
            return True
        # Of a resumable one the answer may have ended already and be kept, or another worker have an earlier placement.
        wait_s = self.recover_wait_s if remaining_s is None else min(self.recover_wait_s, 0.8 * remaining_s)

        async def ask() -> tuple[bool | None, list[str]]:
            found, failures = await self._abort_foreign(wanted, tenant)
            return found or own or None, failures

        return await ask_until_back(self.registry, wait_s, ask) is not None

    async def _abort_foreign(self, wanted: str, tenant: str) -> tuple[bool, list[str]]:
        """(whether a worker had it, workers that did not answer and why)."""
        links = [link for link in self.registry.links.values() if link.is_connected]
        answers = await asyncio.gather(
            *(link.abort_foreign(wanted, tenant, CANCEL_TIMEOUT_S) for link in links), return_exceptions=True
        )
        failures = []
        for link, answer in zip(links, answers, strict=True):
            if isinstance(answer, TailpackError):
                failures.append(f"{link.address}: {answer}")
            elif isinstance(answer, BaseException):
                raise answer
        return any(answer is True for answer in answers), failures

    def stats(self) -> router_pb2.StatsResponse:
        return router_pb2.StatsResponse(
            router_id=self.router_id,
            uptime_ns=time.monotonic_ns() - self._started_ns,
            in_flight=self.num_in_flight,
            streams=self.admission.num_in_flight,
            ttft=histogram_message(self.metrics.ttft),
            itl=histogram_message(self.metrics.itl),
            switches=self._switches,
            version=release(),
            features=FEATURES,
            **vars(self.counters),
        )

    def model(self, name: str) -> types_pb2.ModelInfo:
        """The model that a request names; the only one where it names none.

        Raises:
            NotFound: UNKNOWN_MODEL. InvalidRequest: MODEL_NOT_NAMED. Unavailable: NO_WORKER.
        """
        known = self.registry.models()
        if not known:
            raise self.no_worker()
        if name and name not in known:
            raise NotFound(
                "this model is not served here",
                reason="UNKNOWN_MODEL",
                given=name[:128],
                allowed=", ".join(sorted(known)),
            )
        if not name and len(known) > 1:
            raise InvalidRequest(
                "several models are served: say which", reason="MODEL_NOT_NAMED", allowed=", ".join(sorted(known))
            )
        for link in self.registry.ready(name or None):
            if link.info is not None:
                return link.info.model
        raise self.no_worker()

    def no_worker(self) -> Unavailable:
        links = self.registry.links.values()
        states = "; ".join(f"{link.address} is {link.state}" + (f" ({link.why})" if link.why else "") for link in links)
        return Unavailable("no worker is ready", reason="NO_WORKER", given=states[:2000], retry_after_ms=1000)

    def _workers_changed(self) -> None:
        self._on_ready(not self.admission.draining and bool(self.registry.ready()))
