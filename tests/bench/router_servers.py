"""The servers around the router in its benchmark: a worker without a model, and two that say what gRPC alone costs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

from protos import (
    errors,
    router_pb2,
    router_pb2_grpc,
    rpc,
    types_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from router.service import SERVICE_NAME
from tests.scenarios.fake_worker import SERVICE_NAME as WORKER_NAME
from tests.scenarios.fake_worker import worker_info

TOKEN = 300  # of the tiny tokenizer: a few letters
LIFE_S = 600.0


class StepWorker(worker_pb2_grpc.WorkerServicer):
    """Every `every_s`: one message with `per_step` tokens for each sequence, as a real worker's step makes it.

    0: a step follows the other, and one begins as soon as there is a sequence.
    """

    def __init__(self, every_s: float, per_step: int) -> None:
        self._every_s = every_s
        self._per_step = per_step

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.WorkerMessage]:
        running: dict[str, tuple[int, int]] = {}  # emitted, limit
        ended: list[worker_pb2.SequenceOutput] = []
        some = asyncio.Event()

        def take(message: worker_pb2.RouterMessage) -> None:
            if message.WhichOneof("message") == "submit":
                running[message.submit.request_id] = (0, message.submit.stop.max_tokens)
                some.set()
            elif message.abort.request_id in running:
                del running[message.abort.request_id]
                ended.append(
                    worker_pb2.SequenceOutput(
                        request_id=message.abort.request_id, finish_reason=types_pb2.FINISH_REASON_ABORTED
                    )
                )
                some.set()

        async def read() -> None:
            async for message in requests:
                for each in message.batch.messages if message.HasField("batch") else (message,):
                    take(each)

        reader = asyncio.create_task(read())
        load = types_pb2.WorkerLoad(pages_free=100_000, pages_total=100_000)
        info = worker_info(max_sequence_tokens=1 << 24, features=("batch",))
        yield worker_pb2.WorkerMessage(welcome=worker_pb2.Welcome(info=info, load=load))
        try:
            due = time.monotonic()
            while True:
                if self._every_s:
                    due = max(due + self._every_s, time.monotonic() - self._every_s)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                else:
                    await some.wait()
                    await asyncio.sleep(0)  # all that has come is part of the step
                outputs, ended = ended, []
                for request_id, (emitted, limit) in list(running.items()):
                    count = min(self._per_step, limit - emitted)
                    output = worker_pb2.SequenceOutput(
                        request_id=request_id, token_offset=emitted, token_ids=[TOKEN] * count
                    )
                    running[request_id] = (emitted + count, limit)
                    if emitted + count >= limit:
                        del running[request_id]
                        output.finish_reason = types_pb2.FINISH_REASON_LENGTH
                    outputs.append(output)
                if not running:
                    some.clear()
                if outputs:
                    yield worker_pb2.WorkerMessage(step=worker_pb2.StepOutput(sequences=outputs, load=load))
        finally:
            reader.cancel()

    async def Find(self, request: Any, context: Any) -> worker_pb2.FindResponse:
        return worker_pb2.FindResponse()

    async def Abort(self, request: Any, context: Any) -> worker_pb2.AbortResponse:
        return worker_pb2.AbortResponse()

    async def Info(self, request: Any, context: Any) -> worker_pb2.InfoResponse:
        return worker_pb2.InfoResponse()


class BareRouter(router_pb2_grpc.RouterServicer):
    """The floor: the same messages to callers, from nothing."""

    def __init__(self, every_s: float, per_step: int) -> None:
        self._every_s = every_s
        self._per_step = per_step

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        request_id = rpc.call_metadata(context).request_id
        emitted = 0
        while True:
            chunk = router_pb2.GenerateResponse(
                request_id=request_id, text="text" * self._per_step, text_offset=4 * emitted
            )
            chunk.token_ids.extend([TOKEN] * self._per_step)
            chunk.token_offset = emitted
            emitted += self._per_step
            if emitted >= request.stop.max_tokens:
                chunk.finish_reason = types_pb2.FINISH_REASON_LENGTH
                chunk.usage.output_tokens = emitted
                yield chunk
                return
            yield chunk
            await asyncio.sleep(self._every_s)

    async def Resume(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        raise errors.NotFound("nothing is kept here", reason="UNKNOWN_REQUEST")
        yield

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[router_pb2.SessionResponse]:
        raise errors.NotBuilt("calls come one by one here")
        yield

    async def Cancel(self, request: Any, context: Any) -> router_pb2.CancelResponse:
        return router_pb2.CancelResponse()

    async def ListWorkers(self, request: Any, context: Any) -> router_pb2.ListWorkersResponse:
        return router_pb2.ListWorkersResponse()

    async def Stats(self, request: Any, context: Any) -> router_pb2.StatsResponse:
        return router_pb2.StatsResponse()


class Forwarder(BareRouter):
    """What grpc.aio costs between callers and a worker: hands on requests and outputs, and does nothing else."""

    def __init__(self) -> None:
        super().__init__(0.0, 1)
        self._outputs: dict[str, asyncio.Queue[worker_pb2.SequenceOutput]] = {}
        self._submits: asyncio.Queue[worker_pb2.Submit] = asyncio.Queue()

    async def run(self, worker: str) -> None:
        """The session with the worker."""
        async with rpc.channel(worker) as channel, asyncio.TaskGroup() as tasks:
            call = worker_pb2_grpc.WorkerStub(channel).Session()
            await call.write(worker_pb2.RouterMessage(hello=worker_pb2.Hello(router_id="forwarder", incarnation="1")))
            await call.read()

            async def write() -> None:
                while True:
                    await call.write(worker_pb2.RouterMessage(submit=await self._submits.get()))

            tasks.create_task(write())
            while isinstance(message := await call.read(), worker_pb2.WorkerMessage):
                for output in message.step.sequences:
                    if (outputs := self._outputs.get(output.request_id)) is not None:
                        outputs.put_nowait(output)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
        request_id = rpc.call_metadata(context).request_id
        outputs = self._outputs[request_id] = asyncio.Queue()
        try:
            self._submits.put_nowait(
                worker_pb2.Submit(request_id=request_id, prompt_token_ids=[TOKEN] * 12, stop=request.stop)
            )
            while True:
                output = await outputs.get()
                chunk = router_pb2.GenerateResponse(
                    request_id=request_id,
                    text="text" * len(output.token_ids),
                    token_ids=output.token_ids,
                    token_offset=output.token_offset,
                    finish_reason=output.finish_reason,
                )
                yield chunk
                if output.finish_reason:
                    return
        finally:
            del self._outputs[request_id]


async def serve(role: str, every_s: float, per_step: int, worker: str = "") -> None:
    """role: "worker", "bare" or "forwarder". worker: the forwarder's."""
    server = rpc.RpcServer(role)
    session: asyncio.Task[None] | None = None
    if role == "worker":
        server.add(worker_pb2_grpc.add_WorkerServicer_to_server, StepWorker(every_s, per_step), WORKER_NAME)
    elif role == "bare":
        server.add(router_pb2_grpc.add_RouterServicer_to_server, BareRouter(every_s, per_step), SERVICE_NAME)
    else:
        forwarder = Forwarder()
        session = asyncio.create_task(forwarder.run(worker))
        server.add(router_pb2_grpc.add_RouterServicer_to_server, forwarder, SERVICE_NAME)
    print(json.dumps({"address": await server.start("127.0.0.1:0")}), flush=True)
    await asyncio.wait([asyncio.create_task(asyncio.sleep(LIFE_S)), *([session] if session else [])])
