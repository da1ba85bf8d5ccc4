"""A whole answer, as the client's `complete` returns it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos import router_pb2, types_pb2

Chunk = router_pb2.GenerateResponse
"""A piece of an answer: protos/router.proto says what is in it and when."""


@dataclass(frozen=True)
class Answer:
    """finish_reason: "eos", "length", "stop_token", "stop_string" or "aborted" (somebody cancelled it)."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: types_pb2.Usage
    timings: types_pb2.Timings
    stop_string: str = ""  # which one, with "stop_string"
    logprobs: tuple[types_pb2.PositionLogprobs, ...] = ()  # one per token when asked for
    worker_id: str = ""
    seed: int = 0  # that repeats a sampled answer

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> Answer:
        """All chunks of an answer put together, as a client yielded them."""
        last = chunks[-1]
        return cls(
            request_id=last.request_id,
            text="".join(chunk.text for chunk in chunks),
            token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
            finish_reason=finish_word(last.finish_reason),
            usage=last.usage,
            timings=last.timings,
            stop_string=last.stop_string,
            logprobs=tuple(position for chunk in chunks for position in chunk.logprobs),
            worker_id=next((chunk.worker_id for chunk in chunks if chunk.worker_id), ""),
            seed=next((chunk.seed for chunk in chunks if chunk.seed), 0),
        )


def finish_word(reason: types_pb2.FinishReason.ValueType) -> str:
    """The reason's name without its prefix, in lower case."""
    return types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
