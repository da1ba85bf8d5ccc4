"""Limits that hold before any of our code sees a call: connections, handshakes, metadata, streams."""

from __future__ import annotations

import asyncio
import resource
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import rpc
from protos.errors import TooLarge
from router.admission import DEFAULT_MAX_IN_FLIGHT

HANG_S = 60.0


async def check(address: str, **options: object) -> str:
    """ "ok", or the reason why a call did not get through."""
    async with rpc.channel(address) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HANG_S, **options)
        except grpc.RpcError as failure:
            return rpc.error_from(failure).reason
    return "ok"


async def test_metadata_above_its_limit_is_refused_by_name() -> None:
    server = rpc.RpcServer("test")
    address = await server.start("127.0.0.1:0")
    try:
        room = rpc.MAX_METADATA_BYTES - 1024  # gRPC's own headers count too
        assert await check(address, metadata=(("x-much", "x" * room),)) == "ok"
        async with rpc.channel(address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), metadata=(("x-much", "x" * rpc.MAX_METADATA_BYTES),)
                )
        error = rpc.error_from(caught.value)
        assert isinstance(error, TooLarge)
        assert (error.reason, error.allowed) == ("METADATA_TOO_LARGE", "16384 bytes")
    finally:
        await server.stop(0)


async def test_a_crowd_that_says_nothing_keeps_callers_out_for_a_handshake_s_time_at_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "MAX_CONNECTIONS", 20)
    monkeypatch.setattr(rpc, "HANDSHAKE_TIMEOUT_MS", 1500)
    server = rpc.RpcServer("test", keepalive_time_ms=600_000)  # which ends those who say nothing too
    address = await server.start("127.0.0.1:0")
    host, _, port = address.rpartition(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(30)]

    async def closed(reader: asyncio.StreamReader) -> bool:
        async with asyncio.timeout(HANG_S):
            with suppress(ConnectionError):
                await reader.read()
        return True

    try:
        async with asyncio.timeout(HANG_S):
            over = [asyncio.create_task(closed(reader)) for reader, _ in silent]
            while sum(task.done() for task in over) < 10:  # those above the limit, at once
                await asyncio.sleep(0.01)
        reason = await check(address)
        assert reason in ("CONNECTION_CLOSED", "ok")  # ok: this machine is so busy that the handshakes are over
        assert all(await asyncio.gather(*over))
        assert await check(address) == "ok"
    finally:
        for _, writer in silent:
            writer.transport.abort()
        await server.stop(0)


def test_limits_fit_each_other() -> None:
    # Or a client would wait in silence for a stream, where the router would have refused by name.
    assert rpc.MAX_STREAMS > DEFAULT_MAX_IN_FLIGHT
    options = dict(rpc._server_options(rpc.KEEPALIVE_TIME_MS))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert options["grpc.max_allowed_incoming_connections"] in (rpc.MAX_CONNECTIONS, soft // 2)
    assert options["grpc.max_concurrent_streams"] == rpc.MAX_STREAMS


def test_more_descriptors_are_taken_where_they_are_allowed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        rpc.raise_descriptor_limit()
        allowed = rpc.MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, rpc.MAX_DESCRIPTORS)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (allowed, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
