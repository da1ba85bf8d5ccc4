"""DeepSeek-V4's chat encoding. The family has no Jinja template: its authors define the prompt by a program.

A prompt is <bos>, the system text as it is, and turns: <User>text<Assistant></think>answer<eos>. It ends behind
<Assistant> and <think>, where the model thinks first, or </think>, where it answers at once. A thinking answer is the
reasoning, </think>, and what it says then; an earlier turn's reasoning is not shown to the model again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from protos.errors import InvalidRequest

MODEL_TYPE = "deepseek_v4"  # of config.json
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
NEEDED = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK)
"""Each must be one token of the tokenizer."""


def render(messages: Sequence[Mapping[str, str]], *, thinking: bool) -> str:
    """The prompt of messages with ``role`` (system, user, assistant) and ``content``.

    Consecutive messages of the user are one turn, a blank line between them. Of an assistant's message, what stands
    before the last </think> is reasoning and dropped.

    Raises:
        InvalidRequest: CHAT_TEMPLATE, the roles do not come in an order that the model knows: system first, if at all,
            then turns of user and assistant, the user's last.
    """
    turns = list(messages)
    text = BOS
    if turns and turns[0]["role"] == "system":
        text += turns.pop(0)["content"]
    if not turns or turns[-1]["role"] != "user":
        raise _refused(messages, "the last message is the user's")
    before = ""
    for number, message in enumerate(turns):
        role, content = message["role"], message["content"]
        if role == "user":
            text += ("\n\n" if before == "user" else USER) + content
            if number + 1 < len(turns) and turns[number + 1]["role"] != "user":
                text += ASSISTANT + END_THINK
        elif role == "assistant" and before == "user":
            text += content.rpartition(END_THINK)[2] + EOS
        else:
            raise _refused(messages, "system first, if at all; then user and assistant in turn")
        before = role
    return text + ASSISTANT + (THINK if thinking else END_THINK)


def _refused(messages: Sequence[Mapping[str, str]], allowed: str) -> InvalidRequest:
    return InvalidRequest(
        "this model's chat encoding has no place for these messages",
        reason="CHAT_TEMPLATE",
        given=", ".join(message["role"] for message in messages[:16]),
        allowed=allowed,
    )
