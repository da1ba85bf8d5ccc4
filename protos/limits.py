"""What sampling and stop conditions may hold, and a call be. Router and worker check with this code, so they refuse the
same things.

Ranges are those of protos/types.proto. NaN is outside of every range.
"""

from __future__ import annotations

from collections.abc import Sequence

from protos import types_pb2
from protos.errors import InvalidRequest

MAX_TEMPERATURE = 100.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 64
DEFAULT_RESUME_GRACE_MS = 30_000
MAX_RESUME_GRACE_MS = 600_000
MAX_CHOICES = 64
"""Of one call: each is a request of its own."""


def choice_id(request_id: str, index: int) -> str:
    """What choice ``index`` of a call is known by: the call's id, or one that no caller can choose (rpc.is_id)."""
    return f"{request_id}~{index}" if index else request_id


def choice_ids(request_id: str) -> list[str]:
    """Of all choices that a call of this id may have: who ends the call ends them all."""
    return [choice_id(request_id, index) for index in range(MAX_CHOICES)]


def check_sampling(sampling: types_pb2.Sampling) -> None:
    """Raises InvalidRequest, with a reason BAD_<FIELD>, for a number outside its range."""
    _check_range("temperature", sampling.temperature, 0.0, MAX_TEMPERATURE)
    if sampling.HasField("top_p"):
        _check_range("top_p", sampling.top_p, 0.0, 1.0, low_open=True)
    _check_range("min_p", sampling.min_p, 0.0, 1.0)
    if sampling.HasField("repetition_penalty"):
        _check_range("repetition_penalty", sampling.repetition_penalty, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY)
    _check_range("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)


def check_stop(stop: types_pb2.StopConditions) -> None:
    """Raises InvalidRequest (BAD_STOP_TOKENS) for too many stop token ids."""
    if len(stop.stop_token_ids) > MAX_STOP_TOKENS:
        raise InvalidRequest(
            "too many stop token ids",
            reason="BAD_STOP_TOKENS",
            given=len(stop.stop_token_ids),
            allowed=f"at most {MAX_STOP_TOKENS}",
        )


def check_token_ids(what: str, token_ids: Sequence[int], model: types_pb2.ModelInfo) -> None:
    """Raises InvalidRequest (BAD_TOKEN_ID) for an id outside the model's vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        index, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < model.vocab_size)
        raise InvalidRequest(
            f"a {what} token id is not in the vocabulary of model {model.name}",
            reason="BAD_TOKEN_ID",
            given=f"{bad} at index {index}",
            allowed=f"0 to {model.vocab_size - 1}",
        )


def _check_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    inside = low <= value <= high and not (low_open and value == low)
    if not inside:
        raise InvalidRequest(
            f"{name} is out of range",
            reason=f"BAD_{name.upper()}",
            given=value,
            allowed=f"{'above' if low_open else 'from'} {low:g} to {high:g}",
        )
