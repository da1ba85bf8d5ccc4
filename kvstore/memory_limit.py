"""How much memory may be taken: what the machine has free, and what the process's cgroup still allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

from protos.errors import CapacityError

HEADROOM_BYTES = 256 << 20
"""Left to everything else; a store that takes the last byte has itself or its worker killed."""

NO_LIMIT_BYTES = 1 << 62
"""From here a version-1 cgroup's number means that there is no limit: it writes 2^63 less a page."""


def check_memory(num_bytes: int, *, what: str) -> None:
    """Raises CapacityError (NOT_ENOUGH_MEMORY) when ``num_bytes`` more would not leave the headroom."""
    available, limited_by = available_bytes()
    if num_bytes > available - HEADROOM_BYTES:
        raise CapacityError(
            f"not enough memory for {what}",
            reason="NOT_ENOUGH_MEMORY",
            given=f"{num_bytes} bytes",
            allowed=f"{max(0, available - HEADROOM_BYTES)} bytes ({limited_by}; {HEADROOM_BYTES >> 20} MiB stay free)",
            hint="make the arenas smaller, free memory, or raise the limit",
        )


def available_bytes() -> tuple[int, str]:
    """Bytes that can be taken now, and what limits them."""
    candidates = [(int(psutil.virtual_memory().available), "available on this machine")]
    try:
        membership = Path("/proc/self/cgroup").read_text()
    except OSError:  # not Linux, or no /proc
        membership = ""
    candidates += [(left, "left in this cgroup") for left in cgroup_room(membership, Path("/sys/fs/cgroup"))]
    return min(candidates)


def cgroup_room(membership: str, root: Path) -> list[int]:
    """Bytes left under the memory limit of each cgroup that a process is in, its ancestors included.

    Args:
        membership: the text of /proc/self/cgroup.
        root: where cgroupfs is mounted; version 2, or version 1 with its "memory" hierarchy.
    """
    # File cache that is not in use is given back before the limit hurts.
    return [max(0, limit - usage + cache) for limit, usage, cache in _limited(membership, root)]


def cgroup_limit(membership: str, root: Path) -> int | None:
    """The lowest memory limit of those cgroups; None where there is none. Arguments as for ``cgroup_room``."""
    return min((limit for limit, _, _ in _limited(membership, root)), default=None)


def _limited(membership: str, root: Path) -> Iterator[tuple[int, int, int]]:
    """(limit, usage, inactive file cache) of each cgroup that has a limit."""
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit_file, usage_file, cache_key = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit_file, usage_file, cache_key = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        inside = ".." not in path.split("/")  # else our cgroup lies above what this mount shows
        group = base / path.lstrip("/") if inside else base
        while True:
            limit, usage = _number(group / limit_file), _number(group / usage_file)
            if limit is not None and usage is not None:
                yield limit, usage, _stat(group / "memory.stat", cache_key)
            if group == base:
                break
            group = group.parent


def _number(path: Path) -> int | None:
    """The number in a cgroup file; None when there is no such file or no limit ("max"; version 1: nearly 2^63)."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < NO_LIMIT_BYTES else None


def _stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
