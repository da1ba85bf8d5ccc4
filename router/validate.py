"""What a request may hold, checked before any worker sees it. Pure; the client checks with the same code."""

from __future__ import annotations

from protos import router_pb2, types_pb2
from protos.errors import InvalidRequest, NotBuilt, TooLarge
from protos.limits import MAX_RESUME_GRACE_MS, check_sampling, check_stop, check_token_ids

MAX_PROMPT_BYTES = 8 << 20
MAX_MESSAGES = 4096
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
DEFAULT_MAX_TOKENS = 1024
ROLES = ("system", "user", "assistant")

_STOP_STRINGS_ALLOWED = f"at most {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_STRING_BYTES} bytes"
_PREFIX_REUSES = frozenset(types_pb2.PrefixReuse.values())


def check_request(request: router_pb2.GenerateRequest) -> None:
    """All that a router can say without a model.

    Raises:
        InvalidRequest, TooLarge: as check_values.
        NotBuilt: a feature that this version does not have was asked for.
    """
    for field in ("tools_json", "json_schema", "lora_adapter"):
        if getattr(request, field):
            raise NotBuilt(f"{field} is not built in this version", given=field, hint=f"leave {field} empty")
    check_values(request)


def check_values(request: router_pb2.GenerateRequest) -> None:
    """What holds whichever features a router has: clients check with this, as theirs may be newer.

    Raises:
        InvalidRequest: the reason names the field, e.g. BAD_TEMPERATURE, EMPTY_PROMPT.
        TooLarge: PROMPT_TOO_LARGE.
    """
    if request.prefix_reuse not in _PREFIX_REUSES:
        raise InvalidRequest(
            "prefix_reuse is not known",
            reason="BAD_PREFIX_REUSE",
            given=request.prefix_reuse,
            allowed=", ".join(types_pb2.PrefixReuse.keys()),
        )
    _check_grace(request)
    _check_prompt(request)
    check_sampling(request.sampling)
    _check_stops(request)


def _check_grace(request: router_pb2.GenerateRequest) -> None:
    if request.resume_grace_ms > MAX_RESUME_GRACE_MS:
        raise InvalidRequest(
            "resume_grace_ms is too long",
            reason="BAD_RESUME_GRACE",
            given=request.resume_grace_ms,
            allowed=f"at most {MAX_RESUME_GRACE_MS}",
        )
    if request.resume_grace_ms and not request.resumable:
        raise InvalidRequest(
            "a grace time is for resumable requests only",
            reason="BAD_RESUME_GRACE",
            given=f"{request.resume_grace_ms} ms without resumable",
            allowed="0, or resumable set",
        )


def check_prompt_bytes(num_bytes: int) -> None:
    """Raises TooLarge when a prompt has more bytes than any request may."""
    if num_bytes > MAX_PROMPT_BYTES:
        raise TooLarge(
            "the prompt is too large",
            reason="PROMPT_TOO_LARGE",
            given=f"{num_bytes} bytes",
            allowed=f"at most {MAX_PROMPT_BYTES} bytes",
        )


def check_fits(prompt_token_ids: list[int], stop_token_ids: list[int], model: types_pb2.ModelInfo) -> None:
    """What only the model can tell: token ids within its vocabulary, and room for at least one more token."""
    if not prompt_token_ids:
        raise _empty("the prompt has no tokens")
    if len(prompt_token_ids) >= model.max_sequence_tokens:
        raise _too_long(f"{len(prompt_token_ids)} tokens", model)
    check_token_ids("prompt", prompt_token_ids, model)
    check_token_ids("stop", stop_token_ids, model)


def check_text_fits(text: str, min_tokens: int, model: types_pb2.ModelInfo) -> None:
    """What can be said before a text is tokenised, from how many tokens it has at least.

    Raises:
        TooLarge: PROMPT_TOO_LONG.
    """
    if min_tokens >= model.max_sequence_tokens:
        raise _too_long(f"{len(text.encode())} bytes, at least {min_tokens} tokens", model)


def _too_long(given: str, model: types_pb2.ModelInfo) -> TooLarge:
    return TooLarge(
        f"the prompt is too long for model {model.name}",
        reason="PROMPT_TOO_LONG",
        given=given,
        allowed=f"at most {model.max_sequence_tokens - 1} tokens (prompt and answer: {model.max_sequence_tokens})",
    )


def _check_prompt(request: router_pb2.GenerateRequest) -> None:
    match request.WhichOneof("prompt"):
        case "text":
            check_prompt_bytes(len(request.text.encode()))
            if not request.text:
                raise _empty("the prompt is empty")
        case "chat":
            messages = request.chat.messages
            if len(messages) > MAX_MESSAGES:
                raise TooLarge(
                    "the chat has too many messages",
                    reason="PROMPT_TOO_LARGE",
                    given=len(messages),
                    allowed=f"at most {MAX_MESSAGES}",
                )
            for message in messages:
                if message.role not in ROLES:
                    raise InvalidRequest(
                        "a chat message has an unknown role",
                        reason="BAD_ROLE",
                        given=repr(message.role[:64]),
                        allowed=", ".join(ROLES),
                    )
            check_prompt_bytes(sum(len(message.content.encode()) for message in messages))
            if not any(message.content for message in messages):
                raise _empty("the chat has no text")
        case "token_ids":
            check_prompt_bytes(4 * len(request.token_ids.ids))
            if not request.token_ids.ids:
                raise _empty("the prompt has no token ids")
        case _:
            raise _empty("the request has no prompt")


def _check_stops(request: router_pb2.GenerateRequest) -> None:
    if len(request.stop_strings) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            "too many stop strings",
            reason="BAD_STOP_STRINGS",
            given=len(request.stop_strings),
            allowed=_STOP_STRINGS_ALLOWED,
        )
    for stop in request.stop_strings:
        num_bytes = len(stop.encode())
        if not 1 <= num_bytes <= MAX_STOP_STRING_BYTES:
            raise InvalidRequest(
                "a stop string has a bad length",
                reason="BAD_STOP_STRINGS",
                given=f"{num_bytes} bytes",
                allowed=_STOP_STRINGS_ALLOWED,
            )
    check_stop(request.stop)


def _empty(message: str) -> InvalidRequest:
    return InvalidRequest(message, reason="EMPTY_PROMPT", allowed="at least one token", hint="send some text")
