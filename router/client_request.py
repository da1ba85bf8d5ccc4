"""Requests as callers write them: checked, before anything is sent, by the rules that the router has. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict, Unpack

from protos import router_pb2, types_pb2
from protos.errors import InvalidRequest
from protos.limits import MAX_LOGPROBS
from router.validate import check_values

_MAX_UINT32 = (1 << 32) - 1
_MAX_UINT64 = (1 << 64) - 1

Message = tuple[str, str]
"""(role, content)"""

Prompt = str | Sequence[Message] | Sequence[int]

PREFIX_REUSE = {
    "default": types_pb2.PREFIX_REUSE_DEFAULT,
    "any": types_pb2.PREFIX_REUSE_ANY,
    "exact": types_pb2.PREFIX_REUSE_EXACT,
    "none": types_pb2.PREFIX_REUSE_NONE,
}


class Parameters(TypedDict, total=False):
    """What a request may ask for besides its prompt. Meanings and ranges: protos/types.proto, protos/router.proto."""

    model: str
    """Which one, where several are served."""
    max_tokens: int | None
    """Most tokens of the answer, at least 1; None leaves it to the router. The model's room bounds it too."""
    temperature: float
    """0, the default, always takes the likeliest token."""
    top_k: int
    top_p: float | None
    min_p: float
    repetition_penalty: float | None
    seed: int | None
    """Repeats a sampled answer. None: the worker draws one and says which in the first chunk."""
    logprobs: int | None
    """Log-probabilities of the tokens, and of so many others at each position."""
    stop_strings: Sequence[str]
    """The text ends before the first of these."""
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    prefix_reuse: str
    """"default", "any", "exact" or "none": what of the prompt may come from KV that is there already."""
    thinking: bool
    """The model reasons before it answers: the text begins with that, and "</think>". Of chats only."""
    resumable: bool
    """A lost connection does not abort the request; the client goes on where it was."""
    resume_grace_ms: int
    """How long the answer is kept after the connection was lost; 0: 30 seconds."""


def build_request(prompt: Prompt, **parameters: Unpack[Parameters]) -> router_pb2.GenerateRequest:
    """A checked request. prompt: text as it is, chat messages (role, content), or token ids.

    Raises:
        InvalidRequest, TooLarge: a value that the router would refuse, or that its message cannot hold.
    """
    max_tokens, seed, logprobs = parameters.get("max_tokens"), parameters.get("seed"), parameters.get("logprobs")
    if max_tokens is not None:
        _check_integer("max_tokens", max_tokens, _MAX_UINT32, low=1)
    _check_integer("top_k", parameters.get("top_k", 0), _MAX_UINT32)
    _check_integer("seed", seed or 0, _MAX_UINT64)
    _check_integer("logprobs", logprobs or 0, MAX_LOGPROBS)
    _check_integer("resume_grace_ms", parameters.get("resume_grace_ms", 0), _MAX_UINT32)
    for token_id in parameters.get("stop_token_ids", ()):
        _check_integer("stop token id", token_id, _MAX_UINT32)
    reuse = parameters.get("prefix_reuse", "default")
    if reuse not in PREFIX_REUSE:
        raise InvalidRequest(
            "prefix_reuse is not known", reason="BAD_PREFIX_REUSE", given=reuse, allowed=", ".join(PREFIX_REUSE)
        )
    request = router_pb2.GenerateRequest(
        model=_text("model", parameters.get("model", "")),
        sampling=types_pb2.Sampling(
            temperature=parameters.get("temperature", 0.0),
            top_k=parameters.get("top_k", 0),
            top_p=parameters.get("top_p"),
            min_p=parameters.get("min_p", 0.0),
            repetition_penalty=parameters.get("repetition_penalty"),
            seed=seed,
            logprobs=logprobs,
        ),
        stop=types_pb2.StopConditions(
            max_tokens=max_tokens or 0,
            stop_token_ids=parameters.get("stop_token_ids", ()),
            ignore_eos=parameters.get("ignore_eos", False),
        ),
        stop_strings=[_text("stop string", stop) for stop in parameters.get("stop_strings", ())],
        prefix_reuse=PREFIX_REUSE[reuse],
        resumable=parameters.get("resumable", False),
        resume_grace_ms=parameters.get("resume_grace_ms", 0),
    )
    _set_prompt(request, prompt)
    if parameters.get("thinking"):
        if request.WhichOneof("prompt") != "chat":
            raise InvalidRequest(
                "thinking needs a chat",
                reason="THINKING_NEEDS_CHAT",
                given=f"a prompt of {request.WhichOneof('prompt')}",
                allowed="chat messages",
            )
        request.chat.thinking = True
    check_values(request)
    return request


def as_chat(prompt: str, system: str | None = None) -> list[Message]:
    """One user message, after an optional system message."""
    return [*([("system", system)] if system else []), ("user", prompt)]


def _set_prompt(request: router_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = _text("prompt", prompt)
        return
    for part in prompt:
        if isinstance(part, tuple):
            role, content = part
            request.chat.messages.add(role=_text("role", role), content=_text("content", content))
        else:
            _check_integer("prompt token id", part, _MAX_UINT32)
            request.token_ids.ids.append(part)


def _text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as failure:
        raise InvalidRequest(
            f"the {name} is not valid Unicode text", reason="BAD_UNICODE", given=f"position {failure.start}"
        ) from None
    return text


def _check_integer(name: str, value: int, high: int, *, low: int = 0) -> None:
    if not low <= value <= high:
        raise InvalidRequest(
            f"{name} is out of range",
            reason=f"BAD_{name.upper().replace(' ', '_')}",
            given=value,
            allowed=f"{low} to {high}",
        )
