"""Text to token ids, and chat messages to text, with the files of a Hugging Face model folder.

Both run in threads, but for the shortest prompts: the tokenizers library releases the GIL, and a long prompt must not
hold up the streams of others. Long prompts queue for one thread of their own, so that short ones never wait behind
them. A job that is cancelled before it starts is never run.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from protos.errors import InvalidRequest, ModelError
from router import chat_deepseek_v4
from router.detokenizer import TokenBytes, token_bytes

INLINE_CHARACTERS = 1024
"""Prompts with no more are encoded where they are, in about 0.25 us a character (1 us of the worst text): going to a
thread and back takes 70 us, and far more where the GIL is in demand."""

LONG_PROMPT_CHARACTERS = 64 << 10
"""Prompts with more of them are long ones."""

_UTF8_BYTES = sorted({*range(0xC0), *range(0xC2, 0xF5)})
"""Byte values that UTF-8 uses."""

_MESSAGE_CHARACTERS = 32  # what a template writes around a message, roughly

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model folder. Immutable once made; close() ends its threads.

    Attributes:
        digest: blake2b-128 of tokenizer.json, as in ModelInfo.tokenizer_digest.
        vocab_size: one more than the highest token id.
        tokens: the text of each token (see router/detokenizer.py).
    """

    def __init__(self, folder: Path, *, num_threads: int | None = None) -> None:
        """Reads tokenizer.json, and where present tokenizer_config.json, special_tokens_map.json, chat_template.jinja.

        Raises:
            ModelError: a file is missing, unreadable or not supported.
        """
        data = _read(folder / "tokenizer.json")
        description = _json(folder / "tokenizer.json", data)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(data.decode())
        except Exception as failure:  # the library raises no class of its own
            raise ModelError(
                "tokenizer.json cannot be loaded", reason="BAD_TOKENIZER", given=folder, hint=str(failure)
            ) from failure
        # A folder may ask for truncation or padding: prompts are never cut in silence.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.digest = hashlib.blake2b(data, digest_size=16).digest()
        added = self._tokenizer.get_added_tokens_decoder()
        special = frozenset(token.content for token in added.values() if token.special)
        self.tokens: TokenBytes = token_bytes(description, self._tokenizer.get_vocab(with_added_tokens=True), special)
        self.vocab_size = len(self.tokens.table)
        self._bound = _Bound.of(description, self.tokens.table, list(added.values()))
        self._template = ChatTemplate.load(folder)
        self._thinks = self._template is None and _model_type(folder) == chat_deepseek_v4.MODEL_TYPE
        if self._thinks and (missing := set(chat_deepseek_v4.NEEDED) - {token.content for token in added.values()}):
            raise ModelError(
                "the tokenizer lacks tokens of the model's chat encoding",
                reason="BAD_TOKENIZER",
                given=folder,
                allowed=f"tokens of their own for {', '.join(sorted(missing))}",
            )
        self._short = ThreadPoolExecutor(num_threads or max(2, os.cpu_count() or 2), thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-long")

    async def encode_text(self, text: str, check: Callable[[str], None] = lambda text: None) -> list[int]:
        """A prompt as it is, with what the tokenizer itself puts around a text (often a begin-of-sequence token).

        Args:
            check: called with the text before it is tokenised; raises to refuse it. May run in a thread.
        """
        return await self._run(len(text), self._encode_text, text, check)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        check: Callable[[str], None] = lambda text: None,
        *,
        thinking: bool = False,
    ) -> list[int]:
        """Messages (``role``, ``content``) through the chat template, up to where the assistant's turn begins.

        A folder without a template whose config.json says deepseek_v4 has that family's encoding.

        Args:
            check: as for encode_text; called with what the template wrote.
            thinking: the model reasons before it answers.

        Raises:
            InvalidRequest: the model has no template (NO_CHAT_TEMPLATE), it refuses the messages (CHAT_TEMPLATE), or
                it knows no thinking (THINKING_NOT_KNOWN).
        """
        num_characters = sum(_MESSAGE_CHARACTERS + len(message["content"]) for message in messages)
        return await self._run(num_characters, self._encode_chat, messages, check, thinking)

    def min_tokens(self, text: str) -> int:
        """A text has at least so many tokens. Cheap beside tokenising it; 0 where the tokenizer allows no bound."""
        return self._bound.min_tokens(text) if self._bound else 0

    def encode(self, text: str) -> list[int]:
        """encode_text, in the caller's thread."""
        return self._encode(text, True)

    def token_name(self, token_id: int) -> str:
        """What a token without text is called: as tokenizer.json has it, else by its id (vocabularies are padded)."""
        return self._tokenizer.id_to_token(token_id) or f"token_id:{token_id}"

    def close(self) -> None:
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, num_characters: int, job: Callable[..., list[int]], *arguments: object) -> list[int]:
        if num_characters <= INLINE_CHARACTERS:
            return job(*arguments)
        threads = self._long if num_characters > LONG_PROMPT_CHARACTERS else self._short
        return await asyncio.get_running_loop().run_in_executor(threads, job, *arguments)

    def _encode_text(self, text: str, check: Callable[[str], None]) -> list[int]:
        check(text)
        return self._encode(text, True)

    def _encode_chat(
        self, messages: Sequence[Mapping[str, str]], check: Callable[[str], None], thinking: bool
    ) -> list[int]:
        if thinking and not self._thinks:
            raise InvalidRequest(
                "this model has no thinking mode that can be asked for",
                reason="THINKING_NOT_KNOWN",
                given="thinking",
                allowed=f"thinking with {chat_deepseek_v4.MODEL_TYPE} only",
                hint="leave thinking out",
            )
        if self._thinks:
            text = chat_deepseek_v4.render(messages, thinking=thinking)
        elif self._template is not None:
            text = self._template.render(messages)
        else:
            raise InvalidRequest(
                "this model has no chat template", reason="NO_CHAT_TEMPLATE", hint="send the prompt as text instead"
            )
        check(text)
        return self._encode(text, False)  # the template writes special tokens itself

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call is the one without character offsets, which a long prompt would pay for dearly.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


class ChatTemplate:
    """A model's Jinja template, under the conventions that Hugging Face models rely on, in Jinja's sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError (BAD_CHAT_TEMPLATE) when the source is not valid Jinja."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as failure:
            raise ModelError(
                "the model's chat template is not valid", reason="BAD_CHAT_TEMPLATE", hint=str(failure)
            ) from failure
        self._special_tokens = dict(special_tokens)

    @staticmethod
    def load(folder: Path) -> ChatTemplate | None:
        """chat_template.jinja, else ``chat_template`` of tokenizer_config.json; None when the model has neither."""
        config: dict[str, Any] = {}
        for name in ("special_tokens_map.json", "tokenizer_config.json"):  # the later one wins
            if (folder / name).exists():
                config |= _json(folder / name, _read(folder / name))
        tokens: dict[str, str] = {}
        for name in _SPECIAL_NAMES:
            value = config.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
        if (folder / "chat_template.jinja").exists():
            return ChatTemplate(_read(folder / "chat_template.jinja").decode(), tokens)
        source = config.get("chat_template")
        if isinstance(source, list):  # several named ones: [{"name": ..., "template": ...}]
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        return ChatTemplate(source, tokens) if isinstance(source, str) else None

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text. Raises InvalidRequest (CHAT_TEMPLATE) with what the template complained of."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as failure:
            raise InvalidRequest(
                "the model's chat template refuses these messages",
                reason="CHAT_TEMPLATE",
                given=", ".join(message.get("role", "") for message in messages[:16]),
                hint=str(failure)[:500],
            ) from failure


@dataclass(frozen=True)
class _Bound:
    """How few tokens a text can have, for tokenizers where each byte of it ends up in one token or in none.

    max_bytes: of a text, for each of its tokens.
    dropped: byte values that no token has; byte-level tokenizers leave them out without a word.
    """

    max_bytes: int
    dropped: bytes

    @staticmethod
    def of(
        description: Mapping[str, Any], table: Sequence[bytes], added: Sequence[tokenizers.AddedToken]
    ) -> _Bound | None:
        """None where a text may shrink in other ways."""
        composes = False
        for part in _parts(description.get("normalizer"), "normalizers"):
            match part:
                case {"type": "NFC"}:
                    composes = True
                case {"type": "Prepend"} | {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                    pass
                case _:
                    return None
        pre_tokenizers = _parts(description.get("pre_tokenizer"), "pretokenizers")
        for part in pre_tokenizers:
            if part.get("type") not in ("ByteLevel", "Digits", "Metaspace", "Split"):
                return None
            if part.get("behavior") == "Removed":
                return None
        if any(token.lstrip or token.rstrip for token in added):  # they take spaces beside them in, any number
            return None
        known = {token[0] for token in table if len(token) == 1}
        dropped = bytes(byte for byte in _UTF8_BYTES if byte not in known)
        by_bytes = any(part.get("type") == "ByteLevel" for part in pre_tokenizers)
        by_fallback = bool((description.get("model") or {}).get("byte_fallback"))
        if not by_bytes and (dropped or not by_fallback):
            return None  # whole characters are dropped, or runs of them become one "unknown"
        if composes and dropped:
            return None  # which bytes are dropped shows only after composing
        longest = max([*(len(token) for token in table), *(len(token.content.encode()) for token in added)])
        # NFC shrinks UTF-8 to a third at most: https://www.unicode.org/faq/normalization.html
        return _Bound(3 * longest if composes else longest, dropped)

    def min_tokens(self, text: str) -> int:
        return -(-len(text.encode().translate(None, self.dropped)) // self.max_bytes)


def _parts(step: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    """A step of tokenizer.json as the list that a Sequence of them holds."""
    if not step:
        return []
    return list(step[several]) if step.get("type") == "Sequence" else [step]


def _model_type(folder: Path) -> object:
    """What config.json says; None where there is none."""
    file = folder / "config.json"
    return _json(file, _read(file)).get("model_type") if file.exists() else None


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    # Jinja's own escapes <, > and & for HTML; models were trained without that.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as failure:
        raise ModelError(
            f"{path.name} cannot be read",
            reason="BAD_TOKENIZER",
            given=path,
            hint=f"{failure.strerror}; the model folder needs it (Hugging Face layout)",
        ) from failure


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as failure:
        raise ModelError(f"{path.name} is not JSON", reason="BAD_TOKENIZER", given=path, hint=str(failure)) from failure
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} is not a JSON object", reason="BAD_TOKENIZER", given=path)
    return value
