"""Servers, channels and errors on the wire: the one place where gRPC's knobs and status codes appear.

Both ends of every connection are built here, so message limits and keepalive always agree.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import ipaddress
import re
import resource
import secrets
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_status import rpc_status

from protos import errors, types_pb2
from protos.errors import TailpackError
from protos.tls import ClientTls, ServerCertificate, ServerFiles, ServerTls, read_client

log = structlog.get_logger("rpc")

MAX_MESSAGE_BYTES = 64 << 20
"""Of one message, both ways. Services refuse oversized prompts by name well below it: gRPC itself could not."""

KEEPALIVE_TIME_MS = 10_000
KEEPALIVE_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_MS = 5_000
MAX_RECONNECT_BACKOFF_MS = 2_000
HANDSHAKE_TIMEOUT_MS = 10_000
"""From accepting a connection to its first frame, TLS included; sockets that say nothing are closed then."""
STALLED_S = 60.0
"""For a caller to take a message, where a server limits that. Keepalive finds the dead; these live and do not read."""
MAX_CONNECTIONS = 4096
MAX_STREAMS = 5000
"""Calls at one time on one connection. Above a router's most requests in flight: it then refuses by name, where a
client waits in silence for a stream."""
MAX_METADATA_BYTES = 16 << 10
MAX_DESCRIPTORS = 1 << 16
ERROR_DOMAIN = "tailpack"

_ALIVE = ""  # grpc.health.v1's name for the server as a whole


def _common_options(keepalive_time_ms: int) -> list[tuple[str, int | str]]:
    return [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", keepalive_time_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        # How long a ping waits for its answer, whatever the line above says; grpcio 1.85 takes 60 s by default.
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Both: between a soft and a hard limit gRPC refuses at random.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]


def _server_options(keepalive_time_ms: int) -> list[tuple[str, int | str]]:
    # The other end pings every keepalive_time_ms without data, so half of that must be allowed. (A server that keeps
    # gRPC's default of 300 s ends long silent prefills with GOAWAY too_many_pings.)
    return [
        *_common_options(keepalive_time_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_time_ms // 2),
        ("grpc.so_reuseport", 0),  # two servers on one port would share its callers at random
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # Half of the descriptors at most: a crowd at the door must not keep us from a file or from a worker.
        ("grpc.max_allowed_incoming_connections", min(MAX_CONNECTIONS, _descriptor_limit() // 2)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
    ]


def _channel_options(keepalive_time_ms: int) -> list[tuple[str, int | str]]:
    return [
        *_common_options(keepalive_time_ms),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # In spite of its name this bounds one attempt, up to the peer's first frame: a busy peer must not look dead.
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        # Left to itself half a minute: a Service whose pods were all replaced meanwhile would look dead so long.
        ("grpc.dns_min_time_between_resolutions_ms", MAX_RECONNECT_BACKOFF_MS),
        # Channels to one address do not share a connection: a stuck stream must not hold up another channel's.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


# --- the error tree as status codes ---

# Nearest entry along the class's ancestors wins.
_STATUS: dict[type[TailpackError], grpc.StatusCode] = {
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.AlreadyExists: grpc.StatusCode.ALREADY_EXISTS,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.NotBuilt: grpc.StatusCode.UNIMPLEMENTED,
    errors.PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    errors.CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.KvLost: grpc.StatusCode.DATA_LOSS,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.RequestCancelled: grpc.StatusCode.CANCELLED,
    errors.InternalError: grpc.StatusCode.INTERNAL,
    TailpackError: grpc.StatusCode.UNKNOWN,
}
_FAMILY = {status: kind for kind, status in _STATUS.items()}
# Classes whose reason names them exactly come back as themselves, e.g. WORKER_LOST as WorkerLost.
_BY_REASON = {
    kind.default_reason: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, TailpackError)
}


def status_of(error: TailpackError) -> grpc.StatusCode:
    """The status code of an error: that of its nearest ancestor in the table."""
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def to_status(error: TailpackError) -> Any:
    """The rich status (a ``grpc.Status``): code, message, ErrorInfo and, where waiting helps, RetryInfo."""
    code = status_of(error)
    details = [_packed(error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=_info(error)))]
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return rpc_status.to_status(status_pb2.Status(code=code.value[0], message=error.message, details=details))


def error_from(failure: grpc.RpcError) -> TailpackError:
    """The error of a failed call. Never raises; errors of peers that are not ours get their family by status code.

    An error with a class's own default_reason comes back as that class. One with a reason of its own comes back as the
    class of its status code, an ancestor: TooLarge with PROMPT_TOO_LONG as InvalidRequest. Test for its reason then.
    """
    code, message = _code_and_text(failure)
    kind = _FAMILY.get(code, TailpackError)
    metadata: dict[str, str] = {}
    reason: str | None = None
    retry_after_ms: int | None = None
    for detail in _rich_details(failure):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == ERROR_DOMAIN:
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    if reason is None and (known := _from_grpc_itself(code, message)) is not None:
        return known
    return _rebuilt(kind, message, reason, metadata, retry_after_ms)


def _from_grpc_itself(code: grpc.StatusCode, message: str) -> TailpackError | None:
    """By name, what happens before any of our code sees a call: gRPC's own limits, and connections that fail."""
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        if "larger than max" in message:
            return errors.TooLarge(message, allowed=f"{MAX_MESSAGE_BYTES} bytes", hint="send less at a time")
        if "metadata size exceeds" in message:
            return errors.TooLarge(
                "the call's metadata is too large", reason="METADATA_TOO_LARGE", allowed=f"{MAX_METADATA_BYTES} bytes"
            )
    if code is grpc.StatusCode.UNAVAILABLE and "failed to connect" in message:
        why = message.rpartition("last error: ")[2]
        for sign, (reason, text, hint) in _CONNECT_FAILURES.items():
            if sign in why:
                return errors.Unavailable(f"{text}: {why}", reason=reason, hint=hint)
    return None


# What gRPC says of a connection that does not come about: a part of it, then our reason, message and hint.
_CONNECT_FAILURES = {
    "CERTIFICATE_VERIFY_FAILED": (
        "SERVER_CERTIFICATE_REFUSED",
        "the server's certificate is refused",
        "it must be in its time, and of the authority that the client trusts",
    ),
    "Hostname Verification Check failed": (
        "SERVER_CERTIFICATE_REFUSED",
        "the server's certificate is for another name",
        "reach it by a name that its certificate holds, or say that name as the TLS server name",
    ),
    "WRONG_VERSION_NUMBER": ("TLS_NOT_SPOKEN", "the server does not speak TLS", "leave TLS out, or use its TLS port"),
    # A server that refuses a client's certificate says so in a TLS alert, which gRPC does not pass on.
    "Socket closed": (
        "CONNECTION_CLOSED",
        "the server closed the connection at once",
        "it may demand TLS, or another client certificate, or have all the connections that it takes",
    ),
}


def is_ours(failure: grpc.RpcError) -> bool:
    """Whether a service of ours ended the call and says why; else the connection failed, or a stopping server did."""
    info = error_details_pb2.ErrorInfo()
    return any(detail.Unpack(info) and info.domain == ERROR_DOMAIN for detail in _rich_details(failure))


def to_detail(error: TailpackError) -> types_pb2.ErrorDetail:
    """The form in which an error travels inside a stream."""
    return types_pb2.ErrorDetail(
        reason=error.reason,
        message=error.message,
        metadata={**_info(error), "status": status_of(error).name},
        retry_after_ms=error.retry_after_ms or 0,
    )


def from_detail(detail: types_pb2.ErrorDetail) -> TailpackError:
    """The reverse of to_detail, with the class that error_from would give."""
    metadata = dict(detail.metadata)
    code = getattr(grpc.StatusCode, metadata.pop("status", ""), grpc.StatusCode.UNKNOWN)
    kind = _FAMILY.get(code, TailpackError)
    return _rebuilt(kind, detail.message, detail.reason or None, metadata, detail.retry_after_ms or None)


def _rebuilt(
    family: type[TailpackError],
    message: str,
    reason: str | None,
    metadata: dict[str, str],
    retry_after_ms: int | None,
) -> TailpackError:
    kind = _BY_REASON.get(reason or "", family)
    if not issubclass(kind, family):
        kind = family
    return kind(
        message,
        reason=reason,
        given=metadata.get("given"),
        allowed=metadata.get("allowed"),
        hint=metadata.get("hint"),
        retry_after_ms=retry_after_ms,
    )


def _info(error: TailpackError) -> dict[str, str]:
    return {key: value for key, value in error.metadata().items() if key != "reason"}


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _code_and_text(failure: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    code = getattr(failure, "code", lambda: None)()
    text = getattr(failure, "details", lambda: None)() or str(failure)
    return (code if isinstance(code, grpc.StatusCode) else grpc.StatusCode.UNKNOWN), text


def _rich_details(failure: grpc.RpcError) -> Sequence[any_pb2.Any]:
    for key, value in getattr(failure, "trailing_metadata", lambda: None)() or ():
        if key == "grpc-status-details-bin":
            try:
                return list(status_pb2.Status.FromString(value).details)
            except Exception as malformed:  # noqa: BLE001 - a foreign peer may send anything
                log.warning("unreadable error details", error=str(malformed))
    return ()


# --- metadata ---

_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}\Z")
ID_ALLOWED = "1 to 128 of A-Z a-z 0-9 . _ : -"
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}\Z")


def is_id(text: str) -> bool:
    """Whether a request or a tenant may have this id."""
    return _ID.match(text) is not None


@dataclass(frozen=True)
class CallMetadata:
    """What a caller says about a call besides its message."""

    request_id: str
    tenant: str = ""
    traceparent: str = ""
    own_id: bool = True  # the caller's; else the id was made up here


# The tenant that a token has proved, for the rest of this call's task: from _TenantInterceptor to call_metadata.
_TENANT: ContextVar[str | None] = ContextVar("tenant", default=None)
# The same, proved anew each time: for what a stream asks for long after it began.
_TENANT_NOW: ContextVar[Callable[[], str] | None] = ContextVar("tenant_now", default=None)


def call_metadata(context: grpc.aio.ServicerContext[Any, Any]) -> CallMetadata:
    """read_metadata of a call; where the server knows callers by their tokens, the tenant is the token's."""
    return read_metadata(_text_metadata(context.invocation_metadata()), _TENANT.get())


def read_metadata(sent: list[tuple[str, str]], proved_tenant: str | None = None) -> CallMetadata:
    """Reads x-request-id (made up when absent), x-tenant and traceparent (ignored when malformed, as W3C asks).

    Args:
        sent: pairs of lower-case name and value; HTTP headers do as well.
        proved_tenant: whose token the caller has shown; what it says of itself counts only where this is None.

    Raises:
        InvalidRequest: an id or tenant is not 1 to 128 of ``A-Z a-z 0-9 . _ : -``, or is there twice.
    """
    tenant = _checked_id("metadata x-tenant", _only("x-tenant", sent) or "")
    return metadata_of(
        _only("x-request-id", sent) or "",
        tenant if proved_tenant is None else proved_tenant,
        dict(sent).get("traceparent", ""),
        name="metadata x-request-id",
    )


def metadata_of(request_id: str, tenant: str, traceparent: str, *, name: str = "request_id") -> CallMetadata:
    """The same of a call that comes in a stream with others. name: of the request id, for its error."""
    return CallMetadata(
        request_id=_checked_id(name, request_id) or new_request_id(),
        tenant=tenant,
        traceparent=traceparent if _TRACEPARENT.match(traceparent) else "",
        own_id=bool(request_id),
    )


def tenant_now(context: grpc.aio.ServicerContext[Any, Any]) -> Callable[[], str]:
    """Tells the tenant of a stream each time it is called: a token that was withdrawn meanwhile is refused.

    Raises:
        InvalidRequest: as read_metadata. Of what it returns: Unauthenticated, PermissionDenied.
    """
    return _TENANT_NOW.get() or partial(str, call_metadata(context).tenant)


def _checked_id(name: str, value: str) -> str:
    if value and not is_id(value):
        raise errors.InvalidRequest(f"{name} is malformed", given=repr(value[:64]), allowed=ID_ALLOWED)
    return value


def _text_metadata(sent: Any) -> list[tuple[str, str]]:
    return [(key, value) for key, value in sent or () if isinstance(value, str)]


def _only(key: str, sent: list[tuple[str, str]]) -> str | None:
    """The value of a key that may be there once. Raises InvalidRequest."""
    values = [value for name, value in sent if name == key]
    if len(values) > 1:
        given = None if key == "authorization" else repr(values)[:200]
        raise errors.InvalidRequest(f"metadata {key} is there more than once", given=given, allowed="one value")
    return values[0] if values else None


def metadata(
    request_id: str | None = None,
    tenant: str | None = None,
    traceparent: str | None = None,
    token: str | None = None,
) -> tuple[tuple[str, str], ...]:
    """The reverse: what a client sends."""
    pairs = (
        ("x-request-id", request_id),
        ("x-tenant", tenant),
        ("traceparent", traceparent),
        ("authorization", f"Bearer {token}" if token else None),
    )
    return tuple((key, value) for key, value in pairs if value)


def new_request_id() -> str:
    return f"req-{secrets.token_hex(12)}"


# --- channels ---


def channel(
    address: str, *, tls: ClientTls | None = None, keepalive_time_ms: int = KEEPALIVE_TIME_MS
) -> grpc.aio.Channel:
    """An asyncio channel to ``host:port`` or ``unix:/path``. It connects lazily; the caller closes it.

    Args:
        tls: its files are read now; who makes a new channel uses renewed ones. None: plain text.

    Raises:
        ConfigError: TLS_*: see protos/tls.py.
    """
    options = _channel_options(keepalive_time_ms)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, _channel_credentials(tls), options=options + _server_name(tls))


def sync_channel(
    address: str, *, tls: ClientTls | None = None, keepalive_time_ms: int = KEEPALIVE_TIME_MS
) -> grpc.Channel:
    """The same for threads without an event loop."""
    options = _channel_options(keepalive_time_ms)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _channel_credentials(tls), options=options + _server_name(tls))


def _channel_credentials(client: ClientTls) -> grpc.ChannelCredentials:
    files = read_client(client)
    return grpc.ssl_channel_credentials(files.ca, files.key, files.cert)


def _server_name(client: ClientTls) -> list[tuple[str, int | str]]:
    return [("grpc.ssl_target_name_override", client.server_name)] if client.server_name else []


# --- servers ---


class RpcServer:
    """A grpc.aio server with health, reflection, error translation and a graceful stop.

    Health (grpc.health.v1): the empty service name tells *alive* (SERVING from start to stop); each added service's own
    name tells *ready* (NOT_SERVING until ``set_ready(True)``).
    """

    def __init__(
        self,
        name: str,
        *,
        tls: ServerTls | None = None,
        tenant_of: TenantOf | None = None,
        open_methods: Collection[str] = (),
        stalled_s: float | None = None,
        keepalive_time_ms: int = KEEPALIVE_TIME_MS,
    ) -> None:
        """Starts nothing yet.

        Args:
            tls: None: plain text. Else renewed files are used from the next connection on.
            tenant_of: tells the tenant of each call from (its ``authorization`` or None, its ``x-tenant`` or ""), or
                raises; its message is not even read then. None: callers name their tenant as they like.
            open_methods: full names ("/package.Service/Method") or beginnings of them that need no token; those of
                health and reflection never do.
            stalled_s: a call whose caller takes no message for so long ends with SLOW_READER, which its handler is
                told at the `yield`. None: it waits as long as the caller lives.

        Raises:
            ConfigError: TLS_*: see protos/tls.py.
        """
        self.name = name
        self.certificate = ServerCertificate(tls, name) if tls is not None else None
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if tenant_of is not None:
            interceptors.append(_TenantInterceptor(tenant_of, (*_OPEN_METHODS, *open_methods)))
        self._server = grpc.aio.server(interceptors=interceptors, options=_server_options(keepalive_time_ms))
        self._handlers = _Handlers(name, self._server, stalled_s)
        self._health = health_aio.HealthServicer()
        self._services: list[str] = []
        self.ready = False
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._handlers)

    def add(self, add_to_server: Callable[[Any, Any], None], servicer: Any, service_full_name: str) -> None:
        """Registers a generated ``add_XServicer_to_server`` with its servicer. Before start."""
        add_to_server(servicer, self._handlers)
        self._services.append(service_full_name)

    async def start(self, address: str) -> str:
        """Binds and serves; alive, not yet ready.

        Args:
            address: ``host:port`` (port 0: a free one) or ``unix:/path``.

        Returns:
            The bound address.

        Raises:
            ConfigError: reason PORT_IN_USE or BAD_ADDRESS.
        """
        check_free(address)
        reflection.enable_server_reflection(
            (*self._services, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )
        try:
            if self.certificate is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, _server_credentials(self.certificate))
        except RuntimeError as failure:
            raise errors.ConfigError(
                f"{self.name} cannot listen on {address}", reason="PORT_IN_USE", given=address, hint=str(failure)
            ) from failure
        await self._server.start()
        for service in self._services:
            await self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        await self._health.set(_ALIVE, health_pb2.HealthCheckResponse.SERVING)
        return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"

    async def set_ready(self, ready: bool) -> None:
        """Tells health checks and balancers whether to send calls here."""
        self.ready = ready
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self._services:
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Not ready at once; refuses new calls; running ones have ``grace_s`` seconds, then they are cancelled."""
        await self.set_ready(False)
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        """Until stop() is through."""
        await self._server.wait_for_termination()


def _server_credentials(certificate: ServerCertificate) -> grpc.ServerCredentials:
    given = certificate.current()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given  # gRPC calls this in each handshake, on a thread of its own
        files = certificate.current()
        if files is given:
            return None
        given = files
        return _configuration(files)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(given),
        renewed,  # type: ignore[arg-type]  # the stubs do not know None: as before
        require_client_authentication=given.client_ca is not None,
    )


def _configuration(files: ServerFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], root_certificates=files.client_ca)


def check_free(address: str) -> None:
    """Raises ConfigError when the address is malformed or taken. gRPC itself reports both only as a RuntimeError.

    start() calls it; whoever has expensive things to do before start() may call it first.
    """
    if address.startswith("unix:"):
        path = Path(address.removeprefix("unix:"))
        if len(str(path).encode()) > 107:
            raise errors.ConfigError("socket path is too long", reason="BAD_ADDRESS", given=path, allowed="107 bytes")
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise errors.ConfigError("socket path is not a socket", reason="BAD_ADDRESS", given=path)
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise errors.ConfigError("address is malformed", reason="BAD_ADDRESS", given=address, allowed="host:port")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as failure:
        raise errors.ConfigError("host is unknown", reason="BAD_ADDRESS", given=address, hint=str(failure)) from failure
    family, kind, protocol, _, bind_to = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(bind_to)
        except OSError as failure:
            reason, hint = _BIND_FAILURES.get(failure.errno or 0, ("BAD_ADDRESS", None))
            raise errors.ConfigError(
                f"cannot listen on {address}: {failure.strerror}", reason=reason, given=address, hint=hint
            ) from failure


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach ``host:port`` or ``unix:/path``."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


_BIND_FAILURES = {
    errno.EADDRINUSE: (
        "PORT_IN_USE",
        "end the process that listens there, or choose another port (port 0 takes a free one)",
    ),
    errno.EADDRNOTAVAIL: (
        "BAD_ADDRESS",
        "the address is none of this machine's; 0.0.0.0 stands for all of them, 127.0.0.1 for callers on this machine",
    ),
    errno.EACCES: ("PORT_NOT_ALLOWED", "choose a port from 1024 on: those below are the administrator's"),
}


TenantOf = Callable[[str | None, str], str]
# Probes have no tokens, and what these tell is public.
_OPEN_METHODS = ("/grpc.health.v1.Health/", "/grpc.reflection.")


class _TenantInterceptor(grpc.aio.ServerInterceptor):
    """Lets in calls whose tenant is known, before their messages are read."""

    def __init__(self, tenant_of: TenantOf, open_methods: tuple[str, ...]) -> None:
        self._tenant_of = tenant_of
        self._open_methods = open_methods

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        if not str(details.method).startswith(self._open_methods):
            try:
                sent = _text_metadata(details.invocation_metadata)
                prove = partial(self._tenant_of, _only("authorization", sent), _only("x-tenant", sent) or "")
                _TENANT.set(prove())
                _TENANT_NOW.set(prove)
            except TailpackError as refused:
                return _refusal(refused)
        return await continuation(details)


def _refusal(error: TailpackError) -> Any:
    """A handler that ends a call of any kind with an error, and reads nothing."""
    status = to_status(error)

    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(status.code, status.details, status.trailing_metadata)

    return grpc.stream_stream_rpc_method_handler(refuse)


class _Handlers:
    """What generated code adds a service to. What handlers raise becomes statuses: they themselves never touch codes.

    They are wrapped here, once, and not by an interceptor, which would do so for each call.
    """

    def __init__(self, name: str, server: grpc.aio.Server, stalled_s: float | None) -> None:
        self._name = name
        self._server = server
        self._stalled_s = stalled_s

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Generated code adds the same handlers by both ways; the other one tells their names."""

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        wrapped = {name: self._wrapped(handler, f"/{service}/{name}") for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))

    def _wrapped(self, handler: Any, method: str) -> Any:
        if handler.response_streaming:
            inner: Any = handler.stream_stream if handler.request_streaming else handler.unary_stream
            wrapped = self._streaming(inner, method)
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            wrapped = self._unary(inner, method)
        make = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        return make(
            wrapped,
            # A handler that is not wrapped would not know what to do with an _Unreadable.
            request_deserializer=handler.request_deserializer
            if wrapped is inner
            else _or_unreadable(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _unary(self, handler: Any, method: str) -> Any:
        if not asyncio.iscoroutinefunction(handler):
            return handler  # health and reflection of the sync kind: nothing of ours to translate

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await handler(_readable(request), context)
            except Exception as failure:  # noqa: BLE001 - the boundary
                return await self._abort(failure, method, context)

        return call

    def _streaming(self, handler: Any, method: str) -> Any:
        if not inspect.isasyncgenfunction(handler):
            return handler

        # A coroutine with context.write instead of a generator: when the call is cancelled while a message is being
        # sent, grpc.aio drops a suspended generator, and the handler's `finally` (which frees the sequence) would wait
        # for the garbage collector.
        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            watch = _WriteWatch(self._stalled_s)
            try:
                responses = handler(_readable(request), context)
                try:
                    async for response in responses:
                        watch.begin()
                        await context.write(response)
                        watch.end()
                except asyncio.CancelledError:
                    if (stalled := watch.taken_back()) is None:
                        raise
                    with suppress(Exception):  # what the handler makes of it is its own affair
                        await responses.athrow(stalled)
                    raise stalled from None
                finally:
                    watch.stop()
                    await responses.aclose()
            except Exception as failure:  # noqa: BLE001 - the boundary
                await self._abort(failure, method, context)

        return call

    async def _abort(self, failure: Exception, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if isinstance(failure, grpc.aio.AbortError):
            raise failure
        if isinstance(failure, grpc.aio.InternalError):
            # What sending raises when the caller's connection is gone, a moment before gRPC cancels the call.
            raise asyncio.CancelledError from failure
        error = by_name(failure, self._name, method)
        if error.reason == UNREADABLE_MESSAGE:
            log.warning("unreadable message", server=self._name, method=method, peer=context.peer())
        status = to_status(error)
        await context.abort(status.code, status.details, status.trailing_metadata)


def by_name(failure: Exception, server: str, method: str) -> TailpackError:
    """What a caller is told of a failure. One that is no error of ours is a bug: it is logged, and told as such."""
    if isinstance(failure, TailpackError):
        return failure
    log.error("bug in a handler", server=server, method=method, exc_info=failure)
    return errors.InternalError(f"{server} failed inside {method}", hint=f"{type(failure).__name__}; see its log")


class _WriteWatch:
    """Cancels a call's task when its caller takes a message for longer than that: one timer a call, none a message."""

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._stalled = False
        self._began_s: float | None = None  # of the write that goes on, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        if limit_s is not None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            self._timer = self._loop.call_later(limit_s, self._look, limit_s)

    def begin(self) -> None:
        if self._timer is not None:
            self._began_s = self._loop.time()

    def end(self) -> None:
        self._began_s = None

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def taken_back(self) -> errors.CapacityError | None:
        """The error to end with, where the task was cancelled here and by nobody else."""
        if not self._stalled or self._task is None or self._task.uncancel():
            return None
        return errors.CapacityError(
            "the caller does not read what it asked for",
            reason="SLOW_READER",
            given=f"a message that was not taken for {self._limit_s:g} s",
        )

    def _look(self, limit_s: float) -> None:
        left_s = limit_s if self._began_s is None else self._began_s + limit_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look, limit_s)
        elif self._task is not None:
            self._stalled = True
            self._task.cancel()


UNREADABLE_MESSAGE = "UNREADABLE_MESSAGE"


class _Unreadable:
    """Stands for a message that does not parse: what a deserialiser raises, gRPC turns into UNKNOWN and a traceback."""


def _or_unreadable(deserializer: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    if deserializer is None:
        return None

    def parse(data: bytes) -> Any:
        try:
            return deserializer(data)
        except (DecodeError, UnicodeDecodeError):
            return _Unreadable()

    return parse


def _readable(request: Any) -> Any:
    """A call's message as it is, or its messages one by one. Raises InvalidRequest at one that does not parse."""
    if isinstance(request, _Unreadable):
        raise errors.InvalidRequest(
            "the message does not parse as what this method takes",
            reason=UNREADABLE_MESSAGE,
            allowed="a serialised message of the method's type, strings in UTF-8",
        )
    return _readable_each(request) if isinstance(request, AsyncIterator) else request


async def _readable_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _readable(request)


# --- processes ---

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on uvloop, with as many descriptors as are allowed. One event loop a process: grpc.aio does not
    support several.
    """
    raise_descriptor_limit()
    try:
        import uvloop
    except ImportError:  # not built for this platform: asyncio's own loop does the same, slower
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def raise_descriptor_limit() -> None:
    """A connection is a descriptor, so is each GiB of a GPU's memory, and shells allow 1,024 by default. Processes
    started from here on have them too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _descriptor_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
