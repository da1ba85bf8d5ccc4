"""One request from its first check to its last chunk: admitted, tokenised, placed, relayed, accounted for."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import structlog

from protos import router_pb2, types_pb2, worker_pb2
from protos.errors import DeadlineExceeded, RequestCancelled, TailpackError, Unavailable
from protos.histogram import Histogram
from protos.tracing import NoSpan, Span, error_name, request_span
from router import account, policy
from router.admission import Call
from router.detokenizer import Detokenizer
from router.prompt_log import prompt_text
from router.recovery import Recovery, takers
from router.registry import WorkerLink
from router.relay import Relay
from router.replay import Skip
from router.subscription import Subscription
from router.validate import DEFAULT_MAX_TOKENS, check_fits, check_request, check_text_fits

if TYPE_CHECKING:
    from router.requests import Requests

log = structlog.get_logger("router")


class Answer:
    """One request between its first check and its end; one log line comes of it.

    Entering it returns with the first chunk there. A worker that fails is replaced by itself or another, before and
    behind that: router/recovery.py says how.

    Raises, on entering and from iterating: TailpackError. What was emitted comes ahead of an error.
    """

    event = "request"
    """Of its line in the log."""

    def __init__(
        self, requests: Requests, request: router_pb2.GenerateRequest, call: Call, started_ns: int | None = None
    ) -> None:
        """started_ns: when it came, time.monotonic_ns; None: now."""
        self.call = call
        self._requests = requests
        self._request = request
        self._key: str | None = None  # in admission, where it is not the sequence's
        self._entered = False
        self._started_ns = started_ns or time.monotonic_ns()
        self._span = request_span(requests.tracing, call.traceparent, request_id=call.request_id, door=call.door)
        self._relay_span: Span | NoSpan | None = None  # of the newest placement; the worker's spans are below it
        self._deadline_s = call.remaining_s()
        self._cancelled = False
        self._relay: Relay | None = None
        self._stream: Subscription | None = None
        self._placement = _NOWHERE
        self._placed_on = _NOBODY  # as it was then
        self._recovery: Recovery | None = None
        self._first: router_pb2.GenerateResponse | None = None
        self._finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
        self._model = ""
        self._num_prompt_tokens = 0
        self._num_charged = 0  # of its prompt's tokens, to its tenant
        self._tokenized_ns: int | None = None
        self._num_retries = 0

    async def __aenter__(self) -> Self:
        self._arrive()
        try:
            await self._enter()
            self._first = await self._begin()
        except BaseException as error:
            self._end(error)
            raise
        if self._relay is not None and (first_ns := self._relay.pace.first_ns) is not None:
            self._requests.metrics.ttft.observe((first_ns - self._started_ns) / 1e9)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end(error)  # also on cancellation: nothing here waits

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> router_pb2.GenerateResponse:
        assert self._relay is not None, "use it inside `async with`"
        chunk, self._first = self._first, None
        if chunk is None:
            try:
                chunk = await self._relay.next_chunk()
            except TailpackError as failure:
                chunk = await self._go_on(failure)
            if chunk is None:
                raise StopAsyncIteration
        if chunk.finish_reason:
            self._finish_reason = chunk.finish_reason
        return chunk

    def refuse(self, error: BaseException) -> None:
        """Counts and logs a request that ends before it is entered."""
        self._arrive()
        self._end(error)

    def cancel(self) -> None:
        """Somebody asked to end it: its caller gets a last chunk that says so."""
        self._cancelled = True
        if self._relay is not None:
            self._relay.cancel()
        if self._recovery is not None:
            self._recovery.wake.set()

    # --- placing ---

    def _arrive(self) -> None:
        self._requests.counters.requests += 1

    async def _enter(self) -> None:
        admission = self._requests.admission
        await admission.enter(self.call, self.cancel)
        self._entered = True
        check_request(self._request)
        admission.hold(self.call, self._request.ByteSize())

    async def _begin(self) -> router_pb2.GenerateResponse | None:
        """Tokenises and places. Returns the first chunk.

        The submission is this call's alone: it ends with the first token, where the stream may live for hours.
        """
        requests, request = self._requests, self._request
        if self._deadline_s is not None and self._deadline_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request was placed")
        model = requests.model(request.model)
        self._model = model.name
        with self._span.phase("tokenize"):
            prompt = await self._tokenize(model)
        self._tokenized_ns = time.monotonic_ns()
        requests.metrics.tokenize.observe((self._tokenized_ns - self._started_ns) / 1e9)
        self._num_prompt_tokens = len(prompt)
        check_fits(prompt, list(request.stop.stop_token_ids), model)
        requests.tenants.admit_prompt(self.call.tenant, len(prompt))
        self._num_charged = len(prompt)
        submit = self._submission(prompt, model)
        self._placement = policy.Placement(len(prompt), submit.stop.max_tokens)
        del prompt  # a long one is tens of megabytes as a list, and may queue for minutes
        if self._cancelled:
            raise RequestCancelled("the request was cancelled before it ran")
        with self._span.phase("place"):
            link = self._choose(self._links())
        if link is None:
            raise self._nobody()
        self._place(submit, link)
        assert self._relay is not None
        try:
            return await self._relay.next_chunk()
        except TailpackError as failure:
            return await self._go_on(failure, submit)

    async def _tokenize(self, model: types_pb2.ModelInfo) -> list[int]:
        tokenizer, request = self._requests.tokenizer, self._request

        def check(text: str) -> None:
            check_text_fits(text, tokenizer.min_tokens(text), model)

        match request.WhichOneof("prompt"):
            case "chat":
                messages = [{"role": message.role, "content": message.content} for message in request.chat.messages]
                return await tokenizer.encode_chat(messages, check, thinking=request.chat.thinking)
            case "text":
                return await tokenizer.encode_text(request.text, check)
            case _:
                return list(request.token_ids.ids)

    def _choose(self, links: list[WorkerLink]) -> WorkerLink | None:
        address = policy.choose((link.candidate() for link in links), self._placement, self.call.request_id)
        return None if address is None else self._requests.registry.links[address]

    def _links(self) -> list[WorkerLink]:
        """Those that may be chosen."""
        return self._requests.registry.ready(self._model)

    def _nobody(self) -> TailpackError:
        """The error where there is none."""
        return self._requests.no_worker()

    def _submission(self, prompt: list[int], model: types_pb2.ModelInfo) -> worker_pb2.Submit:
        request, call = self._request, self.call
        room = model.max_sequence_tokens - len(prompt)
        submit = worker_pb2.Submit(
            request_id=call.sequence_id,
            tenant=call.tenant,
            prompt_token_ids=prompt,
            sampling=request.sampling,
            stop=request.stop,
            traceparent=call.traceparent,
            prefix_reuse=request.prefix_reuse,
        )
        submit.stop.max_tokens = min(room, request.stop.max_tokens or DEFAULT_MAX_TOKENS)
        if self._deadline_s is not None:
            submit.deadline_unix_ns = time.time_ns() + int(self._deadline_s * 1e9)
        return submit

    def _place(self, submit: worker_pb2.Submit, link: WorkerLink) -> None:
        """The first time, or again with what is said of the sequence from here on."""
        assert link.info is not None
        span = self._relay_span = self._span.begin("relay", worker=link.worker_id)
        submit.traceparent = span.traceparent
        stream = Subscription(link, self.call.sequence_id, resumable=submit.HasField("resumable"))
        relay = self._relay
        if relay is None:
            charge = partial(self._requests.tenants.charge, self.call.tenant)
            relay = self._relay_of(
                stream, self._placement.prompt_tokens, link.info.model, self._requests.metrics.itl, charge
            )
        link.submit(submit, relay, self._placement)
        if self._relay is not None:
            relay.go_on(stream, link.worker_id, repeats=stream.resumable)
        self._stream, self._relay, self._placed_on = stream, relay, link.info

    # --- when a worker fails ---

    async def _go_on(
        self, failure: TailpackError, submit: worker_pb2.Submit | None = None
    ) -> router_pb2.GenerateResponse | None:
        """Places it again until a chunk comes of it. submit: while nothing was emitted, what was submitted.

        Raises:
            TailpackError: nobody takes it, or the failure is none that another worker could mend.
        """
        relay, stream = self._relay, self._stream
        assert relay is not None and stream is not None
        recovery = self._recovery = self._recovery or self._new_recovery(relay)
        while True:
            self._end_relay_span(failure)
            stream.leave()
            recovery.failed(failure, stream, self._placed_on)
            placed = await self._place_again(recovery, submit)
            stream = self._stream or stream
            try:
                chunk = await relay.next_chunk()
            except TailpackError as again:
                failure = again
                continue
            if placed:
                recovery.went_on("joined" if relay.joined else "recomputed")
            return chunk

    def _new_recovery(self, relay: Relay) -> Recovery:
        requests = self._requests
        return Recovery(requests.registry, relay, requests.recover_wait_s, requests.recovered)

    async def _place_again(self, recovery: Recovery, submit: worker_pb2.Submit | None) -> bool:
        """Where there is a place for it. False: it was cancelled. Raises TailpackError where there is none in time."""
        relay = self._relay
        assert relay is not None
        links = self._links if relay.num_tokens == 0 else lambda: takers(self._links(), self._placed_on)
        while True:
            with self._span.phase("place"):
                link = await recovery.place(links, self._choose)
            if link is None:
                return False
            if submit is None or relay.num_tokens:
                submit = await self._submission_again(relay)
            if recovery.cancelled:
                return False
            try:
                self._place(submit, link)
            except Unavailable:  # it has left since
                recovery.refused(link)
                continue
            if relay.num_tokens == 0:
                self._num_retries += 1
                self._requests.counters.retries += 1
            return True

    async def _submission_again(self, relay: Relay) -> worker_pb2.Submit:
        """What is to be said of a sequence that began: its prompt is made again, as its tokens are long forgotten."""
        model = self._placed_on.model
        submit = self._submission(await self._tokenize(model), model)
        submit.stop.max_tokens = self._placement.max_tokens
        submit.emitted_token_ids.extend(relay.log.token_ids)
        if relay.seed and not submit.sampling.HasField("seed"):
            submit.sampling.seed = relay.seed
        if submit.deadline_unix_ns and (left_s := self.call.remaining_s()) is not None:
            submit.deadline_unix_ns = time.time_ns() + int(left_s * 1e9)
        return submit

    def _relay_of(
        self,
        stream: Subscription,
        num_prompt_tokens: int,
        model: types_pb2.ModelInfo,
        itl: Histogram,
        emitted: Callable[[int], None],
        skip: Skip | None = None,
    ) -> Relay:
        """Of the request's prompt only its kind counts here."""
        request = self._request
        hidden = set(request.stop.stop_token_ids)
        if not request.stop.ignore_eos:
            hidden.update(model.eos_token_ids)
        return Relay(
            self.call.request_id,
            stream.link.worker_id,
            num_prompt_tokens=num_prompt_tokens,
            detokenizer=Detokenizer(
                self._requests.tokenizer.tokens, frozenset(hidden), text_begins=request.WhichOneof("prompt") == "chat"
            ),
            stop_strings=request.stop_strings,
            source=stream,
            itl=itl,
            emitted=emitted,
            skip=skip,
            unread=self._requests.unread,
            logs=self._requests.token_logs,
        )

    # --- the end ---

    def _end(self, error: BaseException | None) -> None:
        outcome, reason = account.outcome(
            error,
            self._finish_reason,
            placed=self._stream is not None,
            resumable=self._stream is not None and self._stream.resumable,
            deadline_s=self._deadline_s,
            remaining_s=self.call.remaining_s,
        )
        if self._stream is not None:
            self._stream.leave(delivered=bool(self._finish_reason))
        if self._relay is not None:
            self._relay.close()
        if outcome in ("rejected", "failed") and self._num_charged and not (self._relay and self._relay.num_tokens):
            self._requests.tenants.charge(self.call.tenant, -self._num_charged)  # it got nothing for them
        if self._entered:
            self._requests.admission.leave(self.call, key=self._key)
        self._account(outcome, reason)
        if self._requests.tracing is not None:
            self._end_spans(reason, error)

    def _end_spans(self, reason: str, error: BaseException | None) -> None:
        self._end_relay_span(error)
        self._span.set(model=self._model, prompt_tokens=self._num_prompt_tokens, reason=reason)
        self._span.end(error=_failure_name(error))

    def _end_relay_span(self, error: BaseException | None) -> None:
        span, self._relay_span = self._relay_span, None
        if span is not None:
            if self._relay is not None and self._relay.pace.first_ns is not None:
                span.event("first token", self._relay.pace.first_ns)
            span.end(error=_failure_name(error))

    def _account(self, outcome: str, reason: str) -> None:
        """Counts the request, and logs its one line."""
        total_ns = time.monotonic_ns() - self._started_ns
        self._count(outcome, reason, total_ns)
        log.info(
            self.event,
            request_id=self.call.request_id,
            tenant=self.call.tenant,
            door=self.call.door,
            model=self._model,
            worker=self._stream.link.worker_id if self._stream is not None else None,
            outcome=outcome,
            reason=reason,
            prompt_tokens=self._num_prompt_tokens,
            retries=self._num_retries,
            recovered=",".join(self._recovery.outcomes) or None if self._recovery is not None else None,
            **account.numbers(
                self._relay, started_ns=self._started_ns, tokenized_ns=self._tokenized_ns, total_ns=total_ns
            ),
            traceparent=self.call.traceparent or None,
            **({"prompt": prompt_text(self._request)} if self._requests.log_prompts else {}),
        )

    def _count(self, outcome: str, reason: str, total_ns: int) -> None:
        relay, counters, metrics = self._relay, self._requests.counters, self._requests.metrics
        setattr(counters, outcome, getattr(counters, outcome) + 1)
        metrics.end(self.call.door, outcome, reason)
        metrics.duration.observe(total_ns / 1e9)
        if relay is None:
            return
        counters.prompt_tokens += self._num_prompt_tokens
        counters.output_tokens += relay.num_tokens
        if relay.last_output is not None and relay.num_tokens:
            usage = relay.last_output.usage
            metrics.reused(usage.cached_prompt_tokens, usage.prefix_exact)


def _failure_name(error: BaseException | None) -> str | None:
    return error_name(error) if isinstance(error, Exception) else None


_NOWHERE, _NOBODY = policy.Placement(0, 0), types_pb2.WorkerInfo()
