"""The HTTP door: OpenAI-compatible /v1, health and metrics, as one ASGI application over the requests of one router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from protos import rpc, types_pb2
from protos.errors import (
    CapacityError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    TailpackError,
    TooLarge,
)
from protos.metrics import Page, metrics_page
from router.admission import Call
from router.choices import Choices
from router.http_errors import to_http
from router.openai_answer import AnswerWriter
from router.openai_request import Asked, read_chat, read_completion
from router.requests import Requests
from router.validate import MAX_PROMPT_BYTES

log = structlog.get_logger("http")

MAX_BODY_BYTES = 2 * MAX_PROMPT_BYTES + (1 << 20)
"""Room for the largest prompt as JSON: text whose every third byte is escaped, or token ids."""
MAX_READING_BYTES = 16 * MAX_BODY_BYTES
"""Of all bodies that are arriving at one time."""
BODY_TIMEOUT_S = 60.0
SILENT_S = 15.0
"""A stream says at least so often that it lives, by a comment: proxies end silent responses."""

_PUBLIC = ("/health/live", "/health/ready", "/metrics")
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes events on as they come
]


class HttpDoor:
    """The application. Paths of /v1 know their tenant before a byte of the body is read.

    Args:
        tenant_of: as for rpc.RpcServer. None: callers name their tenant in x-tenant as they like.
        page: of /metrics.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        tenant_of: Callable[[str | None, str], str] | None = None,
        page: Page = metrics_page,
    ) -> None:
        self._requests = requests
        self._tenant_of = tenant_of
        self._page = page
        self._created_s = int(time.time())
        self._reading_bytes = 0
        self._router = Router(
            [
                Route("/health/live", self._live),
                Route("/health/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", _Endpoint(self, read_completion), methods=["POST"]),
                Route("/v1/chat/completions", _Endpoint(self, read_chat), methods=["POST"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The boundary: request ids, tenants, and errors in OpenAI's form."""
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        request_id, begun = rpc.new_request_id(), False

        async def send_stamped(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            metadata = self._metadata(scope["path"], headers)
            request_id = metadata.request_id
            scope["call"] = Call(request_id, metadata.tenant, metadata.traceparent, door="http")
            scope["app"] = self  # so that starlette raises what it refuses
            await self._router(scope, receive, send_stamped)
        except (ClientDisconnect, ClientGone):
            pass
        except Exception as failure:
            if begun:
                raise  # uvicorn logs it and cuts the connection: nothing else can say it now
            error = to_http(_as_error(failure, scope["path"]))
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send_stamped)

    def _metadata(self, path: str, headers: list[tuple[str, str]]) -> rpc.CallMetadata:
        if self._tenant_of is None or path in _PUBLIC:
            return rpc.read_metadata(headers)
        said = rpc.read_metadata(headers)
        authorizations = [value for name, value in headers if name == "authorization"]
        if len(authorizations) > 1:
            raise InvalidRequest("header authorization is there more than once", allowed="one value")
        return rpc.read_metadata(headers, self._tenant_of(authorizations[0] if authorizations else None, said.tenant))

    # --- what needs no model ---

    async def _live(self, request: Request) -> Response:
        return JSONResponse({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        if self._requests.admission.draining:
            return JSONResponse({"status": "draining"}, 503)
        if not self._requests.registry.ready():
            return JSONResponse({"status": "no worker is ready"}, 503)
        return JSONResponse({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        body, content_type = self._page(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _models(self, request: Request) -> Response:
        known = {info.name: info for info in self._infos()}
        return JSONResponse({"object": "list", "data": [self._entry(known[name]) for name in sorted(known)]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for info in self._infos():
            if info.name == name:
                return JSONResponse(self._entry(info))
        raise NotFound("this model is not served here", reason="UNKNOWN_MODEL", given=name[:128])

    def _infos(self) -> list[types_pb2.ModelInfo]:
        """Of workers that were ready at some time: a list that changes with every restart would be of no use."""
        known = self._requests.registry.models()
        infos = (link.info.model for link in self._requests.registry.links.values() if link.info is not None)
        return [info for info in infos if info.name in known]

    def _entry(self, info: types_pb2.ModelInfo) -> dict[str, Any]:
        return {
            "id": info.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "tailpack",
            "max_model_len": info.max_sequence_tokens,  # as vLLM's clients read it
        }

    # --- what the endpoints need ---

    async def read_body(self, request: Request) -> bytes:
        """A JSON body, at most MAX_BODY_BYTES of it, counted as it comes.

        Raises:
            InvalidRequest: UNSUPPORTED_MEDIA_TYPE. TooLarge: BODY_TOO_LARGE. DeadlineExceeded: BODY_TIMEOUT.
            CapacityError: TOO_MANY_REQUEST_BYTES. ClientDisconnect.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also keeps web pages of other origins out: browsers ask before they send JSON
            raise InvalidRequest(
                "the body must be JSON",
                reason="UNSUPPORTED_MEDIA_TYPE",
                given=kind[:64] or "no content-type",
                allowed="content-type: application/json",
            )
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            raise _too_large(f"{length[:20]} bytes")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.stream():
                    if len(body) + len(piece) > MAX_BODY_BYTES:
                        raise _too_large(f"more than {MAX_BODY_BYTES} bytes")
                    if self._reading_bytes + len(piece) > MAX_READING_BYTES:
                        raise CapacityError(
                            "the bodies that are arriving are too large together",
                            reason="TOO_MANY_REQUEST_BYTES",
                            allowed=f"{MAX_READING_BYTES} bytes",
                            retry_after_ms=1000,
                        )
                    self._reading_bytes += len(piece)
                    body += piece
        except TimeoutError:
            raise DeadlineExceeded(
                "the body did not arrive in time", reason="BODY_TIMEOUT", allowed=f"{BODY_TIMEOUT_S:g} s"
            ) from None
        finally:
            self._reading_bytes -= len(body)
        return bytes(body)

    def writer(self, asked: Asked, request_id: str) -> AnswerWriter:
        infos = [info for info in self._infos() if info.name == asked.model or not asked.model]
        info = infos[0] if infos else types_pb2.ModelInfo()  # unknown: the request is about to be refused
        return AnswerWriter(
            asked,
            request_id,
            model=info.name,
            created_s=int(time.time()),
            fingerprint=f"fp_{info.weights_digest.hex()[:12]}" if info.weights_digest else None,
            token_bytes=self._requests.tokenizer.tokens.__getitem__,
            hidden=frozenset() if asked.ignore_eos else frozenset(info.eos_token_ids),
        )

    def choices(self, asked: Asked, call: Call) -> Choices:
        return Choices(self._requests, asked.requests, call)


class _Endpoint:
    """POST /v1/completions or /v1/chat/completions. read: what makes of its body what is asked."""

    def __init__(self, door: HttpDoor, read: Callable[[bytes], Asked]) -> None:
        self._door = door
        self._read = read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope["call"]
        try:
            asked = self._read(await self._door.read_body(Request(scope, receive)))
        except TailpackError as refused:  # later ones have their line in the log by their answer
            log.info(
                "refused", request_id=call.request_id, tenant=call.tenant, path=scope["path"], reason=refused.reason
            )
            raise
        writer = self._door.writer(asked, call.request_id)
        async with aborted_when_gone(receive), self._door.choices(asked, call) as choices:
            if asked.stream:
                await _stream(choices, writer, send, scope["path"])
            else:
                while chunks := await choices.take():
                    for index, chunk in chunks:
                        writer.add(index, chunk)
        if asked.stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            body = msgspec.json.encode(writer.whole())
            await Response(body, media_type="application/json")(scope, receive, send)


async def _stream(choices: Choices, writer: AnswerWriter, send: Send, path: str) -> None:
    """Server-sent events up to [DONE], or to an error. One before the first chunk is raised: it has a status still."""
    begun = False

    async def send_event(data: bytes) -> None:
        nonlocal begun
        if not begun:
            begun = True
            await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        if data:
            await send({"type": "http.response.body", "body": data, "more_body": True})

    try:
        while True:
            try:
                async with asyncio.timeout(SILENT_S):
                    chunks = await choices.take()
            except TimeoutError:
                await send_event(b": waiting\n\n")
                continue
            if not chunks:
                break
            await send_event(b"".join(_event(json) for index, chunk in chunks for json in writer.events(index, chunk)))
        usage = writer.usage_event()
        await send_event((_event(usage) if usage else b"") + b"data: [DONE]\n\n")
    except Exception as failure:
        if not begun:
            raise
        await send_event(_event(to_http(_as_error(failure, path)).body))


def _event(json: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(json) + b"\n\n"  # JSON has no raw line ends


class ClientGone(Exception):
    """The caller has closed its connection: there is nobody to answer."""


@asynccontextmanager
async def aborted_when_gone(receive: Receive) -> AsyncIterator[None]:
    """Cancels what runs inside as soon as the caller leaves. For after the body was read.

    Raises:
        ClientGone: it has left.
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
        if not gone or task.uncancel() > 0:  # somebody else cancelled it too
            raise
        raise ClientGone from None
    finally:
        watcher.cancel()


def _as_error(failure: Exception, path: str) -> TailpackError:
    match failure:
        case TailpackError():
            return failure
        case HTTPException(status_code=405):
            allowed = (failure.headers or {}).get("Allow")
            return InvalidRequest("this path has another method", reason="METHOD_NOT_ALLOWED", allowed=allowed)
        case HTTPException():
            return NotFound("there is no such path", reason="UNKNOWN_PATH", given=path[:128])
    log.error("bug in a handler", path=path, exc_info=failure)
    return InternalError("the router failed inside this request", hint=f"{type(failure).__name__}; see its log")


def _too_large(given: str) -> TooLarge:
    return TooLarge(
        "the body is too large", reason="BODY_TOO_LARGE", given=given, allowed=f"at most {MAX_BODY_BYTES} bytes"
    )
