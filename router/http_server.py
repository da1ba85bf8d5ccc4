"""HTTP/1.1 for an ASGI application on the running event loop: uvicorn without its signals, with limits of our own."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from protos import rpc
from protos.errors import ConfigError, InvalidRequest, Unavailable
from router.http_body import json_response
from router.http_errors import to_http

MAX_CONNECTIONS = 4096
MAX_HEAD_BYTES = 32 << 10
KEEP_ALIVE_S = 75
"""How long a connection without a request stays open. Above the usual 60 s of proxies: they should close first."""
HEAD_TIMEOUT_S = 20.0
"""From a connection's beginning, or a request's first byte, to the end of the request's head. Bodies have a limit of
their own (router/http.py); what is left of one that was refused unread must be here in this time too."""
TLS_HANDSHAKE_TIMEOUT_S = 10.0
"""As gRPC doors have it (protos/rpc.py). Such a socket is no connection yet, so no other limit counts it."""
DEAD_AFTER_S = 60
"""Without any acknowledgement of what was sent, or of a keep-alive probe, the caller's machine is gone."""

FLUSH_S = 1.0
"""How long a stopping server waits for callers to take what was written to them."""


class HttpServer:
    """One listening socket.

    Args:
        app: an ASGI 3 application.
        tls: a server-side context: HTTPS. None: plain text.
    """

    def __init__(self, app: Any, tls: ssl.SSLContext | None = None) -> None:
        async def bounded(scope: Any, receive: Any, send: Any) -> None:
            """uvicorn's own limit answers in plain text."""
            if len(self._server.server_state.connections) > MAX_CONNECTIONS:
                error = to_http(_too_many())
                refusal = json_response(error.body, error.status, {**error.headers, "connection": "close"})
                await refusal(scope, receive, send)
            else:
                await app(scope, receive, send)

        self._config = uvicorn.Config(
            bounded,
            http=_Protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._tls = tls
        self._server = _Server(self._config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, address: str) -> str:
        """Listens on ``host:port``; port 0 takes a free one.

        Returns:
            The URL of its root, without a slash at the end.

        Raises:
            ConfigError: PORT_IN_USE, BAD_ADDRESS, PORT_NOT_ALLOWED.
        """
        listening = _listen(address)
        self._config.load()
        self._config.ssl = self._tls
        self._serving = asyncio.create_task(self._server.serve([listening]))
        while not self._server.started:  # it binds nothing and waits for nothing: a turn or two of the loop
            await asyncio.sleep(0)
            if self._serving.done():
                self._serving.result()
        host = address.rpartition(":")[0]
        return f"{'https' if self._tls else 'http'}://{host}:{listening.getsockname()[1]}"

    async def stop(self) -> None:
        """Closes everything; requests that still run are cancelled. Returns when they have ended."""
        if self._serving is not None:
            self._server.stopping.set()
            await self._serving


class _Server(uvicorn.Server):
    """uvicorn's, with a stop that waits for nothing but what it cancels."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stopping = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop, config = asyncio.get_running_loop(), self.config

        def connection() -> asyncio.Protocol:
            return _Protocol(config=config, server_state=self.server_state, app_state={})

        timeout_s = TLS_HANDSHAKE_TIMEOUT_S if config.ssl else None  # asyncio allows a minute, and uvicorn no choice
        self.servers = [
            await loop.create_server(
                connection, sock=sock, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=timeout_s
            )
            for sock in sockets or ()
        ]
        self.started = True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # signals are the process's

    async def main_loop(self) -> None:
        while not self.stopping.is_set():
            await self.on_tick(0)  # sets the Date header
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self.stopping.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        tasks = list(self.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        open_ones = list(self.server_state.connections)
        for connection in open_ones:
            connection.transport.close()  # behind what it has yet to send
        ends = asyncio.get_running_loop().time() + FLUSH_S
        while self.server_state.connections and asyncio.get_running_loop().time() < ends:
            await asyncio.sleep(0.005)
        for connection in list(self.server_state.connections):
            connection.transport.abort()


class _Protocol(H11Protocol):
    """One connection. Adds what uvicorn has no limit for: half-open connections and slow heads."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _notice_dead_peers(transport.get_extra_info("socket"))
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """In the form of the door's other errors. uvicorn's is plain text."""
        allowed = f"HTTP/1.1, with a head of at most {MAX_HEAD_BYTES} bytes"
        error = to_http(InvalidRequest(msg.rstrip("."), reason="NOT_HTTP", allowed=allowed))
        response = json_response(error.body, error.status, {**error.headers, "connection": "close"})
        for event in (
            h11.Response(status_code=error.status, headers=response.raw_headers, reason=b"Bad Request"),
            h11.Data(data=bytes(response.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """A deadline runs while a request is arriving that no handler waits for."""
        handled = self.cycle is not None and not self.cycle.response_complete
        if handled or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def _too_many() -> Unavailable:
    return Unavailable(
        "this router has too many connections",
        reason="TOO_MANY_CONNECTIONS",
        allowed=f"{MAX_CONNECTIONS} at its HTTP door",
        retry_after_ms=1000,
    )


def _notice_dead_peers(connection: socket.socket) -> None:
    """A caller whose machine vanished sends no end; without this its answer would run on to max_tokens."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", DEAD_AFTER_S // 4),
        ("TCP_KEEPINTVL", DEAD_AFTER_S // 4),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", DEAD_AFTER_S * 1000),
    ):
        if hasattr(socket, name):  # not every platform has each of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _listen(address: str) -> socket.socket:
    rpc.check_free(address)
    host, _, port = address.rpartition(":")
    family, *_, bind_to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(bind_to)
    except OSError as failure:  # somebody was faster
        listening.close()
        raise ConfigError(
            f"cannot listen on {address}", reason="PORT_IN_USE", given=address, hint=failure.strerror
        ) from failure
    listening.setblocking(False)
    return listening
