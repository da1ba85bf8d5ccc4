"""A small asyncio client of the Router service. Errors arrive as TailpackError; nothing of gRPC shows.

async with Client("127.0.0.1:7700") as client:
    async for chunk in client.generate("What is the capital of France?"):
        print(chunk.text, end="")
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import grpc

from protos import router_pb2, router_pb2_grpc, rpc, types_pb2
from protos.errors import InvalidRequest, NotBuilt, PreconditionFailed, TailpackError
from protos.limits import MAX_LOGPROBS
from router.validate import check_request

DEFAULT_ADDRESS = "127.0.0.1:7700"
MAX_TIMEOUT_S = 1_000_000
_MAX_UINT32 = (1 << 32) - 1
_MAX_UINT64 = (1 << 64) - 1

_NOT_GRPC = ("Received http2 header with status", "http1.x server", "Expected SETTINGS frame")
"""What gRPC says of servers that speak something else."""

Message = tuple[str, str]
"""(role, content)"""


PREFIX_REUSE = {
    "default": types_pb2.PREFIX_REUSE_DEFAULT,
    "any": types_pb2.PREFIX_REUSE_ANY,
    "exact": types_pb2.PREFIX_REUSE_EXACT,
    "none": types_pb2.PREFIX_REUSE_NONE,
}


def build_request(
    prompt: str | Sequence[Message] | Sequence[int],
    *,
    model: str = "",
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float | None = None,
    min_p: float = 0.0,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    logprobs: int | None = None,
    stop_strings: Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    prefix_reuse: str = "default",
) -> router_pb2.GenerateRequest:
    """A checked request. Meanings and ranges: protos/types.proto.

    Args:
        prompt: text as it is, chat messages (role, content), or token ids.
        max_tokens: most tokens of the answer, at least 1; None leaves it to the router. The model's room bounds it too.
        prefix_reuse: "default", "any", "exact" or "none": what of the prompt may come from KV that is there already.

    Raises:
        InvalidRequest, TooLarge: a value that the router would refuse, or that its message cannot hold.
    """
    if max_tokens is not None:
        _check_integer("max_tokens", max_tokens, _MAX_UINT32, low=1)
    _check_integer("top_k", top_k, _MAX_UINT32)
    _check_integer("seed", seed or 0, _MAX_UINT64)
    _check_integer("logprobs", logprobs or 0, MAX_LOGPROBS)
    for token_id in stop_token_ids:
        _check_integer("stop token id", token_id, _MAX_UINT32)
    if prefix_reuse not in PREFIX_REUSE:
        raise InvalidRequest(
            "prefix_reuse is not known", reason="BAD_PREFIX_REUSE", given=prefix_reuse, allowed=", ".join(PREFIX_REUSE)
        )
    request = router_pb2.GenerateRequest(model=_text("model", model), prefix_reuse=PREFIX_REUSE[prefix_reuse])
    _set_prompt(request, prompt)
    request.sampling.CopyFrom(
        types_pb2.Sampling(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            logprobs=logprobs,
        )
    )
    request.stop.CopyFrom(
        types_pb2.StopConditions(max_tokens=max_tokens or 0, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos)
    )
    request.stop_strings.extend(_text("stop string", stop) for stop in stop_strings)
    check_request(request)
    return request


class Client:
    """One channel to a router. Use as an async context manager; leaving it ends what still runs."""

    def __init__(self, address: str = DEFAULT_ADDRESS, *, tenant: str | None = None) -> None:
        self.address = address
        self._tenant = tenant
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = rpc.channel(self.address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def stream(
        self,
        request: router_pb2.GenerateRequest,
        *,
        request_id: str | None = None,
        timeout_s: float | None = None,
        traceparent: str | None = None,
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """Sends a request; yields its chunks. Leaving the loop, or closing the iterator, ends the request.

        Raises:
            TailpackError: as the router says, or Unavailable when it cannot be reached.
            InvalidRequest: BAD_TIMEOUT_S and what else cannot be sent. PreconditionFailed: NOT_A_ROUTER.
        """
        if timeout_s is not None and not 0 < timeout_s <= MAX_TIMEOUT_S:  # NaN is outside too
            raise InvalidRequest(
                "timeout_s is out of range",
                reason="BAD_TIMEOUT_S",
                given=timeout_s,
                allowed=f"above 0 to {MAX_TIMEOUT_S} seconds",
                hint="leave it out for no deadline",
            )
        for name, value in (("request id", request_id), ("tenant", self._tenant), ("traceparent", traceparent)):
            _check_metadata(name, value or "")
        metadata = rpc.metadata(request_id, self._tenant, traceparent)
        call = self._stub().Generate(request, timeout=timeout_s, metadata=metadata)
        try:
            async for chunk in call:
                yield chunk
        except grpc.RpcError as failure:
            raise self._error(failure) from failure
        finally:
            call.cancel()  # leaving an `async for` does not end a call

    async def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        chat: bool = True,
        system: str | None = None,
        request_id: str | None = None,
        timeout_s: float | None = None,
        model: str = "",
        max_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float | None = None,
        min_p: float = 0.0,
        repetition_penalty: float | None = None,
        seed: int | None = None,
        logprobs: int | None = None,
        stop_strings: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        prefix_reuse: str = "default",
    ) -> AsyncIterator[router_pb2.GenerateResponse]:
        """build_request and stream in one. A str prompt is one user message unless chat is False."""
        request = build_request(
            as_chat(prompt, system) if isinstance(prompt, str) and chat else prompt,
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            logprobs=logprobs,
            stop_strings=stop_strings,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            prefix_reuse=prefix_reuse,
        )
        chunks = self.stream(request, request_id=request_id, timeout_s=timeout_s)
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]

    async def cancel(self, request_id: str) -> bool:
        """Ends a request of this tenant, wherever it runs. False: there is none."""
        try:
            answer = await self._stub().Cancel(
                router_pb2.CancelRequest(request_id=request_id), metadata=rpc.metadata(tenant=self._tenant)
            )
        except grpc.RpcError as failure:
            raise self._error(failure) from failure
        return answer.found

    async def list_workers(self) -> Sequence[router_pb2.WorkerStatus]:
        try:
            return (await self._stub().ListWorkers(router_pb2.ListWorkersRequest())).workers
        except grpc.RpcError as failure:
            raise self._error(failure) from failure

    async def stats(self) -> router_pb2.StatsResponse:
        try:
            return await self._stub().Stats(router_pb2.StatsRequest())
        except grpc.RpcError as failure:
            raise self._error(failure) from failure

    def _error(self, failure: grpc.RpcError) -> TailpackError:
        error = rpc.error_from(failure)
        # A router that refuses a feature says which was given; gRPC's UNIMPLEMENTED, also made of HTTP 404, does not.
        foreign = isinstance(error, NotBuilt) and error.given is None and error.hint is None
        if foreign or any(sign in error.message for sign in _NOT_GRPC):
            return PreconditionFailed(
                f"{self.address} is not a Tailpack router",
                reason="NOT_A_ROUTER",
                hint="give the address that `tailpack up` prints for its router",
            )
        return error

    def _stub(self) -> router_pb2_grpc.RouterAsyncStub:
        if self._channel is None:
            raise RuntimeError("use the client inside `async with`")
        return router_pb2_grpc.RouterStub(self._channel)


def as_chat(prompt: str, system: str | None = None) -> list[Message]:
    """One user message, after an optional system message."""
    return [*([("system", system)] if system else []), ("user", prompt)]


def _set_prompt(request: router_pb2.GenerateRequest, prompt: str | Sequence[Message] | Sequence[int]) -> None:
    if isinstance(prompt, str):
        request.text = _text("prompt", prompt)
        return
    for part in prompt:
        if isinstance(part, tuple):
            role, content = part
            request.chat.messages.add(role=_text("role", role), content=_text("content", content))
        else:
            _check_integer("prompt token id", part, _MAX_UINT32)
            request.token_ids.ids.append(part)


def _text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        raise InvalidRequest(
            f"the {name} is not valid Unicode text", reason="BAD_UNICODE", given=f"position {failure.start}"
        ) from None
    return text


def _check_metadata(name: str, value: str) -> None:
    # gRPC cannot send anything else; the router has a narrower rule and says which.
    if not (value.isascii() and value.isprintable()) and value:
        raise InvalidRequest(
            f"the {name} cannot be sent",
            reason=f"BAD_{name.upper().replace(' ', '_')}",
            given=ascii(value[:64]),
            allowed="printable ASCII",
        )


def _check_integer(name: str, value: int, high: int, *, low: int = 0) -> None:
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} is out of range",
            reason=f"BAD_{name.upper().replace(' ', '_')}",
            given=value,
            allowed=f"{low} to {high}",
        )
