"""The endpoints of OpenAI's API that generate: a body in, one JSON document or a stream of events out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from protos import types_pb2
from protos.errors import TailpackError, Unavailable
from router.admission import Call
from router.choices import Choices
from router.http_body import BodyReader, json_response
from router.http_errors import to_http
from router.openai_answer import AnswerWriter
from router.openai_request import Asked
from router.requests import Requests

log = structlog.get_logger("http")

SILENT_S = 15.0
"""A stream says at least so often that it lives, by a comment: proxies end silent responses."""

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on as they come
]


class ClientGone(Exception):
    """The caller has closed its connection: there is nobody to answer."""


class Endpoint:
    """An ASGI application for one path. scope["call"] is the request's Call.

    Args:
        read: what makes of a body what is asked.
        as_error: what becomes of an exception that is not ours.
    """

    def __init__(
        self,
        requests: Requests,
        bodies: BodyReader,
        read: Callable[[bytes], Asked],
        as_error: Callable[[BaseException, str], TailpackError],
    ) -> None:
        self._requests = requests
        self._bodies = bodies
        self._read = read
        self._as_error = as_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["call"]
        try:
            asked = self._read(await self._bodies.read(Request(scope, receive)))
        except TailpackError as refused:  # later ones have their line in the log by their answer
            log.info(
                "refused", request_id=call.request_id, tenant=call.tenant, path=scope["path"], reason=refused.reason
            )
            raise
        writer = self._writer(asked, call.request_id)
        choices = Choices(self._requests, asked.requests, call)
        if not asked.stream:
            async with aborted_when_gone(receive), choices:
                while chunks := await choices.take():
                    for index, chunk in chunks:
                        writer.add(index, chunk)
            await json_response(writer.whole())(scope, receive, send)
            return
        events = _Events(send)
        try:
            async with aborted_when_gone(receive), choices:
                await _stream(choices, writer, events)
        except ClientGone:
            raise
        except Exception as failure:
            if not events.begun:
                raise  # it has a status still
            await events.send(to_http(self._as_error(failure, scope["path"])).body)
        await events.end()

    def _writer(self, asked: Asked, request_id: str) -> AnswerWriter:
        tokens = self._requests.tokenizer.tokens
        links = self._requests.registry.links.values()
        infos = [link.info.model for link in links if link.info is not None]
        info = next((info for info in infos if asked.model in ("", info.name)), types_pb2.ModelInfo())
        return AnswerWriter(
            asked,
            request_id,
            model=info.name,  # of no model: the request is about to be refused
            created_s=int(time.time()),
            fingerprint=f"fp_{info.weights_digest.hex()[:12]}" if info.weights_digest else None,
            token_bytes=lambda token_id: tokens.of((token_id,), frozenset()),
            token_name=self._requests.tokenizer.token_name,
            hidden=frozenset() if asked.ignore_eos else frozenset(info.eos_token_ids),
        )


async def _stream(choices: Choices, writer: AnswerWriter, events: _Events) -> None:
    """All events of an answer, up to [DONE]. Raises at an error; what came before it was sent."""
    while True:
        try:
            async with asyncio.timeout(SILENT_S):
                chunks = await choices.take()
        except TimeoutError:
            await events.send_comment("waiting")
            continue
        if not chunks:
            break
        await events.send(*(json for index, chunk in chunks for json in writer.events(index, chunk)))
    usage = writer.usage_event()
    await events.send(*([usage] if usage else []), "[DONE]")


class _Events:
    """A response of server-sent events. It begins with the first of them: until then an error can have a status."""

    def __init__(self, send: Send) -> None:
        self.begun = False
        self._send = send

    async def send(self, *events: dict[str, Any] | str) -> None:
        """Each event's data: JSON, or text as it is. JSON has no raw line ends, so each is one line."""
        data = [event.encode() if isinstance(event, str) else msgspec.json.encode(event) for event in events]
        await self._write(b"".join(b"data: " + line + b"\n\n" for line in data))

    async def send_comment(self, text: str) -> None:
        await self._write(b": " + text.encode() + b"\n\n")

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, body: bytes) -> None:
        if not body:
            return
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


@asynccontextmanager
async def aborted_when_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside as soon as the caller leaves. For after the body was read.

    Raises:
        ClientGone: it has left. Unavailable: DRAINING: somebody else cancelled it, as the server does when it stops.
    """
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        task.uncancel()
        raise (ClientGone() if gone else stopping()) from None
    finally:
        watcher.cancel()


def stopping() -> Unavailable:
    return Unavailable("this router is shutting down", reason="DRAINING", hint="use another", retry_after_ms=1000)
