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
from collections.abc import Mapping
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor

_FIRST = ("timestamp", "level", "component", "event")
_FOLDED = ("_tokens", "_ms")


def _in_reading_order(_logger: object, _method: str, event: EventDict) -> EventDict:
    """When, how bad, who, what; then the rest as it was given."""
    return {**{key: event[key] for key in _FIRST if key in event}, **event}


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

    def msg(self, line: str) -> None:
        self._handler.acquire()
        try:
            self._handler.stream.write(f"{line}\n")
            self._handler.stream.flush()
        except (OSError, ValueError):
            pass  # nobody reads it any more; what was to be logged must not fail for that
        finally:
            self._handler.release()

    debug = info = warning = error = critical = exception = msg


_ENCODER = json_library.JSONEncoder(default=repr)  # ASCII, so that no terminal takes any of it for a command


def _to_json(event: Mapping[str, Any], **_settings: object) -> str:
    return _ENCODER.encode(event)


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

    def add_component(_logger: object, _method: str, event: EventDict) -> EventDict:
        return {"component": component, **event}  # not a contextvar: those stay behind in the main thread

    shared: list[Processor] = [
        add_component,
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True) if json else structlog.processors.TimeStamper("%H:%M:%S"),
    ]
    render: list[Processor] = (
        [structlog.processors.format_exc_info, _in_reading_order, structlog.processors.JSONRenderer(_to_json)]
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
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    lines = _Lines(handler)
    structlog.configure(
        processors=[*shared, structlog.processors.StackInfoRenderer(), *render],
        logger_factory=lambda *_args: lines,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
