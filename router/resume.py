"""Resumable answers: found on the workers that have them, joined, resumed, or begun.

The sequence of a resumable request belongs to its worker, which keeps what it emitted (worker/resumable.py). A router
only subscribes to it: the call that placed the request as any other. So every router can go on with every answer, and
makes its text again from the first token, with the same stop strings and the same character boundaries.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Self

import structlog

from protos import router_pb2, rpc, types_pb2, worker_pb2
from protos.errors import AlreadyExists, NotFound, PreconditionFailed, TailpackError, Unavailable, printable
from protos.histogram import STEP_BOUNDS_S, Histogram
from protos.limits import DEFAULT_RESUME_GRACE_MS
from router.admission import Call
from router.find import Found, ask_until_back, find, worker_not_asked
from router.generation import Answer
from router.recovery import Recovery
from router.registry import WorkerLink
from router.relay import Relay
from router.replay import Place, Skip, bad_offset
from router.subscription import Subscription
from router.validate import check_request

if TYPE_CHECKING:
    from router.requests import Requests

log = structlog.get_logger("router")

HASHED_ON_LOOP_BYTES = 1 << 18
"""A larger request is hashed on another thread."""


class Resumables:
    """The resumable answers that one router streams."""

    def __init__(self, requests: Requests) -> None:
        self.firsts: dict[str, First] = {}  # calls that place a request, by sequence id
        self.num_resumed = 0  # open calls of Resume
        self.num_looking = 0  # calls that are no request yet: workers are asked whether they have its answer
        self._requests = requests
        self._numbers = itertools.count()

    @asynccontextmanager
    async def generate(self, request: router_pb2.GenerateRequest, call: Call) -> AsyncIterator[Answer]:
        """Joins the answer where the same request runs or is kept, else begins it.

        Only an id that its caller chose is looked for. Two first calls at the same moment through two routers may find
        nothing both, and both run where they are placed on different workers.

        Raises:
            AlreadyExists: another request has this id (DUPLICATE_REQUEST). Unavailable: a worker that is connected does
            not answer. And what Answer raises.
        """
        started_ns = time.monotonic_ns()
        try:
            check_request(request)
            digest = await _digest(request)
            found = await self._find(call, request.ByteSize()) if call.own_id else None
            if found is not None and found.digest != digest:
                raise AlreadyExists(
                    "another request with this id runs or is kept",
                    reason="DUPLICATE_REQUEST",
                    given=call.request_id,
                    hint="a resumable request joins its answer only when it is sent again unchanged",
                )
        except BaseException as error:
            Answer(self._requests, request, call, started_ns).refuse(error)
            raise
        answer: Answer
        if found is not None:
            answer = Joined(self._requests, found, call, Place(), num_bytes=request.ByteSize(), started_ns=started_ns)
        else:
            answer = First(self._requests, request, call, digest, started_ns)
        async with answer:  # nothing has waited since nothing was found
            yield answer

    @asynccontextmanager
    async def resume(self, request: router_pb2.ResumeRequest, call: Call) -> AsyncIterator[Answer]:
        """Goes on with an answer behind what its caller has. ``call`` is that of Resume, under the answer's id.

        Raises:
            NotFound: UNKNOWN_REQUEST. InvalidRequest: BAD_OFFSET. Unavailable: a worker that may have it is away.
        """
        try:
            found = await self._find(call, request.ByteSize(), wait_s=self._requests.recover_wait_s)
            if found is None:
                raise _unknown(call)
            if request.token_offset > found.num_tokens:
                raise bad_offset(f"token offset {request.token_offset}", f"at most {found.num_tokens}, what is there")
        except TailpackError as error:
            given = printable(call.request_id[:128])  # of its message: it may be anything, and megabytes of it
            log.info("resume", request_id=given, tenant=call.tenant, outcome="rejected", reason=error.reason)
            raise
        async with Resumed(
            self._requests, found, call, Place(request.token_offset, request.text_offset), num_bytes=request.ByteSize()
        ) as answer:
            yield answer

    async def _find(self, call: Call, num_bytes: int, *, wait_s: float | None = None) -> Found | None:
        """Who has it. The call is admitted as any other meanwhile: it holds its request, and asks all workers.

        wait_s: for workers that are away. None: they are taken to be gone with all they had: else one dead worker would
        hold up every request with an id.
        """
        _ = call.sequence_id  # raises where it could be taken for another tenant's
        if not rpc.is_id(call.request_id):
            return None  # no request has such an id
        admission, key = self._requests.admission, f"/looking/{next(self._numbers)}"
        await admission.enter(call, _nothing_to_cancel, key=key)
        self.num_looking += 1
        try:
            admission.hold(call, num_bytes, key=key)
            if wait_s is not None:
                return await ask_until_back(self._requests.registry, wait_s, lambda: self.look(call))
            found, failures = await self.look(call)
            if found is None and failures:
                raise worker_not_asked(failures)
            return found
        finally:
            self.num_looking -= 1
            admission.leave(call, key=key)

    async def look(self, call: Call) -> tuple[Found | None, list[str]]:
        """Once, as router.find.find, here first: a call that is about to place the request is waited for."""
        wanted = call.sequence_id
        while True:
            while (first := self.firsts.get(wanted)) is not None and not first.is_cut:
                await first.placed.wait()
                if not first.is_cut and (found := first.found()) is not None:
                    return found, []
            found, failures = await find(self._requests.registry, wanted, call.tenant)
            if found is not None or first is not None or wanted not in self.firsts:
                return found, failures


def _nothing_to_cancel() -> None:
    """Cancel looks for ids, and what only looks for an answer is in under none."""


class First(Answer):
    """The call that places a resumable request. When it ends, the sequence goes on."""

    def __init__(
        self, requests: Requests, request: router_pb2.GenerateRequest, call: Call, digest: bytes, started_ns: int
    ) -> None:
        super().__init__(requests, request, call, started_ns)
        self.digest = digest
        self._attempt = 0
        self.placed = asyncio.Event()  # or ended without

    def found(self) -> Found | None:
        """Where it was placed; None: it ended before that."""
        if self._stream is None or self._relay is None:
            return None
        return Found(self._stream.link, self._request, self.digest, self._num_prompt_tokens, self._relay.num_tokens)

    @property
    def is_cut(self) -> bool:
        """It has lost its worker, and is about to place the request again."""
        return self._stream is not None and self._stream.is_cut

    async def __aenter__(self) -> Self:
        # Before anything waits, so that its like finds it and not nothing.
        self._requests.resumables.firsts.setdefault(self.call.sequence_id, self)
        return await super().__aenter__()

    def _links(self) -> list[WorkerLink]:
        return [link for link in super()._links() if link.can_resume()]

    def _nobody(self) -> TailpackError:
        if not super()._links():
            return super()._nobody()
        return PreconditionFailed(
            "no worker of this model keeps resumable answers",
            reason="RESUME_NOT_SUPPORTED",
            given="resumable",
            hint="update the workers, or make the request not resumable",
        )

    def _submission(self, prompt: list[int], model: types_pb2.ModelInfo) -> worker_pb2.Submit:
        submit = super()._submission(prompt, model)
        submit.deadline_unix_ns = 0  # that of this call; the request may outlive it
        submit.resumable.grace_ms = self._request.resume_grace_ms or DEFAULT_RESUME_GRACE_MS
        submit.resumable.request_digest = self.digest
        submit.resumable.caller_request = _without_prompt(self._request).SerializeToString()
        return submit

    def _place(self, submit: worker_pb2.Submit, link: WorkerLink) -> None:
        self._attempt = submit.resumable.attempt = self._attempt + 1
        super()._place(submit, link)
        self.placed.set()

    async def _place_again(self, recovery: Recovery, submit: worker_pb2.Submit | None) -> bool:
        self.placed.clear()  # whoever looks for it waits for its next place
        return await super()._place_again(recovery, submit)

    def _end(self, error: BaseException | None) -> None:
        super()._end(error)
        if self._requests.resumables.firsts.get(self.call.sequence_id) is self:
            del self._requests.resumables.firsts[self.call.sequence_id]
        self.placed.set()


class Joined(Answer):
    """A call of Generate whose request is answered already. It counts as a request like any other, and in ``resumes``;
    of tokens it counts those that it sends, and no prompt, as nothing was computed for it.
    """

    _keys = itertools.count()

    def __init__(
        self,
        requests: Requests,
        found: Found,
        call: Call,
        place: Place,
        *,
        num_bytes: int,
        started_ns: int | None = None,
    ) -> None:
        super().__init__(requests, found.request, call, started_ns)
        self._found = found
        self._place_of_caller = place
        self._num_bytes = num_bytes
        self._key = f"/resumed/{next(self._keys)}"  # beside the sequence's own, which Cancel looks for; no id has a "/"

    async def _enter(self) -> None:
        admission = self._requests.admission
        await admission.enter(self.call, self.cancel, key=self._key)
        self._entered = True
        admission.hold(self.call, self._num_bytes, key=self._key)

    async def _begin(self) -> router_pb2.GenerateResponse | None:
        link, wanted = self._found.link, self.call.sequence_id
        if link.info is None:
            raise Unavailable(f"worker {link.worker_id} is not connected", retry_after_ms=500)
        self._model = link.info.model.name
        stream = Subscription(link, link.subscription_name(wanted), resumable=True)
        relay = self._relay_of(
            stream,
            self._found.num_prompt_tokens,
            link.info.model,
            Histogram(STEP_BOUNDS_S),  # a replay's gaps between tokens say nothing
            self._charge,
            Skip(self._place_of_caller, self._found.num_tokens),
        )
        link.subscribe(stream.name, wanted, self.call.tenant, relay)
        self._stream, self._relay, self._placed_on = stream, relay, link.info
        self._requests.counters.resumes += 1
        try:
            return await relay.next_chunk()
        except NotFound:  # forgotten since it was found
            raise self._gone() from None
        except TailpackError as failure:
            return await self._go_on(failure)

    def _new_recovery(self, relay: Relay) -> Recovery:
        requests = self._requests
        return Recovery(requests.registry, relay, requests.recover_wait_s, requests.recovered, needs_log=False)

    async def _place_again(self, recovery: Recovery, submit: worker_pb2.Submit | None) -> bool:
        """At whichever worker has the answer: the same that is back, or where the call that placed it took it."""
        relay, wanted = self._relay, self.call.sequence_id
        assert relay is not None
        while True:
            link = await recovery.search(self._look_again)
            if link is None or link.info is None:
                return False
            stream = Subscription(link, link.subscription_name(wanted), resumable=True)
            try:
                link.subscribe(stream.name, wanted, self.call.tenant, relay)
            except Unavailable:  # it has left since
                recovery.refused(link)
                continue
            relay.go_on(stream, link.worker_id, repeats=True)
            relay.joined = True  # whoever reads an answer has nothing computed
            self._stream, self._placed_on = stream, link.info
            return True

    async def _look_again(self) -> tuple[WorkerLink | None, list[str]]:
        found, failures = await self._requests.resumables.look(self.call)
        return (found.link if found is not None and found.digest == self._found.digest else None), failures

    def _gone(self) -> TailpackError:
        return Unavailable("the answer was forgotten just now", reason="ANSWER_GONE", retry_after_ms=100)

    def _charge(self, num_tokens: int) -> None:
        """The tenant pays for what is sent, not for what is made again without being sent."""
        assert self._relay is not None
        new = min(num_tokens, self._relay.num_tokens - self._place_of_caller.token_offset)
        if new > 0:
            self._requests.tenants.charge(self.call.tenant, new)

    def _count(self, outcome: str, reason: str, total_ns: int) -> None:
        counters, metrics = self._requests.counters, self._requests.metrics
        setattr(counters, outcome, getattr(counters, outcome) + 1)
        metrics.end(self.call.door, outcome, reason)
        metrics.duration.observe(total_ns / 1e9)
        self._count_tokens()

    def _count_tokens(self) -> None:
        if self._relay is not None:
            sent = max(0, self._relay.num_tokens - self._place_of_caller.token_offset)
            self._requests.counters.output_tokens += sent


class Resumed(Joined):
    """A call of Resume. It is no request: it counts in ``resumes`` and ``streams``, and the tokens that it sends."""

    event = "resume"

    def _arrive(self) -> None:
        self._requests.resumables.num_resumed += 1

    def _gone(self) -> TailpackError:
        return _unknown(self.call)

    def _count(self, outcome: str, reason: str, total_ns: int) -> None:
        self._requests.resumables.num_resumed -= 1
        self._count_tokens()


def _unknown(call: Call) -> NotFound:
    return NotFound(
        "no such request of this tenant runs or is kept",
        reason="UNKNOWN_REQUEST",
        given=call.request_id[:128],
        hint="it was not resumable, was cancelled, or its grace time is over",
    )


async def _digest(request: router_pb2.GenerateRequest) -> bytes:
    """Equal requests have equal ones, on all routers."""

    def digest() -> bytes:
        return hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest()

    return await asyncio.to_thread(digest) if request.ByteSize() > HASHED_ON_LOOP_BYTES else digest()


def _without_prompt(request: router_pb2.GenerateRequest) -> router_pb2.GenerateRequest:
    """What the text of the answer depends on, and the prompt's kind."""
    kept = router_pb2.GenerateRequest(stop=request.stop, stop_strings=request.stop_strings)
    match request.WhichOneof("prompt"):
        case "chat":
            kept.chat.SetInParent()
        case "text":
            kept.text = ""
        case "token_ids":
            kept.token_ids.SetInParent()
    return kept
