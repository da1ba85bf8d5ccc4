"""Logs of every process: to stderr, in colour for a person at a terminal, one JSON object a line otherwise.

Events are short constant strings; what varies is in key-value pairs. Records of libraries that use ``logging`` (grpc,
Ray) take the same form. Tracebacks are printed without the values of local variables: those hold callers' prompts.
"""

from __future__ import annotations

import logging
import sys

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
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True) if json else structlog.processors.TimeStamper("%H:%M:%S"),
    ]
    render: list[Processor] = (
        [structlog.processors.format_exc_info, _in_reading_order, structlog.processors.JSONRenderer()]
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
    logging.getLogger("tailpack").setLevel(level.upper())
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.processors.StackInfoRenderer(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=lambda *_args: logging.getLogger("tailpack"),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
