"""Token ids to text, a few tokens at a time.

The text of a sequence is defined once for every kind of tokenizer: the bytes of its tokens, one after the other, read
as UTF-8 with U+FFFD for what is not (one per maximal broken part, as Unicode recommends). Bytes of a token depend on no
other token, so the text is the same for any chunking, the cost per token is a table look-up, and nothing but an
incomplete character (at most 3 bytes) is held back. For byte-level tokenizers this is exactly what decoding all ids at
once gives; for those with byte-fallback tokens it differs only where such bytes are not valid UTF-8 (the library then
replaces the whole run of them, which could only be known at the run's end).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from protos.errors import ModelError


@dataclass(frozen=True)
class TokenBytes:
    """What each token adds to the text.

    table: bytes by token id; empty for special tokens and for ids that name no token.
    strip_start: at most this many spaces are dropped where a text begins (SentencePiece marks a first word with one).
    """

    table: tuple[bytes, ...]
    strip_start: int = 0

    def of(self, token_ids: Iterable[int], hidden: frozenset[int]) -> bytes:
        """What these tokens add, without those that are hidden."""
        table, size = self.table, len(self.table)
        # Models round their vocabulary up: an id behind the tokenizer's last one has no text.
        return b"".join([table[i] for i in token_ids if i < size and i not in hidden])


class Detokenizer:
    """The text of one sequence.

    Args:
        tokens: the table.
        hidden: ids that are not shown as text whatever the table says (end of sequence, stop tokens).
        text_begins: the answer starts a text of its own (a chat turn) instead of going on with one.
    """

    def __init__(self, tokens: TokenBytes, hidden: frozenset[int] = frozenset(), *, text_begins: bool = True) -> None:
        self._tokens = tokens
        self._hidden = hidden
        self._incomplete = b""  # the beginning of a character
        self._strip = tokens.strip_start if text_begins else 0

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        data = self._tokens.of(token_ids, self._hidden)
        while self._strip and data:
            if data[0] != 0x20:
                self._strip = 0
                break
            data, self._strip = data[1:], self._strip - 1
        return self._decode(data)

    def flush(self) -> str:
        """At the end: U+FFFD once if the last character is incomplete, else nothing."""
        return self._decode(b"", final=True) if self._incomplete else ""

    def _decode(self, data: bytes, final: bool = False) -> str:
        data = self._incomplete + data
        text, consumed = codecs.utf_8_decode(data, "replace", final)
        self._incomplete = data[consumed:]
        return text


def token_bytes(
    tokenizer_json: Mapping[str, Any], vocabulary: Mapping[str, int], special: frozenset[str]
) -> TokenBytes:
    """Builds the table from the ``decoder`` of a tokenizer.json.

    Args:
        vocabulary: token to id, added tokens included.
        special: tokens without text.

    Raises:
        ModelError: a decoder whose tokens have no bytes of their own (WordPiece, CTC, ...).
    """
    rules = _Rules.of(tokenizer_json.get("decoder"))
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    for token, token_id in vocabulary.items():
        if token not in special:
            table[token_id] = rules.bytes_of(token)
    return TokenBytes(tuple(table), rules.strip_start)


@dataclass(frozen=True)
class _Rules:
    byte_level: bool = False
    byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    strip_start: int = 0

    @staticmethod
    def of(decoder: Mapping[str, Any] | None) -> _Rules:
        parts = (decoder or {}).get("decoders", [decoder] if decoder else [])
        byte_level = byte_fallback = False
        replacements: list[tuple[str, str]] = []
        strip_start = 0
        for part in parts:
            match part:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_fallback = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                    replacements.append((pattern, content))
                case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                    strip_start = start
                case {"type": "Metaspace", **options}:
                    replacements.append((str(options.get("replacement", "▁")), " "))
                    strip_start = 0 if options.get("prepend_scheme") == "never" else 1
                case _:
                    raise ModelError(
                        "tokenizer.json has a decoder whose tokens cannot be turned into text one by one",
                        reason="UNSUPPORTED_DECODER",
                        given=str(part)[:200],
                        allowed="ByteLevel, ByteFallback, Replace of a string, Fuse, Strip at the start, Metaspace",
                    )
        if not parts or (byte_level and (byte_fallback or replacements)):
            raise ModelError(
                "tokenizer.json has no decoder that Tailpack knows",
                reason="UNSUPPORTED_DECODER",
                given=str(decoder)[:200],
            )
        return _Rules(byte_level, byte_fallback, tuple(replacements), strip_start)

    def bytes_of(self, token: str) -> bytes:
        if self.byte_level:
            mapped = [_BYTE_OF.get(character) for character in token]
            # An added token may hold characters outside the byte alphabet: then it stands for itself.
            return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes([int(token[3:5], 16)])
            except ValueError:
                pass
        for pattern, content in self.replacements:
            token = token.replace(pattern, content)
        return token.encode()


def _byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte (GPT-2's table): itself if printable, else U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return alphabet | {chr(0x100 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
