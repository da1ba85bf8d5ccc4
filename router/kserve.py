"""The KServe door: protos/kserve.proto over the requests of one router, on the router's gRPC port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog

from protos import kserve_pb2, kserve_pb2_grpc, rpc
from protos.errors import DeadlineExceeded, InternalError, TailpackError
from protos.limits import choice_id
from protos.metrics import build_version
from router.admission import Call
from router.choices import complete
from router.kserve_answer import inference_response, stream_error
from router.kserve_request import INPUTS, OUTPUTS, VERSION, check_version, read_inference
from router.requests import Requests

log = structlog.get_logger("kserve")

SERVICE_NAME = kserve_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
OPEN_METHODS = (f"/{SERVICE_NAME}/ServerLive", f"/{SERVICE_NAME}/ServerReady")
"""These need no token, as health checks do not."""
MAX_STREAM_REQUESTS = 256
"""That run at one time on one stream; more are read when one of them has ended."""
_OUTBOX = 16  # responses; what is not taken gathers in the relays, which bound it

_TENSORS = {
    "text_input": ("BYTES", [1]),
    "input_ids": ("INT64", [-1]),
    "stop": ("BYTES", [-1]),
    "text_output": ("BYTES", [1]),
    "token_ids": ("INT32", [-1]),
    "finish_reason": ("BYTES", [1]),
}


class KserveService(kserve_pb2_grpc.GRPCInferenceServiceServicer):
    """Handlers only: they read, hand on, and write."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    async def ServerLive(self, request: kserve_pb2.ServerLiveRequest, context: Any) -> kserve_pb2.ServerLiveResponse:
        return kserve_pb2.ServerLiveResponse(live=True)

    async def ServerReady(self, request: kserve_pb2.ServerReadyRequest, context: Any) -> kserve_pb2.ServerReadyResponse:
        return kserve_pb2.ServerReadyResponse(ready=self._ready(None))

    async def ModelReady(self, request: kserve_pb2.ModelReadyRequest, context: Any) -> kserve_pb2.ModelReadyResponse:
        return kserve_pb2.ModelReadyResponse(
            ready=request.version in ("", VERSION) and self._ready(request.name or None)
        )

    def _ready(self, model: str | None) -> bool:
        return not self._requests.admission.draining and bool(self._requests.registry.ready(model))

    async def ServerMetadata(
        self, request: kserve_pb2.ServerMetadataRequest, context: Any
    ) -> kserve_pb2.ServerMetadataResponse:
        return kserve_pb2.ServerMetadataResponse(
            name="tailpack", version=build_version(), extensions=["model_stream_infer"]
        )

    async def ModelMetadata(
        self, request: kserve_pb2.ModelMetadataRequest, context: Any
    ) -> kserve_pb2.ModelMetadataResponse:
        check_version(request.version)
        model = self._requests.model(request.name)
        answer = kserve_pb2.ModelMetadataResponse(name=model.name, versions=[VERSION], platform="tailpack")
        for names, tensors in ((INPUTS, answer.inputs), (OUTPUTS, answer.outputs)):
            for name in names:
                datatype, shape = _TENSORS[name]
                tensors.add(name=name, datatype=datatype, shape=shape)
        return answer

    async def ModelInfer(self, request: kserve_pb2.ModelInferRequest, context: Any) -> kserve_pb2.ModelInferResponse:
        metadata = rpc.call_metadata(context)
        if not metadata.own_id:  # ahead of the answer it costs as much as a tenth of it
            await context.send_initial_metadata((("x-request-id", metadata.request_id),))
        inference = read_inference(request)
        call = _call(metadata, metadata.request_id, context, inference.timeout_s)
        async with _in_time(inference.timeout_s), self._requests.answer(inference.request, call) as answer:
            chunks = [chunk async for chunk in complete(answer)]
        return inference_response(request, inference, self._name(request.model_name), chunks, streamed=False)

    async def ModelStreamInfer(
        self, requests: AsyncIterator[kserve_pb2.ModelInferRequest], context: Any
    ) -> AsyncIterator[kserve_pb2.ModelStreamInferResponse]:
        metadata = rpc.call_metadata(context)
        await context.send_initial_metadata((("x-request-id", metadata.request_id),))
        outbox: asyncio.Queue[kserve_pb2.ModelStreamInferResponse | Exception | None] = asyncio.Queue(_OUTBOX)
        reader = asyncio.create_task(self._read_stream(requests, metadata, context, outbox))
        try:
            while (message := await outbox.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                yield message
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_stream(
        self,
        requests: AsyncIterator[kserve_pb2.ModelInferRequest],
        metadata: rpc.CallMetadata,
        context: Any,
        outbox: asyncio.Queue[kserve_pb2.ModelStreamInferResponse | Exception | None],
    ) -> None:
        """Answers each request of a stream; ends the outbox when all are answered, or with what broke the stream."""
        slots = asyncio.Semaphore(MAX_STREAM_REQUESTS)
        num_requests = 0
        try:
            async with asyncio.TaskGroup() as running:
                async for request in requests:
                    await slots.acquire()
                    call_id = choice_id(metadata.request_id, num_requests)  # that no caller can choose
                    num_requests += 1
                    task = running.create_task(self._answer_one(request, metadata, call_id, context, outbox))
                    task.add_done_callback(lambda task: slots.release())
        except* Exception as failures:  # noqa: BLE001 - raised by whoever empties the outbox
            await outbox.put(failures.exceptions[0])
        else:
            await outbox.put(None)

    async def _answer_one(
        self,
        request: kserve_pb2.ModelInferRequest,
        metadata: rpc.CallMetadata,
        call_id: str,
        context: Any,
        outbox: asyncio.Queue[kserve_pb2.ModelStreamInferResponse | Exception | None],
    ) -> None:
        try:
            inference = read_inference(request)
            call = _call(metadata, call_id, context, inference.timeout_s)
            async with _in_time(inference.timeout_s), self._requests.answer(inference.request, call) as answer:
                name = self._name(request.model_name)
                async for chunk in complete(answer):
                    response = inference_response(request, inference, name, [chunk], streamed=True)
                    await outbox.put(kserve_pb2.ModelStreamInferResponse(infer_response=response))
        except TailpackError as error:
            await outbox.put(stream_error(request, error))
        except Exception as bug:
            log.error("bug in a handler", method="ModelStreamInfer", exc_info=bug)
            hint = f"{type(bug).__name__}; see its log"
            await outbox.put(stream_error(request, InternalError("the router failed inside this request", hint=hint)))

    def _name(self, asked: str) -> str:
        return asked or next(iter(self._requests.registry.models()), "")


@asynccontextmanager
async def _in_time(timeout_s: float | None) -> AsyncIterator[None]:
    """Ends what runs inside after so long; None: never. A call's own deadline is gRPC's to keep, a request's is ours.

    Raises:
        DeadlineExceeded: the time was over.
    """
    timer = asyncio.timeout(timeout_s)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise DeadlineExceeded("the request's timeout passed", given=f"timeout {timeout_s:g} s") from None


def _call(metadata: rpc.CallMetadata, call_id: str, context: Any, timeout_s: float | None) -> Call:
    remaining_s: Callable[[], float | None] = context.time_remaining
    if timeout_s is not None:
        ends_s = time.monotonic() + timeout_s

        def remaining_s() -> float | None:
            of_call: float | None = context.time_remaining()
            own = ends_s - time.monotonic()
            return own if of_call is None else min(own, of_call)

    return Call(call_id, metadata.tenant, metadata.traceparent, remaining_s, door="kserve")
