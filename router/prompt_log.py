"""What the log shows of a prompt, where the router was told to log prompts."""

from __future__ import annotations

from protos import router_pb2

MAX_CHARACTERS = 4096


def prompt_text(request: router_pb2.GenerateRequest) -> str:
    """The prompt in one string, cut to MAX_CHARACTERS with its length behind it; token ids as numbers."""
    match request.WhichOneof("prompt"):
        case "chat":
            text = "\n".join(f"{message.role}: {message.content}" for message in request.chat.messages)
        case "token_ids":
            text = " ".join(map(str, request.token_ids.ids[:MAX_CHARACTERS]))
        case _:
            text = request.text
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)"
