"""The HTTP door: OpenAI-compatible /v1, health and metrics, as one ASGI application over the requests of one router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from protos import rpc, types_pb2
from protos.errors import InternalError, InvalidRequest, NotFound, TailpackError
from protos.metrics import Page, metrics_page
from router.admission import Call
from router.http_body import BodyReader, json_response
from router.http_errors import to_http
from router.openai_endpoint import ClientGone, Endpoint, stopping
from router.openai_request import read_chat, read_completion
from router.requests import Requests

log = structlog.get_logger("http")

_OPEN_PATHS = ("/health/live", "/health/ready", "/metrics")
"""These need no token: probes and Prometheus have none. They hold nothing of any request."""


class HttpDoor:
    """The application. Paths of /v1 know their tenant before a byte of the body is read.

    Args:
        tenant_of: as for rpc.RpcServer. None: callers name their tenant in x-tenant as they like.
        page: of /metrics, which is here only without tenant_of.
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
        self.bodies = BodyReader()
        completions = Endpoint(requests, self.bodies, read_completion, _as_error)
        chat = Endpoint(requests, self.bodies, read_chat, _as_error)
        self._router = Router(
            [
                Route("/health/live", self._live),
                Route("/health/ready", self._ready),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/chat/completions", chat, methods=["POST"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The boundary: request ids, tenants, and errors in OpenAI's form."""
        request_id, begun = rpc.new_request_id(), False

        async def send_stamped(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            metadata = self._metadata(scope)
            request_id = metadata.request_id
            scope["call"] = Call(request_id, metadata.tenant, metadata.traceparent, door="http")
            scope["app"] = self  # so that starlette raises what it refuses
            await self._router(scope, receive, send_stamped)
        except (ClientDisconnect, ClientGone):
            pass
        except (Exception, asyncio.CancelledError) as failure:
            if begun:
                raise  # uvicorn logs it and cuts the connection: nothing else can say it now
            error = to_http(_as_error(failure, scope["path"]))
            await json_response(error.body, error.status, error.headers)(scope, receive, send_stamped)

    def _metadata(self, scope: Scope) -> rpc.CallMetadata:
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        said = rpc.read_metadata(headers)
        if self._tenant_of is None or scope["path"] in _OPEN_PATHS:
            return said
        authorizations = [value for name, value in headers if name == "authorization"]
        if len(authorizations) > 1:
            raise InvalidRequest("header authorization is there more than once", allowed="one value")
        return rpc.read_metadata(headers, self._tenant_of(authorizations[0] if authorizations else None, said.tenant))

    async def _live(self, request: Request) -> Response:
        return json_response({"status": "live"})

    async def _ready(self, request: Request) -> Response:
        if self._requests.admission.draining:
            return json_response({"status": "draining"}, 503)
        if not self._requests.registry.ready():
            return json_response({"status": "no worker is ready"}, 503)
        return json_response({"status": "ready"})

    async def _metrics(self, request: Request) -> Response:
        """Not where tokens are demanded: it names their tenants, what each has open and may spend."""
        if self._tenant_of is not None:
            raise NotFound(
                "metrics are not at a door that demands tokens",
                reason="METRICS_ELSEWHERE",
                given=request.url.path,
                hint="give the router --metrics HOST:PORT, an address that Prometheus alone reaches",
            )
        body, content_type = self._page(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _models(self, request: Request) -> Response:
        infos = self._infos()
        return json_response({"object": "list", "data": [self._entry(infos[name]) for name in sorted(infos)]})

    async def _model(self, request: Request) -> Response:
        name, infos = request.path_params["name"], self._infos()
        if name not in infos:
            raise NotFound(
                "this model is not served here",
                reason="UNKNOWN_MODEL",
                given=name[:128],
                allowed=", ".join(sorted(infos)),
            )
        return json_response(self._entry(infos[name]))

    def _infos(self) -> dict[str, types_pb2.ModelInfo]:
        """Models by name, also those whose workers are away just now: a name that comes and goes is of no use."""
        infos = [link.info.model for link in self._requests.registry.links.values() if link.info is not None]
        return {info.name: info for info in infos}

    def _entry(self, info: types_pb2.ModelInfo) -> dict[str, Any]:
        return {
            "id": info.name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "tailpack",
            "max_model_len": info.max_sequence_tokens,  # prompt and answer; the API itself has no field for it
        }


def _as_error(failure: BaseException, path: str) -> TailpackError:
    match failure:
        case TailpackError():
            return failure
        case asyncio.CancelledError():
            return stopping()
        case HTTPException(status_code=405):
            allowed = (failure.headers or {}).get("Allow")
            return InvalidRequest("this path has another method", reason="METHOD_NOT_ALLOWED", allowed=allowed)
        case HTTPException():
            return NotFound("there is no such path", reason="UNKNOWN_PATH", given=path[:128])
    log.error("bug in a handler", path=path, exc_info=failure)
    return InternalError("the router failed inside this request", hint=f"{type(failure).__name__}; see its log")
