"""The gRPC face of a worker. Handlers only enqueue; what happens to a sequence is the engine's business."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import structlog

from protos import kvstore_pb2, rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.errors import (
    AlreadyExists,
    CapacityError,
    InternalError,
    InvalidRequest,
    NotFound,
    TailpackError,
    Unavailable,
)
from protos.limits import choice_ids
from worker.engine import Engine
from worker.resumable import duplicate, goes_on_with
from worker.sequence import Request
from worker.sessions import RouterSession, Sessions

log = structlog.get_logger("worker")

LARGE_PROMPT_TOKENS = 1 << 14
"""From here on a prompt is read off the event loop: a million tokens take 170 ms."""

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Sessions, Abort, Find and Info over one engine. ``memory`` says what the worker takes."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        info: types_pb2.WorkerInfo,
        memory: Callable[[], worker_pb2.WorkerMemory],
        kv: Callable[[], kvstore_pb2.DeviceStats | None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._answers = sessions.answers
        self._info = info
        self._memory = memory
        self._kv = kv
        self._draining: str | None = None

    def drain(self, why: str) -> None:
        """From now on new sequences are refused (DRAINING); routers are told."""
        self._draining = why
        self._sessions.say_goodbye(why)

    async def Session(
        self, request_iterator: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        hello = await _hello(request_iterator)
        with self._sessions.open(f"{hello.router_id}/{hello.incarnation}", self._engine) as session:
            log.info("router connected", router=hello.router_id, owner=session.owner)
            reader = asyncio.create_task(self._read(request_iterator, session))
            try:
                yield worker_pb2.WorkerMessage(welcome=worker_pb2.Welcome(info=self._info, load=self._engine.load()))
                if self._draining is not None:
                    session.say_goodbye(self._draining)
                while (message := await session.next()) is not None:
                    yield message
            finally:
                reader.cancel()
                log.info("router disconnected", router=hello.router_id, owner=session.owner)

    async def Abort(self, request: worker_pb2.AbortRequest, context: Any) -> worker_pb2.AbortResponse:
        answer = self._answers.find(request.request_id, request.tenant)
        if answer is not None:
            self._answers.cancel(answer)
            return worker_pb2.AbortResponse(found=True)
        found = [self._engine.abort(each, tenant=request.tenant) for each in choice_ids(request.request_id)]
        return worker_pb2.AbortResponse(found=any(found))

    async def Find(self, request: worker_pb2.FindRequest, context: Any) -> worker_pb2.FindResponse:
        answer = self._answers.find(request.request_id, request.tenant)
        if answer is None or not answer.is_resumable:
            return worker_pb2.FindResponse()
        return worker_pb2.FindResponse(
            found=True,
            request_digest=answer.submit.resumable.request_digest,
            caller_request=answer.submit.resumable.caller_request,
            prompt_tokens=answer.num_prompt_tokens,
            output_tokens=len(answer.token_ids),
            ended=answer.last is not None,
            attempt=answer.submit.resumable.attempt,
        )

    async def Info(self, request: worker_pb2.InfoRequest, context: Any) -> worker_pb2.InfoResponse:
        memory = self._memory() if request.with_memory else None
        kv = await asyncio.to_thread(self._kv) if request.with_kv else None
        return worker_pb2.InfoResponse(info=self._info, load=self._engine.load(), memory=memory, kv=kv)

    async def _read(self, messages: AsyncIterator[worker_pb2.RouterMessage], session: RouterSession) -> None:
        """Takes in what the router says until it says no more; then the session ends."""
        failure: TailpackError | None = None
        try:
            async for message in messages:
                for each in message.batch.messages if message.HasField("batch") else (message,):
                    await self._take(each, session)
        except TailpackError as refused:
            failure = refused
        finally:
            session.end(failure)

    async def _take(self, message: worker_pb2.RouterMessage, session: RouterSession) -> None:
        match message.WhichOneof("message"):
            case "submit":
                await self._submit(message.submit, session)
            case "abort":
                self._abort(message.abort, session)
            case "resume":
                self._resume(message.resume, session)
            case "more":
                if subscription := session.subscriptions.get(message.more.subscription_id):
                    subscription.go_on()
            case "leave":
                session.leave(message.leave.subscription_id, delivered=message.leave.delivered)
            case "hello":
                raise InvalidRequest("a session says hello once", reason="HELLO_TWICE")
            case _:
                raise InvalidRequest("an empty message, or one that this version does not know, or a batch in a batch")

    async def _submit(self, submit: worker_pb2.Submit, session: RouterSession) -> None:
        """Hands a sequence to the engine. A large one is read on another thread, and what the session says next waits
        for it: an abort must not overtake its submit.
        """
        resumable = submit.HasField("resumable")
        owner = self._answers.new_owner() if resumable else session.owner
        try:
            request = await self._request(submit, owner)
            if self._draining is not None:
                raise Unavailable(
                    "this worker takes no new sequences", reason="DRAINING", hint=self._draining, retry_after_ms=0
                )
            if self._joins(submit, request, session):
                return
            if resumable:
                session.check_name(submit.request_id)
                if not self._open(submit, owner, session):
                    return
            elif self._answers.holds(submit.request_id):
                raise duplicate(submit.request_id)
        except (AlreadyExists, CapacityError, InternalError, InvalidRequest, Unavailable) as refusal:
            session.add([_refused(submit.request_id, len(submit.emitted_token_ids), refusal)])
            return
        try:
            self._engine.submit(request)
        except TailpackError:
            if resumable:
                self._answers.drop(owner)
            raise

    async def _request(self, submit: worker_pb2.Submit, owner: str) -> Request:
        """Raises InternalError where it cannot be read: that must not cost the session's other sequences."""
        try:
            if len(submit.prompt_token_ids) > LARGE_PROMPT_TOKENS and self._draining is None:
                return await asyncio.to_thread(Request.from_proto, submit, owner)
            return Request.from_proto(submit, owner)
        except Exception as failure:
            log.error("bug in reading a request", request_id=submit.request_id, exc_info=failure)
            raise InternalError(
                "the worker could not read this request", hint=f"{type(failure).__name__}; see its log"
            ) from failure

    def _joins(self, submit: worker_pb2.Submit, request: Request, session: RouterSession) -> bool:
        """Whether a submission goes on with an adopted sequence. One of its id that it does not go on with is ended."""
        answer = self._answers.adopted(submit.request_id, submit.tenant)
        if answer is None:
            return False
        session.check_name(submit.request_id)
        if goes_on_with(request, answer):
            session.subscribed(self._answers.join(answer, submit, session))
            return True
        log.info(
            "an adopted sequence is not what its router asks for, and is computed anew",
            request_id=submit.request_id,
            num_tokens=len(answer.token_ids),
            num_emitted=len(request.emitted),
        )
        self._answers.cancel(answer)
        return False

    def _open(self, submit: worker_pb2.Submit, owner: str, session: RouterSession) -> bool:
        """Subscribes the session to a resumable submission; whether the engine has yet to be told of it."""
        abort = partial(self._engine.abort, submit.request_id, owner=owner)
        subscription = self._answers.open(submit, owner, abort, session, partial(self._engine.let_go, owner))
        session.subscribed(subscription)
        return subscription.answer.owner == owner

    def _resume(self, resume: worker_pb2.Resume, session: RouterSession) -> None:
        name = resume.subscription_id
        session.check_name(name)
        try:
            session.subscribed(self._answers.resume(resume.request_id, resume.tenant, name, session))
        except NotFound as unknown:
            session.add([_refused(name, 0, unknown)])

    def _abort(self, abort: worker_pb2.Abort, session: RouterSession) -> None:
        subscription = session.subscriptions.get(abort.request_id)
        if subscription is None:
            # Only its own: another router may have been faster with the same id.
            self._engine.abort(abort.request_id, owner=session.owner)
        elif abort.complete:
            self._answers.complete(subscription.answer)
        else:
            self._answers.cancel(subscription.answer)


def _refused(request_id: str, token_offset: int, error: TailpackError) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(
        request_id=request_id,
        token_offset=token_offset,
        finish_reason=types_pb2.FINISH_REASON_ERROR,
        error=rpc.to_detail(error),
    )


async def _hello(messages: AsyncIterator[worker_pb2.RouterMessage]) -> worker_pb2.Hello:
    """The first message of a session.

    Raises:
        InvalidRequest: it is not a hello, or names no router.
    """
    async for message in messages:
        if message.WhichOneof("message") == "hello" and message.hello.router_id:
            return message.hello
        break
    raise InvalidRequest(
        "a session begins with hello", reason="HELLO_FIRST", allowed="a hello with router_id and incarnation"
    )
