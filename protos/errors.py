"""The error tree of Tailpack. Four families: the caller's mistake, capacity, transient, bug.

Every error says four things: a stable ``reason`` (SCREAMING_SNAKE, what programs test for), what was given, what is
allowed, and what to do. ``protos/rpc.py`` turns them into gRPC status codes and back; no other file knows those codes.
"""

from __future__ import annotations

from typing import ClassVar


class TailpackError(Exception):
    """Root of the tree.

    Args:
        message: one sentence that names what is wrong.
        reason: stable name; defaults to the class's own.
        given: what was received, short enough to log.
        allowed: what would have been accepted.
        hint: what to do about it.
        retry_after_ms: where waiting helps, how long; else None.
    """

    reason: str = "UNKNOWN"
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        given: object = None,
        allowed: object = None,
        hint: str | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        self.reason = reason or self.default_reason
        self.message = message
        self.given = None if given is None else str(given)
        self.allowed = None if allowed is None else str(allowed)
        self.hint = hint
        self.retry_after_ms = retry_after_ms
        super().__init__(message)

    def __str__(self) -> str:
        parts = [self.message]
        if self.given is not None:
            parts.append(f"given: {self.given}")
        if self.allowed is not None:
            parts.append(f"allowed: {self.allowed}")
        if self.hint is not None:
            parts.append(self.hint)
        return printable("; ".join(parts)) + f" [{self.reason}]"

    def __reduce__(self) -> tuple[object, ...]:
        # Ray and multiprocessing pickle exceptions; keyword-only arguments need help.
        return (_rebuild, (type(self), self.message, dict(self.metadata()), self.retry_after_ms))

    def metadata(self) -> dict[str, str]:
        """The fields besides the message, as they travel in google.rpc.ErrorInfo."""
        fields = {"reason": self.reason, "given": self.given, "allowed": self.allowed, "hint": self.hint}
        return {key: value for key, value in fields.items() if value is not None}


def printable(text: str) -> str:
    """One line for a terminal or a log, whatever a caller has sent: control characters as Python spells them."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _rebuild(
    kind: type[TailpackError], message: str, metadata: dict[str, str], retry_after_ms: int | None
) -> TailpackError:
    return kind(
        message,
        reason=metadata.get("reason"),
        given=metadata.get("given"),
        allowed=metadata.get("allowed"),
        hint=metadata.get("hint"),
        retry_after_ms=retry_after_ms,
    )


# --- the caller's mistake: sending it again is no use ---


class InvalidRequest(TailpackError):
    """A value is malformed or out of its range."""

    default_reason = "INVALID_REQUEST"


class TooLarge(InvalidRequest):
    """A prompt or message is over its limit."""

    default_reason = "TOO_LARGE"


class NotFound(TailpackError):
    """A name or id is not known here."""

    default_reason = "NOT_FOUND"


class AlreadyExists(TailpackError):
    """An id is in use."""

    default_reason = "ALREADY_EXISTS"


class Unauthenticated(TailpackError):
    """No or wrong credentials."""

    default_reason = "UNAUTHENTICATED"


class PermissionDenied(TailpackError):
    """Known, but not allowed to."""

    default_reason = "PERMISSION_DENIED"


class NotBuilt(TailpackError):
    """A feature that this version does not have. Refused instead of ignored."""

    default_reason = "FEATURE_NOT_BUILT"


class PreconditionFailed(TailpackError):
    """The request is right in itself but does not fit the state: geometry, epoch, mode."""

    default_reason = "PRECONDITION_FAILED"


class ConfigError(PreconditionFailed):
    """A setting is unknown, malformed or contradicts another. Fatal at start."""

    default_reason = "BAD_CONFIG"


class ModelError(PreconditionFailed):
    """Weights, config or tokenizer of a model are unreadable or do not belong together. Fatal at start."""

    default_reason = "BAD_MODEL"


# --- capacity: the request is fine, there is no room now ---


class CapacityError(TailpackError):
    """Out of pages, slots, memory or queue."""

    default_reason = "NO_CAPACITY"


# --- transient: a peer is away or the request was ended from outside ---


class Unavailable(TailpackError):
    """A peer cannot be reached, or is leaving."""

    default_reason = "UNAVAILABLE"


class WorkerLost(Unavailable):
    """The worker of a running sequence died or left."""

    default_reason = "WORKER_LOST"


class KvStoreLost(Unavailable):
    """The kvstore of this node is gone."""

    default_reason = "KVSTORE_LOST"


class KvLost(TailpackError):
    """A sequence's KV is gone and no token log is left to compute it again."""

    default_reason = "KV_LOST"


class DeadlineExceeded(TailpackError):
    """The caller's deadline passed."""

    default_reason = "DEADLINE_EXCEEDED"


class RequestCancelled(TailpackError):
    """Ended by Cancel or by the caller's leaving."""

    default_reason = "CANCELLED"


# --- bug: a broken invariant; stops the process that finds it ---


class InternalError(TailpackError):
    """Something that cannot be. Never dressed as a normal stop."""

    default_reason = "INTERNAL"
