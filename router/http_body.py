"""JSON over HTTP, both ways. Bodies of requests are counted while they arrive, and given up when they take too long."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from protos.errors import CapacityError, DeadlineExceeded, InvalidRequest, TooLarge
from router.validate import MAX_PROMPT_BYTES

MAX_BODY_BYTES = 2 * MAX_PROMPT_BYTES + (1 << 20)
"""Room for the largest prompt as JSON: text of which every third byte is escaped, or token ids."""
MAX_READING_BYTES = 16 * MAX_BODY_BYTES
"""Of all bodies that are arriving at one time."""
BODY_TIMEOUT_S = 60.0


class BodyReader:
    """Reads the bodies of one door."""

    def __init__(self) -> None:
        self.num_bytes = 0  # of bodies that are arriving

    async def read(self, request: Request) -> bytes:
        """The body, at most MAX_BODY_BYTES.

        Raises:
            InvalidRequest: UNSUPPORTED_MEDIA_TYPE.
            TooLarge: BODY_TOO_LARGE; by its content-length before a byte is read.
            DeadlineExceeded: BODY_TIMEOUT.
            CapacityError: TOO_MANY_REQUEST_BYTES.
            starlette.requests.ClientDisconnect: the caller left.
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
            raise _too_large(f"{length} bytes")
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for piece in request.stream():
                    self._count(body, piece)
                    body += piece
        except TimeoutError:
            raise DeadlineExceeded(
                "the body did not arrive in time", reason="BODY_TIMEOUT", allowed=f"{BODY_TIMEOUT_S:g} s"
            ) from None
        finally:
            self.num_bytes -= len(body)
        return bytes(body)

    def _count(self, body: bytearray, piece: bytes) -> None:
        if len(body) + len(piece) > MAX_BODY_BYTES:
            raise _too_large("more")
        if self.num_bytes + len(piece) > MAX_READING_BYTES:
            raise CapacityError(
                "the bodies that are arriving are too large together",
                reason="TOO_MANY_REQUEST_BYTES",
                allowed=f"{MAX_READING_BYTES} bytes",
                retry_after_ms=1000,
            )
        self.num_bytes += len(piece)


def json_response(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """One line of JSON."""
    return Response(msgspec.json.encode(body) + b"\n", status, headers, media_type="application/json")


def _too_large(given: str) -> TooLarge:
    return TooLarge(
        "the body is too large", reason="BODY_TOO_LARGE", given=given, allowed=f"at most {MAX_BODY_BYTES} bytes"
    )
