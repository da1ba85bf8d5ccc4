"""A router without workers, for tests of the client: real gRPC, an answer known in advance, calls cut at any token.

It keeps resumable answers as routers do: by request id, until they are cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import errors, router_pb2, router_pb2_grpc, rpc, types_pb2
from protos.tls import ServerTls

SESSIONS = False
"""Whether fake routers have sessions. For tests to set."""
SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name
TEXTS = ("Où", " est", "", " 日本", "", " 🎉", "?", "")
"""By token; some complete no character."""


@dataclass(frozen=True)
class Call:
    """One call as the router saw it. number: from 0, over all of them."""

    number: int
    method: str  # "Generate" or "Resume"
    request: router_pb2.GenerateRequest | router_pb2.ResumeRequest
    metadata: dict[str, str]
    timeout_s: float | None


@dataclass(frozen=True)
class Plan:
    """How one call goes. at: chunks (of one token) that it sends before what follows happens; None: it is whole.

    Args:
        error: then it fails with this; else the connection is cut, without a word.
        silent: not even the first metadata is sent.
        edit: changes chunks on their way, in the order of their tokens.
        hang: then it waits for ever.
    """

    at: int | None = None
    error: errors.TailpackError | None = None
    silent: bool = False
    edit: Callable[[router_pb2.GenerateResponse], list[router_pb2.GenerateResponse]] = lambda chunk: [chunk]
    hang: bool = False


class _Cut(Exception):
    """The connection of a session."""


class _InSession:
    """Stands for the context of a call that has no stream of its own."""

    def __init__(self, asked: router_pb2.SessionCall, context: Any, outbox: Any) -> None:
        self._asked = asked
        self._context = context
        self._outbox = outbox

    def say(self, **said: Any) -> None:
        self._outbox.put_nowait(router_pb2.SessionAnswer(number=self._asked.number, **said))

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        request_id = self._asked.request_id or self._asked.resume.request_id
        own = rpc.metadata(request_id, traceparent=self._asked.traceparent)
        return [*(pair for pair in self._context.invocation_metadata() if pair[0] != "traceparent"), *own]

    def time_remaining(self) -> float | None:
        return self._asked.timeout_ms / 1e3 if self._asked.timeout_ms else None

    async def send_initial_metadata(self, metadata: Any) -> None:
        self.say(request_id=dict(metadata)["x-request-id"])

    async def abort(self, code: Any, details: str) -> None:
        raise _Cut


@dataclass
class FakeRouter(router_pb2_grpc.RouterServicer):
    """plan: says how each call goes. Everything it saw is kept for the test to look at."""

    plan: Callable[[Call], Plan] = lambda call: Plan()
    calls: list[Call] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    num_running: int = 0
    num_sessions: int = 0
    worker_state: str = "ready"
    kept: set[str] = field(default_factory=set)  # ids of resumable answers
    address: str = ""
    tls: ServerTls | None = None
    _server: rpc.RpcServer | None = None

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._server = rpc.RpcServer("fake-router", tls=self.tls)
        self._server.add(router_pb2_grpc.add_RouterServicer_to_server, self, SERVICE_NAME)
        self.address = await self._server.start(address)
        return self.address

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def Generate(self, request: router_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        call = self._call("Generate", request, context)
        if request.resumable:
            self.kept.add(call.metadata["x-request-id"])
        async for chunk in self._answer(call, context, 0, 0):
            yield chunk

    async def Resume(self, request: router_pb2.ResumeRequest, context: Any) -> AsyncIterator[Any]:
        call = self._call("Resume", request, context)
        if request.request_id not in self.kept:
            raise errors.NotFound("no such request", reason="UNKNOWN_REQUEST", given=request.request_id)
        async for chunk in self._answer(call, context, request.token_offset, request.text_offset):
            yield chunk

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.SessionResponse]:
        assert SESSIONS, "its Stats names no such feature"
        self.num_sessions += 1
        outbox: asyncio.Queue[router_pb2.SessionAnswer | Exception] = asyncio.Queue()
        running: dict[int, asyncio.Task[None]] = {}
        reader = asyncio.create_task(self._read(requests, context, outbox, running))
        try:
            yield router_pb2.SessionResponse(welcome=router_pb2.SessionWelcome(max_calls=100, window_bytes=1 << 16))
            while isinstance(said := await outbox.get(), router_pb2.SessionAnswer):
                yield router_pb2.SessionResponse(answers=[said])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        finally:
            for task in (reader, *running.values()):
                task.cancel()

    async def _read(self, requests: Any, context: Any, outbox: Any, running: dict[int, asyncio.Task[None]]) -> None:
        async for message in requests:
            for number in message.left:
                running.pop(number).cancel()
            for call in message.calls:
                running[call.number] = asyncio.create_task(self._one(call, context, outbox))

    async def _one(self, asked: router_pb2.SessionCall, context: Any, outbox: Any) -> None:
        """One call of a session, as if it had come by itself."""
        its = _InSession(asked, context, outbox)
        resumes = asked.HasField("resume")
        chunks = self.Resume(asked.resume, its) if resumes else self.Generate(asked.generate, its)
        try:
            async for chunk in chunks:
                its.say(chunk=chunk)
        except errors.TailpackError as error:
            its.say(error=rpc.to_detail(error))
        except _Cut as cut:
            outbox.put_nowait(cut)

    async def Cancel(self, request: router_pb2.CancelRequest, context: Any) -> router_pb2.CancelResponse:
        self.cancels.append(request.request_id)
        found = request.request_id in self.kept
        self.kept.discard(request.request_id)
        return router_pb2.CancelResponse(found=found)

    async def ListWorkers(self, request: Any, context: Any) -> router_pb2.ListWorkersResponse:
        model = types_pb2.ModelInfo(name="fake", vocab_size=100, max_sequence_tokens=4096, eos_token_ids=[1])
        worker = router_pb2.WorkerStatus(state=self.worker_state, info=types_pb2.WorkerInfo(model=model))
        return router_pb2.ListWorkersResponse(workers=[worker])

    async def Stats(self, request: Any, context: Any) -> router_pb2.StatsResponse:
        return router_pb2.StatsResponse(router_id=self.address, features=["session"] if SESSIONS else ())

    def _call(self, method: str, request: Any, context: Any) -> Call:
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        call = Call(len(self.calls), method, request, metadata, context.time_remaining())
        self.calls.append(call)
        return call

    async def _answer(self, call: Call, context: Any, token_offset: int, text_offset: int) -> AsyncIterator[Any]:
        self.num_running += 1
        try:
            plan = self.plan(call)
            if not plan.silent:
                await context.send_initial_metadata((("x-request-id", call.metadata["x-request-id"]),))
            chunks = pieces(call.metadata["x-request-id"], token_offset, text_offset)
            for chunk in chunks[: plan.at]:
                for edited in plan.edit(chunk):
                    yield edited
            if plan.hang:
                await asyncio.Event().wait()
            if plan.error is not None:
                raise plan.error
            if plan.at is not None:
                # What a client sees of a cut connection. Not through our server's translation: nobody of ours speaks.
                await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        finally:
            self.num_running -= 1


def pieces(request_id: str, token_offset: int, text_offset: int) -> list[router_pb2.GenerateResponse]:
    """The answer behind the offsets, a token a chunk and the last chunk by itself."""
    chunks: list[router_pb2.GenerateResponse] = []
    text_bytes = 0
    for token, text in enumerate(TEXTS):
        if token >= token_offset:
            assert text_bytes >= text_offset or token > token_offset
            chunks.append(
                router_pb2.GenerateResponse(
                    request_id=request_id,
                    text=text,
                    text_offset=text_bytes,
                    token_ids=[token],
                    token_offset=token,
                    worker_id="w" if not chunks else "",
                )
            )
        text_bytes += len(text.encode())
    last = router_pb2.GenerateResponse(
        request_id=request_id,
        text_offset=text_bytes,
        token_offset=len(TEXTS),
        finish_reason=types_pb2.FINISH_REASON_EOS,
        usage=types_pb2.Usage(prompt_tokens=3, output_tokens=len(TEXTS)),
    )
    return [*chunks, last]


@contextlib.asynccontextmanager
async def fake_routers(*plans: Callable[[Call], Plan]) -> AsyncIterator[list[FakeRouter]]:
    """One for each plan, listening; all end with the block."""
    routers = [FakeRouter(plan) for plan in plans]
    try:
        for router in routers:
            await router.start()
        yield routers
    finally:
        for router in routers:
            await router.stop()
