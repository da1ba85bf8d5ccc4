"""Logs of every process: to stderr, in colour for a person at a terminal, one JSON object a line otherwise.

Events are short constant strings; what varies is in key-value pairs. Records of libraries that use ``logging`` (grpc,
Ray) take the same form. Tracebacks are printed without the values of local variables: those hold callers' prompts.

Our own events go to the handler's stream without becoming records of ``logging`` first, which would take longer than
all the rest: a router logs a line a request.
"""

from __future__ import annotations

import json as json_library
import logging
import sys
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor

_FOLDED = ("_tokens", "_ms")


def _for_people(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Leaves out what is not known, and folds counts and times into one entry each: "tokens='prompt 12, output 33'".

    In JSON a kind of line always has the same keys.
    """
    shown: EventDict = {}
    for key, value in event.items():
        suffix = next((each for each in _FOLDED if key.endswith(each)), None)
        if value is None or value == "":
            continue
        if suffix is None or not isinstance(value, int | float):
            shown[key] = value
        else:
            entry = f"{key.removesuffix(suffix).replace('_', ' ')} {value}"
            name = suffix.strip("_")
            shown[name] = f"{shown[name]}, {entry}" if name in shown else entry
    return shown


class _Lines:
    """What structlog hands rendered lines to: the stream of a handler, which other threads write to as well."""

    def __init__(self, handler: logging.StreamHandler[TextIO]) -> None:
        self._handler = handler
        self._lock = handler.lock or nullcontext()

    def msg(self, line: str) -> None:
        with self._lock:
            try:
                self._handler.stream.write(f"{line}\n")
                self._handler.stream.flush()
            except (OSError, ValueError):
                pass  # nobody reads it any more; what was to be logged must not fail for that

    debug = info = warning = error = critical = exception = msg


def _now(utc: bool) -> str:
    """For programs to the microsecond, in UTC; for people the time of day."""
    return f"{datetime.now(UTC).isoformat()[:-6]}Z" if utc else datetime.now().strftime("%H:%M:%S")


_QUICK = msgspec.json.Encoder(enc_hook=repr)
_EXACT = json_library.JSONEncoder(default=repr, separators=(",", ":"))  # as the quick one has them


def _to_json(logger: object, method: str, event: EventDict) -> str:
    """In ASCII, so that no terminal takes any of it for a command. Nearly all lines are so by themselves."""
    if "exc_info" in event:
        event = structlog.processors.format_exc_info(logger, method, event)
    try:
        line = _QUICK.encode(event)
    except (ValueError, OverflowError):  # half a surrogate pair; a number of more than 64 bits
        return _EXACT.encode(event)
    return line.decode() if line.isascii() else _EXACT.encode(event)


def configure(component: str, json: bool | None = None, level: str = "info") -> None:
    """Sets up logging for this process; call once, first thing in ``main``.

    Args:
        component: which process this is ("router", "worker", ...); part of every record.
        json: True for JSON lines, False for people, None to decide by whether stderr is a terminal.
        level: "debug", "info", "warning" or "error": the least that is logged of our own events.
            Libraries are logged from "warning" on.
    """
    if json is None:
        json = not sys.stderr.isatty()

    def begin(_logger: object, method: str, event: EventDict) -> EventDict:
        """When, how bad, who, what; then the rest as it was given."""
        what = event.pop("event")
        return {"timestamp": _now(json), "level": method, "component": component, "event": what, **event}

    render: list[Processor] = (
        [_to_json]
        if json
        else [
            _for_people,
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(),
                exception_formatter=structlog.dev.plain_traceback,
                sort_keys=False,
                pad_event_to=0,
                pad_level=False,
            ),
        ]
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[begin, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    lines = _Lines(handler)
    structlog.configure(
        processors=[begin, *render],
        logger_factory=lambda *_args: lines,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
