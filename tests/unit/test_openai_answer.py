"""Chunks of answers as OpenAI's JSON."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from protos import router_pb2, types_pb2
from router.openai_answer import LEAST_LOGPROB, AnswerWriter
from router.openai_request import Asked, read_chat, read_completion

TOKENS = {1: b"", 5: b"Hi", 6: b" \xe6\x97", 7: b"\xa5", 8: b"!", 9: b"\xff"}
EOS = 1


def chunk(
    text: str,
    ids: Sequence[int] = (),
    reason: str = "",
    logprob: float | None = None,
) -> router_pb2.GenerateResponse:
    made = router_pb2.GenerateResponse(text=text, token_ids=ids)
    if reason:
        made.finish_reason = types_pb2.FinishReason.Value(f"FINISH_REASON_{reason}")
        made.usage.prompt_tokens, made.usage.output_tokens, made.usage.cached_prompt_tokens = 10, 4, 3
    for token_id in ids:
        if logprob is None:
            continue
        top = [types_pb2.TokenLogprob(token_id=t, logprob=p) for t, p in ((token_id, logprob), (9, -math.inf))]
        made.logprobs.add(chosen=top[0], top=top)
    return made


def writer(asked: Asked, ignore_eos: bool = False) -> AnswerWriter:
    return AnswerWriter(
        asked,
        "r-1",
        model="tiny",
        created_s=12,
        fingerprint="fp_ab",
        token_bytes=TOKENS.__getitem__,
        token_name={1: "<|end|>"}.__getitem__,
        hidden=frozenset() if ignore_eos else frozenset({EOS}),
    )


def chat(**fields: Any) -> Asked:
    return read_chat(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())


def completion(**fields: Any) -> Asked:
    return read_completion(json.dumps({"prompt": "x", **fields}).encode())


def sent(json: Any) -> Any:
    """As it arrives: what JSON cannot hold would have become null."""
    return msgspec.json.decode(msgspec.json.encode(json))


ANSWER = [chunk("Hi", [5]), chunk("", [6]), chunk(" 日", [7]), chunk("!", [8, EOS], "EOS")]


def test_a_whole_chat() -> None:
    it = writer(chat())
    for part in ANSWER:
        it.add(0, part)
    assert sent(it.whole()) == {
        "id": "chatcmpl-r-1",
        "object": "chat.completion",
        "created": 12,
        "model": "tiny",
        "system_fingerprint": "fp_ab",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi 日!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 4,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }


def test_a_streamed_chat_names_its_role_once_and_its_reason_last() -> None:
    it = writer(chat(stream=True))
    events = [event for part in ANSWER for event in it.events(0, part)]
    assert {(event["id"], event["object"]) for event in events} == {("chatcmpl-r-1", "chat.completion.chunk")}
    assert [event["choices"][0]["delta"] for event in events] == [
        {"role": "assistant", "content": ""},
        {"content": "Hi"},
        {"content": " 日"},  # nothing for half a character
        {"content": "!"},
        {},
    ]
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * 4 + ["stop"]
    assert not any("usage" in event for event in events)
    assert it.usage_event() is None


def test_a_stream_with_usage_has_it_in_an_event_of_its_own() -> None:
    it = writer(completion(stream=True, stream_options={"include_usage": True}))
    events = [event for part in ANSWER for event in it.events(0, part)]
    assert [event["choices"][0]["text"] for event in events] == ["Hi", " 日", "!", ""]
    assert all(event["usage"] is None and event["object"] == "text_completion" for event in events)
    last = it.usage_event()
    assert last is not None
    assert (last["choices"], last["usage"]["total_tokens"]) == ([], 14)


def test_usage_counts_a_prompt_once_for_all_its_choices() -> None:
    it = writer(completion(prompt=["a", "b"], n=2))
    for index in range(4):
        it.add(index, chunk("x", [5], "LENGTH"))
    whole = it.whole()
    assert (whole["usage"]["prompt_tokens"], whole["usage"]["completion_tokens"]) == (20, 16)
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 6}
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("reason", "expected"), [("EOS", "stop"), ("STOP_TOKEN", "stop"), ("STOP_STRING", "stop"), ("LENGTH", "length")]
)
def test_reasons(reason: str, expected: str) -> None:
    it = writer(completion())
    it.add(0, chunk("", [5], reason))
    assert it.whole()["choices"][0]["finish_reason"] == expected


@pytest.mark.parametrize("reason", ["ABORTED", "ERROR"])
def test_an_abort_is_never_dressed_as_a_normal_stop(reason: str) -> None:
    with pytest.raises(KeyError):
        writer(completion()).add(0, chunk("", [], reason))


WITH_LOGPROBS = [chunk("Hi", [5], logprob=-0.5), chunk(" 日!", [6, 7, 8], logprob=-1.0), chunk("", [EOS], "EOS", -2.0)]


def test_chat_logprobs_tell_tokens_with_their_bytes() -> None:
    it = writer(chat(logprobs=True, top_logprobs=2))
    for part in WITH_LOGPROBS:
        it.add(0, part)
    content = sent(it.whole())["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"], entry["logprob"]) for entry in content] == [
        ("Hi", [72, 105], -0.5),
        (" \ufffd", [32, 0xE6, 0x97], -1.0),
        ("\ufffd", [0xA5], -1.0),
        ("!", [33], -1.0),
    ]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == "Hi 日!"
    assert content[0]["top_logprobs"] == [
        {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
        {"token": "\ufffd", "logprob": LEAST_LOGPROB, "bytes": [255]},
    ]


def test_completion_logprobs_tell_where_in_the_text_tokens_begin() -> None:
    it = writer(completion(logprobs=2))
    for part in WITH_LOGPROBS:
        it.add(0, part)
    logprobs = sent(it.whole())["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Hi", "bytes:\\x20\\xe6\\x97", "bytes:\\xa5", "!"]
    assert logprobs["token_logprobs"] == [-0.5, -1.0, -1.0, -1.0]
    assert logprobs["text_offset"] == [0, 2, 3, 4]
    assert logprobs["top_logprobs"][0] == {"Hi": -0.5, "bytes:\\xff": LEAST_LOGPROB}


def test_without_alternatives_there_are_none() -> None:
    it = writer(completion(logprobs=0))
    for part in WITH_LOGPROBS:
        it.add(0, part)
    assert it.whole()["choices"][0]["logprobs"]["top_logprobs"] is None


def test_a_stop_token_that_is_no_text_has_no_logprob_unless_it_is_an_ordinary_token() -> None:
    for ignore_eos, expected in ((False, 4), (True, 5)):
        it = writer(chat(logprobs=True), ignore_eos)
        for part in WITH_LOGPROBS:
            it.add(0, part)
        content = it.whole()["choices"][0]["logprobs"]["content"]
        assert len(content) == expected
        assert (content[-1]["token"], content[-1]["bytes"]) == (("<|end|>", []) if ignore_eos else ("!", [33]))


def test_any_chunking_streams_the_same_answer() -> None:
    text, seed = "Hi 日!", random.randrange(2**32)
    rng = random.Random(seed)
    for _ in range(20):
        it = writer(chat(stream=True))
        at = 0
        events: list[Any] = []
        while at < len(text):
            step = rng.randint(1, 3)
            events += it.events(0, chunk(text[at : at + step], [5]))
            at += step
        events += it.events(0, chunk("", [EOS], "EOS"))
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(delta.get("content", "") for delta in deltas) == text, f"seed {seed}"
        assert sum("role" in delta for delta in deltas) == 1
