"""What the client refuses before it sends anything."""

from __future__ import annotations

from typing import Any

import pytest

from protos.errors import ConfigError, TailpackError
from router.client import AsyncTailpack, as_chat, build_request
from router.client_settings import addresses


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"max_tokens": -1}, "BAD_MAX_TOKENS"),
        ({"max_tokens": 0}, "BAD_MAX_TOKENS"),
        ({"max_tokens": 1 << 32}, "BAD_MAX_TOKENS"),
        ({"top_k": -1}, "BAD_TOP_K"),
        ({"seed": -1}, "BAD_SEED"),
        ({"seed": 1 << 64}, "BAD_SEED"),
        ({"logprobs": -1}, "BAD_LOGPROBS"),
        ({"logprobs": 21}, "BAD_LOGPROBS"),
        ({"stop_token_ids": [-1]}, "BAD_STOP_TOKEN_ID"),
        ({"temperature": float("nan")}, "BAD_TEMPERATURE"),
        ({"prompt": ""}, "EMPTY_PROMPT"),
        ({"prompt": []}, "EMPTY_PROMPT"),
        ({"prompt": [-1]}, "BAD_PROMPT_TOKEN_ID"),
        ({"prompt": "x" * (8 << 20) + "y"}, "PROMPT_TOO_LARGE"),
        ({"prompt": "lone surrogate \ud800"}, "BAD_UNICODE"),
        ({"prompt": [("user", "\ud800")]}, "BAD_UNICODE"),
        ({"stop_strings": ["\udcff"]}, "BAD_UNICODE"),  # as a shell passes a byte that is not UTF-8
        ({"prompt": [("tool", "x")]}, "BAD_ROLE"),
        ({"prompt": "x", "thinking": True}, "THINKING_NEEDS_CHAT"),
        ({"prompt": [1], "thinking": True}, "THINKING_NEEDS_CHAT"),
    ],
)
def test_refused_by_name(parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(TailpackError) as caught:
        build_request(**{"prompt": "x", **parameters})
    assert caught.value.reason == reason


@pytest.mark.parametrize("logprobs", [-1, 21])
def test_the_range_of_logprobs_is_the_true_one(logprobs: int) -> None:
    with pytest.raises(TailpackError) as caught:
        build_request("x", logprobs=logprobs)
    assert caught.value.allowed == "0 to 20"


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 0.0, 1e300])
async def test_timeouts_that_are_none_are_refused_by_name(timeout_s: float) -> None:
    async with AsyncTailpack("127.0.0.1:1") as client:
        with pytest.raises(TailpackError) as caught:
            await anext(client.stream(build_request("x"), timeout_s=timeout_s))
    assert caught.value.reason == "BAD_TIMEOUT_S"
    assert caught.value.allowed


def test_unset_fields_stay_unset() -> None:
    request = build_request("x")
    assert not request.sampling.HasField("top_p")
    assert not request.sampling.HasField("seed")
    assert not request.sampling.HasField("logprobs")
    assert build_request("x", seed=0, logprobs=0).sampling.HasField("seed")
    assert build_request("x", logprobs=0).sampling.HasField("logprobs")


def test_prompts_of_all_kinds() -> None:
    assert build_request("x").WhichOneof("prompt") == "text"
    chat = build_request(as_chat("hi", "Be brief.")).chat
    assert [(message.role, message.content) for message in chat.messages] == [("system", "Be brief."), ("user", "hi")]
    assert list(build_request([1, 2]).token_ids.ids) == [1, 2]
    assert not chat.thinking and build_request(as_chat("hi"), thinking=True).chat.thinking


@pytest.mark.parametrize(
    "given",
    ["", "h", "h:", ":7", "h:0", "h:99999", "h:7700,", "h:1,h:1", "h:-1", "h:x", "h:٣", "http://h:80", "https://h:80/"],
)
def test_addresses_that_lead_elsewhere_are_refused(given: str) -> None:
    """gRPC would take 34463 for 99999, and 443 for none."""
    with pytest.raises(ConfigError) as caught:
        addresses(given)
    assert caught.value.reason == "BAD_ADDRESS"


def test_addresses() -> None:
    assert addresses("h:1, [::1]:65535,unix:/s,dns:///svc.ns:7700") == (
        "h:1",
        "[::1]:65535",
        "unix:/s",
        "dns:///svc.ns:7700",
    )
