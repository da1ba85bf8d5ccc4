"""What the engine says of a sequence: its new tokens, and with the last of them how it ended and what it took."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from protos import types_pb2
from protos.errors import TailpackError
from worker.sampler import Drawn
from worker.sequence import Output, Request, Sequence


def output_of(
    sequence: Sequence,
    new: Seq[Drawn],
    reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED,
    error: TailpackError | None = None,
) -> Output:
    """Of ``new``, which the sequence has. ``reason``: unspecified while it goes on. Says a drawn seed once."""
    last = reason != types_pb2.FINISH_REASON_UNSPECIFIED
    sampled = not sequence.request.sampling.greedy
    seed = sequence.request.sampling.seed if sampled and not sequence.seed_reported else None
    sequence.seed_reported = True
    return Output(
        request_id=sequence.request.request_id,
        owner=sequence.request.owner,
        token_offset=sequence.num_emitted - len(new),
        token_ids=tuple(each.token_id for each in new),
        logprobs=tuple(each.logprobs for each in new if each.logprobs is not None),
        finish_reason=reason,
        error=error,
        usage=sequence.usage() if last else None,
        timings=sequence.timings(time.monotonic_ns()) if last else None,
        seed=seed,
    )


def refusal_of(request: Request, error: TailpackError) -> Output:
    """The only answer to a request that was never a sequence here."""
    return Output(
        request_id=request.request_id,
        owner=request.owner,
        token_offset=len(request.emitted),
        finish_reason=types_pb2.FINISH_REASON_ERROR,
        error=error,
        usage=types_pb2.Usage(prompt_tokens=len(request.prompt), output_tokens=len(request.emitted)),
        timings=types_pb2.Timings(),
    )
