"""The error tree as HTTP."""

from __future__ import annotations

import pytest

from protos import errors
from protos.errors import TailpackError
from router.http_errors import InvalidField, UnbuiltField, to_http

ALL = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TailpackError)]


@pytest.mark.parametrize("kind", ALL)
def test_every_error_has_a_status_and_openais_form(kind: type[TailpackError]) -> None:
    error = kind("what is wrong", given="this", allowed="that", hint="do so")
    http = to_http(error)
    assert set(http.body) == {"error"}
    assert http.body["error"]["message"] == str(error)
    assert http.body["error"]["code"] == kind.default_reason
    callers_own = issubclass(
        kind,
        errors.InvalidRequest | errors.NotFound | errors.NotBuilt | errors.Unauthenticated | errors.PermissionDenied,
    )
    assert (400 <= http.status < 500) or not callers_own
    assert http.headers["x-should-retry"] == "false"
    assert "retry-after" not in http.headers


@pytest.mark.parametrize(("retry_after_ms", "seconds"), [(1, "1"), (1000, "1"), (1001, "2")])
def test_where_waiting_helps_it_says_how_long(retry_after_ms: int, seconds: str) -> None:
    http = to_http(errors.Unavailable("away", retry_after_ms=retry_after_ms))
    assert (http.status, http.headers["x-should-retry"], http.headers["retry-after"]) == (503, "true", seconds)
    assert http.headers["retry-after-ms"] == str(retry_after_ms)


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (errors.TooLarge("x", reason="PROMPT_TOO_LONG"), 400, "context_length_exceeded", None),
        (errors.TooLarge("x", reason="BODY_TOO_LARGE"), 413, "BODY_TOO_LARGE", None),
        (errors.NotFound("x", reason="UNKNOWN_MODEL"), 404, "model_not_found", "model"),
        (errors.InvalidRequest("x", reason="BAD_TOP_P"), 400, "BAD_TOP_P", "top_p"),
        (errors.WorkerLost("x"), 503, "WORKER_LOST", None),
        (errors.KvLost("x"), 500, "KV_LOST", None),
        (InvalidField("n", "x"), 400, "BAD_FIELD", "n"),
        (UnbuiltField("tools"), 400, "FEATURE_NOT_BUILT", "tools"),
    ],
)
def test_what_clients_test_for(error: TailpackError, status: int, code: str, param: str | None) -> None:
    http = to_http(error)
    assert (http.status, http.body["error"]["code"], http.body["error"]["param"]) == (status, code, param)


def test_a_message_is_one_line_whatever_a_caller_sent() -> None:
    message = to_http(errors.InvalidRequest("bad", given="a\n\x1b[31mb")).body["error"]["message"]
    assert message.isprintable()
