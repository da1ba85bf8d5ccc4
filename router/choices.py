"""Several answers that run side by side and end together: the choices of one request of the HTTP door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from protos import router_pb2, types_pb2
from protos.errors import RequestCancelled
from protos.limits import choice_id
from router.admission import Call
from router.requests import Requests

Chunk = tuple[int, router_pb2.GenerateResponse]
"""Which choice, and what came of it."""


async def complete(answer: AsyncIterator[router_pb2.GenerateResponse]) -> AsyncIterator[router_pb2.GenerateResponse]:
    """An answer's chunks, for protocols that know no end by Cancel.

    Raises:
        RequestCancelled: it ended so; what came before was returned.
    """
    async for chunk in answer:
        if chunk.finish_reason == types_pb2.FINISH_REASON_ABORTED:
            chunk.ClearField("finish_reason")
            yield chunk
            raise RequestCancelled("the request was cancelled while it ran")
        yield chunk


class Choices:
    """Starts when entered; leaving it ends what still runs. Their ids: limits.choice_id."""

    def __init__(self, requests: Requests, choices: Sequence[router_pb2.GenerateRequest], call: Call) -> None:
        self._requests = requests
        self._choices = choices
        self._call = call
        # Short: what its reader does not take gathers in the relays, which bound it.
        self._queue: asyncio.Queue[Chunk | Exception | None] = asyncio.Queue(len(choices))
        self._num_running = len(choices)
        self._failure: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._choices))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def take(self) -> list[Chunk]:
        """All chunks that have gathered; waits until there is one. Empty when all choices have ended.

        Cancelling it loses nothing.

        Raises:
            TailpackError: a choice failed; all that came before was returned.
        """
        chunks: list[Chunk] = []
        while self._failure is None and self._num_running and not (chunks and self._queue.empty()):
            match await self._queue.get():
                case None:
                    self._num_running -= 1
                case Exception() as failure:
                    self._failure = failure
                case chunk:
                    chunks.append(chunk)
        if self._failure is not None and not chunks:
            raise self._failure
        return chunks

    async def _run(self, index: int) -> None:
        call = replace(self._call, request_id=choice_id(self._call.request_id, index)) if index else self._call
        try:
            async with self._requests.answer(self._choices[index], call) as answer:
                async for chunk in complete(answer):
                    await self._queue.put((index, chunk))
        except Exception as failure:  # noqa: BLE001 - it is raised where the chunks are taken
            await self._queue.put(failure)
        else:
            await self._queue.put(None)
