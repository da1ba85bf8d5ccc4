"""The HTTP door in this process, over fake workers, and a client that shows every byte of it."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai

from protos import worker_pb2
from router.http import HttpDoor
from router.http_body import BodyReader
from router.http_server import HttpServer
from tests.scenarios.fake_worker import Script
from tests.scenarios.router_harness import Harness, cluster

HANG_S = 60.0
"""A bound on what would otherwise hang; nothing is measured by it."""


@dataclass
class Door:
    harness: Harness
    server: HttpServer
    url: str
    bodies: BodyReader

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def openai(self, **options: Any) -> openai.AsyncOpenAI:
        """The official client; without retries, so that tests see what is answered."""
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", **{"api_key": "unused", "timeout": HANG_S, "max_retries": 0, **options}
        )

    async def send(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Reply:
        """One request on a connection of its own, and its whole answer."""
        async with self.connection() as (reader, writer):
            writer.write(request_bytes(method, path, body, headers))
            await writer.drain()
            return await read_reply(reader)

    async def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> Reply:
        return await self.send("POST", path, body, headers)

    @asynccontextmanager
    async def connection(
        self, receive_bytes: int | None = None
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """receive_bytes: what the kernel may hold of what was not read yet."""
        own = socket.socket()
        if receive_bytes is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        own.setblocking(False)
        await asyncio.get_running_loop().sock_connect(own, self.address)
        reader, writer = await asyncio.open_connection(sock=own, limit=receive_bytes or 65536)
        try:
            async with asyncio.timeout(HANG_S):
                yield reader, writer
        finally:
            writer.close()


@dataclass
class Reply:
    """A response; events: the data of server-sent events, "[DONE]" as it is, others as what their JSON says."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        assert set(self.json) == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    @property
    def events(self) -> list[Any]:
        return events_of(self.body)


def events_of(body: bytes) -> list[Any]:
    """Strict: each event is one data line and an empty line; comments are left out."""
    assert body.endswith(b"\n\n")
    blocks = body.decode().removesuffix("\n\n").split("\n\n")
    found = []
    for block in blocks:
        if block.startswith(":"):
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


def request_bytes(method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> bytes:
    """bytes as they are; anything else as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": "test", "content-length": str(len(data)), "content-type": "application/json", **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items() if value)
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data


async def read_reply(reader: asyncio.StreamReader) -> Reply:
    """One response, framed by its length, by chunks, or by the connection's end."""
    status, headers = await read_head(reader)
    if "content-length" in headers:
        return Reply(status, headers, await reader.readexactly(int(headers["content-length"])))
    if headers.get("transfer-encoding") != "chunked":
        return Reply(status, headers, await reader.read())
    pieces = []
    while piece := await read_chunk(reader):
        pieces.append(piece)
    return Reply(status, headers, b"".join(pieces))


async def read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    return int(first.split()[1]), {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}


async def read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size)
    assert await reader.readexactly(2) == b"\r\n"
    return data


@asynccontextmanager
async def http_door(
    folder: Path,
    script: Callable[[worker_pb2.Submit], Script] | Script,
    *,
    tenant_of: Callable[[str | None, str], str] | None = None,
    **options: Any,
) -> AsyncIterator[Door]:
    """Router, its HTTP door and workers; all end with the block, and nothing may be left of any request."""
    async with cluster(folder, script, **options) as harness:
        application = HttpDoor(harness.requests, tenant_of=tenant_of)
        server = HttpServer(application)
        url = await server.start("127.0.0.1:0")
        try:
            yield Door(harness, server, url, application.bodies)
            await harness.settled()
        finally:
            await server.stop()
