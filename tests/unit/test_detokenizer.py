"""Text is the same for any chunking of the tokens, and the same as decoding all of them at once."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from protos.errors import ModelError
from router.detokenizer import Detokenizer, TokenBytes, token_bytes
from router.tokenizer import Tokenizer
from tests.scenarios.tiny_tokenizer import CORPUS, write_tokenizer

TEXTS = [
    *CORPUS,
    "👩‍👩‍👧‍👦🏳️‍🌈👍🏽 ZWJ and modifiers",
    "\u0065\u0301 combining, \u200f right to left \u05e9\u05dc\u05d5\u05dd",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 beyond the BMP 🀄",
    "a literal \ufffd stays",
    " leading and trailing space ",
    "tabs\tand\r\nnewlines\n\n",
]


def text_of(tokens: TokenBytes, ids: list[int], sizes: list[int], **options: Any) -> str:
    """The text when the ids come in chunks of these sizes (cycled)."""
    detokenizer = Detokenizer(tokens, **options)
    shown, start, number = "", 0, 0
    while start < len(ids):
        size = sizes[number % len(sizes)]
        shown += detokenizer.push(ids[start : start + size])
        start, number = start + size, number + 1
    return shown + detokenizer.flush()


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_real_text_in_all_chunk_sizes(byte_level: Tokenizer) -> None:
    for text in TEXTS:
        ids = byte_level.encode(text)
        for size in (1, 2, 3, 7, len(ids) + 1):
            assert text_of(byte_level.tokens, ids, [size]) == text


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_any_ids_in_any_chunks_equal_one_decode(byte_level: Tokenizer, data: st.DataObject) -> None:
    """Random ids make broken UTF-8 of every kind; ids past the vocabulary have no text."""
    ids = data.draw(st.lists(st.integers(0, byte_level.vocab_size + 3), max_size=40))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=8))
    assert text_of(byte_level.tokens, ids, sizes) == byte_level._tokenizer.decode(ids, skip_special_tokens=True)


@settings(max_examples=500, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_any_text_survives(byte_level: Tokenizer, text: str, sizes: list[int]) -> None:
    ids = byte_level.encode(text)
    expected = byte_level._tokenizer.decode(ids, skip_special_tokens=True)
    assert text_of(byte_level.tokens, ids, sizes) == expected


def test_text_cut_inside_a_character_ends_in_one_replacement(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("ok \U0001f680")[:-1]  # not in the corpus: its last byte is a token of its own
    assert text_of(byte_level.tokens, ids, [1]) == byte_level._tokenizer.decode(ids) == "ok \ufffd"


def test_what_is_held_back_is_at_most_one_character(byte_level: Tokenizer) -> None:
    rng = random.Random(5)
    detokenizer = Detokenizer(byte_level.tokens)
    for _ in range(20_000):
        detokenizer.push([rng.randrange(byte_level.vocab_size)])
        assert len(detokenizer._incomplete) <= 3


def test_special_and_hidden_tokens_are_not_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>user<|im_end|>")
    assert text_of(byte_level.tokens, ids, [1]) == "user"
    a, b = byte_level.encode("a"), byte_level.encode("b")
    assert text_of(byte_level.tokens, [*a, *b, *a], [1], hidden=frozenset(b)) == "aa"


def test_added_tokens_outside_the_byte_alphabet_stand_for_themselves(byte_level: Tokenizer) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(byte_level._tokenizer.to_str())
    added = ["two words", "naïve", "日", "Ã©"]  # the last one is spelt in the byte alphabet
    tokenizer.add_tokens(added)
    vocabulary = tokenizer.get_vocab()
    tokens = token_bytes(json.loads(tokenizer.to_str()), vocabulary, frozenset())
    for token in added:
        ids = [vocabulary[token]]
        assert text_of(tokens, ids, [1]) == tokenizer.decode(ids)


# --- SentencePiece-like tokenizers ---


@pytest.fixture(scope="module")
def fallback() -> tuple[tokenizers.Tokenizer, TokenBytes]:
    """Words with U+2581 for spaces, a token for every byte, and a decoder as Llama 2 and Mistral have it."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁The", "▁", "▁capital", "of", "▁is", "日", "本", "s", "e", ".", "▁▁"]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={piece: number for number, piece in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    special = frozenset({"<s>", "</s>"})
    return tokenizer, token_bytes(json.loads(tokenizer.to_str()), tokenizer.get_vocab(), special)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_byte_fallback_equals_one_decode(
    fallback: tuple[tokenizers.Tokenizer, TokenBytes], data: st.DataObject
) -> None:
    tokenizer, tokens = fallback
    words = st.integers(256, 268)
    character = st.characters(exclude_categories=["Cs"]).map(lambda c: list(c.encode()))
    parts = data.draw(st.lists(st.one_of(words.map(lambda word: [word]), character), max_size=20))
    ids = [token_id for part in parts for token_id in part]
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    assert text_of(tokens, ids, sizes) == tokenizer.decode(ids, skip_special_tokens=True)


def test_broken_byte_fallback_keeps_what_is_whole(fallback: tuple[tokenizers.Tokenizer, TokenBytes]) -> None:
    _, tokens = fallback
    ids = [*"日".encode(), 0xE6, 0x97]
    assert text_of(tokens, ids, [1]) == text_of(tokens, ids, [5]) == "日\ufffd"


def test_a_continuation_keeps_its_leading_space(fallback: tuple[tokenizers.Tokenizer, TokenBytes]) -> None:
    tokenizer, tokens = fallback
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary["▁capital"], vocabulary["▁is"]]
    assert text_of(tokens, ids, [1]) == "capital is"
    assert text_of(tokens, ids, [1], text_begins=False) == " capital is"


@pytest.mark.parametrize("decoder", [None, {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "CTC"}])
def test_a_decoder_without_bytes_per_token_is_refused(decoder: Any) -> None:
    with pytest.raises(ModelError) as caught:
        token_bytes({"decoder": decoder}, {"a": 0}, frozenset())
    assert caught.value.reason == "UNSUPPORTED_DECODER"


@pytest.mark.skipif(
    not list((Path.home() / ".cache" / "tailpack").glob("**/tokenizer.json")), reason="no converted demo model here"
)
def test_the_demo_model_s_tokenizer() -> None:
    folder = next((Path.home() / ".cache" / "tailpack").glob("**/tokenizer.json")).parent
    tokenizer = Tokenizer(folder)
    rng = random.Random(3)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for size in (1, 2, 5):
            assert text_of(tokenizer.tokens, ids, [size]) == tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    for _ in range(200):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(30)]
        assert text_of(tokenizer.tokens, ids, [1, 4]) == tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    tokenizer.close()
