"""The error tree as HTTP: status codes, which appear here only, and bodies in the form that OpenAI's clients read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from protos import errors
from protos.errors import TailpackError

# Nearest entry along the class's ancestors wins: (status, OpenAI's error type).
_STATUS: dict[type[TailpackError], tuple[int, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error"),
    errors.TooLarge: (413, "invalid_request_error"),
    errors.NotFound: (404, "invalid_request_error"),
    errors.AlreadyExists: (409, "invalid_request_error"),
    errors.Unauthenticated: (401, "authentication_error"),
    errors.PermissionDenied: (403, "permission_error"),
    errors.NotBuilt: (400, "invalid_request_error"),  # not 501: clients send again what ends with 5xx
    errors.PreconditionFailed: (409, "invalid_request_error"),
    errors.CapacityError: (429, "rate_limit_error"),
    errors.Unavailable: (503, "server_error"),
    errors.KvLost: (500, "server_error"),
    errors.DeadlineExceeded: (504, "timeout_error"),
    errors.RequestCancelled: (499, "request_cancelled"),  # nginx' number; HTTP has none for it
    errors.InternalError: (500, "server_error"),
    TailpackError: (500, "server_error"),
}
# Reasons for which HTTP has a status of its own.
_STATUS_BY_REASON = {
    "PROMPT_TOO_LONG": 400,  # the request's size is fine, the model's is not: as OpenAI answers it
    "METHOD_NOT_ALLOWED": 405,
    "BODY_TIMEOUT": 408,
    "UNSUPPORTED_MEDIA_TYPE": 415,
}
# Reasons for which OpenAI's API has a code that clients test for. All others go out as they are.
_CODES = {"PROMPT_TOO_LONG": "context_length_exceeded", "UNKNOWN_MODEL": "model_not_found"}
# Which field of the request an error is about, where the error itself does not say (see InvalidField).
_FIELDS = {
    "UNKNOWN_MODEL": "model",
    "MODEL_NOT_NAMED": "model",
    "BAD_STOP_STRINGS": "stop",
    "BAD_TEMPERATURE": "temperature",
    "BAD_TOP_P": "top_p",
    "BAD_MIN_P": "min_p",
    "BAD_REPETITION_PENALTY": "repetition_penalty",
    "BAD_ROLE": "messages",
    "CHAT_TEMPLATE": "messages",
    "THINKING_NOT_KNOWN": "thinking",
    "NO_CHAT_TEMPLATE": "messages",
}


class InvalidField(errors.InvalidRequest):
    """A field of a JSON body that cannot be taken. param: its name, as in OpenAI's errors."""

    default_reason = "BAD_FIELD"

    def __init__(self, param: str | None, message: str, **details: Any) -> None:
        super().__init__(message, **details)
        self.param = param


class UnbuiltField(errors.NotBuilt):
    """A field that would change the answer and is not built. param: its name."""

    def __init__(self, param: str, **details: Any) -> None:
        super().__init__(f"{param} is not built in this version", hint="leave it out", **details)
        self.param = param


@dataclass(frozen=True)
class HttpError:
    """How an error leaves: status, extra headers and the JSON body."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)


def to_http(error: TailpackError) -> HttpError:
    """body: {"error": {"message", "type", "param", "code"}}; code is our reason unless OpenAI has a word for it."""
    status, kind = next(_STATUS[ancestor] for ancestor in type(error).__mro__ if ancestor in _STATUS)
    status = _STATUS_BY_REASON.get(error.reason, status)
    headers = {"x-should-retry": "true" if error.retry_after_ms is not None else "false"}  # OpenAI's clients obey it
    if error.retry_after_ms is not None:
        headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    body = {
        "message": str(error),
        "type": kind,
        "param": getattr(error, "param", None) or _FIELDS.get(error.reason),
        "code": _CODES.get(error.reason, error.reason),
    }
    return HttpError(status, {"error": body}, headers)
