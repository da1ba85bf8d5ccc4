"""OpenAI's JSON bodies as GenerateRequests, one per choice. Pure.

Every field is one of three kinds. Fields that are honoured stand in the structs below. Those that cannot change the
answer (_IGNORED) are taken and ignored. Those that would change it and are not built (_NEUTRAL) are refused by name
unless they have a value that asks for nothing. Any other field is refused as unknown.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from protos import router_pb2
from protos.errors import TooLarge
from protos.limits import MAX_CHOICES
from router.http_errors import InvalidField, UnbuiltField

MAX_CHOICES_BYTES = 64 << 20
"""Of all choices' prompts together: each choice is a request of its own."""
DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where it is absent: the API's own default."""
DEFAULT_TEMPERATURE = 1.0  # the API's own
_NEUTRAL_BYTES = 64

_Natural = Annotated[int, Meta(ge=0, le=2**32 - 1)]
_Positive = Annotated[int, Meta(ge=1, le=2**32 - 1)]
_Logprobs = Annotated[int, Meta(ge=0, le=20)]
_Role = Annotated[str, Meta(max_length=64)]

# Values, as JSON, that ask for nothing; null always does. The field's absence is the same.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": (),
    "web_search_options": (),
}
_NEUTRAL_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "reasoning_content": ("",),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}


class _StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against who watches lengths; changes no answer, never done


class _Part(Struct, forbid_unknown_fields=True):
    type: str
    text: str | UnsetType = UNSET
    image_url: Raw | UnsetType = UNSET  # so that it is refused as what it is
    input_audio: Raw | UnsetType = UNSET
    file: Raw | UnsetType = UNSET


class _Message(Struct, forbid_unknown_fields=True):
    role: _Role
    content: str | list[_Part] | None = None
    annotations: Raw | UnsetType = UNSET
    audio: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    name: Raw | UnsetType = UNSET
    reasoning_content: Raw | UnsetType = UNSET
    refusal: Raw | UnsetType = UNSET
    tool_call_id: Raw | UnsetType = UNSET
    tool_calls: Raw | UnsetType = UNSET


class _Body(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take."""

    model: str | None = None
    max_tokens: _Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    # Ours.
    top_k: _Natural | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    # Refused unless neutral.
    frequency_penalty: Raw | UnsetType = UNSET
    logit_bias: Raw | UnsetType = UNSET
    presence_penalty: Raw | UnsetType = UNSET
    # Ignored.
    user: Raw | UnsetType = UNSET
    metadata: Raw | UnsetType = UNSET
    service_tier: Raw | UnsetType = UNSET
    safety_identifier: Raw | UnsetType = UNSET
    prompt_cache_key: Raw | UnsetType = UNSET
    prompt_cache_retention: Raw | UnsetType = UNSET
    parallel_tool_calls: Raw | UnsetType = UNSET  # tools are refused: there is nothing to do in parallel


class _CompletionBody(_Body, kw_only=True):
    prompt: Raw | UnsetType = UNSET
    logprobs: _Logprobs | None = None
    best_of: int | None = None
    echo: Raw | UnsetType = UNSET
    suffix: Raw | UnsetType = UNSET


class _ChatBody(_Body, kw_only=True):
    messages: list[_Message]
    thinking: bool | None = None  # ours: the model reasons before it answers
    max_completion_tokens: _Positive | None = None
    logprobs: bool | None = None
    top_logprobs: _Logprobs | None = None
    audio: Raw | UnsetType = UNSET
    function_call: Raw | UnsetType = UNSET
    functions: Raw | UnsetType = UNSET
    modalities: Raw | UnsetType = UNSET
    prediction: Raw | UnsetType = UNSET
    reasoning_effort: Raw | UnsetType = UNSET
    response_format: Raw | UnsetType = UNSET
    store: Raw | UnsetType = UNSET
    tool_choice: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    verbosity: Raw | UnsetType = UNSET
    web_search_options: Raw | UnsetType = UNSET


@dataclass(frozen=True)
class Asked:
    """A body, understood.

    requests: one per choice; the choices of one prompt stand side by side, `per_prompt` of them.
    logprobs: of how many alternatives; None: none at all.
    """

    chat: bool
    model: str
    requests: tuple[router_pb2.GenerateRequest, ...]
    per_prompt: int
    stream: bool
    include_usage: bool
    logprobs: int | None
    ignore_eos: bool


def read_completion(body: bytes) -> Asked:
    """The body of POST /v1/completions.

    Raises:
        InvalidField: BAD_JSON, BAD_FIELD, UNKNOWN_FIELD, EMPTY_PROMPT, TOO_MANY_CHOICES.
        TooLarge: PROMPT_TOO_LARGE, of all choices together.
        UnbuiltField: a field that would change the answer and is not built.
    """
    given = _decode(body, _CompletionBody)
    _check_neutral(given, _NEUTRAL)
    per_prompt = given.n or 1
    if given.best_of not in (None, per_prompt):
        raise UnbuiltField("best_of", given=given.best_of, allowed=f"as many as n, {per_prompt}")
    request = _sampling(given, given.max_tokens or DEFAULT_COMPLETION_TOKENS, given.logprobs)
    prompts = _prompts(given.prompt)
    if len(prompts) * per_prompt > MAX_CHOICES:
        raise _too_many(f"{len(prompts)} prompts, n {per_prompt}")
    requests: list[router_pb2.GenerateRequest] = []
    for prompt in prompts:
        whole = router_pb2.GenerateRequest()
        whole.CopyFrom(request)
        if isinstance(prompt, str):
            whole.text = prompt
        else:
            whole.token_ids.ids.extend(prompt)
        requests += _choices(whole, per_prompt, MAX_CHOICES_BYTES // len(prompts))
    return _asked(given, chat=False, requests=requests, logprobs=given.logprobs)


def read_chat(body: bytes) -> Asked:
    """The body of POST /v1/chat/completions. Raises what read_completion raises."""
    given = _decode(body, _ChatBody)
    _check_neutral(given, _NEUTRAL)
    if given.max_tokens and given.max_completion_tokens and given.max_tokens != given.max_completion_tokens:
        raise InvalidField(
            "max_tokens",
            "max_tokens and max_completion_tokens contradict each other",
            given=f"{given.max_tokens} and {given.max_completion_tokens}",
            hint="send max_completion_tokens alone",
        )
    if given.top_logprobs is not None and not given.logprobs:
        raise InvalidField("top_logprobs", "top_logprobs needs logprobs: true", given=given.top_logprobs)
    logprobs = (given.top_logprobs or 0) if given.logprobs else None
    request = _sampling(given, given.max_completion_tokens or given.max_tokens or 0, logprobs)
    request.chat.thinking = bool(given.thinking)
    for index, message in enumerate(given.messages):
        _check_neutral(message, _NEUTRAL_IN_MESSAGES, f"messages[{index}].")
        # OpenAI's newer models call the system's turn the developer's.
        role = "system" if message.role == "developer" else message.role
        request.chat.messages.add(role=role, content=_content(message, f"messages[{index}].content"))
    return _asked(
        given, chat=True, requests=list(_choices(request, given.n or 1, MAX_CHOICES_BYTES)), logprobs=logprobs
    )


def _asked(given: _Body, *, chat: bool, requests: list[router_pb2.GenerateRequest], logprobs: int | None) -> Asked:
    if given.stream_options is not None and not given.stream:
        raise InvalidField("stream_options", "stream_options needs stream: true")
    return Asked(
        chat=chat,
        model=given.model or "",
        requests=tuple(requests),
        per_prompt=given.n or 1,
        stream=bool(given.stream),
        include_usage=given.stream_options is not None and bool(given.stream_options.include_usage),
        logprobs=logprobs,
        ignore_eos=bool(given.ignore_eos),
    )


def _sampling(given: _Body, max_tokens: int, logprobs: int | None) -> router_pb2.GenerateRequest:
    """A request without its prompt. Ranges of the numbers are checked where all requests are: router/validate.py."""
    request = router_pb2.GenerateRequest(model=given.model or "")
    sampling = request.sampling
    sampling.temperature = DEFAULT_TEMPERATURE if given.temperature is None else given.temperature
    sampling.top_k = given.top_k or 0
    sampling.min_p = given.min_p or 0.0
    if given.top_p is not None:
        sampling.top_p = given.top_p
    if given.repetition_penalty is not None:
        sampling.repetition_penalty = given.repetition_penalty
    if given.seed is not None:
        sampling.seed = given.seed % 2**64
    if logprobs is not None:
        sampling.logprobs = logprobs
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = bool(given.ignore_eos)
    request.stop_strings.extend([given.stop] if isinstance(given.stop, str) else given.stop or [])
    return request


def _choices(request: router_pb2.GenerateRequest, count: int, max_bytes: int) -> Iterator[router_pb2.GenerateRequest]:
    """The request, and copies of it that draw other random numbers."""
    if count > 1 and request.ByteSize() * count > max_bytes:
        raise TooLarge(
            "the choices' prompts are too large together",
            reason="PROMPT_TOO_LARGE",
            given=f"{count} times {request.ByteSize()} bytes",
            allowed=f"{max_bytes} bytes",
            hint="send fewer choices at a time",
        )
    yield request
    for index in range(1, count):
        copy = router_pb2.GenerateRequest()
        copy.CopyFrom(request)
        if request.sampling.HasField("seed"):
            copy.sampling.seed = choice_seed(request.sampling.seed, index)
        yield copy  # without a seed the worker draws one for each


def choice_seed(seed: int, index: int) -> int:
    """Choice 0 has the seed itself. The others are hashed: seed + 1 would be choice 0 of another request."""
    if index == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _prompts(given: Raw | UnsetType) -> list[str] | list[list[int]]:
    """A string, several, token ids, or several lists of them."""
    data = b"" if given is UNSET else bytes(memoryview(given))
    if data in (b"", b"null"):
        raise InvalidField("prompt", "the request has no prompt", reason="EMPTY_PROMPT", allowed="text or token ids")
    if data.startswith(b'"'):
        return [_decode(data, str, "prompt")]
    if re.match(rb"\[\s*\[", data):
        if (num_lists := data.count(b"[") - 1) > MAX_CHOICES:  # before a million of them are made
            raise _too_many(f"{num_lists} prompts")
        return [_token_ids(ids) for ids in _decode(data, list[list[_Natural]], "prompt")]
    mixed = _decode(data, list[str | _Natural], "prompt")
    texts = [prompt for prompt in mixed if isinstance(prompt, str)]
    if not texts:
        return [_token_ids([prompt for prompt in mixed if isinstance(prompt, int)])]
    if len(texts) > MAX_CHOICES:
        raise _too_many(f"{len(texts)} prompts")
    if len(texts) < len(mixed):
        raise InvalidField("prompt", "the prompt mixes texts and token ids", allowed="one kind")
    return texts


def _token_ids(ids: list[int]) -> list[int]:
    if not ids:
        raise InvalidField("prompt", "the prompt has no token ids", reason="EMPTY_PROMPT", allowed="at least one")
    return ids


def _content(message: _Message, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        raise InvalidField(where, "a message has no content", allowed="text, or parts of type text")
    texts = []
    for part in message.content:
        if part.type != "text":
            raise UnbuiltField(where, given=f"a part of type {part.type[:64]!r}", allowed="parts of type 'text'")
        if not isinstance(part.text, str):
            raise InvalidField(where, "a part of type text has no text")
        texts.append(part.text)
    return "".join(texts)


def _check_neutral(given: Struct, neutral: dict[str, tuple[Any, ...]], prefix: str = "") -> None:
    for name, values in neutral.items():
        value = getattr(given, name, UNSET)
        if value is UNSET:
            continue
        data = bytes(memoryview(value)[:_NEUTRAL_BYTES])
        if len(memoryview(value)) > _NEUTRAL_BYTES or not _is_neutral(data, values):
            allowed = " or ".join(msgspec.json.encode(value).decode() for value in (None, *values))
            raise UnbuiltField(prefix + name, given=data.decode(errors="replace"), allowed=allowed)


def _is_neutral(data: bytes, values: tuple[Any, ...]) -> bool:
    value = msgspec.json.decode(data)
    if value is None:
        return True
    # False == 0 in Python: kinds are compared too.
    return any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values)


def _too_many(given: str) -> InvalidField:
    return InvalidField(
        "n", "too many choices", reason="TOO_MANY_CHOICES", given=given, allowed=f"{MAX_CHOICES} (prompts times n)"
    )


_T = TypeVar("_T")
_WHERE = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.DOTALL)


def _decode(data: bytes, kind: type[_T] | Any, param: str | None = None) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as failure:
        text = str(failure)
        found = _WHERE.search(text)
        where = ((param or "") + (found[1] if found else ""))[:128]
        text = _WHERE.sub("", text)[:300]
        if unknown := _UNKNOWN.match(text):
            name = f"{where}.{unknown[1]}" if where else unknown[1]
            raise InvalidField(
                name[:128], f"field {name[:128]!r} is not known", reason="UNKNOWN_FIELD", hint="leave it out"
            ) from None
        raise InvalidField(where or None, f"{where or 'the body'}: {text[:1].lower()}{text[1:]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as failure:
        raise InvalidField(param, "the body is not JSON", reason="BAD_JSON", hint=str(failure)[:200]) from None
