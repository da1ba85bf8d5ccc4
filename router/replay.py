"""What of an answer that is made again from its first token its caller has already. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos import types_pb2
from protos.errors import InvalidRequest


@dataclass(frozen=True)
class Place:
    """Where a caller goes on: behind so many tokens, and so many UTF-8 bytes of text."""

    token_offset: int = 0
    text_offset: int = 0


class Skip:
    """Cuts off what is before a place. Tokens and text are cut apart: text lags behind tokens.

    Args:
        num_known: tokens that the answer has for sure. A place that is not reached with these is ahead of the answer.
    """

    def __init__(self, place: Place, num_known: int) -> None:
        self.place = place
        self.num_known = num_known
        self._tokens = place.token_offset
        self._text = place.text_offset

    @property
    def done(self) -> bool:
        return not (self._tokens or self._text)

    def tokens(
        self, token_ids: list[int], logprobs: Sequence[types_pb2.PositionLogprobs]
    ) -> tuple[list[int], Sequence[types_pb2.PositionLogprobs]]:
        """Those that are new to the caller."""
        cut = min(self._tokens, len(token_ids))
        self._tokens -= cut
        return token_ids[cut:], logprobs[cut:]

    def text(self, text: str) -> str:
        """What of it is new. Raises InvalidRequest (BAD_OFFSET) where the place is inside a character."""
        data = text.encode()
        cut = min(self._text, len(data))
        self._text -= cut
        rest = data[cut:]
        if rest and rest[0] & 0xC0 == 0x80:
            raise bad_offset(f"text offset {self.place.text_offset}, inside a character", "the start of a character")
        return rest.decode()

    def ahead(self, num_tokens: int) -> InvalidRequest:
        """The error where the answer has no more than ``num_tokens`` tokens and their text."""
        return bad_offset(
            f"token offset {self.place.token_offset}, text offset {self.place.text_offset}",
            f"what is there: {num_tokens} tokens and their text",
        )


def bad_offset(given: str, allowed: str) -> InvalidRequest:
    return InvalidRequest("an answer cannot be resumed there", reason="BAD_OFFSET", given=given, allowed=allowed)
