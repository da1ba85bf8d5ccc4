"""The two forms of the log: one JSON object a line, and lines for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from protos import logs

LINE = {
    "request_id": "r-1",
    "tenant": "",
    "worker": None,
    "outcome": "finished",
    "prompt_tokens": 12,
    "output_tokens": 1048576,
    "ttft_ms": 23.3,
    "itl_max_ms": None,
    "total_ms": 360.25,
}


@contextmanager
def written(*, json: bool, level: str = "info") -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.configure("router", json, level)
    stream = io.StringIO()
    (handler,) = root.handlers
    assert isinstance(handler, logging.StreamHandler)
    handler.setStream(stream)
    try:
        yield stream
    finally:
        logs.configure("test", json=True)
        root.handlers[:], root.level = before


def fail_with_a_secret_variable() -> None:
    secret = "xyzzy-secret-plugh"
    raise ValueError(f"{len(secret)} characters")


def test_json_lines_begin_with_what_is_read_first_and_keep_every_key() -> None:
    with written(json=True) as stream:
        structlog.get_logger("router").info("request", **LINE)
    line = json.loads(stream.getvalue())
    assert list(line) == ["timestamp", "level", "component", "event", *LINE]
    assert {key: line[key] for key in LINE} == LINE
    assert (line["level"], line["component"], line["event"]) == ("info", "router", "request")


@pytest.mark.parametrize("value", ["é \x9b \ud800", 1 << 70, -(1 << 70), {1: [b"x"]}, 0.1, Path("a/b"), "\x1b[31m\n"])
def test_json_lines_hold_anything_in_ascii(value: object) -> None:
    with written(json=True) as stream:
        structlog.get_logger("router").info("request", value=value)
    line = stream.getvalue()
    assert line.isascii() and line.endswith("\n") and line[:-1].isprintable()
    read = json.loads(line)["value"]
    assert read == value or (read, value) in ((repr(value), value), ({"1": ["eA=="]}, value))


def test_all_json_lines_have_the_same_separators() -> None:
    with written(json=True) as stream:
        for value in ("plain", "é", 1 << 70):
            structlog.get_logger("router").info("request", value=value, more=[1, 2])
    for line in stream.getvalue().splitlines():
        assert '"more":[1,2]' in line and ", " not in line and ": " not in line


def test_people_read_no_blanks_and_counts_and_times_at_one_place() -> None:
    with written(json=False) as stream:
        structlog.get_logger("router").info("request", **LINE)
    line = stream.getvalue().rstrip("\n")
    assert line[8:] == (
        " [info] request component=router request_id=r-1 outcome=finished"
        " tokens='prompt 12, output 1048576' ms='ttft 23.3, total 360.25'"
    )


@pytest.mark.parametrize("as_json", [True, False])
def test_tracebacks_have_no_values_of_variables(as_json: bool) -> None:
    with written(json=as_json) as stream:
        try:
            fail_with_a_secret_variable()
        except ValueError:
            structlog.get_logger("router").error("bug", exc_info=True)
        logging.getLogger("a.library").error("its bug", exc_info=ValueError("as it says"))
    assert "fail_with_a_secret_variable" in stream.getvalue() and "ValueError: 18 characters" in stream.getvalue()
    assert "as it says" in stream.getvalue()
    assert "xyzzy" not in stream.getvalue()


def test_levels_are_of_our_own_events_and_libraries_begin_at_warning() -> None:
    with written(json=True, level="debug") as stream:
        structlog.get_logger("router").debug("ours")
        logging.getLogger("a.library").info("theirs")
        logging.getLogger("a.library").warning("theirs, loud")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["ours", "theirs, loud"]
