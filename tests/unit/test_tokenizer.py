"""Model folders: what is read, what is refused, and how chat templates are rendered."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import tempfile
import threading
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import InvalidRequest, ModelError
from router.tokenizer import INLINE_CHARACTERS, LONG_PROMPT_CHARACTERS, ChatTemplate, Tokenizer
from tests.scenarios.tiny_tokenizer import write_tokenizer

USER = [{"role": "user", "content": "hi"}]


def test_the_digest_is_that_of_the_file(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    data = (tmp_path / "tokenizer.json").read_bytes()
    assert Tokenizer(tmp_path).digest == hashlib.blake2b(data, digest_size=16).digest()


def test_truncation_and_padding_of_the_folder_are_not_obeyed(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    plain = Tokenizer(tmp_path).encode("one two three four five")
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["truncation"] = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    description["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|im_start|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert Tokenizer(tmp_path).encode("one two three four five") == plain


@pytest.mark.parametrize("data", [None, b"", b"{", b"[]", b"{}", b'{"model": 1}', b"\xff\xfe"])
def test_an_unreadable_tokenizer_is_refused_by_name(tmp_path: Path, data: bytes | None) -> None:
    if data is not None:
        (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert caught.value.reason == "BAD_TOKENIZER"


@pytest.mark.parametrize("config", ["{", "[1]"])
def test_an_unreadable_config_is_refused_by_name(tmp_path: Path, config: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert caught.value.reason == "BAD_TOKENIZER"


async def test_chat_is_encoded_without_a_second_begin_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    ids = await tokenizer.encode_chat(USER)
    assert ids == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(0) == 2


async def test_a_model_without_a_template_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, chat_template=None))
    with pytest.raises(InvalidRequest) as caught:
        await tokenizer.encode_chat(USER)
    assert caught.value.reason == "NO_CHAT_TEMPLATE"


async def test_encoding_does_not_hold_up_the_event_loop(tmp_path: Path) -> None:
    """2 MB of text take long; others' streams must go on meanwhile. No time is asserted, only that turns were taken."""
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    encoding = asyncio.create_task(tokenizer.encode_text("The quick brown fox. " * 100_000))
    turns = 0
    started = time.monotonic()
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    print(f"{turns} turns in {time.monotonic() - started:.3f} s")
    assert turns > 10
    assert len(await encoding) > 100_000


async def test_short_prompts_do_not_wait_behind_long_ones_and_abandoned_ones_are_never_begun(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path), num_threads=1)
    go_on = threading.Event()
    begun = []

    def hold(text: str) -> None:
        begun.append(text[0])
        assert go_on.wait(60)

    try:
        long = [
            asyncio.create_task(tokenizer.encode_text(letter * (LONG_PROMPT_CHARACTERS + 1), hold)) for letter in "ab"
        ]
        chat = [{"role": "user", "content": "c" * (LONG_PROMPT_CHARACTERS + 1)}]
        long.append(asyncio.create_task(tokenizer.encode_chat(chat, hold)))
        async with asyncio.timeout(60):
            short = "s" * (INLINE_CHARACTERS + 1)
            assert await tokenizer.encode_text(short) == tokenizer.encode(short)
            assert await tokenizer.encode_chat([{"role": "user", "content": short}])
            while not begun:
                await asyncio.sleep(0.001)
        for task in long[1:]:
            task.cancel()
        await asyncio.wait(long[1:])
    finally:
        go_on.set()
    assert await long[0]
    assert await tokenizer.encode_text("d" * (LONG_PROMPT_CHARACTERS + 1), lambda text: begun.append("d"))
    assert begun == ["a", "d"]


async def test_only_what_takes_long_goes_to_a_thread(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    here, threads = threading.current_thread(), list[threading.Thread]()

    def check(text: str) -> None:
        threads.append(threading.current_thread())

    for letters in (INLINE_CHARACTERS, INLINE_CHARACTERS + 1):
        await tokenizer.encode_text("a" * letters, check)
    await tokenizer.encode_chat(USER, check)
    await tokenizer.encode_chat([{"role": "user", "content": ""}] * INLINE_CHARACTERS, check)
    assert [thread is here for thread in threads] == [True, False, True, False]


async def test_a_refused_text_is_not_tokenised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path))
    monkeypatch.setattr(tokenizer, "_encode", lambda *arguments: pytest.fail("tokenised"))

    def refuse(text: str) -> None:
        raise InvalidRequest(text)

    with pytest.raises(InvalidRequest, match="hello"):
        await tokenizer.encode_text("hello", refuse)
    with pytest.raises(InvalidRequest, match="assistant"):
        await tokenizer.encode_chat(USER, refuse)


NFC = {"type": "NFC"}


@pytest.mark.parametrize(
    ("changes", "bounded"),
    [
        ({}, True),
        ({"normalizer": NFC}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [NFC]}}, True),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, False),
        ({"pre_tokenizer": {"type": "Whitespace"}}, False),
        ({"pre_tokenizer": None}, False),  # then characters outside the vocabulary vanish
    ],
)
def test_which_tokenizers_bound_the_tokens_of_a_text(tmp_path: Path, changes: dict[str, Any], bounded: bool) -> None:
    write_tokenizer(tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text()) | changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert (Tokenizer(tmp_path).min_tokens("x" * 10_000) > 10) == bounded


TEXTS = st.text(
    alphabet=st.one_of(st.characters(codec="utf-8"), st.sampled_from("한글 각\u0301ẗ<|im_start>x")), max_size=60
)


@given(TEXTS)
@pytest.mark.parametrize(("normalizer", "dropped"), [(None, ""), (NFC, ""), (None, "x\x04")])
def test_no_text_has_fewer_tokens_than_the_bound(normalizer: dict[str, str] | None, dropped: str, text: str) -> None:
    tokenizer = _variant(json.dumps(normalizer), dropped)
    repeated = (
        *(character * 500 for character in "x\x04"),
        text[:1] * 500,
        text[:4] * 100,
        "<|im_start|>" * 50,
        " " * 500,
    )
    for form in (
        text,
        unicodedata.normalize("NFD", text),
        *repeated,
        *(unicodedata.normalize("NFD", t) for t in repeated),
    ):
        assert tokenizer.min_tokens(form) <= len(tokenizer.encode(form))
    assert tokenizer.min_tokens("y" * 1000) > 10


def test_composed_text_may_be_a_third_of_what_was_sent() -> None:
    plain, composing = (_variant(json.dumps(normalizer), "").min_tokens("y" * 36_000) for normalizer in (None, NFC))
    assert composing == -(-plain // 3)


@functools.cache
def _variant(normalizer: str, dropped: str) -> Tokenizer:
    """With a normalizer, and without the tokens of some bytes, as SmolLM2's has none for most control characters."""
    with tempfile.TemporaryDirectory() as name:
        path = write_tokenizer(Path(name)) / "tokenizer.json"
        description = json.loads(path.read_text()) | {"normalizer": json.loads(normalizer)}
        model = description["model"]
        shown = {character if character.isprintable() else chr(0x100 + ord(character)) for character in dropped}
        model["vocab"] = {token: i for token, i in model["vocab"].items() if i < 2 or not shown & set(token)}
        model["merges"] = [pair for pair in model["merges"] if not shown & set("".join(pair))]
        path.write_text(json.dumps(description))
        return Tokenizer(Path(name))


# --- templates ---


def render(source: str, messages: Any = None, **tokens: str) -> str:
    return ChatTemplate(source, tokens).render(messages or USER)


def test_hugging_face_conventions() -> None:
    assert render("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", bos_token="<s>", eos_token="</s>") == (
        "<s>hi</s>"
    )
    assert render("{% if add_generation_prompt %}\n  go\n{% endif %}\n") == "  go\n"  # trim_blocks, lstrip_blocks
    assert render("  {% if tools is none %}a{% endif %}") == "a"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{% for m in messages %}{% break %}{% endfor %}x") == "x"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[7]['content'].x.y }}",
        "{{ 1 / 0 }}",
        "{{ 'a' + 1 }}",
        "{{ messages.append(1) }}",  # immutable sandbox
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # out of the sandbox
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_that_fails_is_the_request_s_error_by_name(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.reason == "CHAT_TEMPLATE"
    assert caught.value.hint


def test_what_the_template_complained_of_is_passed_on() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_malformed_template_is_fatal_at_start(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="{% for %}")
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path)
    assert caught.value.reason == "BAD_CHAT_TEMPLATE"


def test_where_templates_are_looked_for(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(USER) == "D"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<bos>"}}))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}J")
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(USER) == "<bos>J"
