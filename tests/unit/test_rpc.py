"""protos/rpc.py on real sockets: errors there and back, health, reflection, keepalive, cancelled handlers.

The services are the worker's own; its handlers are scripted here.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import errors, rpc, worker_pb2, worker_pb2_grpc
from protos.errors import TailpackError

NAME = worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name


class Scripted(worker_pb2_grpc.WorkerServicer):
    """Handlers that do as a test says."""

    def __init__(self) -> None:
        self.raises: Exception | None = None
        self.began, self.speaks, self.closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.speaks.set()
        self.told: BaseException | None = None  # what ended Session, where something did
        self.silent_s = 0.0
        self.reads = False
        self.message = worker_pb2.WorkerMessage()
        self.endless = False
        self.seen: rpc.CallMetadata | None = None

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        self.seen = rpc.call_metadata(context)
        if self.raises is not None:
            raise self.raises
        return worker_pb2.InfoResponse()

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        try:
            if self.raises is not None:
                raise self.raises
            if self.reads:
                async for _ in requests:
                    pass
            self.began.set()
            await self.speaks.wait()
            await asyncio.sleep(self.silent_s)
            yield self.message
            while self.endless:
                yield self.message
        except BaseException as error:
            self.told = error
            raise
        finally:
            self.closed.set()

    async def Abort(self, request: Any, context: Any) -> worker_pb2.AbortResponse:
        return worker_pb2.AbortResponse()

    async def Find(self, request: Any, context: Any) -> worker_pb2.FindResponse:
        return worker_pb2.FindResponse()


class Started:
    def __init__(self, servicer: Scripted, server: rpc.RpcServer, address: str) -> None:
        self.servicer, self.server, self.address = servicer, server, address
        self.channel = rpc.channel(address)
        self.stub = worker_pb2_grpc.WorkerStub(self.channel)


@pytest.fixture
async def started() -> AsyncIterator[Started]:
    servicer, server = Scripted(), rpc.RpcServer("test")
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, NAME)
    one = Started(servicer, server, await server.start("127.0.0.1:0"))
    yield one
    await one.channel.close()
    await server.stop(0)


ALL_ERRORS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, TailpackError)]


@pytest.mark.parametrize("kind", ALL_ERRORS, ids=lambda kind: kind.__name__)
async def test_every_error_arrives_as_itself(started: Started, kind: type[TailpackError]) -> None:
    sent = kind("müßte", given="7", allowed="1 to 5", hint="try 5", retry_after_ms=250)
    started.servicer.raises = sent
    with pytest.raises(grpc.RpcError) as unary:
        await started.stub.Info(worker_pb2.InfoRequest())
    with pytest.raises(grpc.RpcError) as streamed:
        async for _ in started.stub.Session(iter(())):
            pass
    for failure in (unary.value, streamed.value):
        got = rpc.error_from(failure)
        assert type(got) is kind
        assert (got.message, got.reason, got.given, got.allowed, got.hint, got.retry_after_ms) == (
            "müßte", kind.default_reason, "7", "1 to 5", "try 5", 250,
        )  # fmt: skip
    inside = rpc.from_detail(rpc.to_detail(sent))
    assert (type(inside), str(inside), inside.retry_after_ms) == (kind, str(sent), 250)


async def test_a_special_reason_keeps_its_family(started: Started) -> None:
    for sent, family in (
        (errors.ConfigError("taken", reason="PORT_IN_USE"), errors.PreconditionFailed),
        (errors.TooLarge("long", reason="PROMPT_TOO_LONG"), errors.InvalidRequest),
    ):
        started.servicer.raises = sent
        with pytest.raises(grpc.RpcError) as failure:
            await started.stub.Info(worker_pb2.InfoRequest())
        for got in (rpc.error_from(failure.value), rpc.from_detail(rpc.to_detail(sent))):
            assert (type(got), got.reason) == (family, sent.reason)


async def test_a_bug_is_internal_and_says_nothing_of_its_text(started: Started) -> None:
    started.servicer.raises = ValueError("secret prompt text")
    with pytest.raises(grpc.RpcError) as failure:
        await started.stub.Info(worker_pb2.InfoRequest())
    got = rpc.error_from(failure.value)
    assert type(got) is errors.InternalError
    assert "secret" not in str(got)


def test_reasons_are_unique() -> None:
    reasons = [kind.default_reason for kind in ALL_ERRORS]
    assert len(set(reasons)) == len(reasons)


async def test_oversized_message_is_named(started: Started) -> None:
    started.servicer.message = worker_pb2.WorkerMessage(goodbye=worker_pb2.Goodbye(why="x" * rpc.MAX_MESSAGE_BYTES))
    with pytest.raises(grpc.RpcError) as failure:
        async for _ in started.stub.Session(iter(())):
            pass
    assert rpc.error_from(failure.value).reason == "TOO_LARGE"


async def test_over_grpcs_default_limit_passes(started: Started) -> None:
    started.servicer.message = worker_pb2.WorkerMessage(goodbye=worker_pb2.Goodbye(why="x" * (8 << 20)))
    received = [message async for message in started.stub.Session(iter(()))]
    assert len(received[0].goodbye.why) == 8 << 20


async def test_a_dead_peer_is_unavailable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    async with rpc.channel(address) as channel:
        with pytest.raises(grpc.RpcError) as failure:
            await worker_pb2_grpc.WorkerStub(channel).Info(worker_pb2.InfoRequest())
    assert type(rpc.error_from(failure.value)) is errors.Unavailable


async def test_alive_is_not_ready(started: Started) -> None:
    health = health_pb2_grpc.HealthStub(started.channel)

    async def status(service: str) -> str:
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    assert (await status(""), await status(NAME)) == ("SERVING", "NOT_SERVING")
    await started.server.set_ready(True)
    assert (await status(""), await status(NAME)) == ("SERVING", "SERVING")
    await started.server.set_ready(False)
    assert (await status(""), await status(NAME)) == ("SERVING", "NOT_SERVING")


async def test_reflection_lists_the_services(started: Started) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(started.channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    async for answer in stub.ServerReflectionInfo(asked):
        names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    "endless", [False, True], ids=["while waiting", "while sending to a client that does not read"]
)
async def test_a_cancelled_call_runs_the_handlers_finally(started: Started, endless: bool) -> None:
    started.servicer.endless = endless
    if not endless:
        started.servicer.speaks.clear()
    started.servicer.message = worker_pb2.WorkerMessage(goodbye=worker_pb2.Goodbye(why="x" * 1_000_000))
    call = started.stub.Session(iter(()))
    if endless:
        await call.read()
        await asyncio.sleep(0.3)  # the flow-control window fills; the handler now sits in a write
    else:
        await asyncio.wait_for(started.servicer.began.wait(), 60)
    assert not started.servicer.closed.is_set()
    call.cancel()
    await asyncio.wait_for(started.servicer.closed.wait(), 60)


async def test_a_long_silence_survives_keepalive_pings() -> None:
    servicer, server = Scripted(), rpc.RpcServer("test", keepalive_time_ms=100)
    servicer.silent_s = 6.0  # gRPC sends a ping a second at most without data; a server allows two by default
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, NAME)
    address = await server.start("127.0.0.1:0")
    async with rpc.channel(address, keepalive_time_ms=100) as channel:
        stub = worker_pb2_grpc.WorkerStub(channel)
        assert len([message async for message in stub.Session(iter(()))]) == 1
    await server.stop(0)


@pytest.fixture
async def impatient() -> AsyncIterator[Started]:
    servicer, server = Scripted(), rpc.RpcServer("test", stalled_s=0.2)
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, NAME)
    one = Started(servicer, server, await server.start("127.0.0.1:0"))
    yield one
    await one.channel.close()
    await server.stop(0)


async def test_a_caller_who_does_not_read_is_ended_by_name(impatient: Started) -> None:
    servicer = impatient.servicer
    servicer.endless = True
    servicer.message = worker_pb2.WorkerMessage(goodbye=worker_pb2.Goodbye(why="x" * 500_000))
    call = impatient.stub.Session(iter(()))
    await call.read()
    await asyncio.wait_for(servicer.closed.wait(), 60)  # though the caller lives, and says nothing
    assert isinstance(servicer.told, errors.CapacityError)
    assert (servicer.told.reason, servicer.told.given) == ("SLOW_READER", "a message that was not taken for 0.2 s")
    with pytest.raises(grpc.RpcError) as failure:
        while isinstance(await call.read(), worker_pb2.WorkerMessage):
            pass
    assert rpc.error_from(failure.value).reason == "SLOW_READER"


async def test_a_silent_handler_is_no_slow_reader(impatient: Started) -> None:
    impatient.servicer.silent_s = 0.7  # more than three times the limit
    messages = [message async for message in impatient.stub.Session(iter(()))]
    assert len(messages) == 1


async def test_metadata_there_and_back(started: Started) -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    await started.stub.Info(worker_pb2.InfoRequest(), metadata=rpc.metadata("r:1", "acme", trace))
    assert started.servicer.seen == rpc.CallMetadata("r:1", "acme", trace)
    await started.stub.Info(worker_pb2.InfoRequest(), metadata=rpc.metadata(traceparent="not one"))
    assert started.servicer.seen is not None
    assert started.servicer.seen.request_id.startswith("req-")
    assert started.servicer.seen.traceparent == ""


@pytest.mark.parametrize("bad", ["a b", "x" * 129, "a/b"])
async def test_malformed_request_id_is_refused(started: Started, bad: str) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        await started.stub.Info(worker_pb2.InfoRequest(), metadata=rpc.metadata(request_id=bad))
    assert isinstance(rpc.error_from(failure.value), errors.InvalidRequest)


@pytest.mark.parametrize("key", ["x-request-id", "x-tenant"])
async def test_metadata_there_twice_is_refused(started: Started, key: str) -> None:
    with pytest.raises(grpc.RpcError) as failure:
        await started.stub.Info(worker_pb2.InfoRequest(), metadata=((key, "one"), (key, "two")))
    got = rpc.error_from(failure.value)
    assert isinstance(got, errors.InvalidRequest) and "'one', 'two'" in str(got)


GARBAGE = b"\xff\xff\xff\xff"
NOT_UTF8 = b"\x0a\x02\xff\xfe"  # field 1, a string of two bytes


@pytest.mark.parametrize("data", [GARBAGE, NOT_UTF8], ids=["no message", "no UTF-8"])
@pytest.mark.parametrize("method", ["Abort", "Session"])
async def test_a_message_that_does_not_parse_is_the_callers_mistake(
    started: Started, caplog: pytest.LogCaptureFixture, method: str, data: bytes
) -> None:
    data = data if method == "Abort" or data == GARBAGE else b"\x0a" + bytes([len(data)]) + data  # inside a hello
    started.servicer.reads = True
    path = f"/{NAME}/{method}"
    raw: Any = started.channel  # without serialisers it sends bytes as they are
    with pytest.raises(grpc.RpcError) as failure, caplog.at_level("WARNING"):
        if method == "Abort":
            await raw.unary_unary(path)(data)
        else:
            async for _ in raw.stream_stream(path)(iter([data])):
                pass
    got = rpc.error_from(failure.value)
    assert isinstance(got, errors.InvalidRequest) and got.reason == "UNREADABLE_MESSAGE"
    assert not [record for record in caplog.records if record.exc_info], caplog.text


async def test_a_taken_port_is_named(started: Started) -> None:
    with pytest.raises(errors.ConfigError) as failure:
        await rpc.RpcServer("second").start(started.address)
    assert failure.value.reason == "PORT_IN_USE"


@pytest.mark.parametrize(
    ("number", "reason", "hint"),
    [
        (errno.EADDRINUSE, "PORT_IN_USE", "end the process"),
        (errno.EADDRNOTAVAIL, "BAD_ADDRESS", "none of this machine's"),
        (errno.EACCES, "PORT_NOT_ALLOWED", "from 1024 on"),
        (errno.EPERM, "BAD_ADDRESS", ""),
    ],
)
def test_why_an_address_cannot_be_taken_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, number: int, reason: str, hint: str
) -> None:
    def refuse(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(errors.ConfigError, match=os.strerror(number)) as failure:
        rpc.check_free("127.0.0.1:80")
    assert failure.value.reason == reason and hint in (failure.value.hint or "")


@pytest.mark.parametrize("bad", ["nonsense", ":80", "127.0.0.1:99999", "127.0.0.1:", f"unix:/tmp/{'x' * 120}"])
async def test_a_malformed_address_is_named(bad: str) -> None:
    with pytest.raises(errors.ConfigError) as failure:
        await rpc.RpcServer("second").start(bad)
    assert failure.value.reason == "BAD_ADDRESS"


async def test_unix_socket(tmp_path: Path) -> None:
    servicer, server = Scripted(), rpc.RpcServer("test")
    server.add(worker_pb2_grpc.add_WorkerServicer_to_server, servicer, NAME)
    address = await server.start(f"unix:{tmp_path}/s.sock")
    with rpc.sync_channel(address) as channel:
        call: Callable[[Any], Any] = worker_pb2_grpc.WorkerStub(channel).Info
        await asyncio.to_thread(call, worker_pb2.InfoRequest())
    await server.stop(0)


async def test_stop_lets_running_calls_finish_and_refuses_new_ones(started: Started) -> None:
    started.servicer.speaks.clear()
    call = started.stub.Session(iter(()))
    await asyncio.wait_for(started.servicer.began.wait(), 60)
    stopping = asyncio.create_task(started.server.stop(60))
    await asyncio.sleep(0.1)
    async with rpc.channel(started.address) as late:
        with pytest.raises(grpc.RpcError) as failure:
            await worker_pb2_grpc.WorkerStub(late).Info(worker_pb2.InfoRequest())
    assert isinstance(rpc.error_from(failure.value), errors.Unavailable)
    assert not stopping.done()
    started.servicer.speaks.set()
    assert len([message async for message in call]) == 1
    await stopping


def test_retry_info_is_a_duration() -> None:
    status = rpc.to_status(errors.CapacityError("full", retry_after_ms=1500))
    assert duration_pb2.Duration(seconds=1, nanos=500_000_000).SerializeToString() in status.trailing_metadata[0][1]
