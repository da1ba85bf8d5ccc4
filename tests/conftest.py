"""Shared by all kinds of tests."""

from __future__ import annotations

from protos import logs

# Without it structlog's default renders every local variable of a traceback: slow, and it would hide what users see.
logs.configure("test", json=True)
