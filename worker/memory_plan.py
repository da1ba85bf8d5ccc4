"""What a worker will take of its device's memory, told from headers before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kvstore.geometry import ITEM_BYTES
from protos.errors import CapacityError
from worker.checkpoint import E4M3, FP8, Expected, Stored

WEIGHTS, IN_BLOCKS = "weights", "weights in FP8 blocks"
FROM_FP8, FROM_FP4 = "weights dequantised from FP8", "weights dequantised from FP4"
MODEL_TABLES = "tables of the model"
REPACKED, STATE, BUFFERS = "weights repacked for decode", "decode state", "decode buffers"
WORKSPACES, TABLES, GRAPH_POOLS = "attention workspaces", "tables of page kernels", "graph pools"
ACTIVATIONS, LIBRARIES = "activations, kept by torch's allocator", "libraries' workspaces"
CONTEXT, LOADING, KERNELS, FIRST_STEP = "CUDA context", "loading weights", "kernels and graphs", "first steps"
PROCESS, UNKNOWN = "interpreter and libraries", "unknown"
_ITEM_BYTES = {**ITEM_BYTES, "int64": 8, E4M3: 1}
_DEQUANTIZING = 5 * 4  # bytes a value beside the result: codes, values, scales and their product in float32
_CHECKING = 2  # bytes a value beside a copy: whether it is finite


class Use(NamedTuple):
    """``num_bytes`` on the device; ``file_bytes`` is what they are read from, 0 where they are not."""

    owner: str
    num_bytes: int
    file_bytes: int = 0

    def __str__(self) -> str:
        files = f" ({_shown(self.file_bytes)} in files)" if self.file_bytes else ""
        return f"{self.owner} {_shown(self.num_bytes)}{files}"


def weight_uses(expected: Mapping[str, Expected], found: Mapping[str, Stored], dtype: str) -> tuple[Use, ...]:
    """The weights held once loaded, and the most that reading one of them takes beside them.

    Args:
        dtype: of weights whose ``held`` is "".
    """
    held: dict[str, list[int]] = {}
    largest = 0
    for name, wanted in expected.items():
        if not wanted.is_held:
            continue
        owner = _owner(wanted)
        sizes = held.setdefault(owner, [0, 0])
        item_bytes = _ITEM_BYTES[wanted.held or dtype]
        file_bytes = found[name].num_bytes + (found[wanted.scale].num_bytes if wanted.scale else 0)
        sizes[0] += wanted.num_values * item_bytes
        sizes[1] += file_bytes
        beside = item_bytes + _CHECKING + (_DEQUANTIZING if wanted.scale else 0)
        largest = max(largest, file_bytes + wanted.num_values * beside)
    uses = [Use(owner, *held[owner]) for owner in (WEIGHTS, IN_BLOCKS, FROM_FP8, FROM_FP4) if owner in held]
    return (*uses, Use("reading one weight", largest))


def _owner(wanted: Expected) -> str:
    if wanted.scale:
        return FROM_FP8 if wanted.dtypes == FP8 else FROM_FP4
    return IN_BLOCKS if wanted.held == E4M3 or wanted.is_scale else WEIGHTS


def total(uses: Iterable[Use]) -> int:
    return sum(use.num_bytes for use in uses)


def table(uses: Iterable[Use]) -> str:
    """Owners and sizes on one line, as errors and logs take it."""
    uses = tuple(uses)
    return ", ".join(str(use) for use in uses) + f": {_shown(total(uses))} in all"


def demand_fit(uses: Iterable[Use], room: int, where: str) -> None:
    """Raises CapacityError (MODEL_TOO_LARGE) with the table where ``uses`` take more than ``room`` bytes."""
    uses = tuple(uses)
    if total(uses) > room:
        raise CapacityError(
            "the model does not fit one device",
            reason="MODEL_TOO_LARGE",
            given=table(uses),
            allowed=f"{_shown(room)} {where}",
            hint="a smaller model, a smaller dtype, or a device with more memory; one device holds a whole model",
        )


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.1f} MiB"
