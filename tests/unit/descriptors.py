"""Which descriptors of this process are open, for tests that none may be left."""

from __future__ import annotations

import contextlib
import os


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of each. Compare by what is new, not by how many: what earlier tests left for the garbage
    collector is closed at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))  # noqa: PTH115
    return found
