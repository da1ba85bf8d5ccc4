"""The Router service: owns a request's life from its first check to its last chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from protos import router_pb2, router_pb2_grpc, rpc, types_pb2, worker_pb2
from protos.errors import (
    AlreadyExists,
    CapacityError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    RequestCancelled,
    TailpackError,
    Unavailable,
)
from router import policy
from router.detokenizer import Detokenizer
from router.registry import Registry, TokenizerFacts, WorkerLink
from router.relay import Relay
from router.tokenizer import Tokenizer
from router.validate import DEFAULT_MAX_TOKENS, check_fits, check_request, check_text_fits

log = structlog.get_logger("router")

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
MAX_ATTEMPTS = 3
DEFAULT_MAX_REQUEST_BYTES = 512 << 20
"""Of all requests in flight, as received. gRPC holds each one besides as parsed, and the router as token ids until the
first token."""
MAX_SEQUENCE_ID_BYTES = 256  # as workers and stores have it
CANCEL_TIMEOUT_S = 2.0
ID_FREE_S = 1.0
"""How long a request waits for a worker to confirm that an earlier one with its id, whose caller left, has ended."""
ID_POLL_S = 0.005
DEADLINE_LAG_S = 0.25
"""A client that ends its call with no more than this left of the deadline is taken to have met the deadline."""


def sequence_id(tenant: str, request_id: str) -> str:
    """What workers know a request by. All routers agree on it, so that any of them can cancel it.

    A request id is its tenant's own: another's use of the same one must neither collide with it nor tell that it runs.
    """
    return f"{tenant}/{request_id}" if tenant else request_id  # neither holds a "/"


@dataclass
class Counters:
    """Of one router, since it started. requests = finished + cancelled + failed + rejected + in flight."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    retries: int = 0


@dataclass
class _Active:
    """A request between its first check and its end; one log line comes of it."""

    request_id: str
    tenant: str
    traceparent: str
    started_ns: int = field(default_factory=time.monotonic_ns)
    cancelled: bool = False
    relay: Relay | None = None
    link: WorkerLink | None = None
    model: str = ""
    prompt_tokens: int = 0
    tokenized_ns: int | None = None
    num_retries: int = 0
    held_bytes: int = 0

    @property
    def sequence_id(self) -> str:
        return sequence_id(self.tenant, self.request_id)

    def cancel(self) -> None:
        self.cancelled = True
        if self.relay is not None:
            self.relay.cancel()


class RouterService(router_pb2_grpc.RouterServicer):
    """Handlers of protos/router.proto over one registry of workers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        addresses: list[str],
        *,
        router_id: str | None = None,
        max_in_flight: int = 4096,
        max_request_bytes: int = DEFAULT_MAX_REQUEST_BYTES,
        on_ready: Callable[[bool], None] = lambda ready: None,
    ) -> None:
        """Starts nothing yet.

        Args:
            max_in_flight, max_request_bytes: of all requests in flight; more are refused with a retry hint.
            on_ready: told whenever a worker comes or goes, whether any is ready.
        """
        incarnation = rpc.new_request_id().removeprefix("req-")
        self.router_id = router_id or f"router-{incarnation[:8]}"
        self.counters = Counters()
        self.draining = False
        self._tokenizer = tokenizer
        self._max_in_flight = max_in_flight
        self._max_request_bytes = max_request_bytes
        self._held_bytes = 0
        self._on_ready = on_ready
        self._active: dict[str, _Active] = {}  # by sequence id
        self._num_waiting = 0  # for their ids to be free; not in _active yet
        self._started_ns = time.monotonic_ns()
        self._idle = asyncio.Event()
        self._idle.set()
        facts = TokenizerFacts(tokenizer.digest, tokenizer.vocab_size)
        self.registry = Registry(addresses, self.router_id, incarnation, facts, self._workers_changed)

    def start(self) -> None:
        self.registry.start()

    async def close(self) -> None:
        await self.registry.close()
        self._tokenizer.close()

    @property
    def num_in_flight(self) -> int:
        return len(self._active)

    async def drain(self, grace_s: float) -> bool:
        """Refuses new requests; waits for the running ones. False when some were left after grace_s."""
        self.draining = True
        self._workers_changed()
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    # --- Generate ---

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        metadata = rpc.call_metadata(context)
        await context.send_initial_metadata((("x-request-id", metadata.request_id),))
        self.counters.requests += 1
        active = _Active(metadata.request_id, metadata.tenant, metadata.traceparent)
        deadline_s = context.time_remaining()
        outcome, reason = "cancelled", "CLIENT_GONE"  # unless we get to say otherwise
        entered = False
        try:
            await self._id_free(active)
            self._enter(active)
            entered = True
            check_request(request)
            self._hold(active, request.ByteSize())
            async for chunk in self._answer(request, active, deadline_s):
                if chunk.finish_reason:
                    aborted = chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED
                    outcome, reason = ("cancelled" if aborted else "finished"), _short(chunk.finish_reason)
                yield chunk
        except TailpackError as error:
            reason = error.reason
            if isinstance(error, (RequestCancelled, DeadlineExceeded)):
                outcome = "cancelled"
            else:
                outcome = "failed" if active.link is not None else "rejected"
            raise
        except Exception as bug:
            outcome, reason = "failed", type(bug).__name__
            raise
        finally:
            # Also on cancellation: nothing here waits.
            if reason == "CLIENT_GONE" and _ran_out(deadline_s, context.time_remaining()):
                reason = "DEADLINE_EXCEEDED"
            if active.link is not None:
                active.link.detach(active.sequence_id)
            if entered:
                self._leave(active)
            self._account(active, outcome, reason)

    async def _id_free(self, active: _Active) -> None:
        """A caller that left may use its id again at once, though its worker has yet to confirm the abort. Bounded."""
        wanted = active.sequence_id
        if wanted in self._active or not self.registry.knows(wanted):
            return
        if len(self._active) + self._num_waiting >= self._max_in_flight:
            return  # those that wait hold their requests too
        self._num_waiting += 1
        try:
            ends = time.monotonic() + ID_FREE_S
            while self.registry.knows(wanted) and time.monotonic() < ends:
                await asyncio.sleep(ID_POLL_S)
        finally:
            self._num_waiting -= 1

    def _enter(self, active: _Active) -> None:
        if self.draining:
            raise Unavailable(
                "this router is shutting down", reason="DRAINING", hint="use another", retry_after_ms=1000
            )
        if len(self._active) >= self._max_in_flight:
            raise CapacityError(
                "this router is full",
                reason="TOO_MANY_REQUESTS",
                given=f"{len(self._active)} requests in flight",
                allowed=f"{self._max_in_flight}",
                retry_after_ms=1000,
            )
        if len(active.sequence_id) > MAX_SEQUENCE_ID_BYTES:
            raise InvalidRequest(
                "tenant and request id are too long together",
                reason="BAD_REQUEST_ID",
                given=f"{len(active.tenant)} and {len(active.request_id)} characters",
                allowed=f"{MAX_SEQUENCE_ID_BYTES - 1} together",
            )
        if active.sequence_id in self._active or self.registry.knows(active.sequence_id):
            raise AlreadyExists(
                "a request with this id is running", reason="DUPLICATE_REQUEST", given=active.request_id
            )
        self._active[active.sequence_id] = active
        self._idle.clear()

    def _hold(self, active: _Active, num_bytes: int) -> None:
        """Counts a request's bytes for as long as its stream lives: gRPC keeps the request, as received and parsed."""
        if self._held_bytes + num_bytes > self._max_request_bytes:
            raise CapacityError(
                "the requests in flight are too large together",
                reason="TOO_MANY_REQUEST_BYTES",
                given=f"{num_bytes} bytes beside {self._held_bytes} in flight",
                allowed=f"{self._max_request_bytes} bytes",
                retry_after_ms=1000,
            )
        self._held_bytes += num_bytes
        active.held_bytes = num_bytes

    def _leave(self, active: _Active) -> None:
        self._held_bytes -= active.held_bytes
        del self._active[active.sequence_id]
        if not self._active:
            self._idle.set()

    async def _answer(
        self, request: router_pb2.GenerateRequest, active: _Active, remaining_s: float | None
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Begins an answer, then relays it."""
        relay, chunk = await self._begin(request, active, remaining_s)
        while chunk is not None:
            yield chunk
            chunk = await relay.next_chunk()

    async def _begin(
        self, request: router_pb2.GenerateRequest, active: _Active, remaining_s: float | None
    ) -> tuple[Relay, router_pb2.GenerateResponse | None]:
        """Tokenises and places; places again on another worker while nothing was emitted. Returns with the first chunk.

        The submission is this call's alone: it ends with the first token, where the stream may live for hours.
        """
        if remaining_s is not None and remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request was placed")
        model = self._model(request.model)
        active.model = model.name
        prompt = await self._tokenize(request, model)
        active.tokenized_ns = time.monotonic_ns()
        active.prompt_tokens = len(prompt)
        check_fits(prompt, list(request.stop.stop_token_ids), model)
        submit = _submission(request, active, prompt, model, remaining_s)
        placement = policy.Placement(len(prompt), submit.stop.max_tokens)
        del prompt  # a long one is tens of megabytes as a list, and may queue for minutes
        tried: list[str] = []
        failure: TailpackError | None = None
        while True:
            link = self._choose(model.name, placement, active, tried, failure)
            tried.append(link.address)
            if failure is not None:
                active.num_retries += 1
                self.counters.retries += 1
            relay = self._place(request, submit, placement, link, active, model)
            try:
                return relay, await relay.next_chunk()
            except (Unavailable, CapacityError) as error:  # before any token: what was emitted comes ahead of an error
                if len(tried) >= MAX_ATTEMPTS:
                    raise
                failure = error
                link.detach(active.sequence_id)

    def _model(self, name: str) -> types_pb2.ModelInfo:
        """The model a request names. Raises NotFound, InvalidRequest, Unavailable."""
        known = self.registry.models()
        if not known:
            raise self._no_worker()
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
        raise self._no_worker()

    def _no_worker(self) -> Unavailable:
        links = self.registry.links.values()
        states = "; ".join(f"{link.address} is {link.state}" + (f" ({link.why})" if link.why else "") for link in links)
        return Unavailable("no worker is ready", reason="NO_WORKER", given=states[:2000], retry_after_ms=1000)

    async def _tokenize(self, request: router_pb2.GenerateRequest, model: types_pb2.ModelInfo) -> list[int]:
        def check(text: str) -> None:
            check_text_fits(text, self._tokenizer.min_tokens(text), model)

        match request.WhichOneof("prompt"):
            case "chat":
                messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
                return await self._tokenizer.encode_chat(messages, check)
            case "text":
                return await self._tokenizer.encode_text(request.text, check)
            case _:
                return list(request.token_ids.ids)

    def _choose(
        self,
        model: str,
        placement: policy.Placement,
        active: _Active,
        tried: list[str],
        failure: TailpackError | None,
    ) -> WorkerLink:
        if active.cancelled:
            raise RequestCancelled("the request was cancelled before it ran")
        links = self.registry.ready(model)
        address = policy.choose((link.candidate() for link in links), placement, active.request_id, tried)
        if address is None:
            raise failure or self._no_worker()
        return self.registry.links[address]

    def _place(
        self,
        request: router_pb2.GenerateRequest,
        submit: worker_pb2.Submit,
        placement: policy.Placement,
        link: WorkerLink,
        active: _Active,
        model: types_pb2.ModelInfo,
    ) -> Relay:
        hidden = set(request.stop.stop_token_ids)
        if not request.stop.ignore_eos:
            hidden.update(model.eos_token_ids)
        relay = Relay(
            active.request_id,
            link.worker_id,
            num_prompt_tokens=placement.prompt_tokens,
            detokenizer=Detokenizer(
                self._tokenizer.tokens, frozenset(hidden), text_begins=request.WhichOneof("prompt") == "chat"
            ),
            stop_strings=request.stop_strings,
            abort=lambda: link.abort(active.sequence_id),
        )
        link.submit(submit, relay, placement)
        active.link, active.relay = link, relay
        return relay

    def _account(self, active: _Active, outcome: str, reason: str) -> None:
        now_ns = time.monotonic_ns()
        num_tokens = active.relay.num_tokens if active.relay is not None else 0
        first_ns = active.relay.first_token_ns if active.relay is not None else None
        counters = self.counters
        setattr(counters, outcome, getattr(counters, outcome) + 1)
        if active.link is not None:
            counters.prompt_tokens += active.prompt_tokens
            counters.output_tokens += num_tokens
        log.info(
            "request",
            request_id=active.request_id,
            tenant=active.tenant,
            model=active.model,
            worker=active.link.worker_id if active.link is not None else None,
            outcome=outcome,
            reason=reason,
            prompt_tokens=active.prompt_tokens,
            output_tokens=num_tokens,
            retries=active.num_retries,
            tokenize_ms=_ms(active.started_ns, active.tokenized_ns),
            ttft_ms=_ms(active.started_ns, first_ns),
            total_ms=_ms(active.started_ns, now_ns),
            traceparent=active.traceparent or None,
        )

    # --- the others ---

    async def Cancel(self, request: router_pb2.CancelRequest, context: Any) -> router_pb2.CancelResponse:
        tenant = rpc.call_metadata(context).tenant
        if not request.request_id:
            raise InvalidRequest("request_id is empty", reason="EMPTY_REQUEST_ID")
        wanted = sequence_id(tenant, request.request_id)
        own = self._active.get(wanted)
        if own is not None:
            own.cancel()
            return router_pb2.CancelResponse(found=True)
        links = [link for link in self.registry.links.values() if link.state in ("ready", "draining")]
        answers = await asyncio.gather(
            *(link.abort_foreign(wanted, tenant, CANCEL_TIMEOUT_S) for link in links), return_exceptions=True
        )
        if not any(answer is True for answer in answers):
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer  # "not found" would be a guess
        return router_pb2.CancelResponse(found=any(answer is True for answer in answers))

    async def ListWorkers(self, request: router_pb2.ListWorkersRequest, context: Any) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse(workers=[link.status() for link in self.registry.links.values()])

    async def Stats(self, request: router_pb2.StatsRequest, context: Any) -> router_pb2.StatsResponse:
        return router_pb2.StatsResponse(
            router_id=self.router_id,
            uptime_ns=time.monotonic_ns() - self._started_ns,
            in_flight=len(self._active),
            **vars(self.counters),
        )

    def _workers_changed(self) -> None:
        self._on_ready(not self.draining and bool(self.registry.ready()))


def _submission(
    request: router_pb2.GenerateRequest,
    active: _Active,
    prompt: list[int],
    model: types_pb2.ModelInfo,
    remaining_s: float | None,
) -> worker_pb2.Submit:
    room = model.max_sequence_tokens - len(prompt)
    submit = worker_pb2.Submit(
        request_id=active.sequence_id,
        tenant=active.tenant,
        prompt_token_ids=prompt,
        sampling=request.sampling,
        stop=request.stop,
        traceparent=active.traceparent,
        prefix_reuse=request.prefix_reuse,
    )
    submit.stop.max_tokens = min(room, request.stop.max_tokens or DEFAULT_MAX_TOKENS)
    if remaining_s is not None:
        submit.deadline_unix_ns = time.time_ns() + int(remaining_s * 1e9)
    return submit


def _ran_out(deadline_s: float | None, remaining_s: float | None) -> bool:
    """Whether a call that the client ended was ended by its deadline; both in seconds, None without a deadline.

    The client's clock runs out first: it started earlier, by the way here, and gRPC rounds up what it sends, by 1% at
    most.
    """
    if deadline_s is None or remaining_s is None:
        return False
    return remaining_s <= 0.01 * deadline_s + min(DEADLINE_LAG_S, deadline_s / 4)


def _short(reason: types_pb2.FinishReason.ValueType) -> str:
    return types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")


def _ms(start_ns: int, end_ns: int | None) -> float | None:
    return None if end_ns is None else round((end_ns - start_ns) / 1e6, 2)
