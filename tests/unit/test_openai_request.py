"""OpenAI's JSON bodies: what is honoured, ignored and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import errors
from protos.limits import MAX_CHOICES
from router.http_errors import to_http
from router.openai_request import DEFAULT_COMPLETION_TOKENS, Asked, choice_seed, read_chat, read_completion

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def completion(**fields: Any) -> Asked:
    return read_completion(json.dumps({"prompt": "hello", **fields}).encode())


def chat(**fields: Any) -> Asked:
    return read_chat(json.dumps({**HELLO, **fields}).encode())


def refused(read: Callable[..., Asked], **fields: Any) -> tuple[str, str | None, str]:
    """Reason, field, and the message as a caller sees it."""
    with pytest.raises(errors.TailpackError) as caught:
        read(**fields)
    error = to_http(caught.value)
    assert error.status == 400
    return caught.value.reason, error.body["error"]["param"], error.body["error"]["message"]


def test_the_least_that_can_be_sent_has_the_apis_defaults() -> None:
    (request,) = completion().requests
    assert request.text == "hello"
    assert request.stop.max_tokens == DEFAULT_COMPLETION_TOKENS
    assert request.sampling.temperature == 1.0
    (request,) = chat().requests
    assert [(message.role, message.content) for message in request.chat.messages] == [("user", "hello")]
    assert request.stop.max_tokens == 0  # the router's own default
    assert not request.sampling.HasField("seed")
    assert not request.sampling.HasField("logprobs")


def test_every_honoured_field_arrives() -> None:
    asked = completion(
        model="tiny",
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        repetition_penalty=1.1,
        seed=-1,
        stop=["a", "b", "c", "d", "e"],
        logprobs=3,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
    )
    (request,) = asked.requests
    sampling = request.sampling
    assert (request.model, asked.model) == ("tiny", "tiny")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 40, 0.05)
    assert (sampling.repetition_penalty, sampling.seed, sampling.logprobs) == (1.1, 2**64 - 1, 3)
    assert (request.stop.max_tokens, request.stop.ignore_eos) == (7, True)
    assert list(request.stop_strings) == ["a", "b", "c", "d", "e"]
    assert (asked.stream, asked.include_usage, asked.logprobs, asked.ignore_eos) == (True, True, 3, True)
    assert list(completion(stop="x").requests[0].stop_strings) == ["x"]


def test_a_temperature_of_zero_is_not_the_default() -> None:
    assert completion(temperature=0).requests[0].sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_a_prompt_is_text_or_tokens_one_or_several(prompt: Any, expected: list[Any]) -> None:
    got = [request.text or list(request.token_ids.ids) for request in completion(prompt=prompt).requests]
    assert got == expected


def test_choices_of_each_prompt_stand_side_by_side_with_seeds_of_their_own() -> None:
    asked = completion(prompt=["a", "b"], n=3, seed=5)
    assert [request.text for request in asked.requests] == ["a", "a", "a", "b", "b", "b"]
    assert asked.per_prompt == 3
    seeds = [request.sampling.seed for request in asked.requests]
    assert seeds[0] == 5
    assert seeds[:3] == seeds[3:]
    assert len(set(seeds)) == 3
    others = {request.sampling.seed for request in completion(n=3, seed=6).requests}
    assert not others & set(seeds)
    assert not any(request.sampling.HasField("seed") for request in completion(n=3).requests)


@given(seed=st.integers(0, 2**64 - 1))
def test_no_choice_has_anothers_seed(seed: int) -> None:
    assert len({choice_seed(seed, index) for index in range(MAX_CHOICES)}) == MAX_CHOICES


def test_chat_content_is_text_or_parts_of_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (request,) = chat(
        messages=[{"role": "developer", "content": "be short"}, {"role": "user", "content": parts}]
    ).requests
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be short"), ("user", "ab")]


def test_what_clients_send_back_of_an_earlier_answer_is_taken() -> None:
    earlier: dict[str, Any] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    (request,) = chat(messages=[earlier]).requests
    assert request.chat.messages[0].content == "hi"


def test_copies_of_large_prompts_are_bounded() -> None:
    """64 MiB of them: 3 MiB of prompts, 21 times."""
    for prompt in ("x" * (3 << 20), ["x" * (3 << 18)] * 4):
        most = 21 if isinstance(prompt, str) else 16  # and never more than 64 choices
        assert len(completion(prompt=prompt, n=most).requests) >= most
    with pytest.raises(errors.TooLarge) as caught:
        completion(prompt="x" * (3 << 20), n=22)
    assert caught.value.reason == "PROMPT_TOO_LARGE"
    with pytest.raises(errors.TooLarge):
        completion(prompt=["x" * (3 << 20)] * 2, n=11)


def test_thinking_is_asked_of_the_chat() -> None:
    assert [chat(thinking=value).requests[0].chat.thinking for value in (True, False, None)] == [True, False, False]


def test_both_names_of_the_token_limit() -> None:
    assert chat(max_completion_tokens=5).requests[0].stop.max_tokens == 5
    assert chat(max_tokens=5).requests[0].stop.max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=5).requests[0].stop.max_tokens == 5
    assert refused(chat, max_tokens=5, max_completion_tokens=6)[:2] == ("BAD_FIELD", "max_tokens")


def test_chat_logprobs() -> None:
    assert chat(logprobs=True).requests[0].sampling.HasField("logprobs")
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).requests[0].sampling.logprobs == 20
    assert chat(logprobs=False).logprobs is None
    assert refused(chat, top_logprobs=3)[:2] == ("BAD_FIELD", "top_logprobs")


NEUTRAL: dict[str, tuple[Any, Any]] = {
    # a value that asks for nothing, and one that does
    "frequency_penalty": (0.0, 0.1),
    "presence_penalty": (0, -1),
    "logit_bias": ({}, {"5": 1}),
}
NEUTRAL_CHAT: dict[str, tuple[Any, Any]] = NEUTRAL | {
    "tools": ([], [{"type": "function", "function": {"name": "f"}}]),
    "tool_choice": ("none", "required"),
    "functions": ([], [{"name": "f"}]),
    "function_call": ("none", {"name": "f"}),
    "response_format": ({"type": "text"}, {"type": "json_object"}),
    "modalities": (["text"], ["text", "audio"]),
    "audio": (None, {"voice": "x"}),
    "prediction": (None, {"type": "content", "content": "x" * 100}),
    "reasoning_effort": (None, "high"),
    "verbosity": (None, "low"),
    "web_search_options": (None, {}),
    "store": (False, True),
}
NEUTRAL_COMPLETION: dict[str, tuple[Any, Any]] = NEUTRAL | {
    "echo": (False, True),
    "suffix": ("", "end"),
    "best_of": (1, 2),
}


@pytest.mark.parametrize(
    ("read", "name"), [*((chat, name) for name in NEUTRAL_CHAT), *((completion, name) for name in NEUTRAL_COMPLETION)]
)
def test_what_is_not_built_is_refused_by_name_unless_it_asks_for_nothing(read: Any, name: str) -> None:
    neutral, asked = (NEUTRAL_CHAT if read is chat else NEUTRAL_COMPLETION)[name]
    for value in (neutral, None):
        assert read(**{name: value}) == read()
    reason, param, message = refused(read, **{name: asked})
    assert (reason, param) == ("FEATURE_NOT_BUILT", name)
    assert name in message


def test_best_of_as_many_as_n_asks_for_nothing() -> None:
    assert len(completion(n=2, best_of=2).requests) == 2


def test_false_is_no_zero_and_zero_no_false() -> None:
    assert refused(chat, frequency_penalty=False)[0] == "FEATURE_NOT_BUILT"
    assert refused(completion, echo=0)[0] == "FEATURE_NOT_BUILT"


IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls")


@pytest.mark.parametrize("name", IGNORED)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_changes_no_answer_is_ignored(read: Any, name: str) -> None:
    assert read(**{name: "anything"}) == read()


@pytest.mark.parametrize("read", [chat, completion])
def test_an_unknown_field_is_refused_by_name(read: Any) -> None:
    assert refused(read, temprature=0.5)[:2] == ("UNKNOWN_FIELD", "temprature")


def test_parts_and_messages_are_refused_by_their_place() -> None:
    image = [{"type": "image_url", "image_url": {"url": "http://x"}}]
    assert refused(chat, messages=[{"role": "user", "content": image}])[:2] == (
        "FEATURE_NOT_BUILT",
        "messages[0].content",
    )
    user = HELLO["messages"][0]
    assert refused(chat, messages=[user, {**user, "name": "Bob"}])[:2] == ("FEATURE_NOT_BUILT", "messages[1].name")
    assert refused(chat, messages=[{"role": "assistant"}])[1] == "messages[0].content"
    assert refused(chat, messages=[{**user, "mood": 1}])[:2] == ("UNKNOWN_FIELD", "messages[0].mood")
    assert refused(chat, messages=[{"role": "user", "content": [{"type": "text"}]}])[1] == "messages[0].content"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_k": 2**32}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"n": 0}, "n"),
        ({"n": MAX_CHOICES + 1}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": True}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": {}}, "stop"),
        ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * (MAX_CHOICES + 1)}, "n"),
        ({"prompt": [[1]] * (MAX_CHOICES + 1)}, "n"),
        ({"prompt": ["a"] * 33, "n": 2}, "n"),
    ],
)
def test_bad_values_are_refused_by_field(fields: dict[str, Any], param: str) -> None:
    _, got, message = refused(completion, **fields)
    assert got is not None
    assert got.split("[")[0] == param.split("[")[0]
    assert len(message) < 500


BROKEN = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"{} {}",
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": NaN}',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000,
    b'{"user": ' + b'{"a":' * 100_000,
    b'{"tools": ' + b"[" * 100_000,
    b'{"messages": ' + b"[" * 100_000,
]


@pytest.mark.parametrize("body", BROKEN, ids=range(len(BROKEN)))
@pytest.mark.parametrize("read", [read_chat, read_completion])
def test_garbage_is_refused(read: Callable[[bytes], Asked], body: bytes) -> None:
    with pytest.raises(errors.InvalidRequest) as caught:
        read(body)
    assert to_http(caught.value).status == 400


texts = st.text('aé\0\\"{[日', max_size=8)  # all of Unicode takes hypothesis seconds to set up
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
FIELDS = [*NEUTRAL_CHAT, *NEUTRAL_COMPLETION, *IGNORED, "prompt", "messages", "n", "seed", "stop", "stream", "logprobs"]


@given(st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=4))
def test_any_json_is_understood_or_refused(fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    for read in (read_chat, read_completion):
        try:
            asked = read(body)
        except (errors.InvalidRequest, errors.NotBuilt) as refusal:
            assert to_http(refusal).status == 400
        else:
            assert 1 <= len(asked.requests) <= MAX_CHOICES
