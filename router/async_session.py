"""A session of many calls with a router, on an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Any

import grpc

from protos import router_pb2, router_pb2_grpc
from protos.errors import RequestCancelled, Unavailable
from router.answer import Chunk
from router.client_session import CallFailed, Calls, Item, Lost, Reading, out_of_time


class AsyncSession:
    """One stream; open it first. What its calls have to say in one turn of the loop goes out as one message."""

    def __init__(
        self,
        stub: router_pb2_grpc.RouterAsyncStub,
        metadata: tuple[tuple[str, str], ...],
        lost: Callable[[grpc.RpcError], Lost],
    ) -> None:
        """lost: says what the stream's end by an error means."""
        self._stream: Any = stub.Session(metadata=metadata)
        self._lost = lost
        self._calls = Calls()
        self._some = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Until the router welcomes it. Raises grpc.RpcError, Unavailable."""
        first = await self._stream.read()
        if not isinstance(first, router_pb2.SessionResponse) or not first.HasField("welcome"):
            self._stream.cancel()
            raise Unavailable("the router ended a session at its beginning")
        self._calls.welcome(first.welcome)
        self._calls.take(first)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]

    @property
    def is_over(self) -> bool:
        return self._calls.is_over

    @property
    def has_room(self) -> bool:
        return self._calls.has_room

    async def chunks(
        self,
        message: router_pb2.GenerateRequest | router_pb2.ResumeRequest,
        *,
        request_id: str,
        traceparent: str,
        timeout_s: float | None,
    ) -> AsyncGenerator[Chunk, None]:
        """One call. Raises CallFailed; SessionEnds at its beginning."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        inbox: asyncio.Queue[Item] = asyncio.Queue()
        reading = Reading(self._calls.window_bytes)
        number = self._calls.begin(
            message, inbox.put_nowait, request_id=request_id, traceparent=traceparent, timeout_s=timeout_s
        )
        self._some.set()
        try:
            while not reading.ended:
                try:
                    async with asyncio.timeout_at(deadline):
                        item = await inbox.get()
                except TimeoutError:
                    raise CallFailed(out_of_time()) from None
                chunk = reading.take(item)
                if chunk is not None:
                    yield chunk  # what comes back for more has taken this one
                    if (num_bytes := reading.due()) is not None:
                        self._calls.took(number, num_bytes)
                        self._some.set()
        finally:
            self._calls.leave(number)
            self._some.set()

    async def _read(self) -> None:
        lost = Lost(RequestCancelled("the session was closed"), spoken=True)
        try:
            while isinstance(message := await self._stream.read(), router_pb2.SessionResponse):
                self._calls.take(message)
                if self._calls.is_through:
                    self._some.set()
            lost = Lost(Unavailable("the router ended the session"), spoken=False)
        except grpc.RpcError as failed:
            lost = self._lost(failed)
        finally:
            self._calls.lose(lost)
            self._some.set()

    async def _write(self) -> None:
        # When the stream is over the reader sees it too, and says why.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            while self._calls.lost is None:
                await self._some.wait()
                self._some.clear()
                while (message := self._calls.outgoing()) is not None:
                    await self._stream.write(message)
                if self._calls.is_through:
                    await self._stream.done_writing()
                    return

    async def close(self) -> None:
        """Ends its calls."""
        self._stream.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
