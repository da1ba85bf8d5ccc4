"""How `tailpack generate` shows an answer's chunks, its numbers, and what ended it early."""

from __future__ import annotations

import json
import math
from typing import Any

from protos import router_pb2, types_pb2
from protos.errors import DeadlineExceeded, RequestCancelled, TailpackError, Unavailable


def json_line(chunk: router_pb2.GenerateResponse) -> str:
    """A chunk as one line of JSON. Offsets, text and token ids are always there; numbers are numbers.

    A log-probability of minus infinity is null: JSON has no such number.
    """
    fields: dict[str, Any] = {
        "request_id": chunk.request_id,
        "text": chunk.text,
        "text_offset": chunk.text_offset,
        "token_ids": list(chunk.token_ids),
        "token_offset": chunk.token_offset,
    }
    if chunk.worker_id:
        fields["worker_id"] = chunk.worker_id
    if chunk.seed:
        fields["seed"] = chunk.seed
    if chunk.logprobs:
        fields["logprobs"] = [
            {"chosen": _logprob(position.chosen), "top": [_logprob(token) for token in position.top]}
            for position in chunk.logprobs
        ]
    if chunk.finish_reason:
        usage, timings = chunk.usage, chunk.timings
        fields["finish_reason"] = types_pb2.FinishReason.Name(chunk.finish_reason)
        if chunk.finish_reason == types_pb2.FINISH_REASON_STOP_STRING:
            fields["stop_string"] = chunk.stop_string
        fields["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "output_tokens": usage.output_tokens,
            "cached_prompt_tokens": usage.cached_prompt_tokens,
            "prefix_exact": usage.prefix_exact,
        }
        fields["timings"] = {
            "queue_ns": timings.queue_ns,
            "prefill_ns": timings.prefill_ns,
            "decode_ns": timings.decode_ns,
        }
    return json.dumps(fields, ensure_ascii=False, allow_nan=False) + "\n"


def _logprob(token: types_pb2.TokenLogprob) -> dict[str, int | float | None]:
    return {"token_id": token.token_id, "logprob": token.logprob if math.isfinite(token.logprob) else None}


def stats_line(last: router_pb2.GenerateResponse, started: float, first: float | None, ended: float) -> str:
    """Usage and times of a finished answer; started, first (token) and ended in seconds of one clock."""
    usage, timings = last.usage, last.timings
    inexact = ", inexact" if usage.cached_prompt_tokens and not usage.prefix_exact else ""
    parts = [
        f"finish {types_pb2.FinishReason.Name(last.finish_reason).removeprefix('FINISH_REASON_').lower()}",
        f"prompt {usage.prompt_tokens} tokens ({usage.cached_prompt_tokens} cached{inexact})",
        f"answer {usage.output_tokens} tokens",
    ]
    if first is not None:
        parts.append(f"first token after {first - started:.3f} s")
        if usage.output_tokens > 1 and ended > first:
            parts.append(f"{(usage.output_tokens - 1) / (ended - first):.1f} tokens/s")
    parts.append(
        f"worker: queue {timings.queue_ns / 1e9:.3f} s, prefill {timings.prefill_ns / 1e9:.3f} s, "
        f"decode {timings.decode_ns / 1e9:.3f} s"
    )
    return "; ".join(parts)


def explained(error: TailpackError, address: str, num_tokens: int, timeout_s: float | None) -> TailpackError:
    """An error in the words of whoever typed the command, where gRPC's own say little; others as they are."""
    after = f"after {num_tokens} token{'' if num_tokens == 1 else 's'}"
    if isinstance(error, DeadlineExceeded) and timeout_s is not None:
        return DeadlineExceeded(f"the deadline of {timeout_s:g} s passed {after}", hint="allow more with --timeout-s")
    # A router that ends running streams cancels them.
    ended = isinstance(error, (Unavailable, RequestCancelled)) and error.reason == type(error).default_reason
    if ended and num_tokens and error.hint is None:
        return Unavailable(
            f"the router at {address} stopped, or the connection was lost, {after}", hint="send the request again"
        )
    if isinstance(error, Unavailable) and error.reason == Unavailable.default_reason and error.hint is None:
        return Unavailable(
            f"no router at {address}", hint="start one with `tailpack up`, or name another with --router"
        )
    return error
