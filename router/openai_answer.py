"""Chunks of answers as OpenAI's JSON: events of a stream, or one body. Pure."""

from __future__ import annotations

import codecs
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from protos import router_pb2, types_pb2
from router.openai_request import Asked

LEAST_LOGPROB = -9999.0  # what the API says for "never"; JSON has no infinity

_REASONS = {
    types_pb2.FINISH_REASON_EOS: "stop",
    types_pb2.FINISH_REASON_STOP_TOKEN: "stop",
    types_pb2.FINISH_REASON_STOP_STRING: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}

Json = dict[str, Any]


@dataclass
class _Choice:
    """What of one choice is known so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)  # chunk by chunk
    finish_reason: str | None = None
    usage: types_pb2.Usage | None = None
    begun: bool = False
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    num_characters: int = 0  # of the tokens so far: where in the text the next one begins


class AnswerWriter:
    """Writes one response, streamed or whole, of one or several choices.

    Args:
        request_id: of which the response's id is made.
        created_s: Unix time.
        fingerprint: of the weights; None where the worker tells none.
        token_bytes: what a token adds to the text, of any id.
        token_name: how one is called that adds nothing.
        hidden: ids that end a text and are no part of it.
    """

    def __init__(
        self,
        asked: Asked,
        request_id: str,
        *,
        model: str,
        created_s: int,
        fingerprint: str | None,
        token_bytes: Callable[[int], bytes],
        token_name: Callable[[int], str],
        hidden: frozenset[int],
    ) -> None:
        self._asked = asked
        self._head = {
            "id": f"{'chatcmpl' if asked.chat else 'cmpl'}-{request_id}",
            "object": "chat.completion" if asked.chat else "text_completion",
            "created": created_s,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._token_bytes = token_bytes
        self._token_name = token_name
        self._hidden = hidden
        self._choices = [_Choice() for _ in asked.requests]

    def add(self, index: int, chunk: router_pb2.GenerateResponse) -> None:
        """Takes a chunk of a choice for `whole`."""
        choice = self._choices[index]
        choice.text.append(chunk.text)
        if logprobs := self._logprobs(choice, chunk):
            choice.logprobs.append(logprobs)
        self._end(choice, chunk)

    def events(self, index: int, chunk: router_pb2.GenerateResponse) -> Iterator[Json]:
        """What a stream says about a chunk; nothing where it shows nothing, as for half a character."""
        choice = self._choices[index]
        logprobs = self._logprobs(choice, chunk)
        self._end(choice, chunk)
        if self._asked.chat and not choice.begun:
            yield self._event(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None})
        choice.begun = True
        if chunk.text or logprobs:
            shown: Json = {"delta": {"content": chunk.text}} if self._asked.chat else {"text": chunk.text}
            yield self._event(index, {**shown, "logprobs": logprobs})
        if choice.finish_reason is not None:
            shown = {"delta": {}} if self._asked.chat else {"text": ""}
            yield self._event(index, {**shown, "logprobs": None}, choice.finish_reason)

    def usage_event(self) -> Json | None:
        """The last event of a stream whose caller asked for usage."""
        if not self._asked.include_usage:
            return None
        return {**self._stream_head(), "choices": [], "usage": self._usage()}

    def whole(self) -> Json:
        """The response in one, when all choices have ended."""
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.text)
            # Of the API's fields those that say nothing here are there as null: its clients expect them.
            shown: Json = (
                {"message": {"role": "assistant", "content": text, "refusal": None}}
                if self._asked.chat
                else {"text": text}
            )
            merged = _merged(choice.logprobs) if self._asked.logprobs is not None else None
            choices.append({"index": index, **shown, "logprobs": merged, "finish_reason": choice.finish_reason})
        return {**self._head, "choices": choices, "usage": self._usage()}

    def _stream_head(self) -> Json:
        kind = "chat.completion.chunk" if self._asked.chat else "text_completion"
        return {**self._head, "object": kind}

    def _event(self, index: int, shown: Json, finish_reason: str | None = None) -> Json:
        choice = {"index": index, **shown, "finish_reason": finish_reason}
        usage = {"usage": None} if self._asked.include_usage else {}
        return {**self._stream_head(), "choices": [choice], **usage}

    def _end(self, choice: _Choice, chunk: router_pb2.GenerateResponse) -> None:
        if chunk.finish_reason:
            choice.finish_reason = _REASONS[chunk.finish_reason]
            choice.usage = chunk.usage

    def _usage(self) -> Json:
        prompt = cached = output = 0
        for index, choice in enumerate(self._choices):
            assert choice.usage is not None, "usage before the end"
            output += choice.usage.output_tokens
            if index % self._asked.per_prompt == 0:  # the choices of one prompt share it
                prompt += choice.usage.prompt_tokens
                cached += choice.usage.cached_prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    # --- log-probabilities ---

    def _logprobs(self, choice: _Choice, chunk: router_pb2.GenerateResponse) -> Json | None:
        """Those of a chunk, in the endpoint's form; None where it has none."""
        positions = [position for position in chunk.logprobs if position.chosen.token_id not in self._hidden]
        if not positions:
            return None
        if self._asked.chat:
            return {"content": [self._chat_position(position) for position in positions], "refusal": None}
        tops = [self._top(position) for position in positions] if self._asked.logprobs else None
        return {
            "tokens": [self._name(position.chosen.token_id) for position in positions],
            "token_logprobs": [_finite(position.chosen.logprob) for position in positions],
            "top_logprobs": tops,
            "text_offset": [self._offset(choice, position.chosen.token_id) for position in positions],
        }

    def _chat_position(self, position: types_pb2.PositionLogprobs) -> Json:
        return {
            **self._chat_token(position.chosen),
            "top_logprobs": [self._chat_token(token) for token in position.top],
        }

    def _chat_token(self, token: types_pb2.TokenLogprob) -> Json:
        data = self._token_bytes(token.token_id)
        text = data.decode(errors="replace") or self._token_name(token.token_id)
        return {"token": text, "logprob": _finite(token.logprob), "bytes": list(data)}

    def _top(self, position: types_pb2.PositionLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token in position.top:  # most likely first; names need not be unique
            top.setdefault(self._name(token.token_id), _finite(token.logprob))
        return top

    def _name(self, token_id: int) -> str:
        """A token as text; where it is a part of a character, as its bytes: ``bytes:\\xe6\\x97``."""
        data = self._token_bytes(token_id)
        try:
            return data.decode() or self._token_name(token_id)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _offset(self, choice: _Choice, token_id: int) -> int:
        offset = choice.num_characters
        choice.num_characters += len(choice.decoder.decode(self._token_bytes(token_id)))
        return offset


def _merged(chunks: list[Json]) -> Json | None:
    """Log-probabilities of several chunks as those of one."""
    if not chunks:
        return None
    return {
        name: [item for chunk in chunks for item in chunk[name]] if isinstance(value, list) else value
        for name, value in chunks[0].items()
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB
