"""What is said of a request that has ended: its counter, why, and the numbers of its line in the log. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from protos import types_pb2
from protos.errors import DeadlineExceeded, RequestCancelled, TailpackError
from router.relay import Relay

DEADLINE_LAG_S = 0.25
"""A client that ends its call with no more than this left of the deadline is taken to have met the deadline."""

_SHORT = {number: name.removeprefix("FINISH_REASON_") for name, number in types_pb2.FinishReason.items()}


def outcome(
    error: BaseException | None,
    finish_reason: types_pb2.FinishReason.ValueType,
    *,
    placed: bool,
    resumable: bool,
    deadline_s: float | None,
    remaining_s: Callable[[], float | None],
) -> tuple[str, str]:
    """(the counter that a request ends in, why it ended).

    Args:
        error: what ended it, where its caller has not got the last chunk.
        finish_reason: of the last chunk; 0: it was not sent.
        placed: a worker had it.
        resumable: it runs on without its call.
        deadline_s, remaining_s: seconds to its deadline when it came, and now (asked where it matters); None: no such.
    """
    if isinstance(error, TailpackError):
        if isinstance(error, RequestCancelled | DeadlineExceeded):
            return "cancelled", error.reason
        return ("failed" if placed else "rejected"), error.reason
    if isinstance(error, Exception):
        return "failed", type(error).__name__
    if finish_reason:
        aborted = finish_reason == types_pb2.FINISH_REASON_ABORTED
        return ("cancelled" if aborted else "finished"), _SHORT[finish_reason]
    if ran_out(deadline_s, remaining_s()):
        return "cancelled", "DEADLINE_EXCEEDED"
    return "cancelled", "DETACHED" if resumable else "CLIENT_GONE"


def ran_out(deadline_s: float | None, remaining_s: float | None) -> bool:
    """Whether a call that the client ended was ended by its deadline; both in seconds, None without a deadline.

    The client's clock runs out first: it started earlier, by the way here, and gRPC rounds up what it sends, by 1% at
    most.
    """
    if deadline_s is None or remaining_s is None:
        return False
    return remaining_s <= 0.01 * deadline_s + min(DEADLINE_LAG_S, deadline_s / 4)


def numbers(relay: Relay | None, *, started_ns: int, tokenized_ns: int | None, total_ns: int) -> dict[str, Any]:
    """Tokens and milliseconds of a request; None where it did not get so far. started_ns, tokenized_ns:
    time.monotonic_ns; total_ns: from its start to its end.
    """
    usage = timings = ttft_ns = itl_mean_ns = itl_max_ns = None
    num_tokens = 0
    if relay is not None:
        num_tokens, pace = relay.num_tokens, relay.pace
        if pace.first_ns is not None:
            ttft_ns = pace.first_ns - started_ns
        if num_tokens > 1:
            itl_mean_ns, itl_max_ns = pace.mean_gap_ns(num_tokens), pace.longest_gap_ns
        if relay.last_output is not None:
            usage, timings = relay.last_output.usage, relay.last_output.timings
    return {
        "cached_tokens": usage.cached_prompt_tokens if usage else None,
        "prefix_exact": usage.prefix_exact if usage else None,
        "output_tokens": num_tokens,
        "tokenize_ms": None if tokenized_ns is None else _ms(tokenized_ns - started_ns),
        "queue_ms": None if timings is None else _ms(timings.queue_ns),
        "prefill_ms": None if timings is None else _ms(timings.prefill_ns),
        "decode_ms": None if timings is None else _ms(timings.decode_ns),
        "ttft_ms": None if ttft_ns is None else _ms(ttft_ns),
        "itl_mean_ms": None if itl_mean_ns is None else _ms(itl_mean_ns),
        "itl_max_ms": None if itl_max_ns is None else _ms(itl_max_ns),
        "total_ms": _ms(total_ns),
    }


def _ms(ns: int) -> float:
    return round(ns / 1e6, 2)
