"""The Router service: protos/router.proto over the requests of one router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from protos import router_pb2, router_pb2_grpc, rpc
from protos.errors import InvalidRequest
from router.admission import Call
from router.requests import Requests
from router.session import Session

SERVICE_NAME = router_pb2.DESCRIPTOR.services_by_name["Router"].full_name

KV_TIMEOUT_S = 2.5
"""For a worker to ask its kvstore and answer; one that takes longer is listed without."""


class RouterService(router_pb2_grpc.RouterServicer):
    """Handlers only: they read the call's metadata and hand on."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    async def Generate(
        self, request: router_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        metadata = rpc.call_metadata(context)
        if request.resumable or not metadata.own_id:
            # Ahead of the first chunk it takes a tenth of what a request takes, so only where it says something: that
            # a resumable request is here, or an id that its caller does not know.
            await context.send_initial_metadata((("x-request-id", metadata.request_id),))
        call = Call(
            metadata.request_id,
            metadata.tenant,
            metadata.traceparent,
            context.time_remaining,
            own_id=metadata.own_id,
        )
        async with self._requests.answer(request, call) as answer:
            async for chunk in answer:
                yield chunk

    async def Resume(
        self, request: router_pb2.ResumeRequest, context: Any
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        metadata = rpc.call_metadata(context)
        call = Call(request.request_id, metadata.tenant, metadata.traceparent, context.time_remaining)
        async with self._requests.resume(request, call) as answer:
            await context.send_initial_metadata((("x-request-id", request.request_id),))
            async for chunk in answer:
                yield chunk

    async def Session(
        self, request_iterator: AsyncIterator[router_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[router_pb2.SessionResponse]:
        async with aclosing(Session(self._requests, rpc.tenant_now(context)).serve(request_iterator)) as messages:
            async for message in messages:
                yield message

    async def Cancel(self, request: router_pb2.CancelRequest, context: Any) -> router_pb2.CancelResponse:
        tenant = rpc.call_metadata(context).tenant
        if not request.request_id:
            raise InvalidRequest("request_id is empty", reason="EMPTY_REQUEST_ID")
        found = await self._requests.cancel(request.request_id, tenant, context.time_remaining())
        return router_pb2.CancelResponse(found=found)

    async def ListWorkers(self, request: router_pb2.ListWorkersRequest, context: Any) -> router_pb2.ListWorkersResponse:
        links = list(self._requests.registry.links.values())
        workers = [link.status() for link in links]
        if request.with_kv:
            answers = await asyncio.gather(*(link.kv(KV_TIMEOUT_S) for link in links))
            for worker, kv in zip(workers, answers, strict=True):
                if kv is not None:
                    worker.kv.CopyFrom(kv)
        return router_pb2.ListWorkersResponse(workers=workers)

    async def Stats(self, request: router_pb2.StatsRequest, context: Any) -> router_pb2.StatsResponse:
        return self._requests.stats()
