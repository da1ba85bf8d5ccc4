"""Which release this is, as processes tell each other."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

UNINSTALLED = "source"  # a source tree that is not installed


@functools.cache
def release() -> str:
    """As "0.1.0"; UNINSTALLED where the package was not installed."""
    try:
        return version("tailpack")
    except PackageNotFoundError:
        return UNINSTALLED
