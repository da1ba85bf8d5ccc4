"""A small HTTP server for processes that have no other HTTP door: a few pages, one request a connection."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from protos import rpc

MAX_CONNECTIONS = 16
MAX_HEAD_BYTES = 8 << 10
CONNECTION_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Answer:
    """status: as "200 OK"."""

    status: str
    body: bytes
    content_type: str = "text/plain"


class SmallHttpServer:
    """Answers GET and HEAD, from a thread of its own.

    Bounded: MAX_CONNECTIONS at one time, more are closed at once; a connection has CONNECTION_TIMEOUT_S for its request
    and its answer, and makes one request. Answers are made in the server's thread, one at a time.

    Args:
        name: of its thread.
        tls: HTTPS with this context; certificates loaded into it later hold for new connections.
    """

    def __init__(self, name: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._stop = asyncio.Event()
        self._num_open = 0
        self._socket: socket.socket | None = None

    def answer(self, path: str, headers: Mapping[str, str]) -> Answer | None:
        """What is at a path; None: nothing. headers: by their names in lower case. Called in the server's thread."""
        raise NotImplementedError

    def start(self, address: str) -> str:
        """Listens on ``host:port``; port 0 takes a free one.

        Returns:
            The server's URL, without a path.

        Raises:
            ConfigError: PORT_IN_USE, BAD_ADDRESS, PORT_NOT_ALLOWED.
        """
        rpc.check_free(address)
        host, _, port = address.rpartition(":")
        family, *_, bind_to = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server(bind_to[:2], family=family, backlog=MAX_CONNECTIONS)
        self._thread.start()
        scheme = "https" if self._tls else "http"
        return f"{scheme}://{host}:{self._socket.getsockname()[1]}"

    def stop(self) -> None:
        """Closes the port and what is open on it. Also of one that was never started."""
        if self._thread.ident is None:
            self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(CONNECTION_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(
            self._connected,
            sock=self._socket,
            limit=MAX_HEAD_BYTES,
            ssl=self._tls,
            ssl_handshake_timeout=CONNECTION_TIMEOUT_S if self._tls else None,
        )
        await self._stop.wait()
        server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_open >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._num_open += 1
        try:
            async with asyncio.timeout(CONNECTION_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head.decode("latin-1")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, EOFError, asyncio.LimitOverrunError, OSError):
            writer.transport.abort()  # not a request, or nobody who reads the answer
        finally:
            self._num_open -= 1
            writer.close()

    def _response(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, target = request.partition(" ")
        path = target.partition(" ")[0].partition("?")[0]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        answer = self.answer(path, headers) if method in ("GET", "HEAD") else _ONLY_GET
        answer = answer or _NOTHING
        text = (
            f"HTTP/1.1 {answer.status}\r\nContent-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\nConnection: close\r\n\r\n"
        )
        return text.encode() + (b"" if method == "HEAD" else answer.body)


_ONLY_GET = Answer("405 Method Not Allowed", b"only GET is answered\n")
_NOTHING = Answer("404 Not Found", b"there is nothing here\n")
