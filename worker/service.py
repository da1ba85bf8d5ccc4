"""The gRPC face of a worker. Handlers only enqueue; what happens to a sequence is the engine's business."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import structlog

from protos import rpc, types_pb2, worker_pb2, worker_pb2_grpc
from protos.errors import InvalidRequest, TailpackError, Unavailable
from worker.engine import Engine
from worker.sequence import Request
from worker.sessions import RouterSession, Sessions

log = structlog.get_logger("worker")

LARGE_PROMPT_TOKENS = 1 << 14
"""From here on a prompt is read off the event loop: a million tokens take 170 ms."""

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """Sessions, Abort and Info over one engine. ``memory`` says what the worker takes."""

    def __init__(
        self,
        engine: Engine,
        sessions: Sessions,
        info: types_pb2.WorkerInfo,
        memory: Callable[[], worker_pb2.WorkerMemory],
    ) -> None:
        self._engine = engine
        self._sessions = sessions
        self._info = info
        self._memory = memory
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
        return worker_pb2.AbortResponse(found=self._engine.abort(request.request_id, tenant=request.tenant))

    async def Info(self, request: worker_pb2.InfoRequest, context: Any) -> worker_pb2.InfoResponse:
        memory = self._memory() if request.with_memory else None
        return worker_pb2.InfoResponse(info=self._info, load=self._engine.load(), memory=memory)

    async def _read(self, messages: AsyncIterator[worker_pb2.RouterMessage], session: RouterSession) -> None:
        """Takes in what the router says until it says no more; then the session ends."""
        failure: TailpackError | None = None
        try:
            async for message in messages:
                match message.WhichOneof("message"):
                    case "submit":
                        await self._submit(message.submit, session)
                    case "abort":
                        # Only its own: another router may have been faster with the same id.
                        self._engine.abort(message.abort.request_id, owner=session.owner)
                    case "hello":
                        raise InvalidRequest("a session says hello once", reason="HELLO_TWICE")
                    case _:
                        raise InvalidRequest("an empty message, or one that this version does not know")
        except TailpackError as refused:
            failure = refused
        finally:
            session.end(failure)

    async def _submit(self, submit: worker_pb2.Submit, session: RouterSession) -> None:
        """Hands a sequence to the engine. A large one is read on another thread, and what the session says next waits
        for it: an abort must not overtake its submit.
        """
        if len(submit.prompt_token_ids) > LARGE_PROMPT_TOKENS and self._draining is None:
            request = await asyncio.to_thread(Request.from_proto, submit, session.owner)
        else:
            request = Request.from_proto(submit, session.owner)
        if self._draining is None:
            self._engine.submit(request)
            return
        error = Unavailable(
            "this worker takes no new sequences", reason="DRAINING", hint=self._draining, retry_after_ms=0
        )
        refused = worker_pb2.SequenceOutput(
            request_id=submit.request_id,
            token_offset=len(submit.emitted_token_ids),
            finish_reason=types_pb2.FINISH_REASON_ERROR,
            error=rpc.to_detail(error),
        )
        session.add([refused])


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
