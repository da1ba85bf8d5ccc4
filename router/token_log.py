"""The token ids of live streams, so that a sequence can go on elsewhere when its worker is gone.

Four bytes a token, of all streams of a router together at most so many. Above, the stream that grows is no longer kept:
if its worker is lost and comes back without the sequence, it ends.
"""

from __future__ import annotations

from array import array

DEFAULT_MAX_LOGGED_TOKENS = 64 << 20
"""Of all streams of one router: 256 MiB."""


class TokenLogs:
    """A counter. Of one event loop."""

    def __init__(self, max_tokens: int = DEFAULT_MAX_LOGGED_TOKENS) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self.num_dropped = 0  # logs that were given up for want of room


class TokenLog:
    """What one stream was sent, from its first token on.

    Attributes:
        token_ids: empty where the log is not whole.
        whole: all of them are here.
    """

    __slots__ = ("_logs", "token_ids", "whole")

    def __init__(self, logs: TokenLogs) -> None:
        self._logs = logs
        self.token_ids = array("I")
        self.whole = True

    def extend(self, token_ids: list[int]) -> None:
        """Takes the tokens that follow."""
        if not self.whole:
            return
        self.token_ids.fromlist(token_ids)
        logs = self._logs
        logs.num_tokens += len(token_ids)
        if logs.num_tokens > logs.max_tokens:
            logs.num_dropped += 1
            self.close()

    def close(self) -> None:
        """Forgets them; any number of times."""
        self._logs.num_tokens -= len(self.token_ids)
        self.token_ids = array("I")
        self.whole = False
