"""What is said on an Attach stream: what a worker asks for, what it is asked for, and how it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from kvstore.device import DeviceSpec
from kvstore.fd_server import Delivery, num_descriptors
from kvstore.geometry import LAYOUT_VERSION, CacheGeometry
from kvstore.suspects import Pulse
from protos import kvstore_pb2
from protos.errors import InvalidRequest, PreconditionFailed, Unavailable

BRING_TIMEOUT_S = 60.0  # for a worker to make its GPU's memory and bring it


def spec_of(asked: kvstore_pb2.AttachOpen) -> DeviceSpec:
    """What an AttachOpen asks for, checked.

    Raises:
        PreconditionFailed: GEOMETRY_MISMATCH, both sides printed.
        ConfigError, InvalidRequest: something is malformed or out of range.
    """
    if asked.geometry.layout_version != LAYOUT_VERSION:
        raise PreconditionFailed(
            "worker and store lay pages out differently",
            reason="GEOMETRY_MISMATCH",
            given=f"layout {asked.geometry.layout_version} (worker)",
            allowed=f"layout {LAYOUT_VERSION} (store)",
            hint="run worker and store of the same version",
        )
    geometry = CacheGeometry.from_proto(asked.geometry)
    if geometry.digest() != asked.geometry_digest:
        raise PreconditionFailed(
            "worker and store compute different geometry digests",
            reason="GEOMETRY_MISMATCH",
            given=f"{asked.geometry_digest.hex() or 'none'} (worker)",
            allowed=f"{geometry.summary()} (store)",
            hint="run worker and store of the same version",
        )
    if not asked.worker_id:
        raise InvalidRequest("an attachment names its worker", given="''", allowed="any other name")
    return DeviceSpec(
        device=asked.device,
        geometry=geometry,
        arena_bytes=asked.arena_bytes,
        max_sequences=asked.max_sequences,
        max_sequence_tokens=asked.max_sequence_tokens,
        weights_digest=asked.weights_digest,
        checkpoint_slots=asked.checkpoint_slots,
        memory_granularity=asked.memory_granularity,
    )


def num_fds(entries: Sequence[kvstore_pb2.FdEntry]) -> int:
    return sum(map(num_descriptors, entries))


def ask_for(
    entries: Sequence[kvstore_pb2.FdEntry], ticket: bytes, path: str, *, adopt: bool
) -> kvstore_pb2.AttachResponse:
    if adopt:
        return kvstore_pb2.AttachResponse(
            adopt=kvstore_pb2.AdoptMemory(fd_ticket=ticket, fd_socket=path, entries=entries)
        )
    return kvstore_pb2.AttachResponse(create=kvstore_pb2.CreateMemory(fd_ticket=ticket, fd_socket=path, arenas=entries))


async def delivered(delivery: Delivery, ended: asyncio.Task[bool]) -> None:
    """Waits for a worker to bring memory. Raises Unavailable: it left, or it takes too long."""
    arrived = asyncio.create_task(delivery.arrived.wait())
    endings: set[asyncio.Future[Any]] = {arrived, ended}
    try:
        await asyncio.wait(endings, timeout=BRING_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        arrived.cancel()
    if not delivery.arrived.is_set():
        why = "left before it brought" if ended.done() else f"did not bring within {BRING_TIMEOUT_S:g} s"
        raise Unavailable(
            f"the worker {why} the memory it was asked for",
            reason="MEMORY_NOT_DELIVERED",
            given="no descriptors",
            allowed=f"{delivery.num_fds} descriptors",
        )


async def until_detach(requests: AsyncIterator[kvstore_pb2.AttachRequest], pulse: Pulse) -> bool:
    """Reads heartbeats; True when the worker said that it is done, False when the stream just ended.

    The end alone says nothing: a connection that broke can look like a stream that was closed.
    """
    async for request in requests:
        match request.WhichOneof("message"):
            case "heartbeat":
                pulse.beat(time.monotonic())
            case "detach":
                return True
    return False
