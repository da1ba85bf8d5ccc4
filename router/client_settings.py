"""What both flavours of the client share around a call: where it goes, as whom, and what its failure means."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import grpc

from protos import router_pb2, rpc
from protos.errors import (
    ConfigError,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotBuilt,
    PreconditionFailed,
    TailpackError,
    Unavailable,
)
from protos.tls import ClientTls
from router.answer_state import AnswerState, Failure, RetryPolicy
from router.client_session import Lost, NoSessions, not_opened

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:7700"
MAX_TIMEOUT_S = 1_000_000
UNARY_TIMEOUT_S = 10.0
CANCEL_TIMEOUT_S = 2.0
"""How long leaving a resumable answer waits for a router to hear of it."""

_NOT_GRPC = ("Received http2 header with status", "http1.x server", "Expected SETTINGS frame")
"""What gRPC says of servers that speak something else."""


def ignore(error: TailpackError, delay_s: float) -> None:
    """Told of nothing."""


@dataclass(frozen=True)
class Settings:
    """addresses: routers that serve the same workers. token: never shown. on_retry: told each error and the wait."""

    addresses: tuple[str, ...]
    tenant: str | None = None
    token: str | None = field(default=None, repr=False)
    tls: ClientTls | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    on_retry: Callable[[TailpackError, float], None] = ignore

    def __post_init__(self) -> None:
        _check_metadata("tenant", self.tenant)
        _check_metadata("token", self.token, secret=True)

    def metadata(self, request_id: str | None = None, traceparent: str | None = None) -> tuple[tuple[str, str], ...]:
        """Of a call; the trace is the caller's current one where none is given. Raises InvalidRequest for what gRPC
        cannot send.
        """
        traceparent = traceparent or _current_traceparent()
        _check_metadata("request id", request_id)
        _check_metadata("traceparent", traceparent)
        return rpc.metadata(request_id, self.tenant, traceparent, self.token)

    def answer(
        self,
        request: router_pb2.GenerateRequest | None,
        *,
        request_id: str | None,
        timeout_s: float | None,
        first_address: int,
        token_offset: int = 0,
        text_offset: int = 0,
        resume_grace_ms: int = 0,
    ) -> AnswerState:
        """The state of a new answer, or (request None) of one to go on with."""
        if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:  # NaN is outside too
            raise InvalidRequest(
                "timeout_s is out of range",
                reason="BAD_TIMEOUT_S",
                given=timeout_s,
                allowed=f"above 0 to {MAX_TIMEOUT_S} seconds",
                hint="leave it out for no deadline",
            )
        return AnswerState(
            request_id or rpc.new_request_id(),
            request,
            self.retry,
            num_addresses=len(self.addresses),
            first_address=first_address,
            deadline_s=None if timeout_s is None else time.monotonic() + timeout_s,
            token_offset=token_offset,
            text_offset=text_offset,
            resume_grace_ms=resume_grace_ms,
        )

    def failure(
        self, failed: grpc.RpcError, address: int, first_metadata: Iterable[tuple[str, object]] | None = None
    ) -> Failure:
        """A call's end by an error. first_metadata: what its router sent ahead of its answer, None where nothing."""
        return Failure(
            self.error(failed, address),
            spoken=rpc.is_ours(failed),
            accepted=any(key == "x-request-id" for key, _ in first_metadata or ()),
        )

    def lost(self, failed: grpc.RpcError, address: int) -> Lost:
        """A session's end by an error. grpc.aio says INTERNAL of a connection that broke in the middle of a message."""
        error, spoken = self.error(failed, address), rpc.is_ours(failed)
        if isinstance(error, InternalError) and not spoken:
            error = Unavailable(f"the connection was lost: {error.message}")
        return Lost(error, spoken)

    def not_opened(self, failed: grpc.RpcError, address: int, *, in_time: bool = True) -> Failure:
        """Of the calls that wait for a session. in_time: the time that was given to open it is not that of a call."""
        failure = self.failure(failed, address)
        return not_opened() if in_time and isinstance(failure.error, DeadlineExceeded) else failure

    def no_sessions(self, address: int, why: str) -> NoSessions:
        """Of a router that names the feature where none can be had, as behind a proxy: calls get their own streams."""
        log.warning("%s opens no session (%s): each request has its own stream", self.addresses[address], why)
        return NoSessions(time.monotonic())

    def error(self, failed: grpc.RpcError, address: int) -> TailpackError:
        """The same without its circumstances."""
        error = rpc.error_from(failed)
        # A router that refuses a feature says which was given; gRPC's UNIMPLEMENTED, also made of HTTP 404, does not.
        foreign = isinstance(error, NotBuilt) and error.given is None and error.hint is None
        if foreign or any(sign in error.message for sign in _NOT_GRPC):
            return PreconditionFailed(
                f"{self.addresses[address]} is not a Tailpack router",
                reason="NOT_A_ROUTER",
                hint="give the address that `tailpack up` prints for its router",
            )
        return error


def addresses(given: str) -> tuple[str, ...]:
    """ "host:port,host:port" taken apart. Raises ConfigError (BAD_ADDRESS)."""
    parts = tuple(part.strip() for part in given.split(","))
    if not all(parts) or len(set(parts)) != len(parts):
        raise ConfigError(
            "the routers' addresses are malformed",
            reason="BAD_ADDRESS",
            given=repr(given[:200]),
            allowed="host:port, or several different ones with commas between",
        )
    for part in parts:
        # gRPC takes port 443 where none is given, and the port's last 16 bits where it has more.
        host, _, port = part.rpartition(":")
        with_port = bool(host) and port.isascii() and port.isdigit() and 0 < int(port[:6]) <= 65535
        if not part.startswith("unix:") and (not with_port or part.startswith(("http:", "https:"))):
            raise ConfigError(
                "a router's address is malformed",
                reason="BAD_ADDRESS",
                given=repr(part[:200]),
                allowed="host:port of its gRPC door, with a port from 1 to 65535",
            )
    return parts


def _current_traceparent() -> str | None:
    """Of the caller's span, where the caller uses OpenTelemetry; the library is never imported for it."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _check_metadata(name: str, value: str | None, *, secret: bool = False) -> None:
    # gRPC cannot send anything else; the router has a narrower rule and says which.
    if value and not (value.isascii() and value.isprintable()):
        raise InvalidRequest(
            f"the {name} cannot be sent",
            reason=f"BAD_{name.upper().replace(' ', '_')}",
            given=None if secret else ascii(value[:64]),
            allowed="printable ASCII",
        )
