"""The rules that router and worker share: what one refuses, the other refuses for the same reason."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos import router_pb2, types_pb2
from protos.errors import InvalidRequest
from router.validate import check_fits, check_request
from tests.unit.tiny import request
from worker.sequence import Sampling, StopConditions, validate

MODEL = types_pb2.ModelInfo(name="m", vocab_size=100, max_sequence_tokens=64)


def router_reason(sampling: types_pb2.Sampling, stop: types_pb2.StopConditions, prompt: list[int]) -> str | None:
    try:
        check_request(
            router_pb2.GenerateRequest(token_ids=router_pb2.TokenIds(ids=prompt), sampling=sampling, stop=stop)
        )
        check_fits(prompt, list(stop.stop_token_ids), MODEL)
    except InvalidRequest as refused:
        return refused.reason
    return None


def worker_reason(sampling: types_pb2.Sampling, stop: types_pb2.StopConditions, prompt: list[int]) -> str | None:
    made = request("r", prompt)
    made = type(made)("r", "", made.prompt, Sampling.from_proto(sampling), StopConditions.from_proto(stop))
    try:
        validate(made, MODEL)
    except InvalidRequest as refused:
        return refused.reason
    return None


NUMBERS = (math.nan, math.inf, -math.inf, -1.0, -5e-324, 0.0, 5e-324, 1e-40, 0.009, 0.01, 0.5, 1.0, 1.1, 99.9, 100.1)
ALLOWED = {
    "temperature": lambda v: 0 <= v <= 100,
    "top_p": lambda v: 0 < v <= 1,
    "min_p": lambda v: 0 <= v <= 1,
    "repetition_penalty": lambda v: 0.01 <= v <= 100,
}
OTHERS: list[tuple[dict[str, Any], dict[str, Any], list[int], str | None]] = [
    ({"logprobs": 20}, {}, [1], None),
    ({"logprobs": 21}, {}, [1], "BAD_LOGPROBS"),
    ({}, {"stop_token_ids": [5] * 64}, [1], None),
    ({}, {"stop_token_ids": [5] * 65}, [1], "BAD_STOP_TOKENS"),
    ({}, {"stop_token_ids": [99]}, [99], None),
    ({}, {"stop_token_ids": [100]}, [1], "BAD_TOKEN_ID"),
    ({}, {}, [1, 100], "BAD_TOKEN_ID"),
    ({}, {}, [], "EMPTY_PROMPT"),
    ({}, {}, [1] * 64, "PROMPT_TOO_LONG"),
]


@pytest.mark.parametrize("name", ALLOWED)
def test_router_and_worker_draw_the_same_lines(name: str) -> None:
    for value in NUMBERS:
        field: dict[str, Any] = {name: value}
        sampling, stop = types_pb2.Sampling(**field), types_pb2.StopConditions(max_tokens=1)
        expected = None if ALLOWED[name](value) else f"BAD_{name.upper()}"
        assert router_reason(sampling, stop, [1]) == expected, value
        assert worker_reason(sampling, stop, [1]) == expected, value


@pytest.mark.parametrize(("sampling", "stop", "prompt", "reason"), OTHERS)
def test_router_and_worker_give_the_same_reason(
    sampling: dict[str, Any], stop: dict[str, Any], prompt: list[int], reason: str | None
) -> None:
    messages = types_pb2.Sampling(**sampling), types_pb2.StopConditions(max_tokens=1, **stop)
    assert router_reason(*messages, prompt) == reason
    assert worker_reason(*messages, prompt) == reason
